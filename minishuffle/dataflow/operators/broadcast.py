"""Joins with a small side that every subtask holds whole. (Flink: ``BroadcastProcessFunction``.)

The small side is input number 1 and is read to its end before the other: see ``first_input``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import Emit, Mark, Used
from minishuffle.dataflow.operators.chained import ChainedOperator, preview
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.joincolumns import (
    SUFFIX,
    JoinColumns,
    Outbox,
    joined_names,
    null_marks,
    plain,
    plain_schema,
    with_columns,
)
from minishuffle.dataflow.operators.joinrows import is_null
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.dataflow.operators.keykinds import RowKinds
from minishuffle.dataflow.operators.moments import Vector
from minishuffle.errors import ResourceExhausted, UnknownName, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.gather import taken
from minishuffle.exchange.keys import canonical_rows
from minishuffle.exchange.rows import pack_rows
from minishuffle.exchange.sizes import ListedTimes, RowsOut, row_bytes, rows_that_fit
from minishuffle.limits import BATCH_ROWS_MAX, BROADCAST_BYTES_MAX, MIB

__all__ = ["BroadcastArrow", "BroadcastColumns", "BroadcastRows", "places"]

BIG, SMALL = 0, 1


class BroadcastColumns(JoinColumns):
    """The columns of the result: all of the big side as they are, and the small side's others.

    Args:
        keys: of the big side; ``small_keys`` are compared with them, in order.
        is_left: records of the big side without a partner go out, with nulls.
        suffix: follows a name of the small side that the big one has.
    """

    method = "broadcast_join"

    def __init__(
        self, keys: tuple[str, ...], small_keys: tuple[str, ...], *, is_left: bool, suffix: str = SUFFIX
    ) -> None:
        super().__init__(keys, small_keys, "left" if is_left else "inner", suffix)
        self.is_left = is_left

    def held_names(self, given: Sequence[str], input: int) -> list[str]:
        return list(given) if input == BIG else self.others(given)

    def left_schema(self, schema: pa.Schema) -> pa.Schema:
        return pa.schema([field.remove_metadata() for field in schema])


class _Broadcast(ChainedOperator):
    """Keeps the small side; its marks end here."""

    name = "broadcast_join"
    keeps_rows = True
    shares = True
    first_input: int | None = SMALL

    def __init__(self, columns: BroadcastColumns) -> None:
        self.columns = columns
        self._bytes = 0
        self._held = 0
        """Rows of the small side."""

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if input == BIG:
            emit(mark)

    def state_rows(self) -> int:
        return self._held

    def takes_times(self, input: int, used: Used) -> bool:
        return used.times and input == BIG

    def note_size(self, rows: int, size: int) -> None:
        """Count rows and bytes of the small side.

        Raises:
            ResourceExhausted: there are too many.
        """
        self._held += rows
        self._bytes += size
        if self._bytes > BROADCAST_BYTES_MAX:
            raise ResourceExhausted(
                f"the small side of broadcast_join has more than {BROADCAST_BYTES_MAX // MIB} MiB, and each "
                "subtask would keep it: leave out rows and columns, or use key_by(...).join(...)"
            )


class BroadcastArrow(_Broadcast):
    """Emits the big side's batches with the small side's columns, without Python per row.

    Args:
        schema: of the small side.
    """

    def __init__(self, columns: BroadcastColumns, schema: pa.Schema) -> None:
        super().__init__(columns)
        self._schema = plain_schema(schema)
        self._batches: list[pa.RecordBatch] = []
        self._small: _Small | None = None
        """Made once the big side comes."""

    def for_columns(self, used: Used) -> BroadcastArrow:
        """(At submission.) The same where only these columns of the inputs come."""
        narrowed = copy.copy(self)
        narrowed._schema = with_columns(self._schema, used.takes[SMALL])
        return narrowed

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        columns = batch.payload
        if input == SMALL:
            given = plain(columns, self._schema)
            self.note_size(given.num_rows, given.nbytes)
            self._batches.append(given)
            return
        if self._small is None:
            self._small = self._build()
        small = self._small
        outbox = Outbox(emit)
        for start in range(0, columns.num_rows, BATCH_ROWS_MAX):
            self._join(batch.slice(start, min(start + BATCH_ROWS_MAX, columns.num_rows)), small, outbox)
        outbox.flush()

    def _build(self) -> _Small:
        table = pa.Table.from_batches(self._batches, self._schema)
        self._batches = []
        return _Small(table, self.columns)

    def _join(self, some: Batch, small: _Small, outbox: Outbox) -> None:
        batch, times = some.payload, some.times
        given = [column_of(batch, name) for name in self.columns.keys[BIG]]
        self.columns.check_keys(batch.schema, small.schema)
        starts, counts = small.find(given)
        schema = self.columns.result(batch.schema, small.schema)
        wanted = np.maximum(counts, 1) if self.columns.is_left else counts
        most = rows_that_fit(row_bytes(batch) + row_bytes(small.others))
        for asked, found in places(starts, wanted, most):
            missing = counts[asked] == 0
            added = small.others.take(pa.array(found, mask=missing))
            one_each = len(asked) == batch.num_rows and bool((wanted == 1).all())
            own = batch if one_each else taken(batch, asked)
            joined = pa.RecordBatch.from_arrays([*own.columns, *added.columns], schema=schema)
            outbox.add(Batch(joined, None, None if times is None else times.take(asked)))


class _Small:
    """The small side's rows by key; ``others`` are the columns that come into the result."""

    def __init__(self, table: pa.Table, columns: BroadcastColumns) -> None:
        self.schema = table.schema
        names = columns.others(table.schema.names)
        keys = [_whole(table.column(name)) for name in columns.keys[SMALL]]
        nulls = null_marks(keys)
        rows = np.arange(table.num_rows) if nulls is None else np.flatnonzero(~nulls)
        self._index = KeyIndex()
        slots = np.zeros(0, dtype=np.int64)
        if len(rows):
            slots = self._index.lookup([array.take(pa.array(rows)) for array in keys])
        self._counts = np.bincount(slots, minlength=len(self._index))
        self._starts = np.cumsum(self._counts) - self._counts
        order = pa.array(rows[np.argsort(slots, kind="stable")])
        arrays = [_whole(table.column(name)).take(order) for name in names]
        self.others = pa.RecordBatch.from_arrays(arrays, schema=pa.schema([table.field(n) for n in names]))

    def find(self, keys: list[pa.Array]) -> tuple[Vector, Vector]:
        """Where the rows of each key begin in ``others``, and how many there are."""
        slots = self._index.find(keys)
        nulls = null_marks(keys)
        if nulls is not None:
            slots[nulls] = -1
        known = slots >= 0
        starts, counts = np.zeros_like(slots), np.zeros_like(slots)
        starts[known], counts[known] = self._starts[slots[known]], self._counts[slots[known]]
        return starts, counts


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


