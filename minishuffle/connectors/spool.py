"""The sink that keeps its records for other programs to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

import pyarrow as pa

from minishuffle.errors import LocalProtocolError, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import encode
from minishuffle.exchange.sizes import pieces
from minishuffle.exchange.spool import Spool
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import Emit, TaskContext
from minishuffle.operators.chained import ChainedOperator
from minishuffle.operators.misplaced_nulls import misplaced_null
from minishuffle.operators.state_parts import ORDER, SUBTASK, StatePart, in_order, versioned
from minishuffle.operators.wider_type import in_schema

__all__ = ["SpoolSink"]

ELEMENT_BYTES: Final = 1 << 20
"""Small batches are put together to at least so many bytes."""
DELAY_SECONDS: Final = 0.1
"""Unless they have waited so long."""
PART_BYTES: Final = 4 << 20
"""Elements that a snapshot has in one part."""
_ROWS: Final = "kept"
_ELEMENT: Final = "element"
"""Parts of its state, and the column of each."""


class SpoolSink(ChainedOperator):
    """Appends Arrow batches to the task's :class:`~minishuffle.exchange.spool.Spool`.

    Columns are taken by name, in the order of ``schema``, and cast to it where nothing is lost. In a job
    that does not end it waits while readers have left too much unread; if that is to lose nothing, also at
    its end, until they have read all.

    Raises:
        UsageError: a column is missing or too many, a value does not fit its type, or there are nulls in a
            column that is declared without.
        ResourceExhausted: the disk is full.
    """

    keeps_rows = True

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.name = f"to_spark {name}"
        self.schema = schema

    def open(self, context: TaskContext) -> None:
        super().open(context)
        if context.spool is None:
            raise LocalProtocolError(f"{self.name}: this task was given nowhere to keep its results")
        self._spool: Spool = context.spool
        self._kept: list[pa.RecordBatch] = []
        self._kept_rows = 0
        self._kept_bytes = 0
        self._due: float | None = None

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        columns = batch.payload
        if not isinstance(columns, pa.RecordBatch):
            raise UsageError(
                f"{self.name} takes Arrow columns and was given {type(columns).__name__}: declare the "
                "columns before it with schema({...})"
            )
        columns = self._cast(columns)
        place = misplaced_null(columns, self.schema)
        if place is not None:
            raise UsageError(f"{self.name}: column {place!r} has nulls and is declared without")
        for start in range(0, columns.num_rows, BATCH_ROWS_MAX):
            for piece in pieces(Batch(columns.slice(start, BATCH_ROWS_MAX))):
                self._keep(piece.payload)

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.schema.equals(self.schema):
            return batch
        names = self.schema.names
        if sorted(batch.schema.names) != sorted(names):
            raise UsageError(
                f"{self.name} was declared with the columns {', '.join(names)} and was given "
                f"{', '.join(batch.schema.names)}: correct schema({{...}}) before it"
            )
        found: pa.RecordBatch = in_schema(batch, self.schema, self.name)
        return found

    def _keep(self, batch: pa.RecordBatch) -> None:
        if self._kept_rows + batch.num_rows > BATCH_ROWS_MAX:
            self._write()
        self._kept.append(batch)
        self._kept_rows += batch.num_rows
        self._kept_bytes += batch.nbytes
        if self._kept_bytes >= ELEMENT_BYTES or self._kept_rows == BATCH_ROWS_MAX:
            self._write()
        elif self._due is None:
            self._due = self.context.now() + DELAY_SECONDS

    def _together(self) -> pa.RecordBatch:
        return self._kept[0] if len(self._kept) == 1 else pa.concat_batches(self._kept)

    def _write(self) -> None:
        self._due = None
        if not self._kept:
            return
        batch = self._together()
        self._kept, self._kept_rows, self._kept_bytes = [], 0, 0
        spool = self._spool
        if not spool.has_room:
            self.context.wait_until(lambda: spool.has_room)
        spool.append(Batch(batch))
        self.context.counters.note_kept(spool.rows)

    def stored_state(self) -> Iterator[StatePart] | None:
        """The rows that readers have yet to deal with: on disk, and those that wait for each other here."""
        spool, elements = self._spool, self._spool.unread()
        if self._kept:
            _, parts = encode(Batch(self._together()))
            elements = chain(elements, [b"".join(parts)])
        return _parts(self.context.index, spool.rows, elements) if spool.rows or self._kept else None

    def read_state(self, parts: Iterable[StatePart]) -> None:
        """Go on with them, under other numbers: their readers may have had some of them since."""
        at, *kept = in_order(parts)
        (row,) = at.batch[_ROWS].to_pylist()
        self._spool.go_back(row, (each.as_py() for part in kept for each in part.batch[_ELEMENT]))
        self.context.counters.note_kept(self._spool.rows)

    def state_rows(self) -> int:
        return self._kept_rows

    def deadline(self) -> float | None:
        return self._due

    def on_clock(self, now: float, emit: Emit) -> None:
        self._write()

    def before_snapshot(self, emit: Emit) -> None:
        self._write()

    def finish(self, emit: Emit) -> None:
        self._write()
        spool = self._spool
        if spool.is_guaranteed:
            self.context.wait_until(lambda: spool.read_rows >= spool.rows)


def _parts(index: int, rows: int, elements: Iterable[bytes]) -> Iterator[StatePart]:
    """How many rows a subtask has kept so far, and the elements that readers have yet to deal with, some at
    a time."""
    yield _part(index, 0, _ROWS, pa.array([rows], pa.int64()))
    number, some, size = 1, list[bytes](), 0
    for element in elements:
        if some and (size + len(element) > PART_BYTES or len(some) == BATCH_ROWS_MAX):
            yield _part(index, number, _ELEMENT, pa.array(some, pa.large_binary()))
            number, some, size = number + len(some), [], 0
        some.append(element)
        size += len(element)
    if some:
        yield _part(index, number, _ELEMENT, pa.array(some, pa.large_binary()))


def _part(index: int, number: int, name: str, column: pa.Array) -> StatePart:
    owner = pa.repeat(pa.scalar(index, pa.int64()), len(column))
    order = pa.array(range(number, number + len(column)), pa.int64())
    return versioned(name, {ORDER: order, SUBTASK: owner, name: column})
