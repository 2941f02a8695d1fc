"""The frame table: every frame that crosses a connection, field by field.

``length:u32 | type:u8 | channel:u32 | body``, big-endian. ``length`` counts what follows it: the
type, the channel and the body. Frames without a channel carry channel 0.

=====================  ======================  =====================================================
frame                  way                     body
=====================  ======================  =====================================================
Hello                  both, handshake         magic u32, version u16, role u8, cluster id, worker
                                               u32, epoch u64, target u32, nonce 32, proof 0 or 32
Welcome                acceptor -> dialer      worker u32, epoch u64
Reject                 acceptor -> dialer      code u16, text
PartitionRequest       consumer -> producer    job, edge u32, producer u32, subpartition u32,
                                               producer attempt u32, consumer attempt u32,
                                               generation u32, initial credit u32
BufferResponse         producer -> consumer    sequence u32, backlog u32, data type u8, flags u8,
                                               first element start u32, rows begun u32, payload
AddCredit              consumer -> producer    credit u32
BacklogAnnouncement    producer -> consumer    backlog u32
ResumeConsumption      consumer -> producer
CancelPartitionRequest consumer -> producer
Close                  both
Error                  both                    code u16, text; channel 0: the connection
NewBufferSize          consumer -> producer    bytes u32
Ping, Pong             both                    token u64
Message                both, control links     a msgpack map (``wire.messages``); ``channel`` is the
                                               number of the request that it asks or answers
=====================  ======================  =====================================================
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final, Protocol, TypeAlias

from minishuffle import limits
from minishuffle.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "AddCredit",
    "BUFFER_HEADER",
    "BUFFER_HEADER_BYTES",
    "BacklogAnnouncement",
    "BodyReader",
    "BufferFlags",
    "BufferHeader",
    "CancelPartitionRequest",
    "Close",
    "DataType",
    "Error",
    "EventKind",
    "FRAME_HEADER",
    "FRAME_HEADER_BYTES",
    "Frame",
    "FrameDecoder",
    "FrameSink",
    "FrameType",
    "Hello",
    "MAGIC",
    "Message",
    "NO_ELEMENT_START",
    "NewBufferSize",
    "PROTOCOL_VERSION",
    "PartitionRequest",
    "Ping",
    "Pong",
    "Reject",
    "ResumeConsumption",
    "Role",
    "U16",
    "U32",
    "U64",
    "WATERMARK_EVENT",
    "Welcome",
    "decode_body",
    "encode_frame",
    "frame_name",
    "write_buffer_header",
]


# --- body -----------------------------------------------------------------------------------------
#
# Reads the body of a frame, field by field.


U16: Final = struct.Struct(">H")
U32: Final = struct.Struct(">I")
U64: Final = struct.Struct(">Q")


class BodyReader:
    """Reads a frame's body from front to back; running out is the peer's fault."""

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
PROTOCOL_VERSION: Final = 1
FRAME_HEADER: Final = struct.Struct(">IBI")
FRAME_HEADER_BYTES: Final = FRAME_HEADER.size
BUFFER_HEADER: Final = struct.Struct(">IBIIIBBII")
"""Frame header and BufferResponse fields as one structure, the size of a segment's headroom use."""
BUFFER_HEADER_BYTES: Final = BUFFER_HEADER.size
NO_ELEMENT_START: Final = 0xFFFF_FFFF
WATERMARK_EVENT: Final = struct.Struct(">BBq")
"""Kind, whether the producer is idle (0 or 1), and the watermark in microseconds since 1970."""


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


class Role(IntEnum):
    """What a process is, as it says in Hello."""

    WORKER = 1
    COORDINATOR = 2
    CLIENT = 3


class DataType(IntEnum):
    """What a BufferResponse carries; only DATA costs a credit."""

    DATA = 1
    EVENT = 2


class EventKind(IntEnum):
    """First octet of an event's payload."""

    END_OF_DATA = 1
    """The producer will write no more rows; the channel stays open."""
    END_OF_PARTITION = 2
    """Nothing at all follows on this channel."""
    WATERMARK = 3
    """How far the producer's event time has come: :data:`WATERMARK_EVENT` is the whole payload."""


