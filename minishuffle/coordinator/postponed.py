"""Requests of clients that need workers, while some are awaited. Pure."""

from __future__ import annotations

from typing import TypeAlias

from minishuffle.coordinator.polls import require_room
from minishuffle.coordinator.results import ResultRequest
from minishuffle.coordinator.streams import StreamRequest
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.requests import SubmitJob

__all__ = ["PostponedRequests"]

Request: TypeAlias = tuple[int, int, ControlMessage]
"""Link, number and message."""


class PostponedRequests:
    """They wait until no worker is awaited; at most ``LINK_REQUESTS_MAX`` of a link."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    def postpone(self, link: int, request: int, message: ControlMessage) -> bool:
        """Keep a request until no worker is awaited; False if it asks nothing of workers.

        Raises:
            ResourceExhausted: too many of that link wait.
        """
        if not isinstance(message, SubmitJob | StreamRequest | ResultRequest):
            return False
        require_room(link, (each for each, _, _ in self._waiting))
        self._waiting.append((link, request, message))
        return True

    def forget(self, link: int) -> None:
        """The link is closed: nobody waits there."""
        self._waiting = [each for each in self._waiting if each[0] != link]

    def take(self) -> list[Request]:
        """All of them, in their order; they do not wait any more."""
        taken, self._waiting = self._waiting, []
        return taken
