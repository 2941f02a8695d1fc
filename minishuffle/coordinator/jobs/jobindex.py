"""All jobs known to the coordinator by id: running ones, and the last ones that have ended."""

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
"""Number of ended jobs that are still listed."""
JOBS_NAMED: Final = 5
"""Number of known jobs listed in the error about an unknown one."""


class JobTable(dict[str, Job]):
    """Jobs by id, in the order of submission.

    Invariants after :meth:`forget`: at most JOBS_KEPT jobs have ended, and these keep at most
    COLLECTED_ENDED_BYTES_MAX of collected rows. After :meth:`make_room`, running jobs keep at most
    COLLECTED_RUNNING_BYTES_MAX and the last message.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = Holdings()
        """The slots and memory that the jobs hold, each as last noted there."""

    def named(self, name: str) -> Job:
        """The job with this id.

        Raises:
            UnknownName: there is none. The text names the id of a job with this name, if there is one.
        """
        if name in self:
            return self[name]
        known = list(self)[-JOBS_NAMED:]
        there = f"the latest are {', '.join(known)}" if known else "none was submitted yet"
        if called := [job for job, each in self.items() if each.name == name]:
            there = f"that is the name of {called[-1]}: write {called[-1]}"
        shown = name[: limits.NAME_BYTES_MAX]
        raise UnknownName(f"there is no job {shown!r}; {there} ('minishuffle jobs list' shows all)")

    def submitted(self, submission: str) -> Job | None:
        """The job with this submission id."""
        return next((job for job in self.values() if submission and job.submission == submission), None)

    def active(self) -> list[Job]:
        return [job for job in self.values() if not job.terminal]

    def waiting(self) -> list[Job]:
        """Active jobs with tasks, or a stage, that wait for a slot, or tasks that wait for a holder."""
        return [
            job
            for job in self.active()
            if job.waits_for_slot or job.wants_slots or job.holders.some_are_alone()
        ]

    def suspected(self, by: int, message: PeerSuspicion, at: float) -> list[Job]:
        """Note that a worker suspects another, or trusts it again. Returns the jobs with a new event about
        it."""
        kind = "worker suspected" if message.suspected else "worker trusted"
        what = "gets no answer from" if message.suspected else "gets answers again from"
        text = f"worker {by} {what} worker {message.worker}"
        both = [job for job in self.active() if {by, message.worker} <= job.slots.workers()]
        for job in both:
            job.history.note(at, kind, text, worker=message.worker)
        return both

    def note(self, worker: int, kind: str, text: str, at: float) -> list[Job]:
        """Note an event of a worker in all jobs that run there; gives these jobs."""
        there = [job for job in self.active() if worker in job.slots.held()]
        for job in there:
            job.history.note(at, kind, text, worker=worker)
        return there

    def forget(self) -> list[str]:
        """Drop the oldest ended jobs, and collected rows of the other ended jobs, rows that clients have
        fetched first. Returns the ids of the dropped jobs."""
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
        """A job has collected rows: if running jobs keep too many bytes of rows, drop the fetched ones; if
        that is not enough, fail this job."""
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
