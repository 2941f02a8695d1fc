"""A retained partition, and consumers of it that leave out rows by number; the test takes all turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minishuffle.counters import TaskCounters
from minishuffle.errors import PartitionLost, ShuffleError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.buffers import Flush, Slice
from minishuffle.exchange.elements import Assembler, AssemblyBudget, decode, encode
from minishuffle.exchange.elementstore import ElementStore, StorePlace
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.exchange.retainedlog import RetainedSubpartition, RetainedView
from minishuffle.exchange.retention import RetainedBytes, RetainedStore
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import BARRIER_EVENT, WATERMARK_EVENT, DataType, EventKind
from support.disks import HeldDisk

__all__ = ["CAPACITY", "Consumer", "Producer", "UNREAD", "VERSION", "Waiting"]

CAPACITY = 128
UNREAD = 4 * CAPACITY
VERSION = 3


class Waiting(Exception):
    """The writer would wait."""


def wait(ready: Callable[[], bool]) -> None:
    if not ready():
        raise Waiting


class Producer:
    """A partition, and what its loop and its disk have yet to do."""

    def __init__(
        self,
        consumers: int = 1,
        *,
        memory_bytes: int = 1 << 20,
        limit_bytes: int = 1 << 30,
        version: int = VERSION,
        flushing: Flush = Flush.AT_ONCE,
        first_rows: tuple[int, ...] = (),
        make_store: Callable[[], ElementStore] = lambda: ElementStore("p", StorePlace()),
        waits: Callable[[Callable[[], bool]], None] = wait,
        **options: Any,
    ) -> None:
        self.halves = 0
        self.wakes = 0
        self.full_disks: list[ShuffleError] = []
        self.budget = RetainedBytes(
            limit_bytes, memory_bytes, CAPACITY, on_half=self._half, on_disk_full=self.full_disks.append
        )
        self.disk = HeldDisk()
        self.notified: list[Any] = []
        self.counters = TaskCounters()
        self.lost: list[PartitionLost] = []
        self.store = RetainedStore(self.budget, make_store, keep_bytes=0, wake=self._wake)
        self.partition = RetainedPartition(
            PartitionId(JobId("j1"), 0, 0),
            range(consumers),
            self.notified.append,
            self.counters,
            self.store,
            version=version,
            wait=waits,
            wake=self._wake,
            flushing=flushing,
            capacity=CAPACITY,
            disk=self.disk,
            lost=self.lost.append,
            **{"unread_bytes": UNREAD, **options},
        )
        if first_rows:
            self.partition.begin_at(first_rows)

    def _half(self) -> None:
        self.halves += 1

    def _wake(self) -> None:
        self.wakes += 1

    @property
    def only(self) -> RetainedSubpartition:
        (subpartition,) = self.partition.subpartitions
        return subpartition

    def write(self, rows: list[Any], position: int = 0) -> None:
        if not self.partition.skips(position, len(rows)):
            self.partition.write(position, *encode(Batch(rows)))

    def attend(self) -> None:
        """The loop looks at what has something new."""
        while self.notified:
            self.notified.pop().attend()

    def validate(self) -> None:
        self.store.validate()
        for subpartition in self.partition.subpartitions:
            subpartition.validate()


class Consumer:
    """Reads one subpartition, and leaves out rows by number."""

    def __init__(self, producer: Producer, position: int = 0) -> None:
        self.producer = producer
        self.subpartition = producer.partition.subpartitions[position]
        self.assembler = Assembler(AssemblyBudget(1 << 20))
        self.view: RetainedView | None = None
        self.errors: list[ShuffleError] = []
        self.generation = 0
        self.attempt = 1
        self.next = self.subpartition.first_row
        self.rows: list[Any] = []
        self.events: list[Any] = []
        self.barrier = 0
        self.lent: list[Slice] = []
        """Buffers that were not given back yet."""
        self._at: int | None = None
        """The number of the next row that begins in a buffer."""
        self._row = 0
        """The number of the next row that comes."""

    def attach(self, row: int | None = None, *, version: int = VERSION, whole: bool = False) -> RetainedView:
        self.generation += 1
        self.assembler.clear()
        self._at, self.barrier = None, 0
        self.view = self.subpartition.attach(
            self.generation,
            lambda: None,
            self.errors.append,
            attempt=self.attempt,
            whole=whole,
            version=version,
            row=self.next if row is None else row,
        )
        return self.view

    def poll(self) -> bool:
        """Take one buffer or event, if there is one."""
        view = self.view
        if view is None:
            return False
        kind, backlog = view.next_type(), view.backlog()
        assert backlog or kind is not NextType.DATA
        piece = view.poll()
        if piece is None:
            return False
        if piece.data_type == DataType.EVENT:
            self._take_event(bytes(piece.payload))
            piece.released()
            return True
        self.lent.append(piece)
        if self._at is None:
            assert piece.row <= self.next, "it begins with the element that holds the row"
            assert piece.first_start == 0
            self._row = piece.row
        else:
            assert piece.row == self._at
        self._at = piece.row + piece.rows
        if piece.whole is not None:
            assert piece.row == self._row
            self._take(piece.whole.batch)
            return True
        self.assembler.feed(piece.payload, piece.rows)
        while (element := self.assembler.next()) is not None:
            form, rows, payload = element
            self._take(decode(form, rows, payload))
        return True

    def _take(self, batch: Batch) -> None:
        found = batch.payload if isinstance(batch.payload, list) else batch.payload.column(0).to_pylist()
        row, self._row = self._row, self._row + len(found)
        assert row <= self.next
        self.rows += found[self.next - row :]
        self.next = max(self.next, self._row)

    def _take_event(self, payload: bytes) -> None:
        if payload[0] == EventKind.WATERMARK:
            self.events.append(WATERMARK_EVENT.unpack(payload)[2])
        elif payload[0] == EventKind.BARRIER:
            self.barrier = BARRIER_EVENT.unpack(payload)[2]
            self.events.append(("barrier", self.barrier))
        else:
            self.events.append(EventKind(payload[0]))

    def give_back(self) -> None:
        for piece in self.lent:
            piece.released()
        self.lent.clear()

    def read(self) -> list[Any]:
        """All that there is; gives what is new."""
        before = len(self.rows)
        while self.poll() or self.producer.disk.waiting:
            if self.producer.disk.waiting:
                self.producer.disk.turn()
        self.give_back()
        return self.rows[before:]
