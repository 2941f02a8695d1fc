"""The TCP shell against peers that do not behave; what goes well is the conformance suite's."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from minishuffle import limits
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import PartitionNotFound, PeerLost, RemoteProtocolError, ShuffleError
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.ids import Address
from minishuffle.protocol.channel import ConsumerChannel, FreeBuffer, Received
from minishuffle.protocol.connection import ConnectionEvent, PartitionRequested, PeerSilent
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.codec import encode_frame
from minishuffle.wire.frames import (
    FRAME_HEADER,
    AddCredit,
    FrameType,
    Hello,
    PartitionRequest,
    Ping,
    Role,
)
from minishuffle.wire.handshake import Handshake, HandshakeRefused, Identity

SECRET = b"the cluster's"
SECONDS_MAX = 20.0
HOST = "127.0.0.1"
REQUEST = PartitionRequest(1, "j1", 0, 0, 0, 1, 1, 1, 2)

Scenario = Callable[["Site"], Awaitable[None]]
Run = Callable[..., None]

MALFORMED = {
    "garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "oversized": FRAME_HEADER.pack(limits.DATA_FRAME_BYTES_MAX + 1, FrameType.PING, 0) + bytes(16),
    "unknown": FRAME_HEADER.pack(5, 99, 0),
    "too short": FRAME_HEADER.pack(0, FrameType.PING, 0),
}
"""What is no frame at any time. The garbage's first four bytes are a length, too."""


def worker(number: int, epoch: int | None = None) -> Identity:
    return Identity(Role.WORKER, "test", number, number if epoch is None else epoch)


def beyond_handshake(frames: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in frames.items() if name not in ("hello", "welcome", "reject")}


class Handler:
    """Refuses every partition, and remembers everything."""

    def __init__(self) -> None:
        self.up: list[DataLink] = []
        self.down: list[ShuffleError] = []
        self.refusals: list[tuple[str, str, str]] = []
        self.events: list[ConnectionEvent] = []
        self.unwelcome: str | None = None

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _, _ in self.refusals]

    def authorize(self, peer: Identity) -> str | None:
        return self.unwelcome

    def refused(self, reason: str, text: str, remote: str) -> None:
        self.refusals.append((reason, text, remote))

    def link_up(self, link: DataLink) -> None:
        self.up.append(link)

    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, PartitionRequested):
                link.connection.refuse(event.request.channel, PartitionNotFound("not here"))
                link.flush_soon()

    def link_down(self, link: DataLink, error: ShuffleError) -> None:
        self.down.append(error)


class Reader:
    """A gate without floating buffers, of one channel, which waits for its failure."""

    def __init__(self) -> None:
        self.error: ShuffleError | None = None
        pool = NetworkBufferPool(1, 256).create_pool("reader", 1, 1)
        segment = pool.request()
        assert segment is not None
        self.channel = ConsumerChannel(self, [segment], 256)

    def request_floating(self) -> FreeBuffer | None:
        return None

    def wait_in_line(self, channel: ConsumerChannel) -> None: ...

    def leave_line(self, channel: ConsumerChannel) -> None: ...

    def release_floating(self, buffer: FreeBuffer) -> None: ...

    def release_exclusive(self, buffer: FreeBuffer) -> None:
        assert isinstance(buffer, Segment)
        buffer.recycle()

    def deliver(self, received: Received) -> None: ...

    def fail(self, error: ShuffleError) -> None:
        self.error = error


class Peer:
    """A socket that says whatever the test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def prove(self, identity: Identity, secret: bytes = SECRET) -> None:
        """Complete the handshake as the dialer."""
        handshake = Handshake(identity, secret, os.urandom(32), dialer=True, target=2)
        self.send(handshake.start())
        while handshake.peer is None:
            self.send(handshake.receive(await self.reader.read(4096)))

    async def until_closed(self) -> bytes:
        """What the other side still says before it closes."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionResetError:
            assert self.writer.is_closing()


