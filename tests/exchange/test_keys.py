"""The hash of keys: fixed vectors, rows against Arrow, one key against whole vectors."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import UsageError
from minishuffle.exchange import keys as keys_module
from minishuffle.exchange.keys import (
    destination,
    hash_columns,
    hash_rows,
    stable_hash,
)

VECTORS = [
    (0, 0x0000000000000000),
    (1, 0x5692161D100B05E5),
    (-1, 0xB4D055FCF2CBBD7B),
    (2**63 - 1, 0x5A682AFE7965DEBD),
    (-(2**63), 0x25C26EA579CEA98A),
    (2**63, 0x481EC0A212A9F3DB),
    (2**64 - 1, 0xDE0A564CBCD060C4),
    (2**64, 0x5ABB1E0CB1C53B58),
    (-(2**63) - 1, 0xA18074384760CC71),
    (10**400, 0xAF8AC3F1F6E2009E),
    (0.5, 0xDA0F63B252FC0485),
    (-1.5, 0xD4CFFBD648D7FE1A),
    (1e300, 0x68535B8F3933B5C1),
    (5e-324, 0x01D60447FEA35413),
    (math.nan, 0x47EBBEDE4FAC3A28),
    (math.inf, 0xE7B7CF8960E812E9),
    (-math.inf, 0x21C31A5EC23B8305),
    ("", 0xF1357AEA2E62A9C5),
    ("a", 0xB56482F3EC8D3491),
    ("12345678", 0xE74C1381AC26442F),
    ("123456789", 0xF735C3BE2388D850),
    ("user-000042", 0x41FBA355A9045AC6),
    ("é" * 32, 0x9DE7A23330C43024),
    ("é" * 33, 0x3DD69FACD00BD6F8),
    ("x" * 64, 0x56859FB644743776),
    ("x" * 65, 0x97E878744C553AC5),
    ("x" * 256, 0x225FAADEB8E1A2A6),
    ("x" * 257, 0xFEA8A39BDC630CF1),
    (b"", 0xC2B2AE3D27D4EB4F),
    (b"\0", 0xE39B5998E7625F38),
    (b"a", 0x0536C40F9FC6EF07),
    (b"y" * 65, 0xDCB0389FECAF534B),
    (b"y" * 300, 0x739F4C0E4A3DD55D),
    (None, 0xE7037ED1A0B428DB),
    ((), 0x207B280083EB3508),
    ((1,), 0x51BDFE67F3E6B9F8),
    ((None,), 0x6A6E30D172D98A88),
    ((1, "a"), 0xDAA9D065942F79D2),
    (("a", 1), 0x4A2209982F762D0D),
    ((1, (2, 3)), 0x698B54643F99B0CD),
    (date(1970, 1, 1), 0x8FFD3F943FAE5847),
    (date(2026, 11, 21), 0x746BE1DE2E07630D),
    (date(1, 1, 1), 0x18C9C8F9D26B07FE),
    (datetime(1970, 1, 1), 0x399CB48BC72E8D68),
    (datetime(2026, 11, 21, 12, 0, 0, 1), 0xDC5F6DC6013A9866),
    (datetime(1, 1, 1), 0x1850100C7A918260),
    (datetime(9999, 12, 31, 23, 59, 59, 999999), 0x34BF8E2ECB1C3F7E),
    (time(0, 0), 0x8D4482AB6DD6C67E),
    (time(12, 30, 7, 5), 0xAC8B281460BAC9C8),
    (time(23, 59, 59, 999999), 0x5CB7775A3FD21BBB),
    (timedelta(0), 0x294B9A2C8FE1C296),
    (timedelta(microseconds=-1), 0x389D5D1665565520),
    (timedelta(days=3, seconds=4, microseconds=5), 0x5ABBB2C90AF95F0B),
    (timedelta.max, 0x3FC605CAEBB7F7AC),
    (timedelta.min, 0xD683C01B2F506476),
    (UUID(int=0), 0x03C5FBF67C187428),
    (UUID("12345678-1234-5678-1234-567812345678"), 0x656E5A58B9F05629),
    (Decimal("0.1"), 0x42FC6F11AF6630BA),
    (Decimal("-12.30"), 0x4F5B78ACD80CBA22),
    (Decimal("1E-30"), 0xF08260CCEEBCD422),
    (Decimal("12345678901234567890.1"), 0x805F97EC7A2F0538),
]


@pytest.mark.parametrize(("key", "expected"), VECTORS, ids=lambda value: repr(value)[:20])
def test_vectors_of_one_key(key: Any, expected: int) -> None:
    assert stable_hash(key) == expected


def vectors_of(kind: type, arrow: pa.DataType) -> dict[Any, int]:
    """The vectors whose keys are of that Python type and fit the Arrow type."""
    found = {}
    for key, expected in VECTORS:
        if type(key) is kind:
            try:
                array = pa.array([key], arrow)
            except (pa.ArrowException, OverflowError):
                continue
            if str(array.to_pylist()[0]) == str(key):
                found[key] = expected
    return found


INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]

ARROW_TYPES = [
    *((int, kind) for kind in INTEGERS),
    *((float, kind) for kind in (pa.float16(), pa.float32(), pa.float64())),
    *((str, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *((bytes, kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1))),
    *((datetime, pa.timestamp(unit)) for unit in ("s", "ms", "us")),
    *((date, kind) for kind in (pa.date32(), pa.date64())),
    *((time, kind) for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))),
    *((timedelta, pa.duration(unit)) for unit in ("s", "ms", "us")),
    (UUID, pa.uuid()),
    *((Decimal, kind) for kind in (pa.decimal128(38, 30), pa.decimal128(21, 1), pa.decimal128(9, 2))),
    *((Decimal, kind) for kind in (pa.decimal256(60, 30), pa.decimal32(4, 2), pa.decimal64(12, 2))),
]


@pytest.mark.parametrize(("python", "kind"), ARROW_TYPES, ids=lambda value: str(value))
def test_vectors_in_arrow(python: type, kind: pa.DataType) -> None:
    expected = vectors_of(python, kind)
    assert expected
    array = pa.array([*expected, None], kind)
    wanted = [*expected.values(), stable_hash(None)]
    assert hash_columns([array]).tolist() == wanted
    assert hash_columns([array.slice(1)]).tolist() == wanted[1:]
    assert hash_columns([array.slice(0, 0)]).tolist() == []
    assert hash_columns([pa.nulls(2, kind)]).tolist() == [stable_hash(None)] * 2


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_a_moment_hashes_the_same_in_each_unit_and_zone(unit: str, zone: str | None) -> None:
    moment = datetime(2026, 11, 21, 12, 30, 7, tzinfo=UTC)
    seconds = pa.array([int(moment.timestamp())], pa.int64()).cast(pa.timestamp("s"))
    array = seconds.cast(pa.timestamp(unit)).view(pa.timestamp(unit, zone))
    elsewhere = moment.astimezone(timezone(timedelta(hours=-3)))
    assert hash_columns([array]).tolist() == [stable_hash(elsewhere)]
    assert stable_hash(moment.replace(tzinfo=None)) == stable_hash(elsewhere)


def test_nanoseconds_tell_moments_apart() -> None:
    hashes = hash_columns([pa.array([1000, 1001], pa.int64()).view(pa.timestamp("ns"))]).tolist()
    assert hashes[0] == stable_hash(datetime(1970, 1, 1, microsecond=1)) != hashes[1]


def test_booleans_nulls_and_dictionaries() -> None:
    assert hash_columns([pa.array([True, None, False])]).tolist() == [
        stable_hash(1),
        stable_hash(None),
        stable_hash(0),
    ]
    assert hash_columns([pa.nulls(2)]).tolist() == [stable_hash(None)] * 2
    words = pa.array(["b", None, "a", "b"])
    assert hash_columns([words.dictionary_encode()]).tolist() == hash_columns([words]).tolist()


@pytest.mark.parametrize(
    "kind", [*INTEGERS, pa.float32(), pa.float64(), pa.decimal128(9, 2), pa.decimal128(30, 7)]
)
def test_numbers_hash_by_their_value_alone(kind: pa.DataType) -> None:
    values = [0, 1, 7, 100]
    array = pa.array(map(Decimal, values) if pa.types.is_decimal(kind) else values, kind)
    assert hash_columns([array]).tolist() == [stable_hash(value) for value in values]


def test_a_decimal_that_does_not_fit_its_type_is_hashed() -> None:
    wide = pa.array([Decimal("12345.67")], pa.decimal128(9, 2))
    assert hash_columns([wide.cast(pa.decimal32(5, 2), safe=False)]).tolist() == hash_columns([wide]).tolist()


def test_booleans_of_eight_bits_are_booleans() -> None:
    stored = pa.array([0, 1, -7, None], pa.int8())
    array = pa.ExtensionArray.from_storage(pa.bool8(), stored)
    assert hash_columns([array]).tolist() == hash_rows([False, True, True, None]).tolist()
    assert hash_columns([array.slice(2)]).tolist() == hash_rows([1, None]).tolist()


@pytest.mark.parametrize("kind", [pa.time64("ns"), pa.duration("ns")], ids=str)
def test_times_and_durations_of_nanoseconds_are_keys_of_their_own(kind: pa.DataType) -> None:
    values = pa.array([0, 1, 1000], pa.int64())
    hashes = hash_columns([values.cast(kind)]).tolist()
    micros = time(0, 0, 0, 1) if pa.types.is_time(kind) else timedelta(microseconds=1)
    assert hashes[2] == stable_hash(micros)
    assert len({*hashes, *hash_columns([values]).tolist()}) == 6


def test_the_largest_unsigned_integers_are_no_negative_ones() -> None:
    values = [2**63 - 1, 2**63, 2**64 - 1]
    assert hash_columns([pa.array(values, pa.uint64())]).tolist() == hash_rows(values).tolist()
    assert stable_hash(2**64 - 1) != stable_hash(-1)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int8())]), pa.json_()], ids=str)
def test_columns_that_cannot_be_keys(kind: pa.DataType) -> None:
    with pytest.raises(UsageError, match="cannot be a key: cast it"):
        hash_columns([pa.nulls(1, kind)])


# --- columns ----------------------------------------------------------------------------------------

arrow_columns = st.sampled_from(
    [
        (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
        (pa.uint64(), st.integers(0, 2**64 - 1)),
        (pa.int8(), st.integers(-128, 127)),
        (pa.bool_(), st.booleans()),
        (pa.float64(), st.floats()),
        (pa.float64(), st.integers(-(2**70), 2**70).map(float)),
        (pa.float32(), st.floats(width=32)),
        (pa.string(), st.text(max_size=30)),
        (pa.large_string(), st.text(alphabet="aé", min_size=60, max_size=66) | st.text(max_size=9)),
        (pa.binary(), st.binary(max_size=70)),
        (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
        (pa.date32(), st.dates()),
        (pa.decimal128(18, 4), st.decimals(-(10**6), 10**6, places=4)),
        (pa.decimal128(38, 10), st.decimals(-(10**25), 10**25, places=10)),
        (pa.decimal128(5, -2), st.integers(-999, 999).map(lambda value: Decimal(value) * 100)),
    ]
).flatmap(lambda pair: st.tuples(st.just(pair[0]), st.lists(st.none() | pair[1], min_size=1, max_size=20)))


@given(arrow_columns, st.integers(0, 5))
def test_arrow_hashes_as_one_by_one(column: tuple[pa.DataType, list[Any]], skipped: int) -> None:
    kind, values = column
    array = pa.array(values, kind).slice(skipped)
    assert hash_columns([array]).tolist() == [stable_hash(value) for value in values[skipped:]]


def test_several_columns_hash_as_tuples() -> None:
    numbers, words = pa.array([1, None, 3]), pa.array(["x", "y", None])
    rows = list(zip(numbers.to_pylist(), words.to_pylist(), strict=True))
    assert hash_columns([numbers, words]).tolist() == hash_rows(rows).tolist() == list(map(stable_hash, rows))


def test_long_columns_are_hashed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, words = pa.array(range(100)), pa.array([str(n) * n for n in range(100)])
    whole = hash_columns([numbers, words]).tolist()
    monkeypatch.setattr(keys_module, "CHUNK_ROWS", 7)
    assert hash_columns([numbers, words]).tolist() == whole


# --- destinations -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**64 - 1), max_size=10), st.integers(1, 32_768))
def test_destinations_of_one_hash_and_of_many_agree(hashes: list[int], consumers: int) -> None:
    many = destination(np.array(hashes, dtype=np.uint64), consumers)
    assert many.tolist() == [destination(value, consumers) for value in hashes]
    assert all(0 <= place < consumers for place in many.tolist())


@pytest.mark.parametrize("consumers", [2, 3, 7, 64])
@pytest.mark.parametrize(
    "keys", [list(range(20_000)), [f"user-{n}" for n in range(20_000)]], ids=["int", "str"]
)
def test_keys_spread_evenly(keys: list[Any], consumers: int) -> None:
    hashes = hash_rows(keys)
    assert len(np.unique(hashes)) == len(keys)
    counts = np.bincount(destination(hashes, consumers), minlength=consumers)
    mean = len(keys) / consumers
    assert np.abs(counts - mean).max() < 5 * math.sqrt(mean)
