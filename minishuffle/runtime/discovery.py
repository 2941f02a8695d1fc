"""The splits of a source whose names change while it is read.

A subtask owns the names whose stable hash, modulo the parallelism, is its index: so all subtasks agree
without asking each other, at any time and in any order of names. Few splits divide unevenly so. A name that
a later answer lacks is still read to its end. One that has ended is not read again, until an answer lacks it:
then it is forgotten, so that what is known of a source is no more than what it gives and what is being read.
(Flink: ``SplitEnumerator``, with the assignment of ``KafkaSourceEnumerator``.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from minishuffle.exchange.keys import stable_hash
from minishuffle.operators.base import SplitSource
from minishuffle.runtime.splits import NamedSplit, check_count, checked_names, given_splits
from minishuffle.wire.packed import Cursor, SplitPosition

__all__ = ["SplitDiscovery"]


class SplitDiscovery:
    """Finds the splits of one subtask. No clock: ``now`` is in seconds of any origin.

    The numbers of splits differ between all subtasks; those that an earlier attempt has given stay.

    Args:
        interval: seconds between two answers of ``splits()``.
        resumed: where an earlier attempt was.
    """

    def __init__(
        self,
        source: SplitSource[Any],
        index: int,
        parallelism: int,
        interval: float,
        resumed: Iterable[SplitPosition] = (),
    ) -> None:
        self._source = source
        self._index, self._parallelism, self._interval = index, parallelism, interval
        before = {entry.cursor.name: entry for entry in resumed if entry.cursor is not None}
        self._before = {name: entry for name, entry in before.items() if self._owns(name)}
        """What was not given so far of that. A savepoint has the splits of all subtasks."""
        self._numbers = {name: entry.split for name, entry in self._before.items()}
        self._ended = {name: entry for name, entry in self._before.items() if entry.done}
        self._changes: list[SplitPosition] = []
        last = max((entry.split for entry in before.values()), default=-1)
        self._next = last + 1 + (index - last - 1) % parallelism
        self.due = -math.inf
        """When :meth:`look` is to be called next."""

    def look(self, now: float) -> list[NamedSplit]:
        """The splits that have not been given so far: the first time those too that an earlier attempt was
        reading.

        Raises:
            WrongResult: ``splits()`` gives what are no names, or too many for one subtask.
            Exception: what ``splits()`` raises.
        """
        self.due = now + self._interval
        names = checked_names(self._source, given_splits(self._source, ordered=False))
        places, self._before = self._before, {}
        given = set(names)
        for name in [each for each in self._ended if each not in given]:
            del self._numbers[name]
            self._changes.append(self._ended.pop(name)._replace(forgotten=True))
        for name in names:
            if name not in self._numbers and self._owns(name):
                self._numbers[name] = self._next
                places[name] = SplitPosition(self._next, 0, cursor=Cursor(name))
                self._changes.append(places[name])
                self._next += self._parallelism
        check_count(self._source, len(self._numbers))
        return [NamedSplit(self._source, name, place) for name, place in places.items() if not place.done]

    def _owns(self, name: str) -> bool:
        """Whether the split of that name is one of this subtask."""
        return stable_hash(name) % self._parallelism == self._index

    def end(self, split: NamedSplit) -> None:
        """A split was read to its end."""
        cursor = split.cursor
        self._ended[cursor.name] = SplitPosition(split.number, split.position, 0, True, cursor)

    def take_changes(self) -> list[SplitPosition]:
        """Splits that are new, and those that are forgotten, since the last call."""
        changes, self._changes = self._changes, []
        return changes
