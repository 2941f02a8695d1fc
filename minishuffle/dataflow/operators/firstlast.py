"""The value that a column has in the first or the last row of each slot, by event time."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.dataflow.operators.columns import MINIMUM, folded, result_type
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.moments import event_times
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.dataflow.operators.widertype import as_type, in_schema, wider_schema
from minishuffle.limits import BATCH_ROWS_MAX

__all__ = ["FirstOrLast"]

Vector: TypeAlias = "np.ndarray[Any, Any]"

_TIME = "time"
_NO_ROW = np.iinfo(np.int64).max


class FirstOrLast:
    """Keeps one row of each slot: that of the least event time, or the greatest.

    Rows of one time are taken by the smallest values of ``columns``, from the first on, nulls before all
    others; the firsts and lasts of one aggregation have the same ``columns``, so all of a kind come from
    one row. A null is a value like any other. Rows are gathered until there are twice as many as slots, and
    then sorted once; every look at the values sorts those since the last one.

    Raises:
        UsageError: a column's type has no order, or the event time is missing.
    """

    def __init__(self, is_last: bool, column: str, columns: tuple[str, ...], time: EventTime) -> None:
        self._is_last = is_last
        self._place = 1 + columns.index(column)
        self._columns = columns
        self._time = time
        self._schema: pa.Schema | None = None
        self._kept: pa.RecordBatch | None = None
        """The row of each slot, but for what is waiting."""
        self._waiting: list[pa.RecordBatch] = []
        self._slots: list[Vector] = []
        """The slot of each row, for each batch that waits."""

    @property
    def _function(self) -> str:
        return "last" if self._is_last else "first"

    def rows_of(self, batch: pa.RecordBatch) -> pa.Array:
        """What is taken of a batch: a struct of the event time and ``columns``."""
        arrays = [pa.array(event_times(self._time, batch))]
        for name in self._columns:
            column = column_of(batch, name)
            arrays.append(as_type(column, result_type(self._function, name, column.type)))
        return pa.StructArray.from_arrays(arrays, names=[_TIME, *map(str, range(len(self._columns)))])

    def grow(self, size: int) -> None:
        """Nothing: slots get room with their first row, which each of them has."""

    def update(self, slots: Vector, column: pa.Array) -> None:
        batch = pa.RecordBatch.from_struct_array(column)
        self._schema = wider_schema(self._schema, batch.schema, self._function)
        self._waiting.append(batch)
        self._slots.append(slots)
        kept = 0 if self._kept is None else self._kept.num_rows
        if sum(map(len, self._slots)) > kept + BATCH_ROWS_MAX:
            self._settle()

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        self._settle()
        self.update(slots, column)
        return self._settle()

    def at(self, slots: Vector | slice) -> pa.Array:
        return self._settled(slots).column(self._place)

    def keep(self, slots: Vector) -> None:
        self._kept = self._settled(slots)

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        return [self._settled(slots).to_struct_array()]

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        self.update(slots, columns[0])

    def _settled(self, slots: Vector | slice) -> pa.RecordBatch:
        self._settle()
        assert self._kept is not None
        return self._kept.take(pa.array(np.arange(self._kept.num_rows)[slots]))

    def _settle(self) -> pa.Array:
        """Let each slot keep one row. Gives the values of each slot after each row that waited."""
        if not self._waiting:
            return pa.nulls(0)
        assert self._schema is not None
        before = [] if self._kept is None else [self._kept]
        alike = [in_schema(batch, self._schema, self._function) for batch in (*before, *self._waiting)]
        rows = pa.Table.from_batches(alike, self._schema).combine_chunks().to_batches()[0]
        known = 0 if self._kept is None else self._kept.num_rows
        slots = np.concatenate([np.arange(known), *self._slots])
        order = self._order(rows)
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = np.arange(len(order))
        least = np.full(int(slots.max()) + 1, _NO_ROW)
        after, _ = folded(MINIMUM, least, slots, ranks)
        self._kept = rows.take(pa.array(order[least]))
        self._waiting, self._slots = [], []
        return rows.column(self._place).take(pa.array(order[after[known:]]))

    def _order(self, rows: pa.RecordBatch) -> Vector:
        """The numbers of the rows, from the one that goes before all others."""
        columns, directions = [rows.column(0)], ["descending" if self._is_last else "ascending"]
        for column in rows.columns[1:]:
            if not pa.types.is_null(column.type):
                columns += [pc.cast(column.is_valid(), pa.int8()), column]
                directions += ["ascending", "ascending"]
        names = list(map(str, range(len(columns))))
        sort_keys = list(zip(names, directions, strict=True))
        order: Vector = pc.sort_indices(pa.table(columns, names=names), sort_keys=sort_keys).to_numpy()
        return order.astype(np.int64)
