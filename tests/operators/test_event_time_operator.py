"""How far event time is at an operator, which records it takes, and what becomes of the late ones."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.errors import LateRecord
from minishuffle.exchange.batch import Batch, Mask
from minishuffle.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Active,
    Emit,
    Idle,
    Reached,
    Side,
    TaskContext,
    Watermark,
)
from minishuffle.operators.event_time import BESIDE, EventTime
from minishuffle.operators.event_time_operator import (
    DROPPED,
    EventTimeOperator,
    EventTimeProgress,
    InputProgress,
    Late,
)
from support.batches import collecting


class Taking(EventTimeOperator):
    """Emits what it takes, with its times; a record at the watermark is late. It holds watermarks back."""

    def late(self, batch: Batch, progress: InputProgress) -> Mask | None:
        assert batch.times is not None
        late: Mask = batch.times <= progress.reached
        return late

    def take(self, batch: Batch, input: int, emit: Emit) -> None:
        assert batch.times is not None
        emit(Batch(list(zip(batch.payload, batch.times.tolist(), strict=True))))

    def on_watermark(self, emit: Emit) -> int:
        watermark = min(self.progress.watermarks)
        emit(Batch([f"at {watermark}"]))
        return watermark if self.progress.ended else watermark - 1

    def on_end(self, emit: Emit) -> None:
        emit(Batch(["end"]))


def taking(*late: Late, time: EventTime = BESIDE) -> tuple[Taking, list[Any], TaskContext]:
    operator, context = Taking([time] * len(late), late), TaskContext("job", "task", 0, 1, 1)
    operator.open(context)
    return operator, [], context


def timed(*times: int) -> Batch:
    return Batch([f"row {time}" for time in times], None, np.array(times, np.int64))


def test_late_records_are_counted_and_dropped() -> None:
    operator, out, context = taking(Late())
    operator.process(timed(3, 9), 0, collecting(out))
    operator.on_mark(Watermark(5), 0, collecting(out))
    operator.process(timed(5, 6, 2), 0, collecting(out))
    operator.process(timed(1), 0, collecting(out))
    operator.on_mark(Idle(), 0, collecting(out))
    assert out == [[("row 3", 3), ("row 9", 9)], ["at 5"], Watermark(4), [("row 6", 6)], Idle()]
    assert (context.counters.records_late, context.counters.late_dropped) == (3, 3)


def test_late_records_go_aside_with_the_times_that_were_beside_them() -> None:
    operator, out, context = taking(Late("side", "late"))
    operator.on_mark(Watermark(5), 0, out.append)
    operator.process(timed(5, 6, 2), 0, out.append)
    (side,) = [item for item in out if isinstance(item, Side)]
    assert (side.tag, side.batch.payload) == ("late", ["row 5", "row 2"])
    assert side.batch.times is not None and side.batch.times.tolist() == [5, 2]
    assert (context.counters.records_late, context.counters.late_dropped) == (2, 0)


def test_late_records_end_the_job_if_there_are_to_be_none() -> None:
    operator, out, context = taking(Late("fail"))
    operator.on_mark(Watermark(3_600_000_003), 0, out.append)
    with pytest.raises(LateRecord) as failed:
        operator.process(timed(4), 0, out.append)
    assert str(failed.value) == (
        "a record came too late: 'row 4' is of 1970-01-01 00:00:00.000004 (UTC), and the watermark says that "
        "all before 1970-01-01 01:00:00.000004 have come, 1:00:00 later: raise out_of_order= of event_time() "
        "by that much, give a window allowed_lateness=, or write late='drop', which counts such records, or "
        "late='side', which has them in .late"
    )
    assert (context.counters.records_late, context.counters.late_dropped) == (1, 0)


@pytest.mark.parametrize("policy", ["drop", "side", "fail"])
def test_late_records_that_came_in_time_before_are_left_out_whatever_becomes_of_late_ones(
    policy: Any,
) -> None:
    """Their producer makes them once more; what is late by its own word is so every time."""
    operator, context = Taking([BESIDE], [Late(policy, "late")]), TaskContext("job", "task", 0, 1, 1)
    context = replace(context, repeats_from=lambda: 3)
    operator.open(context)
    out: list[Any] = []
    operator.on_mark(Watermark(5), 0, collecting(out))
    operator.process(timed(3, 5), 0, collecting(out))
    operator.process(timed(4, 6), 0, collecting(out))
    assert out == [["at 5"], Watermark(4), [("row 6", 6)]] and context.counters.records_late == 0
    with pytest.raises(LateRecord) if policy == "fail" else nullcontext():
        operator.process(timed(2, 3), 0, out.append)
    assert context.counters.records_late == 1


def test_the_producer_of_the_records_decides_where_it_is_ahead() -> None:
    operator, out, context = taking(DROPPED, time=EventTime(is_beside=True, each=True))
    operator.on_mark(Watermark(2), 0, collecting(out))
    operator.on_mark(Reached(5), 0, collecting(out))
    operator.process(timed(5, 6), 0, collecting(out))
    operator.on_mark(Reached(0), 0, collecting(out))
    operator.process(timed(2, 3), 0, collecting(out))
    assert out[2:] == [[("row 6", 6)], [("row 3", 3)]]
    assert context.counters.records_late == 2


def test_times_come_from_where_they_stand() -> None:
    operator, out, _ = taking(DROPPED, time=EventTime(fn=len))
    operator.process(Batch(["a", "abc"]), 0, collecting(out))
    operator.process(Batch([]), 0, collecting(out))
    assert out == [[("a", 1), ("abc", 3)]]


def test_the_watermark_goes_on_where_it_was() -> None:
    before, out, _ = taking(Late())
    before.on_mark(Watermark(5), 0, out.append)
    after, out, context = taking(Late())
    after.read_state(before.write_state())
    after.process(timed(5, 6), 0, collecting(out))
    after.on_mark(Watermark(END_OF_TIME), 0, collecting(out))
    assert out == [[("row 6", 6)], [f"at {END_OF_TIME}"], ["end"], Watermark(END_OF_TIME)]
    assert context.counters.records_late == 1


def test_a_watermark_and_idleness_are_passed_on_once() -> None:
    operator, out, _ = taking(DROPPED)
    for mark in (
        Watermark(5),
        Watermark(5),
        Idle(),
        Idle(),
        Watermark(5),
        Idle(),
        Watermark(7),
        Idle(),
        Active(),
    ):
        operator.on_mark(mark, 0, out.append)
    marks = [item for item in out if not isinstance(item, Batch)]
    assert marks == [Watermark(4), Idle(), Active(), Idle(), Watermark(6), Idle(), Active()]


def test_the_lesser_watermark_of_two_inputs_counts_and_the_end_comes_once() -> None:
    operator, out, context = taking(Late("side", "left"), Late("side", "right"))
    operator.on_mark(Watermark(5), 0, collecting(out))
    operator.on_mark(Watermark(3), 1, collecting(out))
    assert out == [[f"at {BEGINNING_OF_TIME}"], ["at 3"], Watermark(2)]
    out.clear()
    operator.process(timed(4, 6), 0, out.append)
    operator.process(timed(4, 3), 1, out.append)
    assert [item.tag for item in out if isinstance(item, Side)] == ["left", "right"]
    taken = [item.payload for item in out if isinstance(item, Batch)]
    assert taken == [[("row 6", 6)], [("row 4", 4)]]
    out.clear()
    for input in (0, 1):
        operator.on_mark(Watermark(END_OF_TIME), input, collecting(out))
    assert out == [["at 3"], [f"at {END_OF_TIME}"], ["end"], Watermark(END_OF_TIME)]
    assert context.counters.records_late == 2


def test_an_idle_input_does_not_follow_one_that_has_ended_or_is_idle_too() -> None:
    progress = EventTimeProgress(2)
    progress.take(Watermark(50), 0)
    assert progress.take(Idle(), 1)
    assert progress.watermarks == (50, 50)
    assert not progress.idle
    progress.take(Watermark(END_OF_TIME), 0)
    assert progress.watermarks == (END_OF_TIME, 50)
    assert progress.idle
    assert not progress.take(Active(), 1)
    assert not progress.idle
    both_idle = EventTimeProgress(2)
    both_idle.take(Watermark(50), 0)
    both_idle.take(Idle(), 0)
    both_idle.take(Idle(), 1)
    assert both_idle.watermarks == (50, BEGINNING_OF_TIME)
    assert both_idle.idle


def test_an_operator_goes_on_where_the_subtask_that_is_farthest_was() -> None:
    first, second, after = (EventTimeProgress(2) for _ in range(3))
    first.take(Watermark(50), 0)
    second.take(Watermark(20), 0)
    second.take(Watermark(70), 1)
    for progress in (first, second):
        for records in progress.write():
            after.read(records)
    assert after.watermarks == (50, 70)
    assert after.last == 70


ROWS = [{"t": 1}, {"t": 2}]
BATCHES = [Batch(ROWS, [1, 1]), Batch(pa.RecordBatch.from_pylist(ROWS))]


@pytest.mark.parametrize("batch", BATCHES, ids=["rows", "arrow"])
def test_each_policy(batch: Any) -> None:
    out: list[Any] = []
    context = TaskContext("job", "task", 0, 1, 1)
    Late().take(batch, context, out.append)
    assert out == []
    assert (context.counters.records_late, context.counters.late_dropped) == (2, 2)
    Late("side", "late-1").take(batch, context, out.append)
    (side,) = out
    assert isinstance(side, Side) and side.tag == "late-1" and len(side.batch) == 2
    assert (context.counters.records_late, context.counters.late_dropped) == (4, 2)
