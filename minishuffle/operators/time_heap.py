"""What waits for its time: rows of a join, open windows, timers. (Flink: ``HeapPriorityQueue``.)"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from minishuffle.exchange.watermarks import END_OF_TIME

__all__ = ["TimeHeap"]

Thing = TypeVar("Thing")


class TimeHeap(Generic[Thing]):
    """Things by time (microseconds since 1970), given back in its order; those of one time as they came,
    or by the numbers that they came with, which differ."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Thing]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[int, Thing]]:
        """All of them, in no particular order."""
        return ((time, thing) for time, _, thing in self._entries)

    def push(self, time: int, thing: Thing, number: int | None = None) -> None:
        heapq.heappush(self._entries, (time, self._number if number is None else number, thing))
        self._number += 1

    @property
    def earliest(self) -> int:
        """The least time; ``END_OF_TIME`` if there is nothing."""
        return self._entries[0][0] if self._entries else END_OF_TIME

    @property
    def first(self) -> Thing:
        """What is next; there must be something."""
        return self._entries[0][2]

    def pop(self) -> tuple[int, Thing]:
        """Take what is next."""
        time, _, thing = heapq.heappop(self._entries)
        return time, thing

    def take_until(self, limit: int) -> Iterator[tuple[int, Thing]]:
        """Take what is due up to ``limit``, also what is pushed meanwhile."""
        while self._entries and self._entries[0][0] <= limit:
            yield self.pop()
