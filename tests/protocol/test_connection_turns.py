"""Whose turn it is on a connection, and what credit lets leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.wire.frames import EventKind

Peers = Any
BLOCK = bytes(range(64))


def test_each_credit_sends_one_buffer_and_no_more(peers_of: Callable[..., Peers]) -> None:
    """Case 23, PartitionRequestQueueTest."""
    peers = peers_of(channels=1, floating=1)
    peers.request_all()
    for _ in range(6):
        peers.partition.write(0, 1, [BLOCK])
    peers.settle()
    # 2 exclusive and the one floating buffer that the backlog asked for.
    assert len(peers.gates[0].queue) == 3
    assert peers.consume(0)
    peers.settle()
    assert len(peers.gates[0].queue) == 3


def test_credit_runs_dry_when_nothing_is_consumed_and_the_books_agree(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=2)
    peers.request_all()
    for _ in range(8):
        peers.partition.write(0, 1, [BLOCK])
    peers.settle()
    granted, received = peers.counters[1].credits_granted, peers.counters[0].credits_received
    assert granted == received == 2 + 2 + 4
    assert len(peers.gates[0].queue) == 6
    assert peers.gates[0].channel.credit.waiting


def test_events_need_no_credit_and_are_not_held_up_by_another_channel(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=2, exclusive=1, floating=1)
    peers.request_all()
    for _ in range(5):
        peers.partition.write(0, 1, [BLOCK])
    peers.partition.subpartitions[1].add_event(EventKind.END_OF_DATA)
    peers.settle()
    assert peers.consume(1)
    assert peers.events[1] == [EventKind.END_OF_DATA]


def test_an_event_leaves_without_credit_and_takes_none(peers_of: Callable[..., Peers]) -> None:
    """Case 22, PartitionRequestQueueTest."""
    peers = peers_of(channels=1, exclusive=0, floating=1)
    peers.request_all()
    peers.settle()
    (producer,) = peers.producer.producers.channels.values()
    peers.partition.broadcast_event(EventKind.END_OF_DATA)
    peers.settle()
    assert peers.consume(0) and peers.events[0] == [EventKind.END_OF_DATA]
    assert (producer.credit.granted, producer.credit.sent) == (0, 0)
    assert peers.gates[0].channel.credit.granted == 0


def test_nothing_more_is_sent_behind_a_barrier_until_it_is_resumed(peers_of: Callable[..., Peers]) -> None:
    """Cases 24, 33 and 88: credit that is there stays, and the barrier takes none."""
    peers = peers_of(channels=1, floating=1)
    peers.request_all()
    first = peers.partition.subpartitions[0]
    peers.partition.write(0, 1, [BLOCK])
    first.add_barrier(7)
    peers.partition.write(0, 1, [BLOCK])
    peers.settle()
    credit = peers.producer.producers.channels[peers.gates[0].channel.id].credit
    before = credit.available
    assert (len(peers.gates[0].queue), first.view.backlog(), first.backlog()) == (2, 0, 1)
    assert peers.consume(0) and peers.consume(0) and peers.stands == [7]
    peers.settle()
    for wrong in ({"generation": 2}, {"off": 1}, {"off": -1}):
        peers.resume(0, **wrong)
        peers.settle()
        assert not peers.gates[0].queue, wrong
    assert credit.available == before == 2, "it is kept"
    peers.resume(0)
    peers.settle()
    assert len(peers.gates[0].queue) == 1
    peers.resume(0)
    peers.settle()
    assert not peers.gates[0].channel.credit.idle < 0


def test_an_event_behind_a_barrier_needs_no_credit_either(peers_of: Callable[..., Peers]) -> None:
    """Cases 36, 178 and 182: on the channel that is resumed, and on no other."""
    peers = peers_of(channels=2, exclusive=0, floating=1)
    peers.request_all()
    first = peers.partition.subpartitions[0]
    for each in peers.partition.subpartitions:
        each.add_barrier(1)
        each.add_event(EventKind.END_OF_DATA)
    peers.settle()
    for number in (0, 1):
        assert peers.consume(number) and not peers.consume(number)
    peers.resume(0)
    peers.settle()
    assert not peers.consume(1)
    assert peers.consume(0) and peers.events[0] == [EventKind.END_OF_DATA]
    first.add_barrier(2)
    peers.settle()
    assert peers.consume(0)
    peers.resume(0)
    peers.settle()
    assert not peers.gates[0].queue


def test_channels_take_turns_one_buffer_each(peers_of: Callable[..., Peers]) -> None:
    """Case 27, PartitionRequestQueueTest."""
    peers = peers_of(channels=4, floating=4)
    peers.request_all()
    peers.settle()
    for _ in range(2):
        for position in range(4):
            peers.partition.write(position, 1, [BLOCK])
    for _ in range(2):
        peers.move(peers.producer, peers.consumer, buffers=4)
        assert len({len(gate.queue) for gate in peers.gates}) == 1
    assert [len(gate.queue) for gate in peers.gates] == [2, 2, 2, 2]


def test_64_channels_never_differ_by_more_than_one_buffer(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=16, floating=16)
    peers.request_all()
    peers.settle()
    for position in range(16):
        peers.partition.write(position, 1, [BLOCK])
    for taken in range(1, 17):
        peers.move(peers.producer, peers.consumer, buffers=1)
        lengths = [len(gate.queue) for gate in peers.gates]
        assert sum(lengths) == taken
        assert max(lengths) - min(lengths) <= 1


def test_backlog_is_announced_when_there_is_no_credit_to_send_it_with(peers_of: Callable[..., Peers]) -> None:
    """A channel without exclusive buffers lives on announcements and floating buffers alone."""
    peers = peers_of(channels=1, exclusive=0, floating=2)
    peers.request_all()
    peers.settle()
    for _ in range(5):
        peers.partition.write(0, 1, [BLOCK])
    peers.settle()
    assert peers.counters[0].frames_out["backlog_announcement"] >= 1
    for _ in range(5):
        peers.settle()
        assert peers.consume(0)
    assert bytes(peers.read[0]) == BLOCK * 5


def test_an_unanswered_backlog_is_repeated_only_when_it_has_doubled(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1, exclusive=0, floating=1)
    peers.request_all()
    peers.settle()
    peers.partition.write(0, 1, [BLOCK])
    peers.settle()  # announced, answered, sent: the only floating buffer is now in use
    before = peers.counters[0].frames_out["backlog_announcement"]
    announced = []
    for _ in range(8):
        peers.partition.write(0, 1, [BLOCK])
        peers.move(peers.producer, peers.consumer)
        announced.append(peers.counters[0].frames_out["backlog_announcement"] - before)
    assert announced == [1, 2, 2, 3, 3, 3, 3, 4]


def test_idle_channels_hold_no_floating_buffers_for_what_is_sent_and_still_in_the_transport(
    peers_of: Callable[..., Peers],
) -> None:
    peers = peers_of(channels=5, exclusive=0, floating=4)
    peers.request_all()
    peers.settle()
    for number in range(4):
        peers.partition.write(number, 1, [b"row"])
        peers.partition.subpartitions[number].flush()
        peers.partition.subpartitions[number].attend()
    peers.move(peers.producer, peers.consumer)
    peers.move(peers.consumer, peers.producer)
    chunks, held = peers.producer.data_to_send(16)
    peers.consumer.receive(b"".join(chunks), 0.0)
    assert len(held) == 4
    peers.partition.broadcast_watermark(7, False)
    for number in range(4):
        assert peers.consume(number)
    peers.settle()
    for piece in held:
        piece.released()
    peers.partition.write(4, 1, [BLOCK])
    peers.settle()
    while peers.consume(4):
        peers.settle()
    assert peers.read[4] == BLOCK, "its floating buffers wait for data that never come"


@pytest.mark.parametrize(("exclusive", "unread"), [(1, 1), (2, 2), (3, 2), (4, 3)])
def test_adaptive_elements_gather_until_the_consumer_has_read_what_was_sent_before(
    peers_of: Callable[..., Peers], exclusive: int, unread: int
) -> None:
    peers = peers_of(channels=1, exclusive=exclusive, floating=4)
    subpartition = peers.partition.subpartitions[0]
    subpartition.flushing = Flush.ADAPTIVE
    peers.request_all()
    peers.settle()
    for _ in range(unread):
        peers.partition.write(0, 1, [b"a"])
        assert peers.move(peers.producer, peers.consumer) == 1, "little is unread: at once"
    for data in (b"b", b"c", b"d"):
        peers.partition.write(0, 1, [data])
        peers.settle()
    assert [bytes(received.payload) for received in peers.gates[0].queue] == [b"a"] * unread
    assert subpartition.backlog() == 0, "no floating buffer is to wait for it"
    while peers.gates[0].queue[0].rows == 1:
        peers.consume(0)
        peers.settle()
    assert [bytes(received.payload) for received in peers.gates[0].queue][-1] == b"bcd"
    left = len(peers.gates[0].queue)
    peers.partition.write(0, 1, [BLOCK + b"e"])
    peers.settle()
    assert len(peers.gates[0].queue) > left, "a full segment does not wait"
    while peers.consume(0):
        peers.settle()
    assert peers.read == [b"a" * unread + b"bcd" + BLOCK + b"e"]


@pytest.mark.parametrize(("exclusive", "withheld"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_half_of_the_credit_goes_with_what_else_leaves(
    peers_of: Callable[..., Peers], exclusive: int, withheld: int
) -> None:
    peers = peers_of(channels=1, exclusive=exclusive, floating=4)
    peers.request_all()
    peers.settle()
    credit = peers.gates[0].channel.credit

    def read_one() -> None:
        peers.partition.write(0, 1, [BLOCK])
        peers.settle()
        assert peers.consume(0)
        peers.settle()

    for number in range(withheld):
        read_one()
        assert credit.unannounced == number + 1, "nothing is sent for it alone"
    read_one()
    assert (credit.unannounced, credit.granted - credit.received) == (0, exclusive)
    for _ in range(withheld):
        read_one()
    assert peers.counters[1].frames_out["add_credit"] == 1
    peers.consumer.announce_buffer_size(peers.gates[0].channel, len(BLOCK))
    peers.settle()
    assert (credit.unannounced, credit.granted - credit.received) == (0, exclusive)
    assert peers.counters[1].frames_out["add_credit"] == (2 if withheld else 1)
    peers.check_ledgers()


def test_an_adaptive_writer_wakes_the_loop_once_while_its_elements_gather(
    peers_of: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = peers_of(channels=1)
    subpartition = peers.partition.subpartitions[0]
    subpartition.flushing = Flush.ADAPTIVE
    peers.request_all()
    peers.settle()
    for _ in range(2):
        peers.partition.write(0, 1, [b"a"])
        peers.settle()
    woken: list[PipelinedSubpartition] = []
    monkeypatch.setattr(peers.partition, "_notify", lambda each: (woken.append(each), each.attend()))
    for _ in range(10):
        peers.partition.write(0, 1, [b"b"])
    assert len(woken) == 1
    while peers.consume(0):
        pass
    peers.settle()
    peers.partition.write(0, 1, [b"c"])
    assert len(woken) == 2


@pytest.mark.parametrize(("exclusive", "floating"), [(1, 4), (0, 1)])
def test_an_adaptive_writer_wakes_the_loop_once_while_there_is_no_credit(
    peers_of: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch, exclusive: int, floating: int
) -> None:
    peers = peers_of(channels=1, exclusive=exclusive, floating=floating)
    peers.partition.subpartitions[0].flushing = Flush.ADAPTIVE
    peers.request_all()
    peers.settle()
    peers.partition.write(0, 1, [b"a"])
    peers.settle()
    woken: list[PipelinedSubpartition] = []
    monkeypatch.setattr(peers.partition, "_notify", lambda each: (woken.append(each), each.attend()))
    for _ in range(10):
        peers.partition.write(0, 1, [b"b"])
        peers.settle()
    assert len(woken) == 1
    assert peers.consume(0)
    peers.settle()
    assert [bytes(received.payload) for received in peers.gates[0].queue] == [b"b" * 10]


def test_elements_that_are_sent_at_once_gather_while_the_link_or_the_credit_does_not_let_them(
    peers_of: Callable[..., Peers],
) -> None:
    peers = peers_of(channels=1, exclusive=2, floating=1)
    peers.partition.subpartitions[0].flushing = Flush.AT_ONCE
    peers.request_all()
    peers.settle()
    for data in (b"a", b"b"):
        peers.partition.write(0, 1, [data])
        assert peers.move(peers.producer, peers.consumer) == 1, "idle link, credit: at once"
    peers.partition.write(0, 1, [b"c"])
    peers.partition.write(0, 1, [b"d"])
    peers.settle()
    assert [bytes(received.payload) for received in peers.gates[0].queue] == [b"a", b"b", b"cd"]
    for data in (b"e", b"f", b"g"):
        peers.partition.write(0, 1, [data])
        assert peers.move(peers.producer, peers.consumer) == 0, "no credit"
    for _ in range(4):
        peers.consume(0)
        peers.settle()
    assert peers.read == [b"abcdefg"]
    assert peers.counters[0].buffers_out == 4


def test_credit_is_announced_at_half_of_the_initial_credit(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1, exclusive=5, floating=1)
    peers.request_all()
    peers.settle()
    announced = []
    for _ in range(7):
        peers.partition.write(0, 1, [BLOCK])
        peers.settle()
        assert peers.consume(0)
        peers.settle()
        announced.append(peers.counters[1].credits_granted - 5)
    assert announced == [0, 0, 3, 3, 3, 6, 6]


def test_credit_is_never_withheld_from_a_channel_that_has_none_left(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1, exclusive=5, floating=1)
    peers.request_all()
    peers.settle()
    for _ in range(4):
        peers.partition.write(0, 1, [BLOCK])
        peers.settle()
    assert peers.consume(0)
    peers.settle()
    assert peers.counters[1].credits_granted == 5  # one of five: withheld while the producer has one left
    for _ in range(2):
        peers.partition.write(0, 1, [BLOCK])
        peers.settle()
    # The last credit brought one buffer, and with it gone the withheld one the other.
    assert len(peers.gates[0].queue) == 5


def test_all_pending_credit_of_a_connection_leaves_in_one_frame(peers_of: Callable[..., Peers]) -> None:
    """Case 47, CreditBasedPartitionRequestClientHandlerTest."""
    peers = peers_of(channels=4, floating=4)
    peers.request_all()
    peers.settle()
    for number in range(4):
        for _ in range(2):
            peers.partition.write(number, 1, [BLOCK])
    peers.settle()
    before = peers.counters[1].frames_out.get("add_credit", 0)
    for number in range(4):
        assert peers.consume(number) and peers.consume(number)
    peers.settle()
    assert peers.counters[1].frames_out["add_credit"] == before + 1
    assert peers.counters[0].credits_received == peers.counters[1].credits_granted > 8


# --- deadlocks seen elsewhere -----------------------------------------------------------------------------


@pytest.mark.parametrize("flushing", Flush)
@pytest.mark.parametrize("exclusive", [2, 3, 8])
def test_an_element_that_needs_more_than_the_credit_that_is_left_arrives_while_some_is_withheld(
    peers_of: Callable[..., Peers], exclusive: int, flushing: Flush
) -> None:
    """A window update that waits until half is free, and a sender that waits for room for all it has, wait
    for each other. The only floating buffer is in another channel."""
    withheld = 0
    for read_before in range(exclusive):
        peers = peers_of(channels=2, exclusive=exclusive, floating=1)
        peers.partition.subpartitions[0].flushing = flushing
        peers.request_all()
        for _ in range(exclusive + 1):
            peers.partition.write(1, 1, [BLOCK])
        peers.settle()
        for _ in range(read_before):
            peers.partition.write(0, 1, [BLOCK])
            peers.settle()
            assert peers.consume(0)
        peers.settle()
        (producer, _) = peers.producer.producers.channels.values()
        withheld += peers.gates[0].channel.credit.unannounced
        assert producer.credit.available <= exclusive
        peers.partition.write(0, 1, [BLOCK * exclusive, b"and the rest"])
        peers.partition.subpartitions[0].flush()
        peers.settle()
        while peers.consume(0):
            peers.settle()
        assert peers.read[0] == BLOCK * (read_before + exclusive) + b"and the rest"
        assert not peers.gates[1].pool.available and len(peers.gates[1].queue) == exclusive + 1
    assert withheld or exclusive == 2, "half of two is withheld from nobody"


def test_channels_that_nobody_reads_block_none_that_somebody_waits_for(
    peers_of: Callable[..., Peers],
) -> None:
    """Each task writes its next element once it has read one of the other's. Both directions of their
    connection have a full channel as well, whose consumer waits for the end of that exchange."""
    there = peers_of(channels=2, floating=1)
    back = peers_of(channels=2, floating=1, over=there)
    for way in (there, back):
        way.request_all()
        for _ in range(20):
            way.partition.write(0, 1, [BLOCK])
        way.settle()
    full = [len(way.gates[0].queue) for way in (there, back)]
    assert full == [3, 3]
    for number in range(50):
        for way in (there, back):
            way.partition.write(1, 1, [bytes([number]) * 100])
            way.partition.subpartitions[1].flush()
            way.partition.subpartitions[1].attend()
            way.settle()
            while way.consume(1):
                way.settle()
            assert way.read[1][-100:] == bytes([number]) * 100
    assert [len(way.gates[0].queue) for way in (there, back)] == full
    for way in (there, back):
        while way.consume(0):
            way.settle()
        assert way.read[0] == BLOCK * 20


@pytest.mark.parametrize("together", [False, True], ids=["spread", "burst"])
def test_a_thousand_slow_channels_leave_nine_tenths_of_a_link_to_one_that_is_full(
    peers_of: Callable[..., Peers], together: bool
) -> None:
    """One second of a link of 100 MB/s, as 100 steps of 32 buffers of 32 KiB; each of the slow channels has
    1 KB to send in it, all at different times or all at once. Sizes are divided by 512."""
    slow, steps, step_bytes, full = 1_000, 100, 32 * len(BLOCK), 1_000
    peers = peers_of(channels=slow + 1, exclusive=2, floating=32, segments=1_200)
    for subpartition in peers.partition.subpartitions:
        subpartition.flushing = Flush.AT_ONCE
    peers.request_all()
    peers.settle()
    sent = 0
    for step in range(steps):
        for number in range(slow):
            if (0 if together else number % steps) == step:
                peers.partition.write(number, 1, [b"1K"])
        left = step_bytes
        while left > 0:
            while peers.partition.subpartitions[full].backlog() < 32:
                peers.partition.write(full, 1, [BLOCK])
            chunks, pieces = peers.producer.data_to_send(16)
            sizes = [piece.size for piece in pieces]
            assert sizes, "the link is idle"
            left -= sum(sizes)
            sent += len(BLOCK) * sizes.count(len(BLOCK))
            for piece in pieces:
                piece.released()
            peers.consumer.receive(b"".join(chunks), 0.0)
            for gate in peers.gates:
                while gate.queue:
                    gate.channel.consumed(gate.queue.popleft())
                    peers.consumer.announce_credit(gate.channel)
            peers.producer.receive(b"".join(peers.consumer.data_to_send(1)[0]), 0.0)
    assert sent >= 0.9 * steps * step_bytes
    assert sum(each.buffers_out for each in peers.partition.subpartitions[:slow]) == slow, (
        "and they have sent"
    )
