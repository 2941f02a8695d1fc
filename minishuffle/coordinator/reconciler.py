"""The reconciliation of a worker that comes back: it reports facts, and gets its desired state. Pure.

Each side may have missed messages of the other: the last messages before a coordinator or its link was lost
never arrived, and a worker has continued meanwhile. There is a single procedure, after a broken link and
after a restart of the coordinator from its journal, with one message each way::

    worker                                    coordinator
      Register: all it has, and every
      report that was not acknowledged   -->  applies each report once, by its number (attemptreports.py);
                                              restarts tasks that should be on the worker and are not
                                         <--  Registered: the desired state
      releases everything beyond it

The desired state is a list of commands, computed from the jobs after all facts are applied. It is reduced: it
describes the current state, not the history. Each command names its attempts and its term, and may have been
received before. No other message is sent to a worker before this list. No task that waits for workers
restarts before the facts of the last one are applied (``CoordinatorState._all_are_back``).

A new process has nothing and has missed nothing: its list is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minishuffle.coordinator.clients.results import Results
from minishuffle.coordinator.clients.streams import Streams
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.jobindex import JobTable
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.subtasks import Subtask
from minishuffle.coordinator.scheduling.placement import consumer_ends, current_attempts, placed_attempt
from minishuffle.coordinator.workers import Worker, WorkerRegistry
from minishuffle.ids import FIRST_ATTEMPT, AttemptId
from minishuffle.plan.stages import deploys_later
from minishuffle.wire.messages import CancelTasks, ReleaseJob, TaskAttempt, TasksRestarted, WorkerLost
from minishuffle.wire.registration import Desired, Register

__all__ = ["Reconciler"]


@dataclass(frozen=True, slots=True)
class Reconciler:
    """The computation of the desired state of workers; it changes nothing."""

    term: int
    workers: WorkerRegistry
    jobs: JobTable
    streams: Streams
    results: Results

    def missing(self, job: Job, worker: int, about: Register) -> list[TaskKey]:
        """Subtasks that should run on a worker and do not: their deployment never arrived."""
        there = {(*each.subtask.key, each.attempt) for each in about.attempts if each.subtask.job == job.id}
        return [
            task.key
            for task in job.subtasks.on(worker)
            if task.state in ("created", "running") and (*task.key, task.attempt) not in there
        ]

    def desired(self, worker: Worker, about: Register, since: float) -> list[Desired]:
        """The desired state of a worker that has registered.

        Args:
            about: its registration; its facts were applied.
            since: it may not know of workers that have ended since then.
        """
        if not about.epoch:
            return []
        number = worker.worker
        found: list[Desired] = [
            WorkerLost(term=self.term, worker=lost.worker, epoch=lost.epoch)
            for lost in self.workers.ended_since(since)
        ]
        found += self.results.desired(number)
        there: dict[str, list[AttemptId]] = {name: [] for name in about.jobs}
        for each in about.attempts:
            there.setdefault(each.subtask.job, []).append(each)
        for name in sorted(there.keys() - self.jobs.keys()):
            found.append(ReleaseJob(term=self.term, job=name))
        for job in self.jobs.values():
            if not job.terminal:
                found += self._of_job(job, number, there.get(job.id, ()))
            elif job.released and job.id in there:  # as for a job that has just ended
                found += [*self._ends(job, number), ReleaseJob(term=self.term, job=job.id)]
        return [*found, *self.streams.desired(number)]

    def _of_job(self, job: Job, worker: int, there: Iterable[AttemptId]) -> list[Desired]:
        """The commands for a job that has not ended; ``there`` are its attempts on the worker."""
        term, here = self.term, job.subtasks.on(worker)
        found = self._ends(job, worker)
        wanted = {(*task.key, task.attempt) for task in here if not job.ends.is_spent(task)}
        held = [(task.key, task.state_held) for task in job.subtasks.values()]
        wanted |= {(*key, each[1]) for key, each in held if each is not None and each[0] == worker}
        wanted |= {(*each.of(job.id).subtask.key, each.number) for each in job.holders.on(worker)}
        surplus = [
            TaskAttempt(operator=each.subtask.operator, index=each.subtask.index, attempt=each.attempt)
            for each in there
            if (*each.subtask.key, each.attempt) not in wanted
        ]
        if surplus:
            found.append(ReleaseJob(term=term, job=job.id, attempts=surplus))
        if job.stop_sent and wanted:
            found.append(CancelTasks(term=term, job=job.id))
        if ending := [each for each in here if job.cancellations.is_to_end(each)]:
            found.append(CancelTasks(term=term, job=job.id, attempts=current_attempts(ending)))
        found += self._restarted(job, worker, here)
        if (barrier := job.pause.message(term, job.id)) is not None and wanted and not job.move.barrier:
            found.append(barrier)
        return found

    def _ends(self, job: Job, worker: int) -> list[Desired]:
        """Ends of consumers to send to producers on the worker, before these are released."""
        ends = [each for task in job.subtasks.on(worker) for each in job.ends.late_ends(task.key)]
        return [message for _, message in consumer_ends(job.id, ends, term=self.term)]

    def _restarted(self, job: Job, worker: int, here: Iterable[Subtask]) -> list[Desired]:
        """The producers and consumers of tasks on the worker, tasks for which it holds, and holders of its
        tasks, if not at their first attempt, or if perhaps deployed later than these tasks."""
        addresses = {each.worker: each.address for each in self.workers.there()}
        later = deploys_later(job.graph)
        beside = [
            placed_attempt(task)
            for task in _neighbour_tasks(job, worker, here)
            if (later or task.attempt > FIRST_ATTEMPT) and task.worker in addresses
        ]
        beside += [each for each in job.holders.named_for(here) if each.worker in addresses]
        if not beside:
            return []
        workers = [addresses[number] for number in sorted({each.worker for each in beside})]
        return [TasksRestarted(term=self.term, job=job.id, tasks=beside, workers=workers)]


def _neighbour_tasks(job: Job, worker: int, here: Iterable[Subtask]) -> list[Subtask]:
    """Deployed subtasks that exchange rows with these, or whose snapshots the worker holds."""
    keys = {
        key for task in here for key in (*job.graph.producers(*task.key), *job.graph.consumers(*task.key))
    }
    keys |= {
        key
        for key, _ in job.holders.on(worker)
        if worker in (job.holders.worker_of(key), job.subtasks[key].resumption.state_worker)
    }
    live = (task for task in job.subtasks.values() if task.state in ("created", "running", "finished"))
    return [task for task in live if task.on_worker and task.key in keys]
