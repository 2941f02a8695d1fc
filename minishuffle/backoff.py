"""How long to wait before something that has failed is tried again. Pure.

Whoever waits keeps a :class:`Backoff` and counts failures; each wait is twice as long as the one before it.
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
        at_once: so many failures in a row are followed by no wait.
        jitter: a wait is off by this part of it at most, either way.
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
