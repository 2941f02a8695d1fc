"""What a coordinator has to remember over its restarts: its term and how many jobs were submitted."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Self

from minishuffle.errors import ShuffleError

__all__ = ["CoordinatorJournal"]

FILE_NAME = "journal.sqlite"
BUSY_SECONDS = 5.0
"""How long another process may hold the file."""


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
        try:
            self._database = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                self.term, self.jobs_submitted = self._begin_term()
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

    def _begin_term(self) -> tuple[int, int]:
        database = self._database
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("BEGIN IMMEDIATE")
        database.execute(
            "CREATE TABLE IF NOT EXISTS coordinator (one INTEGER PRIMARY KEY CHECK (one = 1), "
            "term INTEGER NOT NULL, jobs_submitted INTEGER NOT NULL)"
        )
        database.execute("INSERT OR IGNORE INTO coordinator VALUES (1, 0, 0)")
        database.execute("UPDATE coordinator SET term = term + 1")
        term, jobs_submitted = database.execute("SELECT term, jobs_submitted FROM coordinator").fetchone()
        database.execute("COMMIT")
        return term, jobs_submitted

    def record_jobs(self, submitted: int) -> None:
        """Make it last that so many jobs were submitted.

        Raises:
            ShuffleError: it cannot be written, e.g. because the disk is full.
        """
        try:
            self._database.execute(
                "UPDATE coordinator SET jobs_submitted = max(jobs_submitted, ?)", (submitted,)
            )
        except sqlite3.Error as error:
            raise ShuffleError(
                f"the journal {self.path} cannot be written ({error}): make room or see to its permissions, "
                "and start the coordinator again"
            ) from error
        self.jobs_submitted = max(self.jobs_submitted, submitted)

    def close(self) -> None:
        self._database.close()
