"""A disk whose reads the test lets happen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from minishuffle.errors import ShuffleError

__all__ = ["HeldDisk"]


class HeldDisk:
    """Reads when the test says so, one at a time, in their order."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()

    def run(self, read: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.waiting.append((read, done))

    def turn(self) -> None:
        """One read, and what the loop does with it."""
        read, done = self.waiting.popleft()
        try:
            found = read()
        except ShuffleError as error:
            found = error
        done(found)
