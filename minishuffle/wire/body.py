"""Reads the body of a frame, field by field."""

from __future__ import annotations

import struct
from typing import Final

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError

__all__ = ["U16", "U32", "U64", "BodyReader"]

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
