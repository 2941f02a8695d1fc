"""A result partition whose consumers come and go, and what its views have read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

from minishuffle.counters import TaskCounters
from minishuffle.errors import ShuffleError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.buffers import BufferBuilder, Flush, Slice, WholeBatch
from minishuffle.exchange.elements import ByteBudget
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition, PipelinedView
from minishuffle.exchange.wholebatches import WholeBatches
from minishuffle.ids import JobId, PartitionId
from minishuffle.wire.frames import NO_ELEMENT_START, DataType

CAPACITY = 16
"""Bytes of a segment."""


class Handing(WholeBatches):
    """Hands over elements, (number, bytes), instead of Arrow's batches; a writer never has to wait.

    ``held`` has those that the exchange has.
    """

    def __init__(self) -> None:
        super().__init__(ByteBudget(0), CAPACITY, self._pass, lambda: None)
        self.held: set[WholeBatch] = set()
        self.waits = 0

    def _pass(self, ready: Callable[[], bool]) -> None:
        self.waits += 1

    def take(self, batch: Batch, buffer_size: int | None) -> WholeBatch:
        number, size, rows = batch.payload
        whole = WholeBatch(
            batch.payload,
            rows,
            size,
            min(CAPACITY, buffer_size or CAPACITY),
            parts=lambda batch: [bytes([number]) * size],
            on_freed=self.held.discard,
        )
        self.held.add(whole)
        return whole


def payload_of(piece: Slice) -> bytes:
    """The bytes of a piece, be it a whole batch or not."""
    if piece.whole is None:
        return bytes(piece.payload)
    number, size, _ = piece.whole.batch
    return bytes([number]) * int(size)


class Producer:
    """A partition over 16-byte segments, whose notices wait in ``inbox`` until the loop attends to them.

    Each element is its number repeated, so what a view reads shows which elements it has.
    """

    def __init__(
        self,
        consumers: int = 1,
        drops: bool = True,
        flushing: Flush = Flush.ON_REQUEST,
        segments: int = 64,
        *,
        repeats: bool = False,
        closed: Iterable[int] = (),
    ) -> None:
        self.network = NetworkBufferPool(segments, CAPACITY)
        self.pool = self.network.create_pool("p", 1, segments)
        self.inbox: list[PipelinedSubpartition] = []
        self.counters = TaskCounters()
        self.handing = Handing()
        self.partition = PipelinedPartition(
            PartitionId(JobId("j1"), 0, 0),
            range(consumers),
            self.acquire,
            self._notify,
            self.counters,
            flushing=flushing,
            drops=drops,
            repeats=repeats,
            closed=closed,
            whole_batches=self.handing,
        )
        self.subpartitions = self.partition.subpartitions
        self.first = self.subpartitions[0]
        self.views: list[list[PipelinedView]] = [[] for _ in range(consumers)]
        self.errors: list[ShuffleError] = []
        self.rows = [0] * consumers
        """By position, how many were written or skipped."""
        self.first_rows: list[dict[int, int]] = [{} for _ in range(consumers)]
        """By position and element, the number of its first row."""
        self.data: dict[int, bytes] = defaultdict(bytes)
        """What each view of the first subpartition has read, without events."""

    def acquire(self) -> Segment:
        return cast(Segment, self.pool.request())

    def _notify(self, subpartition: PipelinedSubpartition) -> None:
        """As ``TaskPaths.notify``."""
        if not subpartition.notified:
            subpartition.notified = True
            self.inbox.append(subpartition)

    def attend(self) -> None:
        while self.inbox:
            self.inbox.pop(0).attend()

    def attach(self, position: int = 0, attempt: int = 1, *, whole: bool = False) -> PipelinedView:
        views = self.views[position]
        view = self.subpartitions[position].attach(
            len(views) + 1, lambda: None, self.errors.append, attempt=attempt, whole=whole
        )
        views.append(view)
        return view

    def write(self, number: int, size: int, rows: int = 1, position: int = 0) -> None:
        """One element, as a task writes it."""
        self._number(number, rows, position)
        if self.partition.skips(position, rows):
            return
        element: Any = (number, size, rows)
        if not self.partition.hand_over(position, Batch(element)):
            self.partition.write(position, rows, [bytes([number]) * size])

    def broadcast(self, number: int, size: int, rows: int = 1) -> None:
        """One element for all consumers, as a task writes it."""
        positions = range(len(self.subpartitions))
        for position in positions:
            self._number(number, rows, position)
        to = [position for position in positions if not self.partition.skips(position, rows)]
        if to:
            self.partition.broadcast(to, rows, [bytes([number]) * size])

    def _number(self, number: int, rows: int, position: int) -> None:
        self.first_rows[position][number] = self.rows[position]
        self.rows[position] += rows

    def check_number(self, piece: Slice, position: int = 0) -> None:
        """The element that begins first in a piece with data has the rows that the piece says."""
        if piece.data_type == DataType.DATA and piece.first_start != NO_ELEMENT_START:
            assert piece.row == self.first_rows[position][payload_of(piece)[piece.first_start]]

    def read_all(self) -> None:
        """The consumer of the first subpartition takes what there is."""
        while self.first.view is not None and (piece := self.first.view.poll()) is not None:
            self.check_number(piece)
            if piece.data_type == DataType.DATA:
                self.data[len(self.views[0])] += payload_of(piece)
            piece.released()

    @property
    def dropped(self) -> tuple[int, int]:
        """Rows discarded from the queue, and rows that the writer has skipped."""
        dropped = self.partition.rows_dropped()
        assert set(dropped) - {"suspected"} == {"queue_discarded", "upstream_unavailable"}
        return dropped["queue_discarded"], dropped["upstream_unavailable"]

    @property
    def suspected(self) -> int:
        """Rows dropped under suspicion, from the queue or by the writer."""
        return self.partition.rows_dropped().get("suspected", 0)

    @property
    def queued(self) -> int:
        """Rows that were begun, and neither sent nor discarded."""
        builders: dict[int, BufferBuilder] = {}
        whole = 0
        for subpartition in self.subpartitions:
            for item in (*subpartition._queue, subpartition._open):
                if isinstance(item, BufferBuilder):
                    builders[id(item)] = item
                elif isinstance(item, WholeBatch):
                    whole += item.rows
        return whole + sum(builder.rows - builder.sent_rows for builder in builders.values())

    @property
    def sent(self) -> int:
        return sum(view.rows_sent for views in self.views for view in views)

    @property
    def cut(self) -> int:
        """Rows, of those sent, of which a view has the beginning only."""
        return sum(view.rows_skipped for views in self.views for view in views)

    def check_books(self, written: int) -> None:
        assert written == self.sent + sum(self.dropped) + self.suspected + self.queued
        for subpartition, rows in zip(self.subpartitions, self.rows, strict=True):
            begun = subpartition.open.rows if subpartition.open is not None else 0
            assert subpartition.rows + begun == rows, "the number of the next row"

    def check_all_home(self) -> None:
        self.partition.release(False)
        assert not self.handing.held
        assert self.network.free == self.network.total
        self.network.validate()


def read(view: PipelinedView) -> list[bytes]:
    """The payloads of what there is."""
    found = []
    while (piece := view.poll()) is not None:
        found.append(bytes(piece.payload))
        piece.released()
    return found


def check_elements(views: Iterable[bytes], elements: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Each was read whole, or in part as the last one of a view, or not at all, and in order.

    Args:
        views: the bytes that each view has read.
        elements: by number; bytes and rows.

    Returns: the rows that were read, and those of them that were cut.
    """
    found: list[int] = []
    sent = cut = 0
    for data in views:
        at = 0
        while at < len(data):
            size, rows = elements[data[at]]
            piece = data[at : at + size]
            assert bytes(piece) == bytes([data[at]]) * len(piece)
            found.append(data[at])
            at += size
            sent += rows
            if len(piece) < size:
                cut += rows
    assert found == sorted(set(found))
    return sent, cut
