"""Decimals as whole numbers of their smallest unit: int64 while they fit, Python's beyond, always exact."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.errors import UsageError

__all__ = ["DIGITS_MAX", "decimal_array", "decimal_units", "is_decimal"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

DIGITS_MAX: Final = 38
"""Digits of a decimal128."""
_LOW: Final = (1 << 64) - 1


def is_decimal(kind: pa.DataType) -> bool:
    """Whether the type is a decimal of at most 128 bits."""
    return bool(pa.types.is_decimal(kind)) and kind.bit_width <= 128


def decimal_units(column: pa.Array, null: int) -> Vector:
    """The values in units of the last digit, as int64 or, if one needs more, as Python's integers.

    Nulls become ``null``.
    """
    if column.type.bit_width < 128:
        column = column.cast(pa.decimal128(column.type.precision, column.type.scale))
    data = column.buffers()[1]
    words = np.frombuffer(data, np.int64, count=2 * len(column), offset=16 * column.offset).reshape(-1, 2)
    low, high = words[:, 0], words[:, 1]
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    fits = (high == low >> 63) if nulls is None else (high == low >> 63) | nulls
    units: Vector
    if fits.all() and -(1 << 63) <= null < 1 << 63:
        units = low.copy()
    else:
        units = (high.astype(object) << 64) + low.view(np.uint64).astype(object)
    if nulls is not None:
        units[nulls] = null
    return units


def decimal_array(units: Vector, missing: Vector | None, kind: pa.DataType, what: str) -> pa.Array:
    """The column of type ``kind`` of these units, null where ``missing``.

    Raises:
        UsageError: a value has more digits than the type holds; begins with ``what``.
    """
    if missing is not None:
        units = np.where(missing, 0, units)
    limit = 10**kind.precision
    if len(units) and not -limit < min(units.min(), 0) <= max(units.max(), 0) < limit:
        raise UsageError(f"{what} leaves the range of {kind}: cast the column to float64 first")
    words = np.empty((len(units), 2), np.int64)
    if units.dtype == object:
        words[:, 0] = np.array([unit & _LOW for unit in units], np.uint64).view(np.int64)
        words[:, 1] = units >> 64
    else:
        words[:, 0], words[:, 1] = units, units >> 63
    validity = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    wide = pa.decimal128(kind.precision, kind.scale)
    return pa.Array.from_buffers(wide, len(units), [validity, pa.py_buffer(words)]).cast(kind)
