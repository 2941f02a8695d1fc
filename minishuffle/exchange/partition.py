"""What one producer subtask writes for one edge: the interface of every kind of result partition.

A partition is *opened* (constructed), *written* by the task, *finished*, and *released*. What it holds for
one consumer is a subpartition, and each attempt of that consumer reads it through a *view*, one for each
generation of the channel. The kinds have no base class in common, and whoever writes or reads does not ask
which one it has:

* :class:`~minishuffle.exchange.pipelined.PipelinedPartition`: in network memory, read once as it is written.
* :class:`~minishuffle.exchange.blocking.BlockingPartition`: stored, and read whole by each view.
* :class:`~minishuffle.exchange.retained.RetainedPartition`: read as it is written, and retained until no view
  may begin before it.

(Flink: ``ResultPartition``, ``ResultSubpartition``, ``ResultSubpartitionView``.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from minishuffle.errors import ShuffleError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.buffers import Slice
from minishuffle.exchange.elements import Part
from minishuffle.exchange.hotkeys import HotKeys
from minishuffle.exchange.rowtaps import RowTap
from minishuffle.ids import FIRST_ATTEMPT, PartitionId
from minishuffle.protocol.channel import ProducerChannel, SubpartitionView
from minishuffle.protocol.connection import Connection
from minishuffle.protocol.oneway import OneWaySender
from minishuffle.wire.frames import LatencyMarker, PartitionRequest

__all__ = [
    "Attended",
    "PartitionView",
    "ProducerAttachment",
    "ProducerLink",
    "ResultPartition",
    "ResultSubpartition",
    "SubpartitionState",
    "serve",
]


# --- the interface --------------------------------------------------------------------------------


class Attended(Protocol):
    """What the loop attends to once it was notified."""

    notified: bool
    """Set by whoever queues this for the loop's attention, cleared by the loop."""

    def attend(self) -> None:
        """(Loop.) There may be something to poll. The flag is cleared before the look."""


class ProducerLink(Protocol):
    """A link to a consumer, of whatever transport."""

    @property
    def connection(self) -> Connection | OneWaySender: ...

    @property
    def paused(self) -> bool:
        """The socket takes no more for now."""
        ...

    def flush_soon(self) -> None: ...


class PartitionView(SubpartitionView, Protocol):
    """What one consumer reads of a subpartition, at one generation. Everything is the loop's.

    Once released, or once there is a newer view of the subpartition, it polls nothing.
    """

    generation: int
    attempt: int
    """The consumer's."""
    channel: ProducerChannel | None
    link: ProducerLink | None
    """The link that carries it, and its channel there; None in one process."""
    rows_sent: int
    """Rows of elements that began in what was polled."""
    rows_skipped: int
    """Rows, of those, of an element whose end was not polled when this view ended: nobody gets it."""

    @property
    def current(self) -> bool: ...

    def poll(self, data: bool = True) -> Slice | None: ...

    def fail(self, error: ShuffleError) -> None:
        """Nothing more comes: end this view, and tell the consumer why; idempotent."""


class SubpartitionState(NamedTuple):
    """For those who look: segments and events that are queued, bytes of the segment that is being written,
    and what becomes of rows: see ``PipelinedSubpartition``."""

    queued: int = 0
    open_bytes: int = 0
    available: bool = True
    suspected: bool = False
    closed: bool = False


class ResultSubpartition(Protocol):
    """What a partition holds for one consumer. Everything is the loop's."""

    consumer: int
    """Index of the consumer subtask."""
    error: ShuffleError | None
    """Why the producer has failed, if it has."""

    @property
    def view(self) -> PartitionView | None:
        """The current one; None while no consumer is attached."""
        ...

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
    ) -> PartitionView:
        """The view of a consumer that reads from now on, instead of any other.

        Args:
            version, row: the first row that is new to the consumer, and the version that it knows: what is
                retained is read from there on.
            on_available: there is something to poll; also called if that is known already.
            on_failed: nothing more comes, and why; the view has ended before.
            whole: batches that are handed over may come as they are.
        """
        ...

    def backlog(self) -> int:
        """Data buffers that its consumer has yet to poll."""
        ...

    def state(self) -> SubpartitionState: ...


