"""Consumers that go away: what their producer drops, keeps and counts, and how it goes on with the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minishuffle.counters import TaskCounters
from minishuffle.errors import ShuffleError, Superseded, TaskFailed
from minishuffle.exchange.buffers import BufferBuilder, Flush, Slice
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedView, Subpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import WATERMARK_EVENT, CancelReason, DataType, EventKind
from support.interleave import Stepped, nested

CAPACITY = 16
ENDED, FAILED, MOVED = CancelReason.ENDED, CancelReason.FAILED, CancelReason.MOVED
SUSPECTED = CancelReason.SUSPECTED


class Producer:
    """A partition over 16-byte segments, whose notices wait in ``inbox`` until the loop attends to them.

    Each element is its number repeated, so what a view reads shows which elements it has.
    """

    def __init__(
        self, consumers: int = 1, drops: bool = True, flushing: Flush = Flush.ON_REQUEST, segments: int = 64
    ) -> None:
        self.network = NetworkBufferPool(segments, CAPACITY)
        self.pool = self.network.create_pool("p", 1, segments)
        self.inbox: list[Subpartition] = []
        self.counters = TaskCounters()
        self.partition = ResultPartition(
            PartitionId(JobId("j1"), 0, 0),
            range(consumers),
            self.acquire,
            self._notify,
            self.counters,
            flushing=flushing,
            drops=drops,
        )
        self.subpartitions = self.partition.subpartitions
        self.first = self.subpartitions[0]
        self.views: list[list[PipelinedView]] = [[] for _ in range(consumers)]
        self.errors: list[ShuffleError] = []
        self.data: dict[int, bytes] = defaultdict(bytes)
        """What each view of the first subpartition has read, without events."""

    def acquire(self) -> Segment:
        return cast(Segment, self.pool.request())

    def _notify(self, subpartition: Subpartition) -> None:
        """As ``TaskPaths.notify``."""
        if not subpartition.notified:
            subpartition.notified = True
            self.inbox.append(subpartition)

    def attend(self) -> None:
        while self.inbox:
            self.inbox.pop(0).attend()

    def attach(self, position: int = 0, attempt: int = 1) -> PipelinedView:
        views = self.views[position]
        view = self.subpartitions[position].attach(
            len(views) + 1, lambda: None, self.errors.append, attempt=attempt
        )
        views.append(view)
        return view

    def write(self, number: int, size: int, rows: int = 1, position: int = 0) -> None:
        """One element, as a task writes it."""
        if not self.partition.skips(position, rows):
            self.partition.write(position, rows, [bytes([number]) * size])

    def read_all(self) -> None:
        """The consumer of the first subpartition takes what there is."""
        while self.first.view is not None and (piece := self.first.view.poll()) is not None:
            if piece.data_type == DataType.DATA:
                self.data[len(self.views[0])] += piece.payload
            piece.released()

    @property
    def dropped(self) -> tuple[int, int]:
        """Rows discarded from the queue, and rows that the writer has skipped."""
        dropped = self.partition.rows_dropped()
        assert set(dropped) - {"suspected"} == {"queue_discarded", "upstream_unavailable"}
        return dropped["queue_discarded"], dropped["upstream_unavailable"]

    @property
    def suspected(self) -> int:
        """Rows dropped under suspicion, from the queue or by the writer."""
        return self.partition.rows_dropped().get("suspected", 0)

    @property
    def queued(self) -> int:
        """Rows that were begun, and neither sent nor discarded."""
        builders: dict[int, BufferBuilder] = {}
        for subpartition in self.subpartitions:
            for item in (*subpartition._queue, subpartition._open):
                if isinstance(item, BufferBuilder):
                    builders[id(item)] = item
        return sum(builder.rows - builder.sent_rows for builder in builders.values())

    @property
    def sent(self) -> int:
        return sum(view.rows_sent for views in self.views for view in views)

    @property
    def cut(self) -> int:
        """Rows, of those sent, of which a view has the beginning only."""
        return sum(view.rows_skipped for views in self.views for view in views)

    def check_books(self, written: int) -> None:
        assert written == self.sent + sum(self.dropped) + self.suspected + self.queued

    def check_all_home(self) -> None:
        self.partition.discard(False)
        assert self.network.free == self.network.total
        self.network.validate()


def read(view: PipelinedView) -> list[bytes]:
    """The payloads of what there is."""
    found = []
    while (piece := view.poll()) is not None:
        found.append(bytes(piece.payload))
        piece.released()
    return found


def check_elements(views: Iterable[bytes], elements: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Each was read whole, or in part as the last one of a view, or not at all, and in order.

    Args:
        views: the bytes that each view has read.
        elements: by number; bytes and rows.

    Returns: the rows that were read, and those of them that were cut.
    """
    found: list[int] = []
    sent = cut = 0
    for data in views:
        at = 0
        while at < len(data):
            size, rows = elements[data[at]]
            piece = data[at : at + size]
            assert bytes(piece) == bytes([data[at]]) * len(piece)
            found.append(data[at])
            at += size
            sent += rows
            if len(piece) < size:
                cut += rows
    assert found == sorted(set(found))
    return sent, cut


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
    assert (producer.dropped, producer.pool.in_use) == ((2, 3), 0)


