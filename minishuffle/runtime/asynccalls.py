"""The event loop that a task's asynchronous functions run on, in a thread of its own: never the worker's."""

from __future__ import annotations

import asyncio
import logging
import selectors
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from types import CodeType, FrameType
from typing import Any, Final

from minishuffle.errors import WrongResult
from minishuffle.operators.base import AsyncCall

__all__ = ["CALLS_CODE", "AwaitedCalls", "LoopCalls"]

_log = logging.getLogger("minishuffle.worker")


class LoopCalls:
    """See :class:`~minishuffle.operators.base.AsyncCalls`. The thread runs until :meth:`close`.

    Args:
        name: of the thread.
        ring: wakes the task when a call has ended.
        begin: the first that the thread calls.
        started: called by the task's thread behind each :meth:`start`, with what says whether all of its
            calls have ended: it may wait for that.
    """

    def __init__(
        self,
        name: str,
        ring: Callable[[], None],
        begin: Callable[[], None] = lambda: None,
        started: Callable[[Callable[[], bool]], None] = lambda have_ended: None,
    ) -> None:
        self._ring, self._begin, self._started = ring, begin, started
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        """Those under way; the loop itself refers to them weakly."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- task ----------------------------------------------------------------------------------------

    def start(
        self, fn: Callable[[Any], Awaitable[Any]], calls: Sequence[AsyncCall], timeout: float | None
    ) -> None:
        """Begin these calls; each is ``done`` when it has ended."""
        self._loop.call_soon_threadsafe(self._start, fn, calls, timeout)
        self._started(lambda: all(call.done for call in calls))

    def wait(self, awaitable: Awaitable[Any]) -> None:
        """Until the awaitable has ended; raises what it does."""
        call = AsyncCall(None)
        asyncio.run_coroutine_threadsafe(self._call(lambda _: awaitable, call, None), self._loop).result()
        if call.error is not None:
            raise call.error

    def cancel(self) -> None:
        """Cancel what runs on the loop, and wait until it has ended. A function that goes on although it is
        cancelled holds the task up, as one that does not return does."""
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()

    def close(self) -> None:
        """Cancel what runs, and end the loop and its thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # --- any thread ----------------------------------------------------------------------------------

    def frame(self, frames: Mapping[int, FrameType]) -> FrameType | None:
        """Where its thread is, of the innermost frames of all threads; None: it waits, or has ended."""
        frame = frames.get(self._thread.ident or 0)
        # Another thread may have got its number since it ended.
        if frame is None or frame.f_code.co_filename == selectors.__file__ or not self._thread.is_alive():
            return None
        return frame

    # --- loop ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._begin()
        asyncio.set_event_loop(self._loop)
        while not self._closed:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # A callback or task that the user's code has made raised it; :meth:`_call` lets none through.
                _log.warning("%s: a callback raised", self._thread.name, exc_info=error)
        self._loop.close()

    def _start(
        self, fn: Callable[[Any], Awaitable[Any]], calls: Sequence[AsyncCall], timeout: float | None
    ) -> None:
        for call in calls:
            task = self._loop.create_task(self._call(fn, call, timeout))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _call(
        self, fn: Callable[[Any], Awaitable[Any]], call: AsyncCall, timeout: float | None
    ) -> None:
        bound = asyncio.timeout(timeout)
        try:
            async with bound:
                found = fn(call.row)
                if not isawaitable(found):
                    raise WrongResult(
                        f"map_async takes an asynchronous function, and this one gave "
                        f"{type(found).__name__}: define it with 'async def', or use map"
                    )
                call.result = await found
        except BaseException as error:  # whatever it is, it ends this call alone, and the task looks at it
            late = isinstance(error, TimeoutError) and bound.expired()
            call.error = TimeoutError(f"no result within {timeout:g} s") if late else error
        call.done = True
        self._ring()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _end(self) -> None:
        await self._cancel()
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


CALLS_CODE: Final[frozenset[CodeType]] = frozenset({LoopCalls._run.__code__, LoopCalls._call.__code__})
"""What frames around the user's own on such a thread run."""


class AwaitedCalls(LoopCalls):
    """The same for a task in the calling thread, which nobody wakes: calls that begin together have ended, in
    whatever order, before it goes on."""

    def __init__(self, name: str) -> None:
        self._rung = threading.Event()
        super().__init__(name, self._rung.set, started=self._await)

    def _await(self, have_ended: Callable[[], bool]) -> None:
        while True:
            self._rung.clear()
            if have_ended():
                return
            self._rung.wait()
