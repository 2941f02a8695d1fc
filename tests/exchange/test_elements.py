"""Elements: what goes in comes out, over buffers of any size; bad ones are refused."""

from __future__ import annotations

import enum
import errno
import math
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError, ResourceExhausted, UnserializableRecord, UsageError
from minishuffle.exchange import assembly, elements
from minishuffle.exchange.elements import (
    ELEMENT_HEADER,
    Assembler,
    AssemblyBudget,
    Batch,
    ElementFormat,
    KeyedRows,
    decode,
    encode,
    pack_rows,
    unpack_rows,
)


def written(batch: Batch) -> bytes:
    rows, parts = encode(batch)
    data = b"".join(parts)
    size, header_rows, _ = ELEMENT_HEADER.unpack_from(data)
    assert (size, header_rows) == (len(data) - ELEMENT_HEADER.size, rows)
    assert all(memoryview(part).format == "B" for part in parts)
    return data


def through(batch: Batch) -> Any:
    data = written(batch)
    _, rows, kind = ELEMENT_HEADER.unpack_from(data)
    return decode(kind, rows, memoryview(data)[ELEMENT_HEADER.size :])


def assembler(limit_bytes: int = limits.ASSEMBLY_BYTES_MAX, directory: Path | None = None) -> Assembler:
    return Assembler(AssemblyBudget(limit_bytes), None if directory is None else str(directory))


def fed(target: Assembler, buffers: Iterable[bytes]) -> Iterator[tuple[int, int, Any]]:
    """The elements of consecutive buffers; each is overwritten when it has been given back."""
    for buffer in buffers:
        segment = bytearray(buffer)
        target.feed(memoryview(segment))
        while (element := target.next()) is not None:
            yield element
        assert target.exhausted
        segment[:] = b"\xff" * len(segment)
        segment.append(0)  # fails if anything still refers to the segment


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


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
    Decimal("1.10"),
    Decimal("-Infinity"),
    UUID(int=7),
    (1, ("a", ())),
    {"a": (1, None), 2: {}, (1, 2): "tuple", None: 1},
    Level.LOW,
    Pair(1, 2),
]


@pytest.mark.parametrize("value", SAME, ids=lambda value: repr(value)[:30])
def test_values_come_back_equal(value: Any) -> None:
    (back,) = through([value])
    assert back == value
    assert through([{"deep": [value]}]) == [{"deep": (value,)}]


def test_values_that_change_their_type() -> None:
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
    assert back == [(1, (2,)), b"x", 3, 2**64 - 1, 0.5, True, 1]
    assert [type(value) for value in back] == [tuple, bytes, int, int, float, bool, int]


def test_aware_and_naive_datetimes_stay_apart() -> None:
    naive, aware = datetime(2026, 1, 1, 5), datetime(2026, 1, 1, 5, tzinfo=timezone(timedelta(hours=2)))
    back = through([naive, aware, Decimal("1.10"), math.nan])
    assert back[0].tzinfo is None
    assert back[1].utcoffset() == timedelta(hours=2)
    assert str(back[2]) == "1.10"
    assert math.isnan(back[3])


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.datetimes()
    | st.datetimes(timezones=st.just(UTC))
    | st.dates()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids(),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(values, max_size=5), st.integers(1, 40))
def test_rows_of_any_kind_over_buffers_of_any_size(rows: list[Any], size: int) -> None:
    keyed = KeyedRows([str(number) for number in range(len(rows))], rows)
    data = written(rows) + written(keyed)
    assert [decode(*element) for element in fed(assembler(), cut(data, size))] == [rows, keyed]


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
        encode([0, "fine", bad, object()])
    with pytest.raises(UnserializableRecord, match=reason):
        encode(KeyedRows([1, 2, 3, 4], [0, "fine", bad, 1]))


def test_a_key_that_cannot_cross_is_named() -> None:
    with pytest.raises(UnserializableRecord, match=r"the key of row 1 .*frozenset"):
        encode(KeyedRows([1, frozenset()], [1, 2]))


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
def test_record_batches_come_back_equal(batch: pa.RecordBatch) -> None:
    back = through(batch)
    assert back.equals(batch, check_metadata=True)
    assert back.schema.equals(batch.schema, check_metadata=True)
    part = through(batch.slice(1, 2))
    assert part.equals(batch.slice(1, 2))
    part.validate(full=True)


def test_a_slice_takes_its_own_bytes_only() -> None:
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
def test_dictionaries_are_decoded(encoded: pa.Array, plain: pa.DataType) -> None:
    batch = pa.RecordBatch.from_arrays([encoded, pa.array(range(len(encoded)))], names=["d", "n"])
    back = through(batch)
    assert back.schema.types == [plain, pa.int64()]
    assert back.to_pylist() == batch.to_pylist()


