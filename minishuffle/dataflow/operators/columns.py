"""Aggregates of Arrow columns as vectors indexed by slot (the number of a key), brought forward by compiled
loops: no Python per row.

Nulls count for nothing, as in SQL: a sum, mean, minimum or maximum of no value is null. A null is
replaced by the operation's neutral element, so that the kernels need not know of it.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.dataflow.operators.decimals import DIGITS_MAX, decimal_array, decimal_units, is_decimal
from minishuffle.dataflow.operators.widertype import wider
from minishuffle.errors import UsageError
from minishuffle.exchange.schemas import without_dictionary, without_view
from minishuffle.kernels.machinecode import kernel

__all__ = [
    "MINIMUM",
    "SUM",
    "Aggregate",
    "Fold",
    "Mean",
    "Outputs",
    "RowCount",
    "ValueCount",
    "folded",
    "grown",
    "merge_states",
    "result_type",
    "states_of",
    "valid_marks",
]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_INT64_MAX, _INT64_MIN = 2**63 - 1, np.int64(-(2**63))


def grown(vector: Vector, size: int, fill: Any) -> Vector:
    """The vector itself if it is long enough, else a copy of at least twice its length."""
    if len(vector) >= size:
        return vector
    larger = np.full(max(size, 2 * len(vector), 1024), fill, dtype=vector.dtype)
    larger[: len(vector)] = vector
    return larger


def valid_marks(column: pa.Array) -> Vector:
    valid: Vector = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


SUM, MINIMUM, _MAXIMUM = 0, 1, 2
_OPERATIONS = {"sum": SUM, "min": MINIMUM, "max": _MAXIMUM}
"""As ``kernels/loops.py`` numbers them."""


def folded(operation: int, state: Vector, slots: Vector, numbers: Vector) -> tuple[Vector, int]:
    """The state of each row's slot after that row, and for how many rows it was done: fewer than all if a
    sum of int64 overflows in the next one."""
    values = np.empty(len(slots), dtype=state.dtype)
    loop = kernel("fold_ints" if state.dtype == np.int64 else "fold_floats")
    return values, loop(operation, state, slots, numbers, values, len(slots))


def _fold_objects(operation: int, state: Vector, slots: Vector, numbers: Vector) -> Vector:
    """The same with Python's integers, row by row."""
    plain: Any = [operator.add, min, max][operation]
    values = np.empty(len(slots), dtype=object)
    for row, (slot, number) in enumerate(zip(slots.tolist(), numbers.tolist(), strict=True)):
        values[row] = state[slot] = plain(state[slot], number)
    return values


class Aggregate(Protocol):
    """One output column: its state for every slot."""

    def grow(self, size: int) -> None:
        """Make room for slots up to ``size``."""

    def update(self, slots: Vector, column: pa.Array) -> None:
        """Take a batch; only the state after it matters."""

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        """Take a batch; give the value after each row."""

    def at(self, slots: Vector | slice) -> pa.Array:
        """The values of these slots now."""

    def keep(self, slots: Vector) -> None:
        """Forget all slots but these, which are numbered anew in this order."""

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        """All that is known of these slots, as columns."""

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        """Add such columns to the slots."""


Outputs: TypeAlias = "list[tuple[str, str, Aggregate]]"
"""Name, input column and aggregate of each output."""


class RowCount:
    """Number of rows."""

    def __init__(self) -> None:
        self.counts = np.zeros(0, dtype=np.int64)

    def grow(self, size: int) -> None:
        self.counts = grown(self.counts, size, 0)

    def update(self, slots: Vector, column: pa.Array) -> None:
        folded(SUM, self.counts, slots, self._counted(column))

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        return pa.array(folded(SUM, self.counts, slots, self._counted(column))[0])

    def _counted(self, column: pa.Array) -> Vector:
        """How many each row counts for."""
        return np.ones(len(column), dtype=np.int64)

    def at(self, slots: Vector | slice) -> pa.Array:
        return pa.array(self.counts[slots])

    def keep(self, slots: Vector) -> None:
        self.counts = self.counts.take(slots)

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        return [self.at(slots)]

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        folded(SUM, self.counts, slots, columns[0].to_numpy())


class ValueCount(RowCount):
    """Number of values that are not null."""

    def _counted(self, column: pa.Array) -> Vector:
        return valid_marks(column).astype(np.int64) if column.null_count else super()._counted(column)


