"""Where one attempt stops when its job is paused, and its clock, which stands still meanwhile. Pure.

A task stops at a barrier (``minishuffle/README.md``, *Pause*): a source between two reads, another task once
it has read everything that its producers wrote before the barrier. It forwards the barrier, and calls no
operator until the coordinator ends the barrier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from minishuffle.wire.messages import WriteState

__all__ = ["TaskPause"]


class TaskPause:
    """The barriers of one attempt. Numbers ascend; each is written by one thread.

    Args:
        clock: seconds, of any origin.
        barrier: the last one of the job.
        paused: the job is paused at this barrier: the attempt starts paused, and reads nothing until it ends.
    """

    def __init__(self, clock: Callable[[], float], barrier: int = 0, paused: bool = False) -> None:
        self.starts_paused = paused
        self.due = barrier if paused else 0
        """(Any thread.) The barrier to stop at; 0: none."""
        self.at = 0
        """(Task.) The barrier at which the task has stopped; 0: none."""
        self.blocked = False
        """(Task.) The task waits for its consumers, and reaches no barrier before they read."""
        self.moving: Collection[tuple[int, int]] = ()
        """(Loop.) Moving subtasks, by operator and index, if this task is among them: it stops in order to
        move."""
        self.dividers: deque[tuple[int, dict[int, set[int]]]] = deque()
        """(Loop.) Barriers to send to moving consumers, by edge, without stopping; taken by the task."""
        self.unread: Sequence[int] = ()
        """(Task.) Edges of inputs that it reads later, once others have ended; while it stands."""
        self.saves: WriteState | None = None
        """(Any thread.) The savepoint for which the task is to take its state, while it stands."""
        self.cut: WriteState | None = None
        """(Any thread.) The savepoint or durable snapshot for which the task is to take its state at a
        barrier, behind which it goes on at once."""
        self._saved = 0
        """The number of the last savepoint or durable snapshot."""
        self._clock = clock
        self._wanted = barrier
        self._over = barrier - 1 if paused else barrier
        self._stood_seconds = 0.0
        self._stopped_at: float | None = None

    # --- loop ------------------------------------------------------------------------------------

    def want(self, barrier: int, *, paused: bool) -> None:
        """The task must stop at ``barrier``, or continue if it has stopped there. It does not move."""
        self.moving = ()
        self._wanted = max(barrier, self._wanted)
        if self.cut is not None and self.cut.barrier <= barrier:
            self.cut = None
        over = max(barrier - 1 if paused else barrier, self._over)
        # Before the task continues: otherwise it would stop at the same barrier again.
        self.due = self._wanted if self._wanted > over else 0
        self._over = over

    def move(self, barrier: int, moving: Collection[tuple[int, int]]) -> None:
        """The task is among the subtasks ``moving``: it must stop at ``barrier``."""
        self.want(barrier, paused=True)
        self.moving = moving

    def divide(self, barrier: int, consumers: dict[int, set[int]]) -> None:
        """Consumers of the task move, named by edge: it is to send them ``barrier``."""
        self.dividers.append((barrier, consumers))

    def save(self, message: WriteState) -> bool:
        """If the task stands at that barrier, it is to take its state for the savepoint, once; else False.
        If it goes on, it is to come to the barrier first, unless that has ended."""
        if message.goes_on and message.savepoint > self._saved and message.barrier > self._over:
            self.cut, self._saved = message, message.savepoint
            return True
        if self.at != message.barrier or message.savepoint <= self._saved:
            return False
        self.saves, self._saved = message, message.savepoint
        return True

    @property
    def barrier(self) -> int:
        """(Any thread.) The barrier that the task is to come to; 0: none."""
        cut = self.cut
        return self.due if cut is None else cut.barrier

    @property
    def ended(self) -> int:
        """(Any thread.) Barriers up to this one have ended."""
        return self._over

    # --- task ------------------------------------------------------------------------------------

    def block(self, blocked: bool) -> bool:
        """The task waits for its consumers, or does so no more; gives whether that is new."""
        is_new = blocked != self.blocked
        self.blocked = blocked
        return is_new

    def stop(self, barrier: int, unread: Sequence[int] = ()) -> None:
        """The task has stopped at ``barrier``; edges that are ``unread`` it reads later."""
        self.unread = unread
        self._stopped_at = self._clock()
        self.at = barrier

    def take_saves(self) -> WriteState | None:
        """The savepoint for which the task takes its state now."""
        message, self.saves = self.saves, None
        return message

    def take_cut(self) -> WriteState | None:
        """The savepoint or durable snapshot for which the task takes its state now, and goes on."""
        message, self.cut = self.cut, None
        return message

    def go_on(self) -> None:
        """The barrier has ended."""
        assert self._stopped_at is not None
        self._stood_seconds += self._clock() - self._stopped_at
        self._stopped_at = None
        self.at = 0  # last: while the task stands, nobody asks for its time

    def now(self) -> float:
        """The clock, without the time for which the task has stood."""
        return self._clock() - self._stood_seconds

    def stood_seconds(self) -> float:
        """For how long the task has stood so far, in all."""
        return self._stood_seconds
