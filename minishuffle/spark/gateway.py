"""The JVM beside the driver: what it says is passed on without its greetings, and Ctrl-C stays Python's."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway

from minishuffle.errors import UsageError
from minishuffle.launch import signals_later

__all__ = [
    "connect_again",
    "end_jvm",
    "own_interrupts",
    "quiet_accumulators",
    "renew_connection",
    "start_jvm",
]

GREETING: Final = b"WARNING: Using incubator modules"
"""Java says so of every program that has Spark's module, whatever is asked of it."""
LINES_KEPT: Final = 5
STOP_SECONDS: Final = 20.0
CONNECTIONS_MAX: Final = 5


class _Stderr:
    """Passes on what the JVM and its children write to standard error; the last lines are kept."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        self.last: deque[str] = deque(maxlen=LINES_KEPT)
        self._thread = threading.Thread(target=self._run, name="stderr of Spark", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with os.fdopen(self._read, "rb") as lines:
            for line in lines:
                if line.startswith(GREETING):
                    continue
                text = line.decode(errors="replace")
                self.last.append(text.strip())
                sys.stderr.write(text)
                sys.stderr.flush()

    def close(self) -> None:
        """Leave the writing to the JVM."""
        os.close(self.write)

    def join(self) -> None:
        """Until all who could write are gone."""
        self._thread.join(STOP_SECONDS)


class _NotFromPy4J(logging.Filter):
    """Py4J logs the stack of every call that Ctrl-C ends; this keeps out what it gives to the root logger."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "py4j" not in Path(record.pathname).parts


_stderr: _Stderr | None = None
_not_from_py4j: Final = _NotFromPy4J()


def start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM of this process, unless it has one.

    Raises:
        UsageError: it ended at once; the text has what it said last.
    """
    global _stderr
    if SparkContext._gateway is not None:
        return
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with signals_later():
        stderr = _Stderr()
        try:
            gateway = launch_gateway(conf, {"stderr": stderr.write})  # type: ignore[no-untyped-call]
        except Exception as error:
            stderr.close()
            stderr.join()
            said = "; ".join(stderr.last) or str(error)
            raise UsageError(f"Java ended before Spark had started: {said}") from error
        stderr.close()
        connect_again(gateway._gateway_client)
        _stderr = stderr
        logging.getLogger().addFilter(_not_from_py4j)
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        SparkContext._ensure_initialized(gateway=gateway)


def connect_again(client: Any) -> None:
    """Have Py4J's client try again when the JVM closes a connection that is being made.

    At Ctrl-C Py4J asks the JVM to close the socket of the call that was broken off. The JVM closes each
    one that has the same local port (py4j.GatewayServer.shutdownSocket), which all connections to it have.
    So it closes the next one too where the request comes late, and PySpark's call on its way out of a
    ``with`` hid the KeyboardInterrupt behind a Py4JNetworkError.
    """
    create = client._create_new_connection

    def create_new_connection() -> Any:
        for _ in range(CONNECTIONS_MAX - 1):
            with suppress(Py4JNetworkError):
                return create()
        return create()

    client._create_new_connection = create_new_connection


def end_jvm() -> None:
    """End the JVM of this process, and wait until it and its children are gone."""
    global _stderr
    gateway: Any = SparkContext._gateway
    if gateway is None:
        return
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    gateway.shutdown()
    SparkContext._gateway = None
    SparkContext._jvm = None
    if process is not None:
        _end(process)
    if _stderr is not None:
        _stderr.join()
        _stderr = None
    logging.getLogger().removeFilter(_not_from_py4j)
    logging.getLogger("py4j").setLevel(logging.NOTSET)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The JVM ends when its standard input does; it is killed if it takes too long."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)


def quiet_accumulators(context: Any) -> None:
    """Let the server of accumulators print no stack when the JVM disconnects, as when jobs are stopped."""
    server = context._accumulatorServer
    tell = server.handle_error

    def handle_error(request: Any, address: Any) -> None:
        if not isinstance(sys.exception(), EOFError):
            tell(request, address)

    server.handle_error = handle_error


def renew_connection() -> None:
    """Have this thread talk to the JVM over a connection of its own from here on.

    For what must be done after Ctrl-C: where it broke off a call, the answer to that call is still to
    come, and would be taken for the answer to the next one. Py4J has then asked the JVM to close the
    connection too, which can reach the next one.

    Raises:
        Py4JNetworkError: the JVM is gone.
    """
    gateway: Any = SparkContext._gateway
    if gateway is None:
        return
    for attempt in range(CONNECTIONS_MAX):
        connection = gateway._gateway_client.get_thread_connection()
        if connection is not None:
            connection.close()
        try:
            gateway.jvm.System.nanoTime()
            return
        except Py4JNetworkError:
            if attempt == CONNECTIONS_MAX - 1:
                raise


@contextmanager
def own_interrupts() -> Iterator[None]:
    """Within it PySpark may not take Ctrl-C over: its handler calls the JVM from within a call of the JVM,
    which fails with three stacks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
