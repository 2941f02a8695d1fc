"""The aggregates by their names, and what each reads of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.exchange.batch import Times
from minishuffle.operators.aggregate_states import (
    Aggregate,
    Fold,
    Outputs,
    ValueCount,
    is_bytes,
    result_type,
)
from minishuffle.operators.decimals import DecimalSum, exact_mean
from minishuffle.operators.decimals import wide as wide_decimal
from minishuffle.operators.deviation import Deviation
from minishuffle.operators.distinct import DistinctCount
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.first_last import Extreme, FirstOrLast
from minishuffle.operators.wider_type import DIGITS_MAX, as_type

__all__ = ["BY_TIME", "Function", "input_of", "outputs_of"]

Vector: TypeAlias = "np.ndarray[Any, Any]"
Function: TypeAlias = Literal["sum", "count", "min", "max", "mean", "std", "first", "last", "count_distinct"]

BY_TIME = ("first", "last")
"""Those that read the event time."""
_OTHERWISE: Final[dict[str, Function]] = {
    **dict.fromkeys(("average", "avg"), "mean"),
    **dict.fromkeys(("len", "n", "size"), "count"),
    **dict.fromkeys(("approx_count_distinct", "n_unique", "nunique"), "count_distinct"),
    **dict.fromkeys(("stddev", "stddev_samp"), "std"),
}
"""Those of other names in pandas, Polars, SQL or Spark."""


def outputs_of(columns: Mapping[str, tuple[str, Function]], time: EventTime | None = None) -> Outputs:
    """An aggregate for each output name: (input column, function).

    Raises:
        InvalidGraph: a function needs event time, and there is none.
        UsageError: there is no such function.
    """
    by_time = tuple(dict.fromkeys(column for column, function in columns.values() if function in BY_TIME))
    if by_time and time is None:
        raise InvalidGraph(
            f"first and last (of column {by_time[0]!r}) go by event time, and there is none: call "
            "event_time() right after the source"
        )
    outputs: Outputs = []
    for name, (column, function) in columns.items():
        if function in BY_TIME:
            assert time is not None
            outputs.append((name, column, FirstOrLast(function == "last", column, by_time, time)))
        else:
            outputs.append((name, column, _of_values(function, column)))
    return outputs


def _of_values(function: Function, column: str) -> Aggregate:
    if function in ("sum", "min", "max"):
        return _OfValues(function, column)
    if function == "count":
        return ValueCount()
    if function == "mean":
        return Mean(column)
    if function == "std":
        return Deviation(column)
    if function == "count_distinct":
        return DistinctCount(column)
    names = ", ".join(get_args(Function))
    meant = _OTHERWISE.get(function)
    hint = f"did you mean {meant!r}? " if meant else ""
    raise UsageError(f"no aggregate {function!r} (of column {column!r}): {hint}write one of {names}")


def input_of(
    batch: pa.RecordBatch, column: str, aggregate: Aggregate, times: Times | None = None
) -> pa.Array:
    """What the aggregate of that column takes of rows, with the event times beside them."""
    if isinstance(aggregate, FirstOrLast):
        return aggregate.rows_of(batch, times)
    return batch.column(column)


class _OfValues(Aggregate):
    """A sum, minimum or maximum. Its state is made for the type of its column, when that comes first.

    Integers and booleans sum as int64, floats as float64, decimals and uint64 as decimal128 of 38 digits. A
    column of type null has no values and needs no state.

    Args:
        function: "mean" stands for the sum of which a mean is made: of integers it is a decimal.
    """

    def __init__(self, function: str, name: str) -> None:
        self._function = function
        self._name = name
        self._state: Fold | DecimalSum | Extreme | None = None
        self._stored = pa.null()
        """The type of what the state takes."""
        self._size = 0
        """How many slots there are."""
        self._had_none = False
        """There are slots that have had rows, and no value, before there was a state."""

    def grow(self, size: int) -> None:
        self._size = size
        if self._state is not None:
            self._state.grow(size)

    def update(self, slots: Vector, column: pa.Array) -> None:
        state = self._state_for(column.type)
        if state is not None:
            state.update(slots, as_type(column, self._stored))

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        state = self._state_for(column.type)
        return pa.nulls(len(slots)) if state is None else state.running(slots, as_type(column, self._stored))

    def _state_for(self, kind: pa.DataType) -> Fold | DecimalSum | Extreme | None:
        """The state. The first column of another type than null makes it, for ``kind``; None until then.

        Raises:
            UsageError: the function cannot aggregate this type.
        """
        if self._state is None and pa.types.is_null(kind):
            self._had_none = True
        elif self._state is None:
            self._state, self._stored = self._state_of(kind)
            self._state.grow(self._size)
            if self._had_none:
                self._state.update(np.arange(self._size), pa.nulls(self._size, self._stored))
        return self._state

    def _state_of(self, given: pa.DataType) -> tuple[Fold | DecimalSum | Extreme, pa.DataType]:
        """An empty state for values of a type, and the type that it takes."""
        sums = self._function in ("sum", "mean")
        is_decimal = sums and (pa.types.is_uint64(given) or (self._function == "mean" and _is_whole(given)))
        if is_decimal:
            kind = pa.decimal128(DIGITS_MAX, 0)
        else:
            kind = result_type("sum" if sums else self._function, self._name, given)
        if not sums:
            by_order = pa.types.is_decimal(kind) or is_bytes(kind)
            return Extreme(self._function) if by_order else Fold(self._function, self._name, kind), kind
        if pa.types.is_decimal(kind):
            result = wide_decimal(kind) if self._function == "mean" else kind
            return DecimalSum(f"{self._function} of column {self._name!r}", result), kind
        return Fold("sum", self._name, kind), kind

    def at(self, slots: Vector | slice) -> pa.Array:
        if self._state is None:
            return pa.nulls(len(np.arange(self._size)[slots]))
        return self._state.at(slots)

    def _totals(self, slots: Vector | slice) -> pa.Array:
        """The values, or sums that may have more digits than a result."""
        return self._state.totals(slots) if isinstance(self._state, DecimalSum) else self.at(slots)

    def keep(self, slots: Vector) -> None:
        if self._state is not None:
            self._state.keep(slots)
        self._size = len(slots)

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        return [self._totals(slots)]

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        (column,) = columns
        kind = column.type
        if not pa.types.is_decimal256(kind):
            self.update(slots, column)
        elif (state := self._state_for(pa.decimal128(DIGITS_MAX, kind.scale))) is not None:
            state.merge(slots, columns)


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


class Mean(Aggregate):
    """Sum divided by the number of values, as float64; null if there is none. Of integers and decimals the
    sum is exact, and rounded once, when it is divided."""

    def __init__(self, name: str) -> None:
        self._sum = _OfValues("mean", name)
        self._count = ValueCount()
        self._parts: tuple[Aggregate, ...] = (self._sum, self._count)

    def grow(self, size: int) -> None:
        for part in self._parts:
            part.grow(size)

    def update(self, slots: Vector, column: pa.Array) -> None:
        for part in self._parts:
            part.update(slots, column)

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        return _quotient(*(part.running(slots, column) for part in self._parts))

    def at(self, slots: Vector | slice) -> pa.Array:
        return _quotient(*self.as_columns(slots))

    def keep(self, slots: Vector) -> None:
        for part in self._parts:
            part.keep(slots)

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        return [part.at(slots) for part in self._parts]

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        for part, column in zip(self._parts, columns, strict=True):
            part.merge(slots, [column])


def _quotient(total: pa.Array, count: pa.Array) -> pa.Array:
    """Null where there is no value: the total is null there."""
    if pa.types.is_decimal(total.type):
        return exact_mean(total, count)
    return pc.divide(total.cast(pa.float64(), safe=False), count.cast(pa.float64()))
