"""Records that wait until the watermark has reached their times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Final

import numpy as np

from minishuffle.dataflow.operators.timeheap import TimeHeap
from minishuffle.exchange.batch import Batch

__all__ = ["WaitingBatches"]

_RUN_ROWS_MIN: Final = 128
"""Batches of fewer records are put together: alone each would be a run of its own, and cost as much."""


@dataclass(slots=True)
class _Run:
    """Records in order of time."""

    batch: Batch
    begin: int
    """Those before this number have been given back; they stay in memory while they are the fewer ones."""
    number: int
    """Runs count from 0, in the order in which their records came."""


class WaitingBatches:
    """Batches with times, all of rows or all of columns of one schema, given back in order of time; records
    of one time as they came. A run of them is put in order once, and then cut."""

    def __init__(self) -> None:
        self._runs: TimeHeap[_Run] = TimeHeap()
        """By their first time."""
        self._latest: list[Batch] = []
        """The last ones, which are no run yet."""
        self._latest_rows = 0
        """How many records these have."""
        self._rows = self._numbers = 0

    def __len__(self) -> int:
        """How many records wait."""
        return self._rows

    @property
    def earliest(self) -> int:
        """The least time; ``END_OF_TIME`` if there are no records."""
        self._begin_run()
        return self._runs.earliest

    def __iter__(self) -> Iterator[Batch]:
        """All of them; added so, they wait as they do here."""
        self._begin_run()
        for run in sorted((run for _, run in self._runs), key=attrgetter("number")):
            yield run.batch.slice(run.begin, len(run.batch)) if run.begin else run.batch

    def add(self, batch: Batch) -> None:
        """Hold records."""
        if rows := len(batch):
            self._latest.append(batch)
            self._latest_rows += rows
            self._rows += rows
            if self._latest_rows >= _RUN_ROWS_MIN:
                self._begin_run()

    def take_until(self, limit: int) -> Batch | None:
        """Let go of the records up to ``limit``, and give them in order of time; None if there are none."""
        self._begin_run()
        due: list[tuple[int, Batch]] = []
        for _, run in self._runs.take_until(limit):
            batch, begin, rows = run.batch, run.begin, len(run.batch)
            times = batch.times
            assert times is not None
            end = rows if times[-1] <= limit else int(np.searchsorted(times, limit, "right"))
            due.append((run.number, batch.slice(begin, end) if end - begin < rows else batch))
            if end < rows:
                run.begin = end
                if 2 * end > rows:
                    run.batch, run.begin = batch.take(np.arange(end, rows)), 0
                self._push(run)
        if not due:
            return None
        due.sort(key=itemgetter(0))
        found = [batch for _, batch in due]
        self._rows -= sum(map(len, found))
        return _in_order(Batch.concat(found))

    def _begin_run(self) -> None:
        """Have the last batches, if there are any, be a run."""
        if self._latest:
            self._push(_Run(_in_order(Batch.concat(self._latest)), 0, self._numbers))
            self._numbers += 1
            self._latest, self._latest_rows = [], 0

    def _push(self, run: _Run) -> None:
        assert run.batch.times is not None
        self._runs.push(int(run.batch.times[run.begin]), run)


def _in_order(batch: Batch) -> Batch:
    """The records in order of time; those of one time stay in theirs."""
    times = batch.times
    assert times is not None
    if len(times) == 1 or np.all(times[:-1] <= times[1:]):
        return batch
    return batch.take(np.argsort(times, kind="stable"))
