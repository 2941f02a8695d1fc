"""The machines of one logical channel, for either end; many channels share a connection.

A *producer channel* reads a subpartition's view and sends a data buffer for each credit, and events without
credit. A *consumer channel* checks each buffer that arrives, copies it into a buffer it had promised, and
turns consumed buffers into new credit. (Flink: ``CreditBasedSequenceNumberingViewReader`` and
``RemoteInputChannel``.)
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError, ShuffleError
from minishuffle.limits import SEGMENT_HEADROOM_BYTES
from minishuffle.protocol.credit import BufferKind, ReceiveCredit, SendCredit
from minishuffle.wire.frames import (
    BUFFER_FIXED_BYTES,
    ROW_MAX,
    BufferHeader,
    CancelReason,
    DataType,
    Payload,
)

__all__ = [
    "ChannelState",
    "ConsumerAttachment",
    "ConsumerChannel",
    "FreeBuffer",
    "NextType",
    "Outgoing",
    "ProducerChannel",
    "Received",
    "SubpartitionView",
]

SEQUENCE_MASK = 0xFFFF_FFFF
_DATA, _EVENT = int(DataType.DATA), int(DataType.EVENT)
"""The lookup of an enumeration's member costs as much as a call on Python 3.11: members needed for every
buffer have names of their own, here and below."""
_FLOATING = BufferKind.FLOATING


class NextType(Enum):
    """The result of a view's next poll."""

    NONE = 0
    DATA = 1
    EVENT = 2
    PARTIAL = 3
    """Data of a segment that is still being filled: to be sent while the consumer has nothing to read."""


_TYPE_DATA, _TYPE_EVENT, _TYPE_PARTIAL = NextType.DATA, NextType.EVENT, NextType.PARTIAL


class Outgoing(Payload, Protocol):
    """A piece of a segment, or an event, on its way out."""

    next_type: NextType
    """The result of the poll after this one."""
    backlog: int
    """Number of data buffers after this one."""

    def released(self) -> None:
        """The transport has let go of the memory. Called exactly once."""


class SubpartitionView(Protocol):
    """The reading end of a subpartition. Everything is called on the loop's side."""

    def next_type(self) -> NextType: ...

    def backlog(self) -> int:
        """Data buffers that could be polled now, without a partial one."""

    def hold(self) -> None:
        """A partial piece must not be sent now, so the writer need not announce it. The next poll ends
        this."""

    def poll(self, data: bool = True) -> Outgoing | None:
        """The next piece; None if there is none, or if it is data and ``data`` is False."""

    def resize(self, size: int) -> None:
        """Set the size in bytes of data buffers begun from now on, if they have room for it. No effect on
        stored data, or once there is a newer view."""

    def resume(self, barrier: int) -> None:
        """The consumer continues after a barrier: the view gives data again. No effect if it waits for
        another barrier, or for none. (Flink: ``resumeConsumption``.)"""

    def make_stable(self, version: int, row: int) -> None:
        """The consumer's snapshots cover rows below ``row`` of that version, which need not be retained any
        longer. No effect once there is a newer view."""

    def release(self, reason: CancelReason) -> None:
        """The consumer is gone; nothing more will be polled through this view. Idempotent."""


class FreeBuffer(Protocol):
    """A receive buffer: headroom, then the payload area."""

    memory: memoryview


class Received:
    """A buffer or an event that has arrived and waits for the task. The task reads ``payload`` and then
    returns it to its attachment.

    Args:
        buffer, kind: the memory of a data payload, and its owner; None for an event.
    """

    __slots__ = ("attachment", "buffer", "data_type", "kind", "payload", "row", "rows")

    def __init__(
        self,
        attachment: ConsumerAttachment,
        payload: memoryview,
        header: BufferHeader,
        buffer: FreeBuffer | None = None,
        kind: BufferKind | None = None,
    ) -> None:
        self.attachment = attachment
        self.payload = payload
        self.data_type = header[5]
        self.rows = header[8]
        self.row = header[9]
        self.buffer = buffer
        self.kind = kind


class ConsumerAttachment(Protocol):
    """The owner of a consumer channel: takes what it received, and lends it floating buffers."""

    def request_floating(self) -> FreeBuffer | None: ...

    def wait_in_line(self, channel: ConsumerChannel) -> None:
        """Call ``channel.offer_floating`` when a floating buffer comes free, in turn."""

    def leave_line(self, channel: ConsumerChannel) -> None: ...

    def release_floating(self, buffer: FreeBuffer) -> None: ...

    def release_exclusive(self, buffer: FreeBuffer) -> None: ...

    def deliver(self, received: Received) -> None: ...

    def consumed(self, buffer: Any) -> None:
        """The task has given back what was delivered."""

    def spares(self, buffer: Any) -> bool:
        """(Task.) Nobody waits for that buffer, which the task has given back: the loop need not be woken for
        it. Who waits for it from now on has the loop look."""

    def fail(self, error: ShuffleError) -> None:
        """The channel is broken; the task is to see ``error`` after what was delivered."""


