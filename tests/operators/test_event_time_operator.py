"""Which records an operator takes that goes by event time, and what becomes of the late ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minishuffle.dataflow.operators.base import END_OF_TIME, Emit, Idle, Reached, Side, TaskContext, Watermark
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.times import BESIDE, EventTime
from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Batch, Mask
from minishuffle.operators.event_time_operator import EventTimeOperator, EventTimeProgress
from support.batches import collecting


class Taking(EventTimeOperator):
    """Emits what it takes, and its times; a record at the watermark is late. It holds watermarks back."""

    def late(self, batch: Batch, progress: EventTimeProgress) -> Mask | None:
        assert batch.times is not None
        late: Mask = batch.times <= progress.reached
        return late if late.any() else None

    def take(self, batch: Batch, emit: Emit) -> None:
        assert batch.times is not None
        emit(Batch(list(zip(batch.payload, batch.times.tolist(), strict=True))))

    def on_watermark(self, watermark: int, emit: Emit) -> int:
        emit(Batch([f"at {watermark}"]))
        return watermark - 1


def taking(late: Late, time: EventTime = BESIDE) -> tuple[Taking, list[Any], TaskContext]:
    operator, context = Taking(time, late, None, "fail"), TaskContext("job", "task", 0, 1, 1)
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
    assert operator.sides_to_read() == {"late": "late"}


def test_late_records_fail_the_task_if_there_are_to_be_none() -> None:
    operator, out, _ = taking(Late("fail"))
    operator.on_mark(Watermark(5), 0, out.append)
    with pytest.raises(UsageError, match="came too late, behind the watermark: 'row 4'"):
        operator.process(timed(4), 0, out.append)


def test_the_producer_of_the_records_decides_where_it_is_ahead() -> None:
    operator, out, context = taking(Late())
    operator.on_mark(Watermark(2), 0, collecting(out))
    operator.on_mark(Reached(5), 0, collecting(out))
    operator.process(timed(5, 6), 0, collecting(out))
    operator.on_mark(Reached(0), 0, collecting(out))
    operator.process(timed(2, 3), 0, collecting(out))
    assert out[2:] == [[("row 6", 6)], [("row 3", 3)]]
    assert context.counters.records_late == 2


def test_times_come_from_where_they_stand() -> None:
    operator, out, _ = taking(Late(), EventTime(fn=len))
    operator.process(Batch(["a", "abc"]), 0, collecting(out))
    operator.process(Batch([]), 0, collecting(out))
    assert out == [[("a", 1), ("abc", 3)]]


def test_the_watermark_goes_on_where_it_was() -> None:
    before, out, _ = taking(Late())
    before.on_mark(Watermark(5), 0, out.append)
    after, out, context = taking(Late())
    after.read_state(before.write_state())
    after.process(timed(5, 6), 0, collecting(out))
    after.finish(collecting(out))
    assert out == [[("row 6", 6)], [f"at {END_OF_TIME}"]]
    assert context.counters.records_late == 1
