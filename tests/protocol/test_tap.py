"""Listening to a channel: every frame of it, both ways, none of the others; nothing is changed by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.counters import ConnectionCounters, TaskCounters
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import AssemblyBudget, encode
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.partition import serve
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.connection import Connection, PartitionRequested
from minishuffle.wire.frames import EventKind, LatencyMarker, PartitionRequest
from support.links import BareLink, consumer_of

if TYPE_CHECKING:
    from collections.abc import Callable

SEGMENT_BYTES = 256
Noted = list[tuple[str, dict[str, Any]]]


class Exchange:
    """Two channels from partitions of one process to a gate of another; bytes move in short pieces."""

    def __init__(self, piece: int) -> None:
        self.piece = piece
        self.network = NetworkBufferPool(64, SEGMENT_BYTES)
        pool = self.network.create_pool("gate", 5, 8)
        self.gate = InputGate(
            0,
            0,
            GateBuffers(pool, SEGMENT_BYTES, 2, 3),
            wake=lambda: None,
            give_back=lambda buffer: buffer.attachment.consumed(buffer),
            budget=AssemblyBudget(1 << 20),
            counters=TaskCounters(),
        )
        self.consuming, self.producing = BareLink(), BareLink(dialer=True)
        self.partitions = []
        for producer in (0, 1):
            output = self.network.create_pool(f"output {producer}", 8, 8)
            self.partitions.append(
                PipelinedPartition(
                    PartitionId(JobId("j1"), 0, producer),
                    range(1),
                    self._acquire(output),
                    PipelinedSubpartition.attend,
                    TaskCounters(),
                )
            )
            self.gate.add_channel(producer)

    @staticmethod
    def _acquire(pool: Any) -> Callable[[], Any]:
        return lambda: pool.request()

    def attach(self) -> None:
        for channel in self.gate.channels:
            channel.attach_remote(
                self.consuming, PartitionRequest(PartitionId(JobId("j1"), 0, channel.producer), 0)
            )

    def id_of(self, producer: int) -> int:
        return consumer_of(self.gate.channels[producer]).id

    def settle(self) -> None:
        """Exchange frames until neither side has any."""
        for _ in range(1000):
            if not (self.producing.connection.wants_to_send or self.consuming.connection.wants_to_send):
                return
            self._move(self.consuming.connection, self.producing.connection)
            self._move(self.producing.connection, self.consuming.connection)
        raise AssertionError("still frames to send")

    def _move(self, sender: Connection, receiver: Connection) -> None:
        chunks, pieces = sender.data_to_send(16)
        data = b"".join(chunks)
        for piece in pieces:
            piece.released()
        for at in range(0, len(data), self.piece):
            receiver.receive(data[at : at + self.piece], 0.0)
        for event in receiver.events():
            if isinstance(event, PartitionRequested):
                partition = self.partitions[event.request.partition.producer]
                serve(self.producing, event.request, partition.subpartitions[0])

    def run(self) -> list[Any]:
        """Write, read and end everything; gives how many rows were read."""
        rows = 0
        for number in range(20):
            for partition in self.partitions:
                count, parts = encode(Batch([f"{number} {'x' * 90}"]))
                partition.write(0, count, parts)
            self.settle()
            while (element := self.gate.poll()) is not None:
                rows += element.rows
            self.settle()
        for partition in self.partitions:
            partition.emit_latency(LatencyMarker(0, 0, 0))
            partition.broadcast_watermark(5, idle=False)
            partition.broadcast_event(EventKind.END_OF_PARTITION)
        self.settle()
        while (element := self.gate.poll()) is not None:
            rows += element.rows
        self.settle()
        return [rows, self.gate.finished]


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_both_ends_note_the_same_frames_of_that_channel_alone(piece: int) -> None:
    exchange = Exchange(piece)
    exchange.attach()
    here: Noted = []
    there: Noted = []
    channel = exchange.id_of(1)
    exchange.consuming.connection.listen(channel, lambda way, frame: here.append((way, frame)))
    exchange.producing.connection.listen(channel, lambda way, frame: there.append((way, frame)))
    assert exchange.run() == [40, True]

    other = {"in": "out", "out": "in"}
    assert [(other[way], frame) for way, frame in here if way == "in"] == [
        each for each in there if each[0] == "out"
    ]
    assert [frame for way, frame in here if way == "out"] == [frame for way, frame in there if way == "in"]
    first = here[0]
    assert (first[0], first[1]["frame"], first[1]["producer"]) == ("out", "partition_request", 1)
    assert first[1]["initial_credit"] == 2 and "channel" not in first[1]
    buffers = [frame for _, frame in here if frame["frame"] == "buffer_response"]
    assert [frame["sequence"] for frame in buffers] == list(range(len(buffers)))
    assert sum(frame.get("rows", 0) for frame in buffers) == 20
    assert [frame["event"] for frame in buffers if frame["type"] == "event"] == [
        "latency_marker",
        "watermark",
        "end_of_partition",
    ]
    assert any(frame.get("flags") == ["starts"] for frame in buffers), "an element begins and goes on"
    credit = sum(frame["credit"] for _, frame in here if frame["frame"] == "add_credit")
    data = sum(frame["type"] == "data" for frame in buffers)
    assert credit + 2 >= data > 0
    assert here[-1][1]["frame"] == "cancel_partition_request"
    assert not any("payload" in frame or "body" in frame for _, frame in here)


def test_nothing_is_changed_by_who_listens() -> None:
    counters = []
    for listens in (False, True):
        exchange = Exchange(5)
        exchange.attach()
        if listens:
            for link in (exchange.consuming, exchange.producing):
                link.connection.listen(exchange.id_of(0), lambda way, frame: None)
        assert exchange.run() == [40, True]
        connection = exchange.consuming.connection
        counters.append((_counters(connection), _counters(exchange.producing.connection)))
    assert counters[0] == counters[1]


def _counters(connection: Connection) -> ConnectionCounters:
    return connection._counters


def test_who_stops_listening_hears_no_more_and_one_may_begin_in_the_middle_of_a_frame() -> None:
    exchange = Exchange(1 << 20)
    exchange.attach()
    exchange.settle()
    noted: Noted = []
    connection = exchange.consuming.connection
    count, parts = encode(Batch(["x" * 100]))
    for _ in range(4):
        exchange.partitions[0].write(0, count, parts)
    chunks, pieces = exchange.producing.connection.data_to_send(16)
    data = b"".join(chunks)
    connection.receive(data[:50], 0.0)  # the header and a part of the payload
    connection.listen(exchange.id_of(0), lambda way, frame: noted.append((way, frame)))
    connection.receive(data[50:], 0.0)
    for piece in pieces:
        piece.released()
    assert noted == []
    exchange.partitions[0].broadcast_watermark(5, idle=False)
    exchange.settle()
    sequences = [frame["sequence"] for _, frame in noted if frame["frame"] == "buffer_response"]
    assert sequences and sequences == list(range(1, 1 + len(sequences)))
    connection.listen_no_more(exchange.id_of(0))
    connection.listen_no_more(exchange.id_of(0))
    before = len(noted)
    exchange.partitions[0].broadcast_watermark(9, idle=False)
    exchange.settle()
    assert len(noted) == before
