"""Control links over real loopback sockets, on both event loops."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from minishuffle import limits
from minishuffle.errors import (
    PeerLost,
    RemoteProtocolError,
    ResourceExhausted,
    ShuffleError,
    UnknownName,
    UsageError,
)
from minishuffle.ids import Address
from minishuffle.transport.control import BlockingControlClient, ControlLink, ControlServer, connect_control
from minishuffle.wire.codec import encode_frame
from minishuffle.wire.control import encode_message
from minishuffle.wire.frames import FRAME_HEADER, Ping, Role
from minishuffle.wire.handshake import Handshake, HandshakeRefused, Identity
from minishuffle.wire.messages import Accepted, CancelTasks, Collected, Failure, GetStatus, ListJobs, ShowJob
from minishuffle.wire.parts import ControlMessage

SECRET = b"a secret of the cluster"
COORDINATOR = Identity(Role.COORDINATOR, "blue", 0, 0)
WORKER = Identity(Role.WORKER, "blue", 0, 0)
CLIENT = Identity(Role.CLIENT, "blue", 0, 0)
SECONDS_MAX = 10.0

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on one of the loops, for a bounded time."""

    def bounded(main: Coroutine[Any, Any, None]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(main, SECONDS_MAX))

    return bounded


@dataclass
class Listener:
    """A server that keeps what it is told; ShowJob is failed, everything else accepted."""

    server: ControlServer = field(default_factory=ControlServer)
    links: list[ControlLink] = field(default_factory=list)
    refusals: asyncio.Queue[tuple[str, str, str]] = field(default_factory=asyncio.Queue)
    messages: asyncio.Queue[tuple[ControlMessage, int]] = field(default_factory=asyncio.Queue)
    ends: asyncio.Queue[Exception | None] = field(default_factory=asyncio.Queue)
    starts_links: bool = True

    async def start(self, **options: Any) -> Address:
        await self.server.start("127.0.0.1", 0, COORDINATOR, SECRET, self.on_link, self.on_refused, **options)
        return Address("127.0.0.1", self.server.port)

    def on_link(self, link: ControlLink) -> None:
        self.links.append(link)
        if self.starts_links:
            self.start_link(link)

    def start_link(self, link: ControlLink) -> None:
        def answer(message: ControlMessage, request: int) -> None:
            self.messages.put_nowait((message, request))
            if isinstance(message, ShowJob):
                link.send(Failure(code=UnknownName.code, text=f"there is no job {message.job}"), request)
            elif request:
                link.send(Accepted(job=f"j{request}"), request)

        link.start(answer, self.ends.put_nowait)

    def on_refused(self, reason: str, text: str, remote: str) -> None:
        self.refusals.put_nowait((reason, text, remote))


