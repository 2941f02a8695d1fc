"""Sums of decimals, and of integers, beyond 64 bits."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.columns import Aggregate, ValueCount, grown
from minishuffle.errors import UsageError
from minishuffle.kernels.machinecode import kernel

__all__ = ["DecimalSum"]

Vector: TypeAlias = "np.ndarray[Any, Any]"


class DecimalSum(Aggregate):
    """Sum of the values of a decimal128 column, always exact.

    Args:
        what: begins the error.
        kind: the type of the values, and of the sum.

    Raises:
        UsageError: a sum leaves the type.
    """

    def __init__(self, what: str, kind: pa.DataType) -> None:
        self._what = what
        self._kind = kind
        self._words = np.zeros(0, dtype=np.int64)
        """Two for each slot, as Arrow has them: the lower half of the sum in units of the last digit, then
        the upper half."""
        self._count = ValueCount()

    def grow(self, size: int) -> None:
        self._words = grown(self._words, 2 * size, 0)
        self._count.grow(size)

    def update(self, slots: Vector, column: pa.Array) -> None:
        self._add(slots, column)
        self._count.update(slots, column)

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        return self._array(self._add(slots, column), self._count.running(slots, column))

    def _add(self, slots: Vector, column: pa.Array) -> Vector:
        """The words of each row's slot after that row."""
        if column.null_count:
            column = column.fill_null(0)
        words = np.frombuffer(column.buffers()[1], np.int64, 2 * len(column), 16 * column.offset)
        after = np.empty(2 * len(slots), dtype=np.int64)
        if kernel("fold_wide")(self._words, slots, words, after, len(slots)) < len(slots):
            raise self._beyond()
        return after

    def at(self, slots: Vector | slice) -> pa.Array:
        return self._array(self._words.reshape(-1, 2)[slots].copy(), self._count.at(slots))

    def keep(self, slots: Vector) -> None:
        self._words = self._words.reshape(-1, 2)[slots].reshape(-1)
        self._count.keep(slots)

    def _array(self, words: Vector, counts: pa.Array) -> pa.Array:
        """The sums with those words, null where there is no value."""
        validity = np.packbits(counts.to_numpy() > 0, bitorder="little")
        sums = pa.Array.from_buffers(self._kind, len(counts), [pa.py_buffer(validity), pa.py_buffer(words)])
        try:
            sums.validate(full=True)
        except pa.ArrowInvalid as error:
            raise self._beyond() from error
        return sums

    def _beyond(self) -> UsageError:
        return UsageError(f"{self._what} leaves the range of {self._kind}: cast the column to float64 first")
