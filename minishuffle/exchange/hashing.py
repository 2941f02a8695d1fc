"""The stable 64-bit hash: of one canonical key in plain Python, of whole Arrow arrays with numpy.

Both give the same numbers on every machine and in every run. An integer is hashed by the finaliser of
splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014); what
is not an integer is first made a 64-bit word that a tag of its kind tells apart; strings and bytes go
through the finaliser eight little-endian bytes at a time, those over 64 bytes are digested by BLAKE2b.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.errors import UsageError

__all__ = ["KEY_TYPES", "family", "fixed_values", "hash_array", "hash_form", "mix_tuple", "text_buffers"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

KEY_TYPES: Final = "bool, int, float, Decimal, str, bytes, datetime, date, None, or a tuple of these"

_MASK: Final = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB

_UNSIGNED: Final = 0x9E37_79B9_7F4A_7C15
_FLOAT: Final = 0xD1B5_4A32_D192_ED03
_DECIMAL: Final = 0xABC9_8388_FB8F_AC03
_TIMESTAMP: Final = 0x8CB9_2BA7_2F3D_8DD7
_DATE: Final = 0xAEF1_7502_108E_F2D9
_TEXT: Final = 0xF135_7AEA_2E62_A9C5
_BINARY: Final = 0xC2B2_AE3D_27D4_EB4F
_TUPLE: Final = 0xA0B4_28DB_3C60_3A5D
"""Odd words whose bits look random: each kind of value hashes in a domain of its own."""
_NULL: Final = 0xE703_7ED1_A0B4_28DB

WORDS_BYTES_MAX: Final = 64
"""Longer strings are digested by BLAKE2b."""
_NAN_BITS: Final = 0x7FF8_0000_0000_0000
_EPOCH: Final = datetime(1970, 1, 1)
_EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)


# --- one key --------------------------------------------------------------------------------------


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def _hash_int(value: int) -> int:
    if -(1 << 63) <= value < 1 << 63:
        return _mix(value & _MASK)
    if 0 < value <= _MASK:
        return _mix(value ^ _UNSIGNED)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return _digest(data, b"int")


def _hash_bytes(data: bytes, tag: int) -> int:
    if len(data) > WORDS_BYTES_MAX:
        return _digest(data, b"str" if tag == _TEXT else b"bytes")
    value = _mix(tag ^ len(data))
    for at in range(0, len(data), 8):
        value = _mix(value ^ int.from_bytes(data[at : at + 8], "little"))
    return value


def _digest(data: bytes, kind: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8, person=kind).digest(), "little")


def _hash_decimal(value: Decimal) -> int:
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    coefficient = int("".join(map(str, digits)))
    while coefficient % 10 == 0:
        coefficient, exponent = coefficient // 10, exponent + 1
    return _mix(_hash_int(-coefficient if sign else coefficient) ^ _mix((exponent & _MASK) ^ _DECIMAL))


def hash_form(form: Any) -> int:
    """The hash of a key in its canonical form: see ``keys.canonical``."""
    match form:
        case int():
            return _hash_int(form)
        case str():
            return _hash_bytes(form.encode(errors="surrogatepass"), _TEXT)
        case bytes():
            return _hash_bytes(form, _BINARY)
        case None:
            return _NULL
        case tuple():
            value = _mix(_TUPLE + len(form) & _MASK)
            for part in form:
                value = _mix(value ^ hash_form(part))
            return value
        case float():
            bits = _NAN_BITS if math.isnan(form) else struct.unpack("<Q", struct.pack("<d", form))[0]
            return _mix(bits ^ _FLOAT)
        case datetime():
            since = form.replace(tzinfo=None) - _EPOCH - (form.utcoffset() or timedelta())
            return _mix((since // _MICROSECOND * 1000 & _MASK) ^ _TIMESTAMP)
        case date():
            return _mix((form.toordinal() - _EPOCH_ORDINAL & _MASK) ^ _DATE)
        case Decimal():
            return _hash_decimal(form)
    raise AssertionError(f"{type(form).__name__} is no canonical form")


# --- whole arrays -----------------------------------------------------------------------------------

_S27, _S30, _S31, _S3, _S64 = (np.uint64(bits) for bits in (27, 30, 31, 3, 64))
_M1, _M2 = np.uint64(_FIRST), np.uint64(_SECOND)


def _mix_all(words: Vector) -> Vector:
    """:func:`_mix` of uint64 words, in place."""
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
    value = columns[0] ^ np.uint64(_mix(_TUPLE + len(columns) & _MASK))
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
        np.bitwise_xor(words, np.uint64(_UNSIGNED), out=words, where=words >= np.uint64(1 << 63))
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
    exact = {int(row): _hash_int(int(values[row])) for row in huge}
    values[np.isnan(values)] = np.uint64(_NAN_BITS).view(np.float64)
    bits = values.view(np.uint64)
    bits ^= np.uint64(_FLOAT)
    np.copyto(bits, words.view(np.uint64), where=integral)
    _mix_all(bits)
    for row, value in exact.items():
        bits[row] = value
    return bits


_PER_UNIT: Final = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_DAY_MILLISECONDS: Final = 86_400_000


def _hash_timestamps(array: pa.Array) -> Vector:
    words = fixed_values(array, np.int64) * np.int64(_PER_UNIT[array.type.unit])
    return _mix_all(words.view(np.uint64) ^ np.uint64(_TIMESTAMP))


def _hash_dates(array: pa.Array) -> Vector:
    if pa.types.is_date32(array.type):
        days = fixed_values(array, np.int32).astype(np.int64)
    else:
        days = fixed_values(array, np.int64) // _DAY_MILLISECONDS
    return _mix_all(days.view(np.uint64) ^ np.uint64(_DATE))


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
    exponents = (-left).view(np.uint64) ^ np.uint64(_DECIMAL)
    result = _mix_all(hashed ^ _mix_all(exponents))
    halves, rest = np.divmod(digits, _FIVES[left])
    floats = halves.astype(np.float64)
    exact = (rest == 0) & (floats.astype(np.int64) == halves)
    bits = np.ldexp(floats, -left).view(np.uint64) ^ np.uint64(_FLOAT)
    np.copyto(result, _mix_all(bits), where=exact)
    return result


def _pylist(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    return values


_DECIMAL_DIGITS_MAX: Final = 4300
"""An integer of more digits is too costly to make of a Decimal."""


def decimal_form(value: Decimal | None) -> int | float | Decimal | None:
    """The canonical form of a Decimal: an equal integer or float if there is one.

    Raises:
        UsageError: an integer of more than 4,300 digits.
    """
    if value is None:
        return None
    if not value.is_finite():
        return math.nan if value.is_nan() else float(value)
    if value.adjusted() > _DECIMAL_DIGITS_MAX:
        raise UsageError(
            f"a Decimal key has more than {_DECIMAL_DIGITS_MAX} digits before the point: key by str(value)"
        )
    if value == value.to_integral_value():
        return int(value)
    near = float(value)
    return near if near == value else value


# --- strings ----------------------------------------------------------------------------------------


def text_buffers(array: pa.Array) -> tuple[Vector, Vector]:
    """Offsets (n + 1) and the bytes they point into, of a string or binary array, without a copy."""
    kind = array.type
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    _, offsets, data = array.buffers()
    if offsets is None or not len(array):
        return np.zeros(len(array) + 1, np.int64), np.zeros(0, np.uint8)
    dtype = np.int64 if large else np.int32
    skipped = array.offset * np.dtype(dtype).itemsize
    numbers = np.frombuffer(offsets, dtype, count=len(array) + 1, offset=skipped)
    return numbers, np.frombuffer(b"" if data is None else data, np.uint8)


def _initial(tag: int) -> Vector:
    return np.array([_mix(tag ^ length) for length in range(WORDS_BYTES_MAX + 1)], dtype=np.uint64)


_INITIAL: Final = {_TEXT: _initial(_TEXT), _BINARY: _initial(_BINARY)}
_LOW_BYTES: Final = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)


def _hash_text(array: pa.Array, tag: int) -> Vector:
    offsets, data = text_buffers(array)
    begin = int(offsets[0])
    used = int(offsets[-1]) - begin
    # A copy that ends in zeros, so that whole words can be read at any offset.
    padded = np.empty((used >> 3) + 2, dtype=np.uint64)
    padded[used >> 3 :] = 0
    padded.view(np.uint8)[:used] = data[begin : begin + used]
    starts = (offsets[:-1] - begin).astype(np.int64)
    lengths = np.diff(offsets)
    longest = int(lengths.max(initial=0))
    long = np.flatnonzero(lengths > WORDS_BYTES_MAX) if longest > WORDS_BYTES_MAX else ()
    hashes = _INITIAL[tag].take(lengths, mode="clip")
    rows: Vector | None = None
    for at in range(0, min(longest, WORDS_BYTES_MAX), 8):
        hashes, rows = _absorb_word(hashes, rows, padded, starts, lengths, at)
    kind = b"str" if tag == _TEXT else b"bytes"
    memory = memoryview(padded.view(np.uint8))
    for row in long:
        start = int(starts[row])
        hashes[row] = _digest(bytes(memory[start : start + int(lengths[row])]), kind)
    return hashes


def _absorb_word(
    hashes: Vector, rows: Vector | None, padded: Vector, starts: Vector, lengths: Vector, at: int
) -> tuple[Vector, Vector | None]:
    """Mix the word at byte ``at`` of each string into its hash, where the string is that long.

    ``rows`` are those that had the word before, or None for all.
    """
    if rows is None:
        longer = lengths > at
        if not longer.all():
            rows = np.flatnonzero(longer)
    else:
        rows = rows[lengths[rows] > at]
    begins, left = (starts, lengths) if rows is None else (starts[rows], lengths[rows])
    words = _load_words(padded, begins + at)
    words &= _LOW_BYTES.take(left - at, mode="clip")
    words ^= hashes if rows is None else hashes[rows]
    _mix_all(words)
    if rows is None:
        return words, None
    hashes[rows] = words
    return hashes, rows


def _load_words(padded: Vector, at: Vector) -> Vector:
    """The little-endian words that begin at any byte, from the aligned ones that they straddle."""
    index = at >> 3
    low = padded.take(index)
    index += 1
    high = padded.take(index)
    shift = (at & 7).view(np.uint64)
    shift <<= _S3
    low >>= shift
    np.subtract(_S64, shift, out=shift)
    high <<= shift  # numpy shifts by 64 to 0
    low |= high
    return low


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


_PLAIN_TEXT: Final = {"text": (_TEXT, pa.large_string()), "binary": (_BINARY, pa.large_binary())}


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
        return np.full(len(array), _NULL, dtype=np.uint64)
    if group in _PLAIN_TEXT:
        tag, plain = _PLAIN_TEXT[group]
        whole = pa.types.is_fixed_size_binary(kind) or "view" in str(kind)
        hashes = _hash_text(array.cast(plain) if whole else array, tag)
    else:
        hashes = _kernel(kind, group)(array.cast(pa.uint8()) if pa.types.is_boolean(kind) else array)
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return hashes


def _kernel(kind: pa.DataType, group: str) -> Callable[[pa.Array], Vector]:
    if group == "timestamp":
        return _hash_timestamps
    if group == "date":
        return _hash_dates
    if pa.types.is_decimal(kind):
        return _hash_decimals
    return _hash_floats if pa.types.is_floating(kind) else _hash_integers
