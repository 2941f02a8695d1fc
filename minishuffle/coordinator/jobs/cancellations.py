"""The attempts of one job that must end before their next attempts can be deployed, and the reasons. Pure.

There are three reasons::

    drained    its slot moves (moving.py)
    replayed   its input or output is made again from the beginning (lostpartitions.py)
    canceled   its region restarts (failover.py)

The worker gets one message. The attempt counts as ending until it has ended in any way. A drained attempt may
first process the rows already sent to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from minishuffle.coordinator.jobs.failover import Regions, RegionsRecord
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.lostpartitions import Replays, ReplaysRecord
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.coordinator.scheduling.moving import JobMove
from minishuffle.plan.graph import JobGraph

__all__ = ["Cancellations"]

Reason: TypeAlias = Literal["", "drained", "replayed", "canceled"]


class Cancellations:
    """The cancellations of one job.

    Args:
        replays: tasks that run again from the beginning.
        move: tasks that leave their slots.
    """

    def __init__(
        self, graph: JobGraph, replays: Replays, move: JobMove, tasks: Mapping[TaskKey, Subtask]
    ) -> None:
        self.regions = Regions(graph)
        self.drained: set[TaskKey] = set()
        """Subtasks whose attempt must end because a slot moves, and still runs."""
        self._graph = graph
        self._replays = replays
        self._move = move
        self._tasks = tasks
        self._unsent: list[TaskKey] = []
        """Subtasks to cancel, until CancelTasks is sent."""

    # --- what happens ---------------------------------------------------------------------------

    def cancel(self, keys: Iterable[TaskKey]) -> None:
        """Cancel the attempts of these subtasks."""
        self._unsent += keys

    def take(self) -> list[Subtask]:
        """Remove and return the subtasks to cancel, if their attempt still has to end."""
        found = [self._tasks[key] for key in dict.fromkeys(self._unsent) if self.why(key)]
        self._unsent.clear()
        return found

    def restart_with(self, keys: Sequence[TaskKey]) -> None:
        """Cancel the running attempts of all subtasks that restart together with these."""
        self.cancel(self.regions.restart(keys, self._runs))

    def end_all(self) -> None:
        """Cancel all running attempts: the next ones are deployed together once these have ended."""
        self.give_up()
        self.regions = Regions(self._graph, "full")
        self.restart_with(list(self._tasks))

    def drain(self, keys: Sequence[TaskKey]) -> Sequence[TaskKey]:
        """Drain these running subtasks, whose slots move. Returns all subtasks that must end for it."""
        if self.regions.joint:
            keys = self.regions.restart(keys, self._runs)
        self.drained.update(keys)
        return keys

    def widen(self, strategy: str) -> bool:
        """Use another restart strategy from now on. False, and no change, if it is in use already, or
        attempts are ending."""
        if strategy == self.regions.strategy or not self.regions.at_rest or self.drained:
            return False
        self.regions = Regions(self._graph, strategy)
        return True

    def ended(self, key: TaskKey) -> None:
        """The current attempt of a subtask has ended, in any way."""
        self.drained.discard(key)
        self.regions.ended(key)
        self._replays.ended(key)

    def give_up(self) -> None:
        """Drop all: no subtask restarts any more."""
        self.drained.clear()
        self._move.give_up()
        self.regions.give_up()
        self._replays.give_up()

    def _runs(self, key: TaskKey) -> bool:
        return self._tasks[key].runs

    # --- what follows ---------------------------------------------------------------------------

    def why(self, key: TaskKey) -> Reason:
        """The reason why the running attempt of a subtask must end; empty: none."""
        if key in self.drained:
            return "drained"
        if self._replays.must_end(key):
            return "replayed"
        return "canceled" if self.regions.must_end(key) else ""

    def is_to_end(self, task: Subtask) -> bool:
        """Whether an attempt was cancelled and is to restart, and runs as far as is known."""
        return task.on_worker and bool(self.why(task.key))

    def holds_back(self, key: TaskKey) -> bool:
        """Whether the next attempt of a subtask waits until attempts of others have ended."""
        return self.regions.is_ending(key) or self._replays.holds_back(key)

    def deployed_with(self, keys: Sequence[TaskKey]) -> set[TaskKey]:
        """All subtasks deployed together with any of these pending ones. The members of a region that is
        still ending are added when its end is complete."""
        members = keys if any(map(self.regions.is_ending, keys)) else self.regions.of(keys)
        return self._replays.deployed_with(keys).union(members)

    # --- the journal ----------------------------------------------------------------------------

    def recall(
        self, strategy: str, regions: RegionsRecord, replays: ReplaysRecord, drained: Iterable[TaskKey]
    ) -> None:
        """Restore from the journal's records. All workers get the messages again."""
        self.regions, self.drained = Regions(self._graph, strategy), set(drained)
        self._unsent = [*self.regions.recall(regions), *self._replays.recall(replays), *drained]
