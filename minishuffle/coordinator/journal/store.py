"""The coordinator's journal: records that outlive it, in an SQLite file of the state directory.

A write is one transaction: after a crash all of it is there, or nothing. It is refused once another
coordinator has begun a later term. Each record replaces the previous one with its kind and name, so the size
of the file is proportional to the current state. After a crash, SQLite itself discards the incomplete end of
its log; in addition every record has a checksum.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from minishuffle.errors import ResourceExhausted, ShuffleError, Superseded
from minishuffle.ids import RecordKey

__all__ = ["CoordinatorJournal", "JournalLost"]

FILE_NAME = "journal.sqlite"
OPEN_BUSY_SECONDS = 5.0
"""Seconds for which another process may hold the file at the start."""
LOG_PAGES = 100
"""The log begins again once it has that many pages: to write over a file costs less than to extend it."""
WRITE = (
    "INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT (kind, name) "
    "DO UPDATE SET record = excluded.record, checksum = excluded.checksum"
)
"""In place: the index and the list of free pages are not written."""
WRITE_BUSY_SECONDS = 1.0
"""Seconds for which another process may hold the file during a write."""


class JournalLost(ResourceExhausted):
    """The file was removed, or replaced with an empty one."""


class CoordinatorJournal:
    """The journal file. Opening it begins a new term. Used by one thread at a time.

    Args:
        directory: exists.

    Raises:
        ShuffleError: the file cannot be opened or read, with the fix.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._file: tuple[int, int] | None = None
        """Device and inode of the file last written; None after an error: it is opened again."""
        self._is_set_up = False
        """The connection has its settings, and its file the tables."""
        try:
            self._database = self._connect(OPEN_BUSY_SECONDS)
            try:
                self.term, self.records = self._begin_term()
                self._database.execute(f"PRAGMA busy_timeout = {WRITE_BUSY_SECONDS * 1000:.0f}")
                self._file = self._inode()
            except BaseException:
                self._database.close()
                raise
        except (sqlite3.OperationalError, ValueError) as error:
            raise ShuffleError(
                f"the journal {self.path} cannot be opened ({error}): see that there is room on its disk, "
                "that it may be written and that no other program holds it, or choose another --state-dir"
            ) from error
        except sqlite3.Error as error:
            raise self.damaged(str(error)) from error

    def damaged(self, why: str) -> ShuffleError:
        """The error for contents that make no sense."""
        return ShuffleError(
            f"the journal {self.path} is damaged ({why}): move that file away and start again; jobs that run "
            "are not known then, and job numbers begin at j1"
        )

    def of_another_release(self, why: str) -> ShuffleError:
        """The error for contents of another release."""
        return ShuffleError(
            f"the journal {self.path} is of another release of minishuffle ({why}): end its cluster with "
            "that release ('minishuffle cluster down'), move the file away and start again; then job numbers "
            "begin at j1"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _connect(self, busy_seconds: float) -> sqlite3.Connection:
        database = sqlite3.connect(
            self.path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
        )
        self._is_set_up = False
        return database

    def _inode(self) -> tuple[int, int] | None:
        """Device and inode of the file now at ``path``: SQLite would continue to write to a removed file."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _begin_term(self) -> tuple[int, dict[RecordKey, bytes]]:
        with self._transaction() as database:
            database.execute("UPDATE coordinator SET term = term + 1")
            term: int = database.execute("SELECT term FROM coordinator").fetchone()[0]
            records: dict[RecordKey, bytes] = {}
            rows = database.execute("SELECT kind, name, record, checksum FROM records ORDER BY rowid")
            for kind, name, record, checksum in rows:
                if checksum != _checksum((kind, name), record):
                    raise self.damaged(f"the checksum of record {kind} {name} is wrong")
                records[kind, name] = record
        return term, records

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction: everything in the block or nothing. The tables exist."""
        database = self._database
        if not self._is_set_up:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        database.execute("BEGIN IMMEDIATE")
        try:
            if not self._is_set_up:
                self._make_tables(database)
            yield database
            database.execute("COMMIT")
            self._is_set_up = True
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    @staticmethod
    def _make_tables(database: sqlite3.Connection) -> None:
        database.execute(
            "CREATE TABLE IF NOT EXISTS coordinator "
            "(one INTEGER PRIMARY KEY CHECK (one = 1), term INTEGER NOT NULL)"
        )
        database.execute(
            "CREATE TABLE IF NOT EXISTS records (kind TEXT NOT NULL, name TEXT NOT NULL, "
            "record BLOB NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (kind, name))"
        )
        database.execute("INSERT OR IGNORE INTO coordinator (one, term) VALUES (1, 0)")

    def write(self, changes: Mapping[RecordKey, bytes | None], *, whole: bool = False) -> None:
        """Store records durably, and delete others (None); may be repeated after an error.

        Args:
            whole: ``changes`` are all records that exist.

        Raises:
            JournalLost: earlier records are not there, and ``changes`` are not the ``whole``.
            Superseded: a later term has begun.
            ResourceExhausted: it cannot be written, e.g. because the disk is full.
        """
        try:
            if self._file is None or self._file != self._inode():
                self._database.close()
                self._database = self._connect(WRITE_BUSY_SECONDS)
            self._file = None
            with self._transaction() as database:
                self._require_term(database, whole)
                for key, record in changes.items():
                    if record is None:
                        database.execute("DELETE FROM records WHERE kind = ? AND name = ?", key)
                    else:
                        row = (*key, record, _checksum(key, record))
                        database.execute(WRITE, row)
        except sqlite3.Error as error:
            raise ResourceExhausted(
                f"the journal {self.path} cannot be written ({error}): make room on its disk or see to its "
                "permissions"
            ) from error
        self._file = self._inode()

    def _require_term(self, database: sqlite3.Connection, whole: bool) -> None:
        """Check that no later term has begun. A new file has no term yet, and gets this one.

        Raises:
            JournalLost: the file is new, and the records are not the ``whole``.
            Superseded: a later term has begun.
        """
        term: int = database.execute("SELECT term FROM coordinator").fetchone()[0]
        if term == 0:
            if not whole:
                raise JournalLost(f"the journal {self.path} was removed")
            database.execute("UPDATE coordinator SET term = ?", (self.term,))
        if term > self.term:
            raise Superseded(
                f"a coordinator of term {term} has taken over with {self.path}: this one, of term "
                f"{self.term}, ends"
            )

    def close(self) -> None:
        self._database.close()


def _checksum(key: RecordKey, record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32("\0".join(key).encode()))
