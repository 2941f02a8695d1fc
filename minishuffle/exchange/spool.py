"""Results that wait on disk for a reader: stored elements, found by the number of their first row.

One thread (the task's) writes, one (the loop's) frees, any number read, without a lock: each changes
what is its own by one step that the interpreter does not divide. A file is closed when the last reader lets
go of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from minishuffle import limits
from minishuffle.errors import RemoteProtocolError, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import ELEMENT_HEADER, Part, decode, encode, read_header
from minishuffle.exchange.elementstore import ElementStore, StoredElement

__all__ = ["Spool"]

FILES_PER_BOUND: Final = 4
"""Room comes free a file at a time, so several of them make up what an unbounded job may keep."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One element: rows ``begin`` to ``end``."""

    begin: int
    end: int
    store: ElementStore = field(repr=False)
    element: StoredElement

    def cut(self, begin: int, end: int) -> tuple[int, list[Part]]:
        """Those of its rows that are in this range, as an element."""
        data = self.store.read(self.element)
        if begin <= self.begin and self.end <= end:
            return self.end - self.begin, [data]
        first = max(begin, self.begin) - self.begin
        return encode(_batch(data).slice(first, min(end, self.end) - self.begin))


class Spool:
    """The rows that one attempt of a sink's subtask keeps, numbered from ``first`` on.

    Invariants: the entries join on to each other and end at ``rows``; everything below ``freed`` may be
    gone, nothing at or above it is.

    Args:
        make_store: gives one for the next file, with nothing in memory.
        bytes_max: of what nobody has read yet, for a job that does not end; None: as the disk allows.
        first: rows that earlier attempts have kept, as far as readers know.
        is_guaranteed: rows that readers have yet to deal with come again if the attempt is lost.
    """

    def __init__(
        self,
        make_store: Callable[[], ElementStore],
        bytes_max: int | None,
        first: int = 0,
        *,
        is_guaranteed: bool = False,
    ) -> None:
        self.rows = first
        """The number of the next row; written by the task."""
        self.freed = first
        """Rows below may be gone; written by the loop."""
        self.read_rows = first
        """Rows below were read and dealt with: they do not count against ``bytes_max``. Written by the
        loop."""
        self.rows_again = 0
        """Rows of earlier attempts that this one makes again, under other numbers."""
        self.is_guaranteed = is_guaranteed
        self._bytes_written = 0
        """The task's."""
        self._bytes_read = 0
        """The loop's: those of the elements that end below ``read_rows``."""
        self._make_store = make_store
        self._bytes_max = bytes_max
        self._file_bytes = (
            limits.SPOOL_FILE_BYTES if bytes_max is None else max(1, bytes_max // FILES_PER_BOUND)
        )
        self._entries: deque[_Entry] = deque()
        self._open: ElementStore | None = None

    # --- task ------------------------------------------------------------------------------------

    def begin_at(self, row: int) -> None:
        """The attempt begins with a snapshot, behind which an earlier one kept rows from that number on."""
        self.rows_again = self.rows - row

    def go_back(self, row: int, elements: Iterable[bytes]) -> None:
        """The whole job goes back to where earlier attempts had kept rows up to that number. Keep what
        readers had yet to deal with then once more, under other numbers.

        Raises:
            ResourceExhausted: the disk is full, or cannot be written to.
        """
        self.rows_again = self.rows - row
        for element in elements:
            _, rows, _ = read_header(element)
            self._store(rows, [element])
            self.rows_again += rows

    def unread(self) -> Iterator[bytes]:
        """The elements of all rows that readers have yet to deal with now. They are read as they are asked
        for, on any thread, and though readers have dealt with them by then.

        Raises:
            PartitionLost: (with each) what is on disk is not what was written.
        """
        begin, end = self.read_rows, self.rows
        entries = [entry for entry in self._entries.copy() if entry.end > begin]
        return (b"".join(entry.cut(begin, end)[1]) for entry in entries)

    @property
    def has_room(self) -> bool:
        """False while a job that does not end has to wait for a reader."""
        return self._bytes_max is None or self._bytes_written - self._bytes_read < self._bytes_max

    def append(self, batch: Batch) -> None:
        """Write one batch of columns, as one element.

        Raises:
            ResourceExhausted: the disk is full, or cannot be written to.
        """
        rows, parts = encode(batch)
        if rows:
            self._store(rows, parts)

    def _store(self, rows: int, parts: list[Part]) -> None:
        store = self._open
        if store is None or store.bytes >= self._file_bytes:
            store = self._open = self._make_store()
        element = store.append(rows, parts)
        self._entries.append(_Entry(self.rows, self.rows + rows, store, element))
        self._bytes_written += element.size
        self.rows += rows

    # --- loop ------------------------------------------------------------------------------------

    def free(self, begin: int, read: int) -> None:
        """Nobody will ask for rows below ``begin`` again, and those below ``read`` were dealt with.

        Neither goes back. Files are given up whole.
        """
        entries = self._entries.copy()
        before, self.read_rows = self.read_rows, max(self.read_rows, min(read, self.rows))
        self._bytes_read += sum(
            entry.element.size for entry in entries if before < entry.end <= self.read_rows
        )
        self.freed = max(self.freed, min(begin, self.read_rows))
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
            PartitionLost: what is on disk is not what was written.
        """
        self.check(begin, end)
        for entry in self._entries.copy():
            if entry.end <= begin:
                continue
            if entry.begin >= end:
                return
            yield entry.cut(begin, end)

    def validate(self) -> None:
        """Check the invariants; for tests."""
        entries = self._entries.copy()
        assert all(one.end == two.begin for one, two in pairwise(entries))
        assert entries[-1].end == self.rows if entries else self.freed == self.rows
        assert not entries or entries[0].begin <= self.freed <= self.rows


def _batch(element: bytes) -> Batch:
    size, rows, kind = read_header(element)
    batch = decode(kind, rows, memoryview(element)[ELEMENT_HEADER.size : ELEMENT_HEADER.size + size])
    if isinstance(batch.payload, list):
        raise RemoteProtocolError("kept results are not Arrow columns")
    return batch
