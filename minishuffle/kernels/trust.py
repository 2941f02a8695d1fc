"""Whether nobody but this user and root can have put a file where it is."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["distrusted"]

LINKS_MAX: Final = 40
"""Symbolic links on one way, as in Linux."""


def distrusted(path: Path) -> str:
    """Why the file, or what stands in its place, cannot be trusted; empty if it can.

    It and every folder above it have to belong to this user or root, and nobody else may write them. A folder
    in which everybody may write is all right if it is sticky: nobody can replace there what is another's.
    So is the user's own group, of which nobody else is a member. Symbolic links are followed, and have to
    belong to this user or root too. What is not there is no reason.

    Raises:
        OSError: one of them cannot be looked at.
    """
    for each, found in _passed(path):
        if found.st_uid not in (os.getuid(), 0):
            return f"{each} belongs to another user (id {found.st_uid})"
        if stat.S_ISLNK(found.st_mode) or (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX):
            continue
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)):
            return f"others may write {each} (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def _passed(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder and link on the way from the root to ``path``, and that itself."""
    here, ahead, links = Path("/"), list(path.absolute().parts[1:]), 0
    yield here, here.lstat()
    while ahead:
        part = ahead.pop(0)
        if part == "..":
            here = here.parent
            continue
        try:
            found = (here / part).lstat()
        except FileNotFoundError:
            return
        yield here / part, found
        if not stat.S_ISLNK(found.st_mode):
            here = here / part
            continue
        if (links := links + 1) > LINKS_MAX:
            raise OSError(f"too many symbolic links on the way to {path}")
        target = (here / part).readlink()
        if target.is_absolute():
            here = Path("/")
        ahead[:0] = [each for each in target.parts if each != "/"]


def _is_own_group(number: int) -> bool:
    """Whether that is the group which many systems give each user, by the user's name."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return (group.gr_name, user.pw_gid) == (user.pw_name, number) and set(group.gr_mem) <= {user.pw_name}
