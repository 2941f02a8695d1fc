"""Input channels in any order of attachments, writes, moves, polls and buffers that come home."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minishuffle.errors import PeerLost, TaskFailed
from minishuffle.exchange.channels import (
    RemoteAttachment,
)
from minishuffle.protocol.channel import Received
from minishuffle.wire.frames import EventKind
from support.exchanges import EXCLUSIVE, SEGMENT_BYTES, Exchange
from support.soak import examples

NUMBERS = st.integers(0, 1)


class AnyOrder(RuleBasedStateMachine):
    """Writes, flushes, moves of bytes, polls and buffers that come home, between attachments of any kind.
    Cases 91 and 94, RemoteInputChannelTest."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange = Exchange(channels=2, tolerant=True)
        self.ended: set[int] = set()
        self.least = SEGMENT_BYTES
        """The smallest buffer size that was announced."""
        self.barriers: list[list[tuple[int, int]]] = [[], []]
        """By channel: barriers, and the first row that is behind each."""
        self.barrier = self.over = 0

    @rule(number=NUMBERS, size=st.sampled_from([1, 40, 90, 3 * SEGMENT_BYTES]))
    def write(self, number: int, size: int) -> None:
        output = self.exchange.output
        if number not in self.ended and output.maximum - output.in_use > 2 + (size + 60) // self.least:
            self.exchange.write(number, size)

    @rule(number=NUMBERS)
    def end(self, number: int) -> None:
        if number not in self.ended:
            self.ended.add(number)
            self.exchange.partitions[number].broadcast_event(EventKind.END_OF_PARTITION)

    @rule()
    def put_barrier(self) -> None:
        """Over all channels, as a pause does, the last one over or not."""
        self.barrier += 1
        for number in {0, 1} - self.ended:
            self.barriers[number].append((self.barrier, self.exchange.written))
            self.exchange.partitions[number].broadcast_barrier(self.barrier)

    @rule()
    def end_barriers(self) -> None:
        self.over = self.barrier
        self.exchange.gate.end_barriers(self.over)
        for partition in self.exchange.partitions:
            partition.end_barriers(self.over)

    @rule(number=NUMBERS)
    def flush(self, number: int) -> None:
        self.exchange.flush(number)

    @rule(number=NUMBERS, kind=st.sampled_from(["local", "remote"]))
    def attach(self, number: int, kind: str) -> None:
        getattr(self.exchange, f"attach_{kind}")(number)

    @rule(number=NUMBERS)
    def detach(self, number: int) -> None:
        self.exchange.channels[number].detach()

    @rule(number=NUMBERS)
    def fail(self, number: int) -> None:
        """A failure of the current generation, attached or not, which may be said twice."""
        self.exchange.channels[number].fail(self.exchange.generations[number], PeerLost("failed"))

    @rule(number=NUMBERS)
    def producer_fails(self, number: int) -> None:
        """And another attempt goes on, whose partition this is too."""
        self.exchange.partitions[number].fail(TaskFailed("the producer raised"))
        self.exchange.partitions[number].subpartitions[0].error = None

    @rule(size=st.sampled_from([9, 40, SEGMENT_BYTES - 1, SEGMENT_BYTES, 1000]))
    def resize(self, size: int) -> None:
        self.exchange.resize(size)
        self.least = min(self.least, size)

    @rule(to_consumer=st.booleans(), buffers=st.integers(1, 16))
    def move(self, to_consumer: bool, buffers: int) -> None:
        self.exchange.move(to_consumer=to_consumer, buffers=buffers)

    @rule()
    def settle(self) -> None:
        self.exchange.settle()

    @rule(count=st.integers(1, 4))
    def poll(self, count: int) -> None:
        for _ in range(count):
            self.exchange.poll()

    @precondition(lambda self: self.exchange.returned)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        """In any order. It may serve another attachment that waits, but is credit to its own alone."""
        returned, short = self.exchange.returned, self.exchange.gate.buffers.short
        buffer = returned.pop(data.draw(st.integers(0, len(returned) - 1)))
        others = [
            attachment.consumer.credit
            for attachment in self.exchange.attachments
            if isinstance(attachment, RemoteAttachment)
            and attachment is not buffer.attachment
            and not (attachment.consumer.credit.waiting or attachment in short)
        ]
        before = [credit.granted + credit.unannounced for credit in others]
        buffer.attachment.consumed(buffer)
        assert [credit.granted + credit.unannounced for credit in others] == before

    @rule()
    def cut(self) -> None:
        self.exchange.cut()

    @rule()
    def read_all(self) -> None:
        """Whoever has backlog and a consumer gets a buffer in the end, if the task reads; behind a barrier
        there is none."""
        exchange = self.exchange
        while True:
            exchange.settle()
            exchange.poll_all()
            if not exchange.returned:
                break
            exchange.give_back(len(exchange.returned))
        for partition in exchange.partitions:
            view = partition.subpartitions[0].view
            assert view is None or view.backlog() == 0

    @invariant()
    def each_segment_is_in_one_place(self) -> None:
        """Free in an attachment, arriving, in a queue, in the task's hands, or on its way home."""
        exchange = self.exchange
        known = {*exchange.attachments, *(channel.attachment for channel in exchange.channels)}
        attachments = [each for each in known if isinstance(each, RemoteAttachment)]
        there = [buffer for each in attachments for buffer in each.consumer.credit.exclusive]
        there += [buffer for each in attachments for buffer in each.consumer.credit.floating]
        read = [each.current for each in exchange.channels] + exchange.returned
        for channel in exchange.channels:
            read += channel.queue
        there += [item.buffer for item in read if isinstance(item, Received) and item.buffer is not None]
        assert len({id(buffer) for buffer in there}) == len(there) == exchange.gate.buffers.pool.in_use

    @invariant()
    def both_ends_agree(self) -> None:
        """What one has granted or sent has reached the other, or is on its way."""
        for credit, sent in self.exchange.ledgers():
            assert 0 <= sent.available <= credit.granted - credit.received

    @invariant()
    def ledgers_hold(self) -> None:
        self.exchange.validate()
        buffers = self.exchange.gate.buffers
        snapshot = self.exchange.gate.snapshot()
        assert buffers.pool.in_use <= buffers.pool.size
        assert buffers.exclusive_held == snapshot.exclusive_capacity < buffers.pool.minimum
        assert 0 <= snapshot.exclusive_used <= snapshot.exclusive_capacity <= 2 * EXCLUSIVE
        assert 0 <= snapshot.floating_used <= buffers.pool.size

    @invariant()
    def rows_come_once_and_in_order(self) -> None:
        for read in self.exchange.read:
            assert all(one < other for one, other in zip(read, read[1:], strict=False))

    @invariant()
    def no_row_is_read_behind_a_barrier_that_is_not_over(self) -> None:
        for read, barriers in zip(self.exchange.read, self.barriers, strict=True):
            behind = [row for barrier, row in barriers if barrier > self.over]
            assert not read or not behind or read[-1] < behind[0]

    @invariant()
    def each_generation_is_drained_once(self) -> None:
        drained = [(number, g) for number, g, event in self.exchange.events if event == "drain"]
        assert len(drained) == len(set(drained))

    def teardown(self) -> None:
        """Half of the channels are read to their end first."""
        exchange = self.exchange
        if len(exchange.events) % 2:
            for channel in exchange.channels:
                channel.detach()
            exchange.poll_all()
            assert not any(channel.queue for channel in exchange.channels)
        exchange.close()
        for channel, read in zip(exchange.channels, exchange.read, strict=True):
            received = sum(a.rows_received for a in exchange.attachments if a.channel is channel)
            assert received == len(read) + channel.rows_incomplete + channel.rows_discarded
        self.exchange.network.validate()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
