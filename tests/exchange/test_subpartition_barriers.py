"""Barriers in the queue of a subpartition: state until they are resumed, whoever comes and goes meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minishuffle.exchange.subpartition import PipelinedView
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import BARRIER_EVENT, CancelReason, EventKind
from support.interleave import nested
from support.producers import Producer, read

pytestmark = pytest.mark.usefixtures("one_processor")

FAILED, SUSPECTED = CancelReason.FAILED, CancelReason.SUSPECTED


def barrier(number: int) -> bytes:
    return BARRIER_EVENT.pack(EventKind.BARRIER, True, number)


def rows_of(view: PipelinedView) -> bytes:
    return b"".join(each for each in read(view) if len(each) != BARRIER_EVENT.size)


def test_a_barrier_keeps_its_place_and_blocks_until_it_is_resumed() -> None:
    """Case 181."""
    producer = Producer()
    view = producer.attach()
    producer.write(1, 4)
    producer.partition.broadcast_barrier(1)
    producer.write(2, 16)
    assert read(view) == [b"\1" * 4, barrier(1)]
    assert (view.next_type(), view.backlog(), producer.first.backlog()) == (NextType.NONE, 0, 1)
    for other in (0, 2):
        view.resume(other)
        assert view.next_type() is NextType.NONE
    view.resume(1)
    assert (view.next_type(), view.backlog()) == (NextType.DATA, 1)
    assert read(view) == [b"\2" * 16]
    view.resume(1)
    producer.check_books(2)


def test_a_flush_while_it_is_blocked_is_remembered() -> None:
    """Case 179."""
    producer = Producer()
    view = producer.attach()
    producer.partition.broadcast_barrier(1)
    assert read(view) == [barrier(1)]
    producer.write(1, 4)
    producer.partition.flush()
    assert view.next_type() is NextType.NONE
    view.resume(1)
    assert read(view) == [b"\1" * 4]


@pytest.mark.parametrize("polled", [False, True])
def test_the_next_view_begins_with_a_barrier_that_was_not_resumed(polled: bool) -> None:
    """Behind the rows that precede it, and those behind it wait for its resume once more."""
    producer = Producer(drops=False)
    view = producer.attach()
    producer.write(1, 4)
    producer.partition.broadcast_watermark(5, False)
    producer.partition.broadcast_barrier(3)
    producer.write(2, 16)
    if polled:
        read(view)
    view.release(FAILED)
    view.resume(3)  # too late: it is not the current one
    again = producer.attach()
    kinds = [each[0] if len(each) in (6, 10) else each for each in read(again)]
    assert kinds == [*([] if polled else [b"\1" * 4]), EventKind.WATERMARK, EventKind.BARRIER]
    again.resume(3)
    assert read(again) == [b"\2" * 16]
    again.release(FAILED)
    assert EventKind.BARRIER not in [each[0] for each in read(producer.attach())]


@pytest.mark.parametrize("reason", [FAILED, SUSPECTED])
@pytest.mark.parametrize("polled", [False, True])
def test_nothing_is_dropped_for_a_consumer_that_goes_while_a_barrier_is_not_over(
    reason: CancelReason, polled: bool
) -> None:
    producer = Producer()
    view = producer.attach()
    producer.partition.broadcast_barrier(1)
    if polled:
        read(view)
    producer.write(1, 4)
    view.release(reason)
    producer.attend()
    producer.write(2, 4)
    assert (producer.dropped, producer.suspected, producer.first.available) == ((0, 0), 0, True)
    again = producer.attach()
    assert read(again) == [barrier(1)]
    again.resume(1)
    producer.partition.end_barriers(1)
    producer.partition.flush()
    assert read(again) == [b"\1" * 4 + b"\2" * 4]
    again.release(reason)
    producer.write(3, 4)
    assert sum(producer.dropped) + producer.suspected == 1, "it is over: all is as always"


@pytest.mark.parametrize("reason", [FAILED, SUSPECTED])
def test_what_was_held_back_is_dropped_when_the_barrier_is_over_and_nobody_came(reason: CancelReason) -> None:
    producer = Producer()
    view = producer.attach()
    producer.partition.broadcast_barrier(2)
    producer.write(1, 4)
    view.release(reason)
    producer.partition.end_barriers(1)
    assert producer.first.available
    producer.partition.end_barriers(2)
    producer.write(2, 4)
    assert not producer.first.available
    assert producer.dropped == ((1, 1) if reason is FAILED else (0, 0))
    assert producer.suspected == (0 if reason is FAILED else 2)
    assert rows_of(producer.attach()) == b"", "and no barrier blocks the next one"
    producer.check_books(2)


def test_barriers_that_nobody_reads_take_each_others_place() -> None:
    """A job that reads another input first may be paused any number of times."""
    producer = Producer()
    producer.write(1, 4)
    for number in range(1, 1000):
        producer.partition.broadcast_barrier(number)
    assert producer.first.state().queued == 2
    assert read(producer.attach()) == [b"\1" * 4, barrier(999)]


def test_a_barrier_begins_a_new_segment_of_a_broadcast() -> None:
    producer = Producer(consumers=2)
    views = [producer.attach(0), producer.attach(1)]
    producer.broadcast(1, 4)
    producer.partition.broadcast_barrier(1)
    producer.broadcast(2, 4)
    producer.partition.flush()
    assert [read(view) for view in views] == [[b"\1" * 4, barrier(1)]] * 2
    for view in views:
        view.resume(1)
    assert [read(view) for view in views] == [[b"\2" * 4]] * 2
    producer.check_all_home()


def test_a_barrier_for_some_consumers_holds_back_what_follows_for_them_alone() -> None:
    """Until the next attempt of each resumes; then the consumer that goes is like any other."""
    producer = Producer(consumers=3)
    views = [producer.attach(position) for position in range(3)]
    producer.partition.broadcast_barrier(1, {1, 2})
    for position in range(3):
        producer.write(position + 1, 16, position=position)
    assert [read(view) for view in views] == [[b"\1" * 16], [barrier(1)], [barrier(1)]]
    assert not producer.partition.is_read(()) and not producer.partition.is_read((2,))
    assert producer.partition.is_read((1, 2))
    views[1].release(FAILED)
    views[1] = producer.attach(1, 2)
    assert read(views[1]) == [barrier(1)]
    views[1].resume(1)
    assert read(views[1]) == [b"\2" * 16]
    assert producer.partition.is_read((2,)) and not producer.subpartitions[1].held_back
    views[1].release(FAILED)
    producer.write(4, 16, position=1)
    assert sum(producer.dropped) == 1


def test_whatever_barrier_a_view_gives_is_the_one_that_it_waits_for() -> None:
    """Also if the writer puts the next one while it is polled."""
    made: list[tuple[Producer, PipelinedView, list[bytes]]] = []

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        producer, given = Producer(), []
        view = producer.attach()
        producer.partition.broadcast_barrier(1)
        made.append((producer, view, given))
        return lambda: given.extend(read(view)), lambda: producer.partition.broadcast_barrier(2)

    seen = set()
    for _ in nested(make):
        producer, view, given = made[-1]
        seen.add(tuple(given))
        producer.write(1, 16)
        for _ in range(3):
            if BARRIER_EVENT.size == len(given[-1]):
                view.resume(BARRIER_EVENT.unpack(given[-1])[-1])
                given += read(view)
        assert given[-2:] == [barrier(2), b"\1" * 16]
    assert seen == {(barrier(1),), (barrier(2),)}
