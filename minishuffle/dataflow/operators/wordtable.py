"""From 64-bit words to numbers, a whole vector at a time.

A table that is addressed by the word itself serves as long as the words lie close together; beyond
that a hash table with open addressing does (linear probing, at most half full).
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

__all__ = ["Growing", "WordTable", "first_rows"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

DIRECT_SIZE_MAX: Final = 1 << 22
"""The longest table that is addressed by the word."""
DIRECT_SIZE_FREE: Final = 1 << 16
"""A table of that length may be as empty as it likes."""
DIRECT_PER_WORD: Final = 16
"""A longer one has at least one word for so many places."""
_HASHED_BITS_MIN: Final = 10
_ABSENT: Final = -1
_MULTIPLIER: Final = 0x9E37_79B9_7F4A_7C15
"""2**64 divided by the golden ratio: multiplicative hashing, whose upper bits count."""
_S32: Final = np.uint64(32)


class Growing:
    """A vector that grows at its end; its memory doubles, so that appending costs constant time."""

    def __init__(self, dtype: Any) -> None:
        self._memory: Vector = np.empty(16, dtype=dtype)
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
            memory = np.empty(max(end, 2 * len(self._memory)), dtype=self._memory.dtype)
            memory[: self._length] = self.values
            self._memory = memory
        self._memory[self._length : end] = values
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget what was appended from number ``length`` on."""
        self._length = length


def _scatter(words: Vector, bits: int, multiplier: int = _MULTIPLIER) -> Vector:
    """A place below 2**bits for each word."""
    mixed = words.view(np.uint64) >> _S32
    mixed ^= words.view(np.uint64)
    mixed *= np.uint64(multiplier)
    mixed >>= np.uint64(64 - bits)
    return mixed.view(np.int64)


def first_rows(words: Vector) -> Vector:
    """Where each distinct word (int64) comes first, ascending."""
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
        rows = rows[words[holders] != mine]
        multiplier = multiplier * 5 % 2**64
    return np.sort(np.concatenate(found)) if found else rows


class WordTable:
    """A map from words (int64) to numbers (int64, from 0)."""

    def __init__(self) -> None:
        self._count = 0
        self._base = 0
        self._direct: Vector | None = np.full(1, _ABSENT, dtype=np.int64)
        """Numbers by word - base, and one absent at the end; None once there is a hash table."""
        self._bits = _HASHED_BITS_MIN
        self._numbers: Vector = np.empty(0, dtype=np.int64)
        self._words: Vector = np.empty(0, dtype=np.int64)
        """The hash table: by place the number, or absent, and the word."""

    def find(self, words: Vector) -> Vector:
        """The number of each word, -1 for those that have none."""
        if self._direct is None:
            return self._find_hashed(words)
        offsets = words.view(np.uint64) - np.uint64(self._base % 2**64)
        last = len(self._direct) - 1
        if offsets.max(initial=0) > last:
            np.minimum(offsets, np.uint64(last), out=offsets)
        return self._direct.take(offsets.view(np.int64))

    def insert(self, words: Vector, numbers: Vector) -> None:
        """Add distinct words, none of which is in the table."""
        if not len(words):
            return
        self._count += len(words)
        if self._direct is not None and self._make_room_direct(int(words.min()), int(words.max())):
            self._direct[words - self._base] = numbers
            return
        if self._direct is not None or 2 * self._count > len(self._numbers):
            self._rehash()
        self._insert_hashed(words, numbers)

    # --- addressed by the word ------------------------------------------------------------------

    def _make_room_direct(self, low: int, high: int) -> bool:
        """Stretch the table over low..high as well; False if it would be too empty or too long."""
        assert self._direct is not None
        size = len(self._direct) - 1
        begin, end = (self._base, self._base + size) if size else (low, low)
        if begin <= low and high < end:
            return True
        wide = max(end, high + 1) - min(begin, low)
        if wide > min(DIRECT_SIZE_MAX, max(DIRECT_SIZE_FREE, DIRECT_PER_WORD * self._count)):
            return False
        # As much room again beyond the end that was too near, so that stretching costs constant time.
        room = min(2 * wide, DIRECT_SIZE_MAX)
        base = begin if low >= begin else max(max(end, high + 1) - room, -(1 << 63))
        stretched = np.full(room + 1, _ABSENT, dtype=np.int64)
        stretched[begin - base : begin - base + size] = self._direct[:size]
        self._direct, self._base = stretched, base
        return True

    # --- hashed ---------------------------------------------------------------------------------

    def _find_hashed(self, words: Vector) -> Vector:
        places = _scatter(words, self._bits)
        numbers = self._numbers.take(places)
        other = self._words.take(places) != words
        other &= numbers >= 0
        rows = np.flatnonzero(other)
        last = len(self._numbers) - 1
        while len(rows):
            places = (places[rows] if len(places) == len(words) else places) + 1 & last
            numbers[rows] = found = self._numbers.take(places)
            going = np.flatnonzero((self._words.take(places) != words[rows]) & (found >= 0))
            rows, places = rows[going], places[going]
        return numbers

    def _insert_hashed(self, words: Vector, numbers: Vector) -> None:
        places = _scatter(words, self._bits)
        last = len(self._numbers) - 1
        while len(words):
            free = np.flatnonzero(self._numbers.take(places) < 0)
            self._numbers[places[free]] = numbers[free]
            won = self._numbers.take(places) == numbers
            self._words[places[won]] = words[won]
            left = ~won
            words, numbers, places = words[left], numbers[left], places[left] + 1 & last

    def _rehash(self) -> None:
        """A hash table with room for twice the count, from whatever there was."""
        if self._direct is not None:
            held = np.flatnonzero(self._direct >= 0)
            words, numbers = held + self._base, self._direct[held]
            self._direct = None
        else:
            held = np.flatnonzero(self._numbers >= 0)
            words, numbers = self._words[held], self._numbers[held]
        self._bits = max(_HASHED_BITS_MIN, (4 * self._count - 1).bit_length())
        self._numbers = np.full(1 << self._bits, _ABSENT, dtype=np.int64)
        self._words = np.zeros(1 << self._bits, dtype=np.int64)
        self._insert_hashed(words, numbers)
