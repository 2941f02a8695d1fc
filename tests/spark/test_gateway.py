"""Connections to the JVM, with one of the test's own in its place."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from py4j.clientserver import JavaClient, JavaParameters, PythonParameters  # type: ignore[import-untyped]
from py4j.java_gateway import GatewayProperty  # type: ignore[import-untyped]
from py4j.protocol import OUTPUT_VOID_COMMAND, Py4JNetworkError  # type: ignore[import-untyped]

from minishuffle.spark.gateway import CONNECTIONS_MAX, connect_again

pytestmark = pytest.mark.extra

SECONDS_MAX = 10.0
SECRET = "secret"


@contextmanager
def jvm(closing: int) -> Iterator[int]:
    """A port whose first connections are closed when they have said the secret; the next one is answered."""

    def serve() -> None:
        with suppress(OSError):  # The test is over.
            for answered in [False] * closing + [True]:
                connection, _ = listening.accept()
                with connection, connection.makefile("rwb") as lines:
                    assert [lines.readline(), lines.readline()] == [b"A\n", f"{SECRET}\n".encode()]
                    if answered:
                        lines.write(OUTPUT_VOID_COMMAND.encode())
                        lines.flush()
                        lines.readline()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(SECONDS_MAX)
    assert not thread.is_alive()


def client_of(port: int) -> JavaClient:
    java = JavaParameters(port=port, auth_token=SECRET)
    client = JavaClient(java, PythonParameters(), GatewayProperty(auto_field=False, pool=None))
    connect_again(client)
    return client


@pytest.mark.parametrize("closing", [0, 1, CONNECTIONS_MAX - 1])
def test_a_connection_that_the_jvm_closes_while_it_is_made_is_made_again(closing: int) -> None:
    with jvm(closing) as port:
        connection = client_of(port)._create_new_connection()
        assert connection.is_connected
        connection.close()


def test_a_jvm_that_closes_each_connection_is_given_up() -> None:
    with jvm(CONNECTIONS_MAX) as port, pytest.raises(Py4JNetworkError, match="empty"):
        client_of(port)._create_new_connection()
