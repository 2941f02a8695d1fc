"""One suite that every transport passes: the seeded memory wire, and TCP on asyncio and on uvloop.

A node has a partition to be read from and channels to read with; a fabric joins two nodes.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest
import uvloop

from minishuffle.counters import ConnectionCounters, TaskCounters
from minishuffle.errors import PartitionNotFound, PeerLost, ShuffleError
from minishuffle.exchange.partition import ResultPartition, Subpartition, serve
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.ids import Address, JobId, PartitionId
from minishuffle.protocol.channel import ConsumerChannel, FreeBuffer, Received
from minishuffle.protocol.connection import ConnectionEvent, PartitionRequested
from minishuffle.transport.tcp import DataEndpoint
from minishuffle.wire.frames import DataType, EventKind, PartitionRequest, Role
from minishuffle.wire.handshake import Identity
from support.memory import MemoryWire

SEGMENT_BYTES = 4096
CHANNELS = 3
STEPS_MAX = 200_000


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
            self.channel.consumed(received)
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
        self.partition = ResultPartition(
            PartitionId(JobId("j1"), 0, worker),
            0,
            CHANNELS,
            lambda: self.segment(self.output),
            self._notify,
            TaskCounters(),
        )
        self.readers: list[Reader] = []
        self.link: Link | None = None
        self.down: ShuffleError | None = None
        self.refuse = False
        self.refusals: list[str] = []

    def segment(self, pool: Any) -> Segment:
        segment = pool.request()
        assert isinstance(segment, Segment)
        return segment

    def _notify(self, subpartition: Subpartition) -> None:
        subpartition.attend()

    def read_all(self) -> None:
        self.readers = [Reader(self, number) for number in range(CHANNELS)]
        assert self.link is not None
        for reader in self.readers:
            request = PartitionRequest(0, "j1", 0, 0, reader.number, 1, 1, 1, 0)
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
                serve(link, event.request, self.partition.subpartitions[event.request.subpartition])
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
    async def connect(self) -> None:
        self.endpoints = [
            DataEndpoint(node, node.identity, b"secret", node.counters, ping_interval=60.0)
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


@pytest.fixture(params=["memory-1", "memory-2", "memory-3", "asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Runs a scenario on a connected fabric of that kind."""
    kind = request.param

    def runner(scenario: Scenario) -> None:
        async def main() -> None:
            fabric = MemoryFabric(int(kind[-1])) if kind.startswith("memory") else TcpFabric()
            await fabric.connect()
            try:
                await scenario(fabric)
            finally:
                await fabric.close()

        if kind == "uvloop":
            uvloop.run(main())
        else:
            asyncio.run(main())

    return runner


async def write_everything(fabric: Fabric, sizes: list[int], seed: int = 5) -> list[bytes]:
    """Node 0 writes elements of those sizes to its channels in turn; returns what each should read."""
    source, rng = fabric.nodes[0], random.Random(seed)
    expected = [bytearray() for _ in range(CHANNELS)]
    for number, size in enumerate(sizes):
        await fabric.until(source.room)
        data = rng.randbytes(size)
        source.partition.write(number % CHANNELS, 1, [data])
        expected[number % CHANNELS] += data
    source.partition.broadcast_event(EventKind.END_OF_PARTITION)
    return [bytes(data) for data in expected]


