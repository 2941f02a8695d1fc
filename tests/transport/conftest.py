"""Both ends of connections over loopback sockets: data endpoints, control servers, and strangers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from minishuffle.counters import ConnectionCounters
from minishuffle.errors import PartitionNotFound, ShuffleError, UnknownName
from minishuffle.ids import Address, JobId, PartitionId
from minishuffle.protocol.connection import ConnectionEvent, PartitionRequested
from minishuffle.transport.control import ControlLink, ControlServer
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.frames import PartitionRequest, Role
from minishuffle.wire.handshake import Handshake, Identity
from minishuffle.wire.messages import ControlMessage
from minishuffle.wire.requests import Accepted, Failure, ShowJob
from support.fabric import KINDS, Runner, run_on
from support.reader import Reader

HOST = "127.0.0.1"
SECONDS_MAX = 20.0
"""Bound of every test here."""
SECRET = b"the cluster's"
REQUEST = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, channel=1, initial_credit=2)
CONTROL_SECRET = b"a secret of the cluster"
COORDINATOR = Identity(Role.COORDINATOR, "blue", 0, 0)
WORKER = Identity(Role.WORKER, "blue", 0, 0)

Scenario = Callable[["Site"], Awaitable[None]]
RunSite = Callable[..., None]
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=KINDS)
def run_joined(request: pytest.FixtureRequest) -> Runner:
    """Runs a scenario on two nodes that are joined by a fabric of that kind."""
    return lambda scenario: run_on(request.param, scenario)


# --- data connections -----------------------------------------------------------------------------------


def worker_identity(number: int, epoch: int | None = None) -> Identity:
    return Identity(Role.WORKER, "test", number, number if epoch is None else epoch)


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

    def forget(self) -> None:
        for kept in (self.up, self.down, self.refusals, self.events):
            kept.clear()

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

    async def listen(
        self,
        handshake_seconds: float = SECONDS_MAX,
        ping_interval: float = 60.0,
        suspect_after: float | None = None,
        tls: Credentials | None = None,
    ) -> DataEndpoint:
        endpoint = self.endpoint(
            worker_identity(2),
            self.handler,
            self.counters,
            handshake_seconds,
            ping_interval=ping_interval,
            suspect_after=suspect_after,
            tls=tls,
        )
        self.port = await endpoint.listen(HOST)
        return endpoint

    def endpoint(
        self,
        identity: Identity,
        handler: Handler,
        counters: ConnectionCounters | None = None,
        handshake_seconds: float = SECONDS_MAX,
        secret: bytes = SECRET,
        ping_interval: float = 60.0,
        suspect_after: float | None = None,
        tls: Credentials | None = None,
    ) -> DataEndpoint:
        counters = counters or ConnectionCounters()
        endpoint = DataEndpoint(
            handler,
            identity,
            secret,
            counters,
            ping_interval,
            suspect_after=suspect_after,
            handshake_seconds=handshake_seconds,
            tls=tls,
        )
        self.endpoints.append(endpoint)
        return endpoint

    async def dial(
        self,
        secret: bytes = SECRET,
        target: int = 2,
        epoch: int | None = 2,
        tls: Credentials | None = None,
    ) -> DataLink:
        endpoint = self.endpoint(worker_identity(1), self.dialing, secret=secret, tls=tls)
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
def run_site(request: pytest.FixtureRequest) -> RunSite:
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


# --- control links --------------------------------------------------------------------------------------


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
        await self.server.start(
            "127.0.0.1",
            0,
            COORDINATOR,
            CONTROL_SECRET,
            on_link=self.on_link,
            refused=self.on_refused,
            **options,
        )
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

    async def prove(self, identity: Identity = WORKER, and_then: bytes = b"") -> None:
        """Complete a good handshake; ``and_then`` follows the proof in the same write."""
        handshake = Handshake(identity, CONTROL_SECRET, os.urandom(32), dialer=True)
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


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on one of the loops, for a bounded time."""

    def bounded(main: Coroutine[Any, Any, None]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(main, SECONDS_MAX))

    return bounded


@pytest.fixture
def make_listener() -> type[Listener]:
    """For servers of control links; those that start no links by themselves wait for the test to."""
    return Listener


@pytest.fixture
def make_stranger() -> Callable[[Address], Awaitable[Stranger]]:
    return Stranger.at
