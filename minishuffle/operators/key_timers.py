"""Timers of keys, by event time or by the wall clock. (Flink: ``InternalTimerService``.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any

from minishuffle.operators.time_heap import TimeHeap

__all__ = ["KeyTimers"]


class KeyTimers:
    """At most one timer for each key and time (microseconds since 1970), given back in order of when they are
    due: at their time, or as said when they are set.

    Those that are due at one time come in the order in which they were set.

    Args:
        due: when a timer is due for which that is not said.
    """

    def __init__(self, due: Callable[[int], int] = int) -> None:
        self._due = due
        self._set: dict[Any, dict[int, list[Any]]] = {}
        """What stands for each timer in the heap, by key and time: key, time, when it is due, and a number in
        the order of setting."""
        self._heap: TimeHeap[list[Any]] = TimeHeap()
        """A timer that was deleted stays, its list empty, until most are such."""
        self._count = self._number = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, timer: tuple[Any, int]) -> bool:
        form, time = timer
        return time in self._set.get(form, ())

    def has_key(self, form: Any) -> bool:
        """Whether the key has any timer."""
        return form in self._set

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """All of them as (key, time), in the order in which they were set."""
        return ((form, time) for form, time, _, _ in self._in_order())

    def _in_order(self) -> list[list[Any]]:
        return sorted(chain.from_iterable(map(dict.values, self._set.values())), key=itemgetter(3))

    def set(self, form: Any, time: int, due: int | None = None) -> bool:
        """False if there is that one already."""
        times = self._set.get(form)
        if times is None:
            times = self._set[form] = {}
        elif time in times:
            return False
        due = self._due(time) if due is None else due
        times[time] = entry = [form, time, due, self._number]
        self._number += 1
        self._count += 1
        self._heap.push(due, entry)
        return True

    def delete(self, form: Any, time: int) -> bool:
        """False if there is none."""
        if (form, time) not in self:
            return False
        self._take_out(form, time).clear()
        if len(self._heap) > 2 * self._count + 64:
            self._heap = TimeHeap()
            for kept in self._in_order():
                self._heap.push(kept[2], kept)
        return True

    def _take_out(self, form: Any, time: int) -> list[Any]:
        times = self._set[form]
        entry = times.pop(time)
        if not times:
            del self._set[form]
        self._count -= 1
        return entry

    def clear(self) -> None:
        """Delete all of them."""
        self._set, self._heap, self._count = {}, TimeHeap(), 0

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
            _, (form, at, _, _) = self._heap.pop()
            self._take_out(form, at)
            yield form, at, due
