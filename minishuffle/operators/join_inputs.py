"""Both inputs of a join on event time: how far they are, and which of their records are late.

While one input is idle and the other is not, it counts as far as the other; what it still sends of that time
is late. (Flink: ``IntervalJoinOperator``, where a record is late by the lesser watermark of both.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Active,
    Emit,
    Idle,
    Mark,
    Reached,
    Used,
    Watermark,
)
from minishuffle.dataflow.operators.chained import ChainedOperator
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import TIME_MAX, TIME_MIN, event_times
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.exchange.batch import Batch, Mask, Times
from minishuffle.operators.event_time_operator import EventTimeProgress, behind
from minishuffle.operators.state_parts import StatePart
from minishuffle.operators.task_state import Holding, Records, TaskState

__all__ = [
    "DROPPED",
    "LEFT",
    "RIGHT",
    "SIDES",
    "Bounds",
    "How",
    "JoinProgress",
    "TimedJoin",
    "record_times",
]

How: TypeAlias = Literal["inner", "left", "right", "full", "semi", "anti"]

LEFT, RIGHT = 0, 1
SIDES: Final = ("left", "right")
DROPPED: Final = (Late(), Late())


class Bounds(NamedTuple):
    """How far before and after a left record the right ones are that match it; microseconds."""

    before: int
    after: int

    def of(self, input: int) -> tuple[int, int]:
        """How far before and after a record of ``input`` its partners are."""
        return (self.before, self.after) if input == LEFT else (self.after, self.before)


class JoinProgress:
    """The watermarks of both inputs (0 is left, 1 is right)."""

    def __init__(self, how: How, bounds: Bounds) -> None:
        self.how = how
        self.bounds = Bounds(*(min(bound, TIME_MAX - TIME_MIN) for bound in bounds))
        self.inputs = (EventTimeProgress(), EventTimeProgress())
        self._last = [BEGINNING_OF_TIME, BEGINNING_OF_TIME]
        """What each input had reached before its end."""
        self._idle = [False, False]

    @property
    def watermarks(self) -> tuple[int, int]:
        """Those of the left and of the right input."""
        left, right = self.inputs
        return left.watermark, right.watermark

    @property
    def ended(self) -> bool:
        """Whether both inputs have ended."""
        return self.watermarks == (END_OF_TIME, END_OF_TIME)

    @property
    def idle(self) -> bool:
        """Whether there is nothing but idle and ended inputs."""
        return not self.ended and all(
            idle or time == END_OF_TIME for idle, time in zip(self._idle, self.watermarks, strict=True)
        )

    def take(self, mark: Mark, input: int) -> None:
        """A watermark, idleness or its end has come."""
        self._idle[input] = isinstance(mark, Idle)
        if isinstance(mark, Watermark):
            self.inputs[input].advance(mark.time)
            if mark.time != END_OF_TIME:
                self._last[input] = self.inputs[input].watermark
        for one, other in ((LEFT, RIGHT), (RIGHT, LEFT)):
            watermark = self.inputs[other].watermark
            if self._idle[one] and not self._idle[other] and watermark != END_OF_TIME:
                self.inputs[one].advance(watermark)

    def limit(self, input: int) -> int:
        """Records of ``input`` with this time or an earlier one are held no more."""
        other = self.inputs[1 - input].watermark
        return other if other in (BEGINNING_OF_TIME, END_OF_TIME) else other - self.bounds.of(input)[1]

    def watermark(self, earliest: tuple[int, int]) -> int:
        """What holds for the join's output; ``earliest`` of the times held on each side.

        A pair has the greater time of both, and one of them is yet to come. Other joins than inner ones emit
        records that are held, with their own times.
        """
        held_left, held_right = earliest
        time = min(self.watermarks)
        if self.how not in ("inner", "right"):
            time = min(time, held_left - 1)
        if self.how in ("full", "right"):
            time = min(time, held_right - 1)
        return END_OF_TIME if self.ended else time

    @property
    def last(self) -> int:
        """What the output has reached when nothing comes any more."""
        return max(self._last)

    def write(self) -> Iterator[Records]:
        """How far both inputs are."""
        columns = {"reached": pa.array(self.watermarks), "last": pa.array(self._last)}
        yield Records(pa.RecordBatch.from_pydict(columns))

    def read(self, records: Records) -> None:
        """Be at least as far as a subtask that has written this."""
        reached, last = (column.to_pylist() for column in records.payload)
        for input, own in enumerate(self.inputs):
            own.advance(reached[input])
            self._last[input] = max(self._last[input], last[input])


class TimedJoin(ChainedOperator):
    """What joins on event time share: late records, watermarks, and which state they write.

    Args:
        times: where the times of the left and of the right records stand; both ``is_none`` if there are none.
        lateness: what becomes of late records, left and right ones.
    """

    keeps_rows = True
    shares = True

    def __init__(
        self, how: How, bounds: Bounds, times: tuple[EventTime, EventTime], lateness: tuple[Late, Late]
    ) -> None:
        self.times = times
        self.lateness = lateness
        self.progress = JoinProgress(how, bounds)
        self.by_channel = any(time.each for time in times)
        self._told = BEGINNING_OF_TIME
        self._told_idle = False

    # --- what a subclass does -----------------------------------------------------------------------

    def join(self, batch: Batch, input: int, emit: Emit) -> None:
        """Take records that are in time, at least one, with their times."""
        raise NotImplementedError

    def let_go(self, input: int, limit: int, emit: Emit) -> None:
        """Forget what a side holds up to ``limit``; emit what goes out by then."""
        raise NotImplementedError

    def earliest(self, input: int) -> int:
        """The least time that a side holds; ``END_OF_TIME`` if it holds nothing."""
        raise NotImplementedError

    def write_side(self, input: int) -> Iterator[Records]:
        """The records that a side holds."""
        raise NotImplementedError

    def read_side(self, input: int, records: Records) -> None:
        """Hold records that were written so."""
        raise NotImplementedError

    # --- records and marks --------------------------------------------------------------------------

    def late(self, batch: Batch, progress: EventTimeProgress) -> Mask | None:
        """Which records of an input that has come so far are late; None: none of them."""
        return behind(batch, progress)

    def takes_times(self, input: int, used: Used) -> bool:
        return self.times[input].is_beside

    def sides_to_read(self) -> Mapping[str, str]:
        left, right = self.lateness
        return {**left.sides("late"), **right.sides("late_right")}

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = len(batch.payload)
        if not rows:
            return
        time = self.times[input]
        times = np.zeros(rows, dtype=np.int64) if time.is_none else event_times(time, batch)
        timed = Batch(batch.payload, batch.keys, times)
        late = self.late(timed, self.progress.inputs[input])
        if late is not None:
            self.lateness[input].take(batch.mask(late), self.context, emit)
            timed = timed.mask(~late)
        if len(timed):
            self.join(timed, input, emit)

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        progress = self.progress
        if isinstance(mark, Reached):
            progress.inputs[input].follow(mark.time if self.times[input].each else BEGINNING_OF_TIME)
            return
        if not isinstance(mark, Watermark | Idle | Active):
            emit(mark)
            return
        progress.take(mark, input)
        for side in (LEFT, RIGHT):
            self.let_go(side, progress.limit(side), emit)
        time = progress.watermark((self.earliest(LEFT), self.earliest(RIGHT)))
        if time == END_OF_TIME and progress.last > self._told:
            self._told = progress.last
            emit(Watermark(progress.last))
        if time > self._told:
            self._told, self._told_idle = time, False
            emit(Watermark(time))
        if progress.idle != self._told_idle:
            self._told_idle = progress.idle
            emit(Idle() if progress.idle else Active())

    # --- state --------------------------------------------------------------------------------------

    def write_state(self) -> Iterator[StatePart]:
        return self._task_state().write(self.context.index)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        self._task_state().read(parts)

    def _task_state(self) -> TaskState:
        """How far event time is, for all subtasks, and both sides' records by key."""
        held = {"progress": Holding("all", self.progress.write, self.progress.read)}
        for input, name in enumerate(SIDES):
            held[name] = Holding("key", partial(self.write_side, input), partial(self.read_side, input))
        return TaskState(held)


def record_times(batch: Batch) -> Times:
    """The times of records that are joined, which all have one."""
    assert batch.times is not None
    return batch.times