class Site:
    """Worker 2 listens, worker 1 dials it; ``peer`` opens sockets of the test's own."""

    def __init__(self) -> None:
        self.handler, self.counters = Handler(), ConnectionCounters()
        self.dialing = Handler()
        self.port = 0
        self.endpoints: list[DataEndpoint] = []
        self.peers: list[Peer] = []

    @property
    def address(self) -> Address:
        return Address(HOST, self.port)

    async def listen(self, handshake_seconds: float = SECONDS_MAX) -> DataEndpoint:
        endpoint = self.endpoint(worker(2), self.handler, self.counters, handshake_seconds)
        self.port = await endpoint.listen(HOST)
        return endpoint

    def endpoint(
        self,
        identity: Identity,
        handler: Handler,
        counters: ConnectionCounters | None = None,
        handshake_seconds: float = SECONDS_MAX,
        secret: bytes = SECRET,
    ) -> DataEndpoint:
        counters = counters or ConnectionCounters()
        endpoint = DataEndpoint(handler, identity, secret, counters, 60.0, handshake_seconds)
        self.endpoints.append(endpoint)
        return endpoint

    async def dial(self, secret: bytes = SECRET, target: int = 2, epoch: int | None = 2) -> DataLink:
        endpoint = self.endpoint(worker(1), self.dialing, secret=secret)
        return await endpoint.dial(self.address, target, epoch)

    async def peer(self) -> Peer:
        peer = Peer(*await asyncio.open_connection(HOST, self.port))
        self.peers.append(peer)
        return peer

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    async def works(self, link: DataLink) -> None:
        """A partition is asked for, and refused, over that link."""
        reader = Reader()
        link.connection.request_partition(reader.channel, REQUEST)
        link.flush_soon()
        await self.until(lambda: reader.error is not None)
        assert isinstance(reader.error, PartitionNotFound)

    async def close(self) -> None:
        for endpoint in self.endpoints:
            await endpoint.close()
        for peer in self.peers:
            await peer.close()
        await self.until(lambda: not any(endpoint.links for endpoint in self.endpoints))


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a scenario against a site that listens, on either loop, and bounded."""

    def run_scenario(scenario: Scenario, **options: Any) -> None:
        async def bounded() -> None:
            site = Site()
            async with asyncio.timeout(SECONDS_MAX):
                await site.listen(**options)
                try:
                    await scenario(site)
                finally:
                    await site.close()

        request.param(bounded())

    return run_scenario


# --- the secret -----------------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused_on_both_sides(run: Run) -> None:
    async def scenario(site: Site) -> None:
        link = await site.dial()
        with pytest.raises(HandshakeRefused, match="do not have the same secret") as refused:
            await site.dial(secret=b"another")
        assert refused.value.reason == "secret"
        await site.until(lambda: site.handler.refusals)
        assert site.handler.reasons == site.dialing.reasons == ["secret"]
        assert len(site.handler.up) == 1
        assert site.handler.down == []
        await site.works(link)

    run(scenario)


def test_nothing_behind_an_unproved_hello_is_read(run: Run) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        hello = Hello(Role.WORKER, "test", 1, 1, 2, bytes(32))
        peer.send(encode_frame(hello))
        await peer.reader.readexactly(20)
        unproved = encode_frame(replace(hello, proof=bytes(32)))
        peer.send(unproved + encode_frame(REQUEST) + encode_frame(Ping(1)))
        await peer.until_closed()
        assert site.handler.reasons == ["secret"]
        assert (site.handler.up, site.handler.events) == ([], [])
        assert site.counters.frames_in == {"hello": 2}

    run(scenario)


@pytest.mark.parametrize("frame", [REQUEST, Ping(1), AddCredit(1, 1)], ids=lambda frame: type(frame).__name__)
def test_no_other_frame_is_read_before_hello(run: Run, frame: Any) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        peer.send(encode_frame(frame))
        await peer.until_closed()
        assert site.handler.reasons == ["malformed"]
        assert (site.handler.up, site.handler.events) == ([], [])
        assert beyond_handshake(site.counters.frames_in) == {}

    run(scenario)


def test_a_peer_that_is_proved_and_not_welcome_learns_why(run: Run) -> None:
    async def scenario(site: Site) -> None:
        site.handler.unwelcome = "worker 1 is connected already"
        with pytest.raises(HandshakeRefused, match="worker 1 is connected already") as refused:
            await site.dial()
        assert refused.value.reason == "peer"
        assert site.handler.reasons == ["peer"]
        assert site.handler.up == []

    run(scenario)


@pytest.mark.parametrize(
    ("target", "epoch", "message"),
    [(2, 1, "epoch 1 was dialed, epoch 2 answers"), (3, None, "worker 3 was dialed, but worker 2 answers")],
)
def test_another_worker_than_the_one_that_was_dialed_is_refused(
    run: Run, target: int, epoch: int | None, message: str
) -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(HandshakeRefused, match=message):
            await site.dial(target=target, epoch=epoch)
        assert site.dialing.reasons == ["peer"]
        assert site.dialing.up == []

    run(scenario)


# --- malformed streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_before_the_handshake_close_that_connection_alone(run: Run, data: bytes) -> None:
    async def scenario(site: Site) -> None:
        link = await site.dial()
        peer = await site.peer()
        peer.send(data)
        await peer.until_closed()
        (refusal,) = site.handler.refusals
        assert (refusal[0], refusal[2]) == (
            "malformed",
            f"{HOST}:{peer.writer.get_extra_info('sockname')[1]}",
        )
        await site.works(link)

    run(scenario)


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_after_the_handshake_close_that_connection_alone(run: Run, data: bytes) -> None:
    async def scenario(site: Site) -> None:
        link = await site.dial()
        peer = await site.peer()
        await peer.prove(worker(7))
        await site.until(lambda: len(site.handler.up) == 2)
        peer.send(encode_frame(REQUEST) + data)
        await peer.until_closed()
        await site.until(lambda: site.handler.down)
        (error,) = site.handler.down
        assert isinstance(error, RemoteProtocolError)
        assert site.handler.reasons == ["malformed"]
        await site.works(link)

    run(scenario)


def test_malformed_bytes_right_behind_the_last_hello_are_caught(run: Run) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        handshake = Handshake(worker(7), SECRET, bytes(32), dialer=True, target=2)
        peer.send(handshake.start())
        proof = b""
        while not proof:
            proof = handshake.receive(await peer.reader.read(4096))
        peer.send(proof + encode_frame(Ping(3)) + MALFORMED["unknown"])
        await peer.until_closed()
        await site.until(lambda: site.handler.down)
        assert isinstance(site.handler.down[0], RemoteProtocolError)
        assert site.counters.frames_in == {"hello": 2, "ping": 1}

    run(scenario)


@pytest.mark.parametrize("proved", [False, True], ids=["before", "after"])
def test_a_truncated_frame_closes_that_connection_alone(run: Run, proved: bool) -> None:
    async def scenario(site: Site) -> None:
        link = await site.dial()
        peer = await site.peer()
        if proved:
            await peer.prove(worker(7))
            await site.until(lambda: len(site.handler.up) == 2)
            peer.send(encode_frame(REQUEST)[:-3])
        else:
            peer.send(encode_frame(Hello(Role.WORKER, "test", 7, 7, 2, bytes(32)))[:-3])
        peer.writer.write_eof()
        await peer.until_closed()
        await site.until(lambda: not site.endpoints[0]._unproven and len(site.endpoints[0].links) == 1)
        assert [type(error) for error in site.handler.down] == ([PeerLost] if proved else [])
        assert site.handler.events == []
        await site.works(link)

    run(scenario)


def test_a_frame_may_come_byte_by_byte(run: Run) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        await peer.prove(worker(7))
        for byte in encode_frame(replace(REQUEST, channel=0x8000_0001)):
            peer.send(bytes([byte]))
            await peer.writer.drain()
        await site.until(lambda: site.handler.events)
        answer = await peer.reader.readexactly(FRAME_HEADER.size)
        assert FRAME_HEADER.unpack(answer)[1:] == (FrameType.ERROR, 0x8000_0001)

    run(scenario)


# --- silence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", encode_frame(Hello(Role.WORKER, "test", 7, 7, 2, bytes(32)))[:20]])
def test_a_peer_that_does_not_finish_its_handshake_is_sent_away(run: Run, said: bytes) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        peer.send(said)
        assert await peer.until_closed() == b""
        assert site.handler.refusals[0][:2] == ("timeout", "no handshake within 0.05 s")
        assert len(site.handler.refusals) == 1

    run(scenario, handshake_seconds=0.05)


def test_dialing_somebody_who_says_nothing_ends_in_time(run: Run) -> None:
    async def scenario(site: Site) -> None:
        endpoint = site.endpoint(worker(1), site.dialing, handshake_seconds=0.05)
        with socket.create_server((HOST, 0)) as silent:
            port = silent.getsockname()[1]
            with pytest.raises(PeerLost, match="no handshake within 0.05 s|cannot be reached"):
                await endpoint.dial(Address(HOST, port), 2, 2)
            await site.until(lambda: not endpoint._unproven)

    run(scenario)


def test_dialing_where_nobody_listens_names_worker_and_address(run: Run) -> None:
    async def scenario(site: Site) -> None:
        with socket.create_server((HOST, 0)) as taken:
            port = taken.getsockname()[1]
        endpoint = site.endpoint(worker(1), site.dialing)
        with pytest.raises(
            PeerLost, match=f"worker 2 cannot be reached: .*{HOST}:{port}: Connection refused"
        ):
            await endpoint.dial(Address(HOST, port), 2, 2)

    run(scenario)


def test_dialing_somebody_who_hangs_up_is_told(run: Run) -> None:
    async def scenario(site: Site) -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(hang_up, HOST, 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            endpoint = site.endpoint(worker(1), site.dialing)
            with pytest.raises(PeerLost, match=f"{HOST}:{port} closed the connection during the handshake"):
                await endpoint.dial(Address(HOST, port), 2, 2)

    run(scenario)


def test_an_established_peer_that_is_silent_is_pinged_and_then_reported(run: Run) -> None:
    async def scenario(site: Site) -> None:
        peer = await site.peer()
        await peer.prove(worker(7))
        await site.until(lambda: site.handler.up)
        endpoint, now = site.endpoints[0], asyncio.get_running_loop().time()
        endpoint.tick(now + 61.0)
        ping = await peer.reader.readexactly(len(encode_frame(Ping(1))))
        assert ping == encode_frame(Ping(1))
        assert site.handler.events == []
        endpoint.tick(now + 61.0 + 181.0)
        assert [type(event) for event in site.handler.events] == [PeerSilent]

    run(scenario)


def test_a_peer_that_answers_its_ping_is_not_reported(run: Run) -> None:
    async def scenario(site: Site) -> None:
        await site.dial()
        endpoint, now = site.endpoints[0], asyncio.get_running_loop().time()
        endpoint.tick(now + 61.0)
        await site.until(lambda: site.counters.frames_in.get("pong") == 1)
        endpoint.tick(now + 61.5)
        assert site.handler.events == []

    run(scenario)


# --- limits and ends ------------------------------------------------------------------------------------


def test_only_so_many_connections_may_wait_for_their_handshake(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNAUTHENTICATED_CONNECTIONS_MAX", 3)

    async def scenario(site: Site) -> None:
        waiting = [await site.peer() for _ in range(3)]
        await site.until(lambda: len(site.endpoints[0]._unproven) == 3)
        fourth = await site.peer()
        assert await fourth.until_closed() == b""
        assert site.handler.reasons == ["limit"]
        await waiting[0].close()
        await site.until(lambda: len(site.endpoints[0]._unproven) == 2)
        await waiting[1].prove(worker(7))
        await site.works(await site.dial())
        assert len(site.handler.up) == 2
        assert site.handler.reasons == ["limit"]

    run(scenario)


def test_closing_an_endpoint_tells_its_peers_and_stops_listening(run: Run) -> None:
    async def scenario(site: Site) -> None:
        await site.dial()
        silent = await site.peer()
        await site.until(lambda: len(site.endpoints[0]._unproven) == 1)
        await site.endpoints[0].close()
        assert await silent.until_closed() == b""
        await site.until(lambda: site.dialing.down)
        assert "worker 2 closed the connection" in str(site.dialing.down[0])
        assert "closed on this side" in str(site.handler.down[0])
        endpoint = site.endpoint(worker(1), site.dialing)
        with pytest.raises(PeerLost, match="cannot be reached"):
            await endpoint.dial(site.address, 2, 2)

    run(scenario)


def test_both_ends_count_the_same_bytes(run: Run) -> None:
    async def scenario(site: Site) -> None:
        link = await site.dial()
        await site.works(link)
        dialing = site.endpoints[1].counters
        await site.until(lambda: site.counters.bytes_in == dialing.bytes_out)
        await site.until(lambda: site.counters.bytes_out == dialing.bytes_in)
        assert site.counters.frames_in == dialing.frames_out == {"hello": 2, "partition_request": 1}
        assert site.counters.frames_out == dialing.frames_in == {"hello": 1, "welcome": 1, "error": 1}

    run(scenario)
