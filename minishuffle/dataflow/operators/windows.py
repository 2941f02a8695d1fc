"""Windows of event time: which are open, which records come too late for theirs.

(Flink: ``WindowOperator``, ``EventTimeTrigger``, ``ContinuousEventTimeTrigger``.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Emit,
    Mark,
    Reached,
    TaskContext,
    Used,
    Watermark,
)
from minishuffle.dataflow.operators.chained import ChainedOperator
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import Vector, event_times
from minishuffle.dataflow.operators.timeheap import TimeHeap
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.dataflow.operators.windowassigner import WindowAssigner
from minishuffle.exchange.batch import Batch, Mask
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.state_parts import StatePart, greatest

__all__ = ["OpenWindows", "Panes", "Starts", "WindowOperator"]

Starts: TypeAlias = Vector
"""Where each record's window begins, microseconds since 1970."""
_DROPPED: Final = Late()


@dataclass(frozen=True, slots=True)
class Panes:
    """Values of a window before the last ones, for the side output ``tag`` ("": none); microseconds.

    A window takes records until the watermark is ``lateness`` past its end. What has changed in it is shown
    at the first watermark in each ``early`` of it (0: not before its end), at its end, and at each watermark
    after that.
    """

    tag: str = ""
    lateness: int = 0
    early: int = 0


_NO_PANES: Final = Panes()


class OpenWindows:
    """The windows that hold records and have not fired.

    A window fires when the watermark has reached its last microsecond, or is so much past it as records may
    be late; a record whose window has fired, or would have, is late.

    Args:
        time: where the records' times stand.
        assigner: which windows a record is in.
        late: what becomes of records all of whose windows have fired.
    """

    def __init__(
        self, time: EventTime, assigner: WindowAssigner, late: Late = _DROPPED, panes: Panes = _NO_PANES
    ) -> None:
        self.time = time
        self.assigner = assigner
        self.late = late
        self.panes = panes
        self.own = BEGINNING_OF_TIME
        """The watermark of the producer that the records at hand come from, where that decides."""
        self._watermark = BEGINNING_OF_TIME
        self._open: TimeHeap[int] = TimeHeap()
        """Starts by last microsecond."""
        self._to_show: TimeHeap[int] = TimeHeap()
        """Starts of windows that have changed, by the watermark at which that is shown."""
        self._changed: set[int] = set()
        """These starts."""

    def admit(self, batch: Batch, context: TaskContext, emit: Emit) -> Iterator[tuple[Batch, Starts]]:
        """The records that are in time, and where their windows begin: each as often as it is in windows, in
        the order in which they came; as many at a time as make a batch."""
        times = event_times(self.time, batch)
        step = max(1, BATCH_ROWS_MAX // self.assigner.per_record)
        for first in range(0, len(times), step):
            some = batch if len(times) <= step else batch.slice(first, min(first + step, len(times)))
            yield self._placed(some, times[first : first + step], context, emit)

    def _placed(self, batch: Batch, times: Vector, context: TaskContext, emit: Emit) -> tuple[Batch, Starts]:
        closed = max(self._reached(max(self._watermark, self.own)), BEGINNING_OF_TIME)
        placed: list[tuple[Starts, Mask]] = []
        for starts, within in self.assigner.assigned(times):
            late = self.assigner.ends(starts) - 1 <= closed
            if not placed and late.any():  # Windows fire in order: with its latest one all of a record have.
                self.late.take(batch.mask(late), context, emit)
            placed.append((starts, ~late if within is None else within & ~late))
        if len(placed) == 1:
            ((starts, kept),) = placed
            return (batch, starts) if kept.all() else (batch.mask(kept), starts[kept])
        rows = np.concatenate([np.flatnonzero(kept) for _, kept in placed])
        order = np.argsort(rows, kind="stable")
        return batch.take(rows[order]), np.concatenate([starts[kept] for starts, kept in placed])[order]

    def opened(self, start: int) -> None:
        """A window has its first record."""
        self._open.push(self.assigner.last(start), start)

    def due(self, watermark: int) -> list[int]:
        """The starts of the windows that fire at ``watermark``, ascending; they are open no more."""
        self._watermark = max(watermark, self._watermark)
        return [start for _, start in self._open.take_until(self._reached(self._watermark))]

    def changed(self, start: int) -> None:
        """A window has a value that was not shown; for windows with panes."""
        if start not in self._changed:
            self._changed.add(start)
            self._to_show.push(self._next_pane(start), start)

    def _next_pane(self, start: int) -> int:
        """The first watermark from now on at which a window is shown."""
        last, early, reached = self.assigner.last(start), self.panes.early, self._watermark
        if reached >= last:
            return reached + 1
        if not early:
            return last
        return min(last, start - 1 + (max(reached - start + 1, 0) // early + 1) * early)

    def to_show(self) -> Iterator[int]:
        """The starts of windows of which a pane is due; some may have fired."""
        for _, start in self._to_show.take_until(self._watermark):
            self._changed.discard(start)
            yield start

    def passed_on(self, watermark: int) -> int:
        """The watermark behind the windows: what they emit has the time of their end."""
        behind = max(watermark - self.panes.lateness, BEGINNING_OF_TIME)
        return watermark if watermark == END_OF_TIME else behind

    def write_state(self) -> StatePart:
        """How far windows have fired."""
        return StatePart("fired", pa.RecordBatch.from_pydict({"watermark": [self._watermark]}))

    def read_state(self, part: StatePart) -> None:
        (self._watermark,) = greatest(part, [self._watermark], "watermark")

    def _reached(self, watermark: int) -> int:
        """The last microsecond of the latest windows that have fired at ``watermark``."""
        return watermark - self.panes.lateness


class WindowOperator(ChainedOperator):
    """What windows of rows and of columns share: how marks move them."""

    name = "window"
    keeps_rows = True
    _windows: OpenWindows

    def fire(self, starts: list[int], emit: Emit) -> None:
        """Emit the values of these windows and forget them."""
        raise NotImplementedError

    def show(self, start: int, emit: Emit) -> None:
        """Emit what has changed in a window, if it is open, to the side output."""
        raise NotImplementedError

    def takes_times(self, input: int, used: Used) -> bool:
        return self._windows.time.is_beside

    def sides_to_read(self) -> Mapping[str, str]:
        """Not the panes: what they show goes out at last."""
        return self._windows.late.sides("late")

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if isinstance(mark, Reached):
            self._windows.own = mark.time
        elif isinstance(mark, Watermark):
            self._advance(mark.time, emit)
            emit(Watermark(self._windows.passed_on(mark.time)))
        else:
            emit(mark)

    def finish(self, emit: Emit) -> None:
        self._advance(END_OF_TIME, emit)

    def _advance(self, watermark: int, emit: Emit) -> None:
        self.fire(self._windows.due(watermark), emit)
        for start in self._windows.to_show():
            self.show(start, emit)
