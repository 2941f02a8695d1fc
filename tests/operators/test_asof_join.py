"""As-of joins against a loop over all right rows for each left one."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.operators import asof_join
from minishuffle.operators.asof_join import AsOfColumns, AsOfJoin
from minishuffle.operators.base import END_OF_TIME, Mark, Side, TaskContext, Watermark
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import Late
from minishuffle.operators.join_results import ColumnResults
from support.batches import as_batch, collecting

TIMES = (EventTime(column="t"), EventTime(column="u"))
ASIDE = (Late("side", "late"), Late("side", "late_right"))
Record = tuple[Any, int, Any]
"""Key, time, value."""
Step = tuple[int, "list[Record] | int"]
"""Input and a batch or a watermark."""
LEFT_SCHEMA = pa.schema({"k": pa.int64(), "t": pa.int64(), "v": pa.int64()})
RIGHT_SCHEMA = pa.schema({"key": pa.int32(), "u": pa.int64(), "v": pa.int64()})


def arrow(input: int, records: list[Record]) -> pa.RecordBatch:
    schema = RIGHT_SCHEMA if input else LEFT_SCHEMA
    columns = [pa.array([record[place] for record in records], schema.types[place]) for place in range(3)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class Run:
    """What a join gives, as (key, time, value, right time, right value); no row behind a watermark."""

    def __init__(self, tolerance: int | None) -> None:
        columns = AsOfColumns(("k",), ("key",))
        self.join = AsOfJoin(ColumnResults(columns, (LEFT_SCHEMA, RIGHT_SCHEMA)), tolerance, TIMES, ASIDE)
        self.join.open(TaskContext("job", "task", 0, 1, 1))
        self.rows: list[Any] = []
        self.late = 0
        self.watermark = -(1 << 63)

    def emit(self, item: Any) -> None:
        if isinstance(item, Side):
            self.late += len(item.batch)
        elif isinstance(item, Watermark):
            assert item.time > self.watermark
            self.watermark = item.time
        elif not isinstance(item, Mark):
            for row, time in zip(item.payload.to_pylist(), item.times.tolist(), strict=True):
                assert time == row["t"] > self.watermark
                self.rows.append((row["k"], row["t"], row["v"], row["u"], row["v_right"]))

    def take(self, steps: list[Step]) -> None:
        for input, item in steps:
            if isinstance(item, int):
                self.join.on_mark(Watermark(item), input, self.emit)
            else:
                self.join.process(as_batch(arrow(input, item)), input, self.emit)


def reference(steps: list[Step], tolerance: int | None) -> tuple[list[Any], int]:
    """What is in time, one after the other; then all against all."""
    watermarks = [-(1 << 63), -(1 << 63)]
    good: tuple[list[Record], list[Record]] = ([], [])
    late = 0
    for input, item in steps:
        if isinstance(item, int):
            watermarks[input] = item
            continue
        for record in item:
            if record[1] <= watermarks[input]:
                late += 1
            else:
                good[input].append(record)
    rows, farthest = [], 10**6 if tolerance is None else tolerance
    for key, time, value in good[0]:
        before = [
            (u, v)
            for other, u, v in good[1]
            if other is not None and other == key and 0 <= time - u <= farthest
        ]
        latest = max(before, key=lambda row: (row[0], 1 if row[1] is None else -row[1]), default=(None, None))
        rows.append((key, time, value, *latest))
    return rows, late


@st.composite
def interleavings(draw: st.DrawFn) -> list[Step]:
    times, steps = [0, 0], []
    for _ in range(draw(st.integers(0, 14))):
        input = draw(st.integers(0, 1))
        if draw(st.booleans()):
            row = st.tuples(
                st.none() | st.integers(0, 2),
                st.integers(-2, 15).map(times[input].__add__),
                st.none() | st.integers(0, 9),
            )
            steps.append((input, draw(st.lists(row, min_size=1, max_size=6))))
        else:
            times[input] += draw(st.integers(1, 12))
            steps.append((input, times[input]))
    return [*steps, (0, END_OF_TIME), (1, END_OF_TIME)]


def order(row: Any) -> Any:
    return tuple((value is not None, value or 0) for value in row)


@given(steps=interleavings(), tolerance=st.sampled_from([None, 0, 3, 20]), look=st.sampled_from([0, 65_536]))
def test_each_left_row_has_the_latest_right_one(steps: list[Step], tolerance: int | None, look: int) -> None:
    rows, late = reference(steps, tolerance)
    run = Run(tolerance)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asof_join, "BATCH_ROWS_MAX", max(look, 3))
        run.take(steps)
    assert sorted(run.rows, key=order) == sorted(rows, key=order) and run.late == late
    assert run.join.state_rows() == 0 and run.watermark == END_OF_TIME


def test_a_left_row_waits_for_the_rights_watermark_alone() -> None:
    run = Run(None)
    run.take([(1, [(1, 3, 30)]), (0, [(1, 5, 50)]), (0, 9), (1, 4)])
    assert run.rows == []
    run.take([(1, [(1, 5, 31)]), (1, 5)])
    assert run.rows == [(1, 5, 50, 5, 31)]


def test_one_right_row_of_each_key_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asof_join, "BATCH_ROWS_MAX", 10)
    run = Run(None)
    for time in range(0, 1000, 10):
        run.take([(1, [(key, time + key, time) for key in range(5)]), (0, time), (1, time + 9)])
    assert run.join.state_rows() <= 2 * 5 + 10 + 5
    run.take([(0, [(4, 2000, 1)]), (1, END_OF_TIME)])
    assert run.rows == [(4, 2000, 1, 994, 990)]
    near = Run(100)
    for time in range(0, 1000, 10):
        near.take([(1, [(time, time, time)]), (0, time), (1, time + 9)])
    assert near.join.state_rows() <= 2 * 11 + 10 + 1


def test_right_rows_of_one_time_are_taken_by_their_other_columns() -> None:
    for first, second in ((7, 3), (3, 7)):
        run = Run(None)
        run.take([(1, [(1, 3, first), (1, 3, second)]), (0, [(1, 3, 0)]), (1, 3)])
        assert run.rows == [(1, 3, 0, 3, 3)]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float64()])
def test_of_ties_nan_is_the_greatest_and_null_the_smallest(kind: pa.DataType) -> None:
    times, left = [5, 5, 5], pa.record_batch({"k": [1], "t": [9], "v": [0]})
    for values, taken in (([math.nan, 2.5, 3.5], 2.5), ([math.nan, None, 2.5], None)):
        column = pa.array(values, pa.float64()).cast(kind)
        right = pa.record_batch({"key": [1, 1, 1], "u": times, "v": column})
        schemas = (left.schema, right.schema)
        join = AsOfJoin(ColumnResults(AsOfColumns(("k",), ("key",)), schemas), None, TIMES, ASIDE)
        join.open(TaskContext("job", "task", 0, 1, 1))
        out: list[Any] = []
        join.process(as_batch(right), 1, collecting(out))
        join.process(as_batch(left), 0, collecting(out))
        join.on_mark(Watermark(END_OF_TIME), 1, collecting(out))
        assert out[0]["v_right"].to_pylist() == [taken]
