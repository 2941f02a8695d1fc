"""Nulls are found where a schema says that there are none, at any depth, and nowhere else."""

from __future__ import annotations

import pyarrow as pa
import pytest

from minishuffle.operators.misplaced_nulls import misplaced_null

STRICT = pa.field("y", pa.int64(), nullable=False)


def batch(kind: pa.DataType, values: list[object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(values, kind)], ["c"])


@pytest.mark.parametrize(
    "loose, declared, fine, misplaced, place",
    [
        (pa.int64(), pa.field("c", pa.int64(), nullable=False), [1, 2], [1, None], "c"),
        (
            pa.struct([("y", pa.int64())]),
            pa.field("c", pa.struct([STRICT])),
            [{"y": 1}, None],
            [None, {"y": None}],
            "c.y",
        ),
        (pa.list_(pa.int64()), pa.field("c", pa.list_(STRICT)), [[1], None, []], [[1], None, [None]], "c.y"),
        (
            pa.list_(pa.int64(), 1),
            pa.field("c", pa.list_(STRICT, 1)),
            [[1], None],
            [[1], None, [None]],
            "c.y",
        ),
        (
            pa.map_(pa.string(), pa.int64()),
            pa.field("c", pa.map_(pa.string(), STRICT)),
            [[("k", 1)], None, []],
            [[("k", 1)], None, [("k", None)]],
            "c.y",
        ),
        (
            pa.list_(pa.struct([("y", pa.int64())])),
            pa.field("c", pa.list_(pa.struct([STRICT]))),
            [[{"y": 1}, None]],
            [[None, {"y": None}]],
            "c.item.y",
        ),
    ],
    ids=["flat", "struct", "list", "fixed list", "map", "structs in a list"],
)
def test_a_null_is_found_where_none_may_be(
    loose: pa.DataType, declared: pa.Field, fine: list[object], misplaced: list[object], place: str
) -> None:
    schema = pa.schema([declared])
    assert misplaced_null(batch(loose, fine), schema) is None
    assert misplaced_null(batch(loose, misplaced), schema) == place
    assert misplaced_null(batch(loose, misplaced), batch(loose, []).schema) is None


def test_only_the_rows_of_a_slice_count() -> None:
    kind = pa.map_(pa.string(), pa.int64())
    rows = batch(kind, [[("k", None)], [("k", 1)], [("k", None)]])
    schema = pa.schema([pa.field("c", pa.map_(pa.string(), STRICT))])
    assert misplaced_null(rows, schema) == "c.y"
    assert misplaced_null(rows.slice(1, 1), schema) is None
