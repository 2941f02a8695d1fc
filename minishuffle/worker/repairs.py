"""When channels that have failed are requested again. Pure."""

from __future__ import annotations

import heapq

from minishuffle.worker.registry import ChannelKey

__all__ = ["Repairs"]


class Repairs:
    """Failed channels, each with the generation that failed, ordered by the time of their next request.

    An entry is stale if the channel has been attached again since: the caller compares generations.
    """

    def __init__(self) -> None:
        self._planned: list[tuple[float, int, ChannelKey, int]] = []
        """A heap; the running number keeps the order of entries with the same time."""
        self._begun = 0

    def plan(self, channel: ChannelKey, generation: int, at: float) -> None:
        """Request the channel again at that time."""
        self._begun += 1
        heapq.heappush(self._planned, (at, self._begun, channel, generation))

    def next_deadline(self) -> float | None:
        """The earliest time in the plan."""
        return self._planned[0][0] if self._planned else None

    def take(self, now: float) -> tuple[ChannelKey, int] | None:
        """The next channel whose time has come, with its generation; None if there is none."""
        if not self._planned or self._planned[0][0] > now:
            return None
        _, _, channel, generation = heapq.heappop(self._planned)
        return channel, generation

    def has(self, channel: ChannelKey, generation: int) -> bool:
        """Whether its time is still to come; for checks of invariants."""
        return any(planned[2:] == (channel, generation) for planned in self._planned)
