"""The return of a whole job to a durable snapshot, when one of its tasks cannot be recovered alone. Pure.

::

    none --the state of a task is lost--> under way --all attempts have ended, a manifest is read--> none

The newest snapshot is read first, and an older one if that cannot be, or if a task then finds its state there
broken: the durable ones of the job, then the savepoint that it was submitted from, at last its beginning, for
which nothing is read. A storage that does not answer is asked again for a while, and no read is waited for
longer than that. If sources of the job acknowledge, none but the durable ones are read once there was one:
what precedes these does not come again. If programs write to the job, it is the last durable one alone, which
covers what has its receipt. All tasks then begin with what that holds for them, and with a version of their
rows of their own: whatever earlier attempts have sent, retained or held counts for nothing. Rows that were
published behind the snapshot come twice. (Flink: ``RestartPipelinedRegionFailoverStrategy`` restarts from the
last checkpoint at each failure.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.jobs.savepoints import FolderWork
from minishuffle.coordinator.journal.codec import Record
from minishuffle.snapshots.storage import without_credentials

__all__ = ["BEGINNING", "STORAGE_SECONDS_MAX", "FallbackRecord", "JobFallback", "RestorePoint"]


STORAGE_SECONDS_MAX: Final = 300.0
"""For so long a job that goes back waits for a storage that does not answer, and then takes an older
snapshot: its beginning may be long ago."""
ASK_AGAIN_SECONDS: Final = 1.0
READ_SECONDS_MAX: Final = 60.0
"""For so long at the least one read is waited for."""


@dataclass(frozen=True, slots=True)
class RestorePoint(Record):
    """A snapshot that the tasks of a job may begin with."""

    path: str
    """Its folder; empty: the beginning of the job."""
    drop: tuple[str, ...] = ()
    """Ids or names of operators whose state in it is left out."""
    trust: bool = False
    """It need not be signed under the secret of this cluster."""
    published: int = 0
    """Rows that the job had published when it was begun."""
    number: int = 0
    """Its number among the durable snapshots of the job; 0: it is none of these."""

    def __str__(self) -> str:
        if not self.path:
            return "its beginning"
        kind = (
            f"durable snapshot {self.number}"
            if self.number
            else f"savepoint {without_credentials(self.path)}"
        )
        return kind


BEGINNING = RestorePoint("")


@dataclass(slots=True)
class FallbackRecord(Record):
    """The journaled state of the returns of a job."""

    count: int = 0
    """How often the job went back."""
    points: tuple[RestorePoint, ...] = ()
    """While it goes back: what is left to try; the first is read."""
    last: RestorePoint = BEGINNING
    """The one that the tasks began with when the job had last gone back."""
    broken: tuple[int, ...] = ()
    """The numbers of durable snapshots whose manifest could be read, and the state of a task could not."""
    until: float = 0.0
    """Until then a storage that does not answer is asked again; wall clock, as the next."""
    next_at: float = 0.0
    """When the first of the points is read again; 0: it is being read, or was."""
    problem: str = ""
    """The last error of its storage."""


@dataclass(slots=True)
class JobFallback(FallbackRecord):
    """The returns of one job, one at a time.

    Invariant: there are resumptions only while one is under way.
    """

    work: list[FolderWork] = field(default_factory=list, repr=False)
    """For the coordinator's process; see :meth:`take_work`."""
    _overdue_at: float = field(default=0.0, repr=False)
    """When the read under way is waited for no more."""
    _found: Mapping[TaskKey, Resumption] | None = field(default=None, repr=False)
    """By subtask, the state with which it begins, once that is known."""

    @property
    def under_way(self) -> bool:
        return bool(self.points)

    @property
    def is_read(self) -> bool:
        """Whether the first of the points was read."""
        return self._found is not None

    def begin(self, job: str, points: Sequence[RestorePoint], at: float) -> bool:
        """The job goes back to the first of these that can be read. False: there is none."""
        self.count += 1
        self.until, self.problem = at + STORAGE_SECONDS_MAX, ""
        self.points = tuple(each for each in points if each.number not in self.broken)
        self.read(job, at)
        return self.under_way

    def lasted(self, at: float) -> float:
        """Seconds since the job began to go back."""
        return max(0.0, at - self.until + STORAGE_SECONDS_MAX)

    def read(self, job: str, at: float) -> None:
        """Have the first of the points read, perhaps once more."""
        self._found, self.next_at = None, 0.0
        self._overdue_at = max(self.until, at + READ_SECONDS_MAX)
        if self.under_way and self.points[0].path:
            point = self.points[0]
            self.work.append(FolderWork(job, self.count, point.path, "open", trust=point.trust))
        elif self.under_way:
            self._found = {}

    def ask_again(self, problem: str, at: float) -> bool:
        """The storage does not answer, and the first of the points is read again soon; gives whether that has
        another reason than before."""
        is_new, self.problem = problem != self.problem, problem
        self.next_at = at + ASK_AGAIN_SECONDS
        return is_new

    def look(self, job: str, at: float) -> None:
        """Read the first of the points again, if that is due."""
        if self.next_at and at >= self.next_at:
            self.read(job, at)

    @property
    def _is_reading(self) -> bool:
        return self.under_way and not self.is_read and not self.next_at

    def next_time(self) -> float | None:
        """When :meth:`look` or :meth:`overdue` has something to do."""
        return self._overdue_at if self._is_reading else self.next_at or None

    def overdue(self, at: float) -> bool:
        """Whether the storage has answered nothing for so long that no answer is waited for."""
        return self._is_reading and at >= self._overdue_at

    def awaits(self, number: int, folder: str) -> bool:
        """Whether this folder is being read for this return."""
        return self.under_way and not self.is_read and (self.count, self.points[0].path) == (number, folder)

    def found(self, resumptions: Mapping[TaskKey, Resumption]) -> None:
        """The first of the points is read."""
        self._found = resumptions

    def unreadable(self, job: str, at: float) -> bool:
        """The first of the points cannot be read: try the next. False: there is none."""
        self.points = self.points[1:]
        self.read(job, at)
        return self.under_way

    def end(self) -> tuple[RestorePoint, Mapping[TaskKey, Resumption]]:
        """All attempts have ended: what the tasks begin with."""
        assert self._found is not None
        point, found = self.points[0], self._found
        self.points, self._found, self.last = (), None, point
        return point, found

    def pass_over(self) -> None:
        """A task cannot read its state in the durable snapshot that the job went back to last: the next time
        that is none to go back to."""
        if self.last.number not in self.broken:
            self.broken = (*self.broken, self.last.number)

    def give_up(self) -> None:
        """The job ends."""
        self.points, self._found, self.next_at = (), None, 0.0

    def recall(self, record: FallbackRecord) -> None:
        """Restore from the journal's record."""
        for each in fields(FallbackRecord):
            setattr(self, each.name, getattr(record, each.name))

    def take_work(self) -> list[FolderWork]:
        """Take what the coordinator's process is to do."""
        work, self.work = self.work, []
        return work
