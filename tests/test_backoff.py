"""Waits between tries double up to a bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.backoff import Backoff


@pytest.mark.parametrize(
    ("backoff", "waits"),
    [
        (Backoff(0.5, 4.0), [0.0, 0.5, 1.0, 2.0, 4.0, 4.0]),
        (Backoff(0.5, 4.0, at_once=1), [0.0, 0.0, 0.5, 1.0, 2.0, 4.0]),
        (Backoff(0.5, 3.0, jitter=0.1), [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]),
        (Backoff(0.0, 0.0), [0.0] * 6),
    ],
)
def test_waits_double_up_to_the_longest(backoff: Backoff, waits: list[float]) -> None:
    assert [backoff.seconds(failures) for failures in range(6)] == waits


@given(st.integers(0, 10**9), st.floats(0.0, 1.0))
def test_jitter_moves_a_wait_by_its_part_at_most(failures: int, random: float) -> None:
    backoff = Backoff(0.1, 10.0, at_once=2, jitter=0.1)
    wait = backoff.seconds(failures)
    assert 0.0 <= wait <= 10.0
    assert backoff.seconds(failures, random) == pytest.approx(wait * (0.9 + 0.2 * random))
