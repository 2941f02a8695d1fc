"""Blocking partitions: what is written is stored until the job has ended, and each view reads all of it.

What an exchange of the kind ``blocking`` carries, or the small side of a join: a consumer that starts anew
has lost it. So the producer stores its elements, in memory and beyond a bound in a file, from where each view
reads all of them, the first to the last. The consumer gives out what it has of a partition once it has all of
it, and forgets what it has if the producer goes away before: the next attempt of either sends and reads it
once more. Nothing of such a partition is ever lost, and nothing is seen twice. One with a block that is not
what was written is as if its worker were lost: its producer runs again. (Flink:
``BoundedBlockingSubpartition``, whose views begin once it is finished; here they begin at once, and what was
written is on its way while more is.)

What is broadcast is stored once, in one log that all consumers read. Files are written by the task and read
by threads that may wait for the disk; a view whose next element is not in memory yet has nothing to poll, and
is woken once it is.

It carries no watermarks: event time waits for the end of the partition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

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
from minishuffle.exchange.buffers import Event, Slice
from minishuffle.exchange.elements import Part
from minishuffle.exchange.elementstore import ElementLog, ElementStore, StoredElement
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.exchange.partition import Attended, ProducerLink, SubpartitionState
from minishuffle.exchange.rowtaps import RowTap
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

__all__ = ["BlockingPartition", "BlockingView", "DiskReads"]

_STARTS, _CONTINUES, _ENDS = map(int, (BufferFlags.STARTS, BufferFlags.CONTINUES, BufferFlags.ENDS))
_DATA: Final = int(DataType.DATA)
_Found = TypeVar("_Found")


class DiskReads(Protocol):
    """Threads that may wait for a disk."""

    def run(self, read: Callable[[], _Found], done: Callable[[_Found | ShuffleError], None]) -> None:
        """(Loop.) Have a thread call ``read``, and then the loop ``done`` with what it gave or raised."""


@dataclass(slots=True, kw_only=True)
class BlockingServices:
    """What the subpartitions of a partition share. They do not hold the partition itself, which is gone once
    nobody holds it: one is made for each snapshot, and the garbage collector seldom runs."""

    name: str
    """The name of the partition."""
    capacity: int
    """Payload bytes of a buffer."""
    disk: DiskReads
    read_bytes: int
    """What a view asks the disk for at once; an element at the least."""
    lose: Callable[[PartitionLost], None]
    """(Loop.) What was stored is not what was written."""
    finished: bool = False
    """(Writer.) Nothing more will be written."""


class BlockingPartition:
    """What one producer subtask writes for one edge, and stores: a :class:`ResultPartition`.

    Invariants: what is written before :meth:`finish` is polled by every view, in its order, and then the end;
    what a view has read ahead from the disk is less than twice ``read_bytes`` and two elements.

    Args:
        notify: tells the loop that a subpartition wants its attention.
        shared: every element goes to all consumers, and is stored once.
        capacity: payload bytes of a buffer.
        disk: reads what is not in memory.
        lost: called once if what was stored cannot be read: no view brings it any more.
    """

    def __init__(
        self,
        partition_id: PartitionId,
        consumers: range,
        notify: Callable[[Attended], None],
        counters: TaskCounters,
        store: ElementStore,
        *,
        shared: bool,
        capacity: int,
        disk: DiskReads,
        lost: Callable[[PartitionLost], None] = lambda error: None,
    ) -> None:
        self.id = partition_id
        self.hot_keys = HotKeys()
        self.taps: tuple[RowTap, ...] = ()
        self.services = BlockingServices(
            name=str(partition_id),
            capacity=capacity,
            disk=disk,
            read_bytes=limits.BLOCKS_READ_AHEAD_BYTES // (2 * max(1, len(consumers))),
            lose=self.lose,
        )
        self._first = consumers.start
        self._notify = notify
        self._counters = counters
        self._store = store
        self._shared = shared
        self._released = False
        self._written_off = False
        self._on_lost = lost
        self._lost = False
        logs = [ElementLog(store)] * len(consumers) if shared else [ElementLog(store) for _ in consumers]
        self.subpartitions = [
            BlockingSubpartition(self.services, each, log) for each, log in zip(consumers, logs, strict=True)
        ]

    # --- writer (task thread) ----------------------------------------------------------------

    def skips(self, position: int, rows: int) -> bool:
        """No consumer is gone for good. Raises TaskCancelled: the task was abandoned."""
        if self._written_off:
            raise TaskCancelled("the task was abandoned")
        return False

    def hand_over(self, position: int, batch: Batch) -> bool:
        """What is stored is bytes."""
        return False

    def write(self, position: int, rows: int, parts: list[Part]) -> None:
        """Store one element for one consumer.

        Raises:
            ResourceExhausted: it is too much, or the disk is full.
            LocalProtocolError: the partition is finished, or goes to all consumers.
        """
        if self._shared and len(self.subpartitions) > 1:
            raise LocalProtocolError(f"partition {self.id} goes to all consumers")
        self._append(position, rows, parts)
        self._count_written([position], rows, parts)

    def broadcast(self, positions: list[int], rows: int, parts: list[Part]) -> None:
        """Store one element for several consumers, all of them if it is shared. Raises as :meth:`write`."""
        for position in positions[:1] if self._shared else positions:
            self._append(position, rows, parts)
        self._count_written(positions, rows, parts)

    def _append(self, position: int, rows: int, parts: list[Part]) -> None:
        if self.services.finished:
            raise LocalProtocolError(f"partition {self.id} is finished")
        if not self._released:
            self.subpartitions[position].log.append(rows, parts)
            if self._released:  # meanwhile: this thread may just have made the file
                self._store.forget()
                self.subpartitions[position].log.clear()

    def _count_written(self, positions: list[int], rows: int, parts: list[Part]) -> None:
        self._counters.bytes_out += sum(map(len, parts)) * len(positions)
        self._counters.records_out += rows * len(positions)
        for position in positions:
            self._notify(self.subpartitions[position])

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        """Event time waits for the end of the partition."""

    def broadcast_barrier(self, barrier: int, consumers: Collection[int] | None = None) -> None:
        """What is stored is in nobody's way."""

    def emit_latency(self, marker: LatencyMarker) -> None:
        """What is stored is read at any time, and again: nothing is measured."""

    def finish(self) -> None:
        self.services.finished = True
        for subpartition in self.subpartitions:
            self._notify(subpartition)

    # --- loop --------------------------------------------------------------------------------

    def subpartition(self, consumer: int) -> BlockingSubpartition | None:
        position = consumer - self._first
        return self.subpartitions[position] if 0 <= position < len(self.subpartitions) else None

    def flush(self) -> None:
        """What is stored goes out at once."""

    def fence(self, consumer: int, attempt: int) -> None:
        subpartition = self.subpartition(consumer)
        view = subpartition.view if subpartition is not None else None
        if view is not None and view.attempt < attempt:
            view.fail(Superseded(f"attempt {view.attempt} of consumer {consumer} was replaced by {attempt}"))

    def close(self, consumers: Iterable[int]) -> None:
        """Nothing: a consumer that starts anew reads all of it."""

    def is_read(self, but: Collection[int]) -> bool:
        """It is made anew elsewhere."""
        return True

    def end_barriers(self, barrier: int) -> None:
        """There are none."""

    def fail(self, error: ShuffleError) -> None:
        for subpartition in self.subpartitions:
            subpartition.fail(error)

    def lose(self, error: PartitionLost) -> None:
        """A block is not what was written: nobody gets any of it."""
        self.fail(error)
        if not self._lost:
            self._lost = True
            self._on_lost(error)

    def release(self, written_off: bool) -> None:
        self._released = True  # first: the writer looks at it last
        self._written_off = written_off
        self.services.lose = _lose_nothing  # it does not hold itself any more
        for subpartition in self.subpartitions:
            subpartition.release()
        self._store.forget()

    def backlog(self) -> int:
        return sum(subpartition.backlog() for subpartition in self.subpartitions)

    # --- both --------------------------------------------------------------------------------

    def rows_dropped(self) -> dict[str, int]:
        """None: they are sent again."""
        return {}

    def buffers_out(self) -> int:
        return sum(subpartition.buffers_out for subpartition in self.subpartitions)