def test_columns_lie_in_the_payload() -> None:
    payload = np.frombuffer(written(BATCHES[0])[ELEMENT_HEADER.size :], np.uint8).copy()
    back = decode(ElementFormat.ARROW, 1000, payload.data)
    assert isinstance(back, pa.RecordBatch)
    begin = payload.ctypes.data
    for column in back.columns:
        address = column.buffers()[1].address
        assert begin <= address < begin + len(payload)
        assert (address - begin) % 8 == 0


def test_schemas_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_SCHEMAS_KEPT", 3)
    monkeypatch.setattr(elements, "_schemas", {})
    for number in range(10):
        batch = pa.record_batch({f"c{number}": [number]})
        assert through(batch).equals(batch)
        assert batch.schema.serialize().to_pybytes() in elements._schemas
        assert len(elements._schemas) <= 3


# --- buffers ----------------------------------------------------------------------------------------

STREAM: list[Batch] = [["a"], KeyedRows(["k"], [("row", 1)]), [], pa.record_batch({"k": [1, 2]}), [b"x" * 30]]


def expect_stream(found: list[tuple[int, int, Any]]) -> None:
    batches = [decode(*element) for element in found]
    assert [element[1] for element in found] == [1, 1, 0, 2, 1]
    assert batches[3].equals(STREAM[3])  # type: ignore[union-attr]
    del batches[3]
    assert batches == STREAM[:3] + STREAM[4:]


def test_every_cut_of_a_stream() -> None:
    data = b"".join(map(written, STREAM))
    for at in range(len(data) + 1):
        expect_stream(list(fed(assembler(), [data[:at], data[at:]])))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, 12, 13, 64, 1000])
def test_a_stream_over_small_buffers(size: int) -> None:
    target = assembler()
    for _ in range(2):
        expect_stream(list(fed(target, cut(b"".join(map(written, STREAM)), size))))


@pytest.mark.parametrize("size", [256, 4099, 32 * 1024])
@pytest.mark.parametrize("length", [0, 1, 100, 32 * 1024 - 12, 32 * 1024, 100_003, 3 * limits.MIB + 1])
def test_elements_of_many_lengths(length: int, size: int) -> None:
    rows = [np.random.default_rng(length).bytes(length), "end"]
    target = assembler()
    found = [decode(*element) for element in fed(target, cut(written(rows) * 2, size))]
    assert found == [rows, rows]


def test_arrow_elements_over_buffers_are_aligned() -> None:
    found = list(fed(assembler(), cut(written(BATCHES[0]) * 3, 1001)))
    assert len(found) == 3
    for kind, rows, payload in found:
        back = decode(kind, rows, payload)
        assert isinstance(back, pa.RecordBatch)
        assert back.equals(BATCHES[0])
        assert all(column.buffers()[1].address % 8 == 0 for column in back.columns)


# --- memory and files ---------------------------------------------------------------------------------


def test_the_budget_is_held_while_an_element_is_under_way() -> None:
    budget = AssemblyBudget(1000)
    data = written([b"x" * 300])
    size = len(data) - ELEMENT_HEADER.size
    first, second = Assembler(budget, None), Assembler(budget, None)
    for number, target in enumerate((first, second), start=1):
        target.feed(memoryview(data)[:50])
        assert target.next() is None
        assert budget.used == number * size
    first.feed(memoryview(data)[50:])
    assert first.next() is not None
    assert budget.used == size
    assert second.clear() == 1
    assert budget.used == 0


def test_an_element_in_one_buffer_needs_no_budget() -> None:
    budget = AssemblyBudget(0)
    (element,) = fed(Assembler(budget, None), [written(["a"])])
    assert decode(*element) == ["a"]


def spilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files that are mapped from now on."""
    sizes: list[int] = []
    real = assembly._map_file

    def counting(size: int, directory: str | None) -> Any:
        sizes.append(size)
        return real(size, directory)

    monkeypatch.setattr(assembly, "_map_file", counting)
    return sizes


def test_what_the_budget_has_no_room_for_goes_to_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = spilled(monkeypatch)
    target = assembler(limit_bytes=1000, directory=tmp_path)
    data = written([b"x" * 990]) + written([b"y" * 2000]) + written([b"z"])
    found = [decode(*element) for element in fed(target, cut(data, 100))]
    assert found == [[b"x" * 990], [b"y" * 2000], [b"z"]]
    assert [size // 1000 for size in sizes] == [2]
    assert list(tmp_path.iterdir()) == []


def test_long_arrow_elements_are_used_from_their_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(assembly, "SPILL_ELEMENT_BYTES", 4096)
    sizes = spilled(monkeypatch)
    (element,) = fed(assembler(directory=tmp_path), cut(written(BATCHES[0]), 512))
    back = decode(*element)
    del element
    assert isinstance(back, pa.RecordBatch)
    assert back.equals(BATCHES[0])
    assert len(sizes) == 1


def test_an_element_of_256_mib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = spilled(monkeypatch)
    size = 256 * limits.MIB
    block = np.arange(4 * limits.MIB, dtype=np.uint32).tobytes()  # 16 MiB
    budget = AssemblyBudget(limits.ASSEMBLY_BYTES_MAX)
    target = Assembler(budget, str(tmp_path))
    target.feed(memoryview(ELEMENT_HEADER.pack(size, 1, ElementFormat.ROWS)))
    assert target.next() is None
    for _ in range(size // len(block)):
        target.feed(memoryview(block))
        element = target.next()
        assert target.exhausted
        assert budget.used == 0
    assert element is not None
    assert element[:2] == (ElementFormat.ROWS, 1)
    assert sizes == [len(element[2])] == [size]
    words = np.frombuffer(element[2], dtype=np.uint32)
    for at in range(0, size, len(block)):
        assert np.array_equal(words[at // 4 : at // 4 + 1000], np.arange(1000))
    assert int(words[-1]) == 4 * limits.MIB - 1


def test_a_full_disk_names_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    target = assembler(limit_bytes=0, directory=tmp_path)
    target.feed(memoryview(written([b"x" * 100])[:50]))
    with pytest.raises(ResourceExhausted, match=rf"{tmp_path} \(No space left on device\): free space there"):
        target.next()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    target = assembler(limit_bytes=0, directory=tmp_path / "gone")
    target.feed(memoryview(written([b"x" * 100])[:50]))
    with pytest.raises(ResourceExhausted, match=r"gone \(No such file or directory\)"):
        target.next()


# --- half elements and bad ones -----------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "rows"), [(0, 0), (5, 0), (11, 0), (12, 3), (40, 3)])
def test_a_half_element_is_thrown_away_with_its_rows_counted(kept: int, rows: int) -> None:
    target = assembler()
    other = written(["before"])
    found = list(fed(target, [other + written([b"x" * 50, 2, 3])[:kept]]))
    assert len(found) == 1
    assert target.clear() == rows
    assert target.clear() == 0
    assert [decode(*element) for element in fed(target, [other])] == [["before"]]


def test_clear_drops_the_rest_of_the_view() -> None:
    target = assembler()
    target.feed(memoryview(written(["a"]) + written(["b"])))
    assert target.next() is not None
    assert not target.exhausted
    assert target.clear() == 0
    assert target.exhausted


@pytest.mark.parametrize(
    "header",
    [(limits.ELEMENT_BYTES_MAX + 1, 1, 1), (2**32 - 1, 1, 3), (10, 1, 0), (10, 1, 4), (10, 1, 255)],
)
def test_headers_that_cannot_be(header: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = spilled(monkeypatch)
    target = assembler()
    target.feed(memoryview(ELEMENT_HEADER.pack(*header) + bytes(10)))
    with pytest.raises(
        RemoteProtocolError, match=rf"an element of {header[0]} bytes, 1 rows and format {header[2]}"
    ):
        target.next()
    assert sizes == []


def test_a_batch_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "ELEMENT_BYTES_MAX", 100)
    with pytest.raises(UsageError, match=r"a batch of 2 rows takes 1\d\d bytes, and an element at most 100"):
        encode(["x" * 60, "y" * 60])


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
    (ElementFormat.ARROW, written(BATCHES[0])[ELEMENT_HEADER.size :]),
    (9, b""),
]


@pytest.mark.parametrize(("kind", "payload"), BAD_PAYLOADS, ids=range(len(BAD_PAYLOADS)))
def test_payloads_that_cannot_be(kind: int, payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(kind, 1, payload)


def test_truncated_arrow_payloads() -> None:
    payload = written(BATCHES[1])[ELEMENT_HEADER.size :]
    for length in range(len(payload) - 8):
        with pytest.raises(RemoteProtocolError):
            decode(ElementFormat.ARROW, 4, payload[:length])


@given(st.sampled_from([ElementFormat.ROWS, ElementFormat.KEYED_ROWS]), st.binary(max_size=40))
def test_garbage_gives_rows_or_an_error_of_ours(kind: int, payload: bytes) -> None:
    try:
        batch = decode(kind, 1, payload)
    except RemoteProtocolError:
        return
    assert len(batch) == 1
