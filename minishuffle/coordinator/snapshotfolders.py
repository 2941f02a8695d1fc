"""What the coordinator does with the folders of savepoints. Blocks: for threads."""

from __future__ import annotations

from minishuffle.coordinator.jobs.savepoints import CHECKED_FILE, FolderWork
from minishuffle.errors import UsageError
from minishuffle.snapshots.catalog import commit, open_manifest
from minishuffle.snapshots.sealedmanifest import SnapshotManifest
from minishuffle.snapshots.storage import folder_at
from minishuffle.wire.requests import SubmitJob

__all__ = ["do_in_folder", "read_manifest"]


def do_in_folder(work: FolderWork, secret: bytes) -> None:
    """Prepare the folder of a savepoint with a file that workers look for, make a snapshot of it, or remove
    it.

    Raises:
        UsageError: what is to be prepared is there already, or can be no folder.
        UnreadableSnapshot: a file that the manifest names is missing or cut.
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


def read_manifest(message: SubmitJob, secret: bytes) -> SnapshotManifest:
    """The manifest of the savepoint from which a job is to go on.

    Raises:
        UnreadableSnapshot: there is none, or a file is missing, cut or changed.
        UntrustedSnapshot: it is not signed under the secret.
        StorageUnavailable: the storage does not answer.
    """
    return open_manifest(folder_at(message.restore_from), secret, trust=message.trust_snapshot)
