"""The frame table: every frame that crosses a connection, field by field.

``length:u32 | type:u8 | channel:u32 | body``, big-endian. ``length`` counts what follows it: the
type, the channel and the body. Frames of no channel, or of several, carry channel 0.

=====================  ======================  =====================================================
frame                  way                     body
=====================  ======================  =====================================================
Hello                  both, handshake         magic u32, version u16, role u8, cluster id, worker
                                               u32, epoch u64, counter u32, target u32, nonce 32,
                                               proof 0 or 32, one-way connection: direction u8 (0: it
                                               is none, 1: the dialer produces, 2: it consumes),
                                               edge u32, number u32, job
Welcome                acceptor -> dialer      worker u32, epoch u64
Reject                 acceptor -> dialer      code u16, text
PartitionRequest       consumer -> producer    job, edge u32, producer u32, subpartition u32,
                                               producer attempt u32, consumer attempt u32,
                                               generation u32, initial credit u32, buffer size u32
                                               (0: whole segments), version u32, row u64, number u32
                                               of the one-way connection that carries the answer
BufferResponse         producer -> consumer    sequence u32, backlog u32, data type u8, flags u8,
                                               first element start u32, rows begun u32, row u64,
                                               payload
AddCredit              consumer -> producer    1 … 4096 times: channel u32, credit u32
BacklogAnnouncement    producer -> consumer    backlog u32
ResumeConsumption      consumer -> producer    generation u32, barrier u32
CancelPartitionRequest consumer -> producer    reason u8
Close                  both
Error                  both                    code u16, text; channel 0: the connection
NewBufferSize          consumer -> producer    bytes u32
Stable                 consumer -> producer    version u32, row u64
Ping, Pong             both                    token u64
Message                both, control links,    a msgpack map (``wire.messages``); ``channel`` is the
                       and between workers     number of the request that it asks or answers. Between
                                               workers the answer is empty
=====================  ======================  =====================================================
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple, Protocol, TypeAlias

from minishuffle import limits
from minishuffle.errors import LocalProtocolError, RemoteProtocolError
from minishuffle.ids import FIRST_ATTEMPT, JobId, PartitionId

__all__ = [
    "AddCredit",
    "BARRIER_EVENT",
    "BUFFER_FIXED_BYTES",
    "BUFFER_HEADER",
    "BUFFER_HEADER_BYTES",
    "BacklogAnnouncement",
    "BodyReader",
    "BufferFlags",
    "BufferHeader",
    "CancelPartitionRequest",
    "CancelReason",
    "Close",
    "DataType",
    "Error",
    "EventKind",
    "FRAME_HEADER",
    "FRAME_HEADER_BYTES",
    "Frame",
    "FrameType",
    "GRANT",
    "LATENCY_EVENT",
    "Hello",
    "LENGTH_BYTES",
    "LatencyMarker",
    "MAGIC",
    "Message",
    "NO_ELEMENT_START",
    "NewBufferSize",
    "OneWay",
    "PROTOCOL_VERSION",
    "ROW_MAX",
    "PartitionRequest",
    "Ping",
    "Pong",
    "Reject",
    "ResumeConsumption",
    "Role",
    "Stable",
    "U16",
    "U32",
    "U64",
    "WATERMARK_EVENT",
    "Welcome",
    "decode_body",
    "encode_frame",
    "encode_text",
    "frame_name",
    "positive",
    "write_buffer",
]


# --- body -----------------------------------------------------------------------------------------
#
# The reader of a frame's body, field by field.


U16: Final = struct.Struct(">H")
U32: Final = struct.Struct(">I")
U64: Final = struct.Struct(">Q")


class BodyReader:
    """Reads a frame's body from front to back; a body that is too short is an error of the peer."""

    __slots__ = ("_at", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        at = self._at
        self._at += layout.size
        if self._at > len(self._view):
            raise RemoteProtocolError(f"body ends after {len(self._view)} bytes, {self._at} are needed")
        return layout.unpack_from(self._view, at)

    def take(self, size: int) -> bytes:
        at = self._at
        self._at += size
        if self._at > len(self._view):
            raise RemoteProtocolError(f"body ends after {len(self._view)} bytes, {self._at} are needed")
        return bytes(self._view[at : self._at])

    def name(self, length: struct.Struct = U16, size_max: int = limits.NAME_BYTES_MAX) -> str:
        (size,) = self.unpack(length)
        if size > size_max:
            raise RemoteProtocolError(f"text of {size} bytes, at most {size_max} are allowed")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError("text is not UTF-8") from error

    def end(self) -> None:
        if self._at != len(self._view):
            raise RemoteProtocolError(f"{len(self._view) - self._at} bytes too many")


# --- frames ---------------------------------------------------------------------------------------

MAGIC: Final = 0x4D534846
PROTOCOL_VERSION: Final = 7
FRAME_HEADER: Final = struct.Struct(">IBI")
FRAME_HEADER_BYTES: Final = FRAME_HEADER.size
LENGTH_BYTES: Final = 4
"""The size of a frame's first field, which counts all that follows it."""
BUFFER_HEADER: Final = struct.Struct(">IBIIIBBIIQ")
"""Frame header and BufferResponse fields as one structure, the size of a segment's headroom use."""
BUFFER_HEADER_BYTES: Final = BUFFER_HEADER.size
BUFFER_FIXED_BYTES: Final = BUFFER_HEADER_BYTES - LENGTH_BYTES
"""The part of a BufferResponse's length that is not payload."""
ROW_MAX: Final = (1 << 63) - 1
"""The greatest number of a row: what is counted by them is reported in 64 bits with a sign."""
BufferHeader: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int]
"""The fields of :data:`BUFFER_HEADER`: length, type, channel, sequence, backlog, data type, flags, first
element start, rows, row. A plain tuple, because one is made for each buffer."""
NO_ELEMENT_START: Final = 0xFFFF_FFFF
GRANT: Final = struct.Struct(">II")
"""A pair of an AddCredit: channel, credit."""
WATERMARK_EVENT: Final = struct.Struct(">BBq")
"""Kind, whether the producer is idle (0 or 1), and the watermark in microseconds since 1970."""
LATENCY_EVENT: Final = struct.Struct(">BIIq")
"""Kind, operator and index of the source, and the time in microseconds since 1970."""
BARRIER_EVENT: Final = struct.Struct(">BBI")
"""Kind, whether it blocks its channel (0 or 1), and the number of the barrier, from 1 on."""
_STABLE: Final = struct.Struct(">IQ")
"""Version, and the number of a row."""
_RESUME: Final = struct.Struct(">II")
"""Generation of the channel, and the number of the barrier."""


