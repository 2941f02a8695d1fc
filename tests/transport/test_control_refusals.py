"""Who is refused a control link, and which links are closed: strangers, garbage, silence, limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError, ResourceExhausted
from minishuffle.ids import Address
from minishuffle.transport.control import BlockingControlClient, connect_control
from minishuffle.wire.control import encode_message
from minishuffle.wire.frames import FRAME_HEADER, Ping, Role, encode_frame
from minishuffle.wire.handshake import Handshake, HandshakeRefused, Identity
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.reports import AttemptReport, Collected
from minishuffle.wire.requests import Accepted, GetStatus, ListJobs
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Listener, Stranger

SECRET = b"a secret of the cluster"
WORKER = Identity(Role.WORKER, "blue", 0, 0)
CLIENT = Identity(Role.CLIENT, "blue", 0, 0)

Run = Callable[[Coroutine[Any, Any, None]], None]
MakeStranger = Callable[[Address], Awaitable["Stranger"]]


def collected(size: int) -> AttemptReport:
    return AttemptReport(term=1, facts=[Collected(attempt=attempt(), payload=bytes(size))])


@pytest.mark.parametrize(
    ("identity", "secret", "reason", "fix"),
    [
        (WORKER, b"another", "secret", "--secret-file"),
        (Identity(Role.WORKER, "red", 0, 0), SECRET, "cluster", "--cluster"),
        (CLIENT, SECRET, "peer", "clients dial another port"),
    ],
)
def test_refused_peers_learn_why_and_are_reported(
    run: Run, identity: Identity, secret: bytes, reason: str, fix: str, make_listener: type[Listener]
) -> None:
    def workers_only(peer: Identity) -> str | None:
        return None if peer.role is Role.WORKER else "clients dial another port"

    async def main() -> None:
        listener = make_listener()
        address = await listener.start(authorize=workers_only)
        with pytest.raises(HandshakeRefused, match=fix) as caught:
            await connect_control(address, identity, secret, timeout=5)
        assert caught.value.reason == reason
        assert str(address) in str(caught.value)
        reported, _, remote = await listener.refusals.get()
        assert reported == reason
        assert remote.startswith("127.0.0.1:")
        with pytest.raises(HandshakeRefused, match=fix):
            await asyncio.to_thread(BlockingControlClient, address, identity, secret, 5)
        assert (await listener.refusals.get())[0] == reason
        assert listener.links == []
        await listener.server.close()

    run(main())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        FRAME_HEADER.pack(limits.HANDSHAKE_FRAME_BYTES_MAX + 1, 1, 0),
        encode_message(ListJobs(), 1),
    ],
)
def test_garbage_instead_of_a_handshake(
    run: Run, garbage: bytes, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener()
        stranger = await make_stranger(await listener.start())
        stranger.writer.write(garbage)
        answer = await stranger.closed_by_peer()
        assert FRAME_HEADER.unpack_from(answer)[1] == 3, "a Reject says why"
        assert (await listener.refusals.get())[0] == "malformed"
        assert listener.links == []
        await listener.server.close()

    run(main())


@pytest.mark.parametrize(
    "garbage",
    [
        FRAME_HEADER.pack(limits.CONTROL_FRAME_BYTES_MAX + 1, 15, 0),
        FRAME_HEADER.pack(200, 77, 0),
        encode_frame(Ping(1)),
        FRAME_HEADER.pack(5 + 3, 15, 0) + b"\xc1\xc1\xc1",
    ],
)
def test_garbage_after_the_handshake_closes_that_link_alone(
    run: Run, garbage: bytes, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener()
        address = await listener.start()
        good = await connect_control(address, WORKER, SECRET, timeout=5)
        replies: asyncio.Queue[ControlMessage] = asyncio.Queue()
        good.start(lambda message, request: replies.put_nowait(message), lambda error: None)
        stranger = await make_stranger(address)
        await stranger.prove()
        stranger.writer.write(encode_message(ListJobs(), 0) + garbage)
        assert isinstance(await listener.ends.get(), RemoteProtocolError)
        assert await stranger.closed_by_peer() == b""
        good.send(ListJobs(), 1)
        assert await replies.get() == Accepted(job="j1")
        await listener.server.close()

    run(main())


def test_handler_may_refuse_a_message(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener(starts_links=False)
        stranger = await make_stranger(await listener.start())
        await stranger.prove(and_then=encode_message(ListJobs(), 1) + encode_message(ListJobs(), 2))
        seen: list[int] = []

        def refuse(message: ControlMessage, request: int) -> None:
            seen.append(request)
            raise RemoteProtocolError("no client may say that")

        listener.links[0].start(refuse, listener.ends.put_nowait)
        assert str(await listener.ends.get()) == "no client may say that"
        assert seen == [1]
        stranger.close()
        await listener.server.close()

    run(main())


def test_silent_peer_is_turned_away(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener()
        stranger = await make_stranger(await listener.start(handshake_seconds=0.02))
        assert await stranger.closed_by_peer() == b""
        reason, text, _ = await listener.refusals.get()
        assert (reason, text) == ("timeout", "no handshake within 0.02 s")
        await listener.server.close()

    run(main())


def test_timer_of_a_proven_link_is_gone(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener()
        address = await listener.start(handshake_seconds=0.05)
        link = await connect_control(address, WORKER, SECRET, timeout=5)
        replies: asyncio.Queue[ControlMessage] = asyncio.Queue()
        link.start(lambda message, request: replies.put_nowait(message), lambda error: None)
        stranger = await make_stranger(address)
        assert await stranger.closed_by_peer() == b"", "the stranger, who came later, is out of time"
        link.send(ListJobs(), 1)
        assert await replies.get() == Accepted(job="j1")
        assert (await listener.refusals.get())[0] == "timeout"
        assert listener.refusals.empty()
        await listener.server.close()

    run(main())


def test_half_a_handshake_is_reported_and_a_mere_look_is_not(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener()
        address = await listener.start()
        looker = await make_stranger(address)
        looker.close()
        stranger = await make_stranger(address)
        stranger.writer.write(b"\x00\x00")
        stranger.close()
        reason, text, _ = await listener.refusals.get()
        assert reason == "closed"
        assert "closed the connection during the handshake" in text
        assert listener.refusals.empty()
        await listener.server.close()

    run(main())


def test_the_oldest_unproven_connection_makes_room_for_a_peer_that_can_prove_itself(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener()
        address = await listener.start(unproven_max=2)
        waiting = [await make_stranger(address), await make_stranger(address)]
        for stranger in waiting:  # an answer shows that the server has taken it up
            stranger.writer.write(Handshake(WORKER, SECRET, os.urandom(32), dialer=True).start())
            assert await stranger.reader.read(1)
        link = await connect_control(address, WORKER, SECRET, timeout=5)
        assert await waiting[0].closed_by_peer()
        reason, text, _ = await listener.refusals.get()
        assert (reason, text) == (
            "limit",
            "it made room for a newer connection: 2 wait for their handshake at most",
        )
        waiting[1].close()
        assert (await listener.refusals.get())[0] == "closed"
        assert listener.refusals.empty(), "each refusal is reported once"
        link.close()
        await listener.server.close()

    run(main())


def test_a_burst_of_silent_connections_closes_none_that_has_sent_a_hello(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    """The kernel has all of them before the process turns to the first one."""

    async def main() -> None:
        listener, loop = make_listener(), asyncio.get_running_loop()
        address = await listener.start()
        handshake = Handshake(CLIENT, SECRET, os.urandom(32), dialer=True)
        with contextlib.ExitStack() as burst:
            peer = burst.enter_context(socket.create_connection((address.host, address.port)))
            peer.sendall(handshake.start())
            for _ in range(3):
                for _ in range(120):
                    silent = burst.enter_context(socket.socket())
                    silent.setblocking(False)
                    silent.connect_ex((address.host, address.port))
                await asyncio.sleep(0)
            peer.setblocking(False)
            while handshake.peer is None:
                async with asyncio.timeout(20):
                    received = await loop.sock_recv(peer, 4096)
                assert received, "it was closed"
                peer.sendall(handshake.receive(received))
        await listener.server.close()

    run(main())


def test_a_link_that_is_closed_for_cause_is_reported(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener()
        stranger = await make_stranger(await listener.start())
        await stranger.prove(and_then=encode_frame(Ping(1)))
        await stranger.closed_by_peer()
        reason, text, remote = await listener.refusals.get()
        assert (reason, text) == ("malformed", "Ping frame on a control link")
        assert remote.startswith("127.0.0.1:")
        await listener.ends.get()
        good = await make_stranger(Address("127.0.0.1", listener.server.port))
        await good.prove()
        good.close()
        await listener.ends.get()
        assert listener.refusals.empty(), "a link that its peer closes is no refusal"
        await listener.server.close()

    run(main())


def test_peer_that_does_not_read_is_dropped(
    run: Run, monkeypatch: pytest.MonkeyPatch, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    monkeypatch.setattr(limits, "CONTROL_UNSENT_BYTES_MAX", 1 << 20)

    async def main() -> None:
        listener = make_listener()
        stranger = await make_stranger(await listener.start())
        await stranger.prove()
        (link,) = listener.links
        sent = 0
        while listener.ends.empty():
            link.send(collected(1 << 18))
            sent += 1 << 18
            assert sent < 1 << 30, "never dropped"
            await asyncio.sleep(0)
        error = await listener.ends.get()
        assert isinstance(error, ResourceExhausted)
        assert "a worker at 127.0.0.1:" in str(error)
        stranger.close()
        await listener.server.close()

    run(main())


def test_a_flood_of_messages_does_not_keep_other_links_waiting(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener()
        address = await listener.start()
        flooding = await make_stranger(address)
        await flooding.prove()
        other = await make_stranger(address)
        await other.prove()
        flooding.writer.write(encode_message(ListJobs(), 0) * 2_000)
        other.writer.write(encode_message(GetStatus(), 0))
        before = 0
        while not isinstance((await listener.messages.get())[0], GetStatus):
            before += 1
        assert before < 1_000, "the flood was dealt with first"
        for _ in range(2_000 - before):
            assert isinstance((await listener.messages.get())[0], ListJobs)
        flooding.close()
        assert await listener.ends.get() is None
        other.close()
        await listener.server.close()

    run(main())


def test_what_was_sent_before_a_close_is_delivered_before_the_end(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    async def main() -> None:
        listener = make_listener()
        stranger = await make_stranger(await listener.start())
        await stranger.prove()
        stranger.writer.write(encode_message(ListJobs(), 0) * 500)
        stranger.close()
        await listener.ends.get()
        assert listener.messages.qsize() == 500
        await listener.server.close()

    run(main())


def test_a_client_that_does_not_read_has_no_more_requests_answered(
    run: Run, make_listener: type[Listener], make_stranger: MakeStranger
) -> None:
    reply = collected(1 << 18)
    requests = 400

    async def main() -> None:
        listener = make_listener(starts_links=False)
        stranger = await make_stranger(await listener.start())
        await stranger.prove(CLIENT, and_then=encode_message(ListJobs(), 1) * requests)
        (link,) = listener.links
        answered = 0

        def answer(message: ControlMessage, request: int) -> None:
            nonlocal answered
            answered += 1
            link.send(reply, request)

        link.start(answer, listener.ends.put_nowait)
        while link.writable:
            await asyncio.sleep(0)
        for _ in range(requests):  # more turns of the loop than all requests would take
            await asyncio.sleep(0)
        assert answered < requests / 2
        expected = requests * len(encode_message(reply, 1))
        received = 0
        while received < expected:
            received += len(await stranger.reader.read(1 << 20))
        assert (answered, received) == (requests, expected), "once it reads, it gets every reply"
        stranger.close()
        await listener.server.close()

    run(main())
