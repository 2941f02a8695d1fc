"""Columns of keys as words: equal keys have equal words, and the words give the keys back."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.exchange.keys import BOOL8, UUIDS, Texts, family, fixed_values, hash_columns
from minishuffle.kernels.machinecode import text_kernel
from minishuffle.operators.wider_type import WIDE_DIGITS_MAX, as_type, wider

__all__ = [
    "FixedColumn",
    "KeyColumn",
    "TextColumn",
    "as_far_as_they_fit",
    "exactly",
    "key_column",
    "null_marks",
]

Vector: TypeAlias = "np.ndarray[Any, Any]"
Matrix: TypeAlias = "np.ndarray[Any, Any]"

TEXT_WORDS_MAX: Final = 8
_SHORT_BYTES_MAX: Final = 8 * TEXT_WORDS_MAX - 1
"""Longer texts are numbered."""
_LONG: Final = 255
"""In the place of the length: the text's number follows."""
_NULL: Final = 254
"""In the place of the length: there is no text."""
_ABSENT_NUMBER: Final = (1 << 55) - 1
_INTEGERS: Final = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_NAN: Final = np.float64("nan")


def null_marks(array: pa.Array) -> Vector | None:
    """Which values are null; None if none is."""
    if not array.null_count:
        return None
    marks: Vector = array.is_null().to_numpy(zero_copy_only=False)
    return marks


