"""The snapshots of a directory: which are whole, which is the newest, which may go."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from minishuffle.errors import StorageUnavailable, UnknownName, UnreadableSnapshot, UntrustedSnapshot
from minishuffle.limits import UNFINISHED_SNAPSHOT_SECONDS
from minishuffle.snapshots.catalog import (
    Listed,
    commit,
    expendable,
    folder_name,
    list_snapshots,
    newest_whole,
    open_manifest,
    probe,
)
from minishuffle.snapshots.sealedmanifest import MANIFEST, SavedTask, WrittenState
from minishuffle.snapshots.storage import folder_at
from support.savedjobs import SECRET, manifest_of, save

MISSING = manifest_of(tasks=(SavedTask(0, 0, "running", None, WrittenState("gone.state", 5, 5, "", 1)),))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three snapshots of job j1, one of j2, an unfinished one, and a folder of something else."""
    for number in (1, 2, 3):
        name = folder_name("j1", "savepoint", number)
        save(folder_at(tmp_path / name), number=number, taken_at=1_000.0 + number)
    save(folder_at(tmp_path / "of another"), job="j2", taken_at=1_010.0)
    (tmp_path / "j1-savepoint-4").mkdir()
    (tmp_path / "j1-savepoint-4" / "0-0-1.state").write_bytes(b"1")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


def names(listed: list[Listed]) -> list[str]:
    return [each.folder.name() for each in listed]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def test_a_snapshot_without_one_of_its_files_is_not_committed(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    with pytest.raises(
        UnreadableSnapshot, match=rf"^there is no {tmp_path}/gone\.state: .* worker that wrote it"
    ):
        commit(folder, MISSING, SECRET)
    (tmp_path / "gone.state").write_bytes(b"1234")
    with pytest.raises(UnreadableSnapshot, match=r"gone\.state has 4 bytes and not 5"):
        commit(folder, MISSING, SECRET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gone.state"]


def test_the_snapshots_of_a_directory_are_listed_by_age(directory: Path) -> None:
    listed = list_snapshots(folder_at(directory), SECRET)
    assert names(listed) == [
        "j1-savepoint-1", "j1-savepoint-2", "j1-savepoint-3", "of another", "j1-savepoint-4",
    ]  # fmt: skip
    assert [each.is_unfinished for each in listed] == [False] * 4 + [True]
    first = listed[0]
    assert first.manifest is not None
    assert first.bytes == first.manifest.size() + (directory / "j1-savepoint-1" / MANIFEST).stat().st_size
    assert list_snapshots(folder_at(directory / "nowhere"), SECRET) == []


def test_a_snapshot_may_be_moved(directory: Path) -> None:
    before = open_manifest(folder_at(directory / "j1-savepoint-1"), SECRET)
    (directory / "j1-savepoint-1").rename(directory / "pictures" / "kept")
    assert open_manifest(folder_at(directory / "pictures" / "kept"), SECRET) == before


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda folder: cut(folder / "1-1-1.state"), r"1-1-1\.state has .* bytes and not"),
        (lambda folder: flip(folder / "1-1-1.state"), r"1-1-1\.state was changed: .* have their checksum"),
        (lambda folder: (folder / "1-0-1.state").unlink(), r"there is no .*1-0-1\.state"),
        (lambda folder: cut(folder / MANIFEST), "manifest is cut after"),
    ],
)  # fmt: skip
def test_the_one_before_takes_the_place_of_a_broken_one(
    harm: Callable[[Path], None], why: str, directory: Path
) -> None:
    harm(directory / "j1-savepoint-3")
    folder, manifest, passed = newest_whole(folder_at(directory), SECRET, job="j1")
    assert (folder.name(), manifest.number) == ("j1-savepoint-2", 2)
    (text,) = passed
    assert text.startswith((f"{directory}/j1-savepoint-3/", f"there is no {directory}/j1-savepoint-3/"))
    assert re.search(why, text)


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    probe(folder_at(tmp_path), "trial")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageUnavailable, match=f"^{tmp_path}/file/trial"):
        probe(folder_at(tmp_path / "file"), "trial")


def test_a_storage_that_gives_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_at(tmp_path)
    monkeypatch.setattr(type(folder), "read", lambda *_: b"other")
    with pytest.raises(UnreadableSnapshot, match="does not hold what was written"):
        probe(folder, "trial")
    assert list(tmp_path.iterdir()) == []


def test_without_a_whole_snapshot_it_says_why(directory: Path) -> None:
    with pytest.raises(
        UnknownName, match=f"no snapshot of job j9 in {directory}: 'minishuffle jobs savepoint'"
    ):
        newest_whole(folder_at(directory), SECRET, job="j9")
    with pytest.raises(
        UnreadableSnapshot, match="no snapshot in .* can be used: .*another secret.*; .*another"
    ):
        newest_whole(folder_at(directory), b"x" * 32)
    with pytest.raises(UntrustedSnapshot):
        open_manifest(folder_at(directory / "of another"), b"x" * 32)
    folder, _, _ = newest_whole(folder_at(directory), b"x" * 32, trust=True)
    assert folder.name() == "of another"


def test_the_last_whole_snapshot_of_each_job_stays(directory: Path) -> None:
    cut(directory / "j1-savepoint-3" / MANIFEST)
    listed = list_snapshots(folder_at(directory), SECRET)
    unfinished = next(each for each in listed if each.is_unfinished)
    soon = unfinished.touched + 1
    assert names(expendable(listed, 0, soon)) == ["j1-savepoint-1"]
    assert names(expendable(listed, 1, soon)) == ["j1-savepoint-1"]
    assert names(expendable(listed, 2, soon)) == []
    later = unfinished.touched + UNFINISHED_SNAPSHOT_SECONDS + 1
    assert names(expendable(listed, 2, later)) == ["j1-savepoint-4"]
    assert names(expendable(listed, 2, later, writing={"j1-savepoint-4"})) == []
