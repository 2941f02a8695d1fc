"""What joins make of pairs of records and of records without a partner: rows of rows, columns of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from minishuffle.exchange.batch import Batch, Times
from minishuffle.exchange.sizes import FIRST_ROWS, payload_bytes
from minishuffle.limits import BATCH_BYTES_MAX, BATCH_ROWS_MAX
from minishuffle.operators.base import Emit, TaskContext
from minishuffle.operators.batch_times import microseconds
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.join_columns import JoinColumns, plain, plain_schema, with_columns
from minishuffle.operators.join_inputs import LEFT, RIGHT, How, record_times
from minishuffle.operators.key_kinds import RowKinds
from minishuffle.operators.key_slots import JoinKeys
from minishuffle.operators.task_state import Records

__all__ = ["ColumnResults", "JoinResults", "JoinedTime", "BatchesOut", "RowResults", "gives_times"]


@dataclass(frozen=True, slots=True)
class JoinedTime:
    """The event time of (key, left row, right row): the greater one, or that of the row that is alone."""

    left: EventTime
    right: EventTime

    def __call__(self, joined: tuple[Any, Any, Any]) -> int:
        _, left, right = joined
        return max(
            microseconds(time.fn(row) if time.fn is not None else row[time.column]) + time.shift
            for time, row in ((self.left, left), (self.right, right))
            if row is not None
        )


def gives_times(how: How, times: tuple[EventTime, EventTime]) -> bool:
    """Whether the times of rows that a join emits are beside them: if not, its rows show them as they
    came."""
    return times[LEFT].is_beside or (times[RIGHT].is_beside and how not in ("semi", "anti"))


class BatchesOut:
    """Gathers batches, of one kind, and emits them put together or cut to ``BATCH_ROWS_MAX`` records and
    about ``BATCH_BYTES_MAX``; what is left with :meth:`flush`."""

    __slots__ = ("_emit", "_gathered", "_room", "_rows")

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._gathered: list[Batch] = []
        self._rows = 0
        self._room = FIRST_ROWS
        """So many records are weighed, and emitted if no more of them fit."""

    def add(self, batch: Batch) -> None:
        self._gathered.append(batch)
        self._rows += len(batch)
        if self._rows >= self._room:
            size = sum(payload_bytes(each.payload) for each in self._gathered)
            self._room = max(1, min(BATCH_ROWS_MAX, self._rows * BATCH_BYTES_MAX // max(1, size)))
            if self._rows >= self._room:
                self.flush()

    def flush(self) -> None:
        """Emit what there is."""
        gathered, rows = self._gathered, self._rows
        self._gathered, self._rows = [], 0
        if not rows:
            return
        whole = Batch.concat(gathered)
        if rows <= self._room:
            self._emit(whole)
            return
        for begin in range(0, rows, self._room):
            self._emit(whole.slice(begin, min(begin + self._room, rows)))


class JoinResults:
    """What is held of the records of both sides, and what comes out; all batches have times."""

    how: How

    def gives_times(self, times: tuple[EventTime, EventTime]) -> bool:
        """Whether the times of what comes out are beside it, where those of both sides stand there."""
        raise NotImplementedError

    def taken(self, batch: Batch, input: int) -> tuple[Batch, JoinKeys]:
        """A batch as it is held, and its keys."""
        raise NotImplementedError

    def pairs(self, own: Batch, other: Batch, input: int) -> Batch:
        """What held records of ``input`` and their partners give, with the greater times."""
        raise NotImplementedError

    def alone(self, batch: Batch, input: int) -> Batch:
        """What held records without a partner give, and left ones of a semi join."""
        raise NotImplementedError

    def restored(self, records: Records, input: int) -> tuple[Batch, JoinKeys]:
        """Held records with the mark "time", and their keys, out of a state."""
        raise NotImplementedError

    def finish(self, operator: str, context: TaskContext) -> None:
        """Both inputs have ended."""


def _later(own: Batch, other: Batch) -> Times:
    later: Times = np.maximum(record_times(own), record_times(other))
    return later


def _restored_times(records: Records) -> Times:
    times: Times = records.marks["time"].to_numpy()
    return times


class RowResults(JoinResults):
    """(key, left row, right row); None for the row of a side that has no partner. Semi and anti joins give
    left rows.

    The key is shown as the later of both records brought it.
    """

    def __init__(self, how: How) -> None:
        self.how = how
        self._kinds = RowKinds()

    def gives_times(self, times: tuple[EventTime, EventTime]) -> bool:
        return gives_times(self.how, times)

    def taken(self, batch: Batch, input: int) -> tuple[Batch, JoinKeys]:
        keys = JoinKeys.of_rows(batch.keys)
        self._kinds.note(keys.forms, input)
        return batch, keys

    def pairs(self, own: Batch, other: Batch, input: int) -> Batch:
        left, right = (own, other) if input == LEFT else (other, own)
        rows = list(zip(own.keys, left.payload, right.payload, strict=True))
        return Batch(rows, None, _later(own, other))

    def alone(self, batch: Batch, input: int) -> Batch:
        if self.how in ("semi", "anti"):
            return Batch(batch.payload, None, batch.times)
        records = zip(batch.keys, batch.payload, strict=True)
        if input == LEFT:
            rows = [(key, row, None) for key, row in records]
        else:
            rows = [(key, None, row) for key, row in records]
        return Batch(rows, None, batch.times)

    def restored(self, records: Records, input: int) -> tuple[Batch, JoinKeys]:
        return self.taken(Batch(records.payload, records.keys, _restored_times(records)), input)

    def finish(self, operator: str, context: TaskContext) -> None:
        self._kinds.complain(operator, context)


class ColumnResults(JoinResults):
    """The columns that :class:`JoinColumns` says. Keys of both sides are compared, of whatever types they
    are.

    Args:
        schemas: of the left and right batches.
    """

    def __init__(self, columns: JoinColumns, schemas: tuple[pa.Schema, pa.Schema]) -> None:
        self.columns = columns
        self.how = columns.how
        self._schemas = tuple(map(plain_schema, schemas))
        self._schema: pa.Schema | None = None

    def gives_times(self, times: tuple[EventTime, EventTime]) -> bool:
        return not times[LEFT].is_none

    def narrowed(self, takes: Mapping[int, frozenset[str] | None]) -> ColumnResults:
        """The same where only these columns (None: all) of the inputs come."""
        left, right = (with_columns(schema, takes[side]) for side, schema in enumerate(self._schemas))
        return ColumnResults(self.columns, (left, right))

    def taken(self, batch: Batch, input: int) -> tuple[Batch, JoinKeys]:
        given = plain(batch.payload, self._schemas[input])
        keys = JoinKeys.of_columns([given.column(name) for name in self.columns.keys[input]])
        held = given.select(self.columns.held_names(given.schema.names, input))
        return Batch(held, None, batch.times), keys

    def held_schema(self, input: int) -> pa.Schema:
        """The columns that are held of a side."""
        schema = self._schemas[input]
        return pa.schema([schema.field(name) for name in self.columns.held_names(schema.names, input)])

    def pairs(self, own: Batch, other: Batch, input: int) -> Batch:
        left, right = (own, other) if input == LEFT else (other, own)
        return Batch(self.joined(left.payload, right.payload), None, _later(own, other))

    def joined(self, left: pa.RecordBatch, right: pa.RecordBatch) -> pa.RecordBatch:
        """Held left rows and right ones, pairwise."""
        return self.columns.pairs(left, right, self.schema())

    def alone(self, batch: Batch, input: int) -> Batch:
        alone = self.columns.left_alone if input == LEFT else self.columns.right_alone
        return Batch(alone(batch.payload, self.schema()), None, batch.times)

    def restored(self, records: Records, input: int) -> tuple[Batch, JoinKeys]:
        assert records.keys is not None
        held = plain(records.payload, self.held_schema(input))
        return Batch(held, None, _restored_times(records)), JoinKeys.of_columns(records.keys)

    def schema(self) -> pa.Schema:
        """The schema of the results."""
        if self._schema is None:
            self._schema = self.columns.result(*self._schemas)
        return self._schema
