"""What systemd hears from a process that it has started: that it is ready, and that its loop goes round."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minishuffle.cli.systemd import Notifier
from minishuffle.cli.worker import run_process
from minishuffle.config import ClusterSettings

SECONDS_MAX = 30.0


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "notify"))
        found.settimeout(SECONDS_MAX)
        yield found


def heard(systemd: socket.socket) -> list[str]:
    """What is there to read."""
    systemd.setblocking(False)
    found = []
    while True:
        try:
            found.append(systemd.recv(1024).decode())
        except BlockingIOError:
            return found


def test_a_process_feeds_the_watchdog_from_its_loop_once_it_is_ready(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "12000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    settings = ClusterSettings(heartbeat_interval=0.1, heartbeat_timeout=0.5)

    async def body(ready: Any, _: Any) -> None:
        assert heard(systemd) == []
        ready({"port": 1})
        loop = asyncio.get_running_loop()
        systemd.setblocking(False)
        said = [await asyncio.wait_for(loop.sock_recv(systemd, 1024), SECONDS_MAX) for _ in range(4)]
        assert said == [b"READY=1\nWATCHDOG_USEC=2000000", *3 * [b"WATCHDOG=1"]]

    assert run_process("worker", settings, False, body) == 0
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & os.environ.keys(), (
        "they are nobody else's"
    )


def test_without_a_watchdog_it_says_that_it_is_ready_and_no_more(systemd: socket.socket) -> None:
    where = systemd.getsockname()
    for more in ({}, {"WATCHDOG_USEC": "12000000", "WATCHDOG_PID": str(os.getpid() + 1)}):
        loop: Any = None
        Notifier({"NOTIFY_SOCKET": where, **more}, os.getpid()).ready(loop, 3.0)
        assert heard(systemd) == ["READY=1"]


def test_sockets_may_be_abstract(caplog: pytest.LogCaptureFixture) -> None:
    loop: Any = None
    name = f"minishuffle-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(f"\0{name}")
        Notifier({"NOTIFY_SOCKET": f"@{name}"}, os.getpid()).ready(loop, 3.0)
        assert heard(found) == ["READY=1"]
    assert not caplog.records


def test_where_there_is_no_systemd_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loop: Any = None
    Notifier({"WATCHDOG_USEC": "1"}, os.getpid()).ready(loop, 3.0)
    assert not caplog.records
    Notifier({"NOTIFY_SOCKET": "/nowhere/notify"}, os.getpid()).ready(loop, 3.0)
    assert "systemd is not told 'READY=1': No such file or directory" in caplog.text
