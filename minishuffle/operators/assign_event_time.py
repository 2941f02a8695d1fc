"""Event time: watermarks made of the records' times. (Flink: ``WatermarkStrategy``.)"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import numpy as np

from minishuffle.exchange.batch import Batch
from minishuffle.limits import WATERMARK_SECONDS_MIN
from minishuffle.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Active,
    Emit,
    Idle,
    Mark,
    SplitMark,
    TaskContext,
    Watermark,
)
from minishuffle.operators.batch_times import Vector, event_times
from minishuffle.operators.chained import ChainedOperator, ForgivingOperator, OnError
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.row_conversion import rows_of
from minishuffle.operators.state_parts import StatePart
from minishuffle.operators.task_state import Holding, Records, TaskState

__all__ = ["AssignEventTime", "HoldTimes", "Watermarks"]

Watermarks: TypeAlias = Literal["batch", "each"]
"""When watermarks go out: after a batch, at most every ``WATERMARK_SECONDS_MIN``; after each record."""

_NO_SPLIT = -1
"""The only split of a stream that does not come straight from a source."""


class AssignEventTime(ForgivingOperator):
    """Passes records on, and after them ``Watermark(greatest time - out_of_order - 1)``.

    The times that a function gives are put beside the rows: it is called once for a row.

    The greatest time is kept for each split of the source; the least of those that are open counts,
    and one without a record yet holds all back. When none is open, the greatest of all counts. A source
    that says that it has no split for this subtask makes it :class:`Idle` until one is open; one that says
    that all of them are idle, until one of them has a record.
    Watermarks and idleness from before are not passed on: these replace them.

    Args:
        time: where the records' times stand.
        out_of_order: microseconds by which a record may come after one of a later time.
        idle_after: seconds without a record after which the stream is :class:`Idle`; None: never.
        watermarks: see :data:`Watermarks`.
        on_error: what becomes of records without a time, or for which the function of ``time`` raises.
        gives_times: something reads the times beside what it emits.
    """

    name = "event_time"
    by_split = True

    def __init__(
        self,
        time: EventTime,
        out_of_order: int = 0,
        idle_after: float | None = None,
        watermarks: Watermarks = "batch",
        on_error: OnError = "fail",
        *,
        gives_times: bool = True,
    ) -> None:
        super().__init__(on_error)
        self.time = time
        self.out_of_order = out_of_order
        self.idle_after = idle_after
        self.each = watermarks == "each"
        self._gives_times = gives_times and (time.is_beside or time.fn is not None)
        self._open: dict[int, int] = {}
        """The greatest time of each split that has not ended."""
        self._before: dict[int, int] = {}
        """The same of splits read by the attempts before. Some may belong to this subtask now."""
        self._resting: set[int] = set()
        """Those of the open splits that are idle."""
        self._current = _NO_SPLIT
        self._greatest = BEGINNING_OF_TIME
        self._told = BEGINNING_OF_TIME
        self._told_at = -np.inf
        self._idle = False

    def open(self, context: TaskContext) -> None:
        super().open(context)
        self._last_record_at = context.now()

    # --- records ---------------------------------------------------------------------------------

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if not len(batch.payload):
            return
        self._resting.discard(self._current)
        batch, times = self._timed(batch)
        if not len(times):
            return
        if self._idle:
            self._idle = False
            emit(Active())
        if self.idle_after is not None:
            self._last_record_at = self.context.now()
        if batch.times is not None or self._gives_times:
            batch = Batch(batch.payload, batch.keys, times if self._gives_times else None)
        if self.each:
            self._emit_each(batch, times, emit)
        else:
            emit(batch)
            self._take(int(times.max()))
            self._tell_in_time(emit)

    def _timed(self, batch: Batch) -> tuple[Batch, Vector]:
        """The records that have a time, and the times."""
        first = self._greatest == BEGINNING_OF_TIME and self.on_error == "fail"
        try:
            return batch, event_times(self.time, batch, first=first)
        except Exception:
            if self.on_error == "fail":
                raise
        has_time = np.ones(len(batch), np.bool_)
        for number in range(len(batch)):
            one = batch.slice(number, number + 1)
            try:
                event_times(self.time, one)
            except Exception as error:
                has_time[number] = False
                self.drop(error, rows_of(one)[0])
        batch = batch.mask(has_time)
        return batch, event_times(self.time, batch)

    def _take(self, greatest: int) -> None:
        self._open[self._current] = max(greatest, self._open.get(self._current, BEGINNING_OF_TIME))
        self._greatest = max(self._greatest, greatest)

    def _emit_each(self, batch: Batch, times: Vector, emit: Emit) -> None:
        """Cut the batch after each record that brings the watermark forward."""
        others = [time for split, time in self._waited_for().items() if split != self._current]
        reached = np.maximum.accumulate(times)
        np.maximum(reached, self._open.get(self._current, BEGINNING_OF_TIME), out=reached)
        held = np.minimum(reached, min(others)) if others else reached
        held = np.maximum(held, self._told_time())
        advances = held > np.concatenate(([self._told_time()], held[:-1]))
        start = 0
        for end in (np.flatnonzero(advances) + 1).tolist():
            emit(batch.slice(start, end))
            self._take(int(reached[end - 1]))
            self._tell(emit)
            start = end
        if start < len(batch):
            emit(batch.slice(start, len(batch)))
        self._take(int(reached[-1]))

    # --- watermarks ------------------------------------------------------------------------------

    def _reached(self) -> int:
        """The time that all open splits have reached which are not idle; if all are, the greatest of them, in
        whatever order they came to be."""
        if self._open and len(self._resting) == len(self._open):
            return max(self._open.values())
        return min(self._waited_for().values()) if self._open else self._greatest

    def _waited_for(self) -> dict[int, int]:
        """The greatest times of the open splits that are not idle."""
        if not self._resting:
            return self._open
        return {split: time for split, time in self._open.items() if split not in self._resting}

    def _told_time(self) -> int:
        """The event time, in microseconds, that all open splits had reached at the last watermark;
        BEGINNING_OF_TIME before the first."""
        told = self._told
        return BEGINNING_OF_TIME if told == BEGINNING_OF_TIME else told + self.out_of_order + 1

    def _due_watermark(self) -> int | None:
        """The watermark to emit, if it has advanced."""
        reached = self._reached()
        if reached == BEGINNING_OF_TIME:
            return None
        watermark = max(reached - self.out_of_order - 1, BEGINNING_OF_TIME)
        return watermark if watermark > self._told else None

    def _tell(self, emit: Emit) -> None:
        watermark = self._due_watermark()
        if watermark is not None:
            self._told = watermark
            emit(Watermark(watermark))
            if self._idle:  # A split has ended; that makes nobody wait for the others.
                emit(Idle())

    def _tell_in_time(self, emit: Emit) -> None:
        now = self.context.now()
        if self._due_watermark() is not None and not (
            self._told_at <= now < self._told_at + WATERMARK_SECONDS_MIN
        ):
            self._told_at = now
            self._tell(emit)

    # --- marks and the clock ---------------------------------------------------------------------

    def advance(self, watermark: int, emit: Emit) -> None:
        """Emit a watermark that does not follow from records, unless it has come as far."""
        if watermark > self._told:
            self._told = watermark
            self._idle = False
            emit(Watermark(watermark))

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if isinstance(mark, SplitMark):
            self._open.pop(_NO_SPLIT, None)  # In a state that was written where there were none.
        match mark:
            case SplitMark(split, "open"):
                self._open.setdefault(split, self._before.get(split, BEGINNING_OF_TIME))
                self._last_record_at = self.context.now()
                if self._idle:
                    self._idle = False
                    emit(Active())
            case SplitMark(_, "none"):
                self._tell(emit)
                if not self._idle:
                    self._idle = True
                    emit(Idle())
            case SplitMark(split, "current"):
                self._current = split
            case SplitMark(split, "idle"):
                self._tell(emit)
                self._resting.add(split)
                self._tell_of_splits(emit)
            case SplitMark(split, "done"):
                self._open.pop(split, None)
                self._resting.discard(split)
                self._tell_of_splits(emit)
            case Watermark(time) if time == END_OF_TIME:
                self._tell(emit)
                self._told = END_OF_TIME
                emit(mark)

    def _tell_of_splits(self, emit: Emit) -> None:
        """One of them is waited for no longer."""
        if self.each:
            self._tell(emit)
        else:
            self._tell_in_time(emit)
        if self._resting and len(self._resting) == len(self._open) and not self._idle:
            self._idle = True
            emit(Idle())

    def _task_state(self) -> TaskState:
        """How far each split is. Every subtask reads all: sources deal splits out, no key does."""
        return TaskState({"splits": Holding("all", self._write_splits, self._read_splits)})

    def _write_splits(self) -> Iterator[Records]:
        yield Records(list(self._open.items()))

    def _read_splits(self, records: Records) -> None:
        """Without splits the least time of all subtasks counts."""
        for split, time in records.payload:
            if split == _NO_SPLIT:
                self._open[split] = min(time, self._open.get(split, time))
            else:
                self._before[split] = time

    def write_state(self) -> Iterator[StatePart]:
        return self._task_state().write(self.context.index)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        self._task_state().read(parts)

    def deadline(self) -> float | None:
        times = []
        if self._due_watermark() is not None:
            times.append(self._told_at + WATERMARK_SECONDS_MIN)
        if self.idle_after is not None and not self._idle and self._told < END_OF_TIME:
            times.append(self._last_record_at + self.idle_after)
        return min(times, default=None)

    def on_clock(self, now: float, emit: Emit) -> None:
        idle_at = np.inf if self.idle_after is None else self._last_record_at + self.idle_after
        if now >= self._told_at + WATERMARK_SECONDS_MIN or now >= idle_at:
            self._told_at = now
            self._tell(emit)
        if now >= idle_at and not self._idle and self._told < END_OF_TIME:
            self._idle = True
            emit(Idle())


class HoldTimes(ChainedOperator):
    """Puts the times of rows beside them, where functions that follow may leave out or change what shows
    them. ``time`` says where they stand; None: nothing reads them."""

    name = "event_time"

    def __init__(self, time: EventTime | None) -> None:
        self._time = time

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if self._time is not None:
            batch = Batch(batch.payload, batch.keys, event_times(self._time, batch))
        emit(batch)
