"""Who may have written a file: owners, modes, sticky folders, private groups and links on the way to it."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from minishuffle.kernels import trust
from minishuffle.kernels.trust import distrusted


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file in two folders of this user's."""
    path = tmp_path / "outer" / "inner" / "file"
    path.parent.mkdir(parents=True, mode=0o755)
    for each in (path.parent.parent, path.parent):
        each.chmod(0o755)
    path.touch()
    path.chmod(0o644)
    return path


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], int]:
    """Makes a file another user's; gives that user's id."""

    def make(path: Path) -> int:
        if os.getuid() == 0:
            os.chown(path, 12_345, -1, follow_symlinks=False)
        else:
            mine = os.getuid()
            monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        return path.lstat().st_uid

    return make


def test_what_is_ones_own_or_not_there_is_trusted(file: Path) -> None:
    assert distrusted(file) == ""
    assert distrusted(file.parent / "none" / "here") == ""


@pytest.mark.parametrize("mode", [0o002, 0o020])
def test_what_others_may_write_is_not(file: Path, mode: int) -> None:
    for each, before in ((file, 0o644), (file.parent, 0o755), (file.parent.parent, 0o755)):
        each.chmod(before | mode)
        if mode == 0o020 and trust._is_own_group(each.stat().st_gid):
            assert distrusted(file) == ""
        else:
            assert distrusted(file) == f"others may write {each} (mode {before | mode:04o})"
        each.chmod(before)
        assert distrusted(file) == ""


def test_a_sticky_folder_is_all_right_and_a_sticky_file_is_not(file: Path) -> None:
    file.parent.chmod(0o1777)
    assert distrusted(file) == ""
    file.chmod(0o1666)
    assert "others may write" in distrusted(file)


def test_what_is_another_users_is_not(file: Path, foreign: Callable[[Path], int]) -> None:
    owner = foreign(file)
    assert distrusted(file).endswith(f"belongs to another user (id {owner})")


def test_a_link_is_followed_and_what_it_passes_is_looked_at(file: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "way").symlink_to("../outer")
    (tmp_path / "link").symlink_to(shared / "way" / "inner")
    assert distrusted(tmp_path / "link" / "file") == ""
    shared.chmod(0o777)
    found = distrusted(tmp_path / "link" / "file")
    assert found == f"others may write {shared} (mode 0777)", "who may write there may lead it elsewhere"
    shared.chmod(0o700)
    file.parent.chmod(0o777)
    assert distrusted(tmp_path / "link" / "file") == f"others may write {file.parent} (mode 0777)"


def test_a_link_of_another_user_is_not(file: Path, tmp_path: Path, foreign: Callable[[Path], int]) -> None:
    (tmp_path / "link").symlink_to(file)
    foreign(tmp_path / "link")
    assert "belongs to another user" in distrusted(tmp_path / "link")


def test_links_without_an_end_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="too many symbolic links"):
        distrusted(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "members", "primary", "own"),
    [
        ("me", [], 5, True),
        ("me", ["me"], 5, True),
        ("me", ["me", "you"], 5, False),
        ("users", [], 5, False),
        ("me", [], 6, False),
    ],
)
def test_a_group_is_ones_own_if_it_is_private(
    monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], primary: int, own: bool
) -> None:
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name=name, gr_mem=members))
    monkeypatch.setattr(pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="me", pw_gid=primary))
    assert trust._is_own_group(5) == own
