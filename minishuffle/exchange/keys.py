"""Canonical keys and their stable hash: the same for rows and for Arrow, on every machine and run.

Two Python keys that are equal by ``==`` have one canonical form. Beyond that, naive datetimes are
taken as UTC, and all NaNs are one key.

========================================  =====================================================
key                                       canonical form
========================================  =====================================================
bool, bool8, any integer width            the integer
float with an integral value, -0.0        that integer
any other float                           that float; one NaN
Decimal                                   the equal integer or float if there is one, else itself
str; bytes                                itself (hashed as UTF-8); itself
datetime, Arrow timestamp                 the moment in UTC (hashed as nanoseconds)
date                                      itself; never equal to a timestamp
time, Arrow time32 and time64             the time of day (hashed as nanoseconds since midnight);
                                          never equal to a number
timedelta, Arrow duration                 itself (hashed as nanoseconds); never equal to a number
UUID                                      itself (hashed as its 16 bytes); never equal to bytes
tuple                                     the canonical forms in order
None, Arrow null                          a key of its own
========================================  =====================================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from hashlib import blake2b
from itertools import chain
from operator import ne
from types import NoneType
from typing import Any, Final, TypeAlias
from uuid import UUID

import numpy as np
import pyarrow as pa

from minishuffle.errors import UsageError, WrongColumns
from minishuffle.exchange.schemas import decoded
from minishuffle.kernels.machinecode import kernel, text_kernel

__all__ = [
    "BOOL8",
    "KEY_TYPES",
    "Texts",
    "UUIDS",
    "canonical",
    "canonical_rows",
    "decimal_form",
    "destination",
    "family",
    "fixed_values",
    "hash_array",
    "hash_columns",
    "hash_form",
    "hash_rows",
    "key_array",
    "mix_tuple",
    "stable_hash",
]


# --- hashing --------------------------------------------------------------------------------------
#
# The stable 64-bit hash of one canonical key; whole Arrow arrays follow further down.
#
# It is the same number on every machine and in every run. An integer is hashed by the finaliser of
# splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014); what
# is not an integer is first made a 64-bit word that a tag of its kind tells apart; strings and bytes go
# through the finaliser eight little-endian bytes at a time, their length with the first. Longer integers
# are digested by BLAKE2b.


KEY_TYPES: Final = (
    "bool, int, float, Decimal, str, bytes, datetime, date, time, timedelta, UUID, None, or a tuple of these"
)

MASK: Final = (1 << 64) - 1
FIRST: Final = 0xBF58_476D_1CE4_E5B9
SECOND: Final = 0x94D0_49BB_1331_11EB

UNSIGNED: Final = 0x9E37_79B9_7F4A_7C15
FLOAT: Final = 0xD1B5_4A32_D192_ED03
DECIMAL: Final = 0xABC9_8388_FB8F_AC03
TIMESTAMP: Final = 0x8CB9_2BA7_2F3D_8DD7
DATE: Final = 0xAEF1_7502_108E_F2D9
TIME: Final = 0x9FB2_1C65_1E98_DF25
DURATION: Final = 0xC3A5_C85C_97CB_3127
TEXT: Final = 0xF135_7AEA_2E62_A9C5
BINARY: Final = 0xC2B2_AE3D_27D4_EB4F
TUPLE: Final = 0xA0B4_28DB_3C60_3A5D
"""Odd words whose bits look random: each kind of value hashes in a domain of its own."""
NULL: Final = 0xE703_7ED1_A0B4_28DB

SINGLE_BYTES_MAX: Final = 256
"""A longer string that is hashed by itself goes through the loop for columns."""
NAN_BITS: Final = 0x7FF8_0000_0000_0000
_EPOCH: Final = datetime(1970, 1, 1)
_EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)


def mix(word: int) -> int:
    """The finaliser of splitmix64, a permutation of the 64-bit words."""
    word = ((word ^ (word >> 30)) * FIRST) & MASK
    word = ((word ^ (word >> 27)) * SECOND) & MASK
    return word ^ (word >> 31)


def hash_int(value: int) -> int:
    """The hash of an integer of any size."""
    if -(1 << 63) <= value < 1 << 63:
        return mix(value & MASK)
    if 0 < value <= MASK:
        return mix(value ^ UNSIGNED)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return int.from_bytes(blake2b(data, digest_size=8, person=b"int").digest(), "little")


def _hash_bytes(data: bytes, tag: int) -> int:
    if len(data) > SINGLE_BYTES_MAX:
        return int(_hash_offsets(np.array([0, len(data)]), np.frombuffer(data, np.uint8), tag)[0])
    value = tag ^ len(data)
    for at in range(0, len(data), 8):
        value = mix(value ^ int.from_bytes(data[at : at + 8], "little"))
    return value


def _hash_decimal(value: Decimal) -> int:
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    coefficient = int("".join(map(str, digits)))
    while coefficient % 10 == 0:
        coefficient, exponent = coefficient // 10, exponent + 1
    return mix(hash_int(-coefficient if sign else coefficient) ^ mix((exponent & MASK) ^ DECIMAL))


def hash_form(form: Any) -> int:
    """The hash of a key in its canonical form: see ``keys.canonical``."""
    match form:
        case int():
            return hash_int(form)
        case str():
            return _hash_bytes(form.encode(errors="surrogatepass"), TEXT)
        case bytes():
            return _hash_bytes(form, BINARY)
        case None:
            return NULL
        case tuple():
            value = mix(TUPLE + len(form) & MASK)
            for part in form:
                value = mix(value ^ hash_form(part))
            return value
        case float():
            bits = NAN_BITS if math.isnan(form) else struct.unpack("<Q", struct.pack("<d", form))[0]
            return mix(bits ^ FLOAT)
        case datetime():
            since = form.replace(tzinfo=None) - _EPOCH - (form.utcoffset() or timedelta())
            return mix((since // _MICROSECOND * 1000 & MASK) ^ TIMESTAMP)
        case date():
            return mix((form.toordinal() - _EPOCH_ORDINAL & MASK) ^ DATE)
        case time():
            return mix(_since_midnight(form) // _MICROSECOND * 1000 ^ TIME)
        case timedelta():
            return mix((form // _MICROSECOND * 1000 & MASK) ^ DURATION)
        case Decimal():
            return _hash_decimal(form)
        case UUID():
            return _hash_bytes(form.bytes, BINARY)
    raise AssertionError(f"{type(form).__name__} is no canonical form")


def _since_midnight(value: time) -> timedelta:
    return datetime.combine(_EPOCH, value) - _EPOCH


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


# --- texts ----------------------------------------------------------------------------------------


Vector: TypeAlias = "np.ndarray[Any, Any]"


class Texts:
    """The bytes of a string or binary column (not a view, not of fixed size), nulls' as they are stored.

    ``offsets`` (int32 or int64, one more than texts) point into ``data`` (uint8).
    """

    def __init__(self, array: pa.Array) -> None:
        self.offsets, self.data = _buffers(array)

    @property
    def lengths(self) -> Vector:
        """The length of each text, in bytes."""
        return np.diff(self.offsets)

    def text(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()


def _buffers(array: pa.Array) -> tuple[Vector, Vector]:
    """Offsets (n + 1) and the bytes they point into, without a copy."""
    kind = array.type
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    _, offsets, data = array.buffers()
    dtype = np.int64 if large else np.int32
    if offsets is None or not len(array):
        return np.zeros(len(array) + 1, dtype), np.zeros(0, np.uint8)
    skipped = array.offset * np.dtype(dtype).itemsize
    numbers = np.frombuffer(offsets, dtype, count=len(array) + 1, offset=skipped)
    return numbers, np.frombuffer(b"" if data is None else data, np.uint8)


# --- columns --------------------------------------------------------------------------------------
#
# The stable hash of whole Arrow arrays: for each value what ``hash_form`` says of it alone.


def _hash_words(words: Vector, tag: int = 0, factor: int = 1) -> Vector:
    """The hash of each word (of 64 bits) x ``factor``."""
    hashes = np.empty(len(words), np.uint64)
    kernel("hash_words")(words.view(np.int64), factor, tag, hashes, len(words))
    return hashes


def _hash_offsets(offsets: Vector, data: Vector, tag: int) -> Vector:
    hashes = np.empty(len(offsets) - 1, np.uint64)
    text_kernel("hash_texts", offsets)(offsets, data, tag, hashes, len(hashes))
    return hashes


def mix_tuple(columns: Sequence[Vector]) -> Vector:
    """The hashes of tuples from the hashes of their parts, which are kept."""
    hashes = np.full(len(columns[0]), mix(TUPLE + len(columns) & MASK), np.uint64)
    for part in columns:
        kernel("combine_hashes")(hashes, part, len(hashes))
    return hashes


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
        return _hash_words(values.astype(np.int64, copy=False))
    words = values.astype(np.uint64)
    if kind.bit_width == 64:
        np.bitwise_xor(words, np.uint64(UNSIGNED), out=words, where=words >= np.uint64(1 << 63))
    return _hash_words(words)


def _hash_floats(array: pa.Array) -> Vector:
    values = fixed_values(array, f"f{array.type.bit_width // 8}").astype(np.float64)
    with np.errstate(invalid="ignore"):
        words = values.astype(np.int64)
    integral = words == values
    integral &= values < 2.0**63
    if integral.all():
        return _hash_words(words)
    huge = np.flatnonzero((np.abs(values) >= 2.0**63) & np.isfinite(values) & ~integral)
    exact = {int(row): hash_int(int(values[row])) for row in huge}
    values[np.isnan(values)] = np.uint64(NAN_BITS).view(np.float64)
    bits = values.view(np.uint64)
    bits ^= np.uint64(FLOAT)
    np.copyto(bits, words.view(np.uint64), where=integral)
    hashes = _hash_words(bits)
    for row, value in exact.items():
        hashes[row] = value
    return hashes


_PER_UNIT: Final = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_DAY_MILLISECONDS: Final = 86_400_000


def _hash_timestamps(array: pa.Array) -> Vector:
    return _hash_words(fixed_values(array, np.int64), TIMESTAMP, _PER_UNIT[array.type.unit])


def _hash_times(array: pa.Array) -> Vector:
    bits = array.type.bit_width
    values = fixed_values(array, f"i{bits // 8}").astype(np.int64)
    return _hash_words(values, TIME, _PER_UNIT[array.type.unit])


def _hash_durations(array: pa.Array) -> Vector:
    return _hash_words(fixed_values(array, np.int64), DURATION, _PER_UNIT[array.type.unit])


def _hash_dates(array: pa.Array) -> Vector:
    if pa.types.is_date32(array.type):
        days = fixed_values(array, np.int32).astype(np.int64)
    else:
        days = fixed_values(array, np.int64) // _DAY_MILLISECONDS
    return _hash_words(days, DATE)


_FIVES: Final = np.array([5**power for power in range(28)], dtype=np.int64)


def _hash_decimals(array: pa.Array) -> Vector:
    """Coefficients that fit int64 at once, the others one by one."""
    scale = array.type.scale
    if array.type.bit_width < 128:
        # What does not fit its type is hashed too: see ``as_far_as_they_fit``.
        array = array.cast(pa.decimal128(38, scale))
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
    hashes = _hash_words(digits)
    fraction = np.flatnonzero(left)
    if len(fraction):
        hashes[fraction] = _hash_fractions(digits[fraction], left[fraction], hashes[fraction])
    for row in wide:
        hashes[row] = hash_form(decimal_form(array[row].as_py()))
    return hashes


def _hash_fractions(digits: Vector, left: Vector, hashed: Vector) -> Vector:
    """Hashes of digits / 10**left, which are no integers; as floats where a float is equal."""
    result = _hash_words(hashed ^ _hash_words(-left, DECIMAL))
    halves, rest = np.divmod(digits, _FIVES[left])
    floats = halves.astype(np.float64)
    exact = (rest == 0) & (floats.astype(np.int64) == halves)
    np.copyto(result, _hash_words(np.ldexp(floats, -left), FLOAT), where=exact)
    return result


def _pylist(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    return values


# --- by type ----------------------------------------------------------------------------------------


UUIDS: Final = pa.uuid()
BOOL8: Final = pa.bool8()


def family(kind: pa.DataType) -> str:
    """Which keys of that Arrow type can be equal to which: number, text, binary, timestamp, date, time,
    duration, uuid, null.

    Raises:
        WrongColumns: the type cannot be a key.
    """
    is_a = pa.types
    if kind == BOOL8:
        return "number"
    if kind == UUIDS:
        return "uuid"
    if is_a.is_integer(kind) or is_a.is_floating(kind) or is_a.is_boolean(kind) or is_a.is_decimal(kind):
        return "number"
    if is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_string_view(kind):
        return "text"
    if is_a.is_binary(kind) or is_a.is_large_binary(kind):
        return "binary"
    if is_a.is_binary_view(kind) or is_a.is_fixed_size_binary(kind):
        return "binary"
    for name in ("timestamp", "date", "time", "duration", "null"):
        if getattr(is_a, f"is_{name}")(kind):
            return name
    raise WrongColumns(
        f"a column of type {kind} cannot be a key: cast it to an integer, float, string, binary, boolean, "
        "decimal, timestamp, date, time or duration type"
    )


_PLAIN_TEXT: Final = {
    "text": (TEXT, pa.large_string()),
    "binary": (BINARY, pa.large_binary()),
    "uuid": (BINARY, pa.large_binary()),
}


def hash_array(array: pa.Array) -> Vector:
    """The hash of each value (uint64), equal to :func:`hash_form` of its canonical form.

    Raises:
        WrongColumns: the type cannot be a key.
    """
    array = decoded(array)
    kind = array.type
    group = family(kind)
    if group == "null":
        return np.full(len(array), NULL, dtype=np.uint64)
    if group in _PLAIN_TEXT:
        tag, plain = _PLAIN_TEXT[group]
        whole = group == "uuid" or pa.types.is_fixed_size_binary(kind) or "view" in str(kind)
        texts = Texts(array.cast(plain) if whole else array)
        hashes = _hash_offsets(texts.offsets, texts.data, tag)
    else:
        if pa.types.is_boolean(kind) or kind == BOOL8:
            array = array.cast(pa.bool_()).cast(pa.uint8())
        hashes = _kernel(array.type, group)(array)
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = NULL
    return hashes


_TEMPORAL: Final = {
    "timestamp": _hash_timestamps,
    "date": _hash_dates,
    "time": _hash_times,
    "duration": _hash_durations,
}


def _kernel(kind: pa.DataType, group: str) -> Callable[[pa.Array], Vector]:
    if group in _TEMPORAL:
        return _TEMPORAL[group]
    if pa.types.is_decimal(kind):
        return _hash_decimals
    return _hash_floats if pa.types.is_floating(kind) else _hash_integers


# --- keys -----------------------------------------------------------------------------------------

Hashes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

CHUNK_ROWS: Final = 65_536
"""Rows of one vector operation. Shorter ones stay in a core's own cache, but each operation may switch
the interpreter's lock: with 16 Ki, a job of two threads ran at half the rate."""


