"""Two connections in any order of writes, flushes, moves of bytes and consumed buffers, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minishuffle.errors import TaskFailed
from minishuffle.exchange.buffers import Flush
from minishuffle.wire.frames import CancelReason, EventKind
from support.soak import examples

Peers = Any
WAYS = st.integers(0, 1)
CHANNELS = st.integers(0, 2)
PEERS: list[Callable[..., Peers]] = []


class TwoPeers(RuleBasedStateMachine):
    """Any order of writing, flushing, sending, arriving, cancelling and consuming: nothing is lost, doubled
    or reordered, the ledgers of both ends agree with what is on its way, and nobody waits for ever.

    Each peer produces and consumes; what one sends arrives as late as it happens, in pieces of any length,
    whatever comes the other way meanwhile. Cases 92 and 93, RemoteInputChannelTest."""

    @initialize(
        channels=st.integers(1, 3),
        exclusive=st.integers(0, 9),
        floating=st.integers(1, 4),
        flushing=st.sampled_from(Flush),
        attach=st.booleans(),
    )
    def begin(self, channels: int, exclusive: int, floating: int, flushing: Flush, attach: bool) -> None:
        peers_of = PEERS[0]
        there = peers_of(channels=channels, exclusive=exclusive, floating=floating, attach=attach)
        back = peers_of(channels=1, exclusive=2, floating=2, attach=attach, over=there)
        self.ways = (there, back)
        self.flushing = flushing
        for way in self.ways:
            for subpartition in way.partition.subpartitions:
                subpartition.flushing = flushing
            way.request_all()
        self.written = [[bytearray() for _ in way.gates] for way in self.ways]
        self.gone: set[tuple[int, int]] = set()
        """Channels that were cancelled, or whose producer has failed."""
        self.stamp = 0
        self.least = 64
        """The smallest buffer size that was announced."""
        self.barriers: list[dict[int, int]] = [{} for _ in range(2 * 3)]
        """By way and channel, bytes that were written before each barrier."""

    def channel(self, way: int, channel: int) -> tuple[Peers, int]:
        return self.ways[way], channel % len(self.ways[way].gates)

    @rule(way=WAYS, channel=CHANNELS, size=st.integers(1, 200))
    def write(self, way: int, channel: int, size: int) -> None:
        peers, channel = self.channel(way, channel)
        full = peers.output.size - peers.output.in_use < 2 + size // self.least
        if full or (way, channel) in self.gone:
            return
        self.stamp += 1
        data = bytes((self.stamp + i) % 251 for i in range(size))
        peers.partition.write(channel, 1, [data[: size // 2], memoryview(data)[size // 2 :]])
        self.written[way][channel] += data

    @rule(way=WAYS)
    def flush(self, way: int) -> None:
        for subpartition in self.ways[way].partition.subpartitions:
            if subpartition.flush():
                subpartition.attend()

    @rule(way=WAYS, buffers=st.integers(1, 4))
    def send(self, way: int, buffers: int) -> None:
        self.ways[way].send(self.ways[way].producer, buffers)

    @rule(way=WAYS, size=st.sampled_from([1, 20, 90, 10_000]))
    def arrive(self, way: int, size: int) -> None:
        self.ways[way].deliver(self.ways[way].to_consumer, size)

    @rule(way=WAYS)
    def let_go(self, way: int) -> None:
        self.ways[way].let_go()

    @rule(way=WAYS)
    def answer(self, way: int) -> None:
        """Requests that were not answered when they came."""
        peers = self.ways[way]
        peers.attach = True
        while peers.unanswered:
            peers.answer(peers.unanswered.pop())

    @rule(way=WAYS, channel=CHANNELS, size=st.sampled_from([16, 63, 64, 1000]))
    def resize(self, way: int, channel: int, size: int) -> None:
        peers, channel = self.channel(way, channel)
        peers.consumer.announce_buffer_size(peers.gates[channel].channel, size)
        self.least = min(self.least, size)

    @rule(way=WAYS, channel=CHANNELS)
    def barrier(self, way: int, channel: int) -> None:
        peers, channel = self.channel(way, channel)
        barriers = self.barriers[3 * way + channel]
        barriers[len(barriers) + 1] = len(self.written[way][channel])
        peers.partition.subpartitions[channel].add_barrier(len(barriers))

    @rule(way=WAYS, channel=CHANNELS)
    def resume(self, way: int, channel: int) -> None:
        peers, channel = self.channel(way, channel)
        peers.resume(channel)

    @rule(way=WAYS, channel=CHANNELS, generation=st.sampled_from([1, 2]))
    def resume_something_else(self, way: int, channel: int, generation: int) -> None:
        peers, channel = self.channel(way, channel)
        peers.resume(channel, generation=generation, off=1000 * (generation % 2))

    @rule(way=WAYS, channel=CHANNELS)
    def consume(self, way: int, channel: int) -> None:
        peers, channel = self.channel(way, channel)
        peers.consume(channel)

    @rule(way=WAYS, channel=CHANNELS, reason=st.sampled_from(CancelReason))
    def cancel(self, way: int, channel: int, reason: CancelReason) -> None:
        peers, channel = self.channel(way, channel)
        self.gone.add((way, channel))
        peers.cancel(channel, reason)

    @rule(way=WAYS, channel=CHANNELS)
    def fail(self, way: int, channel: int) -> None:
        """The producer of a channel that is attached."""
        peers, channel = self.channel(way, channel)
        self.gone.add((way, channel))
        peers.producer.fail_producer(peers.gates[channel].channel.id, TaskFailed("it raised"))

    @rule()
    def rest(self) -> None:
        """Everything arrives, and nothing is consumed."""
        for way in (0, 1):
            self.answer(way)
        for _ in range(100):
            for peers in self.ways:
                peers.send(peers.producer)
                peers.let_go()
                peers.deliver(peers.to_consumer, len(peers.to_consumer.under_way))
            if all(peers.resting for peers in self.ways):
                return
        raise AssertionError("still frames to send after 100 rounds")

    @precondition(lambda self: hasattr(self, "ways"))
    @invariant()
    def nothing_is_out_of_order(self) -> None:
        for peers, written in zip(self.ways, self.written, strict=True):
            for read, there in zip(peers.read, written, strict=True):
                assert there.startswith(read)
            for gate in peers.gates:
                assert sum(each.buffer is not None for each in gate.queue) <= gate.channel.credit.granted

    @precondition(lambda self: hasattr(self, "ways"))
    @invariant()
    def nothing_comes_behind_a_barrier_before_it_is_resumed(self) -> None:
        for way, peers in enumerate(self.ways):
            for channel, barrier in enumerate(peers.stands):
                if barrier:
                    assert len(peers.read[channel]) == self.barriers[3 * way + channel][barrier]
                    assert not peers.gates[channel].queue

    @precondition(lambda self: hasattr(self, "ways"))
    @invariant()
    def the_books_balance(self) -> None:
        for peers in self.ways:
            peers.check_ledgers()
        if all(peers.resting for peers in self.ways):
            for peers in self.ways:
                peers.check_that_nobody_waits_for_ever()

    def teardown(self) -> None:
        if not hasattr(self, "ways"):
            return
        if self.flushing is not Flush.ON_REQUEST:
            self.read_all()
            self.check_that_all_is_read("it waits for a flush that never comes")
        for peers in self.ways:
            peers.partition.broadcast_event(EventKind.END_OF_PARTITION)
        self.read_all()
        self.check_that_all_is_read("at the end")
        for number, peers in enumerate(self.ways):
            for channel in range(len(peers.gates)):
                if (number, channel) in self.gone:
                    peers.partition.subpartitions[channel].discard()
                else:
                    assert peers.events[channel] == [EventKind.END_OF_PARTITION]
            assert peers.output.in_use == 0
        sent, received = self.ways[0].counters
        for one, other in ((sent, received), (received, sent)):
            assert one.bytes_out == other.bytes_in
            assert one.frames_out == other.frames_in
            assert one.credits_received == other.credits_granted or self.gone

    def check_that_all_is_read(self, when: str) -> None:
        for number, (peers, written) in enumerate(zip(self.ways, self.written, strict=True)):
            for channel, there in enumerate(written):
                assert peers.read[channel] == there or (number, channel) in self.gone, when

    def read_all(self) -> None:
        for _ in range(400):
            for peers in self.ways:
                for channel, barrier in enumerate(peers.stands):
                    if barrier:
                        peers.resume(channel)
            self.rest()
            self.the_books_balance()
            if not sum(peers.consume(number) for peers in self.ways for number in range(len(peers.gates))):
                break


def test_any_order_of_events(peers_of: Callable[..., Peers]) -> None:
    PEERS[:] = [peers_of]
    run_state_machine_as_test(
        TwoPeers, settings=settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
    )
    assert PEERS
