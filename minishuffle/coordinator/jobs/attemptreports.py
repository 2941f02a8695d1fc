"""Reports of workers about attempts: the check of their identity, and their dispatch to the job.

The identity of a report is checked only here. A report counts if its attempt is the current one of its
subtask and runs on the reporting worker. Reports of earlier attempts are stale, except for their counts of
exchanged and dropped rows.
"""

from __future__ import annotations

from typing import Final

from minishuffle import limits
from minishuffle.coordinator.jobs.holders import HeldTask
from minishuffle.coordinator.jobs.job import Job
from minishuffle.ids import held_operator, is_holder
from minishuffle.wire.messages import TaskReport
from minishuffle.wire.reports import (
    AttemptReport,
    Collected,
    EndsRead,
    Fact,
    FileCompleted,
    PartitionReadable,
    SnapshotsHeld,
    SourcePositions,
    SplitsDealt,
    StateTaken,
    StateWritten,
    TaskReleased,
    TaskStands,
    TaskStateChanged,
)

__all__ = ["PositionRounds", "apply_fact", "may_wait", "moves_only", "refuses"]

WHILE_IT_RUNS: Final = (Collected, FileCompleted, SourcePositions, SplitsDealt, StateTaken, TaskStands)
"""Facts that are stale once their attempt has ended."""
FREQUENT: Final = (TaskReport, TaskStands)
"""Reports that come so often while an attempt runs that they alone cause no journal write."""


def apply_fact(job: Job, worker: int, fact: Fact | TaskReport, at: float) -> bool:
    """Apply a worker's fact or report about an attempt to the job; False if it is stale."""
    if is_holder(fact.attempt.subtask.operator):
        return _apply_of_holder(job, worker, fact, at)
    task = job.subtasks.current(worker, fact.attempt)
    if task is None:
        return isinstance(fact, TaskReleased | TaskReport) and job.progress.exchanged_before(worker, fact)
    runs = task.state in ("created", "running")
    if runs and moves_only(fact):
        job.subtasks.move(task.key)
    elif not (runs and isinstance(fact, FREQUENT)):
        job.subtasks.touch(task.key)
    if not runs and isinstance(fact, WHILE_IT_RUNS):
        return False
    match fact:
        case TaskStateChanged():
            return job.task_changed(task, fact, at)
        case PartitionReadable(edge=edge):
            return job.partition_readable(task, edge, at)
        case FileCompleted():
            return job.progress.file_completed(task, fact)
        case Collected():
            return job.collected(task, fact, at)
        case TaskReport():
            job.report(task, fact, at)
        case TaskReleased():
            job.progress.exchanged(task, fact.traffic, fact.rows_dropped)
        case SourcePositions():
            job.progress.moved(task, fact, at)
        case SplitsDealt(splits=splits):
            job.splits_dealt(task, splits)
        case EndsRead(edge=edge, producers=producers):
            job.ends_read(task, edge, producers)
        case TaskStands(standing=standing):
            job.task_stands(task, standing, at)
        case StateTaken():
            job.state_taken(task, fact, at)
        case StateWritten():
            job.state_written(task, fact, at)
    return True


def _apply_of_holder(job: Job, worker: int, fact: Fact | TaskReport, at: float) -> bool:
    operator, index = fact.attempt.subtask.key
    held = HeldTask((held_operator(operator), index), fact.attempt.attempt)
    match fact:
        case SnapshotsHeld():
            return job.snapshots_held(worker, held, fact, at)
        case TaskStateChanged(state="failed", error=error):
            problem = "it has failed" if error is None else error.text
            return job.snapshots_held(worker, held, SnapshotsHeld(attempt=fact.attempt, problem=problem), at)
    return False


def moves_only(fact: Fact | TaskReport) -> bool:
    """Whether all it says of an attempt that runs is where its source is: nothing follows but a record."""
    return isinstance(fact, SourcePositions) and not fact.waits


def may_wait(report: AttemptReport) -> float:
    """Seconds within which the consequences of a report are due; 0: at once."""
    seconds = [fact.within if isinstance(fact, SourcePositions) else 0.0 for fact in report.facts]
    return min(seconds, default=0.0)


class PositionRounds:
    """Workers whose positions are journaled together: those of one machine come at the same times."""

    def __init__(self) -> None:
        self._noted: dict[int, float] = {}
        """By worker, the time of its last report."""
        self._missing: set[int] = set()
        """Workers that have reported lately, and not since the last :meth:`end`."""
        self._begun = False

    def note(self, worker: int, now: float) -> bool:
        """A worker has reported positions. Gives whether no other is expected to."""
        self._noted[worker] = now
        self._missing.discard(worker)
        self._begun = True
        return not self._missing

    def end(self, now: float) -> None:
        """The reports are journaled: the next round begins. It expects the workers that have reported within
        two leases."""
        if self._begun:
            self._begun = False
            since = now - 2 * limits.LEASE_SECONDS
            self._noted = {worker: at for worker, at in self._noted.items() if at > since}
            self._missing = set(self._noted)


def refuses(job: Job | None, fact: Fact) -> bool:
    """Whether a fact is a file that is not listed: the sink must not give it its final name."""
    return isinstance(fact, FileCompleted) and (job is None or not job.progress.manifest.lists(fact))
