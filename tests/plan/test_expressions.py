"""Expressions of pyarrow: what they read and give, known before a job runs, and what is refused then."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.stream import Table
from minishuffle.errors import UnknownName, UsageError, WrongColumns
from minishuffle.plan.expressions import check_expression, columns_read, expression_type
from support.cutjobs import Cut, run

SCHEMA = pa.schema(
    {
        "user": pa.string(),
        "price": pa.int32(),
        "n": pa.int64(),
        "cost": pa.decimal128(6, 2),
        "at": pa.timestamp("us", "UTC"),
        "none": pa.null(),
        "view": pa.string_view(),
        "kind": pa.dictionary(pa.int8(), pa.string()),
    }
)
n = pc.field("n")


def rows(table: Table) -> list[Any]:
    return run(table.collect(), Cut(2, rows=2)).rows


def known(table: Table) -> dict[str, str]:
    return {field.name: str(field.type) for field in table.plan.gives.arrow}


# --- what they give ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        (pc.field("price") * n, pa.int64()),
        (n.cast("float64") / 2, pa.float64()),
        (n > 1, pa.bool_()),
        (pc.field("cost") + pc.field("cost"), pa.decimal128(7, 2)),
        (pc.year(pc.field("at")), pa.int64()),
        (pc.scalar("x"), pa.string()),
        (pc.field("view"), pa.string_view()),
        (pc.utf8_upper(pc.field("view")), pa.string()),
        (pc.utf8_length(pc.field("kind")), pa.int32()),
        (pc.coalesce(pc.field("none"), n), pa.int64()),
        (pc.field("none"), pa.null()),
        (pc.field("none") == pc.field("none"), pa.null()),
        (pc.is_null(pc.field("none")), pa.bool_()),
    ],
    ids=str,
)
def test_the_type_of_what_it_gives_is_known(expression: pc.Expression, kind: pa.DataType) -> None:
    assert expression_type(SCHEMA, expression, "with_columns(x=...)") == kind


def test_what_is_no_expression_is_refused() -> None:
    assert check_expression(n, "filter", "n > 5") is n
    with pytest.raises(UsageError, match=r"^filter takes an expression such as n > 5, .*, not 5$"):
        check_expression(5, "filter", "n > 5")
    with pytest.raises(UsageError, match=r"a function of rows is for a Stream: call to_rows\(\) first"):
        check_expression(len, "filter", "n > 5")


@pytest.mark.parametrize(
    ("expression", "error", "says"),
    [
        (pc.field("pice") + 1, UnknownName, "^filter: there is no column 'pice'; did you mean 'price'"),
        (pc.field("user") + 1, UsageError, "^filter: .* no kernel matching"),
        (pc.sum(n), UsageError, "^filter: sum.* is no function of one row: use aggregate"),
        (pc.coalesce(pc.field("none"), 3) / 2, WrongColumns, "^filter: divide.* 'none', .* depends on it"),
        (pc.coalesce(pc.field("none"), n) / 2, WrongColumns, "value in 'none', .* the result depends on it"),
        (pc.coalesce(pc.field("none"), n) / pc.field("price"), WrongColumns, "the result depends on it"),
    ],
)
def test_what_does_not_take_the_columns_is_refused(
    expression: pc.Expression, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        expression_type(SCHEMA, expression, "filter")


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        (pc.match_substring_regex(pc.field("user"), "("), r"Invalid regular expression: missing \)"),
        (pc.assume_timezone(pc.field("day"), "Mars/X"), "Cannot locate or parse timezone 'Mars/X'"),
    ],
)
def test_what_is_wrong_with_any_row_is_refused_at_once(expression: pc.Expression, why: str) -> None:
    data = pa.table({"user": ["ann"], "day": pa.array([0], pa.timestamp("s"))})
    table = Table.from_arrow(data)
    with pytest.raises(UsageError, match=rf"with_columns\(z=...\): .*{why}"):
        table.with_columns(z=expression)


@pytest.mark.parametrize("name", ["sum", "cumulative_sum", "unique", "rank", "sort_indices", "drop_null"])
def test_expressions_that_are_no_function_of_one_row_are_refused(name: str) -> None:
    table = Table.from_arrow(SCHEMA.empty_table())
    expression = pc.Expression._call(name, [n])
    with pytest.raises(UsageError, match=rf"with_columns\(x=...\): {name}.* is no function of one row"):
        table.with_columns(x=expression)
    with pytest.raises(UsageError, match="filter: .* is no function of one row"):
        table.filter(expression > 1)


@pytest.mark.parametrize("text", [pa.string_view(), pa.dictionary(pa.int8(), pa.string_view())], ids=str)
def test_expressions_read_views_as_texts_and_bytes(text: pa.DataType) -> None:
    named = pa.array(["ann", "Bob", None, "cy"], pa.string()).cast(pa.string_view())
    data = {
        "s": named.dictionary_encode().cast(text) if pa.types.is_dictionary(text) else named,
        "b": pa.array([b"x", b"", None, b"xyz"], pa.binary_view()),
        "l": pa.array([["a", "b"], None, [], ["c"]], pa.list_(pa.string_view())),
    }
    table = Table.from_arrow(pa.table(data))
    made = table.with_columns(
        same=pc.field("b"),
        upper=pc.utf8_upper(pc.field("s")),
        long=pc.binary_length(pc.field("b")),
        items=pc.list_value_length(pc.field("l")),
    )
    assert known(made)["same"] == "binary_view"
    found = sorted(((r["upper"], r["same"], r["long"], r["items"]) for r in rows(made)), key=str)
    assert found == [("ANN", b"x", 1, 2), ("BOB", b"", 0, None), ("CY", b"xyz", 3, 1), (None, None, None, 0)]
    condition = (pc.field("s") > "Bz") & (pc.field("b") != b"x") & pc.field("s").isin(["ann", "cy"])
    assert [row["s"] for row in rows(table.filter(condition))] == ["cy"]


def test_views_are_joined_with_literals() -> None:
    table = Table.from_arrow(pa.table({"s": pa.array(["a", "b"], pa.string_view())}))
    made = table.with_columns(z=pc.binary_join_element_wise(pc.field("s"), pc.field("s"), "-"))
    assert known(made)["z"] == "string"
    assert sorted(row["z"] for row in rows(made)) == ["a-a", "b-b"]


def test_an_expression_that_fails_is_named() -> None:
    table = Table.from_arrow(pa.table({"a": [2**62]})).with_columns(b=pc.field("a") * 4)
    with pytest.raises(UsageError, match=r"with_columns: multiply_checked\(a, 4\): overflow"):
        rows(table)


# --- what they read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        (pc.field("s", "x") + pc.field(("t", "x", "y")) > pc.field("a.b"), "s t a.b"),
        (pc.scalar("field_ref: 'z'"), ""),
        (pc.field("a").isin(["\nfield_ref: 'z'"]), "a"),
        (pc.if_else(pc.field("c'd\u2028é"), 1, pc.struct_field(pc.field("s"), [0])), "c'd\u2028é s"),
    ],
    ids=str,
)
def test_what_an_expression_reads_is_known_without_a_schema(expression: pc.Expression, names: str) -> None:
    assert columns_read([expression]) == set(names.split(" ")) - {""}


def test_names_with_line_ends_are_read_whole() -> None:
    assert columns_read([pc.field("a\nend: 'b") & pc.field("c\n")]) == {"a\nend: 'b", "c\n"}


def test_an_expression_names_its_columns() -> None:
    with pytest.raises(UsageError, match=r"\(FieldPath\(0\) > 1\) reads a column by its number: write its"):
        columns_read([n, pc.field(0) > 1])


def test_several_expressions_read_the_columns_of_all() -> None:
    assert columns_read([n + 1, pc.field("price") * n, pc.scalar(3)]) == {"n", "price"}
    assert columns_read([]) == frozenset()
