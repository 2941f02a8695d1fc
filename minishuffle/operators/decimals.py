"""Sums of decimals, and of integers, beyond 64 bits, and their exact means."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.errors import UsageError
from minishuffle.kernels.machinecode import kernel
from minishuffle.operators.aggregate_states import Aggregate, ValueCount, grown
from minishuffle.operators.wider_type import WIDE_DIGITS_MAX

__all__ = ["DecimalSum", "exact_mean", "wide"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_WORDS = 4
"""Words of a sum, as Arrow has them in a decimal256: of units of the last digit, the lowest first."""
_EXACT_MAX = 1 << 53
"""Up to this every integer is a float64."""


def wide(kind: pa.DataType) -> pa.DataType:
    """The type of sums of that decimal type that no number of rows fills."""
    return pa.decimal256(WIDE_DIGITS_MAX, kind.scale)


class DecimalSum(Aggregate):
    """Sum of the values of a decimal128 column, always exact; what is added up has room for more digits than
    the result.

    Args:
        what: begins the error.
        kind: the type of the result: that of the values, or :func:`wide`.

    Raises:
        UsageError: a result leaves the type.
    """

    def __init__(self, what: str, kind: pa.DataType) -> None:
        self._what = what
        self._kind = kind
        self._words = np.zeros(0, dtype=np.int64)
        self._count = ValueCount()

    def grow(self, size: int) -> None:
        self._words = grown(self._words, _WORDS * size, 0)
        self._count.grow(size)

    def update(self, slots: Vector, column: pa.Array) -> None:
        self._add(slots, column, wanted=False)
        self._count.update(slots, column)

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        return self._result(
            _wide_array(self._add(slots, column, wanted=True), self._count.running(slots, column), self._kind)
        )

    def _add(self, slots: Vector, column: pa.Array, *, wanted: bool) -> Vector:
        """The words of each row's slot after that row, if they are wanted."""
        if column.null_count:
            column = column.fill_null(0)
        width = column.type.byte_width // 8
        words = np.frombuffer(column.buffers()[1], np.int64, width * len(column), 8 * width * column.offset)
        after = np.empty(_WORDS * len(slots) if wanted else 0, dtype=np.int64)
        kernel("fold_wide")(self._words, slots, words, width, after, wanted, len(slots))
        return after

    def at(self, slots: Vector | slice) -> pa.Array:
        return self._result(self.totals(slots))

    def totals(self, slots: Vector | slice) -> pa.Array:
        """The sums of these slots, whatever their digits."""
        return _wide_array(self._words.reshape(-1, _WORDS)[slots].copy(), self._count.at(slots), self._kind)

    def keep(self, slots: Vector) -> None:
        self._words = self._words.reshape(-1, _WORDS)[slots].reshape(-1)
        self._count.keep(slots)

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        return [self.totals(slots)]

    def _result(self, sums: pa.Array) -> pa.Array:
        try:
            return sums.cast(self._kind)
        except pa.ArrowInvalid as error:
            raise UsageError(
                f"{self._what} leaves the range of {self._kind}: cast the column to float64 first"
            ) from error


def _wide_array(words: Vector, counts: pa.Array, kind: pa.DataType) -> pa.Array:
    """The sums with those words, null where there is no value."""
    validity = np.packbits(counts.to_numpy() > 0, bitorder="little")
    return pa.Array.from_buffers(wide(kind), len(counts), [pa.py_buffer(validity), pa.py_buffer(words)])


def exact_mean(sums: pa.Array, counts: pa.Array) -> pa.Array:
    """Sums in the type :func:`wide` divided by how many values there were, rounded once, to float64; null
    where there was none."""
    words = np.frombuffer(sums.buffers()[1], np.int64, _WORDS * len(sums), 8 * _WORDS * sums.offset)
    words = words.reshape(-1, _WORDS)
    scale, divisors, low = sums.type.scale, counts.to_numpy(), words[:, 0]
    fits = (words[:, 1:] == (low >> 63)[:, np.newaxis]).all(axis=1) & (np.abs(low) <= _EXACT_MAX)
    fits &= divisors <= _EXACT_MAX // 10**scale if 0 <= scale < len(str(_EXACT_MAX)) else False
    with np.errstate(divide="ignore", invalid="ignore"):
        means = low.astype(np.float64) / (divisors * 10.0 ** max(scale, 0))
    for row in np.flatnonzero(~fits & (divisors > 0)).tolist():
        total = int.from_bytes(words[row].tobytes(), "little", signed=True)
        # Python rounds a quotient of integers once.
        means[row] = total * 10 ** max(-scale, 0) / (int(divisors[row]) * 10 ** max(scale, 0))
    return pa.array(means, mask=divisors == 0)
