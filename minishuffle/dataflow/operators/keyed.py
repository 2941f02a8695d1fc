"""Keyed state of rows: one Python value per key, the user's function called once per record.

Keys are compared in their canonical form (1, True and 1.0 are one key). What is emitted is the key as
a record brought it: that very record with ``emit="each"``, an earlier one of that key otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress, islice
from typing import Any

import pyarrow as pa

from minishuffle.dataflow.operators.aggregate import AggregateArrow, CountArrow
from minishuffle.dataflow.operators.base import Emit
from minishuffle.dataflow.operators.chained import (
    ChainedOperator,
    Emission,
    OnError,
    RecordOperator,
    emit_rows,
)
from minishuffle.dataflow.operators.copies import copied
from minishuffle.dataflow.operators.functions import COLUMN_KEYS_MIN
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.keys import canonical_rows, key_array
from minishuffle.exchange.rows import SCALARS
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.row_store import ABSENT, RowStore
from minishuffle.operators.state_parts import (
    StatePart,
    by_rows,
    chunks,
    keys_of,
    packed,
    unpacked,
)

__all__ = ["AggregateArrow", "CountArrow", "CountRows", "FoldRows", "ReduceRows"]


class _Shown:
    """The key to emit for a canonical key, where the two differ: the first record's."""

    def __init__(self) -> None:
        self._first: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._first)

    def canonical(self, keys: list[Any]) -> list[Any]:
        canonical: list[Any] = canonical_rows(keys)
        if canonical is not keys:
            remember = self._first.setdefault
            for form, key in zip(canonical, keys, strict=True):
                remember(form, key)
        return canonical

    def pairs(self, values: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """(key, value) as they are emitted, from (canonical key, value)."""
        if not self._first:
            return iter(values)
        first = self._first
        return ((first.get(form, form), value) for form, value in values)


def _emit_in_chunks(pairs: Iterator[tuple[Any, Any]], emit: Emit) -> None:
    while chunk := list(islice(pairs, BATCH_ROWS_MAX)):
        emit_rows(chunk, emit)


class CountRows(ChainedOperator):
    """Counts the records of each key and emits (key, count) as ``emit`` says.

    Keys that come as columns (``functions.keys_alone``) are counted as columns, if nothing is emitted before
    the end and as long as all have one type.
    """

    name = "count"

    def __init__(self, emit: Emission) -> None:
        self.emission = emit
        self._counts: Counter[Any] = Counter()
        self._shown = _Shown()
        self._columns: CountArrow | None = None
        """What was counted as columns; then ``_counts`` has what came in short batches since."""
        self._type: pa.DataType | None = None
        """That of the keys in ``_columns``."""
        self._short_rows = 0
        """So many rows are in ``_counts`` beside ``_columns``."""
        self._is_mixed = False
        """Keys have come that no column holds as they are."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        payload, given = batch.payload, batch.keys
        if not isinstance(payload, list):
            if self.emission == "end" and self._fits(payload.column(0).type):
                assert self._columns is not None
                self._columns.process(batch, 0, emit)
                return
            given = payload.column(0).to_pylist()
        keys = self._shown.canonical(given)
        if self.emission == "each":
            if keys:
                emit(Batch(list(zip(given, self._count_each(keys), strict=True))))
            return
        self._counts.update(keys)
        if self.emission == "batch" and keys:
            counts = self._counts
            emit(Batch(list(self._shown.pairs((key, counts[key]) for key in dict.fromkeys(keys)))))
        elif self._columns is not None:
            self._short_rows += len(keys)
            if self._short_rows >= COLUMN_KEYS_MIN:
                self._put_together()

    def _fits(self, kind: pa.DataType) -> bool:
        """Whether keys of that type are counted as columns."""
        if self._columns is None and not self._is_mixed:
            self._columns, self._type = CountArrow(("key",), "end"), kind
        elif kind != self._type:
            self._give_up_columns()
        return self._columns is not None

    def _put_together(self) -> None:
        """Have all counts in one place, as columns if the keys of short batches allow it."""
        keys = key_array(list(self._counts))
        if self._shown or keys is None or keys.type != self._type:
            self._give_up_columns()
        elif self._columns is not None:
            self._columns.add([keys], pa.array(self._counts.values(), pa.int64()))
            self._counts = Counter()
        self._short_rows = 0

    def _give_up_columns(self) -> None:
        if self._columns is not None:
            for counted in self._columns.results():
                self._counts.update(dict(_pairs(counted)))
        self._columns, self._is_mixed = None, True

    def _counted(self) -> Iterator[tuple[Any, int]]:
        """Keys as they are shown, and their counts."""
        if self._columns is not None and self._counts:
            self._put_together()
        if self._columns is not None:
            return chain.from_iterable(map(_pairs, self._columns.results()))
        return self._shown.pairs(self._counts.items())

    def _count_each(self, keys: list[Any]) -> list[int]:
        counts = self._counts
        values: list[int] = []
        get, append = counts.get, values.append
        for key in keys:
            value = get(key, 0) + 1
            counts[key] = value
            append(value)
        return values

    def finish(self, emit: Emit) -> None:
        if self.emission == "end":
            _emit_in_chunks(self._counted(), emit)

    def write_state(self) -> Iterator[StatePart]:
        for some in chunks(self._counted()):
            yield by_rows("counts", [key for key, _ in some], value=[count for _, count in some])

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            forms = self._shown.canonical(keys_of(part))
            self._counts.update(dict(zip(forms, part.batch["value"].to_pylist(), strict=True)))

    def state_rows(self) -> int:
        """The number of keys; some of short batches, fewer than ``COLUMN_KEYS_MIN``, may be in it twice."""
        return len(self._counts) + (self._columns.state_rows() if self._columns is not None else 0)


def _pairs(counted: pa.RecordBatch) -> Iterator[tuple[Any, int]]:
    return zip(counted.column(0).to_pylist(), counted.column(1).to_pylist(), strict=True)


class _FoldedRows(RecordOperator):
    """One value per key, brought forward by a function of the user at each record.

    A record whose function raises is dropped (or fails the task) and leaves its key's value as it
    was, unless the function had already changed that value in place.
    """

    def __init__(self, fn: Callable[[Any, Any], Any], emit: Emission, on_error: OnError) -> None:
        super().__init__(fn, on_error)
        self.emission = emit
        self._state = RowStore()
        self._shown = _Shown()
        self._shows_copies = False
        """A value of the batch that is emitted is not the very one of the state."""

    def shown(self, value: Any) -> Any:
        """What is emitted of a value that the state goes on with, and may change, after this record."""
        if self.emission != "each":
            return value
        self._shows_copies = True
        return copied(value)

    def advance(self, records: Iterator[tuple[Any, Any]], held: Any, values: list[Any]) -> None:
        """Take (place, row) after (place, row): bring ``held[place]`` forward, which is ABSENT for a
        new key, and append it to ``values``, as :meth:`shown` if it is more than a scalar."""
        raise NotImplementedError

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        rows = batch.payload
        if not rows:
            return
        keys = self._shown.canonical(batch.keys)
        held, places = self._state.take(keys)
        values: list[Any] = []
        records = zip(places, rows, strict=True)
        dropped = False
        while True:
            try:
                self.advance(records, held, values)
                break
            except Exception as error:
                culprit = rows[len(values)]
                if self.on_error == "fail":
                    self.note_failure(error, culprit)
                    raise
                self.drop(error, culprit)
                values.append(ABSENT)
                dropped = True
        self._state.put(None if dropped or self._shows_copies else values)
        self._shows_copies = False
        if self.emission != "end":
            self._emit_values(batch.keys, keys, values, dropped, emit)

    def _emit_values(
        self, given: list[Any], keys: list[Any], values: list[Any], dropped: bool, emit: Emit
    ) -> None:
        if dropped:
            kept = [value is not ABSENT for value in values]
            given, keys, values = (list(compress(column, kept)) for column in (given, keys, values))
        if not values:
            return
        if self.emission == "each":
            emit(Batch(list(zip(given, values, strict=True))))
        else:
            last = dict(zip(keys, values, strict=True))
            emit(Batch([(key, copied(value)) for key, value in self._shown.pairs(last.items())]))

    def finish(self, emit: Emit) -> None:
        if self.emission == "end":
            _emit_in_chunks(self._shown.pairs(self._state.items()), emit)

    def write_state(self) -> Iterator[StatePart]:
        for some in chunks(self._shown.pairs(self._state.items())):
            yield by_rows("values", [key for key, _ in some], value=packed(value for _, value in some))

    def read_state(self, parts: Iterable[StatePart]) -> None:
        for part in parts:
            values = unpacked(part.batch["value"])
            held, places = self._state.take(self._shown.canonical(keys_of(part)))
            for place, value in zip(places, values, strict=True):
                held[place] = value
            self._state.put(values)

    def state_rows(self) -> int:
        return len(self._state)


class ReduceRows(_FoldedRows):
    """Combines the rows of each key with ``fn(value, row)``; the first row is the first value."""

    name = "reduce"

    def __init__(self, fn: Callable[[Any, Any], Any], emit: Emission, on_error: OnError = "fail") -> None:
        super().__init__(fn, emit, on_error)

    def advance(self, records: Iterator[tuple[Any, Any]], held: Any, values: list[Any]) -> None:
        fn, absent, append = self.fn, ABSENT, values.append
        for place, row in records:
            value = held[place]
            held[place] = value = row if value is absent else fn(value, row)
            append(value if type(value) in SCALARS else self.shown(value))


class FoldRows(_FoldedRows):
    """Adds each row to its key's value with ``add(value, row)``, which returns the new value, or the same
    one changed: what is emitted is a copy. ``create()`` makes a key's first value.
    """

    name = "aggregate"

    def __init__(
        self,
        create: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        emit: Emission,
        on_error: OnError = "fail",
    ) -> None:
        super().__init__(add, emit, on_error)
        self._create = create

    def advance(self, records: Iterator[tuple[Any, Any]], held: Any, values: list[Any]) -> None:
        add, create, absent, append = self.fn, self._create, ABSENT, values.append
        for place, row in records:
            value = held[place]
            held[place] = value = add(create() if value is absent else value, row)
            append(value if type(value) in SCALARS else self.shown(value))
