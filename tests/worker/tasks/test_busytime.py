"""The clock of a task's states: what it adds up to, and what another thread sees of it."""

from __future__ import annotations

import sys
import threading
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from minishuffle.worker.tasks.busytime import StateClock, StateSeconds, ThreadState

STATES: tuple[ThreadState, ...] = get_args(ThreadState)


class Time:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_state_counts_while_it_lasts() -> None:
    time = Time()
    clock = StateClock(time)
    time.now = 5.0
    assert clock.read() == StateSeconds()
    time.now = 10.0
    clock.enter("busy")
    time.now = 12.0
    assert clock.read() == StateSeconds(busy=2.0)
    time.now = 13.0
    clock.enter("backpressured")
    time.now = 20.0
    assert clock.read() == StateSeconds(busy=3.0, backpressured=7.0)
    time.now = 21.0
    clock.enter("idle")
    assert clock.present() == ("idle", 21.0)
    time.now = 25.0
    clock.enter(None)
    time.now = 30.0
    assert clock.read() == StateSeconds(busy=3.0, idle=4.0, backpressured=8.0)
    assert (clock.blocks.count, clock.blocks.total) == (1, 8.0)


@given(st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 1000)), min_size=1))
def test_the_states_add_up_to_the_time_that_passed(steps: list[tuple[ThreadState, int]]) -> None:
    time = Time()
    clock = StateClock(time)
    for state, seconds in steps:
        clock.enter(state)
        time.now += seconds
        assert sum(clock.read()) == time.now


def test_nothing_falls_however_the_reader_and_the_writer_take_turns() -> None:
    """Both look at a clock that goes on with each look, and give way to each other wherever they can."""
    ticks, done = iter(range(1 << 60)), threading.Event()
    clock = StateClock(lambda: float(next(ticks)))

    def write() -> None:
        while not done.is_set():
            for state in STATES:
                clock.enter(state)

    clock.enter("busy")
    began = sum(clock.read())
    thread = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        before = clock.read()
        for _ in range(50_000):
            now = clock.read()
            assert all(later >= earlier for earlier, later in zip(before, now, strict=True))
            assert sum(now) > sum(before) >= began
            before = now
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
