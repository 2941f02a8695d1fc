"""Collections in memory as sources: their splits, and that rows share nothing."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from minishuffle.connectors.items import ArrowItemsSource, ItemsSource
from minishuffle.limits import LIST_ROWS, SOURCE_SLICES_MAX


@pytest.mark.parametrize("count", [0, 1, 5, SOURCE_SLICES_MAX, 2 * SOURCE_SLICES_MAX + 3])
@pytest.mark.parametrize("columns", [False, True])
def test_splits_are_slices_of_like_size_without_a_gap(count: int, columns: bool) -> None:
    made: Any = ArrowItemsSource(pa.table({"n": range(count)})) if columns else ItemsSource(range(count))
    splits = made.splits()
    assert len(splits) == min(count, SOURCE_SLICES_MAX)
    assert [number for split in splits for number in range(*split)] == list(range(count))
    sizes = {stop - start for start, stop in splits}
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_rows_come_in_lists_from_any_offset() -> None:
    source = ItemsSource(range(2 * LIST_ROWS + 1))
    lists = list(source.read((1, 2 * LIST_ROWS + 1), 2))
    assert list(map(len, lists)) == [LIST_ROWS, LIST_ROWS - 2]
    assert [row for rows in lists for row in rows] == list(range(3, 2 * LIST_ROWS + 1))
    assert list(source.read((0, 3), 3)) == []


def test_no_row_shares_what_can_be_changed_with_another() -> None:
    tags = ["a"]
    (rows,) = ItemsSource([{"tags": tags}, {"tags": tags}]).read((0, 2), 0)
    rows[0]["tags"].append("b")
    assert rows == [{"tags": ["a", "b"]}, {"tags": ["a"]}]


def test_columns_come_as_batches_from_any_offset() -> None:
    batch = pa.record_batch({"n": [0, 1, 2, 3]})
    for table in (pa.Table.from_batches([batch]), batch):
        (out,) = ArrowItemsSource(table).read((1, 4), 1)
        assert out.to_pydict() == {"n": [2, 3]}
    assert list(ArrowItemsSource(batch).read((0, 2), 5)) == []
