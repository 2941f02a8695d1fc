"""Two connections in any order of writes, flushes, moves of bytes and consumed buffers, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minishuffle.errors import TaskFailed
from minishuffle.exchange.buffers import Flush
from minishuffle.wire.frames import CancelReason, EventKind
from support.soak import examples

Peers = Any
MOVES = {
    "nothing": 1,
    "write": 6,
    "consume": 5,
    "arrive": 8,
    "send": 2,
    "let_go": 1,
    "flush": 1,
    "answer": 1,
    "resize": 1,
    "barrier": 1,
    "resume": 2,
    "resume_something_else": 1,
    "rest": 1,
    "cancel": 1,
    "fail": 1,
}
"""The methods of :class:`TwoPeers` that are drawn, and how often. (As rules of a state machine of Hypothesis
they would seldom move data: it leaves many rules out of each example.)"""
DRAWN = st.tuples(
    st.sampled_from([name for name, weight in MOVES.items() for _ in range(weight)]),
    st.sampled_from([0, 0, 1]),
    st.integers(0, 2),
    st.integers(0, 199),
)
"""A move, which way, which channel, and a number that each makes of what it needs."""


class TwoPeers:
    """Any order of writing, flushing, sending, arriving, cancelling and consuming: nothing is lost, doubled
    or reordered, the ledgers of both ends agree with what is on its way, and nobody waits for ever.

    Each peer produces and consumes; what one sends arrives as late as it happens, in pieces of any length,
    whatever comes the other way meanwhile. Cases 92 and 93, RemoteInputChannelTest.
    """

    def __init__(self, there: Peers, back: Peers, flushing: Flush) -> None:
        self.ways = (there, back)
        self.flushing = flushing
        for way in self.ways:
            for subpartition in way.partition.subpartitions:
                subpartition.flushing = flushing
            way.request_all()
            way.move(way.consumer, way.producer)
        self.written = [[bytearray() for _ in way.gates] for way in self.ways]
        self.gone: set[tuple[int, int]] = set()
        """Channels that were cancelled, or whose producer has failed."""
        self.stamp = 0
        self.least = 64
        """The smallest buffer size that was announced."""
        self.barriers: list[dict[int, int]] = [{} for _ in range(2 * 3)]
        """By way and channel, bytes that were written before each barrier."""

    def move(self, name: str, way: int, channel: int, number: int) -> None:
        getattr(self, name)(way, channel % len(self.ways[way].gates), number)
        self.check()

    # --- moves ------------------------------------------------------------------------------------

    def nothing(self, *_: int) -> None:
        """What Hypothesis puts in the place of each move that makes no difference."""

    def write(self, way: int, channel: int, number: int) -> None:
        peers, size = self.ways[way], 1 + number
        full = peers.output.size - peers.output.in_use < 2 + size // self.least
        if full or (way, channel) in self.gone:
            return
        self.stamp += 1
        data = bytes((self.stamp + i) % 251 for i in range(size))
        peers.partition.write(channel, 1, [data[: size // 2], memoryview(data)[size // 2 :]])
        self.written[way][channel] += data

    def flush(self, way: int, channel: int, number: int) -> None:
        for subpartition in self.ways[way].partition.subpartitions:
            if subpartition.flush():
                subpartition.attend()

    def send(self, way: int, channel: int, number: int) -> None:
        self.ways[way].send(self.ways[way].producer, 1 + number % 4)

    def arrive(self, way: int, channel: int, number: int) -> None:
        """All, a few bytes, or all but the last of them; half of the time of what is sent now, too."""
        peers = self.ways[way]
        if number % 2:
            peers.send(peers.producer)
        peers.deliver(peers.to_consumer, (None, 40 + number % 50, -1)[number % 3])

    def let_go(self, way: int, channel: int, number: int) -> None:
        self.ways[way].let_go()

    def answer(self, way: int, channel: int, number: int) -> None:
        """Requests that were not answered when they came."""
        peers = self.ways[way]
        peers.attach = True
        while peers.unanswered:
            peers.answer(peers.unanswered.pop())

    def resize(self, way: int, channel: int, number: int) -> None:
        peers, size = self.ways[way], (16, 63, 64, 1000)[number % 4]
        peers.consumer.announce_buffer_size(peers.gates[channel].channel, size)
        self.least = min(self.least, size)

    def barrier(self, way: int, channel: int, number: int) -> None:
        barriers = self.barriers[3 * way + channel]
        barriers[len(barriers) + 1] = len(self.written[way][channel])
        self.ways[way].partition.subpartitions[channel].add_barrier(len(barriers))

    def resume(self, way: int, channel: int, number: int) -> None:
        self.ways[way].resume(channel)

    def resume_something_else(self, way: int, channel: int, number: int) -> None:
        generation = 1 + number % 2
        self.ways[way].resume(channel, generation=generation, off=1000 * (generation % 2))

    def consume(self, way: int, channel: int, number: int) -> None:
        self.ways[way].consume(channel)

    def cancel(self, way: int, channel: int, number: int) -> None:
        """A channel, or the one that a buffer is just arriving on."""
        gates = self.ways[way].gates
        arriving = [each for each, gate in enumerate(gates) if gate.channel._arriving is not None]
        if number < 50 or arriving:
            channel = arriving[0] if arriving else channel
            self.gone.add((way, channel))
            self.ways[way].cancel(channel, list(CancelReason)[number % len(CancelReason)])

    def fail(self, way: int, channel: int, number: int) -> None:
        """The producer of a channel that is attached."""
        if number < 50:
            peers = self.ways[way]
            self.gone.add((way, channel))
            peers.producer.fail_producer(peers.gates[channel].channel.id, TaskFailed("it raised"))

    def rest(self, *_: int) -> None:
        """Everything arrives, and nothing is consumed."""
        for way in (0, 1):
            self.answer(way, 0, 0)
        for _ in range(100):
            for peers in self.ways:
                peers.move(peers.producer, peers.consumer)
            if all(peers.resting for peers in self.ways):
                return
        raise AssertionError("still frames to send after 100 rounds")

    # --- what holds -------------------------------------------------------------------------------

    def check(self) -> None:
        """After each move."""
        for peers, written in zip(self.ways, self.written, strict=True):
            for read, there in zip(peers.read, written, strict=True):
                assert there.startswith(read)
            for gate in peers.gates:
                data = sum(received.buffer is not None for received in gate.queue)
                assert data <= gate.channel.credit.granted
            peers.check_ledgers()
        self.check_barriers()
        if all(peers.resting for peers in self.ways):
            for peers in self.ways:
                peers.check_that_nobody_waits_for_ever()

    def check_barriers(self) -> None:
        """Nothing comes behind a barrier before it is resumed."""
        for way, peers in enumerate(self.ways):
            for channel, barrier in enumerate(peers.stands):
                if barrier:
                    assert len(peers.read[channel]) == self.barriers[3 * way + channel][barrier]
                    assert not peers.gates[channel].queue

    def finish(self) -> None:
        """Everything is read to its end."""
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
            self.check()
            if not sum(peers.consume(number) for peers in self.ways for number in range(len(peers.gates))):
                break


def test_any_order_of_events(peers_of: Callable[..., Peers]) -> None:
    @settings(max_examples=examples(60))
    @given(
        channels=st.integers(1, 3),
        exclusive=st.integers(0, 9),
        floating=st.integers(1, 4),
        flushing=st.sampled_from(Flush),
        attach=st.booleans(),
        moves=st.lists(DRAWN, min_size=60, max_size=60),
    )
    def any_order(
        channels: int, exclusive: int, floating: int, flushing: Flush, attach: bool, moves: Any
    ) -> None:
        there = peers_of(channels=channels, exclusive=exclusive, floating=floating, attach=attach)
        two = TwoPeers(there, peers_of(channels=1, floating=2, attach=attach, over=there), flushing)
        for name, way, channel, number in moves:
            two.move(name, way, channel, number)
        two.finish()

    any_order()
