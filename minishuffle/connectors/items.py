"""Collections in memory, carried to the workers with the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa

from minishuffle.limits import BATCH_ROWS_MAX, LIST_ROWS, SOURCE_SLICES_MAX
from minishuffle.operators.row_copies import set_apart

__all__ = ["ArrowItemsSource", "ItemsSource"]


class ItemsSource:
    """A collection in memory, carried to the workers with the job; a split is (start, stop)."""

    bounded = True
    format: Literal["rows"] = "rows"
    shares = False
    """They were set apart, and each is given once."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = set_apart(items)

    def splits(self) -> list[tuple[int, int]]:
        return _slices(len(self.items))

    def read(self, split: tuple[int, int], offset: int) -> Iterator[list[Any]]:
        start, stop = split
        for first in range(start + offset, stop, LIST_ROWS):
            yield self.items[first : min(first + LIST_ROWS, stop)]


class ArrowItemsSource:
    """An Arrow table in memory, carried to the workers with the job; a split is (start, stop)."""

    bounded = True
    format: Literal["arrow"] = "arrow"

    def __init__(self, table: pa.Table | pa.RecordBatch) -> None:
        self.table = pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table

    def splits(self) -> list[tuple[int, int]]:
        return _slices(self.table.num_rows)

    def read(self, split: tuple[int, int], offset: int) -> Iterator[pa.RecordBatch]:
        start, stop = split
        piece = self.table.slice(start + offset, max(0, stop - start - offset))
        yield from piece.to_batches(max_chunksize=BATCH_ROWS_MAX)


def _slices(size: int) -> list[tuple[int, int]]:
    count = min(size, SOURCE_SLICES_MAX)
    return [(size * i // count, size * (i + 1) // count) for i in range(count)]
