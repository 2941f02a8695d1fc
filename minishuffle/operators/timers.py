"""Timers of keys, by event time or by the wall clock. (Flink: ``InternalTimerService``.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from minishuffle.operators.time_heap import TimeHeap

__all__ = ["Timers"]


class Timers:
    """At most one timer for each key and time (microseconds since 1970), given back in order of when they are
    due: at their time, or as said when they are set.

    Those that are due at one time come in the order in which they were set.

    Args:
        due: when a timer is due for which that is not said.
    """

    def __init__(self, due: Callable[[int], int] = int) -> None:
        self._due = due
        self._set: dict[tuple[Any, int], list[Any]] = {}
        """What stands for each timer in the heap: key, time, and when it is due."""
        self._heap: TimeHeap[list[Any]] = TimeHeap()
        """A timer that was deleted stays, its list empty, until most are such."""

    def __len__(self) -> int:
        return len(self._set)

    def __contains__(self, timer: tuple[Any, int]) -> bool:
        return timer in self._set

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """All of them as (key, time), in the order in which they were set."""
        return iter(self._set)

    def set(self, form: Any, time: int, due: int | None = None) -> bool:
        """False if there is that one already."""
        if (form, time) in self._set:
            return False
        due = self._due(time) if due is None else due
        self._set[form, time] = entry = [form, time, due]
        self._heap.push(due, entry)
        return True

    def delete(self, form: Any, time: int) -> bool:
        """False if there is none."""
        entry = self._set.pop((form, time), None)
        if entry is None:
            return False
        entry.clear()
        if len(self._heap) > 2 * len(self._set) + 64:
            self._heap = TimeHeap()
            for kept in self._set.values():
                self._heap.push(kept[2], kept)
        return True

    @property
    def earliest(self) -> int | None:
        """When the next one is due."""
        heap = self._heap
        while heap and not heap.first:
            heap.pop()
        return heap.earliest if heap else None

    def take_until(self, time: int) -> Iterator[tuple[Any, int, int]]:
        """Take those that are due up to ``time``, also such as are set meanwhile: key, time, when due."""
        while (due := self.earliest) is not None and due <= time:
            _, (form, at, _) = self._heap.pop()
            del self._set[form, at]
            yield form, at, due
