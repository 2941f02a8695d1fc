"""Consumers that go away: what their producer drops, keeps and counts, and how it goes on with the next."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest

from minishuffle.errors import Superseded, TaskFailed
from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.segments import Segment
from minishuffle.wire.frames import WATERMARK_EVENT, CancelReason, EventKind
from support.interleave import nested
from support.producers import CAPACITY, Producer, check_elements, read

pytestmark = pytest.mark.usefixtures("one_processor")

ENDED, FAILED, MOVED = CancelReason.ENDED, CancelReason.FAILED, CancelReason.MOVED
SUSPECTED = CancelReason.SUSPECTED


# --- drop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [FAILED, MOVED])
def test_what_is_queued_for_a_lost_consumer_is_freed_and_counted(reason: CancelReason) -> None:
    producer = Producer(consumers=2)
    view = producer.attach()
    producer.attach(1)
    producer.write(1, 20, rows=2)
    producer.write(2, 20, rows=3)
    producer.write(3, 20, rows=5, position=1)
    assert producer.pool.in_use == 5
    view.release(reason)
    assert (producer.dropped, producer.first.available) == ((5, 0), False)
    assert producer.pool.in_use == 3, "its open segment, and the other consumer's two"
    assert producer.partition.backlog() == 1
    producer.check_books(10)


def test_the_writer_skips_an_unavailable_consumer_and_gives_its_open_segment_back() -> None:
    producer = Producer(consumers=2)
    producer.attach().release(FAILED)
    producer.attach(1)
    producer.write(1, 20, rows=2)
    producer.write(2, 20, rows=3, position=1)
    assert (producer.dropped, producer.pool.in_use) == ((0, 2), 2)
    assert (producer.counters.records_out, producer.counters.bytes_out) == (5, 20)
    view = producer.attach()
    producer.write(3, 20, rows=7)
    view.release(FAILED)
    producer.write(4, 20, rows=11)
    producer.attend()
    assert (producer.dropped, producer.pool.in_use) == ((7, 13), 2)
    producer.check_books(23)


def test_what_is_dropped_for_a_suspected_consumer_is_counted_apart_until_it_is_back() -> None:
    producer = Producer()
    view = producer.attach()
    producer.write(1, 20, rows=2)
    view.release(SUSPECTED)
    producer.write(2, 20, rows=3)
    producer.attend()
    assert (producer.suspected, producer.dropped, producer.pool.in_use) == (5, (0, 0), 0)
    second = producer.attach()
    producer.write(3, 16, rows=7)
    assert read(second) == [bytes([3]) * 16]
    second.release(FAILED)
    producer.write(4, 16, rows=11)
    assert (producer.suspected, producer.dropped) == (5, (0, 11))
    producer.check_books(23)


def test_a_consumer_whose_next_attempt_is_named_is_not_merely_suspected() -> None:
    producer = Producer()
    producer.attach().release(SUSPECTED)
    producer.write(1, 20, rows=2)
    producer.partition.fence(0, 2)
    producer.write(2, 20, rows=3)
    assert (producer.suspected, producer.dropped) == (2, (0, 3))
    producer.check_books(5)


def test_a_consumer_that_was_never_there_is_waited_for() -> None:
    producer = Producer()
    producer.write(1, 16, rows=3)
    producer.attend()
    assert producer.dropped == (0, 0)
    assert read(producer.attach()) == [bytes([1]) * 16]


def test_a_consumer_that_is_back_reads_what_is_written_from_then_on() -> None:
    producer = Producer()
    producer.attach().release(FAILED)
    producer.write(1, 40, rows=3)
    view = producer.attach()
    assert producer.first.available
    producer.write(2, 16, rows=2)
    assert read(view) == [bytes([2]) * 16]
    assert (producer.dropped, producer.sent) == ((0, 3), 2)


def test_an_element_that_the_writer_was_in_the_middle_of_is_discarded_when_it_notifies() -> None:
    producer = Producer()
    view = producer.attach()
    original, calls = producer.acquire, []

    def acquire() -> Segment:
        calls.append(1)
        if len(calls) == 3:
            view.release(FAILED)
            assert (producer.dropped, producer.first.available) == ((9, 0), False)
        return original()

    producer.partition._acquire = acquire
    producer.write(1, 80, rows=9)
    assert producer.dropped == (9, 0)
    assert producer.pool.in_use == 3
    producer.attend()
    assert producer.dropped == (9, 0), "once, whatever of it is written later"
    assert producer.pool.in_use == 0
    producer.check_books(9)


def test_watermark_and_ends_are_kept_for_the_next_consumer() -> None:
    producer = Producer()
    view = producer.attach()
    producer.partition.broadcast_watermark(5, False)
    producer.write(1, 5)
    view.release(FAILED)
    producer.partition.broadcast_watermark(7, True)
    producer.attend()
    producer.partition.broadcast_event(EventKind.END_OF_DATA)
    producer.attend()
    producer.partition.broadcast_event(EventKind.END_OF_PARTITION)
    mark = WATERMARK_EVENT.pack(EventKind.WATERMARK, True, 7)
    for _ in range(2):
        view = producer.attach()
        assert read(view) == [mark, bytes([EventKind.END_OF_DATA]), bytes([EventKind.END_OF_PARTITION])]
        view.release(FAILED)
    assert producer.dropped == (1, 0)


def test_a_watermark_behind_one_that_was_discarded_reaches_the_next_consumer() -> None:
    producer = Producer()
    view = producer.attach()
    producer.partition.broadcast_watermark(5, False)
    view.release(FAILED)
    view = producer.attach()
    assert read(view) == [WATERMARK_EVENT.pack(EventKind.WATERMARK, False, 5)]
    producer.partition.broadcast_watermark(6, False)
    assert read(view) == [WATERMARK_EVENT.pack(EventKind.WATERMARK, False, 6)]


def test_what_was_sent_of_a_segment_is_not_discarded_with_the_rest_of_it() -> None:
    producer = Producer()
    view = producer.attach()
    producer.write(1, 5, rows=3)
    producer.first.flush()
    assert read(view) == [bytes([1]) * 5]
    producer.write(2, 5, rows=4)
    view.release(FAILED)
    assert (producer.sent, producer.dropped) == (3, (4, 0))
    producer.check_books(7)


def test_a_slice_that_the_transport_holds_keeps_its_segment_until_it_is_let_go() -> None:
    producer = Producer()
    view = producer.attach()
    producer.write(1, 40, rows=4)
    held = view.poll()
    assert held is not None
    view.release(FAILED)
    assert (producer.dropped, producer.cut) == ((0, 0), 4)
    assert producer.pool.in_use == 2, "the slice, and the open segment"
    held.released()
    producer.write(2, 1)
    producer.attend()
    assert producer.pool.in_use == 0


# --- wait -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [FAILED, MOVED, SUSPECTED])
def test_with_wait_everything_stays_for_the_next_consumer(reason: CancelReason) -> None:
    producer = Producer(drops=False)
    producer.attach().release(reason)
    producer.write(1, 16)
    producer.attend()
    assert (producer.first.available, producer.dropped) == (True, (0, 0))
    assert read(producer.attach()) == [bytes([1]) * 16]


@pytest.mark.parametrize("drops", [True, False])
def test_a_consumer_that_has_ended_wants_nothing_more_whatever_the_policy(drops: bool) -> None:
    producer = Producer(drops=drops)
    view = producer.attach()
    producer.write(1, 40, rows=2)
    view.release(ENDED)
    producer.write(2, 40, rows=3)
    producer.attend()
    assert (producer.dropped, producer.pool.in_use) == ((0, 0), 0), "nothing of that is lost"


def test_a_consumer_that_is_closed_gets_the_end_alone() -> None:
    """It has read the rows from an earlier attempt of the producer."""
    producer = Producer(closed=[0])
    producer.write(1, 40, rows=2)
    producer.partition.broadcast_event(EventKind.END_OF_PARTITION)
    view = producer.attach()
    piece = view.poll()
    assert piece is not None and piece.payload[0] == EventKind.END_OF_PARTITION
    assert view.poll() is None
    assert (producer.dropped, producer.pool.in_use) == ((0, 0), 0)


@pytest.mark.parametrize("named_first", [True, False])
def test_a_new_attempt_of_a_consumer_gets_no_rows_that_come_once_more(named_first: bool) -> None:
    """What the one before took of them is not known."""
    producer = Producer(drops=False, repeats=True)
    view = producer.attach() if not named_first else None
    producer.write(1, 40, rows=2)
    producer.partition.fence(0, 2)
    producer.write(2, 40, rows=3)
    assert view is None or not view.current
    producer.partition.broadcast_event(EventKind.END_OF_PARTITION)
    producer.attend()
    piece = producer.attach().poll()
    assert piece is not None and piece.payload[0] == EventKind.END_OF_PARTITION
    assert (producer.dropped, producer.pool.in_use) == ((0, 0), 0)


# --- elements that are cut ------------------------------------------------------------------------------


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("sent", range(41))
def test_an_element_cut_at_any_byte_is_left_out_whole_and_counted_once(sent: int, drops: bool) -> None:
    """Elements of 41 and 20 bytes; the consumer is lost when ``sent`` bytes of the first have gone out.

    Pieces end with segments, so an element in front has the bytes that the cut needs. Case 209,
    PipelinedApproximateSubpartitionTest."""
    producer = Producer(drops=drops)
    front = -sent % CAPACITY
    if front:
        producer.write(0, front)
    producer.write(1, 41, rows=7)
    first = producer.attach()
    gone = 0
    while gone < front + sent:
        piece = first.poll()
        assert piece is not None
        gone += piece.size
        piece.released()
    assert gone == front + sent
    first.release(FAILED)
    second = producer.attach()
    producer.write(2, 20, rows=3)
    producer.first.flush()
    lost = bool(sent) or drops
    assert b"".join(read(second)) == bytes([1] * (0 if lost else 41) + [2] * 20)
    assert (producer.dropped, producer.cut) == ((0 if sent or not drops else 7, 0), 7 if sent else 0)
    producer.check_books(bool(front) + 7 + 3)
    producer.check_all_home()


@pytest.mark.parametrize("begun", [1, 2, 3])
def test_the_rest_of_an_element_is_left_out_although_the_consumer_is_back_before_it_is_written(
    begun: int,
) -> None:
    """The consumer is lost, and another attached, when the writer asks for segment number ``begun + 1``."""
    producer = Producer()
    first = producer.attach()
    original, calls = producer.acquire, []

    def acquire() -> Segment:
        calls.append(1)
        if len(calls) == begun + 1:
            first.release(FAILED)
            producer.attach()
        return original()

    producer.partition._acquire = acquire
    producer.write(1, 60, rows=9)
    producer.write(2, 16, rows=2)
    producer.partition.broadcast_event(EventKind.END_OF_DATA)
    assert b"".join(read(producer.views[0][1])) == bytes([2] * 16 + [EventKind.END_OF_DATA])
    assert producer.dropped == (9, 0)
    producer.check_books(11)
    producer.check_all_home()


# --- consumers that are told ----------------------------------------------------------------------------


def test_a_newer_attempt_of_the_consumer_fences_older_ones_only() -> None:
    producer = Producer(consumers=2)
    views = [producer.attach(position, attempt=2) for position in range(2)]
    producer.write(1, 16, rows=3, position=1)
    producer.partition.fence(1, 2)
    producer.partition.fence(7, 9)
    assert [view.current for view in views] == [True, True]
    for _ in range(2):
        producer.partition.fence(1, 3)
        (error,) = producer.errors
        assert isinstance(error, Superseded) and "attempt 2 of consumer 1 was replaced by 3" in str(error)
        assert [view.current for view in views] == [True, False]
        assert producer.dropped == (3, 0)
    newer = producer.attach(1, attempt=3)
    producer.partition.fence(1, 3)
    assert newer.current


def test_a_producer_that_fails_tells_every_consumer_once_and_frees_everything() -> None:
    producer = Producer(consumers=2, drops=False)
    for position in range(2):
        producer.attach(position)
        producer.write(1, 20, rows=4, position=position)
    error = TaskFailed("the map raised")
    for _ in range(2):
        producer.partition.fail(error)
        producer.partition.release(False)
    assert producer.errors == [error, error]
    assert producer.dropped == (8, 0)
    assert producer.first.error is error
    assert producer.pool.in_use == 0
    producer.check_books(8)


def test_a_view_that_is_replaced_says_so() -> None:
    producer = Producer()
    producer.attach(attempt=1)
    producer.write(1, 16)
    second = producer.attach(attempt=2)
    (error,) = producer.errors
    assert isinstance(error, Superseded)
    assert "generation 2 of attempt 2 takes the place of generation 1 of attempt 1" in str(error)
    assert read(second) == [bytes([1]) * 16], "nothing was lost in between"


# --- two threads ----------------------------------------------------------------------------------------


def queue_two(producer: Producer) -> None:
    producer.write(1, 20, rows=2)
    producer.write(2, 20, rows=3)


def send_half(producer: Producer) -> None:
    queue_two(producer)
    piece = producer.views[0][0].poll()
    assert piece is not None
    producer.data[1] += piece.payload
    piece.released()


def lose_consumer(producer: Producer) -> None:
    view = producer.first.view
    if view is not None:
        view.release(FAILED)


def lose_in_half(producer: Producer) -> None:
    send_half(producer)
    lose_consumer(producer)


def read_and_lose(producer: Producer) -> None:
    producer.read_all()
    lose_consumer(producer)


def lose_and_attach(producer: Producer) -> None:
    lose_consumer(producer)
    producer.attach()


def end_data(producer: Producer) -> None:
    producer.partition.broadcast_event(EventKind.END_OF_DATA)


def write_third(producer: Producer) -> None:
    producer.write(3, 20, rows=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flushing", "drops"),
    [(Flush.ON_REQUEST, True), (Flush.AT_ONCE, False)],
)
@pytest.mark.parametrize("writes", [write_third, end_data])
@pytest.mark.parametrize(
    "acts", [lose_consumer, read_and_lose, lose_and_attach, Producer.attach, Producer.attend]
)
@pytest.mark.parametrize("before", [queue_two, send_half, lose_in_half])
def test_writer_and_loop_may_act_at_any_instruction_of_each_other(
    before: Callable[[Producer], None],
    acts: Callable[[Producer], None],
    writes: Callable[[Producer], None],
    flushing: Flush,
    drops: bool,
) -> None:
    made: list[Producer] = []

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        producer = Producer(drops=drops, flushing=flushing)
        producer.attach()
        before(producer)
        made.append(producer)
        return lambda: acts(producer), lambda: writes(producer)

    for _ in chain(nested(make), nested(lambda: make()[::-1])):
        producer = made.pop()
        written = 10 if writes is write_third else 5
        producer.check_books(written)
        producer.attend()
        producer.partition.flush()
        producer.attend()
        producer.check_books(written)
        if not producer.first.available:
            assert producer.queued == producer.first.backlog() == 0
            assert producer.pool.in_use <= 1, "the open segment"
        producer.read_all()
        producer.attach()
        producer.read_all()
        sent, cut = check_elements(producer.data.values(), {1: (20, 2), 2: (20, 3), 3: (20, 5)})
        assert (producer.sent, producer.cut) == (sent, cut)
        producer.check_books(written)
        assert producer.queued == 0
        producer.check_all_home()


def test_a_view_begins_behind_what_was_written_while_its_consumer_was_away() -> None:
    """The writer has seen the consumer shortly before that went, and sees the next one late: behind what it
    wrote in between it leaves rows out, and there is to be no gap within a view."""
    producer = Producer()
    first, subpartition = producer.attach(), producer.first
    producer.partition.write(0, 2, [bytes([1]) * 4])
    producer.partition.flush()
    first.release(FAILED)
    producer.partition.write(0, 3, [bytes([2]) * 4])
    assert subpartition.backlog() == 0, "what was to be flushed is left out"
    second = producer.attach()
    producer.partition.flush()
    assert second.poll() is None
    subpartition.available = False
    assert producer.partition.skips(0, 5), "as the writer has seen it before"
    subpartition.available = True
    producer.partition.write(0, 1, [bytes([3]) * 4])
    producer.partition.flush()
    piece = second.poll()
    assert piece is not None and (piece.row, piece.rows, bytes(piece.payload)) == (10, 1, bytes([3]) * 4)
    assert sum(producer.partition.rows_dropped().values()) == 2 + 3 + 5
    piece.released()
