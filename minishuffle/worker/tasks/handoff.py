"""The four one-way paths between the loop thread and the task threads, and nothing else.

(a) task → loop: a subpartition has finished segments.
(b) task → loop: a subpartition's open segment has something published that shall go out.
(c) loop → task: a gate's channels have buffers or events (bounded by credit), or a segment came free.
(d) task → loop: buffers given back, and results.

Paths a, b and d share one inbox per worker (:class:`LoopInbox`), which keeps their order; path c is
the gate's own queues with a :class:`TaskBell` per task. On every path the rule is: enqueue first, then
set the wake flag; the reader clears the flag before it drains. The loop never blocks. For a buffer that
nobody waits for no flag is set: the loop finds it when it looks.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from minishuffle.errors import TaskCancelled
from minishuffle.exchange.channels import GivenBack, LocalBuffer
from minishuffle.exchange.partition import Attended
from minishuffle.exchange.segments import LocalPool, Segment
from minishuffle.protocol.channel import Received
from minishuffle.worker.tasks.busytime import StateClock, ThreadState
from minishuffle.worker.tasks.crashrecord import TaskCalls
from minishuffle.worker.tasks.pausing import TaskPause

__all__ = ["LoopInbox", "TaskBell", "TaskPaths", "WakeFlag"]

DRAIN_ITEMS_MAX: Final = 2_000
"""Most items dealt with in one loop turn, so that sockets get theirs."""
WAIT_SECONDS_MAX: Final = 1.0
"""Longest single wait of a task; it looks around and waits again."""


class LoopInbox:
    """The calls of task threads to the loop, in order."""

    __slots__ = ("_closed", "_items", "_woken", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False
        self._closed = False

    def __len__(self) -> int:
        """(Any thread.) What the loop has yet to look at."""
        return len(self._items)

    def post(self, call: Callable[..., None], *args: Any, wakes: bool = True) -> None:
        """(Any thread.) Have ``call(*args)`` run on the loop; without ``wakes`` whenever it looks."""
        if self._closed:
            return
        self._items.append((call, args))
        if wakes:
            self.wake()

    def wake(self) -> None:
        """(Any thread.) Have the loop look."""
        if not (self._woken or self._closed):
            self._woken = True
            self.loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """(Loop.) Run what was posted."""
        self._woken = False
        items = self._items
        try:
            for _ in range(min(len(items), DRAIN_ITEMS_MAX)):
                call, args = items.popleft()
                call(*args)
        finally:  # a call that raised must not hold up the calls posted after it
            if items and not self._woken:
                self._woken = True
                self.loop.call_soon(self.drain)

    def close(self) -> None:
        """The loop is about to end: nothing posted from now on runs."""
        self._closed = True


class WakeFlag:
    """A flag that one thread waits for, and others set: a ``threading.Event`` in two calls instead of twenty.
    A task with few rows waits before every batch.

    A lock that is held while the flag is not set; who sets it releases the lock.
    """

    __slots__ = ("_unset",)

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def is_set(self) -> bool:
        return not self._unset.locked()

    def set(self) -> None:
        """(Any thread.)"""
        try:  # as a context manager it would take four times as long
            self._unset.release()
        except RuntimeError:
            return  # it was set already

    def clear(self) -> None:
        self._unset.acquire(blocking=False)

    def wait(self, seconds: float) -> bool:
        """Until it is set, which ends with that, or ``seconds`` have passed; whether it was set."""
        return self._unset.acquire(timeout=max(seconds, 0.0))


class TaskBell:
    """Wakes one task thread: input came, a segment came free, or it is to stop.

    The loop rings at the end of its turn: a task that woke at the first of many buffers would fight the
    loop for the interpreter's lock while the loop delivers the rest.
    """

    __slots__ = ("_loop", "_ringing", "_rung", "clear", "ring_now")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung = WakeFlag()
        self.clear = self._rung.clear
        """(Task.) To be called before the look."""
        self.ring_now = self._rung.set
        """(Any thread.)"""
        self._ringing = False

    def ring(self) -> None:
        """(Loop.) After the enqueue."""
        if not self._ringing and not self._rung.is_set():
            self._ringing = True
            self._loop.call_soon(self._end_of_turn)

    def _end_of_turn(self) -> None:
        self._ringing = False
        self._rung.set()

    def wait(self, seconds: float) -> None:
        """(Task.) Until it rings, or ``seconds`` have passed. The look follows."""
        self._rung.wait(min(seconds, WAIT_SECONDS_MAX))


class TaskPaths:
    """The paths between one attempt's thread and the loop, and the clock that counts its waits. Once they are
    closed, an abandoned thread can do no harm.

    Args:
        inbox: the worker's.
        pause: barrier and paused of :class:`TaskPause`.
        stands: called on the loop when ``pause`` says something new.
    """

    def __init__(
        self,
        inbox: LoopInbox,
        pause: tuple[int, bool] = (0, False),
        stands: Callable[[], None] = lambda: None,
    ) -> None:
        self.bell = TaskBell(inbox.loop)
        self.clock = StateClock(time.monotonic)
        self.pause = TaskPause(time.monotonic, *pause)
        self.calls = TaskCalls.private()
        """The task's current batch, for crash reports. Waits here do not count as user code."""
        self.cancelled = self.job_ends = False
        """The task is to stop; and there will be no other attempt. The loop sets both."""
        self._cancelling = WakeFlag()
        self._closed = False
        self._inbox = inbox
        self._returned: deque[GivenBack] = deque()
        self._returning = False
        """The loop has yet to look at what was returned. The task sets it, the loop takes it back."""
        self._stands = stands

    # --- task → loop -----------------------------------------------------------------------------

    def notify(self, subpartition: Attended) -> None:
        """Paths a and b. At most one notice per subpartition is under way."""
        if not subpartition.notified and not self._closed:
            subpartition.notified = True
            self._inbox.post(subpartition.attend)

    def give_back(self, buffer: GivenBack) -> None:
        """Path d: return a consumed buffer. All buffers returned until the loop runs are handled in one
        call. It is not woken for one that nobody waits for."""
        self._returned.append(buffer)
        if not self._returning:
            self._returning = True
            self.post(self._take_returned, wakes=False)
        # Asked behind the post: who waits for it from now on has the loop look, and that finds it.
        spared = isinstance(buffer, Received | LocalBuffer) and buffer.attachment.spares(buffer)
        if not (spared or self._closed):
            self._inbox.wake()

    @property
    def returned(self) -> int:
        """Consumed buffers that the loop has yet to take back."""
        return len(self._returned)

    def _take_returned(self) -> None:
        """(Loop.)"""
        returned = self._returned
        self._returning = False  # before the look
        try:
            for _ in range(len(returned)):
                buffer = returned.popleft()
                buffer.attachment.consumed(buffer)
        finally:  # a buffer that raised must not hold up the buffers after it
            if returned and not self._returning:
                self._returning = True
                self.post(self._take_returned)

    def post(self, call: Callable[..., None], *args: Any, wakes: bool = True) -> None:
        """Path d: anything else that this attempt has to say; dropped once it was abandoned."""
        if not self._closed:
            self._inbox.post(call, *args, wakes=wakes)

    # --- waiting (task) --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise TaskCancelled if the task is to stop."""
        if self.cancelled:
            raise TaskCancelled("the task was cancelled")

    def acquire(self, pool: LocalPool, hit: Callable[[str], None] = lambda limit: None) -> Segment:
        """A segment for writing; waits for one (hard back-pressure, measured) if need be. ``hit`` is
        called with the name of each limit (``counters.LIMITS``) that is hit."""
        self.check()
        segment = pool.request()
        if segment is None:
            hit("writer")
            found: list[Segment] = []

            def ready() -> bool:
                taken = pool.request()
                if taken is not None:
                    found.append(taken)
                return bool(found)

            self.wait_until(ready)
            segment = found[0]
        if pool.in_use >= pool.size:
            hit("pool")
        return segment

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for the consumers (hard back-pressure, measured, but for time in which the task is to stand)
        until ``ready`` says so."""
        entered: ThreadState = "backpressured"
        self.clock.enter(entered)
        state = self.calls.pause()
        try:
            while True:
                self.bell.clear()
                self.check()  # first: what closes the paths may make it ready too
                if ready():
                    break
                waits: ThreadState = "idle" if self.pause.due else "backpressured"
                if waits != entered:
                    entered = waits
                    self.clock.enter(entered)
                self._set_blocked(self.pause.due > 0)
                self.bell.wait(WAIT_SECONDS_MAX)
        finally:
            self._set_blocked(False)
            self.calls.resume(state)
            self.clock.enter("busy")
        # The bell may have rung for input as well: let the task look again.
        self.bell.ring_now()

    def wait_inside(self, ready: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait until ``ready`` says so, and count the time for what the thread does now, with the rows that
        it has in hand. False: it has not said so within ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            self.bell.clear()
            self.check()
            if is_ready := ready():
                break
            if (left := deadline - time.monotonic()) <= 0.0:
                break
            self.bell.wait(left)
        self.bell.ring_now()  # perhaps for input as well
        return is_ready

    def _set_blocked(self, blocked: bool) -> None:
        """It waits for its consumers, or does no more: that counts if it is to stop."""
        if self.pause.block(blocked):
            self.post(self._stands)

    def linger(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until ``ready`` says so, cancelled or not; not longer, and only while the paths are open."""
        deadline = time.monotonic() + seconds
        while True:
            self.bell.clear()
            left = deadline - time.monotonic()
            if ready() or self._closed or left <= 0:
                return
            self.bell.wait(left)

    def stand(self, goes_on: Callable[[], bool]) -> None:
        """Stop, say so, and wait (idle time, measured) until the pause has ended."""
        self.post(self._stands)
        self.clock.enter("idle")
        state = self.calls.pause()
        self.wait_inside(goes_on)
        self.calls.resume(state)
        self.clock.enter("busy")

    def wait(self, seconds: float) -> None:
        """Wait for input (idle time, measured)."""
        self.clock.enter("idle")
        state = self.calls.pause()
        self.bell.wait(seconds)
        self.calls.resume(state)
        self.clock.enter("busy")
        self.check()

    def rest(self, seconds: float) -> None:
        """Wait (idle time, measured) however often it rings, but for a cancel."""
        self.clock.enter("idle")
        state = self.calls.pause()
        self._cancelling.wait(seconds)
        self.calls.resume(state)
        self.clock.enter("busy")
        self.check()

    # --- loop ------------------------------------------------------------------------------------

    def record(self, calls: TaskCalls) -> None:
        """The thread is about to start: it writes there from now on what it has in hand."""
        self.calls = calls

    def cancel(self, *, job_ends: bool = False) -> None:
        """Wake the task and have it stop at its next look."""
        self.job_ends = self.job_ends or job_ends  # before the task sees that it is cancelled
        self.cancelled = True
        self._cancelling.set()
        self.bell.ring_now()

    def close(self) -> None:
        """The attempt has ended or was abandoned: it can publish nothing from now on."""
        self.cancel()
        self._closed = True
        if self._returning:  # perhaps without a wake, and nothing of the task has the loop look any more
            self._inbox.wake()
