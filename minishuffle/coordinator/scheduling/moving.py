"""The move of subtasks to other slots after they have processed all rows in flight. Pure.

The producers of moving subtasks put a barrier on the channels to them, and continue. Rows after the barrier
wait for the next attempts, whatever ``on_unavailable`` is. A moving subtask stops at the barrier, once it has
read everything before it, and ends when its consumers have read all it emitted. So a move loses no rows in
flight. It is limited by a deadline, and given up at once when an attempt fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.subtasks import Subtask

__all__ = ["JobMove"]


@dataclass(slots=True)
class JobMove:
    """The move of subtasks of one job. Times are wall clock. It is not journaled: the next coordinator ends
    moving attempts at once."""

    barrier: int = 0
    """The barrier after which rows for moving subtasks are held back; 0: none."""
    until: float = 0.0
    """Deadline of the move."""
    unsent: bool = False
    """The workers have not been told of the move yet."""
    _waiting: dict[TaskKey, int] = field(default_factory=dict)
    """Attempts that have not stopped yet, or have emitted rows that are not read yet."""
    _moving: list[TaskKey] = field(default_factory=list)

    @property
    def is_aligning(self) -> bool:
        """Attempts still process rows before the barrier."""
        return bool(self._moving)

    def begin(self, barrier: int, tasks: Iterable[Subtask], until: float) -> None:
        """Begin a move of these tasks; no move is under way."""
        self.barrier, self.until, self.unsent = barrier, until, True
        self._waiting = {task.key: task.attempt for task in tasks}
        self._moving = sorted(self._waiting)

    def taken(self, task: Subtask) -> None:
        """The attempt has read its input, and its consumers have read its output; or it has finished."""
        if self._waiting.get(task.key) == task.attempt:
            del self._waiting[task.key]

    def take_ready(self) -> list[TaskKey]:
        """The subtasks to end now: all of them, once none waits."""
        return [] if self._waiting else self.give_up()

    def give_up(self) -> list[TaskKey]:
        """Stop waiting. Returns the subtasks to end at once."""
        moving, self._moving = self._moving, []
        self._waiting.clear()
        self.unsent = False
        return moving

    def interrupt(self, at: float) -> list[TaskKey]:
        """An attempt has failed: stop waiting, and hold no rows back any longer. Returns the subtasks to end
        at once."""
        self.until = min(at, self.until)
        return self.give_up()

    def end(self) -> list[TaskKey]:
        """The move is complete: hold no rows back. Returns the subtasks to end at once."""
        self.barrier = 0
        return self.give_up()

    def take_unsent(self) -> bool:
        """Whether the workers must get the message about the move: True once."""
        unsent, self.unsent = self.unsent, False
        return unsent

    def is_overdue(self, at: float) -> bool:
        """Whether rows are still held back after the deadline."""
        return bool(self.barrier) and at >= self.until