class FrameType(IntEnum):
    """The type octet."""

    HELLO = 1
    WELCOME = 2
    REJECT = 3
    PARTITION_REQUEST = 4
    BUFFER_RESPONSE = 5
    ADD_CREDIT = 6
    BACKLOG_ANNOUNCEMENT = 7
    RESUME_CONSUMPTION = 8
    CANCEL_PARTITION_REQUEST = 9
    CLOSE = 10
    ERROR = 11
    NEW_BUFFER_SIZE = 12
    PING = 13
    PONG = 14
    MESSAGE = 15
    STABLE = 16


class Role(IntEnum):
    """The role of a process, as its Hello says."""

    WORKER = 1
    COORDINATOR = 2
    CLIENT = 3
    PROBE = 4
    """A worker that only tests whether a link can be made."""


class DataType(IntEnum):
    """The contents of a BufferResponse; only DATA needs a credit."""

    DATA = 1
    EVENT = 2


class EventKind(IntEnum):
    """First octet of an event's payload."""

    END_OF_DATA = 1
    """The producer will write no more rows; the channel stays open."""
    END_OF_PARTITION = 2
    """Nothing follows on this channel."""
    WATERMARK = 3
    """The producer's event time: :data:`WATERMARK_EVENT` is the whole payload."""
    LATENCY_MARKER = 4
    """The time at which a source emitted the marker: a :class:`LatencyMarker` is the whole payload. Only jobs
    with a setting for it have markers. A worker must know the setting to run their tasks, so none receives a
    marker it cannot read."""
    BARRIER = 5
    """The end of all rows that the producer wrote before it: :data:`BARRIER_EVENT` is the whole payload.
    After a blocking barrier, the producer sends nothing before ResumeConsumption. (Flink:
    ``CheckpointBarrier``.)"""


