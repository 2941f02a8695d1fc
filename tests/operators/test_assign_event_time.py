"""Watermarks made of the records' times: by batch and by record, by split, when idle, at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import MissingColumn, UsageError, WrongColumns
from minishuffle.limits import WATERMARK_SECONDS_MIN
from minishuffle.operators.assign_event_time import AssignEventTime
from minishuffle.operators.base import (
    END_OF_TIME,
    Active,
    Idle,
    Mark,
    SplitMark,
    TaskContext,
    Watermark,
)
from minishuffle.operators.event_time import EventTime
from support.batches import as_batch, shown

BY_COLUMN = EventTime(column="t")
Make = Callable[[Sequence[int]], Any]


def arrow(times: Sequence[int]) -> pa.RecordBatch:
    return pa.record_batch({"t": pa.array(times, pa.int64())})


def rows(times: Sequence[int]) -> list[dict[str, int]]:
    return [{"t": time} for time in times]


both = pytest.mark.parametrize("make", [arrow, rows])


class Bench:
    """An operator, a clock, and what came out: lists of times and marks."""

    def __init__(self, operator: AssignEventTime) -> None:
        self.operator = operator
        self.now = 100.0
        self.out: list[Any] = []
        operator.open(TaskContext("job", "task", 0, 1, 1, now=lambda: self.now))

    def emit(self, item: Any) -> None:
        item = shown(item)
        if isinstance(item, Mark):
            self.out.append(item)
        else:
            self.out.append([row["t"] for row in (item if isinstance(item, list) else item.to_pylist())])

    def take(self, *items: Any) -> list[Any]:
        """What comes out for these batches and marks."""
        self.out = []
        for item in items:
            if isinstance(item, Mark):
                self.operator.on_mark(item, 0, self.emit)
            else:
                self.operator.process(as_batch(item), 0, self.emit)
        return self.out

    def wait(self, seconds: float) -> list[Any]:
        """What comes out as the clock goes on, as a task asks for it."""
        self.out = []
        end = self.now + seconds
        while (due := self.operator.deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.operator.on_clock(self.now, self.emit)
        self.now = end
        return self.out


def bench(out_of_order: int = 0, idle: float | None = None, each: bool = False) -> Bench:
    return Bench(AssignEventTime(BY_COLUMN, out_of_order, idle, "each" if each else "batch"))


@both
def test_a_watermark_follows_its_batch_and_is_behind_the_greatest_time(make: Make) -> None:
    b = bench(out_of_order=10)
    assert b.take(make([50, 70, 60])) == [[50, 70, 60], Watermark(59)]


@both
def test_watermarks_are_spaced_out_and_the_last_is_not_lost(make: Make) -> None:
    b = bench()
    assert b.take(make([1]), make([2]), make([3])) == [[1], Watermark(0), [2], [3]]
    assert b.wait(WATERMARK_SECONDS_MIN / 2) == []
    assert b.wait(2 * WATERMARK_SECONDS_MIN) == [Watermark(2)]
    assert b.operator.deadline() is None
    assert b.take(make([4])) == [[4], Watermark(3)]


def test_a_clock_that_is_set_back_does_not_hold_watermarks_up() -> None:
    b = bench()
    b.take(rows([1]))
    b.now = 5.0
    assert b.take(rows([2])) == [[2], Watermark(1)]


@both
def test_after_each_record_the_batch_is_cut_where_the_watermark_advances(make: Make) -> None:
    b = bench(out_of_order=1, each=True)
    expected = [[10], Watermark(8), [9, 12], Watermark(10), [12, 13], Watermark(11), [5]]
    assert b.take(make([10, 9, 12, 12, 13, 5])) == expected
    assert b.take(make([13, 14])) == [[13, 14], Watermark(12)]


@given(batches=st.lists(st.lists(st.integers(-30, 30), max_size=6), max_size=5), late=st.integers(0, 5))
def test_each_is_as_if_a_watermark_came_after_every_record(batches: list[list[int]], late: int) -> None:
    expected: list[Any] = []
    greatest = None
    for time in (time for batch in batches for time in batch):
        expected.append(time)
        if greatest is None or time > greatest:
            greatest = time
            expected.append(Watermark(time - late - 1))
    for make in (arrow, rows):
        out = bench(late, each=True).take(*map(make, batches))
        flat = [x for item in out for x in (item if isinstance(item, list) else [item])]
        assert flat == expected


# --- splits ---------------------------------------------------------------------------------------

NONE = SplitMark(-1, "none")
"""The source has no split for this subtask."""


def test_a_subtask_without_splits_is_idle_until_one_is_open() -> None:
    b = bench()
    assert b.take(NONE) == [Idle()]
    assert b.take(NONE) == []
    assert b.take(SplitMark(0, "open")) == [Active()]
    assert b.take(SplitMark(0, "current"), rows([10])) == [[10], Watermark(9)]
    assert b.take(SplitMark(0, "done"), SplitMark(1, "open")) == []


def test_the_time_that_was_reached_is_told_before_the_subtask_has_no_split() -> None:
    b = bench()
    b.take(SplitMark(0, "open"), SplitMark(1, "open"), SplitMark(0, "current"), rows([10]))
    assert b.take(SplitMark(0, "done"), SplitMark(1, "done"), NONE) == [Watermark(9), Idle()]


def test_the_wait_for_records_begins_again_with_a_split() -> None:
    b = bench(idle=5.0)
    b.take(NONE)
    b.wait(60.0)
    assert b.take(SplitMark(0, "open")) == [Active()]
    assert b.wait(4.0) == []
    assert b.wait(2.0) == [Idle()]


def test_the_least_split_counts_and_one_without_records_holds_all_back() -> None:
    b = bench(each=True)
    assert b.take(SplitMark(0, "open"), SplitMark(3, "open")) == []
    assert b.take(SplitMark(0, "current"), rows([10, 20])) == [[10, 20]]
    assert b.take(SplitMark(3, "current"), rows([5, 15, 30])) == [
        *([5], Watermark(4), [15], Watermark(14), [30]),
        Watermark(19),
    ]
    assert b.take(SplitMark(3, "done")) == []
    assert b.take(SplitMark(0, "current"), rows([21])) == [[21], Watermark(20)]
    assert b.take(SplitMark(0, "done")) == [Watermark(29)]


def test_a_split_that_ends_without_records_holds_nothing_back() -> None:
    b = bench()
    b.take(SplitMark(0, "open"), SplitMark(1, "open"), SplitMark(0, "current"), rows([10]))
    assert b.take(SplitMark(1, "done")) == [Watermark(9)]


def test_a_split_that_opens_late_does_not_turn_time_back() -> None:
    b = bench(each=True)
    b.take(SplitMark(0, "open"), SplitMark(0, "current"), rows([10]))
    assert b.take(SplitMark(1, "open"), SplitMark(1, "current"), rows([3, 12])) == [[3, 12]]
    assert b.take(SplitMark(0, "done")) == [Watermark(11)]


# --- idleness and the end -------------------------------------------------------------------------


def test_a_stream_without_records_is_idle_once_and_awakes_with_the_next() -> None:
    b = bench(idle=5.0)
    assert b.wait(4.9) == []
    assert b.wait(0.2) == [Idle()]
    assert b.wait(100) == []
    assert b.take(rows([7])) == [Active(), [7], Watermark(6)]
    assert b.take(rows([8])) == [[8]]
    assert b.wait(6) == [Watermark(7), Idle()]


@pytest.mark.parametrize("each", [False, True])
def test_one_that_awakes_says_so_also_where_the_watermark_stays(each: bool) -> None:
    b = bench(idle=5.0, each=each)
    b.take(rows([7]))
    assert b.wait(6)[-1:] == [Idle()]
    assert b.take(rows([3])) == [Active(), [3]]


@pytest.mark.parametrize("each", [False, True])
def test_a_split_that_ends_does_not_wake_an_idle_stream(each: bool) -> None:
    b = bench(idle=5.0, each=each)
    b.take(SplitMark(0, "open"), SplitMark(1, "open"), SplitMark(0, "current"), rows([10]))
    assert b.wait(6) == [Idle()]
    assert b.take(SplitMark(1, "done")) == [Watermark(9), Idle()]


def test_at_the_end_nothing_is_told_any_more() -> None:
    b = bench(idle=5.0)
    assert b.take(rows([7]), rows([9]), Watermark(END_OF_TIME))[-1] == Watermark(END_OF_TIME)
    assert b.operator.deadline() is None
    assert b.wait(100) == []


def test_marks_from_before_are_replaced() -> None:
    assert bench().take(Watermark(5), Idle(), SplitMark(0, "open")) == []


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"s": 1}, MissingColumn),
        ({"t": "2026-03-28T20:00"}, WrongColumns),
        (5, WrongColumns),
        ({"t": None}, UsageError),
    ],
    ids=str,
)
def test_what_no_record_so_far_has_right_ends_the_job(row: Any, kind: type[UsageError]) -> None:
    """One among others costs the task its batch; a value that is missing may be there in the next record."""
    with pytest.raises(UsageError) as caught:
        Bench(AssignEventTime(BY_COLUMN)).take([row, row])
    assert type(caught.value) is kind and kind.final is (kind is not UsageError)
    for items in ([[{"t": 1}, row]], [rows([1]), [row]]):
        with pytest.raises(UsageError) as caught:
            Bench(AssignEventTime(BY_COLUMN)).take(*items)
        assert not caught.value.final


def test_an_idle_split_holds_nobody_back_until_its_next_record() -> None:
    made = bench(each=True)
    made.take(SplitMark(0, "open"), SplitMark(1, "open"))
    assert made.take(SplitMark(0, "current"), rows([10])) == [[10]], "split 1 is waited for"
    assert made.take(SplitMark(1, "idle")) == [Watermark(9)]
    assert made.take(rows([20])) == [[20], Watermark(19)]
    assert made.take(SplitMark(0, "idle")) == [Idle()], "all are"
    assert made.take(SplitMark(1, "current"), rows([30])) == [Active(), [30], Watermark(29)]
    assert made.take(SplitMark(0, "current"), rows([40])) == [[40]], "split 1 is waited for again"
    assert made.take(SplitMark(0, "idle"), SplitMark(1, "done")) == [Watermark(39), Idle()]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_watermark_before_all_are_idle_is_that_of_the_split_that_is_furthest(
    order: tuple[int, int],
) -> None:
    """As StatusWatermarkValve of Flink does when its last channel becomes idle."""
    made = bench(each=True)
    made.take(SplitMark(0, "open"), SplitMark(1, "open"))
    made.take(SplitMark(0, "current"), rows([100]), SplitMark(1, "current"), rows([50]))
    assert made.take(*(SplitMark(split, "idle") for split in order))[-2:] == [Watermark(99), Idle()]


def test_what_is_due_goes_out_before_the_last_split_is_idle() -> None:
    made = bench()
    made.take(SplitMark(0, "open"), SplitMark(0, "current"), rows([10]))
    assert made.take(rows([20])) == [[20]]
    assert made.take(SplitMark(0, "idle")) == [Watermark(19), Idle()]
