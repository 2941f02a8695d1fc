"""Retained partitions: what is written stays until no snapshot of a consumer may ask for it again.

A subpartition is a log of elements and events, in which each row has a number that never starts again. The
writer appends, a view reads from the row that its consumer names, at its own pace and as often as a
consumer comes back, and ``Stable`` frees what the consumer's oldest snapshot covers. Nothing else does: no
row is ever dropped, whoever is gone or suspected. A view begins with the element that holds its row, from
the beginning of that element, and the consumer leaves out what it has. (Flink has no such partition: it
restarts the producer.)

Elements lie in the log as they were written, or as the batches that were handed over; a broadcast's element
is held once by all its logs. A view joins short ones to a buffer and sends pieces of long ones without a
copy. Where they are held, and what is on disk, is the subject of :mod:`~minishuffle.exchange.retention`.

Two things bound a writer. Within what it writes for one element, a consumer that reads but does not keep up
stops it, as segments do elsewhere: ``allowance`` says how many bytes may be unread. A consumer that is away
does not, nor one that has just come back and has everything before it to read: the writer writes on for the
others. From the moment that it reads what it has not had credit for at first, it falls no further behind.
Between elements, the writer waits for room in what its worker may retain.

What a watermark says lasts: a view that begins behind it begins with the last one. The end stays in the
log. A latency marker is given once. A barrier that blocks stops a view until its consumer resumes, and no
view any more once it has been resumed or has ended for its job.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from random import Random
from typing import Final

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.errors import (
    LocalProtocolError,
    PartitionLost,
    PartitionNotFound,
    ShuffleError,
    Superseded,
    TaskCancelled,
)
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.blocking import DiskReads
from minishuffle.exchange.buffers import Event, Flush, Slice, WholeBatch
from minishuffle.exchange.elements import Part, encode
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.exchange.partition import Attended, ProducerLink, SubpartitionState
from minishuffle.exchange.retention import RetainedElement, RetainedStore, Spilled
from minishuffle.exchange.rowtaps import RowTap
from minishuffle.exchange.wholebatches import as_handed_over
from minishuffle.ids import FIRST_ATTEMPT, PartitionId
from minishuffle.limits import SEGMENT_HEADROOM_BYTES
from minishuffle.protocol.channel import NextType, ProducerChannel
from minishuffle.wire.frames import (
    NO_ELEMENT_START,
    BufferFlags,
    CancelReason,
    DataType,
    EventKind,
    LatencyMarker,
)

__all__ = ["RetainedPartition", "RetainedSubpartition", "RetainedView"]

_STARTS, _CONTINUES, _ENDS = map(int, (BufferFlags.STARTS, BufferFlags.CONTINUES, BufferFlags.ENDS))
_DATA: Final = int(DataType.DATA)
_NOTHING = memoryview(b"")
_HEADROOM: Final = bytes(SEGMENT_HEADROOM_BYTES)
_NONE, _DATA_NEXT, _EVENT_NEXT, _PARTIAL = NextType.NONE, NextType.DATA, NextType.EVENT, NextType.PARTIAL
_UNBOUNDED: Final = sys.maxsize


class RetainedPartition:
    """What one producer subtask writes for one edge, and retains: a :class:`ResultPartition`.

    Invariants, for each subpartition::

        freed ≤ stable, freed ≤ read ≤ written
        rows that are held = those from freed to written
        bytes that are held = Σ over the elements with these rows, each counted once
        unread bytes < allowance + one element, unless no view is attached

    Args:
        version: of its rows: the attempt that began to make them.
        first_rows: rows that were written before, for each consumer: the number of the first one here.
        store: where its elements are held.
        wait: (task) returns once what it is given says True, and raises if the task is to stop.
        wake: (loop) has a task that waits look again.
        flushing: when data leave that fill no buffer.
        capacity: payload bytes of a buffer, before a consumer says otherwise.
        unread_bytes: what a consumer that keeps up may have yet to read before the writer waits.
        disk: reads what is not in memory, and encodes what was handed over.
        closed: consumers that get none of its rows, but the end.
        full: called each time that the writer has to wait for a consumer.
        lost: called once if what was retained cannot be read: no view brings it any more.
    """

    def __init__(
        self,
        partition_id: PartitionId,
        consumers: range,
        notify: Callable[[Attended], None],
        counters: TaskCounters,
        store: RetainedStore,
        *,
        version: int,
        first_rows: Sequence[int] = (),
        wait: Callable[[Callable[[], bool]], None],
        wake: Callable[[], None],
        flushing: Flush = Flush.ON_REQUEST,
        capacity: int,
        unread_bytes: int,
        disk: DiskReads,
        closed: Iterable[int] = (),
        full: Callable[[], None] = lambda: None,
        lost: Callable[[PartitionLost], None] = lambda error: None,
    ) -> None:
        self.id = partition_id
        self.hot_keys = HotKeys()
        self.taps: tuple[RowTap, ...] = ()
        self.version = version
        self.store = store
        self.flushing = flushing
        self.unread_bytes = unread_bytes
        self.disk = disk
        self.wake = wake
        self.read_bytes = limits.BLOCKS_READ_AHEAD_BYTES // (2 * max(1, len(consumers)))
        """What a view asks the disk for at once; an element at the least."""
        self._first = consumers.start
        self._notify = notify
        self._counters = counters
        self._wait = wait
        self._full = full
        self._on_lost = lost
        self._lost = self._finished = self._released = self._written_off = False
        self._dirty: deque[RetainedSubpartition] = deque()
        """Those with something written since the last flush; each at most once."""
        self._random: Random | None = None
        self.subpartitions = [
            RetainedSubpartition(self, each, row, capacity)
            for each, row in zip(consumers, first_rows or [0] * len(consumers), strict=True)
        ]
        self.close(closed)

    # --- writer (task thread) ----------------------------------------------------------------

    def skips(self, position: int, rows: int) -> bool:
        """Only rows that nobody will ever want are left out. Raises TaskCancelled: the task was abandoned."""
        if self._written_off:
            raise TaskCancelled("the task was abandoned")
        subpartition = self.subpartitions[position]
        if subpartition.closed:
            subpartition.rows += rows
        return subpartition.closed

    def hand_over(self, position: int, batch: Batch) -> bool:
        """Retain the batch itself, if the consumer is on this worker; waits as :meth:`write`. False: it has
        to be written as an element.

        Raises:
            LocalProtocolError: the partition is finished.
        """
        subpartition = self.subpartitions[position]
        if not subpartition.whole or isinstance(batch.payload, list):
            return False
        frozen = as_handed_over(batch)
        if frozen is None:
            return False
        handed, size = frozen
        self._enter(subpartition)
        rows = len(handed)
        subpartition.append(self.store.add(rows, size, handed))
        subpartition.seal()
        self._notify(subpartition)
        self._wrote(1, rows, size)
        return True

    def write(self, position: int, rows: int, parts: list[Part]) -> None:
        """Write one element for one consumer; waits while that one has too much to read.

        Raises:
            LocalProtocolError: the partition is finished.
        """
        subpartition = self.subpartitions[position]
        self._enter(subpartition)
        size = sum(map(len, parts))
        subpartition.append(self.store.add(rows, size, parts))
        self._published(subpartition)
        self._wrote(1, rows, size)

    def broadcast(self, positions: list[int], rows: int, parts: list[Part]) -> None:
        """Write one element for several consumers; it is held once. Waits and raises as :meth:`write`."""
        subpartitions = [self.subpartitions[position] for position in positions]
        for subpartition in subpartitions:
            self._enter(subpartition)
        size = sum(map(len, parts))
        element = self.store.add(rows, size, parts, holders=len(positions))
        for subpartition in subpartitions:
            subpartition.append(element)
            self._published(subpartition)
        self._wrote(len(positions), rows, size)

    def _enter(self, subpartition: RetainedSubpartition) -> None:
        """Wait until another element may follow."""
        if self._finished:
            raise LocalProtocolError(f"partition {self.id} is finished")
        if subpartition.bytes - subpartition.position >= subpartition.allowance:
            self._full()
            self._notify(subpartition)
            self._wait(subpartition.has_room)

    def _published(self, subpartition: RetainedSubpartition) -> None:
        """The reader may send what fills a buffer; the rest now, or when the buffer timeout has passed."""
        if self.flushing is not Flush.ON_REQUEST:
            if not subpartition.held:
                self._notify(subpartition)
            return
        if not subpartition.dirty:
            subpartition.dirty = True  # before the note: who takes it clears the flag and looks
            self._dirty.append(subpartition)
        if subpartition.bytes - subpartition.noted >= subpartition.capacity:
            subpartition.noted = subpartition.bytes
            self._notify(subpartition)

    def _wrote(self, consumers: int, rows: int, size: int) -> None:
        self._counters.bytes_out += size * consumers
        self._counters.records_out += rows * consumers
        if self._released:  # meanwhile; nobody looks at it any more
            for subpartition in self.subpartitions:
                subpartition.entries = []
            self.store.clear()

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        for subpartition in self.subpartitions:
            subpartition.add_watermark(time, idle)
            self._notify(subpartition)

    def broadcast_barrier(self, barrier: int, consumers: Collection[int] | None = None) -> None:
        for subpartition in self.subpartitions:
            if consumers is None or subpartition.consumer in consumers:
                subpartition.add_barrier(barrier)
                self._notify(subpartition)

    def emit_latency(self, marker: LatencyMarker) -> None:
        if self._random is None:
            self._random = Random(self.id.producer)
        subpartition = self._random.choice(self.subpartitions)
        subpartition.add_latency(marker)
        self._notify(subpartition)

    def finish(self) -> None:
        for subpartition in self.subpartitions:
            subpartition.add_event(Event(EventKind.END_OF_DATA))
            subpartition.add_event(Event(EventKind.END_OF_PARTITION))
            self._notify(subpartition)
        self._finished = True

    # --- loop --------------------------------------------------------------------------------

    def subpartition(self, consumer: int) -> RetainedSubpartition | None:
        position = consumer - self._first
        return self.subpartitions[position] if 0 <= position < len(self.subpartitions) else None

    def flush(self) -> None:
        dirty = self._dirty
        for _ in range(len(dirty)):
            subpartition = dirty.popleft()
            subpartition.dirty = False  # before the look: what is written from now on is noted anew
            subpartition.flush()

    def fence(self, consumer: int, attempt: int) -> None:
        subpartition = self.subpartition(consumer)
        view = subpartition.view if subpartition is not None else None
        if view is not None and view.attempt < attempt:
            view.fail(Superseded(f"attempt {view.attempt} of consumer {consumer} was replaced by {attempt}"))

    def close(self, consumers: Iterable[int]) -> None:
        for consumer in consumers:
            if (subpartition := self.subpartition(consumer)) is not None:
                subpartition.close()

    def is_read(self, but: Collection[int]) -> bool:
        return not any(each.held_back for each in self.subpartitions if each.consumer not in but)

    def end_barriers(self, barrier: int) -> None:
        for subpartition in self.subpartitions:
            subpartition.barriers_over = max(barrier, subpartition.barriers_over)

    def fail(self, error: ShuffleError) -> None:
        for subpartition in self.subpartitions:
            subpartition.fail(error)

    def lose(self, error: PartitionLost) -> None:
        """What was retained is not what was written: the producer has to make it again."""
        self.fail(error)
        if not self._lost:
            self._lost = True
            self._on_lost(error)

    def release(self, written_off: bool) -> None:
        self._written_off = written_off
        if not self._released:
            self._released = True
            for subpartition in self.subpartitions:
                subpartition.release()
            self.store.release()

    def backlog(self) -> int:
        return sum(subpartition.backlog() for subpartition in self.subpartitions)

    # --- both --------------------------------------------------------------------------------

    def rows_dropped(self) -> dict[str, int]:
        """None: they wait for their consumer."""
        return {}

    def buffers_out(self) -> int:
        return sum(subpartition.buffers_out for subpartition in self.subpartitions)


# --- subpartition ---------------------------------------------------------------------------------


class _Entry:
    """An element in a log: its first row has the number ``row``, its first byte the number ``at``."""

    __slots__ = ("at", "element", "row")

    def __init__(self, row: int, at: int, element: RetainedElement) -> None:
        self.row = row
        self.at = at
        self.element = element


class RetainedSubpartition:
    """The log for one consumer: a :class:`ResultSubpartition`.

    Each attribute is written by one thread, and the list of entries is changed by steps that the interpreter
    does not divide: the writer appends, the loop takes from the front.

    Args:
        row: the number of the first row.
        capacity: payload bytes of a buffer.
    """

    __slots__ = (
        "_barrier",
        "_latency",
        "_mark",
        "_tail",
        "allowance",
        "barriers_over",
        "buffers_out",
        "bytes",
        "capacity",
        "closed",
        "consumer",
        "dirty",
        "entries",
        "error",
        "first",
        "first_row",
        "flushed",
        "held",
        "noted",
        "notified",
        "partition",
        "position",
        "read",
        "resumed",
        "rows",
        "sealed",
        "stable",
        "view",
        "waits",
        "whole",
    )

    def __init__(self, partition: RetainedPartition, consumer: int, row: int, capacity: int) -> None:
        self.consumer = consumer
        self.entries: list[_Entry | Event] = []
        self.partition = partition
        # The writer's.
        self.rows = row
        """The number of the next row."""
        self.bytes = 0
        """All that were appended."""
        self.sealed = 0
        """Bytes below go out although they may fill no buffer: there is an event or a batch behind them."""
        self.noted = 0
        """Bytes of which the loop was told because they fill a buffer."""
        self.waits = False
        """The writer waits for the consumer."""
        self._tail: Event | None = None
        """The watermark or barrier that is the last thing in the log, if any is."""
        self._latency: Event | None = None
        self._barrier: Event | None = None
        """The barrier that was appended last."""
        # Of both.
        self.dirty = False
        """Noted by its partition as to be flushed; set by the writer, cleared by the loop."""
        self.notified = False
        # The loop's.
        self.first_row = row
        self.first = 0
        """The number of the first entry that is held; they are numbered from 0 on."""
        self.stable = row
        """Rows below are covered by the consumer's snapshots."""
        self.read = row
        """Rows below were read by some view."""
        self.position = 0
        """Bytes below were read by the view, or by the last there was."""
        self.allowance = partition.unread_bytes
        """The writer waits while as many bytes are unread."""
        self.flushed = 0
        """Bytes below go out: the buffer timeout has passed."""
        self.capacity = capacity
        """Bytes that are put into each buffer."""
        self.buffers_out = 0
        self.held = False
        """The loop does not want to know of what is written before it looks anyhow."""
        self.whole = False
        """The consumer is on this worker, and takes batches whole."""
        self.closed = False
        """Nobody will ever want a row of it: its consumer has them. Events are passed on."""
        self.error: ShuffleError | None = None
        self.view: RetainedView | None = None
        self.resumed = self.barriers_over = 0
        """Barriers up to these were resumed, or have ended."""
        self._mark: Event | None = None
        """The last watermark that is held no more."""

    # --- writer ----------------------------------------------------------------------------------

    def append(self, element: RetainedElement) -> None:
        """An element for this consumer."""
        row = self.rows
        self.rows = row + element.rows
        self._tail = None
        at = self.bytes
        self.entries.append(_Entry(row, at, element))
        self.bytes = at + element.size  # last: who has read this finds the entry

    def seal(self) -> None:
        """What was written so far goes out."""
        self.sealed = self.bytes

    def has_room(self) -> bool:
        """The consumer has read enough."""
        self.waits = True  # before the look
        self.waits = self.bytes - self.position >= self.allowance
        return not self.waits

    def add_event(self, event: Event) -> None:
        event.row = self.rows
        self.entries.append(event)
        self.sealed = self.bytes
        self._tail = event

    def add_watermark(self, time: int, idle: bool) -> None:
        """It takes the place of one that is the last in the log and that the view has not read."""
        tail = self._tail
        if tail is None or tail.kind is not EventKind.WATERMARK or not tail.overtake(time, idle):
            self.add_event(Event(EventKind.WATERMARK, time, idle))

    def add_barrier(self, barrier: int) -> None:
        """It takes the place of one that is the last in the log and that the view has not read."""
        tail = self._tail
        if tail is None or tail.kind is not EventKind.BARRIER or not tail.renumber(barrier):
            self._barrier = Event(EventKind.BARRIER, barrier=barrier, blocking=True)
            self.add_event(self._barrier)

    def add_latency(self, marker: LatencyMarker) -> None:
        """One at a time: the one that has waited longer says more."""
        if self._latency is None or self._latency.taken:
            self._latency = Event(EventKind.LATENCY_MARKER, marker=marker)
            self.add_event(self._latency)

    # --- loop ------------------------------------------------------------------------------------

    def attach(
        self,
        generation: int,
        on_available: Callable[[], None],
        on_failed: Callable[[ShuffleError], None] = lambda error: None,
        *,
        attempt: int = FIRST_ATTEMPT,
        whole: bool = False,
        version: int = 0,
        row: int = 0,
    ) -> RetainedView:
        """A view of everything from that row of that version on, instead of any other. Of another version
        than this partition's, it is everything that is here.

        If rows from there on are not held any more, the view fails when it is looked at first.
        """
        same = version == self.partition.version
        begin = max(row, self.first_row) if same else self.first_row
        before, refusal = self.view, None
        if begin < self.freed and self.error is None and not self.closed:
            name = f"subpartition {self.consumer} of partition {self.partition.id}"
            refusal = PartitionLost(
                f"rows from {begin} on of {name} were asked for, and those below {self.freed} were given up "
                "because a snapshot of the consumer covers them: the job has to begin at its last durable cut"
            )
        at, mark, position = self._find(begin)
        self.view = view = RetainedView(
            self, generation, (at, begin, mark), on_available, on_failed, attempt=attempt
        )
        view.whole = self.whole = whole
        view.refusal = refusal
        self.position = position
        behind = self.bytes - position > self.partition.unread_bytes
        self.allowance = _UNBOUNDED if behind else self.partition.unread_bytes
        if before is not None:
            before.on_failed(Superseded(f"subpartition {self.consumer} was requested again"))
        return view

    @property
    def freed(self) -> int:
        """Rows below are not held."""
        return next((entry.row for entry in self.entries if isinstance(entry, _Entry)), self.rows)

    def _find(self, row: int) -> tuple[int, Event | None, int]:
        """Where the log is to be read from for that row: the number of the entry, the last watermark before
        it, and the byte."""
        position, entries = self.bytes, self.entries  # first: what is appended from now on lies behind
        index = bisect_left(entries, True, key=lambda entry: _reaches(entry, row))
        mark = self._mark
        for number in range(index - 1, -1, -1):
            entry = entries[number]
            if isinstance(entry, Event) and entry.kind is EventKind.WATERMARK:
                mark = entry
                break
        for number in range(index, len(entries)):
            entry = entries[number]
            if isinstance(entry, _Entry):
                position = entry.at
                break
        return self.first + index, mark, position

    def make_stable(self, version: int, row: int) -> None:
        """The consumer's oldest snapshot covers rows below that one: the view has read beyond them. Those of
        an older version end where this one begins."""
        if version == self.partition.version and row > self.stable:
            self.stable = row
            self._free()

    def _free(self) -> None:
        entries, stable, freed = self.entries, self.stable, 0
        most = self.view.at - self.first if self.view is not None else 0
        while freed < most and not _reaches(entry := entries[freed], stable):
            if isinstance(entry, _Entry):
                self.partition.store.free(entry.element)
            elif entry.kind is EventKind.WATERMARK:
                self._mark = entry
            freed += 1
        self.first += freed
        del entries[:freed]
        self.partition.store.note_freed()

    def moved(self, read: int) -> None:
        """The view has read so many bytes in all, and ``position`` says how far it is."""
        allowance, most = self.allowance, self.partition.unread_bytes
        if allowance > most:
            unread = self.bytes - self.position
            if read >= most or unread <= most:  # it has had more than credit for a start, or keeps up
                self.allowance = max(most, min(allowance, unread + most))
        if self.waits and self.bytes - self.position < self.allowance:
            self.partition.wake()

    def lose(self) -> None:
        """The consumer has gone: the writer waits for it no more."""
        self.view, self.whole, self.allowance = None, False, _UNBOUNDED
        if self.waits:
            self.partition.wake()

    @property
    def held_back(self) -> bool:
        """A barrier is in the log that was not resumed and has not ended."""
        barrier = self._barrier
        return barrier is not None and barrier.barrier > max(self.barriers_over, self.resumed)

    def close(self) -> None:
        """Nobody wants a row of it any more."""
        self.closed = True  # first: the writer looks at it
        self.allowance = _UNBOUNDED
        entries, count = self.entries, len(self.entries)
        read = min(count, self.view.at - self.first) if self.view is not None else 0
        for entry in entries[:count]:
            if isinstance(entry, _Entry):
                self.partition.store.free(entry.element)
        kept = [entry for entry in entries[read:count] if isinstance(entry, Event)]
        self.first += read
        entries[:count] = kept
        self.position = self.bytes
        self.partition.store.note_freed()

    def fail(self, error: ShuffleError) -> None:
        """The producer has failed: tell the consumer, if there is one."""
        self.error = error
        if self.view is not None:
            self.view.fail(error)

    def attend(self) -> None:
        self.notified = False
        if self.view is not None:
            self.view.on_available()

    def flush(self) -> None:
        """The buffer timeout has passed."""
        self.flushed = self.bytes
        if self.position < self.flushed:
            self.attend()

    def release(self) -> None:
        """Nothing is held any more. (Flink: a view of a partition that was released is not created.)"""
        self.lose()
        self.entries = []
        self.position = self.bytes
        if self.error is None:
            self.error = PartitionNotFound(f"partition {self.partition.id} was released")

    def readiness(self) -> NextType:
        """Whether what is unread, which is something, goes out."""
        position = self.position
        if (
            self.bytes - position >= self.capacity
            or position < self.sealed
            or position < self.flushed
            or (flushing := self.partition.flushing) is Flush.AT_ONCE
        ):
            return _DATA_NEXT
        return _PARTIAL if flushing is Flush.ADAPTIVE else _NONE

    def backlog(self) -> int:
        """Data buffers that the view has yet to poll, without one that does not go out yet."""
        if self.view is None:
            return 0
        total, position, capacity = self.bytes, self.position, self.capacity
        if self.partition.flushing is Flush.AT_ONCE:
            return -(-(total - position) // capacity)
        out = max(0, max(self.sealed, self.flushed) - position)
        buffers = -(-out // capacity)
        return buffers + max(0, total - position - buffers * capacity) // capacity

    def state(self) -> SubpartitionState:
        unread = self.bytes - self.position
        return SubpartitionState(unread // self.capacity, unread % self.capacity, True, False, self.closed)

    def validate(self) -> None:
        """Check the invariants; for tests."""
        held = [entry for entry in self.entries if isinstance(entry, _Entry)]
        assert self.freed <= self.rows and self.first_row <= self.read <= self.rows
        assert self.freed <= self.stable or self.closed
        assert all(entry.element.data is not None for entry in held)
        ends = [entry.row + entry.element.rows for entry in held]
        assert [entry.row for entry in held[1:]] == ends[:-1]
        assert not ends or ends[-1] == self.rows
        assert self.position <= self.bytes


def _reaches(entry: _Entry | Event, row: int) -> bool:
    """Whether there is that row, or one behind it, in an entry of a log, or behind an event there."""
    return entry.row >= row if isinstance(entry, Event) else entry.row + entry.element.rows > row


# --- view -----------------------------------------------------------------------------------------


class RetainedView:
    """What one consumer reads of a log, from a row on: a :class:`PartitionView`.

    Args:
        begin: the number of the first entry, the first row that is wanted, and the watermark before it.
    """

    __slots__ = (
        "_ahead",
        "_barrier",
        "_begin",
        "_current",
        "_fetched",
        "_fetched_bytes",
        "_mark",
        "_reading",
        "_rest",
        "_row",
        "_subpartition",
        "_taken",
        "at",
        "attempt",
        "channel",
        "generation",
        "link",
        "on_available",
        "on_failed",
        "read",
        "refusal",
        "rows_sent",
        "rows_skipped",
        "whole",
    )

    def __init__(
        self,
        subpartition: RetainedSubpartition,
        generation: int,
        begin: tuple[int, int, Event | None],
        on_available: Callable[[], None],
        on_failed: Callable[[ShuffleError], None],
        *,
        attempt: int,
    ) -> None:
        self.generation = generation
        self.attempt = attempt
        self.channel: ProducerChannel | None = None
        self.link: ProducerLink | None = None
        self.whole = False
        """It takes batches as they are."""
        self.refusal: PartitionLost | None = None
        """Why it gives nothing."""
        self.on_available = on_available
        self.on_failed = on_failed
        self.rows_sent = 0
        self.rows_skipped = 0
        """None ever: the next view sends all of an element again."""
        self.read = 0
        """Bytes that were polled."""
        self._subpartition = subpartition
        self.at, self._begin, mark = begin
        """The number of the next entry, and the first row that is wanted."""
        self._mark = None if mark is None else Event(EventKind.WATERMARK, mark.time, mark.idle)
        self._row = self._begin
        """The number of the next row."""
        self._current: _Entry | None = None
        """The element that was begun last, while there is a rest of it."""
        self._rest: deque[Part] = deque()
        self._taken = 0
        """Bytes of it that were polled."""
        self._fetched: dict[int, list[Part]] = {}
        """Elements that were read from disk, or encoded, and not begun, by number."""
        self._fetched_bytes = 0
        self._ahead = self.at
        """Entries below were asked for."""
        self._reading = False
        self._barrier = 0
        """The barrier that it has polled last, and that blocks it; 0: none does."""

    @property
    def current(self) -> bool:
        return self._subpartition.view is self

    def resize(self, size: int) -> None:
        if self.current:
            self._subpartition.capacity = size

    def resume(self, barrier: int) -> None:
        if self.current and self._barrier == barrier:
            self._barrier, self._subpartition.resumed = 0, barrier

    def make_stable(self, version: int, row: int) -> None:
        """The consumer's snapshots cover rows below that one; no effect once there is a newer view."""
        if self.current:
            self._subpartition.make_stable(version, row)

    def release(self, reason: CancelReason) -> None:
        """The consumer went away: nothing is freed, its next attempt reads it again, whatever the reason."""
        if self.current:
            self._subpartition.lose()

    def fail(self, error: ShuffleError) -> None:
        if self.current:
            self._subpartition.lose()
            self.on_failed(error)

    def hold(self) -> None:
        self._subpartition.held = True

    # --- what is next ----------------------------------------------------------------------------

    def next_type(self) -> NextType:
        """Also asks the disk for what is next, if that is there and not in memory."""
        subpartition = self._subpartition
        if subpartition.view is not self or self._barrier:
            return _NONE
        if self.refusal is not None:
            self.fail(self.refusal)
            return _NONE
        subpartition.held = False  # before the look
        if self._mark is not None:
            return _EVENT_NEXT
        if self._rest:
            return subpartition.readiness()
        entry = self._head()
        if entry is None:
            return _NONE
        if isinstance(entry, Event):
            return _EVENT_NEXT
        if self._find(entry.element) is None:
            return _NONE
        return subpartition.readiness()

    def _head(self) -> _Entry | Event | None:
        """The next entry, behind those that the consumer does not want."""
        subpartition = self._subpartition
        entries = subpartition.entries
        while True:
            index = self.at - subpartition.first
            if index >= len(entries):
                return None
            entry = entries[index]
            if isinstance(entry, Event):
                if self._is_wanted(entry):
                    return entry
            elif entry.row >= self._begin or entry.row + entry.element.rows > self._begin:
                return entry
            else:
                self._row = entry.row + entry.element.rows
                subpartition.position = entry.at + entry.element.size
            self.at += 1

    def _is_wanted(self, event: Event) -> bool:
        if event.marker is not None:
            return not event.taken
        subpartition = self._subpartition
        return not event.blocking or event.barrier > max(subpartition.barriers_over, subpartition.resumed)

    def _find(self, element: RetainedElement) -> list[Part] | Batch | None:
        """The bytes of an element that is next, or the batch that the consumer takes as it is; None: the disk
        was asked for them. The writer may move it to the disk at any time: look once."""
        data = element.data
        if type(data) is list:
            return data
        if self.whole and isinstance(data, Batch):
            return data
        found = self._fetched.get(element.number)
        if found is None and not self._reading:
            self._ahead = self.at
            self._fetch()
        return found

    def backlog(self) -> int:
        return 0 if self._barrier or not self.current else self._subpartition.backlog()

    # --- polling ---------------------------------------------------------------------------------

    def poll(self, data: bool = True) -> Slice | None:
        kind = self.next_type()
        if kind is _NONE or (kind is not _EVENT_NEXT and not data):
            return None
        if kind is _EVENT_NEXT:
            piece = self._take_event()
        else:
            taken = self._take_data()
            if taken is None:
                return None
            piece = taken
            self._subpartition.moved(self.read)
        piece.next_type = self.next_type()
        piece.backlog = self.backlog()
        return piece

    def _take_event(self) -> Slice:
        """The event that is next. What says nothing to a later view leaves the log: a marker, and a watermark
        that comes right before another."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.row = self._row
            return mark.slice()
        entries, index = self._subpartition.entries, self.at - self._subpartition.first
        event = entries[index]
        assert isinstance(event, Event)
        if event.marker is not None:
            del entries[index]
            return event.slice()
        if event.kind is EventKind.WATERMARK and index:
            before = entries[index - 1]
            if isinstance(before, Event) and before.kind is EventKind.WATERMARK:
                del entries[index - 1]
                self.at -= 1
        self.at += 1
        piece = event.slice()
        if event.blocking:
            self._barrier = event.given
        return piece

    def _take_data(self) -> Slice | None:
        if self._rest:
            return self._fill()
        entry = self._head()
        assert isinstance(entry, _Entry)
        found = self._find(entry.element)
        if found is None:
            return None
        if isinstance(found, Batch):
            return self._take_whole(entry, found)
        return self._fill(entry, found)

    def _take_whole(self, entry: _Entry, batch: Batch) -> Slice:
        element = entry.element
        handed = Batch(batch.payload, None, batch.times)
        whole = WholeBatch(handed, element.rows, element.size, self._subpartition.capacity, parts=_encoded)
        piece = Slice(_NOTHING, 0, element.size, _DATA, element.rows)
        piece.flags, piece.first_start, piece.whole = _STARTS | _ENDS, 0, whole
        piece.row = entry.row
        self._begin_element(entry)
        self._end_element(entry)
        self._subpartition.buffers_out += 1
        self.read += element.size
        return piece

    def _fill(self, entry: _Entry | Event | None = None, parts: list[Part] | Batch | None = None) -> Slice:
        """A buffer with the rest of an element, or that one, as many more as fit, and the beginning of
        another; without a copy if it is a piece of one part."""
        subpartition, rest = self._subpartition, self._rest
        capacity, size, sent = subpartition.capacity, 0, self.rows_sent
        pieces: list[Part] = []
        row, first_start = self._row, NO_ELEMENT_START
        while True:
            if isinstance(parts, list) and isinstance(entry, _Entry):
                if first_start == NO_ELEMENT_START:
                    row, first_start = entry.row, size
                self._begin_element(entry)
                rest.extend(parts)
            while rest and size < capacity:
                part = rest[0]
                length = len(part)
                if length <= capacity - size:
                    rest.popleft()
                else:
                    length = capacity - size
                    view = memoryview(part)
                    part, rest[0] = view[:length], view[length:]
                pieces.append(part)
                size += length
                self._taken += length
            if rest:
                break
            if self._current is not None:
                self._end_element(self._current)
            if size >= capacity:
                break
            entry = self._head()
            parts = self._find(entry.element) if isinstance(entry, _Entry) else None
            if not isinstance(parts, list):
                break
        if self._current is not None:
            subpartition.position = self._current.at + min(self._taken, self._current.element.size - 1)
        subpartition.buffers_out += 1
        self.read += size
        piece = _slice_of(pieces, size, self.rows_sent - sent)
        piece.row, piece.first_start = row, first_start
        piece.flags = (_CONTINUES if first_start else 0) | (0 if rest else _ENDS)
        piece.flags |= 0 if first_start == NO_ELEMENT_START else _STARTS
        return piece

    def _begin_element(self, entry: _Entry) -> None:
        rows = entry.element.rows
        self.at += 1
        self._row = end = entry.row + rows
        self.rows_sent += rows
        subpartition = self._subpartition
        if end > subpartition.read:
            subpartition.read = end
        self._current, self._taken = entry, 0
        if self._fetched and (parts := self._fetched.pop(entry.element.number, None)) is not None:
            self._fetched_bytes -= sum(map(len, parts))
            if not self._reading and 2 * self._fetched_bytes < subpartition.partition.read_bytes:
                self._fetch()

    def _end_element(self, entry: _Entry) -> None:
        self._current = None
        self._subpartition.position = entry.at + entry.element.size

    # --- what is not in memory -------------------------------------------------------------------

    def _fetch(self) -> None:
        """Ask the disk for the elements from ``_ahead`` on, up to one that is in memory."""
        subpartition, partition = self._subpartition, self._subpartition.partition
        wanted: list[RetainedElement] = []
        size = 0
        self._ahead = max(self._ahead, self.at)
        while (index := self._ahead - subpartition.first) < len(subpartition.entries):
            entry = subpartition.entries[index]
            if isinstance(entry, _Entry):
                if size >= max(1, partition.read_bytes) or type(entry.element.data) is list:
                    break
                wanted.append(entry.element)
                size += entry.element.size
            self._ahead += 1
        if wanted:
            self._reading = True
            partition.disk.run(partial(_read_all, wanted), self._on_read)

    def _on_read(self, found: list[tuple[int, list[Part]]] | ShuffleError) -> None:
        self._reading = False
        if isinstance(found, PartitionLost):
            self._subpartition.partition.lose(found)
        elif isinstance(found, ShuffleError):
            self.fail(found)
        elif self.current:
            self._fetched.update(found)
            self._fetched_bytes += sum(sum(map(len, parts)) for _, parts in found)
            self.on_available()


def _slice_of(pieces: list[Part], size: int, rows: int) -> Slice:
    """A buffer of these bytes; a single piece is not copied, and so has no room for a header before it."""
    if len(pieces) == 1:
        piece = Slice(memoryview(pieces[0]), 0, size, _DATA, rows)
        piece.shared = True
        return piece
    memory = bytearray().join([_HEADROOM, *pieces])
    return Slice(memoryview(memory), SEGMENT_HEADROOM_BYTES, size, _DATA, rows)


def _encoded(batch: Batch) -> list[Part]:
    return encode(batch)[1]


def _read_all(elements: list[RetainedElement]) -> list[tuple[int, list[Part]]]:
    """(A thread for the disk.) Number and bytes of each that is still held."""
    found = []
    for element in elements:
        data = element.data
        if isinstance(data, Spilled):
            found.append((element.number, data.read()))
        elif isinstance(data, Batch):
            found.append((element.number, _encoded(data)))
    return found