class LatencyMarker(NamedTuple):
    """A marker that travels with the rows of a source, and measures their latency without user code. (Flink:
    ``LatencyMarker``.)"""

    operator: int
    subtask: int
    """Operator and subtask of the source."""
    time: int
    """Time of its emission, in microseconds since 1970."""

    def pack(self) -> bytes:
        """The payload of the event."""
        return LATENCY_EVENT.pack(EventKind.LATENCY_MARKER, *self)

    @classmethod
    def unpack(cls, payload: bytes) -> LatencyMarker:
        """Unpack the result of :meth:`pack`; the caller has checked its size."""
        _, operator, subtask, time = LATENCY_EVENT.unpack(payload)
        return cls(operator, subtask, time)


class CancelReason(IntEnum):
    """Why a consumer closes a channel."""

    ENDED = 1
    """It has read all the rows it needs."""
    FAILED = 2
    """The consuming task, or the channel, failed."""
    MOVED = 3
    """The channel was attached elsewhere."""
    SUSPECTED = 4
    """The consumer's worker does not answer Pings. The producer's worker applies this itself."""


class BufferFlags(IntFlag):
    """The positions of elements in a buffer."""

    NONE = 0
    STARTS = 1
    """An element starts in this buffer."""
    CONTINUES = 2
    """The buffer's first byte belongs to an element begun before."""
    ENDS = 4
    """The buffer's last byte is the last of an element."""


class OneWay(NamedTuple):
    """A connection with data in one direction only: from the producers of an edge on one worker to the
    consumers on another. See :mod:`~minishuffle.protocol.oneway`."""

    job: str
    edge: int
    produces: bool
    """The dialer produces and the acceptor consumes; False: the reverse."""
    number: int
    """Unique number, given by the consumer."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opening of either side; ``proof`` is empty in the first one.

    ``target`` is the worker id that the dialer means to reach, 0 for a coordinator; ``nonce`` has
    32 bytes, ``proof`` 0 or 32. ``counter`` says how many times this process has dialed that target, from
    1 on; it is 0 where nobody counts: of an acceptor, and on control links.
    """

    role: int
    cluster: str
    worker: int
    epoch: int
    target: int
    nonce: bytes
    proof: bytes = b""
    counter: int = 0
    magic: int = MAGIC
    version: int = PROTOCOL_VERSION
    one_way: OneWay | None = None
    """The purpose of a one-way connection; None for one with data both ways, and from an acceptor."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The acceptor's last frame of a successful handshake."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Reject:
    """The acceptor's last frame of a refused handshake; the connection closes after it."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class PartitionRequest:
    """Opens a logical channel, from an attempt of a consumer to a partition of a producer's attempt.

    The opener of the channel fills in its id, its initial credit in buffers, and the first row that it wants.
    ``buffer_size``: as in NewBufferSize; 0: buffers are as large as segments.
    """

    partition: PartitionId
    subpartition: int
    """Index of the consumer subtask."""
    producer_attempt: int = FIRST_ATTEMPT
    consumer_attempt: int = FIRST_ATTEMPT
    generation: int = 1
    channel: int = 0
    initial_credit: int = 0
    buffer_size: int = 0
    version: int = 0
    """The attempt that began the version of the producer's rows; 0: that of a producer which never runs
    again."""
    row: int = 0
    """The number, in that version, of the first row that is new to the consumer."""
    one_way: int = 0
    """Number of the one-way connection for the answer; 0: the connection of this request."""


@dataclass(frozen=True, slots=True)
class AddCredit:
    """Credit of one or more channels: pairs of channel and number of buffers.

    The decoder does not create this object; it passes each pair to its sink.
    """

    grants: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BacklogAnnouncement:
    channel: int
    backlog: int


