"""The search for a row that ends its process, in a job that loses nothing. Pure.

There a row that ends the process of its task would end that of each next attempt, since the rows come again.
What an attempt has in hand outlives its process (:mod:`~minishuffle.worker.tasks.crashrecord`): how many
rows, and the hash of the first of them. The next attempt takes batches in pieces of a 64th of those rows from
that row on, and at its beginning, until some multiple of them has come; others whole. The piece that it dies
in has fewer rows again, at last one: a bisection into 64 parts, since a replay costs more than a small piece
does. A row that is found is left out by later attempts, once.

Rows are known by what is in them, not by their numbers: producers that have died as well may make them again
in another order. Of rows that are alike the first one is taken for the one that is looked for.

The coordinator counts the deaths, and says what to look for (``coordinator/jobs/deaths.py``). Message queues
have the same for a *poison message*, which no consumer can take: it goes to the dead letters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np

from minishuffle.errors import UnserializableRecord, WrongColumns
from minishuffle.exchange.batch import Batch, Payload
from minishuffle.exchange.keys import hash_columns
from minishuffle.exchange.rows import pack_each
from minishuffle.wire.messages import PoisonRow, PoisonSearch

__all__ = ["Piece", "PoisonRows"]

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
        self._row, self._rows, self._reach = search.row, search.rows, search.reach
        self._found = search.found
        self._pending = [place for place in range(len(search.found)) if place not in self.left_out]
        self._size = max(1, search.rows // PARTS)
        self._full_window = WINDOW * search.rows
        self._window = self._full_window if search.row else 0
        """Rows that are still taken in pieces. The snapshot may be behind the row that is looked for."""

    @property
    def has_ended(self) -> bool:
        """Nothing is looked for any more."""
        return self._reach <= 0 or not (self._rows or self._pending)

    def pieces(self, batch: Batch) -> Iterator[Piece]:
        """Cut a batch: gives what to take of it, one after the other. The next one may be asked for once the
        last one is taken."""
        rows = len(batch)
        self._reach -= rows
        hashes = _hashes(batch.payload if self._row or self._pending else batch.slice(0, 1).payload)
        begins = _places(hashes, [self._row] if self._row else [])
        poisoned = _places(hashes, [self._found[each].row for each in self._pending])
        at = 0
        while at < rows:
            first, begin = int(hashes[at]), _from(begins, at, rows)
            if _from(poisoned, at, rows) == at and (place := self._take(first)) is not None:
                yield Piece(batch.slice(at, at + 1), first, self._found[place])
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

    def _take(self, row: int) -> int | None:
        """The place of a row that is left out now; None: it was before, and this is another one."""
        for place in self._pending:
            if self._found[place].row == row:
                self._pending.remove(place)
                self.left_out.append(place)
                return place
        return None


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
