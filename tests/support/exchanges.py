"""A producer and a consumer of one process, whose channels are attached in one way after another."""

from __future__ import annotations

from functools import partial

from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.channels import (
    Attachment,
    ChannelEvent,
    GivenBack,
    InputChannel,
    Notice,
    RemoteAttachment,
)
from minishuffle.exchange.debloater import BufferDebloater
from minishuffle.exchange.elements import AssemblyBudget, decode, encode
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.partition import serve
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import LocalPool, NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import Outgoing
from minishuffle.protocol.connection import PartitionCancelled, PartitionReleased, PartitionRequested
from minishuffle.wire.frames import (
    PartitionRequest,
)
from support.links import BareLink, Line, consumer_of

SEGMENT_BYTES = 128
EXCLUSIVE = 2
FLOATING = 3


class AnySize(BufferDebloater):
    """Announces what the test wants."""

    def __init__(self) -> None:
        super().__init__(1.0, SEGMENT_BYTES, lambda: 0.0)
        self.next: int | None = None

    def look(self, buffers: int) -> int | None:
        size, self.next = self.next, None
        return size


class Exchange:
    """A producer with one consumer, whose channel is attached to it in one way after another.

    Args:
        answers: requests are answered when they arrive; else by :meth:`answer`.
    """

    def __init__(
        self,
        channels: int = 1,
        *,
        tolerant: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        exclusive: int = EXCLUSIVE,
        floating: int = FLOATING,
        answers: bool = True,
    ) -> None:
        self.network = NetworkBufferPool(200, segment_bytes)
        self.output = self.network.create_pool("output", channels + 1, 100)
        least = channels * exclusive
        pool = self.network.create_pool("gate", least + 1, least + floating)
        self.returned: list[GivenBack] = []
        self.debloater = AnySize()
        self.gate = InputGate(
            0,
            0,
            GateBuffers(pool, segment_bytes, exclusive, floating),
            wake=lambda: None,
            give_back=self.returned.append,
            budget=AssemblyBudget(1 << 20),
            counters=TaskCounters(),
            tolerant=tolerant,
            debloater=self.debloater,
        )
        self.partitions = [self._partition(number, self.output) for number in range(channels)]
        self.events: list[tuple[int, int, str]] = []
        """Channel, generation and what happened to it."""
        self.channels = [self.gate.add_channel(n, partial(self._on_event, n)) for n in range(channels)]
        self.generations = [0] * channels
        self.attachments: list[Attachment] = []
        self.links: list[tuple[BareLink, BareLink]] = []
        """Consumer's and producer's ends; the last is in use."""
        self.held: list[Outgoing] = []
        """What the transport has not let go of."""
        self._answers = answers
        self.connect()
        self.written = 0
        self.read: list[list[int]] = [[] for _ in range(channels)]

    @staticmethod
    def _partition(number: int, pool: LocalPool) -> PipelinedPartition:
        def acquire() -> Segment:
            segment = pool.request()
            assert segment is not None
            return segment

        partition_id = PartitionId(JobId("j1"), 0, number)
        return PipelinedPartition(
            partition_id, range(1), acquire, PipelinedSubpartition.attend, TaskCounters()
        )

    def connect(self) -> None:
        self.links.append((BareLink(), BareLink(dialer=True)))
        consumer, producer = (link.connection for link in self.links[-1])
        self.lines = (Line(producer), Line(consumer))
        """To the producer and to the consumer; what was on its way over the link before is gone."""
        self.unanswered: list[PartitionRequest] = []

    def _on_event(self, number: int, generation: int, event: ChannelEvent) -> None:
        self.events.append((number, generation, event.value))
        if event is ChannelEvent.DRAIN:
            queued = [item for item in self.channels[number].queue if not isinstance(item, Notice)]
            assert not any(item.attachment.generation <= generation for item in queued)

    # --- producer --------------------------------------------------------------------------------

    def write(self, number: int, size: int) -> None:
        """One element of one row: a number that counts up, and ``size`` bytes."""
        rows, parts = encode(Batch([[self.written, "x" * size]]))
        self.written += 1
        self.partitions[number].write(0, rows, parts)

    def flush(self, number: int) -> None:
        if self.partitions[number].subpartitions[0].flush():
            self.partitions[number].subpartitions[0].attend()

    # --- loop ------------------------------------------------------------------------------------

    def attach_remote(self, number: int) -> None:
        self.generations[number] += 1
        request = PartitionRequest(
            PartitionId(JobId("j1"), 0, number), 0, generation=self.generations[number]
        )
        self.channels[number].attach_remote(self.links[-1][0], request)
        self._attached(number)

    def attach_local(self, number: int) -> None:
        self.generations[number] += 1
        subpartition = self.partitions[number].subpartitions[0]
        self.channels[number].attach_local(subpartition, self.generations[number], lambda piece: None)
        self._attached(number)

    def _attached(self, number: int) -> None:
        if any((n, event) == (number, "end") for n, _, event in self.events):
            return  # nothing is wanted of it
        attachment = self.channels[number].attachment
        assert attachment is not None and attachment.generation == self.generations[number]
        self.attachments.append(attachment)

    def move(self, *, to_consumer: bool, buffers: int = 16) -> None:
        """One flush of one side of the link, and all that is on its way there arrives."""
        self.send(to_consumer=to_consumer, buffers=buffers)
        self.let_go()
        self.arrive(to_consumer=to_consumer)

    def send(self, *, to_consumer: bool, buffers: int = 16) -> None:
        """One flush of one side of the link, which is on its way then."""
        chunks, pieces = self.links[-1][to_consumer].connection.data_to_send(buffers)
        self.lines[to_consumer].put(b"".join(chunks))
        self.held += pieces

    def let_go(self) -> None:
        """The transport has no memory of segments any more."""
        for piece in self.held:
            piece.released()
        self.held.clear()

    def arrive(self, *, to_consumer: bool, size: int | None = None) -> None:
        """So many of the bytes on their way to one side arrive, as in :meth:`Line.deliver`."""
        line = self.lines[to_consumer]
        line.deliver(size)
        events = line.receiver.events()
        cancelled = {event.channel for event in events if isinstance(event, PartitionCancelled)}
        requests = [event.request for event in events if isinstance(event, PartitionRequested)]
        released = sum(isinstance(event, PartitionReleased) for event in events)
        assert len(cancelled) + len(requests) + released == len(events)
        waiting = [each for each in (*self.unanswered, *requests) if each.channel not in cancelled]
        self.unanswered = waiting
        if self._answers:
            self.answer()

    def answer(self) -> None:
        """The producers are there: all requests are granted."""
        requests, self.unanswered = self.unanswered, []
        for request in requests:
            partition = self.partitions[request.partition.producer]
            serve(self.links[-1][1], request, partition.subpartitions[0])

    def settle(self) -> None:
        for _ in range(1000):
            self.answer()
            sends = any(link.connection.wants_to_send for link in self.links[-1])
            if not (sends or self.held or any(line.under_way for line in self.lines)):
                return
            self.move(to_consumer=False)
            self.move(to_consumer=True)
        raise AssertionError("still frames to send after 1000 rounds")

    def give_back(self, count: int) -> None:
        """The loop hears of buffers that the task is done with."""
        for buffer in self.returned[:count]:
            buffer.attachment.consumed(buffer)
        del self.returned[:count]

    def cut(self) -> None:
        """The link breaks, and there is a new one."""
        self.let_go()
        for link in self.links[-1]:
            link.connection.lost(PeerLost("cut"))
        self.connect()

    def resize(self, size: int) -> None:
        """Buffers are to have so many bytes from now on."""
        self.debloater.next = size
        self.gate.debloat()

    # --- task ------------------------------------------------------------------------------------

    def poll(self) -> bool:
        element = self.gate.poll()
        if element is None:
            return False
        rows = decode(element.format, element.rows, element.payload).payload
        assert isinstance(rows, list)
        self.read[element.channel.producer] += [row[0] for row in rows]
        return True

    def poll_all(self) -> None:
        while self.poll():
            pass

    def validate(self) -> None:
        self.network.validate()
        for link in self.links[-1]:
            link.connection.validate()
        for attachment in self.attachments:
            if isinstance(attachment, RemoteAttachment):
                attachment.consumer.validate()

    def check_ledgers(self) -> None:
        """Both ends of the link in use agree with what is on its way, for each channel that both have."""
        to_producer, to_consumer = self.lines
        for channel, consuming in to_consumer.receiver._consumers.items():
            producing, credit = to_producer.receiver.producers.channels.get(channel), consuming.credit
            if producing is not None:
                assert credit.granted == producing.credit.granted + to_producer.credit(channel)
                assert producing.credit.sent == credit.received + to_consumer.buffers(channel)
                assert producing.credit.available >= 0 and credit.granted >= credit.received

    def close(self) -> None:
        """Everything ends; every segment comes home exactly once."""
        self.gate.close()
        self.let_go()
        self.give_back(len(self.returned))
        for partition in self.partitions:
            partition.subpartitions[0].discard()
        for link in self.links[-1]:
            link.connection.lost(None)
        assert self.network.free == self.network.total


def credit_of(channel: InputChannel) -> tuple[int, int]:
    """Buffers promised and to be promised to the producer, and idle ones behind that."""
    credit = consumer_of(channel).credit
    return credit.granted + credit.unannounced, credit.idle
