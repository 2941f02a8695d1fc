"""Numbers the keys of Arrow batches, a whole batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.dataflow.operators.wordtable import Growing, WordTable, first_rows
from minishuffle.errors import UsageError
from minishuffle.exchange.columnhash import family, fixed_values
from minishuffle.exchange.keys import hash_columns

__all__ = ["KeyIndex"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_INTEGERS: Final = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_NAN: Final = np.float64("nan")


class KeyIndex:
    """Slots (0, 1, …) of keys in the order in which they first appear.

    A key is a row of one or more columns. Nulls are equal to each other and to nothing else, NaNs and
    the two zeros likewise; a batch whose columns have other types than the first one's is cast, so
    that 1, 1.0 and True are one key.

    Keys of one column of numbers or moments are found by their value. Others are found by their hash
    and then compared with the stored key; should two keys ever have one hash, the index goes on with
    a dict, exact and slow.
    """

    def __init__(self, hash_keys: Callable[[Sequence[pa.Array]], Vector] = hash_columns) -> None:
        self._hash_keys = hash_keys
        self._columns: list[_FixedColumn | _BytesColumn] = []
        self._table = WordTable()
        self._null_slot = -1
        """Of a single column of fixed width, whose nulls have no word."""
        self._exact: dict[tuple[Any, ...], int] | None = None

    def __len__(self) -> int:
        return len(self._columns[0]) if self._columns else 0

    def keys(self, slots: Vector | None = None) -> list[pa.Array]:
        """The columns of the keys in ``slots``, or of all in order; in the types of the first batch."""
        return [column.array(slots) for column in self._columns]

    def lookup(self, arrays: Sequence[pa.Array]) -> Vector:
        """The slot (int64) of each row; new keys get the next slots.

        Raises:
            UsageError: a column's type cannot be a key, or its values do not fit the first batch's.
        """
        if not self._columns:
            self._columns = [_column_for(array) for array in arrays]
        given = [column.conform(array) for column, array in zip(self._columns, arrays, strict=True)]
        if self._exact is not None:
            return self._lookup_exact(given)
        only = self._columns[0]
        if len(given) == 1 and isinstance(only, _FixedColumn):
            return self._lookup_words(only, given[0])
        return self._lookup_hashed(given)

    def find(self, arrays: Sequence[pa.Array]) -> Vector:
        """The slot of each row as :meth:`lookup` gives it, but -1 for keys that are not there.

        Raises:
            UsageError: a column's type cannot be a key, or its values do not fit the first batch's.
        """
        if not self._columns:
            return np.full(len(arrays[0]), -1, dtype=np.int64)
        given = [column.conform(array) for column, array in zip(self._columns, arrays, strict=True)]
        only = self._columns[0]
        if self._exact is None and len(given) == 1 and isinstance(only, _FixedColumn):
            slots = self._table.find(only.words(given[0]))
            nulls = _nulls(given[0])
            if nulls is not None:
                slots[nulls] = self._null_slot
            return slots
        if self._exact is None:
            slots = self._table.find(self._hash_keys(given).view(np.int64))
            rows = np.flatnonzero(slots >= 0)
            asked = [_movable(array).take(pa.array(rows)) for array in given]
            if all(
                column.matches(slots[rows], array) for column, array in zip(self._columns, asked, strict=True)
            ):
                return slots
            self._exact = {key: slot for slot, key in enumerate(self._as_python(self.keys()))}
        exact = self._exact
        return np.array([exact.get(key, -1) for key in self._as_python(given)], dtype=np.int64)

    def _lookup_words(self, column: _FixedColumn, array: pa.Array) -> Vector:
        words, nulls = column.words(array), _nulls(array)
        if nulls is not None:
            return self._lookup_with_nulls(column, array, words, nulls)
        slots = self._table.find(words)
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            rows = missing[first_rows(words[missing])]
            self._table.insert(words[rows], len(self) + np.arange(len(rows)))
            column.append(array, rows)
            slots[missing] = self._table.find(words[missing])
        return slots

    def _lookup_with_nulls(
        self, column: _FixedColumn, array: pa.Array, words: Vector, nulls: Vector
    ) -> Vector:
        slots = np.empty(len(words), dtype=np.int64)
        valid = np.flatnonzero(~nulls)
        words = words[valid]
        slots[valid] = found = self._table.find(words)
        missing = valid[found < 0]
        rows = missing[first_rows(words[found < 0])]
        numbers = len(self) + np.arange(len(rows))
        fresh = rows
        if self._null_slot < 0:
            null_row = int(np.argmax(nulls))
            before = int(np.searchsorted(rows, null_row))
            numbers[before:] += 1
            self._null_slot = len(self) + before
            fresh = np.insert(rows, before, null_row)
        self._table.insert(column.words(array)[rows], numbers)
        column.append(array, fresh)
        if len(missing):
            slots[valid] = self._table.find(words)
        slots[nulls] = self._null_slot
        return slots

    def _lookup_hashed(self, arrays: list[pa.Array]) -> Vector:
        words = self._hash_keys(arrays).view(np.int64)
        slots = self._table.find(words)
        known = len(self)
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            rows = missing[first_rows(words[missing])]
            self._append(arrays, rows)
            self._table.insert(words[rows], known + np.arange(len(rows)))
            slots[missing] = self._table.find(words[missing])
        if all(column.matches(slots, array) for column, array in zip(self._columns, arrays, strict=True)):
            return slots
        for column in self._columns:
            column.truncate(known)
        self._exact = {key: slot for slot, key in enumerate(self._as_python(self.keys()))}
        return self._lookup_exact(arrays)

    def _append(self, arrays: list[pa.Array], rows: Vector) -> None:
        for column, array in zip(self._columns, arrays, strict=True):
            column.append(array, rows)

    def _lookup_exact(self, arrays: list[pa.Array]) -> Vector:
        exact = self._exact
        assert exact is not None
        known = len(exact)
        slots = [exact.setdefault(key, len(exact)) for key in self._as_python(arrays)]
        numbers = np.array(slots, dtype=np.int64)
        fresh = np.flatnonzero(numbers >= known)
        self._append(arrays, fresh[first_rows(numbers[fresh])])
        return numbers

    def _as_python(self, arrays: list[pa.Array]) -> list[tuple[Any, ...]]:
        columns = [column.as_python(array) for column, array in zip(self._columns, arrays, strict=True)]
        return list(zip(*columns, strict=True))


def _nulls(array: pa.Array) -> Vector | None:
    if not array.null_count:
        return None
    marks: Vector = array.is_null().to_numpy(zero_copy_only=False)
    return marks


def _movable(array: pa.Array) -> pa.Array:
    """The array in a type that pyarrow can take rows from: it cannot from views of texts and bytes."""
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        return array.cast(pa.large_binary())
    return array


def _taken(values: Growing, slots: Vector | None) -> Vector:
    return values.values if slots is None else values.values.take(slots)


class _Column:
    """What both kinds of stored columns share: the type, and which slots are null."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self._nulls = Growing(np.bool_)
        self._has_nulls = False

    def __len__(self) -> int:
        return len(self._nulls)

    def conform(self, array: pa.Array) -> pa.Array:
        """The array in the type of the stored keys."""
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if array.type == self.kind:
            return array
        if family(array.type) not in (family(self.kind), "null"):
            raise self._misfit(array, "it is of another kind")
        try:
            cast = array.cast(self.kind)
        except pa.ArrowException as error:
            raise self._misfit(array, str(error)) from error
        # Some casts lose a part of a value without a word; equal hashes say that the keys are equal.
        if not np.array_equal(hash_columns([array]), hash_columns([cast])):
            raise self._misfit(array, "a value would change")
        return cast

    def _misfit(self, array: pa.Array, why: str) -> UsageError:
        return UsageError(
            f"a key column of type {array.type} does not fit the keys of type {self.kind} that came before "
            f"({why}): cast the column to one type first"
        )

    def _append_nulls(self, array: pa.Array, rows: Vector) -> None:
        nulls = _nulls(array)
        self._has_nulls |= nulls is not None
        self._nulls.append(np.zeros(len(rows), np.bool_) if nulls is None else nulls[rows])

    def _same(self, equal: Vector, slots: Vector, array: pa.Array) -> bool:
        """Whether rows are equal to the keys in ``slots``, given where values are, nulls aside."""
        nulls = _nulls(array)
        if nulls is None and not self._has_nulls:
            return bool(equal.all())
        stored = self._nulls.values.take(slots)
        if nulls is None:
            return bool((equal & ~stored).all())
        return bool(((stored == nulls) & (equal | nulls)).all())

    def _validity(self, slots: Vector | None = None) -> pa.Buffer | None:
        if not self._has_nulls:
            return None
        return pa.py_buffer(np.packbits(~_taken(self._nulls, slots), bitorder="little"))


