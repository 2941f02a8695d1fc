"""Functions of Arrow batches."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from minishuffle.errors import WrongResult
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import TaskContext
from minishuffle.operators.map_batches import MapBatches
from support.batches import Calls, run_operator


def batch_of(*values: int | None) -> pa.RecordBatch:
    return pa.record_batch({"v": pa.array(values, pa.int64())})


def test_map_batches_takes_batches_tables_and_nothing() -> None:
    assert run_operator(MapBatches(lambda batch: batch.slice(1)), batch_of(1, 2)) == [batch_of(2)]
    doubled = MapBatches(lambda batch: pa.concat_tables([pa.Table.from_batches([batch])] * 2))
    assert run_operator(doubled, batch_of(1)) == [batch_of(1), batch_of(1)]
    assert run_operator(MapBatches(lambda batch: None), batch_of(1)) == []
    assert run_operator(MapBatches(lambda batch: batch.slice(0, 0)), batch_of(1)) == []
    large = run_operator(MapBatches(lambda batch: batch_of(*range(BATCH_ROWS_MAX + 1))), batch_of(1))
    assert [len(batch) for batch in large] == [BATCH_ROWS_MAX, 1]


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_map_batches_refuses_any_other_result(on_error: Any) -> None:
    with pytest.raises(WrongResult, match=r"returned a dict: return a pyarrow\.RecordBatch"):
        run_operator(MapBatches(lambda batch: {}, on_error), batch_of(1))


def refuse_three(batch: pa.RecordBatch) -> pa.RecordBatch:
    if 3 in batch.column("v").to_pylist():
        raise ValueError("three")
    return batch


def test_map_batches_fails_with_a_note() -> None:
    with pytest.raises(ValueError, match="three") as caught:
        run_operator(MapBatches(refuse_three), batch_of(1, 3))
    assert caught.value.__notes__ == [
        "raised in operator 'map_batches' by a batch of 2 rows with the columns v"
    ]


def test_map_batches_drops_the_bad_row_alone() -> None:
    lines: list[str] = []
    context = TaskContext("job", "task", 0, 1, 1, log=lines.append)
    calls = Calls(refuse_three)
    out = run_operator(MapBatches(calls, "dead_letter"), batch_of(1, 3, 5), batch_of(7), context=context)
    assert out == [batch_of(1, 5), batch_of(7)]
    assert context.counters.user_errors == {"dead_letter": 1}
    assert lines == ["dead letter: map_batches: ValueError: three: record {'v': 3}"]
    assert [len(batch) for batch in calls.seen] == [3, 1, 1, 1, 1]
