"""Interval joins of Arrow batches, without Python per row."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import Batch, Emit, Used
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.hiddentime import gives_time, with_time
from minishuffle.dataflow.operators.joincolumns import (
    JoinColumns,
    Outbox,
    common_schema,
    null_marks,
    plain,
    plain_schema,
    with_columns,
)
from minishuffle.dataflow.operators.joinheld import Held, Mask, Run
from minishuffle.dataflow.operators.joins import DROPPED, LEFT, RIGHT, SIDES, Bounds, IntervalJoin
from minishuffle.dataflow.operators.keyedstate import StatePart, by_columns, key_columns_of
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import Vector
from minishuffle.dataflow.operators.times import EventTime

__all__ = ["JoinArrow"]

SPARE_KEYS: Final = 4096
"""So many keys of which nothing is held are not worth numbering the others anew."""


class JoinArrow(IntervalJoin):
    """Emits the columns that :class:`JoinColumns` says, and the hidden one of event time if it is read.

    Each side numbers its keys in a :class:`KeyIndex` and holds its rows in a :class:`Held`; the other side's
    keys are looked up there, of whatever type they are. When most keys have no rows any more, the others are
    numbered anew.

    Args:
        schemas: of the left and right batches; None: as they come (inner joins only), so the results' types
            become wider if those of later batches do.
    """

    def __init__(
        self,
        columns: JoinColumns,
        bounds: Bounds,
        times: tuple[EventTime, EventTime],
        schemas: tuple[pa.Schema | None, pa.Schema | None] = (None, None),
        late: tuple[Late, Late] = DROPPED,
    ) -> None:
        super().__init__(columns.how, bounds, times, late)
        self.columns = columns
        self._declared = schemas
        self._schemas = [None if schema is None else plain_schema(schema) for schema in schemas]
        self._gives_time = not times[LEFT].is_none
        self._result: pa.Schema | None = None
        self._indexes = [KeyIndex(), KeyIndex()]
        bounds = self.progress.bounds
        self._held = (Held(*bounds.of(RIGHT)), Held(*bounds.of(LEFT)))

    def for_columns(self, used: Used) -> JoinArrow:
        """(At submission.) The same where only these columns of the inputs come."""
        narrowed = copy.copy(self)
        narrowed._gives_time = self._gives_time and gives_time(used)
        left, right = (with_columns(schema, used.takes[side]) for side, schema in enumerate(self._declared))
        narrowed._declared = (left, right)
        narrowed._schemas = [None if schema is None else plain_schema(schema) for schema in (left, right)]
        return narrowed

    def take(self, batch: Batch, times: Vector, input: int, emit: Emit) -> None:
        assert isinstance(batch, pa.RecordBatch)
        given = self.in_common_types(batch, input)
        outbox = Outbox(emit)
        names = self.columns.keys[input]
        nulls = null_marks([column_of(given, name) for name in names])
        if nulls is not None:
            self._add_alone(self._as_held(given.filter(pa.array(nulls)), input), times[nulls], input, outbox)
            given, times = given.filter(pa.array(~nulls)), times[~nulls]
        if given.num_rows:
            keys = [column_of(given, name) for name in names]
            batch, slots = self._as_held(given, input), self._indexes[input].lookup(keys)
            others = self._indexes[1 - input].find(keys)
            if input == RIGHT and self.columns.shows_left_alone:
                rows = _first_of_each(slots, times)
                batch, slots, times, others = (
                    batch.take(pa.array(rows)),
                    slots[rows],
                    times[rows],
                    others[rows],
                )
            matched = self._match(batch, others, times, input, outbox)
            self._hold(batch, slots, times, matched, input, outbox)
        outbox.flush()
        self._forget_keys(input)

    def in_common_types(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        """The batch in types for all of its side so far, which is then held in these too."""
        before = self._schemas[input]
        if self._declared[input] is not None:
            return plain(batch, before)
        given = plain(batch, None)
        schema = self._schemas[input] = common_schema(before, given.schema)
        left, right = self._schemas
        if schema is not before and left is not None and right is not None:
            self.columns.check_keys(left, right)
        if before is not None and not schema.equals(before):
            self._result = None
            held = pa.schema([schema.field(name) for name in self.held_columns(schema.names, input)])
            for run in self.runs_of(input):
                run.batch = plain(run.batch, held)
        return plain(given, schema)

    def _as_held(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        return batch.select(self.held_columns(batch.schema.names, input))

    def held_columns(self, given: list[str], input: int) -> list[str]:
        """The columns that are held of batches of a side that have the columns ``given``."""
        return self.columns.held_names(given, input)

    def runs_of(self, input: int) -> list[Any]:
        """What is held of a side, each with its ``batch``."""
        return list(self._held[input].runs)

    def schema_of(self, input: int) -> pa.Schema:
        """The schema of a side as it came so far; it must be known."""
        schema = self._schemas[input]
        assert schema is not None
        return schema

    def _match(self, batch: pa.RecordBatch, slots: Vector, times: Vector, input: int, outbox: Outbox) -> Mask:
        """Put out the pairs of these records with what the other side holds, where their keys have ``slots``
        (-1: none); which of them had a partner."""
        matched = np.zeros(len(slots), dtype=np.bool_)
        for asked, run, rows in self._held[1 - input].find(slots, times, batch) if (slots >= 0).any() else ():
            matched[asked] = True
            if self.columns.shows_left_alone:
                rows = np.unique(rows[~run.matched[rows]])
                run.matched[rows] = True
                if self.how == "semi" and input == RIGHT:
                    self.put_out(run.batch.take(pa.array(rows)), run.times[rows], outbox)
                continue
            run.matched[rows] = True
            own, other = batch.take(pa.array(asked)), run.batch.take(pa.array(rows))
            left, right = (own, other) if input == LEFT else (other, own)
            pairs = self.columns.pairs(left, right, self.result_schema())
            self.put_out(pairs, np.maximum(times[asked], run.times[rows]), outbox)
        if self.how == "semi" and input == LEFT and matched.any():
            self.put_out(batch.filter(pa.array(matched)), times[matched], outbox)
        return matched

    def _hold(
        self, batch: pa.RecordBatch, slots: Vector, times: Vector, matched: Mask, input: int, outbox: Outbox
    ) -> None:
        stays = times > self.progress.limit(input)
        if stays.all():
            self._held[input].add(batch, slots, times, matched)
            return
        alone = ~stays & ~matched
        self._add_alone(batch.filter(pa.array(alone)), times[alone], input, outbox)
        if stays.any():
            kept = batch.filter(pa.array(stays))
            self._held[input].add(kept, slots[stays], times[stays], matched[stays])

    def let_go(self, input: int, limit: int, emit: Emit) -> None:
        outbox = Outbox(emit)
        for run, rows in self._held[input].take_until(limit):
            self._add_unmatched(run, rows, input, outbox)
        outbox.flush()
        self._forget_keys(input)

    def _add_unmatched(self, run: Run, rows: Vector, input: int, outbox: Outbox) -> None:
        if self.goes_unmatched(input):
            alone = rows[~run.matched[rows]]
            self._add_alone(run.batch.take(pa.array(alone)), run.times[alone], input, outbox)

    def _add_alone(self, batch: pa.RecordBatch, times: Vector, input: int, outbox: Outbox) -> None:
        """Put out rows of a side that have no partner, if such rows go out."""
        if not batch.num_rows or not self.goes_unmatched(input):
            return
        alone = self.columns.left_alone if input == LEFT else self.columns.right_alone
        self.put_out(alone(batch, self.result_schema()), times, outbox)

    def put_out(self, batch: pa.RecordBatch, times: Vector, outbox: Outbox) -> None:
        outbox.add(with_time(batch, times) if self._gives_time else batch)

    def earliest(self, input: int) -> int:
        return self._held[input].earliest

    def write_sides(self) -> Iterator[StatePart]:
        for input, name in enumerate(SIDES):
            schema = self._schemas[input]
            if schema is not None:
                told = pa.RecordBatch.from_pydict({"schema": [schema.serialize().to_pybytes()]})
                yield StatePart(name, told)
            yield from self.write_rows(input)

    def write_rows(self, input: int) -> Iterator[StatePart]:
        """The rows that are held of a side."""
        for run in map(Run.kept, self._held[input].runs):
            if len(run):
                columns = {
                    "time": pa.array(run.times),
                    "matched": pa.array(run.matched),
                    "row": run.batch.to_struct_array(),
                }
                yield from by_columns(SIDES[input], self._indexes[input].keys(run.slots), columns)

    def read_side(self, part: StatePart, input: int) -> None:
        if "schema" in part.batch.schema.names:
            schema = pa.ipc.read_schema(pa.py_buffer(part.batch["schema"][0].as_py()))
            self.in_common_types(pa.RecordBatch.from_pylist([], schema=schema), input)
            return
        schema = self.schema_of(input)
        names = self.held_columns(schema.names, input)
        batch = pa.RecordBatch.from_struct_array(part.batch["row"])
        batch = plain(batch, pa.schema([schema.field(name) for name in names]))
        self.read_rows(part, batch, input)

    def read_rows(self, part: StatePart, batch: pa.RecordBatch, input: int) -> None:
        """Hold such rows."""
        slots = self._indexes[input].lookup(key_columns_of(part))
        times, matched = part.batch["time"].to_numpy(), part.batch["matched"].to_numpy(zero_copy_only=False)
        self._held[input].add(batch, slots, times, matched)

    def state_rows(self) -> int:
        return len(self._held[LEFT]) + len(self._held[RIGHT])

    def result_schema(self) -> pa.Schema:
        """The schema of the results for batches as they came so far."""
        if self._result is None:
            left, right = self._schemas
            assert left is not None
            assert right is not None
            self._result = self.columns.result(left, right)
        return self._result

    def _forget_keys(self, input: int) -> None:
        """Number the keys of a side anew that have rows, once most have none."""
        index, held = self._indexes[input], self._held[input]
        if len(index) <= SPARE_KEYS + 2 * len(held):
            return
        is_live = np.zeros(len(index), dtype=np.bool_)
        for run in held.runs:
            is_live[run.slots] = True
        self._indexes[input] = fewer = KeyIndex()
        if held.runs:
            fewer.lookup(index.keys(np.flatnonzero(is_live)))
        anew = np.cumsum(is_live) - 1
        for run in held.runs:
            run.number(anew[run.slots])


def _first_of_each(slots: Vector, times: Vector) -> Vector:
    """The rows that are the first of their key and time. Where right rows only say that there are some, one
    does for all. (A key that 100,000 rows of both sides have would make ten thousand million pairs.)"""
    order = np.lexsort((times, slots))
    slots, times = slots[order], times[order]
    differs = (slots[1:] != slots[:-1]) | (times[1:] != times[:-1])
    return np.sort(order[np.concatenate([[True], differs])])
