import os
import socket

import pytest

from minishuffle.cli import doctor
from minishuffle.errors import ResourceExhausted, UnknownName, UsageError


def test_a_taken_port_names_its_holder_and_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ResourceExhausted) as caught:
            doctor.require_free_port("127.0.0.1", port, "--port")
    assert f"port {port} is taken by " in str(caught.value)
    assert f"(pid {os.getpid()})" in str(caught.value)
    assert str(caught.value).endswith("choose another with --port")


def test_a_free_port_and_port_0_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for free in (port, 0):
        doctor.require_free_port("127.0.0.1", free, "--port")
        with socket.create_server(("127.0.0.1", free)) as server:
            assert server.getsockname()[1]


def test_an_address_of_another_machine_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192.0.2.1:1234 .*--host"):
        doctor.require_free_port("192.0.2.1", 1234, "--port")


def test_this_machine_is_local_and_another_is_not() -> None:
    doctor.require_local("127.0.0.1", "worker 1")
    with pytest.raises(UnknownName, match=r"worker 1 runs on 192.0.2.1"):
        doctor.require_local("192.0.2.1", "worker 1")
