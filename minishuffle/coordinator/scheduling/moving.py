"""Subtasks of one job that are to leave their slots, and first take all that was emitted for them. Pure.

Whoever feeds them puts a barrier on the channels to them, and goes on: what it emits for them from then on
waits for their next attempts, whatever ``on_unavailable`` says. Each of them stops behind the barrier, once
it has taken all that came before, and ends when all that it has itself emitted was taken. So a move loses no
row that is in flight. It waits for so long at most, and not at all for what a failure has made void.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minishuffle.coordinator.jobs.lifecycle import Subtask
from minishuffle.coordinator.jobs.lossaccounting import TaskKey

__all__ = ["JobMove"]


@dataclass(slots=True)
class JobMove:
    """Times are of the wall clock. Not journaled: the next coordinator has attempts that are to move end
    at once."""

    barrier: int = 0
    """That which holds back what is emitted for those that move; 0: nothing is held back any more."""
    until: float = 0.0
    """When whatever is not over by then is."""
    unsent: bool = False
    """The workers have yet to hear of it."""
    _waiting: dict[TaskKey, int] = field(default_factory=dict)
    """The attempts that have yet to stand, with all taken that they have emitted."""
    _moving: list[TaskKey] = field(default_factory=list)

    @property
    def is_aligning(self) -> bool:
        """Attempts wait for what was emitted for them."""
        return bool(self._moving)

    def begin(self, barrier: int, tasks: Iterable[Subtask], until: float) -> None:
        """These are to move; none is moving."""
        self.barrier, self.until, self.unsent = barrier, until, True
        self._waiting = {task.key: task.attempt for task in tasks}
        self._moving = sorted(self._waiting)

    def taken(self, task: Subtask) -> None:
        """All was taken that the attempt was to take, and that it has emitted; or it has finished."""
        if self._waiting.get(task.key) == task.attempt:
            del self._waiting[task.key]

    def take_ready(self) -> list[TaskKey]:
        """Those that are to end now: all of them, once none waits any more."""
        return [] if self._waiting else self.give_up()

    def give_up(self) -> list[TaskKey]:
        """Nobody waits any more; gives those that are to end at once."""
        moving, self._moving = self._moving, []
        self._waiting.clear()
        self.unsent = False
        return moving

    def interrupt(self, at: float) -> list[TaskKey]:
        """The same, since an attempt has failed; what is held back is so no longer."""
        self.until = min(at, self.until)
        return self.give_up()

    def end(self) -> list[TaskKey]:
        """The same, and nothing is held back any more."""
        self.barrier = 0
        return self.give_up()

    def take_unsent(self) -> bool:
        """Whether the workers have yet to hear of the move: True once."""
        unsent, self.unsent = self.unsent, False
        return unsent

    def is_overdue(self, at: float) -> bool:
        """Whether what is held back is to be held back no more."""
        return bool(self.barrier) and at >= self.until
