"""Folders of snapshots, on disks and in object stores: the same of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from minishuffle.errors import StorageUnavailable, UnreadableSnapshot, UsageError
from minishuffle.snapshots.sealedmanifest import MANIFEST
from minishuffle.snapshots.storage import folder_above, folder_at, place_below, place_for_all


def test_files_are_written_listed_read_and_removed(tmp_path: Path) -> None:
    top = folder_at(tmp_path / "new" / "place")
    assert top.entries() == []
    folder = top.child("s")
    assert (folder.where, folder.name()) == (f"{tmp_path}/new/place/s", "s")
    with pytest.raises(StorageUnavailable, match="No such file"):
        folder.create("a.state")  # nor does one that was removed come back
    folder.publish(MANIFEST, b"all")
    file = folder.create("a.state")
    file.write(b"0123")
    file.write(memoryview(b"456"))
    file.close()
    assert [(each.name, each.is_folder, each.bytes) for each in folder.entries()] == [
        ("a.state", False, 7),
        (MANIFEST, False, 3),
    ]
    assert [(each.name, each.is_folder, each.bytes) for each in top.entries()] == [("s", True, 0)]
    assert all(each.modified > 1e9 for each in folder.entries())
    assert folder.read("a.state") == b"0123456"
    assert (folder.read("a.state", 2, 3), folder.read("a.state", 5, 9)) == (b"234", b"56")
    assert folder.read("a.state", 90, 9) == b""
    with pytest.raises(UnreadableSnapshot, match=f"^there is no {folder.where}/b: it was removed"):
        folder.read("b")
    folder.remove()
    assert top.entries() == []


def test_a_file_system_of_pyarrow_is_used_in_the_same_way() -> None:
    top = folder_at("mock://any/new")
    folder = top.child("s")
    file = folder.create("a.state")
    file.write(b"0123456")
    file.close()
    folder.create("b.state").abandon()
    folder.publish(MANIFEST, b"all")
    assert [(each.name, each.bytes) for each in folder.entries()] == [
        ("a.state", 7),
        ("b.state", 0),
        (MANIFEST, 3),
    ]
    assert [(each.name, each.is_folder) for each in top.entries()] == [("s", True)]
    assert (folder.read("a.state", 2, 3), folder.read("a.state", 5, 9)) == (b"234", b"56")
    assert (folder.read("a.state", 90, 9), folder.read("a.state")) == (b"", b"0123456")
    with pytest.raises(UnreadableSnapshot, match=f"^there is no {folder.where}/c: it was removed"):
        folder.read("c")
    folder.remove()
    assert top.entries() == []


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("", "cannot be the path of a directory"),
        ("a\0b", "cannot be the path of a directory"),
        ("~nobody-of-this-name/a", "cannot be the path of a directory"),
        ("s3://[a/b", "names no file system: "),
    ],
)
def test_what_is_no_path_is_refused(where: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        folder_at(where)


@pytest.mark.parametrize(
    ("where", "below"),
    [
        ("/a/b", "/a/b/c"),
        ("/a/b?/", "/a/b?/c"),
        ("s3://bucket/a", "s3://bucket/a/c"),
        ("s3://bucket/a/?region=here", "s3://bucket/a/c?region=here"),
    ],
)
def test_a_folder_in_another_has_its_options(where: str, below: str) -> None:
    assert place_below(where, "c") == below
    if "://" not in where:
        assert folder_above(below).where == where.rstrip("/")


def test_a_uri_of_no_file_system_is_refused_without_its_credentials() -> None:
    with pytest.raises(
        UsageError, match="^nowhere://bucket/folder names no file system: .*s3://bucket/folder"
    ):
        folder_at("nowhere://key:word@bucket/folder")
    with pytest.raises(UsageError, match="names no file system") as refused:
        folder_at("s3://key:word@bucket/a folder")
    assert "word" not in str(refused.value)


def test_what_goes_while_a_directory_is_listed_hides_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert [entry.name for entry in folder_at(tmp_path).entries()] == ["a", "nowhere"]


def test_a_directory_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageUnavailable, match=f"^{tmp_path}/file: Not a directory: see that it is there"):
        folder_at(tmp_path / "file").entries()
    with pytest.raises(
        StorageUnavailable, match=f"^{tmp_path}: Is a directory|^{tmp_path}/s: Is a directory"
    ):
        (tmp_path / "s").mkdir()
        folder_at(tmp_path).read("s")


def test_a_place_is_one_for_other_processes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert place_for_all("saved") == place_for_all(tmp_path / "saved") == f"{tmp_path}/saved"
    assert [place_for_all(each) for each in ("", "s3://bucket/saved")] == ["", "s3://bucket/saved"]
