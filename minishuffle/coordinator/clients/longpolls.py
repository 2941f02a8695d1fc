"""Long polls: requests about one job that are answered when there is news, or at their deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from minishuffle.coordinator.clients.pending import Pending, PendingRequests
from minishuffle.coordinator.instructions import Reply
from minishuffle.coordinator.jobs.job import Job
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.requests import GetEvents, GetLogs, GetRows, WaitJob, WaitPause, WaitSavepoint

__all__ = ["LongPolls", "Poll", "PollRequest"]

PollRequest: TypeAlias = GetEvents | GetLogs | GetRows | WaitJob | WaitPause | WaitSavepoint

WAIT_SECONDS_MAX: Final = 60.0
POLLS_MAX: Final = 1_024
"""Most long polls that wait at a time; further ones are answered at once."""


@dataclass(slots=True, eq=False)
class Poll(Pending):
    """A request that waits for news of a job, or for its deadline."""

    message: PollRequest
    job: Job


class LongPolls:
    """The waiting long polls: at most POLLS_MAX, and LINK_REQUESTS_MAX for each link."""

    def __init__(self, pending: PendingRequests) -> None:
        self._pending = pending

    def ask(self, link: int, request: int, message: PollRequest, job: Job, now: float) -> list[Reply]:
        """Answer at once, or wait for at most ``wait_seconds`` of the message."""
        deadline = now + min(message.wait_seconds, WAIT_SECONDS_MAX)
        has_room = self._pending.has_room(Poll, link, POLLS_MAX)
        if not has_room or _ready(message, job) or now >= deadline:
            return [Reply(link, request, _reply(message, job))]
        self._pending.add(Poll(link, request, message, job, deadline=deadline))
        return []

    def changed(self, job: Job, now: float) -> list[Reply]:
        """Answer the polls of a job that have news, or whose deadline has passed."""
        return [
            self._pending.answer(poll, _reply(poll.message, job))
            for poll in self._pending.of(Poll)
            if poll.job is job and (_ready(poll.message, job) or now >= poll.deadline)
        ]


def _ready(message: PollRequest, job: Job) -> bool:
    """Whether a request can be answered before its deadline."""
    match message:
        case GetEvents(after=after):
            return job.terminal or job.history.has_events(after)
        case GetLogs(after=after):
            return job.terminal or job.history.has_lines(after)
        case GetRows(after=after):
            return job.terminal or job.history.has_rows(after)
        case WaitJob():
            return job.terminal
        case WaitPause():
            return not job.pause.under_way
        case WaitSavepoint():
            return not job.savepoint.under_way


def _reply(message: PollRequest, job: Job) -> ControlMessage:
    match message:
        case GetEvents(after=after):
            return job.history.events_after(after, job.terminal)
        case GetLogs(after=after):
            return job.history.logs_after(after, job.terminal)
        case GetRows(after=after):
            return job.rows_after(after)
        case WaitJob():
            return job.info(job.ended_at, results=True)
        case WaitPause():
            return job.info(results=False, tasks=False)
        case WaitSavepoint():
            info = job.info(results=False, tasks=False)
            # Whoever takes one is to have a job go on from it: others see it without the key of its store.
            saved = info.savepoint.model_copy(update={"path": job.savepoint.folder})
            return info.model_copy(update={"savepoint": saved})
