"""Subpartitions and their writer: what Flink's PipelinedSubpartition tests assert, in our terms."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.counters import TaskCounters
from minishuffle.errors import LocalProtocolError
from minishuffle.exchange.buffers import Flush, Slice
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.limits import EVENTS_QUEUED_PER_CHANNEL_MAX, OUTPUT_BUFFERS_PER_SUBPARTITION_MAX
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import NO_ELEMENT_START, BufferFlags, CancelReason, DataType, EventKind

CAPACITY = 16


class Bench:
    """A partition of ``count`` subpartitions over 16-byte segments; ``notified`` lists wake-ups."""

    def __init__(self, count: int = 1, segments: int = 64, flushing: Flush = Flush.ON_REQUEST) -> None:
        self.pool = NetworkBufferPool(segments, CAPACITY)
        self.local = self.pool.create_pool("p", 1, segments)
        self.counters = TaskCounters()
        self.notified: list[PipelinedSubpartition] = []
        self.full = 0
        """How often a subpartition was said to have all that the output keeps for it."""
        self.partition = PipelinedPartition(
            PartitionId(JobId("j1"), 0, 0),
            range(count),
            self._acquire,
            self.notified.append,
            self.counters,
            flushing=flushing,
            full=self._count_full,
        )
        self.first = self.partition.subpartitions[0]
        self.view = self.first.attach(1, lambda: None)

    def _count_full(self) -> None:
        self.full += 1

    def _acquire(self) -> Segment:
        return cast(Segment, self.local.request())

    def write(self, data: bytes, position: int = 0) -> None:
        self.partition.write(position, 1, [data])

    def poll(self) -> Slice:
        piece = self.view.poll()
        assert piece is not None
        return piece

    def drain(self) -> list[Slice]:
        """Poll everything there is, letting go of each piece before the next poll."""
        pieces = []
        while (piece := self.view.poll()) is not None:
            pieces.append(piece)
            self.copied.append(bytes(piece.payload))
            piece.released()
        return pieces

    @property
    def copied(self) -> list[bytes]:
        return self.__dict__.setdefault("_copied", [])


def test_an_unfinished_segment_is_not_available_until_flushed() -> None:
    """Case 168, PipelinedSubpartitionWithReadViewTest."""
    bench = Bench()
    bench.write(b"abc")
    assert bench.view.next_type() is NextType.NONE
    assert bench.first.backlog() == 0
    assert bench.notified == []
    assert bench.first.flush()
    assert bench.view.next_type() is NextType.DATA
    assert bench.first.backlog() == 1
    assert bytes(bench.poll().payload) == b"abc"
    assert bench.first.backlog() == 0


def test_an_open_segment_to_be_flushed_counts_as_backlog_once_and_not_while_a_slice_is_in_flight() -> None:
    bench = Bench(flushing=Flush.AT_ONCE)
    bench.write(b"abc")
    held = bench.poll()
    bench.write(b"de")
    assert bench.first.backlog() == 0, "it cannot be polled before the slice is back"
    held.released()
    assert bench.first.backlog() == 1
    bench.write(bytes(CAPACITY - 5))
    assert bench.first.backlog() == 1, "it is finished now"
    bench.write(b"f")
    assert bench.first.backlog() == 2
    bench.drain()
    assert bench.first.backlog() == 0


def test_a_flush_is_of_one_segment_and_not_of_the_next() -> None:
    bench = Bench()
    bench.write(b"abc")
    bench.first.flush()
    bench.write(bytes(CAPACITY - 3))
    bench.write(b"not asked for")
    assert [piece.size for piece in bench.drain()] == [CAPACITY]
    assert bench.first.backlog() == 0


def test_a_flush_of_a_partition_looks_only_at_what_was_published_since_the_last() -> None:
    """Case 171, PipelinedSubpartitionWithReadViewTest."""
    bench = Bench(count=3)
    woken: list[int] = []
    for number, subpartition in enumerate(bench.partition.subpartitions):
        subpartition.attach(2, lambda number=number: woken.append(number))  # type: ignore[misc]
    bench.write(b"abc", position=2)
    bench.write(b"de", position=2)
    bench.partition.flush()
    assert woken == [2]
    bench.partition.flush()
    assert woken == [2], "nothing came since, although nothing was sent either"
    bench.write(b"f", position=0)
    bench.write(b"g", position=2)
    bench.partition.flush()
    assert woken == [2, 0, 2]


def test_flush_of_nothing_has_no_effect() -> None:
    """Case 173, PipelinedSubpartitionWithReadViewTest."""
    bench = Bench()
    assert not bench.first.flush()
    bench.write(b"abc")
    bench.first.flush()
    bench.poll().released()
    assert not bench.first.flush()
    assert bench.view.next_type() is NextType.NONE


def test_a_full_segment_goes_out_and_notifies() -> None:
    bench = Bench()
    bench.write(bytes(CAPACITY))
    assert bench.notified == [bench.first]
    assert bench.first.backlog() == 1
    assert bench.poll().size == CAPACITY
    assert bench.first.backlog() == 0


def test_the_open_segment_behind_a_finished_one_is_not_promised() -> None:
    """Case 169, PipelinedSubpartitionWithReadViewTest."""
    bench = Bench()
    bench.write(bytes(CAPACITY + 3))
    assert bench.notified == [bench.first]
    assert bench.first.backlog() == 1
    piece = bench.poll()
    assert (piece.next_type, piece.backlog) == (NextType.NONE, 0)
    piece.released()
    assert bench.view.poll() is None
    bench.first.flush()
    assert [piece.size for piece in bench.drain()] == [3]


def test_an_empty_segment_leaves_without_a_buffer() -> None:
    """Cases 167 and 172, PipelinedSubpartitionWithReadViewTest."""
    bench = Bench()
    bench.write(b"")
    assert not bench.first.flush()
    assert (bench.view.next_type(), bench.first.backlog(), bench.notified) == (NextType.NONE, 0, [])
    for _ in range(3):
        bench.write(b"")
        bench.first.finish_open(ends=True)
    assert (bench.view.next_type(), bench.view.poll()) == (NextType.NONE, None)
    bench.write(bytes(CAPACITY))
    assert [piece.size for piece in bench.drain()] == [CAPACITY]
    assert (bench.first.backlog(), bench.local.in_use) == (0, 0)


def test_timeout_zero_flushes_after_every_element() -> None:
    bench = Bench(flushing=Flush.AT_ONCE)
    bench.write(b"a")
    assert bench.notified == [bench.first]
    assert bench.view.next_type() is NextType.DATA


def test_an_event_makes_everything_before_it_available_and_counts_no_backlog() -> None:
    """Cases 267 and 286, RecordWriterTest and EventSerializerTest."""
    bench = Bench()
    bench.write(b"abc")
    bench.partition.broadcast_event(EventKind.END_OF_DATA)
    assert bench.first.backlog() == 1
    assert bench.view.next_type() is NextType.DATA
    bench.poll().released()
    assert bench.first.backlog() == 0
    assert bench.view.next_type() is NextType.EVENT
    event = bench.poll()
    assert (event.data_type, bytes(event.payload)) == (DataType.EVENT, bytes([EventKind.END_OF_DATA]))


def test_broadcast_event_without_records_takes_no_segment() -> None:
    bench = Bench(count=3)
    bench.partition.broadcast_event(EventKind.END_OF_PARTITION)
    assert bench.local.in_use == 0
    views = [subpartition.attach(1, lambda: None) for subpartition in bench.partition.subpartitions]
    assert all(view.next_type() is NextType.EVENT for view in views)


def test_ends_are_state_and_told_again_to_the_next_consumer() -> None:
    bench = Bench()
    bench.partition.broadcast_event(EventKind.END_OF_DATA)
    bench.partition.broadcast_event(EventKind.END_OF_PARTITION)
    first = [bytes(piece.payload) for piece in bench.drain()]
    bench.view.release(CancelReason.FAILED)
    bench.view = bench.first.attach(2, lambda: None)
    assert [bytes(piece.payload) for piece in bench.drain()] == first
    assert len(first) == 2


@pytest.mark.parametrize("consumer", ["reads", "has gone"])
@pytest.mark.parametrize("way", ["write", "broadcast"])
def test_what_is_written_behind_the_end_is_refused(way: str, consumer: str) -> None:
    """Cases 188 and 246: PipelinedSubpartitionTest#testNegativeBufferSizeAsSignOfAddingFail,
    ResultPartitionTest#testAddOnFinishedPipelinedPartition."""
    bench = Bench(count=2)
    partition = bench.partition

    def write() -> None:
        if partition.skips(0, 1):
            return
        if way == "write":
            partition.write(0, 1, [b"abc"])
        else:
            partition.broadcast([0, 1], 1, [b"abc"])

    write()
    partition.finish()
    if consumer == "has gone":
        bench.first.lose(CancelReason.ENDED)
    before = (bench.counters.records_out, bench.counters.bytes_out, bench.local.in_use, partition.backlog())
    with pytest.raises(LocalProtocolError, match="(?m)^partition j1/edge0.0 is finished$"):
        write()
    after = (bench.counters.records_out, bench.counters.bytes_out, bench.local.in_use, partition.backlog())
    assert after == before
    if consumer == "reads":
        event = DataType.EVENT
        assert [DataType(piece.data_type) for piece in bench.drain()] == [DataType.DATA, event, event]


