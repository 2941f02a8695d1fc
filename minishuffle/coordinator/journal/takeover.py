"""How a worker that comes back and its coordinator find out what each has missed. Pure.

Either may have decided something that the other has not heard of: a coordinator before it was lost, whose
last messages never arrived, or a worker while there was none. The coordinator's word counts; what the worker
has beyond that is released, and what it lacks starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.coordinator.scheduling.placement import consumer_ends, current_attempts, placed_attempt
from minishuffle.ids import FIRST_ATTEMPT, AttemptId
from minishuffle.plan.stages import deploys_later
from minishuffle.wire.messages import (
    CancelTasks,
    ControlMessage,
    Register,
    ReleaseJob,
    TaskAttempt,
    TasksRestarted,
    WorkerAddress,
)

__all__ = ["missing", "reconciled"]


def _tasks_on(worker: int, job: Job) -> list[Subtask]:
    """Subtasks whose current attempt, or the last while the next is pending, is there."""
    return [task for task in job.subtasks.values() if task.worker == worker and task.on_worker]


def _tasks_beside(worker: int, job: Job) -> list[Subtask]:
    """Subtasks that exchange rows with those on a worker, and whose current attempt was deployed."""
    graph, here = job.graph, _tasks_on(worker, job)
    keys = {key for task in here for key in (*graph.producers(*task.key), *graph.consumers(*task.key))}
    live = (task for task in job.subtasks.values() if task.state in ("created", "running", "finished"))
    return [task for task in live if task.on_worker and task.key in keys]


def missing(worker: int, held: Iterable[AttemptId], job: Job) -> list[TaskKey]:
    """Subtasks that should run on a worker and do not: it never heard of them."""
    there = {(*each.subtask.key, each.attempt) for each in held if each.subtask.job == job.id}
    return [
        task.key
        for task in _tasks_on(worker, job)
        if task.state in ("created", "running") and (*task.key, task.attempt) not in there
    ]


def reconciled(
    worker: int,
    about: Register,
    jobs: Iterable[Job],
    addresses: Mapping[int, WorkerAddress],
    term: int,
) -> list[ControlMessage]:
    """What to send to a worker that has come back; ``jobs`` are all."""
    by_id = {job.id: job for job in jobs}
    active = {name: job for name, job in by_id.items() if not job.terminal}
    there: dict[str, list[AttemptId]] = {}
    for each in about.attempts:
        there.setdefault(each.subtask.job, []).append(each)
    known = {*there, *about.jobs}
    messages: list[ControlMessage] = []
    for name in sorted(known - active.keys()):
        if name in by_id:
            messages += _ends(worker, by_id[name], term)
        messages.append(ReleaseJob(term=term, job=name))
    for job in active.values():
        messages += _ends(worker, job, term)
        wanted = {(*task.key, task.attempt) for task in _tasks_on(worker, job) if not job.ends.is_spent(task)}
        surplus = [
            TaskAttempt(operator=each.subtask.operator, index=each.subtask.index, attempt=each.attempt)
            for each in there.get(job.id, ())
            if (*each.subtask.key, each.attempt) not in wanted
        ]
        if surplus:
            messages.append(ReleaseJob(term=term, job=job.id, attempts=surplus))
        if job.stopping and wanted:
            messages.append(CancelTasks(term=term, job=job.id))
        ending = [each for each in _tasks_on(worker, job) if job.cancellations.is_to_end(each)]
        if ending:
            messages.append(CancelTasks(term=term, job=job.id, attempts=current_attempts(ending)))
        if restarted := _restarted(worker, job, addresses, term):
            messages.append(restarted)
        if (barrier := job.pause.message(term, job.id)) is not None and wanted and not job.move.barrier:
            messages.append(barrier)
    return messages


def _ends(worker: int, job: Job, term: int) -> list[ControlMessage]:
    """What attempts there may have to hear of their consumers, before they are released."""
    found = [each for task in _tasks_on(worker, job) for each in job.ends.ends_of(task.key)]
    return [message for _, message in consumer_ends(job.id, found, term=term)]


def _restarted(
    worker: int, job: Job, addresses: Mapping[int, WorkerAddress], term: int
) -> TasksRestarted | None:
    """The attempts at the other end of its channels, as far as they are not the first, or were deployed later
    than the tasks there may have been."""
    later = deploys_later(job.graph)
    beside = [
        placed_attempt(task)
        for task in _tasks_beside(worker, job)
        if (later or task.attempt > FIRST_ATTEMPT) and task.worker in addresses
    ]
    if not beside:
        return None
    workers = [addresses[number] for number in sorted({each.worker for each in beside})]
    return TasksRestarted(term=term, job=job.id, tasks=beside, workers=workers)
