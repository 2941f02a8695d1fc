"""Elements are put together from the buffers of a channel: header by header, payload by payload.

A payload that lies in one buffer is copied out at once. One that spans buffers is put together in
memory as long as it is not too long and the worker's budget has room, else in an unlinked file that is
mapped into memory.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from enum import IntEnum
from typing import Any, Final

import numpy as np

from minishuffle.errors import RemoteProtocolError, ResourceExhausted
from minishuffle.limits import ELEMENT_BYTES_MAX, SPILL_ELEMENT_BYTES

__all__ = ["ELEMENT_HEADER", "Assembler", "AssemblyBudget", "ElementFormat"]

ELEMENT_HEADER: Final = struct.Struct(">IIB3x")
"""Payload bytes, rows, format."""


class ElementFormat(IntEnum):
    """How the payload of an element is written."""

    ROWS = 1
    KEYED_ROWS = 2
    ARROW = 3


_FORMATS: Final = frozenset(map(int, ElementFormat))
_NOTHING: Final = memoryview(b"")


class AssemblyBudget:
    """How many bytes of half elements a worker may hold in memory.

    Shared by the assemblers of all task threads without a lock: each writes an entry of its own, and
    two that look at the same time may each take the last room, so the limit is exact within one
    element per thread.

    Args:
        limit_bytes: the bound.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Bytes of half elements in memory."""
        return sum(self._held.values())

    def reserve(self, holder: int, size: int) -> bool:
        """Take ``size`` bytes for ``holder`` (the id of an assembler); False if there is no room."""
        if self.used + size > self.limit_bytes:
            return False
        self._held[holder] = size
        return True

    def release(self, holder: int) -> None:
        """Give back what ``holder`` took, if anything."""
        self._held.pop(holder, None)


class Assembler:
    """The element under way of one channel.

    Args:
        budget: the worker's.
        directory: where long elements are put together; None for the system's temporary directory.
    """

    __slots__ = ("_at", "_budget", "_directory", "_filled", "_format", "_header", "_rows", "_target", "_view")

    def __init__(self, budget: AssemblyBudget, directory: str | None) -> None:
        self._budget = budget
        self._directory = directory
        self._view = _NOTHING
        self._at = 0
        self._header = b""
        """The part of a header that has come."""
        self._target: memoryview | None = None
        """The payload under way, which is complete up to ``_filled``."""
        self._filled = 0
        self._format = 0
        self._rows = 0

    @property
    def exhausted(self) -> bool:
        """True once every byte that was fed has been copied out; nothing refers to the view then."""
        return self._at == len(self._view)

    def feed(self, view: memoryview) -> None:
        """The payload of the channel's next buffer. The one before must be exhausted."""
        assert self.exhausted
        self._view = view
        self._at = 0

    def next(self) -> tuple[int, int, Any] | None:
        """The next whole element as (format, rows, payload), or None when more bytes are needed.

        The payload (bytes or a memoryview) owns its memory, which is aligned to 8 bytes or more.

        Raises:
            RemoteProtocolError: a header that cannot be; nothing was allocated for it.
            ResourceExhausted: a long element cannot be written to ``directory``.
        """
        if self._target is None:
            size = self._next_header()
            if size is None:
                return None
            end = self._at + size
            if end <= len(self._view):
                payload = bytes(self._view[self._at : end])
                self._advance(end)
                return self._format, self._rows, payload
            self._target = self._allocate(size)
            self._filled = 0
        return self._fill(self._target)

    def clear(self) -> int:
        """Throw away the half element and the rest of the view; returns the half element's rows."""
        rows = self._rows if self._target is not None else 0
        self._target = None
        self._header = b""
        self._advance(len(self._view))
        self._budget.release(id(self))
        return rows

    def _advance(self, at: int) -> None:
        self._at = at
        if at == len(self._view):
            self._view = _NOTHING
            self._at = 0

    def _next_header(self) -> int | None:
        """Read a header; returns the payload's size, or None if a part of the header is missing."""
        wanted = ELEMENT_HEADER.size - len(self._header)
        piece = self._view[self._at : self._at + wanted]
        header = self._header + bytes(piece)
        if len(header) < ELEMENT_HEADER.size:
            self._header = header
            self._advance(self._at + len(piece))
            return None
        size, rows, kind = ELEMENT_HEADER.unpack(header)
        if kind not in _FORMATS or size > ELEMENT_BYTES_MAX:
            raise RemoteProtocolError(
                f"an element of {size} bytes, {rows} rows and format {kind}: the formats are 1, 2 and 3, and "
                f"the limit is {ELEMENT_BYTES_MAX} bytes"
            )
        self._header = b""
        self._at += wanted
        self._rows, self._format = rows, kind
        return int(size)

    def _allocate(self, size: int) -> memoryview:
        if size <= SPILL_ELEMENT_BYTES and self._budget.reserve(id(self), size):
            return np.empty(size, dtype=np.uint8).data
        return memoryview(_map_file(size, self._directory))

    def _fill(self, target: memoryview) -> tuple[int, int, Any] | None:
        view = self._view
        size = min(len(target) - self._filled, len(view) - self._at)
        target[self._filled : self._filled + size] = view[self._at : self._at + size]
        self._filled += size
        self._advance(self._at + size)
        if self._filled < len(target):
            return None
        self._target = None
        self._budget.release(id(self))
        return self._format, self._rows, target


def _map_file(size: int, directory: str | None) -> mmap.mmap:
    """``size`` bytes of a new file without a name; its blocks are reserved, so that writing cannot fail."""
    try:
        with tempfile.TemporaryFile(dir=directory, prefix="minishuffle-element-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        where = directory or tempfile.gettempdir()
        raise ResourceExhausted(
            f"an element of {size} bytes cannot be put together in {where} ({error.strerror}): "
            "free space there, or emit smaller batches"
        ) from error
