"""The records of the coordinator's journal: the state that outlives it. Pure.

A record has a kind and a name, and replaces the previous record of this kind and name:

====================  =====================================================================================
``coordinator``       numbers of submitted jobs and accepted registrations, and the highest worker id
``clock``             the wall clock minus the monotonic clock of the coordinator's host
``worker`` ID         a registration that has not ended
``applied`` ID        the highest number of an applied report of that worker
``graph`` JOB         a job as it was submitted, with its pickled functions until it has ended
``job`` JOB           the job's state, placement, restarts, causes, and totals of its losses
``task`` JOB/OP/I     a subtask and its current attempt, the time of its next attempt and the start of its
                      recovery, its failures, its counted deaths, and the ends it has read
``positions`` J/OP/I  the positions of a source's subtask
``counts`` JOB/OP/I   the counters and traffic of a running attempt, at most a few seconds old
``past`` JOB/OP/I     the replaced attempts of the subtask
``event`` JOB/NUMBER  an event of the job
``file`` JOB/NUMBER   a file that a sink of the job has completed
``stream`` JOB/OP     a stream that external clients write: its writer, and writes that have begun or ended
``result`` JOB/OP     kept rows of a sink: the places of its parts, and the commits
``lines`` JOB         log lines of the job, and their number
``rows`` JOB/NUMBER   a batch of collected rows
====================  =====================================================================================

Lines and rows are written only when a coordinator hands over, and deleted by the next one. The counts of a
running attempt are not written with each heartbeat: its worker reports them again, unless it is lost together
with the coordinator.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from minishuffle import limits
from minishuffle.coordinator.clients.results import ResultRecord
from minishuffle.coordinator.clients.streams import StreamRecord
from minishuffle.coordinator.jobs.history import LinesRecord, RowsRecord
from minishuffle.coordinator.jobs.job import Job, JobRecord, TaskRecord
from minishuffle.coordinator.jobs.lossaccounting import PastRecord, TaskKey
from minishuffle.coordinator.jobs.positions import PositionsRecord
from minishuffle.coordinator.jobs.subtasks import CountsRecord
from minishuffle.coordinator.journal.codec import Fact, Record, pack_record, unpack_record
from minishuffle.coordinator.workers import AppliedRecord, RegistryNumbers, Worker, WorkerRecord
from minishuffle.errors import InvalidGraph, ShuffleError
from minishuffle.ids import Changes, RecordKey
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.outputs import ListedFile
from minishuffle.wire.packed import unpack_placement
from minishuffle.wire.requests import JobEvent

__all__ = [
    "Recorder",
    "job_records",
    "recalled_clients",
    "recalled_clock",
    "recalled_counts",
    "recalled_jobs",
    "recalled_workers",
]

OF_JOBS: Final = frozenset({"graph", "job", "task", "positions", "counts", "past", "event", "file"})
OF_CLIENTS: Final = frozenset({"stream", "result"})
"""Kinds of operators that external clients write to or read from."""
NUMBERED: Final = ("event", "file")
"""Kinds whose names end with a rising number."""
HANDED_OVER: Final = frozenset({"lines", "rows"})
"""Kinds written only at a handover."""


@dataclass(frozen=True, slots=True)
class ClusterRecord(Record):
    """The number of submitted jobs, and :class:`RegistryNumbers`."""

    submitted: int
    epoch: int
    highest: int
    standby_short: int


@dataclass(frozen=True, slots=True)
class ClockRecord(Record):
    """The wall clock minus the monotonic clock of a host, in seconds."""

    host: str
    offset: float


@dataclass(frozen=True, slots=True)
class GraphRecord(Record):
    """A job as it was submitted."""

    name: str
    submission: str
    submitted_at: float
    graph: bytes
    """See :meth:`JobGraph.to_bytes`."""


KINDS: Final[Mapping[str, type[Any]]] = {
    "coordinator": ClusterRecord,
    "clock": ClockRecord,
    "worker": WorkerRecord,
    "applied": AppliedRecord,
    "graph": GraphRecord,
    "job": JobRecord,
    "task": TaskRecord,
    "positions": PositionsRecord,
    "counts": CountsRecord,
    "past": PastRecord,
    "event": JobEvent,
    "file": ListedFile,
    "stream": StreamRecord,
    "result": ResultRecord,
    "lines": LinesRecord,
    "rows": RowsRecord,
}
"""The type of the records of each kind."""


def _digest(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=16).digest()


def _task_name(job: str, key: TaskKey) -> str:
    return f"{job}/{key[0]}/{key[1]}"


# --- writing --------------------------------------------------------------------------------------


def _graph(job: Job) -> bytes:
    graph = job.graph.to_bytes()
    return pack_record(GraphRecord(job.name, job.submission, job.submitted_at, graph))


def _positions(job: Job, key: TaskKey) -> bytes | None:
    record = job.progress.sources.record(*key)
    return None if record is None else pack_record(record)


def _of_job(job: Job, keys: Iterable[TaskKey], after: Mapping[str, int]) -> Changes:
    """The job's records except its graph: those of ``keys``, and of events and files with numbers above
    ``after``."""
    changes: Changes = {("job", job.id): pack_record(job.record())}
    for key in keys:
        name = _task_name(job.id, key)
        changes["task", name] = pack_record(job.task_record(key))
        changes["positions", name] = _positions(job, key)
        if job.subtasks[key].counts_record() is None:
            changes["counts", name] = None
        past = job.progress.books.past_record(key)
        changes["past", name] = pack_record(past) if past is not None else None
    for event in job.history.events_above(after.get("event", 0)):
        changes["event", f"{job.id}/{event.number}"] = pack_record(event)
    for number, file in job.progress.manifest.kept_above(after.get("file", 0)):
        changes["file", f"{job.id}/{number}"] = pack_record(file)
    return changes


def job_records(job: Job) -> Changes:
    """All records of a job."""
    records = {("graph", job.id): _graph(job), **_of_job(job, job.subtasks, {})}
    return {key: record for key, record in records.items() if record is not None}


class Recorder:
    """The contents of the journal, and the changes to write.

    Args:
        records: of the journal, from which the state was restored.
    """

    def __init__(self, records: Mapping[RecordKey, bytes]) -> None:
        self._held: dict[RecordKey, bytes] = {}
        """Digests of the records that are in the journal, or are about to be."""
        self._of_jobs: dict[str, set[RecordKey]] = {}
        self._released: set[str] = set()
        """Jobs whose graph record no longer has functions."""
        self._last: dict[str, dict[str, int]] = {}
        """By job and kind, the number of the last event or file in the journal."""
        self._changes: Changes = {}
        self._numbers: tuple[int, RegistryNumbers] | None = None
        """The last arguments of :meth:`counts`."""
        self._reported: dict[tuple[str, TaskKey], Job] = {}
        """Subtasks with newer counts than the journal's; the one with the oldest record is first."""
        self._counts_due = 0.0
        self.note(dict(records))
        self._put({key: None for key in records if key[0] in HANDED_OVER})  # restored, and not updated

    def note(self, changes: Changes) -> None:
        """Note records that are in the journal."""
        for key, record in changes.items():
            if record is None:
                self._held.pop(key, None)
                continue
            self._held[key] = _digest(record)
            kind, name = key
            if kind in OF_JOBS | OF_CLIENTS:
                job, _, rest = name.partition("/")
                self._of_jobs.setdefault(job, set()).add(key)
                if kind in NUMBERED:
                    last = self._last.setdefault(job, {})
                    last[kind] = max(last.get(kind, 0), int(rest))

    def _put(self, changes: Changes) -> None:
        changed: Changes = {}
        for key, record in changes.items():
            if self._held.get(key) != (None if record is None else _digest(record)):
                changed[key] = record
        self.note(changed)
        self._changes |= changed

    def job(self, job: Job) -> None:
        """Record the changes of a job."""
        keys = job.subtasks.take_changed()
        if job.id not in self._of_jobs or (job.released and job.id not in self._released):
            self._put({("graph", job.id): _graph(job)})
        if job.released:
            self._released.add(job.id)
        before = dict(self._last.get(job.id, {}))
        self._put(_of_job(job, keys, before))
        for kind, kept in (("event", limits.JOB_EVENTS_KEPT), ("file", limits.JOB_FILES_KEPT)):
            last = self._last.get(job.id, {}).get(kind, 0)
            old = range(before.get(kind, 0) - kept + 1, last - kept + 1)
            self._put({(kind, f"{job.id}/{number}"): None for number in old if number > 0})

    def moved(self, job: Job) -> None:
        """Record the subtasks of a job whose sources have moved, if nothing else has changed."""
        for key in job.subtasks.take_moved():
            self._put({("positions", _task_name(job.id, key)): _positions(job, key)})

    def clients(
        self, job: str, streams: Mapping[int, StreamRecord], results: Mapping[int, ResultRecord]
    ) -> None:
        """Record the streams and results of a job, by operator."""
        for operator, stream in streams.items():
            self._put({("stream", f"{job}/{operator}"): pack_record(stream)})
        for operator, result in results.items():
            self._put({("result", f"{job}/{operator}"): pack_record(result)})

    def forget_job(self, job: str) -> None:
        """Delete all records of a job."""
        self._put(dict.fromkeys(self._of_jobs.pop(job, ())))
        self._last.pop(job, None)
        self._released.discard(job)

    def worker(self, worker: Worker) -> None:
        """Record a worker that has registered or ended."""
        name = str(worker.worker)
        if worker.state in ("lost", "gone"):
            self._put({("worker", name): None, ("applied", name): None})
            return
        self._put({("worker", name): pack_record(worker.record())})
        self.applied(worker)

    def applied(self, worker: Worker) -> None:
        """Record the last report that was applied of a worker, unless the worker has ended."""
        if worker.state not in ("lost", "gone"):
            self._put({("applied", str(worker.worker)): pack_record(AppliedRecord(worker.applied))})

    def counts(self, submitted: int, numbers: RegistryNumbers) -> None:
        """Record the numbers of the cluster."""
        if (submitted, numbers) != self._numbers:
            self._numbers = submitted, numbers
            self._put({("coordinator", ""): pack_record(ClusterRecord(submitted, *numbers))})

    def clock(self, host: str, offset: float) -> None:
        """Record the wall clock minus the monotonic clock of a host, in seconds."""
        self._put({("clock", ""): pack_record(ClockRecord(host, offset))})

    def reported(self, job: Job, key: TaskKey) -> None:
        """Note that a heartbeat had new counts of a subtask."""
        self._reported.setdefault((job.id, key), job)

    def _write_counts(self) -> None:
        room = limits.JOURNAL_COUNTS_BYTES_MAX
        while self._reported and room > 0:
            _, key = first = next(iter(self._reported))
            job = self._reported.pop(first)
            if (counts := job.subtasks[key].counts_record()) is not None:
                record = pack_record(counts)
                self._put({("counts", _task_name(job.id, key)): record})
                room -= len(record)

    def hand_over(self, jobs: Iterable[Job]) -> None:
        """Record everything for the next coordinator, lines and rows too: this one ends in order."""
        while self._reported:
            self._write_counts()
        for job in jobs:
            about, rows = job.history.handed_over()
            self._put({("lines", job.id): pack_record(about)})
            self._put({("rows", f"{job.id}/{number}"): pack_record(each) for number, each in rows.items()})

    def take(self, now: float) -> Changes:
        """Take the changes since the last call."""
        if self._reported and now >= self._counts_due:
            self._counts_due = now + limits.JOURNAL_COUNTS_SECONDS
            self._write_counts()
        changes, self._changes = self._changes, {}
        return changes


