"""Every job that the coordinator knows, by id: those that are not over, and the last ones that are."""

from __future__ import annotations

from typing import Final

from minishuffle import limits
from minishuffle.coordinator.jobs import Job
from minishuffle.errors import UnknownName

__all__ = ["JOBS_KEPT", "JobTable"]

JOBS_KEPT: Final = 100
"""Jobs that are over and still listed."""
JOBS_NAMED: Final = 5
"""Of those that are known, in an error about one that is not."""


class JobTable(dict[str, Job]):
    """In the order of submission. Invariant: at most JOBS_KEPT are over, once :meth:`forget` was called."""

    def named(self, name: str) -> Job:
        """Raises UnknownName: there is no job of that id."""
        if name in self:
            return self[name]
        known = list(self)[-JOBS_NAMED:]
        there = f"the latest are {', '.join(known)}" if known else "none was submitted yet"
        shown = name[: limits.NAME_BYTES_MAX]
        raise UnknownName(f"there is no job {shown!r}; {there} ('minishuffle jobs list' shows all)")

    def active(self) -> list[Job]:
        return [job for job in self.values() if not job.over]

    def forget(self) -> None:
        """Drop the oldest of those that are over."""
        over = [job for job in self.values() if job.over]
        for old in over[: max(0, len(over) - JOBS_KEPT)]:
            del self[old.id]
