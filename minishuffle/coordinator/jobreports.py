"""What workers report of a job, and where each report goes."""

from __future__ import annotations

from typing import TypeAlias

from minishuffle.coordinator.jobs import Job
from minishuffle.wire.messages import (
    Collected,
    EndsRead,
    LogLines,
    PartitionReadable,
    RecoverySteps,
    SourcePositions,
    TaskReleased,
    TaskStands,
    TaskStateChanged,
)
from minishuffle.wire.outputs import FileCompleted

__all__ = ["JobReport", "RepeatedReport", "heard", "is_refused"]

RepeatedReport: TypeAlias = (
    TaskStateChanged
    | TaskReleased
    | Collected
    | SourcePositions
    | FileCompleted
    | EndsRead
    | PartitionReadable
)
"""They are repeated until they are acknowledged."""
JobReport: TypeAlias = RepeatedReport | LogLines | RecoverySteps | TaskStands


def heard(job: Job, worker: int, message: JobReport, at: float) -> bool:
    """A worker says something of a job; False if that is not (any more) so."""
    match message:
        case TaskStateChanged():
            return job.task_changed(worker, message, at)
        case TaskReleased():
            return job.task_released(worker, message)
        case Collected():
            return job.collected(worker, message, at)
        case SourcePositions():
            return job.source_moved(worker, message, at)
        case FileCompleted():
            return job.file_completed(worker, message)
        case EndsRead():
            return job.ends_read(worker, message)
        case PartitionReadable():
            return job.partition_readable(worker, message, at)
        case TaskStands():
            return job.task_stands(worker, message, at)
        case RecoverySteps():
            job.recovered(message, at)
        case LogLines(lines=lines):
            job.history.log(lines)
    return True


def is_refused(job: Job | None, message: RepeatedReport) -> bool:
    """Whether it is of a file that is not listed: the sink must not give it its name."""
    return isinstance(message, FileCompleted) and (job is None or not job.manifest.lists(message))