def canonical(value: Any) -> Hashable:
    """The form under which keys are hashed and compared.

    Raises:
        UsageError: the value is of a type that cannot be a key; names the type and the fix.
    """
    match value:
        case None:
            return None
        case bool() | int():
            return int(value)
        case str():
            return str.__str__(value)  # the text itself, also of an enumeration of str
        case bytes():
            return bytes(value)
        case float():
            return _float_form(value)
        case tuple():
            return tuple(map(canonical, value))
        case datetime():
            return _moment(value)
        case date() | timedelta():
            return value
        case time():
            return _time_of_day(value)
        case Decimal():
            return decimal_form(value)
        case UUID():
            return value
        case np.bool_() | np.integer():
            return int(value)
        case np.floating():
            return _float_form(float(value))
    raise UsageError(f"a key of type {type(value).__name__} cannot be hashed: key by {KEY_TYPES}")


def _float_form(value: float) -> int | float:
    if value.is_integer():
        return int(value)
    return math.nan if math.isnan(value) else float(value)


def _moment(value: datetime) -> datetime:
    """The naive datetime in UTC; itself at the ends of the calendar, where UTC has no such year."""
    offset = value.utcoffset()
    if offset is None:
        return value.replace(tzinfo=None, fold=0)
    try:
        return value.replace(tzinfo=None, fold=0) - offset
    except OverflowError:
        return value