class Fold:
    """Sum, minimum or maximum of the values, from the operation's neutral element on. The state is a vector
    of int64 or float64, and of Python's integers once a decimal needs more than 64 bits.

    Integers and booleans sum as int64, floats as float64, decimals as decimal128 of 38 digits. If columns
    of several types come, the state gets the wider one, whichever came first; beside floats, an integer
    beyond 2**53 is rounded to the nearest float64. A column of type null has no values and sets no type.
    """

    def __init__(self, function: str, name: str) -> None:
        self.function = function
        self.name = name
        self.type: pa.DataType | None = None
        self.state: Vector
        self._seen: Vector | None = None
        """By slot 1 if there was a value, else 0; None as long as no null has come: then all had one."""
        self._size = self._known = 0

    def _takes(self, kind: pa.DataType) -> bool:
        """Get ready for a column of that type: False if no value has come yet, and none is in it."""
        if pa.types.is_null(kind):
            self._note_nulls()
        elif self.type is None:
            self._settle(kind)
        elif kind != self.type:
            self._widen(kind)
        return self.type is not None

    def _widen(self, kind: pa.DataType) -> None:
        """Go on from the state so far in a type that also holds values of type ``kind``."""
        result_type(self.function, self.name, kind)
        wide = wider(_as_number(self.type), _as_number(kind))
        if wide is None:
            raise UsageError(
                f"{self.function} of column {self.name!r}: its types {self.type} and {kind} have none in "
                "common that is exact: cast the column first, or declare it with to_table(schema)"
            )
        if wide != self.type:
            held = self._array(self.state, self._unseen())
            self._settle(wide)
            self.state = np.array(self._numbers(held))

    def _settle(self, kind: pa.DataType) -> None:
        """Choose operation, number type and neutral element by the column's type."""
        floats = pa.types.is_float32(kind) or pa.types.is_float64(kind)
        self.result = result_type(self.function, self.name, kind)
        self.type = self.result if self.function == "sum" else kind
        self.number = self.type if floats or not _is_moment(kind) else _NUMBERS[kind.bit_width]
        self.stored = pa.float64() if floats else pa.int64()
        self.neutral: float | int
        if self.function == "sum":
            self.neutral = 0
        elif floats:
            self.neutral = np.nan
        else:
            self.neutral = _INT64_MAX if self.function == "min" else int(_INT64_MIN)
        size = self._size if self._seen is None else len(self._seen)
        self.state = np.full(size, self.neutral, dtype=self.stored.to_pandas_dtype())

    def grow(self, size: int) -> None:
        self._known, self._size = self._size, size
        if self.type is not None:
            self.state = grown(self.state, size, self.neutral)
        if self._seen is not None:
            self._seen = grown(self._seen, size, 0)

    def update(self, slots: Vector, column: pa.Array) -> None:
        if self._takes(column.type):
            self._fold(slots, column)

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        if not self._takes(column.type):
            return pa.nulls(len(slots))
        values, seen = self._fold(slots, column)
        return self._array(values, None if seen is None else seen == 0)

    def _fold(self, slots: Vector, column: pa.Array) -> tuple[Vector, Vector | None]:
        """The state of each row's slot after that row, and whether it had a value, if some had none."""
        numbers = self._numbers(column)
        seen = None
        if column.null_count:
            self._note_nulls()
        if self._seen is not None:
            seen, _ = folded(_MAXIMUM, self._seen, slots, valid_marks(column).astype(np.int64))
        operation = _OPERATIONS[self.function]
        if self.state.dtype == object:
            return _fold_objects(operation, self.state, slots, numbers), seen
        values, done = folded(operation, self.state, slots, numbers)
        if done == len(slots):
            return values, seen
        if not is_decimal(self.result):
            raise UsageError(
                f"a sum of column {self.name!r} leaves the range of int64: cast the column to float64 first"
            )
        self.state = self.state.astype(object)
        rest = _fold_objects(operation, self.state, slots[done:], numbers[done:].astype(object))
        return np.concatenate((values[:done].astype(object), rest)), seen

    def at(self, slots: Vector | slice) -> pa.Array:
        if self.type is None:
            assert self._seen is not None
            return pa.nulls(len(self._seen[slots]))
        state = self.state[slots] if isinstance(slots, slice) else self.state.take(slots)
        return self._array(state, None if self._seen is None else self._seen[slots] == 0)

    def keep(self, slots: Vector) -> None:
        if self.type is not None:
            self.state = self.state.take(slots)
        if self._seen is not None:
            self._seen = self._seen.take(slots)
        self._size = self._known = len(slots)

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        return [self.at(slots)]

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        self.update(slots, columns[0])

    def _numbers(self, column: pa.Array) -> Vector:
        given = column.type
        assert self.type is not None
        try:
            if is_decimal(given) and is_decimal(self.type) and given.scale == self.type.scale:
                return self._units(column)
            if pa.types.is_boolean(given) and given != self.type:
                column = column.cast(pa.int8())  # pyarrow casts booleans to no decimals
            if given != self.type:
                rounds = pa.types.is_integer(given) and pa.types.is_floating(self.type)
                column = column.cast(self.type, safe=not rounds)
            if is_decimal(self.type):
                return self._units(column)
            if self.type == pa.uint64():
                return self._shifted(column)
            column = column.cast(self.number).cast(self.stored)
        except pa.ArrowException as error:
            raise UsageError(
                f"{self.function} of column {self.name!r}: type {given} does not fit the state of type "
                f"{self.stored} ({error}): cast the column first, or declare it with to_table(schema)"
            ) from error
        if column.null_count:
            column = pc.fill_null(column, pa.scalar(self.neutral, self.stored))
        numbers: Vector = column.to_numpy(zero_copy_only=False)
        return numbers

    def _shifted(self, column: pa.Array) -> Vector:
        """Unsigned numbers moved down by 2**63, which keeps their order."""
        numbers: Vector = column.fill_null(0).to_numpy().view(np.int64) ^ _INT64_MIN
        if column.null_count:
            numbers[~valid_marks(column)] = self.neutral
        return numbers

    def _units(self, column: pa.Array) -> Vector:
        """Decimals in their smallest unit: int64 as long as that holds state and values."""
        units = decimal_units(column, int(self.neutral))
        if units.dtype == self.state.dtype:
            return units
        if self.state.dtype != object:
            unseen = self._unseen()
            self.state = self.state.astype(object)
            if self.function != "sum":
                self.neutral = 10 ** (DIGITS_MAX + 1) * (1 if self.function == "min" else -1)
                self.state[unseen] = self.neutral
        return decimal_units(column, int(self.neutral)).astype(object)

    def _note_nulls(self) -> None:
        if self._seen is None:
            self._seen = np.zeros(self._size if self.type is None else len(self.state), dtype=np.int64)
            self._seen[: self._known] = 1

    def _unseen(self) -> Vector:
        """Which slots had no value before this batch."""
        return np.arange(len(self.state)) >= self._known if self._seen is None else self._seen == 0

    def _array(self, values: Vector, missing: Vector | None) -> pa.Array:
        if is_decimal(self.result):
            what = f"{self.function} of column {self.name!r}"
            return decimal_array(values, missing, self.result, what)
        if self.type == pa.uint64():
            values = (values ^ _INT64_MIN).view(np.uint64)
        array = pa.array(values, mask=missing)
        return array if array.type == self.result else array.cast(self.number).cast(self.result)


