"""Send buffers: a segment that is being filled, the slices of it that go out, and events.

The writer (task thread) appends and publishes; the reader (loop thread) sends what is published. Each field
is written by one side only. (Flink: ``BufferBuilder``, ``BufferConsumer``.)
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from minishuffle.exchange.segments import LooseSegment, Segment
from minishuffle.limits import SEGMENT_HEADROOM_BYTES
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import (
    BARRIER_EVENT,
    NO_ELEMENT_START,
    WATERMARK_EVENT,
    DataType,
    EventKind,
    LatencyMarker,
)

__all__ = ["BufferBuilder", "Event", "EventState", "Flush", "Slice", "SliceOwner", "WholeBatch"]


_NONE = NextType.NONE
"""Looked up once: it is needed for each slice."""


class Flush(Enum):
    """When data leave of a segment that is not full."""

    ON_REQUEST = 0
    """When a flush asks for it, and that may be never."""
    AT_ONCE = 1
    ADAPTIVE = 2
    """While the consumer has nothing else to read; until then they gather."""


class BufferBuilder:
    """A segment that is being written or waits to be sent.

    Invariants: ``sent_bytes ≤ published bytes ≤ capacity``; ``starts`` ascends.

    Args:
        capacity: bytes that are put into it at most, if there is room; None: until it is full.
        first_row: the number of the first row that begins in it.
    """

    __slots__ = (
        "capacity",
        "drained",
        "first_row",
        "flush_requested",
        "holder",
        "last_rows",
        "length",
        "published",
        "rows",
        "segment",
        "sent_bytes",
        "sent_rows",
        "sent_starts",
        "shared",
        "starts",
    )
    next_type = NextType.DATA
    segments = 1
    """For how many segments it stands in the queue."""

    def __init__(self, segment: Segment, capacity: int | None = None, first_row: int = 0) -> None:
        self.segment = segment
        self.first_row = first_row
        room = len(segment.memory) - SEGMENT_HEADROOM_BYTES
        self.capacity = room if capacity is None else min(room, capacity)
        self.shared = segment.readers > 1
        """Other subpartitions have builders of the same segment, which says the same to all of them."""
        # The writer's.
        self.length = 0
        self.rows = 0
        self.last_rows = 0
        """Rows of the element that began last."""
        self.starts: list[int] = []
        self.published = (0, 0, 0, True)
        """(bytes, rows begun, elements begun, ends with an element) that the reader may send."""
        # The reader's.
        self.sent_bytes = 0
        self.sent_rows = 0
        self.sent_starts = 0
        self.holder: SliceOwner | None = None
        """The view whose slice of this segment the transport holds."""
        self.flush_requested = False
        """It is to be sent as far as it is published, full or not."""
        self.drained = False
        """It has left its subpartition: the segment is recycled once no slice of it is held."""

    def begin(self, rows: int) -> None:
        """(Writer.) An element of ``rows`` rows begins here."""
        self.starts.append(self.length)
        self.rows += rows
        self.last_rows = rows

    def append(self, part: memoryview, at: int) -> int:
        """(Writer.) Copy from ``part[at:]`` what fits; returns how much that was."""
        length = self.length
        room, size = self.capacity - length, len(part) - at
        if size > room:
            size = room
            part = part[at : at + size]
        elif at:
            part = part[at:]
        begin = SEGMENT_HEADROOM_BYTES + length
        self.segment.memory[begin : begin + size] = part
        self.length = length + size
        return size

    def follow(self, written: BufferBuilder) -> None:
        """(Writer.) Say what ``written``, a builder of the same segment, says; nothing is published yet."""
        self.starts = written.starts  # it only grows, and nobody reads beyond what is published
        self.length, self.rows, self.last_rows = written.length, written.rows, written.last_rows

    def publish(self, ends: bool = True) -> None:
        self.published = (self.length, self.rows, len(self.starts), ends)

    def unsent(self) -> bool:
        return self.published[0] > self.sent_bytes

    def drain(self) -> None:
        """(Reader.) Nothing more of it is to be sent."""
        self.drained = True
        if self.holder is None:
            self.segment.recycle()

    def skip_rest(self) -> bool:
        """(Reader.) Leave out what is here of an element whose beginning is not; True if that ends here."""
        length, rows, starts, ends = self.published
        if starts > self.sent_starts:
            self.sent_bytes = self.starts[self.sent_starts]
            return True
        ends = ends and length > self.sent_bytes
        self.sent_bytes, self.sent_rows = length, rows
        self.flush_requested = False  # it was for what is left out; the writer notes what follows by itself
        return ends

    def leave_out(self) -> tuple[int, bool]:
        """(Reader.) Leave out what is published and not sent; gives the rows that begin in it, and whether it
        ends in the middle of an element."""
        length, rows, starts, ends = self.published
        left_out = rows - self.sent_rows
        self.sent_bytes, self.sent_rows, self.sent_starts = length, rows, starts
        self.flush_requested = False  # as in skip_rest
        return left_out, not ends


class WholeBatch:
    """A batch that a consumer in this process gets as it is: one element, in no segment.

    It stands in the queue between builders, for as many segments as its bytes would fill.

    Args:
        batch: what the consumer gets.
        rows, size: how many it has, and how many bytes.
        segment_bytes: payload bytes of a segment.
        parts: gives its bytes as an element, for a consumer that turns out to be in another process.
        on_left: called on the loop when it has left the queue.
        on_freed: called once nobody in the exchange holds it any more; more often if the writer cannot be
            stopped.
    """

    __slots__ = (
        "_on_freed",
        "_on_left",
        "_parts",
        "_segment_bytes",
        "batch",
        "first_row",
        "rows",
        "segments",
        "size",
    )
    next_type = NextType.DATA

    def __init__(
        self,
        batch: Any,
        rows: int,
        size: int,
        segment_bytes: int,
        *,
        parts: Callable[[Any], list[bytes | memoryview]],
        on_left: Callable[[], None] = lambda: None,
        on_freed: Callable[[WholeBatch], None] = lambda whole: None,
    ) -> None:
        self.batch = batch
        self.first_row = 0
        """(Writer.) The number of its first row; set when it is queued."""
        self.rows = rows
        self.size = size
        self.segments = max(1, -(-size // segment_bytes))
        self._segment_bytes = segment_bytes
        self._parts = parts
        self._on_left = on_left
        self._on_freed = on_freed

    def unsent(self) -> bool:
        """It leaves the queue when it is handed over."""
        return True

    def skip_rest(self) -> bool:
        """An element begins here: nothing of another is left out."""
        return True

    def leave(self) -> None:
        """(Reader.) It has left the queue."""
        self._on_left()

    def free(self) -> None:
        """The consumer has taken the batch, or nobody will."""
        self._on_freed(self)

    def leave_out(self) -> tuple[int, bool]:
        """(Reader.) See :meth:`BufferBuilder.leave_out`."""
        self.leave()
        self.free()
        return self.rows, False

    def in_segments(self) -> list[BufferBuilder]:
        """(Reader.) Its bytes instead of it, as a writer would have written them."""
        builders = [BufferBuilder(LooseSegment(self._segment_bytes), first_row=self.first_row)]
        builders[0].begin(self.rows)
        for part in self._parts(self.batch):
            view = memoryview(part)
            at = 0
            while at < len(view):
                if builders[-1].length == self._segment_bytes:
                    builders[-1].publish(ends=False)
                    segment, behind = LooseSegment(self._segment_bytes), self.first_row + self.rows
                    builders.append(BufferBuilder(segment, first_row=behind))
                at += builders[-1].append(view, at)
        builders[-1].publish()
        return builders


class SliceOwner(Protocol):
    """Whoever a slice was polled from."""

    def slice_released(self, builder: Any) -> None:
        """Gets back what the slice was made of."""


class Slice:
    """What a poll gives: a piece of a segment, a whole batch or an event: a ``protocol.channel.Outgoing``."""

    __slots__ = (
        "backlog",
        "builder",
        "data_type",
        "first_start",
        "flags",
        "memory",
        "next_type",
        "row",
        "rows",
        "shared",
        "size",
        "start",
        "view",
        "whole",
    )

    def __init__(self, memory: memoryview, start: int, size: int, data_type: int, rows: int) -> None:
        self.memory = memory
        self.start = start
        self.size = size
        self.data_type = data_type
        self.rows = rows
        self.row = 0
        """The number of the first row that begins here, or of the next if none does."""
        self.shared = False
        self.flags = 0
        self.first_start = NO_ELEMENT_START
        self.next_type = _NONE
        self.backlog = 0
        self.view: SliceOwner | None = None
        """Gets ``builder`` back, if the memory is a segment's."""
        self.builder: Any = None
        self.whole: WholeBatch | None = None
        """The batch, instead of memory."""

    @property
    def payload(self) -> memoryview:
        return self.memory[self.start : self.start + self.size]

    def released(self) -> None:
        """The transport (or the local consumer) has let go; a finished segment is recycled."""
        builder, view = self.builder, self.view
        if builder is None or view is None:
            if self.whole is not None:
                self.whole.free()
            return
        self.builder = None
        view.slice_released(builder)