# --- elements that are cut ------------------------------------------------------------------------------


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("sent", range(41))
def test_an_element_cut_at_any_byte_is_left_out_whole_and_counted_once(sent: int, drops: bool) -> None:
    """Elements of 41 and 20 bytes; the consumer is lost when ``sent`` bytes of the first have gone out.

    Pieces end with segments, so an element in front has the bytes that the cut needs.
    """
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
        producer.partition.discard(False)
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


@pytest.mark.parametrize(("flushing", "drops"), [(Flush.ON_REQUEST, True), (Flush.AT_ONCE, False)])
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


# --- any order ------------------------------------------------------------------------------------------


class TheBooksBalance(RuleBasedStateMachine):
    """A task writes while its consumers come and go; the loop acts between any two of its instructions.

    At every step: rows written = sent + skipped + discarded + queued; the rows of the element that is being
    written may be counted already or not.
    """

    @initialize(drops=st.booleans(), flushing=st.sampled_from(Flush))
    def begin(self, drops: bool, flushing: Flush) -> None:
        self.producer = Producer(consumers=2, drops=drops, flushing=flushing, segments=2_000)
        self.subpartitions = self.producer.subpartitions
        self.call: Stepped | None = None
        self.written = 0
        """Rows of the calls that have returned."""
        self.writing = 0
        """Rows of the call under way."""
        self.elements: list[list[tuple[int, int, int]]] = [[], []]
        """Of each consumer: (number, bytes, rows)."""
        self.number = self.marks = 0
        self.finished = False
        self.held: list[Slice] = []
        self.read: list[list[bytearray]] = [[], []]
        """By consumer and view."""
        self.times: list[list[list[int]]] = [[], []]
        self.ends: list[list[int]] = [[], []]
        self.attach(0)

    # --- writer ----------------------------------------------------------------------------------

    def start(self, call: Callable[[], object], steps: int) -> None:
        """End the task's last call, and run so many instructions of the next, or all if that is 0."""
        self.finish_call()
        self.call = Stepped(call)
        if steps:
            self.call.step(steps)
        else:
            self.finish_call()

    @precondition(lambda self: self.call is not None)
    @rule(steps=st.integers(1, 300))
    def go_on(self, steps: int) -> None:
        assert self.call is not None
        if self.call.step(steps) < steps:
            self.finish_call()

    @precondition(lambda self: self.call is not None)
    @rule()
    def finish_call(self) -> None:
        if self.call is not None:
            self.call.finish()
            self.call = None
            self.written += self.writing
            self.writing = 0

    @precondition(lambda self: not self.finished and self.number < 240)
    @rule(
        sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
        positions=st.sampled_from([(0,), (1,), (0, 1)]),
        steps=st.integers(0, 600),
    )
    def write(self, sizes: list[int], positions: tuple[int, ...], steps: int) -> None:
        self.finish_call()
        elements = []
        for size in sizes:
            self.number += 1
            element = (self.number, size, self.number % 5)
            elements += [(*element, position) for position in positions]
            for position in positions:
                self.elements[position].append(element)
        self.writing = sum(rows for _, _, rows, _ in elements)

        def write() -> None:
            for element in elements:
                self.producer.write(*element)

        self.start(write, steps)

    @precondition(lambda self: not self.finished)
    @rule(idle=st.booleans(), steps=st.integers(0, 150))
    def mark(self, idle: bool, steps: int) -> None:
        self.marks += 1
        time = self.marks
        self.start(lambda: self.producer.partition.broadcast_watermark(time, idle), steps)

    @precondition(lambda self: not self.finished and self.number > 10)
    @rule(steps=st.integers(0, 150))
    def finish(self, steps: int) -> None:
        self.finished = True
        self.start(lambda: self.producer.partition.broadcast_event(EventKind.END_OF_DATA), steps)

    # --- loop ------------------------------------------------------------------------------------

    @rule(position=st.integers(0, 1))
    def attach(self, position: int) -> None:
        self.producer.attach(position)
        self.read[position].append(bytearray())
        self.times[position].append([])
        self.ends[position].append(0)

    @rule(position=st.integers(0, 1), reason=st.sampled_from([FAILED, SUSPECTED, MOVED, ENDED, None]))
    def lose(self, position: int, reason: CancelReason | None) -> None:
        """None: a newer attempt of the consumer is named."""
        view = self.subpartitions[position].view
        if reason is None:
            self.producer.partition.fence(position, 2)
        elif view is not None:
            view.release(reason)
        assert self.subpartitions[position].view is None

    @precondition(lambda self: self.producer.inbox)
    @rule()
    def attend(self) -> None:
        self.producer.inbox.pop(0).attend()

    @rule()
    def flush(self) -> None:
        self.producer.partition.flush()

    @rule(position=st.integers(0, 1), hold=st.booleans(), pieces=st.integers(1, 4))
    def poll(self, position: int, hold: bool, pieces: int) -> None:
        view = self.subpartitions[position].view
        if view is None:
            return
        for _ in range(pieces):
            if hold and view.next_type() is NextType.PARTIAL:
                view.hold()
                return
            piece = view.poll()
            if piece is None:
                return
            self.take(position, piece)

    def take(self, position: int, piece: Slice) -> None:
        payload = bytes(piece.payload)
        if piece.data_type == DataType.DATA:
            if not self.read[position][-1]:
                assert piece.first_start == 0, "a view begins with an element"
            self.read[position][-1] += payload
            self.held.append(piece)
            return
        piece.released()
        if payload[0] == EventKind.WATERMARK:
            _, _, time = WATERMARK_EVENT.unpack(payload)
            self.times[position][-1].append(time)
        else:
            self.ends[position][-1] += 1

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 50))
    def let_go(self, which: int) -> None:
        self.held.pop(which % len(self.held)).released()

    # --- what holds ------------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "producer"))
    @invariant()
    def every_row_is_in_one_place(self) -> None:
        producer = self.producer
        found = producer.sent + sum(producer.dropped) + producer.suspected + producer.queued
        assert self.written <= found <= self.written + self.writing
        if self.call is None:
            assert found == self.written
        assert producer.cut <= producer.sent
        producer.network.validate()

    @precondition(lambda self: hasattr(self, "producer"))
    @invariant()
    def nothing_stays_for_a_consumer_that_is_unavailable(self) -> None:
        for subpartition in self.subpartitions:
            assert subpartition.available or subpartition.view is None
            if not (subpartition.available or subpartition.notified or self.call):
                assert not subpartition._queue and subpartition.backlog() == 0

    def teardown(self) -> None:
        if not hasattr(self, "producer"):
            return
        self.finish_call()
        producer = self.producer
        producer.attend()
        self.release_all()
        for position in range(2):
            self.attach(position)
        while True:
            producer.partition.flush()
            before = sum(len(view) for views in self.read for view in views)
            for position in range(2):
                self.poll(position, hold=False, pieces=10_000)
            self.release_all()
            if sum(len(view) for views in self.read for view in views) == before:
                break
        producer.check_books(self.written)
        found = [
            check_elements(
                self.read[position], {number: (size, rows) for number, size, rows in self.elements[position]}
            )
            for position in range(2)
        ]
        assert producer.counters.records_out == self.written
        assert producer.sent == sum(sent for sent, _ in found)
        assert producer.cut == sum(cut for _, cut in found)
        for position in range(2):
            assert all(times == sorted(times) for times in self.times[position])
            assert self.times[position][-1][-1:] == [self.marks] * bool(self.marks)
            assert self.ends[position][-1] == self.finished
        producer.check_all_home()

    def release_all(self) -> None:
        for piece in self.held:
            piece.released()
        self.held.clear()


TestTheBooksBalance: Callable[..., object] = TheBooksBalance.TestCase
