"""Tables by key: aggregates, windows, distinct keys and the greatest rows, whichever way a job is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api.stream import KeyedTable, Stream, Table
from minishuffle.errors import InvalidGraph, UnknownName, UsageError
from minishuffle.operators.event_time import EventTime
from support.cutjobs import Cut, run

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
ROWS = [
    {"user": user, "city": city, "at": START + timedelta(minutes=minute), "amount": amount}
    for user, city, minute, amount in [
        ("ann", "Rome", 5, 10),
        ("bob", "Oslo", 20, 7),
        ("ann", "Oslo", 50, None),
        ("ann", "Rome", 70, 30),
        ("bob", None, 130, 7),
        ("ann", "Bonn", 80, 30),
    ]
]
TYPES = {"user": "string", "city": "string", "at": pa.timestamp("us", "UTC"), "amount": "int64"}
CUTS = (Cut(1), Cut(2, rows=1), Cut(3, seed=5, rows=2, merges=True))


class OneSplit:
    """The rows in their order."""

    format = "arrow"

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist(ROWS[offset:], pa.schema(list(TYPES.items())))


def orders() -> Table:
    return Table.from_arrow(pa.Table.from_pylist(ROWS, pa.schema(list(TYPES.items()))))  # type: ignore[arg-type]


def timed() -> Table:
    return orders().parallel(1).event_time("at", out_of_order=3 * HOUR)


def rows(table: Table) -> list[Any]:
    """The rows, the same for each cut."""
    found = [sorted(run(table.collect(), cut).rows, key=repr) for cut in CUTS]
    assert all(each == found[0] for each in found)
    return found[0]


def known(table: Table) -> dict[str, str]:
    assert table.plan.gives.schema is not None
    return {field.name: str(field.type) for field in table.plan.gives.schema}


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda t: t.key_by("count").count("end"), "'count', its columns being count, count"),
        (lambda t: t.key_by("k").aggregate("each", k=("n", "sum")), "'k', its columns being k, k"),
        (
            lambda t: t.event_time("at").key_by("k").window(HOUR).aggregate(window_start=("n", "sum")),
            "'window_start', its columns being k, window_start, window_end, window_start",
        ),
        (
            lambda t: t.event_time("at").key_by("k").session_window(HOUR).aggregate(k=("n", "sum")),
            "'k', its columns being k, window_start, window_end, k",
        ),
        (
            lambda t: (
                t.event_time("at").key_by("k").window(HOUR, early=HOUR / 2).aggregate(pane=("n", "sum"))
            ),
            "'pane', .*window_end, pane, pane, final",
        ),
    ],
    ids=["count", "aggregate", "window", "session", "panes"],
)
def test_two_columns_of_one_name_are_refused_when_the_plan_is_built(build: Any, names: str) -> None:
    table = orders().rename({"user": "k", "amount": "n", "city": "count"})
    with pytest.raises(UsageError, match=f"would have two columns {names}: choose another name"):
        build(table)


def test_aggregates_by_key() -> None:
    table = orders().key_by("user").aggregate(total=("amount", "sum"), n=("amount", "count"))
    assert known(table) == {"user": "string", "total": "int64", "n": "int64"}
    assert rows(table) == [{"user": "ann", "total": 70, "n": 3}, {"user": "bob", "total": 14, "n": 2}]


def test_first_and_last_go_by_event_time_also_without_its_column() -> None:
    timed = orders().event_time("at", out_of_order=HOUR)
    wanted = {"first": ("amount", "first"), "city": ("city", "last"), "n": ("city", "count_distinct")}
    for table in (timed, timed.select("amount", "city", "user")):
        job = table.key_by("user").aggregate(**wanted).collect()
        for cut in CUTS:
            rows = sorted(run(job, cut).rows, key=lambda row: row["user"])
            assert [tuple(row.values()) for row in rows] == [("ann", 10, "Bonn", 3), ("bob", 7, None, 1)]
    with pytest.raises(InvalidGraph, match="first and last .* go by event time, and there is none"):
        orders().key_by("user").aggregate(**wanted)


def test_counts_by_several_keys() -> None:
    table = orders().key_by(["user", "city"]).count()
    assert known(table) == {"user": "string", "city": "string", "count": "int64"}
    assert {(row["user"], row["city"]): row["count"] for row in rows(table)} == {
        ("ann", "Rome"): 2, ("ann", "Oslo"): 1, ("ann", "Bonn"): 1, ("bob", "Oslo"): 1, ("bob", None): 1
    }  # fmt: skip


def test_values_may_go_out_before_the_end() -> None:
    table = orders().parallel(1).key_by("user").count(emit="each")
    counts = sorted(row["count"] for row in run(table.collect(), Cut(2)).rows)
    assert counts == [1, 1, 2, 2, 3, 4]
    endless = Table.generate().key_by("number")
    with pytest.raises(InvalidGraph, match="emit='end' on a source without end"):
        endless.count(emit="end")
    with pytest.raises(UsageError, match="emit is 'now'"):
        endless.count(emit="now")  # type: ignore[arg-type]


def test_each_key_once() -> None:
    table = orders().key_by("city").distinct()
    assert known(table) == {"city": "string"}
    assert rows(table) == [{"city": "Bonn"}, {"city": "Oslo"}, {"city": "Rome"}, {"city": None}]


def test_the_greatest_rows_of_each_key() -> None:
    table = orders().key_by("user").top_n(2, by="amount")
    assert list(known(table)) == ["user", "city", "at", "amount"]
    assert [(row["user"], row["amount"], row["city"]) for row in rows(table)] == [
        ("ann", 30, "Bonn"), ("ann", 30, "Rome"), ("bob", 7, "Oslo"), ("bob", 7, None)
    ]  # fmt: skip
    least = rows(orders().key_by("user").top_n(1, by="amount", descending=False))
    assert [(row["user"], row["amount"]) for row in least] == [("ann", None), ("bob", 7)]
    with pytest.raises(InvalidGraph, match="top_n on a source without end"):
        Table.generate().key_by("number").top_n(1, by="number")


def test_the_greatest_of_many_rows_are_kept_while_they_come() -> None:
    numbers = pa.table({"n": range(300_000)})
    table = Table.from_arrow(numbers).with_columns(k=pc.bit_wise_and(pc.field("n"), 3)).key_by("k")
    found = run(table.top_n(2, by="n").collect(), Cut(2)).rows
    assert sorted(row["n"] for row in found) == list(range(299_992, 300_000))


def test_windows_by_key() -> None:
    table = timed().key_by("user").window(HOUR).aggregate(total=("amount", "sum"))
    assert list(known(table)) == ["user", "window_start", "window_end", "total"]
    assert table.plan.gives.time == EventTime(column="window_end", shift=-1)
    assert [(row["user"], row["window_start"].hour, row["total"]) for row in rows(table)] == [
        ("ann", 0, 10), ("ann", 1, 60), ("bob", 0, 7), ("bob", 2, 7)
    ]  # fmt: skip
    again = timed().key_by("user").window(HOUR).count().key_by("user").window(timedelta(days=1)).count()
    assert {row["user"]: row["count"] for row in rows(again)} == {"ann": 2, "bob": 2}


def test_what_comes_too_late_for_a_window_is_a_table() -> None:
    source = Table.source(OneSplit(), schema=TYPES).parallel(1).event_time("at", watermarks="each")
    counted = source.key_by("user").window(HOUR, late="side").count()
    assert isinstance(counted.late, Table)
    assert list(known(counted.late)) == list(TYPES)
    job = Stream.together(counted.collect(), counted.late.select("amount").collect("late"))
    assert {"amount": 30} in run(job, Cut(1)).rows


def test_windows_need_event_time() -> None:
    with pytest.raises(InvalidGraph, match=r"call event_time\('column'\) before key_by"):
        orders().key_by("user").window(HOUR)
    with pytest.raises(UsageError, match="late is 'never'"):
        timed().key_by("user").window(HOUR, late="never")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (lambda: orders().key_by("usr"), UnknownName, "no column .usr.; did you mean .user."),
        (lambda: orders().key_by(lambda row: 1), UsageError, "key_by of a Table takes columns"),
        (lambda: orders().key_by(), UsageError, "key_by takes column names"),
        (lambda: orders().key_by("user").aggregate(), UsageError, "aggregate takes at least one column"),
        (lambda: orders().key_by("user").aggregate(n="amount"), UsageError, r"write n=\('column', 'sum'\)"),
        (lambda: orders().key_by("user").aggregate(n=("x", "sum")), UnknownName, "no column 'x'"),
        (lambda: orders().key_by("user").aggregate(n=("amount", "max2")), UsageError, "max2"),
        (lambda: orders().key_by("user").aggregate(n=("city", "sum")), UsageError, "city"),
        (lambda: orders().key_by("user").top_n(0, by="amount"), UsageError, "top_n takes a whole number"),
        (lambda: orders().key_by("user").top_n(1, by="amuont"), UnknownName, "did you mean 'amount'"),
        (lambda: orders().key_by("user").reduce(max), UsageError, "this is a KeyedTable: call to_rows"),
        (lambda: timed().key_by("user").window(HOUR).fold(int, max), UsageError, "is a WindowedTable: call"),
        (lambda: orders().rebalance().key_by("user").count(), InvalidGraph, "key_by itself chooses"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_where_they_are_written(
    wrong: Callable[[], Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        wrong()


def test_they_show_what_they_are() -> None:
    keyed = timed().key_by("user")
    assert isinstance(keyed, KeyedTable)
    assert repr(keyed).startswith("<KeyedTable by user of <Table")
    assert repr(keyed.window(HOUR)).startswith("<WindowedTable of 3600 s over <KeyedTable")
