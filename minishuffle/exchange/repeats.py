"""Rows that come once more: which of them a consumer leaves out.

A producer that had finished and was lost before a consumer had read all of it writes its rows once more, in
the same order over each channel. The consumer has taken the first of them, and leaves out as many. If it may
lack some of those, because its link broke under them, it takes none: they would come twice, or in disorder.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["NEW", "RowsTaken", "Rendition"]

EVERYTHING: Final = 1 << 63
"""More rows than there can be."""


class Rendition(NamedTuple):
    """What an attachment reads: an attempt of a producer, and the first of those that write the same rows."""

    attempt: int
    base: int


NEW: Final = Rendition(0, 0)
"""That of a producer which never runs again."""


class RowsTaken:
    """How far a task is in the rows of one channel, since the base of its producer's attempt.

    Invariant: ``at ≤ taken``.
    """

    __slots__ = ("_gaps", "_half", "_written", "at", "lost", "taken")

    def __init__(self) -> None:
        self.at = 0
        """Rows that have come of the current attempt."""
        self.taken = 0
        """Rows that were given out, or are taken to have been."""
        self.lost = 0
        """Rows that were left out although they had not been given out before, in all."""
        self._half = 0
        self._written = NEW
        self._gaps = False
        """Rows may be missing among those that were taken."""

    def detach(self, half: int) -> None:
        """Nothing more comes of the current attempt, which has begun an element of so many rows."""
        self._half += half

    def attach(self, written: Rendition, *, silent: bool = False) -> int:
        """What comes now is of that attempt; gives the rows of the element that was begun before, if it does
        not come once more.

        If a link breaks, the next attachment to the same attempt lacks what was under way. One that was
        ``silent`` before has come no further in rows that were taken before, and those under way are lost in
        any case. Of rows that come for the first time nothing is known then.
        """
        before, self._written = self._written, written
        half, self._half = self._half, 0
        if before is NEW:
            return half
        if written.attempt == before.attempt:
            self._gaps = self._gaps or not silent or written.attempt == written.base
        elif written.base == before.base:
            self.at = 0
            if not self._gaps:
                return 0
        else:
            self.at = self.taken = 0
            self._gaps = False
        return half

    @property
    def gaps(self) -> bool:
        """Rows may be missing among those that were taken."""
        return self._gaps

    def close(self) -> int:
        """Nothing comes any more: gives the rows of the element that was begun last."""
        half, self._half = self._half, 0
        return half

    def take(self, rows: int) -> int:
        """An element with so many rows has come; gives how many of the first of them are left out."""
        begin, known = self.at, self.taken
        self.at = end = begin + rows
        if end > known:
            self.taken = end
        if self._gaps and self._written.attempt != self._written.base:
            self.lost += max(0, end - max(begin, known))
            return rows
        return min(rows, known - begin) if begin < known else 0

    def finish(self) -> None:
        """The end has come: whatever comes once more is left out."""
        self.taken = EVERYTHING
