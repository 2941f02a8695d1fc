"""Attempts of one job that are to end so that the next ones follow: which, why, and who waits for that. Pure.

There are three reasons::

    drained    its slot moves (moving.py)
    replayed   what it reads or writes runs again from its beginning (lostpartitions.py)
    canceled   its region restarts (failover.py)

Its worker hears of it once. It is to end until it has ended, however that comes; an attempt that is to be
drained may first take what was emitted for it.
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
    """Those of one job.

    Args:
        replays: what runs again from its beginning.
        move: what leaves its slots.
        tasks: all subtasks.
    """

    def __init__(
        self, graph: JobGraph, replays: Replays, move: JobMove, tasks: Mapping[TaskKey, Subtask]
    ) -> None:
        self.regions = Regions(graph)
        self.drained: set[TaskKey] = set()
        """Those that have to end because a slot moves, and have not so far."""
        self._graph = graph
        self._replays = replays
        self._move = move
        self._tasks = tasks
        self._unsent: list[TaskKey] = []
        """Until CancelTasks is sent."""

    # --- what happens ---------------------------------------------------------------------------

    def cancel(self, keys: Iterable[TaskKey]) -> None:
        """These are to end now."""
        self._unsent += keys

    def take(self) -> list[Subtask]:
        """Those that are to end, and whose workers have yet to hear of it: each once."""
        found = [self._tasks[key] for key in dict.fromkeys(self._unsent) if self.why(key)]
        self._unsent.clear()
        return found

    def restart_with(self, keys: Sequence[TaskKey]) -> None:
        """What restarts together with these has to end first."""
        self.cancel(self.regions.restart(keys, self._runs))

    def drain(self, keys: Sequence[TaskKey]) -> Sequence[TaskKey]:
        """The slots of these, which run, are to move: gives all that have to end for that."""
        if self.regions.joint:
            keys = self.regions.restart(keys, self._runs)
        self.drained.update(keys)
        return keys

    def widen(self, strategy: str) -> bool:
        """As much restarts together as that strategy says; False if it did before, or something is to end."""
        if strategy == self.regions.strategy or not self.regions.at_rest or self.drained:
            return False
        self.regions = Regions(self._graph, strategy)
        return True

    def ended(self, key: TaskKey) -> None:
        """The current attempt of a subtask has ended, however."""
        self.drained.discard(key)
        self.regions.ended(key)
        self._replays.ended(key)

    def give_up(self) -> None:
        """Nothing restarts any more."""
        self.drained.clear()
        self._move.give_up()
        self.regions.give_up()
        self._replays.give_up()

    def _runs(self, key: TaskKey) -> bool:
        return self._tasks[key].runs

    # --- what follows ---------------------------------------------------------------------------

    def why(self, key: TaskKey) -> Reason:
        """The reason for which the attempt of a subtask is to end that runs; empty: it is not."""
        if key in self.drained:
            return "drained"
        if self._replays.must_end(key):
            return "replayed"
        return "canceled" if self.regions.must_end(key) else ""

    def is_to_end(self, task: Subtask) -> bool:
        """Whether an attempt was cancelled and is to restart, and runs as far as is known."""
        return task.on_worker and bool(self.why(task.key))

    def holds_back(self, key: TaskKey) -> bool:
        """Whether the next attempt of a subtask waits for others to end."""
        return self.regions.is_ending(key) or self._replays.holds_back(key)

    def deployed_with(self, keys: Sequence[TaskKey]) -> set[TaskKey]:
        """All that is deployed at one time with any of these, which are pending. When a region is to be
        deployed that has yet to end is known at its end."""
        members = keys if any(map(self.regions.is_ending, keys)) else self.regions.of(keys)
        return self._replays.deployed_with(keys).union(members)

    # --- the journal ----------------------------------------------------------------------------

    def recall(
        self, strategy: str, regions: RegionsRecord, replays: ReplaysRecord, drained: Iterable[TaskKey]
    ) -> None:
        """Become what the journal has of each. Workers hear of all of it again."""
        self.regions, self.drained = Regions(self._graph, strategy), set(drained)
        self._unsent = [*self.regions.recall(regions), *self._replays.recall(replays), *drained]
