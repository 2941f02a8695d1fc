"""Aggregates combined before an exchange: each batch by itself, so that nothing waits and no row is held.

What :class:`CombineBatches` sends for a batch is either its rows, or for each of their keys what
:class:`CombinedAggregation` behind the exchange adds to the key's state; the two have different columns.
(Flink: ``MiniBatchLocalGroupAggFunction`` and ``MiniBatchGlobalGroupAggFunction``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import pyarrow as pa

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.gather import take
from minishuffle.operators.aggregate_states import Outputs, pieces_of
from minishuffle.operators.base import Emit
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.column_store import Vector
from minishuffle.operators.key_index import KeyIndex
from minishuffle.operators.reductions import Aggregation, FirstOfKeys

__all__ = ["CombineBatches", "CombinedAggregation", "state_names"]

SHORT_ROWS = 1024
"""Batches of fewer rows are sent as they are: combining them costs more than it saves."""
_SAMPLE_ROWS: Final = 4096
"""So many rows of a longer batch show whether it has few keys."""
_KEYS_MAX: Final = 16_384
"""So many keys are remembered at most from one batch to the next."""
_PASSED_MAX: Final = 63
"""So many batches at most are sent as they are before another one is looked at."""


class CombineBatches(ChainedOperator):
    """Combines the rows of each key in a batch, if it has at most half as many keys as rows.

    If it has more the rows are sent, and those of some batches that follow, of twice as many and one more
    each time, before a sample of one is looked at: where keys are many, that costs next to nothing.

    Args:
        keys: names of the key columns.
        make_outputs: gives new aggregates with their names and input columns.
        prefix: of the names of columns of states; no column of rows begins with it.
    """

    name = "combine"

    def __init__(self, keys: Sequence[str], make_outputs: Callable[[], Outputs], prefix: str) -> None:
        self._keys = tuple(keys)
        self._make_outputs = make_outputs
        self._names = [*keys, *state_names(prefix, (name for name, _, _ in make_outputs()))]
        self._index = KeyIndex()
        """Keys of batches before: most come again, and are found sooner than they are added."""
        self._firsts = FirstOfKeys()
        self._has_few = False
        """The last batch that was looked at had few keys."""
        self._pause = self._left = 0
        """How many batches pass after the last one that had many keys, and how many of them are left."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = batch.payload
        if self._left or len(rows) < SHORT_ROWS:
            self._left = max(0, self._left - 1)
            emit(batch)
        elif self._has_few or self._has_few_keys(rows.slice(0, _SAMPLE_ROWS)):
            for begin, count in pieces_of(len(rows)):
                emit(Batch(self._combined(rows.slice(begin, count))))
        else:
            self._pause = self._left = min(_PASSED_MAX, 2 * self._pause + 1)
            emit(batch)

    def _has_few_keys(self, rows: pa.RecordBatch) -> bool:
        slots = self._slots(rows)
        self._note(self._firsts.of(slots, len(self._index)), rows)
        return self._has_few

    def _note(self, firsts: Vector, rows: pa.RecordBatch) -> None:
        self._has_few = 2 * len(firsts) <= len(rows)
        if self._has_few:
            self._pause = 0

    def _slots(self, rows: pa.RecordBatch) -> Vector:
        """Those of the rows' keys, in an index that does not grow for ever."""
        if len(self._index) > _KEYS_MAX:
            self._index, self._firsts = KeyIndex(), FirstOfKeys()
        return self._index.lookup([rows.column(name) for name in self._keys])

    def _combined(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The keys of these rows and the states of their aggregates."""
        slots, outputs = self._slots(rows), self._make_outputs()
        firsts = self._firsts.of(slots, len(self._index))
        self._note(firsts, rows)
        chosen = slots.take(firsts)
        columns = [take(rows.column(name), firsts) for name in self._keys]
        for _, column, aggregate in outputs:
            aggregate.grow(len(self._index))
            aggregate.update(slots, rows.column(column))
            columns += aggregate.as_columns(chosen)
        return pa.RecordBatch.from_arrays(columns, names=self._names)


def state_names(prefix: str, names: Iterable[str]) -> list[str]:
    """The names of the columns that hold the states of the aggregates of these names, one each."""
    return [f"{prefix}{name}" for name in names]


class CombinedAggregation(Aggregation):
    """Aggregates of rows, and of what :class:`CombineBatches` with the same ``prefix`` has made of others."""

    def __init__(self, keys: Sequence[str], outputs: Outputs, prefix: str, name: str = "aggregate") -> None:
        self._states = state_names(prefix, (each for each, _, _ in outputs))
        super().__init__(keys, outputs, name)

    def _brought(self, piece: Batch) -> Vector:
        rows = piece.payload
        if rows.schema.get_field_index(self._states[0]) < 0:
            return super()._brought(piece)
        slots = self.state.take_columns(self._keys_of(rows))
        for (_, _, aggregate), state in zip(self._outputs, self._states, strict=True):
            aggregate.merge(slots, [rows.column(state)])
        return slots
