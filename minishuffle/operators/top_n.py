"""The rows of each key with the greatest or smallest values of a column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.schemas import with_innermost, without_view
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import Emit
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.join_columns import plain_schema
from minishuffle.operators.key_index import KeyIndex
from minishuffle.operators.row_order import row_order
from minishuffle.operators.state_parts import StatePart
from minishuffle.operators.task_state import Holding, Records, TaskState
from minishuffle.operators.wider_type import in_schema

__all__ = ["TopN"]

Vector = np.ndarray[Any, np.dtype[np.int64]]


class TopN(ChainedOperator):
    """Emits the ``n`` rows of each key with the greatest values of ``by``, or the smallest, when the data
    end: the key columns, then the others.

    A null is smaller than all values; NaN comes after all numbers in either direction. Rows of one value are
    taken by the smallest values of the other columns, but for those of lists and the like, which have no
    order. Rows are gathered until there are twice as many as can stay, and then sorted once.
    """

    name = "top_n"
    keeps_rows = True

    def __init__(self, keys: tuple[str, ...], n: int, by: str, descending: bool) -> None:
        self._keys = keys
        self._n = n
        self._by = by
        self._descending = descending
        self._index = KeyIndex()
        self._batches: list[pa.RecordBatch] = []
        self._slots: list[Vector] = []
        """The slot of each row's key, for each batch."""
        self._rows = 0
        self._kept = 0
        """Rows that were left when they were last sorted."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if batch.payload.num_rows:
            self._take(batch.payload)

    def _take(self, batch: pa.RecordBatch) -> None:
        keys = [batch.column(name) for name in self._keys]
        names = [*self._keys, *(name for name in batch.schema.names if name not in self._keys)]
        self._slots.append(self._index.lookup(keys))
        self._batches.append(batch.select(names))
        self._rows += batch.num_rows
        if self._rows > 2 * self._kept + BATCH_ROWS_MAX:
            self._keep_greatest()

    def finish(self, emit: Emit) -> None:
        if not self._rows:
            return
        self._keep_greatest()
        for batch in self._batches:
            for start in range(0, batch.num_rows, BATCH_ROWS_MAX):
                emit(Batch(batch.slice(start, BATCH_ROWS_MAX)))
        self._batches, self._slots, self._rows = [], [], 0

    def state_rows(self) -> int:
        return self._rows

    def write_state(self) -> Iterator[StatePart]:
        return self._task_state().write(self.context.index)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        self._task_state().read(parts)

    def _task_state(self) -> TaskState:
        return TaskState({"rows": Holding("key", self._write_rows, self._read_rows)})

    def _write_rows(self) -> Iterator[Records]:
        for batch in self._batches:
            yield Records(batch, [batch.column(name) for name in self._keys])

    def _read_rows(self, records: Records) -> None:
        self._take(records.payload)

    def _keep_greatest(self) -> None:
        schema = self._batches[0].schema
        if any(not batch.schema.equals(schema) for batch in self._batches):
            schema = plain_schema(schema)  # Exchanges decode dictionaries, but for what stays in the worker.
        # pyarrow takes no rows of views.
        plain = pa.schema([each.with_type(with_innermost(each.type, without_view)) for each in schema])
        alike = [in_schema(batch, plain, self.name) for batch in self._batches]
        table = pa.Table.from_batches(alike, plain)
        slots = np.concatenate(self._slots)
        order = self._order(table, slots)
        sorted_slots = slots[order]
        starts = np.flatnonzero(np.diff(sorted_slots, prepend=-1))
        ranks = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
        rows = order[ranks < self._n]
        kept = table.take(pa.array(rows)).combine_chunks()
        self._batches = in_schema(kept, schema, self.name).to_batches()
        self._rows = self._kept = len(rows)
        counts = [batch.num_rows for batch in self._batches]
        self._slots = np.split(slots[rows], np.cumsum(counts)[:-1])

    def _order(self, table: pa.Table, slots: Vector) -> Vector:
        """The numbers of the rows by key, value, and the other columns."""
        others = [name for name in table.column_names if name not in self._keys and name != self._by]
        columns = [pa.array(slots), *map(table.column, (self._by, *others))]
        by = "descending" if self._descending else "ascending"
        return row_order(columns, ["ascending", by, *["ascending"] * len(others)], nan_last=1)
