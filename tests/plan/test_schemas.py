"""Schemas as they are declared, and those that aggregates are said to have: they are those that they have."""

from __future__ import annotations

from typing import Any, get_args

import pyarrow as pa
import pytest

from minishuffle.errors import UsageError
from minishuffle.operators.base import TaskContext
from minishuffle.operators.chained import Emission
from minishuffle.plan.schemas import aggregated_schema, arrow_schema, check_result, with_schema
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


# --- declared ---------------------------------------------------------------------------------------


def test_a_schema_is_arrow_s_or_a_map_of_types() -> None:
    expected = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.float32()), ("d", pa.binary())])
    for schema in (expected, {"a": int, "b": str, "c": "float32", "d": pa.binary()}):
        assert arrow_schema(schema) == expected


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({}, "takes a pyarrow.Schema"),
        ([int], "takes a pyarrow.Schema"),
        ({"a": list}, "no type for the column 'a'"),
        ({"a": "int63"}, "no type for the column 'a'"),
        (pa.schema([("a", pa.int64()), ("a", pa.string())]), "there are two columns 'a'"),
    ],
)
def test_other_schemas_are_refused(schema: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        arrow_schema(schema)


def test_an_argument_that_is_left_out_is_no_schema() -> None:
    declared = with_schema({"a": int}, lambda schema: schema, lambda: pa.schema({}))
    assert declared == pa.schema({"a": pa.int64()})
    assert with_schema(None, lambda schema: schema, lambda: pa.schema({"b": "string"})).names == ["b"]
    with pytest.raises(UsageError, match="takes a pyarrow.Schema"):
        with_schema({}, lambda schema: schema, lambda: pa.schema({}))


def test_a_result_has_no_two_columns_of_one_name() -> None:
    check_result(["k", "n"])
    with pytest.raises(UsageError, match="^the result would have two columns 'n', .* being k, n, n: ch"):
        check_result(["k", "n", "n"])
