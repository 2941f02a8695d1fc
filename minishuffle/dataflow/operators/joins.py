"""Interval joins on event time: how far both sides are, what is late, what need not be held any more.

A left record matches the right ones of its key whose times are at most ``before`` before and at most
``after`` after its own. A record is held until the other side's watermark is so much past it that nothing
which could match comes any more. Without event time records are held until both sides have ended.
(Flink: ``IntervalJoinOperator``; there without outer joins, and late by the lesser watermark of both.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

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
from minishuffle.dataflow.operators.joinheld import Held
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import TIME_MAX, TIME_MIN, Vector, event_times
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.exchange.batch import Batch, Mask
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.state_parts import StatePart, greatest

__all__ = ["Bounds", "How", "IntervalJoin", "JoinProgress"]

How: TypeAlias = Literal["inner", "left", "right", "full", "semi", "anti"]

LEFT, RIGHT = 0, 1
SIDES: Final = ("left", "right")
DROPPED: Final = (Late(), Late())
SPARE_KEYS: Final = 4096
"""So many keys of which nothing is held are not worth numbering the others anew."""


class Index(Protocol):
    """Slots (0, 1, …) of keys, in whatever form."""

    def __len__(self) -> int: ...

    def lookup(self, keys: Any) -> Vector:
        """The slot of each; new keys get the next ones."""

    def find(self, keys: Any) -> Vector:
        """The slot of each; -1 if it is not there."""

    def keys(self, slots: Vector) -> Any:
        """The keys of slots, which are in order."""


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
    """What joins of rows and of Arrow share: all but what keys, records and results are.

    Each side numbers its keys in an index and holds its records in a :class:`Held`; the other side's keys
    are looked up there. When most keys have no records any more, the others are numbered anew.

    Args:
        times: where the times of the left and of the right records stand; both ``is_none`` if there are none.
        late: what becomes of late records, left and right ones.
        index: makes an index without keys.
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
        index: Callable[[], Index],
    ) -> None:
        self.how = how
        self.times = times
        self.late = late
        self.progress = JoinProgress(how, bounds)
        self.by_channel = any(time.each for time in times)
        self._index = index
        self._indexes = [index(), index()]
        bounds = self.progress.bounds
        self._held = (Held(*bounds.of(RIGHT)), Held(*bounds.of(LEFT)))
        self._own = [BEGINNING_OF_TIME, BEGINNING_OF_TIME]
        """By input the watermark of the producer that the records at hand come from, where that decides."""
        self._told = BEGINNING_OF_TIME
        self._told_idle = False

    def takes_times(self, input: int, used: Used) -> bool:
        return self.times[input].is_beside

    def sides_to_read(self) -> Mapping[str, str]:
        return {**self.late[LEFT].sides("late"), **self.late[RIGHT].sides("late_right")}

    # --- what a subclass does -----------------------------------------------------------------------

    def numbered(self, batch: Batch, input: int) -> tuple[Batch, Vector, Vector]:
        """A batch as it is held, and for each record the slot of its key in the index of its side, and in
        that of the other; -1 for a null key, and for one that is not there."""
        raise NotImplementedError

    def pairs(self, own: Batch, other: Batch, input: int) -> Batch:
        """What records of ``input`` and their partners give."""
        raise NotImplementedError

    def alone(self, batch: Batch, input: int) -> Batch:
        """What records without a partner give, and left ones of a semi join."""
        raise NotImplementedError

    def outbox(self, emit: Emit) -> Any:
        """Gathers what :meth:`put_out` gives it, and emits it in batches; the rest with ``flush()``."""
        raise NotImplementedError

    def put_out(self, batch: Batch, times: Vector, outbox: Any) -> None:
        """Results of these times."""
        raise NotImplementedError

    def write_records(self, batch: Batch, slots: Vector, name: str, **columns: Any) -> Iterator[StatePart]:
        """A part "left" or "right" with these records and columns."""
        raise NotImplementedError

    def read_records(self, part: StatePart, input: int) -> tuple[Batch, Vector]:
        """Records that were written so, and their slots in the index of their side."""
        raise NotImplementedError

    # --- what is held -------------------------------------------------------------------------------

    def goes_unmatched(self, input: int) -> bool:
        """Whether records of a side go out without a partner."""
        return self.how in (("left", "full", "anti") if input == LEFT else ("right", "full"))

    def take(self, batch: Batch, times: Vector, input: int, emit: Emit) -> None:
        """Join records that are in time, hold those that may have more partners."""
        batch, slots, others = self.numbered(batch, input)
        if input == RIGHT and self.how in ("semi", "anti"):
            rows = _first_of_each(slots, times)
            batch, times, slots, others = batch.take(rows), times[rows], slots[rows], others[rows]
        outbox = self.outbox(emit)
        matched = self._match(batch, others, times, input, outbox)
        stays = (times > self.progress.limit(input)) & (slots >= 0)
        if not stays.all():
            self._put_out_alone(batch, times, np.flatnonzero(~stays & ~matched), input, outbox)
            kept = np.flatnonzero(stays)
            batch, times, slots, matched = batch.take(kept), times[kept], slots[kept], matched[kept]
        if len(slots):
            self._held[input].add(batch, slots, times, matched)
        outbox.flush()
        self._forget_keys(input)

    def _match(self, batch: Batch, slots: Vector, times: Vector, input: int, outbox: Any) -> Mask:
        """Put out the pairs of these records with what the other side holds, where their keys have ``slots``
        (-1: none); which of them had a partner."""
        matched = np.zeros(len(slots), dtype=np.bool_)
        held = self._held[1 - input]
        for asked, numbers in held.find(slots, times, batch) if (slots >= 0).any() else ():
            matched[asked] = True
            if self.how in ("semi", "anti"):
                numbers = np.unique(numbers[~held.matched[numbers]])
                if self.how == "semi" and input == RIGHT and len(numbers):
                    self.put_out(self.alone(held.records(numbers), LEFT), held.times[numbers], outbox)
            else:
                pairs = self.pairs(batch.take(asked), held.records(numbers), input)
                self.put_out(pairs, np.maximum(times[asked], held.times[numbers]), outbox)
            held.matched[numbers] = True
        if self.how == "semi" and input == LEFT and matched.any():
            found = np.flatnonzero(matched)
            self.put_out(self.alone(batch.take(found), LEFT), times[found], outbox)
        return matched

    def let_go(self, input: int, limit: int, emit: Emit) -> None:
        """Forget the records of a side up to ``limit``; emit those that go out without a partner."""
        outbox, held = self.outbox(emit), self._held[input]
        for chunk, numbers in held.take_until(limit):
            alone = numbers[~held.matched[numbers]] - chunk.first
            self._put_out_alone(chunk.batch, held.times[chunk.first : chunk.end], alone, input, outbox)
        outbox.flush()
        self._forget_keys(input)

    def _put_out_alone(self, batch: Batch, times: Vector, rows: Vector, input: int, outbox: Any) -> None:
        """Put out those of a batch of a side at ``rows``, without a partner, if such records go out."""
        if len(rows) and self.goes_unmatched(input):
            self.put_out(self.alone(batch.take(rows), input), times[rows], outbox)

    def _forget_keys(self, input: int) -> None:
        """Number the keys of a side anew that have records, once most have none."""
        index, held = self._indexes[input], self._held[input]
        if len(index) <= SPARE_KEYS + 2 * len(held):
            return
        is_live = np.zeros(len(index), dtype=np.bool_)
        for chunk in held.chunks:
            is_live[held.slots[chunk.numbers]] = True
        self._indexes[input] = fewer = self._index()
        if held.chunks:
            fewer.lookup(index.keys(np.flatnonzero(is_live)))
        held.renumber(np.cumsum(is_live) - 1)

    def earliest(self, input: int) -> int:
        """The least time that a side holds; ``END_OF_TIME`` if it holds nothing."""
        return self._held[input].earliest

    def state_rows(self) -> int:
        return len(self._held[LEFT]) + len(self._held[RIGHT])

    def write_state(self) -> Iterator[StatePart]:
        yield self.progress.write_state()
        for input in (LEFT, RIGHT):
            yield from self.write_held(input)

    def write_held(self, input: int) -> Iterator[StatePart]:
        """The records that are held of a side: parts "left" or "right"."""
        held = self._held[input]
        for chunk in held.chunks:
            numbers = chunk.numbers
            for begin in range(0, len(numbers), BATCH_ROWS_MAX):
                some = numbers[begin : begin + BATCH_ROWS_MAX]
                columns = {"time": held.times[some], "matched": held.matched[some]}
                yield from self.write_records(chunk.records(some), held.slots[some], SIDES[input], **columns)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            if part.name == "progress":
                self.progress.read_state(part)
            else:
                self.read_held(part, SIDES.index(part.name))

    def read_held(self, part: StatePart, input: int) -> None:
        """Hold records that were written so."""
        batch, slots = self.read_records(part, input)
        times, matched = part.batch["time"].to_numpy(), part.batch["matched"].to_numpy(zero_copy_only=False)
        self._held[input].add(batch, slots, times, matched)

    # --- records and marks --------------------------------------------------------------------------

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = len(batch.payload)
        if not rows:
            return
        time = self.times[input]
        times = np.zeros(rows, dtype=np.int64) if time.is_none else event_times(time, batch)
        late = times <= max(self.progress.reached[input], self._own[input])
        if late.any():
            self.late[input].take(batch.mask(late), self.context, emit)
            batch, times = batch.mask(~late), times[~late]
        if len(times):
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


def _first_of_each(slots: Vector, times: Vector) -> Vector:
    """The records that are the first of their key and time. Where right ones only say that there are some,
    one does for all. (A key of 100,000 records on both sides would make ten thousand million pairs.)"""
    order = np.lexsort((times, slots))
    slots, times = slots[order], times[order]
    differs = (slots[1:] != slots[:-1]) | (times[1:] != times[:-1])
    return np.sort(order[np.concatenate([[True], differs])])
