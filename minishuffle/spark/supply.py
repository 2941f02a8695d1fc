"""How many workers to ask Spark for, and when to give up. Pure: time comes in, numbers go out."""

from __future__ import annotations

from typing import Final

__all__ = ["Supply"]

FAILURES_MAX: Final = 5
"""So many workers in a row that never registered: the executors cannot run them."""
BACKOFF_SECONDS: Final = 0.5
BACKOFF_SECONDS_MAX: Final = 8.0


class Supply:
    """Keeps ``wanted`` workers on order or at work; each order has a number that is never used again.

    Invariant: ``len(orders) ≤ wanted``.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.orders: set[int] = set()
        """Orders that Spark has and that have not ended."""
        self.first_failure = ""
        self._numbers = 0
        self._failures = 0
        self._not_before = 0.0

    def due(self, now: float) -> list[int]:
        """Numbers of the orders to place now."""
        if now < self._not_before or self.failed:
            return []
        placed = []
        while len(self.orders) < self.wanted:
            self._numbers += 1
            self.orders.add(self._numbers)
            placed.append(self._numbers)
        return placed

    def ended(self, order: int, reason: str, was_registered: bool, now: float) -> None:
        """An order's job is over; ``reason`` is empty for an orderly end."""
        self.orders.discard(order)
        if was_registered:
            self._failures = 0
            return
        self._failures += 1
        self.first_failure = self.first_failure or reason
        self._not_before = now + min(BACKOFF_SECONDS * 2**self._failures, BACKOFF_SECONDS_MAX)

    @property
    def failed(self) -> bool:
        """Nothing is ordered any more."""
        return self._failures >= FAILURES_MAX
