"""Simulated time: what happens in several processes, in an order that a seed decides.

A :class:`World` has the clock, the random source and everything that is still to happen. A :class:`Host` is a
process in it: an asyncio event loop (:class:`SimulatedLoop`) whose turns, timers and sockets are events of
the world, so that the package's own shells run on it unchanged. Nothing here sleeps or knows the real time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.simulated_network import Network, SimulatedTransport
    from support.simulated_threads import SimulatedThread

__all__ = ["Host", "SimulatedLoop", "World"]

TRACE_LENGTH = 120
"""Events that are kept for the report of a failure."""
TURN_SECONDS_MAX = 30e-6
"""How soon a loop that has something to do begins its turn, as a rule."""
LATE_TURN_SECONDS_MAX = 0.02
"""And at the most, when other programs have the processor."""
LATE_TURN_SHARE = 0.01
AFTERLIFE_TURNS = 50
"""How many turns the tasks of a process that has died have for their clean-up, which nobody sees."""


class World:
    """Simulated seconds, and what is to happen when.

    Args:
        seed: decides every delay and every order.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.clock_ahead = 0.0
        """How far the system clock of all hosts is ahead of where it was."""
        self.steps = 0
        self.trace: deque[str] = deque(maxlen=TRACE_LENGTH)
        self.hosts: list[Host] = []
        self.running: SimulatedThread | None = None
        """The task thread that runs now; None while a loop or the world itself does."""
        self.after_turn: Callable[[Host], None] = lambda host: None
        """Called when a loop has made a turn: a place for checks."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Have ``call`` made at that time; calls of the same time are made in the order of their entry."""
        self._number += 1
        heappush(self._events, (max(when, self.now), self._number, call))

    def within(self, seconds: float, call: Callable[[], object]) -> None:
        """Have ``call`` made at some moment of the next ``seconds``."""
        self.at(self.now + self.random.random() * seconds, call)

    def note(self, text: str) -> None:
        """For the report of a failure."""
        self.trace.append(f"{self.now:10.6f}  {text}")

    def step(self) -> bool:
        """Let the next thing happen; False if there is none."""
        if not self._events:
            return False
        self.now, _, call = heappop(self._events)
        self.steps += 1
        call()
        return True

    def run_until(self, condition: Callable[[], bool], seconds: float, steps_max: int) -> bool:
        """Let things happen until the condition holds; False if it does not within that time."""
        end, last = self.now + seconds, self.steps + steps_max
        while not condition():
            if not self._events or self._events[0][0] > end:
                self.now = end
                return condition()
            assert self.steps < last, f"more than {steps_max} steps: something goes round in circles"
            self.step()
        return True

    def close(self) -> None:
        """End every process; their threads and tasks with them."""
        for host in self.hosts:
            host.kill()
        self._events.clear()


class Host:
    """A process: its loop, its threads and its sockets.

    Args:
        name: for the trace.
    """

    def __init__(self, world: World, network: Network, name: str) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.dead = False
        self.silent = False
        """It is dead, and nobody says so to its peers: its machine is gone."""
        self.cut_off = False
        """It lives, and whatever it and the coordinator say to each other is lost."""
        self.stopped = False
        self.stopped_at = 0.0
        """When it was, if it is."""
        self.threads: list[SimulatedThread] = []
        self.transports: list[SimulatedTransport] = []
        self.loop = SimulatedLoop(self)
        world.hosts.append(self)

    @property
    def lost(self) -> bool:
        """To the coordinator, sooner or later."""
        return self.dead or self.cut_off

    def run(self, main: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
        """Begin a coroutine on its loop."""
        return self.loop.create_task(main, name=name)

    def stop(self) -> None:
        """SIGSTOP."""
        self.world.note(f"{self.name} is stopped")
        if not self.stopped:
            self.stopped, self.stopped_at = True, self.world.now

    def go_on(self) -> None:
        """SIGCONT."""
        if self.dead or not self.stopped:
            return
        self.world.note(f"{self.name} goes on")
        self.stopped = False
        self.loop.schedule()
        for thread in self.threads:
            thread.go_on()

    def kill(self, *, silent: bool = False) -> None:
        """SIGKILL, or the loss of the machine; idempotent. Its threads and tasks unwind unseen."""
        if self.dead:
            return
        self.world.note(f"{self.name} is killed{', and nobody says so' if silent else ''}")
        self.dead, self.silent = True, silent
        for transport in self.transports:
            transport.host_died()
        for thread in self.threads:
            thread.kill()
        self.loop.unwind()


DISK_SECONDS = 0.02
"""Within which a disk has done something."""


def _settle(settle: Callable[[Any], None], value: Any, future: asyncio.Future[Any]) -> None:
    if not future.done():
        settle(value)


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The event loop of a host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.errors: list[dict[str, Any]] = []
        """What callbacks raised: nothing in the package may."""
        self._world = host.world
        self._ready: deque[asyncio.Handle] = deque()
        self._scheduled = False

    # --- turns -----------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Have a turn soon, if there is anything to do."""
        if self._scheduled or not self._ready or self.host.stopped or self.host.dead:
            return
        self._scheduled = True
        late = self._world.random.random() < LATE_TURN_SHARE
        self._world.within(LATE_TURN_SECONDS_MAX if late else TURN_SECONDS_MAX, self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self.host.stopped or self.host.dead:
            return
        self._run_ready()
        self._world.after_turn(self.host)
        self.schedule()

    def _run_ready(self) -> None:
        ready = self._ready
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def unwind(self) -> None:
        """The process has died: end its tasks, without any effect outside."""
        tasks = asyncio.all_tasks(self)  # First: what is ready holds some that nothing else does.
        self._ready.clear()
        for task in tasks:
            task.cancel()
            coroutine: Any = task.get_coro()
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
        for _ in range(AFTERLIFE_TURNS):
            if self._ready:
                self._run_ready()
        self._ready.clear()

    # --- what asyncio and the package call -------------------------------------------------------

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self.schedule()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.at(when, partial(self._due, handle))
        return handle

    def _due(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled() and not self.host.dead:
            self._ready.append(handle)
            self.schedule()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is looked at when it is due."""

    def time(self) -> float:
        return self._world.now

    def run_in_executor(self, executor: object, fn: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """What threads do that wait for a disk: at once, a little later."""
        future = self.create_future()

        def work() -> None:
            if self.host.dead or future.cancelled():
                return
            try:
                found = fn(*args)
            except Exception as error:
                self.call_soon(_settle, future.set_exception, error, future)
            else:
                self.call_soon(_settle, future.set_result, found, future)

        self._world.within(DISK_SECONDS, work)
        return future

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.host.dead:
            self.errors.append(context)

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self.host.network.listen(self.host, factory, port)

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self.host.network.connect(self.host, factory, port)
