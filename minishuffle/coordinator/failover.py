"""When the next attempt of a subtask that failed starts, and when it has failed too often. Pure.

The first restart is at once; then the delay is 100 ms and doubles up to 10 s, each with some jitter so that
subtasks that fail together do not come back together. Without a failure for a minute it begins anew. So many
failures within five minutes end the job. These are Flink's exponential-delay and failure-rate restart
strategies (FLIP-364), for each subtask by itself. Lost workers are no failures of a subtask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from minishuffle import limits
from minishuffle.errors import ResourceExhausted
from minishuffle.wire.messages import ErrorInfo

__all__ = ["DELAY_SECONDS_MAX", "DELAY_SECONDS_MIN", "JITTER", "QUIET_SECONDS", "Failures"]

DELAY_SECONDS_MIN: Final = 0.1
DELAY_SECONDS_MAX: Final = 10.0
JITTER: Final = 0.1
"""A delay is off by this part of it at most, either way."""
QUIET_SECONDS: Final = 60.0
"""After so long without a failure the next restart is at once again."""


class Failures:
    """The failures of one subtask within ``RESTART_FAILURE_WINDOW_SECONDS``.

    Args:
        failures_max: so many end the job.
        random: a number from 0 to 1, for the jitter.
    """

    def __init__(self, failures_max: int, random: Callable[[], float]) -> None:
        self._failures_max = failures_max
        self._random = random
        self._recent: deque[tuple[float, ErrorInfo]] = deque()
        self._delay = 0.0
        self._last = 0.0

    @property
    def count(self) -> int:
        """Failures that count, the last one included."""
        return len(self._recent)

    @property
    def first(self) -> ErrorInfo:
        """The cause of the first of them."""
        return self._recent[0][1]

    def add(self, cause: ErrorInfo, now: float) -> float | None:
        """The subtask failed: gives the seconds until it restarts, or None if that was once too often."""
        if now >= self._last + QUIET_SECONDS:
            self._delay = 0.0
        else:
            self._delay = min(DELAY_SECONDS_MAX, max(DELAY_SECONDS_MIN, 2 * self._delay))
        self._last = now
        self._recent.append((now, cause))
        while self._recent[0][0] <= now - limits.RESTART_FAILURE_WINDOW_SECONDS:
            self._recent.popleft()
        if self.count >= self._failures_max:
            return None
        return self._delay * (1 + JITTER * (2 * self._random() - 1))

    def limit_reached(self, task: str) -> ErrorInfo:
        """Why the job ends; ``task`` is the name of the subtask."""
        seconds = limits.RESTART_FAILURE_WINDOW_SECONDS
        text = (
            f"{task} failed {self.count} times within {seconds:g} s (restart_failures_max): remove the "
            "cause, or allow more with --set restart_failures_max=N"
        )
        return ErrorInfo(code=ResourceExhausted.code, text=text, task=task)
