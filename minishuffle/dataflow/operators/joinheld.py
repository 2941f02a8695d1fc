"""The Arrow rows that one side of an interval join holds, found by key and time a batch at a time.

They lie in runs, each sorted once by a word of key and time bucket (as wide as the join's bounds are apart),
so that a whole batch is looked up by binary search; the matches are then checked against key and time. Runs
of like size are merged, which leaves few of them and moves each row a logarithmic number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from minishuffle.dataflow.operators.base import END_OF_TIME
from minishuffle.dataflow.operators.moments import Vector
from minishuffle.exchange.sizes import rows_that_fit
from minishuffle.limits import BATCH_ROWS_MAX

__all__ = ["Held", "Mask", "Run", "places"]

Mask = np.ndarray[Any, np.dtype[np.bool_]]

RUN_ROWS_MAX: Final = 1 << 18
"""Longer ones do not come from merging: one merge stays below a tenth of a second."""
RUN_BYTES_MAX: Final = 1 << 28
"""Likewise; and the offsets of a text column do not overflow."""

_SLOT_FACTOR: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_BUCKET_FACTOR: Final = np.uint64(0xC2B2_AE3D_27D4_EB4F)
"""Odd, with bits well mixed. Two pairs that give one word cost a comparison, no more."""
_S32: Final = np.uint64(32)


def _words(slots: Vector, buckets: Vector) -> np.ndarray[Any, np.dtype[np.uint64]]:
    words = buckets.view(np.uint64) * _BUCKET_FACTOR
    words ^= words >> _S32
    words += slots.view(np.uint64)
    words *= _SLOT_FACTOR
    return words


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
        words = _words(slots, self.times // self._width)
        self.order = np.argsort(words, kind="stable")
        self.words = words[self.order]

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
        """The partners of rows of ``batch`` with these keys and times: (numbers given, run, numbers in it),
        pairwise, as many at a time as make a batch."""
        first, last = (times - self._before) // self._width, (times + self._after) // self._width
        further = np.flatnonzero(last != first)
        looks = [(np.arange(len(times)), _words(slots, first))]
        if len(further):
            looks.append((further, _words(slots[further], last[further])))
        for run in self.runs:
            most = rows_that_fit(batch, run.batch)
            for numbers, words in looks:
                starts = np.searchsorted(run.words, words, "left")
                counts = np.searchsorted(run.words, words, "right") - starts
                for asked, found in places(starts, counts, most):
                    asked, rows = numbers[asked], run.order[found]
                    apart = run.times[rows] - times[asked]
                    fits = (-self._before <= apart) & (apart <= self._after)
                    fits &= run.slots[rows] == slots[asked]
                    asked, rows = asked[fits], rows[fits]
                    if len(rows):
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


def places(starts: Vector, counts: Vector, most: int = BATCH_ROWS_MAX) -> Iterator[tuple[Vector, Vector]]:
    """Every place in ``starts[i]`` .. ``starts[i] + counts[i]`` with its ``i``, at most so many at a time."""
    hits = np.flatnonzero(counts)
    counts = counts[hits]
    ends = np.cumsum(counts)
    offsets = starts[hits] - (ends - counts)
    total = int(ends[-1]) if len(hits) else 0
    for begin in range(0, total, most):
        end = min(begin + most, total)
        first, last = np.searchsorted(ends, (begin, end - 1), "right")
        some = counts[first : last + 1].copy()
        some[0] = ends[first] - begin
        some[-1] -= ends[last] - end
        numbers = np.arange(begin, end)
        yield np.repeat(hits[first : last + 1], some), np.repeat(offsets[first : last + 1], some) + numbers
