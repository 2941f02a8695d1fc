"""The order of rows against Python's, of all types that have one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.operators.row_order import has_order, row_order

NUMBERS = st.none() | st.sampled_from([-math.inf, -1.0, 0.0, 2.5, math.inf, math.nan])


def rank(value: float | None) -> Any:
    if value is None:
        return (0, 0.0)
    return (2, 0.0) if math.isnan(value) else (1, value)


@given(
    st.lists(st.tuples(st.integers(0, 2), NUMBERS, NUMBERS)),
    st.sampled_from(["ascending", "descending"]),
    st.sampled_from([pa.float16(), pa.float32(), pa.float64()]),
)
def test_a_null_is_smaller_than_all_values_and_nan_is_greater(
    rows: list[Any], direction: str, kind: pa.DataType
) -> None:
    numbers, some, others = ([row[place] for row in rows] for place in range(3))
    columns = [
        pa.array(numbers, pa.int64()),
        pa.array(some, pa.float64()).cast(kind),
        pa.array(others, pa.float64()),
    ]
    wanted = sorted(range(len(rows)), key=lambda row: rank(others[row]))
    wanted.sort(key=lambda row: rank(some[row]), reverse=direction == "descending")
    wanted.sort(key=lambda row: numbers[row])
    order = row_order(columns, ["ascending", direction, "ascending"])
    assert order.dtype == np.int64
    assert [(numbers[row], rank(some[row]), rank(others[row])) for row in order] == [
        (numbers[row], rank(some[row]), rank(others[row])) for row in wanted
    ]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.5, 0.5, None]).cast(pa.float16()),
        pa.array([2, 1, None], pa.decimal32(3)),
        pa.array([2, 1, None], pa.decimal64(3)),
        pa.array(["b", "a", None], pa.string_view()),
        pa.array([b"b", b"a", None], pa.binary_view()),
        pa.array(["b", "a", None]).dictionary_encode(),
        pa.array([True, False, None]),
        pa.array([2, 1, None], pa.duration("s")),
        pa.array([2, 1, None], pa.time32("s")),
    ],
    ids=lambda column: str(column.type),
)
def test_values_of_all_types_are_ordered(column: pa.Array) -> None:
    assert has_order(column.type)
    assert row_order([column], ["ascending"]).tolist() == [2, 1, 0]
    assert row_order([pa.chunked_array([column, column])], ["descending"]).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[2], [1]]),
        pa.array([{"a": 2}, {"a": 1}]),
        pa.nulls(2),
        pa.array([(2, 0, 0), (1, 0, 0)], pa.month_day_nano_interval()),
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"b" * 16, b"a" * 16], pa.binary(16))),
    ],
    ids=lambda column: str(column.type),
)
def test_columns_without_an_order_are_left_out(column: pa.Array) -> None:
    assert not has_order(column.type)
    assert row_order([pa.array([1, 1]), column], ["ascending", "ascending"]).tolist() == [0, 1]
