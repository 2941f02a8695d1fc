"""Rows arrive as what they were; keys that stand in the rows travel without a second copy of them."""

from __future__ import annotations

import re
from collections import Counter
from datetime import date, datetime, timedelta
from http import HTTPStatus
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import RemoteProtocolError, UnserializableRecord
from minishuffle.exchange.rows import (
    pack_each,
    pack_keyed_rows,
    pack_result,
    pack_rows,
    preview,
    unpack_keyed_rows,
    unpack_result,
    unpack_rows,
)

ROWS = [("ada", 1, 2.5), ("bob", 2, 2.5), ("ada", 3, None)]


@pytest.mark.parametrize("place", [0, 1])
def test_keys_that_are_a_place_of_their_rows_are_not_sent_twice(place: int) -> None:
    keys = [row[place] for row in ROWS]
    packed = pack_keyed_rows(keys, ROWS)
    assert msgpack.unpackb(packed, use_list=False) == (place, tuple(ROWS))
    assert unpack_keyed_rows(packed) == (keys, ROWS)


@pytest.mark.parametrize("rows", [["ada", "bob"], ROWS, [("ada", (1, 2)), ("bob", (3, 4))], [1, "a"]])
def test_rows_that_are_their_own_keys_are_not_sent_twice(rows: list[Any]) -> None:
    for keys in (rows, list(rows)):
        packed = pack_keyed_rows(keys, rows)
        assert msgpack.unpackb(packed, use_list=False) == (-1, tuple(rows))
        assert unpack_keyed_rows(packed) == (rows, rows)


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (["ADA", "BOB", "ADA"], ROWS),
        (["ada", "bob", 3], ROWS),
        ([1, 2], [(1, 0), (0, 2)]),
        ([1, 2], [(0, 1), (2,)]),
        ([1, 2], [(1,), {"k": 2}]),
        ([1, 2], [1, 3]),
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
    "value", [(3, ((1, 2),)), (0, (5,)), (-2, ((1,),)), (0, ({"k": 1},)), ("0", ((1,),)), (0,)]
)
def test_a_place_that_is_not_there_is_the_peers_fault(value: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="keyed rows cannot be unpacked"):
        unpack_keyed_rows(msgpack.packb(value))


class Point(NamedTuple):
    x: int
    y: list[int]


class Name(str):
    """A text of the user's own."""


class Tags(list[Any]):
    """A list of the user's own."""


def types_in(value: Any) -> Any:
    """The types of a value and of all values in it."""
    if isinstance(value, dict):
        return dict, [(types_in(key), types_in(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types_in(each) for each in value]
    return type(value)


NESTED = st.recursive(
    st.none() | st.integers(-(2**70), 2**70) | st.text(max_size=3) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.tuples(st.integers(0, 3)), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.lists(NESTED, max_size=6), st.integers(0, 3), st.sampled_from([1, 50]))
def test_lists_stay_lists_and_tuples_tuples(rows: list[Any], keys: int, times: int) -> None:
    rows = rows * times
    back = unpack_rows(pack_rows(rows))
    assert back == rows
    assert types_in(back) == types_in(rows)
    names = [[number, (1, "a"), "k", None][keys] for number in range(len(rows))]
    found = unpack_keyed_rows(pack_keyed_rows(names, rows))
    assert found == (names, rows)
    assert types_in(found) == types_in((names, rows))
    assert types_in(unpack_result(pack_result(rows))) == types_in(rows)


@given(st.lists(st.one_of(NESTED, st.tuples(NESTED, NESTED), st.integers(0, 1 << 70)), max_size=20))
def test_each_value_is_packed_alone(values: list[Any]) -> None:
    back = [unpack_rows(packed) for packed in pack_each(values)]
    assert back == [[value] for value in values]
    assert types_in(back) == types_in([[value] for value in values])


def test_a_value_that_cannot_be_packed_is_named() -> None:
    with pytest.raises(UnserializableRecord, match="it holds a"):
        pack_each(["ada", {1}])


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Counter("ab"), "Counter, which would be of type dict after a restart: keep a plain dict there"),
        ({"a": [Point(1, [])]}, "Point, which would be of type tuple"),
        ((1, Tags([1])), "Tags, which would be of type list"),
        ({"phase": HTTPStatus.OK}, "HTTPStatus, which would be of type int"),
        ([bytearray(b"x")], "bytearray, which would be of type bytes"),
        (pd.Timestamp("2026-01-01"), "Timestamp, which would be of type datetime"),
    ],
)
@pytest.mark.parametrize("among", [[], [1, {"a": (1, [2])}]])
def test_what_would_come_back_as_another_type_can_be_refused(value: Any, what: str, among: list[Any]) -> None:
    assert len(pack_each([*among, value])) == len(among) + 1
    with pytest.raises(UnserializableRecord, match=f"{re.escape(preview(value))} holds a {what}"):
        pack_each([*among, value], alike=True)
    plain = [*among, {"a": [1, (2.5, None)]}, np.float64(0.5), date(2026, 1, 1), True]
    assert pack_each(plain, alike=True) == pack_each(plain)


