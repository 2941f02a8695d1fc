"""The incremental decoder from bytes to frames: any split of the stream gives the same frames.

A payload is copied into memory lent by the sink, so this layer knows no pool. For the frequent frames,
BufferResponse and AddCredit, the sink has methods of their own; every other frame is an object.
"""

from __future__ import annotations

from typing import Final, Protocol

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError
from minishuffle.wire.frames import (
    BUFFER_FIXED_BYTES,
    BUFFER_HEADER,
    BUFFER_HEADER_BYTES,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    GRANT,
    LENGTH_BYTES,
    U64,
    BufferHeader,
    Frame,
    FrameType,
    Ping,
    Pong,
    decode_body,
    positive,
)

__all__ = ["NO_MEMORY", "FrameDecoder", "FrameSink"]

_TYPE_AND_CHANNEL_BYTES: Final = FRAME_HEADER_BYTES - LENGTH_BYTES
_BUFFER_RESPONSE: Final = int(FrameType.BUFFER_RESPONSE)
_ADD_CREDIT: Final = int(FrameType.ADD_CREDIT)
_SIGNS: Final[dict[int, type[Ping] | type[Pong]]] = {int(FrameType.PING): Ping, int(FrameType.PONG): Pong}
_KNOWN_TYPES: Final = frozenset(int(kind) for kind in FrameType)
NO_MEMORY: Final = memoryview(bytearray())
"""Returned by a sink without memory for a payload: the decoder stops for now."""


class FrameSink(Protocol):
    """The receiver of decoded frames."""

    def frame(self, frame: Frame) -> None:
        """Any frame but BufferResponse and AddCredit."""

    def credit(self, channel: int, credit: int) -> None:
        """A pair of an AddCredit; ``credit`` is positive."""

    def buffer_begin(self, header: BufferHeader) -> memoryview | None:
        """A BufferResponse begins: lend memory for its payload, or None to discard it. ``NO_MEMORY`` stops
        the decoder before it."""

    def buffer_end(self) -> None:
        """The last payload is complete; not called for a discarded one."""


