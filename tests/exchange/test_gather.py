"""Rows that are taken out of batches of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.exchange.elements import KeyedRows
from minishuffle.exchange.gather import chosen, take, taken

BATCH = pa.record_batch(
    {
        "view": pa.array(["a", None, "c", "d"], pa.string_view()),
        "bytes": pa.array([b"", b"\xff", None, b"x"], pa.binary_view()),
        "number": pa.array([1, 2, 3, None]),
        "nested": pa.array([[1], None, [2, 3], []]),
    }
)


@pytest.mark.parametrize("rows", [[], [2], [3, 1, 1, 0], [0, 1, 2, 3]], ids=str)
def test_rows_in_the_order_that_was_asked_for(rows: list[int]) -> None:
    found = taken(BATCH, np.array(rows, dtype=np.int64))
    assert found.schema == BATCH.schema
    found.validate(full=True)
    assert found.to_pylist() == [BATCH.to_pylist()[row] for row in rows]


def test_columns_may_begin_in_the_middle() -> None:
    part = BATCH.slice(1, 2)
    assert taken(part, np.array([1, 0])).to_pylist() == part.to_pylist()[::-1]


@pytest.mark.parametrize("mask", [[False] * 4, [True, False, False, True], [True] * 4], ids=str)
@pytest.mark.parametrize("batch", [BATCH, list("abcd"), KeyedRows([1, 2, 3, 4], list("abcd"))], ids=type)
def test_rows_for_which_a_mask_holds(batch: Any, mask: list[bool]) -> None:
    found = chosen(batch, np.array(mask))
    assert type(found) is type(batch)
    kept = [row for row in range(4) if mask[row]]
    if isinstance(batch, KeyedRows):
        assert found == KeyedRows([row + 1 for row in kept], ["abcd"[row] for row in kept])
    elif isinstance(batch, list):
        assert found == ["abcd"[row] for row in kept]
    else:
        assert found.to_pylist() == [batch.to_pylist()[row] for row in kept]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.struct([("a", pa.string_view())]), [{"a": "x"}, None, {"a": None}]),
        (pa.list_(pa.binary_view()), [[b"x", None], None, []]),
        (pa.map_(pa.string(), pa.string_view()), [[("k", "v")], None, []]),
    ],
    ids=str,
)
def test_views_inside_of_other_types(kind: pa.DataType, values: list[Any]) -> None:
    found = take(pa.array(values, kind), pa.array([2, 0, 0, 1]))
    assert found.type == kind
    assert found.to_pylist() == [values[2], values[0], values[0], values[1]]