def exactly(array: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Keys in another type; None if one has no equal there.

    Raises:
        WrongColumns: a type cannot be a key.
    """
    if array.type == kind:
        return array
    if family(array.type) not in (family(kind), "null"):
        return None
    try:
        cast = as_type(array, kind)
    except pa.ArrowException:
        return None
    # Some casts lose a part of a value without a word; equal hashes say that the keys are equal.
    return None if _changed(array, cast).any() else cast


def as_far_as_they_fit(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Vector]:
    """Keys in another type, and which of them have no equal there: what stands for these is undefined."""
    if family(array.type) != family(kind):
        return pa.nulls(len(array), kind), array.is_valid().to_numpy(zero_copy_only=False)
    over = wider(array.type, kind) or kind
    if pa.types.is_decimal(kind):
        # pyarrow casts no integers to few digits, and to fewer bits it cuts digits off before it rescales.
        over = pa.decimal256(WIDE_DIGITS_MAX, kind.scale)
    elif pa.types.is_decimal(array.type) and not pa.types.is_integer(kind):
        over = pa.float64()  # pyarrow casts decimals to neither booleans nor float16
    # What is counted in other units would wrap around.
    has_unit = pa.types.is_timestamp(kind) or pa.types.is_duration(kind)
    try:
        cast = as_type(as_type(array, over, safe=has_unit), kind, safe=False)
    except pa.ArrowException:
        singles = [exactly(array.slice(row, 1), kind) for row in range(len(array))]
        cast = pa.concat_arrays([pa.nulls(1, kind) if single is None else single for single in singles])
    return cast, _changed(array, cast)


def _changed(array: pa.Array, cast: pa.Array) -> Vector:
    changed: Vector = hash_columns([array]) != hash_columns([cast])
    return changed


class KeyColumn:
    """One column of keys, all in one type.

    ``width`` is how many words a key takes.
    """

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self.width = 1

    def write_words(self, array: pa.Array, words: Matrix, at: int) -> None:
        """Fill the ``width`` columns of ``words`` from ``at`` on, which are zeros, with the keys; what stands
        for those of :meth:`beyond` is undefined."""
        raise NotImplementedError

    def widen(self, width: int) -> None:
        """A key takes at least so many words from now on; the caller writes the stored ones anew."""
        self.width = max(self.width, width)

    def width_for(self, array: pa.Array) -> int:
        """Prepare for these keys to be stored; the width that they need."""
        raise NotImplementedError

    @property
    def numbered(self) -> int:
        """How many keys have a number instead of words."""
        return 0

    def beyond(self, array: pa.Array) -> Vector | None:
        """Which keys no words of this width stand for, if there are such; they are not stored then."""
        return None

    def array(self, words: Matrix) -> pa.Array:
        """The keys of those words."""
        raise NotImplementedError


def _validity(nulls: Vector | None) -> pa.Buffer | None:
    return None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))


class FixedColumn(KeyColumn):
    """Keys of at most 64 bits: the integer, or the bits of a float of 64 bits; once there was a null, another
    word that says which are."""

    def write_words(self, array: pa.Array, words: Matrix, at: int) -> None:
        words[:, at] = self.values(array)
        if self.width == 2 and (nulls := null_marks(array)) is not None:
            words[nulls, at] = 0
            words[:, at + 1] = nulls

    def width_for(self, array: pa.Array) -> int:
        return 2 if array.null_count else 1

    def beyond(self, array: pa.Array) -> Vector | None:
        return null_marks(array) if self.width == 1 else None

    def values(self, array: pa.Array) -> Vector:
        """The words alone; without a copy for integers of 64 bits."""
        kind = self.kind
        if pa.types.is_null(kind):
            return np.zeros(len(array), np.int64)
        if pa.types.is_boolean(kind) or kind == BOOL8:
            return fixed_values(array.cast(pa.bool_()).cast(pa.uint8()), np.uint8).astype(np.int64)
        if pa.types.is_floating(kind):
            floats = fixed_values(array, f"f{kind.bit_width // 8}").astype(np.float64)
            floats += 0.0  # makes one of two zeros
            floats[np.isnan(floats)] = _NAN
            return floats.view(np.int64)
        return fixed_values(array, _INTEGERS[kind.bit_width]).astype(np.int64, copy=False)

    def array(self, words: Matrix) -> pa.Array:
        kind, values = self.kind, np.ascontiguousarray(words[:, 0])
        nulls = words[:, 1] != 0 if self.width == 2 else None
        if pa.types.is_null(kind):
            return pa.nulls(len(values))
        if pa.types.is_boolean(kind) or kind == BOOL8:
            return pa.array(values.astype(np.bool_), mask=nulls).cast(kind)
        if pa.types.is_floating(kind):
            numbers = values.view(np.float64).astype(f"f{kind.bit_width // 8}")
        else:
            numbers = values.astype(_INTEGERS[kind.bit_width])
        return pa.Array.from_buffers(kind, len(values), [_validity(nulls), pa.py_buffer(numbers)])


class TextColumn(KeyColumn):
    """Keys of any length: the length in the lowest byte, the bytes after it, then zeros. As many words as
    the longest key takes; those beyond ``TEXT_WORDS_MAX`` words have a number instead."""

    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        self._long: dict[bytes, int] = {}

    @property
    def numbered(self) -> int:
        return len(self._long)

    def _texts(self, array: pa.Array) -> Texts:
        """The keys' bytes; a null has none."""
        kind = self.kind
        if kind == UUIDS:
            array = array.storage
        elif pa.types.is_decimal(kind):
            validity, data = array.buffers()
            plain = pa.binary(kind.byte_width)
            array = pa.Array.from_buffers(plain, len(array), [validity, data], offset=array.offset)
        elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
            array = array.cast(pa.large_binary())
        if array.null_count or pa.types.is_fixed_size_binary(array.type):
            array = array.cast(pa.large_binary()).fill_null(b"")
        return Texts(array)

    def width_for(self, array: pa.Array) -> int:
        texts = self._texts(array)
        short = texts.lengths <= _SHORT_BYTES_MAX
        for row in np.flatnonzero(~short).tolist():
            self._long.setdefault(texts.text(row), len(self._long))
        return int(texts.lengths.max(initial=0, where=short)) // 8 + 1

    def write_words(self, array: pa.Array, words: Matrix, at: int) -> None:
        texts = self._texts(array)
        longest = text_kernel("write_texts", texts.offsets)(
            texts.offsets, texts.data, words.reshape(-1), words.shape[1], at, self.width, len(words)
        )
        if longest > _SHORT_BYTES_MAX:
            # Shorter ones that need more words than there are differ from all stored ones in their length.
            for row in np.flatnonzero(texts.lengths > _SHORT_BYTES_MAX).tolist():
                words[row, at : at + self.width] = 0
                words[row, at] = self._long.get(texts.text(row), _ABSENT_NUMBER) << 8 | _LONG
        if (nulls := null_marks(array)) is not None:
            words[nulls, at] = _NULL

    def array(self, words: Matrix) -> pa.Array:
        contents = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), 8 * words.shape[1])
        lengths = contents[:, 0].astype(np.int64)
        long, nulls = np.flatnonzero(lengths == _LONG).tolist(), lengths == _NULL
        lengths[long], lengths[nulls] = 0, 0
        inside = np.arange(contents.shape[1] - 1) < lengths[:, np.newaxis]
        data = contents[:, 1:][inside]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        buffers = [_validity(nulls), pa.py_buffer(offsets), pa.py_buffer(data)]
        stored = pa.Array.from_buffers(pa.large_binary(), len(words), buffers)
        if long:
            names, values = list(self._long), stored.to_pylist()
            for row in long:
                values[row] = names[int(words[row, 0]) >> 8]
            stored = pa.array(values, pa.large_binary())
        if pa.types.is_decimal(self.kind):
            width = self.kind.byte_width
            held = stored.fill_null(bytes(width)).cast(pa.binary(width))
            return pa.Array.from_buffers(self.kind, len(stored), [_validity(nulls), held.buffers()[1]])
        if self.kind == UUIDS:
            stored = stored.cast(self.kind.storage_type)
        return stored.cast(self.kind)


def key_column(kind: pa.DataType) -> KeyColumn:
    """A column for keys of that type.

    Raises:
        WrongColumns: the type cannot be a key.
    """
    group = family(kind)
    wide = group in ("text", "binary", "uuid") or (pa.types.is_decimal(kind) and kind.bit_width > 64)
    return TextColumn(kind) if wide else FixedColumn(kind)
