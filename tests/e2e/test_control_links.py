"""A control link that is reset, by a firewall say, while both processes and all data links are well."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minishuffle import LocalCluster, Stream
from minishuffle.ids import Address
from minishuffle.launch import stop_children, wait_until_ready

RATE = 1_000
RECORDS = 3_000
SECONDS_MAX = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes ``close`` a reset."""


class Middlebox:
    """Passes the first connection on to ``target``, and can reset it at both ends; takes no other."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> Address:
        return Address(*self._listener.getsockname())

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            near, _ = self._listener.accept()
            far = socket.create_connection((self._target.host, self._target.port))
            self._ends += [near, far]
            for source, target in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(source, target)))
                self._threads[-1].start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)

    def reset(self) -> None:
        """May be called again."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RD)  # wakes its thread
                end.close()
        for thread in self._threads:
            thread.join(SECONDS_MAX)


@pytest.fixture
def behind_it() -> Iterator[tuple[LocalCluster, Middlebox]]:
    """Two workers, the second of which has its control link through a middlebox."""
    with LocalCluster(workers=1, slots=1, restart_workers=False) as cluster:
        processes = cluster._running()
        box = Middlebox(processes.address)
        try:
            child = processes.launch.start(2, box.address)
            try:
                wait_until_ready(child, time.monotonic() + SECONDS_MAX)
                yield cluster, box
            finally:
                stop_children([child], SECONDS_MAX)
        finally:
            box.reset()


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_a_worker_whose_control_link_is_reset_comes_back_and_loses_nothing(
    behind_it: tuple[LocalCluster, Middlebox], wait_until: Callable[..., Any]
) -> None:
    cluster, box = behind_it
    stream = Stream.generate(numbers, rate=RATE, records=RECORDS).rebalance().to_count()
    job = cluster.submit(stream, parallelism=2)
    wait_until(lambda: job.info().state == "running", "the job to run")
    box.reset()
    result = job.wait(SECONDS_MAX)
    assert (result.state, sum(each.value for each in result.results)) == ("finished", RECORDS)
    assert {task.attempt for task in result.tasks} == {1}
    assert {task.worker for task in result.tasks} == {1, 2}
    assert not [event.text for event in job.events() if "lost" in event.kind]
    (log,) = cluster.state_dir.glob("worker-2*.log")
    assert "has taken this worker back" in log.read_text()
