"""The log of a retained subpartition, and the views that read it.

A log has elements and events in their order, and each row has a number that never starts again. Elements
stand in blocks, up to a buffer's bytes of short ones in each. The writer appends, a view reads from the row
that its consumer names, at its own pace and as often as a consumer comes back; a consumer that knows of no
row yet gets all that is held. It begins with the block
that holds the row, from the beginning of that block, and the consumer leaves out what it has. Blocks are
sent as they are, without a copy but where short elements are joined, once, and where a buffer begins in one
and ends in another.

What a watermark says lasts: a view that begins behind it begins with the last one. The end stays in the
log. A latency marker is given once. A barrier that blocks stops a view until its consumer resumes, and no
view any more once it has been resumed or has ended for its job.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from minishuffle.errors import PartitionLost, PartitionNotFound, ShuffleError, Superseded
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.blocking import DiskReads
from minishuffle.exchange.buffers import Event, Flush, Slice, WholeBatch
from minishuffle.exchange.elements import Part, encode
from minishuffle.exchange.partition import ProducerLink, SubpartitionState
from minishuffle.exchange.retention import OpenElements, RetainedBlock, RetainedStore, Spilled, block_parts
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.limits import SEGMENT_HEADROOM_BYTES
from minishuffle.protocol.channel import NextType, ProducerChannel
from minishuffle.wire.frames import (
    NO_ELEMENT_START,
    ROW_MAX,
    BufferFlags,
    CancelReason,
    DataType,
    EventKind,
    LatencyMarker,
)

__all__ = ["LogServices", "RetainedSubpartition", "RetainedView"]

_STARTS, _CONTINUES, _ENDS = map(int, (BufferFlags.STARTS, BufferFlags.CONTINUES, BufferFlags.ENDS))
_DATA: Final = int(DataType.DATA)
_NOTHING = memoryview(b"")
_HEADROOM: Final = bytes(SEGMENT_HEADROOM_BYTES)
_NONE, _DATA_NEXT, _EVENT_NEXT, _PARTIAL = NextType.NONE, NextType.DATA, NextType.EVENT, NextType.PARTIAL
_UNBOUNDED: Final = sys.maxsize


# --- subpartition ---------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class LogServices:
    """What the logs of a partition share."""

    name: str
    """The name of the partition."""
    version: int
    """The version of its rows: the attempt that began to make them."""
    store: RetainedStore
    disk: DiskReads
    """Reads what is not in memory, and encodes what was handed over."""
    flushing: Flush
    unread_bytes: int
    """What a consumer that keeps up may have yet to read before the writer waits."""
    on_stable: Callable[[], None]
    """(Loop.) A consumer's snapshots cover more rows."""
    replayed: Callable[[int, int], None]
    """(Loop.) That attempt of a consumer was sent what was held for it when it was attached."""
    read_bytes: int
    """What a view asks the disk for at once; a block at the least."""
    wake: Callable[[], None]
    """(Loop.) Has a task that waits look again."""
    lose: Callable[[PartitionLost], None]
    """(Loop.) What was retained is not what was written."""


class _Entries:
    """What is in a log, in its order, and where each begins. The numbers stand in arrays, so that few objects
    stay for a block: see :mod:`~minishuffle.exchange.retention`.

    The writer appends and the loop takes away, each by steps that the interpreter does not divide, and the
    loop alone looks: what it sees in ``things`` has its numbers.
    """

    __slots__ = ("bytes", "rows", "things")

    def __init__(self) -> None:
        self.things: list[RetainedBlock | Event] = []
        self.rows = array("q")
        """For each, the number of its first row, or for an event of the row that follows."""
        self.bytes = array("q")
        """For each, the number of its first byte."""

    def append(self, thing: RetainedBlock | Event, rows: int, size: int) -> None:
        """(Writer.)"""
        self.rows.append(rows)
        self.bytes.append(size)
        self.things.append(thing)

    def drop(self, count: int) -> None:
        """(Loop.) Take the first away."""
        del self.things[:count], self.rows[:count], self.bytes[:count]

    def remove(self, index: int) -> None:
        """(Loop.)"""
        del self.things[index], self.rows[index], self.bytes[index]

    def keep(self, kept: list[int], count: int) -> None:
        """(Loop.) Of the first ``count``, keep those with these indexes; only the last of them is a block."""
        self.things[:count] = [self.things[index] for index in kept]
        self.rows[:count] = array("q", [self.rows[index] for index in kept])
        self.bytes[:count] = array("q", [self.bytes[index] for index in kept])


