"""The timers of one job's pending subtasks: when the next attempt is due, or the wait for a slot ends. Pure.

For a *restarting* subtask it is the time at which its next attempt may be deployed. For a subtask that waits
for a slot it is the deadline at which the job fails. A subtask whose worker is lost may have to wait for the
report of how the worker's process ended, which the subtask may have caused
(:mod:`~minishuffle.coordinator.jobs.deaths`). Times are wall clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from minishuffle.coordinator.jobs.lifecycle import PENDING
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.subtasks import Subtask, Subtasks

__all__ = ["RestartTimers"]


class RestartTimers:
    """The timers of one job's pending subtasks.

    Invariants: a subtask has a time exactly if it is pending; every subtask that waits for the report of its
    worker's end has a time.
    """

    def __init__(self, subtasks: Subtasks) -> None:
        self._subtasks = subtasks
        self._times: dict[TaskKey, float] = {}
        self._held: dict[TaskKey, tuple[int, float]] = {}
        """By subtask that waits for the report of its worker's end, the worker and the deadline."""

    def __iter__(self) -> Iterator[TaskKey]:
        return iter(self._times)

    def __len__(self) -> int:
        return len(self._times)

    # --- what happens ---------------------------------------------------------------------------

    def begin(self, key: TaskKey, due: float) -> None:
        """A subtask is pending until ``due``; also called when it begins to wait for a slot."""
        self._times[key] = due

    def end(self, key: TaskKey) -> None:
        """The subtask is deployed, or canceled."""
        del self._times[key]
        self._held.pop(key, None)

    def hold(self, keys: Iterable[TaskKey], worker: int, until: float) -> None:
        """Let these subtasks, which are about to be pending, wait for the report of the worker's end, at most
        until ``until``."""
        self._held.update(dict.fromkeys(keys, (worker, until)))

    def held_until(self, key: TaskKey, at: float) -> float:
        """The time at which the next attempt of a lost subtask is due."""
        return self._held.get(key, (0, at))[1]

    def release(self, worker: int) -> list[TaskKey]:
        """The end of the worker's process is explained. Returns the subtasks that waited for it."""
        found = [key for key, (lost_with, _) in self._held.items() if lost_with == worker]
        for key in found:
            del self._held[key]
        return found

    def hasten(self, keys: Iterable[TaskKey], at: float) -> None:
        """Let restarting subtasks among these restart at ``at`` or earlier."""
        found = [key for key in keys if self._subtasks[key].state == "restarting"]
        self._set({key: min(at, self._times[key]) for key in found})

    def join(self, keys: Iterable[TaskKey]) -> None:
        """Let restarting subtasks among these restart together, at the latest of their times."""
        found = [key for key in keys if self._subtasks[key].state == "restarting"]
        if found:
            self._set(dict.fromkeys(found, max(self._times[key] for key in found)))

    def prolong(self, keys: Iterable[TaskKey], until: float) -> None:
        """Extend the wait of these subtasks for a slot."""
        self._set(dict.fromkeys(keys, until))

    def _set(self, times: dict[TaskKey, float]) -> None:
        self._subtasks.touch(*times)
        self._times |= times

    # --- what follows ---------------------------------------------------------------------------

    def due(self, at: float) -> list[Subtask]:
        """Pending subtasks that may be deployed now, if they have a slot."""
        tasks = (self._subtasks[key] for key in self._times)
        return [task for task in tasks if task.state != "restarting" or self._times[task.key] <= at]

    def waiting(self) -> list[Subtask]:
        """The subtasks that wait for a slot."""
        if not self._subtasks.states["waiting for a slot"]:
            return []
        tasks = (self._subtasks[key] for key in self._times)
        return [task for task in tasks if task.state == "waiting for a slot"]

    def overdue(self, at: float) -> list[Subtask]:
        """The subtasks whose wait for a slot has reached its deadline."""
        return [task for task in self.waiting() if self._times[task.key] <= at]

    def first(self, tasks: Iterable[Subtask]) -> float:
        """The earliest time of these pending subtasks."""
        return min(self._times[task.key] for task in tasks)

    def next_time(self, holds_back: Callable[[TaskKey], bool]) -> float | None:
        """The earliest time, without subtasks that wait until others have ended (``holds_back``)."""
        return min((time for key, time in self._times.items() if not holds_back(key)), default=None)

    # --- the journal ----------------------------------------------------------------------------

    def record(self, key: TaskKey) -> float | None:
        """For the journal: the time of a subtask, if it is pending."""
        return self._times.get(key)

    def recall(self, key: TaskKey, due: float | None) -> None:
        """Restore from the result of :meth:`record`. Launchers repeat how workers ended."""
        if due is not None:
            self._times[key] = due

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        pending = {key for key, task in self._subtasks.items() if task.state in PENDING}
        assert pending == self._times.keys() >= self._held.keys()
