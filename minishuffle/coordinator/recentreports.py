"""What a worker and its tasks reported half a minute ago: where all who judge the load of a job begin.

Loads are the growth between two reports. A function that takes small rows works off a buffer at a time, for a
second or more: over a span as short as that a task that has 10 % too much to do looks idle, or at its limit.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from minishuffle.coordinator.jobs.lossaccounting import Attempt
from minishuffle.counters import TaskCounters
from minishuffle.wire.messages import Heartbeat, PeerReport, WorkerReport

__all__ = ["RECENT_SECONDS", "RecentReports"]

RECENT_SECONDS: Final = 30.0
"""How old the earliest report is at most; the least age is ``KEPT_EVERY_SECONDS`` less."""
KEPT_EVERY_SECONDS: Final = 10.0

T = TypeVar("T")


class _Recent(Generic[T]):
    """Some of the values of the last RECENT_SECONDS, each at a time that never goes back."""

    def __init__(self, at: float, value: T) -> None:
        self._kept = deque([(at, value)])

    def note(self, at: float, value: T) -> None:
        if at >= self._kept[-1][0] + KEPT_EVERY_SECONDS:
            self._kept.append((at, value))
        while self._kept[0][0] < at - RECENT_SECONDS:
            self._kept.popleft()

    @property
    def earliest(self) -> T:
        return self._kept[0][1]


class _RecentCounters(_Recent[TaskCounters]):
    """Those of one attempt, by the time that it has reported."""

    def __init__(self, counters: TaskCounters) -> None:
        super().__init__(counters.seconds, counters)
        self.begun = has_records(counters)


def has_records(counters: TaskCounters) -> bool:
    """The time before its first records, in which a task starts, says nothing of its load."""
    return counters.records_in > 0 or counters.records_out > 0


class RecentReports:
    """Those of one worker and of the attempts that are in its heartbeats."""

    def __init__(self) -> None:
        self._worker: _Recent[tuple[WorkerReport, list[PeerReport]]] | None = None
        self._attempts: dict[tuple[str, Attempt], _RecentCounters] = {}

    def note(self, heartbeat: Heartbeat) -> None:
        """Keep what it says, and forget attempts that it does not name."""
        at, said = heartbeat.report.clock_seconds, (heartbeat.report, heartbeat.peers)
        if self._worker is None:
            self._worker = _Recent(at, said)
        self._worker.note(at, said)
        before, self._attempts = self._attempts, {}
        for task in heartbeat.tasks:
            subtask, counters = task.attempt.subtask, task.counters
            key = (subtask.job, (*subtask.key, task.attempt.attempt))
            recent = before.get(key)
            if recent is None or (not recent.begun and has_records(counters)):
                recent = _RecentCounters(counters)
            recent.note(counters.seconds, counters)
            self._attempts[key] = recent

    def counters(self, job: str) -> dict[Attempt, TaskCounters]:
        """What the attempts of the job had counted."""
        return {attempt: each.earliest for (name, attempt), each in self._attempts.items() if name == job}

    @property
    def report(self) -> tuple[WorkerReport, list[PeerReport]]:
        """What the worker said of itself and of its connections."""
        return (WorkerReport(), []) if self._worker is None else self._worker.earliest