@dataclass(frozen=True, slots=True)
class ResumeConsumption:
    """The consumer continues after the barrier. Ignored for another generation or barrier."""

    channel: int
    generation: int
    barrier: int


@dataclass(frozen=True, slots=True)
class CancelPartitionRequest:
    channel: int
    reason: CancelReason


@dataclass(frozen=True, slots=True)
class Close:
    pass


@dataclass(frozen=True, slots=True)
class Error:
    """A failure of one channel, or of the connection when ``channel`` is 0."""

    channel: int
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class NewBufferSize:
    """The size in bytes of each data buffer that the producer begins from now on. (FLIP-183.)"""

    channel: int
    size: int


@dataclass(frozen=True, slots=True)
class Stable:
    """The consumer's snapshots cover rows of that version below ``row``: the producer need not retain them.
    Ignored for a channel that is closed, as that of a fenced attempt is."""

    channel: int
    version: int
    row: int


@dataclass(frozen=True, slots=True)
class Ping:
    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    token: int


@dataclass(frozen=True, slots=True)
class Message:
    """A control message; ``body`` is the msgpack of a ``wire.messages`` model."""

    request: int
    body: bytes


Frame: TypeAlias = (
    Hello
    | Welcome
    | Reject
    | PartitionRequest
    | AddCredit
    | BacklogAnnouncement
    | ResumeConsumption
    | CancelPartitionRequest
    | Close
    | Error
    | NewBufferSize
    | Stable
    | Ping
    | Pong
    | Message
)

_NAMES: Final = {
    "".join(part.capitalize() for part in kind.name.split("_")): kind.name.lower() for kind in FrameType
}


def frame_name(frame: Frame) -> str:
    """The frame's type in snake case, as in metrics."""
    return _NAMES[type(frame).__name__]


# --- bodies ---------------------------------------------------------------------------------------
#
# :func:`encode_frame` writes every frame but BufferResponse, whose header goes straight into the
# headroom of the segment that it announces (:func:`write_buffer`).


_HELLO: Final = struct.Struct(">IHBIQII32s")
_WELCOME: Final = struct.Struct(">IQ")
_REQUEST: Final = struct.Struct(">IIIIIIIIIQI")
_ONE_WAY: Final = struct.Struct(">BII")
_BUFFER_RESPONSE: Final = int(FrameType.BUFFER_RESPONSE)


# --- encoding ---------------------------------------------------------------------------------


