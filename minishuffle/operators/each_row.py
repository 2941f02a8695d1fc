"""What operators share that call a function of the user for each row.

What a function makes of a row happened when the row did. A row that is dropped because its function raised
drops its time.

A function is called exactly once per record. Under ``on_error="fail"`` a batch runs through one
comprehension; only when it raises is it worked out which record was to blame, from how far the
iterator had come. (``list(map(fn, rows))`` would end silently at a function that raises
StopIteration.) Under the other policies a plain loop drops the one record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import length_hint
from typing import Any

import numpy as np

from minishuffle.exchange.batch import Batch, Times
from minishuffle.exchange.sizes import RowsOut
from minishuffle.operators.base import Emit
from minishuffle.operators.chained import OnError, RecordOperator

__all__ = ["EachRow", "RowTimes", "last_taken", "time_of", "times_of"]


class RowTimes:
    """The times of rows that were made of a batch's, in order: whose each row is, and how many it gave."""

    __slots__ = ("_at", "_counts", "_made", "_owners", "_times")

    def __init__(self, times: Times) -> None:
        self._times = times
        self._owners: list[int] = []
        self._counts: list[int] = []
        self._made: Times | None = None
        """A time for each row that was noted, the first ``_at`` of them taken; None: not computed yet."""
        self._at = 0

    def note(self, owners: Iterable[int], counts: Iterable[int]) -> None:
        self._owners += owners
        self._counts += counts

    def take(self, rows: int) -> Times:
        """The times of the next so many rows; all that were noted are taken before any other is."""
        if self._made is None:
            owners, counts = self._owners, self._counts
            self._owners, self._counts = [], []
            if counts.count(1) == len(counts) == len(self._times):  # Each has given one.
                self._made = self._times
            else:
                self._made = np.repeat(self._times.take(owners), counts)
        begin, self._at = self._at, self._at + rows
        some: Times = self._made[begin : self._at]
        if self._at == len(self._made):
            self._made, self._at = None, 0
        return some


class EachRow(RecordOperator):
    """One call of ``fn`` per row; what the results mean is the subclass's."""

    def __init__(self, fn: Any, on_error: OnError = "fail") -> None:
        super().__init__(fn, on_error)

    def call(self, rows: list[Any]) -> list[Any]:
        """The results; under ``fail`` only."""
        fn, left = self.fn, iter(rows)
        try:
            return [fn(row) for row in left]
        except Exception as error:
            self.note_failure(error, last_taken(rows, left))
            raise

    def call_one_by_one(self, batch: Batch) -> tuple[list[int], list[Any]]:
        """The numbers of the rows whose function did not raise, and their results."""
        kept: list[int] = []
        results: list[Any] = []
        for number, row in enumerate(batch.payload):
            try:
                result = self.fn(row)
            except Exception as error:
                self.drop(error, row, time_of(batch, number))
            else:
                kept.append(number)
                results.append(result)
        return kept, results

    def called(self, batch: Batch) -> tuple[Batch, list[Any]]:
        """The records whose function did not raise, and their results."""
        if self.on_error == "fail":
            return batch, self.call(batch.payload)
        kept, results = self.call_one_by_one(batch)
        return batch if len(kept) == len(batch.payload) else batch.take(np.array(kept, np.int64)), results

    def gathered(self, stamps: RowTimes | None, emit: Emit) -> RowsOut:
        """Where rows go that are given in batches that are not too long, with their times."""
        return RowsOut(self.parted(emit), stamps)


def times_of(batch: Batch) -> RowTimes | None:
    """For what is made of the batch's rows, if they have times."""
    return None if batch.times is None else RowTimes(batch.times)


def time_of(batch: Batch, number: int) -> Times | None:
    """The time of one record, as a vector."""
    return None if batch.times is None else batch.times[number : number + 1]


def last_taken(rows: Sequence[Any], left: Iterator[Any]) -> Any:
    """The row that a list's iterator gave out last."""
    return rows[len(rows) - length_hint(left) - 1]
