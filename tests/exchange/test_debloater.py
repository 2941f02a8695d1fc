"""Debloaters on a clock of the test: the sizes that they choose, and the time in flight that gives."""

from __future__ import annotations

from collections import deque

import pytest

from minishuffle.exchange.debloater import (
    DEBLOAT_SECONDS,
    BufferDebloater,
    ConsumptionMeter,
    starting_bytes,
)
from minishuffle.limits import DEBLOATED_BYTES_MIN, DEBLOATED_BYTES_START, SEGMENT_BYTES_DEFAULT

MB = 1_000_000
BUFFERS = 66
"""Between a producer and a slower consumer: 2 exclusive and 32 floating ones, and 32 at the producer."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Looks:
    """A debloater whose gate always has something to read."""

    def __init__(self, target: float = 1.0, segment_bytes: int = SEGMENT_BYTES_DEFAULT) -> None:
        self.clock = Clock()
        self.debloater = BufferDebloater(target, segment_bytes, self.clock)
        self.debloater.meter.take(0)

    def look(self, rate: float, buffers: int = BUFFERS, seconds: float = DEBLOAT_SECONDS) -> int | None:
        """The next look, when ``rate`` was consumed since the last."""
        self.clock.now += seconds
        self.debloater.meter.take(round(rate * seconds))
        return self.debloater.look(buffers)

    def settle(self, rate: float, buffers: int = BUFFERS) -> int:
        for _ in range(100):
            self.look(rate, buffers)
        return self.debloater.size


def test_the_size_is_what_keeps_the_target_in_flight() -> None:
    assert Looks().settle(0.66 * MB) == pytest.approx(10_000, rel=0.1)
    assert Looks(target=0.1).settle(0.66 * MB) == pytest.approx(1000, rel=0.1)
    assert Looks().settle(0.66 * MB, buffers=4 * BUFFERS) == pytest.approx(2500, rel=0.1)


@pytest.mark.parametrize("segment_bytes", [256, 1000, SEGMENT_BYTES_DEFAULT])
def test_no_size_is_beyond_a_segment_or_below_the_least(segment_bytes: int) -> None:
    looks = Looks(segment_bytes=segment_bytes)
    assert looks.debloater.size == min(DEBLOATED_BYTES_START, segment_bytes) == starting_bytes(segment_bytes)
    assert looks.settle(1e9) == segment_bytes
    assert looks.settle(100.0) == DEBLOATED_BYTES_MIN
    assert looks.settle(1e9) == segment_bytes


def test_the_size_at_most_doubles_and_shrinks_at_once() -> None:
    looks = Looks()
    assert [looks.look(1e9) for _ in range(7)] == [2048, 4096, 8192, 16384, 32768, None, None]
    assert looks.look(1e9, buffers=1_000_000) == pytest.approx(1000, rel=0.01)


def test_zero_buffers_in_use_count_as_one() -> None:
    """Case 301, BufferDebloaterTest#testZeroBuffersInUse."""
    looks = Looks(target=0.1)
    assert looks.settle(10_000, buffers=0) == 1024, "1000 differs by less than 5 % from that"
    assert looks.debloater.seconds == pytest.approx(0.1024)


def test_small_changes_are_not_announced_but_for_those_to_a_bound() -> None:
    looks = Looks()
    size = looks.settle(0.66 * MB)
    for _ in range(50):
        assert looks.look(0.67 * MB) is None
        assert looks.look(0.65 * MB) is None
    assert looks.debloater.size == size
    near = Looks()
    near.settle(BUFFERS * SEGMENT_BYTES_DEFAULT * 0.97)
    assert near.debloater.size < SEGMENT_BYTES_DEFAULT
    assert near.settle(BUFFERS * SEGMENT_BYTES_DEFAULT * 1.01) == SEGMENT_BYTES_DEFAULT


def test_the_time_in_flight_is_that_of_all_buffers_at_the_present_rate() -> None:
    looks = Looks(target=0.5)
    assert looks.debloater.seconds is None
    looks.settle(0.66 * MB)
    assert looks.debloater.seconds == pytest.approx(0.5, rel=0.1)
    looks.settle(1000.0)
    assert looks.debloater.seconds == pytest.approx(BUFFERS * DEBLOATED_BYTES_MIN / 1000, rel=0.01)


def test_a_consumer_that_takes_long_for_each_batch_consumes_at_the_rate_of_its_batches() -> None:
    looks = Looks()
    for _ in range(40):
        for _ in range(24):
            looks.look(0.0)
        looks.look(25 * 0.66 * MB)  # of 5 seconds
    assert looks.debloater.size == pytest.approx(10_000, rel=0.1)
    assert looks.look(0.0) is None


def test_a_job_whose_consumers_wait_for_data_has_full_buffers() -> None:
    """Time without data does not make a consumer slow."""
    clock = Clock()
    debloater = BufferDebloater(1.0, SEGMENT_BYTES_DEFAULT, clock)
    for _ in range(200):
        debloater.meter.take(5_000)
        clock.now += 0.001
        debloater.meter.idle()
        debloater.meter.idle()
        clock.now += 0.5
        debloater.look(1)
    assert debloater.meter.seconds() == pytest.approx(0.2)
    assert debloater.size == SEGMENT_BYTES_DEFAULT


def test_nothing_is_said_before_anything_was_consumed() -> None:
    looks = Looks()
    assert [looks.look(0.0) for _ in range(50)] == [None] * 50
    assert looks.debloater.size == DEBLOATED_BYTES_START


def test_a_meter_is_read_while_it_runs() -> None:
    clock = Clock()
    meter = ConsumptionMeter(clock)
    clock.now = 5.0
    assert meter.seconds() == 0.0, "nothing has come so far"
    meter.take(5)
    clock.now = 6.0
    meter.take(5)
    assert meter.seconds() == 1.0
    meter.idle()
    clock.now = 9.0
    assert meter.seconds() == 1.0


class Channel:
    """A fixed number of buffers, which a producer that is never slow fills to the size that was announced
    last, in front of a consumer with a rate of its own. Time passes in steps of 10 ms."""

    def __init__(self, target: float) -> None:
        self.looks = Looks(target)
        self.queue: deque[tuple[float, int]] = deque()
        """When each buffer was filled, and with how much."""
        self._budget = 0.0
        self._fill()

    def _fill(self) -> None:
        while len(self.queue) < BUFFERS:
            self.queue.append((self.looks.clock.now, self.looks.debloater.size))

    def run(self, rate: float, seconds: float) -> list[tuple[float, float]]:
        """Gives of each buffer consumed when, and how old it was."""
        clock, found, begin = self.looks.clock, [], self.looks.clock.now
        for step in range(round(seconds * 100)):
            clock.now += 0.01
            self._budget += rate * 0.01
            while self._budget >= self.queue[0][1]:
                filled, size = self.queue.popleft()
                self._budget -= size
                self.looks.debloater.meter.take(size)
                found.append((clock.now - begin, clock.now - filled))
                self._fill()
            if step % 20 == 0:
                self.looks.debloater.look(len(self.queue))
        return found


@pytest.mark.parametrize("rates", [(0.1, 0.3, 0.6, 0.1), (0.6, 0.1, 0.6, 0.3)])
@pytest.mark.parametrize("target", [0.25, 1.0])
def test_what_is_consumed_is_as_old_as_the_target_ten_seconds_after_each_change(
    rates: tuple[float, ...], target: float
) -> None:
    channel = Channel(target)
    for rate in rates:
        ages = [age / target for at, age in channel.run(rate * 2 * MB, 20.0) if at > 10.0]
        assert 0.8 < min(ages) <= max(ages) < 1.2
