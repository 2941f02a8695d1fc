"""A gate's buffers: floating ones go to the channels that wait, and all come home when it is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from minishuffle.counters import TCP_LIMITS, GateSnapshot
from minishuffle.errors import PeerLost
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.wire.frames import EventKind
from support.links import consumer_of
from support.reader import Reader

if TYPE_CHECKING:
    from conftest import Setup

SEGMENT_BYTES = 256


# --- floating buffers -----------------------------------------------------------------------------------


def floating_all_at_one_channel(make_setup: type[Setup], segments: int = 512) -> Setup:
    """Four channels with one exclusive buffer each; the first has all three floating ones in its queue,
    the others wait for two each."""
    setup = make_setup(remote=4, exclusive=1, floating=3, segments=segments)
    first, *others = setup.remotes
    consumer_of(first).on_backlog(3)
    assert consumer_of(first).credit.take_unannounced() == 3
    for channel in others:
        consumer_of(channel).on_backlog(1)
        assert consumer_of(channel).credit.waiting
    assert setup.waiting() == others
    for number in range(3):
        setup.arrive(first, setup.element([number]))
    return setup


def test_floating_buffers_go_to_the_waiting_channels_one_each_in_turn(make_setup: type[Setup]) -> None:
    """Case 86, RemoteInputChannelTest."""
    setup = floating_all_at_one_channel(make_setup)
    _, *others = setup.remotes
    for number in range(3):
        assert setup.gate.poll() is not None
        assert [len(consumer_of(channel).credit.floating) for channel in others] == [
            1 if position <= number else 0 for position in range(3)
        ]
    assert [consumer_of(channel).credit.unannounced for channel in others] == [1, 1, 1]
    assert not setup.gate.buffers.line
    assert setup.pool.in_use == 4 + 3


def test_a_channel_that_wants_more_goes_to_the_end_of_the_line(make_setup: type[Setup]) -> None:
    setup = floating_all_at_one_channel(make_setup)
    _, second, third, fourth = setup.remotes
    consumer_of(second).on_backlog(2)
    assert setup.gate.poll() is not None
    assert setup.waiting() == [third, fourth, second]
    assert setup.gate.poll() is not None
    assert setup.gate.poll() is not None
    assert setup.waiting() == [second]
    assert setup.gate.snapshot().channels_starved == 1


def test_a_channel_that_requires_more_than_there_is_waits_until_it_has_that(make_setup: type[Setup]) -> None:
    """Case 83, RemoteInputChannelTest."""
    setup = make_setup(remote=2, exclusive=2, floating=14)
    channel, other = setup.remotes
    consumer, credit = consumer_of(channel), consumer_of(channel).credit
    consumer_of(other).on_backlog(2)
    consumer_of(other).credit.take_unannounced()
    for _ in range(2):
        setup.arrive(other, setup.element(["floating"]))
    setup.arrive(channel, setup.element(["exclusive"]))
    consumer.on_backlog(14)
    assert (credit.required, credit.idle, credit.waiting) == (16, 13, True)
    assert setup.waiting() == [channel]
    consumer.on_backlog(16)
    assert (credit.required, credit.idle) == (18, 13)
    assert setup.waiting() == [channel], "it stands there once"
    consumer.on_backlog(13)
    assert (credit.required, credit.idle) == (15, 13)
    items = [setup.gate.poll() for _ in range(2)]
    assert all(item is not None for item in items)
    assert (credit.idle, setup.waiting()) == (15, []), "an exclusive one that came home, and a floating one"
    assert setup.gate.poll() is not None
    assert (credit.idle, len(credit.exclusive), len(credit.floating)) == (15, 2, 13)
    assert setup.pool.in_use == 2 * 2 + 13, "the last one is the pool's again"


def test_what_a_channel_has_beyond_its_requirement_goes_back_for_an_exclusive_buffer(
    make_setup: type[Setup],
) -> None:
    """Case 84, RemoteInputChannelTest."""
    setup = make_setup(remote=1, exclusive=2, floating=4)
    (channel,) = setup.remotes
    credit = consumer_of(channel).credit
    setup.arrive(channel, setup.element(["a"]), backlog=2)
    assert (credit.required, credit.idle, len(credit.floating)) == (4, 4, 3)
    credit.take_unannounced()
    in_use = setup.pool.in_use
    assert setup.gate.poll() is not None
    assert (credit.idle, len(credit.floating), credit.unannounced) == (4, 2, 0)
    assert setup.pool.in_use == in_use - 1


def test_each_limit_is_noted_when_the_first_channel_hits_it(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=2, exclusive=1, floating=1)
    hit: list[str] = []
    setup.gate.buffers.on_limit = hit.append
    first, second = setup.remotes
    setup.arrive(first, setup.element([1]))
    assert hit == ["exclusive"]
    setup.arrive(second, setup.element([2]))
    consumer_of(first).on_backlog(1)
    consumer_of(second).on_backlog(1)
    assert hit == ["exclusive", "floating", "credit"]
    assert setup.rows() == [1, 2]
    setup.arrive(first, setup.element([3]))
    assert hit == ["exclusive", "floating", "credit"]


@pytest.mark.parametrize(("maximum", "global_pool"), [(3, False), (9, True)])
def test_stages_of_a_channel_without_credit_are_noted_when_it_waits(maximum: int, global_pool: bool) -> None:
    pool = NetworkBufferPool(3, SEGMENT_BYTES).create_pool("gate", 1, maximum)
    buffers, hit = GateBuffers(pool, SEGMENT_BYTES, 1, 2, credit=False), list[str]()
    buffers.on_limit = hit.append
    reader = Reader()
    taken = [buffers.request_floating() for _ in range(4)]
    assert [segment is None for segment in taken] == [False] * 3 + [True]
    buffers.note_limits(reader.channel)
    buffers.note_limits(reader.channel)
    wanted = [limit for limit in TCP_LIMITS[:4] if limit != "global_pool" or global_pool]
    assert hit == wanted and not buffers.take_exclusive()


def test_a_waiting_channel_that_fails_leaves_the_line_and_its_buffers_to_the_others(
    make_setup: type[Setup],
) -> None:
    setup = floating_all_at_one_channel(make_setup)
    _, second, third, fourth = setup.remotes
    consumer_of(second).fail(PeerLost("gone"))
    assert consumer_of(third).credit.unannounced == 1, "the exclusive buffer of the one that failed"
    assert setup.waiting() == [fourth]
    with pytest.raises(PeerLost, match="gone"):
        setup.rows()


def test_a_shrunken_pool_takes_floating_buffers_back_and_serves_the_line_when_it_grows(
    make_setup: type[Setup],
) -> None:
    setup = floating_all_at_one_channel(make_setup, segments=7)
    _, *others = setup.remotes
    assert setup.network.free == 0
    other = setup.network.create_pool("other", 2, 2)
    assert setup.pool.size == 5
    assert setup.gate.poll() is not None
    assert setup.gate.poll() is not None
    assert setup.network.free == 2
    assert setup.waiting() == others
    other.destroy()
    assert setup.pool.size == 7
    assert [consumer_of(channel).credit.unannounced for channel in others] == [1, 1, 0]
    assert setup.waiting() == [others[2]]


def test_snapshot_says_what_is_used_and_who_starves(make_setup: type[Setup]) -> None:
    """Cases 114, 121, 122 and 144, RemoteInputChannelTest and InputBuffersMetricsTest and
    SingleInputGateTest."""
    setup = floating_all_at_one_channel(make_setup)
    assert setup.gate.snapshot() == GateSnapshot(
        queue_buffers=3,
        exclusive_used=0,
        exclusive_capacity=4,
        floating_used=3,
        floating_capacity=3,
        channels=4,
        channels_starved=3,
        credits_announced=4,
        credits_unannounced=0,
        watermark=None,
    )
    setup.arrive(setup.remotes[1], setup.element([9]))
    snapshot = setup.gate.snapshot()
    assert (snapshot.queue_buffers, snapshot.exclusive_used, snapshot.floating_used) == (4, 1, 3)
    assert not setup.gate.unused
    setup.rows()
    assert setup.gate.unused
    snapshot = setup.gate.snapshot()
    assert (snapshot.queue_buffers, snapshot.exclusive_used, snapshot.floating_used) == (0, 0, 0)
    setup.gate.close()
    snapshot = setup.gate.snapshot()
    assert (snapshot.exclusive_used, snapshot.floating_used, snapshot.channels_starved) == (0, 0, 0)


# --- the end --------------------------------------------------------------------------------------------


def test_close_gives_queued_current_and_idle_buffers_back(make_setup: type[Setup]) -> None:
    setup = floating_all_at_one_channel(make_setup)
    setup.arrive(setup.remotes[1], setup.element(["half"])[:-1])
    setup.arrive(setup.remotes[2], setup.element(["now"]) + setup.element(["current"]))
    for _ in range(10):
        setup.gate.poll()
        if setup.remotes[2].current is not None:
            break
    assert setup.remotes[2].current is not None
    setup.gate.close()
    assert setup.pool.in_use == 0
    assert setup.network.free == setup.network.total
    assert setup.network.required == 0
    assert setup.gate.poll() is None
    setup.gate.close()
    assert setup.network.free == setup.network.total


def test_close_of_local_channels_gives_the_producers_segments_back(make_setup: type[Setup]) -> None:
    setup = make_setup()
    partitions = [setup.partition(producer) for producer in range(2)]
    for partition in partitions:
        setup.local(partition)
        partition.write(0, 1, [setup.element(["a"]) + setup.element(["b"])])
        partition.subpartitions[0].flush()
        partition.subpartitions[0].attend()
        for _ in range(6):
            partition.write(0, 1, [setup.element_of(SEGMENT_BYTES)])
    assert setup.gate.poll() is not None
    assert setup.gate.channels[0].current is not None
    setup.gate.close()
    for partition in partitions:
        assert partition.subpartitions[0].view is None
        partition.subpartitions[0].discard()
    assert setup.network.free == setup.network.total


def test_a_buffer_that_was_given_back_before_the_close_comes_home_after_it(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=1, direct=False)
    partition = setup.partition(5)
    setup.local(partition)
    partition.write(0, 1, [setup.element_of(SEGMENT_BYTES)])
    setup.arrive(setup.remotes[0], setup.element([1]))
    setup.rows()
    setup.gate.close()
    assert setup.network.total - setup.network.free == 2
    for buffer in setup.returned:
        buffer.attachment.consumed(buffer)
    assert setup.network.free == setup.network.total


def test_close_tells_the_producer_and_what_comes_later_takes_no_segment(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=1)
    partition = setup.partition(0, segments=8)
    wire = setup.wire([partition])
    partition.write(0, 1, [setup.element_of(SEGMENT_BYTES)])
    chunks, pieces = wire.producer.data_to_send(16)
    data = b"".join(chunks)
    for piece in pieces:
        piece.released()
    setup.gate.close()
    wire.consumer.receive(data, 0.0)
    wire.settle()
    assert setup.pool.in_use == 0
    assert wire.producer.producers.channels == {}
    assert partition.subpartitions[0].view is None


def test_the_minimum_of_a_gate_is_there_while_others_hold_all_memory(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=2, exclusive=2, floating=2, segments=8, borrowed=8)
    first, second = (consumer_of(channel).credit for channel in setup.remotes)
    assert [(credit.granted, credit.exclusive_total) for credit in (first, second)] == [(2, 2), (2, 2)]
    consumer_of(setup.remotes[0]).on_backlog(2)
    assert (len(first.floating), first.waiting, setup.network.extra) == (1, True, 5), "1 is its minimum"
    setup.arrive(setup.remotes[1], setup.element(["made up"]))
    assert setup.rows() == ["made up"]
    setup.borrowed.pop().recycle()
    assert (len(first.floating), first.waiting) == (2, False)
    for segment in setup.borrowed:
        segment.recycle()
    setup.gate.close()
    assert (setup.network.free, setup.network.extra) == (setup.network.total, 0)


def test_a_new_attachment_gets_the_exclusive_buffers_of_the_old_one_as_they_come_home(
    make_setup: type[Setup],
) -> None:
    setup = make_setup(remote=1, exclusive=2, floating=1, segments=3, direct=False)
    (channel,) = setup.remotes
    for number in range(2):
        setup.arrive(channel, setup.element([number]))
    assert setup.rows() == [0, 1]
    setup.request(channel, generation=2)
    assert consumer_of(channel).credit.exclusive_total == 1, "the other two are read"
    for buffer in setup.returned:
        buffer.attachment.consumed(buffer)
    assert consumer_of(channel).credit.exclusive_total == 2
    assert setup.pool.in_use == 2
    setup.gate.close()
    assert setup.network.free == setup.network.total


def test_a_channel_that_ends_leaves_its_exclusive_buffers_to_one_that_is_short(
    make_setup: type[Setup],
) -> None:
    setup = make_setup(remote=1, exclusive=2, floating=1)
    later = setup.remote(1)
    assert consumer_of(later).credit.exclusive_total == 0, "the gate was made for one channel"
    setup.arrive_event(setup.remotes[0], EventKind.END_OF_PARTITION)
    setup.rows()
    assert consumer_of(later).credit.exclusive_total == 2
    later.detach()
    assert not setup.gate.buffers.short
    setup.gate.close()
    assert setup.network.free == setup.network.total
