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
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final, TypeAlias

__all__ = [
    "BUFFER_HEADER",
    "BUFFER_HEADER_BYTES",
    "FRAME_HEADER",
    "FRAME_HEADER_BYTES",
    "MAGIC",
    "NO_ELEMENT_START",
    "PROTOCOL_VERSION",
    "WATERMARK_EVENT",
    "AddCredit",
    "BacklogAnnouncement",
    "BufferFlags",
    "BufferHeader",
    "CancelPartitionRequest",
    "Close",
    "DataType",
    "Error",
    "EventKind",
    "Frame",
    "FrameType",
    "Hello",
    "Message",
    "NewBufferSize",
    "PartitionRequest",
    "Ping",
    "Pong",
    "Reject",
    "ResumeConsumption",
    "Role",
    "Welcome",
    "frame_name",
]

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
