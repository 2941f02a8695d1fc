"""Aggregates of Arrow columns as vectors indexed by slot (the number of a key), brought forward by compiled
loops: no Python per row.

Nulls count for nothing, as in SQL: a sum, mean, minimum or maximum of no value is null. A null is
replaced by the operation's neutral element, so that the kernels need not know of it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import UsageError, WrongColumns
from minishuffle.exchange.schemas import without_dictionary, without_view
from minishuffle.kernels.machinecode import kernel
from minishuffle.operators.state_parts import StatePart
from minishuffle.operators.wider_type import DIGITS_MAX

__all__ = [
    "MINIMUM",
    "SUM",
    "Aggregate",
    "Fold",
    "Outputs",
    "RowCount",
    "ValueCount",
    "folded",
    "grown",
    "is_bytes",
    "is_moment",
    "merge_states",
    "pieces_of",
    "renumbered",
    "result_type",
    "states_of",
    "sum_out_of_range",
    "valid_marks",
]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_INT64_MAX, _INT64_MIN = 2**63 - 1, np.int64(-(2**63))
PIECE_ROWS = 32_768
"""Batches are worked through in pieces: short enough for the processor's cache, long enough that the
switches of the interpreter's lock at each vector operation do not count (8 Ki rows cost twice)."""


