"""Numbers the keys of Arrow batches, a whole batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.exchange.schemas import decoded
from minishuffle.operators.key_columns import (
    FixedColumn,
    KeyColumn,
    as_far_as_they_fit,
    exactly,
    key_column,
)
from minishuffle.operators.word_table import WordTable

__all__ = ["KeyIndex"]

Vector: TypeAlias = "np.ndarray[Any, Any]"
Matrix: TypeAlias = "np.ndarray[Any, Any]"


class KeyIndex:
    """Slots (0, 1, …) of keys in the order in which they first appear.

    A key is a row of one or more columns, of the same types in all batches but for dictionaries, which are
    decoded. Nulls are equal to each other and to nothing else, NaNs and the two zeros likewise. Keys of other
    types can be found: 1, 1.0 and True are one key.

    A key's words stand in one row of a :class:`WordTable`, those of its columns one after the other. When a
    column needs more of them, all rows are written anew.
    """

    def __init__(self) -> None:
        self._columns: list[KeyColumn] = []
        self._table = WordTable(1)

    def __len__(self) -> int:
        return len(self._table)

    def keys(self, slots: Vector | None = None) -> list[pa.Array]:
        """The columns of the keys in ``slots``, or of all in order."""
        rows = self._table.rows if slots is None else self._table.rows.take(slots, axis=0)
        arrays, at = [], 0
        for column in self._columns:
            arrays.append(column.array(rows[:, at : at + column.width]))
            at += column.width
        return arrays

    def lookup(self, arrays: Sequence[pa.Array]) -> Vector:
        """The slot (int64) of each row; new keys get the next slots.

        Raises:
            WrongColumns: a column's type cannot be a key.
            ResourceExhausted: there are too many keys.
        """
        given = list(map(decoded, arrays))
        if not self._columns:
            self._columns = [key_column(array.type) for array in given]
            self._table = WordTable(len(self._columns))
        assert [array.type for array in given] == [column.kind for column in self._columns]
        words = self._words(given)
        slots, absent = self._find(given, words)
        if absent:
            if self._make_room(given):
                words = self._words(given)
            new = np.flatnonzero(slots < 0)
            slots[new] = self._table.add(words[new])
        return slots

    def find(self, arrays: Sequence[pa.Array]) -> Vector:
        """The slot of each row as :meth:`lookup` gives it, but -1 for keys that are not there, of whatever
        type.

        Raises:
            WrongColumns: a column's type cannot be a key.
        """
        absent = np.zeros(len(arrays[0]), dtype=np.bool_)
        if not self._columns:
            return np.full(len(absent), -1, dtype=np.int64)
        given = []
        for column, array in zip(self._columns, map(decoded, arrays), strict=True):
            fitted = exactly(array, column.kind)
            if fitted is None:
                fitted, unlike = as_far_as_they_fit(array, column.kind)
                absent |= unlike
            given.append(fitted)
        slots, _ = self._find(given, self._words(given))
        slots[absent] = -1
        return slots

    def _find(self, given: list[pa.Array], words: Matrix) -> tuple[Vector, int]:
        """The slot of each key, -1 for a new key, and more than 0 if there are new keys."""
        slots, absent = self._table.find(words)
        for column, array in zip(self._columns, given, strict=True):
            beyond = column.beyond(array)
            if beyond is not None:
                slots[beyond] = -1
                absent += 1
        return slots, absent

    def _words(self, given: list[pa.Array]) -> Matrix:
        """A matrix with one row of int64 words for each key, as the table holds them."""
        only = self._columns[0]
        if isinstance(only, FixedColumn) and self._table.width == 1:
            return only.values(given[0]).reshape(-1, 1)
        words = np.zeros((len(given[0]), self._table.width), dtype=np.int64)
        at = 0
        for column, array in zip(self._columns, given, strict=True):
            column.write_words(array, words, at)
            at += column.width
        return words

    def _make_room(self, given: list[pa.Array]) -> bool:
        """Widen the rows if these keys do not fit into them, or have numbers by now that they had not; False:
        what their words are is as it was."""
        numbered = sum(column.numbered for column in self._columns)
        widths = [column.width_for(array) for column, array in zip(self._columns, given, strict=True)]
        if any(width > column.width for column, width in zip(self._columns, widths, strict=True)):
            stored = self.keys()
            for column, width in zip(self._columns, widths, strict=True):
                column.widen(width)
            self._store(stored)
            return True
        return sum(column.numbered for column in self._columns) > numbered

    def _store(self, keys: list[pa.Array]) -> None:
        """Write all rows anew; there are these keys, in order of their slots."""
        for column, array in zip(self._columns, keys, strict=True):
            column.widen(column.width_for(array))
        self._table = WordTable(sum(column.width for column in self._columns))
        self._table.add(self._words(keys))