def test_everything_arrives_once_and_in_order(run: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        reader = fabric.nodes[1]
        reader.read_all()
        sizes = [1, 7, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES, 100] * 30
        expected = await write_everything(fabric, sizes)
        await fabric.until(lambda: all(r.ended for r in reader.readers))
        assert [bytes(r.data) for r in reader.readers] == expected
        await fabric.until(lambda: fabric.nodes[0].output.in_use == 0)
        sent, received = fabric.nodes[0].counters, reader.counters
        await fabric.until(lambda: sent.credits_received == received.credits_granted)
        assert sent.payload_bytes_out == received.payload_bytes_in == sum(sizes)

    run(scenario)


def test_a_paused_channel_stops_alone(run: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        source, reader = fabric.nodes
        reader.read_all()
        paused, free = reader.readers[0], reader.readers[1]
        paused.paused = True
        for _ in range(12):
            source.partition.write(0, 1, [bytes(SEGMENT_BYTES)])
        await fabric.until(lambda: len(paused.queue) == 2 + 8)
        for _ in range(40):
            await fabric.until(lambda: source.output.size - source.output.in_use >= 2)
            source.partition.write(1, 1, [bytes(SEGMENT_BYTES)])
        await fabric.until(lambda: len(free.data) == 40 * SEGMENT_BYTES)
        assert len(paused.queue) == 2 + 8
        paused.paused = False
        paused.drain()
        await fabric.until(lambda: len(paused.data) == 12 * SEGMENT_BYTES)
        assert paused.channel.credit.received == 12

    run(scenario)


def test_segments_are_not_reused_while_the_transport_holds_them(run: Runner) -> None:
    """Many small slices of few segments, overwritten as soon as they are lent again."""

    async def scenario(fabric: Fabric) -> None:
        source, reader = fabric.nodes
        reader.read_all()
        first = source.partition.subpartitions[0]
        await fabric.until(lambda: first.view is not None)
        expected = bytearray()
        for number in range(2000):
            await fabric.until(source.room)
            data = number.to_bytes(4, "big") * 25
            source.partition.write(0, 1, [data])
            expected += data
            if number % 3 == 0 and first.flush():
                first.attend()
        source.partition.broadcast_event(EventKind.END_OF_PARTITION)
        await fabric.until(lambda: reader.readers[0].ended)
        assert bytes(reader.readers[0].data) == bytes(expected)

    run(scenario)


def test_both_ends_may_consume_over_one_connection(run: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        for node in fabric.nodes:
            node.read_all()
        for node in fabric.nodes:
            node.partition.write(2, 1, [f"from {node.identity.worker}".encode()])
            node.partition.broadcast_event(EventKind.END_OF_PARTITION)
        await fabric.until(lambda: all(r.ended for node in fabric.nodes for r in node.readers))
        assert bytes(fabric.nodes[0].readers[2].data) == b"from 2"
        assert bytes(fabric.nodes[1].readers[2].data) == b"from 1"

    run(scenario)


def test_a_refused_partition_is_the_channels_matter(run: Runner) -> None:
    async def scenario(fabric: Fabric) -> None:
        fabric.nodes[0].refuse = True
        reader = fabric.nodes[1]
        reader.read_all()
        await fabric.until(lambda: all(r.error is not None for r in reader.readers))
        assert all(isinstance(r.error, PartitionNotFound) for r in reader.readers)
        assert reader.link is not None

    run(scenario)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("gently", [True, False], ids=["close", "abort"])
def test_the_end_of_a_connection_fails_its_channels_and_frees_every_segment(
    run: Runner, side: int, gently: bool
) -> None:
    async def scenario(fabric: Fabric) -> None:
        source, reader = fabric.nodes
        reader.read_all()
        reader.readers[0].paused = True
        for _ in range(12):
            source.partition.write(0, 1, [bytes(SEGMENT_BYTES)])
        await fabric.until(lambda: len(reader.readers[0].queue) > 0)
        link = fabric.nodes[side].link
        assert link is not None
        if gently:
            link.close()
        else:
            link.abort(PeerLost("enough"))
        await fabric.until(lambda: source.down is not None and reader.down is not None)
        assert all(isinstance(r.error, PeerLost) for r in reader.readers)
        reader.readers[0].drain()
        assert reader.input.in_use == 0
        for subpartition in source.partition.subpartitions:
            subpartition.discard()
        assert source.output.in_use == 0
        assert source.pool.free == source.pool.total

    run(scenario)
