"""Elements that are stored: in memory up to a bound, and beyond it in a file.

The file has no name from the moment it is made, so nothing is left behind however the process ends. Each
element in it is one block with a CRC-32 of its own, which every read checks: whoever reads gets what was
written, or an error that says where it is not. (Flink: ``FileChannelBoundedData``, without checksums.)

One thread appends and any number read, without a lock: an element is there once whoever appended has it.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from minishuffle.errors import PartitionLost, ResourceExhausted
from minishuffle.exchange.elements import ByteBudget, Part

__all__ = ["ElementLog", "ElementStore", "StorePlace", "StoredElement"]


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where files of stores are made, and how they are closed.

    Args:
        directory: None for the system's directory for temporary files.
        close: closes a file by its number; that may take as long as its blocks take to be freed.
    """

    directory: str | None = None
    close: Callable[[int], None] = os.close

    def __str__(self) -> str:
        return self.directory or tempfile.gettempdir()


class _UnnamedFile:
    """A file without a name; closed when nobody holds it any more."""

    __slots__ = ("_close", "number", "size")

    def __init__(self, place: StorePlace) -> None:
        self._close = place.close
        self.number, path = tempfile.mkstemp(prefix="minishuffle-rows-", dir=place.directory)
        os.unlink(path)
        self.size = 0

    def __del__(self) -> None:
        if hasattr(self, "number"):
            self._close(self.number)

    def append(self, parts: list[Part]) -> int:
        """Write behind what was written before; gives the position. A write that fails leaves no trace."""
        at = begin = self.size
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                written = os.pwrite(self.number, view, at)
                at, view = at + written, view[written:]
        self.size = at
        return begin

    def read(self, begin: int, size: int) -> bytes:
        """Fewer bytes if the file ends there."""
        pieces = []
        while size and (piece := os.pread(self.number, size, begin)):
            pieces.append(piece)
            begin, size = begin + len(piece), size - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(slots=True)
class StoredElement:
    """One element of a store: ``size`` bytes with header, in memory or at ``offset`` of the file. Nobody
    changes it; one that is frozen would take a microsecond longer to make."""

    number: int
    """The number of its block, from 0."""
    rows: int
    size: int
    data: bytes | None = field(default=None, repr=False)
    offset: int = 0
    checksum: int = 0
    file: _UnnamedFile | None = field(default=None, repr=False)


class ElementStore:
    """The elements of one owner, which has its entries.

    Args:
        owner: what is stored and where, for errors: partition, attempt and worker.
        memory_bytes: how much stays in memory.
        memory: shared with other stores, each of which keeps in memory what has room there; None: there are
            ``memory_bytes`` for this one.
        budget: shared with all that is stored on the worker; None: as the disk allows.
    """

    def __init__(
        self,
        owner: str,
        place: StorePlace,
        *,
        memory_bytes: int = 0,
        memory: ByteBudget | None = None,
        budget: ByteBudget | None = None,
    ) -> None:
        self.bytes = 0
        """The size of all elements."""
        self._owner = owner
        self._place = place
        self._memory_bytes = memory_bytes
        self._memory = memory
        self._budget = budget
        self._blocks = 0
        self._file: _UnnamedFile | None = None

    def append(self, rows: int, parts: list[Part]) -> StoredElement:
        """Store an element, whose bytes are ``parts`` joined.

        Raises:
            ResourceExhausted: it is too much, or the disk is full or cannot be written to.
        """
        size = sum(map(len, parts))
        if self._budget is not None and not self._budget.extend(id(self), size):
            raise ResourceExhausted(
                f"{self._owner} finds no room: blocking partitions would take more than "
                f"{self._budget.limit_bytes:,} bytes of that worker. Raise blocking_bytes_max, or let fewer "
                "records go over blocking exchanges and into broadcast sides"
            )
        number = self._blocks
        if self._has_memory(size):
            found = StoredElement(number, rows, size, b"".join(parts))
        else:
            checksum = 0
            for part in parts:
                checksum = zlib.crc32(part, checksum)
            try:
                file = self._file
                if file is None:
                    file = self._file = _UnnamedFile(self._place)
                offset = file.append(parts)
            except OSError as error:
                raise ResourceExhausted(
                    f"{self._owner} cannot be kept in {self._place}: {error.strerror}; make room there, or "
                    "start the workers with another --state-dir"
                ) from error
            found = StoredElement(number, rows, size, None, offset, checksum, file)
        self._blocks += 1
        self.bytes += size
        return found

    def _has_memory(self, size: int) -> bool:
        if self._memory is not None:
            return self._memory.extend(id(self), size)
        return self.bytes + size <= self._memory_bytes

    def read(self, element: StoredElement) -> bytes:
        """The bytes of an element of this store. (Any thread; it may wait for the disk.)

        Raises:
            PartitionLost: they are not what was written.
        """
        file = element.file
        if file is None:
            assert element.data is not None
            return element.data
        try:
            data = file.read(element.offset, element.size)
        except OSError as error:
            raise self._lost(element, str(error.strerror)) from error
        if len(data) < element.size:
            raise self._lost(element, f"the file ends {element.size - len(data)} bytes before its end")
        if zlib.crc32(data) != element.checksum:
            raise self._lost(element, "its checksum is not that of what was written")
        return data

    def _lost(self, element: StoredElement, why: str) -> PartitionLost:
        return PartitionLost(
            f"block {element.number} of {self._owner} cannot be read, {element.size} bytes at offset "
            f"{element.offset} of a file in {self._place}: {why}; look at that disk"
        )

    def forget(self) -> None:
        """Let go of the file; it is closed once nobody has an element of it."""
        self._file, self.bytes = None, 0
        for shared in (self._memory, self._budget):
            if shared is not None:
                shared.release(id(self))

    def __del__(self) -> None:
        if hasattr(self, "_budget"):
            self.forget()


class ElementLog:
    """Elements of a store in their order. An element is there once its entry is."""

    __slots__ = ("bytes", "elements", "store")

    def __init__(self, store: ElementStore) -> None:
        self.store = store
        self.elements: list[StoredElement] = []
        self.bytes = 0
        """The size of all of them."""

    def append(self, rows: int, parts: list[Part]) -> None:
        """Raises ResourceExhausted as :meth:`ElementStore.append`."""
        element = self.store.append(rows, parts)
        self.elements.append(element)
        self.bytes += element.size

    def read(self, number: int) -> bytes:
        """The bytes of an element. Raises PartitionLost as :meth:`ElementStore.read`."""
        return self.store.read(self.elements[number])

    def clear(self) -> None:
        """Forget all of it."""
        self.elements, self.bytes = [], 0
