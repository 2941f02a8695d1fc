"""Records that wait until the watermark has reached their times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Final

import numpy as np

from minishuffle.exchange.batch import Batch
from minishuffle.operators.time_heap import TimeHeap

__all__ = ["WaitingBatches"]

_RUN_ROWS_MIN: Final = 128
"""Batches of fewer records are put together: alone each would be a run of its own, and cost as much."""


@dataclass(slots=True)
class _Run:
    """Records in order of time."""

    number: int
    """Runs count from 0, in the order in which their records came."""
    batch: Batch
    begin: int = 0
    """Those before this number have been given back; they stay in memory while they are the fewer ones."""

    def __len__(self) -> int:
        return len(self.batch) - self.begin

    @property
    def earliest(self) -> int:
        assert self.batch.times is not None
        return int(self.batch.times[self.begin])

    def left(self) -> Batch:
        """The records that have not been given back."""
        return self.batch.slice(self.begin, len(self.batch)) if self.begin else self.batch

    def take_until(self, limit: int) -> Batch:
        """Give back the records up to ``limit``."""
        batch, begin, rows = self.batch, self.begin, len(self.batch)
        times = batch.times
        assert times is not None
        end = rows if times[-1] <= limit else int(np.searchsorted(times, limit, "right"))
        self.begin = end
        if rows < 2 * end < 2 * rows:
            self.batch, self.begin = batch.take(np.arange(end, rows)), 0
        return batch.slice(begin, end) if end - begin < rows else batch


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
            yield run.left()

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
            due.append((run.number, run.take_until(limit)))
            if len(run):
                self._runs.push(run.earliest, run)
        if not due:
            return None
        due.sort(key=itemgetter(0))
        found = [batch for _, batch in due]
        self._rows -= sum(map(len, found))
        return _in_order(Batch.concat(found))

    def _begin_run(self) -> None:
        """Have the last batches, if there are any, be a run."""
        if self._latest:
            run = _Run(self._numbers, _in_order(Batch.concat(self._latest)))
            self._runs.push(run.earliest, run)
            self._numbers += 1
            self._latest, self._latest_rows = [], 0


def _in_order(batch: Batch) -> Batch:
    """The records in order of time; those of one time stay in theirs."""
    times = batch.times
    assert times is not None
    if len(times) == 1 or np.all(times[:-1] <= times[1:]):
        return batch
    return batch.take(np.argsort(times, kind="stable"))
