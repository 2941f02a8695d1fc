"""Two connections in any order of writes, flushes, moves of bytes and consumed buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minishuffle.exchange.buffers import Flush
from minishuffle.wire.frames import (
    EventKind,
)

Peers = Any


class TwoPeers(RuleBasedStateMachine):
    """Any order of writing, flushing, moving, and consuming: nothing lost, doubled or reordered."""

    @initialize(
        channels=st.integers(1, 3),
        exclusive=st.integers(0, 9),
        floating=st.integers(1, 4),
        flushing=st.sampled_from(Flush),
    )
    def begin(self, channels: int, exclusive: int, floating: int, flushing: Flush) -> None:
        from_fixture = PEERS[0]
        self.peers = from_fixture(channels=channels, exclusive=exclusive, floating=floating)
        for subpartition in self.peers.partition.subpartitions:
            subpartition.flushing = flushing
        self.peers.request_all()
        self.written = [bytearray() for _ in range(channels)]
        self.stamp = 0
        self.least = 64
        """The smallest buffer size that was announced."""

    @rule(channel=st.integers(0, 2), size=st.integers(1, 200))
    def write(self, channel: int, size: int) -> None:
        channel %= len(self.written)
        if self.peers.output.size - self.peers.output.in_use < 2 + size // self.least:
            return
        self.stamp += 1
        data = bytes((self.stamp + i) % 251 for i in range(size))
        self.peers.partition.write(channel, 1, [data[: size // 2], memoryview(data)[size // 2 :]])
        self.written[channel] += data

    @rule()
    def flush(self) -> None:
        for subpartition in self.peers.partition.subpartitions:
            if subpartition.flush():
                subpartition.attend()

    @rule(buffers=st.integers(1, 4))
    def send(self, buffers: int) -> None:
        self.peers.move(self.peers.producer, self.peers.consumer, buffers)

    @rule()
    def reply(self) -> None:
        self.peers.move(self.peers.consumer, self.peers.producer)

    @rule(channel=st.integers(0, 2), size=st.sampled_from([16, 63, 64, 1000]))
    def resize(self, channel: int, size: int) -> None:
        consumer = self.peers.gates[channel % len(self.written)].channel
        self.peers.consumer.announce_buffer_size(consumer, size)
        self.least = min(self.least, size)

    @rule(channel=st.integers(0, 2))
    def consume(self, channel: int) -> None:
        self.peers.consume(channel % len(self.written))

    @precondition(lambda self: hasattr(self, "peers"))
    @invariant()
    def nothing_is_out_of_order(self) -> None:
        for read, written in zip(self.peers.read, self.written, strict=True):
            assert written.startswith(read)
        for gate in self.peers.gates:
            credit = gate.channel.credit
            assert len(gate.queue) <= credit.granted

    def teardown(self) -> None:
        if not hasattr(self, "peers"):
            return
        if self.peers.partition.subpartitions[0].flushing is not Flush.ON_REQUEST:
            self.read_all()
            assert self.peers.read == self.written, "it waits for a flush that never comes"
        self.peers.partition.broadcast_event(EventKind.END_OF_PARTITION)
        self.read_all()
        assert self.peers.read == self.written
        assert all(events == [EventKind.END_OF_PARTITION] for events in self.peers.events)
        assert self.peers.output.in_use == 0
        sent, received = self.peers.counters
        assert sent.credits_received == received.credits_granted
        assert sent.bytes_out == received.bytes_in
        assert sent.frames_out == received.frames_in

    def read_all(self) -> None:
        for _ in range(400):
            self.peers.settle()
            if not sum(self.peers.consume(number) for number in range(len(self.written))):
                break


PEERS: list[Callable[..., Peers]] = []


def test_any_order_of_events(peers_of: Callable[..., Peers]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    PEERS[:] = [peers_of]
    run_state_machine_as_test(TwoPeers)
    assert PEERS