class BroadcastRows(_Broadcast):
    """Emits dict rows: the big side's with the small side's columns.

    Args:
        names: of the small side's columns; None: those that its rows have.

    Raises:
        UsageError: a row is not a dict.
        UnknownName: a row has no such column.
    """

    def __init__(
        self,
        columns: BroadcastColumns,
        names: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(columns)
        self._rows: dict[Any, list[dict[str, Any]]] = {}
        self._others: dict[str, None] = dict.fromkeys(columns.others(names or ()))
        """Names in the order in which they came."""
        self._kinds = RowKinds()
        self._renamed: dict[tuple[str, ...], list[str]] = {}
        """How the others are called beside a big row of these columns."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        given = batch.payload
        if input == SMALL:
            self.note_size(len(given), len(pack_rows(given)))
            forms = _forms(given, self.columns.keys[SMALL])
            self._kinds.note(forms, SMALL)
            for form, row in zip(forms, given, strict=True):
                self._others.update(dict.fromkeys(self.columns.others(list(row))))
                if not is_null(form):
                    self._rows.setdefault(form, []).append(row)
            return
        times = None if batch.times is None else batch.times.tolist()
        stamps = None if times is None else ListedTimes()
        out = RowsOut(emit, stamps)
        unmatched: list[dict[str, Any]] = [{}] if self.columns.is_left else []
        forms = _forms(given, self.columns.keys[BIG])
        self._kinds.note(forms, BIG)
        for number, (form, row) in enumerate(zip(forms, given, strict=True)):
            names = self._names_beside(tuple(row))
            partners = self._rows.get(form, unmatched)
            for partner in partners:
                added = zip(names, map(partner.get, self._others), strict=True)
                out.rows.append({**row, **dict(added)})
            if stamps is not None and times is not None:
                stamps.times += repeat(times[number], len(partners))
            if len(out.rows) >= out.room:
                out.look()
        out.flush()

    def finish(self, emit: Emit) -> None:
        self._kinds.complain(self.name, self.context)

    def _names_beside(self, big: tuple[str, ...]) -> list[str]:
        names = self._renamed.get(big)
        if names is None:
            names = self._renamed[big] = joined_names(big, list(self._others))[len(big) :]
        return names


def _forms(rows: list[Any], names: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """The canonical key of each row, as a tuple."""
    columns = []
    for name in names:
        try:
            columns.append(canonical_rows(list(map(itemgetter(name), rows))))
        except (LookupError, TypeError) as error:
            raise _no_key(rows, name) from error
    return list(zip(*columns, strict=True))


def _no_key(rows: list[Any], name: str) -> UsageError:
    row = next((row for row in rows if not isinstance(row, dict) or name not in row), rows[0])
    if isinstance(row, dict):
        return UnknownName(f"no column {name!r} to join by: the row has {', '.join(map(str, row))}")
    return UsageError(f"broadcast_join takes dict rows, but a row is {preview(row)}: map the rows to dicts")


def places(starts: Vector, counts: Vector, most: int = BATCH_ROWS_MAX) -> Iterator[tuple[Vector, Vector]]:
    """Every place in ``starts[i]`` .. ``starts[i] + counts[i]`` with its ``i``, at most so many at a time."""
    hits = np.flatnonzero(counts)
    counts = counts[hits]
    ends = np.cumsum(counts)
    offsets = starts[hits] - (ends - counts)
    total = int(ends[-1]) if len(hits) else 0
    for begin in range(0, total, most):
        end = min(begin + most, total)
        first, last = np.searchsorted(ends, (begin, end - 1), "right")
        some = counts[first : last + 1].copy()
        some[0] = ends[first] - begin
        some[-1] -= ends[last] - end
        numbers = np.arange(begin, end)
        yield np.repeat(hits[first : last + 1], some), np.repeat(offsets[first : last + 1], some) + numbers
