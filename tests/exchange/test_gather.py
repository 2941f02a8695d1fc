"""Rows that are taken out of batches of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minishuffle.exchange.gather import take, taken
from support.soak import examples

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
    found = take(pa.array(values, kind), np.array([2, 0, 0, 1]))
    assert found.type == kind
    assert found.to_pylist() == [values[2], values[0], values[0], values[1]]


KINDS = [
    pa.int8(),
    pa.uint16(),
    pa.float32(),
    pa.int64(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.bool_(),
    pa.decimal128(9, 2),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.binary(3),
]
TEXTS = st.text(st.sampled_from(["a", "ß", "\U0001f600"]), max_size=12)


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_fixed_size_binary(kind):
        return st.binary(min_size=3, max_size=3)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return TEXTS
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return TEXTS.map(str.encode)
    return st.booleans() if kind == pa.bool_() else st.integers(0, 100)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=examples(20))
@given(data=st.data())
def test_what_is_taken_is_what_arrow_takes(kind: pa.DataType, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | values_of(kind) if data.draw(st.booleans()) else values_of(kind)))
    column = pa.array(values, kind) if values else pa.array([], kind)
    column = column.slice(data.draw(st.integers(0, len(values))))
    rows = data.draw(st.lists(st.integers(0, len(column) - 1))) if len(column) else []
    found = take(column, np.array(rows, dtype=np.int64))
    found.validate(full=True)
    assert found.equals(column.take(pa.array(rows, pa.int64())))


def test_texts_at_the_very_end_of_their_memory_are_read_no_further() -> None:
    data = np.frombuffer(b"0123456789abc", np.uint8)
    offsets = pa.py_buffer(np.array([0, 10, 12, 13], np.int32))
    column = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(data))
    assert take(column, np.array([2, 1, 0, 2])).to_pylist() == ["c", "ab", "0123456789", "c"]
