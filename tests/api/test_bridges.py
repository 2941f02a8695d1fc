"""Methods that streams or tables lack, and the way that each error names."""

from __future__ import annotations

import traceback
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.bridges import refuse_mixture
from minishuffle.api.stream import Stream, Table
from minishuffle.errors import UsageError


def orders() -> Table:
    return Table.from_arrow(pa.table({"user": ["ann"], "n": [1]}))


def test_two_forms_are_not_mixed() -> None:
    stream = Stream.items([1])
    with pytest.raises(UsageError, match="union of a Table takes a Table, not a Stream: call to_table"):
        orders().union(stream)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"map\(\) takes functions of rows, and this is a Table: call to_rows"
    ):
        orders().map(len)  # type: ignore[attr-defined]
    with pytest.raises(
        UsageError, match=r"select\(\) works on columns, and this is a Stream of rows: call to_t"
    ):
        stream.select("a")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'Table' object has no attribute 'nothing'"):
        orders().nothing  # type: ignore[attr-defined]  # noqa: B018


FORMS: dict[str, Any] = {
    "WindowedTable": lambda: orders().event_time("n").key_by("user").window(timedelta(hours=1)),
    "Table": orders,
    "KeyedTable": lambda: orders().key_by("n"),
    "Stream": lambda: orders().to_rows(),
    "KeyedStream": lambda: orders().to_rows().key_by("n"),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_sent_to_the_other_by_name(form: str) -> None:
    ends = FORMS[form]()
    name = "fold" if "Table" in form else "top_n"
    says = "takes functions of rows, and this is a" if "Table" in form else "works on columns, and this is a"
    with pytest.raises(UsageError) as raised:
        getattr(ends, name)
    assert str(raised.value).startswith(f"{name}() {says} {form}")


def test_a_step_that_needs_keys_or_comes_before_them_says_so() -> None:
    for ends, name in ((orders(), "top_n"), (orders().to_rows(), "window"), (orders().to_rows(), "count")):
        with pytest.raises(AttributeError, match=rf"'{name}': call key_by\(\.\.\.\) first, then {name}\(\)"):
            getattr(ends, name)
    rows = orders().to_rows().key_by("n")
    for keyed, name in ((orders().key_by("n"), "select"), (rows, "map"), (rows, "explain")):
        with pytest.raises(
            AttributeError, match=rf"call {name}\(\) before key_by\(\), or say .*, and then {name}\(\)"
        ):
            getattr(keyed, name)
    for keyed in (orders().key_by("n"), orders().to_rows().key_by("n")):
        for name in ("exchange", "event_time", "union"):
            with pytest.raises(AttributeError, match=rf"'{name}': call {name}\(\) before key_by\(\)$"):
                getattr(keyed, name)
        for name in ("slot_group", "parallel", "name"):
            with pytest.raises(
                AttributeError, match=rf"'{name}': .* call {name}\(\) right after that, before k"
            ):
                getattr(keyed, name)
        with pytest.raises(AttributeError, match=r"'rebalance': say what to compute .*, and then rebalance"):
            keyed.rebalance  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("form", "name", "way"),
    [
        ("Table", "group_by", "write key_by()"),
        ("KeyedTable", "agg", "write aggregate()"),
        ("Table", "agg", "call key_by(...) first, then aggregate()"),
        (
            "KeyedStream",
            "agg",
            "call to_table(schema) on the Stream first, then key_by() and aggregate()",
        ),
        (
            "Stream",
            "head",
            "write show(n) for a look at the first rows, or cluster.run(stream)[:n]",
        ),
        (
            "KeyedTable",
            "head",
            "call show() before key_by(), or say what to compute for each key, such as count(), and then "
            "show()",
        ),
        ("Table", "to_pandas", "nothing has run yet: write cluster.run(table).to_pandas()"),
        ("Stream", "to_list", "nothing has run yet: write cluster.run(stream), which gives a list of rows"),
        (
            "Stream",
            "to_polars",
            "nothing has run yet: write to_table(schema) first, and then cluster.run(table) and "
            "polars.from_arrow() of that",
        ),
        ("KeyedTable", "sum", "write aggregate(total=('amount', 'sum'))"),
        ("WindowedTable", "first", "write aggregate(total=('amount', 'first'))"),
        ("WindowedTable", "agg", "write aggregate()"),
        (
            "WindowedTable",
            "join",
            "say what to compute for each window, such as count(), then key_by(...) and join()",
        ),
        (
            "Table",
            "max",
            "write key_by(...).aggregate(total=('amount', 'max')); for one group of all rows write "
            "with_columns(all=pc.scalar(0)).key_by('all') of a table, with pc for pyarrow.compute, or "
            "key_by(lambda row: 0) of a stream",
        ),
        ("KeyedStream", "sum", "write reduce(fn), or fold(int, lambda total, row: total + row['amount'])"),
        ("Stream", "sort", "rows come in no order: write sorted(cluster.run(stream), key=...)"),
        (
            "Table",
            "sort_values",
            "rows come in no order: write cluster.run(table).sort_by('column'), or key_by(...).top_n(n, "
            "by='column') for the greatest of each key",
        ),
        (
            "Table",
            "to_csv",
            "write to_files(path), which writes Parquet, or for CSV "
            "pyarrow.csv.write_csv(cluster.run(table), path)",
        ),
        ("Table", "withColumn", "write with_columns(total=col('amount') * 2)"),
        ("KeyedStream", "assign", "call to_table(schema) on the Stream first, then with_columns()"),
        ("Stream", "where", "write filter(fn) with a function of the row"),
        (
            "Table",
            "merge",
            "write key_by('id').join(other.key_by('its_id')), or if the other is small broadcast_join(small, "
            "on={'id': 'its_id'})",
        ),
        ("KeyedTable", "merge", "write join(other.key_by('its_id'))"),
        (
            "KeyedStream",
            "map",
            "call map() before key_by(), or say what to compute for each key, such as count(), and then "
            "map(); to spread the work write rebalance() in place of key_by()",
        ),
        ("KeyedTable", "collect", "say what to compute for each key, such as count(), and then collect()"),
        (
            "KeyedTable",
            "rebalance",
            "say what to compute for each key, such as count(), and then rebalance(); to spread records "
            "write rebalance() in place of key_by()",
        ),
        ("Stream", "to_rows", "a Stream has rows already: leave it out"),
        (
            "KeyedTable",
            "user",
            "it is a column: write col('user') in expressions, select('user') for that column alone",
        ),
        ("Table", "drop_nulls", "write filter(~col('amount').is_null())"),
        ("Stream", "apply", "write map(fn)"),
        ("Stream", "dropna", "write filter(lambda row: row['amount'] is not None)"),
        ("KeyedTable", "fillna", "write with_columns(amount=col('amount').fill_null(0)) before key_by()"),
        (
            "KeyedTable",
            "apply",
            "write aggregate(total=('amount', 'sum')), or map_batches(fn) before key_by()",
        ),
        (
            "KeyedStream",
            "apply",
            "write process(fn), reduce(fn) or fold(int, fn), or map(fn) before key_by()",
        ),
        ("Table", "usre", "did you mean 'user'? write col('...') for a column in expressions"),
        ("Table", "filtr", "did you mean 'filter'?"),
    ],
)
def test_names_of_pandas_are_answered_with_those_here(form: str, name: str, way: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(FORMS[form](), name)
    assert str(raised.value) == f"'{form}' object has no attribute '{name}': {way}"


def test_arguments_columns_and_sources_of_pandas_are_answered_too() -> None:
    table: Any = orders()
    keyed = table.key_by("user")
    with pytest.raises(TypeError, match=r"a Table has no values yet, so that \['n'\] .* write select\('col"):
        table["n"]
    with pytest.raises(TypeError, match=r"^join\(\) has no argument 'on': call key_by\(...\) with these"):
        keyed.join(keyed, on="user")
    with pytest.raises(
        TypeError, match=r"broadcast_join\(\) has no argument 'left_on': write on={'id': 'its_id'}"
    ):
        table.broadcast_join(table, left_on="user", right_on="id")
    with pytest.raises(
        TypeError, match=r"^event_time\(\) has no argument 'out_of_orderness': write out_of_or"
    ):
        Stream.items([1]).event_time(int, out_of_orderness=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^from_files\(\) has no argument 'sep': write delimiter=';'"):
        Table.from_files("a.csv", format="csv", sep=";")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^window\(\) has no argument 'timezone': write tz='Europe/Zurich'"):
        keyed.window("month", timezone="Europe/Zurich")
    with pytest.raises(TypeError, match="unexpected keyword argument 'zone'"):
        keyed.window("month", zone="Europe/Zurich")
    with pytest.raises(AttributeError, match=r"'Table' has no attribute 'from_pandas': write Table.from_arr"):
        Table.from_pandas  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="^type object 'Stream' has no attribute 'nothing'$"):
        Stream.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_what_is_no_method_at_all_is_an_error_of_its_name() -> None:
    """Nor does Python add the nearest name of what is private."""
    with pytest.raises(AttributeError) as raised:
        orders().held  # type: ignore[attr-defined]  # noqa: B018
    (line,) = traceback.format_exception_only(raised.value)
    assert line == "AttributeError: 'Table' object has no attribute 'held'\n"
    keyed = orders().key_by("n")
    with pytest.raises(AttributeError) as raised:
        keyed.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert str(raised.value) == "'KeyedTable' object has no attribute 'nothing'"
    assert not hasattr(orders(), "__deepcopy__")


@pytest.mark.parametrize(
    ("mine", "other", "way"),
    [
        ("Table", "Stream", "not a Stream: call to_table(schema) on the Stream, or to_rows() on the Table"),
        ("Stream", "Table", "not a Table: call to_table(schema) on the Stream, or to_rows() on the Table"),
        ("KeyedTable", "Table", "not a Table: call key_by() first"),
        ("Table", "KeyedTable", "not a KeyedTable: leave out its key_by()"),
        ("KeyedStream", "Table", "not a Table: call key_by() first"),
        ("Stream", "WindowedStream", "not a WindowedStream: give it a Stream"),
        ("Table", "dict", "not a dict"),
    ],
)
def test_what_is_given_in_the_wrong_form_is_named_with_the_way(mine: str, other: str, way: str) -> None:
    with pytest.raises(UsageError) as raised:
        refuse_mixture("join", mine, type(other, (), {})())
    assert str(raised.value) == f"join{' of a ' + mine if ':' in way else ''} takes a {mine}, {way}"
