"""Operators that go by event time, and what becomes of records that come too late for them.

An operator says which records are late, by its own rule; here they are counted, and dropped or sent aside, or
they fail the task:

=====================  ===================================================================================
operator               a record is late if
=====================  ===================================================================================
window                 the last microsecond of the latest window that it is in, and the allowed lateness
                       after that, are at or before the watermark
session, count_window  its time is at or before the watermark
join, asof_join        its time is at or before the watermark of its own input
=====================  ===================================================================================

(Flink: ``WindowOperator.isElementLate``, ``sideOutput``.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from minishuffle.dataflow.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Emit,
    Mark,
    Reached,
    Used,
    Watermark,
)
from minishuffle.dataflow.operators.chained import OnError, RecordOperator
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import event_times
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.exchange.batch import Batch, Mask
from minishuffle.operators.state_parts import StatePart
from minishuffle.operators.task_state import Holding, Records, TaskState

__all__ = ["EventTimeOperator", "EventTimeProgress", "behind"]


@dataclass(slots=True)
class EventTimeProgress:
    """How far event time is at an input of an operator; microseconds."""

    watermark: int = BEGINNING_OF_TIME
    """Never goes back."""
    own: int = BEGINNING_OF_TIME
    """The watermark of the producer that the records at hand come from, where that decides."""

    @property
    def reached(self) -> int:
        """What decides whether a record is late."""
        return max(self.watermark, self.own)

    def advance(self, watermark: int) -> None:
        """Be at least so far."""
        self.watermark = max(watermark, self.watermark)

    def follow(self, own: int) -> None:
        """The records to come are those of a producer that is so far."""
        self.own = own


def behind(batch: Batch, progress: EventTimeProgress) -> Mask | None:
    """Which records have times at or before what is reached; None: none of them."""
    assert batch.times is not None
    marks: Mask = batch.times <= progress.reached
    return marks if marks.any() else None


class EventTimeOperator(RecordOperator):
    """An operator of one input, which takes the records that are not late, and moves with the watermark. A
    subclass says what it does then.

    Args:
        time: where the records' times stand.
        late: what becomes of late records.
        fn: the function of the user that is called for each record; None: there is none.
    """

    keeps_rows = True

    def __init__(self, time: EventTime, late: Late, fn: Any, on_error: OnError) -> None:
        super().__init__(fn, on_error)
        self.by_channel = time.each
        self.progress = EventTimeProgress()
        self._time = time
        self._lateness = late

    # --- what a subclass does -----------------------------------------------------------------------

    def late(self, batch: Batch, progress: EventTimeProgress) -> Mask | None:
        """Which records are late; None: none of them. The batch has the records' times."""
        raise NotImplementedError

    def take(self, batch: Batch, emit: Emit) -> None:
        """Take records, at least one, with their times, none of which is late."""
        raise NotImplementedError

    def on_watermark(self, watermark: int, emit: Emit) -> int:
        """Event time has come so far; the watermark to pass on, behind what is emitted now."""
        raise NotImplementedError

    # --- records and marks --------------------------------------------------------------------------

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        times = event_times(self._time, batch)
        if not len(times):
            return
        timed = Batch(batch.payload, batch.keys, times)
        late = self.late(timed, self.progress)
        if late is not None:
            self._lateness.take(batch.mask(late), self.context, emit)
            timed = timed.mask(~late)
        if len(timed):
            self.take(timed, emit)

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if isinstance(mark, Reached):
            self.progress.follow(mark.time)
        elif isinstance(mark, Watermark):
            self.progress.advance(mark.time)
            emit(Watermark(self.on_watermark(mark.time, emit)))
        else:
            emit(mark)

    def finish(self, emit: Emit) -> None:
        self.progress.advance(END_OF_TIME)
        self.on_watermark(END_OF_TIME, emit)

    # --- what the plan asks -------------------------------------------------------------------------

    def takes_times(self, input: int, used: Used) -> bool:
        return self._time.is_beside

    def sides_to_read(self) -> Mapping[str, str]:
        return self._lateness.sides("late")

    # --- state --------------------------------------------------------------------------------------

    def holdings(self) -> dict[str, Holding]:
        """What is no value of a key."""
        return {"reached": Holding("all", self._write_reached, self._read_reached)}

    def write_state(self) -> Iterator[StatePart]:
        return TaskState(self.holdings()).write(self.context.index)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        TaskState(self.holdings()).read(parts)

    def _write_reached(self) -> Iterator[Records]:
        yield Records(pa.RecordBatch.from_pydict({"watermark": [self.progress.watermark]}))

    def _read_reached(self, records: Records) -> None:
        self.progress.advance(max(records.payload["watermark"].to_pylist()))
