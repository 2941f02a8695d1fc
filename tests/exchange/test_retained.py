"""Retained partitions: each row once for a consumer that leaves out rows by number, whatever breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minishuffle.counters import TaskCounters
from minishuffle.errors import PartitionLost, ShuffleError, Superseded
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.buffers import Flush, Slice
from minishuffle.exchange.elements import Assembler, AssemblyBudget, decode, encode
from minishuffle.exchange.elementstore import ElementStore, StorePlace
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.exchange.retainedlog import RetainedSubpartition, RetainedView
from minishuffle.exchange.retention import RetainedBytes, RetainedStore
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import (
    BARRIER_EVENT,
    WATERMARK_EVENT,
    CancelReason,
    DataType,
    EventKind,
    LatencyMarker,
)
from support.disks import HeldDisk

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
            version=VERSION,
            first_rows=first_rows,
            wait=waits,
            wake=self._wake,
            flushing=flushing,
            capacity=CAPACITY,
            unread_bytes=UNREAD,
            disk=self.disk,
            lost=self.lost.append,
            **options,
        )

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
        self._row: int | None = None
        """The number of the first row of the element under way."""

    def attach(self, row: int | None = None, *, version: int = VERSION, whole: bool = False) -> RetainedView:
        self.generation += 1
        self.assembler.clear()
        self._at, self._row, self.barrier = None, None, 0
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
        else:
            assert piece.row == self._at
        self._at = piece.row + piece.rows
        if piece.whole is not None:
            self._take(piece.row, piece.whole.batch)
            return True
        self.assembler.feed(piece.payload, piece.rows)
        row = piece.row if self._row is None else self._row
        while (element := self.assembler.next()) is not None:
            form, rows, payload = element
            self._take(row, decode(form, rows, payload))
            row += rows
        self._row = row if self.assembler.partial else None
        return True

    def _take(self, row: int, batch: Batch) -> None:
        found = batch.payload if isinstance(batch.payload, list) else batch.payload.column(0).to_pylist()
        if row <= self.next:
            self.rows += found[self.next - row :]
            self.next = max(self.next, row + len(found))
        else:
            raise AssertionError(f"row {row} comes where {self.next} was expected")

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


# --- a machine ------------------------------------------------------------------------------------


class Replay(RuleBasedStateMachine):
    """Two consumers of a partition that is broadcast to or not, in memory, on disk or both."""

    @initialize(
        memory=st.sampled_from([0, 3_000, 1 << 20]),
        first=st.sampled_from([0, 7]),
        broadcast=st.booleans(),
        flushing=st.sampled_from(list(Flush)),
    )
    def begin(self, memory: int, first: int, broadcast: bool, flushing: Flush) -> None:
        self.producer = Producer(
            2, memory_bytes=memory, flushing=flushing, first_rows=(first, first + 5), waits=lambda ready: None
        )
        self.broadcast = broadcast
        self.consumers = [Consumer(self.producer, 0), Consumer(self.producer, 1)]
        self.starts = [first, first + 5]
        self.written: list[list[Any]] = [[], []]
        self.mark = 0
        self.barrier = 0
        self.ended = False
        self.number = 0

    @precondition(lambda self: not self.ended)
    @rule(rows=st.integers(1, 4), size=st.sampled_from([0, 0, 0, 30, 400]), to=st.integers(0, 1))
    def write(self, rows: int, size: int, to: int) -> None:
        batch = [f"{self.number + row}" + "x" * size for row in range(rows)]
        self.number += rows
        if self.broadcast:
            self.producer.partition.broadcast([0, 1], *encode(Batch(batch)))
            for written in self.written:
                written += batch
        else:
            self.producer.write(batch, to)
            self.written[to] += batch

    @precondition(lambda self: not (self.ended or self.broadcast))
    @rule(rows=st.integers(1, 40), to=st.integers(0, 1))
    def hand_over(self, rows: int, to: int) -> None:
        values = [str(self.number + row) for row in range(rows)]
        batch = Batch(pa.record_batch({"value": values}))
        self.number += rows
        if not self.producer.partition.hand_over(to, batch):
            self.producer.partition.write(to, *encode(batch))
        self.written[to] += values

    @precondition(lambda self: not self.ended)
    @rule()
    def watermark(self) -> None:
        self.mark += 1
        self.producer.partition.broadcast_watermark(self.mark, False)

    @precondition(lambda self: not self.ended)
    @rule()
    def marker(self) -> None:
        self.producer.partition.emit_latency(LatencyMarker(0, 0, 0))

    @precondition(lambda self: not self.ended)
    @rule(ends=st.booleans())
    def put_barrier(self, ends: bool) -> None:
        self.barrier += 1
        self.producer.partition.broadcast_barrier(self.barrier)
        if ends:
            self.producer.partition.end_barriers(self.barrier)

    @precondition(lambda self: not self.ended)
    @rule()
    def end(self) -> None:
        self.producer.partition.finish()
        self.ended = True

    @rule(which=st.integers(0, 1), polls=st.sampled_from([1, 2, 100]), keeps=st.booleans())
    def read(self, which: int, polls: int, keeps: bool) -> None:
        consumer = self.consumers[which]
        for _ in range(polls):
            consumer.poll()
        if not keeps:
            consumer.give_back()
        if consumer.barrier and consumer.view is not None:
            consumer.view.resume(consumer.barrier)

    @rule()
    def turn_disk(self) -> None:
        if self.producer.disk.waiting:
            self.producer.disk.turn()

    @rule()
    def flush(self) -> None:
        self.producer.partition.flush()

    @rule(which=st.integers(0, 1), whole=st.booleans(), reason=st.sampled_from([None, *CancelReason]))
    def attach(self, which: int, whole: bool, reason: CancelReason | None) -> None:
        """The link breaks, and there is another; or there is another at once."""
        consumer = self.consumers[which]
        if consumer.view is not None and reason is not None:
            consumer.view.release(reason)
        consumer.attach(whole=whole)

    @rule(which=st.integers(0, 1), reason=st.sampled_from(list(CancelReason)))
    def lose(self, which: int, reason: CancelReason) -> None:
        consumer = self.consumers[which]
        if consumer.view is not None:
            consumer.view.release(reason)
            consumer.view = None

    @rule(which=st.integers(0, 1), data=st.data())
    def restart(self, which: int, data: st.DataObject) -> None:
        """The next attempt of a consumer begins at a snapshot of it."""
        consumer, start = self.consumers[which], self.starts[which]
        row = data.draw(st.integers(consumer.subpartition.stable, consumer.next))
        self.producer.partition.fence(which, consumer.attempt + 1)
        consumer.attempt += 1
        consumer.next, consumer.rows = row, consumer.rows[: row - start]
        consumer.attach()

    @rule(which=st.integers(0, 1), data=st.data(), old=st.booleans())
    def make_stable(self, which: int, data: st.DataObject, old: bool) -> None:
        consumer = self.consumers[which]
        if consumer.view is not None:
            row = data.draw(st.integers(0, consumer.next))
            before = consumer.subpartition.stable
            consumer.view.make_stable(VERSION - 1 if old else VERSION, row)
            assert consumer.subpartition.stable == (before if old else max(before, row))

    @rule(size=st.sampled_from([16, 60, CAPACITY]), which=st.integers(0, 1))
    def resize(self, size: int, which: int) -> None:
        view = self.consumers[which].view
        if view is not None:
            view.resize(size)

    @invariant()
    def is_right(self) -> None:
        if not hasattr(self, "producer"):
            return
        self.producer.validate()
        for consumer, written, start in zip(self.consumers, self.written, self.starts, strict=True):
            assert consumer.rows == written[: len(consumer.rows)] and consumer.next == start + len(
                consumer.rows
            )
            assert all(isinstance(error, Superseded) for error in consumer.errors)
            assert consumer.subpartition.rows == start + len(written)

    def teardown(self) -> None:
        if not hasattr(self, "producer"):
            return
        if not self.ended:
            self.producer.partition.finish()
        self.producer.partition.end_barriers(self.barrier)
        for consumer, written in zip(self.consumers, self.written, strict=True):
            view = consumer.attach()
            consumer.read()
            assert consumer.rows == written
            assert consumer.events[-2:] == [EventKind.END_OF_DATA, EventKind.END_OF_PARTITION]
            assert not self.mark or self.mark in consumer.events
            view.make_stable(VERSION, consumer.next)
            assert consumer.subpartition.freed == consumer.subpartition.rows
        assert self.producer.budget.used == 0
        self.producer.partition.release(written_off=False)


TestReplay = Replay.TestCase
TestReplay.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
