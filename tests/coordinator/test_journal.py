from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from minishuffle.coordinator.journal import FILE_NAME, CoordinatorJournal
from minishuffle.errors import ShuffleError


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
def test_a_damaged_file_is_named_with_the_mend(tmp_path: Path, content: bytes) -> None:
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


def test_a_directory_that_is_not_there_is_named_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ShuffleError, match=r"cannot be opened \(.*\): see to its permissions .* --state-dir"):
        CoordinatorJournal(tmp_path / "missing")


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    journal = CoordinatorJournal(tmp_path)
    journal.close()
    with pytest.raises(ShuffleError, match="cannot be written"):
        journal.record_jobs(1)
