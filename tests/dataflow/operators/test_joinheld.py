"""The rows that a side of a join holds: found by key and time, merged, let go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.dataflow.operators import joinheld
from minishuffle.dataflow.operators.base import END_OF_TIME
from minishuffle.dataflow.operators.joinheld import Held


def vector(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


def hold(held: Held, slots: Any, times: Any) -> None:
    names = [f"{slot}@{time}" for slot, time in zip(slots.tolist(), times.tolist(), strict=True)]
    held.add(pa.record_batch({"name": names}), slots, times, np.zeros(len(slots), dtype=np.bool_))


def found(held: Held, slots: Any, times: Any) -> list[tuple[int, str]]:
    pairs = []
    for asked, run, rows in held.find(slots, times, pa.record_batch({"asked": slots})):
        names = run.batch.column("name").take(pa.array(rows)).to_pylist()
        pairs += list(zip(asked.tolist(), names, strict=True))
    return sorted(pairs)


def test_rows_are_found_by_key_and_time_within() -> None:
    held = Held(10, 10)
    hold(held, vector(0, 0, 0, 1), vector(-11, -10, 10, 0))
    hold(held, vector(0, 1), vector(11, 25))
    assert found(held, vector(0, 1, 2), vector(0, 15, 0)) == [(0, "0@-10"), (0, "0@10"), (1, "1@25")]


def test_many_partners_come_in_pieces() -> None:
    held = Held(2, 1)
    hold(held, vector(*[0] * 7, 1), vector(1, 1, 2, 3, 4, 5, 6, 3))
    (run,) = held.runs
    pieces = list(run.find(vector(0, 1, -1, 0), vector(3, 3, 3, 9), 2, 1, 2))
    assert [len(asked) for asked, _ in pieces] == [2, 2, 2]
    pairs = [pair for asked, rows in pieces for pair in zip(asked.tolist(), rows.tolist(), strict=True)]
    assert sorted(pairs) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 7)]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-30, 30)), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(-1, 3), st.integers(-30, 30)), max_size=10),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_all_partners_are_found_once(
    rows: list[tuple[int, int]], others: list[tuple[int, int]], before: int, after: int
) -> None:
    held = Held(before, after)
    hold(held, *(vector(*column) for column in zip(*rows, strict=True)))
    (run,) = held.runs
    slots, times = (vector(*(other[place] for other in others)) for place in (0, 1))
    pairs = [
        pair
        for asked, found_rows in run.find(slots, times, before, after, 3)
        for pair in zip(asked.tolist(), found_rows.tolist(), strict=True)
    ]
    assert sorted(pairs) == [
        (number, place)
        for number, (slot, time) in enumerate(others)
        for place, (own, at) in enumerate(rows)
        if own == slot and -before <= at - time <= after
    ]


def test_one_row_after_the_other_makes_few_runs() -> None:
    held = Held(0, 0)
    for number in range(1000):
        hold(held, vector(number), vector(7))
    assert len(held) == 1000
    assert len(held.runs) <= 12
    assert found(held, vector(3, 999), vector(7, 7)) == [(0, "3@7"), (1, "999@7")]


def test_runs_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joinheld, "RUN_ROWS_MAX", 100)
    held = Held(0, 0)
    for number in range(1000):
        hold(held, vector(number), vector(7))
    assert max(map(len, held.runs)) <= 100


def test_rows_let_go_are_given_once_and_freed() -> None:
    held = Held(0, 0)
    hold(held, np.arange(100), np.arange(100)[::-1].copy())
    hold(held, vector(1, 2), vector(200, 201))
    assert held.earliest == 0
    gone = [rows.tolist() for _, rows in held.take_until(39)]
    assert gone == [list(range(99, 59, -1))]
    assert (len(held), held.earliest) == (62, 40)
    assert sum(run.batch.num_rows for run in held.runs) == 102
    assert [len(rows) for _, rows in held.take_until(50)] == [11]
    assert sum(run.batch.num_rows for run in held.runs) == 51
    assert list(held.take_until(50)) == []
    assert [len(rows) for _, rows in held.take_until(END_OF_TIME)] == [49, 2]
    assert (held.runs, held.earliest) == ([], END_OF_TIME)


def test_merging_leaves_out_what_is_gone_and_keeps_who_had_a_partner() -> None:
    held = Held(0, 0)
    hold(held, vector(1, 2, 3), vector(1, 2, 3))
    held.runs[0].matched[2] = True
    assert len(list(held.take_until(1))) == 1
    hold(held, vector(4, 5), vector(4, 5))
    (run,) = held.runs
    assert run.batch.column("name").to_pylist() == ["2@2", "3@3", "4@4", "5@5"]
    assert run.matched.tolist() == [False, True, False, False]
