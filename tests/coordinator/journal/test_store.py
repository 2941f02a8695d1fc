from __future__ import annotations

import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from minishuffle.coordinator.journal.store import FILE_NAME, CoordinatorJournal, JournalLost
from minishuffle.errors import ResourceExhausted, ShuffleError, Superseded

JOB, TASK = ("job", "j1"), ("task", "j1/0/0")


def test_each_start_begins_a_new_term_and_finds_the_records(tmp_path: Path) -> None:
    with CoordinatorJournal(tmp_path) as journal:
        assert (journal.term, journal.records) == (1, {})
        journal.write({JOB: b"running", TASK: b"1"})
        journal.write({TASK: b"2"})
    with CoordinatorJournal(tmp_path) as journal:
        assert (journal.term, journal.records) == (2, {JOB: b"running", TASK: b"2"})
        journal.write({JOB: None, ("job", "j2"): b""})
    with CoordinatorJournal(tmp_path) as journal:
        assert (journal.term, journal.records) == (3, {TASK: b"2", ("job", "j2"): b""})


def test_what_is_written_outlives_a_process_that_never_closes(tmp_path: Path) -> None:
    killed = CoordinatorJournal(tmp_path)
    killed.write({JOB: b"running"})
    with CoordinatorJournal(tmp_path) as journal:
        assert (journal.term, journal.records) == (2, {JOB: b"running"})
    killed.close()


def test_a_coordinator_of_an_earlier_term_writes_nothing_more(tmp_path: Path) -> None:
    with CoordinatorJournal(tmp_path) as old, CoordinatorJournal(tmp_path) as new:
        new.write({JOB: b"of the new one"})
        for changes in ({JOB: b"of the old one"}, {}):
            with pytest.raises(Superseded, match="a coordinator of term 2 has taken over .* of term 1, ends"):
                old.write(changes)
        new.write({TASK: b"1"})
    with CoordinatorJournal(tmp_path) as journal:
        assert journal.records == {JOB: b"of the new one", TASK: b"1"}


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


def test_a_record_that_was_changed_is_found_by_its_checksum_and_no_term_begins(tmp_path: Path) -> None:
    with CoordinatorJournal(tmp_path) as journal:
        journal.write({JOB: b"running"})
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as database:
        database.execute("UPDATE records SET record = ?", (b"runninG",))
    with pytest.raises(ShuffleError, match=r"journal.sqlite is damaged \(the checksum of record job j1 is"):
        CoordinatorJournal(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as database:
        assert database.execute("SELECT term FROM coordinator").fetchone() == (1,)


def test_a_log_that_was_cut_off_anywhere_loses_whole_writes_and_only_the_last_ones(tmp_path: Path) -> None:
    """The file is what a crash leaves: the write-ahead log is not yet in the database."""
    source = tmp_path / "source"
    source.mkdir()
    journal = CoordinatorJournal(source)
    for number in range(3):
        journal.write({JOB: b"%d" % number, TASK: b"%d" % number})
    log = (source / f"{FILE_NAME}-wal").read_bytes()
    found = []
    for cut in range(len(log), 0, -len(log) // 40):
        directory = tmp_path / str(cut)
        directory.mkdir()
        shutil.copy(source / FILE_NAME, directory)
        (directory / f"{FILE_NAME}-wal").write_bytes(log[:cut])
        with CoordinatorJournal(directory) as recovered:
            assert recovered.records.get(JOB) == recovered.records.get(TASK)
            found.append(recovered.records.get(JOB, b""))
    journal.close()
    assert found == sorted(found, reverse=True)
    assert set(found) >= {b"2", b"1", b""}


def test_a_file_of_another_kind_of_journal_is_refused(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE_NAME)
    database.execute("CREATE TABLE coordinator (something TEXT)")
    database.commit()
    database.close()
    with pytest.raises(ShuffleError, match=r"the journal .* cannot be opened"):
        CoordinatorJournal(tmp_path)


def test_a_directory_that_is_not_there_is_named_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(ShuffleError, match=r"cannot be opened \(.*\): see that there is room .* --state-dir"):
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
        journal.write({JOB: b"1"})
        errors = []
        with nothing_can_be_written():
            for _ in range(3):
                with pytest.raises(ResourceExhausted) as raised:
                    journal.write({JOB: b"2"})
                errors.append(str(raised.value))
        assert all("cannot be written (" in text and "make room" in text for text in errors)
        journal.write({TASK: b"3"})
    with CoordinatorJournal(tmp_path) as journal:
        assert (journal.term, journal.records) == (2, {JOB: b"1", TASK: b"3"})


def test_a_directory_that_was_removed_takes_all_records_once_it_is_back(tmp_path: Path) -> None:
    """The last change alone would be taken for all that there is."""
    directory = tmp_path / "state"
    directory.mkdir()
    with CoordinatorJournal(directory) as journal:
        journal.write({JOB: b"1"})
        shutil.rmtree(directory)
        with pytest.raises(ResourceExhausted, match="unable to open database file"):
            journal.write({JOB: b"2"})
        directory.mkdir()
        for _ in range(2):
            with pytest.raises(JournalLost, match=r"journal\.sqlite was removed"):
                journal.write({JOB: b"2"})
        journal.write({JOB: b"2", TASK: b"3"}, whole=True)
        journal.write({JOB: b"4"})
    with CoordinatorJournal(directory) as journal:
        assert (journal.term, journal.records) == (2, {JOB: b"4", TASK: b"3"})


def test_a_table_with_more_columns_is_read(tmp_path: Path) -> None:
    with CoordinatorJournal(tmp_path) as journal:
        journal.write({JOB: b"1"})
        with closing(sqlite3.connect(journal.path)) as other:
            other.execute("ALTER TABLE records ADD COLUMN later")
    with CoordinatorJournal(tmp_path) as journal:
        assert journal.records == {JOB: b"1"}


def test_a_journal_that_another_program_holds_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.coordinator.journal.store.WRITE_BUSY_SECONDS", 0.05)
    with CoordinatorJournal(tmp_path) as journal, closing(sqlite3.connect(journal.path)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(ResourceExhausted, match="database is locked"):
            journal.write({JOB: b"1"})
        holder.rollback()
        journal.write({JOB: b"1"})


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    journal = CoordinatorJournal(tmp_path)
    journal.close()
    with pytest.raises(ShuffleError, match="cannot be written"):
        journal.write({JOB: b"1"})
