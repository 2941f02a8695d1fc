"""One-way connections: whose reader stops, what goes on then, and what becomes of the channels."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.counters import ConnectionCounters
from minishuffle.errors import PeerLost, PeerSuspected, RemoteProtocolError, TaskFailed
from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import ConsumerChannel, FreeBuffer
from minishuffle.protocol.connection import PartitionRequested, PeerClosed
from minishuffle.protocol.oneway import OneWayReceiver, OneWaySender
from minishuffle.wire.frames import (
    BUFFER_HEADER,
    AddCredit,
    CancelReason,
    Close,
    DataType,
    EventKind,
    PartitionRequest,
    Ping,
    encode_frame,
)
from protocol.conftest import SEGMENT_BYTES, Peers, PlainGate


class TcpGate(PlainGate):
    """Tells the receiver when the channel that waited has a buffer."""

    receiver: OneWayReceiver

    def release_floating(self, buffer: FreeBuffer) -> None:
        waiting = list(self.line)
        super().release_floating(buffer)
        for channel in waiting:
            if not channel.credit.waiting:
                self.receiver.announce_credit(channel)


class OneWayPeers(Peers):
    """``producer`` sends to ``consumer`` over a one-way connection; ``buffers`` for all channels together."""

    def __init__(self, channels: int = 2, buffers: int = 4, flushing: Flush = Flush.ON_REQUEST) -> None:
        super().__init__(channels, exclusive=0, floating=buffers)
        self.receive_pool = NetworkBufferPool(buffers, SEGMENT_BYTES)
        self.pool = self.receive_pool.create_pool("input", 1, buffers)
        self.line: deque[ConsumerChannel] = deque()
        self.receiver = OneWayReceiver(self.consumer, 3, self.counters[1])
        self.wakes: list[int] = []
        """How many channels had something to send each time the sender asked to be looked at."""
        self.sender = OneWaySender(
            self.producer, self.counters[0], lambda: self.wakes.append(len(self.sender.ready))
        )
        self.wire = bytearray()
        for subpartition in self.partition.subpartitions:
            subpartition.flushing = flushing
        self.gates = [TcpGate(self.pool, self.line, 0) for _ in range(channels)]
        for number, gate in enumerate(self.gates):
            assert isinstance(gate, TcpGate)
            gate.receiver = self.receiver
            request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), number)
            self.receiver.request_partition(gate.channel, request)
        self.say()

    def say(self) -> None:
        """What the consumer's side has to say over the ordinary connection."""
        self.move(self.consumer, self.producer)

    def answer(self, event: PartitionRequested) -> None:
        request = event.request
        assert request.one_way == 3 and request.initial_credit == 0
        subpartition = self.partition.subpartitions[request.subpartition]
        view = subpartition.attach(request.generation, lambda: self.sender.available(request.channel))
        self.sender.attach(request.channel, view)

    def write(self, position: int, byte: int, size: int = SEGMENT_BYTES) -> None:
        self.partition.write(position, 1, [bytes([byte]) * size])

    def flush(self, buffers: int = 16) -> int:
        """What the sender has goes onto the wire; gives the number of buffers and events."""
        chunks, pieces = self.sender.data_to_send(buffers)
        self.wire += b"".join(chunks)
        for piece in pieces:
            piece.released()
        self.sender.validate()
        return len(pieces)

    def read_wire(self, size: int = 1 << 30) -> None:
        """One read of the socket, if it is read."""
        if self.receiver.reading and self.wire:
            data = bytes(self.wire[:size])
            del self.wire[:size]
            self.receiver.receive(data, 0.0)
        self.receiver.validate()

    def take(self, channel: int) -> bytes:
        """The task consumes one buffer or event."""
        gate = self.gates[channel]
        received = gate.queue.popleft()
        payload = bytes(received.payload)
        gate.channel.consumed(received)
        self.receiver.validate()
        return payload


