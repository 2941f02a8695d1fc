"""The search for a row that ends its process, in a job that loses nothing. Pure.

There a row that ends the process of its task would end that of each next attempt, since the rows come again.
What an attempt has in hand outlives its process (:mod:`~minishuffle.worker.tasks.crashrecord`): how many
rows, and the hash of the first of them. The next attempt takes batches in pieces of a 64th of those rows from
that row on, and at its beginning, until some multiple of them has come; others whole. The piece that it dies
in has fewer rows again, at last one: a bisection into 64 parts, since a replay costs more than a small piece
does. A row that is found is left out by later attempts, once.

The same is done in front of the operator in which the process has ended, with the rows that come to *it*: so
what is left out there has gone through the operators before, a count say, whose state stays right. Rows that
come of no input row, of a window or at the end of the input, are found there too, and so are timers, each of
which is taken by itself. Two attempts have to die with the same row in hand there. Where what comes is not
the same again (it has the time of day in it, say), or no exchange could take it, the input row is found
instead, and all that comes of it to that operator is left out.

Rows are known by what is in them, not by their numbers: producers that have died as well may make them again
in another order. Of rows that are alike the first one is taken for the one that is looked for.

The coordinator counts the deaths, and says what to look for (``coordinator/jobs/deaths.py``). Message queues
have the same for a *poison message*, which no consumer can take: it goes to the dead letters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from minishuffle.errors import UnserializableRecord, WrongColumns
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.exchange.keys import hash_columns
from minishuffle.exchange.rows import pack_each
from minishuffle.operators.base import Emit, Mark
from minishuffle.wire.messages import PoisonRow, PoisonSearch

__all__ = ["Piece", "PoisonRows", "PoisonWatch"]

PARTS: Final = 64
"""Number of pieces that are made of what an attempt had in hand."""
WINDOW: Final = 4
"""A multiple of the rows in hand is taken in pieces, since rows of other channels may come between."""


class Piece(NamedTuple):
    """Rows that are taken at once."""

    batch: Batch
    first: int
    """The hash of the first row; 0: it is not known."""
    found: PoisonRow | None = None
    """The one row that it is, to be left out."""


class _Place:
    """The search in front of one operator.

    Args:
        row: the hash of the first row in hand there; 0: it is not known.
        rows: as many were in hand.
        found: rows to leave out there, by their places in the search.
    """

    def __init__(self, row: int, rows: int, found: dict[int, PoisonRow]) -> None:
        self.pending = found
        self._row, self._size, self._full_window = row, max(1, rows // PARTS), WINDOW * rows
        self._window = self._full_window if row else 0
        """Rows that are still taken in pieces. The snapshot may be behind the row that is looked for."""

    def pieces(self, batch: Batch, left_out: list[int]) -> Iterator[Piece]:
        """See :meth:`PoisonRows.pieces`."""
        rows = len(batch)
        hashes = _hashes(batch.payload if self._row or self.pending else batch.slice(0, 1).payload)
        begins = _places(hashes, [self._row] if self._row else [])
        poisoned = _places(hashes, [each.row for each in self.pending.values()])
        at = 0
        while at < rows:
            first, begin = int(hashes[at]), _from(begins, at, rows) if self._row else rows
            if _from(poisoned, at, rows) == at and (found := self.take(first, left_out)) is not None:
                yield Piece(batch.slice(at, at + 1), first, found)
                at += 1
                continue
            if begin == at:
                self._window = self._full_window
            end = min(at + self._size, rows) if self._window > 0 else begin
            end = _from(poisoned, at + 1, end)
            if begin < end:
                self._window = self._full_window
            yield Piece(batch if end - at == rows else batch.slice(at, end), first)
            self._window -= min(end - at, self._window)
            at = end

    def take(self, row: int, left_out: list[int]) -> PoisonRow | None:
        """The found row of that hash, which is left out now; None: it was before, and this is another one."""
        for place, each in self.pending.items():
            if each.row == row:
                left_out.append(place)
                return self.pending.pop(place)
        return None

    def give_up(self) -> None:
        """Look only for rows that are found."""
        self._row = self._window = 0


class PoisonRows:
    """The search of one attempt.

    Invariants::

        rows of the pieces of a batch = rows of the batch, in order
        rows of a piece ≤ max(1, rows of the search / 64), from the row that is looked for on
        rows left out ≤ rows found before

    Args:
        search: what is known of attempts that have died.
        left_out: the places, among the rows found, of those that the attempt before has left out.
    """

    def __init__(self, search: PoisonSearch, left_out: Collection[int] = ()) -> None:
        self.left_out = [*left_out]
        """The places of all rows that were left out so far."""
        self._looks, self._reach = search.rows > 0, search.reach
        found: dict[int, dict[int, PoisonRow]] = {0: {}, max(0, search.place): {}}
        for number, each in enumerate(search.found):
            if number not in self.left_out:
                found.setdefault(each.at, {})[number] = each
        known = {search.place: (search.place_row, search.place_rows), 0: (search.row, search.rows)}
        self._places = {at: _Place(*known.get(at, (0, 0)), rows) for at, rows in found.items()}
        """By the place of the operator that gets the rows."""

    @property
    def has_ended(self) -> bool:
        """Nothing is looked for any more."""
        return self._reach <= 0 or not (self._looks or any(each.pending for each in self._places.values()))

    def give_up(self) -> None:
        """Leave out what is found, and look for nothing else."""
        self._looks = False
        for each in self._places.values():
            each.give_up()

    def pieces(self, batch: Batch, at: int = 0) -> Iterator[Piece]:
        """Cut a batch that comes to the operator at that place: to the first one, of the input. Gives what to
        take of it, one after the other. The next one may be asked for once the last one is taken."""
        if at == 0:
            self._reach -= len(batch)
        if at in self._places:
            yield from self._places[at].pieces(batch, self.left_out)
        else:
            yield Piece(batch, int(_hashes(batch.slice(0, 1).payload)[0]))

    def alone(self, record: Any, at: int) -> Piece:
        """The same of a record of no batch, which the operator at that place takes by itself."""
        row = _hash(record)
        found = self._places[at].take(row, self.left_out) if row and at in self._places else None
        return Piece(Batch([record]), row, found)


class NotedCalls(Protocol):
    """The notes of an attempt: :class:`~minishuffle.worker.tasks.crashrecord.TaskCalls`."""

    def note_first(self, row: int) -> None: ...

    def go_in(self, place: int, rows: int = 0, row: int = 0) -> tuple[int, int, int]: ...

    def go_back(self, before: tuple[int, int, int]) -> None: ...


class PoisonWatch:
    """The search of one attempt as its chain meets it: what each operator has in hand is noted, and rows that
    are found are left out.

    Args:
        left_out: called with the places of all rows that were left out, when there is one more.
    """

    def __init__(
        self, rows: PoisonRows, calls: NotedCalls, left_out: Callable[[Sequence[int]], None]
    ) -> None:
        self._rows, self._calls, self._left_out = rows, calls, left_out
        self.go_in, self.go_back = calls.go_in, calls.go_back
        """Note that an operator is called for no row, and that it has returned."""
        self._leaving: PoisonRow | None = None
        """The found input row that is in hand: the rows that an operator gets of it are left out."""
        self.has_given_up = False
        """Calls are under way of other rows than those in hand."""

    @property
    def has_ended(self) -> bool:
        """Nothing is looked for any more."""
        return self._rows.has_ended

    def give_up(self) -> None:
        """Calls are under way of other rows than those in hand: look for no row any more, and note none."""
        self.has_given_up = True
        self._rows.give_up()
        self._calls.note_first(0)

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """Cut a batch of the input: gives what goes into the chain at once, one after the other."""
        for piece in self._rows.pieces(batch):
            self._calls.note_first(0 if self.has_given_up else piece.first)
            self._leaving = piece.found
            yield piece.batch
            if piece.found is not None:
                self._leaving = None
                self._left_out(self._rows.left_out)
        if self.has_ended:
            self._calls.note_first(0)

    def take(
        self, place: int, item: Batch | Mark, take: Emit, leave_out: Callable[[str, Batch], None]
    ) -> None:
        """Have the operator at that place take an item that was emitted to it, or leave it out."""
        leaving = self._leaving
        if isinstance(item, Mark) or (leaving is None and (place == 0 or not len(item) or self.has_ended)):
            self._enter(place, 0, 0, take, item)
        elif leaving is not None:
            if place == leaving.place:
                leave_out(leaving.why, item)
            else:
                self._enter(place, 0, 0, take, item)
        else:
            for piece in self._rows.pieces(item, place):
                if piece.found is not None:
                    leave_out(piece.found.why, piece.batch)
                    self._left_out(self._rows.left_out)
                else:
                    rows = 0 if self.has_given_up else len(piece.batch)
                    self._enter(place, rows, piece.first if rows else 0, take, piece.batch)

    def _enter(self, place: int, rows: int, row: int, take: Emit, item: Batch | Mark) -> None:
        before = self._calls.go_in(place, rows, row)
        take(item)
        self._calls.go_back(before)

    def alone(self, place: int, record: Any) -> str | None:
        """The operator at that place is about to take a record of no batch, a timer say. Gives why it is to
        leave that out; None: it is not."""
        if self.has_ended:
            return None
        piece = self._rows.alone(record, place)
        self._calls.go_in(place, 1, piece.first)
        if piece.found is None:
            return None
        self._left_out(self._rows.left_out)
        return piece.found.why


def _places(hashes: np.ndarray[Any, Any], rows: Sequence[int]) -> list[int]:
    """Where these rows are, in order."""
    if not rows:
        return []
    found: list[int] = np.flatnonzero(np.isin(hashes, np.array(rows, np.uint64))).tolist()
    return found


def _from(places: Sequence[int], at: int, end: int) -> int:
    """The first of these places from ``at`` on and before ``end``; ``end`` if there is none."""
    number = bisect_left(places, at)
    return min(places[number], end) if number < len(places) else end


def _hashes(payload: Payload) -> np.ndarray[Any, Any]:
    """The hash of what is in each row, 63 bits as messages have them; 0 where it cannot be said."""
    if isinstance(payload, list):
        return np.fromiter(map(_hash, payload), np.uint64, len(payload))
    try:
        hashes: np.ndarray[Any, Any] = hash_columns(payload.columns) >> np.uint64(1)
    except WrongColumns:  # lists and structs, say
        return _hashes(payload.to_pylist())
    return hashes


def _hash(row: Any) -> int:
    try:
        packed = pack_each([row])[0]
    except UnserializableRecord:
        return 0
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1
