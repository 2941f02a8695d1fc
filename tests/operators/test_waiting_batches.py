"""Records that wait, against a sort of all of them; what is given back is let go of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.exchange.batch import Batch
from minishuffle.exchange.watermarks import END_OF_TIME
from minishuffle.operators import waiting_batches
from minishuffle.operators.waiting_batches import WaitingBatches


def of_rows(times: list[int], first: int) -> Batch:
    """Each row is its number, beginning with ``first``, and has a key of its own."""
    numbers = list(range(first, first + len(times)))
    return Batch(numbers, list(map(str, numbers)), np.array(times, np.int64))


def of_columns(times: list[int], first: int) -> Batch:
    numbers = pa.array(range(first, first + len(times)), pa.int64())
    return Batch(pa.RecordBatch.from_pydict({"n": numbers}), None, np.array(times, np.int64))


def read(batch: Batch | None) -> list[tuple[int, int]]:
    """(time, number) of records."""
    if batch is None:
        return []
    assert batch.times is not None
    numbers: Any = batch.payload if isinstance(batch.payload, list) else batch.payload["n"].to_pylist()
    assert batch.keys is None or batch.keys == list(map(str, numbers))
    return list(zip(batch.times.tolist(), numbers, strict=True))


@pytest.mark.parametrize("make", [of_rows, of_columns])
@given(
    steps=st.lists(st.lists(st.integers(0, 20), max_size=8) | st.integers(-1, 21), max_size=12),
    run_rows=st.sampled_from([1, 10, 100]),
    looks=st.booleans(),
)
def test_records_come_back_in_order_of_time_and_then_as_they_came(
    make: Any, steps: list[list[int] | int], run_rows: int, looks: bool
) -> None:
    """A step is a batch, or the time up to which records are due."""
    waiting, number = WaitingBatches(), 0
    held: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting_batches, "_RUN_ROWS_MIN", run_rows)
        for step in [*steps, 21]:
            if isinstance(step, list):
                waiting.add(make(step, number))
                held += [(time, number + place) for place, time in enumerate(step)]
                number += len(step)
            else:
                due = sorted(pair for pair in held if pair[0] <= step)
                held = [pair for pair in held if pair[0] > step]
                assert read(waiting.take_until(step)) == due
            assert len(waiting) == len(held)
            if looks:
                assert waiting.earliest == min((time for time, _ in held), default=END_OF_TIME)
                assert sorted(pair for batch in waiting for pair in read(batch)) == sorted(held)


def test_what_waits_and_is_added_elsewhere_is_in_the_same_order() -> None:
    before, after = WaitingBatches(), WaitingBatches()
    for first, times in ((0, [9, 5, 1]), (3, [5, 0, 7]), (6, [5, 5])):
        before.add(of_rows(times, first))
    before.take_until(1)
    for batch in before:
        after.add(batch)
    assert read(after.take_until(9)) == read(before.take_until(9)) == [
        (5, 1), (5, 3), (5, 6), (5, 7), (7, 5), (9, 0)
    ]  # fmt: skip


def test_records_that_were_given_back_are_not_kept_when_they_are_most() -> None:
    rows = [object() for _ in range(10)]
    waiting = WaitingBatches()
    waiting.add(Batch(rows, None, np.arange(10)))
    (batch,) = waiting
    assert batch.payload is rows
    waiting.take_until(3)
    waiting.take_until(5)
    (batch,) = waiting
    assert batch.payload == rows[6:]
    (again,) = waiting
    assert again.payload is batch.payload, "it is a copy without the others"
