"""Interval joins of Arrow batches, without Python per row."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import Batch, Emit
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.joincolumns import (
    JoinColumns,
    Outbox,
    common_schema,
    key_array,
    null_marks,
    plain,
    plain_schema,
)
from minishuffle.dataflow.operators.joinheld import Held, Run
from minishuffle.dataflow.operators.joins import LEFT, RIGHT, IntervalJoin
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.dataflow.operators.moments import Vector
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.exchange.keys import family

__all__ = ["JoinArrow"]

SPARE_KEYS: Final = 4096
"""So many keys of which nothing is held are not worth numbering the others anew."""


class JoinArrow(IntervalJoin):
    """Emits the columns that :class:`JoinColumns` says.

    One :class:`KeyIndex` numbers the keys of both sides, and each side holds its rows in a
    :class:`Held`. When most keys have no rows any more, the others are numbered anew.

    Args:
        schemas: of the left and right batches; None: as they come (inner joins only), so the results' types
            become wider if those of later batches do.
    """

    def __init__(
        self,
        columns: JoinColumns,
        within: int,
        times: tuple[EventTime, EventTime],
        schemas: tuple[pa.Schema | None, pa.Schema | None] = (None, None),
        late_tags: tuple[str | None, str | None] = (None, None),
    ) -> None:
        super().__init__(columns.how, within, times, late_tags)
        self.columns = columns
        self._declared = schemas
        self._schemas = [None if schema is None else plain_schema(schema) for schema in schemas]
        self._result: pa.Schema | None = None
        index = KeyIndex()
        self._indexes = [index, index]
        """By side; two once their keys are of different families, of which none is equal to another."""
        self._families: list[list[str] | None] = [None, None]
        self._held = (Held(self.progress.within), Held(self.progress.within))

    def take(self, batch: Batch, times: Vector, input: int, emit: Emit) -> None:
        assert isinstance(batch, pa.RecordBatch)
        given = self._in_common_types(batch, input)
        outbox = Outbox(emit)
        names = self.columns.keys[input]
        nulls = null_marks([column_of(given, name) for name in names])
        if nulls is not None:
            self._add_alone(self._as_held(given.filter(pa.array(nulls)), input), times[nulls], input, outbox)
            given, times = given.filter(pa.array(~nulls)), times[~nulls]
        if given.num_rows:
            keys = [key_array(column_of(given, name)) for name in names]
            self._compare_families(keys, input)
            slots = self._indexes[input].lookup(keys)
            self._join(self._as_held(given, input), slots, times, input, outbox)
        outbox.flush()
        self._forget_keys()

    def _compare_families(self, keys: list[pa.Array], input: int) -> None:
        """Have keys that are never equal (of numbers and of texts, say) match nothing, as in other joins."""
        if self._families[input] is not None:
            return
        self._families[input] = mine = [family(array.type) for array in keys]
        theirs = self._families[1 - input]
        if theirs is not None and mine != theirs:
            self._indexes[input] = KeyIndex()

    @property
    def _is_apart(self) -> bool:
        return self._indexes[LEFT] is not self._indexes[RIGHT]

    def _in_common_types(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        """The batch in types for all of its side so far, which is then held in these too."""
        before = self._schemas[input]
        if self._declared[input] is not None:
            return plain(batch, before)
        given = plain(batch, None)
        schema = self._schemas[input] = common_schema(before, given.schema)
        if before is not None and not schema.equals(before):
            self._result = None
            held = pa.schema([schema.field(name) for name in self.columns.held_names(schema.names, input)])
            for run in self._held[input].runs:
                run.batch = plain(run.batch, held)
        return plain(given, schema)

    def _as_held(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        names = self.columns.held_names(batch.schema.names, input)
        return batch.select(names)

    def _join(self, batch: pa.RecordBatch, slots: Vector, times: Vector, input: int, outbox: Outbox) -> None:
        matched = np.zeros(len(slots), dtype=np.bool_)
        others = self._held[1 - input]
        for asked, run, rows in () if self._is_apart else others.find(slots, times):
            matched[asked] = True
            run.matched[rows] = True
            own, other = batch.take(pa.array(asked)), run.batch.take(pa.array(rows))
            left, right = (own, other) if input == LEFT else (other, own)
            outbox.add(self.columns.pairs(left, right, self._schema()))
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
        self._forget_keys()

    def _add_unmatched(self, run: Run, rows: Vector, input: int, outbox: Outbox) -> None:
        if self.goes_unmatched(input):
            alone = rows[~run.matched[rows]]
            self._add_alone(run.batch.take(pa.array(alone)), run.times[alone], input, outbox)

    def _add_alone(self, batch: pa.RecordBatch, times: Vector, input: int, outbox: Outbox) -> None:
        """Put out rows of a side that have no partner, if such rows go out."""
        if not batch.num_rows or not self.goes_unmatched(input):
            return
        if input == LEFT:
            outbox.add(self.columns.left_alone(batch, self._schema()))
        else:
            outbox.add(self.columns.right_alone(batch, times, self._schema()))

    def earliest(self, input: int) -> int:
        return self._held[input].earliest

    def state_rows(self) -> int:
        return len(self._held[LEFT]) + len(self._held[RIGHT])

    def _schema(self) -> pa.Schema:
        if self._result is None:
            left, right = self._schemas
            assert left is not None
            assert right is not None
            self._result = self.columns.result(left, right)
        return self._result

    def _forget_keys(self) -> None:
        """Number the keys anew that have rows, once most have none."""
        for sides in [(LEFT,), (RIGHT,)] if self._is_apart else [(LEFT, RIGHT)]:
            index, held = self._indexes[sides[0]], [self._held[side] for side in sides]
            if len(index) > SPARE_KEYS + 2 * sum(map(len, held)):
                self._number_anew(index, sides, [run for each in held for run in each.runs])

    def _number_anew(self, index: KeyIndex, sides: tuple[int, ...], runs: list[Run]) -> None:
        live = np.unique(np.concatenate([run.slots for run in runs])) if runs else np.zeros(0, np.int64)
        fewer = KeyIndex()
        if len(live):
            fewer.lookup(index.keys(live))
        for side in sides:
            self._indexes[side] = fewer
        for run in runs:
            run.number(np.searchsorted(live, run.slots))
