"""The wall clock of a worker, which its loop and its tasks read."""

from __future__ import annotations

import threading
import time

from minishuffle.clock import AnchoredClock

__all__ = ["WallClock"]

HELD_UP_SECONDS = 0.001
"""Two clocks between whose readings a thread was held up for longer are read again."""
READINGS_MAX = 5


class WallClock:
    """Seconds since 1970, as anchored when it was made: see :class:`AnchoredClock`. Any thread may call it;
    some thread does at least once a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clock = AnchoredClock(*_readings())

    def __call__(self) -> float:
        with self._lock:
            return self._clock.read(*_readings())

    def lead(self) -> float:
        """How far the system clock, which functions of users read, is ahead of this one: see
        :attr:`AnchoredClock.lead`."""
        with self._lock:
            self._clock.read(*_readings())
            return self._clock.lead

    def take_steps(self) -> list[float]:
        """See :meth:`AnchoredClock.take_steps`."""
        with self._lock:
            self._clock.read(*_readings())
            return self._clock.take_steps()


def _readings() -> tuple[float, float]:
    """The system clock and the monotonic one, at the same moment as far as that can be had."""
    for _ in range(READINGS_MAX):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        if after - before <= HELD_UP_SECONDS:
            break
    return wall, after