class Mean:
    """Sum divided by the number of values, as float64.

    Sums of integers are kept in two halves, so that one beyond int64 is no obstacle to a mean that fits:
    the upper one is of the values' bits from 32 on.
    """

    def __init__(self, name: str) -> None:
        self._sum = Fold("sum", name)
        self._upper = Fold("sum", name)
        self._count = ValueCount()
        self._parts: tuple[Aggregate, ...] = (self._sum, self._upper, self._count)

    def grow(self, size: int) -> None:
        for part in self._parts:
            part.grow(size)

    def update(self, slots: Vector, column: pa.Array) -> None:
        upper, lower = _halves(column)
        self._upper.update(slots, upper)
        self._sum.update(slots, lower)
        self._count.update(slots, column)

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        upper, lower = _halves(column)
        uppers = self._upper.running(slots, upper)
        total = _whole(uppers, self._sum.running(slots, lower))
        return _quotient(total, self._count.running(slots, column))

    def at(self, slots: Vector | slice) -> pa.Array:
        return _quotient(_whole(self._upper.at(slots), self._sum.at(slots)), self._count.at(slots))

    def keep(self, slots: Vector) -> None:
        for part in self._parts:
            part.keep(slots)

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        return [part.at(slots) for part in self._parts]

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        for part, column in zip(self._parts, columns, strict=True):
            part.merge(slots, [column])


