"""Event time of a table goes with its rows, whether a column that it shows holds it or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.dataflow.operators.times import EVENT_TIME
from minishuffle.dataflow.stream import Stream
from minishuffle.dataflow.stream_base import StreamBase
from minishuffle.dataflow.table import Table
from minishuffle.errors import InvalidGraph, UsageError
from support.cutjobs import Cut, run

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
CUTS = (Cut(1), Cut(2, rows=1), Cut(3, seed=5, rows=2, merges=True))
GIVEN = (("ann", 5), ("bob", 20), ("ann", 50), ("ann", 70), ("bob", 130))
WINDOWS = [("ann", 0, 2), ("ann", 1, 1), ("bob", 0, 1), ("bob", 2, 1)]
"""User, hour and number of records of ``GIVEN``."""


def calls(kind: pa.DataType | None = None, time: str = "at") -> Table:
    minutes = [START + minute * MINUTE for _, minute in GIVEN]
    data = {
        "user": [user for user, _ in GIVEN],
        time: pa.array(minutes, pa.timestamp("us", "UTC")).cast(kind or pa.timestamp("us", "UTC")),
        "n": list(range(len(GIVEN))),
        "more": [[1, 2], [3], [], [4], [5]],
    }
    table = Table.from_arrow(pa.table(data)).parallel(1)
    return table.event_time(time, out_of_order=24 * HOUR)


def answers(stream: StreamBase) -> list[Any]:
    found = [sorted(run(stream.collect(), cut).rows, key=repr) for cut in CUTS]  # type: ignore[attr-defined]
    assert all(each == found[0] for each in found)
    return found[0]


def windows(table: Table) -> list[tuple[str, int, int]]:
    rows = answers(table.key_by("user").window(HOUR).count())
    return sorted((row["user"], (row["window_start"] - START) // HOUR, row["count"]) for row in rows)


def made_anew(table: Table) -> Table:
    other = datetime(1999, 1, 1, tzinfo=UTC)
    return table.with_columns(at=pc.scalar(pa.scalar(other, pa.timestamp("us", "UTC"))))


STEPS: dict[str, Callable[[Table], Table]] = {
    "select": lambda table: table.select("n", "user"),
    "select_twice": lambda table: table.select("n", "user").select("user"),
    "drop": lambda table: table.drop("at", "more"),
    "rename": lambda table: table.rename({"at": "when"}).drop("when"),
    "with_columns": made_anew,
    "filter": lambda table: table.drop("at").with_columns(m=pc.field("n") + 1).filter(pc.field("m") > 0),
    "rename_after": lambda table: table.drop("at").rename({"n": "m"}),
    "broadcast_join": lambda table: table.drop("at").broadcast_join(
        Table.from_arrow(pa.table({"user": ["ann", "bob"], "age": [1, 2]})), "user"
    ),
    "map_batches": lambda table: table.map_batches(lambda batch: batch),
    "rebalance": lambda table: table.drop("at").rebalance().with_columns(m=pc.field("n")),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.timestamp("ms"), pa.int64()], ids=str)
def test_windows_are_those_of_the_time_that_was_assigned(step: str, kind: pa.DataType) -> None:
    if step == "with_columns" and pa.types.is_integer(kind):
        kind = pa.timestamp("ns")
    assert windows(STEPS[step](calls(kind))) == WINDOWS


def test_exploded_rows_have_the_time_of_their_row() -> None:
    exploded = calls().drop("at").explode("more")
    assert windows(exploded) == [("ann", 0, 2), ("ann", 1, 1), ("bob", 0, 1), ("bob", 2, 1)]


def test_nobody_sees_the_column_of_times() -> None:
    table = calls().drop("at", "more")
    assert table._columns == ("user", "n")
    assert [list(row) for row in answers(table)] == [["user", "n"]] * 5
    assert [list(row) for row in answers(table.to_rows())] == [["user", "n"]] * 5
    tops = table.key_by("user").top_n(1, "n")
    assert [list(row) for row in answers(tops)] == [["user", "n"]] * 2
    seen = table.map_batches(lambda batch: pa.table({"names": [",".join(batch.schema.names)]}))
    assert {row["names"] for row in run(seen.collect(), Cut(1)).rows} == {"user,n"}
    again = table.with_columns(at=pc.field("n") * 2).event_time("at")
    assert [list(row) for row in answers(again.drop("at"))] == [["user", "n"]] * 5
    small = Table.from_arrow(pa.table({"user": ["ann", "bob"]}))
    looked_up = small.broadcast_join(table, "user")
    assert [list(row) for row in answers(looked_up)] == [["user", "n"]] * 5


def test_windows_of_windows_need_not_keep_their_end() -> None:
    hours = calls().key_by("user").window(HOUR).count()
    days = hours.select("user", "count").key_by("user").window(24 * HOUR).aggregate(n=("count", "sum"))
    assert [(row["user"], row["n"], row["window_start"]) for row in answers(days)] == [
        ("ann", 3, START), ("bob", 2, START)
    ]  # fmt: skip


def test_a_union_has_the_times_of_all_whatever_their_columns() -> None:
    one, other = calls().drop("more"), calls(pa.timestamp("ms", "UTC"), "when").drop("more")
    assert windows(one.union(other)) == [(user, hour, 2 * count) for user, hour, count in WINDOWS]
    hidden = calls().drop("at", "more")
    assert windows(hidden.union(other.select("user", "n"))) == windows(one.union(other))
    assert windows(one.union(hidden)) == windows(one.union(other))
    assert windows(hidden.union(hidden.drop("n"))) == windows(one.union(other))
    timeless = Table.from_arrow(pa.table({"user": ["cy"], "n": [1]}))
    both = hidden.union(timeless)
    assert [list(row) for row in answers(both)] == [["user", "n"]] * 6
    with pytest.raises(InvalidGraph, match="window needs the event time"):
        both.key_by("user").window(HOUR)


def clicks() -> Table:
    schema = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    rows = [
        {"user": user, "at": START + minute * MINUTE}
        for user, minute in (("ann", 65), ("bob", 10), ("cy", 90))
    ]
    table = Table.from_arrow(pa.Table.from_pylist(rows, schema)).parallel(1)
    return table.event_time("at", out_of_order=24 * HOUR)


def pairs(how: Any, table: bool) -> tuple[Any, list[Any]]:
    """Records of one user 20 minutes apart, and those in each hour of event time."""
    if table:
        joined: Any = (
            calls().drop("more").key_by("user").join(clicks().key_by("user"), how, within=20 * MINUTE)
        )
        counted = [(row["user"], row["window_start"], row["count"])
                   for row in answers(joined.key_by("user").window(HOUR).count())]  # fmt: skip
    else:
        left, right = calls().drop("more").to_rows(), clicks().to_rows()
        joined = left.key_by("user").join(right.key_by("user"), how, 20 * MINUTE)
        counted = answers(joined.key_by(lambda pair: pair[0]).window(HOUR).count())
    return joined, sorted((user, (start - START) // HOUR, count) for user, start, count in counted)


@pytest.mark.parametrize("table", [True, False], ids=["columns", "rows"])
def test_a_pair_has_the_greater_time_of_both(table: bool) -> None:
    assert pairs("inner", table)[1] == [("ann", 1, 2), ("bob", 0, 1)]
    assert pairs("left", table)[1] == [("ann", 0, 1), ("ann", 1, 2), ("bob", 0, 1), ("bob", 2, 1)]
    assert pairs("full", table)[1] == [
        ("ann", 0, 1), ("ann", 1, 2), ("bob", 0, 1), ("bob", 2, 1), ("cy", 1, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["left", "full"])
def test_times_that_are_keys_of_each_other_stay_where_a_function_is_shown_them(how: Any) -> None:
    left, right = calls(), calls(time="when").select("user", "when")
    joined = left.key_by("user", "at").join(right.key_by("user", "when"), how=how, within=timedelta(0))
    mapped = joined.map_batches(
        lambda batch: batch.select(["user", "at"]),
        schema={"user": pa.string(), "at": pa.timestamp("us", "UTC")},
    )
    assert windows(mapped) == WINDOWS


def test_a_right_row_alone_shows_nothing_in_the_columns_of_the_left() -> None:
    joined, _ = pairs("full", True)
    (alone,) = (row for row in answers(joined) if row["user"] == "cy")
    assert alone == {"user": "cy", "at": None, "n": None, "at_right": START + 90 * MINUTE}


def test_rows_with_a_time_by_function_keep_it_as_a_table() -> None:
    rows = [{"user": user, "minute": minute} for user, minute in GIVEN]
    timed = Stream.items(rows).parallel(1).event_time(lambda row: START + row["minute"] * MINUTE,
                                                      out_of_order=24 * HOUR)  # fmt: skip
    for table in (timed.to_table({"user": str, "minute": int}), timed.to_table()):
        assert windows(table) == WINDOWS
        assert [list(row) for row in answers(table)] == [["user", "minute"]] * 5


class InOrder:
    """Two rows in one split, the second of which is late."""

    format = "arrow"

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[pa.RecordBatch]:
        times = pa.array([START + 2 * HOUR, START], pa.timestamp("us", "UTC"))
        yield pa.record_batch({"user": ["ann", "ann"], "at": times}).slice(offset)


def test_late_records_keep_their_columns_and_time() -> None:
    schema = {"user": "string", "at": pa.timestamp("us", "UTC")}
    source = Table.source(InOrder(), schema=schema).parallel(1)
    timed = source.event_time("at", watermarks="each").drop("at")
    late = timed.key_by("user").window(HOUR, late="side").count().late
    assert late._columns == ("user",)
    assert run(late.collect(), Cut(1)).rows == [{"user": "ann"}]
    windows = late.key_by("user").window(HOUR)._windowing
    assert windows.time.is_beside


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("hidden", [True, False])
def test_a_function_of_batches_may_keep_the_time_or_give_another(declared: bool, hidden: bool) -> None:
    table = calls().drop("at") if hidden else calls()
    schema = {"user": "string", "n": "int64"} if declared else None

    def mapped(fn: Callable[[pa.RecordBatch], Any]) -> Table:
        return table.map_batches(fn, columns=["user", EVENT_TIME, "n"], schema=schema)

    def kept(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select([EVENT_TIME, "user", "n"]).filter(pc.field("user") == "ann")

    assert windows(mapped(kept)) == WINDOWS[:2]
    assert [list(row) for row in answers(mapped(kept))] == [["user", "n"]] * 3
    assert hours_of(mapped(kept).to_rows()) == WINDOWS[:2]

    def an_hour_later(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch.schema.field(EVENT_TIME).type == pa.int64()
        times = pc.add(batch.column(EVENT_TIME), HOUR // timedelta(microseconds=1))
        return batch.set_column(batch.schema.get_field_index(EVENT_TIME), EVENT_TIME, times)

    assert windows(mapped(an_hour_later)) == [(user, hour + 1, count) for user, hour, count in WINDOWS]
    lost = mapped(lambda batch: batch.select(["user", "n"]))
    assert len(answers(lost)) == 5
    says = "no column for the event time: the batch has user.*: keep it"
    with pytest.raises(UsageError, match=says if declared else "window needs the event time of the records"):
        windows(lost)


def hours_of(rows: Stream[Any]) -> list[tuple[str, int, int]]:
    counted = answers(rows.key_by("user").window(HOUR).count())
    return sorted((user, (start - START) // HOUR, count) for user, start, count in counted)


def test_a_schema_does_not_name_the_column_of_times() -> None:
    schema = {"n": "int64", EVENT_TIME: "int64"}
    with pytest.raises(UsageError, match=r"map_batches\(schema=...\) names EVENT_TIME.*: leave it out"):
        calls().map_batches(lambda batch: batch, columns=["n", EVENT_TIME], schema=schema)


def test_a_table_without_event_time_has_none_to_give() -> None:
    with pytest.raises(InvalidGraph, match="map_batches has no event time to give: call event_time"):
        Table.from_arrow(pa.table({"n": [1]})).map_batches(lambda batch: batch, columns=["n", EVENT_TIME])


def test_only_a_function_of_batches_loses_a_time_that_is_not_shown() -> None:
    hidden = calls().drop("at")
    with pytest.raises(InvalidGraph, match=r"again after map_batches\(\) that leaves it out"):
        hidden.map_batches(lambda batch: batch).key_by("user").window(HOUR)
    assert hours_of(hidden.to_rows()) == WINDOWS
