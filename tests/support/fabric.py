"""Two nodes and what joins them: a memory wire with a seed, or TCP on asyncio or uvloop, also with TLS.

A node has a partition to be read from and channels to read with.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import uvloop

from minishuffle.counters import ConnectionCounters, TaskCounters
from minishuffle.errors import PartitionNotFound, ShuffleError
from minishuffle.exchange.partition import ProducerAttachment, serve
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import Address, JobId, PartitionId
from minishuffle.protocol.channel import ConsumerChannel, FreeBuffer, Received
from minishuffle.protocol.connection import ConnectionEvent, PartitionRequested
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.tcp import DataEndpoint
from minishuffle.wire.frames import DataType, EventKind, PartitionRequest, Role
from minishuffle.wire.handshake import Identity
from support.certificates import credentials
from support.memory import MemoryWire

SEGMENT_BYTES = 4096
CHANNELS = 3
STEPS_MAX = 200_000
KINDS = ("memory-1", "memory-2", "memory-3", "asyncio", "uvloop", "asyncio-tls", "uvloop-tls")


class Link(Protocol):
    connection: Any
    peer: Identity

    def flush_soon(self) -> None: ...
    def close(self) -> None: ...
    def abort(self, error: ShuffleError) -> None: ...


class Reader:
    """The gate of one channel: takes whatever comes, consuming at once unless it is paused."""

    def __init__(self, node: Node, number: int) -> None:
        self.node = node
        self.number = number
        self.paused = False
        self.queue: deque[Received] = deque()
        self.data = bytearray()
        self.ended = False
        self.error: ShuffleError | None = None
        exclusive: list[FreeBuffer] = [node.segment(node.input), node.segment(node.input)]
        self.channel = ConsumerChannel(self, exclusive, SEGMENT_BYTES)

    def request_floating(self) -> FreeBuffer | None:
        return self.node.input.request()

    def wait_in_line(self, channel: ConsumerChannel) -> None:
        """Nobody else shares the pool that this channel would wait for."""

    def leave_line(self, channel: ConsumerChannel) -> None: ...

    def release_floating(self, buffer: FreeBuffer) -> None:
        assert isinstance(buffer, Segment)
        if self.channel.credit.waiting and self.channel.offer_floating(buffer):
            return
        buffer.recycle()

    def release_exclusive(self, buffer: FreeBuffer) -> None:
        assert isinstance(buffer, Segment)
        buffer.recycle()

    def consumed(self, buffer: Any) -> None:
        self.channel.consumed(buffer)

    def deliver(self, received: Received) -> None:
        self.queue.append(received)
        if not self.paused:
            self.drain()

    def fail(self, error: ShuffleError) -> None:
        self.error = error

    def drain(self) -> None:
        while self.queue:
            received = self.queue.popleft()
            if received.data_type == DataType.DATA:
                self.data += received.payload
            elif received.payload[0] == EventKind.END_OF_PARTITION:
                self.ended = True
            self.consumed(received)
        if self.node.link is not None:
            self.node.link.connection.announce_credit(self.channel)
            self.node.link.flush_soon()


class Node:
    """One process's half of a data connection; a handler for either transport."""

    def __init__(self, worker: int) -> None:
        self.identity = Identity(Role.WORKER, "conformance", worker, worker)
        self.counters = ConnectionCounters()
        self.pool = NetworkBufferPool(64, SEGMENT_BYTES)
        self.output = self.pool.create_pool("output", CHANNELS + 1, 24)
        self.input = self.pool.create_pool("input", 2 * CHANNELS + 1, 2 * CHANNELS + 8)
        self.partition = PipelinedPartition(
            PartitionId(JobId("j1"), 0, worker),
            range(CHANNELS),
            lambda: self.segment(self.output),
            self._notify,
            TaskCounters(),
        )
        self.readers: list[Reader] = []
        self.served: list[ProducerAttachment] = []
        """All that ever read from ``partition``."""
        self.link: Link | None = None
        self.down: ShuffleError | None = None
        self.refuse = False
        self.refusals: list[str] = []

    def segment(self, pool: Any) -> Segment:
        segment = pool.request()
        assert isinstance(segment, Segment)
        return segment

    def _notify(self, subpartition: PipelinedSubpartition) -> None:
        subpartition.attend()

    def read_all(self) -> None:
        self.readers = [Reader(self, number) for number in range(CHANNELS)]
        assert self.link is not None
        for reader in self.readers:
            request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), reader.number)
            self.link.connection.request_partition(reader.channel, request)
        self.link.flush_soon()

    def room(self) -> bool:
        return self.output.available and self.output.size - self.output.in_use >= 6

    def authorize(self, peer: Identity) -> str | None:
        return None

    def refused(self, reason: str, text: str, remote: str) -> None:
        self.refusals.append(reason)

    def link_up(self, link: Any) -> None:
        self.link = link

    def link_events(self, link: Any, events: list[ConnectionEvent]) -> None:
        for event in events:
            if not isinstance(event, PartitionRequested):
                continue
            channel = event.request.channel
            if self.refuse:
                link.connection.refuse(channel, PartitionNotFound("not here"))
            else:
                subpartition = self.partition.subpartitions[event.request.subpartition]
                self.served.append(serve(link, event.request, subpartition))
            link.flush_soon()

    def link_down(self, link: Any, error: ShuffleError) -> None:
        self.link = None
        self.down = error


class Fabric:
    """Two nodes and what joins them; ``until`` drives it, bounded."""

    def __init__(self) -> None:
        self.nodes = (Node(1), Node(2))

    async def connect(self) -> None: ...

    async def until(self, condition: Callable[[], bool]) -> None: ...

    async def close(self) -> None: ...


class MemoryFabric(Fabric):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    async def connect(self) -> None:
        identities = (self.nodes[0].identity, self.nodes[1].identity)
        counters = (self.nodes[0].counters, self.nodes[1].counters)
        self.wire = MemoryWire(random.Random(self.seed), self.nodes, identities, counters)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(STEPS_MAX):
            if condition():
                return
            self.wire.step(0.0)
        raise AssertionError(f"not reached in {STEPS_MAX} steps with seed {self.seed}")

    async def close(self) -> None:
        self.wire.cut()


class TcpFabric(Fabric):
    def __init__(self, tls: Credentials | None) -> None:
        super().__init__()
        self.tls = tls

    async def connect(self) -> None:
        self.endpoints = [
            DataEndpoint(node, node.identity, b"secret", node.counters, ping_interval=60.0, tls=self.tls)
            for node in self.nodes
        ]
        port = await self.endpoints[1].listen("127.0.0.1")
        await self.endpoints[0].dial(Address("127.0.0.1", port), 2, 2)
        await self.until(lambda: self.nodes[1].link is not None)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0)

    async def close(self) -> None:
        for endpoint in self.endpoints:
            await endpoint.close()
        await self.until(lambda: not any(endpoint.links for endpoint in self.endpoints))


Scenario = Callable[[Fabric], Awaitable[None]]
Runner = Callable[[Scenario], None]


def run_on(kind: str, scenario: Scenario) -> None:
    """A scenario on a connected fabric of that kind."""

    async def main() -> None:
        if kind.startswith("memory"):
            fabric: Fabric = MemoryFabric(int(kind[-1]))
        else:
            fabric = TcpFabric(credentials() if kind.endswith("tls") else None)
        await fabric.connect()
        try:
            await scenario(fabric)
        finally:
            await fabric.close()

    if kind.startswith("uvloop"):
        uvloop.run(main())
    else:
        asyncio.run(main())
