"""The producing side of an exchange: ResultPartition, its Subpartitions, and their views.

The writer (task thread) fills one *open* segment per subpartition and publishes what it wrote by
storing one tuple; full segments go to the end of a queue. The reader (loop thread) takes finished
segments from the front, and slices of the open one when a flush was asked for. Each field is written
by one side only. (Flink: ``PipelinedSubpartition``, ``BufferBuilder``.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from minishuffle.counters import TaskCounters
from minishuffle.errors import LocalProtocolError
from minishuffle.exchange.segments import Segment
from minishuffle.ids import PartitionId
from minishuffle.limits import EVENTS_QUEUED_PER_CHANNEL_MAX, SEGMENT_HEADROOM_BYTES
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import NO_ELEMENT_START, WATERMARK_EVENT, BufferFlags, DataType, EventKind

__all__ = ["BufferBuilder", "Event", "ResultPartition", "Slice", "SliceOwner", "Subpartition"]


# --- buffers --------------------------------------------------------------------------------------
#
# Send buffers: a segment that is being filled, and the pieces of it that go out.


class BufferBuilder:
    """A segment that is being written or waits to be sent.

    Invariants: ``sent_bytes ≤ published bytes ≤ capacity``; ``starts`` ascends.
    """

    __slots__ = (
        "capacity",
        "continues",
        "in_flight",
        "length",
        "published",
        "rows",
        "segment",
        "sent_bytes",
        "sent_rows",
        "sent_starts",
        "starts",
    )

    def __init__(self, segment: Segment, continues: bool) -> None:
        self.segment = segment
        self.capacity = len(segment.memory) - SEGMENT_HEADROOM_BYTES
        self.continues = continues
        # The writer's.
        self.length = 0
        self.rows = 0
        self.starts: list[int] = []
        self.published = (0, 0, 0, True)
        """(bytes, rows begun, elements begun, ends with an element) that the reader may send."""
        # The reader's.
        self.sent_bytes = 0
        self.sent_rows = 0
        self.sent_starts = 0
        self.in_flight = False

    def append(self, part: memoryview, at: int) -> int:
        """Copy from ``part[at:]`` what fits; returns how much that was."""
        size = min(len(part) - at, self.capacity - self.length)
        begin = SEGMENT_HEADROOM_BYTES + self.length
        self.segment.memory[begin : begin + size] = part[at : at + size]
        self.length += size
        return size

    def publish(self, ends: bool = True) -> None:
        self.published = (self.length, self.rows, len(self.starts), ends)

    def unsent(self) -> bool:
        return self.published[0] > self.sent_bytes


class SliceOwner(Protocol):
    """Who is told that a slice was let go."""

    def slice_released(self, builder: BufferBuilder) -> None: ...


class Slice:
    """What a poll gives: a piece of a segment, or an event. See ``protocol.channel.Outgoing``."""

    __slots__ = ("_builder", "_view", "data_type", "first_start", "flags", "memory", "rows", "size", "start")

    def __init__(
        self,
        memory: memoryview,
        start: int,
        size: int,
        data_type: int,
        flags: int,
        first_start: int,
        rows: int,
        view: SliceOwner | None = None,
        builder: BufferBuilder | None = None,
    ) -> None:
        self.memory = memory
        self.start = start
        self.size = size
        self.data_type = data_type
        self.flags = flags
        self.first_start = first_start
        self.rows = rows
        self._view = view
        self._builder = builder

    @property
    def payload(self) -> memoryview:
        return self.memory[self.start : self.start + self.size]

    def released(self) -> None:
        """The transport (or the local consumer) has let go; a finished segment is recycled."""
        builder, view = self._builder, self._view
        if builder is None or view is None:
            return
        self._builder = None
        view.slice_released(builder)


class Event:
    """An event in a subpartition's queue. A watermark that is not ``taken`` yet may be overtaken by a
    newer one: the writer changes it in place."""

    __slots__ = ("idle", "kind", "taken", "time")

    def __init__(self, kind: EventKind, time: int = 0, idle: bool = False) -> None:
        self.kind = kind
        self.time = time
        self.idle = idle
        self.taken = False

    def overtake(self, time: int, idle: bool) -> bool:
        """(Writer.) Say something newer instead; False if the reader may have taken it before."""
        self.time, self.idle = time, idle
        return not self.taken

    def slice(self) -> Slice:
        """(Reader.) The event as it goes out."""
        self.taken = True  # before the look at what it says: see overtake
        if self.kind is EventKind.WATERMARK:
            payload = WATERMARK_EVENT.pack(self.kind, self.idle, self.time)
        else:
            payload = bytes((self.kind,))
        memory = memoryview(bytearray(SEGMENT_HEADROOM_BYTES) + payload)
        size, flags = len(payload), BufferFlags.NONE
        return Slice(memory, SEGMENT_HEADROOM_BYTES, size, DataType.EVENT, flags, NO_ELEMENT_START, 0)


# --- partition ------------------------------------------------------------------------------------

Part: TypeAlias = "bytes | memoryview"


class Subpartition:
    """Queue of one producer subtask towards one consumer subtask; it is its own view.

    Invariants: ``polled ≤ added``; at most one builder is open, and it is not in the queue once its
    successor is open; at most one slice of a segment is in flight.
    """

    __slots__ = (
        "_discarded",
        "_events_added",
        "_ends",
        "_events_polled",
        "_mark",
        "_notify",
        "_open",
        "_partial",
        "_polled",
        "_queue",
        "_told",
        "_written",
        "consumer",
        "flush_requested",
        "notified",
        "on_available",
    )

    def __init__(self, consumer: int, notify: Callable[[Subpartition], None]) -> None:
        self.consumer = consumer
        """Index of the consumer subtask."""
        self.notified = False
        """Set by whoever queues this for the loop's attention, cleared by the loop."""
        self.on_available: Callable[[], None] | None = None
        """The reader's wake-up (loop thread); None while no consumer is attached."""
        self.flush_requested = False
        self._discarded = False
        self._notify = notify
        self._queue: deque[BufferBuilder | Event] = deque()
        self._open: BufferBuilder | None = None
        self._partial: BufferBuilder | None = None
        """The builder of a slice that is in flight while more of that segment is to come."""
        self._written = 0
        self._polled = 0
        self._events_added = 0
        """Written by the writer; like ``_written``, and unlike the queue, it may be read at any time."""
        self._events_polled = 0
        self._mark: Event | None = None
        """The writer's: the watermark that is the last thing queued, if any is."""
        self._told: Event | None = None
        """The reader's: the watermark polled last. It and the ends are state: each new consumer is told."""
        self._ends: list[Event] = []

    # --- writer (task thread) ----------------------------------------------------------------

    @property
    def open(self) -> BufferBuilder | None:
        """The builder that is being written."""
        return self._open

    @open.setter
    def open(self, builder: BufferBuilder) -> None:
        self._open = builder
        self._mark = None

    def publish(self, flush: bool) -> None:
        """Let the reader see what was written; wake it if it shall be sent now."""
        builder = self._open
        assert builder is not None
        builder.publish()
        if flush:
            self.flush_requested = True
            self._notify(self)

    def finish_open(self, ends: bool) -> None:
        """The open segment is complete. The queue sees it before it stops being the open one."""
        builder = self._open
        assert builder is not None
        builder.publish(ends)
        self._queue.append(builder)
        self._open = None
        self._written += 1  # last, so that the reader's backlog never has it twice
        self._notify(self)

    def add_event(self, kind: EventKind) -> None:
        """Queue an event behind everything written so far.

        Raises:
            LocalProtocolError: more events are queued than a channel may have.
        """
        queued = self._events_added - self._events_polled
        if queued >= EVENTS_QUEUED_PER_CHANNEL_MAX:
            raise LocalProtocolError(f"{queued} events are queued for one channel")
        self._append(Event(kind))
        self._events_added += 1

    def add_watermark(self, time: int, idle: bool) -> None:
        """Queue a watermark behind everything written so far. It takes the place of an unsent one that has
        no data behind it, so no more of them can be queued than segments."""
        mark = self._mark
        if mark is not None and mark.overtake(time, idle):
            return
        self._append(mark := Event(EventKind.WATERMARK, time, idle))
        self._mark = mark

    def _append(self, event: Event) -> None:
        if self._open is not None:
            self.finish_open(ends=True)
        self._mark = None
        self._queue.append(event)
        self._notify(self)

    # --- reader (loop thread) ----------------------------------------------------------------

    def attach(self, on_available: Callable[[], None]) -> None:
        """A consumer reads from here now; what an earlier one was told of watermark and ends is told
        again."""
        self.on_available = on_available
        told = [] if self._told is None else [Event(EventKind.WATERMARK, self._told.time, self._told.idle)]
        self._queue.extendleft(reversed([*told, *self._ends]))
        self._events_polled -= len(self._ends)
        self._ends.clear()

    def flush(self) -> bool:
        """The buffer timeout has passed: True if there is something published to be sent."""
        builder = self._open
        if builder is None or not builder.unsent():
            return False
        self.flush_requested = True
        return True

    def _head(self) -> BufferBuilder | Event | None:
        """What a poll would take now; gives finished builders back that were sent in slices."""
        queue = self._queue
        builder = self._open
        while queue:
            head = queue[0]
            if isinstance(head, Event):
                return head
            if head.in_flight:
                return None
            if head.unsent():
                return head
            queue.popleft()
            self._polled += 1
            head.segment.recycle()
            builder = self._open
        # Read before the last look at the queue: the writer queues a builder before it opens the next,
        # so one that was open then cannot be overtaken.
        if self.flush_requested and builder is not None and not builder.in_flight and builder.unsent():
            return builder
        return None

    def next_type(self) -> NextType:
        head = self._head()
        if head is None:
            return NextType.NONE
        return NextType.EVENT if isinstance(head, Event) else NextType.DATA

    def backlog(self) -> int:
        """Finished segments, and the open one if it is to go out: a consumer that keeps no buffers for this
        channel grants credit for nothing else."""
        finished, builder = max(0, self._written - self._polled), self._open
        if self.flush_requested and builder is not None and not builder.in_flight and builder.unsent():
            return finished + 1
        return finished

    def poll(self) -> Slice | None:
        head = self._head()
        if head is None:
            return None
        if isinstance(head, Event):
            self._queue.popleft()
            if head.kind is EventKind.WATERMARK:
                self._told = head
            else:
                self._events_polled += 1
                self._ends.append(head)
            return head.slice()
        return self._slice(head)

    def _slice(self, builder: BufferBuilder) -> Slice:
        final = bool(self._queue) and self._queue[0] is builder
        if final:
            self._queue.popleft()
            self._polled += 1
        else:
            # Reset before the look at what is published: a flush asked for from now on is kept.
            self.flush_requested = False
            self._partial = builder
        length, rows, starts, ends = builder.published
        begin = builder.sent_bytes
        flags = BufferFlags.ENDS if ends else BufferFlags.NONE
        first_start = NO_ELEMENT_START
        if builder.sent_starts < starts:
            flags |= BufferFlags.STARTS
            first_start = builder.starts[builder.sent_starts] - begin
        if first_start:
            flags |= BufferFlags.CONTINUES
        piece = Slice(
            builder.segment.memory,
            SEGMENT_HEADROOM_BYTES + begin,
            length - begin,
            DataType.DATA,
            flags,
            first_start,
            rows - builder.sent_rows,
            self,
            builder,
        )
        builder.sent_bytes, builder.sent_rows, builder.sent_starts = length, rows, starts
        builder.in_flight = True
        return piece

    def slice_released(self, builder: BufferBuilder) -> None:
        """The transport has let go of a slice of ``builder``."""
        builder.in_flight = False
        if builder is not self._partial:
            builder.segment.recycle()
            return
        self._partial = None
        if self._discarded:
            if builder is not self._open:  # else it was written off: its writer may still write to it
                builder.segment.recycle()
        elif self.on_available is not None:
            self.on_available()

    def release(self) -> None:
        """The consumer went away: nothing more is read. What is queued stays until ``discard``."""
        self.on_available = None

    def discard(self, written_off: bool = False) -> None:
        """The partition is over: every segment that the transport does not hold goes back.

        The open segment of a writer that could not be stopped is ``written_off``: it may still be
        written to, so it is never lent again, and the pool promises it to nobody.
        """
        self.release()
        self._discarded = True
        builders = [item for item in self._queue if isinstance(item, BufferBuilder)]
        self._queue.clear()
        builder = self._open
        if builder is not None and written_off:
            builder.segment.write_off()
        elif builder is not None:
            builders.append(builder)
            self._open = None
        for builder in builders:
            if not builder.in_flight:
                builder.segment.recycle()
        self._polled = self._written


