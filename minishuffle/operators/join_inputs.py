"""What joins on event time have in common: how far their inputs are, and what that says of held records."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from minishuffle.exchange.batch import Batch, Times
from minishuffle.operators.base import BEGINNING_OF_TIME, END_OF_TIME, Emit
from minishuffle.operators.batch_times import TIME_MAX, TIME_MIN
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import (
    DROPPED,
    EventTimeOperator,
    EventTimeProgress,
    Late,
)
from minishuffle.operators.task_state import Holding, Records

__all__ = [
    "BOTH_DROPPED",
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
BOTH_DROPPED: Final = (DROPPED, DROPPED)


class Bounds(NamedTuple):
    """How far before and after a left record the right ones are that match it; microseconds."""

    before: int
    after: int

    def of(self, input: int) -> tuple[int, int]:
        """How far before and after a record of ``input`` its partners are."""
        return (self.before, self.after) if input == LEFT else (self.after, self.before)


class JoinProgress(EventTimeProgress):
    """How far event time is at the left and at the right input, and what that says of held records."""

    def __init__(self, how: How, bounds: Bounds) -> None:
        super().__init__(len(SIDES))
        self.how = how
        self.bounds = Bounds(*(min(bound, TIME_MAX - TIME_MIN) for bound in bounds))

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


class TimedJoin(EventTimeOperator):
    """What joins on event time share: what each side holds is let go by the other's watermark.

    Args:
        times: where the times of the left and of the right records stand; both ``is_none`` if there are none.
        lateness: what becomes of late records, left and right ones.
    """

    shares = True

    def __init__(
        self, how: How, bounds: Bounds, times: tuple[EventTime, EventTime], lateness: tuple[Late, Late]
    ) -> None:
        super().__init__(times, lateness)
        self.progress: JoinProgress = JoinProgress(how, bounds)

    # --- what a subclass does -----------------------------------------------------------------------

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

    # --- records and watermarks ---------------------------------------------------------------------

    def timed(self, batch: Batch, input: int) -> Batch:
        if self.times[input].is_none:
            return Batch(batch.payload, batch.keys, np.zeros(len(batch), dtype=np.int64))
        return super().timed(batch, input)

    def on_watermark(self, emit: Emit) -> int:
        for side in (LEFT, RIGHT):
            self.let_go(side, self.progress.limit(side), emit)
        return self.progress.watermark((self.earliest(LEFT), self.earliest(RIGHT)))

    def on_end(self, emit: Emit) -> None:
        self.pass_on(self.progress.last, emit)

    # --- state --------------------------------------------------------------------------------------

    def holdings(self) -> dict[str, Holding]:
        found = super().holdings()
        for input, name in enumerate(SIDES):
            write, read = partial(self.write_side, input), partial(self.read_side, input)
            found[name] = Holding("key", write, read, is_fixed=True)
        return found


def record_times(batch: Batch) -> Times:
    """The times of records that are joined, which all have one."""
    assert batch.times is not None
    return batch.times
