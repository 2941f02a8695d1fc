"""A snapshot that was opened: its manifest, and the state of any subtask at any parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minishuffle.operators.state_parts import StatePart, divided
from minishuffle.snapshots.catalog import newest_whole, open_manifest
from minishuffle.snapshots.sealedmanifest import MANIFEST, SnapshotManifest
from minishuffle.snapshots.segmentindex import StateSegment, read_index, wanted
from minishuffle.snapshots.statefile import read_parts
from minishuffle.snapshots.storage import Folder, folder_at

__all__ = ["Snapshot", "open_snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot whose manifest was verified. Segments are read, and compared with their checksums, one by
    one.

    Raises:
        UnreadableSnapshot: by each method, if a file is missing, cut or changed.
        StorageUnavailable: by each method, if the storage does not answer.
    """

    folder: Folder
    manifest: SnapshotManifest
    passed_over: Sequence[str] = ()
    """Why newer snapshots of the same directory cannot be used."""

    def segments(self) -> Iterator[tuple[str, list[StateSegment]]]:
        """The files of tasks in the order of the manifest, each with its segments."""
        for written in self.manifest.states():
            yield written.file, read_index(self.folder, written)

    def parts(self, operator: str, index: int, parallelism: int) -> Iterator[StatePart]:
        """What subtask ``index`` of ``parallelism`` of an operator goes on with, by the id of its state: for
        its ``read_state``. Those that one subtask has written come in the order in which it gave them."""
        for file, segments in self.segments():
            mine = [
                each for each in segments if each.operator == operator and wanted(each, index, parallelism)
            ]
            yield from divided(read_parts(self.folder, file, mine), index, parallelism)


def open_snapshot(where: str | Path, secret: bytes, *, trust: bool = False) -> Snapshot:
    """Open the snapshot in a folder, or the newest whole one in a snapshot directory.

    Args:
        where: path or URI.
        secret: of the cluster that is to use it; empty: it has none.
        trust: open one that is not signed under this secret.

    Raises:
        UnknownName: there is none.
        UnreadableSnapshot: a file is missing, cut, changed, or of another format.
        UntrustedSnapshot: it is not signed under this secret.
        StorageUnavailable: the storage does not answer.
    """
    folder = folder_at(where)
    if any(entry.name == MANIFEST for entry in folder.entries()):
        return Snapshot(folder, open_manifest(folder, secret, trust=trust))
    return Snapshot(*newest_whole(folder, secret, trust=trust))