def _name(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > limits.NAME_BYTES_MAX:
        raise LocalProtocolError(
            f"name of {len(raw)} bytes, at most {limits.NAME_BYTES_MAX} fit: {text[:40]!r}…"
        )
    return U16.pack(len(raw)) + raw


def encode_text(text: str, bytes_max: int) -> bytes:
    """UTF-8 of any text, cut to ``bytes_max``; a lone surrogate, which has no UTF-8, is escaped."""
    raw = text.encode(errors="backslashreplace")
    return raw if len(raw) <= bytes_max else raw[:bytes_max].decode(errors="ignore").encode()


def _text(text: str) -> bytes:
    raw = encode_text(text, limits.ERROR_TEXT_BYTES_MAX)
    return U32.pack(len(raw)) + raw


def _encode_hello(f: Hello) -> bytes:
    fixed = _HELLO.pack(f.magic, f.version, f.role, f.worker, f.epoch, f.counter, f.target, f.nonce)
    job, edge, produces, number = f.one_way or ("", 0, False, 0)
    direction = 0 if f.one_way is None else 1 if produces else 2
    one_way = _ONE_WAY.pack(direction, edge, number) + _name(job)
    return fixed + _name(f.cluster) + bytes([len(f.proof)]) + f.proof + one_way


def _encode_request(f: PartitionRequest) -> bytes:
    fixed = _REQUEST.pack(
        f.partition.edge,
        f.partition.producer,
        f.subpartition,
        f.producer_attempt,
        f.consumer_attempt,
        f.generation,
        f.initial_credit,
        f.buffer_size,
        f.version,
        f.row,
        f.one_way,
    )
    return fixed + _name(f.partition.job)


def encode_frame(frame: Frame) -> bytes:
    """The bytes of any frame but BufferResponse.

    An AddCredit names 1 to ``GRANTS_PER_FRAME_MAX`` channels.
    """
    channel = 0
    match frame:
        case AddCredit(grants):
            kind, body = FrameType.ADD_CREDIT, b"".join([GRANT.pack(*grant) for grant in grants])
        case BacklogAnnouncement(channel, backlog):
            kind, body = FrameType.BACKLOG_ANNOUNCEMENT, U32.pack(backlog)
        case Message(channel, body):
            kind = FrameType.MESSAGE
        case PartitionRequest():
            kind, channel, body = FrameType.PARTITION_REQUEST, frame.channel, _encode_request(frame)
        case CancelPartitionRequest(channel, reason):
            kind, body = FrameType.CANCEL_PARTITION_REQUEST, bytes([reason])
        case ResumeConsumption(channel, generation, barrier):
            kind, body = FrameType.RESUME_CONSUMPTION, _RESUME.pack(generation, barrier)
        case NewBufferSize(channel, size):
            kind, body = FrameType.NEW_BUFFER_SIZE, U32.pack(size)
        case Stable(channel, version, row):
            kind, body = FrameType.STABLE, _STABLE.pack(version, row)
        case Error(channel, code, text):
            kind, body = FrameType.ERROR, U16.pack(code) + _text(text)
        case Ping(token):
            kind, body = FrameType.PING, U64.pack(token)
        case Pong(token):
            kind, body = FrameType.PONG, U64.pack(token)
        case Close():
            kind, body = FrameType.CLOSE, b""
        case Hello():
            kind, body = FrameType.HELLO, _encode_hello(frame)
        case Welcome(worker, epoch):
            kind, body = FrameType.WELCOME, _WELCOME.pack(worker, epoch)
        case Reject(code, text):
            kind, body = FrameType.REJECT, U16.pack(code) + _text(text)
    return FRAME_HEADER.pack(FRAME_HEADER_BYTES - LENGTH_BYTES + len(body), kind, channel) + body


class Payload(Protocol):
    """The payload of a BufferResponse: ``memory[start:start + size]``.

    At least ``BUFFER_HEADER_BYTES`` bytes before it may be overwritten, unless it is shared.
    """

    memory: memoryview
    start: int
    size: int
    data_type: int
    flags: int
    first_start: int
    rows: int
    row: int
    """The number of the first row that begins here, or of the next if none does; of an event too."""
    shared: bool
    """Other channels send the same memory, each with its own header."""


def write_buffer(
    payload: Payload, channel: int, sequence: int, backlog: int, chunks: list[bytes | memoryview]
) -> None:
    """Append a BufferResponse to ``chunks``: as one view, with the header written directly before the
    payload, or as separate header and payload if the payload is shared."""
    memory, start, size = payload.memory, payload.start, payload.size
    if payload.shared:
        whole, begin = memoryview(bytearray(BUFFER_HEADER_BYTES)), 0
        chunks += (whole, memory[start : start + size])
    else:
        begin = start - BUFFER_HEADER_BYTES
        whole = memory
        chunks.append(memory[begin : start + size])
    BUFFER_HEADER.pack_into(
        whole,
        begin,
        BUFFER_FIXED_BYTES + size,
        _BUFFER_RESPONSE,
        channel,
        sequence,
        backlog,
        payload.data_type,
        payload.flags,
        payload.first_start,
        payload.rows,
        payload.row,
    )


# --- decoding ---------------------------------------------------------------------------------


def _decode_hello(body: BodyReader) -> Hello:
    magic, version, role, worker, epoch, counter, target, nonce = body.unpack(_HELLO)
    cluster = body.name()
    (size,) = body.take(1)
    proof = body.take(size)
    direction, edge, number = body.unpack(_ONE_WAY)
    one_way = OneWay(body.name(), edge, direction == 1, number)
    if direction > 2 or (not direction and one_way != ("", 0, False, 0)):
        raise RemoteProtocolError(f"unknown direction {direction} of a one-way connection")
    hello = Hello(role, cluster, worker, epoch, target, nonce, proof, counter, magic, version)  # type: ignore[arg-type]
    return replace(hello, one_way=one_way) if direction else hello


def _decode_request(channel: int, body: BodyReader) -> PartitionRequest:
    edge, producer, subpartition, producer_attempt, consumer_attempt, *rest = body.unpack(_REQUEST)
    generation, credit, buffer_size, version, row, one_way = rest
    if credit > limits.CREDIT_MAX:
        raise RemoteProtocolError(f"initial credit {credit}, at most {limits.CREDIT_MAX} is allowed")
    if buffer_size:
        positive("buffer size", buffer_size, limits.SEGMENT_BYTES_MAX)
    return PartitionRequest(
        PartitionId(JobId(body.name()), edge, producer),
        subpartition,
        producer_attempt,
        consumer_attempt,
        generation,
        channel=channel,
        initial_credit=credit,
        buffer_size=buffer_size,
        version=version,
        row=row,
        one_way=one_way,
    )


def _decode_cancel(channel: int, body: BodyReader) -> CancelPartitionRequest:
    (reason,) = body.take(1)
    if reason not in CancelReason.__members__.values():
        raise RemoteProtocolError(f"unknown reason {reason}")
    return CancelPartitionRequest(channel, CancelReason(reason))


def positive(what: str, value: int, most: int = limits.CREDIT_MAX) -> int:
    """Check ``value``, a count of buffers or bytes from a peer, and return it.

    Raises:
        RemoteProtocolError: it is 0, or more than ``most``.
    """
    if not 0 < value <= most:
        raise RemoteProtocolError(f"{what} {value}, 1 to {most} is allowed")
    return value


def _coded_text(body: BodyReader) -> tuple[int, str]:
    (code,) = body.unpack(U16)
    return code, body.name(U32, limits.ERROR_TEXT_BYTES_MAX)


_DECODERS: Final[dict[int, Callable[[int, BodyReader], Frame]]] = {
    FrameType.HELLO: lambda channel, body: _decode_hello(body),
    FrameType.WELCOME: lambda channel, body: Welcome(*body.unpack(_WELCOME)),
    FrameType.REJECT: lambda channel, body: Reject(*_coded_text(body)),
    FrameType.PARTITION_REQUEST: _decode_request,
    FrameType.BACKLOG_ANNOUNCEMENT: lambda channel, body: BacklogAnnouncement(
        channel, positive("backlog", *body.unpack(U32))
    ),
    FrameType.RESUME_CONSUMPTION: lambda channel, body: ResumeConsumption(channel, *body.unpack(_RESUME)),
    FrameType.CANCEL_PARTITION_REQUEST: _decode_cancel,
    FrameType.CLOSE: lambda channel, body: Close(),
    FrameType.ERROR: lambda channel, body: Error(channel, *_coded_text(body)),
    FrameType.NEW_BUFFER_SIZE: lambda channel, body: NewBufferSize(
        channel, positive("buffer size", body.unpack(U32)[0], limits.SEGMENT_BYTES_MAX)
    ),
    FrameType.STABLE: lambda channel, body: Stable(channel, *body.unpack(_STABLE)),
    FrameType.PING: lambda channel, body: Ping(*body.unpack(U64)),
    FrameType.PONG: lambda channel, body: Pong(*body.unpack(U64)),
}


def decode_body(frame_type: int, channel: int, body: memoryview) -> Frame:
    """Read the body of any frame but BufferResponse and AddCredit.

    Raises:
        RemoteProtocolError: unknown type, or a body too short, too long or out of range.
    """
    if frame_type == FrameType.MESSAGE:
        return Message(channel, bytes(body))
    decoder = _DECODERS.get(frame_type)
    if decoder is None:
        raise RemoteProtocolError(f"frame of unknown type {frame_type}")
    reader = BodyReader(body)
    try:
        frame = decoder(channel, reader)
        reader.end()
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"malformed {FrameType(frame_type).name} frame: {error}") from error
    return frame
