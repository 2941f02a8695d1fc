"""Input gates: the loop's and the task's half, driven by one thread in any order that is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.errors import PeerLost, RemoteProtocolError, StateLost
from minishuffle.exchange.channels import Attached, LocalBuffer
from minishuffle.exchange.elements import ELEMENT_HEADER
from minishuffle.exchange.watermarks import BEGINNING_OF_TIME
from minishuffle.wire.frames import BARRIER_EVENT, WATERMARK_EVENT, EventKind
from support.interleave import interleaved
from support.links import consumer_of

pytestmark = pytest.mark.usefixtures("one_processor")

if TYPE_CHECKING:
    from conftest import Setup

SEGMENT_BYTES = 256


def poll_fairly(setup: Setup, count: int) -> None:
    """Poll everything; the queues stay within one buffer of each other."""
    polled = 0
    while setup.gate.poll() is not None:
        polled += 1
        assert max(setup.queues()) - min(setup.queues()) <= 1
    assert polled == count
    assert max(setup.queues()) == 0


# --- turns --------------------------------------------------------------------------------------------


def test_remote_channels_take_turns(make_setup: type[Setup]) -> None:
    """Case 148, InputGateFairnessTest."""
    setup = make_setup(remote=37, exclusive=4)
    for channel in setup.remotes:
        for number in range(4):
            setup.arrive(channel, setup.element([channel.producer, number]))
    assert setup.queues() == [4] * 37
    poll_fairly(setup, 37 * 4)


def test_local_channels_take_turns(make_setup: type[Setup]) -> None:
    """Case 148, InputGateFairnessTest."""
    setup = make_setup()
    for producer in range(37):
        partition = setup.partition(producer, segments=4)
        for _ in range(4):
            partition.write(0, 1, [setup.element_of(SEGMENT_BYTES)])
        setup.local(partition)
    assert setup.queues() == [4] * 37
    poll_fairly(setup, 37 * 4)
    assert setup.network.free == setup.network.total


def test_a_gate_has_read_all_once_its_producers_have_answered_and_nothing_waits(
    make_setup: type[Setup],
) -> None:
    setup = make_setup(remote=2)
    assert not setup.gate.has_read_all, "nobody has answered"
    for channel in setup.remotes:
        setup.arrive(channel, setup.element([1]))
    assert not setup.gate.has_read_all
    poll_fairly(setup, 2)
    assert setup.gate.has_read_all
    setup.remotes[0].detach(PeerLost("it was lost"))
    assert not setup.gate.has_read_all


@pytest.mark.parametrize("kind", ["remote", "local"])
def test_channels_take_turns_while_data_arrive(make_setup: type[Setup], kind: str) -> None:
    """Case 149, InputGateFairnessTest."""
    setup = make_setup(remote=37 if kind == "remote" else 0, exclusive=4)
    partitions = [setup.partition(producer, segments=4) for producer in range(37 if kind == "local" else 0)]
    channels = setup.remotes or [setup.local(partition) for partition in partitions]
    element = setup.element_of(SEGMENT_BYTES)
    read: list[int] = []
    for number in range(4):
        for channel in channels:
            if partitions:
                partitions[channel.producer].write(0, 1, [element])
            else:
                setup.arrive(channel, element)
            if number and channel.producer % 2:  # it is read more slowly than it arrives
                item = setup.gate.poll()
                assert item is not None
                read.append(item.channel.producer)
        counts = [read.count(producer) for producer in range(37)]
        assert max(counts) - min(counts) <= 1
    while (item := setup.gate.poll()) is not None:
        read.append(item.channel.producer)
        counts = [read.count(producer) for producer in range(37)]
        assert max(counts) - min(counts) <= 1
    assert counts == [4] * 37


def test_a_channel_keeps_its_turn_for_the_elements_of_one_buffer_only(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=2)
    setup.arrive(setup.remotes[0], setup.element(["a1"]) + setup.element(["a2"]))
    setup.arrive(setup.remotes[0], setup.element(["a3"]))
    setup.arrive(setup.remotes[1], setup.element(["b1"]))
    assert setup.rows() == ["a1", "a2", "b1", "a3"]


@pytest.mark.slow
def test_a_channel_stands_in_line_once_however_a_delivery_meets_the_end_of_its_turn(
    make_setup: type[Setup],
) -> None:
    setups: list[Setup] = []

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        setup = make_setup(remote=1)
        setups.append(setup)
        (channel,) = setup.remotes
        channel.deliver(Attached())
        channel.queue.clear()  # the task has taken it, and is about to end its turn
        return lambda: setup.gate.ready.end_turn(channel), lambda: channel.deliver(Attached())

    for _ in interleaved(make):
        setup = setups.pop()
        (channel,) = setup.remotes
        assert list(setup.gate.ready.line) == [channel]
        assert setup.gate.poll() is None and not setup.gate.ready.line
        channel.deliver(Attached())
        assert list(setup.gate.ready.line) == [channel]


def test_what_arrives_between_two_polls_is_found_and_wakes_the_task(make_setup: type[Setup]) -> None:
    """Case 131, SingleInputGateTest."""
    setup = make_setup(remote=1)
    for number in range(5):
        setup.arrive(setup.remotes[0], setup.element([number]))
        assert setup.wakes == number + 1
        assert setup.rows() == [number]
    assert setup.gate.poll() is None


def test_a_channel_that_stands_in_line_does_not_wake_the_task_again(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=1)
    setup.arrive(setup.remotes[0], setup.element(["first"]))
    setup.arrive(setup.remotes[0], setup.element(["second"]))
    assert setup.wakes == 1
    assert setup.rows() == ["first", "second"]


# --- consumption ----------------------------------------------------------------------------------------


def test_a_buffer_is_given_back_with_its_last_element_and_no_longer_looked_at(
    make_setup: type[Setup],
) -> None:
    setup = make_setup(remote=1)
    setup.arrive(setup.remotes[0], setup.element(["first"]) + setup.element(["second"]))
    first = setup.gate.poll()
    assert setup.returned == []
    second = setup.gate.poll()
    (buffer,) = setup.returned
    assert buffer.attachment is setup.remotes[0].attachment
    buffer.payload[:] = bytes(len(buffer.payload))
    assert first is not None and second is not None
    assert setup.rows_of(first) + setup.rows_of(second) == ["first", "second"]
    assert (setup.counters.buffers_in, setup.counters.bytes_in) == (1, len(buffer.payload))


def test_each_fragment_of_an_element_is_given_back_at_once(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=1, exclusive=1)
    (channel,) = setup.remotes
    text = "spanning" * 100
    data = setup.element([text])
    pieces = [data[at : at + SEGMENT_BYTES] for at in range(0, len(data), SEGMENT_BYTES)]
    assert len(pieces) >= 4
    for number, piece in enumerate(pieces[:-1], 1):
        setup.arrive(channel, piece)
        assert setup.gate.poll() is None
        assert len(setup.returned) == number
        assert consumer_of(channel).credit.take_unannounced() == 1
    setup.arrive(channel, pieces[-1])
    assert setup.rows() == [text]
    assert consumer_of(channel).credit.idle == 1


def test_an_empty_buffer_of_a_peer_comes_home_at_once(make_setup: type[Setup]) -> None:
    """Case 16, NettyMessageClientDecoderDelegateTest."""
    setup = make_setup(remote=1, exclusive=1)
    (channel,) = setup.remotes
    data = setup.element(["whole"])
    for piece in (b"", data[:3], b"", data[3:], b""):
        setup.arrive(channel, piece, rows=piece == data[:3])
        item = setup.gate.poll()
        assert (item is not None) == (piece == data[3:])
        assert consumer_of(channel).credit.take_unannounced() == 1
    assert item is None and setup.gate.poll() is None
    assert consumer_of(channel).credit.idle == 1


def test_credit_of_a_paused_task_falls_to_zero_and_the_queue_stays_within_what_was_granted(
    make_setup: type[Setup],
) -> None:
    setup = make_setup(remote=1, exclusive=2, floating=4)
    (channel,) = setup.remotes
    partition = setup.partition(0, segments=64)
    wire = setup.wire([partition])
    for number in range(50):
        partition.write(0, 1, [setup.element_of(SEGMENT_BYTES, str(number))])
        wire.settle()
        assert len(channel.queue) <= consumer_of(channel).credit.granted <= 2 + 4
    (sending,) = wire.producer.producers.channels.values()
    assert sending.credit.available == 0
    assert len(channel.queue) == 6
    assert partition.backlog() == 44
    read: list[str] = []
    for _ in range(50):
        item = setup.gate.poll()
        assert item is not None
        read += setup.rows_of(item)
        wire.settle()
        assert len(channel.queue) <= consumer_of(channel).credit.granted - len(setup.returned) <= 6
    assert [int(row) for row in read] == list(range(50))
    assert wire.link.flushes >= 44


def test_a_channel_without_exclusive_buffers_gets_what_is_flushed_before_a_segment_is_full(
    make_setup: type[Setup],
) -> None:
    setup = make_setup(remote=1, exclusive=0, floating=1)
    partition = setup.partition(0)
    wire = setup.wire([partition])
    for number in range(3):
        partition.write(0, 1, [setup.element([number])])
        wire.settle()
        assert setup.rows() == []
        assert partition.subpartitions[0].flush()
        partition.subpartitions[0].attend()
        wire.settle()
        assert setup.rows() == [number]
    assert setup.pool.in_use == 0, "nothing stays set aside for a channel that has no backlog"


def test_a_local_channel_hands_over_as_much_as_its_credit_and_more_on_consumption(
    make_setup: type[Setup],
) -> None:
    setup = make_setup(exclusive=1, floating=2)
    partition = setup.partition(0, segments=10)
    channel = setup.local(partition)
    for number in range(10):
        partition.write(0, 1, [setup.element_of(SEGMENT_BYTES, str(number))])
    partition.broadcast_event(EventKind.END_OF_PARTITION)
    assert len(channel.queue) == 3
    assert len(setup.handed_over) == 3
    for number in range(10):
        item = setup.gate.poll()
        assert item is not None and int(setup.rows_of(item)[0]) == number
        assert len([item for item in channel.queue if isinstance(item, LocalBuffer)]) <= 3
    assert setup.gate.poll() is None
    assert setup.gate.finished
    assert len(setup.handed_over) == 11
    assert setup.network.free == setup.network.total


# --- ends and failures ----------------------------------------------------------------------------------


def test_the_gate_is_finished_when_every_channel_is(make_setup: type[Setup]) -> None:
    """Cases 127 and 143, SingleInputGateTest."""
    setup = make_setup(remote=2)
    for channel in setup.remotes:
        setup.arrive_event(channel, EventKind.END_OF_DATA)
    assert setup.rows() == []
    setup.arrive_event(setup.remotes[0], EventKind.END_OF_PARTITION)
    assert setup.rows() == []
    assert not setup.gate.finished
    setup.arrive(setup.remotes[1], setup.element(["late"]))
    setup.arrive_event(setup.remotes[1], EventKind.END_OF_PARTITION)
    assert setup.rows() == ["late"]
    assert setup.gate.finished


@pytest.mark.parametrize("size", [1, ELEMENT_HEADER.size - 1, ELEMENT_HEADER.size, ELEMENT_HEADER.size + 1])
def test_an_end_in_the_middle_of_an_element_names_the_rows_that_are_lost(
    make_setup: type[Setup], size: int
) -> None:
    setup = make_setup(remote=1)
    (channel,) = setup.remotes
    setup.arrive(channel, setup.element(["whole"]) + setup.element(["a", "b"])[:size], rows=3)
    setup.arrive_event(channel, EventKind.END_OF_PARTITION)
    assert setup.gate.poll() is not None
    with pytest.raises(RemoteProtocolError, match="ended in the middle of an element: 2 rows are lost"):
        setup.gate.poll()


@pytest.mark.parametrize("size", [1, ELEMENT_HEADER.size + 1])
def test_half_an_element_before_a_new_attachment_is_counted(make_setup: type[Setup], size: int) -> None:
    setup = make_setup(remote=1)
    (channel,) = setup.remotes
    setup.arrive(channel, setup.element(["whole"]) + setup.element(["a", "b"])[:size], rows=3)
    setup.request(channel, generation=2)
    setup.arrive(channel, setup.element(["again"]), row=3)
    assert setup.rows() == ["whole", "again"]
    assert channel.rows_incomplete == 2


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([EventKind.END_OF_PARTITION] * 2, "the partition of producer 0 ended twice"),
        ([99], "event of unknown kind 99"),
    ],
)
def test_events_that_may_not_come(kinds: list[int], message: str, make_setup: type[Setup]) -> None:
    setup = make_setup(remote=2)
    for kind in kinds:
        setup.arrive_event(setup.remotes[0], kind)
    with pytest.raises(RemoteProtocolError, match=message):
        setup.gate.poll()


def test_a_failure_is_seen_after_what_was_delivered_before_it(make_setup: type[Setup]) -> None:
    """Case 141, SingleInputGateTest."""
    setup = make_setup(remote=2)
    setup.arrive(setup.remotes[0], setup.element([1]))
    setup.arrive(setup.remotes[0], setup.element([2]))
    consumer_of(setup.remotes[0]).fail(PeerLost("worker 7 is gone"))
    polled = [setup.gate.poll(), setup.gate.poll()]
    assert None not in polled
    with pytest.raises(PeerLost, match="worker 7 is gone"):
        setup.gate.poll()


@pytest.mark.parametrize("tolerant", [True, False])
def test_a_strict_gate_fails_where_rows_may_be_missing(make_setup: type[Setup], tolerant: bool) -> None:
    """The link breaks: what was under way does not come with the next attachment to the same attempt."""
    setup = make_setup(remote=1, tolerant=True, strict=not tolerant)
    (channel,) = setup.remotes
    setup.arrive(channel, setup.element([0, 1, 2]), rows=3)
    setup.request(channel, generation=2)
    setup.arrive(channel, setup.element([3]), row=3)
    assert setup.rows() == [0, 1, 2, 3], "nothing was under way"
    setup.request(channel, generation=3)
    setup.arrive(channel, setup.element([7, 8]), row=7, rows=2)
    with nullcontext() if tolerant else pytest.raises(PeerLost, match="3 rows of subtask 0 before row 7 are"):
        assert setup.rows() == [7, 8]
    setup.gate.close()
    discarded = 0 if tolerant else 2
    assert setup.gate.rows_dropped() == {"queue_discarded": discarded, "partial_element": 0}


@pytest.mark.parametrize("strict", [True, False])
def test_rows_that_are_missing_before_the_end_are_noticed(make_setup: type[Setup], strict: bool) -> None:
    setup = make_setup(remote=1, tolerant=True, strict=strict)
    (channel,) = setup.remotes
    setup.arrive(channel, setup.element([0, 1]), rows=2)
    setup.request(channel, generation=2)
    setup.arrive_event(channel, EventKind.END_OF_PARTITION, row=6)
    with pytest.raises(PeerLost, match="4 rows of subtask 0 before row 6") if strict else nullcontext():
        assert setup.rows() == [0, 1]
    setup.gate.close()


def test_event_time_waits_for_a_producer_that_moves_and_not_for_one_that_is_lost(
    make_setup: type[Setup],
) -> None:
    setup = make_setup(tolerant=True)
    gate, partitions = setup.gate, [setup.partition(number) for number in (0, 1, 0, 0)]
    first, second, third, _ = partitions
    channel, _ = setup.local(first), setup.local(second)
    gate.expect_move(3)
    gate.end_barriers(3)
    for partition in (first, second):
        partition.broadcast_watermark(5, False)
    first.broadcast_barrier(3)
    assert setup.rows() == [] and gate.valve.watermark == 5

    def gone() -> None:
        channel.detach(PeerLost("reset by peer"))
        setup.rows()

    def back(partition: Any, generation: int) -> None:
        channel.attach_local(partition.subpartitions[0], generation, setup.handed_over.append)
        setup.rows()

    gone()
    second.broadcast_watermark(9, False)
    setup.rows()
    assert gate.valve.watermark == 5, "it has rows of these times"
    back(third, 2)
    third.broadcast_watermark(7, False)
    setup.rows()
    assert gate.valve.watermark == 7
    gone()
    assert gate.valve.watermark == 9, "it has not moved again"


# --- no row may be missing ------------------------------------------------------------------------


def test_event_time_waits_for_a_lost_producer_if_no_row_may_be_missing(make_setup: type[Setup]) -> None:
    setup = make_setup(tolerant=True, guaranteed=True)
    partitions = [setup.partition(number) for number in (0, 1, 0)]
    channel, _ = setup.local(partitions[0]), setup.local(partitions[1])
    for partition in partitions[:2]:
        partition.broadcast_watermark(5, False)
    assert setup.rows() == [] and setup.gate.valve.watermark == 5
    channel.detach(PeerLost("reset by peer"))
    partitions[1].broadcast_watermark(9, False)
    assert setup.rows() == [] and setup.gate.valve.watermark == 5, "it has rows of these times"
    channel.attach_local(partitions[2].subpartitions[0], 2, setup.handed_over.append, version=2)
    partitions[2].broadcast_watermark(3, False)
    assert setup.rows() == [] and setup.gate.valve.watermark == 5
    partitions[2].broadcast_watermark(7, False)
    assert setup.rows() == [] and setup.gate.valve.watermark == 7


def test_event_time_waits_for_a_lost_producer_that_was_idle(make_setup: type[Setup]) -> None:
    setup = make_setup(tolerant=True, guaranteed=True)
    gate, partitions = setup.gate, [setup.partition(number) for number in (0, 1, 0)]
    channel, _ = setup.local(partitions[0]), setup.local(partitions[1])
    partitions[0].broadcast_watermark(5, True)
    partitions[1].broadcast_watermark(9, False)
    assert setup.rows() == [] and gate.valve.watermark == 9
    channel.detach(PeerLost("reset by peer"))
    partitions[1].broadcast_watermark(15, False)
    assert setup.rows() == [] and gate.valve.watermark == 9, "a row of 10 that was under way comes again"
    channel.attach_local(partitions[2].subpartitions[0], 2, setup.handed_over.append, version=2)
    assert setup.rows() == [] and gate.valve.watermark == 9, "it has not said how far it is"
    partitions[2].broadcast_watermark(5, True)
    assert setup.rows() == [] and gate.valve.watermark == 15


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "event",
    [b"", bytes((EventKind.END_OF_PARTITION,)), WATERMARK_EVENT.pack(EventKind.WATERMARK, 0, 5)]
    + [BARRIER_EVENT.pack(EventKind.BARRIER, blocking, 1) for blocking in (0, 1)],
)
def test_a_gate_with_a_guarantee_fails_where_a_row_is_missing(
    make_setup: type[Setup], version: int, event: bytes
) -> None:
    """An event says so, too: behind it no row may come for long."""
    setup = make_setup(remote=1, version=1, tolerant=True, guaranteed=True)
    (channel,) = setup.remotes
    setup.arrive(channel, setup.element([0, 1]), rows=2)
    assert setup.rows() == [0, 1]
    setup.request(channel, generation=2, version=version)
    if event:
        assert channel.attachment is not None
        channel.deliver_event(channel.attachment, event, 4)
    else:
        setup.arrive(channel, setup.element([4]), row=4)
    with pytest.raises(StateLost, match="subtask 0 goes on with row 4 of edge 0, and 2 rows before"):
        setup.rows()
    setup.gate.close()


def test_a_task_runs_again_if_a_producer_does_that_had_ended_and_may_deal_other_rows(
    make_setup: type[Setup],
) -> None:
    setup = make_setup(remote=1, version=1, tolerant=True, guaranteed=True, redealt=True)
    (channel,) = setup.remotes
    setup.arrive(channel, setup.element([0, 1]), rows=2)
    setup.arrive_event(channel, EventKind.END_OF_PARTITION, row=2)
    assert setup.rows() == [0, 1] and setup.gate.finished
    assert setup.gate.taken() == [(0, 1, 2, False)], "more may follow them in another version"
    setup.request(channel, generation=2, version=1)
    assert setup.rows() == []
    setup.request(channel, generation=3, version=2)
    assert setup.gate.dealt() == [(0, 1)], "as it says if it finishes before it looks again"
    with pytest.raises(PeerLost, match="subtask 0 of edge 0, whose end was read, runs again"):
        setup.rows()
    setup.gate.close()


def test_a_task_that_has_finished_stays_attached_until_its_producers_know_what_is_covered(
    make_setup: type[Setup],
) -> None:
    for redealt in (False, True):
        setup = make_setup(remote=2, version=1, tolerant=True, guaranteed=True, redealt=redealt)
        read, broken = setup.remotes
        setup.arrive_event(read, EventKind.END_OF_PARTITION, row=0)
        setup.rows()
        assert setup.gate.dealt() == ([(0, 1), (1, 0)] if redealt else [])
        setup.gate.close(listens=True)
        assert read.attachment is not None and broken.attachment is None
        setup.gate.make_stable(setup.gate.taken())
        assert read.attachment is None
        setup.gate.close()


def test_a_gate_says_which_late_rows_a_producer_makes_once_more(make_setup: type[Setup]) -> None:
    """Those behind the watermark that it has given with them; until it has caught up, or is idle."""
    setup = make_setup(remote=1, version=1, tolerant=True, guaranteed=True)
    (channel,) = setup.remotes

    def watermark(time: int, idle: bool = False) -> None:
        assert channel.attachment is not None
        channel.deliver_event(channel.attachment, WATERMARK_EVENT.pack(EventKind.WATERMARK, idle, time), 0)
        assert setup.rows() == []

    setup.arrive(channel, setup.element([0, 1]), rows=2)
    assert setup.rows() == [0, 1]
    watermark(9)
    assert setup.gate.late_from(channel) is None and setup.gate.valve.watermark == 9
    setup.request(channel, generation=2, version=1)
    watermark(9)
    assert setup.gate.late_from(channel) is None, "the same rows go on"
    setup.request(channel, generation=3, version=3)
    assert setup.rows() == [] and setup.gate.late_from(channel) == BEGINNING_OF_TIME
    watermark(4)
    assert setup.gate.late_from(channel) == 4 and setup.gate.valve.watermark == 9
    setup.request(channel, generation=4, version=3)
    assert setup.rows() == [] and setup.gate.late_from(channel) == 4
    setup.arrive(channel, setup.element([0]))
    assert setup.rows() == [0]
    watermark(9)
    assert setup.gate.late_from(channel) == 9, "one of the two rows is yet to come"
    setup.arrive(channel, setup.element([1]))
    assert setup.rows() == [1]
    watermark(9)
    assert setup.gate.late_from(channel) is None
    setup.request(channel, generation=5, version=5)
    watermark(4)
    assert setup.gate.late_from(channel) == 4
    watermark(4, idle=True)
    assert setup.gate.late_from(channel) is None
    setup.gate.close()


def test_a_task_goes_on_in_each_channel_where_its_snapshot_says(make_setup: type[Setup]) -> None:
    first = make_setup(remote=3, version=3, tolerant=True, guaranteed=True)
    whole, half, _ = first.remotes
    first.arrive(whole, first.element([0, 1]), rows=2)
    first.arrive_event(whole, EventKind.END_OF_PARTITION, row=2)
    first.arrive(half, first.element([0, 1, 2]), rows=3)
    assert first.rows() == [0, 1, 0, 1, 2]
    taken = first.gate.taken()
    assert taken == [(0, 3, 2, True), (1, 3, 3, False), (2, 0, 0, False)]
    first.arrive(half, first.element([3]))
    first.gate.close()
    assert not any(first.gate.rows_dropped().values()), "what was not taken is retained"

    next_one = make_setup(remote=3, version=3, tolerant=True, guaranteed=True)
    ended, known, begun = next_one.remotes
    for channel in (ended, begun):
        next_one.request(channel, generation=2, version=4)
    next_one.gate.begin_at(taken)
    assert next_one.gate.taken() == taken and not next_one.gate.finished
    next_one.arrive(ended, next_one.element([1]), row=1)
    next_one.arrive_event(ended, EventKind.END_OF_PARTITION, row=2)
    next_one.arrive(known, next_one.element([2, 3]), rows=2, row=2)
    next_one.arrive(begun, next_one.element([0]))
    found = []
    while (element := next_one.gate.poll()) is not None:
        found += [(element.channel.producer, row) for row in next_one.rows_of(element)[element.skip :]]
    assert sorted(found) == [(1, 3), (2, 0)]
    for channel in (known, begun):
        next_one.arrive_event(channel, EventKind.END_OF_PARTITION, row=channel.rows.next)
    assert next_one.rows() == [] and next_one.gate.finished and next_one.gate.rows_again == 0
    assert make_setup(remote=1).gate.taken() == [], "rows may be missing"
