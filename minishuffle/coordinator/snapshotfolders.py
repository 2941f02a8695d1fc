"""What the coordinator does with the folders of savepoints. It blocks: threads of their own do it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from minishuffle.coordinator.jobs.savepoints import CHECKED_FILE, FolderWork
from minishuffle.errors import ResourceExhausted, ShuffleError, UnreadableSnapshot, UsageError, described
from minishuffle.snapshots.catalog import commit, list_snapshots, open_manifest
from minishuffle.snapshots.sealedmanifest import SnapshotManifest
from minishuffle.snapshots.storage import folder_at
from minishuffle.wire.requests import SubmitJob

__all__ = ["SnapshotFolders", "do_in_folder", "in_thread", "read_manifest"]

_Found = TypeVar("_Found")
_log = logging.getLogger("minishuffle.coordinator")


async def in_thread(call: Callable[[], _Found]) -> _Found | ShuffleError:
    """Call what blocks in a thread of its own, and wait for its answer or the error that it raises. A storage
    that hangs holds up no other folder, no name that is looked up, and not the end of the process."""
    loop = asyncio.get_running_loop()
    settled: asyncio.Future[_Found | ShuffleError] = loop.create_future()

    def settle(found: _Found | ShuffleError) -> None:
        if not settled.done():
            settled.set_result(found)

    def work() -> None:
        found: _Found | ShuffleError
        try:
            found = call()
        except ShuffleError as error:
            found = error
        except Exception as error:  # e.g. no memory, or what a file system of pyarrow raises: somebody waits
            _log.exception("work in the folder of a savepoint failed")
            found = ResourceExhausted(f"work in the folder of a savepoint failed: {described(error)}")
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=work, name="snapshot folder", daemon=True).start()
    return await settled


class SnapshotFolders:
    """The folders of a coordinator's snapshots. One thing is done in a folder at a time, in the order in
    which it is asked for: a snapshot that is removed is not written then.

    Args:
        secret: signs manifests.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def work_in(self, work: FolderWork) -> SnapshotManifest | ShuffleError | None:
        """Do it: see :func:`do_in_folder`. Gives its error, if it raises one."""
        async with self._turns.setdefault(work.folder, asyncio.Lock()):
            return await in_thread(partial(do_in_folder, work, self._secret))

    async def manifest_for(self, message: SubmitJob) -> SnapshotManifest | ShuffleError:
        """The manifest from which a job is to go on: see :func:`read_manifest`; or its error."""
        return await in_thread(partial(read_manifest, message, self._secret))


def do_in_folder(work: FolderWork, secret: bytes) -> SnapshotManifest | None:
    """Prepare the folder of a snapshot with a file that workers look for, make a snapshot of it, or remove
    it; or open the snapshot there, and return its manifest.

    Raises:
        UsageError: what is to be prepared is there already, or can be no folder.
        UnreadableSnapshot: there is no manifest to open, or a file that it names is missing or cut.
        UntrustedSnapshot: what is to be opened is not signed under the secret.
        StorageUnavailable: the storage refuses it.
    """
    folder = folder_at(work.folder)
    check = folder.child(CHECKED_FILE)
    match work.work:
        case "prepare":
            if folder.entries():
                raise UsageError(f"{folder.where} is not empty: say where with --into")
            check.publish(CHECKED_FILE, work.content.encode())
        case "commit":
            assert work.manifest is not None
            check.remove()
            commit(folder, work.manifest, secret)
        case "discard":
            if folder.entries():
                folder.remove()
        case "open":
            return open_manifest(folder, secret, trust=work.trust)
    return None


def read_manifest(message: SubmitJob, secret: bytes) -> SnapshotManifest:
    """The manifest of the savepoint from which a job is to go on.

    Raises:
        UnreadableSnapshot: there is none, or a file is missing, cut or changed.
        UntrustedSnapshot: it is not signed under the secret.
        StorageUnavailable: the storage does not answer.
    """
    folder = folder_at(message.restore_from)
    try:
        return open_manifest(folder, secret, trust=message.trust_snapshot)
    except UnreadableSnapshot:
        if names := [each.folder.name() for each in list_snapshots(folder, secret)]:
            raise UnreadableSnapshot(
                f"{folder.where} is no snapshot, but a directory of some: give the path of one, the last "
                f"is {names[-1]}; 'minishuffle state list' shows them"
            ) from None
        if not folder.entries():
            raise UnreadableSnapshot(
                f"there is no savepoint {folder.where}: give the path that 'minishuffle jobs savepoint' has "
                "printed; 'minishuffle state list' shows those of a directory"
            ) from None
        raise
