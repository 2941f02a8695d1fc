"""The slots and network segments that jobs hold on each worker, summed up as they change.

Whether one more job fits is a look at these sums, however many jobs run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from minishuffle.coordinator.jobs.job import Job

__all__ = ["Holdings"]


class _Held(NamedTuple):
    """What one job holds."""

    slots: Mapping[int, int]
    segments: Mapping[int, int]
    running: bool


_NOTHING = _Held({}, {}, False)


class Holdings:
    """Sums over jobs that have not ended, without what was lost with a worker.

    A job counts as it was when :meth:`note` was last called with it.
    """

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.slots: Counter[int] = Counter()
        """By worker."""
        self.segments: Counter[int] = Counter()
        """Those that jobs require, by worker."""
        self.running = 0
        """Number of jobs that are not to stop."""
        self._by_job: dict[str, _Held] = {}
        self.note(*jobs)

    def note(self, *jobs: Job) -> None:
        """These may hold something else now."""
        for job in jobs:
            was = self._by_job.pop(job.id, _NOTHING)
            now = _NOTHING
            if not job.terminal:
                now = _Held(job.slots.held(), dict(job.slots.segments), not job.stopping)
                self._by_job[job.id] = now
            self.running += now.running - was.running
            if now.slots != was.slots:
                self.slots.subtract(was.slots)
                self.slots.update(now.slots)
            if now.segments != was.segments:
                self.segments.subtract(was.segments)
                self.segments.update(now.segments)

    def validate(self, jobs: Iterable[Job]) -> None:
        """Check that these, and no others, have been noted as they are; for tests, after each step."""
        fresh = Holdings(jobs)
        assert (self.running, +self.slots, +self.segments) == (fresh.running, +fresh.slots, +fresh.segments)
        assert self._by_job == fresh._by_job
