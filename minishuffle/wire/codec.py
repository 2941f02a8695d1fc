"""Bytes to frames and back, incrementally: any split of the stream gives the same frames.

:func:`encode_frame` writes every frame but BufferResponse, whose header goes straight into the
headroom of the segment that it announces (:func:`write_buffer_header`). :class:`FrameDecoder` copies
a payload into memory that its sink lends, so this layer knows no pool.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Protocol

from minishuffle import limits
from minishuffle.errors import LocalProtocolError, RemoteProtocolError
from minishuffle.wire.body import U16, U32, U64, BodyReader
from minishuffle.wire.frames import (
    BUFFER_HEADER,
    BUFFER_HEADER_BYTES,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    AddCredit,
    BacklogAnnouncement,
    CancelPartitionRequest,
    Close,
    Error,
    Frame,
    FrameType,
    Hello,
    Message,
    NewBufferSize,
    PartitionRequest,
    Ping,
    Pong,
    Reject,
    ResumeConsumption,
    Welcome,
)

__all__ = ["FrameDecoder", "FrameSink", "decode_body", "encode_frame", "write_buffer_header"]

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
