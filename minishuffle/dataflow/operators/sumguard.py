"""A watch over sums of int64, whose overflow numpy does not tell."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from minishuffle.errors import UsageError

__all__ = ["SumGuard"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_INT64_MAX: Final = 2**63 - 1


class SumGuard:
    """Refuses int64 sums that wrap around, at the price of two reductions per batch as long as no sum
    can have come near the limit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._largest = 0
        """No sum is further from 0 than this."""

    def is_safe(self, numbers: Vector, state: Vector) -> bool:
        """Whether no sum can leave int64, whatever slots these numbers go to."""
        added = len(numbers) * _magnitude(numbers)
        if self._largest + added > _INT64_MAX:
            self._largest = _magnitude(state)
        self._largest += added
        return self._largest <= _INT64_MAX

    def compare(self, sums: Vector, rough: Vector) -> None:
        """Raise UsageError where the same sums in float64 are far from those in int64."""
        if np.any(np.abs(sums.astype(np.float64) - rough) > 2.0**62):
            raise UsageError(
                f"a sum of column {self._name!r} leaves the range of int64: cast the column to float64 first"
            )


def _magnitude(numbers: Vector) -> int:
    return max(int(numbers.max(initial=0)), -int(numbers.min(initial=0)))
