"""Listens to the frames of some channels of a connection, both ways, as they pass; nothing is changed.

While nobody listens it costs nothing: the tap takes the place of the decoder's sink, and what is sent is
decoded once more only while it is there. No payload is noted, but the kind of an event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass
from typing import Any, Final, Literal, TypeAlias

from minishuffle import limits
from minishuffle.wire.decoder import NO_MEMORY, FrameDecoder, FrameSink
from minishuffle.wire.frames import (
    BUFFER_FIXED_BYTES,
    NO_ELEMENT_START,
    BufferFlags,
    BufferHeader,
    DataType,
    EventKind,
    Frame,
    frame_name,
)

__all__ = ["ChannelTap", "Note"]

Way: TypeAlias = Literal["in", "out"]
Note: TypeAlias = Callable[[Way, dict[str, Any]], None]
"""Gets each frame: its way, and its fields by name with ``frame`` for its type."""
_EVENT: Final = int(DataType.EVENT)


class ChannelTap:
    """The taps of one connection.

    Args:
        sink: the sink of the connection's decoder.
    """

    def __init__(self, sink: FrameSink) -> None:
        self.received = _Listener("in", self, sink)
        """To be the decoder's sink as long as anybody listens."""
        self._sent = FrameDecoder(_Listener("out", self, None), limits.DATA_FRAME_BYTES_MAX)
        self._notes: dict[int, Note] = {}

    def __bool__(self) -> bool:
        return bool(self._notes)

    def open(self, channel: int, note: Note) -> None:
        self._notes[channel] = note

    def close(self, channel: int) -> None:
        self._notes.pop(channel, None)

    def sending(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Whole frames that are about to be sent."""
        for chunk in chunks:
            self._sent.receive(chunk)

    def note(self, way: Way, channel: int, frame: str, fields: dict[str, Any]) -> None:
        """A frame of that channel passes."""
        note = self._notes.get(channel)
        if note is not None:
            note(way, {"frame": frame, **fields})

    def listens(self, channel: int) -> bool:
        return channel in self._notes


class _Listener:
    """A decoder's sink that notes each frame, and passes it on to the next sink, if any."""

    def __init__(self, way: Way, tap: ChannelTap, behind: FrameSink | None) -> None:
        self._way = way
        self._tap = tap
        self._behind = behind
        self._event: tuple[BufferHeader, memoryview] | None = None
        """An event whose kind is about to be known."""

    def frame(self, frame: Frame) -> None:
        channel = getattr(frame, "channel", 0)
        if channel and self._tap.listens(channel) and is_dataclass(frame):
            fields: dict[str, Any] = {}
            for name, value in asdict(frame).items():
                fields |= value if isinstance(value, dict) else {name: value}
            del fields["channel"]
            self._tap.note(self._way, channel, frame_name(frame), fields)
        if self._behind is not None:
            self._behind.frame(frame)

    def credit(self, channel: int, credit: int) -> None:
        self._tap.note(self._way, channel, "add_credit", {"credit": credit})
        if self._behind is not None:
            self._behind.credit(channel, credit)

    def buffer_begin(self, header: BufferHeader) -> memoryview | None:
        self._event = None  # its payload was discarded
        target = self._behind.buffer_begin(header) if self._behind is not None else None
        if self._tap.listens(header[2]) and target is not NO_MEMORY:
            if header[5] != _EVENT:
                self._note_buffer(header, {})
            else:
                if self._behind is None:
                    target = memoryview(bytearray(header[0] - BUFFER_FIXED_BYTES))
                if target is not None:
                    self._event = header, target
        return target

    def buffer_end(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            header, payload = event
            kind = payload[0] if len(payload) else 0
            known = kind in EventKind.__members__.values()
            self._note_buffer(header, {"event": EventKind(kind).name.lower() if known else str(kind)})
        if self._behind is not None:
            self._behind.buffer_end()

    def _note_buffer(self, header: BufferHeader, more: dict[str, Any]) -> None:
        length, _, channel, sequence, backlog, data_type, flags, first_start, rows, row = header
        fields: dict[str, Any] = {
            "sequence": sequence,
            "backlog": backlog,
            "type": "event" if data_type == _EVENT else "data",
            "bytes": length - BUFFER_FIXED_BYTES,
        }
        if data_type != _EVENT:
            named = [flag.name.lower() for flag in BufferFlags if flag & flags and flag.name]
            fields |= {"row": row, "rows": rows, "flags": named}
            if first_start != NO_ELEMENT_START:
                fields["first_start"] = first_start
        self._tap.note(self._way, channel, "buffer_response", fields | more)