def test_queued_events_are_bounded() -> None:
    bench = Bench()
    for _ in range(EVENTS_QUEUED_PER_CHANNEL_MAX):
        bench.first.add_event(EventKind.END_OF_DATA)
    with pytest.raises(LocalProtocolError, match="events are queued"):
        bench.first.add_event(EventKind.END_OF_DATA)


def test_a_partial_slice_keeps_its_segment_and_only_one_is_in_flight() -> None:
    bench = Bench()
    woken: list[str] = []
    bench.view = bench.first.attach(1, lambda: woken.append("available"))
    bench.write(b"abc")
    bench.first.flush()
    first = bench.poll()
    bench.write(b"def")
    bench.first.flush()
    assert bench.view.poll() is None, "the bytes in front of the next slice are still the transport's"
    first.released()
    assert woken == ["available"]
    second = bench.poll()
    assert bytes(second.payload) == b"def"
    assert second.start == first.start + 3
    assert bench.local.in_use == 1


def test_a_segment_sent_in_slices_is_recycled_when_it_is_full_and_let_go() -> None:
    bench = Bench()
    bench.write(b"abc")
    bench.first.flush()
    piece = bench.poll()
    bench.write(bytes(CAPACITY - 3))
    assert bench.view.next_type() is NextType.NONE
    piece.released()
    last = bench.poll()
    assert last.size == CAPACITY - 3
    assert bench.local.in_use == 1
    last.released()
    assert bench.local.in_use == 0


