"""Broadcasts: one segment that several subpartitions read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest

from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.partition import serve
from minishuffle.exchange.segments import Segment
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import ConsumerChannel, Received
from minishuffle.protocol.connection import PartitionRequested
from minishuffle.wire.frames import CancelReason, EventKind, PartitionRequest
from support.interleave import nested
from support.links import BareLink
from support.producers import CAPACITY, Producer, check_elements, read

pytestmark = pytest.mark.usefixtures("one_processor")

FAILED = CancelReason.FAILED


def test_all_consumers_read_the_one_copy_and_the_last_of_them_recycles_it() -> None:
    """Cases 273 and 278, BroadcastRecordWriterTest and BufferBuilderAndConsumerTest."""
    producer = Producer(consumers=3)
    views = [producer.attach(position) for position in range(3)]
    producer.broadcast(1, CAPACITY, rows=2)
    assert producer.pool.in_use == 1
    pieces = [view.poll() for view in views]
    assert [bytes(piece.payload) for piece in pieces if piece] == [bytes([1]) * CAPACITY] * 3
    assert len({id(piece.memory) for piece in pieces if piece}) == 1
    for piece, left in zip(pieces, (1, 1, 0), strict=True):
        assert piece is not None
        piece.released()
        assert producer.pool.in_use == left
    assert (producer.counters.records_out, producer.counters.bytes_out) == (6, 3 * CAPACITY)
    assert producer.partition.buffers_out() == 3
    producer.check_books(6)


def test_a_segment_with_one_reader_is_not_shared() -> None:
    producer = Producer(consumers=2)
    views = [producer.attach(position) for position in range(2)]
    producer.broadcast(1, CAPACITY)
    views[0].release(FAILED)
    producer.broadcast(2, CAPACITY)
    (both, alone) = (views[1].poll(), views[1].poll())
    assert both is not None and alone is not None
    assert (both.shared, alone.shared) == (True, False)


@pytest.mark.parametrize("flushing", Flush)
@pytest.mark.parametrize("size", [1, CAPACITY - 1, CAPACITY, 3 * CAPACITY + 5])
def test_elements_of_any_length_reach_every_consumer_before_the_event_behind_them(
    flushing: Flush, size: int
) -> None:
    """Case 249, ResultPartitionTest."""
    producer = Producer(consumers=2, flushing=flushing)
    views = [producer.attach(position) for position in range(2)]
    found = [b"", b""]
    for number in range(1, 6):
        producer.broadcast(number, size, rows=number)
        producer.attend()
        if number == 3:  # one of them is slower
            found[0] += b"".join(read(views[0]))
    producer.partition.broadcast_event(EventKind.END_OF_PARTITION)
    for position, view in enumerate(views):
        found[position] += b"".join(read(view))
    expected = b"".join(bytes([number]) * size for number in range(1, 6)) + bytes(
        [EventKind.END_OF_PARTITION]
    )
    assert found == [expected, expected]
    assert producer.pool.in_use == 0
    producer.check_books(30)


def test_a_consumer_that_goes_leaves_the_segment_to_the_others() -> None:
    producer = Producer(consumers=2)
    lost, stays = producer.attach(0), producer.attach(1)
    producer.broadcast(1, 5, rows=2)
    lost.release(FAILED)
    assert producer.dropped == (2, 0)
    producer.broadcast(2, 5, rows=3)
    producer.attend()
    assert producer.dropped == (2, 3)
    assert producer.pool.in_use == 2, "of the other consumer: the segment of before, and one of its own"
    producer.partition.broadcast_event(EventKind.END_OF_DATA)
    assert read(stays) == [bytes([1]) * 5, bytes([2]) * 5, bytes([EventKind.END_OF_DATA])]
    assert producer.pool.in_use == 0
    producer.check_books(10)


def test_a_consumer_that_is_back_reads_what_is_broadcast_from_then_on() -> None:
    producer = Producer(consumers=2)
    producer.attach(0).release(FAILED)
    stays = producer.attach(1)
    producer.broadcast(1, 5)
    back = producer.attach(0)
    producer.broadcast(2, 5)
    producer.partition.broadcast_event(EventKind.END_OF_DATA)
    end = bytes([EventKind.END_OF_DATA])
    assert b"".join(read(back)) == bytes([2]) * 5 + end
    assert b"".join(read(stays)) == bytes([1]) * 5 + bytes([2]) * 5 + end
    assert producer.pool.in_use == 0


def test_a_consumer_that_was_skipped_and_is_back_before_anything_was_written_finds_no_open_segment() -> None:
    producer = Producer(consumers=2)
    view = producer.attach(0)
    stays = producer.attach(1)
    producer.broadcast(1, 5)
    view.release(FAILED)
    assert producer.partition.skips(0, 7), "an element that is never written, since encoding it raised"
    producer.attend()
    back = producer.attach(0)
    producer.broadcast(2, CAPACITY)
    assert read(back) == [bytes([2]) * CAPACITY]
    assert read(stays) == [bytes([1]) * 5, bytes([2]) * CAPACITY]
    assert producer.pool.in_use == 0


def test_a_slow_consumer_holds_up_the_writer_at_the_bound_of_the_pool() -> None:
    producer = Producer(consumers=2, segments=3)
    fast, slow = producer.attach(0), producer.attach(1)
    for number in range(1, 4):
        producer.broadcast(number, CAPACITY)
        assert read(fast) == [bytes([number]) * CAPACITY]
    assert producer.pool.request() is None
    assert producer.partition.backlog() == 3
    piece = slow.poll()
    assert piece is not None
    piece.released()
    producer.broadcast(4, CAPACITY)
    assert [data[0] for data in read(slow)] == [2, 3, 4]


def test_the_open_segment_of_a_writer_that_cannot_be_stopped_is_written_off_once() -> None:
    producer = Producer(consumers=3)
    producer.broadcast(1, 5)
    producer.partition.release(written_off=True)
    assert (producer.network.written_off, producer.pool.in_use) == (1, 1)
    producer.network.validate()


def test_each_channel_sends_the_shared_payload_with_its_own_header() -> None:
    """Three channels of one connection; every payload arrives as it was written."""
    producer = Producer(consumers=3, segments=16)
    consuming, producing = BareLink(), BareLink(dialer=True)
    received: list[tuple[int, bytes]] = []

    class Taker:
        def __init__(self, number: int) -> None:
            self.number = number

        def deliver(self, item: Received) -> None:
            received.append((self.number, bytes(item.payload)))

        def request_floating(self) -> None:
            return None

        def wait_in_line(self, channel: ConsumerChannel) -> None: ...

        def leave_line(self, channel: ConsumerChannel) -> None: ...

    for number in range(3):
        free = [Segment(index, memoryview(bytearray(64 + CAPACITY))) for index in range(2)]
        channel = ConsumerChannel(Taker(number), list(free), CAPACITY)  # type: ignore[arg-type]
        request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), number)
        consuming.connection.request_partition(channel, request)
    move(consuming, producing)
    for event in producing.connection.events():
        assert isinstance(event, PartitionRequested)
        serve(producing, event.request, producer.subpartitions[event.request.subpartition])
    producer.broadcast(7, CAPACITY)
    producer.broadcast(8, CAPACITY)
    producer.attend()
    move(producing, consuming)
    elements = [bytes([7]) * CAPACITY, bytes([8]) * CAPACITY]
    for number in range(3):
        assert [data for taker, data in received if taker == number] == elements
    assert producer.pool.in_use == 0


def move(sender: BareLink, receiver: BareLink) -> None:
    chunks, pieces = sender.connection.data_to_send(100)
    receiver.connection.receive(b"".join(chunks), 0.0)
    for piece in pieces:
        piece.released()


# --- two threads ----------------------------------------------------------------------------------------


def lose(producer: Producer) -> None:
    producer.views[0][0].release(FAILED)


def replace(producer: Producer) -> None:
    lose(producer)
    producer.attach(0)


def read_first(producer: Producer) -> None:
    producer.read_all()


@pytest.mark.slow
@pytest.mark.parametrize("flushing", [Flush.ON_REQUEST, Flush.AT_ONCE])
@pytest.mark.parametrize("acts", [lose, replace, read_first, Producer.attend])
def test_the_loop_may_act_at_any_instruction_of_a_broadcast(
    acts: Callable[[Producer], None], flushing: Flush
) -> None:
    made: list[Producer] = []

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        producer = Producer(consumers=2, flushing=flushing)
        producer.attach(0)
        producer.attach(1)
        producer.broadcast(1, 5, rows=2)
        made.append(producer)
        return lambda: acts(producer), lambda: producer.broadcast(2, 20, rows=3)

    for _ in chain(nested(make), nested(lambda: make()[::-1])):
        producer = made.pop()
        producer.check_books(10)
        producer.broadcast(3, 4, rows=1)
        producer.attend()
        producer.partition.broadcast_event(EventKind.END_OF_DATA)
        producer.read_all()
        elements = {1: (5, 2), 2: (20, 3), 3: (4, 1)}
        assert b"".join(read(producer.views[1][0]))[:-1] == bytes([1] * 5 + [2] * 20 + [3] * 4)
        check_elements(producer.data.values(), elements)
        producer.check_books(12)
        producer.check_all_home()


def test_a_broadcast_fills_its_buffers_as_far_as_suits_the_slowest_consumer() -> None:
    """Case 258, ResultPartitionTest#testDynamicBufferSizeForBroadcast."""
    producer = Producer(consumers=3)
    views = [producer.attach(position) for position in range(3)]
    views[1].resize(9)
    views[2].resize(5)
    producer.broadcast(1, 12)
    producer.partition.broadcast_event(EventKind.END_OF_DATA)
    for view in views:
        assert [len(payload) for payload in read(view)[:-1]] == [5, 5, 2]
