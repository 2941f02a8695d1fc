"""Arrow rows that wait until the watermark has reached their times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.moments import Vector
from minishuffle.dataflow.operators.timeheap import TimeHeap
from minishuffle.dataflow.operators.widertype import in_schema, wider_schema

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
        return TimedRows(self.batch.take(pa.array(rows)), self.times[rows])

    def in_order(self) -> TimedRows:
        """The same in order of time; those of one time stay in theirs."""
        if np.all(self.times[:-1] <= self.times[1:]):
            return self
        return self.chosen(np.argsort(self.times, kind="stable"))

    def part(self, first: int, last: int) -> TimedRows:
        """Those from ``first`` to before ``last``, without a copy."""
        return TimedRows(self.batch.slice(first, last - first), self.times[first:last])


class WaitingRows:
    """Rows, given back in order of time. What is given back and what stays are cut, not copied row by row, as
    each batch is put in order once."""

    def __init__(self) -> None:
        self._runs: TimeHeap[tuple[TimedRows, int]] = TimeHeap()
        """Each in order of time, by the first one, and how many rows it keeps in memory."""
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[TimedRows]:
        """All of them, in no particular order."""
        return (run for _, (run, _) in self._runs)

    @property
    def earliest(self) -> int:
        """The least time; ``END_OF_TIME`` if there are no rows."""
        return self._runs.earliest

    def add(self, rows: TimedRows) -> None:
        """Hold rows, which may be of another schema than those before."""
        if len(rows):
            self._push(rows.in_order(), len(rows))
            self._rows += len(rows)

    def take_until(self, limit: int, name: str) -> TimedRows | None:
        """Let go of the rows up to ``limit``, and give them in order of time; ``name`` stands in errors."""
        due = []
        for _, (run, kept) in self._runs.take_until(limit):
            count = int(np.searchsorted(run.times, limit, "right"))
            due.append(run.part(0, count))
            if count < len(run):
                self._push(run.part(count, len(run)), kept)
        self._rows -= sum(map(len, due))
        return joined(due, name).in_order() if due else None

    def _push(self, run: TimedRows, kept: int) -> None:
        if 2 * len(run) < kept:
            run, kept = run.chosen(np.arange(len(run))), len(run)
        self._runs.push(int(run.times[0]), (run, kept))


def joined(runs: Sequence[TimedRows], name: str) -> TimedRows:
    """Some runs as one, of the schema that all of them fit."""
    if len(runs) == 1:
        return runs[0]
    schema = None
    for run in runs:
        schema = wider_schema(schema, run.batch.schema, name)
    batch = pa.concat_batches([in_schema(run.batch, schema, name) for run in runs])
    return TimedRows(batch, np.concatenate([run.times for run in runs]))
