"""Restarts are spaced and limited."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle import limits
from minishuffle.coordinator.failover import (
    DELAY_SECONDS_MAX,
    DELAY_SECONDS_MIN,
    JITTER,
    QUIET_SECONDS,
    Failures,
)
from minishuffle.errors import ResourceExhausted
from minishuffle.wire.messages import ErrorInfo

MANY = 1_000


def cause(text: str = "boom") -> ErrorInfo:
    return ErrorInfo(code=60, text=text)


def steady(failures_max: int = MANY) -> Failures:
    """Without jitter."""
    return Failures(failures_max, lambda: 0.5)


def test_the_first_restart_is_at_once_and_then_the_delay_doubles_up_to_its_maximum() -> None:
    failures = steady()
    now, delays = 1e9, []
    for _ in range(12):
        delay = failures.add(cause(), now)
        assert delay is not None
        delays.append(round(delay, 6))
        now += delay
    assert delays == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10, 10]


def test_a_minute_without_a_failure_begins_anew() -> None:
    failures = steady()
    assert [failures.add(cause(), now) for now in (100.0, 101.0, 102.0)] == [0, 0.1, 0.2]
    assert failures.add(cause(), 102.0 + QUIET_SECONDS - 0.1) == 0.4
    assert failures.add(cause(), 102.0 + 2 * QUIET_SECONDS) == 0


def test_so_many_failures_within_the_window_are_too_many() -> None:
    failures = steady(3)
    assert failures.add(cause("first"), 100.0) == 0
    assert failures.add(cause("second"), 101.0) == DELAY_SECONDS_MIN
    assert failures.add(cause("third"), 102.0) is None
    assert (failures.first.text, failures.count) == ("first", 3)
    limit = failures.limit_reached("count[1]")
    assert limit.code == ResourceExhausted.code
    assert limit.text == (
        "count[1] failed 3 times within 300 s (restart_failures_max): remove the cause, or allow more with "
        "--set restart_failures_max=N"
    )


def test_failures_before_the_window_do_not_count() -> None:
    failures = steady(2)
    window = limits.RESTART_FAILURE_WINDOW_SECONDS
    assert failures.add(cause("first"), 100.0) == 0
    assert failures.add(cause("second"), 100.0 + window) == 0
    assert failures.first.text == "second"
    assert failures.add(cause("third"), 100.0 + window + 1) is None


def test_one_failure_may_be_the_limit() -> None:
    assert steady(1).add(cause(), 5.0) is None


@pytest.mark.parametrize(("drawn", "delay"), [(0.0, 0.09), (0.5, 0.1), (1.0, 0.11)])
def test_delays_have_jitter(drawn: float, delay: float) -> None:
    failures = Failures(MANY, lambda: drawn)
    assert failures.add(cause(), 100.0) == 0
    assert failures.add(cause(), 100.0) == pytest.approx(delay)


@given(st.integers(), st.integers(1, 50), st.lists(st.floats(0, 100), max_size=60))
def test_delays_are_bounded_and_the_limit_holds_whenever_failures_come(
    seed: int, failures_max: int, gaps: list[float]
) -> None:
    failures = Failures(failures_max, random.Random(seed).random)
    now, times = 1e9, []
    for gap in gaps:
        now += gap
        times.append(now)
        delay = failures.add(cause(), now)
        recent = [time for time in times if time > now - limits.RESTART_FAILURE_WINDOW_SECONDS]
        assert failures.count == len(recent)
        assert (delay is None) == (len(recent) >= failures_max)
        if delay is None:
            return
        assert 0 <= delay <= DELAY_SECONDS_MAX * (1 + JITTER)
