"""The slots and network segments held by jobs on each worker, summed up as they change.

Whether another job fits is decided from these sums, in a time independent of the number of jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from minishuffle.coordinator.jobs.job import Job

__all__ = ["Holdings"]


class _Held(NamedTuple):
    """Slots and segments of one job, and the tasks that workers hold for."""

    slots: Mapping[int, int]
    segments: Mapping[int, int]
    holders: Mapping[int, int]
    running: bool


_NOTHING = _Held({}, {}, {}, False)


class Holdings:
    """Sums over all jobs that have not ended, without slots and segments on lost workers.

    A job counts as it was at the last :meth:`note`.
    """

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.slots: Counter[int] = Counter()
        """Slots held, by worker."""
        self.segments: Counter[int] = Counter()
        """Segments required, by worker."""
        self.holders: Counter[int] = Counter()
        """Tasks whose snapshots it holds, by worker."""
        self.running = 0
        """Number of jobs that are not stopping."""
        self._by_job: dict[str, _Held] = {}
        self.note(*jobs)

    def note(self, *jobs: Job) -> None:
        """Update the sums: these jobs may have changed."""
        for job in jobs:
            was = self._by_job.pop(job.id, _NOTHING)
            now = _NOTHING
            if not job.terminal:
                now = _Held(job.slots.held(), dict(job.slots.segments), job.holders.count(), not job.stopping)
                self._by_job[job.id] = now
            self.running += now.running - was.running
            if now.slots != was.slots:
                self.slots.subtract(was.slots)
                self.slots.update(now.slots)
            if now.segments != was.segments:
                self.segments.subtract(was.segments)
                self.segments.update(now.segments)
            if now.holders != was.holders:
                self.holders.subtract(was.holders)
                self.holders.update(now.holders)

    def validate(self, jobs: Iterable[Job]) -> None:
        """Check that exactly these jobs have been noted, and as they are; for tests, after each step."""
        fresh = Holdings(jobs)
        assert (self.running, +self.slots, +self.segments) == (fresh.running, +fresh.slots, +fresh.segments)
        assert +self.holders == +fresh.holders
        assert self._by_job == fresh._by_job
