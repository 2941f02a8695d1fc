"""Copies share nothing that can be changed, and what cannot be is not copied."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.exchange.batch import Batch
from minishuffle.operators.row_copies import copied, own_rows, set_apart


class Pair(NamedTuple):
    left: Any
    right: Any


FIXED = st.none() | st.integers() | st.text(max_size=2) | st.binary(max_size=2)
VALUES = st.recursive(
    FIXED,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(Counter)
        | st.binary(max_size=2).map(bytearray)
    ),
    max_leaves=10,
)


def changeable(value: Any) -> set[int]:
    found = {id(value)} if isinstance(value, dict | list | bytearray) else set()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return found.union(*map(changeable, inner))


@given(VALUES)
def test_a_copy_is_equal_and_shares_nothing_that_can_be_changed(value: Any) -> None:
    new = copied(value)
    assert new == value
    assert type(new) is type(value)
    assert not changeable(new) & changeable(value)


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(VALUES, min_size=4, max_size=4), st.booleans())
def test_rows_that_repeat_objects_are_set_apart(places: list[int], pool: list[Any], inside: bool) -> None:
    rows = [{"in": pool[place]} if inside else pool[place] for place in places]
    for apart in (set_apart(rows), own_rows(Batch(rows)).payload):
        assert apart == rows
        held = [changeable(row) for row in apart]
        assert sum(map(len, held)) == len(set().union(*held))


@pytest.mark.parametrize(
    "rows", [["a", "b"], [(1, "a"), (2, None)], [1, (2, (3, "x"))], [((1, 2), b""), ((3,), b"")], []]
)
def test_what_cannot_be_changed_is_not_copied(rows: list[Any]) -> None:
    batch = Batch(rows)
    assert own_rows(batch) is batch
    assert all(new is old for new, old in zip(set_apart(rows * 2), rows * 2, strict=True))


def test_tuples_of_scalars_are_themselves_beside_what_is_copied() -> None:
    pair, row = (1, "a"), {"pair": (1, 2)}
    new = own_rows(Batch([pair, row])).payload
    assert new[0] is pair
    assert new[1] is not row
    assert new[1]["pair"] is row["pair"]


def test_a_subclass_keeps_what_else_it_knows() -> None:
    groups = defaultdict(list, {"a": [1]})
    new = copied(groups)
    new["a"].append(2)
    new["b"].append(3)
    assert groups == {"a": [1]}
    assert new == {"a": [1, 2], "b": [3]}


def test_arrow_and_objects_of_the_users_are_left_alone() -> None:
    batch = Batch(pa.RecordBatch.from_pydict({"a": [1]}))
    assert own_rows(batch) is batch
    (found,) = own_rows(Batch([{1, 2}])).payload
    assert found == {1, 2}