def test_a_slice_that_was_the_last_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.write(b"abc")
    bench.first.flush()
    piece = bench.poll()
    bench.partition.broadcast_event(EventKind.END_OF_PARTITION)
    piece.released()
    assert bench.view.next_type() is NextType.EVENT
    assert bench.local.in_use == 0


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ([b"x" * 16], [(BufferFlags.STARTS | BufferFlags.ENDS, 0, 1)]),
        (
            [b"x" * 20],
            [
                (BufferFlags.STARTS, 0, 1),
                (BufferFlags.CONTINUES | BufferFlags.ENDS, NO_ELEMENT_START, 0),
            ],
        ),
        (
            [b"x" * 20, b"y" * 3],
            [
                (BufferFlags.STARTS, 0, 1),
                (BufferFlags.STARTS | BufferFlags.CONTINUES | BufferFlags.ENDS, 4, 1),
            ],
        ),
        (
            [b"x" * 48],
            [
                (BufferFlags.STARTS, 0, 1),
                (BufferFlags.CONTINUES, NO_ELEMENT_START, 0),
                (BufferFlags.CONTINUES | BufferFlags.ENDS, NO_ELEMENT_START, 0),
            ],
        ),
        ([b"x" * 8, b"y" * 8], [(BufferFlags.STARTS | BufferFlags.ENDS, 0, 2)]),
    ],
)
def test_flags_first_start_and_rows_of_each_buffer(
    elements: list[bytes], expected: list[tuple[BufferFlags, int, int]]
) -> None:
    """Case 248, ResultPartitionTest."""
    bench = Bench()
    for element in elements:
        bench.write(element)
    bench.partition.broadcast_event(EventKind.END_OF_PARTITION)
    pieces = [piece for piece in bench.drain() if piece.data_type == DataType.DATA]
    assert [(piece.flags, piece.first_start, piece.rows) for piece in pieces] == expected
    assert b"".join(bench.copied[:-1]) == b"".join(elements)