class _FixedColumn(_Column):
    """Keys of at most 64 bits, each kept as a word that is equal where the keys are."""

    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        self._words = Growing(np.int64)

    def words(self, array: pa.Array) -> Vector:
        """The values as int64; what stands for a null is undefined."""
        kind = self.kind
        if pa.types.is_null(kind):
            return np.zeros(len(array), np.int64)
        if pa.types.is_boolean(kind):
            return fixed_values(array.cast(pa.uint8()), np.uint8).astype(np.int64)
        if pa.types.is_floating(kind):
            floats = fixed_values(array, f"f{kind.bit_width // 8}").astype(np.float64)
            floats += 0.0  # makes one of two zeros
            floats[np.isnan(floats)] = _NAN
            return floats.view(np.int64)
        return fixed_values(array, _INTEGERS[kind.bit_width]).astype(np.int64, copy=False)

    def append(self, array: pa.Array, rows: Vector) -> None:
        self._words.append(self.words(array)[rows])
        self._append_nulls(array, rows)

    def truncate(self, length: int) -> None:
        self._words.truncate(length)
        self._nulls.truncate(length)

    def matches(self, slots: Vector, array: pa.Array) -> bool:
        """Whether the rows are the keys in ``slots``."""
        return self._same(self._words.values.take(slots) == self.words(array), slots, array)

    def as_python(self, array: pa.Array) -> list[Any]:
        """A hashable value for each row, None for null."""
        values: list[Any] = self.words(array).tolist()
        nulls = _nulls(array)
        if nulls is None:
            return values
        return [None if null else value for null, value in zip(nulls.tolist(), values, strict=True)]

    def array(self, slots: Vector | None) -> pa.Array:
        kind, words = self.kind, _taken(self._words, slots)
        length = len(words)
        if pa.types.is_null(kind):
            return pa.nulls(length)
        if pa.types.is_boolean(kind):
            return pa.array(words.astype(np.bool_), mask=_taken(self._nulls, slots))
        if pa.types.is_floating(kind):
            numbers = words.view(np.float64).astype(f"f{kind.bit_width // 8}")
        else:
            numbers = words.astype(_INTEGERS[kind.bit_width])
        return pa.Array.from_buffers(kind, length, [self._validity(slots), pa.py_buffer(numbers)])


