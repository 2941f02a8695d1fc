"""Types that hold the values of two others, whichever comes first."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from minishuffle.dataflow.operators.widertype import in_schema, wider, wider_schema
from minishuffle.errors import UsageError


@pytest.mark.parametrize(
    ("some", "other", "expected"),
    [
        (pa.int64(), pa.int64(), pa.int64()),
        (pa.null(), pa.decimal128(3, 1), pa.decimal128(3, 1)),
        (pa.null(), pa.string_view(), pa.string_view()),
        (pa.int64(), pa.float32(), pa.float64()),
        (pa.float16(), pa.float32(), pa.float32()),
        (pa.int8(), pa.uint64(), pa.int64()),
        (pa.int8(), pa.decimal128(2, 1), pa.decimal128(4, 1)),
        (pa.decimal128(4, 3), pa.decimal64(5, 1), pa.decimal128(7, 3)),
        (pa.decimal128(38, 0), pa.decimal128(38, 9), pa.decimal128(38, 9)),
        (pa.decimal256(40, 2), pa.decimal128(5, 4), pa.decimal256(42, 4)),
        (pa.decimal128(4, 3), pa.float64(), None),
        (pa.bool_(), pa.int64(), None),
        (pa.int64(), pa.string(), None),
        (pa.string(), pa.string_view(), pa.large_string()),
        (pa.string(), pa.binary(), None),
        (pa.timestamp("s"), pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC")),
        (pa.timestamp("s", "Asia/Tokyo"), pa.timestamp("s", "Europe/Rome"), pa.timestamp("s", "UTC")),
        (pa.date32(), pa.timestamp("s"), None),
        (pa.list_(pa.null()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.list_(pa.string()), pa.list_(pa.binary()), None),
        (pa.list_(pa.decimal128(4, 3)), pa.list_(pa.float64()), None),
        (pa.list_(pa.int8()), pa.large_list(pa.float64()), pa.large_list(pa.float64())),
        (pa.struct({"a": pa.string()}), pa.struct({"a": pa.binary()}), None),
        (
            pa.struct({"a": pa.int64(), "b": pa.null()}),
            pa.struct({"a": pa.float64(), "b": pa.list_(pa.null())}),
            pa.struct({"a": pa.float64(), "b": pa.list_(pa.null())}),
        ),
    ],
    ids=str,
)
def test_the_wider_type(some: pa.DataType, other: pa.DataType, expected: pa.DataType | None) -> None:
    assert wider(some, other) == expected
    assert wider(other, some) == expected


def test_structs_get_the_fields_of_both() -> None:
    some = pa.struct([pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.int64(), nullable=False)])
    other = pa.struct([("c", pa.string()), pa.field("b", pa.int64(), nullable=False)])
    wide = [("a", pa.int64()), pa.field("b", pa.int64(), nullable=False), ("c", pa.string())]
    assert wider(some, other) == pa.struct(wide)
    assert wider(other, some) == pa.struct([wide[2], wide[1], wide[0]])


def test_the_wider_schema() -> None:
    some = pa.schema([pa.field("a", pa.null()), pa.field("b", pa.int64(), nullable=False)])
    other = pa.schema([("a", pa.string()), ("b", pa.float64())])
    assert wider_schema(None, some, "it") == some
    assert wider_schema(some, other, "it") == wider_schema(other, some, "it") == other
    with pytest.raises(
        UsageError, match="column 'b' of it has values of the types date32\\[day\\] and double"
    ):
        wider_schema(other, pa.schema([("a", pa.string()), ("b", pa.date32())]), "it")
    with pytest.raises(UsageError, match="it has two columns of one name: rename some of a, a"):
        wider_schema(some, pa.schema([("a", pa.null()), ("a", pa.null())]), "it")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.int64(), pa.int64()),
        (pa.float64(), pa.float64()),
        (pa.decimal128(2, 1), pa.decimal128(4, 1)),
        (pa.bool_(), pa.bool_()),
        (pa.null(), pa.bool_()),
    ],
    ids=str,
)
def test_a_column_of_booleans_beside_one_of_numbers_has_ones_and_zeros(
    kind: pa.DataType, expected: pa.DataType
) -> None:
    booleans, numbers = pa.schema([("a", pa.bool_())]), pa.schema([("a", kind)])
    wide = pa.schema([("a", expected)])
    assert wider_schema(booleans, numbers, "it") == wider_schema(numbers, booleans, "it") == wide
    batch = pa.RecordBatch.from_pydict({"a": [True, False, None]})
    assert in_schema(batch, wide, "it")["a"].to_pylist() == [1, 0, None]


def test_a_column_of_one_schema_alone_may_be_null() -> None:
    some = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    other = pa.schema([pa.field("b", pa.int64(), nullable=False)])
    assert wider_schema(some, other, "it") == pa.schema([("a", pa.int64()), ("b", pa.int64())])


@pytest.mark.parametrize("kind", [pa.RecordBatch, pa.Table])
def test_what_a_batch_lacks_is_null_and_what_does_not_fit_refused(kind: Any) -> None:
    schema = pa.schema({"a": pa.float64(), "b": pa.string(), "c": pa.string()})
    names = pa.array(["x"]).dictionary_encode()
    found = in_schema(kind.from_pydict({"c": names, "a": pa.array([1])}), schema, "it")
    assert type(found) is kind
    assert found.schema == schema
    assert found.to_pylist() == [{"a": 1.0, "b": None, "c": "x"}]
    with pytest.raises(UsageError, match="column 'a' of it has the type int64, and a value that"):
        in_schema(kind.from_pydict({"a": pa.array([2**53 + 1])}), schema, "it")
