"""Signals that end ``submit --wait`` between the submission and its answer leave no job behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from minishuffle.ids import Address
from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HANDSHAKE_BYTES = 600
"""More than a client sends to prove itself, less than a submission."""


class HeldAnswers:
    """A proxy that keeps the answers of the first connection that sends more than a handshake."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.submitted = threading.Event()
        self._start(self._accept)

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._listener.getsockname())

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        try:
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._target.host, self._target.port))
                self._sockets += [client, server]
                held = threading.Event()
                self._start(self._pump, client, server, None if self.submitted.is_set() else held)
                self._start(self._answers, server, client, held)
        except OSError:  # closed
            return

    def _pump(self, source: socket.socket, target: socket.socket, held: threading.Event | None) -> None:
        total = 0
        try:
            while data := source.recv(65_536):
                total += len(data)
                if held is not None and total > HANDSHAKE_BYTES:
                    held.set()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def _answers(self, source: socket.socket, target: socket.socket, held: threading.Event) -> None:
        try:
            while data := source.recv(65_536):
                if held.is_set():
                    self.submitted.set()
                else:
                    target.sendall(data)
        except OSError:
            return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for opened in [self._listener, *self._sockets]:
            opened.close()
        for thread in self._threads:
            thread.join(10)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_answer_to_a_submission_cancels_the_job(
    number: signal.Signals, code: int, wait_until: Callable[..., Any]
) -> None:
    with LocalCluster(workers=1, slots=2) as cluster:
        proxy = HeldAnswers(cluster.client.address)
        secret = str(cluster.state_dir / "secret")
        flags = ["--coordinator", proxy.address, "--secret-file", secret, "--cluster", "local"]
        command = [
            sys.executable,
            "-m",
            "minishuffle",
            *flags,
            "submit",
            "keyby",
            "--wait",
            "--parallelism",
            "1",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert proxy.submitted.wait(60), "the coordinator has answered, and the client has not heard it"
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            proxy.close()
        assert process.returncode == code, errors
        assert [job.state for job in cluster.client.jobs()] == ["canceled"]
