"""The wall clock by which a coordinator dates what happens, and by which its jobs wait. Pure.

It is the monotonic clock of the process with an offset, which follows the system clock slowly when somebody
sets that (:mod:`minishuffle.clock`). The offset is journaled, so that the next coordinator on the same host
goes on with it.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["ClusterClock"]

OFFSET_SECONDS: Final = 1.0
"""The journal hears of the offset when it has changed by more."""


class ClusterClock:
    """Wall time, by the monotonic clock of the coordinator's process. It never goes back.

    Args:
        offset: how far the wall clock is ahead.
    """

    def __init__(self, offset: float) -> None:
        self.offset = offset
        self._latest = 0.0
        """The latest time that was given."""
        self._recorded = math.inf
        """The offset that the journal has."""

    def anchor(self, offset: float) -> None:
        """The wall clock is so far ahead by now."""
        self.offset = offset

    def __call__(self, now: float) -> float:
        """The wall time at ``now``."""
        self._latest = max(self._latest, now + self.offset)
        return self._latest

    def monotonic(self, at: float) -> float:
        """When wall time will have come to ``at``; a microsecond more, since its floats are coarser."""
        return at - self.offset + 1e-6

    def take_offset(self) -> float | None:
        """The offset, if the journal is to hear of it; None if what it has will do."""
        if abs(self.offset - self._recorded) <= OFFSET_SECONDS:
            return None
        self._recorded = self.offset
        return self.offset

    def forget_recorded(self) -> None:
        """The journal has lost what it had."""
        self._recorded = math.inf
