"""Retained partitions: what is written stays until no snapshot of a consumer may ask for it again.

No row is ever dropped, whoever is gone or suspected; ``Stable`` alone frees rows: what the consumer's
oldest snapshot covers. See :mod:`~minishuffle.exchange.retainedlog` for what a consumer reads, and
:mod:`~minishuffle.exchange.retention` for where it is held.

Two things bound a writer. Within what it writes for one element, a consumer that reads but does not keep up
stops it, as segments do elsewhere. A consumer that is away does not, nor one that has just come back and
has everything before it to read: the writer writes on for the others. From the moment that this one has
read more than it had credit for at first, it falls no further behind. Between elements, the writer waits
for room in what its worker may retain.

(Flink has no such partition: it restarts the producers.)
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.errors import LocalProtocolError, PartitionLost, ShuffleError, Superseded, TaskCancelled
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.blocking import DiskReads
from minishuffle.exchange.buffers import Event, Flush
from minishuffle.exchange.elements import Part
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.exchange.partition import Attended
from minishuffle.exchange.retainedlog import LogServices, RetainedSubpartition
from minishuffle.exchange.retention import RetainedBlock, RetainedStore
from minishuffle.exchange.rowtaps import RowTap
from minishuffle.exchange.wholebatches import as_handed_over
from minishuffle.ids import PartitionId
from minishuffle.wire.frames import EventKind, LatencyMarker

__all__ = ["RetainedPartition"]

_ON_REQUEST = Flush.ON_REQUEST


class RetainedPartition:
    """What one producer subtask writes for one edge, and retains: a :class:`ResultPartition`.

    Invariants, for each subpartition::

        first row ≤ freed ≤ stable, freed ≤ written, and nothing is freed that the view has yet to read
        rows that are held = those from freed to written
        bytes that are held = Σ over the blocks with these rows, each counted once
        unread bytes < allowance + one element, unless no view is attached

    Args:
        version: of its rows: the attempt that began to make them.
        store: where its elements are held.
        wait: (task) returns once what it is given says True, and raises if the task is to stop.
        wake: (loop) has a task that waits look again.
        flushing: when data leave that fill no buffer.
        capacity: payload bytes of a buffer, before a consumer says otherwise.
        unread_bytes: what a consumer that keeps up may have yet to read before the writer waits; None: the
            writer waits for none.
        disk: reads what is not in memory, and encodes what was handed over.
        closed: consumers that get none of its rows, but the end.
        full: called each time that the writer has to wait for a consumer.
        fenced: (loop) called with an attempt of a consumer that takes the place of an earlier one.
        lost: called once if what was retained cannot be read: no view brings it any more.
        on_stable: (loop) called when :meth:`stable` says more.
        replayed: (loop) called with the index and attempt of a consumer once it was sent what was retained
            for it when it was attached.
        begun: (task) called once, before its first element is written.
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
        wait: Callable[[Callable[[], bool]], None],
        wake: Callable[[], None],
        flushing: Flush = Flush.ON_REQUEST,
        capacity: int,
        unread_bytes: int | None,
        disk: DiskReads,
        closed: Iterable[int] = (),
        full: Callable[[], None] = lambda: None,
        fenced: Callable[[int], None] = lambda attempt: None,
        lost: Callable[[PartitionLost], None] = lambda error: None,
        on_stable: Callable[[], None] = lambda: None,
        replayed: Callable[[int, int], None] = lambda index, attempt: None,
        begun: Callable[[], None] | None = None,
    ) -> None:
        self.id = partition_id
        self.hot_keys = HotKeys()
        self.taps: tuple[RowTap, ...] = ()
        self.store = store
        """Where it is held; between elements its task looks whether that is full."""
        self._flushing = flushing
        self._first = consumers.start
        self._notify = notify
        self._counters = counters
        self._wait = wait
        self._full = full
        self._begun = begun
        self._on_fenced = fenced
        self._on_lost = lost
        self._lost = self._finished = self._released = self._written_off = False
        self._dirty: deque[RetainedSubpartition] = deque()
        """Those with something written since the last flush; each at most once."""
        self._together: list[RetainedSubpartition] = []
        """(Writer.) Those that the last broadcast went to: each has the same block open, or none has."""
        self._random: Random | None = None
        """(Writer.) Chooses who gets a latency marker."""
        services = LogServices(
            name=str(partition_id),
            version=version,
            store=store,
            disk=disk,
            flushing=flushing,
            unread_bytes=sys.maxsize if unread_bytes is None else unread_bytes,
            on_stable=on_stable,
            replayed=replayed,
            read_bytes=limits.BLOCKS_READ_AHEAD_BYTES // (2 * max(1, len(consumers))),
            wake=wake,
            lose=self.lose,
        )
        self.subpartitions = [RetainedSubpartition(services, each, capacity) for each in consumers]
        self.close(closed)

    # --- writer (task thread) ----------------------------------------------------------------

    def begin_at(self, rows: Sequence[int]) -> None:
        """(Before anything is written.) The number of the first row for each consumer: an earlier attempt has
        written those before, which :meth:`written` gave.

        Raises:
            LocalProtocolError: something was written.
        """
        if any(each.entries.things or each.next_row for each in self.subpartitions):
            raise LocalProtocolError(f"partition {self.id} has begun")
        for subpartition, row in zip(self.subpartitions, rows, strict=True):
            subpartition.begin_at(row)

    def written(self) -> list[int]:
        """The number of the next row for each consumer."""
        return [each.next_row for each in self.subpartitions]

    def skips(self, position: int, rows: int) -> bool:
        """Only rows that nobody will ever want are left out. Raises TaskCancelled: the task was abandoned."""
        if self._written_off:
            raise TaskCancelled("the task was abandoned")
        subpartition = self.subpartitions[position]
        if subpartition.closed:
            subpartition.skipped += rows
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
        self._open([subpartition]).hand_over(handed, size)
        subpartition.rows += len(handed)
        subpartition.bytes += size
        self._close([subpartition])
        self._wrote(1, len(handed), size)
        return True

    def write(self, position: int, rows: int, parts: list[Part]) -> None:
        """Write one element for one consumer; waits while that one has too much to read.

        Raises:
            LocalProtocolError: the partition is finished.
        """
        subpartition = self.subpartitions[position]
        if self._finished or subpartition.bytes - subpartition.position >= subpartition.allowance:
            self._enter(subpartition)
        size = sum(map(len, parts))
        block = subpartition.open
        if block is None or not block.takes(parts, size, subpartition.capacity):
            block = self._open([subpartition])
        block.write(rows, parts, size)
        subpartition.rows += rows
        subpartition.bytes += size
        if 2 * size > subpartition.capacity:
            self._close([subpartition])
        else:
            self._published(subpartition)
        self._wrote(1, rows, size)

    def broadcast(self, positions: list[int], rows: int, parts: list[Part]) -> None:
        """Write one element for several consumers; it is held once. Waits and raises as :meth:`write`.

        A block has the same readers from its beginning to its end. A partition that is broadcast to is not
        written to by :meth:`write`.
        """
        subpartitions = [self.subpartitions[position] for position in positions]
        for subpartition in subpartitions:
            self._enter(subpartition)
        if subpartitions != self._together:
            self._close_open()
            self._together = subpartitions
        size = sum(map(len, parts))
        capacity = min(subpartition.capacity for subpartition in subpartitions)
        block = subpartitions[0].open
        if block is None or not block.takes(parts, size, capacity):
            block = self._open(subpartitions)
        block.write(rows, parts, size)
        for subpartition in subpartitions:
            subpartition.rows += rows
            subpartition.bytes += size
        if 2 * size > capacity:
            self._close(subpartitions)
        else:
            for subpartition in subpartitions:
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

    def _open(self, subpartitions: list[RetainedSubpartition]) -> RetainedBlock:
        """A block for these consumers, behind everything written so far."""
        self._close(subpartitions)
        self._begin()
        block = RetainedBlock(holders=len(subpartitions))
        for subpartition in subpartitions:
            subpartition.append(block)
            subpartition.open = block
        return block

    def _begin(self) -> None:
        """Say once that an element is written."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begun()

    def _close(self, subpartitions: list[RetainedSubpartition]) -> None:
        """The block that is open for these, the same for all, is complete."""
        block = subpartitions[0].open
        if block is None:
            return
        self.store.close(block)  # all that is in it was counted
        for subpartition in subpartitions:
            subpartition.open = None
            subpartition.closed_bytes = subpartition.bytes
            self._notify(subpartition)

    def _close_open(self) -> None:
        """Whatever is open is complete."""
        if self._together:
            self._close(self._together)
            return
        for subpartition in self.subpartitions:
            self._close([subpartition])

    def _published(self, subpartition: RetainedSubpartition) -> None:
        """The reader may send what is in the open block: now, or when the buffer timeout has passed."""
        if self._flushing is not _ON_REQUEST:
            if not subpartition.held:
                self._notify(subpartition)
        elif not subpartition.dirty:
            subpartition.dirty = True  # before the note: who takes it clears the flag and looks
            self._dirty.append(subpartition)

    def _wrote(self, consumers: int, rows: int, size: int) -> None:
        self._counters.bytes_out += size * consumers
        self._counters.records_out += rows * consumers
        if self._released:  # meanwhile; nobody looks at it any more
            for subpartition in self.subpartitions:
                subpartition.forget()
                subpartition.open = None
            self.store.clear()

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        self._close_open()
        for subpartition in self.subpartitions:
            subpartition.add_watermark(time, idle)
            self._notify(subpartition)

    def broadcast_barrier(self, barrier: int, consumers: Collection[int] | None = None) -> None:
        self._close_open()
        for subpartition in self.subpartitions:
            if consumers is None or subpartition.consumer in consumers:
                subpartition.add_barrier(barrier)
                self._notify(subpartition)

    def emit_latency(self, marker: LatencyMarker) -> None:
        self._close_open()
        if self._random is None:
            self._random = Random(self.id.producer)
        subpartition = self._random.choice(self.subpartitions)
        subpartition.add_latency(marker)
        self._notify(subpartition)

    def finish(self) -> None:
        self._close_open()
        for subpartition in self.subpartitions:
            subpartition.add_event(Event(EventKind.END_OF_DATA))
            subpartition.add_event(Event(EventKind.END_OF_PARTITION))
            self._notify(subpartition)
        self._finished = True

    # --- loop --------------------------------------------------------------------------------

    def stable(self) -> list[int]:
        """For each consumer, the number below which its snapshots cover all rows of this version, written
        or not: no later attempt of it asks for them."""
        return [each.stable for each in self.subpartitions]

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
        if subpartition is None:
            return
        view = subpartition.view
        if view is not None and view.attempt < attempt:
            view.fail(Superseded(f"attempt {view.attempt} of consumer {consumer} was replaced by {attempt}"))
        self._on_fenced(attempt)

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
