"""Elements as bytes, and gates whose two halves are driven by one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.channels import InputChannel
from minishuffle.exchange.elements import (
    ELEMENT_HEADER,
    AssemblyBudget,
    decode,
    encode,
    read_header,
)
from minishuffle.exchange.gate import Element, InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.partition import ResultPartition, serve
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import Outgoing
from minishuffle.protocol.connection import Connection, PartitionRequested
from minishuffle.wire.frames import BufferFlags, DataType, PartitionRequest
from support.batches import as_batch
from support.frames import buffer_header
from support.links import BareLink, consumer_of

SEGMENT_BYTES = 256


class Setup:
    """A gate over its own network memory.

    Args:
        direct: consumed buffers reach the loop at once.
        borrowed: segments that another pool has out when the gate's begins; they are ``borrowed``.
    """

    def __init__(
        self,
        remote: int = 0,
        exclusive: int = 2,
        floating: int = 4,
        segments: int = 512,
        direct: bool = True,
        borrowed: int = 0,
        version: int = 0,
        **options: Any,
    ) -> None:
        self.network = NetworkBufferPool(segments, SEGMENT_BYTES)
        self.borrowed: list[Segment] = []
        if borrowed:
            other = self.network.create_pool("other", 1, segments)
            while len(self.borrowed) < borrowed and (segment := other.request()) is not None:
                self.borrowed.append(segment)
        reserved = remote * exclusive
        self.pool = self.network.create_pool("gate", reserved + 1, reserved + floating)
        self.counters = TaskCounters()
        self.wakes = 0
        self.direct = direct
        self.returned: list[Any] = []
        self.handed_over: list[Outgoing] = []
        self.gate = InputGate(
            0,
            0,
            GateBuffers(self.pool, SEGMENT_BYTES, exclusive, floating),
            wake=self._wake,
            give_back=self._give_back,
            budget=AssemblyBudget(1 << 20),
            counters=self.counters,
            **options,
        )
        self.link = BareLink()
        self.remotes = [self.remote(number, version) for number in range(remote)]

    def _wake(self) -> None:
        self.wakes += 1

    def _give_back(self, buffer: Any) -> None:
        self.returned.append(buffer)
        if self.direct:
            buffer.attachment.consumed(buffer)

    def remote(self, producer: int, version: int = 0) -> InputChannel:
        """A channel whose producer is behind ``link``."""
        channel = self.gate.add_channel(producer)
        self.request(channel, version=version)
        return channel

    def request(self, channel: InputChannel, generation: int = 1, version: int = 0) -> None:
        """Attach the channel to ``link``."""
        partition = PartitionId(JobId("j1"), 0, channel.producer)
        request = PartitionRequest(partition, 0, generation=generation, version=version)
        channel.attach_remote(self.link, request)

    def partition(self, producer: int, segments: int = 16) -> PipelinedPartition:
        """A producer in this process, with a pool of its own and one consumer."""
        pool = self.network.create_pool(f"output {producer}", segments, segments)

        def acquire() -> Segment:
            segment = pool.request()
            assert segment is not None
            return segment

        partition_id = PartitionId(JobId("j1"), 0, producer)
        return PipelinedPartition(
            partition_id, range(1), acquire, PipelinedSubpartition.attend, TaskCounters()
        )

    def local(self, partition: PipelinedPartition) -> InputChannel:
        """A channel whose producer is in this process."""
        channel = self.gate.add_channel(partition.id.producer)
        channel.attach_local(partition.subpartitions[0], 1, self.handed_over.append)
        return channel

    def rows(self) -> list[Any]:
        """Every row that the gate has now, polled to its end."""
        found: list[Any] = []
        while (item := self.gate.poll()) is not None:
            found += self.rows_of(item)
        return found

    def queues(self) -> list[int]:
        return [len(channel.queue) for channel in self.gate.channels]

    def waiting(self) -> list[InputChannel]:
        """Channels that wait for a floating buffer, in turn."""
        return [attachment.channel for attachment in self.gate.buffers.line]

    def wire(self, partitions: Sequence[ResultPartition]) -> Wire:
        """Joins the remote channels to partitions of another process."""
        return Wire(self, partitions)

    # --- elements and buffers ---------------------------------------------------------------------

    @staticmethod
    def element(rows: Sequence[Any]) -> bytes:
        """One whole element as an exchange carries it."""
        return b"".join(bytes(part) for part in encode(Batch(list(rows)))[1])

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
        rows = decode(item.format, item.rows, item.payload).payload
        assert isinstance(rows, list)
        return rows

    @staticmethod
    def arrive(channel: InputChannel, data: bytes, backlog: int = 0, rows: int = 1, row: int = 0) -> None:
        """A data buffer of the network, whose producer has heard of all credit; ``row``: of its first row, if
        it is the first of an attachment."""
        consumer = consumer_of(channel)
        if consumer.credit.received == consumer.credit.granted:
            consumer.credit.take_unannounced()
        flags = BufferFlags.STARTS | BufferFlags.ENDS
        at, size = consumer.expected, len(data)
        header = buffer_header(
            consumer.id,
            at,
            DataType.DATA,
            size,
            backlog=backlog,
            flags=flags,
            rows=rows,
            row=max(row, consumer.row),
        )
        consumer.begin(header)[:] = data
        consumer.end()

    @staticmethod
    def arrive_event(channel: InputChannel, kind: int, row: int = 0) -> None:
        consumer = consumer_of(channel)
        header = buffer_header(consumer.id, consumer.expected, DataType.EVENT, 1, row=row)
        consumer.begin(header)[0] = kind
        consumer.end()


class Wire:
    """Joins remote channels to partitions of another process by the bytes of two connections."""

    def __init__(self, setup: Setup, partitions: Sequence[ResultPartition]) -> None:
        self.partitions = partitions
        self.link = setup.link
        self.consumer = setup.link.connection
        self.producing = BareLink(dialer=True)
        self.producer = self.producing.connection
        self.settle()

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
            if isinstance(event, PartitionRequested):
                serve(
                    self.producing,
                    event.request,
                    self.partitions[event.request.partition.producer].subpartitions[0],
                )
        sender.validate()
        receiver.validate()


@pytest.fixture(scope="session")
def written() -> Callable[[Any], bytes]:
    """Gives a whole element, its header checked."""
    return written_element


def written_element(batch: Any) -> bytes:
    rows, parts = encode(as_batch(batch))
    data = b"".join(parts)
    size, header_rows, _ = read_header(data)
    assert (size, header_rows) == (len(data) - ELEMENT_HEADER.size, rows)
    assert all(memoryview(part).format == "B" for part in parts)
    return data


@pytest.fixture
def make_setup() -> type[Setup]:
    """Makes gates; the arguments are ``Setup``'s."""
    return Setup