class BufferFlags(IntFlag):
    """How a buffer's bytes lie with respect to elements."""

    NONE = 0
    STARTS = 1
    """An element starts in this buffer."""
    CONTINUES = 2
    """The buffer's first byte belongs to an element begun before."""
    ENDS = 4
    """The buffer's last byte is the last of an element."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opening of either side; ``proof`` is empty in the dialer's first one.

    ``target`` is the worker id that the dialer means to reach, 0 for a coordinator; ``nonce`` has
    32 bytes, ``proof`` 0 or 32.
    """

    role: int
    cluster: str
    worker: int
    epoch: int
    target: int
    nonce: bytes
    proof: bytes = b""
    magic: int = MAGIC
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Welcome:
    """The acceptor's last word of a handshake that went well."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Reject:
    """The acceptor's last word of one that did not; the connection closes after it."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class PartitionRequest:
    """Opens a logical channel; ``initial_credit`` counts buffers."""

    channel: int
    job: str
    edge: int
    producer: int
    subpartition: int
    producer_attempt: int
    consumer_attempt: int
    generation: int
    initial_credit: int


@dataclass(frozen=True, slots=True)
class BufferHeader:
    """Header of a BufferResponse; ``size`` payload bytes follow."""

    channel: int
    sequence: int
    backlog: int
    data_type: int
    flags: int
    first_start: int
    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class AddCredit:
    channel: int
    credit: int


@dataclass(frozen=True, slots=True)
class BacklogAnnouncement:
    channel: int
    backlog: int


@dataclass(frozen=True, slots=True)
class ResumeConsumption:
    channel: int


@dataclass(frozen=True, slots=True)
class CancelPartitionRequest:
    channel: int


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
    channel: int
    size: int


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
    | Ping
    | Pong
    | Message
)

_NAMES: Final = {
    "".join(part.capitalize() for part in kind.name.split("_")): kind.name.lower() for kind in FrameType
}


def frame_name(frame: Frame) -> str:
    """Its type in snake case, as metrics name it."""
    return _NAMES[type(frame).__name__]


# --- codec ----------------------------------------------------------------------------------------
#
# Bytes to frames and back, incrementally: any split of the stream gives the same frames.
#
# :func:`encode_frame` writes every frame but BufferResponse, whose header goes straight into the
# headroom of the segment that it announces (:func:`write_buffer_header`). :class:`FrameDecoder` copies
# a payload into memory that its sink lends, so this layer knows no pool.


_HELLO: Final = struct.Struct(">IHBIQI32s")
_WELCOME: Final = struct.Struct(">IQ")
_REQUEST: Final = struct.Struct(">IIIIIII")
_LENGTH_BYTES: Final = 4
_TYPE_AND_CHANNEL_BYTES: Final = FRAME_HEADER_BYTES - _LENGTH_BYTES
_BUFFER_FIXED_BYTES: Final = BUFFER_HEADER_BYTES - _LENGTH_BYTES
_BUFFER_RESPONSE: Final = int(FrameType.BUFFER_RESPONSE)


# --- encoding ---------------------------------------------------------------------------------


