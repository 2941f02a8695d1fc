"""What subtasks have held is shared among as many as there are now."""

from __future__ import annotations

import pyarrow as pa
import pytest

from minishuffle.exchange.keys import hash_rows
from minishuffle.operators.base import BEGINNING_OF_TIME, END_OF_TIME
from minishuffle.operators.state_parts import HASH, StatePart
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.wire.packed import SplitPosition


def held(first: int, rows: int) -> TaskStateSnapshot:
    """A snapshot with some keys, and how far it is."""
    keys = list(range(first, first + rows))
    part = StatePart("values", pa.RecordBatch.from_pydict({HASH: hash_rows(keys), "key": keys}))
    return TaskStateSnapshot({"count": [part]}, [SplitPosition(first, rows)], first + 5)


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_each_key_is_with_one_subtask_and_positions_are_with_none(parallelism: int) -> None:
    before = [held(0, 20), held(20, 20)]
    shares = [TaskStateSnapshot.share(before, index, parallelism) for index in range(parallelism)]
    found = [
        key
        for each in shares
        for part in each.parts.get("count", ())
        for key in part.batch["key"].to_pylist()
    ]
    assert sorted(found) == list(range(40))
    assert all(len(each.parts["count"]) > 0 for each in shares)
    assert not any(each.positions for each in shares)


def test_event_time_is_that_of_the_last_and_the_end_holds_nobody_back() -> None:
    assert TaskStateSnapshot.share([held(0, 2), held(9, 2)], 0, 1).watermark == 5
    ended = TaskStateSnapshot(watermark=END_OF_TIME)
    assert TaskStateSnapshot.share([ended, held(9, 2)], 0, 1).watermark == 14
    for nobody in ([], [ended]):
        assert TaskStateSnapshot.share(nobody, 0, 1) == TaskStateSnapshot(watermark=BEGINNING_OF_TIME)
