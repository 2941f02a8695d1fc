"""Streams of frames for the decoder, and what it makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from minishuffle.wire.decoder import FrameDecoder
from minishuffle.wire.frames import BUFFER_FIXED_BYTES, BufferHeader, Frame, FrameType, write_buffer


class Recorder:
    """A sink that lends memory for every payload but those of channel 99."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def frame(self, frame: Frame) -> None:
        self.seen.append(frame)

    def credit(self, channel: int, credit: int) -> None:
        self.seen.append((channel, credit))

    def buffer_begin(self, header: BufferHeader) -> memoryview | None:
        self._header = header
        self._memory = bytearray(header[0] - BUFFER_FIXED_BYTES)
        return None if header[2] == 99 else memoryview(self._memory)

    def buffer_end(self) -> None:
        self.seen.append((self._header, bytes(self._memory)))


def buffer_header(
    channel: int,
    sequence: int,
    data_type: int,
    size: int,
    *,
    backlog: int = 0,
    flags: int = 0,
    first_start: int = 0,
    rows: int = 0,
    row: int = 0,
) -> BufferHeader:
    """The fields of a BufferResponse with ``size`` bytes of payload."""
    length, kind = BUFFER_FIXED_BYTES + size, int(FrameType.BUFFER_RESPONSE)
    return (length, kind, channel, sequence, backlog, data_type, flags, first_start, rows, row)


@dataclass
class Piece:
    """A payload behind 64 bytes of headroom."""

    memory: memoryview
    size: int
    data_type: int = 1
    flags: int = 3
    first_start: int = 0
    rows: int = 5
    row: int = 9
    start: int = 64
    shared: bool = False

    def chunks(self, channel: int, sequence: int, backlog: int) -> list[bytes | memoryview]:
        """Its BufferResponse, as it goes to the socket."""
        chunks: list[bytes | memoryview] = []
        write_buffer(self, channel, sequence, backlog, chunks)
        return chunks


def buffer_response(channel: int, payload: bytes) -> bytes:
    memory = memoryview(bytearray(64 + len(payload)))
    memory[64:] = payload
    return b"".join(Piece(memory, len(payload)).chunks(channel, 1, 2))


def decode(*pieces: bytes, limit: int = 4096) -> list[object]:
    recorder = Recorder()
    decoder = FrameDecoder(recorder, limit)
    for piece in pieces:
        decoder.receive(piece)
    return recorder.seen
