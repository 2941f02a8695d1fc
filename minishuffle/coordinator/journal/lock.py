"""The lock that keeps a second coordinator from a journal in use, unless its user says ``--take-over``.

A coordinator holds a lock (``flock``) on a file next to the journal; the kernel releases it when the process
ends in any way. The lock is not on the journal itself: SQLite uses POSIX locks there, which a process loses
when it closes any descriptor of the file, and with which ``flock`` conflicts on NFS. Where the lock does not
help, as on a file system without locks or from another host, the coordinator named in ``coordinator.json`` is
asked. A coordinator that takes over replaces the lock file with its own; the old coordinator is ended by the
new term, as if it had been cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from minishuffle.config import CoordinatorPlace, read_coordinator
from minishuffle.errors import ResourceExhausted, ShuffleError, UsageError
from minishuffle.transport.control import BlockingControlClient
from minishuffle.transport.credentials import Credentials
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.requests import ClusterStatus, GetStatus

__all__ = ["sole_coordinator"]

FILE_NAME: Final = "journal.lock"
"""The lock file, with the process id of the coordinator that last locked it."""
HELLO_SECONDS: Final = 2.0
"""Seconds within which a running coordinator answers a hello."""
_log = logging.getLogger("minishuffle.coordinator")


@contextlib.contextmanager
def sole_coordinator(state_dir: Path, cluster: str, secret: bytes, *, take_over: bool) -> Iterator[None]:
    """Let no other coordinator start with this state directory during the block, or the life of this process.

    Args:
        state_dir: exists.
        take_over: do not check for a running coordinator; it ends when it notices the new term.

    Raises:
        ResourceExhausted: a coordinator runs.
        UsageError: the lock file cannot be written.
    """
    path = state_dir / FILE_NAME
    try:
        descriptor = _replace(path) if take_over else _lock(path, state_dir)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; name another state directory with --state-dir"
        ) from error
    try:
        place = None if take_over else read_coordinator(state_dir)
        if place is not None and not place.handed_over and (found := _answers(place, cluster, secret)):
            raise _runs(state_dir, found)
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _lock(path: Path, state_dir: Path) -> int:
    """The descriptor of the lock file, locked if the file system has locks.

    Raises:
        ResourceExhausted: another process has the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _flock(descriptor, path) or _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            pid, place = os.read(descriptor, 32).decode().strip(), read_coordinator(state_dir)
            where = f", {place.address}" if place is not None else ""
            os.close(descriptor)
            raise _runs(state_dir, f"pid {pid or 'unknown'}{where}") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process has replaced the file


def _replace(path: Path) -> int:
    """Replace the lock file with a new, locked one. Returns its descriptor."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _flock(descriptor, path)
        new.replace(path)
    except BaseException:
        os.close(descriptor)
        new.unlink()
        raise
    return descriptor


def _flock(descriptor: int, path: Path) -> bool:
    """Whether the file system has locks. Raises BlockingIOError: another process has this one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        _log.warning(
            "the file system of %s has no locks (%s): a second coordinator is refused only if this one "
            "answers it, and else takes its place",
            path,
            error.strerror,
        )
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _answers(place: CoordinatorPlace, cluster: str, secret: bytes) -> str:
    """The coordinator that answers at a place, in words, if it is the one named there; else empty. Another
    process may listen at its port since."""
    identity = Identity(Role.CLIENT, cluster, 0, 0)
    try:
        tls = None if place.tls is None else Credentials(place.tls)
        with BlockingControlClient(place.address, identity, secret, HELLO_SECONDS, tls=tls) as client:
            try:
                status = client.request(GetStatus(jobs=False))
            except ShuffleError:
                return str(place.address)  # it is alive, but busy
    except ShuffleError:
        return ""
    if not isinstance(status, ClusterStatus) or status.term != place.term:
        return ""
    return f"pid {status.pid}, {place.address}"


def _runs(state_dir: Path, found: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"a coordinator runs with {state_dir} already ({found}): leave it, or have this one take its place "
        "with --take-over"
    )