# --- reading --------------------------------------------------------------------------------------


def _recalled(job: str, kinds: Mapping[str, Mapping[Any, Any]], random: Callable[[], float]) -> Job:
    """Restore a job from its records by kind. There are lines only after a handover."""
    about, head = kinds["graph"][()], kinds["job"][()]
    recalled = Job(
        job,
        about.name,
        JobGraph.from_bytes(about.graph),
        unpack_placement(head.placement),
        {},
        at=about.submitted_at,
        random=random,
        submission=about.submission,
    )
    recalled.recall(head, kinds["task"], kinds["counts"], kinds["past"], kinds["positions"])
    recalled.history.recall(head.history, kinds["event"].values())
    if kinds["lines"]:
        recalled.history.take_over(
            kinds["lines"][()], {number: rows for (number,), rows in kinds["rows"].items()}
        )
    recalled.progress.manifest.recall(head.manifest, [file for _, file in sorted(kinds["file"].items())])
    return recalled


def recalled_jobs(records: Mapping[RecordKey, bytes], random: Callable[[], float]) -> list[Job]:
    """The restored jobs in the order of their submission. Records of a job without a job record are ignored.

    Raises:
        ShuffleError: a record cannot be read.
    """
    found: dict[str, dict[str, dict[tuple[int, ...], Any]]] = {}
    for key, record in records.items():
        job, *rest = key[1].split("/")
        kinds = OF_JOBS | HANDED_OVER
        if key[0] in kinds and {("job", job), ("graph", job)} <= records.keys():
            of_job = found.setdefault(job, {kind: {} for kind in kinds})
            of_job[key[0]][tuple(map(int, rest))] = unpack_record(KINDS[key[0]], key, record)
    jobs = []
    for job in sorted(found, key=lambda job: int(job[1:])):
        try:
            jobs.append(_recalled(job, found[job], random))
        except (InvalidGraph, KeyError, TypeError, ValueError) as error:
            raise ShuffleError(f"the records of job {job} cannot be read: {error}") from error
    return jobs


