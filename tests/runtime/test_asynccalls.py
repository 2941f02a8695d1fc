"""The loop of asynchronous functions: what they raise, and what their own tasks do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from minishuffle.operators.base import AsyncCall
from minishuffle.runtime.asynccalls import LoopCalls


def test_wait_raises_what_the_awaitable_does() -> None:
    async def broken() -> None:
        raise OSError("no")

    calls = LoopCalls("test calls", lambda: None)
    with pytest.raises(OSError, match="no"):
        calls.wait(broken())
    calls.close()


def test_a_loop_goes_on_when_a_task_of_the_users_own_ends_the_interpreter() -> None:
    rung = threading.Event()
    made: list[asyncio.Task[None]] = []
    calls = LoopCalls("test calls", rung.set)

    async def leave() -> None:
        raise SystemExit(1)

    async def spawning(row: int) -> int:
        made.append(asyncio.get_running_loop().create_task(leave()))
        return row

    first, second = AsyncCall(1), AsyncCall(2)
    calls.start(spawning, [first, second], None)
    assert rung.wait(30)
    calls.close()
    assert (first.result, second.result) == (1, 2)
    assert [type(task.exception()) for task in made] == [SystemExit, SystemExit]


def test_who_starts_calls_may_wait_until_all_of_them_have_ended() -> None:
    rung, seen = threading.Event(), []

    def started(have_ended: Callable[[], bool]) -> None:
        while not have_ended():
            rung.wait()
            rung.clear()
        seen.append([call.result for call in rows])

    async def double(row: int) -> int:
        await asyncio.sleep(0)
        return 2 * row

    calls = LoopCalls("waits", rung.set, started=started)
    rows = [AsyncCall(1), AsyncCall(2)]
    calls.start(double, rows, None)
    assert seen == [[2, 4]]
    calls.close()
