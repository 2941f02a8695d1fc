"""Parts of a task's state that was frozen for a snapshot, made a few at a time between the elements that
follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from minishuffle.errors import UnserializableRecord
from minishuffle.limits import SLICE_SECONDS, SLICE_SHARE
from minishuffle.operators.state_parts import StatePart
from minishuffle.runtime.statesnapshot import TaskStateSnapshot

__all__ = ["LateParts", "made_in_turn"]


class LateParts:
    """The parts still to be made of the snapshot of a task that takes no local ones.

    Args:
        clock: seconds, of any origin.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rest: Iterator[int] | None = None
        self._last = 0.0
        """When parts were made last, or the state was frozen."""

    @property
    def under_way(self) -> bool:
        """Parts are still to be made."""
        return self._rest is not None

    def begin(self, snapshot: TaskStateSnapshot, made: Callable[[TaskStateSnapshot | str], None]) -> None:
        """Make the parts of that, which was frozen when no other was under way; then ``made`` gets all of
        them, or why they cannot be written."""
        self._rest, self._last = made_in_turn(snapshot, made), self._clock()

    def go_on(self) -> float:
        """Make more of them, for ``limits.SLICE_SECONDS`` or ``SLICE_SHARE`` of the time since the last call;
        gives in how many seconds to call it again."""
        if self._rest is None:
            return math.inf
        self._make(max(SLICE_SECONDS, SLICE_SHARE * (self._clock() - self._last)))
        self._last = self._clock()
        return math.inf if self._rest is None else 0.0

    def end(self) -> None:
        """Make the rest."""
        self._make(math.inf)

    def _make(self, seconds: float) -> None:
        if self._rest is None:
            return
        until = self._clock() + seconds
        for _ in self._rest:
            if self._clock() >= until:
                return
        self._rest = None


def made_in_turn(
    snapshot: TaskStateSnapshot, made: Callable[[TaskStateSnapshot | str], None]
) -> Iterator[int]:
    """Makes a part of that snapshot each time that the next is asked for, and gives the bytes of each."""
    parts: dict[str, list[StatePart]] = {}
    try:
        for operator, held in snapshot.parts.items():
            parts[operator] = []
            for part in held:
                parts[operator].append(part)
                yield part.batch.nbytes
    except UnserializableRecord as error:
        made(f"its state cannot be written: {error}")
    else:
        made(replace(snapshot, parts=parts))
