"""From rows of 64-bit words to slots: a hash table with open addressing, at most a quarter full.

The rows lie one after the other; the table has a part of each row's hash and its slot, so that a lookup
touches two places of memory. Half full, a table would be smaller by 8 to 16 bytes a key, and twice as many
keys would find another one at their first place. The loops are in ``kernels/loops.py``.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from minishuffle.errors import ResourceExhausted
from minishuffle.kernels.machinecode import kernel

__all__ = ["WordTable"]

Vector: TypeAlias = "np.ndarray[Any, Any]"
Matrix: TypeAlias = "np.ndarray[Any, Any]"

ROWS_MAX: Final = (1 << 31) - 1
_BITS_MIN: Final = 10


class WordTable:
    """A map from rows of ``width`` words (int64) to slots: 0, 1, … in the order in which they came."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._stored = np.empty((1 << _BITS_MIN - 2, width), dtype=np.int64)
        """Rows by slot, as many as a quarter of the table's places."""
        self._count = np.zeros(1, dtype=np.int64)
        self._bits = _BITS_MIN
        self._places = np.zeros(1 << self._bits, dtype=np.uint32)

    def __len__(self) -> int:
        return int(self._count[0])

    @property
    def rows(self) -> Matrix:
        """The rows by slot."""
        return self._stored[: len(self)]

    def find(self, words: Matrix) -> tuple[Vector, int]:
        """The slot (int64) of each row, -1 for those that have none; and how many these are."""
        slots = np.empty(len(words), dtype=np.int64)
        absent = kernel("find_keys")(
            *self._arguments(), np.ascontiguousarray(words).reshape(-1), slots, len(slots)
        )
        return slots, absent

    def add(self, words: Matrix) -> Vector:
        """The slot (int64) of each row; those that are not in the table get the next slots.

        Raises:
            ResourceExhausted: there are too many.
        """
        slots = np.empty(len(words), dtype=np.int64)
        given, begin = np.ascontiguousarray(words).reshape(-1), 0
        while True:
            room = min(len(self._stored), ROWS_MAX)
            begin = kernel("add_keys")(*self._arguments(), given, slots, begin, len(slots), self._count, room)
            if begin == len(slots):
                return slots
            if len(self) == ROWS_MAX:
                raise ResourceExhausted(
                    f"one subtask has more than {ROWS_MAX:,} keys, and no more fit: raise parallelism"
                )
            self._grow()

    def _arguments(self) -> tuple[Vector, int, Vector, int]:
        return self._places, self._bits, self._stored.reshape(-1), self.width

    def _grow(self) -> None:
        """Twice the places, and rows."""
        self._stored = np.concatenate((self._stored, np.empty_like(self._stored)))
        self._bits += 1
        self._places = np.zeros(1 << self._bits, dtype=np.uint32)
        kernel("fill_table")(*self._arguments(), len(self))
