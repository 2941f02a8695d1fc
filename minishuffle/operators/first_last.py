"""The row of each slot that comes first in an order: the first or last by event time, the least or greatest
value of a column of texts, bytes or decimals."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.exchange.batch import Batch, Times
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.aggregate_states import MINIMUM, Aggregate, folded, grown, result_type
from minishuffle.operators.batch_times import event_times
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.row_order import row_order
from minishuffle.operators.wider_type import as_type

__all__ = ["Extreme", "FirstOrLast"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_NO_ROW: Final = np.iinfo(np.int64).max
_CHUNKS_MAX: Final = 16


class _LeastRows(Aggregate):
    """Keeps the row of each slot that comes before its others; ``place`` is the number of the column whose
    values are given.

    What is taken is a struct of the row's columns, or the only one of them.

    A batch is sorted together with the rows that its slots have so far, and with no others. Rows that a slot
    lets go stay in memory until they are as many as the slots.
    """

    def __init__(self, what: str, place: int) -> None:
        self._what = what
        self._place = place
        self._rows: pa.Table | None = None
        self._row_of = np.empty(0, dtype=np.int64)
        """By slot the number of its row; -1: it has none."""
        self._size = 0

    def order(self, rows: pa.Table) -> Vector:
        """The numbers of the rows, from the one that comes before all others."""
        raise NotImplementedError

    def grow(self, size: int) -> None:
        self._row_of, self._size = grown(self._row_of, size, -1), size

    def update(self, slots: Vector, column: pa.Array) -> None:
        self._add(slots, column)

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        rows, after = self._add(slots, column)
        return _one_chunk(rows.column(self._place).take(pa.array(after)))

    def _add(self, slots: Vector, column: pa.Array) -> tuple[pa.Table, Vector]:
        """Take a batch. Gives rows, and which of them each row's slot has after that row."""
        if not pa.types.is_struct(column.type):
            column = pa.StructArray.from_arrays([column], names=["value"])
        batch = pa.RecordBatch.from_struct_array(column)
        kept = batch.schema.empty_table() if self._rows is None else self._rows
        touched, owners = np.unique(slots, return_inverse=True)
        places = np.flatnonzero(self._row_of[touched] >= 0)
        given = pa.Table.from_batches([batch])
        rows = pa.concat_tables([kept.take(pa.array(self._row_of[touched[places]])), given]).combine_chunks()
        order = self.order(rows)
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = np.arange(len(order))
        least = np.full(len(touched), _NO_ROW)
        after, _ = folded(MINIMUM, least, np.concatenate((places, owners)), ranks)
        chosen = order[least]
        is_new = chosen >= len(places)
        self._row_of[touched[is_new]] = kept.num_rows + np.arange(np.count_nonzero(is_new))
        self._rows = pa.concat_tables([kept, rows.take(pa.array(chosen[is_new]))])
        if self._rows.num_rows > 2 * self._size + BATCH_ROWS_MAX:
            self.keep(np.arange(self._size))
        elif self._rows.column(0).num_chunks > _CHUNKS_MAX:
            self._rows = self._rows.combine_chunks()
        return rows, order[after[len(places) :]]

    def at(self, slots: Vector | slice) -> pa.Array:
        return self._of(slots).column(self._place)

    def keep(self, slots: Vector) -> None:
        self._rows = pa.Table.from_batches([self._of(slots)])
        self._row_of, self._size = np.arange(len(slots)), len(slots)

    def _of(self, slots: Vector | slice) -> pa.RecordBatch:
        assert self._rows is not None
        chosen = self._row_of[: self._size][slots]
        rows = self._rows.take(pa.array(chosen)).combine_chunks()
        return pa.RecordBatch.from_arrays([_one_chunk(column) for column in rows.columns], schema=rows.schema)

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        return [self._of(slots).to_struct_array()]


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


class FirstOrLast(_LeastRows):
    """The value in the row of the least event time, or the greatest.

    Rows of one time are taken by the smallest values of ``columns``, from the first on, nulls before all
    others and NaN after them; the firsts and lasts of one aggregation have the same ``columns``, so all of a
    kind come from one row. A null is a value like any other.

    Raises:
        UsageError: a column's type has no order, or the event time is missing.
    """

    def __init__(self, is_last: bool, column: str, columns: tuple[str, ...], time: EventTime) -> None:
        super().__init__("last" if is_last else "first", 1 + columns.index(column))
        self._columns = columns
        self._time = time

    @property
    def reads_times(self) -> bool:
        """Whether it reads the times beside rows."""
        return self._time.is_beside

    def rows_of(self, batch: pa.RecordBatch, times: Times | None = None) -> pa.Array:
        """What is taken of rows, with the times beside them: a struct of the event time and ``columns``."""
        arrays = [pa.array(event_times(self._time, Batch(batch, None, times)))]
        for name in self._columns:
            column = batch.column(name)
            arrays.append(as_type(column, result_type(self._what, name, column.type)))
        return pa.StructArray.from_arrays(arrays, names=["time", *map(str, range(len(self._columns)))])

    def order(self, rows: pa.Table) -> Vector:
        by_time = "descending" if self._what == "last" else "ascending"
        return row_order(rows.columns, [by_time, *["ascending"] * (rows.num_columns - 1)])


class Extreme(_LeastRows):
    """The least or greatest value of columns of one type, which has an order; null if there is none."""

    def __init__(self, function: str) -> None:
        super().__init__(function, 0)

    def order(self, rows: pa.Table) -> Vector:
        (column,) = rows.columns
        by_value = "ascending" if self._what == "min" else "descending"
        return row_order([column.is_valid(), column], ["descending", by_value])
