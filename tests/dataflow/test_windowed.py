"""Event time and windows: what a user may write, what is known afterwards, what each mistake is told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.dataflow.nodes import Node, inputs_first
from minishuffle.dataflow.operators.base import Operator
from minishuffle.dataflow.operators.eventtime import AssignEventTime
from minishuffle.dataflow.operators.times import BESIDE, EventTime
from minishuffle.dataflow.operators.windowassigner import LastMoment, tumbling
from minishuffle.dataflow.stream import Stream
from minishuffle.dataflow.stream_base import StreamBase
from minishuffle.dataflow.table import Table
from minishuffle.errors import InvalidGraph, UnknownName, UsageError
from minishuffle.operators.sessions import last_of_session

MOMENT = pa.timestamp("us", "UTC")
SCHEMA = pa.schema({"user": pa.string(), "t": MOMENT, "n": pa.int32(), "price": pa.decimal128(6, 2)})
HOUR = timedelta(hours=1)
HOUR_MICROSECONDS = 3_600_000_000


def table() -> Table:
    return Table.from_arrow(SCHEMA.empty_table())


def rows() -> Stream[Any]:
    return Stream.items([{"user": "a", "t": 1}])


def timed() -> Stream[Any]:
    return rows().event_time("t")


def last(stream: StreamBase) -> Node:
    (node,) = stream.ends
    return node


def operator(stream: StreamBase) -> Operator:
    return last(stream).operators[-1]


# --- event_time -----------------------------------------------------------------------------------


def test_event_time_takes_a_column_or_a_function_of_rows() -> None:
    by_column = operator(timed())
    assert isinstance(by_column, AssignEventTime)
    assert by_column.time == EventTime(column="t")
    assert (by_column.out_of_order, by_column.idle_after, by_column.each) == (0, None, False)
    fn = len
    by_function = rows().event_time(fn, out_of_order=timedelta(seconds=2), idle_after=HOUR, watermarks="each")
    operated = operator(by_function)
    assert isinstance(operated, AssignEventTime)
    assert operated.time == EventTime(fn=fn)
    assert (operated.out_of_order, operated.idle_after, operated.each) == (2_000_000, 3600.0, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"time": 3}, r"event_time takes a function, not 3"),
        (
            {"time": "t", "out_of_order": 5},
            r"event_time\(out_of_order=...\) takes a datetime.timedelta, not 5",
        ),
        ({"time": "t", "out_of_order": -HOUR}, "takes a time from 0, not -1 day"),
        ({"time": "t", "idle_after": timedelta(0)}, r"idle_after=...\) takes a time above 0, not 0:00:00"),
        ({"time": "t", "watermarks": "all"}, "write 'batch' or 'each'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        rows().event_time(**arguments)


def test_the_column_of_the_time_must_exist() -> None:
    with pytest.raises(UnknownName, match="event_time: there is no column 'time'"):
        table().to_rows().event_time("time")


@pytest.mark.parametrize(
    "step",
    [
        lambda s: s.filter(bool),
        lambda s: s.rebalance(),
        lambda s: s.to_table(SCHEMA).to_rows(),
        lambda s: s.union(s),
        lambda s: s.parallel(2).name("x"),
    ],
)
def test_steps_that_keep_a_column_keep_the_time(step: Callable[[Stream[Any]], Stream[Any]]) -> None:
    assert step(timed())._time == EventTime(column="t")


def test_what_makes_other_records_has_their_times_beside_them() -> None:
    by_function = rows().event_time(lambda row: row["t"], watermarks="each")
    assert by_function.filter(bool)._time == by_function._time
    assert by_function.union(by_function)._time == by_function._time
    for other in (by_function.map(dict), by_function.flat_map(list), timed().union(by_function)):
        assert other._time == BESIDE
        assert other.filter(bool)._time == other.map(dict)._time == BESIDE
    paired = by_function.map(dict)._time
    assert paired is not None and paired.each
    assert by_function.map(dict).event_time("t")._time == EventTime(column="t")
    assert rows().map(dict)._time is None
    assert timed().union(rows())._time is None
    assert timed().key_by("user").count()._time is None


# --- windows --------------------------------------------------------------------------------------


def test_windows_need_a_size_and_event_time() -> None:
    keyed = timed().key_by("user")
    for size, told in (
        (5, "takes a datetime.timedelta"),
        (timedelta(0), "takes a time above 0"),
        (timedelta.max, "takes a time of at most 36500 days"),
    ):
        with pytest.raises(UsageError, match=f"window {told}"):
            keyed.window(size)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="write 'drop', 'side' or 'fail'"):
        keyed.window(HOUR, late="keep")  # type: ignore[arg-type]
    for wrong, told in (
        ({"slide": 2 * HOUR}, r"slide=...\) takes at most the window's size"),
        ({"slide": timedelta(seconds=3)}, "each record would be in 1,200 windows, and 1,000 are possible"),
        ({"offset": HOUR}, r"offset=...\) takes a time below"),
        ({"tz": "Europe/Zurich"}, "takes a size of whole days"),
        ({"tz": "Europe/Zurich", "offset": HOUR}, "takes a size of whole days"),
    ):
        with pytest.raises(UsageError, match=told):
            keyed.window(HOUR, **wrong)  # type: ignore[arg-type]
    for size, wrong, told in (
        (24 * HOUR, {"tz": "UTC", "slide": HOUR}, "follow each other: leave out slide="),
        (24 * HOUR, {"tz": "UTC", "offset": 24 * HOUR}, "takes less than 24 hours"),
        ("month", {"slide": HOUR}, "follow each other: leave out slide="),
        ("month", {"offset": timedelta(days=28)}, "takes less than 672 hours"),
        ("year", {"tz": 3}, "takes the name of a time zone"),
        ("year", {"early": timedelta(days=28)}, "early=...\\) takes a time below"),
        ("week", {}, "takes a datetime.timedelta, or 'month', 'quarter' or 'year', not 'week'"),
    ):
        with pytest.raises(UsageError, match=told):
            keyed.window(size, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no such time zone here"):
        keyed.window(24 * HOUR, tz="Europe/Zürich")
    with pytest.raises(InvalidGraph, match=r"call event_time\(...\) before key_by$"):
        rows().key_by("user").window(HOUR)
    assert "of 3600 s" in repr(keyed.window(HOUR))
    assert "of a quarter" in repr(keyed.window("quarter", tz="Asia/Kathmandu", offset=timedelta(days=27)))


def test_windows_of_so_many_records_need_a_number_and_event_time() -> None:
    for size in (0, -1, 2.0, True, HOUR):
        with pytest.raises(UsageError, match="count_window takes a whole number from 1 on, not "):
            timed().key_by("user").count_window(size)  # type: ignore[arg-type]
    with pytest.raises(InvalidGraph, match="count_window needs the event time"):
        table().key_by("user").count_window(3)
    counted = timed().key_by("user").count_window(1_000, late="side")
    assert "of windows of 1,000 records" in repr(counted)
    assert counted.count().late is not None


def test_sessions_need_a_gap_and_event_time() -> None:
    with pytest.raises(UsageError, match="session_window takes a time above 0"):
        timed().key_by("user").session_window(timedelta(0))
    with pytest.raises(InvalidGraph, match="session_window needs the event time"):
        rows().key_by("user").session_window(HOUR)
    sessions = timed().key_by("user").session_window(HOUR, late="side")
    assert "of sessions with gaps of 3600 s" in repr(sessions)
    counted = sessions.count()
    assert counted._time == EventTime(fn=last_of_session) and counted.late is not None
    by_columns = table().event_time("t").key_by("user").session_window(HOUR).count()
    assert by_columns._columns == ("user", "window_start", "window_end", "count")


def test_results_on_rows_have_a_time() -> None:
    windows = rows().event_time("t").key_by("user").window(HOUR)
    for stream in (windows.count(), windows.reduce(max), windows.fold(list, list.__add__)):
        assert stream._time == EventTime(fn=LastMoment(tumbling(HOUR_MICROSECONDS)))
    assert last(windows.fold(list, list.__add__)).label == "window_fold"
    with pytest.raises(
        UsageError, match=r"aggregate\(\) works on columns, and this is a WindowedStream of rows"
    ):
        windows.aggregate(n=("t", "count"))  # type: ignore[attr-defined]


def test_late_records_are_a_stream_of_their_own() -> None:
    windows = table().event_time("t").key_by("user").window(HOUR, late="side")
    counts, totals = windows.count(), windows.aggregate(n=("n", "sum"))
    (one,), (other,) = counts.late._feeds, totals.late._feeds
    assert one.node is last(counts)
    assert one.side is not None
    assert one.side != other.side
    assert totals.late._schema == SCHEMA
    assert totals.late._time == EventTime(column="t")
    renamed = totals.name("totals").parallel(3)
    assert [feed.node for feed in renamed.late._feeds] == list(renamed.ends)


@pytest.mark.parametrize(
    "follow",
    [
        lambda late: late.rebalance(),
        lambda late: late.broadcast().flat_map(list),
        lambda late: late.partition(lambda row, count: 0),
        lambda late: late.key_by("user").count(),
        lambda late: late.to_table({"user": str, "t": int}).key_by("user").aggregate(n=("t", "count")),
        lambda late: late.event_time("t"),
        lambda late: late.event_time("t").key_by("user").window(HOUR).count(),
        lambda late: late.map(str).name("texts").parallel(2),
    ],
    ids=["rebalance", "broadcast", "partition", "count", "aggregate", "time", "windows", "map"],
)
def test_what_follows_late_records_reads_them_and_not_the_windows(
    follow: Callable[[Stream[Any]], StreamBase],
) -> None:
    windows = timed().key_by("user").window(HOUR, late="side").count()
    following = follow(windows.late)
    feeds = [feed for node in inputs_first(following.ends) for feed in node.feeds] + list(following._feeds)
    sides = [feed.side for feed in feeds if feed.node in windows.ends]
    assert sides and all(side is not None for side in sides)


@pytest.mark.parametrize("change", ["name", "parallel"])
def test_late_records_have_neither_name_nor_width_of_their_own(change: str) -> None:
    late = timed().key_by("user").window(HOUR, late="side").count().late
    for stream in (late, late.event_time("t")):
        with pytest.raises(InvalidGraph, match=rf"{change}\(\) cannot follow \.late"):
            stream.name("x") if change == "name" else stream.parallel(1)


def test_streams_without_late_records_say_so() -> None:
    counts = timed().key_by("user").window(HOUR, late="side").count()
    for stream in (rows(), timed().key_by("user").window(HOUR).count(), counts.filter(bool)):
        with pytest.raises(InvalidGraph, match=r"\.late must directly follow .* late='side'"):
            _ = stream.late
    with pytest.raises(InvalidGraph, match=r"\.panes must directly follow .* allowed_lateness or early"):
        _ = timed().key_by("user").window(HOUR).count().panes
    with pytest.raises(InvalidGraph, match=r"\.late_right must directly follow"):
        _ = counts.late_right