@given(
    st.lists(
        st.one_of(st.binary(min_size=1, max_size=60), st.just("flush"), st.just("poll")),
        min_size=1,
        max_size=30,
    )
)
def test_any_mix_of_writes_flushes_and_polls_keeps_bytes_rows_and_boundaries(
    steps: list[bytes | str],
) -> None:
    bench = Bench(segments=200)
    written, starts = bytearray(), []
    for step in steps:
        if step == "flush":
            bench.first.flush()
        elif step == "poll":
            bench.polled = [*getattr(bench, "polled", []), *bench.drain()]  # type: ignore[attr-defined]
        else:
            assert isinstance(step, bytes)
            starts.append(len(written))
            bench.write(step)
            written += step
    bench.partition.broadcast_event(EventKind.END_OF_PARTITION)
    pieces = [*getattr(bench, "polled", []), *bench.drain()]
    data = [piece for piece in pieces if piece.data_type == DataType.DATA]
    assert b"".join(bench.copied[:-1]) == bytes(written)
    assert sum(piece.rows for piece in data) == len(starts)
    at = 0
    for piece in data:
        inside = [start - at for start in starts if at <= start < at + piece.size]
        assert piece.first_start == (inside[0] if inside else NO_ELEMENT_START)
        assert bool(piece.flags & BufferFlags.CONTINUES) == (at not in starts)
        at += piece.size
        assert bool(piece.flags & BufferFlags.ENDS) == (at in starts or at == len(written))
    assert bench.local.in_use == 0
    assert bench.counters.records_out == len(starts)
    assert bench.counters.bytes_out == len(written)


def test_discard_gives_everything_back_but_what_the_transport_holds() -> None:
    bench = Bench()
    bench.write(bytes(CAPACITY * 3 + 2))
    held = bench.poll()
    bench.first.discard()
    assert bench.local.in_use == 1
    held.released()
    assert bench.local.in_use == 0
    assert bench.first.backlog() == 0


def test_an_abandoned_writer_may_go_on_while_its_segments_are_given_back() -> None:
    bench = Bench()
    for _ in range(4):
        bench.write(bytes(CAPACITY))
    bench.write(b"open")

    class Appended(deque[object]):
        """The writer finishes its segment as soon as the loop has looked at the first."""

        looks = 0

        def _look(self) -> None:
            self.looks += 1
            if self.looks == 2:
                bench.first.finish_open(ends=True)

        def popleft(self) -> object:
            self._look()
            return super().popleft()

        def __iter__(self) -> Iterator[object]:
            for item in super().__iter__():
                self._look()
                yield item

    bench.first._queue = Appended(bench.first._queue)  # type: ignore[assignment]
    bench.first.discard(written_off=True)
    assert bench.local.in_use <= 1, "all but what was open then"


def test_the_open_segment_of_a_writer_that_could_not_be_stopped_is_never_lent_again() -> None:
    bench = Bench()
    bench.write(b"abc")
    bench.first.discard(written_off=True)
    assert bench.local.in_use == 1
    assert bench.pool.written_off == 1


def test_a_segment_that_its_writer_finished_after_it_was_written_off_may_come_back() -> None:
    bench = Bench()
    bench.write(b"abc")
    bench.first.flush()
    held = bench.poll()
    bench.first.discard(written_off=True)
    bench.first.finish_open(ends=True)
    held.released()
    assert (bench.local.in_use, bench.pool.written_off) == (0, 0)
    bench.first.discard()
    assert bench.local.in_use == 0, "the release of an attempt that was abandoned discards once more"


def test_a_written_off_segment_is_not_lent_again_when_the_transport_lets_go_of_it() -> None:
    bench = Bench()
    bench.write(b"abc")
    bench.first.flush()
    held = bench.poll()
    bench.first.discard(written_off=True)
    held.released()
    assert bench.local.in_use == 1


def test_a_segment_that_the_writer_finishes_during_a_look_is_not_overtaken_by_the_next() -> None:
    bench = Bench()
    bench.write(b"abc")
    bench.first.flush()

    class Watched(deque[object]):
        """The writer fills its segment and begins another right after the reader's first look."""

        looks = 0

        def __len__(self) -> int:
            found = super().__len__()
            self.looks += 1
            if self.looks == 1:
                bench.write(bytes(CAPACITY))
            return found

    bench.first._queue = Watched()  # type: ignore[assignment]
    bench.view = bench.first.attach(1, lambda: None)
    first = bench.poll()
    assert bytes(first.payload) == b"abc" + bytes(CAPACITY - 3)


