"""The order of rows by slot and the running values, against plain Python."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.dataflow.operators.groups import Groups


@given(st.lists(st.sampled_from([0, 1, 5, 65_535, 65_536, 65_541, 1 << 24, 1 << 33]), max_size=40))
def test_groups_order_wide_slots_stably(slots: list[int]) -> None:
    groups = Groups(np.array(slots, dtype=np.int64))
    assert groups.order.tolist() == sorted(range(len(slots)), key=slots.__getitem__)
    assert groups.slots.tolist() == sorted(set(slots))
    assert (groups.ends - groups.starts + 1).tolist() == [slots.count(slot) for slot in sorted(set(slots))]


@pytest.mark.parametrize(("ufunc", "plain"), [(np.add, operator.add), (np.maximum, max)])
@given(records=st.lists(st.tuples(st.integers(0, 4), st.integers(-100, 100)), max_size=60))
def test_running_values_carry_the_state_on(
    ufunc: np.ufunc, plain: Callable[[Any, Any], Any], records: list[tuple[int, int]]
) -> None:
    state = np.arange(5, dtype=np.int64)
    after, running = list(range(5)), []
    for slot, value in records:
        after[slot] = plain(after[slot], value)
        running.append(after[slot])
    slots, values = (np.array([record[i] for record in records], dtype=np.int64) for i in (0, 1))
    assert Groups(slots).running(ufunc, values, state).tolist() == running
    assert state.tolist() == after
