"""Arrow rows that wait until the watermark has reached their times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.moments import Vector
from minishuffle.dataflow.operators.timeheap import TimeHeap
from minishuffle.exchange.gather import taken

__all__ = ["TimedRows", "WaitingRows", "joined"]


@dataclass(slots=True)
class TimedRows:
    """Rows and their times, microseconds."""

    batch: pa.RecordBatch
    times: Vector

    def __len__(self) -> int:
        return len(self.times)

    def chosen(self, rows: Vector) -> TimedRows:
        """A copy of the rows of these numbers."""
        return TimedRows(taken(self.batch, rows), self.times[rows])

    def in_order(self) -> TimedRows:
        """The same in order of time; those of one time stay in theirs."""
        if np.all(self.times[:-1] <= self.times[1:]):
            return self
        return self.chosen(np.argsort(self.times, kind="stable"))

    def part(self, first: int, last: int) -> TimedRows:
        """Those from ``first`` to before ``last``, without a copy."""
        return TimedRows(self.batch.slice(first, last - first), self.times[first:last])


@dataclass(slots=True)
class _Waiting:
    """Rows of one call of :meth:`WaitingRows.add`, in order of time."""

    rows: TimedRows
    kept: int
    """So many rows of them stay in memory."""
    number: int
    """Calls count from 0."""


class WaitingRows:
    """Rows, given back in order of time, those of one time as they came. What is given back and what stays
    are cut, not copied row by row, as each batch is put in order once."""

    def __init__(self) -> None:
        self._waiting: TimeHeap[_Waiting] = TimeHeap()
        """By their first time."""
        self._rows = self._calls = 0

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[TimedRows]:
        """All of them, in no particular order."""
        return (some.rows for _, some in self._waiting)

    @property
    def earliest(self) -> int:
        """The least time; ``END_OF_TIME`` if there are no rows."""
        return self._waiting.earliest

    def add(self, rows: TimedRows) -> None:
        """Hold rows, of the schema of those before."""
        if len(rows):
            self._push(_Waiting(rows.in_order(), len(rows), self._calls))
            self._rows += len(rows)
            self._calls += 1

    def take_until(self, limit: int) -> TimedRows | None:
        """Let go of the rows up to ``limit``, and give them in order of time."""
        due = []
        for _, some in self._waiting.take_until(limit):
            rows = some.rows
            count = int(np.searchsorted(rows.times, limit, "right"))
            due.append((some.number, rows.part(0, count)))
            if count < len(rows):
                self._push(_Waiting(rows.part(count, len(rows)), some.kept, some.number))
        due.sort(key=itemgetter(0))
        self._rows -= sum(len(rows) for _, rows in due)
        return joined([rows for _, rows in due]).in_order() if due else None

    def _push(self, some: _Waiting) -> None:
        if 2 * len(some.rows) < some.kept:
            some.rows, some.kept = some.rows.chosen(np.arange(len(some.rows))), len(some.rows)
        self._waiting.push(int(some.rows.times[0]), some)


def joined(runs: Sequence[TimedRows]) -> TimedRows:
    """Some runs of one schema as one."""
    if len(runs) == 1:
        return runs[0]
    batch = pa.concat_batches([run.batch for run in runs])
    return TimedRows(batch, np.concatenate([run.times for run in runs]))
