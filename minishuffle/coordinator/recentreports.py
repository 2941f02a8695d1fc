"""Reports of workers and tasks from half a minute ago, from which the load of a job is measured.

A load is the growth between two reports. A function on small rows may process one buffer for a second or
more. Over such a short span, a task with 10 % too much work can look idle, or at its limit.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from minishuffle.coordinator.jobs.lossaccounting import Attempt
from minishuffle.counters import TaskCounters
from minishuffle.wire.messages import Heartbeat, PeerReport, WorkerReport

__all__ = ["RECENT_SECONDS", "RecentReports"]

RECENT_SECONDS: Final = 30.0
"""Greatest age of the earliest report; its least age is ``KEPT_EVERY_SECONDS`` less."""
KEPT_EVERY_SECONDS: Final = 10.0

T = TypeVar("T")


class _Recent(Generic[T]):
    """Values of the last RECENT_SECONDS, at times in ascending order."""

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
    """Counters of one attempt, by its reported time."""

    def __init__(self, counters: TaskCounters) -> None:
        super().__init__(counters.seconds, counters)
        self.begun = has_records(counters)


def has_records(counters: TaskCounters) -> bool:
    """Whether a task has processed records. The time before them, in which it starts, is not part of its
    load."""
    return counters.records_in > 0 or counters.records_out > 0


class RecentReports:
    """Recent reports of one worker and of the attempts in its heartbeats."""

    def __init__(self) -> None:
        self._worker: _Recent[tuple[WorkerReport, list[PeerReport]]] | None = None
        self._attempts: dict[tuple[str, Attempt], _RecentCounters] = {}

    def note(self, heartbeat: Heartbeat) -> None:
        """Keep a heartbeat's reports, and forget attempts that are not in it."""
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
        """The earliest kept counters of the job's attempts."""
        return {attempt: each.earliest for (name, attempt), each in self._attempts.items() if name == job}

    @property
    def report(self) -> tuple[WorkerReport, list[PeerReport]]:
        """The earliest kept report of the worker, and of its connections."""
        return (WorkerReport(), []) if self._worker is None else self._worker.earliest
