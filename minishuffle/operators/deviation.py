"""The standard deviation of the values of each slot."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.kernels.machinecode import kernel
from minishuffle.operators.aggregate_states import Aggregate, grown, result_type, valid_marks

__all__ = ["Deviation"]

Vector: TypeAlias = "np.ndarray[Any, Any]"


class Deviation(Aggregate):
    """The standard deviation of a sample (divided by one less than there are values), as float64.

    Null for fewer than two values; NaN if one is infinite or NaN, or if squares of differences are (beyond
    1e154). What is kept is the number of values, their
    mean, and the sum of squared differences from it, which parts of the data add up without loss.
    (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = [np.zeros(0) for _ in range(3)]
        """Numbers, means, sums of squares by slot."""

    def grow(self, size: int) -> None:
        self._state = [grown(vector, size, 0.0) for vector in self._state]

    def update(self, slots: Vector, column: pa.Array) -> None:
        self._take(slots, column)

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        return _roots(self._take(slots, column))

    def _take(self, slots: Vector, column: pa.Array) -> Vector:
        """The variance of each row's slot after that row."""
        result_type("std", self._name, column.type)
        numbers = column.cast(pa.float64(), safe=False)
        values = pc.fill_null(numbers, 0.0).to_numpy()
        return self._add(slots, [valid_marks(column).astype(np.float64), values, np.zeros(len(values))])

    def _add(self, slots: Vector, parts: list[Vector]) -> Vector:
        variances = np.empty(len(slots))
        kernel("fold_spread")(*self._state, slots, *parts, variances, len(slots))
        return variances

    def at(self, slots: Vector | slice) -> pa.Array:
        counts, _, squares = (vector[slots] for vector in self._state)
        return _roots(np.where(counts > 1, squares / np.maximum(counts - 1, 1), -1.0))

    def keep(self, slots: Vector) -> None:
        self._state = [vector.take(slots) for vector in self._state]

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        return [pa.array(vector[slots]) for vector in self._state]

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        self._add(slots, [column.to_numpy() for column in columns])


def _roots(variances: Vector) -> pa.Array:
    """Null where a variance is negative: there are too few values."""
    missing = variances < 0
    roots = np.sqrt(np.where(missing, 0.0, variances))
    return pa.array(np.where(np.isfinite(roots), roots, np.nan), mask=missing)
