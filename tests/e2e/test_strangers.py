"""What strangers and broken peers send to the ports of a running cluster harms nobody."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minishuffle import limits
from minishuffle.client import Client
from minishuffle.errors import (
    AuthenticationError,
)
from minishuffle.ids import Address
from minishuffle.wire.frames import (
    FRAME_HEADER,
    PROTOCOL_VERSION,
    FrameType,
    Hello,
    Ping,
    Role,
    encode_frame,
)
from minishuffle.wire.handshake import Handshake, Identity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SECONDS_MAX = 30.0


# --- strangers on the ports ---------------------------------------------------------------------------


def doors(endless: Any) -> dict[str, tuple[Address, str, Role, int]]:
    """Where strangers may knock: address, log, and the role and target of a peer that may."""
    return {
        "control": (endless.cluster.client.address, "coordinator", Role.CLIENT, 0),
        "data": (endless.data_address(1), "worker-1", Role.WORKER, 1),
    }


def refusals(endless: Any, door: str, reason: str) -> int:
    name = "minishuffle_connections_refused_total"
    if door == "control":
        return int(endless.coordinator_total(name, reason=reason))
    return int(endless.total(name, 1, reason=reason))


def dial(address: Address) -> socket.socket:
    dialed = socket.create_connection((address.host, address.port), timeout=SECONDS_MAX)
    dialed.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return dialed


def rest(dialed: socket.socket) -> bytes:
    """Everything that comes until the other side closes the connection."""
    received = b""
    try:
        while data := dialed.recv(65_536):
            received += data
    except ConnectionResetError:  # it closed with bytes of ours unread
        pass
    return received


def proven(endless: Any, door: str) -> socket.socket:
    """A connection whose handshake is complete, as a client or as a third worker."""
    address, _, role, target = doors(endless)[door]
    secret = (endless.cluster.state_dir / "secret").read_bytes().strip()
    identity = Identity(role, "local", 77 if role is Role.WORKER else 0, 1 if role is Role.WORKER else 0)
    handshake = Handshake(identity, secret, os.urandom(32), dialer=True, target=target)
    dialed = dial(address)
    dialed.sendall(handshake.start())
    while handshake.peer is None:
        data = dialed.recv(4096)
        assert data, "the handshake was refused"
        dialed.sendall(handshake.receive(data))
    return dialed


@pytest.mark.parametrize("door", ["control", "data"])
def test_a_wrong_secret_is_refused_logged_and_counted(
    endless: Any, goes_on: Callable[[], None], wait_until: Callable[..., Any], door: str
) -> None:
    address, log, role, target = doors(endless)[door]
    before = refusals(endless, door, "secret")
    hello = Hello(role, "local", 77 if target else 0, 0, target, os.urandom(32))
    with dial(address) as dialed:
        dialed.sendall(encode_frame(hello))
        dialed.recv(4096)
        # What follows an unproved Hello is not even looked at.
        unproved = replace(hello, proof=bytes(32))
        dialed.sendall(encode_frame(unproved) + encode_frame(Ping(1)) + b"\xff" * 64)
        answer = rest(dialed)
    _, kind, _ = FRAME_HEADER.unpack_from(answer)
    assert kind == FrameType.REJECT
    assert b"do not have the same secret" in answer
    wait_until(lambda: refusals(endless, door, "secret") == before + 1, "the count")
    assert "(secret): " in endless.log(log)
    goes_on()


def test_a_client_with_the_wrong_secret_is_told_the_mend(endless: Any) -> None:
    with (
        Client(endless.cluster.client.address, b"another" * 5, cluster="local") as client,
        pytest.raises(AuthenticationError, match=r"same secret.*--secret-file"),
    ):
        client.status()


@pytest.mark.parametrize("door", ["control", "data"])
@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("version", {"version": PROTOCOL_VERSION + 1}),
        ("cluster", {"cluster": "another"}),
        ("malformed", {"magic": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_peer_that_is_not_one_of_us_is_refused(
    endless: Any,
    goes_on: Callable[[], None],
    wait_until: Callable[..., Any],
    door: str,
    reason: str,
    change: dict[str, Any],
) -> None:
    address, log, role, target = doors(endless)[door]
    before = refusals(endless, door, reason)
    hello = replace(Hello(role, "local", 77 if target else 0, 0, target, os.urandom(32)), **change)
    with dial(address) as dialed:
        dialed.sendall(encode_frame(hello))
        answer = rest(dialed)
    assert FRAME_HEADER.unpack_from(answer)[1] == FrameType.REJECT
    wait_until(lambda: refusals(endless, door, reason) == before + 1, "the count")
    assert f"({reason}): " in endless.log(log)
    if reason == "version":
        assert f"version {PROTOCOL_VERSION + 1}".encode() in answer and b"install the same release" in answer
    goes_on()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(64),
    "oversized": FRAME_HEADER.pack(0xFFFF_FFF0, FrameType.HELLO, 0),
    "unknown": FRAME_HEADER.pack(5, 250, 0),
    "too-early": encode_frame(Ping(1)),
}


@pytest.mark.parametrize("door", ["control", "data"])
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_from_a_stranger_closes_that_connection_alone(
    endless: Any, goes_on: Callable[[], None], wait_until: Callable[..., Any], door: str, kind: str
) -> None:
    before = refusals(endless, door, "malformed")
    with dial(doors(endless)[door][0]) as dialed:
        dialed.sendall(GARBAGE[kind])
        rest(dialed)
    wait_until(lambda: refusals(endless, door, "malformed") == before + 1, "the count")
    goes_on()


PROVEN_GARBAGE = {
    "oversized": FRAME_HEADER.pack(limits.DATA_FRAME_BYTES_MAX + limits.CONTROL_FRAME_BYTES_MAX, 13, 0),
    "unknown": FRAME_HEADER.pack(13, 250, 0) + bytes(8),
    "too-short": FRAME_HEADER.pack(2, FrameType.PING, 0),
    "not-msgpack": FRAME_HEADER.pack(6, FrameType.MESSAGE, 1) + b"\xc1",
    "noise": bytes(range(255, 55, -1)),
}


@pytest.mark.parametrize("door", ["control", "data"])
@pytest.mark.parametrize("kind", PROVEN_GARBAGE)
def test_garbage_from_a_proven_peer_closes_that_connection_alone(
    endless: Any, goes_on: Callable[[], None], door: str, kind: str
) -> None:
    with proven(endless, door) as dialed:
        dialed.sendall(PROVEN_GARBAGE[kind])
        rest(dialed)
    goes_on()


@pytest.mark.parametrize("door", ["control", "data"])
def test_a_frame_that_is_cut_short_harms_nobody(endless: Any, goes_on: Callable[[], None], door: str) -> None:
    with proven(endless, door) as dialed:
        dialed.sendall(encode_frame(Ping(1))[:-3])
    goes_on()
