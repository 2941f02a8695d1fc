"""The durable snapshots of one job: when the next is due, and which are kept. Pure.

Each is a consistent cut through the whole job, taken by an aligned barrier, as a savepoint is; but no task
stands longer than its own alignment: it goes on as soon as its state is taken. How far one is, and whose
answer it waits for, is what :mod:`~minishuffle.coordinator.jobs.savepoints` says of it. One that fails is
followed by the next in ``durable_interval``, or sooner, if programs that write to the job wait for their
receipts. The last two are kept until the job ends. Folders of others are removed, and once more when the next
one is complete, or by the next coordinator: a worker may have been writing there. (Carbone et al.,
*Lightweight Asynchronous Snapshots for Distributed Dataflows*, 2015; Flink: ``CheckpointCoordinator``,
``CompletedCheckpointStore``.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from typing import Final

from minishuffle.coordinator.jobs.fallback import RestorePoint
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.savepoints import FolderWork, JobSavepoint
from minishuffle.coordinator.journal.codec import Record
from minishuffle.snapshots.storage import without_credentials
from minishuffle.wire.requests import DurableInfo

__all__ = ["CUTS_KEPT", "CompleteCut", "CutsRecord", "JobCuts"]

CUTS_KEPT: Final = 2
"""Complete ones that are kept: if the files of the last are lost, the one before it may be whole."""
RETRY_SECONDS: Final = 1.0
"""Until one that is due, and cannot be taken now, is tried again."""
LEFT_MAX: Final = 16
"""Folders that are removed once more."""
HASTENED_SECONDS: Final = 1.0
"""From the beginning of one until the next, at least, where something waits for it."""


@dataclass(frozen=True, slots=True)
class CompleteCut(Record):
    """A complete durable snapshot."""

    point: RestorePoint
    began: float
    bytes: int
    seconds: float
    """From its beginning to its manifest."""


@dataclass(slots=True)
class CutsRecord(Record):
    """The journaled state of the durable snapshots of a job. Times are wall clock."""

    next_at: float = 0.0
    """When the next is due."""
    taken: int = 0
    failed: int = 0
    problem: str = ""
    """Why the last one failed; empty: it did not."""
    kept: tuple[CompleteCut, ...] = ()
    """The oldest first."""
    left: tuple[tuple[int, str], ...] = ()
    """Removed since the last one was complete: numbers and folders."""
    published: int = 0
    """Rows that the job had published when the one under way began."""
    alone: tuple[TaskKey, ...] = ()
    """Tasks without a holder of their local snapshots when its barrier was sent: once it is complete, their
    producers retain nothing that it covers."""


@dataclass(slots=True)
class JobCuts(CutsRecord):
    """The durable snapshots of one job.

    Invariants: ``len(kept) ≤ CUTS_KEPT``, their numbers ascend, and once there was one, one is kept until the
    job ends.
    """

    work: list[FolderWork] = field(default_factory=list, repr=False)
    """For the coordinator's process; see :meth:`take_work`."""
    awaited: set[TaskKey] = field(default_factory=set, repr=False)
    """Tasks to which programs write that wait for receipts; each heartbeat says so anew."""

    def want(self, at: float, interval: float) -> None:
        """The job takes one each ``interval``; 0: none."""
        self.next_at = at + interval if interval else 0.0

    def is_due(self, at: float) -> bool:
        return bool(self.next_at) and at >= self.next_at

    def postpone(self, at: float) -> None:
        """One is due, and cannot be taken now."""
        self.next_at = at + RETRY_SECONDS

    def begin(self, at: float, interval: float, published: int) -> None:
        """One begins, of a job that has published so many rows; the next is due after ``interval``."""
        self.next_at, self.published = at + interval, published

    def hasten(self, began: float, at: float) -> bool:
        """Something waits for the next one, the last of which has ``began`` then: have it begin soon, so that
        at most half of the time one is under way. Gives whether that is sooner."""
        if not self.next_at:
            return False
        lasts = self.kept[-1].seconds if self.kept else 0.0
        due = max(at, began + max(HASTENED_SECONDS, 2 * lasts))
        is_sooner, self.next_at = due < self.next_at, min(due, self.next_at)
        return is_sooner

    def note_receipts(self, key: TaskKey, *, are_awaited: bool) -> None:
        """Programs that write to a task wait for receipts by the next, or none does any more."""
        if are_awaited:
            self.awaited.add(key)
        else:
            self.awaited.discard(key)

    def hasten_receipts(self, awaited: int, began: float, at: float) -> bool:
        """Receipts wait for one of the number ``awaited``, or a later one (0: for the next): as
        :meth:`hasten`, unless that is there."""
        is_there = bool(self.kept) and 0 < awaited <= self.kept[-1].point.number
        return not is_there and self.hasten(began, at)

    def take(self, alone: Iterable[TaskKey]) -> None:
        """The barrier is sent; these tasks have no holder."""
        self.alone = tuple(alone)

    def fail(self, cut: JobSavepoint) -> bool:
        """The one under way has failed; gives whether for another reason than the one before it."""
        is_new = cut.problem != self.problem
        self.failed, self.problem = self.failed + 1, cut.problem
        if cut.is_made:
            self.left = (*self.left, (cut.number, cut.folder))[-LEFT_MAX:]
        return is_new

    def coordinator_lost(self, job: str) -> None:
        """The one before may have removed nothing."""
        self._discard(job, self.left)

    def complete(self, job: str, cut: JobSavepoint) -> None:
        """The one under way is complete; the oldest of those that are kept goes."""
        point = RestorePoint(cut.folder, published=self.published, number=cut.number)
        self.taken, self.problem = self.taken + 1, ""
        kept = (*self.kept, CompleteCut(point, cut.began, cut.bytes, cut.seconds))
        before = tuple((each.point.number, each.point.path) for each in kept[:-CUTS_KEPT])
        self._discard(job, (*self.left, *before))
        self.kept, self.left = kept[-CUTS_KEPT:], before

    def end(self, job: str) -> None:
        """The job has ended: nobody goes back to one."""
        self._discard(job, (*self.left, *((each.point.number, each.point.path) for each in self.kept)))
        self.kept, self.left, self.next_at = (), (), 0.0

    def _discard(self, job: str, folders: Iterable[tuple[int, str]]) -> None:
        self.work += [FolderWork(job, number, path, "discard") for number, path in folders]

    def points(self) -> list[RestorePoint]:
        """The complete ones to go back to, the newest first."""
        return [each.point for each in reversed(self.kept)]

    def recall(self, record: CutsRecord) -> None:
        """Restore from the journal's record."""
        for each in fields(CutsRecord):
            setattr(self, each.name, getattr(record, each.name))

    def take_work(self) -> list[FolderWork]:
        """Take what the coordinator's process is to do."""
        work, self.work = self.work, []
        return work

    def info(self, running: Collection[TaskKey] = ()) -> DurableInfo:
        """For clients, of a job of which these tasks run."""
        last = self.kept[-1] if self.kept else None
        return DurableInfo(
            number=0 if last is None else last.point.number,
            path="" if last is None else without_credentials(last.point.path),
            taken_at=0.0 if last is None else last.began,
            bytes=0 if last is None else last.bytes,
            seconds=0.0 if last is None else last.seconds,
            taken=self.taken,
            failed=self.failed,
            problem=self.problem,
            awaited=not self.awaited.isdisjoint(running),
        )

    def validate(self) -> None:
        """Check the invariants; for tests."""
        numbers = [each.point.number for each in self.kept]
        assert len(numbers) <= CUTS_KEPT and numbers == sorted(set(numbers))
