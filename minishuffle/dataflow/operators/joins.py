"""Interval joins on event time: how far both sides are, what is late, what need not be held any more.

A left record matches the right ones of its key whose times are at most ``before`` before and at most
``after`` after its own. A record is held until the other side's watermark is so much past it that nothing
which could match comes any more. Without event time records are held until both sides have ended.
(Flink: ``IntervalJoinOperator``; there without outer joins, and late by the lesser watermark of both.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Active,
    Batch,
    Emit,
    Idle,
    Mark,
    Reached,
    Watermark,
)
from minishuffle.dataflow.operators.chained import ChainedOperator
from minishuffle.dataflow.operators.keyedstate import StatePart, greatest
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import TIME_MAX, TIME_MIN, Vector, event_times
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.exchange.gather import chosen

__all__ = ["Bounds", "How", "IntervalJoin", "JoinProgress"]

How: TypeAlias = Literal["inner", "left", "right", "full", "semi", "anti"]
Mask: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"

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
    """The watermarks of both inputs (0 is left, 1 is right).

    While one input is idle and the other is not, it counts as far as the other; what it still sends of
    that time is late.
    """

    def __init__(self, how: How, bounds: Bounds) -> None:
        self.how = how
        self.bounds = Bounds(*(min(bound, TIME_MAX - TIME_MIN) for bound in bounds))
        self.reached = [BEGINNING_OF_TIME, BEGINNING_OF_TIME]
        self._last = [BEGINNING_OF_TIME, BEGINNING_OF_TIME]
        """What each input had reached before its end."""
        self._idle = [False, False]

    @property
    def ended(self) -> bool:
        """Whether both inputs have ended."""
        return self.reached[LEFT] == self.reached[RIGHT] == END_OF_TIME

    @property
    def idle(self) -> bool:
        """Whether there is nothing but idle and ended inputs."""
        return not self.ended and all(
            idle or time == END_OF_TIME for idle, time in zip(self._idle, self.reached, strict=True)
        )

    def take(self, mark: Mark, input: int) -> None:
        """A watermark, idleness or its end has come."""
        self._idle[input] = isinstance(mark, Idle)
        if isinstance(mark, Watermark):
            self.reached[input] = max(mark.time, self.reached[input])
            if mark.time != END_OF_TIME:
                self._last[input] = self.reached[input]
        for one, other in ((LEFT, RIGHT), (RIGHT, LEFT)):
            if self._idle[one] and not self._idle[other] and self.reached[other] != END_OF_TIME:
                self.reached[one] = max(self.reached[one], self.reached[other])

    def limit(self, input: int) -> int:
        """Records of ``input`` with this time or an earlier one are held no more."""
        other = self.reached[1 - input]
        return other if other in (BEGINNING_OF_TIME, END_OF_TIME) else other - self.bounds.of(input)[1]

    def watermark(self, earliest: tuple[int, int]) -> int:
        """What holds for the join's output; ``earliest`` of the times held on each side.

        A pair has the greater time of both, and one of them is yet to come. Other joins than inner ones emit
        records that are held, with their own times.
        """
        held_left, held_right = earliest
        time = min(self.reached)
        if self.how not in ("inner", "right"):
            time = min(time, held_left - 1)
        if self.how in ("full", "right"):
            time = min(time, held_right - 1)
        return END_OF_TIME if self.ended else time

    def write_state(self) -> StatePart:
        """How far both inputs are."""
        return StatePart(
            "progress", pa.RecordBatch.from_pydict({"reached": self.reached, "last": self._last})
        )

    def read_state(self, part: StatePart) -> None:
        self.reached = greatest(part, self.reached, "reached")
        self._last = greatest(part, self._last, "last")

    @property
    def last(self) -> int:
        """What the output has reached when nothing comes any more."""
        return max(self._last)


class IntervalJoin(ChainedOperator):
    """What joins of rows and of Arrow share: late records, marks, and when to let go.

    Args:
        times: where the times of the left and of the right records stand; both ``is_none`` if there are none.
        late: what becomes of late records, left and right ones.
    """

    name = "join"
    keeps_rows = True
    shares = True

    def __init__(
        self,
        how: How,
        bounds: Bounds,
        times: tuple[EventTime, EventTime],
        late: tuple[Late, Late],
    ) -> None:
        self.how = how
        self.times = times
        self.late = late
        self.progress = JoinProgress(how, bounds)
        self.by_channel = any(time.each for time in times)
        self._own = [BEGINNING_OF_TIME, BEGINNING_OF_TIME]
        """By input the watermark of the producer that the records at hand come from, where that decides."""
        self._told = BEGINNING_OF_TIME
        self._told_idle = False

    # --- what a subclass does -----------------------------------------------------------------------

    def take(self, batch: Batch, times: Vector, input: int, emit: Emit) -> None:
        """Join records that are in time."""
        raise NotImplementedError

    def let_go(self, input: int, limit: int, emit: Emit) -> None:
        """Forget the records of a side up to ``limit``; emit those that go out without a partner."""
        raise NotImplementedError

    def earliest(self, input: int) -> int:
        """The least time that a side holds; ``END_OF_TIME`` if it holds nothing."""
        raise NotImplementedError

    def write_sides(self) -> Iterator[StatePart]:
        """The records that are held, in parts "left" and "right"."""
        raise NotImplementedError

    def read_side(self, part: StatePart, input: int) -> None:
        """Hold records that were written so."""
        raise NotImplementedError

    def goes_unmatched(self, input: int) -> bool:
        """Whether records of a side go out without a partner."""
        return self.how in (("left", "full", "anti") if input == LEFT else ("right", "full"))

    def write_state(self) -> Iterator[StatePart]:
        yield self.progress.write_state()
        yield from self.write_sides()

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            if part.name == "progress":
                self.progress.read_state(part)
            else:
                self.read_side(part, SIDES.index(part.name))

    # --- records and marks --------------------------------------------------------------------------

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if not len(batch):
            return
        time = self.times[input]
        times = np.zeros(len(batch), dtype=np.int64) if time.is_none else event_times(time, batch)
        late = times <= max(self.progress.reached[input], self._own[input])
        if late.any():
            self.late[input].take(chosen(batch, late), time, self.context, emit)
            batch, times = chosen(batch, ~late), times[~late]
        if len(batch):
            self.take(batch, times, input, emit)

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if isinstance(mark, Reached):
            self._own[input] = mark.time if self.times[input].each else BEGINNING_OF_TIME
            return
        if not isinstance(mark, Watermark | Idle | Active):
            emit(mark)
            return
        progress = self.progress
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
