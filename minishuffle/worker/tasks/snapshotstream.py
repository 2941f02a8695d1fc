"""The stream by which a task sends its snapshots to their holder, which is on another worker.

It is a retained partition (:mod:`~minishuffle.exchange.retained`) with one consumer, and without a bound of
what is unread: a holder that is slow or away does not stop the task. Its elements are those of
:func:`~minishuffle.worker.tasks.statehandover.pack_state`, and behind those of each snapshot a *marker*,
which says the number of the snapshot and of how many elements it is, and the numbers of those that are to be
kept. Each element counts as one row. The holder acknowledges a marker by saying that the rows up to it are
stable. What was not acknowledged is retained, so a holder whose link was broken goes on where it was, and
another one reads all that no holder had. It may read some of what the one before had, too, and the rest of a
snapshot, which is too short by its marker: a marker says for which holder it was written.

The task has a copy of each snapshot that is to be kept, and sends all of them again when another holder is
named: it need not wait until its consumers are behind a new one.

The stream has no end: a task that has finished may have to run again from what its holder has.

Numbers count the snapshots of one attempt from 1; :data:`BEGUN` is what the attempt has begun with.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from minishuffle.counters import TaskCounters
from minishuffle.errors import ResourceExhausted
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.exchange.elements import AssemblyBudget, ElementFormat, Part, with_header
from minishuffle.exchange.elementstore import ElementLog, ElementStore
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.ids import FIRST_ATTEMPT, PartitionId
from minishuffle.worker.tasks.handoff import TaskPaths
from minishuffle.worker.tasks.statehandover import state_gate

__all__ = ["BEGUN", "Arrival", "SnapshotMarker", "SnapshotStreamInput", "SnapshotWriter"]

BEGUN: Final = 0
"""The number of what an attempt has begun with: nothing, or the snapshot of the attempt before."""
_NONE: Final = (1 << 64) - 1
"""The number in a marker that ends no snapshot."""
_MARKER: Final = struct.Struct(">QIII")
"""Number, elements, holder, and how many numbers follow, of 8 bytes each."""
_HOLDER: Final = 0
"""The position of the holder, the only consumer, in the partition."""


class SnapshotMarker(NamedTuple):
    """The end of a snapshot, unless ``number`` says that it ends none, and which ones are to be kept."""

    number: int
    elements: int
    """The number of elements of the snapshot, which come right before the marker."""
    keep: tuple[int, ...]
    holder: int
    """The number of the holder, among those of the task, that was named last."""

    @property
    def ends_one(self) -> bool:
        """Whether a snapshot comes before it."""
        return self.number != _NONE

    def pack(self) -> bytes:
        count = len(self.keep)
        head = _MARKER.pack(self.number, self.elements, self.holder, count)
        return head + struct.pack(f">{count}Q", *self.keep)

    @classmethod
    def unpack(cls, payload: bytes | memoryview) -> SnapshotMarker:
        """Raises struct.error: it is none."""
        number, elements, holder, count = _MARKER.unpack_from(payload)
        keep = struct.unpack_from(f">{count}Q", payload, _MARKER.size)
        return cls(number, elements, keep, holder)


# --- task -------------------------------------------------------------------------------------------------


class SnapshotWriter:
    """The task's end of the stream.

    Args:
        make_partition: makes the partition, which calls the first of these two on the loop when rows of it
            have become stable, and the second with the number of another holder that is named.
        make_store: makes the store of the task's copy of a snapshot.
        held: called on the loop with the number and the numbers to keep of each marker that the holder has
            acknowledged, in order; the number is :data:`BEGUN` if it ends no snapshot.
        holder_changed: called on the loop when another holder is named, which has nothing of what was
            acknowledged before: see :meth:`send_again`.
        holder: the number of the holder, among those of the task; 0: none was named yet.
    """

    def __init__(
        self,
        make_partition: Callable[[Callable[[], None], Callable[[int], None]], RetainedPartition],
        make_store: Callable[[], ElementStore],
        held: Callable[[int, Sequence[int]], None],
        holder_changed: Callable[[], None],
        holder: int,
    ) -> None:
        self.partition = make_partition(self._acknowledged, self._on_fenced)
        self._held, self._holder_changed = held, holder_changed
        self._make_store = make_store
        self._holder = self._named = max(holder, FIRST_ATTEMPT)
        """The numbers of the holder in markers and (loop) of the holder that was named last."""
        self._copies: dict[int, ElementLog] = {}
        """By number, of snapshots that are to be kept."""
        self._last = holder
        """The number of the last one that was named; 0: none was."""
        self._rows = 0
        self._markers: deque[tuple[int, SnapshotMarker]] = deque()
        """Markers that were not acknowledged, and the row behind each."""

    def begin(self, elements: Iterable[list[Part]]) -> None:
        """(Task.) What the attempt begins with: its holder has that, and another one may need it."""
        log = self._copies[BEGUN] = ElementLog(self._make_store())
        for element in elements:
            self._copy(BEGUN, log, element)

    def write(self, number: int, elements: Iterable[list[Part]], keep: Sequence[int]) -> Iterator[int]:
        """(Task.) Send a snapshot, an element each time that the next one is asked for, and give the bytes of
        each; it and those to be kept with it are in ``keep``. Until all are sent nothing else is.

        Raises:
            UsageError: a row of it is longer than an element may be; nobody takes what was sent for whole.
        """
        log, count = ElementLog(self._make_store()), 0
        self._copies[number] = log
        for element in elements:
            self._write(element)
            self._copy(number, log, element)
            count += 1
            yield sum(map(len, element))
        self._mark(number, count, keep)

    def keep(self, numbers: Sequence[int]) -> None:
        """(Task.) The holder need not keep others than these any more."""
        self._mark(_NONE, 0, numbers)

    def send_again(self, numbers: Sequence[int]) -> bool:
        """(Task.) Another holder was named: send those snapshots to it. False: there is no copy of one of
        them, and nothing was sent."""
        self._holder = self._named
        if any(number not in self._copies for number in numbers):
            return False
        for at, number in enumerate(numbers, 1):
            log = self._copies[number]
            for place in range(len(log.elements)):
                self._write([log.read(place)])
            self._mark(number, len(log.elements), numbers[:at], drop=False)
        return True

    @property
    def last_holder(self) -> int:
        """(Any thread.) The number of the holder that was named last; 0: none was."""
        return self._last

    @property
    def is_read(self) -> bool:
        """(Any thread.) Whether a holder is attached."""
        return self.partition.subpartitions[_HOLDER].view is not None

    def forget(self) -> None:
        """Copies are needed no more."""
        for number in list(self._copies):
            self._copies.pop(number).store.forget()

    def _copy(self, number: int, log: ElementLog, element: list[Part]) -> None:
        """There is no copy of a snapshot that neither memory nor disk has room for."""
        if self._copies.get(number) is log:
            try:
                log.append(1, element)
            except ResourceExhausted:
                self._copies.pop(number).store.forget()

    def _mark(self, number: int, count: int, keep: Sequence[int], *, drop: bool = True) -> None:
        for each in [each for each in self._copies if drop and each not in keep]:
            self._copies.pop(each).store.forget()
        marker = SnapshotMarker(number, count, tuple(keep), self._holder)
        element = with_header(1, ElementFormat.SNAPSHOT, [marker.pack()])
        self._markers.append((self._rows + 1, marker))  # before it can be acknowledged
        self._write(element)

    def _write(self, element: list[Part]) -> None:
        self._rows += 1
        self.partition.write(_HOLDER, 1, element)

    def _on_fenced(self, holder: int) -> None:
        """(Loop.) That holder is named; perhaps once more, as when its worker comes back."""
        if holder > self._last:
            self._last = self._named = holder
            self._holder_changed()

    def _acknowledged(self) -> None:
        """(Loop.) Rows of the partition have become stable. Markers for a holder before may speak of
        snapshots that this one does not have yet."""
        (stable,) = self.partition.stable()
        while self._markers and self._markers[0][0] <= stable:
            _, marker = self._markers.popleft()
            if marker.holder == self._named:
                self._held(marker.number if marker.ends_one else BEGUN, marker.keep)


# --- holder -----------------------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """An element that has come to the holder: a part of a snapshot, or a marker."""

    attempt: int
    """The attempt of the task that has sent it."""
    row: int
    what: memoryview | SnapshotMarker


class SnapshotStreamInput:
    """The holder's end of the stream: a gate with one channel, in memory of its own.

    Args:
        partition_id: what the task writes.
        segment_bytes: payload bytes of a buffer.
        on_event: see :class:`~minishuffle.exchange.channels.InputChannel`.

    Raises:
        ResourceExhausted: the system does not give that much memory.
    """

    def __init__(
        self,
        partition_id: PartitionId,
        paths: TaskPaths,
        budget: AssemblyBudget,
        *,
        segment_bytes: int,
        on_event: Callable[[int, ChannelEvent], object],
    ) -> None:
        self.gate = state_gate(
            partition_id, paths, budget, TaskCounters(), segment_bytes=segment_bytes, waits=True
        )
        self.channel = self.gate.add_channel(partition_id.producer, on_event)

    def poll(self) -> Arrival | None:
        """(Holder's thread.) What has come next; None: nothing yet.

        Raises:
            struct.error, RemoteProtocolError, ResourceExhausted: it cannot be read.
        """
        element = self.gate.poll()
        if element is None:
            return None
        rows, payload = self.channel.rows, element.payload
        is_marker = element.format == ElementFormat.SNAPSHOT
        what = SnapshotMarker.unpack(payload) if is_marker else memoryview(payload)
        return Arrival(rows.version, rows.next - 1, what)
