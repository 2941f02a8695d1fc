"""A source's task rests where that saves batches, and never holds up a source that has more."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from minishuffle.runtime.resting import REST_SECONDS_MAX, SourceRest

PASS_SECONDS = 0.0001
"""What passing a batch on takes."""


class Simulated:
    """A task that reads a source until ``seconds`` have passed: how many batches and rows it had.

    Args:
        read: (time of the read, time of the one before) → (rows, time at which they are there).
        delay: how long the thread waits for a processor at each read.
    """

    def __init__(
        self,
        read: Callable[[float, float], tuple[int, float]],
        *,
        seconds: float = 10.0,
        delay: float = 0.001,
        rests: bool = True,
        consumers: int = 8,
    ) -> None:
        self.batches = self.rows = 0
        self.rested = self.longest = waited = now = before = 0.0
        rest = SourceRest(now, waited, consumers)
        while now < seconds:
            now, waited = now + delay, waited + delay
            rows, now = read(now, before)
            before = now
            self.batches, self.rows = self.batches + 1, self.rows + rows
            now += PASS_SECONDS
            if not rests:
                continue
            if rest.read(rows, now):
                rest.look(now, waited)
            assert 0.0 <= rest.seconds <= REST_SECONDS_MAX
            self.longest = max(self.longest, rest.seconds)
            self.rested, now = self.rested + rest.seconds, now + rest.seconds


def paced(rate: float) -> Callable[[float, float], tuple[int, float]]:
    """Rows come one by one; a read waits for the first and gives all that are there."""

    def read(now: float, before: float) -> tuple[int, float]:
        rows = int(now * rate) - int(before * rate)
        return (rows, now) if rows else (1, (int(before * rate) + 1 + 1e-6) / rate)

    return read


def backlog(rows_max: int, seed: int = 7) -> Callable[[float, float], tuple[int, float]]:
    """There is always more than is taken."""
    draw = random.Random(seed)
    return lambda now, before: (draw.randint(1, rows_max), now)


@pytest.mark.parametrize("rate", [1_000, 2_500, 4_000])
def test_rows_that_come_one_by_one_are_read_together_where_processors_are_short(rate: int) -> None:
    rested, plain = Simulated(paced(rate)), Simulated(paced(rate), rests=False)
    assert rested.rows == pytest.approx(plain.rows, rel=0.01)
    assert rested.batches < plain.batches / 3


@pytest.mark.parametrize("delay", [0.0, 0.00005])
def test_it_does_not_rest_while_processors_are_free(delay: float) -> None:
    assert Simulated(paced(2_500), delay=delay).rested == 0.0


@pytest.mark.parametrize("rate", [12.5, 100, 300])
def test_it_does_not_rest_for_rows_that_come_seldom(rate: float) -> None:
    assert Simulated(paced(rate)).rested == 0.0


@pytest.mark.parametrize("rows_max", [1, 3, 20, 64, 200, 4_096])
def test_a_source_that_has_more_is_not_held_up(rows_max: int) -> None:
    rested, plain = Simulated(backlog(rows_max)), Simulated(backlog(rows_max), rests=False)
    assert rested.rows > 0.9 * plain.rows


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_backlog_in_between_is_not_held_up(rows: int) -> None:
    """For a second in two, a thousand single rows a second; then small batches as fast as they are taken."""
    single = paced(1_000)

    def read(now: float, before: float) -> tuple[int, float]:
        return (rows, now) if now % 2.0 >= 1.0 else single(now, max(before, now - now % 2.0))

    rested, plain = Simulated(read), Simulated(read, rests=False)
    assert rested.rows > 0.85 * plain.rows
    assert rested.rested > 1.0


@pytest.mark.parametrize("rows", [1, 30])
def test_a_source_whose_consumers_are_slow_is_not_held_up(rows: int) -> None:
    """As many rows come with rests as without, and still no more at each read."""
    slow = 5_000.0

    def read(now: float, before: float) -> tuple[int, float]:
        return rows, max(now, before + rows / slow)

    rested = Simulated(read, delay=0.0005)
    assert rested.rested < 0.05 * 10.0


def test_it_rests_until_each_consumer_gets_a_few_rows() -> None:
    two, twelve, many = (Simulated(paced(10_000), consumers=each) for each in (2, 12, 64))
    assert two.longest == 0.0, "that would be too short"
    assert 0.004 < twelve.longest < 0.006
    assert many.longest == REST_SECONDS_MAX


def test_it_stops_when_nothing_comes() -> None:
    rest = SourceRest(0.0, 0.0, 64)
    now = waited = 0.0
    while not rest.seconds:
        now, waited = now + 0.001, waited + 0.001
        if rest.read(1, now):
            rest.look(now, waited)
    assert rest.seconds == REST_SECONDS_MAX
    assert not rest.read(12, now + 0.012)
    assert rest.read(1, now + 1.0)
    rest.look(now + 1.0, waited)
    assert rest.seconds == 0.0


def test_a_thread_that_gets_its_processor_late_now_and_then_does_not_rest() -> None:
    rest, now, waited = SourceRest(0.0, 0.0, 2), 0.0, 0.0
    for number in range(5_000):
        late = 0.005 if number % 20 == 0 else 0.0
        now, waited = now + 0.002 + late, waited + late
        if rest.read(1, now):
            rest.look(now, waited)
        assert rest.seconds == 0.0
