"""Timers of keys, by event time or by the wall clock. (Flink: ``InternalTimerService``.)"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

__all__ = ["Timers"]


class Timers:
    """At most one timer for each key and time (microseconds since 1970), given back in order of time.

    Those of one time come in the order in which they were set.
    """

    def __init__(self) -> None:
        self._set: dict[tuple[Any, int], int] = {}
        self._heap: list[tuple[int, int, Any]] = []
        """Entries of time, number and key; a timer that was deleted stays until most are such."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._set)

    def __contains__(self, timer: tuple[Any, int]) -> bool:
        return timer in self._set

    def set(self, form: Any, time: int) -> bool:
        """False if there is that one already."""
        if (form, time) in self._set:
            return False
        number = self._set[form, time] = self._number
        self._number += 1
        heapq.heappush(self._heap, (time, number, form))
        return True

    def delete(self, form: Any, time: int) -> bool:
        """False if there is none."""
        if self._set.pop((form, time), None) is None:
            return False
        if len(self._heap) > 2 * len(self._set) + 64:
            self._heap = [(at, number, key) for (key, at), number in self._set.items()]
            heapq.heapify(self._heap)
        return True

    @property
    def earliest(self) -> int | None:
        """When the next one is due."""
        heap = self._heap
        while heap and self._set.get((heap[0][2], heap[0][0])) != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take_until(self, time: int) -> Iterator[tuple[Any, int]]:
        """Take those up to ``time``, also such as are set meanwhile: (key, time)."""
        while (due := self.earliest) is not None and due <= time:
            form = heapq.heappop(self._heap)[2]
            del self._set[form, due]
            yield form, due
