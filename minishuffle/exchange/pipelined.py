"""Pipelined partitions: what is written lies in network memory until its consumer has it, and is read once.

(Flink: ``PipelinedResultPartition``.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from random import Random

from minishuffle.counters import TaskCounters
from minishuffle.errors import LocalProtocolError, ShuffleError, Superseded, TaskCancelled
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.buffers import BufferBuilder, Flush
from minishuffle.exchange.elements import Part
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.exchange.rowtaps import RowTap
from minishuffle.exchange.segments import Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.exchange.wholebatches import WholeBatches
from minishuffle.ids import PartitionId
from minishuffle.limits import OUTPUT_BUFFERS_PER_SUBPARTITION_MAX
from minishuffle.wire.frames import EventKind, LatencyMarker

__all__ = ["PipelinedPartition"]

_ON_REQUEST = Flush.ON_REQUEST


class PipelinedPartition:
    """What one producer subtask writes for one edge, through network memory: a :class:`ResultPartition`.

    Args:
        partition_id: job, edge and producer index.
        consumers: the subtasks that it feeds.
        acquire: gives a segment, waiting for one if need be; raises TaskCancelled.
        notify: tells the loop that a subpartition wants its attention.
        flushing: when data leave of a segment that is not full; on request: at each :meth:`flush`.
        drops: rows for a consumer that has gone are dropped until it is back; else they wait for it.
        full: called each time that a subpartition has all segments that the output keeps for one consumer.
        repeats: it writes the rows of an earlier attempt once more, for the attempts of its consumers that
            have read from that one.
        closed: consumers that get none of its rows, but the end.
        whole_batches: for consumers in this process; None: they get bytes as all others.
        buffer_size: bytes that are put into a buffer before its consumer says otherwise (NewBufferSize);
            None: as many as have room.
        on_stable: (loop) called with the row below which the consumer's snapshots cover all.
    """

    def __init__(
        self,
        partition_id: PartitionId,
        consumers: range,
        acquire: Callable[[], Segment],
        notify: Callable[[PipelinedSubpartition], None],
        counters: TaskCounters,
        *,
        flushing: Flush = Flush.ON_REQUEST,
        drops: bool = False,
        full: Callable[[], None] = lambda: None,
        repeats: bool = False,
        closed: Iterable[int] = (),
        whole_batches: WholeBatches | None = None,
        buffer_size: int | None = None,
        on_stable: Callable[[int], None] = lambda row: None,
    ) -> None:
        self.id = partition_id
        self._full = full
        self._first = consumers.start
        self.subpartitions = [
            PipelinedSubpartition(
                each, notify, flushing, drops=drops, buffer_size=buffer_size, on_stable=on_stable
            )
            for each in consumers
        ]
        self.close(closed)
        self.hot_keys = HotKeys()
        self.taps: tuple[RowTap, ...] = ()
        self._repeats = repeats
        self._whole_batches = whole_batches
        self._acquire = acquire
        self._counters = counters
        self._notify = notify
        self._dirty: deque[PipelinedSubpartition] = deque()
        """Those with something published since the last flush; each at most once."""
        self._finished = False
        """(Writer.) Nothing more will be written."""
        self._written_off = False
        """(Loop.) The task was abandoned."""
        self._rows_skipped = 0
        """(Writer.) Rows that were not written because their consumer had gone."""
        self._rows_suspected = 0
        """(Writer.) Rows that were not written because their consumer's worker answered no Ping."""
        self._together: list[PipelinedSubpartition] = []
        """(Writer.) Those that the last broadcast went to: each has the same segment open, or none has."""
        self._random: Random | None = None
        """(Writer.) Chooses who gets a latency marker."""

    def subpartition(self, consumer: int) -> PipelinedSubpartition | None:
        """The one for that consumer subtask; None if this producer does not feed it."""
        position = consumer - self._first
        return self.subpartitions[position] if 0 <= position < len(self.subpartitions) else None

    def skips(self, position: int, rows: int) -> bool:
        """Whether the next element for subpartition number ``position`` is left out, and its rows counted,
        because the consumer has gone; those that nobody will ever want are not counted. Ask before it is
        serialised.

        Raises:
            TaskCancelled: the task was abandoned, and what it had in hand is counted.
            LocalProtocolError: the partition is finished.
        """
        subpartition = self.subpartitions[position]
        if subpartition.available:
            return False
        self._require_open()
        if self._written_off:
            raise TaskCancelled("the task was abandoned")
        if subpartition.open is not None:  # its segment goes home
            subpartition.finish_open(ends=True)
            self._end_together()
        if subpartition.closed:
            subpartition.rows += rows
            return True
        if subpartition.suspected:
            self._rows_suspected += rows
        else:
            self._rows_skipped += rows
        subpartition.rows += rows
        self._counters.records_out += rows
        return True

    def hand_over(self, position: int, batch: Batch) -> bool:
        """Give subpartition number ``position`` the batch itself, if its consumer takes it; waits until that
        has less than a queue full. False: it has to be written as an element.

        Raises:
            LocalProtocolError: the partition is finished.
        """
        subpartition, whole_batches = self.subpartitions[position], self._whole_batches
        if whole_batches is None or not subpartition.whole or isinstance(batch.payload, list):
            return False
        self._require_open()
        if not _has_room(subpartition):
            self._full()
            whole_batches.wait(lambda: _has_room(subpartition))
        whole = whole_batches.take(batch, subpartition.buffer_size) if subpartition.whole else None
        if whole is None:
            return False
        subpartition.add_whole(whole)
        self._counters.bytes_out += whole.size
        self._counters.records_out += whole.rows
        return True

    def write(self, position: int, rows: int, parts: list[Part]) -> None:
        """Write one element, whose bytes are ``parts`` joined, to subpartition number ``position``.

        Raises:
            LocalProtocolError: the partition is finished.
        """
        subpartition = self.subpartitions[position]
        builder = subpartition.open or self._begin(subpartition)
        builder.begin(rows)
        total = 0
        for part in parts:
            view = memoryview(part)
            at, size = 0, len(view)
            total += size
            while at < size:
                if builder.length == builder.capacity:
                    subpartition.finish_open(ends=False)
                    builder = self._begin(subpartition)
                at += builder.append(view, at)
        if builder.length == builder.capacity:
            subpartition.finish_open(ends=True)
        else:
            builder.publish()
            self._published(subpartition)
        self._counters.bytes_out += total
        self._counters.records_out += rows

    def broadcast(self, positions: list[int], rows: int, parts: list[Part]) -> None:
        """Write one element to several subpartitions, at least one. It is copied once, into a segment that
        all of them read; the last one that has done with it recycles it. (Flink: ``broadcastRecord``.)

        A segment has the same readers from its beginning to its end: when a consumer goes or comes back, the
        next element begins another. A partition that is broadcast to is not written to by :meth:`write`.

        Raises:
            LocalProtocolError: the partition is finished.
        """
        subpartitions = [self.subpartitions[position] for position in positions]
        if subpartitions != self._together:
            self._end_together()
            self._together = subpartitions
        builder = subpartitions[0].open or self._begin_together()
        builder.begin(rows)
        total = 0
        for part in parts:
            view = memoryview(part)
            at, size = 0, len(view)
            total += size
            while at < size:
                if builder.length == builder.capacity:
                    self._publish_together(builder, ends=False)
                    builder = self._begin_together()
                at += builder.append(view, at)
        self._publish_together(builder, ends=True)
        self._counters.bytes_out += total * len(subpartitions)
        self._counters.records_out += rows * len(subpartitions)

    def _begin_together(self) -> BufferBuilder:
        """A segment with a builder for each of those that read it; the first of them is written."""
        self._require_open()
        segment = self._acquire()
        segment.readers = len(self._together)
        sizes = [each.buffer_size for each in self._together]
        size = min((size for size in sizes if size is not None), default=None)
        for each in self._together:
            each.open = BufferBuilder(segment, size, first_row=each.rows)
        first = self._together[0].open
        assert first is not None
        return first

    def _end_together(self) -> None:
        """The segment that is open is complete: others will read what follows."""
        for each in self._together:
            if each.open is not None:
                each.finish_open(ends=True)
        self._together = []

    def _publish_together(self, written: BufferBuilder, ends: bool) -> None:
        full = written.length == written.capacity
        for each in self._together:
            builder = each.open
            assert builder is not None
            builder.follow(written)
            if full:
                each.finish_open(ends)
            else:
                builder.publish(ends)
                self._published(each)

    def _published(self, subpartition: PipelinedSubpartition) -> None:
        """The reader may send what it was not to before: now, or when the buffer timeout has passed."""
        if subpartition.flushing is not _ON_REQUEST:
            if not subpartition.held:
                self._notify(subpartition)
        elif not subpartition.dirty:
            subpartition.dirty = True  # before the note: who takes it clears the flag and looks
            self._dirty.append(subpartition)

    def _begin(self, subpartition: PipelinedSubpartition) -> BufferBuilder:
        self._require_open()
        if (
            subpartition.unsent_segments() + 1 >= OUTPUT_BUFFERS_PER_SUBPARTITION_MAX
        ):  # with the one that is begun
            self._full()
        builder = BufferBuilder(self._acquire(), subpartition.buffer_size, first_row=subpartition.rows)
        subpartition.open = builder
        return builder

    def _require_open(self) -> None:
        """Looked at where a segment is begun, not for each element: behind the end none is open."""
        if self._finished:
            raise LocalProtocolError(f"partition {self.id} is finished")

    def finish(self) -> None:
        self.broadcast_event(EventKind.END_OF_DATA)
        self.broadcast_event(EventKind.END_OF_PARTITION)
        self._finished = True

    def broadcast_event(self, kind: EventKind) -> None:
        """Queue an event behind everything written to every subpartition."""
        for subpartition in self.subpartitions:
            subpartition.add_event(kind)

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        """Tell every consumer the event time, in microseconds since 1970, behind everything written."""
        for subpartition in self.subpartitions:
            subpartition.add_watermark(time, idle)

    def broadcast_barrier(self, barrier: int, consumers: Collection[int] | None = None) -> None:
        """Queue a barrier behind everything written, for these consumers or for all: nothing more goes to one
        before it resumes."""
        self._end_together()
        for subpartition in self.subpartitions:
            if consumers is None or subpartition.consumer in consumers:
                subpartition.add_barrier(barrier)

    def emit_latency(self, marker: LatencyMarker) -> None:
        """Send a latency marker to one consumer, any of them, behind everything written. (Flink:
        ``RecordWriter.randomEmit``.)"""
        self._end_together()
        if self._random is None:
            self._random = Random(self.id.producer)
        self._random.choice(self.subpartitions).add_latency(marker)

    def fail(self, error: ShuffleError) -> None:
        """(Loop.) The producer failed: tell its consumers, and whoever asks from now on."""
        for subpartition in self.subpartitions:
            subpartition.fail(error)

    def fence(self, consumer: int, attempt: int) -> None:
        """(Loop.) That attempt of the consumer takes the place of earlier ones: these read no more. It cannot
        tell which rows they took of those that come once more, and gets none."""
        subpartition = self.subpartition(consumer)
        if subpartition is None:
            return
        subpartition.suspected, view = False, subpartition.view
        if view is not None and view.attempt < attempt:
            view.fail(Superseded(f"attempt {view.attempt} of consumer {consumer} was replaced by {attempt}"))
        if self._repeats:
            subpartition.close()

    def close(self, consumers: Iterable[int]) -> None:
        """(Loop.) These get none of its rows, but the end."""
        for consumer in consumers:
            if (subpartition := self.subpartition(consumer)) is not None:
                subpartition.close()

    def is_read(self, but: Collection[int]) -> bool:
        """(Loop.) All consumers ``but`` these have resumed behind the last barrier, and so have all that was
        written before."""
        return not any(each.held_back for each in self.subpartitions if each.consumer not in but)

    def end_barriers(self, barrier: int) -> None:
        """(Loop.) Barriers up to that one have ended."""
        for subpartition in self.subpartitions:
            subpartition.end_barriers(barrier)

    def release(self, written_off: bool) -> None:
        """(Loop.) Nobody reads from it any more: see :meth:`PipelinedSubpartition.discard`."""
        self._written_off = written_off
        for subpartition in self.subpartitions:
            subpartition.discard(written_off)

    def flush(self) -> None:
        """(Loop.) The buffer timeout has passed: send what was published since the last flush."""
        dirty = self._dirty
        for _ in range(len(dirty)):
            subpartition = dirty.popleft()
            subpartition.dirty = False  # before the look: what is published from now on is noted anew
            if subpartition.flush():
                subpartition.attend()

    def backlog(self) -> int:
        return sum(subpartition.backlog() for subpartition in self.subpartitions)

    def rows_dropped(self) -> dict[str, int]:
        """Rows that no consumer gets, by reason."""
        discarded = sum(subpartition.rows_discarded for subpartition in self.subpartitions)
        suspected = self._rows_suspected + sum(each.rows_suspected for each in self.subpartitions)
        dropped = {"upstream_unavailable": self._rows_skipped, "queue_discarded": discarded}
        return {**dropped, "suspected": suspected} if suspected else dropped

    def buffers_out(self) -> int:
        """Buffers with data that were handed to consumers."""
        return sum(subpartition.buffers_out for subpartition in self.subpartitions)


def _has_room(subpartition: PipelinedSubpartition) -> bool:
    """Whether a batch may join its queue, or may no more in any case."""
    return not subpartition.whole or subpartition.unsent_segments() < OUTPUT_BUFFERS_PER_SUBPARTITION_MAX
