"""The folders of savepoints, as the coordinator prepares, completes and removes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minishuffle.coordinator.jobs.savepoints import CHECKED_FILE, FolderWork
from minishuffle.coordinator.snapshotfolders import SnapshotFolders, do_in_folder, in_thread, read_manifest
from minishuffle.errors import (
    ResourceExhausted,
    ShuffleError,
    StorageUnavailable,
    UnreadableSnapshot,
    UntrustedSnapshot,
    UsageError,
)
from minishuffle.snapshots.catalog import commit
from minishuffle.wire.requests import SubmitJob
from support.savedjobs import SECRET, manifest_of


def submitted(path: Path, *, trust: bool = False) -> SubmitJob:
    return SubmitJob(name="n", python="3", graph=b"", restore_from=str(path), trust_snapshot=trust)


def test_a_folder_is_prepared_for_workers_to_find_and_complete_with_its_manifest(tmp_path: Path) -> None:
    where = tmp_path / "new" / "j1-savepoint-1"
    do_in_folder(FolderWork("j1", 1, str(where), "prepare", "words"), SECRET)
    assert (where / CHECKED_FILE / CHECKED_FILE).read_text() == "words"
    with pytest.raises(UsageError, match="is not empty: say where with --into"):
        do_in_folder(FolderWork("j1", 1, str(where), "prepare", "words"), SECRET)
    with pytest.raises(UnreadableSnapshot):
        read_manifest(submitted(where), SECRET)
    manifest = manifest_of()
    do_in_folder(FolderWork("j1", 1, str(where), "commit", manifest=manifest), SECRET)
    assert [each.name for each in where.iterdir()] == ["manifest"]
    assert read_manifest(submitted(where), SECRET) == manifest
    with pytest.raises(UntrustedSnapshot):
        read_manifest(submitted(where), b"another secret of thirty-two chars")
    assert read_manifest(submitted(where, trust=True), b"") == manifest


def test_a_directory_of_snapshots_is_no_snapshot_and_its_last_one_is_named(tmp_path: Path) -> None:
    for number in (1, 2):
        where = tmp_path / f"j1-savepoint-{number}"
        do_in_folder(FolderWork("j1", 1, str(where), "prepare", "words"), SECRET)
        manifest = manifest_of(number=number, taken_at=float(number))
        do_in_folder(FolderWork("j1", 1, str(where), "commit", manifest=manifest), SECRET)
    with pytest.raises(UnreadableSnapshot, match="a directory of some: .*, the last is j1-savepoint-2;"):
        read_manifest(submitted(tmp_path), SECRET)


def test_what_is_not_there_is_no_file_that_was_removed(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSnapshot, match=f"there is no savepoint {tmp_path}/j1: give the path that"):
        read_manifest(submitted(tmp_path / "j1"), SECRET)


def test_what_failed_is_removed_and_nothing_there_is_no_error(tmp_path: Path) -> None:
    where = tmp_path / "j1-savepoint-1"
    discard = FolderWork("j1", 1, str(where), "discard")
    do_in_folder(discard, SECRET)
    do_in_folder(FolderWork("j1", 1, str(where), "prepare", "words"), SECRET)
    (where / "0-0-1.state").write_bytes(b"half")
    do_in_folder(discard, SECRET)
    assert not where.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "j1-savepoint-1"
    with pytest.raises((StorageUnavailable, UsageError), match="file"):
        do_in_folder(FolderWork("j1", 1, str(where), "prepare", "words"), SECRET)


def _refuse(error: Exception) -> str:
    raise error


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: "x", "x"),
        (partial(_refuse, UsageError("no")), UsageError),
        (partial(_refuse, MemoryError("of 1 TB")), ResourceExhausted),
    ],
)
def test_whatever_a_storage_does_its_caller_hears_of_it(
    call: Callable[[], str], found: str | type[ShuffleError]
) -> None:
    said = asyncio.run(in_thread(call))
    assert said == found if isinstance(found, str) else isinstance(said, found)


def test_what_is_removed_while_it_is_written_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow_commit(*args: Any) -> None:
        begun.set()
        assert goes_on.wait(30)
        commit(*args)

    monkeypatch.setattr("minishuffle.coordinator.snapshotfolders.commit", slow_commit)
    where = str(tmp_path / "s1")

    async def together() -> None:
        folders = SnapshotFolders(SECRET)
        await folders.work_in(FolderWork("j1", 1, where, "prepare", "words"))
        writing = asyncio.create_task(
            folders.work_in(FolderWork("j1", 1, where, "commit", manifest=manifest_of()))
        )
        await asyncio.to_thread(begun.wait, 30)
        removing = asyncio.create_task(folders.work_in(FolderWork("j1", 1, where, "discard")))
        elsewhere = FolderWork("j1", 2, str(tmp_path / "s2"), "prepare", "words")
        assert await folders.work_in(elsewhere) is None, "no other folder waits"
        assert not removing.done()
        goes_on.set()
        await asyncio.gather(writing, removing)

    asyncio.run(together())
    assert [path.name for path in tmp_path.iterdir()] == ["s2"]
