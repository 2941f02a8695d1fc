"""The table of all client requests that wait for something. Pure.

It alone knows the requests that wait, their deadlines, and the open questions to workers. Each subject
extends :class:`Pending` with its own fields, and builds the answer.
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
    """A request that waits for its answer."""

    link: int
    request: int
    deadline: float = field(default=math.inf, kw_only=True)
    """When it is answered with what there is."""


PendingT = TypeVar("PendingT", bound=Pending)
QuestionT = TypeVar("QuestionT")


class PendingRequests:
    """All waiting requests by kind; a kind is a subclass of :class:`Pending`. Each request is answered
    exactly once, unless its link closes.

    A kind whose requests are added only after :meth:`require_room` or :meth:`has_room` has at most
    ``LINK_REQUESTS_MAX`` of each link.
    """

    def __init__(self) -> None:
        self.tickets: Iterator[int] = itertools.count(1)
        """Ticket numbers for questions to workers; never repeated."""
        self._waiting: dict[type[Pending], dict[Pending, None]] = {}
        """By kind, the oldest first."""
        self._questions: dict[int, tuple[object, Pending | None]] = {}
        """By ticket, an open question to a worker, and the request that waits for it; None: no request."""

    def has_room(self, kind: type[Pending], link: int, in_all: float = math.inf) -> bool:
        """Whether another request of this kind may wait: fewer than ``in_all`` of all links do, and fewer
        than ``LINK_REQUESTS_MAX`` of this link."""
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
        """Let a request wait."""
        self._waiting.setdefault(type(request), {})[request] = None
        return request

    def of(self, kind: type[PendingT]) -> list[PendingT]:
        """The waiting requests of a kind, the oldest first."""
        return [each for each in self._waiting.get(kind, ()) if isinstance(each, kind)]

    def answer(self, request: Pending, message: ControlMessage) -> Reply:
        """Remove a request, and make its reply."""
        self.remove(request)
        return Reply(request.link, request.request, message)

    def refuse(self, request: Pending, error: ShuffleError) -> Reply:
        """Remove a request, and make its reply."""
        self.remove(request)
        return refusal(request.link, request.request, error)

    def remove(self, *requests: Pending) -> None:
        """Remove requests and close their open questions; late answers are ignored."""
        gone = {*requests}
        for request in gone:
            del self._waiting[type(request)][request]
        for ticket in [ticket for ticket, (_, by) in self._questions.items() if by in gone]:
            self.close(ticket)

    def forget(self, link: int) -> None:
        """A link has closed: remove its requests."""
        self.remove(*(each for kind in self._waiting for each in self.of(kind) if each.link == link))

    # --- time ------------------------------------------------------------------------------------

    def due(self, kind: type[PendingT], now: float) -> list[PendingT]:
        """The requests of a kind whose deadline has passed."""
        return [each for each in self.of(kind) if now >= each.deadline]

    def next_deadline(self) -> float | None:
        at = min((each.deadline for kind in self._waiting.values() for each in kind), default=math.inf)
        return at if at < math.inf else None

    # --- questions to workers --------------------------------------------------------------------

    def expect(self, ticket: int, question: object, by: Pending | None) -> None:
        """Open a question to a worker, for the request ``by``, or for none."""
        self._questions[ticket] = question, by

    def question(self, ticket: int, kind: type[QuestionT]) -> QuestionT | None:
        """The open question with this ticket; None if there is none of this kind."""
        question, _ = self._questions.get(ticket, (None, None))
        return question if isinstance(question, kind) else None

    def questions(self, kind: type[QuestionT]) -> list[tuple[int, QuestionT]]:
        """The open questions of a kind with their tickets, the oldest first."""
        return [(ticket, each) for ticket, (each, _) in self._questions.items() if isinstance(each, kind)]

    def close(self, ticket: int) -> None:
        """Close a question: it is answered, or the answer is no longer needed."""
        del self._questions[ticket]
