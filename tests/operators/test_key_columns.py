"""Columns of keys as words: equal keys have equal words, and the words give the keys back."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.errors import WrongColumns
from minishuffle.operators.key_columns import (
    TEXT_WORDS_MAX,
    FixedColumn,
    KeyColumn,
    TextColumn,
    as_far_as_they_fit,
    exactly,
    key_column,
    null_marks,
)

LONG = "x" * (8 * TEXT_WORDS_MAX)
COLUMNS: dict[str, tuple[pa.Array, type[KeyColumn]]] = {
    "integers": (pa.array([1, -1, 2**63 - 1, None]), FixedColumn),
    "bytes": (pa.array([-128, 127], pa.int8()), FixedColumn),
    "unsigned": (pa.array([0, 2**64 - 1], pa.uint64()), FixedColumn),
    "truths": (pa.array([True, None, False]), FixedColumn),
    "floats": (pa.array([1.5, float("inf"), None], pa.float32()), FixedColumn),
    "dates": (pa.array([date(2026, 1, 1), None]), FixedColumn),
    "moments": (pa.array([datetime(2026, 1, 1), None], pa.timestamp("ns")), FixedColumn),
    "nulls": (pa.nulls(3), FixedColumn),
    "texts": (pa.array(["", "a", "é" * 20, None, LONG, LONG + "y"]), TextColumn),
    "views": (pa.array(["a", LONG], pa.string_view()), TextColumn),
    "fixed": (pa.array([b"abc", None], pa.binary(3)), TextColumn),
    "decimals": (pa.array([Decimal("1.50"), None], pa.decimal128(20, 2)), TextColumn),
    "identifiers": (pa.array([UUID(int=7).bytes, None], pa.uuid()), TextColumn),
}


def words_of(column: KeyColumn, keys: pa.Array) -> Any:
    column.widen(column.width_for(keys))
    words = np.zeros((len(keys), column.width), np.int64)
    column.write_words(keys, words, 0)
    return words


@pytest.mark.parametrize("name", COLUMNS)
def test_words_give_the_keys_back(name: str) -> None:
    keys, kind = COLUMNS[name]
    column = key_column(keys.type)
    assert type(column) is kind
    words = words_of(column, keys)
    assert column.array(words).equals(keys)
    assert column.array(words[::-1]).to_pylist() == keys.to_pylist()[::-1]


@pytest.mark.parametrize("name", sorted(COLUMNS.keys() - {"nulls"}))
def test_other_keys_have_other_words(name: str) -> None:
    keys, _ = COLUMNS[name]
    words = words_of(key_column(keys.type), keys)
    assert len({row.tobytes() for row in words}) == len(keys)


def test_zeros_and_nans_have_one_word_each() -> None:
    other_nan = np.array([0x7FF8000000000001], np.int64).view(np.float64)[0]
    words = words_of(key_column(pa.float64()), pa.array([0.0, -0.0, float("nan"), other_nan]))
    assert words[0, 0] == words[1, 0] and words[2, 0] == words[3, 0] != words[0, 0]


def test_a_null_needs_a_word_of_its_own_once_there_is_one() -> None:
    column = key_column(pa.int64())
    assert column.width_for(pa.array([0, 1])) == 1
    keys = pa.array([0, None])
    found = column.beyond(keys)
    assert found is not None and found.tolist() == [False, True]
    words = words_of(column, keys)
    assert (column.width, column.beyond(keys)) == (2, None)
    assert words.tolist() == [[0, 0], [0, 1]]


def test_long_texts_have_a_number() -> None:
    column = key_column(pa.string())
    assert (column.width_for(pa.array(["1234567", "12345678"])), column.numbered) == (2, 0)
    words = words_of(column, pa.array([LONG, "a", LONG, LONG + "y"]))
    assert column.numbered == 2
    assert words[0].tolist() == words[2].tolist() != words[3].tolist()


def test_marks_of_nulls_are_there_if_a_null_is() -> None:
    assert null_marks(pa.array([1, 2])) is None
    marks = null_marks(pa.array([1, None]))
    assert marks is not None and marks.tolist() == [False, True]


@pytest.mark.parametrize(
    ("keys", "kind", "expected"),
    [
        (pa.array([1, 2]), pa.int8(), pa.array([1, 2], pa.int8())),
        (pa.array([1, 300]), pa.int8(), None),
        (pa.array([1.0, 2.0]), pa.int64(), pa.array([1, 2])),
        (pa.array([1.5]), pa.int64(), None),
        (pa.array([2**53 + 1]), pa.float64(), None),
        (pa.array(["a"]), pa.int64(), None),
        (pa.array(["a"]), pa.large_string(), pa.array(["a"], pa.large_string())),
        (pa.nulls(2), pa.int64(), pa.array([None, None], pa.int64())),
    ],
)
def test_keys_have_another_type_if_all_are_equal_there(
    keys: pa.Array, kind: pa.DataType, expected: Any
) -> None:
    assert exactly(keys, kind) == expected


def test_keys_that_have_no_equal_in_another_type_are_marked() -> None:
    for keys, kind, marks in (
        (pa.array([1, 300, None]), pa.int8(), [False, True, False]),
        (pa.array([1.0, 1.5]), pa.int64(), [False, True]),
        (pa.array(["a", None]), pa.int64(), [True, False]),
    ):
        cast, beyond = as_far_as_they_fit(keys, kind)
        assert (cast.type, beyond.tolist()) == (kind, marks)


def test_lists_are_no_keys() -> None:
    with pytest.raises(WrongColumns, match="cannot be a key"):
        key_column(pa.list_(pa.int64()))