class RetainedSubpartition:
    """The log for one consumer: a :class:`ResultSubpartition`.

    Each attribute is written by one thread, but for the entries, which both change.

    Args:
        capacity: payload bytes of a buffer.
    """

    __slots__ = (
        "_barrier",
        "_latency",
        "_mark",
        "_stable",
        "_tail",
        "allowance",
        "behind",
        "barriers_over",
        "buffers_out",
        "bytes",
        "capacity",
        "closed",
        "closed_bytes",
        "consumer",
        "dirty",
        "entries",
        "error",
        "first",
        "first_row",
        "flushed",
        "held",
        "notified",
        "open",
        "position",
        "resumed",
        "rows",
        "services",
        "skipped",
        "view",
        "waits",
        "whole",
    )

    def __init__(self, services: LogServices, consumer: int, capacity: int) -> None:
        self.consumer = consumer
        self.services = services
        self.entries = _Entries()
        # The writer's.
        self.rows = self.first_row = 0
        """The numbers of the row behind the last that was appended, and of the first. Rows are counted once
        they are in an open block, and before that is closed."""
        self.bytes = 0
        """All that were appended; counted as rows."""
        self.skipped = 0
        """Rows that nobody will ever want, behind those that were appended: no row is appended any more."""
        self.closed_bytes = 0
        """Bytes below are in blocks that are closed, and go out."""
        self.open: RetainedBlock | None = None
        """The block that is being written."""
        self.waits = False
        """The writer waits for the consumer."""
        self._tail: Event | None = None
        """The watermark or barrier that is the last thing in the log, if any is."""
        self._latency: Event | None = None
        self._barrier: Event | None = None
        """The barrier that was appended last."""
        # Both threads'.
        self.dirty = False
        """Noted by its partition as to be flushed; set by the writer, cleared by the loop."""
        self.notified = False
        # The loop's.
        self.first = 0
        """The number of the first entry that is held; they are numbered from 0 on."""
        self._stable = 0
        """Rows of this version that the consumer's snapshots cover are below."""
        self.behind = False
        """The view may have more to read of what is covered: it is freed once that was read."""
        self.position = 0
        """Bytes below were read by the view, or by the last there was."""
        self.allowance = services.unread_bytes
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

    def begin_at(self, row: int) -> None:
        """The first row has that number. A view may be there already."""
        self.rows = self.first_row = row

    def append(self, block: RetainedBlock) -> None:
        """A block is next; its rows and bytes are not counted yet."""
        self._tail = None
        self.entries.append(block, self.rows, self.bytes)

    def has_room(self) -> bool:
        """The consumer has read enough."""
        self.waits = True  # before the look
        self.waits = self.bytes - self.position >= self.allowance
        return not self.waits

    def add_event(self, event: Event) -> None:
        """Append an event; no block is open."""
        event.row = self.next_row
        self.entries.append(event, self.rows, self.bytes)
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
        """A view of everything that is held from that row of that version on, instead of any other; of
        another version than this partition's, all that is held."""
        begin = max(row if version == self.services.version else 0, self.freed)
        before = self.view
        at, mark, position = self._place(begin)
        self.view = view = RetainedView(
            self, generation, (at, begin, mark), on_available, on_failed, attempt=attempt
        )
        view.whole = self.whole = whole
        self.position, self.behind = position, True
        view.look_replayed()
        replays = self.bytes - position > self.services.unread_bytes
        self.allowance = _UNBOUNDED if replays else self.services.unread_bytes
        if before is not None:
            before.on_failed(Superseded(f"subpartition {self.consumer} was requested again"))
        return view

    @property
    def stable(self) -> int:
        """The consumer's snapshots cover rows below; all, for one that wants none."""
        return ROW_MAX if self.closed else max(self.first_row, self._stable)

    @property
    def next_row(self) -> int:
        """(Any thread.) The number of the next row."""
        return self.rows + self.skipped

    @property
    def freed(self) -> int:
        """Rows below are not held."""
        rows, entries = self.next_row, self.entries  # first: what is appended from now on lies behind
        for index, entry in enumerate(entries.things):
            if isinstance(entry, RetainedBlock):
                return entries.rows[index]
        return rows

    def rows_to(self, index: int) -> int:
        """The number of the row behind that entry, so far; if it was closed before, for good."""
        rows, begins = self.rows, self.entries.rows  # first: what is counted from now on may lie behind
        return begins[index + 1] if index + 1 < len(begins) else rows

    def bytes_to(self, index: int) -> int:
        """The number of the byte behind that entry, as :meth:`rows_to`."""
        size, begins = self.bytes, self.entries.bytes
        return begins[index + 1] if index + 1 < len(begins) else size

    def _reaches(self, index: int, row: int) -> bool:
        """Whether that row, or one behind it, is in the entry, may still be written to its open block, or
        follows the event."""
        entry = self.entries.things[index]
        if isinstance(entry, Event):
            return entry.row >= row
        return not entry.closed or self.rows_to(index) > row

    def _place(self, row: int) -> tuple[int, Event | None, int]:
        """Where the log is to be read from for that row: the number of the entry, the last watermark before
        it, and the byte."""
        position, things = self.bytes, self.entries.things  # first: what is appended from now on lies behind
        index = bisect_left(range(len(things)), True, key=lambda index: self._reaches(index, row))
        mark = self._mark
        for number in range(index - 1, -1, -1):
            entry = things[number]
            if isinstance(entry, Event) and entry.kind is EventKind.WATERMARK:
                mark = entry
                break
        for number in range(index, len(things)):
            if isinstance(things[number], RetainedBlock):
                position = self.entries.bytes[number]
                break
        return self.first + index, mark, position

    def make_stable(self, version: int, row: int) -> None:
        """The consumer's oldest snapshot covers rows below that one, which may be yet to be written. Those of
        an older version end where this one begins."""
        if version == self.services.version and row > self._stable:
            advances = row > self.stable
            self._stable = row
            self.free()
            if advances:
                self.services.on_stable()

    def free(self) -> None:
        """Give up what is covered and was read."""
        things, stable, freed = self.entries.things, min(self.stable, self.next_row), 0
        most = self.view.at - self.first if self.view is not None else 0
        while freed < most and not self._reaches(freed, stable):
            entry = things[freed]
            if isinstance(entry, RetainedBlock):
                self.services.store.free(entry)
            elif entry.kind is EventKind.WATERMARK:
                self._mark = entry
            freed += 1
        self.behind = freed == most
        if freed:
            self.first += freed
            self.entries.drop(freed)
            self.services.store.note_freed()

    def moved(self, read: int) -> None:
        """The view has read so many bytes in all, and ``position`` says how far it is."""
        allowance, most = self.allowance, self.services.unread_bytes
        if allowance > most:
            unread = self.bytes - self.position
            if read >= most or unread <= most:  # it has had more than credit for a start, or keeps up
                self.allowance = max(most, min(allowance, unread + most))
        if self.waits and self.bytes - self.position < self.allowance:
            self.services.wake()

    def lose(self) -> None:
        """The consumer has gone: the writer waits for it no more."""
        self.view, self.whole, self.allowance = None, False, _UNBOUNDED
        if self.waits:
            self.services.wake()

    @property
    def held_back(self) -> bool:
        """A barrier is in the log that was not resumed and has not ended."""
        barrier = self._barrier
        return barrier is not None and barrier.barrier > max(self.barriers_over, self.resumed)

    def close(self) -> None:
        """Nobody wants a row of it any more."""
        self.closed = True  # first: the writer looks at it
        self.allowance = _UNBOUNDED
        things, count = self.entries.things, len(self.entries.things)
        read = min(count, self.view.at - self.first) if self.view is not None else 0
        kept: list[int] = []
        for index, entry in enumerate(things[:count]):
            if isinstance(entry, RetainedBlock) and entry.closed:
                self.services.store.free(entry)
            elif index >= read:
                kept.append(index)
        self.first += read
        self.entries.keep(kept, count)
        self.position = self.bytes
        self.services.store.note_freed()

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
        self.forget()
        self.position = self.bytes
        if self.error is None:
            self.error = PartitionNotFound(f"partition {self.services.name} was released")

    def forget(self) -> None:
        """(Both threads, once it is released.) Hold nothing."""
        self.entries = _Entries()

    def readiness(self) -> NextType:
        """Whether what is unread goes out."""
        position = self.position
        if position < self.closed_bytes or position < self.flushed:
            return _DATA_NEXT
        flushing = self.services.flushing
        if flushing is Flush.ON_REQUEST or position >= self.bytes:
            return _NONE
        return _PARTIAL if flushing is Flush.ADAPTIVE else _DATA_NEXT

    def backlog(self) -> int:
        """Data buffers that the view has yet to poll, without one that does not go out yet."""
        out = max(self.closed_bytes, self.flushed) - self.position
        if self.services.flushing is Flush.AT_ONCE:
            out = self.bytes - self.position
        return max(0, -(-out // self.capacity)) if self.view is not None else 0

    def state(self) -> SubpartitionState:
        unread = self.bytes - self.position
        return SubpartitionState(unread // self.capacity, unread % self.capacity, True, False, self.closed)

    def validate(self) -> None:
        """Check the invariants; for tests."""
        entries = self.entries
        count = len(entries.things)
        assert len(entries.rows) == len(entries.bytes) == count
        assert self.first_row <= self.freed <= min(self.stable, self.next_row)
        assert self.view is None or self.first <= self.view.at
        for begins, end in ((entries.rows, self.rows), (entries.bytes, self.bytes)):
            assert list(begins) == sorted(begins) and (not begins or begins[-1] <= end)
        for index, entry in enumerate(entries.things):
            rows = self.rows_to(index) - entries.rows[index]
            size = self.bytes_to(index) - entries.bytes[index]
            if isinstance(entry, RetainedBlock):
                data = entry.data
                assert data is not None and entry.closed is not isinstance(data, OpenElements)
                if isinstance(data, OpenElements):
                    assert index == count - 1 and (data.ends[-1], data.size) == (rows, size)
                elif isinstance(data, bytes | memoryview | tuple):
                    assert sum(map(len, block_parts(data))) == size
                elif isinstance(data, Batch):
                    assert len(data) == rows
            elif index + 1 < count and not self.closed:
                assert (rows, size) == (0, 0), "an event has neither"
        assert self.position <= self.bytes and self.closed_bytes <= self.bytes


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
        "_begins_at",
        "_current",
        "_elements",
        "_ends_at",
        "_fetched",
        "_fetched_bytes",
        "_mark",
        "_reading",
        "_replayed_at",
        "_rest",
        "_row",
        "_rows_taken",
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
        self._replayed_at: int | None = subpartition.next_row
        """The row behind what was held when it was made; None once it has come there."""
        self._current: RetainedBlock | None = None
        """The block that was begun last, while there is a rest of it, or it is open."""
        self._begins_at = self._ends_at = 0
        """The numbers of its first byte, and of the one behind it when it was looked at last."""
        self._rest: deque[Part] = deque()
        """What was begun of it and not polled."""
        self._taken = self._elements = self._rows_taken = 0
        """Bytes of it that were polled; elements that were begun, if it was open then; and their rows."""
        self._fetched: dict[RetainedBlock, tuple[Part, ...]] = {}
        """What was read from disk, or encoded, and not begun."""
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

    def look_replayed(self) -> None:
        """Say once that all was polled that was held when it was made."""
        if self._replayed_at is not None and self._row >= self._replayed_at:
            self._replayed_at = None
            self._subpartition.services.replayed(self._subpartition.consumer, self.attempt)

    # --- what is next ----------------------------------------------------------------------------

    def next_type(self) -> NextType:
        """Also asks the disk for what is next, if that is there and not in memory."""
        subpartition = self._subpartition
        if subpartition.view is not self or self._barrier:
            return _NONE
        subpartition.held = False  # before the look
        if self._mark is not None:
            return _EVENT_NEXT
        if not self._rest:
            entry = self._head()
            if entry is None:
                return _NONE
            if isinstance(entry, Event):
                return _EVENT_NEXT
            if subpartition.readiness() is not _NONE and self._find(entry) is None:
                return _NONE
        return subpartition.readiness()

    def _head(self) -> RetainedBlock | Event | None:
        """What is next, behind what the consumer does not want."""
        subpartition = self._subpartition
        entries = subpartition.entries
        while True:
            index = self._index
            if index >= len(entries.things):
                return None
            entry = entries.things[index]
            if isinstance(entry, Event):
                if self._is_wanted(entry):
                    return entry
                entry.taken = True  # before another look: from now on the writer renumbers it no more
                if self._is_wanted(entry):
                    return entry
            else:
                closed = entry.closed  # before the look at its rows
                row, end = entries.rows[index], subpartition.rows_to(index)
                if entry is self._current:
                    if not closed or self._rows_taken < end - row:
                        return entry
                elif end > self._begin or (not closed and row >= self._begin):
                    return entry
                elif not closed:  # with what follows it, it may yet be skipped: rows in between must not be
                    return None
                self._row = end
                self._end_block()
                subpartition.moved(self.read)
            self.at += 1

    @property
    def _index(self) -> int:
        """Where the next entry is among those that are held."""
        return self.at - self._subpartition.first

    def _is_wanted(self, event: Event) -> bool:
        if event.marker is not None:
            return not event.taken
        subpartition = self._subpartition
        return not event.blocking or event.barrier > max(subpartition.barriers_over, subpartition.resumed)

    def _find(self, block: RetainedBlock) -> OpenElements | tuple[Part, ...] | Batch | None:
        """What is in a block that is next, or the batch that the consumer takes as it is; None: the disk was
        asked for it. The writer may complete it, or move it to the disk, at any time: look once."""
        data = block.data
        if isinstance(data, bytes | memoryview | tuple):
            return block_parts(data)
        if isinstance(data, OpenElements) or (self.whole and isinstance(data, Batch)):
            return data
        found = self._fetched.get(block)
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
            taken = self._take_data()  # may find that the writer has moved it to disk
            if taken is None:
                return None
            piece = taken
            self._subpartition.moved(self.read)
            if self._replayed_at is not None:
                self.look_replayed()
        if self._subpartition.behind:
            self._subpartition.free()
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
        entries, index = self._subpartition.entries, self._index
        event = entries.things[index]
        assert isinstance(event, Event)
        if event.marker is not None:
            entries.remove(index)
            return event.slice()
        if event.kind is EventKind.WATERMARK and index:
            before = entries.things[index - 1]
            if isinstance(before, Event) and before.kind is EventKind.WATERMARK:
                entries.remove(index - 1)
                self.at -= 1
        self.at += 1
        piece = event.slice()
        if event.blocking:
            self._barrier = event.given
        return piece

    def _take_data(self) -> Slice | None:
        """A buffer with what is left of a block, as many more as fit, or the beginning of a long one. None:
        it has just been moved to disk."""
        subpartition, rest = self._subpartition, self._rest
        capacity, size, sent = subpartition.capacity, 0, self.rows_sent
        pieces: list[Part] = []
        block: RetainedBlock | None = None
        row, first_start = self._row, NO_ELEMENT_START
        while True:
            if not rest:
                entry = self._head()
                if not isinstance(entry, RetainedBlock) or (pieces and not self._joins(size)):
                    break
                found = self._find(entry)
                if isinstance(found, Batch) and not pieces:
                    return self._take_whole(found)
                if not isinstance(found, OpenElements | tuple):
                    break
                begun = self._begin_block(entry, found)
                if begun is None:
                    break
                if first_start == NO_ELEMENT_START:
                    row, first_start = begun, size
            block = self._current
            size += self._drain(pieces, capacity - size)
            if rest or size >= capacity:
                break
        if not pieces:
            return None
        subpartition.buffers_out += 1
        self.read += size
        piece = self._slice_of(pieces, block, size, self.rows_sent - sent)
        piece.row, piece.first_start = row, first_start
        piece.flags = (_CONTINUES if first_start else 0) | (0 if rest else _ENDS)
        piece.flags |= 0 if first_start == NO_ELEMENT_START else _STARTS
        return piece

    def _joins(self, size: int) -> bool:
        """Whether the block that is next is to begin in a buffer with so many bytes: it is copied then."""
        subpartition, index = self._subpartition, self._index
        block_size = subpartition.bytes_to(index) - subpartition.entries.bytes[index]
        return size + block_size <= subpartition.capacity or 2 * size < subpartition.capacity

    def _begin_block(self, block: RetainedBlock, data: OpenElements | tuple[Part, ...]) -> int | None:
        """Begin the block that is next, or what was added to it since; gives the number of the first row of
        that, None if there is none."""
        subpartition, index = self._subpartition, self._index
        row = subpartition.entries.rows[index]
        if block is not self._current:
            self._current = block
            self._taken = self._elements = self._rows_taken = 0
            self._begins_at = subpartition.entries.bytes[index]
        if isinstance(data, tuple):  # all of it was counted
            rows, self._ends_at = subpartition.rows_to(index) - row, subpartition.bytes_to(index)
            parts = _behind(data, self._taken) if self._taken else data
        else:
            begun, count, width = self._elements, len(data.ends), data.width
            rows, self._elements = data.ends[count - 1] if count else 0, count
            self._ends_at = self._begins_at + data.size
            parts = tuple(data.parts[begun * width : count * width])
        if self._rows_taken == rows:
            return None
        first = row + self._rows_taken
        self.rows_sent += rows - self._rows_taken
        self._rows_taken = rows
        self._row = row + rows
        self._rest.extend(parts)
        if self._fetched and (parts := self._fetched.pop(block, ())):
            self._fetched_bytes -= sum(map(len, parts))
            if not self._reading and 2 * self._fetched_bytes < self._subpartition.services.read_bytes:
                self._fetch()
        return first

    def _drain(self, pieces: list[Part], room: int) -> int:
        """Take so many bytes of what was begun, if there are; gives how many."""
        rest, size = self._rest, 0
        while rest and size < room:
            part = rest[0]
            length = len(part)
            if length <= room - size:
                rest.popleft()
            else:
                length = room - size
                view = memoryview(part)
                part, rest[0] = view[:length], view[length:]
            pieces.append(part)
            size += length
        self._taken += size
        most = self._ends_at - 1 if rest else self._ends_at  # a batch may take more than it had
        self._subpartition.position = min(self._begins_at + self._taken, most)
        return size

    def _slice_of(self, pieces: list[Part], block: RetainedBlock | None, size: int, rows: int) -> Slice:
        """A buffer of these bytes. A single piece, of ``block``, is not copied: others may send it too, and
        its header goes elsewhere."""
        if len(pieces) > 1:
            memory = bytearray().join([_HEADROOM, *pieces])
            return Slice(memoryview(memory), SEGMENT_HEADROOM_BYTES, size, _DATA, rows)
        piece = Slice(memoryview(pieces[0]), 0, size, _DATA, rows)
        piece.shared = True
        if block is not None:
            block.lent += 1
            piece.view, piece.builder = self._subpartition.services.store, block
        return piece

    def _take_whole(self, batch: Batch) -> Slice:
        """The batch that is next."""
        subpartition, index = self._subpartition, self._index
        row, self._row = subpartition.entries.rows[index], subpartition.rows_to(index)
        rows, size = self._row - row, subpartition.bytes_to(index) - subpartition.entries.bytes[index]
        handed = Batch(batch.payload, None, batch.times)
        whole = WholeBatch(handed, rows, size, subpartition.capacity, parts=_encoded)
        piece = Slice(_NOTHING, 0, size, _DATA, rows)
        piece.flags, piece.first_start, piece.whole = _STARTS | _ENDS, 0, whole
        piece.row = row
        self.rows_sent += rows
        self._end_block()
        self.at += 1
        subpartition.buffers_out += 1
        self.read += size
        return piece

    def _end_block(self) -> None:
        """The block that is next is behind the view."""
        self._current = None
        self._subpartition.position = self._subpartition.bytes_to(self._index)

    # --- what is not in memory -------------------------------------------------------------------

    def _fetch(self) -> None:
        """Ask the disk for the blocks from ``_ahead`` on, up to one that is in memory."""
        subpartition, services = self._subpartition, self._subpartition.services
        wanted: list[RetainedBlock] = []
        size = 0
        self._ahead = max(self._ahead, self.at)
        entries = subpartition.entries
        while (index := self._ahead - subpartition.first) < len(entries.things):
            entry = entries.things[index]
            if isinstance(entry, RetainedBlock):
                data = entry.data
                if size >= max(1, services.read_bytes) or isinstance(data, OpenElements):
                    break
                if self.whole and isinstance(data, Batch):
                    break
                wanted.append(entry)
                size += subpartition.bytes_to(index) - entries.bytes[index]
            self._ahead += 1
        if wanted:
            self._reading = True
            services.disk.run(partial(_read_all, wanted), self._on_read)

    def _on_read(self, found: list[tuple[RetainedBlock, tuple[Part, ...]]] | ShuffleError) -> None:
        self._reading = False
        if isinstance(found, PartitionLost):
            self._subpartition.services.lose(found)
        elif isinstance(found, ShuffleError):
            self.fail(found)
        elif self.current:
            self._fetched.update(found)
            self._fetched_bytes += sum(sum(map(len, parts)) for _, parts in found)
            self.on_available()


def _behind(parts: tuple[Part, ...], size: int) -> tuple[Part, ...]:
    """What lies behind the first ``size`` bytes."""
    found: list[Part] = []
    for part in parts:
        if size < len(part):
            found.append(memoryview(part)[size:] if size else part)
        size = max(0, size - len(part))
    return tuple(found)


def _encoded(batch: Batch) -> list[Part]:
    return encode(batch)[1]


def _read_all(blocks: list[RetainedBlock]) -> list[tuple[RetainedBlock, tuple[Part, ...]]]:
    """(A thread for the disk.) Bytes of each that is still held."""
    found = []
    for block in blocks:
        data = block.data
        if isinstance(data, Spilled):
            found.append((block, data.read()))
        elif isinstance(data, Batch):
            found.append((block, tuple(_encoded(data))))
    return found
