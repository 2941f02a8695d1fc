"""Joins with a small side that every subtask holds whole. (Flink: ``BroadcastProcessFunction``.)

The small side is input number 1 and is read to its end before the other: see ``first_input``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from minishuffle.errors import ResourceExhausted, UnknownName, UsageError, did_you_mean
from minishuffle.exchange.batch import Batch, Numbers
from minishuffle.exchange.gather import taken
from minishuffle.exchange.keys import canonical_rows
from minishuffle.exchange.rows import pack_rows
from minishuffle.exchange.sizes import ListedTimes, RowsOut, row_bytes, rows_that_fit
from minishuffle.limits import BATCH_ROWS_MAX, BROADCAST_BYTES_MAX, MIB
from minishuffle.operators.base import Emit, Mark, TaskContext
from minishuffle.operators.chained import ChainedOperator, preview
from minishuffle.operators.join_columns import (
    SUFFIX,
    JoinColumns,
    joined_names,
    plain,
    plain_schema,
    with_columns,
)
from minishuffle.operators.join_results import BatchesOut
from minishuffle.operators.key_kinds import RowKinds
from minishuffle.operators.key_slots import JoinKeys, KeySlots, has_null
from minishuffle.operators.state_parts import StatePart
from minishuffle.operators.task_state import Holding, Records, TaskState

__all__ = ["BroadcastColumns", "BroadcastJoin", "SmallColumns", "SmallRows", "SmallSide", "places"]

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


class SmallSide:
    """The records of the small side, and how those of the big side are joined with them."""

    def hold(self, batch: Batch) -> int:
        """Hold records; how many bytes they are."""
        raise NotImplementedError

    def held(self) -> Iterator[Batch]:
        """Records as :meth:`hold` takes them, which give the same results as all that it took."""
        raise NotImplementedError

    def join(self, batch: Batch, emit: Emit) -> None:
        """Emit what records of the big side give, with their times."""
        raise NotImplementedError

    def finish(self, operator: str, context: TaskContext) -> None:
        """Both inputs have ended."""


class BroadcastJoin(ChainedOperator):
    """Keeps the small side, whose marks end here, and passes the big side's on."""

    name = "broadcast_join"
    keeps_rows = True
    shares = True
    is_copied = True
    first_input: int | None = SMALL

    def __init__(self, small: SmallSide) -> None:
        self._small = small
        self._bytes = 0
        self._held = 0
        """Rows of the small side."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if input == SMALL:
            self._hold(batch)
        else:
            self._small.join(batch, emit)

    def on_mark(self, mark: Mark, input: int, emit: Emit) -> None:
        if input == BIG:
            emit(mark)

    def finish(self, emit: Emit) -> None:
        self._small.finish(self.name, self.context)

    def _hold(self, batch: Batch) -> None:
        """Raises ResourceExhausted: the small side is too large."""
        self._bytes += self._small.hold(batch)
        self._held += len(batch)
        if self._bytes > BROADCAST_BYTES_MAX:
            raise ResourceExhausted(
                f"the small side of broadcast_join has more than {BROADCAST_BYTES_MAX // MIB} MiB, and each "
                "subtask would keep it: leave out rows and columns, or use key_by(...).join(...)"
            )

    def state_rows(self) -> int:
        return self._held

    def write_state(self) -> Iterator[StatePart]:
        return self._task_state().write(self.context.index)

    def read_state(self, parts: Iterable[StatePart]) -> None:
        self._task_state().read(parts)

    def _task_state(self) -> TaskState:
        return TaskState({"small": Holding("all", self._write_small, self._read_small)})

    def _write_small(self) -> Iterator[Records]:
        for batch in self._small.held():
            yield Records(batch.payload)

    def _read_small(self, records: Records) -> None:
        self._hold(Batch(records.payload))


@dataclass(frozen=True, slots=True)
class _SmallIndex:
    """Where the rows of each key begin in the small side, and how many there are, by the key's slot.
    ``others`` are its columns that come into the result."""

    slots: KeySlots
    starts: Numbers
    counts: Numbers
    others: pa.RecordBatch

    def find(self, keys: JoinKeys) -> tuple[Numbers, Numbers]:
        """Where the rows of each of these keys begin, and how many there are."""
        slots = self.slots.find(keys)
        known = slots >= 0
        starts, counts = np.zeros_like(slots), np.zeros_like(slots)
        starts[known], counts[known] = self.starts[slots[known]], self.counts[slots[known]]
        return starts, counts


class SmallColumns(SmallSide):
    """A small side of columns; what comes out are the big side's batches with the small side's columns,
    without Python per row.

    Args:
        schema: of the small side.
    """

    def __init__(self, columns: BroadcastColumns, schema: pa.Schema) -> None:
        self._columns = columns
        self._schema = plain_schema(schema)
        self._batches: list[pa.RecordBatch] = []
        """All that has come, until the big side comes."""
        self._index: _SmallIndex | None = None
        """The same from then on, without keys that have a null."""

    def narrowed(self, takes: frozenset[str] | None) -> SmallColumns:
        """The same where only these columns (None: all) of the small side come."""
        return SmallColumns(self._columns, with_columns(self._schema, takes))

    def hold(self, batch: Batch) -> int:
        assert self._index is None  # The small side ends before the big one begins.
        given = plain(batch.payload, self._schema)
        self._batches.append(given)
        size: int = given.nbytes
        return size

    def held(self) -> Iterator[Batch]:
        index = self._index
        if index is None:
            yield from map(Batch, self._batches)
        elif len(index.slots):
            keys = index.slots.columns(np.repeat(np.arange(len(index.slots)), index.counts))
            columns = dict(zip(self._columns.keys[SMALL], keys, strict=True))
            columns |= zip(index.others.schema.names, index.others.columns, strict=True)
            yield Batch(pa.RecordBatch.from_pydict({name: columns[name] for name in self._schema.names}))

    def join(self, batch: Batch, emit: Emit) -> None:
        if self._index is None:
            self._index, self._batches = self._indexed(), []
        index, out = self._index, BatchesOut(emit)
        for start in range(0, len(batch), BATCH_ROWS_MAX):
            self._join(batch.slice(start, min(start + BATCH_ROWS_MAX, len(batch))), index, out)
        out.flush()

    def _indexed(self) -> _SmallIndex:
        """Number the keys, and put the rows in order of these numbers."""
        batches = self._batches or [pa.RecordBatch.from_pylist([], schema=self._schema)]
        columns = pa.concat_batches(batches)
        keys = JoinKeys.of_columns([columns.column(name) for name in self._columns.keys[SMALL]])
        slots = KeySlots()
        numbers = slots.lookup(keys)
        order = np.argsort(numbers, kind="stable")[np.count_nonzero(numbers < 0) :]
        counts = np.bincount(numbers[order], minlength=len(slots))
        others = columns.select(self._columns.others(self._schema.names))
        return _SmallIndex(slots, np.cumsum(counts) - counts, counts, taken(others, order))

    def _join(self, batch: Batch, index: _SmallIndex, out: BatchesOut) -> None:
        columns, others = batch.payload, index.others
        self._columns.check_keys(columns.schema, self._schema)
        keys = JoinKeys.of_columns([columns.column(name) for name in self._columns.keys[BIG]])
        starts, counts = index.find(keys)
        schema = self._columns.result(columns.schema, self._schema)
        wanted = np.maximum(counts, 1) if self._columns.is_left else counts
        most = rows_that_fit(row_bytes(columns) + row_bytes(others))
        for asked, found in places(starts, wanted, most):
            rows = pa.array(found, mask=counts[asked] == 0)
            one_each = len(asked) == len(batch) and bool((wanted == 1).all())
            own = batch if one_each else batch.take(asked)
            added = [column.take(rows) for column in others.columns]
            joined = pa.RecordBatch.from_arrays([*own.payload.columns, *added], schema=schema)
            out.add(Batch(joined, None, own.times))


class SmallRows(SmallSide):
    """A small side of dicts; what comes out are the big side's dicts with the small side's columns.

    Args:
        names: of the small side's columns; None: those that its rows have.

    Raises:
        UsageError: a row is not a dict.
        UnknownName: a row has no such column.
    """

    def __init__(self, columns: BroadcastColumns, names: tuple[str, ...] | None = None) -> None:
        self._columns = columns
        self._rows: dict[Any, list[dict[str, Any]]] = {}
        """By canonical key, those without a null in it."""
        self._others: dict[str, None] = dict.fromkeys(columns.others(names or ()))
        """Names in the order in which they came."""
        self._kinds = RowKinds()
        self._renamed: dict[tuple[str, ...], list[str]] = {}
        """How the others are called beside a big row of these columns."""

    def hold(self, batch: Batch) -> int:
        given = batch.payload
        forms = _forms(given, self._columns.keys[SMALL])
        self._kinds.note(forms, SMALL)
        for form, row in zip(forms, given, strict=True):
            self._others.update(dict.fromkeys(self._columns.others(list(row))))
            if not has_null(form):
                self._rows.setdefault(form, []).append(row)
        self._renamed.clear()
        return len(pack_rows(given))

    def held(self) -> Iterator[Batch]:
        # First a row without a key, which has all names in their order.
        names = dict.fromkeys([*self._columns.keys[SMALL], *self._others])
        yield Batch([names, *chain.from_iterable(self._rows.values())])

    def join(self, batch: Batch, emit: Emit) -> None:
        """By a loop over rows: vectors cost a batch of a few rows several times as much."""
        given = batch.payload
        times = None if batch.times is None else batch.times.tolist()
        stamps = None if times is None else ListedTimes()
        out = RowsOut(emit, stamps)
        unmatched: list[dict[str, Any]] = [{}] if self._columns.is_left else []
        forms = _forms(given, self._columns.keys[BIG])
        self._kinds.note(forms, BIG)
        for number, (form, row) in enumerate(zip(forms, given, strict=True)):
            names = self._names_beside(tuple(row))
            partners = self._rows.get(form, unmatched)
            for partner in partners:
                added = zip(names, map(partner.get, self._others), strict=True)
                out.rows.append({**row, **dict(added)})
            if stamps is not None and times is not None:
                stamps.times.extend(repeat(times[number], len(partners)))
            if len(out.rows) >= out.room:
                out.look()
        out.flush()

    def finish(self, operator: str, context: TaskContext) -> None:
        self._kinds.complain(operator, context)

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
        hint = did_you_mean(name, row)
        return UnknownName(f"no column {name!r} to join by: {hint}the row has {', '.join(map(str, row))}")
    return UsageError(f"broadcast_join takes dict rows, but a row is {preview(row)}: map the rows to dicts")


def places(starts: Numbers, counts: Numbers, most: int = BATCH_ROWS_MAX) -> Iterator[tuple[Numbers, Numbers]]:
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
