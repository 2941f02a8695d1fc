"""Slots of keys against a dict: types, nulls, growth, collisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import UsageError
from minishuffle.exchange.keys import canonical
from minishuffle.operators.key_index import KeyIndex

Batches = list[list[pa.Array]]


def rows_of(arrays: Sequence[pa.Array]) -> list[tuple[Any, ...]]:
    return list(zip(*(array.to_pylist() for array in arrays), strict=True))


def check(batches: Batches) -> None:
    """Every slot is what a dict of canonical keys says, and the keys come back in that order; what is not
    there yet is not found."""
    index = KeyIndex()
    slots: dict[Any, int] = {}
    first: list[tuple[Any, ...]] = []
    for arrays in batches:
        expected = []
        known = [slots.get(canonical(row), -1) for row in rows_of(arrays)]
        found = index.find(arrays)
        assert found.dtype == np.int64
        assert found.tolist() == known
        assert len(index) == len(slots)
        for row in rows_of(arrays):
            form = canonical(row)
            if form not in slots:
                slots[form] = len(slots)
                first.append(row)
            expected.append(slots[form])
        found = index.lookup(arrays)
        assert found.dtype == np.int64
        assert found.tolist() == expected
        assert len(index) == len(slots)
    keys = index.keys()
    assert [key.type for key in keys] == [plain(array.type) for array in batches[0]]
    for key in keys:
        key.validate(full=True)
    assert list(map(canonical, rows_of(keys))) == list(map(canonical, first))


def plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


VALUES = [
    (pa.int64(), st.integers(-5, 5)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int64(), st.sampled_from([-(2**63), -(2**63) + 1, 2**63 - 1, 2**63 - 2, 0])),
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint32(), st.integers(0, 2**32 - 1)),
    (pa.uint64(), st.sampled_from([0, 1, 2**63, 2**64 - 1])),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats(width=16)),
    (pa.float32(), st.sampled_from([0.0, -0.0, math.nan, 1.5, math.inf])),
    (pa.float16(), st.floats(width=16)),
    (pa.string(), st.text(max_size=3)),
    (pa.large_string(), st.text(max_size=3)),
    (pa.string_view(), st.text(max_size=3)),
    (pa.string(), st.text("ab\0é", max_size=70)),
    (pa.binary(), st.sampled_from([b"x" * length for length in (6, 7, 8, 62, 63, 64, 65, 255, 256, 257)])),
    (pa.large_string(), st.sampled_from([bit * 63 + end for bit in "ab" for end in ("", "c", "d")])),
    (pa.binary(9), st.binary(min_size=9, max_size=9)),
    (pa.binary(), st.binary(max_size=2)),
    (pa.binary(2), st.binary(min_size=2, max_size=2)),
    (pa.date32(), st.dates(date(2026, 1, 1), date(2026, 1, 4))),
    (pa.date64(), st.dates(date(2026, 1, 1), date(2026, 1, 4))),
    (
        pa.timestamp("us", "UTC"),
        st.datetimes(datetime(2026, 1, 1), datetime(2026, 1, 2)).map(lambda t: t.replace(tzinfo=UTC)),
    ),
    (pa.timestamp("s"), st.sampled_from([datetime(2026, 1, 1), datetime(1, 1, 1)])),
    (pa.decimal128(9, 2), st.decimals(-1, 1, places=2)),
    (pa.decimal64(9, 2), st.decimals(-1, 1, places=2)),
    (pa.decimal256(50, 2), st.decimals(-1, 1, places=2)),
    (pa.null(), st.none()),
]
columns = st.sampled_from(VALUES).map(lambda pair: (pair[0], st.none() | pair[1]))


@st.composite
def batches_of(draw: st.DrawFn, width: st.SearchStrategy[int]) -> Batches:
    kinds = [draw(columns) for _ in range(draw(width))]
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        length, skipped = draw(st.integers(0, 12)), draw(st.integers(0, 2))
        total = length + skipped
        batch = []
        for kind, values in kinds:
            drawn = draw(st.lists(values, min_size=total, max_size=total))
            batch.append(pa.array(drawn, kind).slice(skipped))
        batches.append(batch)
    return batches


@given(batches_of(st.just(1)))
def test_one_column_against_a_dict(batches: Batches) -> None:
    check(batches)


@given(batches_of(st.integers(2, 3)))
def test_several_columns_against_a_dict(batches: Batches) -> None:
    check(batches)


@pytest.mark.parametrize(
    "numbers", [range(0, 3000), range(3000, 0, -1), range(0, 10**7, 997), range(0, -(10**13), -(10**10))]
)
def test_keys_that_keep_coming(numbers: range) -> None:
    values = np.array(numbers, dtype=np.int64)
    parts = [pa.array(np.concatenate((part, part[::-1], values[:5]))) for part in np.array_split(values, 20)]
    check([[part] for part in parts])
    check([[part.cast(pa.string())] for part in parts])
    check([[part, part] for part in parts])


def test_nulls_take_their_place_among_the_new_keys() -> None:
    index = KeyIndex()
    assert index.lookup([pa.array([None, 7, None, 8])]).tolist() == [0, 1, 0, 2]
    assert index.keys()[0].to_pylist() == [None, 7, 8]
    index = KeyIndex()
    assert index.lookup([pa.array([5, 6, None, 8, None])]).tolist() == [0, 1, 2, 3, 2]
    assert index.lookup([pa.array([None, 9], pa.int64())]).tolist() == [2, 4]
    index = KeyIndex()
    assert index.lookup([pa.array([None, None], pa.int64())]).tolist() == [0, 0]
    assert index.lookup([pa.array([0, 3])]).tolist() == [1, 2]
    assert index.keys()[0].to_pylist() == [None, 0, 3]


def test_texts_that_grow_longer_keep_their_slots() -> None:
    index = KeyIndex()
    texts = ["", "a", "a" * 7, "a" * 8, "a\0", None, "b" * 30, "b" * 63, "b" * 64, "c" * 64, "d" * 1000]
    for count in range(1, len(texts) + 1):
        some = pa.array(texts[:count])
        assert index.find([pa.array(texts)]).tolist() == [*range(count - 1), *[-1] * (12 - count)]
        assert index.lookup([some]).tolist() == list(range(count))
        assert index.keys() == [some]
    last = index.keys(np.array([10, 0, 8]))[0]
    assert last.to_pylist() == ["d" * 1000, "", "b" * 64]


def test_more_columns_than_a_word_has_bits_for_nulls() -> None:
    index = KeyIndex()
    rows = [[(row * number) % 5 or None for number in range(70)] for row in range(4)]
    columns = [pa.array(column, pa.int64()) for column in zip(*rows, strict=True)]
    assert index.lookup([column.fill_null(0) for column in columns]).tolist() == [0, 1, 2, 3]
    assert index.lookup(columns).tolist() == [4, 5, 6, 7]
    assert index.keys(np.arange(4, 8)) == columns


def test_zeros_and_nans_are_one_key_each() -> None:
    bits = np.array([0x7FF8_0000_0000_0001, 0xFFF8_0000_0000_0000], dtype=np.uint64).view(np.float64)
    values = pa.array(np.concatenate(([0.0, -0.0], bits, [math.nan])))
    assert KeyIndex().lookup([values]).tolist() == [0, 0, 1, 1, 1]
    assert KeyIndex().lookup([values, values]).tolist() == [0, 0, 1, 1, 1]


def test_keys_are_found_in_any_type_and_are_those_that_came_first() -> None:
    index = KeyIndex()
    assert index.lookup([pa.array([1, 0, 300, None])]).tolist() == [0, 1, 2, 3]
    assert index.find([pa.array([300.0, 1.0, -0.0])]).tolist() == [2, 0, 1]
    assert index.find([pa.array([True, None])]).tolist() == [0, 3]
    assert index.find([pa.array([Decimal("300.00")])]).tolist() == [2]
    assert index.keys() == [pa.array([1, 0, 300, None])]
    words = KeyIndex()
    assert words.lookup([pa.array(["a", "b"])]).tolist() == [0, 1]
    assert words.lookup([pa.array(["b", None, "a"]).dictionary_encode()]).tolist() == [1, 2, 0]
    assert words.find([pa.array(["b"], pa.large_string())]).tolist() == [1]
    assert words.find([pa.nulls(2)]).tolist() == [2, 2]
    moments = KeyIndex()
    assert moments.lookup([pa.array([0, 10**9], pa.timestamp("ns"))]).tolist() == [0, 1]
    assert moments.find([pa.array([1], pa.timestamp("s", "UTC"))]).tolist() == [1]


TOP = 2**53
MIXED = [
    (pa.array([1.0, 2.5]), pa.array([1, 2])),
    (pa.array([1], pa.int8()), pa.array([300, 1])),
    (pa.array([True]), pa.array([5, 1])),
    (pa.array([0.5], pa.float32()), pa.array([0.1])),
    (pa.array([2.0]), pa.array([TOP + 1, 2])),
    (pa.array([1, TOP]), pa.array([1.5], pa.float32())),
    (pa.array([3, 5], pa.uint64()), pa.array([-1, 5])),
    (pa.array([Decimal("1.5"), Decimal("2.0")]), pa.array([Decimal("1.25"), 2])),
    (pa.array([Decimal("1.5")]), pa.array([1000])),
    (pa.array([1], pa.timestamp("s")), pa.array([1, 1000], pa.timestamp("ms"))),
    (pa.array(["a", "b" * 70, None]), pa.nulls(2)),
    (pa.array(["a"]), pa.array(["b", "a"], pa.large_string())),
    (pa.array([b"ab"], pa.binary(2)), pa.array([b"abc", b"ab"])),
    (pa.array(["a"]), pa.array([b"a"])),
    (pa.array([1]), pa.array(["1"])),
    (pa.array([date(2026, 1, 1)]), pa.array([datetime(2026, 1, 1)])),
    (pa.array([TOP + 1]), pa.array([2.5])),
    (pa.array([Decimal("0.1")]), pa.array([0.1])),
    (pa.array([2**64 - 1], pa.uint64()), pa.array([-1])),
]


@pytest.mark.parametrize(("some", "others"), MIXED, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_keys_of_one_type_are_found_in_another(some: pa.Array, others: pa.Array, turned: bool) -> None:
    held, asked = (others, some) if turned else (some, others)
    index = KeyIndex()
    slots: dict[Any, int] = {}
    expected = [slots.setdefault(canonical(value), len(slots)) for value in held.to_pylist()]
    assert index.lookup([held]).tolist() == expected
    found = [slots.get(canonical(value), -1) for value in asked.to_pylist()]
    assert index.find([asked]).tolist() == found
    assert index.keys() == [pa.array(list(dict.fromkeys(held.to_pylist())), held.type)]


@pytest.mark.parametrize(
    ("held", "asked", "found"),
    [
        (pa.array([1, 2]), pa.array([1.5, 2.0, math.nan, 1e300, None]), [-1, 1, -1, -1, -1]),
        (pa.array([1, None], pa.int8()), pa.array([257, 1, None]), [-1, 0, 1]),
        (pa.array([True]), pa.array([5, 1]), [-1, 0]),
        (pa.array([Decimal("1.5"), 3]), pa.array([2**62, 3]), [-1, 1]),
        (pa.array([Decimal("1.5"), 1]), pa.array([True, False]), [1, -1]),
        (pa.array([Decimal("1.5")]), pa.array([1.5, 1.55], pa.float64()), [0, -1]),
        (pa.array([Decimal("1.5")]), pa.array([1.5, 2.0]).cast(pa.float16()), [0, -1]),
        (pa.array([0.5]), pa.array([Decimal("0.1"), Decimal("0.5")]), [-1, 0]),
        (
            pa.array([True, None]),
            pa.array([1, Decimal("0.5"), 10**30, None], pa.decimal128(38, 1)),
            [0, -1, -1, 1],
        ),
        (pa.array([0.5]).cast(pa.float16()), pa.array([Decimal("0.1"), Decimal("0.5")]), [-1, 0]),
        (pa.array([True]), pa.array([], pa.decimal128(3, 1)), []),
        (
            pa.array([Decimal(1)], pa.decimal32(5, 2)),
            pa.array([1, Decimal("1.005")], pa.decimal128(38, 10)),
            [0, -1],
        ),
        (
            pa.array([Decimal(1)], pa.decimal128(5, 2)),
            pa.array([1, Decimal("1.005")], pa.decimal256(76, 40)),
            [0, -1],
        ),
        (pa.array([Decimal(1)], pa.decimal32(5, 2)), pa.array([1, 10**8, 2**62]), [0, -1, -1]),
        (pa.array([Decimal(1)], pa.decimal64(9, 2)), pa.array([1, 10**30], pa.decimal128(38, 2)), [0, -1]),
        (pa.array([b"ab"], pa.binary(2)), pa.array([b"abc", b"ab", None]), [-1, 0, -1]),
        (pa.array(["1", None]), pa.array([1, None]), [-1, 1]),
        (pa.nulls(1), pa.array([1, None]), [-1, 0]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_not_there(held: pa.Array, asked: pa.Array, found: list[int]) -> None:
    index = KeyIndex()
    index.lookup([held])
    assert index.find([asked]).tolist() == found
    assert index.keys() == [held]


@pytest.mark.parametrize(
    ("kind", "other", "values"),
    [
        (pa.time32("s"), pa.time64("ns"), [time(1), None, time(23, 59, 59)]),
        (pa.time32("ms"), pa.time64("us"), [time(1, 0, 0, 5000), None, time(0)]),
        (pa.duration("s"), pa.duration("us"), [timedelta(days=-1), timedelta(0), None]),
        (pa.duration("ms"), pa.duration("ns"), [timedelta(seconds=-1), timedelta(0), None]),
        (pa.uuid(), pa.uuid(), [UUID(int=7), None, UUID(int=(1 << 128) - 1), UUID(int=0)]),
        (pa.bool8(), pa.bool_(), [True, None, False]),
        (pa.bool8(), pa.int64(), [True, None, False]),
    ],
    ids=str,
)
def test_keys_of_all_kinds_come_back_and_are_found_in_other_types(
    kind: pa.DataType, other: pa.DataType, values: list[Any]
) -> None:
    def made(of: pa.DataType) -> pa.Array:
        return pa.array(values, pa.bool_()).cast(of) if pa.bool8() in (kind, of) else pa.array(values, of)

    index = KeyIndex()
    given = made(kind)
    assert index.lookup([pa.concat_arrays([given, given.slice(1)])]).tolist() == [
        *range(len(values)),
        *range(1, len(values)),
    ]
    assert index.keys() == [given]
    assert index.find([made(other)]).tolist() == list(range(len(values)))


def test_whatever_stands_for_true_is_one_key() -> None:
    index = KeyIndex()
    stored = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([5, 1, -1, 0], pa.int8()))
    assert index.lookup([stored]).tolist() == [0, 0, 0, 1]
    assert index.find([pa.array([1, 0, 5])]).tolist() == [0, 1, -1]


@pytest.mark.parametrize("make", [pa.timestamp, pa.duration])
def test_far_times_are_not_found_by_what_they_are_modulo_64_bits(make: Any) -> None:
    wrapped = 2**61  # times 10**9 that is 0 in 64 bits
    index = KeyIndex()
    index.lookup([pa.array([0, 1], pa.int64()).cast(make("ns"))])
    assert index.find([pa.array([0, wrapped], pa.int64()).cast(make("s"))]).tolist() == [0, -1]


def test_a_type_that_cannot_be_a_key() -> None:
    with pytest.raises(UsageError, match="a column of type list.* cannot be a key"):
        KeyIndex().lookup([pa.array([[1]])])


def test_nothing_was_looked_up() -> None:
    index = KeyIndex()
    assert len(index) == 0
    assert index.keys() == []
    assert index.lookup([pa.array([], pa.string())]).tolist() == []
    assert index.keys() == [pa.array([], pa.string())]
