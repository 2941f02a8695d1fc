"""Tumbling windows of event time: which are open, which records come too late for theirs.

The window of size s with a record of time t begins at the greatest multiple of s that is not above t.
(Flink: ``TumblingEventTimeWindows``, ``WindowOperator``, without allowed lateness.)
"""

from __future__ import annotations

from typing import Final, TypeAlias

import pyarrow as pa

from minishuffle.dataflow.operators.base import BEGINNING_OF_TIME, Batch, Emit, TaskContext
from minishuffle.dataflow.operators.keyedstate import StatePart, greatest
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import Vector, event_times
from minishuffle.dataflow.operators.timeheap import TimeHeap
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.exchange.gather import chosen

__all__ = ["OpenWindows", "Starts"]

Starts: TypeAlias = Vector
"""Where each record's window begins, microseconds since 1970."""
_DROPPED: Final = Late()


class OpenWindows:
    """The windows that hold records and have not fired.

    A window fires when the watermark has reached its last microsecond; a record whose window has fired,
    or would have, is late.

    Args:
        time: where the records' times stand.
        size: of each window, microseconds.
        late: what becomes of late records.
    """

    def __init__(self, time: EventTime, size: int, late: Late = _DROPPED) -> None:
        self.time = time
        self.size = size
        self.late = late
        self.own = BEGINNING_OF_TIME
        """The watermark of the producer that the records at hand come from, where that decides."""
        self._watermark = BEGINNING_OF_TIME
        self._open: TimeHeap[None] = TimeHeap()
        """By start."""

    def admit(self, batch: Batch, context: TaskContext, emit: Emit) -> tuple[Batch, Starts]:
        """The records that are in time, and where their windows begin."""
        times = event_times(self.time, batch)
        starts = times - times % self.size
        closed = max(self._watermark, self.own)
        late = starts <= max(self._last_start(closed), BEGINNING_OF_TIME)
        if not late.any():
            return batch, starts
        self.late.take(chosen(batch, late), context, emit)
        return chosen(batch, ~late), starts[~late]

    def opened(self, start: int) -> None:
        """A window has its first record."""
        self._open.push(start, None)

    def due(self, watermark: int) -> list[int]:
        """The starts of the windows that fire at ``watermark``, ascending; they are open no more."""
        self._watermark = max(watermark, self._watermark)
        return [start for start, _ in self._open.take_until(self._last_start(self._watermark))]

    def write_state(self) -> StatePart:
        """How far windows have fired."""
        return StatePart("fired", pa.RecordBatch.from_pydict({"watermark": [self._watermark]}))

    def read_state(self, part: StatePart) -> None:
        (self._watermark,) = greatest(part, [self._watermark], "watermark")

    def _last_start(self, watermark: int) -> int:
        """The latest start of a window that has fired at ``watermark``."""
        return watermark - self.size + 1
