"""Which workers hold the snapshots of a job's tasks, and the messages that say so. Pure.

What becomes of a holder is in :mod:`~minishuffle.coordinator.jobs.holders`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from minishuffle.coordinator.jobs.holders import Holder
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.subtasks import Subtask, names_of
from minishuffle.coordinator.scheduling.placement import takers
from minishuffle.coordinator.workers import Worker
from minishuffle.wire.advertised import unlinkable
from minishuffle.wire.messages import (
    ControlMessage,
    DeployTasks,
    HolderSpec,
    PlacedAttempt,
    ReleaseJob,
    TaskAttempt,
    TasksRestarted,
    WorkerAddress,
)

__all__ = ["holder_messages", "holder_releases", "name_holders"]


def name_holders(
    job: Job, due: Iterable[Subtask], workers: Sequence[Worker], load: Mapping[int, int], at: float
) -> None:
    """Name holders for the tasks that run or are ``due``, where there is none, where it is about to leave,
    where the task comes to it, or where the task's worker has no link to it and has one to another.

    The order of workers: those of another host than the task's; standby ones; fewest tasks held for; lowest
    id. Where only its own worker is left, a task keeps the holder that it has there, if any: it goes on, but
    would be lost with that worker.

    A worker that could hold no more for a task is not named for it again for a while. Is there no other
    meanwhile, the task goes on alone.

    Args:
        due: tasks that are about to be deployed, in their slots.
        workers: all alive ones.
        load: for how many tasks of all jobs each worker holds.
    """
    if not job.holders or job.stopping or job.terminal:
        return
    named: dict[int, list[Subtask]] = {}
    alone: list[Subtask] = []
    places, held = {each.worker: each for each in workers}, Counter(load)
    able = [each for each in takers(workers) if each.worker not in job.links.closed()]
    ready = {task.key for task in due}
    for task in job.subtasks.values():
        home = places.get(job.worker_of(*task.key))
        if task.key not in job.holders or home is None or not (task.runs or task.stays or task.key in ready):
            continue
        holder = job.holders.of(task.key)
        linked = [each for each in able if not job.holders.are_apart(each.worker, home.worker)]
        if _may_stay(holder, home, linked):
            continue
        fit = [each for each in linked if each.worker not in holder.shunned]
        if (worker := _chosen(home, fit, held)) is not None:
            held[worker] += 1
            held[holder.worker] -= holder.worker > 0
            job.holders.name(task.key, worker, runs=task.key not in ready)
            named.setdefault(worker, []).append(task)
        elif holder.shunned and not holder.worker and job.holders.unheld(task.key):
            alone.append(task)
    for worker, tasks in sorted(named.items()):
        text = f"worker {worker} holds the snapshots of {names_of(tasks)}"
        job.history.note(at, "holder named", text, worker=worker)
    if alone:
        text = f"no other worker can hold the snapshots of {names_of(alone)}, lost if its own is: "
        job.history.note(at, "tasks unprotected", text + "they are offered again after a while")


def _may_stay(holder: Holder, home: Worker, able: Iterable[Worker]) -> bool:
    return holder.worker != home.worker and any(each.worker == holder.worker for each in able)


def _chosen(home: Worker, able: Iterable[Worker], held: Mapping[int, int]) -> int | None:
    """The worker to hold for a task on ``home``; None: there is no other."""

    def order(worker: Worker) -> tuple[bool, bool, int, int]:
        same_host = worker.about.identity == home.about.identity
        return same_host, not worker.standby, held.get(worker.worker, 0), worker.worker

    others = [each for each in able if each is not home and not unlinkable(each.about, home.about)]
    return min(others, key=order).worker if others else None


def holder_messages(
    job: Job, addresses: Mapping[int, WorkerAddress], *, term: int
) -> list[tuple[int, ControlMessage]]:
    """Deploy the holders that were named, and name them to the workers of the tasks: messages and their
    workers, in order."""
    specs: dict[int, list[HolderSpec]] = {}
    placed: dict[int, list[PlacedAttempt]] = {}
    for key in job.holders.take_unsent():
        holder, task = job.holders.of(key), job.subtasks[key]
        if holder.worker not in addresses or task.worker not in addresses or not task.on_worker:
            continue
        specs.setdefault(holder.worker, []).append(
            HolderSpec(
                operator=task.operator,
                index=task.index,
                attempt=holder.number,
                task_attempt=task.attempt,
                task_worker=task.worker,
            )
        )
        if again := job.holders.named_for([task]):
            placed.setdefault(task.worker, []).extend(again)
    messages: list[tuple[int, ControlMessage]] = [
        (
            worker,
            DeployTasks(
                term=term,
                job=job.id,
                name=job.name,
                settings=job.graph.settings.model_dump() | {"on_unavailable": job.graph.on_unavailable},
                programs={},
                tasks=[],
                workers=[addresses[each] for each in sorted({spec.task_worker for spec in here})],
                holders=here,
            ),
        )
        for worker, here in sorted(specs.items())
    ]
    messages += [
        (
            worker,
            TasksRestarted(
                term=term,
                job=job.id,
                tasks=here,
                workers=[addresses[each] for each in sorted({attempt.worker for attempt in here})],
            ),
        )
        for worker, here in sorted(placed.items())
    ]
    return messages


def holder_releases(job: Job, *, term: int) -> list[tuple[int, ControlMessage]]:
    """Free what holders have that others have taken over from: messages and their workers."""
    dropped: dict[int, list[TaskAttempt]] = {}
    for worker, held in job.holders.take_dropped():
        dropped.setdefault(worker, []).append(held.attempt)
    return [
        (worker, ReleaseJob(term=term, job=job.id, attempts=attempts))
        for worker, attempts in sorted(dropped.items())
    ]
