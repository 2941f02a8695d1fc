"""Requests of clients that wait, whatever they wait for. Pure.

Who waits, until when, and which answers of workers are due is known here alone. A subject extends
:class:`Pending` by what it waits for, and makes the answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from minishuffle import limits
from minishuffle.coordinator.instructions import Reply, refusal
from minishuffle.errors import ResourceExhausted, ShuffleError
from minishuffle.wire.messages import ControlMessage

__all__ = ["Pending", "PendingRequests"]


@dataclass(slots=True, eq=False)
class Pending:
    """A request that waits."""

    link: int
    request: int
    deadline: float = field(default=math.inf, kw_only=True)
    """When it has waited long enough."""


PendingT = TypeVar("PendingT", bound=Pending)
QuestionT = TypeVar("QuestionT")


class PendingRequests:
    """All requests that wait, by kind, which is their class. Each is answered once, unless its link closes.

    A kind that has asked :meth:`require_room` or :meth:`has_room` first has at most ``LINK_REQUESTS_MAX``
    requests of a link.
    """

    def __init__(self) -> None:
        self.tickets: Iterator[int] = itertools.count(1)
        """Numbers of questions to workers, which no other question has had."""
        self._waiting: dict[type[Pending], dict[Pending, None]] = {}
        """The oldest first."""
        self._questions: dict[int, tuple[object, Pending | None]] = {}
        """By ticket, what a worker has yet to answer, and the request that waits for that."""

    def has_room(self, kind: type[Pending], link: int, in_all: float = math.inf) -> bool:
        """Whether one more request of the link may wait, and one more of that kind."""
        waiting = self.of(kind)
        return len(waiting) < in_all and sum(each.link == link for each in waiting) < limits.LINK_REQUESTS_MAX

    def require_room(self, kind: type[Pending], link: int) -> None:
        """Raises ResourceExhausted: too many requests of the link wait."""
        if not self.has_room(kind, link):
            raise ResourceExhausted(
                f"{limits.LINK_REQUESTS_MAX} requests of this client wait for answers of workers: wait for "
                "them"
            )

    def add(self, request: PendingT) -> PendingT:
        """It waits from now on."""
        self._waiting.setdefault(type(request), {})[request] = None
        return request

    def of(self, kind: type[PendingT]) -> list[PendingT]:
        """Those of a kind, the oldest first."""
        return [each for each in self._waiting.get(kind, ()) if isinstance(each, kind)]

    def answer(self, request: Pending, message: ControlMessage) -> Reply:
        """It waits no more."""
        self.remove(request)
        return Reply(request.link, request.request, message)

    def refuse(self, request: Pending, error: ShuffleError) -> Reply:
        """It waits no more."""
        self.remove(request)
        return refusal(request.link, request.request, error)

    def remove(self, *requests: Pending) -> None:
        """They wait no more, and what workers still answer them is ignored."""
        gone = {*requests}
        for request in gone:
            del self._waiting[type(request)][request]
        for ticket in [ticket for ticket, (_, by) in self._questions.items() if by in gone]:
            self.close(ticket)

    def forget(self, link: int) -> None:
        """The link is closed: nobody waits there."""
        self.remove(*(each for kind in self._waiting for each in self.of(kind) if each.link == link))

    # --- time ------------------------------------------------------------------------------------

    def due(self, kind: type[PendingT], now: float) -> list[PendingT]:
        """Those of a kind that have waited long enough."""
        return [each for each in self.of(kind) if now >= each.deadline]

    def next_deadline(self) -> float | None:
        at = min((each.deadline for kind in self._waiting.values() for each in kind), default=math.inf)
        return at if at < math.inf else None

    # --- questions to workers --------------------------------------------------------------------

    def expect(self, ticket: int, question: object, by: Pending | None) -> None:
        """A worker will answer a question, which is asked for a request that waits, or for none."""
        self._questions[ticket] = question, by

    def question(self, ticket: int, kind: type[QuestionT]) -> QuestionT | None:
        """What has that ticket; None if nobody waits for an answer any more."""
        question, _ = self._questions.get(ticket, (None, None))
        return question if isinstance(question, kind) else None

    def questions(self, kind: type[QuestionT]) -> list[tuple[int, QuestionT]]:
        """Those of a kind that are open, each with its ticket, the oldest first."""
        return [(ticket, each) for ticket, (each, _) in self._questions.items() if isinstance(each, kind)]

    def close(self, ticket: int) -> None:
        """A question is answered, or its answer is not wanted any more."""
        del self._questions[ticket]
