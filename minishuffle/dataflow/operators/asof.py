"""As-of joins: each left row with the latest right row of its key that is not after it.

A left row waits until the right side's watermark has reached its time: then no such right row is to come. Of
the right rows up to both watermarks only the latest of each key is needed any more. (Flink: temporal joins.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import END_OF_TIME, Emit
from minishuffle.dataflow.operators.convert import column_of
from minishuffle.dataflow.operators.joinarrow import JoinArrow
from minishuffle.dataflow.operators.joincolumns import JoinColumns, Outbox, null_marks, plain
from minishuffle.dataflow.operators.joins import DROPPED, LEFT, RIGHT, SIDES, Bounds
from minishuffle.dataflow.operators.keyindex import KeyIndex
from minishuffle.dataflow.operators.late import Late
from minishuffle.dataflow.operators.moments import TIME_MAX, TIME_MIN, Vector
from minishuffle.dataflow.operators.order import row_order
from minishuffle.dataflow.operators.timedrows import TimedRows, WaitingRows, joined
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.exchange.batch import Batch
from minishuffle.kernels.machinecode import kernel
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.state_parts import StatePart, by_columns

__all__ = ["AsOfArrow"]


class RightRows:
    """All right rows that are held; of one schema."""

    def __init__(self) -> None:
        self.runs: list[TimedRows] = []
        self.in_order = False
        """Whether they are one run in the order of matching."""

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    @property
    def earliest(self) -> int:
        return min((int(run.times.min()) for run in self.runs), default=END_OF_TIME)

    def add(self, rows: TimedRows) -> None:
        if len(rows):
            self.runs.append(rows)
            self.in_order = False

    def all(self) -> TimedRows:
        """All of them as one run; there must be some."""
        self.runs = [joined(self.runs)]
        return self.runs[0]


class AsOfArrow(JoinArrow):
    """Emits the columns of a left join: nulls where a left row has no right one.

    Of right rows of one key and time that is taken which has the smallest values in the other columns, from
    the first on, nulls before all others and NaN after them.

    Args:
        tolerance: how far before the left row the right one may be, microseconds; None: as far as it may.
    """

    name = "asof_join"

    def __init__(
        self,
        columns: JoinColumns,
        tolerance: int | None,
        times: tuple[EventTime, EventTime],
        schemas: tuple[pa.Schema, pa.Schema],
        late: tuple[Late, Late] = DROPPED,
    ) -> None:
        before = TIME_MAX - TIME_MIN if tolerance is None else tolerance
        super().__init__(columns, Bounds(before, 0), times, schemas, late)
        self._lefts, self._rights = WaitingRows(), RightRows()
        self._needed = 0
        """Right rows that were left when they were last looked through."""

    def held_columns(self, given: list[str], input: int) -> list[str]:
        """See :meth:`JoinArrow.held_columns`; the right's keys too."""
        names = super().held_columns(given, input)
        return names if input == LEFT else [*names, *self.columns.keys[RIGHT]]

    def _runs_of(self, input: int) -> Sequence[TimedRows]:
        return list(self._lefts) if input == LEFT else self._rights.runs

    def take(self, batch: Batch, times: Vector, input: int, emit: Emit) -> None:
        given = plain(batch.payload, self._schemas[input])
        nulls = null_marks([column_of(given, name) for name in self.columns.keys[input]])
        rows = TimedRows(given.select(self.held_columns(given.schema.names, input)), times)
        if input == RIGHT and nulls is not None:
            rows = rows.chosen(np.flatnonzero(~nulls))
        self._side(input).add(rows)

    def _side(self, input: int) -> WaitingRows | RightRows:
        return self._lefts if input == LEFT else self._rights

    def let_go(self, input: int, limit: int, emit: Emit) -> None:
        if input == LEFT:
            due = self._lefts.take_until(limit)
            if due is not None:
                self._put_out_joined(due, emit)
        elif len(self._rights) > 2 * self._needed + BATCH_ROWS_MAX or self.progress.ended:
            self._forget_rights()

    def _put_out_joined(self, left: TimedRows, emit: Emit) -> None:
        """Put out left rows, which are in order of time, with their right ones."""
        right = self._rights_in_order()
        index, outbox = KeyIndex(), Outbox(emit)
        slots = index.lookup(self._keys_of(right, RIGHT))
        found = np.empty(len(left.times), dtype=np.int64)
        kernel("match_as_of")(
            left.times,
            index.find(self._keys_of(left, LEFT)),
            len(left.times),
            right.times,
            slots,
            len(right.times),
            np.full(len(index), -1, dtype=np.int64),
            self.progress.bounds.before,
            found,
        )
        for first in range(0, len(found), BATCH_ROWS_MAX):
            rows = found[first : first + BATCH_ROWS_MAX]
            others = right.batch.take(pa.array(rows, mask=rows < 0))
            pairs = self.columns.pairs(left.batch.slice(first, BATCH_ROWS_MAX), others, self.result_schema())
            self.put_out(Batch(pairs), left.times[first : first + BATCH_ROWS_MAX], outbox)
        outbox.flush()

    def _keys_of(self, rows: TimedRows, input: int) -> list[pa.Array]:
        return [column_of(rows.batch, name) for name in self.columns.keys[input]]

    def _rights_in_order(self) -> TimedRows:
        """All right rows by time; of those of one key and time comes last which is taken."""
        held = self._rights
        if not held.runs:
            none = pa.RecordBatch.from_pylist([], self.held_schema(RIGHT))
            return TimedRows(none, np.zeros(0, dtype=np.int64))
        rows = held.all()
        if held.in_order:
            return rows
        held.in_order = True
        if np.all(np.diff(rows.times) > 0):
            return rows
        columns = [pa.array(rows.times), *rows.batch]
        order = row_order(columns, ["ascending", *["descending"] * rows.batch.num_columns])
        held.runs = [rows.chosen(order)]
        return held.runs[0]

    def _forget_rights(self) -> None:
        """Keep of the right rows that both sides have passed the latest of each key, if it is near enough."""
        progress, held = self.progress, self._rights
        if progress.ended or not held.runs:
            held.runs, self._needed = [], 0
            return
        passed = min(progress.reached)
        rows = self._rights_in_order()
        count = int(np.searchsorted(rows.times, passed, "right"))
        index = KeyIndex()
        slots = index.lookup(self._keys_of(rows, RIGHT))[:count]
        back = np.empty(count, dtype=np.int64)
        kept = kernel("first_rows")(slots[::-1].copy(), np.zeros(len(index), np.uint8), 1, back, count)
        latest = count - 1 - back[:kept][::-1]
        latest = latest[rows.times[latest] > passed - progress.bounds.before]
        held.runs = []
        held.add(rows.chosen(np.concatenate([latest, np.arange(count, len(rows.times))])))
        self._needed = len(held)

    def earliest(self, input: int) -> int:
        return self._side(input).earliest

    def write_held(self, input: int) -> Iterator[StatePart]:
        for rows in self._runs_of(input):
            columns = {"time": pa.array(rows.times), "row": rows.batch.to_struct_array()}
            yield from by_columns(SIDES[input], self._keys_of(rows, input), columns)

    def read_held(self, part: StatePart, input: int) -> None:
        self._side(input).add(TimedRows(self.rows_of(part, input), part.batch["time"].to_numpy()))

    def state_rows(self) -> int:
        return len(self._lefts) + len(self._rights)
