"""What clients ask of workers, and who has yet to answer. Pure.

A question goes to all workers that it is meant for at once. Its answer is complete when each of them has
answered or is lost, and goes out as it is when :data:`ANSWER_SECONDS_MAX` have passed: a worker whose loop is
held up is named as silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from minishuffle.coordinator.instructions import Reply
from minishuffle.coordinator.polls import require_room
from minishuffle.coordinator.workers import Worker
from minishuffle.errors import UnknownName
from minishuffle.wire.inquiries import AskWorkers, WorkerAnswered, WorkerAsked, WorkersAnswered
from minishuffle.wire.messages import ControlMessage

__all__ = ["ANSWER_SECONDS_MAX", "Questions"]

ANSWER_SECONDS_MAX: Final = 0.7
"""How long a client waits for workers, so that it has what there is within a second."""


@dataclass(slots=True)
class _Question:
    link: int
    request: int
    deadline: float
    open_answers: set[int]
    """Workers that have yet to answer."""
    answers: dict[int, bytes] = field(default_factory=dict)

    def reply(self) -> Reply:
        silent = sorted(self.open_answers)
        return Reply(self.link, self.request, WorkersAnswered(answers=self.answers, silent=silent))


class Questions:
    """Invariant: at most ``LINK_REQUESTS_MAX`` questions of a link are open.

    Args:
        send: a message to a worker that is alive; False if it is not.
        tickets: numbers that are never used again.
    """

    def __init__(
        self, term: int, send: Callable[[int, ControlMessage], bool], tickets: Iterator[int]
    ) -> None:
        self._term = term
        self._send = send
        self._tickets = tickets
        self._open: dict[int, _Question] = {}
        """By ticket, the oldest first."""

    def ask(
        self, link: int, request: int, message: AskWorkers, alive: Iterable[Worker], now: float
    ) -> list[Reply]:
        """Pass a question on, or answer it at once if there is nobody to ask.

        Raises:
            UnknownName: a worker that it names is not alive.
            ResourceExhausted: too many questions of that link are open.
        """
        require_room(link, (each.link for each in self._open.values()))
        there = {worker.worker for worker in alive}
        workers = set(message.workers) or there
        if gone := workers - there:
            known = ", ".join(map(str, sorted(there))) or "none"
            raise UnknownName(f"worker {min(gone)} is not alive; those that are: {known}")
        ticket = next(self._tickets)
        question = _Question(link, request, now + ANSWER_SECONDS_MAX, workers)
        for worker in sorted(workers):
            self._send(
                worker,
                WorkerAsked(
                    term=self._term,
                    ticket=ticket,
                    job=message.job,
                    trace=message.trace,
                    tap=message.tap,
                    profile=message.profile,
                ),
            )
        if question.open_answers:
            self._open[ticket] = question
            return []
        return [question.reply()]

    def answered(self, worker: int, message: WorkerAnswered) -> list[Reply]:
        """One that comes too late, or twice, changes nothing."""
        question = self._open.get(message.ticket)
        if question is None or worker not in question.open_answers:
            return []
        question.open_answers.remove(worker)
        question.answers[worker] = message.answer
        return self._completed()

    def worker_ended(self, worker: int) -> list[Reply]:
        """It will not answer any more."""
        for question in self._open.values():
            question.open_answers.discard(worker)
        return self._completed()

    def _completed(self) -> list[Reply]:
        return self._take([ticket for ticket, each in self._open.items() if not each.open_answers])

    def _take(self, tickets: list[int]) -> list[Reply]:
        return [self._open.pop(ticket).reply() for ticket in tickets]

    def forget(self, link: int) -> None:
        """The link is closed: nobody waits there."""
        self._open = {ticket: each for ticket, each in self._open.items() if each.link != link}

    def due(self, now: float) -> list[Reply]:
        """Answers of questions whose time is up."""
        return self._take([ticket for ticket, each in self._open.items() if now >= each.deadline])

    def next_deadline(self) -> float | None:
        return min((each.deadline for each in self._open.values()), default=None)
