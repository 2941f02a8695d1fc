"""The loop of asynchronous functions: what they raise, and what their own tasks do."""

from __future__ import annotations

import asyncio
import threading

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
