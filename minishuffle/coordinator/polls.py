"""Requests about one job that are answered when there is something new, or after their time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from minishuffle import limits
from minishuffle.coordinator.instructions import Reply
from minishuffle.coordinator.jobs import Job
from minishuffle.errors import ResourceExhausted
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.requests import GetEvents, GetLogs, GetRows, WaitJob, WaitPause

__all__ = ["LongPolls", "PollRequest", "require_room"]

PollRequest: TypeAlias = GetEvents | GetLogs | GetRows | WaitJob | WaitPause

WAIT_SECONDS_MAX: Final = 60.0
POLLS_MAX: Final = 1_024
"""Requests that wait at once; any further is answered right away with what there is."""


@dataclass(slots=True)
class _Poll:
    link: int
    request: int
    message: PollRequest
    deadline: float


class LongPolls:
    """The requests that wait, by job. Invariant: at most POLLS_MAX, and LINK_REQUESTS_MAX of each link."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[_Poll]] = {}

    def ask(self, link: int, request: int, message: PollRequest, job: Job, now: float) -> list[Reply]:
        """Answer at once, or wait for at most ``wait_seconds`` of the message."""
        poll = _Poll(link, request, message, now + min(message.wait_seconds, WAIT_SECONDS_MAX))
        polls = [poll for polls in self._waiting.values() for poll in polls]
        full = len(polls) >= POLLS_MAX or (
            sum(poll.link == link for poll in polls) >= limits.LINK_REQUESTS_MAX
        )
        if full or _ready(message, job) or now >= poll.deadline:
            return [Reply(link, request, _reply(message, job))]
        self._waiting.setdefault(message.job, []).append(poll)
        return []

    def changed(self, job: Job, now: float) -> list[Reply]:
        """Something happened to the job, or time has passed."""
        waiting = self._waiting.pop(job.id, [])
        replies: list[Reply] = []
        remaining: list[_Poll] = []
        for poll in waiting:
            if _ready(poll.message, job) or now >= poll.deadline:
                replies.append(Reply(poll.link, poll.request, _reply(poll.message, job)))
            else:
                remaining.append(poll)
        if remaining:
            self._waiting[job.id] = remaining
        return replies

    def due(self, now: float) -> list[str]:
        """Jobs with a request that has waited long enough."""
        return [job for job, polls in self._waiting.items() if any(now >= poll.deadline for poll in polls)]

    def forget(self, link: int) -> None:
        """The link is closed: nobody waits there."""
        for job, polls in list(self._waiting.items()):
            remaining = [poll for poll in polls if poll.link != link]
            if remaining:
                self._waiting[job] = remaining
            else:
                del self._waiting[job]

    def next_deadline(self) -> float | None:
        return min((poll.deadline for polls in self._waiting.values() for poll in polls), default=None)

    def jobs(self) -> set[str]:
        """Jobs that somebody waits for."""
        return set(self._waiting)


def _ready(message: PollRequest, job: Job) -> bool:
    """Whether there is something to say before the time is up."""
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


def require_room(link: int, links: Iterable[int]) -> None:
    """Raises ResourceExhausted: too many requests of the link wait; ``links`` has one entry for each that
    waits for a worker."""
    if sum(each == link for each in links) >= limits.LINK_REQUESTS_MAX:
        raise ResourceExhausted(
            f"{limits.LINK_REQUESTS_MAX} requests of this client wait for answers of workers: wait for them"
        )
