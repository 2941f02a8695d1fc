"""Input channels: the consuming ends of an exchange, and what each of them is attached to.

An :class:`InputChannel` is the logical channel: a queue between loop and task, the element under way, a
place in the gate's watermark. It lives as long as its gate. An *attachment* is where its buffers come from
for one generation: a channel of a link to another process (:class:`RemoteAttachment`, with its own credit
ledger and receive buffers) or a subpartition of this process (:class:`LocalAttachment`). Attachments
replace each other; every buffer knows its attachment, so what belongs to an old one credits no new one.
(Flink: ``RemoteInputChannel``, ``LocalInputChannel``, ``BufferManager``.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol, TypeAlias

from minishuffle.errors import RemoteProtocolError, ShuffleError
from minishuffle.exchange.buffers import BufferBuilder, Slice
from minishuffle.exchange.elements import Assembler
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.notices import Attached, Notice, QueuedLatency, QueuedWatermark
from minishuffle.exchange.partition import PartitionView, ResultSubpartition
from minishuffle.exchange.rownumbers import NO_VERSION, ChannelRows, RetainedRowNumbers, RowNumbers
from minishuffle.exchange.segments import Segment
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.limits import EVENTS_QUEUED_PER_CHANNEL_MAX
from minishuffle.protocol.channel import (
    ConsumerChannel,
    FreeBuffer,
    NextType,
    Received,
)
from minishuffle.protocol.connection import Connection
from minishuffle.protocol.credit import BufferKind
from minishuffle.protocol.oneway import OneWayReceiver
from minishuffle.wire.frames import (
    BARRIER_EVENT,
    LATENCY_EVENT,
    ROW_MAX,
    WATERMARK_EVENT,
    CancelReason,
    DataType,
    EventKind,
    LatencyMarker,
    PartitionRequest,
)

__all__ = [
    "Attachment",
    "ChannelEvent",
    "ConsumerLink",
    "Detached",
    "GivenBack",
    "InputChannel",
    "LocalAttachment",
    "LocalBuffer",
    "QueuedBarrier",
    "QueuedEvent",
    "ReadyLine",
    "RemoteAttachment",
]


_DATA = int(DataType.DATA)


# --- what a queue holds ---------------------------------------------------------------------------


class QueuedEvent(Notice):
    """An event of the producer; ``row`` is the number of the row behind it."""

    __slots__ = ("attachment", "payload", "row")

    def __init__(self, attachment: Attachment, payload: bytes, row: int) -> None:
        self.attachment = attachment
        self.payload = payload
        self.row = row


class QueuedBarrier(Notice):
    """A barrier of the producer: the task has read all that came before it. ``row`` is the number of the row
    behind it."""

    __slots__ = ("attachment", "barrier", "blocking", "row")

    def __init__(self, attachment: Attachment, barrier: int, row: int, *, blocking: bool) -> None:
        self.attachment = attachment
        self.barrier = barrier
        self.blocking = blocking
        self.row = row


class Detached(Notice):
    """Nothing more comes of that generation, because of ``error`` if there is one.

    The task gives it back to the channel, which stands in for the attachment that is gone. (Flink:
    ``UnavailableEvent`` in ByteDance's single task recovery.)
    """

    __slots__ = ("attachment", "error", "generation")

    def __init__(self, channel: InputChannel, generation: int, error: ShuffleError | None) -> None:
        self.attachment = channel
        self.generation = generation
        self.error = error


class LocalBuffer:
    """A segment of a producer in this process, a piece of one, or a batch. That enters if there is any credit
    and takes as much as it has segments: nothing follows before the debt is repaid."""

    __slots__ = ("attachment", "payload", "piece", "row", "rows", "segments", "whole")

    def __init__(self, attachment: LocalAttachment, piece: Slice) -> None:
        self.attachment = attachment
        self.piece = piece
        self.whole = piece.whole
        self.segments = 1 if piece.whole is None else piece.whole.segments
        self.payload = piece.memory[piece.start : piece.start + piece.size]
        self.rows = piece.rows
        self.row = piece.row


GivenBack: TypeAlias = Received | LocalBuffer | QueuedBarrier | QueuedEvent | Detached
"""What a task gives back to its attachment once it is read: a buffer, a barrier that blocks, the end of a
partition, or the end of what a lost attachment delivered."""
QueueItem: TypeAlias = Received | LocalBuffer | Notice


class ReadyLine:
    """The channels of a gate that have something to read, in turn; a task takes one buffer of each.

    Args:
        wake: tells the task that there is something to read.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.line: deque[InputChannel] = deque()
        self._wake = wake

    def enter(self, channel: InputChannel) -> None:
        """(Loop.) A channel that claimed its place has something to read."""
        self.line.append(channel)
        self._wake()

    def end_turn(self, channel: InputChannel) -> None:
        """(Task.) The channel, which is first, goes to the end of the line if it has more."""
        self.line.popleft()
        if not channel.queue:
            channel.leave_place()
            # The loop may have delivered between the look and the leaving, and claimed the place or not.
            if not (channel.queue and channel.claim_place()):
                return
        self.line.append(channel)


# --- attachments ----------------------------------------------------------------------------------


class ChannelEvent(Enum):
    """What happens to one generation of an input channel: its partition is requested, the producer answers,
    the task has read the end of the partition, nothing more comes because of an error, the task has read all
    that came before the error, or it is known where the next generation reads."""

    REQUEST = "request"
    ATTACH = "attach"
    END = "end"
    FAIL = "fail"
    DRAIN = "drain"
    RENEW = "renew"


class Attachment(Protocol):
    """Where the buffers of an input channel come from. Everything is called on the loop.

    A closed attachment delivers nothing more. Its buffers that the task still holds come home through
    ``consumed`` as before.
    """

    channel: InputChannel
    generation: int
    rows_received: int
    """Rows that begin in the buffers that were received."""

    answered: bool
    """The producer has sent something, or is in the same worker."""

    @property
    def unread(self) -> int:
        """Buffers with data that the producer has yet to send or the task has yet to read."""
        ...

    def resize(self, size: int) -> None:
        """The producer is to put so many bytes into each buffer that it begins from now on."""
        ...

    def resume(self, barrier: int) -> None:
        """The producer is to give what stands behind that barrier."""
        ...

    def make_stable(self, version: int, row: int) -> None:
        """The task's snapshots cover rows of that version below that one."""
        ...

    def consumed(self, buffer: GivenBack) -> None:
        """The task has given ``buffer`` back; at the end of the partition this attachment ends."""
        ...

    def spares(self, buffer: Any) -> bool:
        """(Task.) As of a ``ConsumerAttachment``."""
        ...

    def close(self, reason: CancelReason) -> None:
        """Let go of the producer and of every buffer that the task does not hold; idempotent."""
        ...


class ConsumerLink(Protocol):
    """A link to a producer, of whatever transport."""

    @property
    def connection(self) -> Connection | OneWayReceiver: ...

    def flush_soon(self) -> None:
        """Something was done with ``connection``."""


class RemoteAttachment:
    """A channel of a link to the process of the producer; the owner of its ``ConsumerChannel``."""

    def __init__(
        self, channel: InputChannel, buffers: GateBuffers, link: ConsumerLink, generation: int
    ) -> None:
        self.generation = generation
        self.rows_received = 0
        self.channel = channel
        self.producer = channel.producer
        self.answered = False
        self._buffers = buffers
        self.link = link
        self.release_floating = buffers.release_floating
        exclusive = buffers.take_exclusive()
        self._exclusive = len(exclusive)
        self.consumer = ConsumerChannel(self, exclusive, buffers.segment_bytes)
        if self._exclusive < buffers.exclusive:
            buffers.short.append(self)

    def open(self, request: PartitionRequest) -> None:
        """Ask the producer for the subpartition."""
        size = self._buffers.buffer_size
        request = request if size is None else replace(request, buffer_size=size)
        self.link.connection.request_partition(self.consumer, request)
        self.link.flush_soon()

    @property
    def unread(self) -> int:
        return len(self.channel.queue) + self.consumer.backlog

    def resize(self, size: int) -> None:
        self.link.connection.announce_buffer_size(self.consumer, size)
        self.link.flush_soon()

    def resume(self, barrier: int) -> None:
        self.link.connection.resume_consumption(self.consumer, self.generation, barrier)
        self.link.flush_soon()

    def make_stable(self, version: int, row: int) -> None:
        self.link.connection.announce_stable(self.consumer, version, row)
        self.link.flush_soon()

    def add_exclusive(self, segment: FreeBuffer) -> None:
        """One of the exclusive buffers that it was short of; this attachment is the first of those."""
        self._exclusive += 1
        if self._exclusive == self._buffers.exclusive:
            self._buffers.short.popleft()
        self.consumer.credit.on_exclusive(segment)
        self.announce()

    def announce(self) -> None:
        link = self.link
        if link.connection.announce_credit(self.consumer):
            link.flush_soon()

    def spares(self, buffer: Any) -> bool:
        """With what is left, the producer has credit for whatever it begins."""
        return buffer.kind is BufferKind.EXCLUSIVE and self.consumer.credit.is_ample

    def consumed(self, buffer: GivenBack) -> None:
        if isinstance(buffer, Received):
            consumer = self.consumer
            consumer.consumed(buffer)
            if consumer.credit.unannounced:
                self.announce()
        elif isinstance(buffer, QueuedBarrier):
            self.channel.stop_at(self, buffer.barrier)
        else:
            self.channel.end(self)

    def close(self, reason: CancelReason) -> None:
        self.link.connection.cancel(self.consumer, reason)
        self.link.flush_soon()
        self.consumer.close()
        if self in self._buffers.short:
            self._buffers.short.remove(self)
        self._buffers.exclusive_held -= self._exclusive
        self._exclusive = 0
        self._buffers.serve()

    def _answer(self) -> None:
        self.answered = True
        self.channel.on_event(self.generation, ChannelEvent.ATTACH)
        self.channel.announce_stable()

    # --- for the ConsumerChannel -----------------------------------------------------------------

    def request_floating(self) -> FreeBuffer | None:
        if not self.answered:  # the producer has announced its backlog
            self._answer()
        return self._buffers.request_floating()

    def wait_in_line(self, channel: ConsumerChannel) -> None:
        self._buffers.line.append(self)
        self._buffers.note_limits(channel)

    def leave_line(self, channel: ConsumerChannel) -> None:
        if self in self._buffers.line:
            self._buffers.line.remove(self)

    def release_exclusive(self, buffer: FreeBuffer) -> None:
        assert isinstance(buffer, Segment)
        buffer.recycle()

    def deliver(self, received: Received) -> None:
        if not self.answered:
            self._answer()
        if received.data_type == _DATA:
            self.rows_received += received.rows
            self.channel.deliver(received)
            credit = self.consumer.credit
            if credit.waiting or (not credit.exclusive and self._buffers.credit):
                self._buffers.note_limits(self.consumer)
        else:
            self.channel.deliver_event(self, bytes(received.payload), received.row)
            if self.channel.events_queued > EVENTS_QUEUED_PER_CHANNEL_MAX:
                text = f"more than {EVENTS_QUEUED_PER_CHANNEL_MAX} events in a row wait to be read"
                self.channel.detach(RemoteProtocolError(f"producer {self.producer}: {text}"))

    def fail(self, error: ShuffleError) -> None:
        if self.channel.attachment is self:
            self.channel.detach(error)


class LocalAttachment:
    """A view of a subpartition in this process: segments and batches change hands, nothing is copied.

    Args:
        credit: how many of the producer's segments may wait here: the bound that exclusive and floating
            buffers are for a remote attachment.
        handed_over: called with each piece that changes hands.
        attempt: of the consumer.
        version: of the producer's rows.
    """

    def __init__(
        self,
        channel: InputChannel,
        subpartition: ResultSubpartition,
        generation: int,
        credit: int,
        handed_over: Callable[[Slice], None],
        *,
        attempt: int,
        version: int,
    ) -> None:
        self.generation = generation
        self.rows_received = 0
        self.channel = channel
        self.credit = credit
        self._handed_over = handed_over
        self.outstanding = 0
        self.answered = True
        self._view: PartitionView | None = subpartition.attach(
            generation,
            self.pump,
            self.fail,
            attempt=attempt,
            whole=True,
            version=version,
            row=channel.rows.wanted(version),
        )

    @property
    def unread(self) -> int:
        return self.outstanding + (self._view.backlog() if self._view is not None else 0)

    def resize(self, size: int) -> None:
        if self._view is not None:
            self._view.resize(size)

    def resume(self, barrier: int) -> None:
        if self._view is not None:
            self._view.resume(barrier)
            self.pump()

    def make_stable(self, version: int, row: int) -> None:
        if self._view is not None:
            self._view.make_stable(version, row)

    def pump(self) -> None:
        """Hand over what is available and allowed."""
        while (view := self._view) is not None:
            if self.outstanding >= self.credit and view.next_type() is not NextType.EVENT:
                return
            piece = view.poll()
            if piece is None:
                return
            self._handed_over(piece)
            if piece.data_type == DataType.DATA:
                buffer = LocalBuffer(self, piece)
                self.outstanding += buffer.segments
                self.rows_received += piece.rows
                self.channel.deliver(buffer)
            else:
                payload = bytes(piece.memory[piece.start : piece.start + piece.size])
                piece.released()
                self.channel.deliver_event(self, payload, piece.row)

    def spares(self, buffer: Any) -> bool:
        """The producer has yet to write on in that segment, and will say so."""
        builder = buffer.piece.builder
        goes_on = isinstance(builder, BufferBuilder) and not (builder.drained or builder.unsent())
        return goes_on and self.outstanding <= 1

    def consumed(self, buffer: GivenBack) -> None:
        if isinstance(buffer, LocalBuffer):
            self.outstanding -= buffer.segments
            buffer.piece.released()
            self.pump()
        elif isinstance(buffer, QueuedBarrier):
            self.channel.stop_at(self, buffer.barrier)
        else:
            self.channel.end(self)

    def close(self, reason: CancelReason) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.release(reason)

    def fail(self, error: ShuffleError) -> None:
        """The producer has failed, or somebody else reads the subpartition."""
        if self.channel.attachment is self:
            self.channel.detach(error)


# --- channel --------------------------------------------------------------------------------------


class InputChannel:
    """The logical channel between one producer subtask and the task.

    Args:
        producer: index of the producer subtask.
        number: of the channel in the gate's watermark valve.
        buffers, ready: the gate's.
        on_event: called on the loop with generation and event: a remote producer answers, the partition has
            ended, the attachment has failed, or the task has read all that it delivered before that. The end
            may come behind the failure, and in the place of the latter.
        retained: the producer retains what it has sent. The partition has ended for the loop once snapshots
            of the task cover its end: until then the task's next attempt may have to read it again.
    """

    def __init__(
        self,
        producer: int,
        number: int,
        assembler: Assembler,
        buffers: GateBuffers,
        ready: ReadyLine,
        *,
        on_event: Callable[[int, ChannelEvent], object] = lambda generation, event: None,
        retained: bool = False,
    ) -> None:
        self.producer = producer
        self.number = number
        self.on_event = on_event
        self.assembler = assembler
        """(Task.) The element under way."""
        self.queue: deque[QueueItem] = deque()
        self._place = [None]
        """Empty while the channel stands in the gate's line: who takes its entry puts the channel there."""
        self.current: Received | LocalBuffer | None = None
        """(Task.) The buffer that the assembler reads."""
        self.ended = False
        """(Task.) The end of the partition was read. Whatever may follow is not new."""
        self.reopened = False
        """(Task.) The producer, or its next attempt, was attached once more all the same."""
        self.rows = RetainedRowNumbers() if retained else RowNumbers()
        """(Task.) How far it is in what comes, and what of that comes once more."""
        self.barrier = 0
        """(Task.) The last blocking barrier that was read: all that the producer wrote before it was, too."""
        self.moved = 0
        """(Task.) The barrier at which the producer stopped when it moved last."""
        self.events_read = 0
        """(Task.) Of all that were queued, but for watermarks."""
        self.rows_incomplete = 0
        """(Task.) Rows of elements of which an attachment gave the beginning only."""
        self.rows_discarded = 0
        """(Loop.) Rows that were received and not taken when the channel was closed."""
        self.attachment: Attachment | None = None
        """(Loop.) The current one."""
        self._mark: QueuedWatermark | None = None
        """The last thing in the queue, if that is a watermark."""
        self._latency = QueuedLatency()
        self._events_added = 0
        self._was_attached = False
        """There was an attachment before the current one."""
        self._detached = 0
        """The last generation whose end stands in the queue, or was read."""
        self._stopped_at = self._barriers_over = 0
        """The barrier behind which the attachment gives nothing, 0 if there is none; and the last of those
        that stop nothing."""
        self._version = self._end_version = NO_VERSION
        """The versions of the attachment's rows, and of those that the task has read to their end."""
        self._stable: ChannelRows | None = None
        """What the oldest snapshot of the task covers."""
        self._read_to_end: Attachment | None = None
        """What the task has read to its end; it stays attached until snapshots cover that."""
        self._over = self._closed = self._listens = False
        """The partition has ended for the loop; the task has; it has finished, and takes nothing more."""
        self._buffers = buffers
        self._ready = ready

    # --- both ------------------------------------------------------------------------------------

    def claim_place(self) -> bool:
        """True for exactly one caller, who puts the channel in the line of ready ones."""
        try:
            self._place.pop()  # atomic
        except IndexError:
            return False
        return True

    def leave_place(self) -> None:
        """The channel has left the line."""
        self._place.append(None)

    @property
    def retained(self) -> bool:
        """The producer retains what it has sent."""
        return isinstance(self.rows, RetainedRowNumbers)

    # --- loop ------------------------------------------------------------------------------------

    @property
    def credit(self) -> bool:
        """Another process sends for credit; else as TCP lets it."""
        return self._buffers.credit

    def attach_remote(self, link: ConsumerLink, request: PartitionRequest) -> None:
        """Read from a producer behind ``link`` from now on; no effect once the channel is closed, or the task
        has finished with rows of another version.

        The first row that is wanted is filled in.
        """
        if self._takes(request.version):
            self._replace(request.version)
            attachment = RemoteAttachment(self, self._buffers, link, request.generation)
            self.attachment = attachment
            attachment.open(replace(request, row=self.rows.wanted(request.version)))

    def attach_local(
        self,
        subpartition: ResultSubpartition,
        generation: int,
        handed_over: Callable[[Slice], None],
        *,
        attempt: int = FIRST_ATTEMPT,
        version: int = NO_VERSION,
    ) -> None:
        """Read from a producer in this process from now on; no effect where :meth:`attach_remote` has none.

        Args: those of :class:`LocalAttachment`, and the version of the producer's rows.
        """
        if self._takes(version):
            self._replace(version)
            credit = self._buffers.local_credit
            attachment = LocalAttachment(
                self, subpartition, generation, credit, handed_over, attempt=attempt, version=version
            )
            self.attachment = attachment
            if self._buffers.buffer_size is not None:
                attachment.resize(self._buffers.buffer_size)
            attachment.pump()
            self.announce_stable()

    def _takes(self, version: int) -> bool:
        return not (self._closed or (self._listens and version != self._end_version))

    def _replace(self, version: int) -> None:
        """Make room for an attachment, to rows of that version."""
        self.detach()
        self._version = version
        if self._detached or self._was_attached or self.retained:
            self.deliver(Attached(version))
        else:
            self.rows.attach(version)

    def detach(self, error: ShuffleError | None = None) -> None:
        """End the current attachment, if there is one; the task sees that behind what was delivered."""
        attachment = self._let_go(CancelReason.MOVED if error is None else CancelReason.FAILED)
        if attachment is None:
            return
        if error is not None:
            self.on_event(attachment.generation, ChannelEvent.FAIL)
        self._deliver_detached(attachment.generation, error)

    def fail(self, generation: int, error: ShuffleError) -> None:
        """Nothing more comes of that generation, be it attached or not; the task sees that once, behind what
        was delivered."""
        if generation <= self._detached:
            return
        if self.attachment is not None:
            self.detach(error)
        else:
            self._deliver_detached(generation, error)

    def _deliver_detached(self, generation: int, error: ShuffleError | None) -> None:
        self._detached = generation
        if self._listens:  # nobody reads any more
            self.on_event(generation, ChannelEvent.DRAIN)
        else:
            self.deliver(Detached(self, generation, error))

    def consumed(self, notice: GivenBack) -> None:
        """The task has read that an attachment is gone, and so all that it delivered."""
        assert isinstance(notice, Detached)
        if not self._over:
            self.on_event(notice.generation, ChannelEvent.DRAIN)

    def stop_at(self, attachment: Attachment, barrier: int) -> None:
        """The task has read a blocking barrier that ``attachment`` delivered. One that has ended for the job
        stops nothing."""
        if self.attachment is attachment:
            self._stopped_at = barrier
            self.end_barriers(0)

    def end_barriers(self, barrier: int) -> None:
        """Barriers up to that one have ended: go on behind it."""
        self._barriers_over = max(barrier, self._barriers_over)
        stopped_at = self._stopped_at
        if self.attachment is not None and 0 < stopped_at <= self._barriers_over:
            self._stopped_at = 0
            self.attachment.resume(stopped_at)

    def make_stable(self, rows: ChannelRows) -> None:
        """Whatever snapshot the task's next attempt begins at, it has these rows: the producer need not
        retain them, and of one that was read to its end no row of any version. One that is away hears of it
        when it answers."""
        self._stable = rows
        self.announce_stable()
        if rows.ended and self.attachment is not None and self.attachment is self._read_to_end:
            self.end(self.attachment)
        elif self._listens:
            self._settle()

    def announce_stable(self) -> None:
        """The producer can hear which rows it need not retain."""
        stable, attachment = self._stable, self.attachment
        if stable is not None and attachment is not None:
            version, row = (self._version, ROW_MAX) if stable.ended else (stable.version, stable.row)
            attachment.make_stable(version, row)

    def end(self, attachment: Attachment) -> None:
        """The task has read the end of the partition that ``attachment`` delivered."""
        if self.retained and not (self._stable is not None and self._stable.ended):
            self._read_to_end, self._end_version = attachment, self._version
            return
        self._read_to_end, self._over = None, True
        self.on_event(attachment.generation, ChannelEvent.END)
        if self.attachment is attachment:
            self._let_go(CancelReason.ENDED)

    def _let_go(self, reason: CancelReason) -> Attachment | None:
        attachment, self.attachment = self.attachment, None
        self._stopped_at = 0
        if attachment is not None:
            self._was_attached = True
            attachment.close(reason)
        return attachment

    def deliver(self, item: QueueItem) -> None:
        """Put something at the end of the queue and wake the task; one that has finished takes nothing."""
        if self._listens:
            if not isinstance(item, Notice):
                item.attachment.consumed(item)
            self._settle()
            return
        self._mark = None
        self.queue.append(item)
        if self._place and self.claim_place():  # else it stands in line, and the task will find the item
            self._ready.enter(self)

    def deliver_event(self, attachment: Attachment, payload: bytes, row: int) -> None:
        """Put an event at the end of the queue; see :class:`QueuedWatermark` and :class:`QueuedLatency`."""
        if payload[0] == EventKind.LATENCY_MARKER and len(payload) == LATENCY_EVENT.size:
            if self._latency.taken:
                self._latency = QueuedLatency(LatencyMarker.unpack(payload))
                self.deliver(self._latency)
            return
        if payload[0] == EventKind.BARRIER and len(payload) == BARRIER_EVENT.size:
            _, blocking, barrier = BARRIER_EVENT.unpack(payload)
            self._events_added += 1
            self.deliver(QueuedBarrier(attachment, barrier, row, blocking=bool(blocking)))
            return
        if payload[0] != EventKind.WATERMARK or len(payload) != WATERMARK_EVENT.size:
            self._events_added += 1
            self.deliver(QueuedEvent(attachment, payload, row))
            return
        _, idle, time = WATERMARK_EVENT.unpack(payload)
        if self._mark is None or not self._mark.overtake(time, bool(idle)):
            mark = QueuedWatermark(time, bool(idle), row)
            self.deliver(mark)
            self._mark = mark

    @property
    def events_queued(self) -> int:
        """Events that wait to be read, but for watermarks."""
        return self._events_added - self.events_read

    @property
    def is_read_to_end(self) -> bool:
        """The task has read its end, which snapshots do not cover so far."""
        return not self._over and self._version == self._end_version != NO_VERSION

    def listen(self) -> None:
        """The task has finished. Stay attached, or be attached once more, until the producer has heard that
        all is covered."""
        self._listens = True
        if any(isinstance(item, Detached) for item in self.queue):  # nobody reads it any more
            self.on_event(self._detached, ChannelEvent.DRAIN)

    def _settle(self) -> None:
        """(The task has finished.) Let go of a producer that has heard that all is covered."""
        stable, attachment = self._stable, self.attachment
        if stable is None or attachment is None or not attachment.answered:
            return
        if stable.ended or stable.row >= self.rows.next:
            self._over = True
            self.on_event(attachment.generation, ChannelEvent.END)
            self._let_go(CancelReason.ENDED)

    def close(self) -> None:
        """The task is terminal: end the attachment and give every buffer back; idempotent."""
        self._closed, self._read_to_end = True, None
        self._let_go(CancelReason.ENDED if self.ended else CancelReason.FAILED)
        queue, self.queue = self.queue, deque()
        current, self.current = self.current, None
        untaken = self.assembler.clear()
        if self.retained:  # whatever was not taken comes again
            for buffer in (current, *queue):
                if buffer is not None and not isinstance(buffer, Notice):
                    buffer.attachment.consumed(buffer)
            return
        self.rows_incomplete += self.rows.close()
        if current is None:
            self.rows_incomplete += untaken
        else:
            self._discard(untaken)
            current.attachment.consumed(current)
        for item in queue:
            if isinstance(item, Attached):
                self.rows.attach(item.version)
            elif not isinstance(item, Notice):
                if not self.rows.begun:
                    self.rows.begin(item.row)
                self._discard(item.rows)
                item.attachment.consumed(item)

    def _discard(self, rows: int) -> None:
        """Count rows that were received and not taken, but for those that come once more."""
        self.rows_discarded += rows - self.rows.take(rows)
