"""The orderly stop of a cluster: jobs are cancelled, then workers shut down, each within a time limit.
Pure."""

from __future__ import annotations

from typing import Final, Literal

from minishuffle.errors import UsageError

__all__ = ["OrderlyStop"]

DRAIN_SECONDS: Final = 2.0
"""Seconds beyond ``task_cancel_timeout`` that jobs may take to end when the cluster stops."""
CLOSING_SECONDS: Final = 3.0
"""Seconds that workers may then take to close their links."""


class OrderlyStop:
    """``phase`` goes from "up" over "draining" and "closing" to "stopped" and never back."""

    def __init__(self, task_cancel_timeout: float) -> None:
        self.phase: Literal["up", "draining", "closing", "stopped"] = "up"
        self._drain_seconds = task_cancel_timeout + DRAIN_SECONDS
        self._deadline = 0.0

    def require_up(self) -> None:
        """Raises UsageError: the stop has begun."""
        if self.phase != "up":
            raise UsageError("the cluster is being shut down: start it again with 'minishuffle cluster up'")

    def begin(self, now: float) -> bool:
        """Begin the stop; False if it has begun already."""
        if self.phase != "up":
            return False
        self.phase, self._deadline = "draining", now + self._drain_seconds
        return True

    def drained(self, now: float, jobs_run: bool) -> bool:
        """True, once, when workers must shut down."""
        if self.phase != "draining" or (jobs_run and now < self._deadline):
            return False
        self.phase, self._deadline = "closing", now + CLOSING_SECONDS
        return True

    def closed(self, now: float, workers_there: bool) -> bool:
        """True, once, when all workers have closed, or the time limit has passed."""
        if self.phase != "closing" or (workers_there and now < self._deadline):
            return False
        self.phase = "stopped"
        return True

    def next_deadline(self) -> float | None:
        return self._deadline if self.phase in ("draining", "closing") else None
