"""Submissions without a job: being journaled, or withdrawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from minishuffle.coordinator.jobs.fallback import BEGINNING, RestorePoint
from minishuffle.coordinator.jobs.job import Job
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.errors import TaskCancelled
from minishuffle.ids import Changes
from minishuffle.plan.graph import JobGraph, Placement
from minishuffle.wire.requests import SubmitJob

__all__ = ["WITHDRAWN_KEPT", "Submission", "Submissions"]

WITHDRAWN_KEPT: Final = 1_024
"""Number of remembered ids of submissions that were cancelled before they had a job."""


@dataclass(slots=True)
class Submission:
    """An accepted job, which is started once it is journaled."""

    link: int
    request: int
    job: str
    name: str
    graph: JobGraph
    id: str
    """The id given by the client; may be empty."""
    at: float
    changes: Changes
    """The changes to journal."""
    warning: str
    """A warning for the client's answer; may be empty."""
    origin: RestorePoint = BEGINNING
    """The savepoint that it goes on from, or its beginning."""
    resumptions: Mapping[TaskKey, Resumption] = field(default_factory=dict)
    """Positions and state for its first attempts, if it goes on from one."""

    def make_job(self, placement: Placement, segments: Mapping[int, int], random: Callable[[], float]) -> Job:
        """The job, placed where it fits now; see :class:`Job`."""
        job = Job(
            self.job,
            self.name,
            self.graph,
            placement,
            segments,
            at=self.at,
            random=random,
            submission=self.id,
        )
        if self.origin.path:
            job.restore(self.resumptions, self.origin)
        return job


class Submissions:
    """The submissions without a job.

    Args:
        accepted: number of submissions accepted by earlier coordinators.
    """

    def __init__(self, accepted: int) -> None:
        self.accepted = accepted
        """Number of submissions accepted so far, which is the number of the last job."""
        self._pending: deque[Submission] = deque()
        """Accepted submissions, in the order in which they are journaled."""
        self.unwritten: list[Changes] = []
        """Changes to journal, one entry for each submission, since the last :meth:`take_unwritten`."""
        self._withdrawn: dict[str, None] = {}
        """Ids of the last submissions that were cancelled before they had a job."""

    def accept(
        self,
        link: int,
        request: int,
        message: SubmitJob,
        graph: JobGraph,
        at: float,
        *,
        warning: str,
        origin: RestorePoint,
        resumptions: Mapping[TaskKey, Resumption],
    ) -> Submission:
        """Give the submission the id of a job; it is to be journaled next."""
        self.accepted += 1
        submission = Submission(
            link,
            request,
            f"j{self.accepted}",
            message.name,
            graph,
            message.submission,
            at,
            {},
            warning,
            origin,
            resumptions,
        )
        self._pending.append(submission)
        return submission

    def journal(self, submission: Submission, changes: Changes) -> None:
        """Journal the changes of a submission."""
        submission.changes.update(changes)
        self.unwritten.append(submission.changes)

    def take_unwritten(self) -> list[Changes]:
        """Take the changes to journal, in order."""
        unwritten, self.unwritten = self.unwritten, []
        return unwritten

    def take_back(self, submission: Submission) -> None:
        """The submission was refused after all. Its id, if it was the last, is free again, since no one knows
        it."""
        self.accepted -= submission.job == f"j{self.accepted}"

    def journaled(self) -> Submission:
        """Remove and return the submission that was journaled first."""
        return self._pending.popleft()

    def withdraw(self, submission: str) -> None:
        """A client cancels a submission that it has sent, or is about to send."""
        self._withdrawn[submission] = None
        while len(self._withdrawn) > WITHDRAWN_KEPT:
            del self._withdrawn[next(iter(self._withdrawn))]

    def require_not_withdrawn(self, submission: str) -> None:
        """Raises TaskCancelled: the submission was withdrawn."""
        if submission in self._withdrawn:
            raise TaskCancelled("the submission was cancelled: submit the job again")
