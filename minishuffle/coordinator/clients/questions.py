"""Questions of clients to workers, and the workers that have not answered yet. Pure.

A question goes to all the workers it is meant for at once. Its answer is complete when each of them has
answered or is lost. After :data:`ANSWER_SECONDS_MAX` the answers so far are sent, and the missing workers are
named as silent, for example a worker whose event loop is held up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from minishuffle.coordinator.clients.pending import Pending, PendingRequests
from minishuffle.coordinator.instructions import Reply
from minishuffle.coordinator.workers import Worker
from minishuffle.errors import UnknownName
from minishuffle.wire.inquiries import AskWorkers, WorkerAnswered, WorkerAsked, WorkersAnswered
from minishuffle.wire.messages import ControlMessage

__all__ = ["ANSWER_SECONDS_MAX", "Questions"]

ANSWER_SECONDS_MAX: Final = 0.7
"""Seconds to wait for workers, so that a client has an answer within a second."""


@dataclass(slots=True, eq=False)
class _Question(Pending):
    open_answers: set[int]
    """Workers that have not answered yet."""
    answers: dict[int, bytes] = field(default_factory=dict)


class Questions:
    """The open questions: at most ``LINK_REQUESTS_MAX`` for each link.

    Args:
        send: sends a message to a worker; False if the worker is not alive.
    """

    def __init__(
        self, term: int, send: Callable[[int, ControlMessage], bool], pending: PendingRequests
    ) -> None:
        self._term = term
        self._send = send
        self._pending = pending

    def ask(
        self, link: int, request: int, message: AskWorkers, alive: Iterable[Worker], now: float
    ) -> list[Reply]:
        """Send a question to its workers; answer at once if there are none.

        Raises:
            UnknownName: a worker named in the question is not alive.
            ResourceExhausted: too many questions of this link are open.
        """
        self._pending.require_room(_Question, link)
        there = {worker.worker for worker in alive}
        workers = set(message.workers) or there
        if gone := workers - there:
            known = ", ".join(map(str, sorted(there))) or "none"
            raise UnknownName(f"worker {min(gone)} is not alive; those that are: {known}")
        ticket = next(self._pending.tickets)
        deadline = now + ANSWER_SECONDS_MAX
        question = self._pending.add(_Question(link, request, workers, deadline=deadline))
        self._pending.expect(ticket, question, question)
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
        return self._completed()

    def answered(self, worker: int, message: WorkerAnswered) -> list[Reply]:
        """Handle a worker's answer; ignored if it is late or the second one."""
        question = self._pending.question(message.ticket, _Question)
        if question is None or worker not in question.open_answers:
            return []
        question.open_answers.remove(worker)
        question.answers[worker] = message.answer
        return self._completed()

    def worker_ended(self, worker: int) -> list[Reply]:
        """A worker is lost: no longer wait for its answers."""
        for question in self._pending.of(_Question):
            question.open_answers.discard(worker)
        return self._completed()

    def _completed(self) -> list[Reply]:
        return [self._answer(each) for each in self._pending.of(_Question) if not each.open_answers]

    def due(self, now: float) -> list[Reply]:
        """Replies to the questions whose deadline has passed."""
        return [self._answer(each) for each in self._pending.due(_Question, now)]

    def _answer(self, question: _Question) -> Reply:
        silent = sorted(question.open_answers)
        return self._pending.answer(question, WorkersAnswered(answers=question.answers, silent=silent))
