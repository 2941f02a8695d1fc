"""How long a task's thread is busy, idle and back-pressured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

from minishuffle.counters import Histogram

__all__ = ["BLOCK_SECONDS_BOUNDS", "StateClock", "StateSeconds", "ThreadState", "cpu_wait_seconds"]

BLOCK_SECONDS_BOUNDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)

ThreadState: TypeAlias = Literal["busy", "idle", "backpressured"]


def cpu_wait_seconds(thread: int) -> float:
    """How long a thread of this process, by its native id, was ready to run and had no processor.

    Raises:
        OSError: it has ended, or the system does not say (Linux does, in ``schedstat``).
    """
    with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
        return int(file.read(64).split()[1]) / 1e9


class StateSeconds(NamedTuple):
    """Seconds that a task's thread spent in each state."""

    busy: float = 0.0
    idle: float = 0.0
    backpressured: float = 0.0


class StateClock:
    """How long a task's thread was busy, idle and back-pressured, the state that it is in included.

    *Busy* is everything that is not a wait: user code, decoding, serialising. *Idle* is a wait for input,
    *back-pressured* one for an output segment or for the coordinator to take rows or positions. While the
    thread is in a state the three add up to the time that has passed, whenever they are read, and none of
    them ever falls: to Prometheus a counter that falls has begun again at zero.

    The task's thread writes and any thread reads. ``now`` is a monotonic clock, in seconds. It is read under
    the lock. Otherwise a change of state could have an earlier time than a reader that did not see it yet,
    and the total that this reader saw would fall.
    """

    __slots__ = ("_lock", "_now", "_since", "_state", "_totals", "blocks")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._state: ThreadState | None = None
        self._since = 0.0
        self._totals = StateSeconds()
        """Up to ``_since``."""
        self.blocks = Histogram(BLOCK_SECONDS_BOUNDS)
        """The waits in back-pressure that have ended."""

    def enter(self, state: ThreadState | None) -> None:
        """(Task.) The thread is in ``state`` from now on; None: it does not run."""
        with self._lock:
            now = self._now()
            passed = now - self._since
            before = self._state
            self._totals = self._up_to(now)
            self._state, self._since = state, now
        if before == "backpressured":
            self.blocks.observe(passed)

    def present(self) -> tuple[ThreadState | None, float]:
        """(Any thread.) The present state, and since when."""
        with self._lock:
            return self._state, self._since

    def age(self) -> float:
        """(Any thread.) Seconds that the present state has lasted."""
        with self._lock:
            return self._now() - self._since

    def read(self) -> StateSeconds:
        """(Any thread.) The totals up to now."""
        with self._lock:
            return self._up_to(self._now())

    def _up_to(self, now: float) -> StateSeconds:
        busy, idle, backpressured = self._totals
        passed = now - self._since
        if self._state == "busy":
            busy += passed
        elif self._state == "idle":
            idle += passed
        elif self._state == "backpressured":
            backpressured += passed
        return StateSeconds(busy, idle, backpressured)
