"""What a coordinator has to remember over its restarts: its term and how many jobs were submitted."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from minishuffle.errors import ResourceExhausted, ShuffleError

__all__ = ["CoordinatorJournal"]

FILE_NAME = "journal.sqlite"
OPEN_BUSY_SECONDS = 5.0
"""How long another process may hold the file at the start."""
RECORD_BUSY_SECONDS = 0.1
"""The same while the coordinator runs, which does nothing else meanwhile."""


class CoordinatorJournal:
    """A small SQLite file (write-ahead log) in the cluster's state directory.

    Opening it begins a new term.

    Args:
        directory: exists.

    Raises:
        ShuffleError: the file cannot be opened or read, with the fix.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that was written last; None after an error: it is opened anew."""
        try:
            self._database = self._connect(OPEN_BUSY_SECONDS)
            try:
                self.term, self.jobs_submitted = self._begin_term()
                self._file = self._inode()
            except BaseException:
                self._database.close()
                raise
        except (sqlite3.OperationalError, ValueError) as error:
            raise ShuffleError(
                f"the journal {self.path} cannot be opened ({error}): see to its permissions and that no "
                "other program holds it, or choose another --state-dir"
            ) from error
        except sqlite3.Error as error:
            raise ShuffleError(
                f"the journal {self.path} is damaged ({error}): move that file away and start again; "
                "job numbers then begin at j1"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _connect(self, busy_seconds: float) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=busy_seconds, isolation_level=None)

    def _inode(self) -> tuple[int, int] | None:
        """Device and inode of the file at ``path`` now: SQLite goes on writing to one that was removed."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _begin_term(self) -> tuple[int, int]:
        with self._transaction() as database:
            database.execute("UPDATE coordinator SET term = term + 1")
            found: tuple[int, int] = database.execute(
                "SELECT term, jobs_submitted FROM coordinator"
            ).fetchone()
        return found

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything in the block or nothing; there is a table with its one row."""
        database = self._database
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("BEGIN IMMEDIATE")
        try:
            database.execute(
                "CREATE TABLE IF NOT EXISTS coordinator (one INTEGER PRIMARY KEY CHECK (one = 1), "
                "term INTEGER NOT NULL, jobs_submitted INTEGER NOT NULL)"
            )
            database.execute("INSERT OR IGNORE INTO coordinator VALUES (1, 0, 0)")
            yield database
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def record_jobs(self, submitted: int) -> None:
        """Make it last that so many jobs were submitted; may be tried again after an error.

        Raises:
            ResourceExhausted: it cannot be written, e.g. because the disk is full.
        """
        try:
            if self._file is None or self._file != self._inode():
                self._database.close()
                self._database = self._connect(RECORD_BUSY_SECONDS)
            self._file = None
            self._database.execute(f"PRAGMA busy_timeout = {RECORD_BUSY_SECONDS * 1000:.0f}")
            with self._transaction() as database:
                database.execute(
                    "UPDATE coordinator SET term = max(term, ?), jobs_submitted = max(jobs_submitted, ?)",
                    (self.term, max(self.jobs_submitted, submitted)),
                )
        except sqlite3.Error as error:
            raise ResourceExhausted(
                f"the journal {self.path} cannot be written ({error}): make room on its disk or see to its "
                "permissions, and submit again"
            ) from error
        self._file = self._inode()
        self.jobs_submitted = max(self.jobs_submitted, submitted)

    def close(self) -> None:
        self._database.close()
