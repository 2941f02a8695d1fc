"""Two connections joined by their bytes, with real partitions on one side and plain gates on the other."""

from __future__ import annotations

from collections import deque

import pytest

from minishuffle.counters import ConnectionCounters, TaskCounters
from minishuffle.errors import ShuffleError
from minishuffle.exchange.buffers import BufferBuilder, Slice
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import LocalPool, NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import ChannelState, ConsumerChannel, FreeBuffer, Received
from minishuffle.protocol.connection import (
    Connection,
    PartitionCancelled,
    PartitionReleased,
    PartitionRequested,
)
from minishuffle.wire.frames import BARRIER_EVENT, CancelReason, DataType, EventKind, PartitionRequest
from support.links import Line

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
        self.release_floating(buffer)

    @property
    def buffers(self) -> int:
        """Those that are free in its channel, arriving, or to be read."""
        arriving = self.channel._arriving
        read = [*self.queue, *([arriving] if arriving is not None else [])]
        return self.channel.credit.idle + sum(each.buffer is not None for each in read)

    def deliver(self, received: Received) -> None:
        self.queue.append(received)

    def fail(self, error: ShuffleError) -> None:
        self.error = error


class Peers:
    """``producer`` dialed ``consumer``; requests are answered from ``partition`` at once.

    Args:
        segments: of the producing side.
        over: peers whose two connections these use too, the other way round.
    """

    def __init__(
        self,
        channels: int = 2,
        exclusive: int = 2,
        floating: int = 4,
        attach: bool = True,
        segments: int = 32,
        over: Peers | None = None,
    ) -> None:
        if over is None:
            self.counters = (ConnectionCounters(), ConnectionCounters())
            self.producer = Connection(dialer=True, counters=self.counters[0], ping_interval=5.0, now=0.0)
            self.consumer = Connection(dialer=False, counters=self.counters[1], ping_interval=5.0, now=0.0)
            self.to_consumer, self.to_producer = Line(self.consumer), Line(self.producer)
            self.ways: list[Peers] = []
            """By edge; with those that use the same connections."""
        else:
            self.counters = over.counters[::-1]
            self.producer, self.consumer = over.consumer, over.producer
            self.to_consumer, self.to_producer = over.to_producer, over.to_consumer
            self.ways = over.ways
        self.edge = len(self.ways)
        self.ways.append(self)
        self.held: list[Slice] = []
        """What the transport has not let go of."""
        self.send_pool = NetworkBufferPool(segments, SEGMENT_BYTES)
        self.receive_pool = NetworkBufferPool(channels * exclusive + floating, SEGMENT_BYTES)
        self.output = self.send_pool.create_pool("output", min(segments, channels + 1), segments)
        self.task = TaskCounters()
        self.partition = PipelinedPartition(
            PartitionId(JobId("j1"), self.edge, 0), range(channels), self._acquire, self._notify, self.task
        )
        minimum = channels * exclusive + 1
        pool = self.receive_pool.create_pool("input", minimum, channels * exclusive + floating)
        line: deque[ConsumerChannel] = deque()
        self.gates = [PlainGate(pool, line, exclusive) for _ in range(channels)]
        self.read = [bytearray() for _ in range(channels)]
        self.events: list[list[int]] = [[] for _ in range(channels)]
        self.stands = [0] * channels
        """The barrier that a channel's consumer has read and not resumed from; 0: none."""
        self.requested: list[PartitionRequested] = []
        self.unanswered: list[PartitionRequested] = []
        self.attach = attach

    def _acquire(self) -> Segment:
        segment = self.output.request()
        assert segment is not None
        return segment

    def _notify(self, subpartition: PipelinedSubpartition) -> None:
        subpartition.attend()

    def request_all(self) -> None:
        for number, gate in enumerate(self.gates):
            request = PartitionRequest(PartitionId(JobId("j1"), self.edge, 0), number)
            self.consumer.request_partition(gate.channel, request)

    def answer(self, event: PartitionRequested) -> None:
        subpartition = self.partition.subpartitions[event.request.subpartition]
        request = event.request
        view = subpartition.attach(request.generation, lambda: self.producer.available(request.channel))
        self.producer.attach(request.channel, view)

    def move(self, sender: Connection, receiver: Connection, buffers: int = 16) -> int:
        """One flush of ``sender``, delivered whole; returns how many buffers and events it had."""
        sent = self.send(sender, buffers)
        self.let_go()
        line = self.to_consumer if receiver is self.consumer else self.to_producer
        self.deliver(line)
        return sent

    def send(self, sender: Connection, buffers: int = 16) -> int:
        """One flush of ``sender``, which is on its way then; returns how many buffers and events it had."""
        chunks, pieces = sender.data_to_send(buffers)
        (self.to_consumer if sender is self.producer else self.to_producer).put(b"".join(chunks))
        self.held += pieces
        return len(pieces)

    def let_go(self) -> None:
        """The transport has no memory of segments any more."""
        for piece in self.held:
            piece.released()
        self.held.clear()

    def deliver(self, line: Line, size: int | None = None) -> None:
        """So many bytes arrive, as in :meth:`Line.deliver`, and what they ask for is answered. A channel that
        ends by them may have lent its buffer to another one, whose credit is announced as a gate does it."""
        line.deliver(size)
        for way in self.ways:
            if way.consumer is line.receiver:
                for gate in way.gates:
                    way.consumer.announce_credit(gate.channel)
        for event in line.receiver.events():
            if isinstance(event, PartitionCancelled | PartitionReleased):
                continue
            assert isinstance(event, PartitionRequested)
            way = self.ways[event.request.partition.edge]
            way.requested.append(event)
            if way.attach:
                way.answer(event)
            else:
                way.unanswered.append(event)
        self.validate()

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
        elif received.payload[0] == EventKind.BARRIER:
            _, blocking, self.stands[number] = BARRIER_EVENT.unpack(received.payload)
            assert blocking
        else:
            self.events[number].append(received.payload[0])
        gate.channel.consumed(received)
        for other in self.gates:
            self.consumer.announce_credit(other.channel)
        self.validate()
        return True

    def resume(self, number: int, *, generation: int = 1, off: int = 0) -> None:
        """Want what stands behind the barrier that was read last; ``off``: name another one."""
        consumer = self.gates[number].channel
        self.consumer.resume_consumption(consumer, generation, self.stands[number] + off)
        if generation == 1 and not off:
            self.stands[number] = 0

    def validate(self) -> None:
        self.producer.validate()
        self.consumer.validate()
        self.send_pool.validate()
        self.receive_pool.validate()

    def cancel(self, number: int, reason: CancelReason) -> None:
        """The consumer wants no more of a channel."""
        self.consumer.cancel(self.gates[number].channel, reason)
        for gate in self.gates:
            self.consumer.announce_credit(gate.channel)
        self.validate()

    def check_ledgers(self) -> None:
        """Both ends and what is on its way agree, for each channel that both ends have; and each segment is
        in one place."""
        for gate in self.gates:
            channel = gate.channel
            credit, producer = channel.credit, self.producer.producers.channels.get(channel.id)
            if producer is None or channel.state is ChannelState.CLOSED:
                continue
            assert credit.granted == producer.credit.granted + self.to_producer.credit(channel.id)
            assert producer.credit.sent == credit.received + self.to_consumer.buffers(channel.id)
            assert producer.credit.available >= 0 and credit.granted >= credit.received
        pool = self.gates[0].pool
        assert pool.in_use == sum(gate.buffers for gate in self.gates)
        assert pool.in_use + self.receive_pool.free == self.receive_pool.total
        held = [piece.builder for way in self.ways for piece in way.held if piece.builder is not None]
        segments = {id(each.segment) for each in held if each.segment.owner is self.output}
        for each in self.partition.subpartitions:
            queued = [*each._queue, *([each.open] if each.open else [])]
            segments |= {id(item.segment) for item in queued if isinstance(item, BufferBuilder)}
        assert self.output.in_use == len(segments)

    @property
    def resting(self) -> bool:
        """Nothing more happens before a task writes or reads."""
        moving = self.producer.wants_to_send or self.consumer.wants_to_send
        lines = self.to_consumer.under_way or self.to_producer.under_way
        return not (moving or lines or any(way.held for way in self.ways))

    def check_that_nobody_waits_for_ever(self) -> None:
        """At rest, what waits at a producer waits for a buffer that a task has yet to read."""
        for gate in self.gates:
            producer = self.producer.producers.channels.get(gate.channel.id)
            if producer is None or not producer.view.backlog():
                continue
            assert producer.credit.available == 0, "it could send"
            assert not gate.channel.credit.is_due, "its credit is withheld"
            assert gate.queue or gate.channel.credit.waiting, "it has not asked for a buffer"
            assert gate.queue or not gate.pool.available, "a buffer is free"
            assert any(each.queue for each in self.gates), "nobody has anything to read"


@pytest.fixture
def peers_of() -> type[Peers]:
    return Peers
