"""Canonical keys: one form and one hash for equal keys, in rows of any kind; what cannot be a key."""

from __future__ import annotations

import enum
import math
from collections import Counter
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import UsageError
from minishuffle.exchange.keys import (
    canonical,
    canonical_rows,
    hash_columns,
    hash_rows,
    stable_hash,
)


class Colour(str, enum.Enum):  # noqa: UP042 (its str() is not its value)
    RED = "red"


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (True, 1),
        (np.int16(7), 7),
        (np.bool_(True), 1),
        (np.float32(0.5), 0.5),
        (np.float64(3), 3),
        (np.str_("a"), "a"),
        (Colour.RED, "red"),
        (-0.0, 0),
        (2.0**70, 2**70),
        (Decimal("1.500"), 1.5),
        (Decimal("1E+2"), 100),
        (Decimal("0.10"), Decimal("0.1")),
        (Decimal("-0.0"), 0),
        (Decimal("Infinity"), math.inf),
        (Pair(1, 2.0), (1.0, 2)),
        (datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), datetime(2026, 1, 1, tzinfo=UTC)),
    ],
    ids=repr,
)
def test_equal_keys_have_one_form(left: Any, right: Any) -> None:
    assert left == right
    assert canonical(left) == canonical(right)
    assert stable_hash(left) == stable_hash(right)
    assert len({canonical(left), canonical(right)}) == 1


def test_all_nans_are_one_key() -> None:
    nans = [math.nan, -math.nan, float("nan"), np.float32("nan"), Decimal("NaN"), Decimal("sNaN")]
    assert len({canonical(nan) for nan in nans}) == 1
    assert len({canonical((nan, 1)) for nan in nans}) == 1
    assert {stable_hash(nan) for nan in nans} == {stable_hash(math.nan)}
    bits = np.array([0x7FF8_0000_0000_0001, 0xFFF8_0000_0000_0000], dtype=np.uint64)
    assert set(hash_columns([pa.array(bits.view(np.float64))]).tolist()) == {stable_hash(math.nan)}


def test_a_clock_hour_that_comes_twice_is_two_keys() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    second = first.replace(fold=1)
    assert canonical(first) == datetime(2026, 10, 25, 0, 30)
    assert canonical(second) == datetime(2026, 10, 25, 1, 30)
    assert len(set(canonical_rows([first, second]))) == 2
    assert len(set(hash_rows([first, second]).tolist())) == 2


def test_the_ends_of_the_calendar() -> None:
    early = datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))
    same = (datetime.min + timedelta(hours=1)).replace(tzinfo=timezone(timedelta(hours=2)))
    assert canonical(early) == canonical(same)
    assert stable_hash(early) == stable_hash(same) != stable_hash(datetime.min)


different = [
    0,
    0.5,
    "0",
    b"0",
    None,
    (),
    (0,),
    (0, 0),
    (None,),
    "",
    b"",
    date(1970, 1, 1),
    datetime(1970, 1, 1),
    time(0),
    time(0, 0, 0, 1),
    timedelta(0),
    timedelta(microseconds=1),
    UUID(int=0),
]

different += [2**64, -(2**64), Decimal("0.1"), 0.1, math.nan, math.inf, "1970-01-01", ("",), (b"",), ((),)]


def test_different_keys_stay_different() -> None:
    assert len({canonical(key) for key in different}) == len(different)
    assert len({stable_hash(key) for key in different}) == len(different)


@pytest.mark.parametrize("key", [{}, [1], {1}, Ellipsis, 1j, (1, [2])], ids=repr)
def test_what_cannot_be_a_key(key: Any) -> None:
    named = "list" if isinstance(key, tuple) else type(key).__name__
    for call in (
        canonical,
        stable_hash,
        lambda key: canonical_rows([key]),
        lambda key: hash_rows(["a", key]),
    ):
        with pytest.raises(UsageError, match=f"a key of type {named} cannot be hashed: key by bool, int"):
            call(key)


def test_a_time_of_day_with_a_time_zone_is_no_key() -> None:
    for call in (
        canonical,
        stable_hash,
        lambda key: hash_rows([key]),
        lambda key: canonical_rows([(1, key)]),
    ):
        with pytest.raises(
            UsageError, match="a key of time 12:00:00.00:00 has a time zone: key by a datetime"
        ):
            call(time(12, tzinfo=UTC))
    assert canonical(time(1, fold=1)) == time(1)
    assert stable_hash(time(1, fold=1)) == stable_hash(time(1))


def test_a_decimal_of_too_many_digits() -> None:
    with pytest.raises(UsageError, match="more than 4300 digits"):
        stable_hash(Decimal("1E+999999999"))


numbers = st.one_of(
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(allow_nan=False),
    st.floats(-3, 3, width=16),
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20),
    st.sampled_from([Decimal("0.5"), Decimal("1.0"), 2.0**63, 2**63, 2.0**64, -(2.0**63), Decimal("1E+3")]),
)

plain_keys = st.one_of(
    numbers,
    st.none(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.dates(),
    st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=5))])),
)

any_keys = st.recursive(plain_keys, lambda inner: st.tuples(inner) | st.tuples(inner, inner), max_leaves=3)


@given(st.lists(any_keys, min_size=2, max_size=6))
def test_canonical_forms_are_equal_where_the_keys_are(keys: list[Any]) -> None:
    for left in keys:
        for right in keys:
            same = left == right
            assert (canonical(left) == canonical(right)) is same
            assert (stable_hash(left) == stable_hash(right)) is same
            assert not same or hash(canonical(left)) == hash(canonical(right))


# --- rows -------------------------------------------------------------------------------------------


def test_keys_that_need_no_change_are_given_back() -> None:
    for keys in ([1, True, None, "a", b"a"], [1.5, -0.0, 2.0], [(1, "a"), ((2, None), b"")], []):
        assert canonical_rows(keys) is keys


def test_keys_that_need_a_change() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    keys = [(float("nan"), 1), (float("nan"), 1), noon, noon.replace(tzinfo=None), 1, (1, 2)]
    groups = Counter(canonical_rows(keys))
    assert sorted(groups.values()) == [1, 1, 2, 2]
    assert len(set(canonical_rows([float("nan"), float("nan")]))) == 1


columns = st.sampled_from(
    [
        st.integers(-(2**63), 2**63 - 1),
        st.integers(-(2**65), 2**65),
        st.booleans(),
        st.floats(),
        st.text(max_size=20),
        st.text(alphabet="xyé", min_size=55, max_size=70),
        st.text(alphabet=st.characters(), max_size=3),
        st.binary(max_size=20),
        st.dates(),
        st.datetimes(timezones=st.none() | st.just(UTC)),
        st.none() | st.integers(-5, 5),
        st.none() | st.text(max_size=2),
        st.decimals(-100, 100, places=3),
        plain_keys,
        st.tuples(st.integers(-5, 5), st.text(max_size=3)),
        st.tuples(st.tuples(st.floats()), st.none() | st.binary(max_size=2)),
        st.lists(st.integers(0, 3), max_size=2).map(tuple),
    ]
).flatmap(lambda values: st.lists(values, max_size=12))


@given(columns)
def test_rows_hash_as_one_by_one(keys: list[Any]) -> None:
    hashes = hash_rows(keys)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == [stable_hash(key) for key in keys]


def test_lone_surrogates_are_hashed() -> None:
    keys = ["a", "\ud800"]
    assert hash_rows(keys).tolist() == [stable_hash(key) for key in keys]
