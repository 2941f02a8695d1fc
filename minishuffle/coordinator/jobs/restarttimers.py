"""When pending subtasks of one job go on: the next attempt is due, or the wait for a slot is given up. Pure.

Of a subtask that is *restarting* the time is when its next attempt may be deployed. Of one that waits for a
slot it is when the job fails for want of one. A subtask whose worker is lost may have to wait until it is
known how the process of that worker ended: it may have been the doing of the subtask
(:mod:`~minishuffle.coordinator.jobs.deaths`). Times are of the wall clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from minishuffle.coordinator.jobs.lifecycle import PENDING
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.subtasks import Subtask, Subtasks

__all__ = ["RestartTimers"]


class RestartTimers:
    """The times of one job's pending subtasks.

    Invariants: a subtask has a time if and only if it is pending; whatever waits to know how its worker
    ended has a time.
    """

    def __init__(self, subtasks: Subtasks) -> None:
        self._subtasks = subtasks
        self._times: dict[TaskKey, float] = {}
        self._held: dict[TaskKey, tuple[int, float]] = {}
        """Subtasks that wait to know how their worker ended: that worker, and until when."""

    def __iter__(self) -> Iterator[TaskKey]:
        return iter(self._times)

    def __len__(self) -> int:
        return len(self._times)

    # --- what happens ---------------------------------------------------------------------------

    def begin(self, key: TaskKey, due: float) -> None:
        """A subtask is pending; or it waits for a slot from now on, until ``due``."""
        self._times[key] = due

    def end(self, key: TaskKey) -> None:
        """The subtask is deployed, or will not be."""
        del self._times[key]
        self._held.pop(key, None)

    def hold(self, keys: Iterable[TaskKey], worker: int, until: float) -> None:
        """How the process of ``worker`` ended is known by then at the latest: these, which are about to be
        pending, wait for that."""
        self._held.update(dict.fromkeys(keys, (worker, until)))

    def held_until(self, key: TaskKey, at: float) -> float:
        """When the next attempt of a subtask is due that is lost now."""
        return self._held.get(key, (0, at))[1]

    def release(self, worker: int) -> list[TaskKey]:
        """How the process of ``worker`` ended is known: gives the subtasks that waited for that."""
        found = [key for key, (lost_with, _) in self._held.items() if lost_with == worker]
        for key in found:
            del self._held[key]
        return found

    def hasten(self, keys: Iterable[TaskKey], at: float) -> None:
        """Those of these that restart do so at that time at the latest."""
        found = [key for key in keys if self._subtasks[key].state == "restarting"]
        self._set({key: min(at, self._times[key]) for key in found})

    def join(self, keys: Iterable[TaskKey]) -> None:
        """Those of these that restart do so together, at the latest of their times."""
        found = [key for key in keys if self._subtasks[key].state == "restarting"]
        if found:
            self._set(dict.fromkeys(found, max(self._times[key] for key in found)))

    def prolong(self, keys: Iterable[TaskKey], until: float) -> None:
        """These, which wait for a slot, do so until then."""
        self._set(dict.fromkeys(keys, until))

    def _set(self, times: dict[TaskKey, float]) -> None:
        self._subtasks.touch(*times)
        self._times |= times

    # --- what follows ---------------------------------------------------------------------------

    def due(self, at: float) -> list[Subtask]:
        """Pending subtasks that may be deployed now, if there is a slot for them."""
        tasks = (self._subtasks[key] for key in self._times)
        return [task for task in tasks if task.state != "restarting" or self._times[task.key] <= at]

    def waiting(self) -> list[Subtask]:
        """Those that wait for a slot."""
        if not self._subtasks.states["waiting for a slot"]:
            return []
        tasks = (self._subtasks[key] for key in self._times)
        return [task for task in tasks if task.state == "waiting for a slot"]

    def overdue(self, at: float) -> list[Subtask]:
        """Those of them that have waited for as long as they are to."""
        return [task for task in self.waiting() if self._times[task.key] <= at]

    def first(self, tasks: Iterable[Subtask]) -> float:
        """The earliest time of these, which are pending."""
        return min(self._times[task.key] for task in tasks)

    def next_time(self, holds_back: Callable[[TaskKey], bool]) -> float | None:
        """The earliest time of all that do not wait for others to end, as ``holds_back`` says of each."""
        return min((time for key, time in self._times.items() if not holds_back(key)), default=None)

    # --- the journal ----------------------------------------------------------------------------

    def record(self, key: TaskKey) -> float | None:
        """For the journal: the time of a subtask, if it is pending."""
        return self._times.get(key)

    def recall(self, key: TaskKey, due: float | None) -> None:
        """What :meth:`record` gave. How a worker ended its launcher says again."""
        if due is not None:
            self._times[key] = due

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        pending = {key for key, task in self._subtasks.items() if task.state in PENDING}
        assert pending == self._times.keys() >= self._held.keys()