def test_one_channel_without_a_buffer_stops_its_siblings_events_included() -> None:
    peers = OneWayPeers(channels=2, buffers=2)
    for byte in range(3):
        peers.write(0, byte)
    peers.flush()
    peers.write(1, 9)
    peers.partition.subpartitions[1].add_event(EventKind.END_OF_DATA)
    peers.flush()
    peers.read_wire()
    assert not peers.receiver.reading and [len(gate.queue) for gate in peers.gates] == [2, 0]
    assert 0 < peers.receiver.held_bytes < 3 * (SEGMENT_BYTES + BUFFER_HEADER.size)
    assert peers.take(0)[:1] == b"\x00"  # its buffer goes to the head of the line, and stops the next again
    assert not peers.receiver.reading and [len(gate.queue) for gate in peers.gates] == [2, 0]
    peers.take(0)
    assert peers.receiver.reading and [len(gate.queue) for gate in peers.gates] == [1, 2]
    assert peers.receiver.held_bytes == 0 and peers.take(1)[:1] == b"\x09"
    assert peers.take(1) == bytes([EventKind.END_OF_DATA])


@pytest.mark.parametrize("how", ["cancelled", "lost"])
def test_what_a_dead_consumer_does_not_take_is_discarded_at_once(how: str) -> None:
    peers = OneWayPeers(channels=2, buffers=1)
    for byte in range(3):
        peers.write(0, byte)
    peers.flush()
    peers.write(1, 9)
    peers.flush()
    peers.read_wire()
    assert not peers.receiver.reading
    dead = peers.gates[0]
    (received,) = dead.queue
    if how == "cancelled":
        peers.receiver.cancel(dead.channel, CancelReason.FAILED)
    else:  # the coordinator's verdict: its buffers go home, and only then is the channel let go
        dead.channel.close()
        peers.receiver.cancel(dead.channel, CancelReason.FAILED)
    dead.channel.consumed(received)
    assert peers.receiver.reading and peers.counters[1].rows_discarded == 2
    assert peers.take(1)[:1] == b"\x09" and peers.pool.in_use == 0
    peers.say()
    assert list(peers.sender.channels) == [peers.gates[1].channel.id]


def test_half_a_payload_of_a_dead_consumer_is_discarded() -> None:
    peers = OneWayPeers(channels=2, buffers=2)
    peers.write(0, 1)
    peers.write(1, 2)
    peers.flush()
    peers.read_wire(BUFFER_HEADER.size + 10)
    assert peers.pool.in_use == 1
    peers.receiver.cancel(peers.gates[0].channel, CancelReason.FAILED)
    assert peers.pool.in_use == 0 and peers.counters[1].rows_discarded == 1
    peers.read_wire()
    assert peers.take(1) == bytes([2]) * SEGMENT_BYTES


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 5))
def test_everything_arrives_in_order_however_it_is_cut_and_taken(
    seed: int, channels: int, buffers: int
) -> None:
    rng, peers = Random(seed), OneWayPeers(channels, buffers)
    written = [bytearray() for _ in range(channels)]
    read = [bytearray() for _ in range(channels)]
    left = 30
    while left or peers.sender.wants_to_send or peers.wire or any(gate.queue for gate in peers.gates):
        move = rng.randrange(4)
        if move == 0 and left and peers.output.available and peers.output.in_use < 20:
            left -= 1
            position = rng.randrange(channels)
            peers.write(position, left)
            written[position] += bytes([left]) * SEGMENT_BYTES
        elif move == 1:
            peers.flush(rng.randint(1, 4))
        elif move == 2:
            peers.read_wire(rng.randint(1, 300))
        else:
            ready = [number for number, gate in enumerate(peers.gates) if gate.queue]
            if ready:
                number = rng.choice(ready)
                read[number] += peers.take(number)
    assert read == written and peers.pool.in_use == 0 == peers.output.in_use


