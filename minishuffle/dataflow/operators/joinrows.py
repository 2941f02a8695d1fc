"""Interval joins of rows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from minishuffle.dataflow.operators.base import Batch, Emit, KeyedRows
from minishuffle.dataflow.operators.chained import emit_rows
from minishuffle.dataflow.operators.joins import DROPPED, LEFT, RIGHT, SIDES, Bounds, How, IntervalJoin
from minishuffle.dataflow.operators.keyedstate import (
    StatePart,
    by_rows,
    chunks,
    keys_of,
    packed,
    unpacked,
)
from minishuffle.dataflow.operators.keykinds import RowKinds
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import Vector, microseconds, without_times
from minishuffle.dataflow.operators.timeheap import TimeHeap
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.errors import UsageError
from minishuffle.exchange.keys import canonical_rows
from minishuffle.exchange.sizes import RowsOut

__all__ = ["JoinRows", "JoinedTime", "gives_pairs"]

_time_of = attrgetter("time")


@dataclass(frozen=True, slots=True)
class JoinedTime:
    """The event time of (key, left row, right row): the greater one, or that of the row that is alone."""

    left: EventTime
    right: EventTime

    def __call__(self, joined: tuple[Any, Any, Any]) -> int:
        _, left, right = joined
        return max(
            microseconds(time.fn(row) if time.fn is not None else row[time.column]) + time.shift
            for time, row in ((self.left, left), (self.right, right))
            if row is not None
        )


@dataclass(slots=True, eq=False)
class _Held:
    time: int
    form: Any
    """The canonical key."""
    key: Any
    row: Any
    matched: bool


class _Side:
    """The rows held of one input, by key in order of time."""

    def __init__(self) -> None:
        self._by_key: dict[Any, list[_Held]] = {}
        self._by_time: TimeHeap[_Held] = TimeHeap()

    def __len__(self) -> int:
        return len(self._by_time)

    def __iter__(self) -> Iterator[_Held]:
        return (held for _, held in self._by_time)

    @property
    def earliest(self) -> int:
        return self._by_time.earliest

    def add(self, held: _Held) -> None:
        insort(self._by_key.setdefault(held.form, []), held, key=_time_of)
        self._by_time.push(held.time, held)

    def between(self, form: Any, first: int, last: int) -> list[_Held]:
        """The rows of a key with a time in first..last."""
        rows = self._by_key.get(form)
        if rows is None:
            return []
        start = bisect_left(rows, first, key=_time_of)
        return rows[start : bisect_right(rows, last, lo=start, key=_time_of)]

    def take_until(self, limit: int) -> Iterator[_Held]:
        """Forget the rows up to ``limit`` and give them, in order of time."""
        for _, held in self._by_time.take_until(limit):
            rows = self._by_key.get(held.form)
            if rows is not None and rows[0].time <= limit:
                del rows[: bisect_right(rows, limit, key=_time_of)]
                if not rows:
                    del self._by_key[held.form]
            yield held


def gives_pairs(how: How, times: tuple[EventTime, EventTime]) -> bool:
    """Whether what a join emits are pairs: if not, its rows show its times as they came."""
    return times[LEFT].is_paired or (times[RIGHT].is_paired and how not in ("semi", "anti"))


class JoinRows(IntervalJoin):
    """Emits (key, left row, right row); None for the row of a side that has no partner. Semi and anti joins
    emit left rows. Where a side's rows come in pairs with their times, what is emitted is in pairs too.

    The key is shown as the later of both records brought it.
    """

    def __init__(
        self,
        how: How,
        bounds: Bounds,
        times: tuple[EventTime, EventTime],
        late: tuple[Late, Late] = DROPPED,
    ) -> None:
        super().__init__(how, bounds, times, late)
        self._gives_pairs = gives_pairs(how, times)
        self._sides = (_Side(), _Side())
        self._kinds = RowKinds()

    def take(self, batch: Batch, times: Vector, input: int, emit: Emit) -> None:
        if not isinstance(batch, KeyedRows):
            raise UsageError(f"a join of rows takes rows with keys, not a {type(batch).__name__}")
        own, others = self._sides[input], self._sides[1 - input]
        before, after = self.progress.bounds.of(input)
        limit, outer = self.progress.limit(input), self.goes_unmatched(input)
        batch = without_times(self.times[input], batch)
        out = RowsOut(emit)
        # Where right rows only say that there are some, one of each key and time does for all.
        says_only = input == RIGHT and self.how in ("semi", "anti")
        forms = canonical_rows(batch.keys)
        self._kinds.note(forms, input)
        for key, form, row, time in zip(batch.keys, forms, batch.rows, times.tolist(), strict=True):
            has_key = not _is_null(form)
            if says_only and has_key and own.between(form, time, time):
                continue
            partners = others.between(form, time - before, time + after) if has_key else []
            if partners:
                out.rows += self._matches(key, row, time, partners, input)
            if has_key and time > limit:
                own.add(_Held(time, form, key, row, bool(partners)))
            elif outer and not partners:
                out.rows.append(self._alone(key, row, time, input))
            if len(out.rows) >= out.room:
                out.look()
        out.flush()

    def _matches(self, key: Any, row: Any, time: int, partners: list[_Held], input: int) -> list[Any]:
        """What a record and those that match it give."""
        if self.how == "semi":
            rows = [row] if input == LEFT else [partner.row for partner in partners if not partner.matched]
        elif self.how == "anti":
            rows = []
        elif input == LEFT:
            rows = [(key, row, partner.row) for partner in partners]
        else:
            rows = [(key, partner.row, row) for partner in partners]
        if self._gives_pairs:
            rows = list(zip(self._times(time, partners, input), rows, strict=True))
        for partner in partners:
            partner.matched = True
        return rows

    def _times(self, time: int, partners: list[_Held], input: int) -> list[int]:
        """The event times that go with what :meth:`_matches` gives."""
        if self.how == "semi":
            return [time] if input == LEFT else [partner.time for partner in partners if not partner.matched]
        return [] if self.how == "anti" else [max(time, partner.time) for partner in partners]

    def _alone(self, key: Any, row: Any, time: int, input: int) -> Any:
        if self.how == "anti":
            given = row
        else:
            given = (key, None, row) if input == RIGHT else (key, row, None)
        return (time, given) if self._gives_pairs else given

    def let_go(self, input: int, limit: int, emit: Emit) -> None:
        outer = self.goes_unmatched(input)
        gone = self._sides[input].take_until(limit)
        alone = [
            self._alone(held.key, held.row, held.time, input) for held in gone if outer and not held.matched
        ]
        emit_rows(alone, emit)

    def finish(self, emit: Emit) -> None:
        self._kinds.complain(self.name, self.context)

    def earliest(self, input: int) -> int:
        return self._sides[input].earliest

    def write_sides(self) -> Iterator[StatePart]:
        for name, side in zip(SIDES, self._sides, strict=True):
            for some in chunks(side):
                yield by_rows(
                    name,
                    [held.key for held in some],
                    time=[held.time for held in some],
                    row=packed(held.row for held in some),
                    matched=[held.matched for held in some],
                )

    def read_side(self, part: StatePart, input: int) -> None:
        keys, rows = keys_of(part), unpacked(part.batch["row"])
        times, matched = part.batch["time"].to_pylist(), part.batch["matched"].to_pylist()
        for entry in zip(times, canonical_rows(keys), keys, rows, matched, strict=True):
            self._sides[input].add(_Held(*entry))

    def state_rows(self) -> int:
        return len(self._sides[LEFT]) + len(self._sides[RIGHT])


def _is_null(form: Any) -> bool:
    """Whether a canonical key is null or has a null in it."""
    return form is None or (type(form) is tuple and any(map(_is_null, form)))
