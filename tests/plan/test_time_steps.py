"""Event time: what a user may write, and what is known afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.columns import col
from minishuffle.api.stream import Stream, Table
from minishuffle.api.stream_base import StreamBase
from minishuffle.errors import UnknownName, UsageError
from minishuffle.operators.assign_event_time import AssignEventTime
from minishuffle.operators.base import Operator, TimedBatch
from minishuffle.operators.event_time import BESIDE, EventTime
from minishuffle.plan.planner import logical_plan, planned_programs
from support.planned import HOUR, SCHEMA, last, planned, rows, table, timed


def operator(stream: StreamBase) -> Operator:
    return planned(last(stream))


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


class Timed:
    """Brings the times of its rows."""

    format = "arrow"

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Any]:
        yield TimedBatch(pa.record_batch({"n": [1, 2]}), [0, 10])


def test_times_that_a_source_brings_are_read_right_behind_it() -> None:
    source = Table.source(Timed(), {"n": int})
    timed = source.event_time()
    assert timed.plan.gives.time == BESIDE
    counts = timed.union(source.event_time()).key_by("n").window(HOUR)
    for stream, times in ((counts.aggregate(most=("n", "max")), True), (source.select("n"), False)):
        ((_, program), *_) = planned_programs(logical_plan(stream, whole=False), None)[0]
        assert program.times == times, "what nobody reads is left out"
    late = timed.event_time(out_of_order=HOUR)
    assert late.plan.gives.time == BESIDE, "they stay beside the records"
    for wrong in (rows(), source.select("n"), source.with_columns(t=col("n")).event_time("t"), table()):
        with pytest.raises(UsageError, match=r"event_time\(\) without a column or function takes the times"):
            wrong.event_time()


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


def test_the_column_of_the_time_must_exist_and_hold_times() -> None:
    with pytest.raises(UnknownName, match="event_time: there is no column 'time'"):
        table().to_rows().event_time("time")
    with pytest.raises(UsageError, match="event_time: column 'user' of type string holds no times: cast it"):
        table().event_time("user")


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
    assert step(timed()).plan.gives.time == EventTime(column="t")


def test_what_makes_other_records_has_their_times_beside_them() -> None:
    by_function = rows().event_time(lambda row: row["t"], watermarks="each")
    assert by_function.filter(bool).plan.gives.time == by_function.plan.gives.time
    assert by_function.union(by_function).plan.gives.time == by_function.plan.gives.time
    for other in (by_function.map(dict), by_function.flat_map(list), timed().union(by_function)):
        assert other.plan.gives.time == BESIDE
        assert other.filter(bool).plan.gives.time == other.map(dict).plan.gives.time == BESIDE
    paired = by_function.map(dict).plan.gives.time
    assert paired is not None and paired.each
    assert by_function.map(dict).event_time("t").plan.gives.time == EventTime(column="t")
    assert rows().map(dict).plan.gives.time is None
    assert timed().union(rows()).plan.gives.time is None
    assert timed().key_by("user").count().plan.gives.time is None
