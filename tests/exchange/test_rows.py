"""Keyed rows whose keys stand in the rows travel without a second copy of them."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import RemoteProtocolError
from minishuffle.exchange.rows import pack_keyed_rows, unpack_keyed_rows

ROWS = [("ada", 1, 2.5), ("bob", 2, 2.5), ("ada", 3, None)]


@pytest.mark.parametrize("place", [0, 1])
def test_keys_that_are_a_place_of_their_rows_are_not_sent_twice(place: int) -> None:
    keys = [row[place] for row in ROWS]
    packed = pack_keyed_rows(keys, ROWS)
    assert msgpack.unpackb(packed, use_list=False) == (place, tuple(ROWS))
    assert unpack_keyed_rows(packed) == (keys, ROWS)


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (["ADA", "BOB", "ADA"], ROWS),
        (["ada", "bob", 3], ROWS),
        ([1, 2], [(1, 0), (0, 2)]),
        ([1, 2], [(0, 1), (2,)]),
        ([1, 2], [(1,), {"k": 2}]),
        ([1, 2], [1, 2]),
        ([], []),
    ],
)
def test_other_keys_are_sent_as_they_are(keys: list[Any], rows: list[Any]) -> None:
    packed = pack_keyed_rows(keys, rows)
    assert msgpack.unpackb(packed, use_list=False, strict_map_key=False)[0] == tuple(keys)
    assert unpack_keyed_rows(packed) == (keys, rows)


@given(
    st.lists(st.tuples(st.text(max_size=5), st.integers(-9, 9), st.booleans()), max_size=20),
    st.integers(0, 2),
)
def test_any_rows_keep_their_keys(rows: list[tuple[Any, ...]], place: int) -> None:
    keys = [row[place] for row in rows]
    assert unpack_keyed_rows(pack_keyed_rows(keys, rows)) == (keys, rows)


@pytest.mark.parametrize(
    "value", [(3, ((1, 2),)), (0, (5,)), (-1, ((1,),)), (0, ({"k": 1},)), ("0", ((1,),)), (0,)]
)
def test_a_place_that_is_not_there_is_the_peers_fault(value: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="keyed rows cannot be unpacked"):
        unpack_keyed_rows(msgpack.packb(value))