class ChannelState(Enum):
    OPEN = 1
    CLOSED = 2


_OPEN, _CLOSED = ChannelState.OPEN, ChannelState.CLOSED


class ProducerChannel:
    """The sending end of a channel. ``enqueued``: it is in the connection's queue of ready channels."""

    __slots__ = (
        "_credit_if_read",
        "_exclusive",
        "announced",
        "credit",
        "enqueued",
        "generation",
        "id",
        "sequence",
        "state",
        "view",
    )

    def __init__(self, channel_id: int, view: SubpartitionView, initial_credit: int, generation: int) -> None:
        self.id = channel_id
        self.generation = generation
        self.view = view
        self.credit = SendCredit(initial_credit)
        self._exclusive = initial_credit > 0
        """The consumer grants credit before any backlog is announced."""
        self._credit_if_read = max(1, (initial_credit + 1) // 2)
        """The least credit if the consumer has read everything: it withholds half of what it granted first
        at most."""
        self.sequence = 0
        self.enqueued = False
        self.state = ChannelState.OPEN
        self.announced = 0
        """Backlog that was announced to the consumer since it last granted credit; 0: none was."""

    def may_leave(self, next_type: NextType) -> bool:
        """Whether a poll would give something, and credit for it is there. A partial piece waits, and grows,
        while the consumer has yet to read as much as half of its initial credit stands for: as in Nagle's
        algorithm, with credit for acknowledgements."""
        credit = self.credit
        if next_type is _TYPE_DATA:
            return credit.sent < credit.granted
        if next_type is _TYPE_PARTIAL:
            if credit.available >= self._credit_if_read:
                return True
            self.view.hold()
            return False
        return next_type is _TYPE_EVENT

    def backlog_to_announce(self) -> int:
        """Backlog for a BacklogAnnouncement, or 0.

        Announced when there is data and no credit to send it with; again only when it has doubled
        or credit came and ran out.
        """
        if self.credit.available:
            return 0
        backlog = self.view.backlog()
        if not self._exclusive and self.view.next_type() is _TYPE_PARTIAL:
            backlog += 1
            self.view.hold()  # this look has ended the one before
        if backlog and backlog >= 2 * self.announced:
            self.announced = backlog
            return backlog
        return 0

    def poll(self) -> Outgoing | None:
        """The next piece, for which ``sequence`` is the number before this call; None if none may leave."""
        credit = self.credit
        outgoing = self.view.poll(credit.sent < credit.granted)
        if outgoing is None:
            return None
        if outgoing.next_type is _TYPE_PARTIAL and not self._exclusive:
            outgoing.backlog += 1  # else its credit comes back anyhow
        if outgoing.data_type == _DATA:
            credit.spend()
            if credit.sent == credit.granted:
                self.announced = outgoing.backlog
        self.sequence = (self.sequence + 1) & SEQUENCE_MASK
        return outgoing

    def on_credit(self, credit: int) -> bool:
        """Whether anything may have waited for that: with credit as if the consumer had read everything,
        nothing has.

        Raises:
            RemoteProtocolError: see :meth:`SendCredit.grant`.
        """
        has_waited = self.credit.available < self._credit_if_read
        self.credit.grant(credit)
        self.announced = 0
        return has_waited

    def on_resume(self, barrier: int) -> None:
        """The consumer continues after a barrier. It was not told of a backlog together with the barrier, and
        has requested nothing since, so the backlog is announced again."""
        self.view.resume(barrier)
        self.announced = 0

    def close(self, reason: CancelReason) -> None:
        """Idempotent; releases the view."""
        if self.state is ChannelState.OPEN:
            self.state = ChannelState.CLOSED
            self.view.release(reason)

    def validate(self) -> None:
        self.credit.validate()
        assert 0 <= self.sequence <= SEQUENCE_MASK


class ConsumerChannel:
    """The receiving end. Everything is called on the loop's side."""

    __slots__ = (
        "_arriving",
        "attachment",
        "backlog",
        "credit",
        "expected",
        "id",
        "row",
        "segment_bytes",
        "state",
    )

    def __init__(
        self, attachment: ConsumerAttachment, exclusive: list[FreeBuffer], segment_bytes: int
    ) -> None:
        self.id = 0
        """Given by the connection when the partition is requested."""
        self.attachment = attachment
        self.credit: ReceiveCredit[FreeBuffer] = ReceiveCredit(exclusive)
        self.segment_bytes = segment_bytes
        self.expected = 0
        """Sequence number of the next buffer or event."""
        self.state = ChannelState.OPEN
        self.row = -1
        """Number of the next row; before the first buffer with data it is not known."""
        self._arriving: Received | None = None
        self.backlog = 0
        """Data buffers that the producer had yet to send when it said so last."""

    def begin(self, header: BufferHeader) -> memoryview:
        """A buffer begins to arrive: the memory that its payload goes into.

        Raises:
            RemoteProtocolError: out of sequence, with rows that do not follow those before or cannot be
                counted, longer than a segment or an event may be, of an unknown type, or without credit.
                Only the channel ends, the connection stays.
        """
        length, _, _, sequence, backlog, data_type, _, _, rows, row = header
        size = length - BUFFER_FIXED_BYTES
        if sequence != self.expected:
            raise RemoteProtocolError(f"buffer {sequence} arrived where {self.expected} was expected")
        if size > self.segment_bytes:
            raise RemoteProtocolError(f"payload of {size} bytes, a segment holds {self.segment_bytes}")
        if row > ROW_MAX - rows:
            raise RemoteProtocolError(f"row {row} arrived, and the last one can be {ROW_MAX}")
        self.backlog = backlog
        if data_type == _DATA:
            if row != self.row >= 0:
                raise RemoteProtocolError(f"row {row} arrived where row {self.row} was expected")
            self.row = row + rows
            kind, buffer = self.credit.on_buffer()
            payload = buffer.memory[SEGMENT_HEADROOM_BYTES : SEGMENT_HEADROOM_BYTES + size]
            self._arriving = Received(self.attachment, payload, header, buffer, kind)
            return payload
        if data_type == _EVENT and size > limits.EVENT_BYTES_MAX:
            raise RemoteProtocolError(f"event of {size} bytes, at most {limits.EVENT_BYTES_MAX} are allowed")
        if data_type == _EVENT and size:
            payload = memoryview(bytearray(size))
            self._arriving = Received(self.attachment, payload, header)
            return payload
        raise RemoteProtocolError(f"buffer of unknown data type {data_type} or empty event")

    @property
    def arriving_rows(self) -> int:
        """Rows of the buffer whose payload is not complete yet."""
        return self._arriving.rows if self._arriving is not None else 0

    def end(self) -> None:
        """The payload is complete: hand it over, then ask for what the backlog needs."""
        received, self._arriving = self._arriving, None
        assert received is not None
        self.expected = (self.expected + 1) & SEQUENCE_MASK
        self.attachment.deliver(received)
        self.on_backlog(self.backlog)

    def on_backlog(self, backlog: int) -> None:
        """The producer has ``backlog`` more: borrow floating buffers one by one, or wait in line."""
        if self.state is _CLOSED:
            return
        self.backlog, credit = backlog, self.credit
        wanted = credit.on_backlog(backlog)
        while wanted:
            buffer = self.attachment.request_floating()
            if buffer is None:
                credit.waiting = True
                self.attachment.wait_in_line(self)
                return
            credit.on_floating(buffer)
            wanted -= 1
        if credit.waiting:
            self._leave_line_if_satisfied()

    def lend_itself(self) -> bool:
        """(Without credit.) A data buffer is there: borrow what it goes into; False: this channel waits for
        that in its gate's line."""
        self.on_backlog(1)
        if not self.credit.idle:
            return False
        self.credit.take_unannounced()
        return True

    def offer_floating(self, buffer: FreeBuffer) -> bool:
        """Offer a floating buffer to this channel, whose turn it is; False if it does not need one any more.
        It stays in the queue (``credit.waiting``) while it needs another."""
        credit = self.credit
        if self.state is _CLOSED or credit.idle >= credit.required:
            credit.waiting = False
            return False
        credit.waiting = credit.on_floating(buffer)
        return True

    def consumed(self, received: Received) -> None:
        """The task has given a buffer back."""
        buffer = received.buffer
        if buffer is None:
            return
        if received.kind is _FLOATING:
            self.attachment.release_floating(buffer)
        elif self.state is _CLOSED:
            self.attachment.release_exclusive(buffer)
        else:
            surplus = self.credit.on_consumed(buffer)
            if surplus is not None:
                self.attachment.release_floating(surplus)
            if self.credit.waiting:
                self._leave_line_if_satisfied()

    def _leave_line_if_satisfied(self) -> None:
        if self.credit.idle >= self.credit.required:
            self.credit.waiting = False
            self.attachment.leave_line(self)

    def close(self) -> None:
        """Idempotent: all unused credit is void; floating buffers go to the next in line."""
        if self.state is ChannelState.CLOSED:
            return
        self.state = ChannelState.CLOSED
        if self.credit.waiting:
            self.attachment.leave_line(self)
        arriving, self._arriving = self._arriving, None
        exclusive, floating = self.credit.void()
        for buffer in exclusive:
            self.attachment.release_exclusive(buffer)
        for buffer in floating:
            self.attachment.release_floating(buffer)
        if arriving is not None:
            self.consumed(arriving)

    def fail(self, error: ShuffleError) -> None:
        """Close, and let the task see why."""
        if self.state is ChannelState.OPEN:
            self.close()
            self.attachment.fail(error)

    def validate(self) -> None:
        self.credit.validate()
        assert 0 <= self.expected <= SEQUENCE_MASK
