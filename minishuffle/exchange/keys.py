"""Canonical keys and their stable hash: the same for rows and for Arrow, on every machine and run.

Two Python keys that are equal by ``==`` have one canonical form. Beyond that, naive datetimes are
taken as UTC, and all NaNs are one key.

========================================  =====================================================
key                                       canonical form
========================================  =====================================================
bool, any integer width                   the integer
float with an integral value, -0.0        that integer
any other float                           that float; one NaN
Decimal                                   the equal integer or float if there is one, else itself
str; bytes                                itself (hashed as UTF-8); itself
datetime, Arrow timestamp                 the moment in UTC (hashed as nanoseconds)
date                                      itself; never equal to a timestamp
tuple                                     the canonical forms in order
None, Arrow null                          a key of its own
========================================  =====================================================
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from datetime import date, datetime
from decimal import Decimal
from itertools import chain
from operator import ne
from types import NoneType
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.errors import UsageError
from minishuffle.exchange.columnhash import hash_array, mix_tuple
from minishuffle.exchange.hashing import KEY_TYPES, decimal_form, hash_form

__all__ = [
    "canonical",
    "canonical_rows",
    "destination",
    "hash_columns",
    "hash_rows",
    "key_array",
    "stable_hash",
]

Hashes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

CHUNK_ROWS: Final = 65_536
"""Rows of one vector operation. Shorter ones stay in a core's own cache, but each operation may switch
the interpreter's lock: with 16 Ki, a job of two threads ran at half the rate."""


def canonical(value: Any) -> Hashable:
    """The form under which keys are hashed and compared.

    Raises:
        UsageError: the value is of a type that cannot be a key; names type and mend.
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
        case date():
            return value
        case Decimal():
            return decimal_form(value)
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


def stable_hash(value: Any) -> int:
    """The hash (unsigned, 64 bits) of one key.

    Raises:
        UsageError: see :func:`canonical`.
    """
    return hash_form(canonical(value))


_AS_THEY_ARE: Final = frozenset({int, str, bytes, bool, NoneType})
"""Types whose ``==`` already says which keys are one, with floats that are not NaN, and tuples."""


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
        UsageError: a column's type cannot be a key.
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
        wide = hashes >> np.uint64(32)
        wide *= np.uint64(consumers)
        wide >>= np.uint64(32)
        return wide.view(np.int64)
    return (int(hashes) >> 32) * consumers >> 32