def test_each_consumer_has_its_own_subpartition() -> None:
    bench = Bench(count=2)
    assert bench.partition.subpartition(1) is bench.partition.subpartitions[1]
    assert bench.partition.subpartition(2) is None
    bench.write(bytes(CAPACITY), position=1)
    assert bench.view.next_type() is NextType.NONE
    assert bench.partition.backlog() == 1


def test_events_are_counted_without_a_look_at_the_queue_that_the_loop_is_emptying() -> None:
    """The loop pops while the writer adds: iterating the queue there raised now and then."""
    bench = Bench()
    for _ in range(EVENTS_QUEUED_PER_CHANNEL_MAX):
        bench.first.add_event(EventKind.END_OF_DATA)
    bench.drain()
    bench.first.add_event(EventKind.END_OF_PARTITION)
    assert bench.view.next_type() is NextType.EVENT
    bench.first.attach(2, lambda: None)
    bench.first.add_event(EventKind.END_OF_DATA)


def test_a_queue_is_full_with_the_segments_that_the_output_keeps_for_one_consumer() -> None:
    """Case 222, LocalBufferPoolTest."""
    bench = Bench(count=2)
    for _ in range(OUTPUT_BUFFERS_PER_SUBPARTITION_MAX - 1):
        bench.write(bytes(CAPACITY))
    assert bench.full == 0
    bench.write(b"", position=1)
    assert bench.full == 0, "the other one has nothing queued"
    bench.write(b"")
    assert bench.full == 1


def test_what_is_written_for_a_consumer_that_has_ended_is_neither_kept_nor_lost() -> None:
    """The other one reads on. Cases 161 and 196, PartialConsumePipelinedResultTest and
    PipelinedResultPartitionReleaseOnConsumptionTest."""
    bench = Bench(count=2)
    for position in (0, 1):
        bench.write(b"a" * 20, position)
    bench.partition.close([1, 7])
    assert bench.local.in_use == 2 + 1, "the open segment of its writer is left"
    assert [bench.partition.skips(position, 5) for position in (0, 1)] == [False, True]
    bench.notified.pop().attend()
    assert bench.local.in_use == 2
    bench.partition.broadcast_event(EventKind.END_OF_DATA)
    assert [bench.poll().data_type for _ in range(3)] == [DataType.DATA, DataType.DATA, DataType.EVENT]
    bench.partition.release(False)
    assert sum(bench.partition.rows_dropped().values()) == 0


def test_a_writer_that_waits_for_a_consumer_goes_on_once_that_has_ended() -> None:
    bench = Bench(segments=4)
    bench.write(b"a" * 4 * CAPACITY)
    assert bench.local.request() is None
    bench.partition.close([0])
    assert bench.local.request() is not None


def test_a_buffer_has_as_many_bytes_as_was_said_when_it_was_begun() -> None:
    """Cases 189 and 281, PipelinedSubpartitionTest#testNewBufferSize, BufferBuilderAndConsumerTest."""
    bench = Bench()
    bench.write(b"ab")
    bench.view.resize(5)
    bench.write(bytes(CAPACITY - 2))
    bench.write(bytes(12))
    bench.view.resize(CAPACITY)
    bench.write(bytes(3 + CAPACITY))
    assert [piece.size for piece in bench.drain()] == [CAPACITY, 5, 5, 5, CAPACITY]
    newer = bench.first.attach(2, lambda: None)
    newer.resize(9)
    bench.view.resize(5)
    assert bench.first.buffer_size == 9, "the one before has no say any more"


def test_a_partition_may_begin_with_buffers_that_are_not_filled() -> None:
    """Case 189, PipelinedSubpartitionTest#testStartingBufferSize."""
    pool = NetworkBufferPool(8, CAPACITY)
    local = pool.create_pool("p", 1, 8)
    partition = PipelinedPartition(
        PartitionId(JobId("j1"), 0, 0),
        range(1),
        lambda: cast(Segment, local.request()),
        lambda subpartition: None,
        TaskCounters(),
        buffer_size=6,
    )
    partition.write(0, 1, [bytes(14)])
    view = partition.subpartitions[0].attach(1, lambda: None)
    partition.broadcast_event(EventKind.END_OF_DATA)
    assert [piece.size for piece in iter(view.poll, None) if piece.data_type == DataType.DATA] == [6, 6, 2]
