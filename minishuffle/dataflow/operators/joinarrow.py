"""Interval joins of Arrow batches, without Python per row."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import Emit, Used
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.joincolumns import (
    JoinColumns,
    Outbox,
    null_marks,
    plain,
    plain_schema,
    with_columns,
)
from minishuffle.dataflow.operators.joins import DROPPED, LEFT, SIDES, Bounds, IntervalJoin
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import Vector
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.exchange.batch import Batch
from minishuffle.operators.state_parts import StatePart, by_columns, key_columns_of

__all__ = ["JoinArrow"]


class JoinArrow(IntervalJoin):
    """Emits the columns that :class:`JoinColumns` says, and event times beside them if they are read.

    Keys of both sides are compared, of whatever types they are.

    Args:
        schemas: of the left and right batches.
    """

    def __init__(
        self,
        columns: JoinColumns,
        bounds: Bounds,
        times: tuple[EventTime, EventTime],
        schemas: tuple[pa.Schema, pa.Schema],
        late: tuple[Late, Late] = DROPPED,
    ) -> None:
        super().__init__(columns.how, bounds, times, late, KeyIndex)
        self.columns = columns
        self._schemas = tuple(map(plain_schema, schemas))
        self._gives_times = not times[LEFT].is_none
        self._result: pa.Schema | None = None

    def for_columns(self, used: Used) -> JoinArrow:
        """(At submission.) The same where only these columns of the inputs come."""
        narrowed = copy.copy(self)
        narrowed._gives_times = self._gives_times and used.times
        narrowed._schemas = tuple(
            with_columns(schema, used.takes[side]) for side, schema in enumerate(self._schemas)
        )
        return narrowed

    def numbered(self, batch: Batch, input: int) -> tuple[Batch, Vector, Vector]:
        given = plain(batch.payload, self._schemas[input])
        keys = [column_of(given, name) for name in self.columns.keys[input]]
        nulls = null_marks(keys)
        if nulls is None:
            slots, others = self._slots(keys, input)
        else:
            slots, others = np.full((2, len(given)), -1, dtype=np.int64)
            slots[~nulls], others[~nulls] = self._slots([key.filter(pa.array(~nulls)) for key in keys], input)
        return Batch(given.select(self.held_columns(given.schema.names, input))), slots, others

    def _slots(self, keys: list[pa.Array], input: int) -> tuple[Vector, Vector]:
        own, other = self._indexes[input], self._indexes[1 - input]
        return own.lookup(keys), other.find(keys)

    def held_columns(self, given: list[str], input: int) -> list[str]:
        """The columns that are held of batches of a side that have the columns ``given``."""
        return self.columns.held_names(given, input)

    def held_schema(self, input: int) -> pa.Schema:
        """The columns that are held of a side."""
        schema = self._schemas[input]
        return pa.schema([schema.field(name) for name in self.held_columns(schema.names, input)])

    def pairs(self, own: Batch, other: Batch, input: int) -> Batch:
        left, right = (own, other) if input == LEFT else (other, own)
        return Batch(self.columns.pairs(left.payload, right.payload, self.result_schema()))

    def alone(self, batch: Batch, input: int) -> Batch:
        alone = self.columns.left_alone if input == LEFT else self.columns.right_alone
        return Batch(alone(batch.payload, self.result_schema()))

    def outbox(self, emit: Emit) -> Outbox:
        return Outbox(emit)

    def put_out(self, batch: Batch, times: Vector, outbox: Outbox) -> None:
        outbox.add(Batch(batch.payload, None, times if self._gives_times else None))

    def write_records(self, batch: Batch, slots: Vector, name: str, **columns: Any) -> Iterator[StatePart]:
        row = batch.payload.to_struct_array()
        return by_columns(name, self._indexes[SIDES.index(name)].keys(slots), {**columns, "row": row})

    def read_records(self, part: StatePart, input: int) -> tuple[Batch, Vector]:
        return Batch(self.rows_of(part, input)), self._indexes[input].lookup(key_columns_of(part))

    def rows_of(self, part: StatePart, input: int) -> pa.RecordBatch:
        """The records of a part, as they are held."""
        return plain(pa.RecordBatch.from_struct_array(part.batch["row"]), self.held_schema(input))

    def result_schema(self) -> pa.Schema:
        """The schema of the results."""
        if self._result is None:
            self._result = self.columns.result(*self._schemas)
        return self._result
