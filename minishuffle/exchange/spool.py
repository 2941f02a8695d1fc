"""Results that wait on disk for a reader: elements in files, found by the number of their first row.

One thread (the task's) writes, one (the loop's) frees, any number read, without a lock: each changes
what is its own by one step that the interpreter does not divide. A file has no name from the moment it is
made, so nothing is left behind however the process ends; it is closed when the last reader lets go.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError, ResourceExhausted, UsageError
from minishuffle.exchange.elements import ELEMENT_HEADER, Part, decode, encode, read_header

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Spool", "UnnamedFile"]

FILES_PER_BOUND: Final = 4
"""Room comes free a file at a time, so several of them make up what an unbounded job may keep."""


class UnnamedFile:
    """A file without a name; closed when nobody holds it any more."""

    __slots__ = ("number", "size")

    def __init__(self, directory: str | None) -> None:
        self.number, path = tempfile.mkstemp(prefix="minishuffle-rows-", dir=directory)
        os.unlink(path)
        self.size = 0

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

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
        pieces = []
        while size:
            piece = os.pread(self.number, size, begin)
            if not piece:
                raise ResourceExhausted("a file of kept results is shorter than what was written to it")
            pieces.append(piece)
            begin, size = begin + len(piece), size - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One element: rows ``begin`` to ``end``, ``size`` bytes at ``at`` of the file."""

    begin: int
    end: int
    file: UnnamedFile = field(repr=False)
    at: int
    size: int


class Spool:
    """The rows that one attempt of a sink's subtask keeps, numbered from ``first`` on.

    Invariants: the entries join on to each other and end at ``rows``; everything below ``freed`` may be
    gone, nothing at or above it is.

    Args:
        directory: where its files are made; None for the system's temporary directory.
        bytes_max: of what nobody has read yet, for a job that does not end; None: as the disk allows.
        first: rows that earlier attempts have kept, as far as readers know.
    """

    def __init__(self, directory: str | None, bytes_max: int | None, first: int = 0) -> None:
        self.rows = first
        """The number of the next row; written by the task."""
        self.freed = first
        """Rows below may be gone; written by the loop."""
        self._read_rows = first
        """Rows below were read and dealt with: they do not count against ``bytes_max``."""
        self._bytes_written = 0
        """The task's."""
        self._bytes_read = 0
        """The loop's: those of the elements that end below ``_read_rows``."""
        self._directory = directory
        self._bytes_max = bytes_max
        self._file_bytes = (
            limits.SPOOL_FILE_BYTES if bytes_max is None else max(1, bytes_max // FILES_PER_BOUND)
        )
        self._entries: deque[_Entry] = deque()
        self._open: UnnamedFile | None = None

    # --- task ------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """False while a job that does not end has to wait for a reader."""
        return self._bytes_max is None or self._bytes_written - self._bytes_read < self._bytes_max

    def append(self, batch: pa.RecordBatch) -> None:
        """Write one batch, as one element.

        Raises:
            ResourceExhausted: the disk is full, or cannot be written to.
        """
        rows, parts = encode(batch)
        if not rows:
            return
        try:
            file = self._open
            if file is None or file.size >= self._file_bytes:
                file = self._open = UnnamedFile(self._directory)
            at = file.append(parts)
        except OSError as error:
            raise ResourceExhausted(
                f"results cannot be kept in {self._directory or tempfile.gettempdir()}: {error.strerror}; "
                "make room there, or start the workers with another --state-dir"
            ) from error
        size = sum(map(len, parts))
        self._entries.append(_Entry(self.rows, self.rows + rows, file, at, size))
        self._bytes_written += size
        self.rows += rows

    # --- loop ------------------------------------------------------------------------------------

    def free(self, begin: int, read: int) -> None:
        """Nobody will ask for rows below ``begin`` again, and those below ``read`` were dealt with.

        Neither goes back. Files are given up whole.
        """
        entries = self._entries.copy()
        before, self._read_rows = self._read_rows, max(self._read_rows, min(read, self.rows))
        self._bytes_read += sum(entry.size for entry in entries if before < entry.end <= self._read_rows)
        self.freed = max(self.freed, min(begin, self._read_rows))
        for entry in entries:
            if entry.end > self.freed:
                break
            self._entries.popleft()

    def give_up(self) -> None:
        """The task has ended, and nobody will ask for any of its rows."""
        self.free(self.rows, self.rows)
        self._open = None

    # --- readers ---------------------------------------------------------------------------------

    def check(self, begin: int, end: int) -> None:
        """Raises UsageError if rows ``begin`` to ``end`` are not there (any more)."""
        if begin < self.freed:
            raise UsageError(
                f"rows from {begin} on were asked for, and those below {self.freed} were given up because "
                "a reader had committed them: start that reader anew, from what is there"
            )
        if not begin <= end <= self.rows:
            raise UsageError(f"rows {begin} to {end} were asked for, and there are {self.rows}")

    def read(self, begin: int, end: int) -> Iterator[tuple[int, list[Part]]]:
        """Rows ``begin`` to ``end`` as elements: the rows of each, and the parts of its bytes.

        Raises:
            UsageError: they are not there (any more).
        """
        self.check(begin, end)
        for entry in self._entries.copy():
            if entry.end <= begin:
                continue
            if entry.begin >= end:
                return
            data = entry.file.read(entry.at, entry.size)
            if begin <= entry.begin and entry.end <= end:
                yield entry.end - entry.begin, [data]
            else:
                first = max(begin, entry.begin) - entry.begin
                yield encode(_batch(data).slice(first, min(end, entry.end) - entry.begin - first))

    def validate(self) -> None:
        """Check the invariants; for tests."""
        entries = self._entries.copy()
        assert all(one.end == two.begin for one, two in pairwise(entries))
        assert entries[-1].end == self.rows if entries else self.freed == self.rows
        assert not entries or entries[0].begin <= self.freed <= self.rows


def _batch(element: bytes) -> pa.RecordBatch:
    size, rows, kind = read_header(element)
    batch = decode(kind, rows, memoryview(element)[ELEMENT_HEADER.size : ELEMENT_HEADER.size + size])
    if isinstance(batch, list) or not hasattr(batch, "schema"):
        raise RemoteProtocolError("kept results are not Arrow columns")
    return batch
