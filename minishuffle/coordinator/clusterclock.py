"""The wall clock of a coordinator, for the times of events and the deadlines of jobs. Pure.

It is the monotonic clock of the process plus an offset, which follows the system clock slowly when that is
set (:mod:`minishuffle.clock`). The offset is journaled, so that the next coordinator on the same host
continues with it.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["ClusterClock"]

OFFSET_SECONDS: Final = 1.0
"""Change of the offset, in seconds, from which it is journaled again."""


class ClusterClock:
    """Wall time from the monotonic clock of the coordinator's process. It never goes back.

    Args:
        offset: wall clock minus monotonic clock, in seconds.
    """

    def __init__(self, offset: float) -> None:
        self.offset = offset
        self._latest = 0.0
        """The latest time returned."""
        self._recorded = math.inf
        """The offset in the journal."""

    def anchor(self, offset: float) -> None:
        """Set the offset."""
        self.offset = offset

    def __call__(self, now: float) -> float:
        """The wall time at ``now``."""
        self._latest = max(self._latest, now + self.offset)
        return self._latest

    def monotonic(self, at: float) -> float:
        """The monotonic time at which the wall clock reaches ``at``; a microsecond later, since its floats
        are coarser."""
        return at - self.offset + 1e-6

    def take_offset(self) -> float | None:
        """The offset, if it must be journaled; else None."""
        if abs(self.offset - self._recorded) <= OFFSET_SECONDS:
            return None
        self._recorded = self.offset
        return self.offset

    def forget_recorded(self) -> None:
        """The journal has lost its contents."""
        self._recorded = math.inf
