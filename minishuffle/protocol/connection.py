"""Many logical channels on one byte stream, as a pure machine.

Feed it with :meth:`Connection.receive`; after every call take :meth:`Connection.events` and send
what :meth:`Connection.data_to_send` gives. On each channel either side may be the consumer. Channel
ids are given by the consumer in ascending order, carry a bit that says whether the dialer gave them,
and are never used again on this connection; frames for a closed id are discarded without taking a
buffer. Producer channels that have something to send stand in one line and take turns, one buffer
each (Flink's ``PartitionRequestQueue``). A channel's fault ends that channel; a malformed stream ends
the connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

from minishuffle import limits
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import (
    LocalProtocolError,
    PeerLost,
    PeerSuspected,
    RemoteProtocolError,
    ResourceExhausted,
    ShuffleError,
    error_from_code,
)
from minishuffle.protocol.channel import (
    ChannelState,
    ConsumerChannel,
    Outgoing,
    ProducerChannel,
    SubpartitionView,
)
from minishuffle.protocol.tap import ChannelTap, Note
from minishuffle.wire.decoder import FrameDecoder
from minishuffle.wire.frames import (
    BUFFER_HEADER_BYTES,
    AddCredit,
    BacklogAnnouncement,
    BufferHeader,
    CancelPartitionRequest,
    CancelReason,
    Close,
    DataType,
    Error,
    Frame,
    FrameType,
    Message,
    NewBufferSize,
    PartitionRequest,
    Ping,
    Pong,
    ResumeConsumption,
    Stable,
    encode_frame,
    frame_name,
    write_buffer,
)

__all__ = [
    "Connection",
    "ConnectionEvent",
    "KeepAlive",
    "LAST_LOOK_SECONDS",
    "MessageReceived",
    "PartitionCancelled",
    "PartitionReleased",
    "PartitionRequested",
    "PeerClosed",
    "PeerSilent",
    "Producers",
    "count_buffers",
    "count_frames_in",
    "take_control",
    "SILENT_AFTER_INTERVALS",
]


_DATA: Final = int(DataType.DATA)
_OPEN: Final = ChannelState.OPEN


# --- events ---------------------------------------------------------------------------------------
#
# Events that a connection reports to its shell.


@dataclass(frozen=True, slots=True)
class PartitionRequested:
    """Answer with :meth:`Connection.attach` or :meth:`Connection.refuse`."""

    request: PartitionRequest


@dataclass(frozen=True, slots=True)
class PartitionCancelled:
    """The peer took a request back before it was answered."""

    channel: int


@dataclass(frozen=True, slots=True)
class PartitionReleased:
    """The peer has closed a channel on which it was sent a partition."""

    channel: int


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The peer said Close or a connection-wide Error: nothing more will come."""

    error: ShuffleError | None


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """No byte came for ``seconds`` although a Ping was sent."""

    seconds: float


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message of the peer, or if its body is empty, the answer to the one of that number."""

    message: Message


ConnectionEvent: TypeAlias = (
    PartitionRequested | PartitionCancelled | PartitionReleased | PeerClosed | PeerSilent | MessageReceived
)

# --- keepalive ------------------------------------------------------------------------------------
#
# Ping into silence, and report when even that stays unanswered.


SILENT_AFTER_INTERVALS: Final = 4
LAST_LOOK_SECONDS: Final = 0.01
"""Long enough for an event loop to look at its sockets: uvloop calls timers before them, and counts in ms."""
EARLY_SHARE: Final = 0.25
"""The share of an interval by which a Ping may be early, in order to leave together with others."""


class KeepAlive:
    """The keep-alive of a connection: every received byte is a sign of life, not only a Pong.

    Silence is counted in intervals in which this process ran. A timer that is late by more than an interval
    shows that it did not run: it was stopped, its machine slept, or its threads held the interpreter. Then an
    unread answer may be in the socket. For the same reason a peer counts as silent only after the sockets
    have been read once more.

    Args:
        interval: seconds of silence before a Ping; after three more of them the peer counts as silent.
        now: the clock's reading, in seconds.
    """

    __slots__ = ("_interval", "_received_at", "_silent_intervals", "_token", "due")

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._token = 0
        self._received_at = now
        self.due = now + interval
        """When :meth:`handle_timer` wants to be called."""
        self._silent_intervals = 0

    def note_received(self, now: float) -> None:
        self._received_at = now
        self.due = now + self._interval
        self._silent_intervals = 0

    def handle_timer(self, now: float) -> Ping | PeerSilent | None:
        """The Ping to send or the event to report now; None: nothing is due. The first Ping may go up to
        EARLY_SHARE of an interval early, which makes nothing else earlier."""
        late = now - self.due
        if late < (0 if self._silent_intervals else -EARLY_SHARE * self._interval):
            return None
        if self._silent_intervals and late <= self._interval:
            self._silent_intervals += 1
            last = self._silent_intervals == SILENT_AFTER_INTERVALS
            self.due = now + (LAST_LOOK_SECONDS if last else self._interval)
            silent = self._silent_intervals > SILENT_AFTER_INTERVALS
            return PeerSilent(now - self._received_at) if silent else None
        self.due += self._interval + max(0.0, late)
        self._silent_intervals = max(1, self._silent_intervals)
        self._token += 1
        return Ping(self._token)


# --- producers ------------------------------------------------------------------------------------
#
# The producing half of a connection: its channels, and the line in which they take turns.
#
# (Flink: ``PartitionRequestQueue``.)


class ForeignProducers(Protocol):
    """A one-way connection, for channels requested over the ordinary one."""

    def cancel(self, channel: int, reason: CancelReason) -> PartitionReleased | None:
        """The consumer closes a channel."""

    def on_buffer_size(self, channel: int, size: int) -> None:
        """NewBufferSize."""

    def on_resume(self, channel: int, generation: int, barrier: int) -> None:
        """ResumeConsumption."""

    def on_stable(self, channel: int, version: int, row: int) -> None:
        """Stable."""


class Producers:
    """The channels on which this side produces, including channels handed over to one-way connections.

    Invariants: a channel is in the queue at most once, exactly if it is ``enqueued``; an id is either
    requested or attached.

    Args:
        control: the queue of control frames to send.
    """

    def __init__(self, control: deque[Frame], counters: ConnectionCounters) -> None:
        self.channels: dict[int, ProducerChannel] = {}
        self.ready: deque[ProducerChannel] = deque()
        self._requested: dict[int, PartitionRequest] = {}
        self._elsewhere: dict[int, ForeignProducers] = {}
        """Channels whose buffers one-way connections carry."""
        self._refused_for_number = 0
        self._control = control
        self._counters = counters

    def expect(self, request: PartitionRequest) -> bool:
        """The peer asks for a partition; False if there are too many channels already.

        Raises:
            RemoteProtocolError: it asks on and on although it was refused.
        """
        channels_max = limits.CHANNELS_PER_CONNECTION_MAX
        if len(self.channels) + len(self._elsewhere) + len(self._requested) >= channels_max:
            self._refused_for_number += 1
            if self._refused_for_number > channels_max:
                raise RemoteProtocolError(
                    f"the peer asked for more than {channels_max} channels, and went on asking"
                )
            error = ResourceExhausted(f"more than {channels_max} channels")
            self._control.append(Error(request.channel, error.code, str(error)))
            return False
        self._requested[request.channel] = request
        return True

    def attach(self, channel: int, view: SubpartitionView) -> ProducerChannel | None:
        request = self._requested.pop(channel, None)
        if request is None:
            view.release(CancelReason.FAILED)
            return None
        producer = ProducerChannel(channel, view, request.initial_credit, request.generation)
        if request.buffer_size:
            view.resize(request.buffer_size)
        self._counters.credits_received += request.initial_credit
        self.channels[channel] = producer
        self.available(channel)
        return producer

    def hand_over(self, channel: int, to: ForeignProducers) -> PartitionRequest | None:
        """Hand a request over to the one-way connection that answers it. Returns the request; None if it was
        cancelled."""
        request = self._requested.pop(channel, None)
        if request is not None:
            self._elsewhere[channel] = to
        return request

    def take_back(self, channel: int, error: ShuffleError | None = None) -> None:
        """A channel that was handed over is closed; ``error`` is for its consumer, if the consumer cannot get
        it otherwise."""
        if self._elsewhere.pop(channel, None) is not None and error is not None:
            self._control.append(Error(channel, error.code, str(error)))

    def requested(self, one_way: int) -> bool:
        """Whether there is an unanswered request for the one-way connection of that number."""
        return any(request.one_way == one_way for request in self._requested.values())

    def refuse(self, channel: int, error: ShuffleError) -> None:
        if self._requested.pop(channel, None) is not None:
            self._control.append(Error(channel, error.code, str(error)))

    def fail(self, channel: int, error: ShuffleError) -> None:
        producer = self.channels.pop(channel, None)
        if producer is not None:
            producer.close(CancelReason.FAILED)
            self._control.append(Error(channel, error.code, str(error)))

    def cancel(self, channel: int, reason: CancelReason) -> PartitionCancelled | PartitionReleased | None:
        """The consumer closes a channel; an unknown id is ignored."""
        if (elsewhere := self._elsewhere.pop(channel, None)) is not None:
            return elsewhere.cancel(channel, reason)
        producer = self.channels.pop(channel, None)
        if producer is not None:
            producer.close(reason)
            return PartitionReleased(channel)
        return PartitionCancelled(channel) if self._requested.pop(channel, None) is not None else None

    def on_credit(self, channel: int, credit: int) -> None:
        """Apply an AddCredit; ignored for a closed channel. A credit out of bounds ends its channel."""
        producer = self.channels.get(channel)
        if producer is None:
            self._grant_ahead(channel, credit)
            return
        self._counters.credits_received += credit
        try:
            has_waited = producer.on_credit(credit)
        except RemoteProtocolError as error:
            self.fail(channel, error)
            return
        if has_waited and not producer.enqueued:
            self._line_up(producer)

    def _grant_ahead(self, channel: int, credit: int) -> None:
        """Credit for a request that was not answered yet is part of its initial credit."""
        request = self._requested.get(channel)
        if request is None:
            return
        total = request.initial_credit + credit
        if total > limits.CREDIT_MAX:
            text = f"AddCredit {credit} on top of {request.initial_credit}"
            text += f": at most {limits.CREDIT_MAX} may be outstanding"
            self.refuse(channel, RemoteProtocolError(text))
        else:
            self._requested[channel] = replace(request, initial_credit=total)

    def on_buffer_size(self, channel: int, size: int) -> None:
        """Apply a NewBufferSize; ignored for a closed channel. A request that was not answered yet remembers
        it."""
        producer, request = self.channels.get(channel), self._requested.get(channel)
        if producer is not None:
            producer.view.resize(size)
        elif request is not None:
            self._requested[channel] = replace(request, buffer_size=size)
        elif (elsewhere := self._elsewhere.get(channel)) is not None:
            elsewhere.on_buffer_size(channel, size)

    def on_resume(self, channel: int, generation: int, barrier: int) -> None:
        """Apply a ResumeConsumption; ignored for a closed channel or another generation."""
        producer = self.channels.get(channel)
        if producer is not None and producer.generation == generation:
            producer.on_resume(barrier)
            self.available(channel)
        elif (elsewhere := self._elsewhere.get(channel)) is not None:
            elsewhere.on_resume(channel, generation, barrier)

    def on_stable(self, channel: int, version: int, row: int) -> None:
        """Apply a Stable; ignored for a channel that is not attached: the next one says as much."""
        producer = self.channels.get(channel)
        if producer is not None:
            producer.view.make_stable(version, row)
        elif (elsewhere := self._elsewhere.get(channel)) is not None:
            elsewhere.on_stable(channel, version, row)

    def available(self, channel: int) -> None:
        """Data, an event or credit has arrived: enqueue the channel, or announce a backlog without credit."""
        producer = self.channels.get(channel)
        if producer is not None and not producer.enqueued:
            self._line_up(producer)

    def _line_up(self, producer: ProducerChannel) -> None:
        """Have a channel that stands in no line get in line if it may send something."""
        if producer.may_leave(producer.view.next_type()):
            producer.enqueued = True
            self.ready.append(producer)
        else:
            self._announce_backlog(producer)

    def _announce_backlog(self, producer: ProducerChannel) -> None:
        backlog = producer.backlog_to_announce()
        if backlog:
            self._control.append(BacklogAnnouncement(producer.id, min(backlog, limits.CREDIT_MAX)))

    def take_turns(self, buffers_max: int, chunks: list[bytes | memoryview]) -> list[Outgoing]:
        """Take a buffer of each ready channel in turn, at most ``buffers_max``; their frames are appended to
        ``chunks``."""
        pieces: list[Outgoing] = []
        ready = self.ready
        while ready and len(pieces) < buffers_max:
            producer = ready.popleft()
            producer.enqueued = False
            sequence = producer.sequence
            piece = producer.poll() if producer.state is _OPEN else None
            if piece is None:
                continue
            write_buffer(piece, producer.id, sequence, piece.backlog, chunks)
            pieces.append(piece)
            if producer.may_leave(piece.next_type):
                producer.enqueued = True
                ready.append(producer)
            elif piece.data_type != _DATA:
                self._announce_backlog(producer)
        if pieces:
            count_buffers(pieces, self._counters)
        return pieces

    def lost(self, reason: CancelReason) -> None:
        """The connection is gone."""
        for producer in self.channels.values():
            producer.close(reason)
        for channel, elsewhere in self._elsewhere.items():
            elsewhere.cancel(channel, reason)
        self._elsewhere.clear()
        self.channels.clear()
        self._requested.clear()
        self.ready.clear()

    def validate(self) -> None:
        line = [producer.id for producer in self.ready if producer.state is ChannelState.OPEN]
        assert len(line) == len(set(line))
        assert all(producer.enqueued for producer in self.ready)
        assert not set(self._requested) & set(self.channels)
        assert not set(self._elsewhere) & {*self._requested, *self.channels}
        for producer in self.channels.values():
            producer.validate()


# --- counting -------------------------------------------------------------------------------------


def count_buffers(pieces: list[Outgoing], counters: ConnectionCounters) -> None:
    """Count what is about to be sent."""
    frames_out = counters.frames_out
    frames_out["buffer_response"] = frames_out.get("buffer_response", 0) + len(pieces)
    if len(pieces) == 1 and pieces[0].data_type == _DATA:
        piece = pieces[0]
        counters.buffers_out += 1
        counters.payload_bytes_out += piece.size
        counters.rows_out += piece.rows
        counters.bytes_out += BUFFER_HEADER_BYTES + piece.size
        return
    data = [piece for piece in pieces if piece.data_type == _DATA]
    payload_bytes = sum([piece.size for piece in data])
    counters.buffers_out += len(data)
    counters.payload_bytes_out += payload_bytes
    counters.rows_out += sum([piece.rows for piece in data])
    if len(data) < len(pieces):  # events among them
        payload_bytes = sum([piece.size for piece in pieces])
    counters.bytes_out += BUFFER_HEADER_BYTES * len(pieces) + payload_bytes


def count_frames_in(decoder: FrameDecoder, counters: ConnectionCounters) -> int:
    """Count the frames that have become complete since the last call; gives their number."""
    counts, frames_in = decoder.counts, counters.frames_in
    total = 0
    for kind, name in _FRAME_NAMES:
        if counts[kind]:
            total += counts[kind]
            frames_in[name] = frames_in.get(name, 0) + counts[kind]
            counts[kind] = 0
    return total


def take_control(control: deque[Frame], counters: ConnectionCounters) -> bytes:
    """Take all control frames that wait to be sent, as bytes."""
    encoded = []
    for frame in control:
        name = frame_name(frame)
        counters.frames_out[name] = counters.frames_out.get(name, 0) + 1
        encoded.append(encode_frame(frame))
    control.clear()
    data = b"".join(encoded)
    counters.bytes_out += len(data)
    return data


# --- connection -----------------------------------------------------------------------------------

DIALER_BIT: Final = 0x8000_0000
_FRAME_NAMES: Final = tuple((int(kind), kind.name.lower()) for kind in FrameType)


class Connection:
    """Machine of one data connection after its handshake.

    Invariants: a producer channel stands in the line of ready ones at most once; an id is in at most
    one of requested, producing and consuming; per channel the invariants of its ledgers.
    """

    reading = True
    """The socket is always read: with credit, each buffer that arrives has room."""

    def __init__(
        self, *, dialer: bool, counters: ConnectionCounters, ping_interval: float, now: float
    ) -> None:
        self._dialer = dialer
        self._counters = counters
        self._alive = KeepAlive(ping_interval, now)
        self._next_id = 1
        self._consumers: dict[int, ConsumerChannel] = {}
        self._last_requested = 0
        """The peer's highest channel id, without its direction bit: ids ascend."""
        self._control: deque[Frame] = deque()
        self.producers = Producers(self._control, counters)
        self._pong: Pong | None = None
        """The answer to the newest Ping; it takes the place of one that has not left yet."""
        self._granting: dict[int, ConsumerChannel] = {}
        """Channels whose credit asks for a flush."""
        self._withheld: dict[int, ConsumerChannel] = {}
        """Channels with credit that goes with whatever else leaves."""
        self._resizing: dict[int, int] = {}
        """The buffer sizes to announce, by channel; a newer size replaces an unsent one."""
        self._stable: dict[int, tuple[int, int]] = {}
        """Version and row of the Stable to send, by channel; a newer one replaces an unsent one."""
        self._events: list[ConnectionEvent] = []
        self._arriving: ConsumerChannel | None = None
        self._decoder = FrameDecoder(self, limits.DATA_FRAME_BYTES_MAX)
        self._tap: ChannelTap | None = None
        """While somebody listens to a channel."""
        self._closed = False

    # --- receiving ------------------------------------------------------------------------------

    def receive(self, data: bytes | memoryview, now: float) -> int:
        """Take the next bytes of the stream; gives the number of frames that became complete.

        Raises:
            RemoteProtocolError: the stream is malformed, or the peer does not read its answers; call
                :meth:`lost` and close the socket.
        """
        self._alive.note_received(now)
        self._counters.bytes_in += len(data)
        try:
            self._decoder.receive(data)
        finally:
            frames = count_frames_in(self._decoder, self._counters)
        if len(self._control) > limits.CONTROL_FRAMES_UNSENT_MAX:
            raise RemoteProtocolError(
                f"more than {limits.CONTROL_FRAMES_UNSENT_MAX} control frames wait to be read by the peer"
            )
        return frames

    def events(self) -> list[ConnectionEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def buffer_begin(self, header: BufferHeader) -> memoryview | None:
        """(For the decoder.) Memory for an arriving payload, or None for a closed channel's."""
        counters = self._counters
        _, _, channel, _, _, data_type, _, _, rows, _ = header
        consumer = self._consumers.get(channel)
        if consumer is None:
            self._check_id_was_given(channel)
            counters.rows_discarded += rows
            return None
        try:
            target = consumer.begin(header)
        except RemoteProtocolError as error:
            self.fail_consumer(consumer, error)
            counters.rows_discarded += rows
            return None
        if data_type == _DATA:
            counters.buffers_in += 1
        self._arriving = consumer
        return target

    def buffer_end(self) -> None:
        """(For the decoder.) The payload begun last is complete."""
        consumer, self._arriving = self._arriving, None
        assert consumer is not None
        consumer.end()
        if consumer.credit.unannounced:
            self.announce_credit(consumer)

    def credit(self, channel: int, credit: int) -> None:
        """(For the decoder.) Credit for one of this side's producer channels."""
        self.producers.on_credit(channel, credit)

    def frame(self, frame: Frame) -> None:
        """(For the decoder.) Any other frame."""
        match frame:
            case PartitionRequest():
                self._on_partition_request(frame)
            case BacklogAnnouncement(channel, backlog):
                consumer = self._consumers.get(channel)
                if consumer is None:
                    self._check_id_was_given(channel)
                else:
                    consumer.on_backlog(backlog)
                    self.announce_credit(consumer)
            case NewBufferSize(channel, size):
                self.producers.on_buffer_size(channel, size)
            case ResumeConsumption(channel, generation, barrier):
                self.producers.on_resume(channel, generation, barrier)
            case Stable(channel, version, row):
                self.producers.on_stable(channel, version, row)
            case CancelPartitionRequest(channel, reason):
                if (event := self.producers.cancel(channel, reason)) is not None:
                    self._events.append(event)
            case Error(channel, code, text) if channel:
                self.producer_failed(channel, error_from_code(code, text))
            case Error(_, code, text):
                self._events.append(PeerClosed(error_from_code(code, text)))
            case Close():
                self._events.append(PeerClosed(None))
            case Message():
                self._events.append(MessageReceived(frame))
            case Ping(token):
                self._pong = Pong(token)
            case Pong():
                pass  # every received byte is a sign of life already
            case _:
                raise RemoteProtocolError(
                    f"{frame_name(frame)} frame has no place on an established data connection"
                )

    def _on_partition_request(self, request: PartitionRequest) -> None:
        channel = request.channel
        given_by_dialer, number = bool(channel & DIALER_BIT), channel & ~DIALER_BIT
        if given_by_dialer == self._dialer or number <= self._last_requested:
            raise RemoteProtocolError(
                f"PartitionRequest names channel {channel:#x}, which is not the peer's to give"
            )
        self._last_requested = number
        if self.producers.expect(request):
            self._events.append(PartitionRequested(request))

    def _check_id_was_given(self, channel: int) -> None:
        own = bool(channel & DIALER_BIT) == self._dialer
        if not own or not 0 < channel & ~DIALER_BIT < self._next_id:
            raise RemoteProtocolError(f"frame for channel {channel:#x}, which was never opened")

    # --- consumer side --------------------------------------------------------------------------

    def request_partition(self, consumer: ConsumerChannel, request: PartitionRequest) -> int:
        """Open a channel; ``request.channel`` and ``initial_credit`` are filled in here.

        Returns the channel id.
        """
        if self._closed:
            raise LocalProtocolError("the connection is closed")
        channel = self._next_id | (DIALER_BIT if self._dialer else 0)
        self._next_id += 1
        consumer.id = channel
        self._consumers[channel] = consumer
        credit = consumer.credit.granted
        self._counters.credits_granted += credit
        self._control.append(replace(request, channel=channel, initial_credit=credit))
        return channel

    def announce_credit(self, consumer: ConsumerChannel) -> bool:
        """Let the next flush tell the producer of credit gained since the last AddCredit. False: it does not
        ask for a flush."""
        credit = consumer.credit
        if not credit.unannounced or consumer.state is not _OPEN:
            return False
        if not credit.is_due:
            self._withheld[consumer.id] = consumer
            return False
        self._granting[consumer.id] = consumer
        return True

    def announce_buffer_size(self, consumer: ConsumerChannel, size: int) -> None:
        """Let the next flush tell the producer how many bytes to put into each buffer."""
        if consumer.state is _OPEN:
            self._resizing[consumer.id] = size

    def resume_consumption(self, consumer: ConsumerChannel, generation: int, barrier: int) -> None:
        """Tell the producer to continue after a barrier."""
        if consumer.state is _OPEN:
            self._control.append(ResumeConsumption(consumer.id, generation, barrier))

    def announce_stable(self, consumer: ConsumerChannel, version: int, row: int) -> None:
        """Let the next flush tell the producer which rows it need not retain."""
        if consumer.state is _OPEN:
            self._stable[consumer.id] = version, row

    def cancel(self, consumer: ConsumerChannel, reason: CancelReason = CancelReason.ENDED) -> None:
        """Close a consumer's channel; idempotent."""
        if self._consumers.pop(consumer.id, None) is not None:
            if (stable := self._stable.get(consumer.id)) is not None:
                self._control.append(Stable(consumer.id, *stable))
            self._forget(consumer)
            consumer.close()
            self._control.append(CancelPartitionRequest(consumer.id, reason))

    def fail_consumer(self, consumer: ConsumerChannel, error: ShuffleError) -> None:
        """Nothing more is to come on that channel, because of ``error``: tell both sides; idempotent."""
        if self._consumers.pop(consumer.id, None) is not None:
            self._forget(consumer)
            self._control.append(CancelPartitionRequest(consumer.id, CancelReason.FAILED))
            consumer.fail(error)

    def producer_failed(self, channel: int, error: ShuffleError) -> None:
        """The producer ends a channel with an error; an unknown id is ignored."""
        consumer = self._consumers.pop(channel, None)
        if consumer is not None:
            self._forget(consumer)
            consumer.fail(error)

    def _forget(self, consumer: ConsumerChannel) -> None:
        self._granting.pop(consumer.id, None)
        self._withheld.pop(consumer.id, None)
        self._resizing.pop(consumer.id, None)
        self._stable.pop(consumer.id, None)
        if self._arriving is consumer:
            self._arriving = None
            self._counters.rows_discarded += consumer.arriving_rows
            self._decoder.discard_payload()

    # --- producer side --------------------------------------------------------------------------

    def attach(self, channel: int, view: SubpartitionView) -> ProducerChannel | None:
        """Answer a PartitionRequested; None (and the view released) if it was cancelled meanwhile."""
        return self.producers.attach(channel, view)

    def refuse(self, channel: int, error: ShuffleError) -> None:
        """Answer a PartitionRequested in the negative."""
        self.producers.refuse(channel, error)

    def fail_producer(self, channel: int, error: ShuffleError) -> None:
        """The producing task is gone: tell the consumer why."""
        self.producers.fail(channel, error)

    def available(self, channel: int) -> None:
        """Something became available on a producer channel."""
        self.producers.available(channel)

    # --- sending --------------------------------------------------------------------------------

    def send_message(self, message: Message) -> None:
        """Send it with the next flush, in front of all buffers."""
        self._control.append(message)

    def data_to_send(self, buffers_max: int) -> tuple[list[bytes | memoryview], list[Outgoing]]:
        """Take what is to be sent now, control frames first, then at most ``buffers_max`` buffers.

        The views alias the memory of the returned pieces: call ``released`` on each once the
        transport has let go.
        """
        chunks: list[bytes | memoryview] = []
        if self.wants_to_send:
            self._take_credit()
        if self._resizing:
            self._control.extend(NewBufferSize(*each) for each in self._resizing.items())
            self._resizing.clear()
        if self._stable:
            self._control.extend(Stable(channel, *each) for channel, each in self._stable.items())
            self._stable.clear()
        if self._pong is not None:
            self._control.append(self._pong)
            self._pong = None
        if self._control:
            chunks.append(take_control(self._control, self._counters))
        pieces = self.producers.take_turns(buffers_max, chunks)
        if self._tap is not None:
            self._tap.sending(chunks)
        return chunks, pieces

    @property
    def control_unsent(self) -> int:
        """Control frames that wait to be sent, and channels with something to announce."""
        return len(self._control) + len(self._granting) + len(self._resizing) + len(self._stable)

    @property
    def wants_to_send(self) -> bool:
        waits = self._control or self._pong or self._granting or self._resizing or self._stable
        return bool(waits or self.producers.ready)

    def _take_credit(self) -> None:
        if self._granting or self._withheld:
            granting = self._granting | self._withheld
            self._granting.clear()
            self._withheld.clear()
            grants = []
            for consumer in granting.values():
                credit = consumer.credit.take_unannounced()
                if credit:
                    self._counters.credits_granted += credit
                    grants.append((consumer.id, credit))
            for at in range(0, len(grants), limits.GRANTS_PER_FRAME_MAX):
                self._control.append(AddCredit(tuple(grants[at : at + limits.GRANTS_PER_FRAME_MAX])))

    # --- listening ------------------------------------------------------------------------------

    def listen(self, channel: int, note: Note) -> None:
        """Have ``note`` called with each frame of a channel, either way, from now on."""
        if self._tap is None:
            self._tap = ChannelTap(self)
            self._decoder.sink = self._tap.received
        self._tap.open(channel, note)

    def listen_no_more(self, channel: int) -> None:
        """Idempotent."""
        if self._tap is not None:
            self._tap.close(channel)
            if not self._tap:
                self._tap = None
                self._decoder.sink = self

    # --- time and ends --------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When :meth:`handle_timer` wants to be called."""
        return self._alive.due

    def handle_timer(self, now: float) -> None:
        """Send a Ping into silence; report a peer that does not answer."""
        due = self._alive.handle_timer(now)
        if isinstance(due, Ping):
            self._control.append(due)
        elif due is not None:
            self._events.append(due)

    def close(self) -> None:
        """Send Close; call :meth:`lost` when the socket is gone."""
        if not self._closed:
            self._control.append(Close())

    def lost(self, error: ShuffleError | None) -> None:
        """The byte stream is gone, and with it every channel; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._decoder.discard_payload()
        self._arriving = None
        suspected = isinstance(error, PeerSuspected)
        self.producers.lost(CancelReason.SUSPECTED if suspected else CancelReason.FAILED)
        reason = error or PeerLost("the peer closed the connection")
        consumers = list(self._consumers.values())
        self._consumers.clear()
        self._control.clear()
        self._granting.clear()
        self._withheld.clear()
        self._resizing.clear()
        for consumer in consumers:
            consumer.fail(reason)

    def validate(self) -> None:
        """Check every invariant; for tests, after each step."""
        self.producers.validate()
        assert not set(self.producers.channels) & set(self._consumers)
        for consumer in self._consumers.values():
            consumer.validate()