class Event:
    """An event in a subpartition's queue. A watermark or a barrier that is not ``taken`` yet may be overtaken
    by a newer one: the writer changes it in place.

    Args:
        barrier: the number of a barrier; ``blocking``: its channel gives nothing more until it is resumed.
    """

    __slots__ = ("barrier", "blocking", "given", "idle", "kind", "marker", "row", "taken", "time")
    next_type = NextType.EVENT

    def __init__(
        self,
        kind: EventKind,
        time: int = 0,
        idle: bool = False,
        marker: LatencyMarker | None = None,
        *,
        barrier: int = 0,
        blocking: bool = False,
    ) -> None:
        self.kind = kind
        self.barrier = barrier
        self.blocking = blocking
        self.given = 0
        """(Reader.) The number of the barrier as it went out last: the writer may change that meanwhile."""
        self.marker = marker
        self.row = 0
        """(Writer.) The number of the next row behind it; set when it is queued."""
        self.time = time
        self.idle = idle
        self.taken = False

    def overtake(self, time: int, idle: bool) -> bool:
        """(Writer.) Say something newer instead; False if the reader may have taken it before."""
        self.time, self.idle = time, idle
        return not self.taken

    def renumber(self, barrier: int) -> bool:
        """(Writer.) Be that barrier instead; False if the reader may have taken it before."""
        self.barrier = barrier
        return not self.taken

    def slice(self) -> Slice:
        """(Reader.) The event as it goes out."""
        self.taken = True  # before the look at what it says: see overtake
        if self.kind is EventKind.WATERMARK:
            payload = WATERMARK_EVENT.pack(self.kind, self.idle, self.time)
        elif self.kind is EventKind.BARRIER:
            self.given = self.barrier
            payload = BARRIER_EVENT.pack(self.kind, self.blocking, self.given)
        elif self.marker is not None:
            payload = self.marker.pack()
        else:
            payload = bytes((self.kind,))
        memory = memoryview(bytearray(SEGMENT_HEADROOM_BYTES) + payload)
        piece = Slice(memory, SEGMENT_HEADROOM_BYTES, len(payload), DataType.EVENT, 0)
        piece.row = self.row
        return piece


