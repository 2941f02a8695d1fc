"""The state clock adds up, whenever it is read and whatever it is in the middle of."""

from __future__ import annotations

import sys
import threading
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from minishuffle.counters import Histogram, StateClock, StateSeconds, TaskCounters, ThreadState

STATES: tuple[ThreadState, ...] = get_args(ThreadState)
FAR = 1e9
"""Later than anything that is written here, in whole seconds."""


def test_a_state_counts_while_it_lasts() -> None:
    clock = StateClock()
    assert clock.read(5.0) == StateSeconds()
    clock.enter("busy", 10.0)
    assert clock.read(12.0) == StateSeconds(busy=2.0)
    clock.enter("backpressured", 13.0)
    assert clock.read(20.0) == StateSeconds(busy=3.0, backpressured=7.0)
    clock.enter("idle", 21.0)
    clock.enter(None, 25.0)
    assert clock.read(30.0) == StateSeconds(busy=3.0, idle=4.0, backpressured=8.0)
    assert (clock.blocks.count, clock.blocks.total) == (1, 8.0)


def test_a_reader_whose_time_is_a_little_old_sees_nothing_fall() -> None:
    clock = StateClock()
    clock.enter("busy", 10.0)
    clock.enter("idle", 12.0)
    assert clock.read(11.9) == StateSeconds(busy=2.0)


@given(st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 1000)), min_size=1))
def test_the_states_add_up_to_the_time_that_passed(steps: list[tuple[ThreadState, int]]) -> None:
    clock, now = StateClock(), 0
    for state, seconds in steps:
        clock.enter(state, now)
        now += seconds
        assert sum(clock.read(now)) == now


def test_a_reader_beside_the_writer_never_sees_half_a_change() -> None:
    clock, done = StateClock(), threading.Event()
    clock.enter("busy", 0)

    def write() -> None:
        now = 0
        while not done.is_set():
            now += 1
            clock.enter(STATES[now % 3], now)

    thread = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        assert all(sum(clock.read(FAR)) == FAR for _ in range(50_000))
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_counters_of_a_message_have_no_unknown_fields() -> None:
    class Carrier(BaseModel):
        counters: TaskCounters

    counters = TaskCounters(records_in=3, user_errors={"skip": 1})
    carrier = Carrier(counters=counters)
    assert Carrier.model_validate(carrier.model_dump()) == carrier
    with pytest.raises(ValidationError, match="unknown"):
        Carrier.model_validate({"counters": {"unknown": 1}})


def test_a_quantile_is_the_edge_of_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.quantile(0.5) == 0.0
    for value in (0.5, 1.5, 3.0, 9.0):
        histogram.observe(value)
    assert [histogram.quantile(q) for q in (0.25, 0.5, 0.75, 1.0)] == [1.0, 2.0, 4.0, 4.0]
    assert (histogram.count, histogram.total) == (4, 14.0)
