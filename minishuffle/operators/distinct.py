"""The different keys of Arrow batches, and how many different values each has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.gather import take, taken
from minishuffle.exchange.keys import BOOL8, UUIDS
from minishuffle.operators.aggregate_states import SUM, Aggregate, folded, grown, result_type, valid_marks
from minishuffle.operators.base import Emit
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.key_index import KeyIndex
from minishuffle.operators.keyed_state import KeyedState
from minishuffle.operators.state_parts import StatePart

__all__ = ["Distinct", "DistinctCount"]

Vector: TypeAlias = "np.ndarray[Any, Any]"


class Distinct(ChainedOperator):
    """Emits the columns ``keys`` of the first row of each key, as soon as it comes."""

    name = "distinct"

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = keys
        self._state = KeyedState()
        self._known = 0
        """How many keys there are."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        columns = [batch.payload.column(name) for name in self._keys]
        known, slots = self._known, self._state.take_columns(columns)
        self._known = len(self._state)
        if self._known > known:
            found, rows = np.unique(slots, return_index=True)
            given = pa.RecordBatch.from_arrays(columns, names=list(self._keys))
            emit(Batch(taken(given, np.sort(rows[found >= known]))))

    def state_rows(self) -> int:
        return self._known

    def write_state(self) -> Iterator[StatePart]:
        return self._state.write()

    def freeze_state(self) -> Iterator[StatePart]:
        return self._state.write(frozen=True)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        self._state.read(parts)
        self._known = len(self._state)


class DistinctCount(Aggregate):
    """Number of different values of each slot, which are all kept. A null counts for nothing; NaNs are one
    value.

    Raises:
        UsageError: values are lists and the like.
    """

    reads_all = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts = np.zeros(0, dtype=np.int64)
        self._pairs = KeyIndex()
        """The pairs of slot and value that have come."""

    def grow(self, size: int) -> None:
        self._counts = grown(self._counts, size, 0)

    def update(self, slots: Vector, column: pa.Array) -> None:
        folded(SUM, self._counts, slots, self._marks(slots, column), wanted=False)

    def running(self, slots: Vector, column: pa.Array) -> pa.Array:
        return pa.array(folded(SUM, self._counts, slots, self._marks(slots, column))[0])

    def _marks(self, slots: Vector, column: pa.Array) -> Vector:
        """1 for each row that brings its slot a new value, else 0."""
        result_type("count_distinct", self._name, column.type)
        marks = np.zeros(len(slots), dtype=np.int64)
        rows = np.flatnonzero(valid_marks(column))
        if len(rows):
            known = len(self._pairs)
            pairs = self._pairs.lookup([pa.array(slots[rows]), _as_key(take(column, rows))])
            # New pairs are numbered in the order in which they come.
            before = np.maximum.accumulate(np.concatenate(([known - 1], pairs)))[:-1]
            marks[rows] = pairs > before
        return marks

    def at(self, slots: Vector | slice) -> pa.Array:
        return pa.array(self._counts[slots])

    def keep(self, slots: Vector) -> None:
        owners, values = self._of(slots)
        self._counts, self._pairs = self._counts.take(slots), KeyIndex()
        if len(owners):
            self._pairs.lookup([pa.array(owners), values])

    def as_columns(self, slots: Vector | slice) -> list[pa.Array]:
        owners, values = self._of(slots)
        counts = np.bincount(owners, minlength=len(self._counts[slots]))
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return [pa.LargeListArray.from_arrays(pa.array(offsets), values)]

    def merge(self, slots: Vector, columns: list[pa.Array]) -> None:
        (lists,) = columns
        self.update(slots[pc.list_parent_indices(lists).to_numpy()], pc.list_flatten(lists))

    def _of(self, slots: Vector | slice) -> tuple[Vector, pa.Array]:
        """The values of these slots and, ascending, whose each is: a place in ``slots``."""
        if not len(self._pairs):
            return np.zeros(0, dtype=np.int64), pa.nulls(0)
        owners, values = self._pairs.keys()
        chosen = np.arange(len(self._counts))[slots]
        places = np.full(len(self._counts), -1)
        places[chosen] = np.arange(len(chosen))
        found = places[owners.to_numpy()]
        rows = np.flatnonzero(found >= 0)
        rows = rows[np.argsort(found[rows], kind="stable")]
        return found[rows], take(values, rows)


def _as_key(values: pa.Array) -> pa.Array:
    """The values; those of extension types that are no keys as they are stored."""
    kind = values.type
    is_stored = isinstance(kind, pa.BaseExtensionType) and kind not in (BOOL8, UUIDS)
    return _as_key(values.storage) if is_stored else values