def _time_of_day(value: time) -> time:
    """
    Raises:
        UsageError: it has a time zone: on which day it is decides whether it is another's time.
    """
    if value.tzinfo is not None:
        raise UsageError(
            f"a key of time {value} has a time zone: key by a datetime, or by key.replace(tzinfo=None)"
        )
    return value.replace(fold=0)


def stable_hash(value: Any) -> int:
    """The hash (unsigned, 64 bits) of one key.

    Raises:
        UsageError: see :func:`canonical`.
    """
    return hash_int(value) if type(value) is int else hash_form(canonical(value))


_AS_THEY_ARE: Final = frozenset({int, str, bytes, bool, NoneType})
"""Types for which equal keys are the same key. So are floats other than NaN, and tuples of all these."""


def _is_canonical(keys: Sequence[Any]) -> bool:
    """Whether a dict tells these keys apart as their canonical forms are."""
    kinds = set(map(type, keys)) - _AS_THEY_ARE
    if not kinds <= {float, tuple}:
        return False
    if float in kinds and any(map(ne, keys, keys)):
        return False
    if tuple in kinds:
        return _is_canonical(list(chain.from_iterable(key for key in keys if type(key) is tuple)))
    return True


def canonical_rows(keys: list[Any]) -> list[Any]:
    """Keys that are equal where, and only where, the canonical forms of ``keys`` are equal.

    That is the very list given if its own keys are so.

    Raises:
        UsageError: see :func:`canonical`.
    """
    return keys if _is_canonical(keys) else list(map(canonical, keys))


