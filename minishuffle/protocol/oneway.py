"""TCP flow control: one-way connections, whose reader stops when the frame at its head finds no buffer. Pure.

This is how exchanges worked before credit (Flink up to 1.4), kept to be compared with it. Nobody grants
anything: a producer sends what it has, and the consumer's kernel stops the producer's once nobody reads::

    channel waits for a buffer of its gate -> the connection is read no further -> TCP's window closes
    -> the producer's transport pauses -> its subpartitions fill -> its writer waits for a segment

All channels of one edge between two workers share the connection, so one slow consumer stops its siblings,
events included. That is what credit is for.

A *pair* of workers keeps its ordinary connection besides. It carries Ping and Pong and all that consumers say
(PartitionRequest, NewBufferSize, ResumeConsumption, Stable, CancelPartitionRequest), so neither a sign of
life nor a cancel ever stands behind data. A one-way connection carries BufferResponse and Error from
producers to consumers, and nothing back; one for both directions, or for several edges, would let two
exchanges in a row block each other for ever. The consumer numbers the connections that it wants, and names
the number in each PartitionRequest:

- it takes the next number for its first request of an edge, and again once all channels of the number before
  have ended: a number that has had its last channel gets no other;
- the producer's side closes the connection when its last channel was cancelled and none is requested, the
  consumer's side when it ends before anything came, or with an Error.

Who may dial is decided as for ordinary connections, so either side may hear of a number first. A machine
exists from the first request on, and sends or receives once it has a socket. With its socket its channels are
gone, and those alone; with the ordinary connection all of the pair's are.

:class:`OneWayReceiver` takes the place of the ``Connection`` for the consuming ends of channels,
:class:`OneWaySender` for the producing ends. Channels keep their machines: a consumer's lends itself a buffer
for each one that comes, and a producer's has credit that never ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from minishuffle import limits
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import PeerLost, PeerSuspected, RemoteProtocolError, ShuffleError, error_from_code
from minishuffle.protocol.channel import (
    ChannelState,
    ConsumerChannel,
    NextType,
    Outgoing,
    ProducerChannel,
    SubpartitionView,
)
from minishuffle.protocol.connection import (
    Connection,
    ConnectionEvent,
    PartitionReleased,
    PeerClosed,
    count_buffers,
    count_frames_in,
    take_control,
)
from minishuffle.protocol.credit import ENDLESS_CREDIT
from minishuffle.protocol.tap import ChannelTap, Note
from minishuffle.wire.decoder import NO_MEMORY, FrameDecoder
from minishuffle.wire.frames import (
    BufferHeader,
    CancelReason,
    Close,
    DataType,
    Error,
    Frame,
    PartitionRequest,
    frame_name,
    write_buffer,
)

__all__ = ["OneWayReceiver", "OneWaySender"]

_DATA: Final = int(DataType.DATA)
_NONE, _PARTIAL = NextType.NONE, NextType.PARTIAL
_OPEN: Final = ChannelState.OPEN


class OneWayReceiver:
    """The consuming end of a one-way connection.

    Invariant: while it is stopped there is a channel that waits in its gate's line, for the frame at its
    head.

    Args:
        pair: the ordinary connection to the same worker.
        number: names this one in requests.
    """

    def __init__(self, pair: Connection, number: int, counters: ConnectionCounters) -> None:
        self.number = number
        self.touched = False
        """Something has come."""
        self.failed = False
        """The producer's side has said that a channel failed."""
        self._pair = pair
        self._counters = counters
        self._consumers: dict[int, ConsumerChannel] = {}
        self._last_id = 0
        self._events: list[ConnectionEvent] = []
        self._decoder = FrameDecoder(self, limits.DATA_FRAME_BYTES_MAX)
        self._arriving: ConsumerChannel | None = None
        self._tap: ChannelTap | None = None
        """While somebody listens to a channel."""
        self._held = b""
        self._taking = False
        self._closed = False

    @property
    def channels(self) -> int:
        """Channels that have neither ended nor failed."""
        return len(self._consumers)

    @property
    def reading(self) -> bool:
        """False: the frame at its head has no buffer, and the socket is not to be read."""
        return not self._decoder.stopped

    @property
    def held_bytes(self) -> int:
        """Bytes read and not placed in a buffer yet: less than one read."""
        return len(self._held)

    # --- channels ---------------------------------------------------------------------------------

    def request_partition(self, consumer: ConsumerChannel, request: PartitionRequest) -> int:
        """Open a channel, by a request over the ordinary connection; gives its id."""
        channel = self._pair.request_partition(consumer, replace(request, one_way=self.number))
        self._consumers[channel] = consumer
        self._last_id = channel
        return channel

    def announce_credit(self, consumer: ConsumerChannel) -> bool:
        """A channel has got the buffer that it waited for."""
        self._go_on()
        return True

    def announce_buffer_size(self, consumer: ConsumerChannel, size: int) -> None:
        """Tell the producer how full buffers are to be, over the ordinary connection."""
        self._pair.announce_buffer_size(consumer, size)

    def resume_consumption(self, consumer: ConsumerChannel, generation: int, barrier: int) -> None:
        """Tell the producer to continue after a barrier, over the ordinary connection."""
        self._pair.resume_consumption(consumer, generation, barrier)

    def announce_stable(self, consumer: ConsumerChannel, version: int, row: int) -> None:
        """Tell the producer which rows it need not retain, over the ordinary connection."""
        self._pair.announce_stable(consumer, version, row)

    def cancel(self, consumer: ConsumerChannel, reason: CancelReason = CancelReason.ENDED) -> None:
        """Close a consumer's channel: its data is discarded, at once if it has stopped the other channels;
        idempotent."""
        self._forget(consumer)
        self._pair.cancel(consumer, reason)
        self._go_on()

    def _forget(self, consumer: ConsumerChannel) -> None:
        if self._consumers.pop(consumer.id, None) is not None and self._arriving is consumer:
            self._arriving = None
            self._counters.rows_discarded += consumer.arriving_rows
            self._decoder.discard_payload()

    # --- receiving --------------------------------------------------------------------------------

    def receive(self, data: bytes | memoryview, now: float) -> int:
        """Take what one read gave; gives the number of frames that became complete. Do not read again before
        it is ``reading``.

        Raises:
            RemoteProtocolError: the stream is malformed.
        """
        self.touched = True
        self._counters.bytes_in += len(data)
        return self._take(data)

    def _take(self, data: bytes | memoryview) -> int:
        self._taking = True
        try:
            taken = self._decoder.receive(data)
        finally:
            self._taking = False
            frames = count_frames_in(self._decoder, self._counters)
        self._held = bytes(data[taken:])
        return frames

    def _go_on(self) -> None:
        """Check again whether the frame at the head has a buffer, or no longer needs one."""
        if self.reading or self._taking or self._closed:
            return
        held, self._held = self._held, b""
        try:
            self._take(held)
        except RemoteProtocolError as error:
            self._events.append(PeerClosed(error))

    def buffer_begin(self, header: BufferHeader) -> memoryview | None:
        """(For the decoder.) Memory for an arriving payload, or None for a closed channel's."""
        channel, data_type, rows = header[2], header[5], header[8]
        consumer = self._consumers.get(channel)
        if consumer is None:
            self._check_id_was_given(channel)
            self._counters.rows_discarded += rows
            return None
        if data_type == _DATA and not consumer.lend_itself():
            return NO_MEMORY
        try:
            target = consumer.begin(header)
        except RemoteProtocolError as error:
            self._counters.rows_discarded += rows
            self._consumers.pop(channel)
            self._pair.fail_consumer(consumer, error)
            return None
        self._counters.buffers_in += data_type == _DATA
        self._arriving = consumer
        return target

    def buffer_end(self) -> None:
        """(For the decoder.) The payload begun last is complete."""
        consumer, self._arriving = self._arriving, None
        assert consumer is not None
        consumer.end()

    def credit(self, channel: int, credit: int) -> None:
        """(For the decoder.) There is none here."""
        raise RemoteProtocolError("add_credit frame has no place on a one-way connection")

    def frame(self, frame: Frame) -> None:
        """(For the decoder.) Any other frame."""
        match frame:
            case Error(channel, code, text) if channel:
                self._check_id_was_given(channel)
                consumer = self._consumers.get(channel)
                if consumer is not None:
                    self.failed = True
                    self._forget(consumer)
                    self._pair.producer_failed(channel, error_from_code(code, text))
            case Error(_, code, text):
                self._events.append(PeerClosed(error_from_code(code, text)))
            case Close():
                self._events.append(PeerClosed(None))
            case _:
                raise RemoteProtocolError(f"{frame_name(frame)} frame has no place on a one-way connection")

    def _check_id_was_given(self, channel: int) -> None:
        if not 0 < channel <= self._last_id:
            raise RemoteProtocolError(f"frame for channel {channel:#x}, which was never opened")

    # --- listening --------------------------------------------------------------------------------

    def listen(self, channel: int, note: Note) -> None:
        """Have ``note`` called with each frame of a channel, those over the ordinary connection included."""
        self._pair.listen(channel, note)
        if self._tap is None:
            self._tap = ChannelTap(self)
            self._decoder.sink = self._tap.received
        self._tap.open(channel, note)

    def listen_no_more(self, channel: int) -> None:
        """Idempotent."""
        self._pair.listen_no_more(channel)
        if self._tap is not None:
            self._tap.close(channel)
            if not self._tap:
                self._tap = None
                self._decoder.sink = self

    # --- the shell's side -------------------------------------------------------------------------

    def events(self) -> list[ConnectionEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def data_to_send(self, buffers_max: int) -> tuple[list[bytes | memoryview], list[Outgoing]]:
        """Nothing: it goes one way."""
        return [], []

    wants_to_send = False

    def next_deadline(self) -> float | None:
        """Never: the ordinary connection has the Pings."""
        return None

    def handle_timer(self, now: float) -> None:
        """There is no timer."""

    def close(self) -> None:
        """No frame is sent: the connection goes one way."""

    def lost(self, error: ShuffleError | None) -> None:
        """The byte stream is gone, or never came, and with it every channel; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._decoder.discard_payload()
        self._held, self._arriving = b"", None
        consumers, self._consumers = list(self._consumers.values()), {}
        for consumer in consumers:
            self._pair.fail_consumer(consumer, error or PeerLost("the peer closed the connection"))

    def validate(self) -> None:
        """Check every invariant; for tests, after each step."""
        waiting = [each for each in self._consumers.values() if each.credit.waiting]
        assert self._closed or self._taking or len(waiting) == (not self.reading)
        assert not (self.reading and self._held)
        for consumer in self._consumers.values():
            consumer.validate()


class OneWaySender:
    """The producing end of a one-way connection. Channels take turns, a buffer each; channels that have only
    the open part of a segment are served last.

    Args:
        pair: the ordinary connection to the same worker.
        wake: called when a frame of the ordinary connection gives it something to send.
    """

    def __init__(self, pair: Connection, counters: ConnectionCounters, wake: Callable[[], None]) -> None:
        self.channels: dict[int, ProducerChannel] = {}
        self.ready: deque[ProducerChannel] = deque()
        self._partial: dict[int, ProducerChannel] = {}
        """Channels that have only the open part of a segment."""
        self._control: deque[Frame] = deque()
        self._pair = pair
        self._counters = counters
        self._wake = wake
        self._closed = False

    reading = True

    # --- channels ---------------------------------------------------------------------------------

    def attach(self, channel: int, view: SubpartitionView) -> ProducerChannel | None:
        """Answer a request for this connection; None (and the view released) if it was cancelled
        meanwhile."""
        if self._closed:
            self._pair.refuse(channel, PeerLost("the one-way connection is gone"))
        request = None if self._closed else self._pair.producers.hand_over(channel, self)
        if request is None:
            view.release(CancelReason.FAILED)
            return None
        if request.buffer_size:
            view.resize(request.buffer_size)
        producer = ProducerChannel(channel, view, ENDLESS_CREDIT, request.generation)
        self.channels[channel] = producer
        self.available(channel)
        return producer

    def available(self, channel: int) -> None:
        """Something became available on a channel."""
        producer = self.channels.get(channel)
        if producer is not None and (not producer.enqueued or channel in self._partial):
            self._line_up(producer, producer.view.next_type())

    def _line_up(self, producer: ProducerChannel, next_type: NextType) -> None:
        self._partial.pop(producer.id, None)
        producer.enqueued = next_type is not _NONE
        if next_type is _PARTIAL:
            self._partial[producer.id] = producer
            producer.view.hold()
        elif producer.enqueued:
            self.ready.append(producer)

    def fail_producer(self, channel: int, error: ShuffleError) -> None:
        """The producing task is gone: send its consumer the error, after the data sent before."""
        if self.cancel(channel, CancelReason.FAILED) is not None:
            self._pair.producers.take_back(channel)
            self._control.append(Error(channel, error.code, str(error)))

    def cancel(self, channel: int, reason: CancelReason) -> PartitionReleased | None:
        """The consumer closes a channel; received over the ordinary connection."""
        producer = self.channels.pop(channel, None)
        if producer is None:
            return None
        self._partial.pop(channel, None)
        producer.close(reason)
        return PartitionReleased(channel)

    def on_buffer_size(self, channel: int, size: int) -> None:
        """The consumer sets the size of buffers; received over the ordinary connection."""
        if (producer := self.channels.get(channel)) is not None:
            producer.view.resize(size)

    def on_stable(self, channel: int, version: int, row: int) -> None:
        """The consumer's snapshots cover these rows; received over the ordinary connection."""
        if (producer := self.channels.get(channel)) is not None:
            producer.view.make_stable(version, row)

    def on_resume(self, channel: int, generation: int, barrier: int) -> None:
        """The consumer continues after a barrier; received over the ordinary connection. Ignored for another
        generation."""
        producer = self.channels.get(channel)
        if producer is not None and producer.generation == generation:
            producer.on_resume(barrier)
            self.available(channel)
            if producer.enqueued:
                self._wake()

    # --- sending ----------------------------------------------------------------------------------

    def data_to_send(self, buffers_max: int) -> tuple[list[bytes | memoryview], list[Outgoing]]:
        """As of a ``Connection``."""
        chunks: list[bytes | memoryview] = []
        if self._control:
            chunks.append(take_control(self._control, self._counters))
        pieces: list[Outgoing] = []
        while (self.ready or self._partial) and len(pieces) < buffers_max:
            producer = self.ready.popleft() if self.ready else self._partial.pop(next(iter(self._partial)))
            producer.enqueued = False
            if producer.state is not _OPEN:
                continue
            sequence = producer.sequence
            piece = producer.poll()
            if piece is not None:
                write_buffer(piece, producer.id, sequence, 0, chunks)
                pieces.append(piece)
                self._line_up(producer, piece.next_type)
        if pieces:
            count_buffers(pieces, self._counters)
        return chunks, pieces

    @property
    def wants_to_send(self) -> bool:
        return bool(self._control or self.ready or self._partial)

    # --- the shell's side -------------------------------------------------------------------------

    def receive(self, data: bytes | memoryview, now: float) -> int:
        """Nothing may come.

        Raises:
            RemoteProtocolError: something did.
        """
        self._counters.bytes_in += len(data)
        raise RemoteProtocolError(f"{len(data)} bytes came against the direction of a one-way connection")

    def events(self) -> list[ConnectionEvent]:
        """There are none."""
        return []

    def next_deadline(self) -> float | None:
        """Never: the ordinary connection has the Pings."""
        return None

    def handle_timer(self, now: float) -> None:
        """There is no timer."""

    def close(self) -> None:
        """Send Close after all other frames."""
        if not self._closed:
            self._control.append(Close())

    def lost(self, error: ShuffleError | None) -> None:
        """The byte stream is gone, or never existed, and with it every channel; consumers learn it over the
        ordinary connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        reason = CancelReason.SUSPECTED if isinstance(error, PeerSuspected) else CancelReason.FAILED
        why = error or PeerLost("the peer closed the connection")
        for channel in list(self.channels):
            self.cancel(channel, reason)
            self._pair.producers.take_back(channel, why)
        self._control.clear()

    def validate(self) -> None:
        """Check every invariant; for tests, after each step."""
        line = [producer.id for producer in self.ready if producer.state is _OPEN]
        assert len(line) == len(set(line)) and not set(line) & set(self._partial)
        assert set(self._partial) <= set(self.channels)
        assert all(each.enqueued for each in (*self.ready, *self._partial.values()))
        for producer in self.channels.values():
            producer.validate()
