"""Interval joins of rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from minishuffle.dataflow.operators.base import Emit, Used
from minishuffle.dataflow.operators.joins import DROPPED, LEFT, RIGHT, Bounds, How, IntervalJoin
from minishuffle.dataflow.operators.keykinds import RowKinds
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import Vector, microseconds
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.keys import canonical_rows
from minishuffle.exchange.sizes import ListedTimes, RowsOut
from minishuffle.operators.state_parts import StatePart, by_rows, keys_of, packed, unpacked

__all__ = ["JoinRows", "JoinedTime", "gives_times", "is_null"]


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


class FormIndex:
    """Slots of the canonical forms of keys; a null, or one with a null in it, has none: -1."""

    def __init__(self) -> None:
        self._slots: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def lookup(self, keys: Sequence[Any]) -> Vector:
        """The slot of each; new ones get the next."""
        slots = self._slots
        have_nulls = not {tuple, type(None)}.isdisjoint(map(type, keys))
        numbers = [
            -1 if have_nulls and is_null(form) else slots.setdefault(form, len(slots)) for form in keys
        ]
        return np.array(numbers, dtype=np.int64)

    def find(self, keys: Sequence[Any]) -> Vector:
        """The slot of each; -1 if it is not there."""
        get = self._slots.get
        return np.array([get(form, -1) for form in keys], dtype=np.int64)

    def keys(self, slots: Vector) -> Sequence[Any]:
        return list(compress(self._slots, np.isin(np.arange(len(self)), slots)))


def gives_times(how: How, times: tuple[EventTime, EventTime]) -> bool:
    """Whether the times of what a join emits are beside it: if not, its rows show them as they came."""
    return times[LEFT].is_beside or (times[RIGHT].is_beside and how not in ("semi", "anti"))


class _Outbox(RowsOut):
    """Gathers results with their times, if there are ``stamps``."""

    __slots__ = ("_listed",)

    def __init__(self, emit: Emit, stamps: ListedTimes | None) -> None:
        super().__init__(emit, stamps)
        self._listed = stamps

    def add(self, rows: list[Any], times: Vector) -> None:
        self.rows += rows
        if self._listed is not None:
            self._listed.times += times.tolist()
        self.look()


class JoinRows(IntervalJoin):
    """Emits (key, left row, right row); None for the row of a side that has no partner. Semi and anti joins
    emit left rows. Where a side's times are beside its rows, so are those of what is emitted.

    The key is shown as the later of both records brought it.
    """

    def __init__(
        self,
        how: How,
        bounds: Bounds,
        times: tuple[EventTime, EventTime],
        late: tuple[Late, Late] = DROPPED,
    ) -> None:
        super().__init__(how, bounds, times, late, FormIndex)
        self._gives_times = gives_times(how, times)
        self._kinds = RowKinds()

    def numbered(self, batch: Batch, input: int) -> tuple[Batch, Vector, Vector]:
        forms = canonical_rows(batch.keys)
        self._kinds.note(forms, input)
        own, other = self._indexes[input], self._indexes[1 - input]
        return Batch(batch.payload, batch.keys), own.lookup(forms), other.find(forms)

    def pairs(self, own: Batch, other: Batch, input: int) -> Batch:
        left, right = (own, other) if input == LEFT else (other, own)
        return Batch(list(zip(own.keys, left.payload, right.payload, strict=True)))

    def alone(self, batch: Batch, input: int) -> Batch:
        if self.how in ("semi", "anti"):
            return Batch(batch.payload)
        records = zip(batch.keys, batch.payload, strict=True)
        if input == LEFT:
            return Batch([(key, row, None) for key, row in records])
        return Batch([(key, None, row) for key, row in records])

    def for_columns(self, used: Used) -> JoinRows:
        """(At submission.) Without times beside what it gives if nothing reads them."""
        narrowed = copy.copy(self)
        narrowed._gives_times = self._gives_times and used.times
        return narrowed

    def outbox(self, emit: Emit) -> _Outbox:
        return _Outbox(emit, ListedTimes() if self._gives_times else None)

    def put_out(self, batch: Batch, times: Vector, outbox: _Outbox) -> None:
        outbox.add(batch.payload, times)

    def finish(self, emit: Emit) -> None:
        self._kinds.complain(self.name, self.context)

    def write_records(self, batch: Batch, slots: Vector, name: str, **columns: Any) -> Iterator[StatePart]:
        yield by_rows(name, batch.keys, row=packed(batch.payload), **columns)

    def read_records(self, part: StatePart, input: int) -> tuple[Batch, Vector]:
        keys, rows = keys_of(part), unpacked(part.batch["row"])
        return Batch(rows, keys), self._indexes[input].lookup(canonical_rows(keys))


def is_null(form: Any) -> bool:
    """Whether a canonical key is null or has a null in it."""
    return form is None or (type(form) is tuple and any(map(is_null, form)))
