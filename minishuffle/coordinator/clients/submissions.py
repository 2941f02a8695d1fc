"""Submissions that have no job yet: those that are being journaled, and those that were withdrawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from minishuffle.coordinator.jobs.job import Job
from minishuffle.errors import TaskCancelled
from minishuffle.ids import Changes
from minishuffle.plan.graph import JobGraph, Placement
from minishuffle.wire.requests import SubmitJob

__all__ = ["WITHDRAWN_KEPT", "Submission", "Submissions"]

WITHDRAWN_KEPT: Final = 1_024
"""Ids of submissions that were cancelled before they had a job."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that fits, and is started once it is in the journal."""

    link: int
    request: int
    job: str
    name: str
    graph: JobGraph
    id: str
    """The one that the client gave it; may be empty."""
    at: float
    changes: Changes
    """What is journaled."""
    warning: str
    """What the client is to hear with its answer; may be empty."""

    def make_job(self, placement: Placement, segments: Mapping[int, int], random: Callable[[], float]) -> Job:
        """The job, where it fits now; see :class:`Job`."""
        return Job(
            self.job,
            self.name,
            self.graph,
            placement,
            segments,
            at=self.at,
            random=random,
            submission=self.id,
        )


class Submissions:
    """Those that are in no job yet."""

    """Args:
    accepted: how many submissions earlier coordinators have accepted.
    """

    def __init__(self, accepted: int) -> None:
        self.accepted = accepted
        """So far; the last job that was given an id has this number."""
        self._pending: deque[Submission] = deque()
        """In the order in which they are journaled."""
        self._withdrawn: dict[str, None] = {}
        """The last ones that were cancelled before they had a job."""

    def accept(
        self, link: int, request: int, message: SubmitJob, graph: JobGraph, at: float, *, warning: str
    ) -> Submission:
        """It has a job's id from now on, and is to be journaled."""
        self.accepted += 1
        job = f"j{self.accepted}"
        submission = Submission(link, request, job, message.name, graph, message.submission, at, {}, warning)
        self._pending.append(submission)
        return submission

    def take_back(self, submission: Submission) -> None:
        """It was refused after all. The last id is given again: nobody has heard of it."""
        self.accepted -= submission.job == f"j{self.accepted}"

    def journaled(self) -> Submission:
        """The one that has been journaled for longest, which is no more pending."""
        return self._pending.popleft()

    def withdraw(self, submission: str) -> None:
        """A client cancels what it has submitted, or is about to."""
        self._withdrawn[submission] = None
        while len(self._withdrawn) > WITHDRAWN_KEPT:
            del self._withdrawn[next(iter(self._withdrawn))]

    def require_wanted(self, submission: str) -> None:
        """Raises TaskCancelled: it was withdrawn."""
        if submission in self._withdrawn:
            raise TaskCancelled("the submission was cancelled: submit the job again")
