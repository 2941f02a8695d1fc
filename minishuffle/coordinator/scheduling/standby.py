"""Preparation of workers for a takeover: they load programs of jobs and link to all workers in advance. Pure.

Then a takeover is a single DeployTasks that only names tasks: functions and their imports are loaded, and
links are authenticated. Standby workers are prepared for all running jobs. If there are none, and a worker is
suspected, workers with free slots are prepared for its jobs, before the suspicion is confirmed. A worker
keeps these programs until the job ends, even if it becomes a regular worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minishuffle import limits
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.scheduling.placement import takers
from minishuffle.coordinator.scheduling.workerinventory import Holdings
from minishuffle.coordinator.workers import Worker
from minishuffle.wire.messages import ControlMessage, DeployTasks, Dial, PrepareJob
from minishuffle.wire.registration import Register

__all__ = ["Preparations"]


class Preparations:
    """The programs kept by workers, by job; at most ``PREPARED_PROGRAM_BYTES_MAX`` on each worker."""

    def __init__(self, term: int) -> None:
        self._term = term
        self._kept: dict[int, dict[str, int]] = {}
        """Bytes by worker and job."""
        self._returned: dict[int, set[str]] = {}
        """Jobs with data on a worker that has come back, by worker."""

    def job_started(self, job: Job, workers: Sequence[Worker]) -> list[tuple[int, ControlMessage]]:
        """The messages when a job has been deployed; ``workers`` are all alive ones."""
        return [(each.worker, self._prepare(each, job, workers)) for each in workers if each.standby]

    def worker_joined(
        self, worker: Worker, workers: Sequence[Worker], jobs: Iterable[Job]
    ) -> list[tuple[int, ControlMessage]]:
        """The messages when a worker has registered: if jobs run, standby workers get its address; if it is a
        standby worker, it is prepared for the jobs."""
        running = [job for job in jobs if not job.stopping]
        messages: list[tuple[int, ControlMessage]] = []
        if running:
            messages += self.worker_moved(worker, workers)
        if worker.standby:
            messages += [(worker.worker, self._prepare(worker, job, workers)) for job in running]
        return messages

    def worker_back(self, worker: int, about: Register, jobs: Iterable[Job]) -> None:
        """A worker has come back: note the jobs for which it keeps programs or attempt numbers."""
        known = [job for job in jobs if job.id in about.jobs]
        self._returned[worker] = {job.id for job in known}
        self._kept[worker] = {job.id: _program_bytes(job) for job in known if job.id in about.prepared}

    def worker_moved(self, worker: Worker, workers: Iterable[Worker]) -> list[tuple[int, ControlMessage]]:
        """The messages when a worker has a new address, for standby workers."""
        dial = Dial(term=self._term, peer=worker.address)
        return [(each.worker, dial) for each in workers if each.standby and each is not worker]

    def suspected(
        self, suspect: Worker, workers: Sequence[Worker], jobs: Iterable[Job], held: Holdings
    ) -> list[tuple[int, ControlMessage]]:
        """The messages when a worker may be lost: the workers that would get its slots of a job are prepared
        for the job, unless they run it."""
        others = [each for each in workers if each is not suspect]
        able = takers(others)
        spare = sum(each.standby for each in able)
        free = {each.worker: each.slots - held.slots[each.worker] for each in able if not each.standby}
        ordered = sorted(
            (each for each in able if free.get(each.worker, 0) > 0), key=lambda each: -free[each.worker]
        )
        messages: list[tuple[int, ControlMessage]] = []
        for job in jobs:
            there = job.slots.held()
            if spare or job.stopping or not there[suspect.worker]:
                continue
            heirs = [each for each in ordered if not there[each.worker]][: there[suspect.worker]]
            messages += [
                (each.worker, self._prepare(each, job, others))
                for each in heirs
                if job.id not in self._kept.get(each.worker, ())
            ]
        return messages

    def _prepare(self, worker: Worker, job: Job, workers: Sequence[Worker]) -> PrepareJob:
        programs = {number: vertex.program for number, vertex in enumerate(job.graph.vertices)}
        kept = self._kept.setdefault(worker.worker, {})
        size = _program_bytes(job)
        if job.id in kept or sum(kept.values()) + size > limits.PREPARED_PROGRAM_BYTES_MAX:
            programs = {}
        else:
            kept[job.id] = size
        addresses = [each.address for each in workers if each is not worker]
        return PrepareJob(term=self._term, job=job.id, programs=programs, workers=addresses)

    def shortened(self, worker: int, message: ControlMessage) -> ControlMessage:
        """The message, without the programs if it is a DeployTasks and the worker keeps them."""
        if isinstance(message, DeployTasks) and message.job in self._kept.get(worker, ()):
            return message.model_copy(update={"programs": {}})
        return message

    def job_ended(self, job: str) -> set[int]:
        """Forget a job. Returns the workers that may keep its programs, and must release them."""
        found = {worker for worker, kept in self._kept.items() if kept.pop(job, None) is not None}
        for worker, jobs in self._returned.items():
            if job in jobs:
                jobs.remove(job)
                found.add(worker)
        return found

    def worker_ended(self, worker: int) -> None:
        """A worker is no longer alive: forget it."""
        self._kept.pop(worker, None)
        self._returned.pop(worker, None)

    def validate(self, workers: set[int], jobs: set[str]) -> None:
        """Check the invariants against what is alive; for tests, after each step."""
        assert set(self._kept) <= workers and set(self._returned) <= workers
        assert {job for returned in self._returned.values() for job in returned} <= jobs
        for kept in self._kept.values():
            assert set(kept) <= jobs
            assert sum(kept.values()) <= limits.PREPARED_PROGRAM_BYTES_MAX


def _program_bytes(job: Job) -> int:
    return sum(len(vertex.program) for vertex in job.graph.vertices)
