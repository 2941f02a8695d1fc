"""The snapshots of a directory: commits one, opens one, finds the newest that is whole, says which may go.

Loads neither numpy nor Arrow, unless the directory is in an object store.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from minishuffle.errors import UnknownName, UnreadableSnapshot, UntrustedSnapshot
from minishuffle.limits import UNFINISHED_SNAPSHOT_SECONDS
from minishuffle.snapshots.sealedmanifest import (
    MANIFEST,
    SnapshotKind,
    SnapshotManifest,
    WrittenState,
    seal,
    unseal,
)
from minishuffle.snapshots.segmentindex import checked_segment, read_index
from minishuffle.snapshots.storage import Entry, Folder

__all__ = [
    "BEGUN",
    "Listed",
    "commit",
    "expendable",
    "folder_name",
    "list_snapshots",
    "newest_whole",
    "open_manifest",
    "probe",
    "state_file",
    "verify",
]

STATE_SUFFIX: Final = ".state"
BEGUN: Final = "begun"
"""The name of a file that may be in a folder before any state is."""


def folder_name(job: str, kind: SnapshotKind, number: int) -> str:
    """The name of a snapshot's folder. Nothing depends on it: a folder may be renamed."""
    return f"{job}-{kind}-{number}"


def state_file(vertex: int, index: int, attempt: int) -> str:
    """The name of the file with a subtask's state."""
    return f"{vertex}-{index}-{attempt}{STATE_SUFFIX}"


def commit(folder: Folder, manifest: SnapshotManifest, secret: bytes) -> None:
    """Make a snapshot of a folder in which all state is: the manifest is written last, at once.

    Raises:
        UnreadableSnapshot: a file that the manifest names is missing or cut; no manifest is written.
        StorageUnavailable: the storage refuses it.
    """
    _look_for(folder, manifest.states())
    folder.publish(MANIFEST, seal(manifest, secret))


def _look_for(folder: Folder, states: Iterable[WrittenState]) -> None:
    there = {entry.name: entry.bytes for entry in folder.entries()}
    for written in states:
        size = there.get(written.file)
        if size is None:
            raise UnreadableSnapshot(
                f"there is no {folder.where}/{written.file}: it was removed, or the worker that wrote it has "
                "another directory of that name"
            )
        if size != written.bytes:
            raise UnreadableSnapshot(
                f"{folder.where}/{written.file} has {size:,} bytes and not {written.bytes:,}: it was cut or "
                "changed; use the snapshot before it"
            )


def open_manifest(folder: Folder, secret: bytes, *, trust: bool = False) -> SnapshotManifest:
    """The manifest of a snapshot, all of whose files are there with their lengths. Nothing that the snapshot
    holds was decoded then but the manifest, and that behind its verification.

    Args:
        secret: of the cluster that is to use it; empty: it has none.
        trust: open one that is not signed under this secret.

    Raises:
        UnreadableSnapshot: there is none, or a file is missing or cut.
        UntrustedSnapshot: it is not signed under this secret.
        StorageUnavailable: the storage does not answer.
    """
    manifest = unseal(folder.read(MANIFEST), f"{folder.where}/{MANIFEST}", secret, trust=trust)
    _look_for(folder, manifest.states())
    return manifest


def verify(folder: Folder, manifest: SnapshotManifest) -> None:
    """Read all of a snapshot, and compare it with its checksums.

    Raises:
        UnreadableSnapshot: a file is missing, cut or changed.
        StorageUnavailable: the storage does not answer.
    """
    for written in manifest.states():
        for segment in read_index(folder, written):
            checked_segment(folder, written.file, segment)


def probe(directory: Folder, name: str) -> None:
    """Write a file into a folder of that name as a snapshot is written, read it, and remove both.

    Raises:
        StorageUnavailable: the storage refuses one of these.
        UnreadableSnapshot: what was read is not what was written.
    """
    folder = directory.child(name)
    try:
        folder.publish(MANIFEST, name.encode())
        if folder.read(MANIFEST) != name.encode():
            raise UnreadableSnapshot(f"{folder.where}/{MANIFEST} does not hold what was written to it")
    finally:
        if folder.entries():
            folder.remove()


