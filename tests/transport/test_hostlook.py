"""Whether a host answers, on sockets of this one; tests/e2e/test_lost_hosts.py cuts hosts off."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import uvloop

from minishuffle.ids import Address
from minishuffle.transport import hostlook
from minishuffle.transport.addresses import host_port
from minishuffle.transport.hostlook import host_answers

T = TypeVar("T")
Run = Callable[[Awaitable[T]], T]

HOST = "127.0.0.1"
NOWHERE = "192.0.2.1:9"
"""Of a network for documents (RFC 5737)."""


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run[T]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_bounded(work: Awaitable[T]) -> T:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(work, 20.0))

    return run_bounded


def test_a_process_that_accepts_nothing_answers_from_its_backlog(run: Run[bool | None]) -> None:
    with socket.create_server((HOST, 0)) as stopped:
        assert run(host_answers([host_port(stopped.getsockname())], 1, 5.0)) is True


def test_a_port_that_nobody_listens_on_is_an_answer(run: Run[bool | None]) -> None:
    with socket.create_server((HOST, 0)) as gone:
        address = host_port(gone.getsockname())
    assert run(host_answers([address], 1, 5.0)) is True


def test_one_port_that_answers_is_enough(run: Run[bool | None]) -> None:
    with socket.create_server((HOST, 0)) as there:
        assert run(host_answers([NOWHERE, host_port(there.getsockname())], 3, 5.0)) is True


class Kernel:
    """What connecting comes to, in the place of ``_dial``."""

    def __init__(self, *answers: bool | None) -> None:
        self.answers = list(answers)
        """None: there is never one."""
        self.dialed = 0

    async def dial(self, address: Address) -> bool:
        self.dialed += 1
        answer = self.answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        return bool(answer)


@pytest.mark.parametrize("answers", [(None, None, None), (False, False, False), (None, False, None)])
def test_no_answer_to_any_try_is_silence(
    run: Run[bool | None], monkeypatch: pytest.MonkeyPatch, answers: tuple[bool | None, ...]
) -> None:
    """Neither is what this host's own kernel says of a network that it cannot reach."""
    kernel = Kernel(*answers)
    monkeypatch.setattr(hostlook, "_dial", kernel.dial)
    monkeypatch.setattr("minishuffle.limits.HOST_LOOK_LATE_SECONDS_MAX", 60.0)
    assert run(host_answers([NOWHERE], 3, 0.03)) is False
    assert kernel.dialed == 3


def test_the_last_of_three_tries_counts(run: Run[bool | None], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(None, False, True)
    monkeypatch.setattr(hostlook, "_dial", kernel.dial)
    assert run(host_answers([NOWHERE], 3, 0.03)) is True


def test_whoever_was_held_up_says_nothing(run: Run[bool | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may be in a socket that was not read yet."""
    kernel = Kernel(None)
    monkeypatch.setattr(hostlook, "_dial", kernel.dial)
    monkeypatch.setattr("minishuffle.limits.HOST_LOOK_LATE_SECONDS_MAX", -1.0)
    assert run(host_answers([NOWHERE], 1, 0.01)) is None


def test_without_descriptors_nobody_can_tell(run: Run[bool | None], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    async def look() -> bool | None:
        monkeypatch.setattr(hostlook.socket, "socket", refuse)
        try:
            return await host_answers([NOWHERE], 3, 0.03)
        finally:
            monkeypatch.undo()

    assert run(look()) is None


def test_each_try_has_its_time_whatever_held_the_loop_up(
    run: Run[bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that is held up dials late: what was dialed just now has not been silent."""

    async def dial(_: Address) -> bool:
        for _ in range(5):  # The answer takes a few turns of the loop, as that of another host does.
            await asyncio.sleep(0)
        return True

    async def look() -> bool | None:
        asyncio.get_running_loop().call_soon(time.sleep, 0.1)
        return await host_answers([NOWHERE], 3, 0.1)

    monkeypatch.setattr(hostlook, "_dial", dial)
    assert run(look()) is not False
