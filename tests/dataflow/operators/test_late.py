"""What becomes of late records."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from minishuffle.dataflow.operators.base import Side, TaskContext
from minishuffle.dataflow.operators.late import Late
from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Batch

ROWS = [{"t": 1}, {"t": 2}]
BATCHES = [Batch(ROWS, [1, 1]), Batch(pa.RecordBatch.from_pylist(ROWS))]


@pytest.mark.parametrize("batch", BATCHES, ids=["rows", "arrow"])
def test_each_policy(batch: Any) -> None:
    out: list[Any] = []
    context = TaskContext("job", "task", 0, 1, 1)
    Late().take(batch, context, out.append)
    assert out == []
    assert (context.counters.records_late, context.counters.late_dropped) == (2, 2)
    Late("side", "late-1").take(batch, context, out.append)
    (side,) = out
    assert isinstance(side, Side) and side.tag == "late-1" and len(side.batch) == 2
    assert (context.counters.records_late, context.counters.late_dropped) == (4, 2)
    with pytest.raises(UsageError, match=r"a record came too late.*\{'t': 1\}: raise out_of_order="):
        Late("fail").take(batch, context, out.append)
