"""Narrow columns come back as they were, and take as few bits as their values need."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minishuffle.errors import RemoteProtocolError
from minishuffle.exchange import narrowing
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import ELEMENT_HEADER, ElementFormat, decode, encode
from minishuffle.exchange.narrowing import NARROW_ROWS_MIN, Narrowed, narrow, narrow_schema, widen
from support.batches import as_batch

ROWS = NARROW_ROWS_MIN
INT64 = st.integers(-(2**63), 2**63 - 1)


def batch_of(values: Any, kind: pa.DataType | None = None) -> pa.RecordBatch:
    """One column, ``x``, of at least as many rows as are looked at: the values again and again."""
    array = np.resize(np.array(values), ROWS)
    return pa.record_batch({"x": pa.array(array) if kind is None else pa.array(array).view(kind)})


def back_from(batch: pa.RecordBatch) -> pa.RecordBatch:
    rows, parts = encode(as_batch(batch))
    back = decode(ElementFormat.ARROW, rows, b"".join(parts)[ELEMENT_HEADER.size :]).payload
    assert isinstance(back, pa.RecordBatch)
    back.validate(full=True)
    return back


@given(
    least=INT64, span=st.sampled_from([0, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63]), middle=INT64
)
def test_any_integers_come_back_and_take_the_fewest_bits(least: int, span: int, middle: int) -> None:
    greatest = min(least + span, 2**63 - 1)
    batch = batch_of(np.array([least, min(max(middle, least), greatest), greatest], np.int64))
    narrowed, notes, _ = narrow(batch)
    wanted = next((bits for bits in (8, 16, 32) if greatest - least < 2**bits), None)
    assert [note.bits for note in notes] == ([wanted] if wanted else [])
    assert narrowed.column(0).type.bit_width == (wanted or 64)
    assert back_from(batch).equals(batch)


@pytest.mark.parametrize(
    "kind", [pa.uint64(), pa.timestamp("us", "UTC"), pa.duration("ns"), pa.time64("us"), pa.date64()], ids=str
)
def test_all_kinds_of_whole_numbers_of_64_bits(kind: pa.DataType) -> None:
    batch = batch_of(86_400_000 * np.arange(40), kind)
    assert [note.bits for note in narrow(batch)[1]] == [32]
    assert back_from(batch).equals(batch)
    ends = batch_of(np.array([2**64 - 1, 2**64 - 200], np.uint64))
    assert narrow(ends)[1] == [Narrowed(0, 8, -200)]
    assert back_from(ends).equals(ends)


def test_small_numbers_need_no_base_and_a_slice_has_its_own() -> None:
    batch = pa.record_batch({"x": pa.array(np.arange(3 * ROWS, dtype=np.int64))})
    assert narrow(batch)[1] == [Narrowed(0, 16, 0)]
    end = batch.slice(2 * ROWS)
    assert narrow(end)[1] == [Narrowed(0, 16, 0)]
    assert back_from(end).equals(end)
    high = batch_of(np.arange(10**6, 10**6 + 200))
    assert narrow(high)[1] == [Narrowed(0, 8, 10**6)]


def test_other_columns_are_left_alone() -> None:
    numbers = pa.array(np.arange(ROWS, dtype=np.int64))
    columns = {
        "float": pc.divide(numbers.cast(pa.float64()), 10.0),
        "int": numbers,
        "text": pa.array([*["short"] * (ROWS - 1), "x" * 65_536]),
        "null": pa.array([None, *range(ROWS - 1)], pa.int64()),
        "null float": pa.array([None, *[0.5] * (ROWS - 1)]),
        "null text": pa.array([None, *["a"] * (ROWS - 1)]),
        "short": numbers.cast(pa.int32()),
    }
    fields = [pa.field(name, column.type, metadata={"a": name}) for name, column in columns.items()]
    fields[1] = fields[1].with_nullable(False)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields, {"all": "of it"}))
    assert [note.column for note in narrow(batch)[1]] == [1]
    assert back_from(batch).equals(batch, check_metadata=True)
    few = batch.slice(0, NARROW_ROWS_MIN - 1)
    assert narrow(few) == (few, [], [])


@given(st.lists(st.floats(), min_size=1), st.booleans())
@example([float("nan"), float("inf"), -0.0, 0.25, 1e300], False)
@example([-float("nan"), -float("inf"), 3.4e38, 2.0**-149], True)
def test_floats_come_back_bit_by_bit_and_are_short_if_they_can_be(values: list[float], rounded: bool) -> None:
    given_ones = np.array(values)
    with np.errstate(all="ignore"):
        short = given_ones.astype(np.float32).astype(np.float64)
    batch = batch_of(short if rounded else given_ones)
    fits = rounded or short.tobytes() == given_ones.tobytes()
    assert narrow(batch)[1] == ([Narrowed(0, 32, 0)] if fits else [])
    assert back_from(batch).column(0).to_numpy().tobytes() == batch.column(0).to_numpy().tobytes()


def test_a_float_behind_those_that_are_tried_first_keeps_all_long() -> None:
    batch = batch_of([*[0.5] * (ROWS - 1), 0.1])
    assert narrow(batch)[1] == []
    assert back_from(batch).equals(batch)


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string(), pa.large_binary()], ids=str)
@pytest.mark.parametrize("longest", [0, 3, 255, 256, 65_535, 65_536])
def test_texts_go_as_their_lengths(kind: pa.DataType, longest: int) -> None:
    texts = ["ä"[: longest // 2], "", "x" * longest, "yz"[:longest]] * (ROWS // 64)
    texts += [""] * (2 * ROWS - len(texts))
    batch = pa.record_batch({"x": pa.array(texts, kind), "y": pa.array(texts[::-1], kind)})
    wide = 64 if "large" in str(kind) else 32
    bits = next(bits for bits in (8, 16, 32) if longest < 2**bits)
    _, notes, data = narrow(batch)
    assert [note.bits for note in notes] == ([bits] * 2 if bits < wide else [])
    assert [note.base for note in notes] == list(map(len, data))
    for each in (batch, batch.slice(3, ROWS), batch.slice(ROWS)):
        assert back_from(each).equals(each)
        assert not any(
            buffer.is_mutable for column in back_from(each) for buffer in column.buffers() if buffer
        )


def test_all_kinds_of_narrow_columns_at_once() -> None:
    rows = np.arange(2 * ROWS, dtype=np.int64)
    columns = {
        "text": pa.array(list(map(str, rows))),
        "int": pa.array(rows),
        "float": pa.array(rows / 4),
        "more": pa.array([b"x" * (row % 300) for row in range(2 * ROWS)], pa.large_binary()),
        "long": pa.array(rows / 10),
    }
    batch = pa.record_batch(columns).slice(5)
    assert [note[:2] for note in narrow(batch)[1]] == [(0, 8), (1, 16), (2, 32), (3, 16)]
    assert back_from(batch).equals(batch)


def test_columns_that_another_process_may_know_as_an_extension_and_long_batches_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = batch_of([1, 2, 3])
    unknown = pa.schema([pa.field("x", pa.int64(), metadata={"ARROW:extension:name": "my.own"})])
    assert narrow(pa.RecordBatch.from_arrays(batch.columns, schema=unknown))[1] == []
    assert encode(as_batch(batch), narrows=False)[1][1:] != encode(as_batch(batch))[1][1:]
    monkeypatch.setattr(narrowing, "SPILL_ELEMENT_BYTES", batch.nbytes - 1)
    assert narrow(batch) == (batch, [], [])


def test_what_was_widened_cannot_be_changed() -> None:
    assert not any(buffer.is_mutable for buffer in back_from(batch_of([1, 2])).column(0).buffers() if buffer)


def test_an_element_of_small_numbers_takes_half_of_the_bytes() -> None:
    values = np.arange(100_000 - ROWS, 100_000, dtype=np.int64)
    size = sum(map(len, encode(Batch(pa.record_batch({"key": values, "value": values[::-1].copy()})))[1]))
    assert size < 0.55 * 2 * 8 * ROWS


SCHEMA = pa.schema([("x", pa.int64()), ("y", pa.float64()), ("z", pa.string()), ("big", pa.large_binary())])


@pytest.mark.parametrize(
    "note", [(0, 64, 0), (0, 7, 0), (1, 8, 0), (1, 16, 0), (2, 32, 0), (2, 64, 0), (3, 64, 0), (4, 8, 0)]
)
def test_columns_that_cannot_have_been_narrowed(note: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=rf"column {note[0]} of {note[1]} bits"):
        narrow_schema(SCHEMA, [Narrowed(*note)])
    for twice in (Narrowed(0, 8, 0), Narrowed(2, 8, 0)):
        with pytest.raises(ValueError, match=f"column {twice.column} of 8 bits"):
            narrow_schema(SCHEMA, [twice] * 2)


def test_narrow_columns_with_nulls_or_too_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, none = [Narrowed(0, 8, 0)], pa.py_buffer(b"")
    schema = pa.schema([("x", pa.int64())])
    with pytest.raises(ValueError, match="nulls in column 0"):
        widen(pa.record_batch({"x": pa.array([1, None], pa.uint8())}), schema, notes, none)
    monkeypatch.setattr(narrowing, "ELEMENT_BYTES_MAX", 100)
    with pytest.raises(ValueError, match="1 narrow columns of 13 rows"):
        widen(pa.record_batch({"x": pa.array(range(13), pa.uint8())}), schema, notes, none)


def rewritten(batch: pa.RecordBatch, change: Callable[[Narrowed], Narrowed]) -> tuple[int, bytes]:
    """The rows and the payload of the batch's element, with other notes."""
    rows, parts = encode(as_batch(batch))
    start, notes = bytes(parts[1]), narrow(batch)[1]
    packed = struct.Struct(">IIq")
    start = start[: len(start) - packed.size * len(notes)]
    start += b"".join(packed.pack(*change(note)) for note in notes)
    return rows, b"".join([start, *parts[2:]])


