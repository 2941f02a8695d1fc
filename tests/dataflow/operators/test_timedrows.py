"""Rows that wait for their time, against a list of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.dataflow.operators.base import END_OF_TIME
from minishuffle.dataflow.operators.timedrows import TimedRows, WaitingRows


def timed(times: list[int], **columns: pa.Array) -> TimedRows:
    """Rows that also have their time as a column."""
    moments = np.array(times, dtype=np.int64)
    return TimedRows(pa.RecordBatch.from_pydict({"t": pa.array(moments), **columns}), moments)


def read(rows: TimedRows | None) -> list[int]:
    if rows is None:
        return []
    assert rows.batch["t"].to_pylist() == rows.times.tolist()
    return rows.times.tolist()


@given(
    st.lists(st.lists(st.integers(-9, 9), max_size=12) | st.integers(-10, 10), max_size=20),
)
def test_rows_go_in_order_once_their_time_has_come(steps: list[list[int] | int]) -> None:
    waiting, held = WaitingRows(), list[int]()
    for step in [*steps, END_OF_TIME]:
        if isinstance(step, list):
            waiting.add(timed(step))
            held += step
        else:
            assert read(waiting.take_until(step)) == sorted(time for time in held if time <= step)
            held = [time for time in held if time > step]
        assert len(waiting) == len(held)
        assert waiting.earliest == min(held, default=END_OF_TIME)
        assert sorted(time for rows in waiting for time in read(rows)) == sorted(held)


def test_rows_of_one_time_stay_in_their_order() -> None:
    rows = timed([3, 1, 3, 1], n=pa.array([0, 1, 2, 3])).in_order()
    assert read(rows) == [1, 1, 3, 3]
    assert rows.batch["n"].to_pylist() == [1, 3, 0, 2]


def test_rows_of_views_are_put_in_order_too() -> None:
    kind = pa.string_view()
    waiting = WaitingRows()
    for texts, times in ((["a", "b"], [2, 1]), (["c", "d"], [1, 0])):
        nested = pa.array([[text] for text in texts], pa.list_(kind))
        waiting.add(timed(times, s=pa.array(texts, kind), l=nested))
    rows = waiting.take_until(9)
    assert rows is not None and rows.batch["s"].type == kind and rows.batch["l"].type == pa.list_(kind)
    assert rows.batch["s"].to_pylist() == ["d", "b", "c", "a"]
    assert rows.batch["l"].to_pylist() == [["d"], ["b"], ["c"], ["a"]]


def test_rows_of_one_time_go_as_they_came_whatever_else_came_with_them() -> None:
    waiting = WaitingRows()
    waiting.add(timed([2, 9], n=pa.array(["first", "last"])))
    waiting.add(timed([1, 2, 9], n=pa.array(["", "second", "last but one"])))
    found = waiting.take_until(2)
    assert found is not None and found.batch["n"].to_pylist() == ["", "first", "second"]
    found = waiting.take_until(9)
    assert found is not None and found.batch["n"].to_pylist() == ["last", "last but one"]


def test_few_rows_that_stay_do_not_keep_their_batch_in_memory() -> None:
    waiting = WaitingRows()
    waiting.add(timed(list(range(100_000))))
    assert len(read(waiting.take_until(99_990))) == 99_991
    (rest,) = waiting
    assert read(rest) == list(range(99_991, 100_000))
    assert sum(buffer.size for buffer in rest.batch["t"].buffers() if buffer) < 1_000
