"""Elements: what goes in comes out; bad ones are refused."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import RemoteProtocolError, UnserializableRecord, UsageError
from minishuffle.exchange import elements
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import (
    ELEMENT_HEADER,
    TIMED,
    ElementFormat,
    decode,
    encode,
    pack_rows,
    read_header,
    unpack_rows,
)
from support.batches import as_batch

Written = Callable[[Any], bytes]
Through = Callable[[Any], Any]


@pytest.fixture
def through(written: Written) -> Through:
    """Encodes a batch and decodes it again."""

    def encode_and_decode(batch: Any) -> Any:
        data = written(batch)
        _, rows, kind = read_header(data)
        back = decode(kind, rows, memoryview(data)[ELEMENT_HEADER.size :])
        return back.payload if back.keys is None else back

    return encode_and_decode


# --- rows -------------------------------------------------------------------------------------------


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    left: Any
    right: Any


SAME = [
    None,
    True,
    0,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**40,
    1.5,
    math.inf,
    "é",
    b"\0\xff",
    datetime(2026, 11, 21, 1, 2, 3, 456789),
    datetime.min,
    datetime.max,
    datetime(2026, 11, 21, 1, 2, 3, 456789, UTC),
    datetime(2026, 11, 21, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
    date(2026, 11, 21),
    timedelta(days=-3, microseconds=7),
    timedelta.max,
    time(1, 2, 3, 456789),
    time(23, 59, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    Decimal("1.10"),
    Decimal("-Infinity"),
    UUID(int=7),
    (1, ("a", ())),
    {"a": (1, None), 2: {}, (1, 2): "tuple", None: 1},
    Level.LOW,
    Pair(1, 2),
]


@pytest.mark.parametrize("value", SAME, ids=lambda value: repr(value)[:30])
def test_values_come_back_equal(value: Any, through: Through) -> None:
    (back,) = through([value])
    assert back == value
    assert through([{"deep": [value]}]) == [{"deep": [value]}]
    assert through([{"deep": [(value,)]}]) == [{"deep": [(value,)]}]


def test_values_that_change_their_type(through: Through) -> None:
    rows = [
        [1, [2]],
        bytearray(b"x"),
        np.int16(3),
        np.uint64(2**64 - 1),
        np.float32(0.5),
        np.bool_(True),
        Level.LOW,
    ]
    back = through(rows)
    assert back == [[1, [2]], b"x", 3, 2**64 - 1, 0.5, True, 1]
    assert [type(value) for value in back] == [list, bytes, int, int, float, bool, int]


def test_aware_and_naive_datetimes_stay_apart(through: Through) -> None:
    naive, aware = datetime(2026, 1, 1, 5), datetime(2026, 1, 1, 5, tzinfo=timezone(timedelta(hours=2)))
    back = through([naive, aware, Decimal("1.10"), math.nan])
    assert back[0].tzinfo is None
    assert back[1].utcoffset() == timedelta(hours=2)
    assert str(back[2]) == "1.10"
    assert math.isnan(back[3])


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({1, 2}, r"row 2 .* \{1, 2\} \(set\): it holds a set; map it to None, bool, int"),
        ({"a": [1, object()]}, r"row 2 .* \(dict\): it holds a object; map"),
        (Broken(), "row 2 .* a Broken whose repr raises RuntimeError"),
        (1j, "it holds a complex"),
        (np.datetime64("2026-01-01"), "it holds a datetime64"),
        (np.longdouble(1), "it holds a longdouble"),
        ("\ud800", "surrogates not allowed"),
        (nested(1100), "recursion limit"),
        (range(10**9), r"range\(0, 1000000000\) \(range\)"),
        (("x" * 1000, object()), r"\('x{198}… \(tuple\): it holds a object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_row_that_cannot_cross_is_named(bad: Any, reason: str) -> None:
    with pytest.raises(UnserializableRecord, match=reason):
        encode(Batch([0, "fine", bad, object()]))
    with pytest.raises(UnserializableRecord, match=reason):
        encode(Batch([0, "fine", bad, 1], [1, 2, 3, 4]))


def test_a_key_that_cannot_cross_is_named() -> None:
    with pytest.raises(UnserializableRecord, match=r"the key of row 1 .*frozenset"):
        encode(Batch([1, 2], [1, frozenset()]))


def test_rows_as_bytes_alone() -> None:
    rows = ["a", (1, datetime(2026, 1, 1))]
    assert unpack_rows(pack_rows(rows)) == rows


# --- Arrow ------------------------------------------------------------------------------------------

BATCHES = [
    pa.record_batch({"k": np.arange(1000), "v": np.linspace(0, 1, 1000)}),
    pa.record_batch({"k": pa.array([None, "", "é" * 50, "x"]), "b": [True, None, False, True]}),
    pa.record_batch(
        {"n": pa.array([[1], None, [], [2, 3]]), "s": pa.array([{"a": 1}, None, {"a": 3}, {"a": None}])}
    ),
    pa.record_batch(
        {"d": pa.array([Decimal("1.5"), None]), "t": pa.array([0, 1], pa.timestamp("ns", "UTC"))}
    ),
    pa.record_batch({"z": pa.nulls(3)}).replace_schema_metadata({"m": "1"}),
    pa.record_batch({"v": pa.array(["a", "b"], pa.string_view())}),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: ",".join(map(str, batch.schema.types)))
def test_record_batches_come_back_equal(batch: pa.RecordBatch, through: Through) -> None:
    back = through(batch)
    assert back.equals(batch, check_metadata=True)
    assert back.schema.equals(batch.schema, check_metadata=True)
    part = through(batch.slice(1, 2))
    assert part.equals(batch.slice(1, 2))
    part.validate(full=True)


def test_a_slice_takes_its_own_bytes_only(written: Written) -> None:
    assert len(written(BATCHES[0].slice(500, 10))) < len(written(BATCHES[0].slice(0, 100))) < 2500


DICTIONARY = pa.array(["a", "b", None, "a"]).dictionary_encode()


@pytest.mark.parametrize(
    ("encoded", "plain"),
    [
        (DICTIONARY, pa.string()),
        (pa.ListArray.from_arrays([0, 2, 4], DICTIONARY), pa.list_(pa.string())),
        (pa.StructArray.from_arrays([DICTIONARY], ["x"]), pa.struct([("x", pa.string())])),
        (pa.FixedSizeListArray.from_arrays(DICTIONARY, 2), pa.list_(pa.string(), 2)),
        (pa.LargeListArray.from_arrays([0, 1, 4], DICTIONARY), pa.large_list(pa.string())),
    ],
    ids=["plain", "list", "struct", "fixed", "large"],
)
def test_dictionaries_are_decoded(encoded: pa.Array, plain: pa.DataType, through: Through) -> None:
    batch = pa.RecordBatch.from_arrays([encoded, pa.array(range(len(encoded)))], names=["d", "n"])
    back = through(batch)
    assert back.schema.types == [plain, pa.int64()]
    assert back.to_pylist() == batch.to_pylist()


def test_columns_lie_in_the_payload(written: Written) -> None:
    payload = np.frombuffer(written(BATCHES[0])[ELEMENT_HEADER.size :], np.uint8).copy()
    back = decode(ElementFormat.ARROW, 1000, payload.data).payload
    assert isinstance(back, pa.RecordBatch)
    begin = payload.ctypes.data
    for column in back.columns:
        address = column.buffers()[1].address
        assert begin <= address < begin + len(payload)
        assert (address - begin) % 8 == 0


def test_schemas_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch, through: Through) -> None:
    monkeypatch.setattr(elements, "_SCHEMAS_KEPT", 3)
    monkeypatch.setattr(elements, "_schemas", {})
    for number in range(10):
        batch = pa.record_batch({f"c{number}": [number]})
        assert through(batch).equals(batch)
        assert batch.schema.serialize().to_pybytes() in elements._schemas
        assert len(elements._schemas) <= 3


# --- bad ones -----------------------------------------------------------------------------------------


def test_a_batch_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "ELEMENT_BYTES_MAX", 100)
    with pytest.raises(UsageError, match=r"a batch of 2 rows takes 1\d\d bytes, and at most 100 can be sent"):
        encode(Batch(["x" * 60, "y" * 60]))


BAD_PAYLOADS = [
    (ElementFormat.ROWS, b""),
    (ElementFormat.ROWS, b"\xc1"),
    (ElementFormat.ROWS, msgpack.packb(5)),
    (ElementFormat.ROWS, msgpack.packb([1, 2])),
    (ElementFormat.ROWS, msgpack.packb([1]) + b"\0"),
    (ElementFormat.ROWS, b"\x91\xa1\xff"),
    (ElementFormat.ROWS, b"\x91" * 5000 + b"\x01"),
    (ElementFormat.ROWS, b"\x91\x81\x80\x01"),
    *((ElementFormat.ROWS, msgpack.packb([msgpack.ExtType(code, b"\xff" * 7)])) for code in range(64, 70)),
    (ElementFormat.ROWS, msgpack.packb([msgpack.ExtType(65, b"\x7f" * 8)])),
    (ElementFormat.ROWS, msgpack.packb([msgpack.ExtType(66, b"\x7f" * 4)])),
    (ElementFormat.KEYED_ROWS, msgpack.packb([1])),
    (ElementFormat.KEYED_ROWS, msgpack.packb([[1], [1, 2]])),
    (ElementFormat.KEYED_ROWS, msgpack.packb([[1], 2])),
    (ElementFormat.ARROW, b""),
    (ElementFormat.ARROW, b"\xff" * 64),
    (ElementFormat.ARROW, bytes(64)),
    (ElementFormat.ARROW, b"".join(encode(as_batch(BATCHES[0]))[1])[ELEMENT_HEADER.size :]),
    (9, b""),
]


@pytest.mark.parametrize(("kind", "payload"), BAD_PAYLOADS, ids=range(len(BAD_PAYLOADS)))
def test_payloads_that_cannot_be(kind: int, payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(kind, 1, payload)


def test_truncated_arrow_payloads(written: Written) -> None:
    payload = written(BATCHES[1])[ELEMENT_HEADER.size :]
    for length in range(len(payload) - 8):
        with pytest.raises(RemoteProtocolError):
            decode(ElementFormat.ARROW, 4, payload[:length])


@given(st.sampled_from([ElementFormat.ROWS, ElementFormat.KEYED_ROWS]), st.binary(max_size=40))
def test_garbage_gives_rows_or_an_error_of_ours(kind: int, payload: bytes) -> None:
    try:
        batch = decode(kind, 1, payload).payload
    except RemoteProtocolError:
        return
    assert len(batch) == 1


# --- event times --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "width"),
    [
        ([7, 7], 1),
        ([-3, 252], 1),
        ([-3, 253], 2),
        ([10**15, 10**15 + 65_536], 4),
        ([0, 1 << 32], 8),
        ([-(1 << 63), (1 << 63) - 1], 8),
    ],
)
@pytest.mark.parametrize(
    "batch",
    [Batch(["a", "b"]), Batch([{"k": 1}, {"k": 2}], [1, 2]), Batch(pa.record_batch({"k": [1, 2]}))],
    ids=["rows", "keyed", "columns"],
)
def test_event_times_take_few_bytes_behind_the_batch(batch: Batch, times: list[int], width: int) -> None:
    timed = Batch(batch.payload, batch.keys, np.array(times))
    plain, data = (b"".join(map(bytes, encode(each)[1])) for each in (batch, timed))
    assert data[ELEMENT_HEADER.size :].startswith(plain[ELEMENT_HEADER.size :])
    assert len(data) - len(plain) == 2 * width + 9
    size, rows, kind = read_header(data)
    payload = np.frombuffer(data[ELEMENT_HEADER.size :], np.uint8).copy().data
    back = decode(kind, rows, payload)
    assert (size, rows) == (len(payload), 2)
    assert back.times is not None and back.times.dtype == np.int64
    assert (back.payload, back.keys, back.times.tolist()) == (batch.payload, batch.keys, times)


@pytest.mark.parametrize(
    "payload", [b"", bytes(8) + b"\x03", bytes(8) + b"\x08", b"\x90" + bytes(8) + b"\x01"]
)
def test_event_times_that_cannot_be(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be"):
        decode(ElementFormat.ROWS | TIMED, 2, payload)