class Stranger:
    """A peer that can send anything at all."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def at(cls, address: Address) -> Stranger:
        return cls(*await asyncio.open_connection(address.host, address.port))

    async def prove(self, and_then: bytes = b"") -> None:
        """Complete a good handshake; ``and_then`` follows the proof in the same write."""
        handshake = Handshake(WORKER, SECRET, os.urandom(32), dialer=True)
        self.writer.write(handshake.start())
        self.writer.write(handshake.receive(await self.reader.read(4096)) + and_then)
        while handshake.peer is None:
            handshake.receive(await self.reader.read(4096))

    async def closed_by_peer(self) -> bytes:
        """What the peer sent until it closed."""
        received = b""
        try:
            while data := await self.reader.read(65_536):
                received += data
        except ConnectionError:
            pass  # closed with bytes unread: a reset, which is an end as well
        self.close()
        return received

    def close(self) -> None:
        self.writer.close()


def collected(size: int) -> Collected:
    return Collected(term=1, job="j1", operator=0, index=0, attempt=1, rows=1, payload=bytes(size))


def test_messages_go_both_ways(run: Run) -> None:
    async def main() -> None:
        listener = Listener()
        link = await connect_control(await listener.start(), WORKER, SECRET, timeout=5)
        received: asyncio.Queue[tuple[ControlMessage, int]] = asyncio.Queue()
        ended: asyncio.Queue[Exception | None] = asyncio.Queue()
        link.start(lambda message, request: received.put_nowait((message, request)), ended.put_nowait)
        link.send(ListJobs(), 7)
        link.send(collected(3_000_000))
        assert await received.get() == (Accepted(job="j7"), 7)
        assert await listener.messages.get() == (ListJobs(), 7)
        assert await listener.messages.get() == (collected(3_000_000), 0)
        (other,) = listener.links
        other.send(CancelTasks(term=1, job="j1"))
        assert await received.get() == (CancelTasks(term=1, job="j1"), 0)
        assert (link.peer, other.peer) == (COORDINATOR, WORKER)
        assert (link.local, link.remote) == (other.remote, other.local)
        link.close()
        await link.wait_closed()
        await other.wait_closed()
        link.send(ListJobs())  # without effect
        assert await ended.get() is None
        assert await listener.ends.get() is None
        await listener.server.close()

    run(main())


def test_last_words_before_a_close_arrive(run: Run) -> None:
    async def main() -> None:
        listener = Listener()
        link = await connect_control(await listener.start(), WORKER, SECRET, timeout=5)
        link.start(lambda message, request: None, lambda error: None)
        for _ in range(20):
            link.send(collected(500_000))
        link.close()
        for _ in range(20):
            assert (await listener.messages.get())[0] == collected(500_000)
        assert await listener.ends.get() is None
        await listener.server.close()

    run(main())


def test_messages_that_come_before_start_wait_for_it(run: Run) -> None:
    async def main() -> None:
        listener = Listener(starts_links=False)
        stranger = await Stranger.at(await listener.start())
        await stranger.prove(and_then=encode_message(ListJobs(), 0) + encode_message(GetStatus(), 0)[:9])
        stranger.writer.write(encode_message(GetStatus(), 0)[9:])
        listener.start_link(listener.links[0])
        assert await listener.messages.get() == (ListJobs(), 0)
        assert await listener.messages.get() == (GetStatus(), 0)
        stranger.close()
        assert await listener.ends.get() is None
        await listener.server.close()

    run(main())


def test_link_lost_before_start_still_tells_its_end(run: Run) -> None:
    async def main() -> None:
        listener = Listener(starts_links=False)
        stranger = await Stranger.at(await listener.start())
        await stranger.prove(and_then=encode_message(ListJobs(), 1))
        (link,) = listener.links
        link.close()
        await link.wait_closed()
        listener.start_link(link)
        assert await listener.ends.get() is None
        assert listener.ends.empty()
        stranger.close()
        await listener.server.close()

    run(main())


@pytest.mark.parametrize(
    ("identity", "secret", "reason", "mend"),
    [
        (WORKER, b"another", "secret", "--secret-file"),
        (Identity(Role.WORKER, "red", 0, 0), SECRET, "cluster", "--cluster"),
        (CLIENT, SECRET, "peer", "clients dial another port"),
    ],
)
def test_refused_peers_learn_why_and_are_reported(
    run: Run, identity: Identity, secret: bytes, reason: str, mend: str
) -> None:
    def workers_only(peer: Identity) -> str | None:
        return None if peer.role is Role.WORKER else "clients dial another port"

    async def main() -> None:
        listener = Listener()
        address = await listener.start(authorize=workers_only)
        with pytest.raises(HandshakeRefused, match=mend) as caught:
            await connect_control(address, identity, secret, timeout=5)
        assert caught.value.reason == reason
        assert str(address) in str(caught.value)
        reported, _, remote = await listener.refusals.get()
        assert reported == reason
        assert remote.startswith("127.0.0.1:")
        with pytest.raises(HandshakeRefused, match=mend):
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
def test_garbage_instead_of_a_handshake(run: Run, garbage: bytes) -> None:
    async def main() -> None:
        listener = Listener()
        stranger = await Stranger.at(await listener.start())
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
def test_garbage_after_the_handshake_closes_that_link_alone(run: Run, garbage: bytes) -> None:
    async def main() -> None:
        listener = Listener()
        address = await listener.start()
        good = await connect_control(address, WORKER, SECRET, timeout=5)
        replies: asyncio.Queue[ControlMessage] = asyncio.Queue()
        good.start(lambda message, request: replies.put_nowait(message), lambda error: None)
        stranger = await Stranger.at(address)
        await stranger.prove()
        stranger.writer.write(encode_message(ListJobs(), 0) + garbage)
        assert isinstance(await listener.ends.get(), RemoteProtocolError)
        assert await stranger.closed_by_peer() == b""
        good.send(ListJobs(), 1)
        assert await replies.get() == Accepted(job="j1")
        await listener.server.close()

    run(main())


def test_handler_may_refuse_a_message(run: Run) -> None:
    async def main() -> None:
        listener = Listener(starts_links=False)
        stranger = await Stranger.at(await listener.start())
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


def test_silent_peer_is_turned_away(run: Run) -> None:
    async def main() -> None:
        listener = Listener()
        stranger = await Stranger.at(await listener.start(handshake_seconds=0.02))
        assert await stranger.closed_by_peer() == b""
        reason, text, _ = await listener.refusals.get()
        assert (reason, text) == ("timeout", "no handshake within 0.02 s")
        await listener.server.close()

    run(main())


def test_timer_of_a_proven_link_is_gone(run: Run) -> None:
    async def main() -> None:
        listener = Listener()
        address = await listener.start(handshake_seconds=0.05)
        link = await connect_control(address, WORKER, SECRET, timeout=5)
        replies: asyncio.Queue[ControlMessage] = asyncio.Queue()
        link.start(lambda message, request: replies.put_nowait(message), lambda error: None)
        stranger = await Stranger.at(address)
        assert await stranger.closed_by_peer() == b"", "the stranger, who came later, is out of time"
        link.send(ListJobs(), 1)
        assert await replies.get() == Accepted(job="j1")
        assert (await listener.refusals.get())[0] == "timeout"
        assert listener.refusals.empty()
        await listener.server.close()

    run(main())


def test_half_a_handshake_is_reported_and_a_mere_look_is_not(run: Run) -> None:
    async def main() -> None:
        listener = Listener()
        address = await listener.start()
        looker = await Stranger.at(address)
        looker.close()
        stranger = await Stranger.at(address)
        stranger.writer.write(b"\x00\x00")
        stranger.close()
        reason, text, _ = await listener.refusals.get()
        assert reason == "peer"
        assert "closed the connection during the handshake" in text
        assert listener.refusals.empty()
        await listener.server.close()

    run(main())


def test_number_of_unproven_connections_is_bounded(run: Run) -> None:
    async def main() -> None:
        listener = Listener()
        address = await listener.start(unproven_max=2)
        waiting = [await Stranger.at(address), await Stranger.at(address)]
        for stranger in waiting:  # an answer shows that the server has taken it up
            stranger.writer.write(Handshake(WORKER, SECRET, os.urandom(32), dialer=True).start())
            assert await stranger.reader.read(1)
        with pytest.raises(PeerLost, match="cannot connect to|closed the connection"):
            await connect_control(address, WORKER, SECRET, timeout=5)
        reason, text, _ = await listener.refusals.get()
        assert (reason, text) == ("limit", "2 connections wait for their handshake already")
        waiting[0].close()
        assert (await listener.refusals.get())[0] == "peer"
        link = await connect_control(address, WORKER, SECRET, timeout=5)
        link.close()
        waiting[1].close()
        await listener.server.close()

    run(main())


def test_peer_that_does_not_read_is_dropped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONTROL_UNSENT_BYTES_MAX", 1 << 20)

    async def main() -> None:
        listener = Listener()
        stranger = await Stranger.at(await listener.start())
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


def test_broken_connection_is_told_from_a_closed_one(run: Run) -> None:
    async def main() -> None:
        listener = Listener()
        stranger = await Stranger.at(await listener.start())
        await stranger.prove()
        sock = stranger.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00" + bytes(4))
        stranger.writer.transport.abort()
        error = await listener.ends.get()
        assert isinstance(error, PeerLost)
        assert "broke" in str(error)
        await listener.server.close()

    run(main())


def test_closing_the_server_closes_its_links_and_its_port(run: Run) -> None:
    async def main() -> None:
        listener = Listener()
        address = await listener.start()
        link = await connect_control(address, WORKER, SECRET, timeout=5)
        ended: asyncio.Queue[Exception | None] = asyncio.Queue()
        link.start(lambda message, request: None, ended.put_nowait)
        await listener.server.close()
        assert await ended.get() is None
        with pytest.raises(
            PeerLost, match=rf"cannot connect to {address}: Connection refused; .*--coordinator"
        ):
            await connect_control(address, WORKER, SECRET, timeout=5)
        with pytest.raises(PeerLost, match=f"cannot connect to {address}: Connection refused"):
            BlockingControlClient(address, CLIENT, SECRET, 5)

    run(main())


def test_taken_port_names_its_holder_and_the_flag(run: Run) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
            server = ControlServer()
            with pytest.raises(UsageError) as caught:
                await server.start("127.0.0.1", port, COORDINATOR, SECRET, print, print)
            assert f"port {port} on 127.0.0.1 is taken by" in str(caught.value)
            assert f"(pid {os.getpid()})" in str(caught.value)
            assert "--port" in str(caught.value)

    run(main())


def test_address_of_another_machine_cannot_be_listened_on(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:.*--host"):
            await ControlServer().start("192.0.2.1", 0, COORDINATOR, SECRET, print, print)

    run(main())


def test_listener_that_never_answers(run: Run) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = Address("127.0.0.1", silent.getsockname()[1])
            with pytest.raises(PeerLost, match=f"no answer from {address} within 0.02 s"):
                await connect_control(address, WORKER, SECRET, timeout=0.02)
            with pytest.raises(PeerLost, match="did not answer in time"):
                BlockingControlClient(address, CLIENT, SECRET, 0.02)

    run(main())


def test_blocking_client_asks_and_is_answered(run: Run) -> None:
    def ask(address: Address) -> None:
        with BlockingControlClient(address, CLIENT, SECRET, 5) as client:
            assert client.request(ListJobs()) == Accepted(job="j1")
            with pytest.raises(UnknownName, match="there is no job j9"):
                client.request(ShowJob(job="j9"))
            assert client.request(collected(5_000_000), timeout=5) == Accepted(job="j3")
        with pytest.raises(PeerLost):
            client.request(ListJobs())

    async def main() -> None:
        listener = Listener()
        await asyncio.to_thread(ask, await listener.start())
        assert listener.links[0].peer == CLIENT
        assert await listener.ends.get() is None
        await listener.server.close()

    run(main())


def test_blocking_client_skips_a_reply_that_came_too_late(run: Run) -> None:
    def ask(address: Address) -> None:
        with BlockingControlClient(address, CLIENT, SECRET, 5) as client:
            with pytest.raises(PeerLost, match="did not answer in time"):
                client.request(ListJobs(), timeout=0.02)
            assert client.request(GetStatus()) == Accepted(job="second")

    async def main() -> None:
        listener = Listener(starts_links=False)

        def on_link(link: ControlLink) -> None:
            def answer(message: ControlMessage, request: int) -> None:
                if request == 2:
                    link.send(Accepted(job="first"), 1)
                    link.send(Accepted(job="second"), 2)

            link.start(answer, lambda error: None)

        listener.on_link = on_link  # type: ignore[method-assign]
        await asyncio.to_thread(ask, await listener.start())
        await listener.server.close()

    run(main())


def test_blocking_client_notices_that_the_coordinator_went_away(run: Run) -> None:
    def ask(address: Address) -> ShuffleError:
        with BlockingControlClient(address, CLIENT, SECRET, 5) as client, pytest.raises(PeerLost) as caught:
            client.request(ListJobs())
        return caught.value

    async def main() -> None:
        listener = Listener(starts_links=False)
        listener.on_link = lambda link: link.close()  # type: ignore[method-assign]
        error = await asyncio.to_thread(ask, await listener.start())
        assert "the coordinator at 127.0.0.1:" in str(error)
        await listener.server.close()

    run(main())


def test_blocking_client_takes_no_garbage(run: Run) -> None:
    def ask(address: Address) -> None:
        with pytest.raises(RemoteProtocolError), BlockingControlClient(address, CLIENT, SECRET, 5) as client:
            client.request(ListJobs())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = Handshake(COORDINATOR, SECRET, os.urandom(32), dialer=False)
        while handshake.peer is None:
            writer.write(handshake.receive(await reader.read(4096)))
        writer.write(encode_frame(Ping(1)))
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        await asyncio.to_thread(ask, Address("127.0.0.1", server.sockets[0].getsockname()[1]))
        server.close()

    run(main())
