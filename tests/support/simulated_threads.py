"""Task threads of a simulated process: they run one at a time, as far as the world lets them.

Each has a stack of its own (a greenlet) and hands the processor back at points of its own: when it waits,
and by the seed's choice wherever it meets the loop (:meth:`Threads.pause`). So what runs is the package's own
code, a writer may be held up in the middle of an element, and the order is the seed's alone. Threads of the
system in their place took nearly twice as long: each change of thread was a wait for a lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from greenlet import getcurrent, greenlet

from minishuffle.errors import TaskCancelled
from support.simulated_loop import DISK_SECONDS, Host, World

__all__ = [
    "SimulatedDisk",
    "SimulatedFolderThreads",
    "SimulatedEvent",
    "SimulatedThread",
    "SimulatedTime",
    "Threads",
    "running_host",
]

STEP_SECONDS_MAX = 100e-6
"""How long a thread that could run waits for the processor, as a rule."""
SLOW_STEP_SECONDS_MAX = 0.01
SLOW_STEP_SHARE = 0.03
EPOCH = 86_400.0
"""What the system clock shows at the beginning: enough that it stays positive when it is set back."""
PAUSE_SHARE = 0.1
"""Of the points at which a thread could be interrupted, those at which it is."""


class Killed(TaskCancelled):
    """The process of this thread has died; what it does now has no effect."""


class SimulatedThread:
    """Stands in for ``threading.Thread``."""

    def __init__(self, host: Host, target: Callable[[], object], name: str) -> None:
        self.name = name
        self.native_id = None
        """No system knows it."""
        self._host = host
        self._world = host.world
        self._target = target
        self._stack = greenlet(self._run)
        self._alive = False
        self._killed = False
        self._held = False
        """Its turn came while the process was stopped."""
        self._wait = 0
        """The number of the wait that it is in; 0: none."""
        self._waits = 0

    def start(self) -> None:
        self._alive = True
        self._host.threads.append(self)
        self._soon()

    def is_alive(self) -> bool:
        return self._alive

    # --- the world's side ------------------------------------------------------------------------

    def _soon(self) -> None:
        slow = self._world.random.random() < SLOW_STEP_SHARE
        self._world.within(SLOW_STEP_SECONDS_MAX if slow else STEP_SECONDS_MAX, self._step)

    def _step(self) -> None:
        if self._host.stopped:
            self._held = True
        elif self._alive and not self._killed:
            self._switch_in()

    def _switch_in(self) -> None:
        self._world.running = self
        self._stack.parent = getcurrent()
        self._stack.switch()
        self._world.running = None

    def go_on(self) -> None:
        """The process was stopped, and is not any more."""
        if self._held:
            self._held = False
            self._soon()

    def wake(self, number: int) -> None:
        """End its wait of that number, if it is still in it."""
        if self._wait == number:
            self._wait = 0
            self._soon()

    def kill(self) -> None:
        """Its process has died: it unwinds now."""
        if self._alive:
            self._killed = True
            self._switch_in()
        assert not self._alive, f"{self.name} goes on although its process has died"

    # --- the thread's own side -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if not self._killed:
                self._target()
        finally:
            self._alive = False

    def _switch_out(self) -> None:
        parent = self._stack.parent
        assert parent is not None
        parent.switch()
        if self._killed:
            raise Killed("the process has died")

    def pause(self) -> None:
        """Let others run first."""
        if not self._killed:
            self._soon()
            self._switch_out()

    def wait(self, event: SimulatedEvent, seconds: float) -> None:
        """Until ``event`` is set, or so many seconds have passed."""
        if self._killed:
            raise Killed("the process has died")
        self._waits += 1
        self._wait = self._waits
        event.waiting.append((self, self._waits))
        self._world.at(self._world.now + seconds, partial(self.wake, self._waits))
        self._switch_out()


class SimulatedEvent:
    """Stands in for ``threading.Event`` and ``WakeFlag``."""

    def __init__(self, threads: Threads) -> None:
        self.waiting: list[tuple[SimulatedThread, int]] = []
        self._threads = threads
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self.waiting = self.waiting, []
        for thread, number in waiting:
            thread.wake(number)

    def clear(self) -> None:
        self._threads.pause()
        self._set = False
        self._threads.pause()

    def wait(self, timeout: float) -> bool:
        if not self._set:
            thread = self._threads.current()
            assert thread is not None, "only task threads wait"
            thread.wait(self, timeout)
        return self._set


class Threads:
    """Stands in for the module ``threading``, where the package makes task threads and their bells."""

    def __init__(self, world: World) -> None:
        self._world = world

    def Event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def Thread(self, *, target: Callable[[], object], name: str, daemon: bool) -> SimulatedThread:
        return SimulatedThread(running_host(), target, name)

    def get_ident(self) -> int:
        return threading.get_ident()

    def current(self) -> SimulatedThread | None:
        return self._world.running

    def pause(self) -> None:
        """A point at which a task thread may be interrupted; of no effect elsewhere."""
        thread = self._world.running
        if thread is not None and self._world.random.random() < PAUSE_SHARE:
            thread.pause()

    def sleep(self, seconds: float) -> None:
        """Have the calling task thread do nothing for so long."""
        thread = self._world.running
        assert thread is not None, "only task threads sleep"
        thread.wait(SimulatedEvent(self), seconds)


class SimulatedDisk:
    """Stands in for ``ThreadPoolExecutor`` where threads wait for a disk."""

    def __init__(self, *_: object) -> None:
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        host = running_host()
        host.world.within(DISK_SECONDS, lambda: None if host.dead or self._closed else work())

    def shutdown(self, *, wait: bool) -> None:
        self._closed = True


class SimulatedFolderThreads:
    """Stands in for the module ``threading`` where each thing that is done in a folder has a thread."""

    class Thread:
        """Does its work at a moment within the time of a disk."""

        def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
            self._work = target

        def start(self) -> None:
            SimulatedDisk().submit(self._work)


def running_host() -> Host:
    """The process whose loop has its turn."""
    host: Host = asyncio.get_running_loop().host  # type: ignore[attr-defined]
    return host


class SimulatedTime:
    """Stands in for the module ``time``: all clocks are the world's, but the system clock may be set."""

    def __init__(self, world: World) -> None:
        self._world = world

    def time(self) -> float:
        return EPOCH + self._world.now + self._world.clock_ahead

    def monotonic(self) -> float:
        return self._world.now

    perf_counter = monotonic

    def process_time(self) -> float:
        return 0.0

    def thread_time(self) -> float:
        """As of a thread that has had a processor ever since: what takes it long costs much."""
        return self._world.now

    def pthread_getcpuclockid(self, thread: int) -> int:
        return thread

    def clock_gettime(self, clock: int) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the simulation has no time.{name}: add it to {type(self).__name__}")