class ResultPartition(Protocol):
    """What one producer subtask writes for one edge. A *position* numbers its subpartitions from 0."""

    id: PartitionId
    hot_keys: HotKeys
    """Keys that many of its rows have, if they are dealt out by key."""
    taps: tuple[RowTap, ...]
    """Set by the loop: who looks at the rows that are written; empty unless somebody does."""

    @property
    def subpartitions(self) -> Sequence[ResultSubpartition]: ...

    # --- writer (task thread) ----------------------------------------------------------------

    def skips(self, position: int, rows: int) -> bool:
        """Whether the next element for that position is left out, and its rows counted, because the consumer
        has gone. Ask before it is serialised.

        Raises:
            TaskCancelled: the task was abandoned, and what it had in hand is counted.
        """
        ...

    def hand_over(self, position: int, batch: Batch) -> bool:
        """Give the batch itself, if the consumer takes it. False: it has to be written as an element."""
        ...

    def write(self, position: int, rows: int, parts: list[Part]) -> None:
        """Write one element, whose bytes are ``parts`` joined."""

    def broadcast(self, positions: list[int], rows: int, parts: list[Part]) -> None:
        """Write one element to several positions, at least one; it is held once. A partition that is
        broadcast to is not written to by :meth:`write`."""

    def broadcast_watermark(self, time: int, idle: bool) -> None:
        """Tell every consumer the event time, in microseconds since 1970, behind everything written."""

    def broadcast_barrier(self, barrier: int, consumers: Collection[int] | None = None) -> None:
        """Have these consumers, or all, stop behind everything written, until they resume; what is stored
        waits for nobody."""

    def emit_latency(self, marker: LatencyMarker) -> None:
        """Send a latency marker to one consumer, any of them, behind everything written."""

    def finish(self) -> None:
        """Everything was written: each consumer gets the end behind it."""

    # --- loop --------------------------------------------------------------------------------

    def subpartition(self, consumer: int) -> ResultSubpartition | None:
        """The one for that consumer subtask; None if this producer does not feed it."""
        ...

    def flush(self) -> None:
        """The buffer timeout has passed: send what was published since the last flush."""

    def fence(self, consumer: int, attempt: int) -> None:
        """That attempt of the consumer takes the place of earlier ones: these read no more."""

    def close(self, consumers: Iterable[int]) -> None:
        """These consumers want none of its rows, but the end."""

    def is_read(self, but: Collection[int]) -> bool:
        """All consumers ``but`` these have resumed behind the last barrier, or need not."""
        ...

    def end_barriers(self, barrier: int) -> None:
        """Barriers up to that one have ended: they keep nothing from being dropped."""

    def fail(self, error: ShuffleError) -> None:
        """The producer failed: tell its consumers, and whoever asks from now on."""

    def release(self, written_off: bool) -> None:
        """Nobody reads from it any more; idempotent.

        Args:
            written_off: the writer could not be stopped, and may go on writing.
        """

    def backlog(self) -> int:
        """Data buffers that consumers have yet to poll."""
        ...

    # --- both --------------------------------------------------------------------------------

    def rows_dropped(self) -> dict[str, int]:
        """Rows that no consumer gets, by reason."""
        ...

    def buffers_out(self) -> int:
        """Buffers with data that were handed to consumers."""
        ...


# --- attachments to links -------------------------------------------------------------------------


class ProducerAttachment:
    """A view of a subpartition and the channel of a link that carries it."""

    __slots__ = ("channel", "link", "view")

    def __init__(
        self, link: ProducerLink, request: PartitionRequest, subpartition: ResultSubpartition
    ) -> None:
        self.link = link
        self.channel = request.channel
        """The id that the consumer gave."""
        self.view = subpartition.attach(
            request.generation,
            self.available,
            self.fail,
            attempt=request.consumer_attempt,
            version=request.version,
            row=request.row,
        )

    def available(self) -> None:
        """There is something to poll."""
        self.link.connection.available(self.channel)
        self.link.flush_soon()

    def fail(self, error: ShuffleError) -> None:
        """Tell the consumer why nothing more comes."""
        self.link.connection.fail_producer(self.channel, error)
        self.link.flush_soon()


def serve(
    link: ProducerLink, request: PartitionRequest, subpartition: ResultSubpartition
) -> ProducerAttachment:
    """Answer a PartitionRequest: its consumer reads ``subpartition`` from now on, instead of any other."""
    attachment = ProducerAttachment(link, request, subpartition)
    attachment.view.link = link
    attachment.view.channel = link.connection.attach(request.channel, attachment.view)
    if subpartition.error is not None:
        attachment.view.fail(subpartition.error)
    link.flush_soon()
    return attachment