def test_parts_of_segments_leave_when_nothing_else_is_ready() -> None:
    peers = OneWayPeers(channels=2, buffers=8, flushing=Flush.ADAPTIVE)
    peers.write(0, 1, size=10)
    peers.write(1, 2)
    assert peers.flush(1) == 1  # the whole one first
    assert [each.id for each in peers.sender.ready] == [] and peers.sender.wants_to_send
    peers.write(0, 3)  # ten bytes more than fit
    assert len(peers.sender.ready) == 1
    peers.flush()
    peers.read_wire()
    assert [bytes(each.payload[:1]) for each in peers.gates[0].queue][0] == b"\x01"
    assert sum(len(each.payload) for each in peers.gates[0].queue) == SEGMENT_BYTES + 10


def test_an_error_comes_behind_what_was_sent_and_over_the_same_connection() -> None:
    peers = OneWayPeers()
    peers.write(0, 1)
    peers.flush()
    channel = peers.gates[0].channel
    peers.sender.fail_producer(channel.id, TaskFailed("it died"))
    assert not peers.producer.wants_to_send
    peers.flush()
    peers.read_wire()
    assert isinstance(peers.gates[0].error, TaskFailed) and len(peers.gates[0].queue) == 1
    assert peers.receiver.failed and peers.receiver.channels == 1
    assert peers.gates[1].error is None
    peers.say()  # nobody cancels what has failed
    assert peers.counters[0].frames_in == {"partition_request": 2}


@pytest.mark.parametrize("error", [PeerLost("broken"), PeerSuspected("silent"), None], ids=str)
def test_channels_of_a_connection_that_is_gone_end_on_both_sides(error: PeerLost | None) -> None:
    peers = OneWayPeers()
    peers.write(0, 1)
    peers.sender.lost(error)
    assert not peers.sender.channels and peers.partition.subpartitions[0].view is None
    peers.move(peers.producer, peers.consumer)  # the consumer's side may not know that it is gone
    assert [type(gate.error) for gate in peers.gates] == [type(error or PeerLost(""))] * 2
    for gate in peers.gates:
        peers.receiver.cancel(gate.channel)
    assert peers.receiver.channels == 0
    late = PipelinedSubpartition(0, lambda _: None)
    assert peers.sender.attach(99, late.attach(1, lambda: None)) is None and late.view is None


def test_a_receiver_that_is_gone_cancels_its_channels_alone() -> None:
    peers = OneWayPeers()
    peers.receiver.lost(None)
    assert all(isinstance(gate.error, PeerLost) for gate in peers.gates)
    peers.say()
    assert not peers.sender.channels
    assert peers.consumer.events() == [] == peers.producer.events()


def test_channels_end_with_the_ordinary_connection() -> None:
    peers = OneWayPeers()
    peers.producer.lost(None)
    assert not peers.sender.channels
    peers.consumer.lost(None)
    assert all(isinstance(gate.error, PeerLost) for gate in peers.gates)


def test_how_full_buffers_are_to_be_goes_by_the_ordinary_connection() -> None:
    peers = OneWayPeers()
    subpartition, consumer = peers.partition.subpartitions[0], peers.gates[0].channel
    peers.receiver.announce_buffer_size(consumer, 20)
    peers.say()
    assert subpartition.buffer_size == 20 and peers.sender.wants_to_send is False
    peers.receiver.announce_buffer_size(consumer, 30)
    peers.receiver.cancel(consumer)
    peers.say()
    assert subpartition.buffer_size == 20
    again = TcpGate(peers.pool, peers.line, 0)
    request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, generation=2, buffer_size=40)
    peers.receiver.request_partition(again.channel, request)
    peers.say()
    assert subpartition.buffer_size == 40


def test_behind_a_barrier_nothing_comes_before_it_is_resumed_by_the_ordinary_connection() -> None:
    peers = OneWayPeers(buffers=8)
    consumer = peers.gates[0].channel
    peers.partition.subpartitions[0].add_barrier(3)
    peers.write(0, 1)
    peers.write(1, 2)
    peers.flush()
    peers.read_wire()
    assert [len(gate.queue) for gate in peers.gates] == [1, 1]
    for generation, barrier in ((2, 3), (1, 2)):
        peers.receiver.resume_consumption(consumer, generation, barrier)
    peers.say()
    assert peers.flush() == 0 and not peers.wakes
    peers.receiver.resume_consumption(consumer, 1, 3)
    peers.say()
    assert peers.wakes == [1], "nobody else may look at it: its writer waits for room"
    assert peers.flush() == 1
    peers.read_wire()
    assert [bytes(each.payload)[:1] for each in peers.gates[0].queue] == [bytes([EventKind.BARRIER]), b"\x01"]


