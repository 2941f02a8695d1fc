"""Elements over buffers of any size: what an assembler gives back, its memory and its files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError, ResourceExhausted
from minishuffle.exchange import elements
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import (
    ELEMENT_HEADER,
    Assembler,
    AssemblyBudget,
    ElementFormat,
    decode,
    pack_header,
)

Written = Callable[[Batch], bytes]

NUMBERS = pa.record_batch({"k": np.arange(1000), "v": np.linspace(0, 1, 1000)})


def assembler(limit_bytes: int = limits.ASSEMBLY_BYTES_MAX, directory: Path | None = None) -> Assembler:
    return Assembler(AssemblyBudget(limit_bytes, None if directory is None else str(directory)))


def fed(target: Assembler, buffers: Iterable[bytes]) -> Iterator[tuple[int, int, Any]]:
    """The elements of consecutive buffers; each is overwritten when it has been given back."""
    for buffer in buffers:
        segment = bytearray(buffer)
        target.feed(memoryview(segment), 0)
        while (element := target.next()) is not None:
            yield element
        assert target.exhausted
        segment[:] = b"\xff" * len(segment)
        segment.append(0)  # fails if anything still refers to the segment


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


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


@given(rows=st.lists(values, max_size=5), size=st.integers(1, 40))
def test_rows_of_any_kind_over_buffers_of_any_size(rows: list[Any], size: int, written: Written) -> None:
    """Case 282, SpanningRecordSerializationTest."""
    keyed = Batch(rows, [str(number) for number in range(len(rows))])
    data = written(rows) + written(keyed)
    found = [decode(*element) for element in fed(assembler(), cut(data, size))]
    assert [(batch.payload, batch.keys) for batch in found] == [(rows, None), (rows, keyed.keys)]


# --- buffers ----------------------------------------------------------------------------------------

STREAM = [
    Batch(["a"]),
    Batch([("row", 1)], ["k"]),
    Batch([]),
    Batch(pa.record_batch({"k": [1, 2]})),
    Batch([b"x" * 30]),
]


def expect_stream(found: list[tuple[int, int, Any]]) -> None:
    batches = [decode(*element) for element in found]
    assert [element[1] for element in found] == [1, 1, 0, 2, 1]
    assert [batch.payload for batch in batches] == [batch.payload for batch in STREAM]
    assert [batch.keys for batch in batches] == [batch.keys for batch in STREAM]


def test_every_cut_of_a_stream(written: Written) -> None:
    data = b"".join(map(written, STREAM))
    for at in range(len(data) + 1):
        expect_stream(list(fed(assembler(), [data[:at], data[at:]])))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, 12, 13, 64, 1000])
def test_a_stream_over_small_buffers(size: int, written: Written) -> None:
    target = assembler()
    for _ in range(2):
        expect_stream(list(fed(target, cut(b"".join(map(written, STREAM)), size))))


@pytest.mark.parametrize("size", [256, 4099, 32 * 1024])
@pytest.mark.parametrize("length", [0, 1, 100, 32 * 1024 - 12, 32 * 1024, 100_003, 3 * limits.MIB + 1])
def test_elements_of_many_lengths(length: int, size: int, written: Written) -> None:
    """Case 283, SpanningRecordSerializationTest."""
    rows = [np.random.default_rng(length).bytes(length), "end"]
    target = assembler()
    found = [decode(*element).payload for element in fed(target, cut(written(rows) * 2, size))]
    assert found == [rows, rows]


def test_arrow_elements_over_buffers_are_aligned(written: Written) -> None:
    found = list(fed(assembler(), cut(written(NUMBERS) * 3, 1001)))
    assert len(found) == 3
    for kind, rows, payload in found:
        back = decode(kind, rows, payload).payload
        assert isinstance(back, pa.RecordBatch)
        assert back.equals(NUMBERS)
        assert all(column.buffers()[1].address % 8 == 0 for column in back.columns)


# --- memory and files ---------------------------------------------------------------------------------


def test_the_budget_is_held_while_an_element_is_under_way(written: Written) -> None:
    budget = AssemblyBudget(1000)
    data = written([b"x" * 300])
    size = len(data) - ELEMENT_HEADER.size
    first, second = Assembler(budget), Assembler(budget)
    for number, target in enumerate((first, second), start=1):
        target.feed(memoryview(data)[:50], 1)
        assert target.next() is None
        assert budget.used == number * size
    first.feed(memoryview(data)[50:], 0)
    assert first.next() is not None
    assert budget.used == size
    assert second.clear() == 1
    assert budget.used == 0


def test_the_budget_is_added_up_only_when_all_that_was_reserved_would_not_fit() -> None:
    """Not at each reservation: with thousands of half elements that takes longer than to put one together."""

    class Counted(AssemblyBudget):
        added_up = 0

        @property
        def used(self) -> int:
            self.added_up += 1
            return super().used

    budget = Counted(1_000)
    for holder in range(9):
        assert budget.reserve(holder, 100)
    assert budget.added_up == 0
    budget.release(0)
    assert budget.reserve(9, 100)
    assert budget.added_up == 0, "900 are held, but 1,000 were reserved"
    assert budget.reserve(10, 100)
    assert budget.added_up == 1
    assert not budget.reserve(11, 1), "all of it is held"
    budget.release(10)
    assert budget.reserve(11, 100)
    assert budget.used == 1_000


def test_an_element_in_one_buffer_needs_no_budget(written: Written) -> None:
    budget = AssemblyBudget(0)
    (element,) = fed(Assembler(budget), [written(["a"])])
    assert decode(*element).payload == ["a"]


def spilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files that are mapped from now on."""
    sizes: list[int] = []
    real = elements._map_file

    def counting(size: int, directory: str | None) -> Any:
        sizes.append(size)
        return real(size, directory)

    monkeypatch.setattr(elements, "_map_file", counting)
    return sizes


