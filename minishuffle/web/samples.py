"""Samples of the last ten minutes of jobs and workers, kept by the coordinator's web server. Pure: times are
passed in.

Every few seconds the counters of the last heartbeats are read. The growth between two looks gives the current
load of each vertex, and one sample. The numbers of samples keep counting when the oldest are dropped, so that
a reader can ask for the ones it lacks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from itertools import count, islice
from math import isnan, nan
from typing import Final

from pydantic import BaseModel

from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.workers import Worker
from minishuffle.counters import TaskCounters
from minishuffle.observe.loads import VertexLoad, loads_between

__all__ = ["SAMPLE_SECONDS", "JobSamples", "Samples", "WorkersSamples"]

SAMPLE_SECONDS: Final = 2.0
"""Between two looks: some heartbeats of each worker."""
SAMPLES_KEPT: Final = 300
"""Ten minutes."""
KEPT_SECONDS: Final = SAMPLE_SECONDS * SAMPLES_KEPT
TaskKey = tuple[int, int]

Numbers = list[float | None]


class VertexSamples(BaseModel):
    """Samples of a vertex: the greatest shares of any subtask, 0 to 1, and sums of rates, in records per
    second. None if there was no report."""

    name: str
    backpressured: Numbers
    busy: Numbers
    records_in: Numbers
    records_out: Numbers


class JobSamples(BaseModel):
    """``next`` is the number of the next sample; ``at`` has the times of those that are here, oldest first,
    in seconds since 1970."""

    job: str
    next: int
    at: list[float]
    vertices: list[VertexSamples]


class WorkerSamples(BaseModel):
    """Samples of a worker: largest delay of its event loop, in seconds, and network segments in use."""

    worker: int
    loop_lag: Numbers
    segments_used: Numbers


class WorkersSamples(BaseModel):
    """As :class:`JobSamples`."""

    next: int
    at: list[float]
    workers: list[WorkerSamples]


class _Series:
    """Samples of some columns each, as many as are kept."""

    def __init__(self) -> None:
        self.next = 0
        self._at: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self._rows: deque[array[float]] = deque(maxlen=SAMPLES_KEPT)

    def add(self, at: float, row: Iterable[float]) -> None:
        self.next += 1
        self._at.append(at)
        self._rows.append(array("f", row))

    @property
    def last_at(self) -> float:
        return self._at[-1] if self._at else 0.0

    def above(self, number: int) -> int:
        """The number of kept samples that a reader has already read, who knows ``number`` of all. If it knows
        more than there are, it has read them from an earlier coordinator."""
        known = number if number <= self.next else 0
        return max(0, known - (self.next - len(self._at)))

    def times(self, first: int) -> list[float]:
        return [round(at, 3) for at in islice(self._at, first, None)]

    def column(self, number: int, first: int) -> Numbers:
        """One value of each sample; a row is too short if it was added before the column."""
        return [
            None if number >= len(row) or isnan(row[number]) else float(f"{row[number]:.5g}")
            for row in islice(self._rows, first, None)
        ]


class _JobHistory:
    COLUMNS: Final = 4

    def __init__(self) -> None:
        self.series = _Series()
        self.loads: list[VertexLoad] = []
        self.seen: dict[TaskKey, tuple[int, TaskCounters]] = {}
        """The attempt of each subtask and what it had counted at the last look."""

    def look(self, job: Job, at: float) -> None:
        tasks = list(job.subtasks.values())
        before: dict[TaskKey, TaskCounters] = {}
        for task in tasks:
            attempt, counters = self.seen.get(task.key, (0, task.counters))
            before[task.key] = counters if attempt in (0, task.attempt) else TaskCounters()
        heard = {task.operator for task in tasks if task.counters.seconds > before[task.key].seconds}
        self.loads = loads_between(before, tasks)
        self.seen = {task.key: (task.attempt, task.counters) for task in tasks}
        row: list[float] = []
        for operator, load in enumerate(self.loads):
            values = (load.backpressured, load.busy, load.records_in, load.records_out)
            row += values if operator in heard else [nan] * self.COLUMNS
        self.series.add(at, row)

    def samples(self, job: str, after: int) -> JobSamples:
        series = self.series
        first = series.above(after)
        vertices = [
            VertexSamples(
                name=load.name,
                backpressured=series.column(self.COLUMNS * number, first),
                busy=series.column(self.COLUMNS * number + 1, first),
                records_in=series.column(self.COLUMNS * number + 2, first),
                records_out=series.column(self.COLUMNS * number + 3, first),
            )
            for number, load in enumerate(self.loads)
        ]
        return JobSamples(job=job, next=series.next, at=series.times(first), vertices=vertices)


class Samples:
    """Samples of jobs that run or ended within the last ten minutes, and of workers that are listed."""

    def __init__(self) -> None:
        self._jobs: dict[str, _JobHistory] = {}
        self._workers = _Series()
        self._columns: dict[int, int] = {}
        """By worker that is listed, the number of its first column. The registry lists one that has ended for
        as long as samples are kept."""

    def look(self, jobs: Iterable[Job], workers: Iterable[Worker], at: float) -> None:
        """Take one sample of each; ``at`` is the wall clock."""
        for job in jobs:
            self._jobs.setdefault(job.id, _JobHistory()).look(job, at)
        for name in [name for name, found in self._jobs.items() if found.series.last_at <= at - KEPT_SECONDS]:
            del self._jobs[name]
        listed = {worker.worker: worker for worker in workers}
        self._columns = {number: first for number, first in self._columns.items() if number in listed}
        free = (first for first in count(0, 2) if first not in self._columns.values())
        for number in listed.keys() - self._columns:
            self._columns[number] = next(free)
        row = [nan] * (2 + max(self._columns.values(), default=-2))
        for number, worker in listed.items():
            if worker.state != "alive":
                continue
            first, report = self._columns[number], worker.report
            row[first : first + 2] = (
                report.loop_lag_seconds,
                max(0, worker.about.segments - report.segments_free),
            )
        self._workers.add(at, row)

    def loads(self, job: str) -> list[VertexLoad]:
        """The loads of a job's vertices between the last two looks; empty if there were fewer."""
        found = self._jobs.get(job)
        return [] if found is None or found.series.next < 2 else found.loads

    def of_job(self, job: str, after: int) -> JobSamples:
        """Samples from number ``after`` on; none of a job that was never looked at."""
        return self._jobs.get(job, _JobHistory()).samples(job, after)

    def of_workers(self, after: int) -> WorkersSamples:
        """The same of all workers that are listed."""
        series = self._workers
        first = series.above(after)
        workers = [
            WorkerSamples(
                worker=number,
                loop_lag=series.column(column, first),
                segments_used=series.column(column + 1, first),
            )
            for number, column in sorted(self._columns.items())
        ]
        return WorkersSamples(next=series.next, at=series.times(first), workers=workers)
