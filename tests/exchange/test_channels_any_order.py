"""Input channels in any order of attachments, writes, moves, polls and buffers that come home."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minishuffle.errors import PeerLost, TaskFailed
from minishuffle.exchange.channels import RemoteAttachment
from minishuffle.protocol.channel import Received
from minishuffle.wire.frames import EventKind
from support.exchanges import EXCLUSIVE, FLOATING, SEGMENT_BYTES, Exchange
from support.soak import examples

MOVES = {
    "nothing": 1,
    "write": 9,
    "arrive": 14,
    "poll": 6,
    "give_back": 7,
    "attach": 2,
    "send": 2,
    "let_go": 1,
    "answer": 1,
    "flush": 2,
    "settle": 1,
    "read_all": 1,
    "resize": 1,
    "detach": 1,
    "fail": 1,
    "producer_fails": 1,
    "cut": 1,
    "end": 1,
    "put_barrier": 1,
    "end_barriers": 2,
}
"""The methods of :class:`AnyOrder` that are drawn, and how often."""
DRAWN = st.tuples(
    st.sampled_from([name for name, weight in MOVES.items() for _ in range(weight)]),
    st.integers(0, 1),
    st.integers(0, 59),
)
"""A move, which channel or which way, and a number that each makes of what it needs."""


class AnyOrder:
    """Writes, flushes, moves of bytes, polls and buffers that come home, between attachments of any kind.
    Cases 91 and 94, RemoteInputChannelTest."""

    def __init__(self, exclusive: int, floating: int, answers: bool) -> None:
        self.exchange = Exchange(
            channels=2, tolerant=True, exclusive=exclusive, floating=floating, answers=answers
        )
        self.ended: set[int] = set()
        self.least = SEGMENT_BYTES
        """The smallest buffer size that was announced."""
        self.barriers: list[list[tuple[int, int]]] = [[], []]
        """By channel: barriers, and the first row that is behind each."""
        self.barrier = self.over = 0
        for number in (0, 1):
            self.exchange.attach_remote(number)
        self.exchange.move(to_consumer=False)

    def nothing(self, number: int, choice: int) -> None:
        """What Hypothesis puts in the place of each move that makes no difference."""

    def write(self, number: int, choice: int) -> None:
        output, size = self.exchange.output, (1, 40, 90, 3 * SEGMENT_BYTES)[choice % 4]
        if number not in self.ended and output.maximum - output.in_use > 2 + (size + 60) // self.least:
            self.exchange.write(number, size)

    def end(self, number: int, choice: int) -> None:
        if number not in self.ended:
            self.ended.add(number)
            self.exchange.partitions[number].broadcast_event(EventKind.END_OF_PARTITION)

    def put_barrier(self, number: int, choice: int) -> None:
        """Over all channels, as a pause does, the last one over or not."""
        self.barrier += 1
        for number in {0, 1} - self.ended:
            self.barriers[number].append((self.barrier, self.exchange.written))
            self.exchange.partitions[number].broadcast_barrier(self.barrier)

    def end_barriers(self, number: int, choice: int) -> None:
        self.over = self.barrier
        self.exchange.gate.end_barriers(self.over)
        for partition in self.exchange.partitions:
            partition.end_barriers(self.over)

    def flush(self, number: int, choice: int) -> None:
        self.exchange.flush(number)

    def attach(self, number: int, choice: int) -> None:
        getattr(self.exchange, "attach_local" if choice % 4 == 0 else "attach_remote")(number)

    def detach(self, number: int, choice: int) -> None:
        self.exchange.channels[number].detach()

    def fail(self, number: int, choice: int) -> None:
        """A failure of the current generation, attached or not, which may be said twice."""
        self.exchange.channels[number].fail(self.exchange.generations[number], PeerLost("failed"))

    def producer_fails(self, number: int, choice: int) -> None:
        """And another attempt goes on, whose partition this is too."""
        self.exchange.partitions[number].fail(TaskFailed("the producer raised"))
        self.exchange.partitions[number].subpartitions[0].error = None

    def resize(self, number: int, choice: int) -> None:
        size = (9, 40, SEGMENT_BYTES - 1, SEGMENT_BYTES, 1000)[choice % 5]
        self.exchange.resize(size)
        self.least = min(self.least, size)

    def send(self, number: int, choice: int) -> None:
        self.exchange.send(to_consumer=bool(number), buffers=1 + choice % 16)

    def arrive(self, number: int, choice: int) -> None:
        """All, a few bytes, or all but the last of them; half of the time of what is sent now, too."""
        if choice % 2:
            self.exchange.send(to_consumer=bool(number))
        self.exchange.arrive(to_consumer=bool(number), size=(None, 60, -1)[choice % 3])

    def answer(self, number: int, choice: int) -> None:
        self.exchange.answer()

    def let_go(self, number: int, choice: int) -> None:
        self.exchange.let_go()

    def settle(self, number: int, choice: int) -> None:
        self.exchange.settle()

    def poll(self, number: int, choice: int) -> None:
        for _ in range(1 + choice % 4):
            self.exchange.poll()

    def give_back(self, number: int, choice: int) -> None:
        """In any order. It may serve another attachment that waits, but is credit to its own alone."""
        returned, short = self.exchange.returned, self.exchange.gate.buffers.short
        if not returned:
            return
        buffer = returned.pop(choice % len(returned))
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

    def cut(self, number: int, choice: int) -> None:
        self.exchange.cut()

    def read_all(self, number: int, choice: int) -> None:
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

    def check(self) -> None:
        """After each move."""
        self.each_segment_is_in_one_place()
        self.ledgers_hold()
        self.rows_come_once_and_in_order()
        self.no_row_is_read_behind_a_barrier_that_is_not_over()
        self.each_generation_is_drained_once()

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
        read += [each.consumer._arriving for each in attachments]
        there += [item.buffer for item in read if isinstance(item, Received) and item.buffer is not None]
        assert len({id(buffer) for buffer in there}) == len(there) == exchange.gate.buffers.pool.in_use

    def ledgers_hold(self) -> None:
        self.exchange.validate()
        self.exchange.check_ledgers()
        buffers = self.exchange.gate.buffers
        snapshot = self.exchange.gate.snapshot()
        assert buffers.pool.in_use <= buffers.pool.size
        assert buffers.exclusive_held == snapshot.exclusive_capacity < buffers.pool.minimum
        assert 0 <= snapshot.exclusive_used <= snapshot.exclusive_capacity <= 2 * EXCLUSIVE
        assert 0 <= snapshot.floating_used <= buffers.pool.size
        if self.exchange.gate.unused:
            attachments = (each.attachment for each in self.exchange.channels)
            remote = [each for each in attachments if isinstance(each, RemoteAttachment)]
            arriving = sum(each.consumer._arriving is not None for each in remote)
            used = snapshot.exclusive_used + snapshot.floating_used
            assert used <= len(self.exchange.returned) + arriving
            assert snapshot.queue_buffers == snapshot.channels_starved == 0

    def rows_come_once_and_in_order(self) -> None:
        for read in self.exchange.read:
            assert all(one < other for one, other in zip(read, read[1:], strict=False))

    def no_row_is_read_behind_a_barrier_that_is_not_over(self) -> None:
        for read, barriers in zip(self.exchange.read, self.barriers, strict=True):
            behind = [row for barrier, row in barriers if barrier > self.over]
            assert not read or not behind or read[-1] < behind[0]

    def each_generation_is_drained_once(self) -> None:
        drained = [(number, g) for number, g, event in self.exchange.events if event == "drain"]
        assert len(drained) == len(set(drained))

    def finish(self) -> None:
        """Everything is read first, or what was delivered at least."""
        exchange = self.exchange
        if len(exchange.events) % 2:
            for channel in exchange.channels:
                channel.detach()
            exchange.poll_all()
            assert not any(channel.queue for channel in exchange.channels)
        else:
            self.end_barriers(0, 0)
            self.read_all(0, 0)
        exchange.close()
        for channel, read in zip(exchange.channels, exchange.read, strict=True):
            received = sum(a.rows_received for a in exchange.attachments if a.channel is channel)
            assert received == len(read) + channel.rows_incomplete + channel.rows_discarded
        self.exchange.network.validate()


@settings(max_examples=examples(60))
@given(
    exclusive=st.integers(0, EXCLUSIVE),
    floating=st.integers(1, FLOATING),
    answers=st.booleans(),
    moves=st.lists(DRAWN, min_size=60, max_size=60),
)
def test_any_order_of_events(exclusive: int, floating: int, answers: bool, moves: list[Any]) -> None:
    machine = AnyOrder(exclusive, floating, answers)
    for name, number, choice in moves:
        getattr(machine, name)(number, choice)
        machine.check()
    machine.finish()
    assert machine.exchange.network.free == machine.exchange.network.total
