"""Keyed aggregation of Arrow batches: the keys' slots come from a :class:`KeyIndex`, the state is numpy
vectors by slot (``columns.py``), and no Python runs per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.aggregates import Function, input_of, outputs_of
from minishuffle.dataflow.operators.base import Emit
from minishuffle.dataflow.operators.chained import ChainedOperator, Emission
from minishuffle.dataflow.operators.columns import (
    Outputs,
    RowCount,
    check_result,
    grown,
    merge_states,
    states_of,
)
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.gather import take
from minishuffle.kernels.machinecode import kernel
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.state_parts import StatePart, by_columns, key_columns_of

__all__ = ["AggregateArrow", "CountArrow", "pieces_of"]

PIECE_ROWS = 32_768
"""Batches are worked through in pieces: short enough for the processor's cache, long enough that the
switches of the interpreter's lock at each vector operation do not count (8 Ki rows cost twice)."""
_STAMPS = 255
"""How many stamps of batches there are besides 0."""


def pieces_of(rows: int) -> Iterator[tuple[int, int]]:
    """Begin and length of pieces of like size, about ``PIECE_ROWS`` each: what one of two consumers gets of a
    full batch is one piece, though it may have some rows more than half of that."""
    size = max(1, -(-rows // max(1, round(rows / PIECE_ROWS))))
    return ((start, min(size, rows - start)) for start in range(0, rows, size))


class _KeyedColumns(ChainedOperator):
    """Columns by key; ``outputs`` are (name, input column, aggregate)."""

    def __init__(self, keys: tuple[str, ...], outputs: Outputs, emit: Emission) -> None:
        self.keys = tuple(keys)
        self.outputs = outputs
        self.emission = emit
        self.names = [*self.keys, *(name for name, _, _ in outputs)]
        if not self.keys:
            raise UsageError("an aggregation by key needs at least one key column: key_by('column')")
        check_result(self.names)
        self._index = KeyIndex()
        self._stamps = np.zeros(0, dtype=np.uint8)
        """By slot, that of the last of the batches with the key; 0 for one that is long ago."""
        self._stamp = 0

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        columns, taken = batch.payload, []
        for start, rows in pieces_of(columns.num_rows):
            piece = columns.slice(start, rows)
            key_columns = [column_of(piece, name) for name in self.keys]
            slots = self._index.lookup(key_columns)
            for _, _, aggregate in self.outputs:
                aggregate.grow(len(self._index))
            if self.emission == "each":
                emit(Batch(self._running(piece, key_columns, slots)))
                continue
            for _, column, aggregate in self.outputs:
                aggregate.update(slots, input_of(piece, column, aggregate))
            taken.append(slots)
        if self.emission == "batch" and taken:
            slots = np.concatenate(taken) if len(taken) > 1 else taken[0]
            emit(Batch(self._latest(columns, slots)))

    def _running(
        self, piece: pa.RecordBatch, key_columns: list[pa.Array], slots: np.ndarray[Any, Any]
    ) -> pa.RecordBatch:
        values = [
            aggregate.running(slots, input_of(piece, column, aggregate))
            for _, column, aggregate in self.outputs
        ]
        return pa.RecordBatch.from_arrays([*key_columns, *values], names=self.names)

    def _latest(self, batch: pa.RecordBatch, slots: np.ndarray[Any, Any]) -> pa.RecordBatch:
        """One row for each key of the batch, in the order of the keys' first rows."""
        self._stamps = grown(self._stamps, len(self._index), 0)
        self._stamp = self._stamp % _STAMPS + 1
        if self._stamp == 1:
            self._stamps.fill(0)
        rows = np.empty(len(slots), dtype=np.int64)
        rows = rows[: kernel("first_rows")(slots, self._stamps, self._stamp, rows, len(slots))]
        columns = [take(column_of(batch, name), rows) for name in self.keys]
        chosen = slots.take(rows)
        values = [aggregate.at(chosen) for _, _, aggregate in self.outputs]
        return pa.RecordBatch.from_arrays([*columns, *values], names=self.names)

    def finish(self, emit: Emit) -> None:
        if self.emission == "end":
            for batch in self.results():
                emit(Batch(batch))

    def results(self) -> Iterator[pa.RecordBatch]:
        """Keys and values as they are by now, in the order in which keys first came."""
        key_columns = self._index.keys() if len(self._index) else []
        for start in range(0, len(self._index), BATCH_ROWS_MAX):
            stop = min(start + BATCH_ROWS_MAX, len(self._index))
            columns = [column.slice(start, stop - start) for column in key_columns]
            values = [aggregate.at(slice(start, stop)) for _, _, aggregate in self.outputs]
            yield pa.RecordBatch.from_arrays([*columns, *values], names=self.names)

    def state_rows(self) -> int:
        return len(self._index)

    def write_state(self) -> Iterator[StatePart]:
        if size := len(self._index):
            yield from by_columns("keys", self._index.keys(), states_of(self.outputs, slice(0, size)))

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            slots = self._index.lookup(key_columns_of(part))
            merge_states(self.outputs, slots, len(self._index), part.batch)


class CountArrow(_KeyedColumns):
    """Rows per key: emits the key columns and the count (int64)."""

    name = "count"

    def __init__(self, keys: tuple[str, ...], emit: Emission, name: str = "count") -> None:
        self._count = RowCount()
        super().__init__(keys, [(name, keys[0], self._count)] if keys else [], emit)

    def add(self, keys: list[pa.Array], counts: pa.Array) -> None:
        """Rows that were counted elsewhere."""
        slots = self._index.lookup(keys)
        self._count.grow(len(self._index))
        self._count.merge(slots, [counts])


class AggregateArrow(_KeyedColumns):
    """Aggregates of columns per key: emits the key columns and one column per output name.

    ``columns`` maps an output name to (input column, function), see ``aggregates.Function``; first and last
    need to know where the event ``time`` stands. Integers sum exactly as int64, floats as float64.
    A column may come in several types, in any order: see ``columns.Fold``.

    Raises:
        UsageError: an unknown function, two output columns of one name, a column whose type cannot
            be aggregated, or a sum beyond int64.
        UnknownName: a batch lacks a column.
    """

    name = "aggregate"

    def __init__(
        self,
        keys: tuple[str, ...],
        columns: Mapping[str, tuple[str, Function]],
        emit: Emission,
        time: EventTime | None = None,
    ) -> None:
        super().__init__(keys, outputs_of(columns, time), emit)
