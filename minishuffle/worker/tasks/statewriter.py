"""Savepoints, on a worker: looks for the folder, has tasks that stand take their state, and has disk threads
write it.

All calls are on the loop thread and do not block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from minishuffle.errors import ShuffleError, UnreadableSnapshot
from minishuffle.exchange.watermarks import BEGINNING_OF_TIME
from minishuffle.ids import AttemptId
from minishuffle.runtime.statesnapshot import TaskStateSnapshot
from minishuffle.wire.messages import CheckFolder, ControlMessage, FolderChecked, WriteState
from minishuffle.wire.packed import pack_positions
from minishuffle.wire.reports import Fact, StateTaken, StateWritten
from minishuffle.worker.diskthreads import DiskThreads
from minishuffle.worker.tasks.handoff import TaskPaths

if TYPE_CHECKING:
    from minishuffle.runtime.chain import Chain
    from minishuffle.snapshots.sealedmanifest import WrittenState
    from minishuffle.snapshots.storage import Folder
    from minishuffle.wire.messages import Restoration

__all__ = ["StateWriter", "restoring"]


class StateWriter:
    """Writes what tasks of this worker have taken for savepoints.

    Args:
        disk: its own threads: a storage that hangs, or is far, holds up no read of what tasks store.
        fact: reports a fact about an attempt.
        send: sends the coordinator a message.
    """

    def __init__(
        self, disk: DiskThreads, fact: Callable[[Fact], None], send: Callable[[ControlMessage], None]
    ) -> None:
        self.disk, self._fact, self._send = disk, fact, send

    def check(self, message: CheckFolder) -> None:
        """Look for what the coordinator has written into the folder."""
        asked = message.model_dump(include={"term", "job", "savepoint"})

        def done(found: str | ShuffleError) -> None:
            self._send(FolderChecked(**asked, problem=str(found)))

        self.disk.run(partial(_problem_with, message), done)

    def begin(self, message: WriteState, tasks: Iterable[TaskPaths]) -> None:
        """Have those of a job's tasks that stand at the barrier take their state."""
        for paths in tasks:
            if paths.pause.save(message):
                paths.bell.ring()

    def taken(
        self, attempt: AttemptId, message: WriteState, taken: TaskStateSnapshot | str, stood: float = 0.0
    ) -> None:
        """A task has taken its state, for which it stood so many seconds, or says why it has not."""
        says = partial(StateTaken, attempt=attempt, savepoint=message.savepoint, stood=stood)
        if isinstance(taken, str):
            self._fact(says(problem=taken))
            return
        watermark = None if taken.watermark == BEGINNING_OF_TIME else taken.watermark
        positions = pack_positions(taken.positions)
        self._fact(
            says(positions=positions, watermark=watermark, operators=[*{**taken.parts, **taken.stored}])
        )

    def made(self, attempt: AttemptId, message: WriteState, made: TaskStateSnapshot | str) -> None:
        """All parts of what a task has taken are there, or cannot be written."""
        written = partial(StateWritten, attempt=attempt, savepoint=message.savepoint)
        if isinstance(made, str):
            self._fact(written(problem=made))
            return
        if not (made.parts or made.stored):
            self._fact(written())
            return

        def done(found: WrittenState | ShuffleError) -> None:
            if isinstance(found, ShuffleError):
                self._fact(written(problem=str(found)))
                return
            fact = written(
                file=found.file,
                bytes=found.bytes,
                index_bytes=found.index_bytes,
                checksum=found.checksum,
                rows=found.rows,
            )
            self._fact(fact)

        self.disk.run(partial(_write, message.folder, attempt, made), done)


def _folder(path: str) -> Folder:
    from minishuffle.snapshots.storage import folder_at

    return folder_at(path)


def _problem_with(message: CheckFolder) -> str:
    """(Disk thread.) Why the file is not there; empty: it is."""
    folder = _folder(message.folder)
    content = folder.read(message.file)
    return "" if content == message.content.encode() else f"{folder.where} has another {message.file}"


def _write(path: str, attempt: AttemptId, taken: TaskStateSnapshot) -> WrittenState:
    """(Disk thread.)"""
    from minishuffle.snapshots.catalog import state_file
    from minishuffle.snapshots.statefile import TaskStateWriter

    subtask = attempt.subtask
    writer = TaskStateWriter(_folder(path), state_file(subtask.operator, subtask.index, attempt.attempt))
    try:
        for held in (taken.parts, taken.stored):
            for operator, parts in held.items():
                for part in parts:
                    writer.write(operator, part)
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


def restoring(restoration: Restoration, secret: bytes) -> Callable[[Chain, int, int], None]:
    """Gives an open chain the state that a savepoint holds for a subtask (its index, and its parallelism).

    Raises:
        ShuffleError: (when that is called) the savepoint cannot be read.
    """

    def restore(chain: Chain, index: int, parallelism: int) -> None:
        """(Task thread.)"""
        from minishuffle.operators.aggregate_states import renumbered
        from minishuffle.snapshots.catalog import open_manifest
        from minishuffle.snapshots.savedstate import Snapshot
        from minishuffle.snapshots.sealedmanifest import fingerprint

        folder = _folder(restoration.path)
        snapshot = Snapshot(folder, open_manifest(folder, secret, trust=restoration.trust))
        if fingerprint(snapshot.manifest) != restoration.fingerprint:
            raise UnreadableSnapshot(
                f"{snapshot.folder.where} holds another snapshot than when the job was submitted, "
                "which its sources do not go with: submit it again, and leave the folder alone until it runs"
            )
        ids = [
            operator.id
            for operator in chain.operators
            if operator.id and operator.id not in restoration.dropped
        ]
        before = {each.id: each.outputs for vertex in snapshot.manifest.vertices for each in vertex.operators}
        parts = {id: list(snapshot.parts(id, index, parallelism)) for id in ids}
        for id, now in restoration.outputs.items():
            if id in parts:
                parts[id] = [renumbered(part, before[id], now) for part in parts[id]]
        chain.restore(TaskStateSnapshot(parts))

    return restore
