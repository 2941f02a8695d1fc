"""What clients ask of workers, and who has yet to answer. Pure.

A question goes to all workers that it is meant for at once. Its answer is complete when each of them has
answered or is lost, and goes out as it is when :data:`ANSWER_SECONDS_MAX` have passed: a worker whose loop is
held up is named as silent.
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
"""How long a client waits for workers, so that it has what there is within a second."""


@dataclass(slots=True, eq=False)
class _Question(Pending):
    open_answers: set[int]
    """Workers that have yet to answer."""
    answers: dict[int, bytes] = field(default_factory=dict)


class Questions:
    """At most ``LINK_REQUESTS_MAX`` questions of a link are open.

    Args:
        send: a message to a worker that is alive; False if it is not.
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
        """Pass a question on, or answer it at once if there is nobody to ask.

        Raises:
            UnknownName: a worker that it names is not alive.
            ResourceExhausted: too many questions of that link are open.
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
        """One that comes too late, or twice, changes nothing."""
        question = self._pending.question(message.ticket, _Question)
        if question is None or worker not in question.open_answers:
            return []
        question.open_answers.remove(worker)
        question.answers[worker] = message.answer
        return self._completed()

    def worker_ended(self, worker: int) -> list[Reply]:
        """It will not answer any more."""
        for question in self._pending.of(_Question):
            question.open_answers.discard(worker)
        return self._completed()

    def _completed(self) -> list[Reply]:
        return [self._answer(each) for each in self._pending.of(_Question) if not each.open_answers]

    def due(self, now: float) -> list[Reply]:
        """Answers of questions whose time is up."""
        return [self._answer(each) for each in self._pending.due(_Question, now)]

    def _answer(self, question: _Question) -> Reply:
        silent = sorted(question.open_answers)
        return self._pending.answer(question, WorkersAnswered(answers=question.answers, silent=silent))
