"""Batches of rows and of columns against a plain list of (row, key, time)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minishuffle.exchange.batch import Batch, KeyColumns
from support.soak import examples

Record = tuple[Any, Any, int | None]
"""Row, key, time."""

KEYS = st.sampled_from([None, True, 1, 1.0, "a", (1, "a"), b"a"])
"""Mixed kinds, some of which are equal."""
FORMS = st.sampled_from(["rows", "rows by themselves", "unkeyed rows", "columns", "unkeyed columns"])


def batch_of(form: str, values: list[int], keys: list[Any], *, timed: bool) -> Batch:
    times = np.array(values, np.int64) * 10 if timed else None
    if form.endswith("columns"):
        payload = pa.record_batch(
            {"v": pa.array(values, pa.int64()), "k": pa.array(map(repr, keys), pa.string())}
        )
        return Batch(payload, KeyColumns(payload, [1]) if form == "columns" else None, times)
    rows: list[Any] = [[value] for value in values]
    if form == "rows by themselves":
        return Batch(rows, rows, times)
    return Batch(rows, keys if form == "rows" else None, times)


def records(batch: Batch) -> list[Record]:
    """What is in a batch, whose fields are as long as each other."""
    if isinstance(batch.payload, list):
        rows, keys = batch.payload, batch.keys
    else:
        rows = batch.payload.to_pylist()
        keys = None
        if batch.keys is not None:
            assert isinstance(batch.keys, KeyColumns)
            # The payload's own column, not a copy.
            (column,) = batch.keys
            assert [each and each.address for each in column.buffers()] == [
                each and each.address for each in batch.payload.column(1).buffers()
            ]
            keys = column.to_pylist()
    times = None if batch.times is None else batch.times.tolist()
    assert batch.times is None or batch.times.dtype == np.int64
    nothing = [None] * len(rows)
    return list(zip(rows, nothing if keys is None else keys, times or nothing, strict=True))


def same(found: Batch, like: Batch, expected: list[Record]) -> None:
    """The records are these, and keys and times are as they were in kind."""
    assert len(found) == len(expected)
    assert [(row, repr(key), time) for row, key, time in records(found)] == [
        (row, repr(key), time) for row, key, time in expected
    ]
    if isinstance(like.payload, list):
        assert all(one is other for one, (other, _, _) in zip(found.payload, expected, strict=True))
        if like.keys is not None:
            assert all(one is other for one, (_, other, _) in zip(found.keys, expected, strict=True))
    assert (found.keys is None, found.times is None) == (like.keys is None, like.times is None)
    assert (found.keys is found.payload) == (like.keys is like.payload)


@settings(max_examples=examples(40))
@given(st.data(), FORMS, st.lists(st.tuples(st.integers(0, 9), KEYS), max_size=12), st.booleans())
def test_a_batch_is_cut_and_picked_as_a_list_of_records_is(
    data: st.DataObject, form: str, drawn: list[tuple[int, Any]], timed: bool
) -> None:
    batch = batch_of(form, [value for value, _ in drawn], [key for _, key in drawn], timed=timed)
    plain, size = records(batch), len(drawn)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    same(batch.slice(begin, end), batch, plain[begin:end])

    marks = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    kept = batch.mask(np.array(marks, np.bool_))
    same(kept, batch, [record for record, mark in zip(plain, marks, strict=True) if mark])
    assert (kept is batch) == all(marks)

    numbers = data.draw(st.lists(st.integers(0, size - 1), max_size=20)) if size else []
    same(batch.take(np.array(numbers, np.int64)), batch, [plain[number] for number in numbers])

    counts = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    often = [record for record, count in zip(plain, counts, strict=True) for _ in range(count)]
    same(batch.repeat(np.array(counts, np.int64)), batch, often)


@settings(max_examples=examples(30))
@given(FORMS, st.lists(st.lists(st.tuples(st.integers(0, 9), KEYS), max_size=4), min_size=1), st.booleans())
def test_batches_are_put_together_in_order(
    form: str, drawn: list[list[tuple[int, Any]]], timed: bool
) -> None:
    batches = [batch_of(form, [v for v, _ in each], [k for _, k in each], timed=timed) for each in drawn]
    same(Batch.concat(batches), batches[0], [record for batch in batches for record in records(batch)])


@pytest.mark.parametrize("form", ["rows", "columns"])
def test_keys_and_times_are_cut_without_a_copy_of_columns(form: str) -> None:
    batch = batch_of(form, [1, 2, 3], ["a", "b", "c"], timed=True)
    piece = batch.slice(1, 3)
    assert piece.times is not None
    assert np.shares_memory(piece.times, batch.times)
    if form == "columns":
        assert piece.payload.column(0).buffers()[1].address == batch.payload.column(0).buffers()[1].address


def test_keys_of_several_columns_stay_these_columns() -> None:
    payload = pa.record_batch({"a": [1, 2], "v": [5, 6], "b": ["x", "y"]})
    found = Batch(payload, KeyColumns(payload, [2, 0])).take(np.array([1, 1, 0])).keys
    assert isinstance(found, KeyColumns)
    assert [column.to_pylist() for column in found] == [["y", "y", "x"], [2, 2, 1]]
    assert found.numbers == (2, 0)


def test_rows_are_replaced_and_columns_are_not() -> None:
    for form in ("rows", "rows by themselves", "unkeyed rows", "columns", "unkeyed columns"):
        batch = batch_of(form, [1, 2], ["a", "b"], timed=True)
        assert batch.map_rows(lambda rows: rows) is batch
        found = batch.map_rows(lambda rows: [[row] for row in rows])
        if form.endswith("columns"):
            assert found is batch
        else:
            assert (found.payload, found.times) == ([[[1]], [[2]]], batch.times)
            assert found.keys is found.payload if form == "rows by themselves" else found.keys is batch.keys
