"""Control messages as bytes: packed and unpacked within bounds, and framed on a control link.

Messages from a peer are checked before they become objects: number of bytes and values, length of text,
depth.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import msgpack
from pydantic import ValidationError

from minishuffle import limits
from minishuffle.errors import LocalProtocolError, RemoteProtocolError, ResourceExhausted
from minishuffle.wire.decoder import FrameDecoder
from minishuffle.wire.frames import BufferHeader, Frame, Message, encode_frame
from minishuffle.wire.messages import ControlMessage


def pack_message(message: ControlMessage) -> bytes:
    """The body of a Message frame. Text that is not valid Unicode (such as a file name in an error) is
    escaped: a report that could not be packed would be lost, and its task would wait forever."""
    fields = message.model_dump(mode="python")
    packed: bytes = msgpack.packb(fields, use_bin_type=True, unicode_errors="backslashreplace")
    return packed


CONTAINER_VALUES: Final = 8


def unpack_bounded(body: bytes | memoryview, values_max: int) -> Any:
    """Read msgpack that may come from anybody.

    Raises:
        ValueError: its arrays and maps have more than ``values_max`` entries together (each of them counts
            as CONTAINER_VALUES more), a map by name has more than MESSAGE_KEYS_MAX, or a text more bytes
            than MESSAGE_TEXT_BYTES_MAX.
        TypeError, msgpack.UnpackException: it is not msgpack.
    """
    left = values_max

    def count(container: Any) -> Any:
        nonlocal left
        left -= len(container) + CONTAINER_VALUES
        if left < 0:
            raise ValueError(f"it has more than {values_max:,} values")
        keys = len(container) if type(container) is dict else 0
        # A map by number (offsets by subtask, programs by operator) may be long.
        if keys > limits.MESSAGE_KEYS_MAX and not all(type(key) is int for key in container):
            raise ValueError(f"a map has {keys:,} keys, more than {limits.MESSAGE_KEYS_MAX}")
        return container

    return msgpack.unpackb(
        body,
        raw=False,
        strict_map_key=False,
        list_hook=count,
        object_hook=count,
        max_array_len=min(values_max, len(body)),
        max_map_len=min(values_max, len(body)),
        max_str_len=limits.MESSAGE_TEXT_BYTES_MAX,
        max_ext_len=0,
    )


def what_does_not_fit(error: ValidationError) -> str:
    """The first field that does not fit, and why."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{error.title}.{where:.80}: {first['msg']}"


def unpack_message(body: bytes | memoryview, values_max: int = limits.MESSAGE_VALUES_MAX) -> ControlMessage:
    """Read one message.

    Raises:
        RemoteProtocolError: not msgpack, of an unknown type, too large, or with fields that do not fit.
    """
    try:
        fields = unpack_bounded(body, values_max)
        kind = ControlMessage.by_type.get(fields["type"])
        if kind is None:
            raise ValueError(f"unknown type {fields['type']!r:.80}")
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RemoteProtocolError(f"control message cannot be read: {what_does_not_fit(error)}") from None
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RemoteProtocolError(f"control message cannot be read: {text}") from error


# --- links ----------------------------------------------------------------------------------------


class MessageDecoder:
    """Incremental decoder of one direction of a control link; messages are read one at a time.

    Args:
        values_max: bound of one message, see :func:`unpack_bounded`; the coordinator's own are trusted.
    """

    def __init__(self, values_max: int = limits.CONTROL_FRAME_BYTES_MAX) -> None:
        self._values_max = values_max
        self._frames: deque[Message] = deque()
        self._decoder = FrameDecoder(self, limits.CONTROL_FRAME_BYTES_MAX)

    def receive(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            RemoteProtocolError: anything but Message frames.
        """
        self._decoder.receive(data)

    def __bool__(self) -> bool:
        """Whether :meth:`take` has a message."""
        return bool(self._frames)

    def take(self) -> tuple[ControlMessage, int]:
        """The oldest message that is complete, with its request number.

        Raises:
            RemoteProtocolError: it cannot be read.
        """
        frame = self._frames.popleft()
        return unpack_message(frame.body, self._values_max), frame.request

    def frame(self, frame: Frame) -> None:
        if not isinstance(frame, Message):
            raise RemoteProtocolError(f"{type(frame).__name__} frame on a control link")
        self._frames.append(frame)

    def credit(self, channel: int, credit: int) -> None:
        raise RemoteProtocolError("AddCredit frame on a control link")

    def buffer_begin(self, header: BufferHeader) -> memoryview | None:
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