def _name(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > limits.NAME_BYTES_MAX:
        raise LocalProtocolError(
            f"name of {len(raw)} bytes, at most {limits.NAME_BYTES_MAX} fit: {text[:40]!r}…"
        )
    return U16.pack(len(raw)) + raw


def _text(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > limits.ERROR_TEXT_BYTES_MAX:
        raw = raw[: limits.ERROR_TEXT_BYTES_MAX].decode(errors="ignore").encode()
    return U32.pack(len(raw)) + raw


def _encode_hello(f: Hello) -> bytes:
    fixed = _HELLO.pack(f.magic, f.version, f.role, f.worker, f.epoch, f.target, f.nonce)
    return fixed + _name(f.cluster) + bytes([len(f.proof)]) + f.proof


def _encode_request(f: PartitionRequest) -> bytes:
    fixed = _REQUEST.pack(
        f.edge,
        f.producer,
        f.subpartition,
        f.producer_attempt,
        f.consumer_attempt,
        f.generation,
        f.initial_credit,
    )
    return fixed + _name(f.job)


def encode_frame(frame: Frame) -> bytes:
    """The bytes of any frame but BufferResponse."""
    channel = 0
    match frame:
        case AddCredit(channel, credit):
            kind, body = FrameType.ADD_CREDIT, U32.pack(credit)
        case BacklogAnnouncement(channel, backlog):
            kind, body = FrameType.BACKLOG_ANNOUNCEMENT, U32.pack(backlog)
        case Message(channel, body):
            kind = FrameType.MESSAGE
        case PartitionRequest():
            kind, channel, body = FrameType.PARTITION_REQUEST, frame.channel, _encode_request(frame)
        case CancelPartitionRequest(channel):
            kind, body = FrameType.CANCEL_PARTITION_REQUEST, b""
        case ResumeConsumption(channel):
            kind, body = FrameType.RESUME_CONSUMPTION, b""
        case NewBufferSize(channel, size):
            kind, body = FrameType.NEW_BUFFER_SIZE, U32.pack(size)
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
    return FRAME_HEADER.pack(_TYPE_AND_CHANNEL_BYTES + len(body), kind, channel) + body


def write_buffer_header(
    memory: memoryview,
    payload_start: int,
    size: int,
    channel: int,
    sequence: int,
    backlog: int,
    data_type: int,
    flags: int,
    first_start: int,
    rows: int,
) -> memoryview:
    """Write a BufferResponse header right in front of its payload; return the whole frame.

    ``memory`` holds ``size`` payload bytes from ``payload_start`` on, and at least
    ``BUFFER_HEADER_BYTES`` bytes in front of them that may be overwritten.
    """
    begin = payload_start - BUFFER_HEADER_BYTES
    BUFFER_HEADER.pack_into(
        memory,
        begin,
        _BUFFER_FIXED_BYTES + size,
        _BUFFER_RESPONSE,
        channel,
        sequence,
        backlog,
        data_type,
        flags,
        first_start,
        rows,
    )
    return memory[begin : payload_start + size]


# --- decoding ---------------------------------------------------------------------------------


def _decode_hello(body: BodyReader) -> Hello:
    magic, version, role, worker, epoch, target, nonce = body.unpack(_HELLO)
    cluster = body.name()
    (size,) = body.take(1)
    return Hello(role, cluster, worker, epoch, target, nonce, body.take(size), magic, version)  # type: ignore[arg-type]


def _decode_request(channel: int, body: BodyReader) -> PartitionRequest:
    edge, producer, subpartition, produced_by, consumed_by, generation, credit = body.unpack(_REQUEST)
    if credit > limits.CREDIT_MAX:
        raise RemoteProtocolError(f"initial credit {credit}, at most {limits.CREDIT_MAX} is allowed")
    job = body.name()
    return PartitionRequest(
        channel, job, edge, producer, subpartition, produced_by, consumed_by, generation, credit
    )


def _positive(what: str, value: int) -> int:
    if not 0 < value <= limits.CREDIT_MAX:
        raise RemoteProtocolError(f"{what} {value}, 1 to {limits.CREDIT_MAX} is allowed")
    return value


def _coded_text(body: BodyReader) -> tuple[int, str]:
    (code,) = body.unpack(U16)
    return code, body.name(U32, limits.ERROR_TEXT_BYTES_MAX)


_DECODERS: Final[dict[int, Callable[[int, BodyReader], Frame]]] = {
    FrameType.HELLO: lambda channel, body: _decode_hello(body),
    FrameType.WELCOME: lambda channel, body: Welcome(*body.unpack(_WELCOME)),
    FrameType.REJECT: lambda channel, body: Reject(*_coded_text(body)),
    FrameType.PARTITION_REQUEST: _decode_request,
    FrameType.ADD_CREDIT: lambda channel, body: AddCredit(channel, _positive("credit", *body.unpack(U32))),
    FrameType.BACKLOG_ANNOUNCEMENT: lambda channel, body: BacklogAnnouncement(
        channel, _positive("backlog", *body.unpack(U32))
    ),
    FrameType.RESUME_CONSUMPTION: lambda channel, body: ResumeConsumption(channel),
    FrameType.CANCEL_PARTITION_REQUEST: lambda channel, body: CancelPartitionRequest(channel),
    FrameType.CLOSE: lambda channel, body: Close(),
    FrameType.ERROR: lambda channel, body: Error(channel, *_coded_text(body)),
    FrameType.NEW_BUFFER_SIZE: lambda channel, body: NewBufferSize(
        channel, _positive("buffer size", *body.unpack(U32))
    ),
    FrameType.PING: lambda channel, body: Ping(*body.unpack(U64)),
    FrameType.PONG: lambda channel, body: Pong(*body.unpack(U64)),
}


def decode_body(frame_type: int, channel: int, body: memoryview) -> Frame:
    """Read the body of any frame but BufferResponse.

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


class FrameSink(Protocol):
    """Who takes decoded frames."""

    def frame(self, frame: Frame) -> None:
        """Any frame but BufferResponse."""

    def buffer_begin(
        self,
        channel: int,
        sequence: int,
        backlog: int,
        data_type: int,
        flags: int,
        first_start: int,
        rows: int,
        size: int,
    ) -> memoryview | None:
        """A BufferResponse begins: lend memory for its ``size`` bytes, or None to discard them."""

    def buffer_end(self) -> None:
        """The payload begun last is complete; not called for one that is discarded."""


class FrameDecoder:
    """Incremental decoder of one direction of a connection.

    Feed it with :meth:`receive`. After a RemoteProtocolError it must not be used again.
    Invariant: ``0 ≤ filled ≤ size of the payload under way``, and no head and payload are under
    way at the same time.
    """

    __slots__ = ("_filled", "_head", "_limit", "_remaining", "_sink", "_target")

    def __init__(self, sink: FrameSink, limit_bytes: int) -> None:
        self._sink = sink
        self._limit = limit_bytes
        self._head = bytearray()
        """Start of a frame (or of a BufferResponse's header) that is not complete yet."""
        self._target: memoryview | None = None
        self._filled = 0
        self._remaining = 0

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the stream; calls the sink for what became complete.

        Raises:
            RemoteProtocolError: the stream is not what the frame table says.
        """
        view = memoryview(data)
        at, end = 0, len(view)
        while at < end:
            if self._remaining:
                at += self._receive_payload(view, at, end)
            elif self._head:
                at += self._receive_head(view, at, end)
            else:
                used = self._parse(view, at, end)
                if not used:
                    self._head += view[at:]
                    return
                at += used

    def discard_payload(self) -> None:
        """The memory lent for the payload under way is taken back: skip the rest of it."""
        self._target = None

    def _receive_payload(self, view: memoryview, at: int, end: int) -> int:
        size = min(self._remaining, end - at)
        if self._target is not None:
            self._target[self._filled : self._filled + size] = view[at : at + size]
        self._advance(size)
        return size

    def _advance(self, size: int) -> None:
        self._filled += size
        self._remaining -= size
        if not self._remaining and self._target is not None:
            self._target = None
            self._sink.buffer_end()

    def _receive_head(self, view: memoryview, at: int, end: int) -> int:
        """Complete a head that was cut by the end of an earlier read."""
        have = len(self._head)
        missing = self._head_bytes() - have
        size = min(missing, end - at)
        self._head += view[at : at + size]
        if size == missing:
            head = self._head
            if self._head_bytes() == len(head):
                self._head = bytearray()
                used = self._parse(memoryview(head), 0, len(head))
                assert used == len(head)
        return size

    def _head_bytes(self) -> int:
        """How long the head under way has to be before it can be parsed."""
        if len(self._head) < FRAME_HEADER_BYTES:
            return FRAME_HEADER_BYTES
        length, kind, _ = FRAME_HEADER.unpack_from(self._head, 0)
        self._check(length, kind)
        return BUFFER_HEADER_BYTES if kind == _BUFFER_RESPONSE else _LENGTH_BYTES + int(length)

    def _check(self, length: int, kind: int) -> None:
        if length > self._limit:
            raise RemoteProtocolError(
                f"frame of {length} bytes (type {kind}), at most {self._limit} are allowed"
            )
        if length < (_BUFFER_FIXED_BYTES if kind == _BUFFER_RESPONSE else _TYPE_AND_CHANNEL_BYTES):
            raise RemoteProtocolError(f"frame of {length} bytes is too short for its type {kind}")
        if kind not in _KNOWN_TYPES:
            raise RemoteProtocolError(f"frame of unknown type {kind}")

    def _parse(self, view: memoryview, at: int, end: int) -> int:
        """Parse one frame (or the header of a BufferResponse); 0 when it is not all there."""
        if end - at < FRAME_HEADER_BYTES:
            return 0
        length, kind, channel = FRAME_HEADER.unpack_from(view, at)
        if kind == _BUFFER_RESPONSE and _BUFFER_FIXED_BYTES <= length <= self._limit:
            return self._parse_buffer_header(view, at, end)
        self._check(length, kind)
        total = _LENGTH_BYTES + int(length)
        if end - at < total:
            return 0
        self._sink.frame(decode_body(kind, channel, view[at + FRAME_HEADER_BYTES : at + total]))
        return total

    def _parse_buffer_header(self, view: memoryview, at: int, end: int) -> int:
        if end - at < BUFFER_HEADER_BYTES:
            return 0
        length, _, channel, sequence, backlog, data_type, flags, first_start, rows = (
            BUFFER_HEADER.unpack_from(view, at)
        )
        size = length - _BUFFER_FIXED_BYTES
        target = self._sink.buffer_begin(
            channel, sequence, backlog, data_type, flags, first_start, rows, size
        )
        if target is not None and not size:
            self._sink.buffer_end()
            return BUFFER_HEADER_BYTES
        self._target = target
        self._filled = 0
        self._remaining = size
        return BUFFER_HEADER_BYTES


_KNOWN_TYPES: Final = frozenset(int(kind) for kind in FrameType)
