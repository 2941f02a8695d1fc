"""Every job that the coordinator knows, by id: those that run, and the last ones that have ended."""

from __future__ import annotations

from typing import Final

from minishuffle import limits
from minishuffle.coordinator.jobs.history import History
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.scheduling.workerinventory import Holdings
from minishuffle.errors import ResourceExhausted, UnknownName
from minishuffle.wire.messages import ErrorInfo, PeerSuspicion

__all__ = ["JOBS_KEPT", "JobTable"]

JOBS_KEPT: Final = 100
"""Ended jobs that are still listed."""
JOBS_NAMED: Final = 5
"""Known jobs that an error about an unknown one lists."""


class JobTable(dict[str, Job]):
    """In the order of submission.

    Invariants, once :meth:`forget` was called: at most JOBS_KEPT have ended, and these keep
    COLLECTED_ENDED_BYTES_MAX of collected rows at most. Once :meth:`make_room` was called, those that run
    keep COLLECTED_RUNNING_BYTES_MAX and the last message at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = Holdings()
        """What they hold, of each as it was when it was noted there."""

    def named(self, name: str) -> Job:
        """The job of that id. Raises UnknownName: there is none; says which is called so, if one is."""
        if name in self:
            return self[name]
        known = list(self)[-JOBS_NAMED:]
        there = f"the latest are {', '.join(known)}" if known else "none was submitted yet"
        if called := [job for job, each in self.items() if each.name == name]:
            there = f"that is the name of {called[-1]}: write {called[-1]}"
        shown = name[: limits.NAME_BYTES_MAX]
        raise UnknownName(f"there is no job {shown!r}; {there} ('minishuffle jobs list' shows all)")

    def submitted(self, submission: str) -> Job | None:
        """The job of a submission with that id."""
        return next((job for job in self.values() if submission and job.submission == submission), None)

    def active(self) -> list[Job]:
        return [job for job in self.values() if not job.terminal]

    def waiting(self) -> list[Job]:
        """Those with tasks, or a stage, that wait for a slot."""
        return [job for job in self.active() if job.waits_for_slot or job.wants_slots]

    def suspected(self, by: int, message: PeerSuspicion, at: float) -> list[Job]:
        """A worker suspects another, or does so no more: gives the jobs whose events say so now."""
        kind = "worker suspected" if message.suspected else "worker trusted"
        what = "gets no answer from" if message.suspected else "gets answers again from"
        text = f"worker {by} {what} worker {message.worker}"
        both = [job for job in self.active() if {by, message.worker} <= job.slots.workers()]
        for job in both:
            job.history.note(at, kind, text, worker=message.worker)
        return both

    def clock_set(self, worker: int, text: str, at: float) -> list[Job]:
        """The system clock of a worker was set: gives the jobs whose events say so now."""
        there = [job for job in self.active() if worker in job.slots.held()]
        for job in there:
            job.history.note(at, "clock set", text, worker=worker)
        return there

    def forget(self) -> list[str]:
        """Drop the oldest jobs that have ended, which are given, and rows of the others: first what clients
        have fetched."""
        ended = [job for job in self.values() if job.terminal]
        dropped = [job.id for job in ended[: max(0, len(ended) - JOBS_KEPT)]]
        for old in dropped:
            del self[old]
        ended = sorted((job for job in self.values() if job.terminal), key=lambda job: job.ended_at)
        excess = sum(job.history.collected_bytes for job in ended) - limits.COLLECTED_ENDED_BYTES_MAX
        for drop in (History.drop_fetched_rows, History.drop_rows):
            for job in ended:
                if excess > 0:
                    excess -= drop(job.history)
        return dropped

    def make_room(self, job: Job, at: float) -> None:
        """That job has collected rows: if those that run keep too many, drop what clients have fetched; if
        that is not enough, fail the job."""
        active = self.active()
        excess = sum(each.history.collected_bytes for each in active) - limits.COLLECTED_RUNNING_BYTES_MAX
        for each in active:
            if excess > 0:
                excess -= each.history.drop_fetched_rows()
        if excess > 0:
            text = (
                f"jobs that run collected more than {limits.COLLECTED_RUNNING_BYTES_MAX:,} bytes of rows "
                "that no client has fetched, and this one was the last: read them while the jobs run, or "
                "write them with to_files instead of collect"
            )
            job.fail(ErrorInfo(code=ResourceExhausted.code, text=text), at)

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        self.held.validate(self.active())
        ended = [job for job in self.values() if job.terminal]
        assert len(ended) <= JOBS_KEPT
        assert sum(job.history.collected_bytes for job in ended) <= limits.COLLECTED_ENDED_BYTES_MAX
