"""Interval joins of columns: types, columns, batches; which records match is in ``test_interval_join``."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.exchange.batch import Batch
from minishuffle.operators import join_results
from minishuffle.operators.base import END_OF_TIME, TaskContext, Watermark
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import Late
from minishuffle.operators.interval_join import IntervalJoin
from minishuffle.operators.join_columns import JoinColumns
from minishuffle.operators.join_inputs import LEFT, RIGHT, Bounds, How
from minishuffle.operators.join_results import BatchesOut, ColumnResults
from minishuffle.operators.row_conversion import rows_of
from support.batches import as_batch, collecting


def joined(operator: IntervalJoin, left: pa.RecordBatch, right: pa.RecordBatch) -> list[dict[str, Any]]:
    out: list[Any] = []
    operator.open(TaskContext("job", "task", 0, 1, 1))
    operator.process(as_batch(left), LEFT, collecting(out))
    operator.process(as_batch(right), RIGHT, collecting(out))
    for input in (LEFT, RIGHT):
        operator.on_mark(Watermark(END_OF_TIME), input, collecting(out))
    batches = [item for item in out if isinstance(item, pa.RecordBatch)]
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(batches[0].schema)
    return [row for batch in batches for row in batch.to_pylist()]


def simple(left: pa.Schema, right: pa.Schema, how: How = "inner", **options: Any) -> IntervalJoin:
    results = ColumnResults(JoinColumns(("k",), ("k",), how), (left, right))
    time = EventTime(column="t")
    return IntervalJoin(results, Bounds(10, 10), (time, time), **options)


def batch(keys: pa.Array, **columns: Any) -> pa.RecordBatch:
    given = columns or {"v": list(range(len(keys)))}
    return pa.record_batch({"k": keys, "t": pa.array([1] * len(keys)), **given})


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pa.array([1, 2], pa.int8()), pa.array([2, 300], pa.int64())),
        (pa.array(["a", "b"]), pa.array(["b", "c"], pa.large_string())),
        (pa.array(["a", "b"]).dictionary_encode(), pa.array(["b", "c"])),
        (pa.array(["a", "b"], pa.string_view()), pa.array(["b", "c"], pa.string_view())),
        (pa.array([True, False]), pa.array([0, 7], pa.int32())),
        (pa.array([1.5, 2.0], pa.float32()), pa.array([2.0, 9.0])),
        (pa.array([1, 2], pa.timestamp("s", "UTC")), pa.array([2_000_000, 5], pa.timestamp("us", "UTC"))),
        (pa.array([b"x", b"y"]), pa.array([b"y", b"z"], pa.large_binary())),
        (pa.array([1, 2]), pa.array([2.0, 2.5])),
        (pa.array([1.5, 2.0]), pa.array([2, 1])),
        (pa.array([Decimal("1.5"), Decimal("2.0")]), pa.array([Decimal("2.00"), Decimal("1.25")])),
    ],
    ids=lambda array: str(array.type),
)
def test_keys_of_like_types_match(left: pa.Array, right: pa.Array) -> None:
    sides = batch(left), batch(right)
    rows = joined(simple(*(side.schema for side in sides)), *sides)
    assert [(row["v"], row["v_right"]) for row in rows] == [(1, 0)]


def test_rows_with_many_partners_go_out_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_results, "BATCH_ROWS_MAX", 100)
    sizes: list[int] = []
    one = batch(pa.array([1] * 70))
    operator = simple(one.schema, one.schema)
    operator.open(TaskContext("job", "task", 0, 1, 1))
    operator.process(as_batch(one), LEFT, lambda item: None)
    operator.process(as_batch(one), RIGHT, lambda item: sizes.append(len(item)))  # type: ignore[arg-type]
    assert sum(sizes) == 70 * 70
    assert max(sizes) <= 100


def test_a_name_that_is_taken_with_its_suffix_gets_another() -> None:
    left, right = batch(pa.array([1]), v=[1], v_right=[2]), batch(pa.array([1]), v=[3])
    (row,) = joined(simple(left.schema, right.schema), left, right)
    assert {name: row[name] for name in row if name[0] == "v"} == {"v": 1, "v_right": 2, "v_right_right": 3}


def left_of(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)


def test_a_right_record_alone_has_its_keys_and_time_and_nothing_else_of_the_left() -> None:
    strict = [pa.field(name, kind, nullable=False) for name, kind in (("k", pa.int64()), ("t", pa.date32()))]
    left, right = pa.schema(strict), pa.schema({"k": pa.int32(), "t": pa.timestamp("us"), "v": pa.int64()})
    operator = simple(left, right, "full")
    (row,) = joined(operator, left_of(left), pa.record_batch([[1], [5], [7]], schema=right))
    t_right = datetime(1970, 1, 1, microsecond=5)
    assert row == {"k": 1, "t": None, "t_right": t_right, "v": 7}


def test_nothing_but_the_left_shows_the_right_columns_as_null() -> None:
    right = pa.schema({"k": pa.int64(), "t": pa.int64(), "text": pa.dictionary(pa.int8(), pa.string())})
    operator = simple(batch(pa.array([1])).schema, right, "left")
    operator.open(TaskContext("job", "task", 0, 1, 1))
    out: list[Any] = []
    operator.process(as_batch(batch(pa.array([1, None]))), LEFT, collecting(out))
    assert out[0].to_pylist() == [{"k": None, "t": 1, "v": 1, "t_right": None, "text": None}]
    operator.on_mark(Watermark(END_OF_TIME), RIGHT, collecting(out))
    assert out[1].schema.field("text").type == pa.string()
    assert out[1].num_rows == 1


def test_late_records_with_views_of_texts_are_set_aside_as_they_are() -> None:
    given = batch(pa.array(["a"], pa.string_view()), v=pa.array([b"x"], pa.binary_view()))
    operator = simple(given.schema, given.schema, lateness=(Late("side", "late"), Late()))
    operator.open(TaskContext("job", "task", 0, 1, 1))
    out: list[Any] = []
    operator.on_mark(Watermark(1), LEFT, collecting(out))
    operator.process(as_batch(given), LEFT, collecting(out))
    assert out[0][1].equals(given)


@pytest.mark.parametrize(("kind", "sizes"), [("rows", [100, 100, 100]), ("columns", [105, 105, 90])])
def test_few_results_are_put_together_and_many_are_cut_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch, kind: str, sizes: list[int]
) -> None:
    """A row takes 100 bytes, one of columns 95."""
    monkeypatch.setattr(join_results, "BATCH_BYTES_MAX", 10_000)
    texts = [f"{number:>91}" for number in range(300)]
    columns = pa.record_batch({"text": texts})
    whole = Batch(texts if kind == "rows" else columns, None, np.arange(300))
    out: list[Batch] = []
    results = BatchesOut(out.append)  # type: ignore[arg-type]
    for begin in range(0, 60, 20):
        results.add(whole.slice(begin, begin + 20))
    assert out == []
    results.add(whole.slice(60, 300))
    results.flush()
    results.flush()
    assert [len(each) for each in out] == sizes
    found = Batch.concat(out)
    assert found.times is not None
    assert found.times.tolist() == list(range(300))
    assert rows_of(found) == (texts if kind == "rows" else columns.to_pylist())


def test_a_right_side_of_keys_alone_is_held_and_written() -> None:
    left, right = pa.record_batch({"k": [1, 2], "v": [5, 6]}), pa.record_batch({"k": [1, 1, 3]})
    time = EventTime(is_beside=True)
    before, after = (
        IntervalJoin(
            ColumnResults(JoinColumns(("k",), ("k",), "inner"), (left.schema, right.schema)),
            Bounds(0, 0),
            (time, time),
        )
        for _ in range(2)
    )
    for operator in (before, after):
        operator.open(TaskContext("job", "task", 0, 1, 1))
    before.process(Batch(right, None, np.array([7, 7, 7])), RIGHT, lambda item: None)
    after.read_state(before.write_state())
    assert after.state_rows() == 3
    out: list[Any] = []
    after.process(Batch(left, None, np.array([7, 7])), LEFT, collecting(out))
    assert out[0].to_pylist() == [{"k": 1, "v": 5}] * 2