def test_stable_goes_over_the_ordinary_connection() -> None:
    peers = OneWayPeers()
    consumer = peers.gates[0].channel
    told: list[tuple[int, int]] = []

    class View:
        def make_stable(self, version: int, row: int) -> None:
            told.append((version, row))

        def release(self, reason: CancelReason) -> None:
            pass

    peers.sender.channels[consumer.id].view = View()  # type: ignore[assignment]
    peers.receiver.announce_stable(consumer, 3, 1 << 40)
    peers.say()
    assert told == [(3, 1 << 40)]
    peers.sender.cancel(consumer.id, CancelReason.MOVED)
    peers.receiver.announce_stable(consumer, 3, 1 << 41)
    peers.say()
    assert told == [(3, 1 << 40)]


def test_nothing_goes_against_its_direction() -> None:
    peers = OneWayPeers()
    assert peers.receiver.data_to_send(16) == ([], []) and not peers.receiver.wants_to_send
    peers.receiver.close()
    assert peers.receiver.data_to_send(16) == ([], [])
    with pytest.raises(RemoteProtocolError, match="against the direction"):
        peers.sender.receive(encode_frame(AddCredit(((1, 1),))), 0.0)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (encode_frame(Ping(1)), "ping frame has no place on a one-way connection"),
        (encode_frame(AddCredit(((1, 1),))), "add_credit frame has no place"),
        (BUFFER_HEADER.pack(32, 5, 77, 0, 0, DataType.DATA, 0, 0, 0, 0) + b"x", "never opened"),
    ],
)
def test_a_stream_with_what_does_not_belong_there_ends(data: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        OneWayPeers().receiver.receive(data, 0.0)


def test_a_buffer_out_of_sequence_ends_its_channel_alone() -> None:
    peers = OneWayPeers(buffers=1)
    channel = peers.gates[0].channel
    peers.receiver.receive(BUFFER_HEADER.pack(32, 5, channel.id, 5, 0, DataType.DATA, 0, 0, 7, 0) + b"x", 0.0)
    assert isinstance(peers.gates[0].error, RemoteProtocolError) and peers.pool.in_use == 0
    assert peers.counters[1].rows_discarded == 7
    peers.write(1, 2)
    peers.flush()
    peers.read_wire()
    assert peers.take(1)[:1] == b"\x02"


def test_the_end_of_a_connection_is_an_event() -> None:
    peers = OneWayPeers()
    peers.sender.close()
    peers.flush()
    peers.read_wire()
    assert peers.receiver.events() == [PeerClosed(None)] and peers.receiver.events() == []


def test_a_malformed_rest_of_what_is_held_ends_the_connection() -> None:
    peers = OneWayPeers(buffers=1)
    peers.write(0, 1)
    peers.write(0, 2)
    peers.flush()
    peers.wire += encode_frame(Ping(1))
    peers.read_wire()
    assert not peers.receiver.reading
    peers.take(0)
    (event,) = peers.receiver.events()
    assert isinstance(event, PeerClosed) and "no place" in str(event.error)


def test_frames_are_counted_as_over_an_ordinary_connection() -> None:
    peers = OneWayPeers(buffers=8)
    peers.write(0, 1)
    peers.partition.finish()
    peers.flush()
    peers.sender.close()
    peers.flush()
    peers.read_wire()
    sent, came = peers.counters
    assert isinstance(sent, ConnectionCounters)
    assert sent.frames_out["buffer_response"] == came.frames_in["buffer_response"] == 5
    assert sent.frames_out["close"] == came.frames_in["close"] == 1
    assert (sent.buffers_out, came.buffers_in, sent.rows_out) == (1, 1, 1)
    assert encode_frame(Close())
