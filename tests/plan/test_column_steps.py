"""Tables: what their steps give, what is known afterwards, and what each mistake is answered with."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import InvalidGraph, UnknownName, UsageError, WrongColumns
from minishuffle.operators.event_time import BESIDE, EventTime
from support.cutjobs import Cut, run

MOMENT = pa.timestamp("us", "UTC")
ORDERS = pa.table(
    {
        "user": ["ann", "bob", "ann", None],
        "price": pa.array([10, 20, None, 40], pa.int32()),
        "n": [1, 2, 3, 4],
        "tags": [["a", "b"], [], None, ["c"]],
        "at": pa.array([datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in range(4)], MOMENT),
    }
)
price, n = pc.field("price"), pc.field("n")


def orders() -> Table:
    return Table.from_arrow(ORDERS)


def rows(table: Table) -> list[Any]:
    return run(table.collect(), Cut(2, rows=2)).rows


def by_n(table: Table) -> list[Any]:
    return sorted(rows(table), key=lambda row: row["n"])


def known(table: Table) -> dict[str, str]:
    assert table.plan.gives.schema is not None
    return {field.name: str(field.type) for field in table.plan.gives.schema}


def test_columns_are_chosen_dropped_and_renamed() -> None:
    assert by_n(orders().select("n", "user").rename({"user": "who"})) == [
        {"n": number, "who": who} for number, who in enumerate(ORDERS["user"].to_pylist(), 1)
    ]
    chosen = orders().select(["at", "n"])
    assert chosen.plan.gives.columns == ("at", "n")
    dropped = orders().drop("at", "tags")
    assert dropped.plan.gives.columns == ("user", "price", "n")
    assert by_n(dropped)[1] == {"user": "bob", "price": 20, "n": 2}


def test_columns_behind_a_function_are_those_that_it_gives_for_no_rows() -> None:
    asked: list[tuple[int, list[str]]] = []

    def seen(batch: pa.RecordBatch) -> pa.RecordBatch:
        asked.append((batch.num_rows, batch.schema.names))
        return batch.select(["n"]).append_column("half", pc.divide(batch["n"], 2.0))

    made = orders().map_batches(seen, columns=["n", "price"])
    assert (known(made), asked) == ({"n": "int64", "half": "double"}, [(0, ["n", "price"])])
    assert by_n(made)[:2] == [{"n": 1, "half": 0.5}, {"n": 2, "half": 1.0}]
    with pytest.raises(UnknownName, match="no column 'price'; there are n, half"):
        made.drop("price")
    for schema, taken in ({"n": "int64"}, None), ("same", ["n"]):
        asked.clear()
        select = orders().map_batches(lambda batch: batch.select(["n"]), schema=schema, columns=taken)  # type: ignore[arg-type]
        assert known(select) == {"n": "int64"}
        assert len(rows(select)) == 4


class Opened:
    """A function with a state of its own."""

    def open(self, context: Any) -> None:
        self.is_open = True

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        assert self.is_open
        return batch


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda batch: batch["n"][0].as_py(), "raised IndexError: index out of bounds"),
        (lambda batch: None, "gave None and no batch"),
        (lambda batch: pa.table({"m": [None] * len(batch)}), "gave the column 'm' in the type null"),
    ],
)
def test_a_function_that_does_not_show_its_columns_has_to_say_them(fn: Any, why: str) -> None:
    """The error has the line, what to write, and the command that shows what to write."""
    says = rf"^map_batches at .*_steps.py:\d+: its function, called with a batch without rows, {why}: write"
    with pytest.raises(InvalidGraph, match=rf"{says} schema= .*`minishuffle schema .*.py:JOB` shows"):
        orders().map_batches(fn, on_error="skip")


@pytest.mark.parametrize(
    "fn", [lambda batch: batch.select(["usr"]), lambda batch: batch.to_pandas()[["n"]].assign(m=batch["usr"])]
)
def test_a_function_with_a_wrong_column_is_told_those_of_its_batch(fn: Any) -> None:
    """A schema would not help; for a key that is no column it might."""
    says = (
        r"(?m)^map_batches at .* raised KeyError: .*usr.*: did you mean 'user'\? the batch has .*user.*[^:]$"
    )
    with pytest.raises(UnknownName, match=says):
        orders().map_batches(fn)
    with pytest.raises(InvalidGraph, match="raised KeyError: 'x': write schema="):
        orders().map_batches(lambda batch: {}["x"])


def test_a_function_that_gives_no_batch_has_to_return_one() -> None:
    """A schema would not help."""
    says = (
        r"(?m)^map_batches at .*column_steps.py:\d+: .* gave a dict: return a pyarrow RecordBatch or Table$"
    )
    with pytest.raises(InvalidGraph, match=says):
        orders().map_batches(lambda batch: batch.to_pydict())


def test_a_function_that_is_opened_is_not_called_while_the_job_is_made() -> None:
    with pytest.raises(
        InvalidGraph, match=r"its function has open\(\), .*write schema= .*, or schema='same'"
    ):
        orders().map_batches(Opened())
    opened = orders().map_batches(Opened(), schema="same")
    assert (known(opened), len(rows(opened))) == (known(orders()), 4)


def test_a_column_of_nulls_alone_stays_where_the_data_have_it() -> None:
    table = Table.from_arrow(pa.table({"a": [1], "b": pa.nulls(1)}))
    assert known(table.map_batches(lambda batch: batch, schema="same")) == {"a": "int64", "b": "null"}
    with pytest.raises(InvalidGraph, match="gave the column 'b' in the type null"):
        table.map_batches(lambda batch: batch)


def test_batches_of_other_columns_than_those_for_no_rows_are_refused() -> None:
    def wider(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(["n"]) if not len(batch) else batch.select(["n", "price"])

    def longer(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"n": pa.array(batch["n"].to_pylist(), "int64" if len(batch) else "int32")})

    with pytest.raises(WrongColumns, match=r"'price' is not in the schema of what .* made \(n\): declare"):
        rows(orders().map_batches(wider))
    with pytest.raises(
        WrongColumns, match="'n' has the type int64, but int32 is what the function gave when"
    ):
        rows(orders().map_batches(longer))


def test_expressions_make_columns_of_those_before() -> None:
    table = orders().with_columns(total=price * n, n=n + 1, one=pc.scalar(1))
    assert known(table)["total"] == "int64"
    assert list(known(table)) == ["user", "price", "n", "tags", "at", "total", "one"]
    assert [(row["total"], row["n"], row["one"]) for row in by_n(table)] == [
        (10, 2, 1), (40, 3, 1), (None, 4, 1), (160, 5, 1)
    ]  # fmt: skip


def test_two_columns_of_one_name_are_neither_read_nor_passed_on() -> None:
    twice = Table.from_arrow(pa.table([[1], [2], [3]], names=["a", "a", "b"]))
    for read in (twice.select, twice.explode, twice.event_time, twice.key_by):
        with pytest.raises(
            UsageError, match=r"there are several columns 'a': give each a name of its own first"
        ):
            read("a")
    others: list[Callable[[], Any]] = [lambda: twice.drop("b"), lambda: twice.rename({"b": "c"})]
    for change in (*others, lambda: twice.with_columns(c=pc.scalar(1))):
        with pytest.raises(
            UsageError, match=r"^the table of \w+\(\) has two columns of one name: rename some"
        ):
            change()


def test_a_filter_keeps_rows_for_which_it_is_true() -> None:
    assert [row["n"] for row in by_n(orders().filter(price > 10))] == [2, 4]
    assert by_n(orders().filter(pc.scalar(True))) == by_n(orders())
    assert rows(orders().filter(n > 9)) == []


def test_explode_gives_a_row_for_each_value() -> None:
    table = orders().explode("tags")
    assert known(table)["tags"] == "string"
    assert sorted((row["n"], row["tags"]) for row in rows(table)) == [(1, "a"), (1, "b"), (4, "c")]


def test_map_batches_gets_the_columns_and_the_rows_it_asks_for() -> None:
    def seen(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"rows": [batch.num_rows], "names": [list(batch.schema.names)]})

    many = Table.from_arrow(pa.table({"a": range(10), "b": range(10)})).parallel(1)
    mapped = many.map_batches(seen, columns=["b"], batch_rows=3)
    sizes = [(row["rows"], tuple(row["names"])) for row in run(mapped.collect(), Cut(1)).rows]
    assert max(size for size, _ in sizes) <= 3
    assert sum(size for size, _ in sizes) == 10
    assert {names for _, names in sizes} == {("b",)}


def test_map_batches_is_checked_against_its_schema() -> None:
    table = orders().map_batches(lambda batch: batch.select(["n"]), schema={"n": int})
    assert known(table) == {"n": "int64"}
    assert len(rows(table)) == 4
    with pytest.raises(UsageError, match="column 'n' has the type int64, but string is declared"):
        rows(orders().map_batches(lambda batch: batch.select(["n"]), schema={"n": str}))


def test_a_union_has_the_columns_of_all_in_types_for_all() -> None:
    one = Table.from_arrow(pa.table({"k": [1], "v": pa.array([1], pa.int32())}))
    two = Table.from_arrow(pa.table({"v": [2.5], "w": ["x"]}))
    both = one.union(two, one)
    assert known(both) == {"k": "int64", "v": "double", "w": "string"}
    assert sorted(rows(both), key=lambda row: row["v"]) == [
        {"k": 1, "v": 1.0, "w": None}, {"k": 1, "v": 1.0, "w": None}, {"k": None, "v": 2.5, "w": "x"}
    ]  # fmt: skip
    with pytest.raises(UsageError, match="none in common"):
        one.union(Table.from_arrow(pa.table({"v": ["text"]})))


def test_rows_become_a_table_and_back() -> None:
    stream = Stream.items([{"a": 1}, {"a": 2, "b": "x"}])
    table = stream.to_table({"a": float, "b": str})
    assert known(table) == {"a": "double", "b": "string"}
    back = table.with_columns(a=pc.field("a") * 2).to_rows().map(lambda row: (row["a"], row["b"]))
    assert sorted(run(back.collect(), Cut(1)).rows) == [(2.0, None), (4.0, "x")]
    tuples = Stream.items([(1, "x")]).to_table({"n": int, "t": str})
    assert rows(tuples) == [{"n": 1, "t": "x"}]
    assert known(stream.to_table()) == {"a": "int64", "b": "string"}


def test_rows_that_do_not_fit_may_go_aside() -> None:
    stream = Stream.items([{"a": 1}, {"a": "x"}]).event_time(lambda row: 0)
    table = stream.to_table({"a": int}, on_error="side").name("columns")
    aside = table.errors.map(lambda row: row["record"])
    found = run(Stream.together(aside.collect("aside"), table.collect("rows")), Cut(1)).rows
    assert sorted(found, key=str) == [{"a": "x"}, {"a": 1}]
    with pytest.raises(InvalidGraph, match=r"\.errors must directly follow a step .* to_table with"):
        assert table.select("a").errors


@pytest.mark.parametrize("schema", [None, "same"])
def test_categories_pass_a_function_of_batches_behind_an_exchange_too(schema: Any) -> None:
    """Exchanges decode them, but where the batch is handed over in the worker."""
    categories = pa.array(["x", "y", "x"]).dictionary_encode()
    lists, parts = (
        pa.ListArray.from_arrays([0, 1, 2, 3], categories),
        pa.StructArray.from_arrays([categories], "a"),
    )
    table = Table.from_arrow(pa.table({"c": categories, "n": [1, 2, 3], "l": lists, "s": parts}))
    mapped = table.rebalance().map_batches(lambda batch: batch, schema=schema)
    found = rows(mapped.key_by("c").aggregate(n=("n", "sum")))
    assert sorted(row["n"] for row in found) == [2, 4]
    assert sorted(str((row["l"], row["s"])) for row in rows(mapped)) == [
        "(['x'], {'a': 'x'})", "(['x'], {'a': 'x'})", "(['y'], {'a': 'y'})"
    ]  # fmt: skip


def test_event_time_follows_its_column() -> None:
    timed = orders().event_time("at")
    place = EventTime(column="at")
    for table in (
        timed,
        timed.select("at", "n"),
        timed.drop("n"),
        timed.with_columns(m=n + 1),
        timed.filter(n > 1),
        timed.explode("tags"),
        timed.union(timed.filter(n > 2)),
        timed.map_batches(lambda batch: batch),
        timed.map_batches(lambda batch: batch, schema={"at": MOMENT}),
    ):
        assert table.plan.gives.time == place
    assert timed.rename({"at": "then"}).plan.gives.time == EventTime(column="then")
    assert timed.to_rows().plan.gives.time == place
    assert Stream.items([{"at": 1}]).event_time("at").to_table({"at": int}).plan.gives.time == place
    for table in (timed.select("n"), timed.drop("at"), timed.with_columns(at=n)):
        assert table.plan.gives.time == BESIDE
    for table in (
        timed.map_batches(lambda batch: batch, schema={"n": int}),
        timed.drop("at").map_batches(lambda batch: batch),
        timed.union(orders()),
    ):
        assert table.plan.gives.time is None


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (lambda: orders().select("uesr"), UnknownName, "no column .uesr.; did you mean .user."),
        (lambda: orders().select(), UsageError, "select takes column names, not"),
        (lambda: orders().select("n", "n"), UsageError, "select names a column twice"),
        (lambda: orders().drop(*ORDERS.column_names), UsageError, "drop would leave no column"),
        (lambda: orders().rename({"n": "at"}), UsageError, "rename would give two columns one name"),
        (lambda: orders().rename("n"), UsageError, "rename takes a dict"),
        (lambda: orders().with_columns(), UsageError, "takes at least one column"),
        (lambda: orders().with_columns(a=1), UsageError, "takes an expression such as"),
        (lambda: orders().with_columns(a=pc.field("nn") + 1), UnknownName, "no column .nn.; did you mean"),
        (lambda: orders().with_columns(a=pc.field("user") + 1), UsageError, "no kernel matching"),
        (lambda: orders().filter(n + 1), UsageError, "filter: .* gives int64: write a condition"),
        (lambda: orders().filter(lambda row: True), UsageError, "call to_rows\\(\\) first"),
        (lambda: orders().explode("n"), UsageError, "column 'n' has the type int64, which is no list"),
        (lambda: orders().explode("nn"), UnknownName, "no column 'nn'"),
        (lambda: orders().map_batches(3), UsageError, "takes a function"),
        (lambda: orders().map_batches(len, batch_rows=0), UsageError, "batch_rows is 0"),
        (lambda: orders().map_batches(len, columns=["x"]), UnknownName, "no column 'x'"),
        (lambda: orders().union(), InvalidGraph, "at least one other table"),
        (lambda: orders().event_time("att"), UnknownName, "no column 'att'; did you mean 'at'"),
        (lambda: orders().event_time(lambda row: 1), UsageError, "takes the name of a column"),
        (lambda: orders().event_time("at", out_of_order=timedelta(-1)), UsageError, "from 0"),
        (lambda: Table.from_arrow([{"a": 1}]), UsageError, "Stream.items\\(rows\\).to_table"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_where_they_are_written(
    wrong: Callable[[], Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        wrong()