class BlockingSubpartition:
    """What one consumer may read, any number of times; ``log`` may be shared with others."""

    __slots__ = ("buffers_out", "consumer", "error", "log", "notified", "services", "view")

    def __init__(self, services: BlockingServices, consumer: int, log: ElementLog) -> None:
        self.services = services
        self.consumer = consumer
        self.log = log
        self.buffers_out = 0
        """Buffers with data that were handed to the consumer."""
        self.notified = False
        self.error: ShuffleError | None = None
        self.view: BlockingView | None = None

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
    ) -> BlockingView:
        """A view of everything from the beginning on, instead of any other; it gives bytes in any case."""
        before = self.view
        self.view = view = BlockingView(self, generation, on_available, on_failed, attempt=attempt)
        if before is not None:
            before.on_failed(Superseded(f"subpartition {self.consumer} was requested again"))
        return view

    def attend(self) -> None:
        self.notified = False
        if self.view is not None:
            self.view.on_available()

    def fail(self, error: ShuffleError) -> None:
        """The producer has failed: tell the consumer, if there is one."""
        self.error = error
        if self.view is not None:
            self.view.fail(error)

    def release(self) -> None:
        """Nothing is stored any more. (Flink: a view of a partition that was released is not created.)"""
        self.view = None
        self.log.clear()
        if self.error is None:
            self.error = PartitionNotFound(f"partition {self.services.name} was released")

    def backlog(self) -> int:
        return 0 if self.view is None else self.view.backlog()

    def state(self) -> SubpartitionState:
        return SubpartitionState()