# --- all of a directory -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """A folder of a snapshot directory: a snapshot, a broken one, or an unfinished one."""

    folder: Folder
    bytes: int
    """The length of all files together."""
    touched: float
    """When the last of them was written, seconds since 1970."""
    manifest: SnapshotManifest | None = None
    problem: str = ""
    """Why it cannot be used; empty: it can be, or is unfinished."""
    trusted: bool = True
    """False: it is not signed under the secret of this cluster, which is the problem."""

    @property
    def is_unfinished(self) -> bool:
        """It has no manifest: it is being written, or whoever wrote it has ended."""
        return self.manifest is None and not self.problem

    @property
    def taken_at(self) -> float:
        """When it was taken, or written if nobody can read that; seconds since 1970."""
        return self.touched if self.manifest is None else self.manifest.taken_at


def list_snapshots(directory: Folder, secret: bytes, *, trust: bool = False) -> list[Listed]:
    """The snapshots of a directory, the oldest first, by their manifests: their state is not read.

    Raises:
        StorageUnavailable: the storage does not answer.
    """
    folders = [directory.child(entry.name) for entry in directory.entries() if entry.is_folder]
    found = [_listed(folder, folder.entries(), secret, trust=trust) for folder in folders]
    return sorted((each for each in found if each is not None), key=lambda each: each.taken_at)


def _listed(folder: Folder, entries: Sequence[Entry], secret: bytes, *, trust: bool) -> Listed | None:
    """None: it is no snapshot's."""
    names = [entry.name for entry in entries]
    if not any(name in (MANIFEST, BEGUN) or name.endswith(STATE_SUFFIX) for name in names):
        return None
    size = sum(entry.bytes for entry in entries)
    touched = max(entry.modified for entry in entries)
    if MANIFEST not in names:
        return Listed(folder, size, touched)
    try:
        return Listed(folder, size, touched, open_manifest(folder, secret, trust=trust))
    except UntrustedSnapshot as error:
        return Listed(folder, size, touched, problem=str(error), trusted=False)
    except UnreadableSnapshot as error:
        return Listed(folder, size, touched, problem=str(error))


def newest_whole(
    directory: Folder, secret: bytes, *, job: str = "", trust: bool = False
) -> tuple[Folder, SnapshotManifest, list[str]]:
    """The newest snapshot, of a job if one is given, whose files all have their checksums; and why newer ones
    were passed over. What is unfinished is none.

    Raises:
        UnknownName: there is none.
        UnreadableSnapshot: there are only broken ones.
        StorageUnavailable: the storage does not answer.
    """
    passed = []
    for each in reversed(list_snapshots(directory, secret, trust=trust)):
        if each.manifest is None:
            if each.problem:
                passed.append(each.problem)
        elif job in ("", each.manifest.job):
            try:
                verify(each.folder, each.manifest)
            except UnreadableSnapshot as error:
                passed.append(str(error))
            else:
                return each.folder, each.manifest, passed
    of_job = f" of job {job}" if job else ""
    if passed:
        raise UnreadableSnapshot(f"no snapshot{of_job} in {directory.where} can be used: {'; '.join(passed)}")
    raise UnknownName(
        f"there is no snapshot{of_job} in {directory.where}: 'minishuffle jobs savepoint' takes one"
    )


def expendable(listed: Iterable[Listed], keep: int, now: float, writing: Container[str] = ()) -> list[Listed]:
    """Which of the snapshots of a directory may be removed: all but the newest ``keep`` (at least one) of
    each job, and unfinished ones to which nothing was added for ``UNFINISHED_SNAPSHOT_SECONDS``. A broken one
    stays: it may be the last of its job, whose name nobody can read.

    Args:
        writing: names of folders that are being written now.
    """
    whole: dict[tuple[str, str], list[Listed]] = {}
    found, bound = [], now - UNFINISHED_SNAPSHOT_SECONDS
    for each in listed:
        if each.manifest is not None:
            whole.setdefault((each.manifest.cluster, each.manifest.job), []).append(each)
        elif each.is_unfinished and each.folder.name() not in writing and each.touched < bound:
            found.append(each)
    for of_job in whole.values():
        of_job.sort(key=lambda each: each.taken_at)
        found += of_job[: -max(1, keep)]
    return found