def states_of(outputs: Outputs, slots: Vector | slice) -> dict[str, pa.Array]:
    """The states of all aggregates, each of whose columns has a name of its own."""
    return {
        f"{number}.{place}": column
        for number, (_, _, aggregate) in enumerate(outputs)
        for place, column in enumerate(aggregate.as_columns(slots))
    }


def merge_states(outputs: Outputs, slots: Vector, size: int, batch: pa.RecordBatch) -> None:
    """Add columns that :func:`states_of` gave; there are slots up to ``size``."""
    for number, (_, _, aggregate) in enumerate(outputs):
        aggregate.grow(size)
        names = [name for name in batch.schema.names if name.startswith(f"{number}.")]
        aggregate.merge(slots, [batch.column(name) for name in names])


def _halves(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Integers of 64 bits as those from bit 32 on and those below; nothing and itself for others."""
    kind = column.type
    if not pa.types.is_integer(kind) or kind.bit_width < 64:
        return pa.nulls(len(column)), column
    upper = pc.shift_right(column, pa.scalar(32, kind))
    return upper.cast(pa.int64()), pc.bit_wise_and(column, pa.scalar(0xFFFF_FFFF, kind)).cast(pa.int64())


def _whole(upper: pa.Array, lower: pa.Array) -> pa.Array:
    """Sums of halves put together: exact in int64 where that holds them, else as float64."""
    if not pa.types.is_integer(upper.type):
        return lower
    upper = pc.fill_null(upper, 0)
    parts = [part.cast(pa.float64(), safe=False) for part in (upper, lower)]
    rough = pc.add(pc.multiply(parts[0], 2.0**32), parts[1])
    if not pa.types.is_integer(lower.type):
        return rough
    exact = pc.add(pc.multiply(upper, 1 << 32), lower)
    if (pc.max(pc.abs(rough)).as_py() or 0.0) < 2.0**62:
        return exact
    return pc.if_else(pc.less(pc.abs(rough), 2.0**62), exact.cast(pa.float64(), safe=False), rough)


_NUMBERS = {1: pa.uint8(), 32: pa.int32(), 64: pa.int64()}
"""How booleans and moments are kept, by the width of the type in bits."""


def _as_number(kind: pa.DataType) -> pa.DataType:
    return pa.int8() if pa.types.is_boolean(kind) else kind


def _is_moment(kind: pa.DataType) -> bool:
    return bool(pa.types.is_temporal(kind)) and kind.bit_width in _NUMBERS


def _quotient(total: pa.Array, count: pa.Array) -> pa.Array:
    """Null where there is no value: the total is null there."""
    return pc.divide(total.cast(pa.float64(), safe=False), count.cast(pa.float64()))


def result_type(function: str, name: str, kind: pa.DataType) -> pa.DataType:
    """The type of an aggregate of the column ``name``, which is of type ``kind``.

    Raises:
        UsageError: the function cannot aggregate this type.
    """
    floats = pa.types.is_float32(kind) or pa.types.is_float64(kind)
    numbers = floats or is_decimal(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    if function in ("first", "last", "count_distinct"):
        return _plain_type(function, name, kind)
    if function == "count":
        return pa.int64()
    if pa.types.is_null(kind):
        return pa.float64() if function in ("mean", "std") else kind
    if not numbers and (function in ("sum", "mean", "std") or not _is_moment(kind)):
        raise UsageError(
            f"{function} of column {name!r} of type {kind} is not supported: cast the column "
            "to int64, float64 or decimal128 first"
        )
    if function in ("mean", "std"):
        return pa.float64()
    if function == "sum":
        if is_decimal(kind):
            return pa.decimal128(DIGITS_MAX, kind.scale)
        return pa.float64() if floats else pa.int64()
    return kind


def _plain_type(function: str, name: str, kind: pa.DataType) -> pa.DataType:
    """The type of what compares or orders values of the column."""
    kind = without_view(without_dictionary(kind))
    if pa.types.is_nested(kind):
        raise UsageError(
            f"{function} of column {name!r} of type {kind} is not supported: lists and the like have no "
            "order; take their parts out first, as with explode() or map_batches()"
        )
    return pa.int64() if function == "count_distinct" else kind