@given(st.lists(st.tuples(st.integers()), min_size=60, max_size=60), st.integers(0, 59), NESTED)
def test_one_row_among_many_stays_what_it_is(rows: list[Any], place: int, other: Any) -> None:
    rows[place] = other
    assert types_in(unpack_rows(pack_rows(rows))) == types_in(rows)
    keys = list(range(60))
    found = unpack_keyed_rows(pack_keyed_rows(rows, keys))
    assert types_in(found) == types_in((rows, keys))


def test_extensions_of_msgpack_are_not_taken_for_tuples() -> None:
    rows = [msgpack.ExtType(9, b"x"), [1], *([(2,)] * 60)]
    assert types_in(unpack_rows(pack_rows(rows))) == types_in(rows)


@pytest.mark.parametrize("times", [1, 50])
@pytest.mark.parametrize("among", [[], [[1]], [[1], (2,)], [{"a": [1, (2,)]}]])
def test_subclasses_become_their_base_whatever_is_beside_them(among: list[Any], times: int) -> None:
    among = among * times
    rows = [Point(1, []), Name("n"), Tags([1]), Counter("a"), np.float64(0.5), HTTPStatus.OK, *among]
    back = unpack_rows(pack_rows(rows))
    assert back == [(1, []), "n", [1], {"a": 1}, 0.5, 200, *among]
    assert list(map(type, back))[:6] == [tuple, str, list, dict, float, int]


@pytest.mark.parametrize(
    "form", [b"L\x01", b"R\x93\x01\x02\x03", b"M\x01", b"K\x01", b"K\x92\x00\x01", b"Z\x90"]
)
def test_a_marked_value_that_cannot_be_is_the_peers_fault(form: bytes) -> None:
    for unpack in (unpack_rows, unpack_keyed_rows, unpack_result):
        with pytest.raises(RemoteProtocolError, match="cannot be unpacked"):
            unpack(b"\xc1" + form)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    "value",
    [pd.Timestamp("2026-01-01T00:00:00.123456789"), pd.Timestamp(1, unit="ns", tz="UTC"), pd.Timedelta(1)],
    ids=str,
)
def test_nanoseconds_are_refused_rather_than_cut(value: Any, deep: bool) -> None:
    row = {"a": [(value,), [1]]} if deep else value
    with pytest.raises(UnserializableRecord, match="has nanoseconds and Python's times have none: round it"):
        pack_rows([row])


def test_times_of_pandas_without_nanoseconds_become_python_s() -> None:
    rows = [pd.Timestamp("2026-01-01T00:00:00.123456"), pd.Timedelta(microseconds=7)]
    back = unpack_rows(pack_rows(rows))
    assert back == [datetime(2026, 1, 1, 0, 0, 0, 123456), timedelta(microseconds=7)]
    assert list(map(type, back)) == [datetime, timedelta]


def test_what_is_no_time_of_python_s_is_refused() -> None:
    with pytest.raises(UnserializableRecord, match="NaT is no time: put None there"):
        pack_rows([pd.NaT])
    with pytest.raises(UnserializableRecord):
        pack_rows([np.timedelta64(1, "ns")])
