"""The different keys of Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import Batch, Emit
from minishuffle.dataflow.operators.chained import ChainedOperator
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.keyedstate import StatePart, by_columns, key_columns_of
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.exchange.gather import taken

__all__ = ["Distinct"]


class Distinct(ChainedOperator):
    """Emits the columns ``keys`` of the first row of each key, as soon as it comes."""

    name = "distinct"

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = keys
        self._index = KeyIndex()

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        assert isinstance(batch, pa.RecordBatch)
        columns = [column_of(batch, name) for name in self._keys]
        known = len(self._index)
        slots = self._index.lookup(columns)
        if len(self._index) > known:
            found, rows = np.unique(slots, return_index=True)
            given = pa.RecordBatch.from_arrays(columns, names=list(self._keys))
            emit(taken(given, np.sort(rows[found >= known])))

    def state_rows(self) -> int:
        return len(self._index)

    def write_state(self) -> Iterator[StatePart]:
        if len(self._index):
            yield from by_columns("keys", self._index.keys(), {})

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            self._index.lookup(key_columns_of(part))