def recalled_workers(records: Mapping[RecordKey, bytes], now: float) -> list[Worker]:
    """The restored workers, awaited from ``now`` on.

    Raises:
        ShuffleError: a record cannot be read.
    """
    found = []
    for key, record in records.items():
        if key[0] == "worker":
            applied = _unpacked(AppliedRecord, ("applied", key[1]), records)
            about = unpack_record(WorkerRecord, key, record)
            found.append(Worker.from_record(int(key[1]), about, applied.number if applied else 0, now))
    return found


def recalled_clients(records: Mapping[RecordKey, bytes], kind: type[Fact]) -> Mapping[str, dict[int, Fact]]:
    """The restored facts of a kind of :meth:`Recorder.clients`, by job and operator.

    Raises:
        ShuffleError: a record cannot be read.
    """
    found: defaultdict[str, dict[int, Fact]] = defaultdict(dict)
    for key, record in records.items():
        if KINDS.get(key[0]) is kind:
            job, _, operator = key[1].partition("/")
            found[job][int(operator)] = unpack_record(kind, key, record)
    return found


def recalled_clock(records: Mapping[RecordKey, bytes], host: str) -> float | None:
    """The last offset of :meth:`Recorder.clock`, if it was recorded on this host since its boot, so that the
    monotonic clock is the same.

    Raises:
        ShuffleError: the record cannot be read.
    """
    clock = _unpacked(ClockRecord, ("clock", ""), records)
    return clock.offset if clock is not None and host and clock.host == host else None


def recalled_counts(records: Mapping[RecordKey, bytes]) -> tuple[int, RegistryNumbers]:
    """The last numbers of :meth:`Recorder.counts`; zeros if there are none.

    Raises:
        ShuffleError: the record cannot be read.
    """
    cluster = _unpacked(ClusterRecord, ("coordinator", ""), records)
    if cluster is None:
        return 0, RegistryNumbers()
    return cluster.submitted, RegistryNumbers(cluster.epoch, cluster.highest, cluster.standby_short)


def _unpacked(kind: type[Fact], key: RecordKey, records: Mapping[RecordKey, bytes]) -> Fact | None:
    """The record of this key; None if there is none."""
    record = records.get(key)
    return None if record is None else unpack_record(kind, key, record)