class ResultPartition:
    """What one producer subtask writes for one edge.

    Args:
        partition_id: job, edge and producer index.
        first, count: the consumer subtasks that it feeds.
        acquire: gives a segment, waiting for one if need be; raises TaskCancelled.
        notify: tells the loop that a subpartition wants its attention.
        flush_always: publish and send after every element (buffer timeout 0).
    """

    def __init__(
        self,
        partition_id: PartitionId,
        first: int,
        count: int,
        acquire: Callable[[], Segment],
        notify: Callable[[Subpartition], None],
        counters: TaskCounters,
        flush_always: bool = False,
    ) -> None:
        self.id = partition_id
        self.first = first
        self.subpartitions = [Subpartition(first + i, notify) for i in range(count)]
        self._acquire = acquire
        self._counters = counters
        self._flush_always = flush_always

    def subpartition(self, consumer: int) -> Subpartition | None:
        """The one for that consumer subtask; None if this producer does not feed it."""
        position = consumer - self.first
        return self.subpartitions[position] if 0 <= position < len(self.subpartitions) else None

    def write(self, position: int, rows: int, parts: list[Part]) -> None:
        """Write one element, whose bytes are ``parts`` joined, to subpartition number ``position``."""
        subpartition = self.subpartitions[position]
        builder = subpartition.open or self._begin(subpartition, continues=False)
        builder.starts.append(builder.length)
        builder.rows += rows
        total = 0
        for part in parts:
            view = memoryview(part)
            at, size = 0, len(view)
            total += size
            while at < size:
                if builder.length == builder.capacity:
                    subpartition.finish_open(ends=False)
                    self._counters.buffers_out += 1
                    builder = self._begin(subpartition, continues=True)
                at += builder.append(view, at)
        if builder.length == builder.capacity:
            subpartition.finish_open(ends=True)
            self._counters.buffers_out += 1
        else:
            subpartition.publish(self._flush_always)
        self._counters.bytes_out += total
        self._counters.records_out += rows

    def _begin(self, subpartition: Subpartition, continues: bool) -> BufferBuilder:
        builder = BufferBuilder(self._acquire(), continues)
        subpartition.open = builder
        return builder

    def broadcast_event(self, kind: EventKind) -> None:
        """Queue an event behind everything written to every subpartition."""
        for subpartition in self.subpartitions:
            if subpartition.open is not None:
                self._counters.buffers_out += 1
            subpartition.add_event(kind)

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        """Tell every consumer the event time, in microseconds since 1970, behind everything written."""
        for subpartition in self.subpartitions:
            if subpartition.open is not None:
                self._counters.buffers_out += 1
            subpartition.add_watermark(time, idle)

    def backlog(self) -> int:
        return sum(subpartition.backlog() for subpartition in self.subpartitions)
