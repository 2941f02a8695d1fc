"""Wall time as anchored, against clocks that are set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.clock import SLEW, AnchoredClock, set_by

START = 1_700_000_000.0
HOUR = 3600.0


def run(clock: AnchoredClock, set_at: float, by: float, seconds: int) -> list[float]:
    """What it shows each second behind START; at ``set_at`` the system clock is set by so much."""
    found = []
    for second in range(seconds + 1):
        wall = START + second + (by if second >= set_at else 0.0)
        found.append(clock.read(wall, 50.0 + second) - START)
    return found


@pytest.mark.parametrize(
    ("by", "after_ten", "lead", "is_step"),
    [
        (0.0, 10.0, 0.0, False),
        (-HOUR, 9.95, -HOUR + 0.05, True),
        (HOUR, 10.05, HOUR - 0.05, True),
        # Made up for when the four seconds have passed, and too small for a step.
        (0.04, 10.04, 0.0, False),
        (-0.9, 9.95, 0.0, False),
        (1.1, 10.05, 1.05, True),
    ],
)
def test_it_follows_by_one_percent_a_second(by: float, after_ten: float, lead: float, is_step: bool) -> None:
    clock = AnchoredClock(START, 50.0)
    found = run(clock, 6, by, 10)
    assert found[:6] == [0, 1, 2, 3, 4, 5]
    assert found[10] == pytest.approx(after_ten, abs=1e-5)
    assert clock.lead == pytest.approx(lead, abs=1e-5)
    assert clock.take_steps() == pytest.approx([by] if is_step else [], abs=1e-5)
    assert clock.take_steps() == []


def test_it_is_the_system_clock_again_in_the_end() -> None:
    clock = AnchoredClock(START, 50.0)
    found = run(clock, 1, -30.0, 4000)
    assert found[2999] > 2999 - 30.0 + 1e-3
    assert found[3001:] == pytest.approx([second - 30.0 for second in range(3001, 4001)], abs=1e-5)
    assert (clock.lead, len(clock.take_steps())) == (0.0, 1)


def test_a_pause_in_which_it_was_not_read_makes_up_for_no_more_than_a_second() -> None:
    clock = AnchoredClock(START, 50.0)
    assert clock.read(START + 500.0 - HOUR, 550.0) == pytest.approx(START + 500.0 - SLEW)


def test_two_steps_are_two() -> None:
    clock = AnchoredClock(START, 50.0)
    run(clock, 3, HOUR, 5)
    clock.read(START + 6, 56.0)
    assert clock.take_steps() == pytest.approx([HOUR, -HOUR], abs=1e-5)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(-2 * HOUR, 2 * HOUR)), min_size=1, max_size=50))
def test_it_neither_jumps_nor_runs_back(moves: list[tuple[float, float]]) -> None:
    """Each move: seconds pass, then the system clock is set; where it is far away it is followed."""
    clock = AnchoredClock(START, 0.0)
    wall, monotonic, before = START, 0.0, START
    for passed, step in moves:
        wall, monotonic = wall + passed + step, monotonic + passed
        shown = clock.read(wall, monotonic)
        assert (1 - SLEW) * passed - 1e-6 <= shown - before <= (1 + SLEW) * passed + 1e-6
        followed, away = shown - before - passed, wall - (before + passed)
        assert abs(followed) < 1e-6 or followed * away > 0
        assert abs(followed) <= abs(away) + 1e-6
        before = shown


@pytest.mark.parametrize(("seconds", "text"), [(-30.0, "back by 30.0 s"), (3600.04, "forward by 3,600.0 s")])
def test_it_is_said_by_how_much_a_clock_was_set(seconds: float, text: str) -> None:
    assert set_by(seconds) == text
