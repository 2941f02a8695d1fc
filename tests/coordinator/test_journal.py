from __future__ import annotations

import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from minishuffle.config import ClusterSettings
from minishuffle.coordinator.journal import FILE_NAME, RECORD_BUSY_SECONDS, CoordinatorJournal
from minishuffle.errors import ResourceExhausted, ShuffleError


def test_each_start_begins_a_new_term_and_job_numbers_last(tmp_path: Path) -> None:
    with CoordinatorJournal(tmp_path) as journal:
        assert (journal.term, journal.jobs_submitted) == (1, 0)
        journal.record_jobs(1)
        journal.record_jobs(2)
        assert journal.jobs_submitted == 2
    with CoordinatorJournal(tmp_path) as journal:
        assert (journal.term, journal.jobs_submitted) == (2, 2)


def test_what_is_recorded_outlives_a_process_that_never_closes(tmp_path: Path) -> None:
    killed = CoordinatorJournal(tmp_path)
    killed.record_jobs(5)
    with CoordinatorJournal(tmp_path) as journal:
        assert (journal.term, journal.jobs_submitted) == (2, 5)
    killed.close()


def test_the_number_of_jobs_never_shrinks(tmp_path: Path) -> None:
    with CoordinatorJournal(tmp_path) as journal:
        journal.record_jobs(9)
        journal.record_jobs(3)
        assert journal.jobs_submitted == 9
    with CoordinatorJournal(tmp_path) as journal:
        assert journal.jobs_submitted == 9


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_file_is_named_with_a_fix(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(content)
    with pytest.raises(
        ShuffleError, match=r"is damaged \(.*\): move that file away and start again"
    ) as raised:
        CoordinatorJournal(tmp_path)
    assert str(path) in str(raised.value)
    assert path.read_bytes() == content


def test_a_file_of_another_kind_of_journal_is_refused(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE_NAME)
    database.execute("CREATE TABLE coordinator (something TEXT)")
    database.commit()
    database.close()
    with pytest.raises(ShuffleError, match=r"the journal .* cannot be opened"):
        CoordinatorJournal(tmp_path)


def test_a_directory_that_is_not_there_is_named_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(ShuffleError, match=r"cannot be opened \(.*\): see to its permissions .* --state-dir"):
        CoordinatorJournal(tmp_path / "missing")


@contextmanager
def nothing_can_be_written() -> Iterator[None]:
    """Every write to a file of this process fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_each_time_until_there_is_room(tmp_path: Path) -> None:
    with CoordinatorJournal(tmp_path) as journal:
        journal.record_jobs(1)
        errors = []
        with nothing_can_be_written():
            for _ in range(3):
                with pytest.raises(ResourceExhausted) as raised:
                    journal.record_jobs(2)
                errors.append(str(raised.value))
        assert all("cannot be written (" in text and "make room" in text for text in errors)
        assert journal.jobs_submitted == 1
        journal.record_jobs(2)
    with CoordinatorJournal(tmp_path) as journal:
        assert (journal.term, journal.jobs_submitted) == (2, 2)


def test_a_directory_that_was_removed_works_again_once_it_is_back(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    with CoordinatorJournal(directory) as journal:
        journal.record_jobs(7)
        shutil.rmtree(directory)
        with pytest.raises(ResourceExhausted, match="unable to open database file"):
            journal.record_jobs(8)
        directory.mkdir()
        journal.record_jobs(8)
        assert journal.jobs_submitted == 8
    with CoordinatorJournal(directory) as journal:
        assert (journal.term, journal.jobs_submitted) == (2, 8)


def test_a_journal_that_is_held_by_another_program_does_not_hold_up_the_coordinator(tmp_path: Path) -> None:
    with CoordinatorJournal(tmp_path) as journal, closing(sqlite3.connect(journal.path)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(ResourceExhausted, match="database is locked"):
            journal.record_jobs(1)
        assert 0.5 * ClusterSettings().heartbeat_interval > RECORD_BUSY_SECONDS
        holder.rollback()
        journal.record_jobs(1)


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    journal = CoordinatorJournal(tmp_path)
    journal.close()
    with pytest.raises(ShuffleError, match="cannot be written"):
        journal.record_jobs(1)