_ARROW_TYPES: Final = {
    frozenset({int}): pa.int64(),
    frozenset({str}): pa.large_string(),
    frozenset({bytes}): pa.large_binary(),
    frozenset({float}): pa.float64(),
    frozenset({date}): pa.date32(),
    frozenset({int, NoneType}): pa.int64(),
    frozenset({str, NoneType}): pa.large_string(),
}
"""Keys of these types go through Arrow, in loops of C."""


def key_array(keys: Sequence[Any]) -> pa.Array | None:
    """Keys of one common type as a column; None for other types, integers beyond int64 and texts with
    a lone surrogate."""
    kind = _ARROW_TYPES.get(frozenset(map(type, keys)))
    if kind is None:
        return None
    try:
        return pa.array(keys, kind)
    except (OverflowError, UnicodeEncodeError, pa.ArrowInvalid):
        return None


def hash_rows(keys: Sequence[Any]) -> Hashes:
    """The hash of each key; keys of one common type without a call in Python for each.

    Raises:
        UsageError: see :func:`canonical`.
    """
    array = key_array(keys)
    if array is not None:
        return hash_columns([array])
    if set(map(type, keys)) == {tuple} and len(lengths := set(map(len, keys))) == 1 and lengths != {0}:
        return mix_tuple([hash_rows(column) for column in zip(*keys, strict=True)])
    return np.fromiter(map(stable_hash, keys), np.uint64, len(keys))


def hash_columns(arrays: Sequence[pa.Array]) -> Hashes:
    """The hash of each row: of the bare value for one array, of the tuple of values for several.

    Raises:
        WrongColumns: a column's type cannot be a key.
    """
    rows = len(arrays[0])
    if rows <= CHUNK_ROWS:
        return _hash_chunk(arrays)
    hashes = np.empty(rows, dtype=np.uint64)
    for start in range(0, rows, CHUNK_ROWS):
        pieces = [array.slice(start, CHUNK_ROWS) for array in arrays]
        hashes[start : start + CHUNK_ROWS] = _hash_chunk(pieces)
    return hashes


def _hash_chunk(arrays: Sequence[pa.Array]) -> Hashes:
    columns = [hash_array(array) for array in arrays]
    return columns[0] if len(columns) == 1 else mix_tuple(columns)


def destination(hashes: Any, consumers: int) -> Any:
    """Which of ``consumers`` a hash belongs to, uniform for any number: an int for an int, an int64
    vector for a uint64 vector."""
    if isinstance(hashes, np.ndarray):
        positions = np.empty(len(hashes), np.int64)
        kernel("choose_consumers")(hashes, consumers, positions, len(hashes))
        return positions
    return (int(hashes) >> 32) * consumers >> 32