def test_what_the_budget_has_no_room_for_goes_to_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: Written
) -> None:
    sizes = spilled(monkeypatch)
    target = assembler(limit_bytes=1000, directory=tmp_path)
    data = written([b"x" * 990]) + written([b"y" * 2000]) + written([b"z"])
    found = [decode(*element).payload for element in fed(target, cut(data, 100))]
    assert found == [[b"x" * 990], [b"y" * 2000], [b"z"]]
    assert [size // 1000 for size in sizes] == [2]
    assert list(tmp_path.iterdir()) == []


def test_long_arrow_elements_are_used_from_their_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: Written
) -> None:
    monkeypatch.setattr(elements, "SPILL_ELEMENT_BYTES", 4096)
    sizes = spilled(monkeypatch)
    (element,) = fed(assembler(directory=tmp_path), cut(written(NUMBERS), 512))
    back = decode(*element).payload
    del element
    assert isinstance(back, pa.RecordBatch)
    assert back.equals(NUMBERS)
    assert len(sizes) == 1


@pytest.mark.slow
def test_an_element_of_256_mib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = spilled(monkeypatch)
    size = 256 * limits.MIB
    block = np.arange(4 * limits.MIB, dtype=np.uint32).tobytes()  # 16 MiB
    budget = AssemblyBudget(limits.ASSEMBLY_BYTES_MAX, str(tmp_path))
    target = Assembler(budget)
    target.feed(memoryview(pack_header(size, 1, ElementFormat.ROWS)), 1)
    assert target.next() is None
    for _ in range(size // len(block)):
        target.feed(memoryview(block), 0)
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


def test_a_full_disk_names_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: Written
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    target = assembler(limit_bytes=0, directory=tmp_path)
    target.feed(memoryview(written([b"x" * 100])[:50]), 1)
    with pytest.raises(ResourceExhausted, match=rf"{tmp_path} \(No space left on device\): free space there"):
        target.next()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_named(tmp_path: Path, written: Written) -> None:
    target = assembler(limit_bytes=0, directory=tmp_path / "gone")
    target.feed(memoryview(written([b"x" * 100])[:50]), 1)
    with pytest.raises(ResourceExhausted, match=r"gone \(No such file or directory\)"):
        target.next()


# --- half elements and bad headers -----------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "rows"), [(0, 0), (1, 3), (11, 3), (12, 3), (40, 3)])
def test_a_half_element_is_thrown_away_with_its_rows_counted(kept: int, rows: int, written: Written) -> None:
    target = assembler()
    other = written(["before"])
    target.feed(memoryview(other + written([b"x" * 50, 2, 3])[:kept]), 1 + rows)
    assert target.next() is not None and target.next() is None
    assert target.partial == (kept > 0)
    assert target.clear() == rows
    assert target.clear() == 0
    assert [decode(*element).payload for element in fed(target, [other])] == [["before"]]


def test_clear_drops_the_rest_of_the_view(written: Written) -> None:
    target = assembler()
    target.feed(memoryview(written(["a"]) + written(["b"])), 2)
    assert target.next() is not None
    assert not target.exhausted
    assert not target.partial and target.clear() == 1
    assert target.exhausted


@pytest.mark.parametrize(
    "header",
    [(limits.ELEMENT_BYTES_MAX + 1, 1, 1), (2**32 - 1, 1, 3), (10, 1, 0), (10, 1, 6), (10, 1, 255)],
)
def test_headers_that_cannot_be(header: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = spilled(monkeypatch)
    target = assembler()
    target.feed(memoryview(pack_header(*header) + bytes(10)), 1)
    with pytest.raises(
        RemoteProtocolError, match=rf"an element of {header[0]} bytes, 1 rows and format {header[2]}"
    ):
        target.next()
    assert sizes == []


@pytest.mark.parametrize(
    ("version", "flags", "cut"), [(0, 0, 0), (2, 0, 0), (1, 2, 0), (1, 128, 5), (255, 255, 11)]
)
def test_a_header_of_another_version_or_with_a_flag_is_refused_in_words(
    version: int, flags: int, cut: int, written: Written
) -> None:
    data = bytearray(written([1, 2]))
    data[9:11] = bytes((version, flags))
    target = assembler()
    if cut:
        target.feed(memoryview(bytes(data[:cut])), 0)
        assert target.next() is None
    target.feed(memoryview(bytes(data[cut:])), 2)
    known = "this process reads version 1 and flags up to 0x01"
    text = f"header has version {version} and flags 0x{flags:02x}: {known}"
    with pytest.raises(RemoteProtocolError, match=text):
        target.next()