class FrameDecoder:
    """Incremental decoder of one direction of a connection.

    Feed it with :meth:`receive`. After a RemoteProtocolError it must not be used again.
    Invariant: ``0 ≤ filled ≤ size of the payload under way``, and no head and payload are under
    way at the same time.
    """

    __slots__ = ("_filled", "_head", "_limit", "_remaining", "_target", "counts", "sink", "stopped")

    def __init__(self, sink: FrameSink, limit_bytes: int) -> None:
        self.counts = [0] * (max(FrameType) + 1)
        """Received frames by type; a BufferResponse counts with its header."""
        self.sink = sink
        self._limit = limit_bytes
        self._head = bytearray()
        """Start of a frame (or of a BufferResponse's header) that is not complete yet."""
        self._target: memoryview | None = None
        self._filled = 0
        self._remaining = 0
        self.stopped = False
        """The sink has no memory for the next payload."""

    def receive(self, data: bytes | bytearray | memoryview) -> int:
        """Decode the next bytes of the stream, calling the sink for all that became complete.

        Returns the number of bytes used: all, unless the decoder is ``stopped``. Then the rest, which may be
        empty, must be passed again when the sink may have memory.

        Raises:
            RemoteProtocolError: the stream does not follow the frame table.
        """
        view = memoryview(data)
        at, end = 0, len(view)
        if self.stopped:
            self.stopped = False
            if self._head:
                self._complete_head()
        while at < end and not self.stopped:
            if self._remaining:
                at += self._receive_payload(view, at, end)
            elif self._head:
                at += self._receive_head(view, at, end)
            else:
                at = self._receive_buffers(view, at, end)
                if at < end and not (self._remaining or self.stopped):
                    used = self._parse(view, at, end)
                    if not used:
                        self._head += view[at:]
                        return end
                    at += used
        return at

    def discard_payload(self) -> None:
        """The sink takes back the memory of the current payload: skip the rest of it."""
        self._target = None

    def _receive_buffers(self, view: memoryview, at: int, end: int) -> int:
        """Decode BufferResponses until another frame comes; returns the position after them.

        Of the last one, only the header and a part of the payload may have arrived.
        """
        begin, complete = self.sink.buffer_begin, self.sink.buffer_end
        counts, limit, last = self.counts, self._limit, end - BUFFER_HEADER_BYTES
        while at <= last:
            header: BufferHeader = BUFFER_HEADER.unpack_from(view, at)
            length = header[0]
            if header[1] != _BUFFER_RESPONSE or not BUFFER_FIXED_BYTES <= length <= limit:
                break
            target = begin(header)
            if target is NO_MEMORY:
                self.stopped = True
                break
            counts[_BUFFER_RESPONSE] += 1
            at += BUFFER_HEADER_BYTES
            following = at + length - BUFFER_FIXED_BYTES
            if following > end:
                self._target, self._filled, self._remaining = target, 0, following - at
                break
            if target is not None:
                target[:] = view[at:following]
                complete()
            at = following
        return at

    def _receive_payload(self, view: memoryview, at: int, end: int) -> int:
        """Copy more of a payload that was cut by the end of an earlier read."""
        size = min(self._remaining, end - at)
        if self._target is not None:
            self._target[self._filled : self._filled + size] = view[at : at + size]
        self._filled += size
        self._remaining -= size
        if not self._remaining and self._target is not None:
            self._target = None
            self.sink.buffer_end()
        return size

    def _receive_head(self, view: memoryview, at: int, end: int) -> int:
        """Complete a head that was cut by the end of an earlier read."""
        have = len(self._head)
        missing = self._head_bytes() - have
        size = min(missing, end - at)
        self._head += view[at : at + size]
        if size == missing and self._head_bytes() == len(self._head):
            self._complete_head()
        return size

    def _complete_head(self) -> None:
        """Decode a complete head; it is kept if there is no memory for its payload."""
        head, self._head = self._head, bytearray()
        view = memoryview(head)
        used = self._receive_buffers(view, 0, len(view))
        if self.stopped:
            self._head = head
        else:
            used = used or self._parse(view, 0, len(view))
            assert used == len(view)

    def _head_bytes(self) -> int:
        """Length that the current head must have before it can be parsed."""
        if len(self._head) < FRAME_HEADER_BYTES:
            return FRAME_HEADER_BYTES
        length, kind, _ = FRAME_HEADER.unpack_from(self._head, 0)
        self._check(length, kind)
        return BUFFER_HEADER_BYTES if kind == _BUFFER_RESPONSE else LENGTH_BYTES + int(length)

    def _check(self, length: int, kind: int) -> None:
        if length > self._limit:
            raise RemoteProtocolError(
                f"frame of {length} bytes (type {kind}), at most {self._limit} are allowed"
            )
        if length < (BUFFER_FIXED_BYTES if kind == _BUFFER_RESPONSE else _TYPE_AND_CHANNEL_BYTES):
            raise RemoteProtocolError(f"frame of {length} bytes is too short for its type {kind}")
        if kind not in _KNOWN_TYPES:
            raise RemoteProtocolError(f"frame of unknown type {kind}")
        if kind == _ADD_CREDIT:
            grants, rest = divmod(length - _TYPE_AND_CHANNEL_BYTES, GRANT.size)
            if rest or not 0 < grants <= limits.GRANTS_PER_FRAME_MAX:
                raise RemoteProtocolError(
                    f"malformed ADD_CREDIT frame of {length} bytes: it names 1 to "
                    f"{limits.GRANTS_PER_FRAME_MAX} channels"
                )

    def _parse(self, view: memoryview, at: int, end: int) -> int:
        """Parse a frame other than a BufferResponse. Returns the bytes used; 0 if it is not complete."""
        if end - at < FRAME_HEADER_BYTES:
            return 0
        length, kind, channel = FRAME_HEADER.unpack_from(view, at)
        self._check(length, kind)
        total = LENGTH_BYTES + int(length)
        if kind == _BUFFER_RESPONSE or end - at < total:
            return 0
        self.counts[kind] += 1
        body = view[at + FRAME_HEADER_BYTES : at + total]
        if kind == _ADD_CREDIT:
            for granted, credit in GRANT.iter_unpack(body):
                self.sink.credit(granted, positive("credit", credit))
        elif kind in _SIGNS and len(body) == U64.size:  # the most of what idle connections say
            self.sink.frame(_SIGNS[kind](U64.unpack(body)[0]))
        else:
            self.sink.frame(decode_body(kind, channel, body))
        return total
