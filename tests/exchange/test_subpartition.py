"""Consumers of a subpartition that come, go, and come again: views, generations, attachments."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minishuffle.counters import ConnectionCounters, TaskCounters
from minishuffle.errors import TaskFailed
from minishuffle.exchange.buffers import Slice
from minishuffle.exchange.partition import serve
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedView
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import NextType
from minishuffle.protocol.connection import Connection
from minishuffle.wire.frames import (
    NO_ELEMENT_START,
    BufferFlags,
    CancelReason,
    DataType,
    EventKind,
    PartitionRequest,
)
from support.interleave import nested

CAPACITY = 16


class Producer:
    """A partition of one subpartition over 16-byte segments; ``woken`` lists the generations woken."""

    def __init__(self, segments: int = 64) -> None:
        self.network = NetworkBufferPool(segments, CAPACITY)
        self.pool = self.network.create_pool("p", 1, segments)
        self.partition = PipelinedPartition(
            PartitionId(JobId("j1"), 0, 0),
            range(1),
            lambda: cast(Segment, self.pool.request()),
            lambda subpartition: subpartition.attend(),
            TaskCounters(),
        )
        self.subpartition = self.partition.subpartitions[0]
        self.woken: list[int] = []

    def attach(self, generation: int) -> PipelinedView:
        return self.subpartition.attach(generation, lambda: self.woken.append(generation))

    def write(self, data: bytes, rows: int = 1) -> None:
        self.partition.write(0, rows, [data])

    def flush(self) -> None:
        self.subpartition.flush()


def poll(view: PipelinedView) -> Slice:
    piece = view.poll()
    assert piece is not None
    return piece


def payloads(view: PipelinedView) -> list[bytes]:
    """Everything that there is; each piece is let go before the next poll."""
    found = []
    while (piece := view.poll()) is not None:
        found.append(bytes(piece.payload))
        piece.released()
    return found


# --- views ----------------------------------------------------------------------------------------------


def test_a_view_reads_until_a_newer_one_is_attached() -> None:
    producer = Producer()
    first = producer.attach(1)
    producer.write(bytes(CAPACITY))
    second = producer.attach(2)
    assert (first.current, second.current, second.generation) == (False, True, 2)
    assert (first.next_type(), first.poll()) == (NextType.NONE, None)
    assert payloads(second) == [bytes(CAPACITY)]


def test_release_of_a_view_that_is_not_current_changes_nothing() -> None:
    producer = Producer()
    first, second = producer.attach(1), producer.attach(2)
    first.release(CancelReason.FAILED)
    assert producer.subpartition.view is second
    producer.write(bytes(CAPACITY))
    assert producer.woken == [2]
    second.release(CancelReason.FAILED)
    second.release(CancelReason.FAILED)
    assert producer.subpartition.view is None


def test_what_is_queued_waits_for_the_next_view() -> None:
    producer = Producer()
    producer.attach(1).release(CancelReason.FAILED)
    producer.write(bytes(CAPACITY))
    assert producer.woken == []
    assert payloads(producer.attach(2)) == [bytes(CAPACITY)]


def test_a_slice_in_flight_wakes_its_own_view_only() -> None:
    producer = Producer()
    first = producer.attach(1)
    producer.write(b"abc")
    producer.flush()
    held = poll(first)
    second = producer.attach(2)
    held.released()
    assert producer.woken == []
    producer.write(b"de")
    producer.flush()
    held = poll(second)
    held.released()
    assert producer.woken == [], "nothing has waited for it"
    producer.write(b"fg")
    producer.flush()
    held = poll(second)
    producer.write(b"hi")
    producer.flush()
    assert second.poll() is None
    held.released()
    assert producer.woken == [2]
    assert payloads(second) == [b"hi"]


def test_a_segment_whose_front_an_older_view_has_in_flight_does_not_hold_the_new_one_up() -> None:
    producer = Producer()
    first = producer.attach(1)
    producer.write(b"abc")
    producer.flush()
    held = poll(first)
    second = producer.attach(2)
    producer.write(b"de")
    producer.flush()
    taken = poll(second)
    taken.memory[:3] = b"xxx"  # the header goes there
    producer.write(bytes(CAPACITY - 5))
    assert payloads(second) == [bytes(CAPACITY - 5)]
    assert (bytes(held.payload), bytes(taken.payload)) == (b"abc", b"de")
    assert producer.pool.in_use == 1
    taken.released()
    held.released()
    assert producer.pool.in_use == 0


@pytest.mark.parametrize(
    ("polled", "expected"),
    [
        (0, [b"a" * 16, b"a" * 16, b"a" * 4 + b"b" * 12, b"b" * 2]),
        (1, [b"b" * 12, b"b" * 2]),
        (2, [b"b" * 12, b"b" * 2]),
        (3, []),
    ],
)
def test_a_view_begins_with_a_whole_element(polled: int, expected: list[bytes]) -> None:
    """Cases 204 and 207, PipelinedApproximateSubpartitionTest."""
    producer = Producer()
    first = producer.attach(1)
    producer.write(b"a" * 36, rows=5)
    producer.write(b"b" * 14, rows=3)
    producer.flush()
    for _ in range(polled):
        poll(first).released()
    second = producer.attach(2)
    pieces = []
    while (piece := second.poll()) is not None:
        pieces.append(piece)
        piece.released()
    assert [bytes(piece.payload) for piece in pieces] == expected
    assert first.rows_sent + second.rows_sent == 8
    assert (first.rows_skipped, second.rows_skipped) == ({0: 0, 1: 5, 2: 5, 3: 3}[polled], 0)
    if expected:
        assert pieces[0].flags & BufferFlags.STARTS and pieces[0].first_start == 0


def test_the_rest_of_an_element_is_skipped_however_late_it_is_written() -> None:
    """Cases 203 and 208, PipelinedApproximateSubpartitionTest."""
    producer = Producer()
    first = producer.attach(1)
    builders: list[Segment] = []

    def acquire() -> Segment:
        """The consumer is replaced, twice, while the writer is in the middle of an element."""
        segment = producer.pool.request()
        assert segment is not None
        builders.append(segment)
        if len(builders) == 2:
            poll(first).released()
            views.append(producer.attach(2))
            views.append(producer.attach(3))
            assert views[1].poll() is None
        return segment

    views: list[PipelinedView] = []
    producer.partition._acquire = acquire
    producer.write(b"a" * 40, rows=7)
    producer.write(b"b" * 3)
    producer.partition.broadcast_event(EventKind.END_OF_DATA)
    assert payloads(views[1]) == [b"b" * 3, bytes([EventKind.END_OF_DATA])]
    assert [view.rows_skipped for view in (first, *views)] == [7, 0, 0]
    assert producer.pool.in_use == 0


def test_a_new_view_begins_behind_what_another_has_sent_of_a_segment_that_its_writer_is_handing_over() -> (
    None
):
    """Case 206, PipelinedApproximateSubpartitionTest."""
    made: list[tuple[Producer, list[bytes]]] = []

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        producer = Producer()
        first = producer.attach(1)
        producer.write(b"a")
        producer.flush()
        found: list[bytes] = []
        made.append((producer, found))
        return lambda: producer.write(b"b" * CAPACITY), lambda: found.extend(payloads(first))

    for _ in nested(make):
        producer, found = made.pop()
        second = producer.attach(2)
        producer.flush()
        found += payloads(second)
        assert b"".join(found) in {b"a" + b"b" * CAPACITY, b"a" + b"b" * (CAPACITY - 1)}


# --- attachments ----------------------------------------------------------------------------------------


class Link:
    """One end of a data connection; ``pokes`` counts the flushes asked for."""

    def __init__(self) -> None:
        self.connection = Connection(dialer=True, counters=ConnectionCounters(), ping_interval=5.0, now=0.0)
        self.pokes = 0

    def flush_soon(self) -> None:
        self.pokes += 1

    def sent(self) -> bytes:
        chunks, pieces = self.connection.data_to_send(16)
        data = b"".join(chunks)
        for piece in pieces:
            piece.released()
        return data

    def request(self, channel: int, generation: int) -> PartitionRequest:
        """The consumer asks for subpartition 0."""
        request = PartitionRequest(
            PartitionId(JobId("j1"), 0, 0), 0, generation=generation, channel=channel, initial_credit=2
        )
        self.connection.producers.expect(request)
        return request


def test_serving_a_request_joins_the_view_to_its_channel() -> None:
    producer, link = Producer(), Link()
    producer.write(b"x" * CAPACITY)
    attachment = serve(link, link.request(7, 3), producer.subpartition)
    assert (attachment.channel, attachment.view.generation) == (7, 3)
    assert attachment.view.current
    assert link.pokes == 1
    assert b"x" * CAPACITY in link.sent()
    producer.write(b"y" * CAPACITY)
    assert link.pokes == 2
    assert b"y" * CAPACITY in link.sent()


def test_a_request_that_was_cancelled_meanwhile_leaves_no_attachment() -> None:
    producer, link = Producer(), Link()
    request = link.request(7, 1)
    link.connection.producers.cancel(7, CancelReason.ENDED)
    assert not serve(link, request, producer.subpartition).view.current
    assert producer.subpartition.view is None


def test_a_second_request_takes_over_and_the_first_consumer_gets_to_know() -> None:
    producer, old, new = Producer(), Link(), Link()
    before = serve(old, old.request(7, 1), producer.subpartition)
    attachment = serve(new, new.request(9, 2), producer.subpartition)
    assert (before.view.current, attachment.view.current) == (False, True)
    assert b"generation 2 of attempt 1 takes the place of generation 1 of attempt 1" in old.sent()
    producer.write(b"x" * CAPACITY)
    assert old.sent() == b""
    assert b"x" * CAPACITY in new.sent()


def test_a_producer_that_fails_tells_its_consumers() -> None:
    producer, link = Producer(), Link()
    attachment = serve(link, link.request(7, 1), producer.subpartition)
    producer.partition.fail(TaskFailed("the map raised"))
    assert b"the map raised" in link.sent()
    assert not attachment.view.current
    producer.partition.fail(TaskFailed("again"))
    assert link.sent() == b""


# --- any order ------------------------------------------------------------------------------------------


class ViewsComeAndGo(RuleBasedStateMachine):
    """A writer, views that replace each other at any time, and slices that come home late.

    Each element is ``number`` repeated, as one row; so a view's bytes show which elements it has and how
    much of each.
    """

    @initialize(segments=st.integers(8, 40))
    def begin(self, segments: int) -> None:
        self.producer = Producer(segments)
        self.subpartition = self.producer.subpartition
        self.sizes: list[int] = []
        self.views: list[PipelinedView] = []
        self.read: list[bytearray] = []
        self.held: list[Slice] = []
        self.taken: list[tuple[Slice, bytes]] = []
        self.marks = 0
        self.ended = False

    @precondition(lambda self: not self.ended)
    @rule(size=st.integers(1, 50))
    def write(self, size: int) -> None:
        pool = self.producer.pool
        if pool.size - pool.in_use < 5 or len(self.sizes) > 250:
            return
        self.producer.write(bytes([len(self.sizes)]) * size)
        self.sizes.append(size)

    @precondition(lambda self: not self.ended)
    @rule()
    def mark(self) -> None:
        self.marks += 1
        self.producer.partition.broadcast_watermark(self.marks, False)

    @precondition(lambda self: not self.ended)
    @rule()
    def finish(self) -> None:
        self.ended = True
        self.producer.partition.broadcast_event(EventKind.END_OF_DATA)

    @rule()
    def flush(self) -> None:
        self.producer.flush()

    @rule()
    def attach(self) -> None:
        self.views.append(self.producer.attach(len(self.views) + 1))
        self.read.append(bytearray())

    @precondition(lambda self: self.views)
    @rule(which=st.integers(0, 5))
    def release_a_view(self, which: int) -> None:
        self.views[max(-1 - which, -len(self.views))].release(CancelReason.FAILED)

    @precondition(lambda self: self.views)
    @rule(which=st.integers(0, 3), pieces=st.integers(1, 4))
    def poll(self, which: int, pieces: int) -> None:
        number = max(len(self.views) - 1 - which, 0)
        view = self.views[number]
        said: NextType | None = None
        for _ in range(pieces):
            expected = view.next_type()
            assert said in (None, expected)
            piece = view.poll()
            assert (piece is None) == (expected is NextType.NONE)
            if piece is None:
                return
            assert view.current
            assert (piece.data_type == DataType.EVENT) == (expected is NextType.EVENT)
            assert piece.backlog == view.backlog()
            said = piece.next_type
            if piece.data_type == DataType.DATA:
                self.take(number, piece)

    @precondition(lambda self: self.views)
    @rule()
    def poll_without_credit(self) -> None:
        expected = self.views[-1].next_type()
        piece = self.views[-1].poll(data=False)
        assert (piece is None) == (expected is not NextType.EVENT)
        assert piece is None or piece.data_type == DataType.EVENT

    def take(self, number: int, piece: Slice) -> None:
        read, payload = self.read[number], bytes(piece.payload)
        if not read:
            assert piece.first_start == 0, "a view begins with an element"
        assert bool(piece.flags & BufferFlags.STARTS) == (piece.first_start != NO_ELEMENT_START)
        piece.memory[piece.start - 32 : piece.start] = bytes(32)  # the header
        read += payload
        self.held.append(piece)
        self.taken.append((piece, payload))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 50))
    def let_go(self, which: int) -> None:
        self.held.pop(which % len(self.held)).released()

    @precondition(lambda self: hasattr(self, "producer"))
    @invariant()
    def at_most_one_view_is_current(self) -> None:
        current = [view for view in self.views if view.current]
        assert current == ([] if self.subpartition.view is None else [self.subpartition.view])
        assert self.subpartition._polled <= self.subpartition._written
        assert 0 <= self.subpartition.backlog() <= self.subpartition._written - self.subpartition._polled + 1
        self.producer.network.validate()

    @precondition(lambda self: hasattr(self, "producer"))
    @invariant()
    def what_the_transport_holds_is_not_written_to(self) -> None:
        for piece, payload in self.taken:
            if piece in self.held:
                assert bytes(piece.payload) == payload

    def teardown(self) -> None:
        if not hasattr(self, "producer"):
            return
        for piece in self.held:
            piece.released()
        self.views.append(self.producer.attach(len(self.views) + 1))
        self.read.append(bytearray())
        self.held.clear()
        self.flush()
        while True:
            before = len(self.taken)
            self.poll(0, 1000)
            for piece in self.held:
                piece.released()
            self.held.clear()
            if len(self.taken) == before:
                break
        self.check_elements()
        assert self.producer.pool.in_use <= 1, "only a segment that is open and sent"
        self.subpartition.discard()
        assert self.producer.network.free == self.producer.network.total

    def check_elements(self) -> None:
        """Each went whole to one view, or its beginning did and the rest was skipped and counted."""
        found: list[int] = []
        cut = 0
        for read in self.read:
            at = 0
            while at < len(read):
                number = read[at]
                size = self.sizes[number]
                piece = bytes(read[at : at + size])
                assert piece == bytes([number]) * len(piece)
                at += size
                found.append(number)
                if len(piece) < size:
                    assert at > len(read), "only a view's last element may be cut"
                    cut += 1
        assert found == list(range(len(self.sizes)))
        assert sum(view.rows_sent for view in self.views) == len(self.sizes)
        assert sum(view.rows_skipped for view in self.views) == cut


TestViewsComeAndGo: Callable[..., object] = ViewsComeAndGo.TestCase