@pytest.mark.parametrize("more", [-1, 1, -(2**40), 2**40, 2**62])
def test_texts_of_other_lengths_than_their_bytes_are_refused(more: int) -> None:
    texts = pa.array(["abc", "defgh"] * ROWS)
    batch = pa.record_batch({"x": texts, "n": pa.array(range(2 * ROWS)), "y": texts})
    for changed in (0, 2):
        rows, payload = rewritten(
            batch,
            lambda note, at=changed: note._replace(base=note.base + more) if note.column == at else note,
        )
        with pytest.raises(RemoteProtocolError, match="Arrow columns cannot be read"):
            decode(ElementFormat.ARROW, rows, payload)
    moved = {0: more, 1: 0, 2: -more}
    rows, payload = rewritten(batch, lambda note: note._replace(base=note.base + moved[note.column]))
    with pytest.raises(RemoteProtocolError, match="texts of"):
        decode(ElementFormat.ARROW, rows, payload)
    assert decode(ElementFormat.ARROW, *rewritten(batch, lambda note: note)).payload.equals(batch)


@pytest.mark.parametrize("values", [[1, 2, 3], ["a", "bc", "def"]], ids=["numbers", "texts"])
def test_a_payload_that_is_cut_is_refused_at_any_length(values: list[Any]) -> None:
    rows, parts = encode(as_batch(batch_of(values)))
    payload = b"".join(parts)[ELEMENT_HEADER.size :]
    for length in [*range(400), len(payload) - 9]:
        with pytest.raises(RemoteProtocolError):
            decode(ElementFormat.ARROW, rows, payload[:length])
