"""Tumbling windows of event time: which are open, which records come too late for theirs.

The window of size s with a record of time t begins at the greatest multiple of s that is not above t.
(Flink: ``TumblingEventTimeWindows``, ``WindowOperator``, without allowed lateness.)
"""

from __future__ import annotations

import heapq
from typing import TypeAlias

import numpy as np

from minishuffle.dataflow.operators.base import BEGINNING_OF_TIME, Batch, Emit, KeyedRows, Side, TaskContext
from minishuffle.dataflow.operators.moments import Vector, event_times
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.exchange.gather import chosen

__all__ = ["OpenWindows", "Starts"]

Starts: TypeAlias = Vector
"""Where each record's window begins, microseconds since 1970."""


class OpenWindows:
    """The windows that hold records and have not fired.

    A window fires when the watermark has reached its last microsecond; a record whose window has fired,
    or would have, is late.

    Args:
        time: where the records' times stand.
        size: of each window, microseconds.
        late_tag: the side output of late records; None: they are dropped.
    """

    def __init__(self, time: EventTime, size: int, late_tag: str | None) -> None:
        self.time = time
        self.size = size
        self.late_tag = late_tag
        self._watermark = BEGINNING_OF_TIME
        self._starts: list[int] = []
        """A heap."""

    def admit(self, batch: Batch, context: TaskContext, emit: Emit) -> tuple[Batch, Starts]:
        """The records that are in time, and where their windows begin; late ones are counted."""
        times = event_times(self.time, batch)
        starts = times - times % self.size
        late = starts <= max(self._last_start(self._watermark), BEGINNING_OF_TIME)
        count = int(np.count_nonzero(late))
        if not count:
            return batch, starts
        context.counters.records_late += count
        if self.late_tag is not None:
            set_aside = chosen(batch, late)
            emit(Side(self.late_tag, set_aside.rows if isinstance(set_aside, KeyedRows) else set_aside))
        return chosen(batch, ~late), starts[~late]

    def opened(self, start: int) -> None:
        """A window has its first record."""
        heapq.heappush(self._starts, start)

    def due(self, watermark: int) -> list[int]:
        """The starts of the windows that fire at ``watermark``, ascending; they are open no more."""
        self._watermark = max(watermark, self._watermark)
        last, fired = self._last_start(self._watermark), []
        while self._starts and self._starts[0] <= last:
            fired.append(heapq.heappop(self._starts))
        return fired

    def _last_start(self, watermark: int) -> int:
        """The latest start of a window that has fired at ``watermark``."""
        return watermark - self.size + 1
