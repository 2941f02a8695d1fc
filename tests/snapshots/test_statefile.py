"""The file with one task's state: by key groups, for any parallelism, in the order in which it was."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.errors import StorageUnavailable
from minishuffle.exchange.keys import destination, hash_rows
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.state_parts import ORDER, SUBTASK, StatePart, by_rows, divided, keys_of, versioned
from minishuffle.snapshots.segmentindex import KEY_GROUPS, NO_GROUP, read_index, wanted
from minishuffle.snapshots.statefile import (
    SEGMENT_ROWS,
    TaskStateWriter,
    by_key_groups,
    key_groups,
    read_parts,
)
from minishuffle.snapshots.storage import folder_at


@cache
def numbered(count: int, first: int = 0) -> StatePart:
    """So many keys, in an order of their own."""
    keys = list(range(first, first + count))
    random.Random(count).shuffle(keys)
    numbers = pa.array(range(first, first + count), pa.int64())
    return by_rows("values", keys, **{ORDER: numbers}, value=[str(key) for key in keys])


def test_a_key_group_is_what_a_subtask_of_the_greatest_parallelism_has() -> None:
    hashes = hash_rows(list(range(1_000)))
    assert key_groups(hashes).tolist() == destination(hashes, KEY_GROUPS).tolist()
    ends = np.array([0, (1 << 64) - 1], np.uint64)
    assert key_groups(ends).tolist() == [0, KEY_GROUPS - 1]


@pytest.mark.parametrize("count", [1, SEGMENT_ROWS, SEGMENT_ROWS + 1, BATCH_ROWS_MAX])
def test_parts_are_cut_where_key_groups_end(count: int) -> None:
    part = numbered(count)
    pieces = list(by_key_groups(part.batch))
    assert sum(rows.num_rows for _, _, rows in pieces) == count
    assert -(-count // (SEGMENT_ROWS + 100)) <= len(pieces) <= -(-count // SEGMENT_ROWS)
    for (_, last, _), (first, _, _) in zip(pieces, pieces[1:], strict=False):
        assert last < first
    for first, last, rows in pieces:
        groups = key_groups(rows["hash"].to_numpy())
        assert (groups.min(), groups.max()) == (first, last)
        assert rows[ORDER].to_pylist() == sorted(rows[ORDER].to_pylist())


def test_a_group_with_many_rows_stays_whole() -> None:
    keys = ["hot"] * (2 * SEGMENT_ROWS) + list(range(10))
    part = by_rows("values", keys, **{ORDER: pa.array(range(len(keys)))})
    pieces = [rows.num_rows for _, _, rows in by_key_groups(part.batch)]
    assert max(pieces) >= 2 * SEGMENT_ROWS
    assert sum(pieces) == len(keys)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7, 1_000])
def test_each_subtask_reads_its_keys_and_little_more(parallelism: int, tmp_path: Path) -> None:
    folder, parts = folder_at(tmp_path), [numbered(BATCH_ROWS_MAX), numbered(20_000, BATCH_ROWS_MAX)]
    writer = TaskStateWriter(folder, "0.state")
    writer.write("a", parts[0])
    writer.write("other", numbered(3))
    writer.write("a", parts[1])
    written = writer.close()
    index = read_index(folder, written)
    assert written.rows == sum(segment.rows for segment in index) == BATCH_ROWS_MAX + 20_003
    assert written.bytes == (tmp_path / "0.state").stat().st_size
    for subtask in range(min(parallelism, 3)):
        mine = [each for each in index if each.operator == "a" and wanted(each, subtask, parallelism)]
        assert (
            sum(each.rows for each in mine)
            <= (BATCH_ROWS_MAX + 20_000) / parallelism + 4 * SEGMENT_ROWS + 20_000
        )
        found = list(divided(read_parts(folder, "0.state", mine), subtask, parallelism))
        expected = list(divided(parts, subtask, parallelism))
        assert [part.name for part in found] == ["values"] * len(expected)
        assert [part.batch for part in found] == [part.batch for part in expected]
        assert all(part.batch.schema.metadata for part in found)


@pytest.mark.parametrize("columns", [{SUBTASK: [1, 0]}, {"v": [1.5, None]}], ids=["of a subtask", "of all"])
def test_rows_without_a_hash_are_in_a_group_of_their_own(columns: dict[str, Any], tmp_path: Path) -> None:
    folder, part = folder_at(tmp_path), versioned("own", {ORDER: [0, 1], **columns})
    writer = TaskStateWriter(folder, "0.state")
    writer.write("a", part)
    writer.write("a", StatePart("none", part.batch.slice(0, 0)))
    (segment,) = read_index(folder, writer.close())
    assert (segment.first, segment.last) == (NO_GROUP, NO_GROUP)
    assert all(wanted(segment, index, 5) for index in range(5))
    assert [each.batch for each in read_parts(folder, "0.state", [segment])] == [part.batch]


def test_columns_of_any_type_come_back(tmp_path: Path) -> None:
    count = SEGMENT_ROWS + 10
    texts = pa.array([f"t{number % 7}" for number in range(count)])
    part = by_rows(
        "values",
        list(range(count)),
        **{ORDER: pa.array(range(count))},
        categories=texts.dictionary_encode(),
        views=texts.cast(pa.string_view()),
        lists=pa.array([[number] for number in range(count)]),
    )
    writer = TaskStateWriter(folder := folder_at(tmp_path), "0.state")
    writer.write("a", part)
    (found,) = read_parts(folder, "0.state", read_index(folder, writer.close()))
    assert found.batch.to_pylist() == part.batch.to_pylist()
    assert found.batch.schema == part.batch.schema
    assert keys_of(found) == list(range(count))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StorageUnavailable, match=r"file/0\.state: (Not a directory|File exists).*that there is room"
    ):
        TaskStateWriter(folder_at(tmp_path / "file"), "0.state")
    writer = TaskStateWriter(folder_at("/dev"), "full")
    with pytest.raises(StorageUnavailable, match="^/dev/full: No space left on device"):
        writer.write("a", numbered(BATCH_ROWS_MAX))
    writer.abandon()
