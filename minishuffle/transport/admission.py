"""The policy of every listening port: unproven connections that may wait, and refusals that are logged. Pure.

Anyone who reaches a port can open connections. So the cost of connections that have not proven the secret is
bounded, and they cannot keep out a peer that can prove it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

__all__ = ["REFUSAL_LINES", "REFUSAL_SECONDS", "RefusalLog", "UnprovenConnections"]

REFUSAL_LINES: Final = 5
"""Number of refusals logged one by one; later ones are summed up."""
REFUSAL_SECONDS: Final = 60.0
"""Between two summaries."""

Connection = TypeVar("Connection")


class UnprovenConnections(Generic[Connection]):
    """Accepted connections whose handshake is not complete, oldest first.

    Invariant: at most ``limit``.

    Args:
        greeted: whether a connection has sent a valid first Hello.
    """

    def __init__(self, limit: int, greeted: Callable[[Connection], bool]) -> None:
        self.limit = limit
        self._greeted = greeted
        self._connections: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._connections))

    def add(self, connection: Connection) -> Connection | None:
        """Admit a connection. Returns the connection that must be closed to make room, if any: the oldest one
        without a Hello, or else the oldest.

        A handshake takes a few milliseconds for a peer that knows the secret, so the oldest connection is the
        least likely to complete it.
        """
        evicted: Connection | None = None
        if len(self._connections) >= self.limit:
            silent = (each for each in self._connections if not self._greeted(each))
            evicted = next(silent, next(iter(self._connections)))
            del self._connections[evicted]
        self._connections[connection] = None
        return evicted

    def remove(self, connection: Connection) -> None:
        """Its handshake is complete, or it is closed."""
        self._connections.pop(connection, None)

    def eviction(self) -> str:
        """Why one is closed."""
        return f"it made room for a newer connection: {self.limit} wait for their handshake at most"


class RefusalLog:
    """Counts refusals by reason and logs them at a bounded rate: a few lines, then sums.

    After ``REFUSAL_LINES`` refusals the others of the next ``REFUSAL_SECONDS`` are summed up in one line. As
    long as there are any, one line follows another in that distance; after an interval without any,
    refusals are logged one by one again.

    Args:
        log: takes a line.
        call_at: has a function called at a time of the clock that ``now`` is of.
    """

    def __init__(
        self, log: Callable[[str], None], call_at: Callable[[float, Callable[[], None]], object]
    ) -> None:
        self.counts: dict[str, int] = {}
        """Refused connections by reason."""
        self._log = log
        self._call_at = call_at
        self._until = float("-inf")
        """End of the interval."""
        self._lines_left = 0
        self._summed: dict[str, int] = {}

    def refused(self, reason: str, text: str, remote: str, now: float) -> None:
        """A connection was refused, or closed for cause."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if now >= self._until:
            self._lines_left = REFUSAL_LINES if not self._summed else 0
            self._summarise()
            self._until = now + REFUSAL_SECONDS
        if self._lines_left:
            self._lines_left -= 1
            self._log(f"connection from {remote} refused ({reason}): {text}")
            return
        if not self._summed:
            self._call_at(self._until, self._on_interval)
        self._summed[reason] = self._summed.get(reason, 0) + 1

    def _on_interval(self) -> None:
        if self._summed:
            self._summarise()
            self._lines_left = 0
            self._until += REFUSAL_SECONDS

    def _summarise(self) -> None:
        summed, self._summed = self._summed, {}
        if summed:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(summed.items()))
            total = sum(summed.values())
            self._log(f"{total:,} more connections refused in {REFUSAL_SECONDS:g} s ({reasons})")
