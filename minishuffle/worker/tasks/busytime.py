"""How long a task's thread is busy, idle and back-pressured, and how long it has a processor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

from minishuffle.counters import Histogram

__all__ = ["BLOCK_SECONDS_BOUNDS", "ProcessorClock", "StateClock", "StateSeconds", "ThreadState"]

BLOCK_SECONDS_BOUNDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)

ThreadState: TypeAlias = Literal["busy", "idle", "backpressured"]


class ProcessorClock:
    """How long a thread had a processor, and how long it was ready to run and had none. Both stay as they are
    once it has ended."""

    __slots__ = ("_had", "_running", "_waited")

    def __init__(self) -> None:
        self._running: tuple[int, int | None] | None = None
        """The thread's clock and its native id, while it runs."""
        self._had = self._waited = 0.0

    def begin(self, thread: int, native_id: int | None) -> None:
        """(Its thread.) It runs; ``thread`` is what Python calls it, ``native_id`` what the system does."""
        self._running = time.pthread_getcpuclockid(thread), native_id

    def end(self) -> None:
        """(Its thread.) It is about to end."""
        self._had = time.thread_time()
        self._running = None

    def had_seconds(self) -> float:
        """(Any thread.) For how long it had a processor."""
        running = self._running
        if running is not None:
            try:
                return time.clock_gettime(running[0])
            except OSError:  # it ended after the look at its clock
                return self._had
        return self._had

    def waited_seconds(self) -> float:
        """(Any thread.) For how long it waited for one; 0 where the system does not say (Linux does)."""
        running = self._running
        if running is not None and running[1] is not None:
            try:
                with open(f"/proc/self/task/{running[1]}/schedstat", "rb", buffering=0) as file:
                    self._waited = int(file.read(64).split()[1]) / 1e9
            except OSError:  # it ended after the look at its clock, or nothing is known
                return self._waited
        return self._waited


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

    __slots__ = ("_lock", "_now", "_seconds", "_since", "_state", "blocks")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._state: ThreadState | None = None
        self._since = 0.0
        self._seconds: dict[ThreadState, float] = {"busy": 0.0, "idle": 0.0, "backpressured": 0.0}
        """Up to ``_since``."""
        self.blocks = Histogram(BLOCK_SECONDS_BOUNDS)
        """The waits in back-pressure that have ended."""

    def enter(self, state: ThreadState | None) -> None:
        """(Task.) The thread is in ``state`` from now on; None: it does not run."""
        with self._lock:
            now = self._now()
            passed = now - self._since
            before = self._state
            if before is not None:
                self._seconds[before] += passed
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
            seconds = dict(self._seconds)
            if self._state is not None:
                seconds[self._state] += self._now() - self._since
        return StateSeconds(**seconds)