class _BytesColumn(_Column):
    """Keys of any length, kept as their bytes one after the other."""

    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        self._data = Growing(np.uint8)
        self._ends = Growing(np.int64)
        self._ends.append(np.zeros(1, np.int64))

    def _binary(self, array: pa.Array) -> pa.Array:
        if not pa.types.is_decimal(self.kind):
            return array.cast(pa.large_binary())
        width = self.kind.byte_width
        validity, data = array.buffers()
        plain = pa.Array.from_buffers(pa.binary(width), len(array), [validity, data], offset=array.offset)
        return plain.cast(pa.large_binary())

    def _stored(self) -> pa.Array:
        buffers = [self._validity(), pa.py_buffer(self._ends.values), pa.py_buffer(self._data.values)]
        return pa.Array.from_buffers(pa.large_binary(), len(self), buffers)

    def append(self, array: pa.Array, rows: Vector) -> None:
        taken = self._binary(array).take(pa.array(rows)).fill_null(b"")
        _, offsets, data = taken.buffers()
        if len(rows):
            ends = np.frombuffer(offsets, np.int64, count=len(taken) + 1, offset=8 * taken.offset)
            self._ends.append(ends[1:] + (len(self._data) - int(ends[0])))
            self._data.append(np.frombuffer(data, np.uint8)[int(ends[0]) : int(ends[-1])])
        self._append_nulls(array, rows)

    def truncate(self, length: int) -> None:
        self._data.truncate(int(self._ends.values[length]))
        self._ends.truncate(length + 1)
        self._nulls.truncate(length)

    def matches(self, slots: Vector, array: pa.Array) -> bool:
        """Whether the rows are the keys in ``slots``."""
        equal = pc.equal(self._stored().take(pa.array(slots)), self._binary(array)).fill_null(False)
        return self._same(equal.to_numpy(zero_copy_only=False), slots, array)

    def as_python(self, array: pa.Array) -> list[Any]:
        """A hashable value for each row, None for null."""
        values: list[Any] = self._binary(array).to_pylist()
        return values

    def array(self, slots: Vector | None) -> pa.Array:
        stored = self._stored() if slots is None else self._stored().take(pa.array(slots))
        if pa.types.is_decimal(self.kind):
            width = self.kind.byte_width
            held = stored.fill_null(bytes(width)).cast(pa.binary(width))
            return pa.Array.from_buffers(self.kind, len(stored), [self._validity(slots), held.buffers()[1]])
        return stored.cast(self.kind)


def _column_for(array: pa.Array) -> _FixedColumn | _BytesColumn:
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    group = family(kind)
    wide = group in ("text", "binary") or (pa.types.is_decimal(kind) and kind.bit_width > 64)
    return _BytesColumn(kind) if wide else _FixedColumn(kind)