class BlockingView:
    """Reads a log from its first element on, in buffers of its own: a :class:`PartitionView`."""

    __slots__ = (
        "_at",
        "_ended",
        "_read",
        "_read_bytes",
        "_reading",
        "_rest",
        "_sent",
        "_subpartition",
        "attempt",
        "channel",
        "generation",
        "link",
        "on_available",
        "on_failed",
        "rows_sent",
        "rows_skipped",
    )

    def __init__(
        self,
        subpartition: BlockingSubpartition,
        generation: int,
        on_available: Callable[[], None],
        on_failed: Callable[[ShuffleError], None],
        *,
        attempt: int,
    ) -> None:
        self.generation = generation
        self.attempt = attempt
        self.channel: ProducerChannel | None = None
        self.link: ProducerLink | None = None
        self.on_available = on_available
        self.on_failed = on_failed
        self.rows_sent = 0
        self.rows_skipped = 0
        """None ever: the next view sends all of it."""
        self._subpartition = subpartition
        self._at = 0
        """Elements of the log that are in memory here, or were."""
        self._read: deque[tuple[int, bytes]] = deque()
        """Rows and bytes of those that were read from the disk and not begun."""
        self._read_bytes = 0
        self._reading = False
        """The disk was asked for more."""
        self._rest = memoryview(b"")
        """What is left of the element that was begun last."""
        self._sent = 0
        """Bytes."""
        self._ended = False

    @property
    def current(self) -> bool:
        return self._subpartition.view is self

    def release(self, reason: CancelReason) -> None:
        """The consumer went away: nothing is freed, it may start anew, also if it has read to the end."""
        if self.current:
            self._subpartition.view = None

    def fail(self, error: ShuffleError) -> None:
        if self.current:
            self._subpartition.view = None
            self.on_failed(error)

    def resize(self, size: int) -> None:
        """What is stored gets no older while it waits: buffers are full."""

    def resume(self, barrier: int) -> None:
        """No barrier blocks it."""

    def make_stable(self, version: int, row: int) -> None:
        """Nothing is retained for a snapshot."""

    def hold(self) -> None:
        """No buffer of it is partial."""

    def next_type(self) -> NextType:
        """Also asks the disk for what is next, if that is there and not in memory."""
        if not self.current or self._subpartition.error is not None:
            return NextType.NONE
        finished = self._subpartition.services.finished  # before the look at the log
        if self._rest or self._read:
            return NextType.DATA
        if self._reading:
            return NextType.NONE
        elements = self._subpartition.log.elements
        if self._at < len(elements):
            if elements[self._at].data is not None:
                return NextType.DATA
            self._read_ahead()
            return NextType.NONE
        return NextType.EVENT if finished and not self._ended else NextType.NONE

    def backlog(self) -> int:
        """Buffers, also of what is not in memory yet."""
        left = max(0, self._subpartition.log.bytes - self._sent) if self.current else 0
        return -(-left // self._subpartition.services.capacity)

    def poll(self, data: bool = True) -> Slice | None:
        next_type = self.next_type()
        if next_type is NextType.NONE or (next_type is NextType.DATA and not data):
            return None
        if next_type is NextType.DATA:
            piece = self._fill()
        else:
            self._ended = True
            piece = Event(EventKind.END_OF_PARTITION).slice()
            piece.row = self.rows_sent
        piece.next_type = self.next_type()
        piece.backlog = self.backlog()
        return piece

    # --- what it reads ---------------------------------------------------------------------------

    def _fill(self) -> Slice:
        """A buffer with as many elements as fit, and the beginning of another."""
        capacity = self._subpartition.services.capacity
        memory = bytearray(SEGMENT_HEADROOM_BYTES + capacity)
        size, rows_begun, first_start = 0, 0, NO_ELEMENT_START
        while size < capacity:
            if not self._rest:
                found = self._next()
                if found is None:
                    break
                rows, element = found
                self._rest = memoryview(element)
                rows_begun += rows
                if first_start == NO_ELEMENT_START:
                    first_start = size
            length = min(len(self._rest), capacity - size)
            begin = SEGMENT_HEADROOM_BYTES + size
            memory[begin : begin + length] = self._rest[:length]
            self._rest = self._rest[length:]
            size += length
        self._sent += size
        row = self.rows_sent
        self.rows_sent += rows_begun
        self._subpartition.buffers_out += 1
        piece = Slice(memoryview(memory), SEGMENT_HEADROOM_BYTES, size, _DATA, rows_begun)
        piece.row, piece.first_start = row, first_start
        piece.flags = (_CONTINUES if first_start else 0) | (0 if self._rest else _ENDS)
        piece.flags |= 0 if first_start == NO_ELEMENT_START else _STARTS
        return piece

    def _next(self) -> tuple[int, bytes] | None:
        """Rows and bytes of the next element; None if it is not there, or not in memory."""
        if self._read:
            rows, data = self._read.popleft()
            self._read_bytes -= len(data)
            if not self._reading and self._read_bytes < self._subpartition.services.read_bytes:
                self._read_ahead()
            return rows, data
        elements = self._subpartition.log.elements
        if self._reading or self._at == len(elements):
            return None
        element = elements[self._at]
        if element.data is None:
            return None
        self._at += 1
        return element.rows, element.data

    def _read_ahead(self) -> None:
        """Ask the disk for the elements from ``_at`` on that are there, up to one that is in memory."""
        subpartition = self._subpartition
        elements, services = subpartition.log.elements, subpartition.services
        wanted: list[StoredElement] = []
        size = 0
        while self._at < len(elements) and size < max(1, services.read_bytes):
            element = elements[self._at]
            if element.data is not None:
                break
            wanted.append(element)
            size += element.size
            self._at += 1
        if wanted:
            self._reading = True
            services.disk.run(partial(_read_all, subpartition.log.store, wanted), self._on_read)

    def _on_read(self, found: list[tuple[int, bytes]] | ShuffleError) -> None:
        self._reading = False
        if isinstance(found, PartitionLost):
            self._subpartition.services.lose(found)
        elif isinstance(found, ShuffleError):
            self.fail(found)
        elif self.current:
            self._read.extend(found)
            self._read_bytes += sum(len(data) for _, data in found)
            self.on_available()


def _lose_nothing(error: PartitionLost) -> None:
    """What is released is needed no more."""


def _read_all(store: ElementStore, elements: list[StoredElement]) -> list[tuple[int, bytes]]:
    """(A thread for the disk.) Rows and bytes of each."""
    return [(element.rows, store.read(element)) for element in elements]
