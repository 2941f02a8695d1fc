"""What workers report of a job's attempts: whether it counts, and where it goes.

The identity of a report is checked here and nowhere else: it counts if its attempt is the current one of its
subtask and runs on the worker that reports. What comes of earlier attempts is stale, but for the rows that
these have exchanged and dropped.
"""

from __future__ import annotations

from typing import Final

from minishuffle.coordinator.jobs.job import Job
from minishuffle.wire.messages import TaskReport
from minishuffle.wire.reports import (
    AttemptReport,
    Collected,
    EndsRead,
    Fact,
    FileCompleted,
    PartitionReadable,
    SourcePositions,
    TaskReleased,
    TaskStands,
    TaskStateChanged,
)

__all__ = ["heard", "may_wait", "refuses"]

WHILE_IT_RUNS: Final = (Collected, FileCompleted, SourcePositions, TaskStands)
"""Stale once the attempt has ended."""
FREQUENT: Final = (TaskReport, TaskStands)
"""Reported so often, while an attempt runs, that the journal is not written for it."""


def heard(job: Job, worker: int, fact: Fact | TaskReport, at: float) -> bool:
    """A worker reports something of an attempt of the job; False if it is stale."""
    task = job.subtasks.current(worker, fact.attempt)
    if task is None:
        return isinstance(fact, TaskReleased | TaskReport) and job.progress.exchanged_before(worker, fact)
    runs = task.state in ("created", "running")
    if not (runs and isinstance(fact, FREQUENT)):
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
        case EndsRead(edge=edge, producers=producers):
            job.ends_read(task, edge, producers)
        case TaskStands(standing=standing):
            job.task_stands(task, standing, at)
    return True


def may_wait(report: AttemptReport) -> float:
    """Seconds within which what follows from a report is to be done; 0: at once."""
    seconds = [fact.within if isinstance(fact, SourcePositions) else 0.0 for fact in report.facts]
    return min(seconds, default=0.0)


def refuses(job: Job | None, fact: Fact) -> bool:
    """Whether it is of a file that is not listed: the sink must not give it its name."""
    return isinstance(fact, FileCompleted) and (job is None or not job.progress.manifest.lists(fact))
