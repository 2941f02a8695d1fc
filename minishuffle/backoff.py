"""Exponential back-off: the waits between tries of something that fails. Pure.

The caller keeps a :class:`Backoff` and counts failures; each wait is twice as long as the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Backoff"]

_DOUBLINGS_MAX: Final = 64
"""More than any bound allows, and far from overflow."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off: ``first`` seconds, then twice as long each time, up to ``longest``.

    Args:
        at_once: number of failures in a row after which there is no wait.
        jitter: a wait differs by at most this part of it, either way.
    """

    first: float
    longest: float
    at_once: int = 0
    jitter: float = 0.0

    def seconds(self, failures: int, random: float = 0.5) -> float:
        """How long to wait after that many failures in a row; none after 0.

        Args:
            random: from 0 to 1, for the jitter; without one the wait has none.
        """
        doublings = failures - self.at_once - 1
        if doublings < 0:
            return 0.0
        wait = min(self.first * 2.0 ** min(doublings, _DOUBLINGS_MAX), self.longest)
        return wait * (1 + self.jitter * (2 * random - 1))
