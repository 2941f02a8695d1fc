"""Sockets of this process that processes which it forks must not hold.

A user's function may fork, with ``os.fork`` or ``multiprocessing``. The copy has every descriptor, and a
connection ends for its peer, and a port is free, when the last descriptor of it is closed: a worker that is
killed would be missed only when its heartbeats are, and its ports would be taken as long as the copy lives.
Programs that are executed have none of them, as they are closed on exec.
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol

__all__ = ["close_in_forks"]

_registered: dict[int, tuple[int, int]] = {}
"""Device and inode of each socket, by descriptor. A closed one stays until its number is registered again;
another file with this number meanwhile has another inode."""


class HasDescriptor(Protocol):
    def fileno(self) -> int:
        """Negative once it is closed."""
        ...


def close_in_forks(*sockets: HasDescriptor) -> None:
    """Have every process that this one forks close its copies of these sockets, at once."""
    for each in sockets:
        if (descriptor := each.fileno()) >= 0:
            _registered[descriptor] = _inode(descriptor)


def _inode(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _close_all() -> None:
    """Close them in a process that has just been forked. Nothing is sent: the parent's are open.

    The null device takes their numbers, for the objects that own them are here too: they would close what the
    user opens next.
    """
    for descriptor, inode in _registered.items():
        with contextlib.suppress(OSError):  # The parent has closed it.
            if _inode(descriptor) != inode:
                continue
            os.close(descriptor)  # First, so that a process which has as many as it may can open another.
            if (null := os.open(os.devnull, os.O_RDWR)) != descriptor:
                os.dup2(null, descriptor, inheritable=False)
                os.close(null)
    _registered.clear()


os.register_at_fork(after_in_child=_close_all)
