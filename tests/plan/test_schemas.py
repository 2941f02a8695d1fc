"""The schemas that aggregates are said to have are those that they have."""

from __future__ import annotations

from typing import Any, get_args

import pyarrow as pa
import pytest

from minishuffle.operators.base import TaskContext
from minishuffle.operators.chained import Emission
from minishuffle.plan.schemas import aggregated_schema
from support.batches import as_batch, collecting
from support.reducing import aggregating

TABLE = pa.table(
    {
        "text": pa.array(["a", "b", None]).dictionary_encode(),
        "small": pa.array([1, None, 3], pa.int8()),
        "large": pa.array([1, 2, 3], pa.uint64()),
        "real": pa.array([1.5, 2, None], pa.float32()),
        "flag": [True, False, None],
        "amount": pa.array([1, 2, None], pa.decimal128(5, 2)),
        "at": pa.array([1, 2, None], pa.timestamp("ms")),
    }
)
COLUMNS = {
    f"{function}_{name}": (name, function)
    for name in ("small", "large", "real", "flag", "amount", "at")
    for function in ("sum", "count", "min", "max", "mean")
    if name != "at" or function not in ("sum", "mean")
}


@pytest.mark.parametrize("emit", get_args(Emission))
@pytest.mark.parametrize("keys", [("text",), ("large",), ("at", "amount")])
def test_what_is_told_is_what_comes(keys: tuple[str, ...], emit: Emission) -> None:
    out: list[Any] = []
    operator = aggregating(keys, COLUMNS, emit)
    operator.open(TaskContext("job", "task", 0, 1, 1))
    operator.process(as_batch(TABLE.to_batches()[0]), 0, collecting(out))
    operator.finish(collecting(out))
    told = aggregated_schema(TABLE.schema, keys, COLUMNS, at_end=emit == "end")
    assert [batch.schema for batch in out] == [told]
