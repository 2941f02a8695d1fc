"""Types in types: what is replaced, and what stays."""

from __future__ import annotations

import pyarrow as pa
import pytest

from minishuffle.errors import UsageError
from minishuffle.exchange.schemas import (
    converted,
    decoded,
    long_types,
    require_plain,
    with_columns_of,
    with_innermost,
    with_types,
    without_dictionary,
    without_view,
)

VIEWS = pa.struct([pa.field("a", pa.string_view(), nullable=False), ("b", pa.list_(pa.binary_view()))])
LONG = pa.struct([pa.field("a", pa.large_string(), nullable=False), ("b", pa.list_(pa.large_binary()))])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.int64(), pa.int64()),
        (pa.string_view(), pa.large_string()),
        (VIEWS, LONG),
        (pa.list_(VIEWS, 2), pa.list_(LONG, 2)),
        (pa.large_list(VIEWS), pa.large_list(LONG)),
        (pa.map_(pa.string(), VIEWS, keys_sorted=True), pa.map_(pa.string(), LONG, keys_sorted=True)),
    ],
    ids=str,
)
def test_views_become_long_types_at_any_depth(kind: pa.DataType, expected: pa.DataType) -> None:
    assert with_innermost(kind, without_view) == expected


def test_dictionaries_become_what_they_hold_at_any_depth() -> None:
    texts = pa.dictionary(pa.int32(), pa.string())
    kind = pa.struct([("a", texts), ("b", pa.list_(texts)), ("c", pa.string_view())])
    plain = pa.struct([("a", pa.string()), ("b", pa.list_(pa.string())), ("c", pa.string_view())])
    assert with_innermost(kind, without_dictionary) == plain


RUNS = pa.run_end_encoded(pa.int32(), pa.int64())
UNION = pa.dense_union([pa.field("a", pa.int8()), pa.field("b", pa.string())])


@pytest.mark.parametrize(
    "kind",
    [
        RUNS,
        UNION,
        pa.list_(UNION),
        pa.dictionary(pa.int8(), RUNS),
        pa.struct([("a", pa.int8()), ("b", pa.list_(RUNS))]),
    ],
    ids=str,
)
def test_runs_and_unions_are_refused_at_any_depth(kind: pa.DataType) -> None:
    with pytest.raises(UsageError, match="column 'x' is of type .* decode runs with pyarrow.compute"):
        require_plain(pa.field("x", kind))


@pytest.mark.parametrize("kind", [pa.int64(), VIEWS, pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_other_types_are_taken(kind: pa.DataType) -> None:
    require_plain(pa.field("x", kind))


INDICES = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]


def nested(values: pa.Array, depth: str) -> pa.Array:
    """Four values, behind one that a slice leaves out, at a depth."""
    offsets = pa.array(range(len(values) + 1), pa.int32())
    if depth == "struct":
        values = pa.StructArray.from_arrays([values], ["a"])
    elif depth == "list":
        values = pa.ListArray.from_arrays(offsets, values)
    elif depth == "fixed list":
        values = pa.FixedSizeListArray.from_arrays(values, 1)
    elif depth == "map":
        values = pa.MapArray.from_arrays(offsets, pa.array(range(len(values))), values)
    return values.slice(1)


@pytest.mark.parametrize("depth", ["top", "struct", "list", "fixed list", "map"])
@pytest.mark.parametrize("view", [pa.string_view(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_dictionaries_of_views_are_decoded_and_made(
    index: pa.DataType, view: pa.DataType, depth: str
) -> None:
    held = pa.array([b"b", b"a"], pa.binary()).cast(view)
    given = nested(pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 1, 0], index), held), depth)
    found = decoded(given)
    assert found.to_pylist() == given.to_pylist()
    assert found.type == with_innermost(with_innermost(given.type, without_dictionary), without_view)
    back = converted(found, given.type)
    assert back.type == given.type
    assert back.to_pylist() == given.to_pylist()
    chunked = decoded(pa.chunked_array([given, given]))
    assert chunked.to_pylist() == given.to_pylist() * 2


def test_dictionaries_of_views_become_those_of_long_types() -> None:
    view = pa.dictionary(pa.int8(), pa.string_view(), ordered=True)
    batch = pa.record_batch([pa.array(["a", None]).cast(pa.string_view()).dictionary_encode()], ["x"])
    found = with_columns_of(batch, long_types(batch.schema))
    assert found.column(0).to_pylist() == ["a", None]
    assert found.column(0).type == pa.dictionary(pa.int32(), pa.large_string())
    assert long_types(pa.schema([("x", view), ("y", pa.string_view())])) == [
        pa.dictionary(pa.int8(), pa.large_string(), ordered=True),
        pa.string_view(),
    ]
    plain = pa.record_batch([pa.array([1])], ["x"])
    assert with_columns_of(plain, long_types(plain.schema)) is plain


def test_a_schema_with_other_types_keeps_names_and_nulls() -> None:
    schema = pa.schema([pa.field("a", pa.int8(), nullable=False), ("b", pa.string())], {"m": "1"})
    other = with_types(schema, [pa.int64(), pa.binary()])
    assert other == pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.binary())])
    assert other.metadata == schema.metadata


@pytest.mark.parametrize(
    "held",
    [
        pa.array([[1], None, []]),
        pa.array([{"a": "x"}, None, {"a": None}]),
        pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())),
        pa.array([["x"], None, []], pa.list_view(pa.string())),
        pa.array(["x", None, "y"]).dictionary_encode(),
    ],
    ids=lambda held: str(held.type),
)
def test_dictionaries_of_nested_values_are_decoded(held: pa.Array) -> None:
    given = pa.DictionaryArray.from_arrays(pa.array([2, 0, None, 0], pa.int8()), held)
    values = held.to_pylist()
    assert decoded(given).to_pylist() == [values[2], values[0], None, values[0]]
    assert decoded(pa.chunked_array([given, given])).to_pylist() == given.to_pylist() * 2


def test_a_dictionary_of_nulls_is_nulls() -> None:
    given = pa.DictionaryArray.from_arrays(pa.array([0, None], pa.int8()), pa.nulls(1))
    batch = pa.record_batch([given], ["x"])
    assert with_columns_of(batch, long_types(batch.schema)).column(0) == pa.nulls(2)
