"""From rows of 64-bit words to slots, a whole vector at a time.

A table that is addressed by the word itself serves single words as long as they lie close together;
beyond that, and for longer rows, a hash table with open addressing does (linear probing, at most half
full). It holds slots only; the rows lie one after the other, so that a lookup touches two places of memory.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from minishuffle.errors import ResourceExhausted

__all__ = ["Growing", "WordTable", "first_rows"]

Vector: TypeAlias = "np.ndarray[Any, Any]"
Matrix: TypeAlias = "np.ndarray[Any, Any]"

DIRECT_SIZE_MAX: Final = 1 << 22
"""The longest table that is addressed by the word."""
DIRECT_SIZE_FREE: Final = 1 << 16
"""A table of that length may be as empty as it likes."""
DIRECT_PER_WORD: Final = 16
"""A longer one has at least one word for so many places."""
ROWS_MAX: Final = (1 << 31) - 1
_HASHED_BITS_MIN: Final = 10
_ABSENT: Final = -1
_MULTIPLIER: Final = 0x9E37_79B9_7F4A_7C15
"""2**64 divided by the golden ratio: multiplicative hashing, whose upper bits count."""
_STEP: Final = 0xD1B5_4A32_D192_ED04
"""Added for each word of a row (even, so that multipliers stay odd)."""
_S32: Final = np.uint64(32)


class Growing:
    """A vector, or rows of ``width``, that grows at its end; its memory doubles, so that appending costs
    constant time."""

    def __init__(self, dtype: Any, width: int | None = None) -> None:
        self._memory: Vector = np.empty(16 if width is None else (16, width), dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> Vector:
        """What was appended so far; it does not change as more is appended."""
        return self._memory[: self._length]

    def append(self, values: Vector) -> None:
        end = self._length + len(values)
        if end > len(self._memory):
            length = max(end, 2 * len(self._memory))
            memory = np.empty((length, *self._memory.shape[1:]), dtype=self._memory.dtype)
            memory[: self._length] = self.values
            self._memory = memory
        self._memory[self._length : end] = values
        self._length = end


def _scatter(words: Matrix, bits: int, multiplier: int = _MULTIPLIER) -> Vector:
    """A place below 2**bits for each row."""
    unsigned = words.view(np.uint64)
    mixed = unsigned[:, 0] * np.uint64(multiplier)
    for number in range(1, words.shape[1]):
        mixed ^= unsigned[:, number] * np.uint64((multiplier + number * _STEP) % 2**64)
    mixed ^= mixed >> _S32
    mixed *= np.uint64(multiplier)
    mixed >>= np.uint64(64 - bits)
    return mixed.view(np.int64)


def _differ(some: Matrix, others: Matrix) -> Vector:
    """Whether the rows at the same position differ."""
    differ: Vector = some[:, 0] != others[:, 0]
    for number in range(1, some.shape[1]):
        differ |= some[:, number] != others[:, number]
    return differ


def first_rows(words: Matrix) -> Vector:
    """Where each distinct row (of int64) comes first, ascending."""
    rows = np.arange(len(words))
    bits = max(4, (2 * len(words)).bit_length())
    claims = np.empty(1 << bits, dtype=np.int64)
    multiplier = _MULTIPLIER
    found = []
    while len(rows):
        mine = words[rows]
        places = _scatter(mine, bits, multiplier)
        claims[places[::-1]] = rows[::-1]  # of several rows the last assignment stays: the first row
        holders = claims[places]
        found.append(rows[holders == rows])
        rows = rows[_differ(words[holders], mine)]
        multiplier = multiplier * 5 % 2**64
    return np.sort(np.concatenate(found)) if found else rows


class WordTable:
    """A map from rows of ``width`` words (int64) to slots: 0, 1, … in the order in which they came."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._rows = Growing(np.int64, width)
        self._base = 0
        self._direct: Vector | None = np.full(1, _ABSENT, dtype=np.int64) if width == 1 else None
        """Slots by word - base, and one absent at the end; None if there is a hash table."""
        self._bits = _HASHED_BITS_MIN
        self._slots = np.full(1 << self._bits, _ABSENT, dtype=np.int32)
        """The hash table: by place the slot, or absent."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> Matrix:
        """The rows by slot."""
        return self._rows.values

    def find(self, words: Matrix) -> Vector:
        """The slot (int64) of each row, -1 for those that have none."""
        if self._direct is None:
            return self._find_hashed(words).astype(np.int64)
        offsets = words[:, 0].view(np.uint64) - np.uint64(self._base % 2**64)
        last = len(self._direct) - 1
        if offsets.max(initial=0) > last:
            np.minimum(offsets, np.uint64(last), out=offsets)
        return self._direct.take(offsets.view(np.int64))

    def insert(self, words: Matrix) -> None:
        """Add distinct rows, none of which is in the table: they get the next slots.

        Raises:
            ResourceExhausted: there are too many.
        """
        if not len(words):
            return
        count = len(self) + len(words)
        if count > ROWS_MAX:
            raise ResourceExhausted(
                f"one subtask has {count:,} keys, and at most {ROWS_MAX:,} fit: raise parallelism"
            )
        slots = np.arange(len(self), count)
        self._rows.append(words)
        if self._direct is not None:
            column = words[:, 0]
            if self._make_room_direct(int(column.min()), int(column.max())):
                self._direct[column - self._base] = slots
                return
            self._direct = None
            self._rehash()
        elif 2 * count > len(self._slots):
            self._rehash()
        else:
            self._insert_hashed(words, slots)

    # --- addressed by the word ------------------------------------------------------------------

    def _make_room_direct(self, low: int, high: int) -> bool:
        """Stretch the table over low..high as well; False if it would be too empty or too long."""
        assert self._direct is not None
        size = len(self._direct) - 1
        begin, end = (self._base, self._base + size) if size else (low, low)
        if begin <= low and high < end:
            return True
        wide = max(end, high + 1) - min(begin, low)
        if wide > min(DIRECT_SIZE_MAX, max(DIRECT_SIZE_FREE, DIRECT_PER_WORD * len(self))):
            return False
        # As much room again beyond the end that was too near, so that stretching costs constant time.
        room = min(2 * wide, DIRECT_SIZE_MAX)
        base = begin if low >= begin else max(max(end, high + 1) - room, -(1 << 63))
        stretched = np.full(room + 1, _ABSENT, dtype=np.int64)
        stretched[begin - base : begin - base + size] = self._direct[:size]
        self._direct, self._base = stretched, base
        return True

    # --- hashed ---------------------------------------------------------------------------------

    def _find_hashed(self, words: Matrix) -> Vector:
        if not len(self):
            return np.full(len(words), _ABSENT, dtype=np.int32)
        places = _scatter(words, self._bits)
        slots: Vector = self._slots.take(places)
        rows = self._taken_by_others(slots, words)
        places = places[rows]
        while len(rows):
            places += 1
            places &= len(self._slots) - 1
            mine = words[rows]
            slots[rows] = found = self._slots.take(places)
            going = self._taken_by_others(found, mine)
            rows, places = rows[going], places[going]
        return slots

    def _taken_by_others(self, slots: Vector, words: Matrix) -> Vector:
        """Where a slot is not absent but another row's."""
        other = _differ(self.rows.take(slots, axis=0), words)  # absent (-1) takes the last row
        other &= slots >= 0
        return np.flatnonzero(other)

    def _insert_hashed(self, words: Matrix, slots: Vector) -> None:
        places = _scatter(words, self._bits)
        while len(slots):
            free = np.flatnonzero(self._slots.take(places) < 0)
            self._slots[places[free]] = slots[free]
            left = np.flatnonzero(self._slots.take(places) != slots)
            slots, places = slots[left], places[left] + 1 & len(self._slots) - 1

    def _rehash(self) -> None:
        """A hash table of all rows, between a quarter and half full."""
        count = len(self)
        self._bits = max(_HASHED_BITS_MIN, (2 * count).bit_length())
        self._slots = np.full(1 << self._bits, _ABSENT, dtype=np.int32)
        self._insert_hashed(self.rows, np.arange(count))
