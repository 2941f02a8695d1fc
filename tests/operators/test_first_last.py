"""First and last by event time against a loop over the rows, however they are cut."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import UsageError
from minishuffle.operators import first_last
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.first_last import Extreme, FirstOrLast

T = EventTime(column="t")
SCHEMA = pa.schema({"t": pa.int64(), "a": pa.string(), "b": pa.float64()})
ROWS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 3),
        st.none() | st.sampled_from(["", "x", "y"]),
        st.none() | st.integers(-2, 2).map(float),
    ),
    min_size=1,
    max_size=30,
)


def batch_of(rows: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip("tab", row[1:], strict=True)) for row in rows], SCHEMA)


def slots_of(rows: list[Any], numbers: dict[int, int]) -> np.ndarray[Any, Any]:
    return np.array([numbers.setdefault(row[0], len(numbers)) for row in rows], dtype=np.int64)


def best(rows: list[Any], is_last: bool) -> Any:
    def rank(row: Any) -> Any:
        _, at, a, b = row
        return (-at if is_last else at, a is not None, a or "", b is not None, b or 0.0)

    return min(rows, key=rank)


@given(rows=ROWS, size=st.integers(1, 7), is_last=st.booleans(), place=st.sampled_from([0, 1]))
def test_each_slot_has_the_value_of_its_best_row(
    rows: list[Any], size: int, is_last: bool, place: int
) -> None:
    """At the end, after each row, and in a state that others are merged into."""
    name = "ab"[place]
    ended, running, merged = (FirstOrLast(is_last, name, ("a", "b"), T) for _ in range(3))
    numbers: dict[int, int] = {}
    for first in range(0, len(rows), size):
        piece = rows[first : first + size]
        slots, column = slots_of(piece, numbers), ended.rows_of(batch_of(piece))
        for aggregate in (ended, running, merged):
            aggregate.grow(len(numbers))
        ended.update(slots, column)
        after = running.running(slots, column).to_pylist()
        for number, (slot, _, _, _) in enumerate(piece):
            seen = [row for row in rows[: first + number + 1] if row[0] == slot]
            assert after[number] == best(seen, is_last)[2 + place]
        one = FirstOrLast(is_last, name, ("a", "b"), T)
        present, local = np.unique(slots, return_inverse=True)
        one.grow(len(present))
        one.update(local, column)
        merged.merge(present, one.as_columns(slice(0, len(present))))
    wanted = [best([row for row in rows if row[0] == slot], is_last)[2 + place] for slot in numbers]
    everything = slice(0, len(numbers))
    for aggregate in (ended, running, merged):
        assert aggregate.at(everything).to_pylist() == wanted
    kept = np.arange(len(numbers))[::-2]
    ended.keep(kept)
    assert ended.at(slice(0, len(kept))).to_pylist() == wanted[::-2]


TEXTS = st.lists(st.tuples(st.integers(0, 2), st.none() | st.text(max_size=2)), min_size=1, max_size=20)


@given(rows=TEXTS, size=st.integers(1, 7), function=st.sampled_from(["min", "max"]))
def test_extremes_of_texts(rows: list[Any], size: int, function: str) -> None:
    ended, running, merged, pick = *(Extreme(function) for _ in range(3)), {"min": min, "max": max}[function]
    numbers: dict[int, int] = {}
    for first in range(0, len(rows), size):
        piece = rows[first : first + size]
        slots, column = slots_of(piece, numbers), pa.array([text for _, text in piece], pa.string())
        for aggregate in (ended, running, merged):
            aggregate.grow(len(numbers))
        ended.update(slots, column)
        seen = [
            [text for key, text in rows[: first + number + 1] if key == piece[number][0] and text is not None]
            for number in range(len(piece))
        ]
        assert running.running(slots, column).to_pylist() == [pick(some, default=None) for some in seen]
        merged.merge(slots, [pa.StructArray.from_arrays([column], ["value"])])
    for aggregate in (running, merged):
        assert aggregate.at(slice(0, len(numbers))).equals(ended.at(slice(0, len(numbers))))


def test_rows_that_cannot_win_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_last, "BATCH_ROWS_MAX", 10)
    aggregate = FirstOrLast(True, "a", ("a",), T)
    aggregate.grow(1)
    for number in range(100):
        batch = batch_of([(0, number, "x", None)] * 4)
        aggregate.update(np.zeros(4, np.int64), aggregate.rows_of(batch))
        assert aggregate._rows is not None
        assert aggregate._rows.num_rows <= 12
    assert aggregate.at(slice(0, 1)).to_pylist() == ["x"]


def test_columns_may_come_as_dictionaries_or_as_what_they_hold() -> None:
    aggregate = FirstOrLast(True, "v", ("v",), T)
    aggregate.grow(1)
    for at, texts in enumerate([pa.array(["x"]).dictionary_encode(), pa.array(["y"])]):
        aggregate.update(np.zeros(1, np.int64), aggregate.rows_of(pa.record_batch({"t": [at], "v": texts})))
    assert aggregate.at(slice(0, 1)).to_pylist() == ["y"]


def test_lists_have_no_order() -> None:
    aggregate = FirstOrLast(True, "v", ("v",), T)
    with pytest.raises(UsageError, match="last of column 'v' of type list.* is not supported"):
        aggregate.rows_of(pa.record_batch({"t": [0], "v": [[1]]}))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([2.5, 1.5]).cast(pa.float16()),
        pa.array([math.nan, 1.5]).cast(pa.float16()),
        pa.array([2, 1], pa.decimal32(3)),
        pa.array(["b", "a"], pa.string_view()),
    ],
    ids=str,
)
def test_ties_are_broken_by_values_of_any_type(values: pa.Array) -> None:
    batch = pa.record_batch({"t": [1, 1], "v": values})
    for is_last in (False, True):
        aggregate = FirstOrLast(is_last, "v", ("v",), T)
        aggregate.grow(1)
        aggregate.update(np.zeros(2, np.int64), aggregate.rows_of(batch))
        assert aggregate.at(slice(0, 1)).to_pylist() == values[1:].to_pylist()


def test_values_without_an_order_have_a_first() -> None:
    moments = pa.array([(1, 2, 3), (0, 0, 1)], pa.month_day_nano_interval())
    aggregate = FirstOrLast(False, "v", ("v",), T)
    aggregate.grow(1)
    aggregate.update(np.zeros(2, np.int64), aggregate.rows_of(pa.record_batch({"t": [2, 1], "v": moments})))
    assert aggregate.at(slice(0, 1)).to_pylist() == [(0, 0, 1)]
