"""Keys of joins: which are one, which have none, how they are numbered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.operators.key_slots import JoinKeys, KeySlots


def of_rows(*keys: Any) -> JoinKeys:
    return JoinKeys.of_rows(list(keys))


def of_columns(*keys: Any) -> JoinKeys:
    return JoinKeys.of_columns([pa.array(keys)])


both = pytest.mark.parametrize("of", [of_rows, of_columns], ids=["rows", "columns"])


@both
def test_new_keys_get_the_next_slots_and_nulls_none(of: Any) -> None:
    slots = KeySlots()
    assert slots.find(of(7, None)).tolist() == [-1, -1]
    assert slots.lookup(of(7, None, 8, 7)).tolist() == [0, -1, 1, 0]
    assert slots.find(of(9, 8, None, 7)).tolist() == [-1, 1, -1, 0]
    assert len(slots) == 2


@both
def test_keys_that_are_kept_are_numbered_anew_in_order(of: Any) -> None:
    slots = KeySlots()
    slots.lookup(of(5, 6, 7, 8))
    slots.keep(np.array([False, True, False, True]))
    assert slots.lookup(of(8, 5, 6)).tolist() == [1, 2, 0]
    slots.keep(np.zeros(3, np.bool_))
    assert len(slots) == 0
    assert slots.find(of(8)).tolist() == [-1]


def test_several_columns_are_one_key_which_is_null_where_one_of_them_is() -> None:
    slots = KeySlots()
    keys = JoinKeys.of_columns([pa.array([1, 1, None, 1]), pa.array(["a", "b", "a", None])])
    assert slots.lookup(keys).tolist() == [0, 1, -1, -1]
    assert [column.to_pylist() for column in slots.columns(np.array([1]))] == [[1], ["b"]]


def test_keys_of_rows_may_be_of_any_kinds() -> None:
    slots = KeySlots()
    given = of_rows(True, (1.0, "a"), ((None,), 1), "1", 1, (1, "a"))
    assert slots.lookup(given).tolist() == [0, 1, -1, 2, 0, 1]
    assert len(slots) == 3


def test_views_of_texts_are_keys_also_beside_nulls() -> None:
    slots = KeySlots()
    slots.lookup(of_columns("a", "b"))
    assert slots.find(JoinKeys.of_columns([pa.array(["b", None], pa.string_view())])).tolist() == [1, -1]
