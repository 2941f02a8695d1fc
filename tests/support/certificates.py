"""One CA for all tests of a process, and certificates of it and of others, good and bad."""

from __future__ import annotations

import atexit
import datetime
import shutil
import tempfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

from minishuffle import authority
from minishuffle.authority import LOOPBACK, Authority
from minishuffle.config import TlsFiles
from minishuffle.transport.credentials import Credentials

KINDS = ("good", "another", "stranger", "foreign name", "expired", "too early")


@cache
def _directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="certificates-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def _authority(name: str) -> Authority:
    return Authority.kept(_directory() / name)


@cache
def files_of(kind: str = "good") -> TlsFiles:
    """The files of a process whose certificate is ``good``, ``another`` one of that CA, a ``stranger`` to it,
    for a ``foreign name``, ``expired``, or used ``too early``."""
    times = {}
    if kind == "expired":
        times = {"VALID": datetime.timedelta(minutes=-1)}
    elif kind == "too early":
        times = {"CLOCKS_APART": datetime.timedelta(days=-1)}
    hosts = ["elsewhere.example"] if kind == "foreign name" else LOOPBACK
    with patch.multiple(authority, **times) if times else patch.object(authority, "VALID", authority.VALID):
        return _authority("others" if kind == "stranger" else "ours").issue(_directory() / kind, hosts)


@cache
def credentials(kind: str = "good") -> Credentials:
    """The same, read; of those that can be."""
    return Credentials(files_of(kind))


def unchecked(kind: str) -> Credentials:
    """The same of a process whose clock, or whose files, were good when it read them."""
    with patch("minishuffle.transport.credentials._try_out"):
        return Credentials(files_of(kind))
