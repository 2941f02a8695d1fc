"""Control links' byte stream: Message frames, and nothing else, both ways."""

from __future__ import annotations

from minishuffle import limits
from minishuffle.errors import LocalProtocolError, RemoteProtocolError, ResourceExhausted
from minishuffle.wire.codec import FrameDecoder, encode_frame
from minishuffle.wire.frames import Frame, Message
from minishuffle.wire.messages import pack_message, unpack_message
from minishuffle.wire.parts import ControlMessage

__all__ = ["MessageDecoder", "encode_message"]


class MessageDecoder:
    """Incremental decoder of one direction of a control link."""

    def __init__(self) -> None:
        self._messages: list[tuple[ControlMessage, int]] = []
        self._decoder = FrameDecoder(self, limits.CONTROL_FRAME_BYTES_MAX)

    def receive(self, data: bytes) -> list[tuple[ControlMessage, int]]:
        """Take the next bytes; returns the messages that became complete, with their request numbers.

        Raises:
            RemoteProtocolError: anything but well-formed Message frames.
        """
        self._decoder.receive(data)
        messages, self._messages = self._messages, []
        return messages

    def frame(self, frame: Frame) -> None:
        if not isinstance(frame, Message):
            raise RemoteProtocolError(f"{type(frame).__name__} frame on a control link")
        self._messages.append((unpack_message(frame.body), frame.request))

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
        raise RemoteProtocolError("BufferResponse frame on a control link")

    def buffer_end(self) -> None:
        raise LocalProtocolError("no payload was begun")


def encode_message(message: ControlMessage, request: int) -> bytes:
    """The frame that carries ``message``.

    Raises:
        ResourceExhausted: it is longer than a control frame may be.
    """
    data = encode_frame(Message(request, pack_message(message)))
    if len(data) > limits.CONTROL_FRAME_BYTES_MAX:
        raise ResourceExhausted(
            f"{type(message).__name__} of {len(data)} bytes is too large for the control plane, which takes "
            f"{limits.CONTROL_FRAME_BYTES_MAX}; let functions read large objects from files instead of "
            "carrying them"
        )
    return data
