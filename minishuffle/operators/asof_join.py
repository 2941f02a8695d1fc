"""As-of joins: each left row with the latest right row of its key that is not after it.

A left row waits until the right side's watermark has reached its time: then no such right row is to come. Of
the right rows up to both watermarks only the latest of each key is needed any more. (Flink: temporal joins.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from minishuffle.exchange.batch import Batch, Numbers
from minishuffle.kernels.machinecode import kernel
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import END_OF_TIME, Emit
from minishuffle.operators.batch_times import TIME_MAX, TIME_MIN
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import Late
from minishuffle.operators.join_columns import SUFFIX, JoinColumns
from minishuffle.operators.join_inputs import BOTH_DROPPED, LEFT, RIGHT, Bounds, TimedJoin, record_times
from minishuffle.operators.join_results import BatchesOut, ColumnResults
from minishuffle.operators.key_slots import JoinKeys, KeySlots
from minishuffle.operators.row_order import row_order
from minishuffle.operators.task_state import Records
from minishuffle.operators.waiting_batches import WaitingBatches

__all__ = ["AsOfColumns", "AsOfJoin"]


class AsOfColumns(JoinColumns):
    """The columns of a left join. Of the right the keys are held too, by which its rows are found."""

    def __init__(self, left_keys: tuple[str, ...], right_keys: tuple[str, ...], suffix: str = SUFFIX) -> None:
        super().__init__(left_keys, right_keys, "left", suffix)

    def held_names(self, given: Sequence[str], input: int) -> list[str]:
        keys, others = self.keys[input], self.others(given, input)
        return [*keys, *others] if input == LEFT else [*others, *keys]


class _RightRows:
    """All right rows that are held, with their times."""

    def __init__(self) -> None:
        self.runs: list[Batch] = []
        self.in_order = False
        """Whether they are one run in the order of matching."""

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    @property
    def earliest(self) -> int:
        return min((int(record_times(run).min()) for run in self.runs), default=END_OF_TIME)

    def add(self, rows: Batch) -> None:
        if len(rows):
            self.runs.append(rows)
            self.in_order = False

    def replace(self, *runs: Batch) -> None:
        """Hold these alone."""
        self.runs = []
        for rows in runs:
            self.add(rows)

    def sort(self, schema: pa.Schema) -> Batch:
        """All rows, of this schema, in the order of matching: by time, and of equal key and time the row that
        is taken last."""
        if not self.runs:
            none = pa.RecordBatch.from_pylist([], schema=schema)
            return Batch(none, None, np.zeros(0, dtype=np.int64))
        rows = Batch.concat(self.runs)
        if not self.in_order and not np.all(np.diff(record_times(rows)) > 0):
            columns = [pa.array(record_times(rows)), *rows.payload]
            directions = ["ascending", *["descending"] * rows.payload.num_columns]
            rows = rows.take(row_order(columns, directions))
        self.runs, self.in_order = [rows], True
        return rows


class AsOfJoin(TimedJoin):
    """Emits the columns of a left join: nulls where a left row has no right one.

    Of right rows of one key and time that is taken which has the smallest values in the other columns, from
    the first on, nulls before all others and NaN after them.

    Args:
        tolerance: how far before the left row the right one may be, microseconds; None: as far as it may.
    """

    name = "asof_join"

    def __init__(
        self,
        results: ColumnResults,
        tolerance: int | None,
        times: tuple[EventTime, EventTime],
        lateness: tuple[Late, Late] = BOTH_DROPPED,
        *,
        gives_times: bool = True,
    ) -> None:
        before = TIME_MAX - TIME_MIN if tolerance is None else tolerance
        super().__init__(results.how, Bounds(before, 0), times, lateness)
        self._results = results
        self._gives_times = gives_times and results.gives_times(times)
        self._lefts, self._rights = WaitingBatches(), _RightRows()
        self._needed = 0
        """Right rows that were left when they were last looked through."""

    def take(self, batch: Batch, input: int, emit: Emit) -> None:
        held, keys = self._results.taken(batch, input)
        # A left row without a key goes out at its time, a right one never.
        self._side(input).add(held if input == LEFT or keys.kept is None else held.mask(keys.kept))

    def _side(self, input: int) -> WaitingBatches | _RightRows:
        return self._lefts if input == LEFT else self._rights

    def let_go(self, input: int, limit: int, emit: Emit) -> None:
        if input == LEFT:
            due = self._lefts.take_until(limit)
            if due is not None:
                self._put_out(due, emit)
        elif len(self._rights) > 2 * self._needed + BATCH_ROWS_MAX or self.progress.ended:
            self._forget_rights()

    def _put_out(self, left: Batch, emit: Emit) -> None:
        """Put out left rows, which are in order of time, with their right ones."""
        right = self._rights_in_order()
        slots, out = KeySlots(), BatchesOut(emit)
        right_slots = slots.lookup(self._keys_of(right, RIGHT))
        found = np.empty(len(left), dtype=np.int64)
        kernel("match_as_of")(
            left.times,
            slots.find(self._keys_of(left, LEFT)),
            len(left),
            right.times,
            right_slots,
            len(right),
            np.full(len(slots), -1, dtype=np.int64),
            self.progress.bounds.before,
            found,
        )
        for first in range(0, len(found), BATCH_ROWS_MAX):
            rows = found[first : first + BATCH_ROWS_MAX]
            some = left.slice(first, first + len(rows))
            others = right.payload.take(pa.array(rows, mask=rows < 0))
            joined = self._results.joined(some.payload, others)
            out.add(Batch(joined, None, some.times if self._gives_times else None))
        out.flush()

    def _keys_of(self, rows: Batch, input: int) -> JoinKeys:
        return JoinKeys.of_columns(self._key_columns(rows.payload, input))

    def _key_columns(self, columns: pa.RecordBatch, input: int) -> list[pa.Array]:
        return [columns.column(name) for name in self._results.columns.keys[input]]

    def _rights_in_order(self) -> Batch:
        return self._rights.sort(self._results.held_schema(RIGHT))

    def _forget_rights(self) -> None:
        """Keep of the right rows that both sides have passed the latest of each key, if it is near enough."""
        progress, held = self.progress, self._rights
        if progress.ended or not held.runs:
            held.replace()
            self._needed = 0
            return
        passed = min(progress.watermarks)
        rows = self._rights_in_order()
        times, keys = record_times(rows), KeySlots()
        count = int(np.searchsorted(times, passed, "right"))
        slots = keys.lookup(self._keys_of(rows, RIGHT))[:count]
        back = np.empty(count, dtype=np.int64)
        kept = kernel("first_rows")(slots[::-1].copy(), np.zeros(len(keys), np.uint8), 1, back, count)
        latest: Numbers = count - 1 - back[:kept][::-1]
        latest = latest[times[latest] > passed - progress.bounds.before]
        held.replace(rows.take(np.concatenate([latest, np.arange(count, len(rows))])))
        self._needed = len(held)

    def earliest(self, input: int) -> int:
        return self._side(input).earliest

    def state_rows(self) -> int:
        return len(self._lefts) + len(self._rights)

    def write_side(self, input: int) -> Iterator[Records]:
        for rows in self._lefts if input == LEFT else self._rights.runs:
            keys, marks = self._key_columns(rows.payload, input), {"time": pa.array(record_times(rows))}
            yield Records(rows.payload, keys, marks)

    def read_side(self, input: int, records: Records) -> None:
        batch, _ = self._results.restored(records, input)
        self._side(input).add(batch)
