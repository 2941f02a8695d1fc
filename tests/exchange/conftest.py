"""Elements as bytes, and gates whose two halves are driven by one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from minishuffle.counters import ConnectionCounters, TaskCounters
from minishuffle.exchange.elements import ELEMENT_HEADER, AssemblyBudget, Batch, decode, encode
from minishuffle.exchange.gate import Element, InputChannel, InputGate, LocalInputChannel, RemoteInputChannel
from minishuffle.exchange.partition import ResultPartition, Subpartition
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import Outgoing
from minishuffle.protocol.connection import Connection, PartitionRequested
from minishuffle.wire.frames import BufferFlags, BufferHeader, DataType, PartitionRequest

SEGMENT_BYTES = 256


class Setup:
    """A gate over its own network memory. ``direct``: consumed buffers reach the loop at once."""

    def __init__(
        self, remote: int = 0, exclusive: int = 2, floating: int = 4, segments: int = 512, direct: bool = True
    ) -> None:
        self.network = NetworkBufferPool(segments, SEGMENT_BYTES)
        reserved = remote * exclusive
        self.pool = self.network.create_pool("gate", reserved + 1, reserved + floating)
        self.counters = TaskCounters()
        self.wakes = 0
        self.direct = direct
        self.returned: list[tuple[InputChannel, Any]] = []
        self.handed_over: list[Outgoing] = []
        budget = AssemblyBudget(1 << 20)
        self.gate = InputGate(
            0, 0, self.pool, SEGMENT_BYTES, self._wake, self._give_back, budget, None, self.counters
        )
        self.remotes = [RemoteInputChannel(self.gate, number, exclusive) for number in range(remote)]
        for channel in self.remotes:
            self.gate.add(channel)

    def _wake(self) -> None:
        self.wakes += 1

    def _give_back(self, channel: InputChannel, buffer: Any) -> None:
        self.returned.append((channel, buffer))
        if self.direct:
            channel.consumed(buffer)

    def partition(self, producer: int, segments: int = 16) -> ResultPartition:
        """A producer in this process, with a pool of its own and one consumer."""
        pool = self.network.create_pool(f"output {producer}", segments, segments)

        def acquire() -> Segment:
            segment = pool.request()
            assert segment is not None
            return segment

        partition_id = PartitionId(JobId("j1"), 0, producer)
        return ResultPartition(partition_id, 0, 1, acquire, Subpartition.attend, TaskCounters())

    def local(self, partition: ResultPartition, credit: int) -> LocalInputChannel:
        channel = LocalInputChannel(self.gate, partition.id.producer, credit, self.handed_over.append)
        self.gate.add(channel)
        channel.connect(partition.subpartitions[0].attach(1, channel.pump))
        return channel

    def rows(self) -> list[Any]:
        """Every row that the gate has now, polled to its end."""
        found: list[Any] = []
        while (item := self.gate.poll()) is not None:
            found += self.rows_of(item)
        return found

    def queues(self) -> list[int]:
        return [len(channel.queue) for channel in self.gate.channels]

    def wire(self, partitions: list[ResultPartition]) -> Wire:
        """Joins the remote channels to partitions of another process."""
        return Wire(self, partitions)

    # --- elements and buffers ---------------------------------------------------------------------

    @staticmethod
    def element(rows: Sequence[Any]) -> bytes:
        """One whole element as an exchange carries it."""
        return b"".join(bytes(part) for part in encode(list(rows))[1])

    @staticmethod
    def element_of(size: int, mark: str = "x") -> bytes:
        """One element, of one row, with exactly ``size`` bytes."""
        for length in range(size):
            found = Setup.element([mark.ljust(length)])
            if len(found) == size:
                return found
        raise AssertionError(f"no element has {size} bytes")

    @staticmethod
    def rows_of(item: Element) -> list[Any]:
        rows = decode(item.format, item.rows, item.payload)
        assert isinstance(rows, list)
        return rows

    @staticmethod
    def arrive(channel: RemoteInputChannel, data: bytes, backlog: int = 0) -> None:
        """A data buffer of the network; its producer has heard of all credit."""
        consumer = channel.consumer
        if consumer.credit.received == consumer.credit.granted:
            consumer.credit.take_unannounced()
        flags = BufferFlags.STARTS | BufferFlags.ENDS
        header = BufferHeader(consumer.id, consumer.expected, backlog, DataType.DATA, flags, 0, 1, len(data))
        consumer.begin(header)[:] = data
        consumer.end()

    @staticmethod
    def arrive_event(channel: RemoteInputChannel, kind: int) -> None:
        consumer = channel.consumer
        header = BufferHeader(consumer.id, consumer.expected, 0, DataType.EVENT, BufferFlags.NONE, 0, 0, 1)
        consumer.begin(header)[0] = kind
        consumer.end()


class Wire:
    """Joins remote channels to partitions of another process by the bytes of two connections."""

    def __init__(self, setup: Setup, partitions: list[ResultPartition]) -> None:
        self.partitions = partitions
        self.producer = Connection(dialer=True, counters=ConnectionCounters(), ping_interval=5.0, now=0.0)
        self.consumer = Connection(dialer=False, counters=ConnectionCounters(), ping_interval=5.0, now=0.0)
        self.pokes = 0
        for channel in setup.remotes:
            channel.connect(self.consumer, self._poke)
            request = PartitionRequest(0, "j1", 0, channel.producer, 0, 1, 1, 1, 0)
            self.consumer.request_partition(channel.consumer, request)
        self.settle()

    def _poke(self) -> None:
        self.pokes += 1

    def settle(self) -> None:
        """Exchange frames until neither side has any."""
        for _ in range(1000):
            if not (self.producer.wants_to_send or self.consumer.wants_to_send):
                return
            self._move(self.consumer, self.producer)
            self._move(self.producer, self.consumer)
        raise AssertionError("still frames to send after 1000 rounds")

    def _move(self, sender: Connection, receiver: Connection) -> None:
        chunks, pieces = sender.data_to_send(16)
        data = b"".join(chunks)
        for piece in pieces:
            piece.released()
        if data:
            receiver.receive(data, 0.0)
        for event in receiver.events():
            assert isinstance(event, PartitionRequested)
            subpartition = self.partitions[event.request.producer].subpartitions[0]
            channel = event.request.channel
            view = subpartition.attach(1, lambda channel=channel: self.producer.available(channel))  # type: ignore[misc]
            self.producer.attach(channel, view)
        sender.validate()
        receiver.validate()


@pytest.fixture(scope="session")
def written() -> Callable[[Batch], bytes]:
    """Gives a whole element, its header checked."""
    return written_element


def written_element(batch: Batch) -> bytes:
    rows, parts = encode(batch)
    data = b"".join(parts)
    size, header_rows, _ = ELEMENT_HEADER.unpack_from(data)
    assert (size, header_rows) == (len(data) - ELEMENT_HEADER.size, rows)
    assert all(memoryview(part).format == "B" for part in parts)
    return data


@pytest.fixture
def make_setup() -> type[Setup]:
    """Makes gates; the arguments are ``Setup``'s."""
    return Setup
