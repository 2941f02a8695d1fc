"""Partitions that are kept: what is written stays until the job has ended, and goes whole to whoever asks.

The small side of a join, say: a consumer that starts anew has lost it, and would match nothing any more. So
the producer writes its elements into a log, in memory and beyond a bound in a file, from which each view
reads all of them, the first to the last. The consumer gives out what it has of a partition once it has all of
it, and forgets what it has if the producer goes away before: the next attempt of either sends and reads it
once more. Nothing of such a partition is ever lost, and nothing is seen twice. (Flink: a blocking result
partition, which its consumers may read again.)

It carries no watermarks: event time waits for the end of the partition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.errors import LocalProtocolError, ResourceExhausted, ShuffleError, Superseded
from minishuffle.exchange.buffers import Event, Flush, Slice
from minishuffle.exchange.partition import ResultPartition
from minishuffle.exchange.segments import Segment
from minishuffle.exchange.spool import UnnamedFile
from minishuffle.exchange.subpartition import PipelinedView, Subpartition
from minishuffle.ids import FIRST_ATTEMPT, PartitionId
from minishuffle.limits import SEGMENT_HEADROOM_BYTES
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import (
    NO_ELEMENT_START,
    BufferFlags,
    CancelReason,
    DataType,
    EventKind,
    LatencyMarker,
)

__all__ = ["ElementLog", "KeptPartition"]

Part: TypeAlias = "bytes | memoryview"
_STARTS, _CONTINUES, _ENDS = map(int, (BufferFlags.STARTS, BufferFlags.CONTINUES, BufferFlags.ENDS))
_DATA: Final = int(DataType.DATA)


class ElementLog:
    """Elements in their order. One thread appends and any number read, without a lock: an element is there
    once its entry is.

    Args:
        directory: where its file is made; None for the system's temporary directory.
        memory_bytes: how much stays in memory.
    """

    def __init__(self, directory: str | None, memory_bytes: int) -> None:
        self.bytes = 0
        """The size of all elements."""
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._entries: list[tuple[int, bytes | tuple[int, int]]] = []
        """Rows, and the bytes or where in the file they are (position and size)."""
        self._file: UnnamedFile | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, rows: int, parts: list[Part]) -> None:
        """
        Raises:
            ResourceExhausted: it is too much, or the disk is full.
        """
        size = sum(map(len, parts))
        if self.bytes + size > limits.KEPT_BYTES_MAX:
            raise ResourceExhausted(
                f"more than {limits.KEPT_BYTES_MAX:,} bytes of a subtask are kept for those that read "
                "them and may restart: broadcast less, or set restart_strategy to 'none'"
            )
        if self.bytes + size <= self._memory_bytes:
            self._entries.append((rows, b"".join(parts)))
        else:
            try:
                if self._file is None:
                    self._file = UnnamedFile(self._directory)
                at = self._file.append(parts)
            except OSError as error:
                raise ResourceExhausted(
                    f"rows cannot be kept on disk for subtasks that may restart: {error.strerror}; "
                    "make room there, or start the workers with another --state-dir"
                ) from error
            self._entries.append((rows, (at, size)))
        self.bytes += size

    def read(self, number: int) -> tuple[int, bytes]:
        """Rows and bytes of an element."""
        rows, data = self._entries[number]
        if isinstance(data, bytes):
            return rows, data
        assert self._file is not None
        return rows, self._file.read(*data)

    def clear(self) -> None:
        """Forget all of it; its file goes with it."""
        self._entries, self._file, self.bytes = [], None, 0


class KeptSubpartition(Subpartition):
    """What one consumer may read, any number of times; ``log`` may be shared with others."""

    __slots__ = ("capacity", "finished", "log")

    def __init__(
        self, consumer: int, notify: Callable[[Subpartition], None], log: ElementLog, capacity: int
    ) -> None:
        super().__init__(consumer, notify, Flush.AT_ONCE)
        self.log = log
        self.capacity = capacity
        """Payload bytes of a buffer."""
        self.finished = False
        """Nothing more will be written."""

    def attach(
        self,
        generation: int,
        on_available: Callable[[], None],
        on_failed: Callable[[ShuffleError], None] = lambda error: None,
        *,
        attempt: int = FIRST_ATTEMPT,
        whole: bool = False,
    ) -> PipelinedView:
        """A view of everything from the beginning on, instead of any other; it gives bytes in any case."""
        before = self.view
        if before is not None:
            before.end()
        self.view = view = KeptView(self, generation, on_available, on_failed)
        view.attempt = attempt
        if before is not None:
            before.on_failed(Superseded(f"subpartition {self.consumer} was requested again"))
        return view

    def lose(self, reason: CancelReason) -> None:
        """Nothing is freed: the consumer may start anew, also one that has read to the end."""

    def attend(self) -> None:
        self.notified = False
        if self.view is not None:
            self.view.on_available()

    def flush(self) -> bool:
        return False

    def backlog(self) -> int:
        return 0 if self.view is None else self.view.backlog()

    def discard(self, written_off: bool = False) -> None:
        if self.view is not None:
            self.view.end()
        self.log.clear()


class KeptView(PipelinedView):
    """Reads a log from its first element on, in buffers of its own."""

    __slots__ = ("_at", "_ended", "_kept", "_rest", "_sent")

    def __init__(
        self,
        subpartition: KeptSubpartition,
        generation: int,
        on_available: Callable[[], None],
        on_failed: Callable[[ShuffleError], None],
    ) -> None:
        super().__init__(subpartition, generation, [], on_available, on_failed)
        self._kept = subpartition
        self._at = 0
        """Elements that were begun."""
        self._rest = memoryview(b"")
        """What is left of the last of them."""
        self._sent = 0
        """Bytes."""
        self._ended = False

    def end(self) -> None:
        self._kept.view = None

    def next_type(self) -> NextType:
        if not self.current:
            return NextType.NONE
        finished = self._kept.finished  # before the look at the log
        if self._rest or self._at < len(self._kept.log):
            return NextType.DATA
        return NextType.EVENT if finished and not self._ended else NextType.NONE

    def hold(self) -> None:
        """No buffer of it is partial."""

    def backlog(self) -> int:
        left = max(0, self._kept.log.bytes - self._sent) if self.current else 0
        return -(-left // self._kept.capacity)

    def poll(self, data: bool = True) -> Slice | None:
        next_type = self.next_type()
        if next_type is NextType.NONE or (next_type is NextType.DATA and not data):
            return None
        if next_type is NextType.DATA:
            piece = self._fill()
        else:
            self._ended = True
            piece = Event(EventKind.END_OF_PARTITION).slice()
        piece.next_type = self.next_type()
        piece.backlog = self.backlog()
        return piece

    def _fill(self) -> Slice:
        """A buffer with as many elements as fit, and the beginning of another."""
        log, capacity = self._kept.log, self._kept.capacity
        memory = bytearray(SEGMENT_HEADROOM_BYTES + capacity)
        size, rows_begun, first_start = 0, 0, NO_ELEMENT_START
        while size < capacity:
            if not self._rest:
                if self._at == len(log):
                    break
                rows, element = log.read(self._at)
                self._at += 1
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
        self.rows_sent += rows_begun
        self._kept.buffers_out += 1
        piece = Slice(memoryview(memory), SEGMENT_HEADROOM_BYTES, size, _DATA, rows_begun)
        piece.first_start = first_start
        piece.flags = (_CONTINUES if first_start else 0) | (0 if self._rest else _ENDS)
        piece.flags |= 0 if first_start == NO_ELEMENT_START else _STARTS
        return piece


class KeptPartition(ResultPartition):
    """What one producer subtask writes for one edge, and keeps.

    Args:
        shared: every element goes to all consumers, in the order of their positions; it is kept once.
        capacity: payload bytes of a buffer.
        directory: see :class:`ElementLog`.
    """

    def __init__(
        self,
        partition_id: PartitionId,
        consumers: range,
        notify: Callable[[Subpartition], None],
        counters: TaskCounters,
        *,
        shared: bool,
        capacity: int,
        directory: str | None,
    ) -> None:
        super().__init__(partition_id, consumers, _no_segment, notify, counters)
        memory = limits.KEPT_MEMORY_BYTES
        if shared:
            log = ElementLog(directory, memory)
            self._logs = [log] * len(consumers)
        else:
            self._logs = [ElementLog(directory, memory // max(1, len(consumers))) for _ in consumers]
        self._shared = shared
        self._kept = [
            KeptSubpartition(each, notify, log, capacity)
            for each, log in zip(consumers, self._logs, strict=True)
        ]
        self.subpartitions = [*self._kept]

    def skips(self, position: int, rows: int) -> bool:
        """No consumer is gone for good."""
        return False

    def write(self, position: int, rows: int, parts: list[Part]) -> None:
        if position == 0 or not self._shared:
            self._logs[position].append(rows, parts)
        self._counters.bytes_out += sum(map(len, parts))
        self._counters.records_out += rows
        self._notify(self.subpartitions[position])

    def broadcast(self, positions: list[int], rows: int, parts: list[Part]) -> None:
        for position in positions:
            self.write(position, rows, parts)

    def broadcast_event(self, kind: EventKind) -> None:
        """The end of the partition is the end of its data."""
        if kind is EventKind.END_OF_PARTITION:
            for subpartition in self._kept:
                subpartition.finished = True
                self._notify(subpartition)

    def emit_latency(self, marker: LatencyMarker) -> None:
        """What is kept is read at any time, and again: nothing is measured."""

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        """Event time waits for the end of the partition."""


def _no_segment() -> Segment:
    raise LocalProtocolError("a partition that is kept is not written to segments")
