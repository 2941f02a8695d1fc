"""Anchored wall time: the system clock at the start of a process, plus monotonic time since.

A change of the system clock does not move it at once: it follows by at most ``SLEW`` seconds a second, in
both directions, and never runs back. Times that cross hosts, or are the user's, use it; durations on one host
use a monotonic clock.

Pure: the readings are arguments.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["AnchoredClock", "set_by"]

SLEW: Final = 0.01
"""Seconds by which it follows the system clock in each second."""
LOOK_SECONDS_MAX: Final = 1.0
"""Between two readings it follows for so long at most: nobody knows when the system clock was set."""
STEPS_KEPT: Final = 100
"""The last ones, until somebody asks for them."""
STEP_SECONDS: Final = 1.0
"""A system clock that moved by more between two readings was set."""


class AnchoredClock:
    """Invariants: readings never fall; between two of them pass 1 - ``SLEW`` to 1 + ``SLEW`` seconds for each
    one on the monotonic clock.

    Args:
        wall: the system clock, in seconds since 1970.
        monotonic: at the same moment, seconds of any origin.
    """

    def __init__(self, wall: float, monotonic: float) -> None:
        self._origin = wall - monotonic
        self._monotonic = monotonic
        self._ahead = 0.0
        """How far the system clock has moved away from where it was at first."""
        self._followed = 0.0
        """How far this one has."""
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)

    def read(self, wall: float, monotonic: float) -> float:
        """Seconds since 1970; the arguments are what both clocks show now."""
        passed = max(0.0, monotonic - self._monotonic)
        self._monotonic += passed
        ahead = wall - monotonic - self._origin
        if abs(step := ahead - self._ahead) > STEP_SECONDS:
            self._steps.append(step)
        self._ahead = ahead
        most = SLEW * min(passed, LOOK_SECONDS_MAX)
        self._followed += min(max(ahead - self._followed, -most), most)
        return self._monotonic + self._followed + self._origin

    def take_steps(self) -> list[float]:
        """By how many seconds the system clock was set each time, since this was asked last; forwards is
        positive."""
        steps = list(self._steps)
        self._steps.clear()
        return steps

    @property
    def lead(self) -> float:
        """By how many seconds the system clock was ahead of this one when it was read last; 0.0 unless it was
        set by more than STEP_SECONDS that are not made up yet."""
        lead = self._ahead - self._followed
        return lead if abs(lead) > STEP_SECONDS else 0.0


def set_by(seconds: float) -> str:
    """By how much a clock was set, in words."""
    return f"{'forward' if seconds > 0 else 'back'} by {abs(seconds):,.1f} s"