class EventState:
    """What the events that have left a subpartition's queue say; each new view begins with it. A latency
    marker, or a barrier that does not block, says nothing that lasts. (Reader.)"""

    __slots__ = ("_barrier", "_ends", "_watermark", "barriers_over", "resumed")

    def __init__(self) -> None:
        self.barriers_over = self.resumed = 0
        """Barriers up to these have ended, or were resumed: they hold nothing back."""
        self._watermark: Event | None = None
        """The last one."""
        self._barrier: Event | None = None
        """The last that blocks, until it is resumed."""
        self._ends: list[Event] = []

    def take(self, event: Event) -> None:
        event.taken = True  # before anybody looks at what it says: see Event.overtake
        if event.kind is EventKind.WATERMARK:
            self._watermark = event
        elif event.kind is EventKind.BARRIER:
            if event.blocking:
                self._barrier = event
        elif event.marker is None:
            self._ends.append(event)

    def resume(self, barrier: int) -> None:
        """What stands behind that barrier is wanted."""
        if self._barrier is not None and self._barrier.barrier <= barrier:
            self._barrier = None

    @property
    def ends(self) -> int:
        """How many there are, but for watermarks and barriers."""
        return len(self._ends)

    def events(self) -> list[Event]:
        """In the order in which a consumer is to receive them."""
        mark = self._watermark
        marks = [] if mark is None else [Event(EventKind.WATERMARK, mark.time, mark.idle)]
        barriers = [] if self._barrier is None else [self._barrier]
        return marks + barriers + self._ends
