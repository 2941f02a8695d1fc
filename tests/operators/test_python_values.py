"""Python values as Arrow arrays, whole or refused."""

from __future__ import annotations

import datetime
import enum
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.errors import WrongColumns
from minishuffle.operators.python_values import MISFITS, array_of, check_made, type_of

DAY = datetime.date(2020, 1, 1)
MOMENT = datetime.datetime(2020, 1, 1, 5)
LENGTH = datetime.timedelta(days=1)
PAIRS = pa.map_(pa.string(), pa.int64())
POINT = pa.struct([("x", pa.int64()), ("at", pa.date32())])


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.date32(), MOMENT),
        (pa.date64(), MOMENT),
        (pa.date32(), 5),
        (pa.timestamp("us"), DAY),
        (pa.timestamp("us"), 5),
        (pa.time64("us"), 5),
        (pa.duration("us"), 5),
        (pa.string(), b"b"),
        (pa.large_string(), bytearray(b"b")),
        (pa.binary(), "b"),
        (pa.binary(2), "bb"),
        (pa.float64(), True),
        (pa.float64(), Decimal("0.5")),
        (pa.float32(), 1e300),
        (pa.float16(), -1e5),
        (pa.int64(), True),
        (pa.bool_(), 1),
        (pa.decimal128(3, 1), True),
        (POINT, {"x": 1, "y": 2}),
        (POINT, {"at": MOMENT}),
        (POINT, (1, DAY)),
        (pa.list_(pa.date32()), [DAY, MOMENT]),
        (pa.list_(pa.string()), ["a", b"b"]),
        (pa.list_(pa.string()), "ab"),
        (pa.list_(pa.float32()), np.array([1e300])),
        (pa.list_(pa.int64(), 1), [1.5]),
        (pa.list_view(pa.int64()), [1.5]),
        (PAIRS, [("a", 1.5)]),
        (PAIRS, [(b"a", 1)]),
        (pa.map_(pa.string(), POINT), {"a": {"y": 1}}),
        (pa.dictionary(pa.int32(), pa.int8()), 1.5),
        (pa.dictionary(pa.int32(), pa.string()), b"b"),
        (pa.run_end_encoded(pa.int32(), pa.int8()), 1.5),
    ],
    ids=str,
)
def test_values_that_would_lose_something_are_refused(kind: pa.DataType, value: Any) -> None:
    for values in ([value], [None, value]):
        with pytest.raises(MISFITS):
            array_of(kind, values)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.date64(), DAY),
        (pa.uint64(), 2**64 - 1),
        (pa.list_(pa.uint64()), [2**64 - 1, None]),
        (pa.large_list(pa.uint8()), [255]),
        (pa.list_view(pa.int64()), [1, None]),
        (pa.large_list_view(pa.string()), ["a"]),
        (pa.list_(pa.int64(), 2), [1, 2]),
        (PAIRS, [("a", 1), ("b", None)]),
        (PAIRS, []),
        (pa.map_(pa.int8(), pa.list_(PAIRS)), [(1, [[("a", 1)]])]),
        (POINT, {"x": None, "at": DAY}),
        (pa.float32(), float("inf")),
        (pa.float32(), 1.5),
        (pa.float64(), 2**53),
        (pa.decimal128(3, 1), Decimal("1.5")),
        (pa.decimal128(3, 1), 1),
        (pa.binary(), b"b"),
        (pa.dictionary(pa.int32(), pa.string()), "a"),
        (pa.run_end_encoded(pa.int32(), pa.string()), "a"),
        (pa.null(), None),
        (pa.uuid(), uuid.UUID(int=1)),
        (pa.string(), Colour.RED),
        (pa.int8(), np.int64(5)),
        (pa.float64(), np.float32(0.5)),
        (pa.bool_(), np.True_),
        (pa.timestamp("us"), np.datetime64(5, "us")),
        (pa.duration("ms"), np.timedelta64(5, "ms")),
    ],
    ids=str,
)
def test_values_of_the_type_are_kept(kind: pa.DataType, value: Any) -> None:
    array = array_of(kind, [value, None])
    assert array.type == kind
    assert array.to_pylist() == [value, None]


def test_other_forms_of_values() -> None:
    assert array_of(pa.binary(16), [uuid.UUID(int=1)]).to_pylist() == [uuid.UUID(int=1).bytes]
    assert array_of(PAIRS, [{"a": 1}, (("b", 2),)]).to_pylist() == [[("a", 1)], [("b", 2)]]
    numbers = pa.list_(pa.int16())
    assert array_of(numbers, [np.array([1, 2]), (3,), {4}]).to_pylist() == [[1, 2], [3], [4]]
    with pytest.raises(MISFITS):
        array_of(numbers, [np.array([2**20])])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, Decimal("0.1")], pa.decimal128(21, 1)),
        ([1, 2.5], pa.float64()),
        ([[1], (Decimal("0.1"),), None], pa.list_(pa.decimal128(21, 1))),
        ([{"x": 1}, {"x": Decimal("0.1")}], pa.struct({"x": pa.decimal128(21, 1)})),
        ([np.float32(1), 1.5], pa.float64()),
        ([[], [None]], pa.list_(pa.null())),
        ([None], pa.null()),
        ([{}], pa.struct([])),
    ],
    ids=str,
)
def test_the_type_does_not_depend_on_the_order(values: list[Any], kind: pa.DataType) -> None:
    assert type_of(values) == type_of(values[::-1]) == kind
    assert len(array_of(kind, values)) == len(values)


def test_values_without_a_type() -> None:
    assert type_of([1, "x"]) == pa.int64()
    assert type_of([DAY, MOMENT]) == pa.date32()
    for odd in (object(), {1: 2}):
        with pytest.raises(MISFITS):
            type_of([odd])


@pytest.mark.parametrize(
    ("kind", "is_made"),
    [
        (pa.int64(), True),
        (pa.uuid(), True),
        (pa.bool8(), True),
        (pa.json_(), True),
        (pa.list_(pa.struct({"a": pa.string_view()})), True),
        (pa.dictionary(pa.int8(), pa.string_view()), True),
        (pa.dictionary(pa.int32(), pa.int8()), True),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), True),
        (pa.dictionary(pa.int8(), pa.list_(pa.int8())), False),
        (pa.dictionary(pa.int8(), pa.uuid()), False),
        (pa.struct({"a": pa.uuid()}), False),
    ],
    ids=str,
)
def test_types_that_pyarrow_makes_of_no_python_values_are_refused(kind: pa.DataType, is_made: bool) -> None:
    if is_made:
        check_made(pa.field("x", kind))
        return
    with pytest.raises(WrongColumns, match="column 'x' of type .* cannot be made of Python values"):
        check_made(pa.field("x", kind))


def test_booleans_of_eight_bits_are_made() -> None:
    made = array_of(pa.bool8(), [True, None, False])
    assert (made.type, made.to_pylist()) == (pa.bool8(), [True, None, False])
