"""Links without a socket, for consumers and producers of either side, and what is on its way over them."""

from __future__ import annotations

from collections import deque

from minishuffle.counters import ConnectionCounters
from minishuffle.exchange.channels import InputChannel, RemoteAttachment
from minishuffle.protocol.channel import ConsumerChannel
from minishuffle.protocol.connection import Connection
from minishuffle.wire.decoder import FrameDecoder
from minishuffle.wire.frames import (
    BUFFER_HEADER_BYTES,
    FRAME_HEADER,
    LENGTH_BYTES,
    DataType,
    PartitionRequest,
)
from support.frames import Recorder


class BareLink:
    """A connection that is flushed when the test moves its bytes; ``flushes`` counts what asked for it."""

    def __init__(self, *, dialer: bool = False) -> None:
        self.connection = Connection(dialer=dialer, counters=ConnectionCounters(), ping_interval=5.0, now=0.0)
        self.flushes = 0
        self.paused = False

    def flush_soon(self) -> None:
        self.flushes += 1


class Line:
    """The bytes on their way to ``receiver``, and the frames in them."""

    def __init__(self, receiver: Connection) -> None:
        self.receiver = receiver
        self.under_way = bytearray()
        self._recorder = Recorder()
        self._decoder = FrameDecoder(self._recorder, 1 << 20)
        self._frames: deque[tuple[int, int, object]] = deque()
        """Where each begins and ends in the stream, and what it says."""
        self._sent = self._delivered = 0

    def put(self, data: bytes) -> None:
        self.under_way += data
        at = 0
        while at < len(data):
            size = LENGTH_BYTES + FRAME_HEADER.unpack_from(data, at)[0]
            self._decoder.receive(data[at : at + size])
            for item in self._recorder.seen:
                self._frames.append((self._sent + at, self._sent + at + size, item))
            self._recorder.seen.clear()
            at += size
        self._sent += len(data)

    def deliver(self, size: int | None) -> None:
        """The next bytes arrive, wherever that cuts a frame; None: all. Negative: all but so many."""
        data = bytes(self.under_way[:size])
        if data:
            del self.under_way[:size]
            self._delivered += len(data)
            self.receiver.receive(data, 0.0)
            while self._frames and self._frames[0][1] <= self._delivered:
                self._frames.popleft()

    def credit(self, channel: int) -> int:
        """Credit for a channel that is on its way, with that of its request."""
        found = 0
        for _, _, item in self._frames:
            if isinstance(item, PartitionRequest) and item.channel == channel:
                found += item.initial_credit
            elif isinstance(item, tuple) and item[0] == channel:
                found += item[1]
        return found

    def buffers(self, channel: int) -> int:
        """Buffers with data of a channel whose header has not arrived."""
        return sum(
            isinstance(item, tuple)
            and isinstance(item[0], tuple)
            and item[0][2] == channel
            and item[0][5] == DataType.DATA
            and begin + BUFFER_HEADER_BYTES > self._delivered
            for begin, _, item in self._frames
        )


def consumer_of(channel: InputChannel) -> ConsumerChannel:
    """The consuming end that carries a channel now; a channel is attached to a link for that."""
    attachment = channel.attachment
    assert isinstance(attachment, RemoteAttachment)
    return attachment.consumer
