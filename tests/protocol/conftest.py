"""Two connections joined by their bytes, with real partitions on one side and plain gates on the other."""

from __future__ import annotations

from collections import deque

import pytest

from minishuffle.counters import ConnectionCounters, TaskCounters
from minishuffle.errors import ShuffleError
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import LocalPool, NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import ConsumerChannel, FreeBuffer, Received
from minishuffle.protocol.connection import (
    Connection,
    PartitionCancelled,
    PartitionReleased,
    PartitionRequested,
)
from minishuffle.wire.frames import DataType, PartitionRequest

SEGMENT_BYTES = 64


class PlainGate:
    """A gate of one channel (or of several that share its pool) that keeps what it is given."""

    def __init__(self, pool: LocalPool, line: deque[ConsumerChannel], exclusive: int) -> None:
        self.pool = pool
        self.line = line
        self.queue: deque[Received] = deque()
        self.error: ShuffleError | None = None
        buffers: list[FreeBuffer] = []
        for _ in range(exclusive):
            segment = pool.request()
            assert segment is not None
            buffers.append(segment)
        self.channel = ConsumerChannel(self, buffers, SEGMENT_BYTES)

    def request_floating(self) -> FreeBuffer | None:
        return self.pool.request()

    def wait_in_line(self, channel: ConsumerChannel) -> None:
        self.line.append(channel)

    def leave_line(self, channel: ConsumerChannel) -> None:
        self.line.remove(channel)

    def release_floating(self, buffer: FreeBuffer) -> None:
        assert isinstance(buffer, Segment)
        while self.line:
            channel = self.line.popleft()
            if channel.offer_floating(buffer):
                if channel.credit.waiting:
                    self.line.append(channel)
                return
        buffer.recycle()

    def release_exclusive(self, buffer: FreeBuffer) -> None:
        assert isinstance(buffer, Segment)
        buffer.recycle()

    def deliver(self, received: Received) -> None:
        self.queue.append(received)

    def fail(self, error: ShuffleError) -> None:
        self.error = error


class Peers:
    """``producer`` dialed ``consumer``; requests are answered from ``partition`` at once."""

    def __init__(self, channels: int = 2, exclusive: int = 2, floating: int = 4, attach: bool = True) -> None:
        self.counters = (ConnectionCounters(), ConnectionCounters())
        self.producer = Connection(dialer=True, counters=self.counters[0], ping_interval=5.0, now=0.0)
        self.consumer = Connection(dialer=False, counters=self.counters[1], ping_interval=5.0, now=0.0)
        self.send_pool = NetworkBufferPool(32, SEGMENT_BYTES)
        self.receive_pool = NetworkBufferPool(channels * exclusive + floating, SEGMENT_BYTES)
        self.output = self.send_pool.create_pool("output", channels + 1, 32)
        self.task = TaskCounters()
        self.partition = PipelinedPartition(
            PartitionId(JobId("j1"), 0, 0), range(channels), self._acquire, self._notify, self.task
        )
        minimum = channels * exclusive + 1
        pool = self.receive_pool.create_pool("input", minimum, channels * exclusive + floating)
        line: deque[ConsumerChannel] = deque()
        self.gates = [PlainGate(pool, line, exclusive) for _ in range(channels)]
        self.read = [bytearray() for _ in range(channels)]
        self.events: list[list[int]] = [[] for _ in range(channels)]
        self.requested: list[PartitionRequested] = []
        self.attach = attach

    def _acquire(self) -> Segment:
        segment = self.output.request()
        assert segment is not None
        return segment

    def _notify(self, subpartition: PipelinedSubpartition) -> None:
        subpartition.attend()

    def request_all(self) -> None:
        for number, gate in enumerate(self.gates):
            request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), number)
            self.consumer.request_partition(gate.channel, request)

    def answer(self, event: PartitionRequested) -> None:
        subpartition = self.partition.subpartitions[event.request.subpartition]
        request = event.request
        view = subpartition.attach(request.generation, lambda: self.producer.available(request.channel))
        self.producer.attach(request.channel, view)

    def move(self, sender: Connection, receiver: Connection, buffers: int = 16) -> int:
        """One flush of ``sender``, delivered whole; returns how many buffers and events it had."""
        chunks, pieces = sender.data_to_send(buffers)
        data = b"".join(chunks)
        for piece in pieces:
            piece.released()
        if data:
            receiver.receive(data, 0.0)
        for event in receiver.events():
            if isinstance(event, PartitionCancelled | PartitionReleased):
                continue
            assert isinstance(event, PartitionRequested)
            self.requested.append(event)
            if self.attach:
                self.answer(event)
        self.validate()
        return len(pieces)

    def settle(self) -> None:
        """Exchange frames until neither side has any; nothing is consumed."""
        for _ in range(200):
            if not (self.producer.wants_to_send or self.consumer.wants_to_send):
                return
            self.move(self.producer, self.consumer)
            self.move(self.consumer, self.producer)
        raise AssertionError("still frames to send after 200 rounds")

    def consume(self, number: int) -> bool:
        """Read one received buffer or event of a channel and give it back."""
        gate = self.gates[number]
        if not gate.queue:
            return False
        received = gate.queue.popleft()
        if received.data_type == DataType.DATA:
            self.read[number] += received.payload
        else:
            self.events[number].append(received.payload[0])
        gate.channel.consumed(received)
        for other in self.gates:
            self.consumer.announce_credit(other.channel)
        self.validate()
        return True

    def validate(self) -> None:
        self.producer.validate()
        self.consumer.validate()
        self.send_pool.validate()
        self.receive_pool.validate()


@pytest.fixture
def peers_of() -> type[Peers]:
    return Peers
