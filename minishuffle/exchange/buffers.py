"""Send buffers: a segment that is being filled, and the pieces of it that go out."""

from __future__ import annotations

from typing import Protocol

from minishuffle.exchange.segments import Segment
from minishuffle.limits import SEGMENT_HEADROOM_BYTES
from minishuffle.wire.frames import NO_ELEMENT_START, WATERMARK_EVENT, BufferFlags, DataType, EventKind

__all__ = ["BufferBuilder", "Event", "Slice", "SliceOwner"]


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
