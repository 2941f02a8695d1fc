"""The Arrow rows that one side of an interval join holds, found by key and time a batch at a time.

They lie in runs, each with chains of rows of one key and time bucket (as wide as the join's bounds are
apart), which compiled loops walk along. Runs of like size are merged, which leaves few of them and moves
each row a logarithmic number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import END_OF_TIME
from minishuffle.dataflow.operators.moments import Vector
from minishuffle.exchange.sizes import rows_that_fit
from minishuffle.kernels.machinecode import kernel

__all__ = ["Held", "Mask", "Run"]

Mask = np.ndarray[Any, np.dtype[np.bool_]]

RUN_ROWS_MAX: Final = 1 << 18
"""Longer ones do not come from merging: one merge stays below a tenth of a second."""
RUN_BYTES_MAX: Final = 1 << 28
"""Likewise; and the offsets of a text column do not overflow."""


class Run:
    """Rows with the slot of their key, their time, and whether they had a partner."""

    def __init__(
        self, batch: pa.RecordBatch, slots: Vector, times: Vector, matched: Mask, width: int
    ) -> None:
        self.batch = batch
        self.times = times
        self.matched = matched
        self.gone = 0
        """So many rows, the first by time, are held no more."""
        self._width = width
        self._by_time = np.argsort(times, kind="stable")
        self._sorted_times = times[self._by_time]
        self.number(slots)

    def __len__(self) -> int:
        return len(self.times)

    @property
    def earliest(self) -> int:
        return int(self._sorted_times[self.gone])

    def number(self, slots: Vector) -> None:
        """Set the slots of the rows' keys."""
        self.slots = slots
        bits = max(1, 2 * len(slots) - 1).bit_length()
        self._shift = 64 - bits
        self._heads = np.full(1 << bits, -1, dtype=np.int64)
        self._following = np.empty(len(slots), dtype=np.int64)
        kernel("link_rows")(
            slots, self.times, self._width, self._heads, self._shift, self._following, len(slots)
        )

    def find(
        self, slots: Vector, times: Vector, before: int, after: int, most: int
    ) -> Iterator[tuple[Vector, Vector]]:
        """The rows that match others of these keys and times: (numbers given, numbers of rows), pairwise, at
        most so many at a time."""
        others, rows = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
        place = np.array([0, 0, -2], dtype=np.int64)
        look = kernel("find_rows")
        while place[0] < len(slots):
            count = look(
                slots,
                times,
                len(slots),
                self.slots,
                self.times,
                self._heads,
                self._shift,
                self._following,
                self._width,
                before,
                after,
                place,
                others,
                rows,
                most,
            )
            if count:
                yield others[:count].copy(), rows[:count].copy()

    def take_until(self, limit: int) -> Vector:
        """Let go of the rows up to ``limit``, and give their numbers."""
        before, self.gone = self.gone, int(np.searchsorted(self._sorted_times, limit, "right"))
        return self._by_time[before : self.gone]

    def kept(self) -> Run:
        """The same without the rows that are gone."""
        if not self.gone:
            return self
        rows = np.sort(self._by_time[self.gone :])
        batch = self.batch.take(pa.array(rows))
        return Run(batch, self.slots[rows], self.times[rows], self.matched[rows], self._width)


class Held:
    """All rows of a side that are held.

    Args:
        before: how far before a record of the other side its partners are; microseconds.
        after: how far after it.
    """

    def __init__(self, before: int, after: int) -> None:
        self.runs: list[Run] = []
        self._before, self._after = before, after
        # As many times as partners may have: these are then in one bucket, or in two that follow each other.
        self._width = before + after + 1

    def __len__(self) -> int:
        return sum(len(run) - run.gone for run in self.runs)

    @property
    def earliest(self) -> int:
        """The least time; ``END_OF_TIME`` if there are no rows."""
        return min((run.earliest for run in self.runs), default=END_OF_TIME)

    def add(self, batch: pa.RecordBatch, slots: Vector, times: Vector, matched: Mask) -> None:
        """Hold rows, at least one."""
        runs = self.runs
        runs.append(Run(batch, slots, times, matched, self._width))
        while len(runs) > 1 and _is_worth_merging(runs[-2], runs[-1]):
            last, before = runs.pop().kept(), runs.pop().kept()
            runs.append(
                Run(
                    pa.concat_batches([before.batch, last.batch]),
                    np.concatenate([before.slots, last.slots]),
                    np.concatenate([before.times, last.times]),
                    np.concatenate([before.matched, last.matched]),
                    self._width,
                )
            )

    def find(
        self, slots: Vector, times: Vector, batch: pa.RecordBatch
    ) -> Iterator[tuple[Vector, Run, Vector]]:
        """The partners of rows of ``batch`` with these keys (-1: none) and times: (numbers given, run,
        numbers in it), pairwise, as many at a time as make a batch."""
        for run in self.runs:
            most = rows_that_fit(batch, run.batch)
            for asked, rows in run.find(slots, times, self._before, self._after, most):
                yield asked, run, rows

    def take_until(self, limit: int) -> Iterator[tuple[Run, Vector]]:
        """Let go of the rows up to ``limit``: (run, numbers in it)."""
        kept = []
        for run in self.runs:
            if run.earliest <= limit:
                yield run, run.take_until(limit)
            if run.gone == len(run):
                continue
            kept.append(run.kept() if 2 * run.gone > len(run) else run)
        self.runs = kept


def _is_worth_merging(before: Run, last: Run) -> bool:
    if len(before) > 2 * len(last) or len(before) + len(last) > RUN_ROWS_MAX:
        return False
    size: int = before.batch.nbytes + last.batch.nbytes
    return size <= RUN_BYTES_MAX
