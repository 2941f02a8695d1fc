"""Records that a function makes of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from minishuffle.errors import UsageError, WrongResult
from minishuffle.exchange.batch import Payload
from minishuffle.limits import BATCH_ROWS_MAX, LIST_ROWS, RATE_MAX, SOURCE_SLICES_MAX

__all__ = ["GeneratorSource", "number_batch", "number_rows"]

Format: TypeAlias = Literal["rows", "arrow"]

GENERATED_ROWS = 16_384
"""Records in a generated Arrow batch when no rate is set: its columns fit the processor's cache."""
TURNS_PER_SECOND = 5
"""Batches per second and split of a generator with a rate: the flow is smooth also where each of 64 subtasks
has one split, and batches are not so small that a worker does little else than wake."""


class GeneratorSource:
    """Records by number: ``fn(start, count)`` gives those numbered start to start + count - 1.

    ``fn`` returns a list of rows or, with ``format="arrow"``, a RecordBatch, of exactly ``count``
    records, and the same for the same numbers at each call. So a split gives the same batches wherever
    its read begins, and is never without one (``same_batches``). Blocks of consecutive numbers are dealt
    to the splits in turn. ``rate`` is records/s of the whole source; ``records`` is the total, or
    None for a source without end.

    Raises:
        UsageError: ``rate``, ``records`` or ``splits`` is out of range, or ``fn`` returns another
            number of records.
    """

    def __init__(
        self,
        fn: Callable[[int, int], Payload],
        rate: float | None = None,
        records: int | None = None,
        splits: int = SOURCE_SLICES_MAX,
        format: Format = "rows",
    ) -> None:
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate <= RATE_MAX):
            raise UsageError(f"rate is {rate!r}: give records per second above 0, or leave it out")
        if records is not None and not (isinstance(records, int) and records >= 0):
            raise UsageError(
                f"records is {records!r}: give a whole number from 0 on, or leave it out for no end"
            )
        if splits < 1:
            raise UsageError(f"splits is {splits}: give at least 1")
        self.fn = fn
        self.rate = rate
        self.records = records
        self.bounded = records is not None
        self.same_batches = True
        self.format = format
        self._splits = splits
        self._block = self._block_records()

    def _block_records(self) -> int:
        block: float = GENERATED_ROWS if self.format == "arrow" else LIST_ROWS
        if self.rate is not None:
            block = min(self.rate / self._splits / TURNS_PER_SECOND, BATCH_ROWS_MAX)
        if self.records is not None:
            block = min(block, -(-self.records // self._splits))
        return max(1, int(block))

    @property
    def split_layout(self) -> str:
        """Which numbers are in which split, as text: positions of one that deals otherwise are of others."""
        return f"{self._splits} with blocks of {self._block:,} records, by its rate and records"

    def splits(self) -> range:
        return range(self._splits)

    def read(self, split: int, offset: int) -> Iterator[Payload]:
        turn, within = divmod(offset, self._block)
        while True:
            block_start = (turn * self._splits + split) * self._block
            stop = block_start + self._block
            if self.records is not None:
                stop = min(stop, self.records)
            count = stop - block_start - within
            if count <= 0:
                return
            batch = self.fn(block_start + within, count)
            kind = pa.RecordBatch if self.format == "arrow" else list
            if not isinstance(batch, kind):
                raise WrongResult(
                    f"the generator's function gave a {type(batch).__name__}: return a {kind.__name__}, "
                    "or say format='arrow' for record batches"
                )
            if len(batch) != count:
                raise WrongResult(
                    f"the generator's function was asked for {count} records from number "
                    f"{block_start + within} on and gave {len(batch)}: return exactly as many"
                )
            yield batch
            turn, within = turn + 1, 0


def number_rows(start: int, count: int) -> list[int]:
    """What a generator gives without a function: ``count`` integers from ``start`` on."""
    return list(range(start, start + count))


def number_batch(start: int, count: int) -> pa.RecordBatch:
    """The same as the int64 column ``number``."""
    return pa.RecordBatch.from_pydict({"number": np.arange(start, start + count, dtype=np.int64)})