def pieces_of(rows: int) -> Iterator[tuple[int, int]]:
    """Begin and length of pieces of like size, about ``PIECE_ROWS`` each: what one of two consumers gets of a
    full batch is one piece, though it may have some rows more than half of that."""
    size = max(1, -(-rows // max(1, round(rows / PIECE_ROWS))))
    return ((start, min(size, rows - start)) for start in range(0, rows, size))


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


def folded(
    operation: int, state: Vector, slots: Vector, numbers: Vector, *, wanted: bool = True
) -> tuple[Vector, int]:
    """The state of each row's slot after that row, if it is wanted, and for how many rows it was done: fewer
    than all if a sum of int64 overflows in the next one."""
    values = np.empty(len(slots) if wanted else 0, dtype=state.dtype)
    loop = kernel("fold_ints" if state.dtype == np.int64 else "fold_floats")
    return values, loop(operation, state, slots, numbers, values, wanted, len(slots))


class Aggregate(ABC):
    """One output column: its state for every slot."""

    reads_all: ClassVar[bool] = False
    """To read some slots takes as long as to read all."""

    @abstractmethod
    def grow(self, size: int) -> None:
        """Make room for slots up to ``size``."""

    @abstractmethod
    def update(self, slots: Vector, column: pa.Array) -> None:
        """Take a batch; only the state after it matters."""

    @abstractmethod
    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        """Take a batch; give the value after each row."""

    @abstractmethod
    def at(self, slots: Vector | slice) -> pa.Array:
        """The values of these slots now."""

    @abstractmethod
    def keep(self, slots: Vector) -> None:
        """Forget all slots but these, which are numbered anew in this order."""

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        """All that is known of these slots, as columns."""
        return [self.at(slots)]

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        """Add such columns to the slots."""
        self.update(slots, columns[0])


Outputs: TypeAlias = "list[tuple[str, str, Aggregate]]"
"""Name, input column and aggregate of each output."""


class RowCount(Aggregate):
    """Number of rows."""

    def __init__(self) -> None:
        self.counts = np.zeros(0, dtype=np.int64)

    def grow(self, size: int) -> None:
        self.counts = grown(self.counts, size, 0)

    def update(self, slots: Vector, column: pa.Array) -> None:
        folded(SUM, self.counts, slots, self._counted(column), wanted=False)

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        return pa.array(folded(SUM, self.counts, slots, self._counted(column))[0])

    def _counted(self, column: pa.Array) -> Vector:
        """How many each row counts for."""
        return np.ones(len(column), dtype=np.int64)

    def at(self, slots: Vector | slice) -> pa.Array:
        return pa.array(self.counts[slots])

    def keep(self, slots: Vector) -> None:
        self.counts = self.counts.take(slots)

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        folded(SUM, self.counts, slots, columns[0].to_numpy(), wanted=False)


class ValueCount(RowCount):
    """Number of values that are not null."""

    def _counted(self, column: pa.Array) -> Vector:
        return valid_marks(column).astype(np.int64) if column.null_count else super()._counted(column)


class Fold(Aggregate):
    """Sum, minimum or maximum of the values of one type, from the operation's neutral element on: a vector of
    int64 or float64."""

    def __init__(self, function: str, name: str, kind: pa.DataType) -> None:
        floats = bool(pa.types.is_floating(kind))
        self._name = name
        self._operation = _OPERATIONS[function]
        self._type = kind
        self._number = _NUMBERS[kind.bit_width] if is_moment(kind) else kind
        self._stored = pa.float64() if floats else pa.int64()
        bound = np.nan if floats else _INT64_MAX if function == "min" else int(_INT64_MIN)
        self._neutral: float | int = 0 if function == "sum" else bound
        self._state = np.empty(0, dtype=self._stored.to_pandas_dtype())
        self._seen: Vector | None = None
        """By slot 1 if there was a value, else 0; None as long as no null has come: then all had one."""
        self._size = self._known = 0
        """How many slots there are, and were there when the last batch was taken."""

    def grow(self, size: int) -> None:
        self._size = size
        self._state = grown(self._state, size, self._neutral)
        if self._seen is not None:
            self._seen = grown(self._seen, size, 0)

    def update(self, slots: Vector, column: pa.Array) -> None:
        self._fold(slots, column, wanted=False)

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        return self._array(*self._fold(slots, column, wanted=True))

    def _fold(self, slots: Vector, column: pa.Array, *, wanted: bool) -> tuple[Vector, Vector | None]:
        """The state of each row's slot after that row, if it is wanted, and whether it had a value, if some
        had none."""
        if column.null_count and self._seen is None:
            self._seen = np.zeros(self._size, dtype=np.int64)
            self._seen[: self._known] = 1
        self._known = self._size
        values, done = folded(self._operation, self._state, slots, self._numbers(column), wanted=wanted)
        if done < len(slots):
            raise sum_out_of_range(self._name)
        if self._seen is None:
            return values, None
        marks = valid_marks(column).astype(np.int64)
        return values, folded(_MAXIMUM, self._seen, slots, marks, wanted=wanted)[0]

    def at(self, slots: Vector | slice) -> pa.Array:
        state = self._state[slots] if isinstance(slots, slice) else self._state.take(slots)
        return self._array(state, None if self._seen is None else self._seen[slots])

    def keep(self, slots: Vector) -> None:
        self._state = self._state.take(slots)
        if self._seen is not None:
            self._seen = self._seen.take(slots)
        self._size = self._known = len(slots)

    def _numbers(self, column: pa.Array) -> Vector:
        if self._type == pa.uint64():  # moved down by 2**63, which keeps their order
            numbers: Vector = column.fill_null(0).to_numpy().view(np.int64) ^ _INT64_MIN
            if column.null_count:
                numbers[~valid_marks(column)] = self._neutral
            return numbers
        if column.type != self._stored:
            column = column.cast(self._number).cast(self._stored)
        if column.null_count:
            column = pc.fill_null(column, pa.scalar(self._neutral, self._stored))
        numbers = column.to_numpy(zero_copy_only=False)
        return numbers

    def _array(self, values: Vector, seen: Vector | None) -> pa.Array:
        if self._type == pa.uint64():
            values = (values ^ _INT64_MIN).view(np.uint64)
        array = pa.array(values, mask=None if seen is None else seen == 0)
        return array if array.type == self._type else array.cast(self._number).cast(self._type)


_OF_AGGREGATE: Final = re.compile(r"(?P<front>(?:row\.)?)(?P<number>\d+)\.(?P<place>\d+)")
"""What :func:`states_of` calls a column, alone or among those of a record that is held."""


def states_of(outputs: Outputs, slots: Vector | slice) -> dict[str, pa.Array]:
    """The states of all aggregates, each of whose columns has a name of its own."""
    return {
        f"{number}.{place}": column
        for number, (_, _, aggregate) in enumerate(outputs)
        for place, column in enumerate(aggregate.as_columns(slots))
    }


def merge_states(outputs: Outputs, slots: Vector, size: int, batch: pa.RecordBatch) -> None:
    """Add columns that :func:`states_of` gave; there are slots up to ``size``. An aggregate without columns
    has had no value: the state is of a job that did not have it, see :func:`renumbered`."""
    for number, (_, _, aggregate) in enumerate(outputs):
        aggregate.grow(size)
        names = [name for name in batch.schema.names if name.startswith(f"{number}.")]
        if names:
            aggregate.merge(slots, [batch.column(name) for name in names])
        else:
            aggregate.update(slots, pa.nulls(len(slots)))


def renumbered(part: StatePart, before: Sequence[str], now: Sequence[str]) -> StatePart:
    """A part with the states of aggregates of these names (:func:`states_of`), for an operator that has those
    of other names, or has them in another order. The state of one that it does not have is left out."""
    columns = {}
    for name, column in zip(part.batch.schema.names, part.batch.columns, strict=True):
        found = _OF_AGGREGATE.fullmatch(name)
        number = -1 if found is None else int(found["number"])
        if found is None:
            columns[name] = column
        elif number >= len(before):  # Behind the aggregates there may be what panes count.
            columns[f"{found['front']}{number - len(before) + len(now)}.{found['place']}"] = column
        elif before[number] in now:
            columns[f"{found['front']}{now.index(before[number])}.{found['place']}"] = column
    batch = pa.RecordBatch.from_pydict(columns)
    return StatePart(part.name, batch.replace_schema_metadata(part.batch.schema.metadata))


_NUMBERS = {1: pa.uint8(), 32: pa.int32(), 64: pa.int64()}
"""How booleans and moments are kept, by the width of the type in bits."""


def is_moment(kind: pa.DataType) -> bool:
    """Whether a value is a number in another guise: a boolean, a date, a time, a duration."""
    return bool(pa.types.is_boolean(kind) or pa.types.is_temporal(kind)) and kind.bit_width in _NUMBERS


def sum_out_of_range(name: str) -> UsageError:
    return UsageError(f"a sum of column {name!r} leaves the range of int64: cast the column to float64 first")


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a value is a text or bytes; not for views."""
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(is_text or is_binary or pa.types.is_fixed_size_binary(kind))


def result_type(function: str, name: str, kind: pa.DataType) -> pa.DataType:
    """The type of an aggregate of the column ``name``, which is of type ``kind``.

    Raises:
        UsageError: the function cannot aggregate this type.
    """
    if function == "count":
        return pa.int64()
    if function in ("first", "last", "count_distinct"):
        return _plain_type(function, name, kind)
    if function in ("min", "max"):
        kind = _plain_type(function, name, kind)
        if is_moment(kind) or is_bytes(kind):
            return kind
    kind = without_dictionary(kind)
    floats = pa.types.is_float32(kind) or pa.types.is_float64(kind)
    decimals = pa.types.is_decimal(kind) and kind.bit_width <= 128
    if not (floats or decimals or any(is_a(kind) for is_a in _INTEGERS)):
        raise WrongColumns(
            f"{function} of column {name!r} of type {kind} is not supported: cast the column "
            "to int64, float64 or decimal128 first"
        )
    if function in ("mean", "std"):
        return pa.float64()
    if function == "sum" and pa.types.is_uint64(kind):
        return pa.decimal128(DIGITS_MAX, 0)  # Two of them may leave any type of integers.
    if function == "sum" and not pa.types.is_null(kind):
        return pa.decimal128(DIGITS_MAX, kind.scale) if decimals else pa.float64() if floats else pa.int64()
    return kind


_INTEGERS = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)


def _plain_type(function: str, name: str, kind: pa.DataType) -> pa.DataType:
    """The type of what compares or orders values of the column."""
    kind = without_view(without_dictionary(kind))
    if pa.types.is_nested(kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind):
        raise WrongColumns(
            f"{function} of column {name!r} of type {kind} is not supported: lists and the like have no "
            "order; take their parts out first, as with explode() or map_batches()"
        )
    if function != "count_distinct":
        return kind
    if pa.types.is_interval(kind):
        raise WrongColumns(
            f"count_distinct of column {name!r} of type {kind} is not supported: make integers or a duration "
            "of it first, in map_batches()"
        )
    return pa.int64()
