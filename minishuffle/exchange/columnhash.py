"""The stable hash of whole Arrow arrays with numpy: for each value what ``hashing`` says of it alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.errors import UsageError
from minishuffle.exchange.hashing import (
    BINARY,
    DATE,
    DECIMAL,
    FIRST,
    FLOAT,
    MASK,
    NAN_BITS,
    NULL,
    SECOND,
    TEXT,
    TIMESTAMP,
    TUPLE,
    UNSIGNED,
    WORDS_BYTES_MAX,
    decimal_form,
    digest,
    hash_form,
    hash_int,
    mix,
)
from minishuffle.exchange.texts import Texts

__all__ = ["family", "fixed_values", "hash_array", "mix_tuple"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_S27, _S30, _S31 = (np.uint64(bits) for bits in (27, 30, 31))
_M1, _M2 = np.uint64(FIRST), np.uint64(SECOND)


def _mix_all(words: Vector) -> Vector:
    """:func:`mix` of each uint64 word, in place."""
    shifted = words >> _S30
    words ^= shifted
    words *= _M1
    np.right_shift(words, _S27, out=shifted)
    words ^= shifted
    words *= _M2
    np.right_shift(words, _S31, out=shifted)
    words ^= shifted
    return words


def mix_tuple(columns: Sequence[Vector]) -> Vector:
    """The hashes of tuples from the hashes of their parts, which are kept."""
    value = columns[0] ^ np.uint64(mix(TUPLE + len(columns) & MASK))
    _mix_all(value)
    for part in columns[1:]:
        value ^= part
        _mix_all(value)
    return value


def fixed_values(array: pa.Array, dtype: Any) -> Vector:
    """The values of a fixed-width array, without a copy; what lies under nulls is undefined."""
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array), dtype)
    width = np.dtype(dtype).itemsize
    return np.frombuffer(buffer, dtype, count=len(array), offset=array.offset * width)


def _hash_integers(array: pa.Array) -> Vector:
    kind = array.type
    values = fixed_values(array, kind.to_pandas_dtype())
    if pa.types.is_signed_integer(kind):
        return _mix_all(values.astype(np.int64).view(np.uint64))
    words = values.astype(np.uint64)
    if kind.bit_width == 64:
        np.bitwise_xor(words, np.uint64(UNSIGNED), out=words, where=words >= np.uint64(1 << 63))
    return _mix_all(words)


def _hash_floats(array: pa.Array) -> Vector:
    values = fixed_values(array, f"f{array.type.bit_width // 8}").astype(np.float64)
    with np.errstate(invalid="ignore"):
        words = values.astype(np.int64)
    integral = words == values
    integral &= values < 2.0**63
    if integral.all():
        return _mix_all(words.view(np.uint64))
    huge = np.flatnonzero((np.abs(values) >= 2.0**63) & np.isfinite(values) & ~integral)
    exact = {int(row): hash_int(int(values[row])) for row in huge}
    values[np.isnan(values)] = np.uint64(NAN_BITS).view(np.float64)
    bits = values.view(np.uint64)
    bits ^= np.uint64(FLOAT)
    np.copyto(bits, words.view(np.uint64), where=integral)
    _mix_all(bits)
    for row, value in exact.items():
        bits[row] = value
    return bits


_PER_UNIT: Final = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_DAY_MILLISECONDS: Final = 86_400_000


def _hash_timestamps(array: pa.Array) -> Vector:
    words = fixed_values(array, np.int64) * np.int64(_PER_UNIT[array.type.unit])
    return _mix_all(words.view(np.uint64) ^ np.uint64(TIMESTAMP))


def _hash_dates(array: pa.Array) -> Vector:
    if pa.types.is_date32(array.type):
        days = fixed_values(array, np.int32).astype(np.int64)
    else:
        days = fixed_values(array, np.int64) // _DAY_MILLISECONDS
    return _mix_all(days.view(np.uint64) ^ np.uint64(DATE))


_FIVES: Final = np.array([5**power for power in range(28)], dtype=np.int64)


def _hash_decimals(array: pa.Array) -> Vector:
    """Coefficients that fit int64 at once, the others one by one."""
    scale = array.type.scale
    if array.type.bit_width < 128:
        array = array.cast(pa.decimal128(array.type.precision, scale))
    if not 0 <= scale < len(_FIVES) or array.type.bit_width > 128:
        return np.array([hash_form(decimal_form(value)) for value in _pylist(array)], dtype=np.uint64)
    halves = np.frombuffer(array.buffers()[1], np.int64).reshape(-1, 2)
    halves = halves[array.offset : array.offset + len(array)]
    digits = halves[:, 0].copy()
    wide = np.flatnonzero(halves[:, 1] != digits >> 63)
    left = np.full(len(digits), scale)
    for _ in range(scale):
        even = (digits % 10 == 0) & (left > 0)
        if not even.any():
            break
        digits[even] //= 10
        left -= even
    hashes = _mix_all(digits.copy().view(np.uint64))
    fraction = np.flatnonzero(left)
    if len(fraction):
        hashes[fraction] = _hash_fractions(digits[fraction], left[fraction], hashes[fraction])
    for row in wide:
        hashes[row] = hash_form(decimal_form(array[row].as_py()))
    return hashes


def _hash_fractions(digits: Vector, left: Vector, hashed: Vector) -> Vector:
    """Of digits / 10**left, which are no integers; as floats where a float is equal."""
    exponents = (-left).view(np.uint64) ^ np.uint64(DECIMAL)
    result = _mix_all(hashed ^ _mix_all(exponents))
    halves, rest = np.divmod(digits, _FIVES[left])
    floats = halves.astype(np.float64)
    exact = (rest == 0) & (floats.astype(np.int64) == halves)
    bits = np.ldexp(floats, -left).view(np.uint64) ^ np.uint64(FLOAT)
    np.copyto(result, _mix_all(bits), where=exact)
    return result


def _pylist(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    return values


# --- strings ----------------------------------------------------------------------------------------


def _initial(tag: int) -> Vector:
    return np.array([mix(tag ^ length) for length in range(WORDS_BYTES_MAX + 1)], dtype=np.uint64)


_INITIAL: Final = {TEXT: _initial(TEXT), BINARY: _initial(BINARY)}


def _hash_text(array: pa.Array, tag: int) -> Vector:
    texts = Texts(array)
    lengths = texts.lengths
    longest = int(lengths.max(initial=0))
    hashes = _INITIAL[tag].take(lengths, mode="clip")
    rows: Vector | None = None
    for at in range(0, min(longest, WORDS_BYTES_MAX), 8):
        hashes, rows = _absorb_word(hashes, rows, texts, at)
    kind = b"str" if tag == TEXT else b"bytes"
    if longest > WORDS_BYTES_MAX:
        for row in np.flatnonzero(lengths > WORDS_BYTES_MAX).tolist():
            hashes[row] = digest(texts.text(row), kind)
    return hashes


def _absorb_word(hashes: Vector, rows: Vector | None, texts: Texts, at: int) -> tuple[Vector, Vector | None]:
    """Mix the word at byte ``at`` of each text into its hash, where the text is that long.

    ``rows`` are those that had the word before, or None for all.
    """
    if rows is None:
        longer = texts.lengths > at
        if not longer.all():
            rows = np.flatnonzero(longer)
    else:
        rows = rows[texts.lengths[rows] > at]
    words = texts.words(at, rows)
    words ^= hashes if rows is None else hashes[rows]
    _mix_all(words)
    if rows is None:
        return words, None
    hashes[rows] = words
    return hashes, rows


# --- by type ----------------------------------------------------------------------------------------


def family(kind: pa.DataType) -> str:
    """Which keys of that Arrow type can be equal to which: number, text, binary, timestamp, date, null.

    Raises:
        UsageError: the type cannot be a key.
    """
    is_a = pa.types
    if is_a.is_integer(kind) or is_a.is_floating(kind) or is_a.is_boolean(kind) or is_a.is_decimal(kind):
        return "number"
    if is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_string_view(kind):
        return "text"
    if is_a.is_binary(kind) or is_a.is_large_binary(kind):
        return "binary"
    if is_a.is_binary_view(kind) or is_a.is_fixed_size_binary(kind):
        return "binary"
    for name in ("timestamp", "date", "null"):
        if getattr(is_a, f"is_{name}")(kind):
            return name
    raise UsageError(
        f"a column of type {kind} cannot be a key: cast it to an integer, float, string, binary, boolean, "
        "decimal, timestamp or date type"
    )


_PLAIN_TEXT: Final = {"text": (TEXT, pa.large_string()), "binary": (BINARY, pa.large_binary())}


def hash_array(array: pa.Array) -> Vector:
    """The hash of each value (uint64), equal to :func:`hash_form` of its canonical form.

    Raises:
        UsageError: the type cannot be a key.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    group = family(kind)
    if group == "null":
        return np.full(len(array), NULL, dtype=np.uint64)
    if group in _PLAIN_TEXT:
        tag, plain = _PLAIN_TEXT[group]
        whole = pa.types.is_fixed_size_binary(kind) or "view" in str(kind)
        hashes = _hash_text(array.cast(plain) if whole else array, tag)
    else:
        hashes = _kernel(kind, group)(array.cast(pa.uint8()) if pa.types.is_boolean(kind) else array)
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = NULL
    return hashes


def _kernel(kind: pa.DataType, group: str) -> Callable[[pa.Array], Vector]:
    if group == "timestamp":
        return _hash_timestamps
    if group == "date":
        return _hash_dates
    if pa.types.is_decimal(kind):
        return _hash_decimals
    return _hash_floats if pa.types.is_floating(kind) else _hash_integers
