"""The savepoint of one job: at which step it is, and whose answer it waits for. Pure.

::

    none --a client asks--> checking --all workers find the folder--> aligning --all tasks run--> taking
         --all have taken their state--> writing --all files are there--> committing --the manifest--> none

A barrier passes through the job, at which each task takes its state and goes on, as for a durable snapshot.
A job stands from ``aligning``, which is a pause then, until ``taking`` has ended, if its channels cannot be
aligned while it runs; if it was paused before, and stays so; and if it is to be stopped. Then it stays
paused until the manifest is there, is cancelled (``stopping``), and the savepoint ends with it.

A savepoint fails if a task ends before its state is written, at its deadline, if its coordinator is lost, and
if a worker cannot read or write the folder. Then there is no manifest, and the job goes on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from minishuffle.coordinator.jobs.lifecycle import WAITING
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.subtasks import Subtask, names_of
from minishuffle.coordinator.journal.codec import Record
from minishuffle.plan.graph import JobGraph
from minishuffle.snapshots.sealedmanifest import (
    SavedOperator,
    SavedSplit,
    SavedTask,
    SavedVertex,
    SnapshotKind,
    SnapshotManifest,
    WrittenState,
)
from minishuffle.snapshots.storage import place_below, without_credentials
from minishuffle.wire.messages import CheckFolder, CutComplete, Standing, WriteState
from minishuffle.wire.packed import SplitPosition, unpack_positions
from minishuffle.wire.reports import StateTaken, StateWritten
from minishuffle.wire.requests import SavepointInfo

__all__ = [
    "FETCH_SECONDS",
    "FolderWork",
    "JobSavepoint",
    "SavepointRecord",
    "not_safe",
    "partly_ended",
    "sides_of",
    "unfetched",
]

Saved: TypeAlias = tuple[tuple[SavedVertex, ...], tuple[SavedTask, ...], dict[str, dict[str, SavedSplit]]]
"""Vertices, tasks, and positions by source and split."""
Phase: TypeAlias = Literal["none", "checking", "aligning", "taking", "writing", "committing", "stopping"]
FETCH_SECONDS: Final = 5.0
"""How long a savepoint waits for a client to fetch the rows that were collected before it."""
CHECKED_FILE: Final = "begun"
"""The file by which workers know that the folder is the coordinator's."""


@dataclass(frozen=True, slots=True)
class FolderWork:
    """Work for the coordinator's process in the folder of a snapshot: ``prepare`` it with a file, ``commit``
    the manifest, ``open`` that, or ``discard`` all of it. All but the last are answered."""

    job: str
    savepoint: int
    folder: str
    work: Literal["prepare", "commit", "open", "discard"]
    content: str = ""
    manifest: SnapshotManifest | None = None
    trust: bool = False
    """Open a manifest that is not signed under the secret, too."""


@dataclass(slots=True)
class SavepointRecord(Record):
    """The journaled state of the last savepoint of a job. Times are wall clock."""

    phase: Phase = "none"
    kind: SnapshotKind = "savepoint"
    """``durable``: its tasks go on as soon as their own state is taken, and the job does not stand."""
    number: int = 0
    """Number of the last savepoint; 0: there was none."""
    token: str = ""
    """The id that its client gave it."""
    folder: str = ""
    is_made: bool = False
    """The folder is there, and is this savepoint's."""
    stops: bool = False
    """The job is to be stopped behind it."""
    holds: bool = False
    """The job was paused for it alone."""
    began: float = 0.0
    until: float = 0.0
    """Its deadline."""
    problem: str = ""
    """Why it failed; empty: it has not."""
    bytes: int = 0
    seconds: float = 0.0
    """From its beginning to its manifest."""
    stood: float = 0.0
    """The longest for which a task stood, in seconds; of a job that stood as a whole, from when its sources
    were to stop until all state was taken."""


@dataclass(slots=True)
class JobSavepoint(SavepointRecord):
    """The savepoints of one job, one at a time.

    Invariants: answers are awaited only in the phases that ask for them; each awaited task has a place in
    ``_tasks``, and none has written before it has taken.
    """

    work: list[FolderWork] = field(default_factory=list, repr=False)
    """For the coordinator's process; see :meth:`take_work`."""
    goes_on: bool = False
    """Its barrier passes through the job, whose tasks go on as soon as their own state is taken."""
    aligned_at: float = 0.0
    """When the job was to stand."""
    pause_seconds: float = 0.0
    """How long the tasks may take until they stand."""
    limit: float = 0.0
    """Seconds for all of it, while only ``pause_seconds`` count; 0: they never do."""
    collected: int = 0
    """Batches of collected rows that precede the cut."""
    fetched_by: float = math.inf
    """When a client has to have these at the latest."""
    _unsent: set[int] = field(default_factory=set, repr=False)
    """Workers that were not asked yet what the phase asks for."""
    _announced: set[int] = field(default_factory=set, repr=False)
    """Workers that have yet to hear that it is complete."""
    _kept: int = field(default=0, repr=False)
    _alone: list[TaskKey] = field(default_factory=list, repr=False)
    """Tasks without a holder of their local snapshots: see :class:`CutComplete`."""
    _unchecked: set[int] = field(default_factory=set, repr=False)
    """Workers that have yet to look for the folder."""
    _barrier: int = field(default=0, repr=False)
    _tasks: dict[TaskKey, int] = field(default_factory=dict, repr=False)
    """The attempts that hold state, by subtask."""
    _taken: dict[TaskKey, StateTaken] = field(default_factory=dict, repr=False)
    _written: dict[TaskKey, StateWritten] = field(default_factory=dict, repr=False)

    # --- moves -----------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        return self.phase != "none"

    @property
    def where(self) -> str:
        """Its folder, as events show it."""
        return without_credentials(self.folder)

    @property
    def needs_pause(self) -> bool:
        """The job is to stand, and not to go on."""
        stands = self.phase in ("aligning", "taking") and not self.goes_on
        return stands or (self.stops and self.phase in ("writing", "committing"))

    @property
    def is_passing(self) -> bool:
        """Its barrier is on its way through a job that does not stand."""
        return self.phase == "taking" and self.goes_on

    def begin(
        self,
        job: str,
        folder: str,
        *,
        number: int,
        at: float,
        seconds: float,
        token: str = "",
        stops: bool = False,
        kind: SnapshotKind = "savepoint",
    ) -> None:
        """A client, or the interval of the job, asks for one within ``seconds``; ``number`` is that among
        those of both kinds."""
        self.phase, self.number, self.token, self.folder = "checking", number, token, folder
        self.kind, self.goes_on, self.limit = kind, kind == "durable", 0.0
        self.is_made, self.stops, self.holds, self.problem = False, stops, False, ""
        self.began, self.until, self.bytes, self.seconds, self.stood = at, at + seconds, 0, 0.0, 0.0
        self._forget()
        self.work.append(FolderWork(job, self.number, folder, "prepare", self._content(job)))

    def pauses_within(self, seconds: float) -> None:
        """Give the pause its limit."""
        self.pause_seconds = seconds

    def _content(self, job: str) -> str:
        return f"{self.kind} {self.number} of job {job}, begun at {self.began:.6f}"

    def prepared(self, workers: Iterable[int]) -> None:
        """The file is in the folder: have these workers look for it."""
        self.is_made = True
        self._unchecked.update(workers)
        self._unsent.update(self._unchecked)

    def prepared_too_late(self, work: FolderWork) -> None:
        """The file is in the folder of one that has failed meanwhile: nobody else knows that."""
        self.work.append(replace(work, work="discard"))

    def checked(self, worker: int) -> bool:
        """A worker has found the file; True once all have."""
        self._unchecked.discard(worker)
        return self.phase == "checking" and not self._unchecked

    def ask_again(self, worker: int, tasks: Mapping[TaskKey, Subtask]) -> None:
        """A worker has come back, and may not have got what it was sent."""
        late = {tasks[key].worker for key in self._tasks.keys() - self._taken.keys()}
        if worker in self._unchecked or (self.phase == "taking" and worker in late):
            self._unsent.add(worker)

    def align(self, at: float, *, holds: bool) -> None:
        """The job is to stand; with ``holds`` it is paused for this alone."""
        self.phase, self.holds, self.aligned_at, self.goes_on = "aligning", holds, at, False
        self._go_by_its_limit()

    def pass_through(self, at: float) -> None:
        """A barrier is to go through the job once all tasks run, within the time for a pause."""
        self.phase, self.goes_on, self.limit = "aligning", True, self.until - self.began
        self.until = at + self.pause_seconds

    def keep_paused(self) -> None:
        """A user pauses the job, which is paused already: it does not go on by itself."""
        self.holds = False

    def take(self, barrier: int, tasks: Iterable[Subtask]) -> None:
        """Have these tasks take their state at the barrier, at which the job stands unless it goes on."""
        self.phase, self._barrier = "taking", barrier
        there = list(tasks)
        self._tasks = {task.key: task.attempt for task in there}
        self._unsent = {task.worker for task in there}

    def take_passing(self, barrier: int, tasks: Iterable[Subtask]) -> None:
        """Have these tasks, all of which run, take their state at the barrier: since nobody stands, they have
        all the time of the savepoint for it."""
        self.take(barrier, tasks)
        self._go_by_its_limit()

    def _go_by_its_limit(self) -> None:
        """The time for a pause counts no more, if it did."""
        if self.limit:
            self.until, self.limit = self.began + self.limit, 0.0

    def take_within(self, barrier: int, tasks: Iterable[Subtask], at: float) -> None:
        """(A durable one.) Have these tasks take their state, within the time for a pause."""
        self.take(barrier, tasks)
        self.aligned_at, self.limit = at, self.until - self.began
        self.until = at + self.pause_seconds

    def task_has_finished(self, key: TaskKey) -> None:
        """A task has ended before it came to the barrier: its consumers do not wait for one of it."""
        if self.is_passing and key not in self._taken:
            self._tasks.pop(key, None)

    @property
    def has_all_taken(self) -> bool:
        """All tasks that had not ended have taken their state."""
        return self.phase == "taking" and self._taken.keys() == self._tasks.keys()

    def has_ended(self, key: TaskKey) -> bool:
        """Whether a task is in it as one that has ended."""
        return key not in self._tasks

    def all_taken(self, at: float, collected: int) -> None:
        """All state is taken, of a job of which so many batches of rows were collected before."""
        stood = max((fact.stood for fact in self._taken.values()), default=0.0)
        self.phase, self.stood = "writing", stood if self.goes_on else at - self.aligned_at
        self.until = max(self.until, self.began + self.limit)
        self.collected, self.fetched_by = collected, math.inf

    def fetch_by(self, time: float) -> None:
        """All is written, but for rows that a client has to fetch until then."""
        self.fetched_by = min(time, self.fetched_by)

    def task_has_taken(self, key: TaskKey, fact: StateTaken) -> None:
        """A task has taken its state. Facts of other savepoints change nothing."""
        if self.phase == "taking" and self._is_awaited(key, fact):
            self._taken[key] = fact

    def task_has_written(self, key: TaskKey, fact: StateWritten) -> None:
        """The state of a task is in its file."""
        if self.phase in ("taking", "writing") and self._is_awaited(key, fact):
            self._written[key] = fact
            self.bytes += fact.bytes

    def _is_awaited(self, key: TaskKey, fact: StateTaken | StateWritten) -> bool:
        return fact.savepoint == self.number and self._tasks.get(key) == fact.attempt.attempt

    @property
    def all_written(self) -> bool:
        return self.phase == "writing" and self._written.keys() == self._tasks.keys()

    def commit(self, job: str, name: str, saved: Saved) -> None:
        """All files are there: have the manifest written. What it says of the cluster is filled in later."""
        self.phase = "committing"
        vertices, tasks, positions = saved
        manifest = SnapshotManifest(
            "", self.kind, self.number, self.began, "", job, name, vertices, tasks, positions
        )
        self.work.append(FolderWork(job, self.number, self.folder, "commit", manifest=manifest))

    def committed(self, at: float) -> None:
        """The manifest is there: it is complete."""
        self.phase, self.seconds = ("stopping" if self.stops else "none"), at - self.began
        self._forget()

    def end(self) -> None:
        """The job has stopped behind it."""
        self.phase = "none"

    def fail(self, job: str, problem: str) -> None:
        """It does not come to its end. A folder that it has not made is left as it is."""
        if self.is_made:
            self.work.append(FolderWork(job, self.number, self.folder, "discard"))
        self.phase, self.problem = "none", problem
        self._forget()

    def _forget(self) -> None:
        self._unsent.clear()
        for table in (self._tasks, self._taken, self._written):
            table.clear()
        self._unchecked.clear()

    def needs(self, key: TaskKey) -> bool:
        """Whether an attempt of that subtask must not end now."""
        return self.phase in ("taking", "writing") and key in self._tasks and key not in self._written

    def overdue(self, tasks: Mapping[TaskKey, Subtask]) -> str:
        """Why it fails at its deadline."""
        within = f"within {self.until - self.began:g} s (savepoint_timeout)"
        if self.limit and self.phase in ("aligning", "taking"):
            within = f"within {self.pause_seconds:g} s (pause_timeout)"
        if self._unchecked:
            workers = ", ".join(map(str, sorted(self._unchecked)))
            return f"worker {workers} did not look for {self.where} {within}"
        if self.phase in ("checking", "aligning"):
            what = "the folder was not made" if self.phase == "checking" else "the job did not stand"
            return f"{'not all of its tasks ran' if self.limit else what} {within}"
        late = [tasks[key] for key in self._tasks.keys() - self._written.keys()]
        if self.phase == "taking":
            late = [tasks[key] for key in self._tasks.keys() - self._taken.keys()]
        if late:
            what = "taken" if self.phase == "taking" else "written"
            return f"{names_of(sorted(late, key=lambda task: task.key))} had not {what} their state {within}"
        return f"the manifest was not written {within}"

    # --- what follows ----------------------------------------------------------------------------

    def next_time(self) -> float | None:
        """Its next deadline."""
        return min(self.until, self.fetched_by) if self.under_way else None

    def summary(self) -> str:
        """For the event at its end."""
        what = f"{self.bytes:,} bytes in {self.seconds:.3f} s"
        return f"{self.where}: {what}; no task stood longer than {self.stood:.3f} s"

    def take_work(self) -> list[FolderWork]:
        """Take what the coordinator's process is to do."""
        work, self.work = self.work, []
        return work

    def announce(self, workers: Iterable[int], kept: int, alone: Iterable[TaskKey]) -> None:
        """It is complete, of which these workers are to hear.

        Args:
            kept: the oldest one to which the job may go back.
            alone: tasks without a holder.
        """
        self._announced, self._kept, self._alone = set(workers), kept, list(alone)

    def take_unsent(self, term: int, job: str) -> list[tuple[int, CheckFolder | WriteState | CutComplete]]:
        """Take the messages to send, with their workers."""
        if self._announced:
            complete = CutComplete(
                term=term, job=job, savepoint=self.number, kept=self._kept, alone=self._alone
            )
            announced, self._announced = sorted(self._announced), set()
            return [(worker, complete) for worker in announced]
        unsent, self._unsent = sorted(self._unsent), set()
        message: CheckFolder | WriteState
        if not unsent:
            return []
        if self.phase == "checking":
            message = CheckFolder(
                term=term,
                job=job,
                savepoint=self.number,
                folder=place_below(self.folder, CHECKED_FILE),
                file=CHECKED_FILE,
                content=self._content(job),
            )
        else:
            message = WriteState(
                term=term,
                job=job,
                savepoint=self.number,
                barrier=self._barrier,
                folder=self.folder,
                goes_on=self.goes_on,
            )
        return [(worker, message) for worker in unsent]

    def info(self) -> SavepointInfo:
        """For clients."""
        return SavepointInfo(
            number=self.number,
            token=self.token,
            phase=self.phase,
            path=self.where,
            problem=self.problem,
            bytes=self.bytes,
            seconds=self.seconds,
            stood_seconds=self.stood,
        )

    def saved(
        self, graph: JobGraph, tasks: Mapping[TaskKey, Subtask], ended: Mapping[TaskKey, bytes]
    ) -> Saved:
        """Vertices, tasks and positions of the manifest.

        Args:
            ended: positions of sources' subtasks that had ended before, as far as they are known.
        """
        again = sides_of(graph)
        holding = {id for fact in self._taken.values() for id in fact.operators}
        vertices = tuple(
            SavedVertex(
                vertex.name,
                vertex.parallelism,
                tuple(
                    SavedOperator(
                        each.id, each.name, each.kind, tuple(each.keys), tuple(each.outputs), each.reads
                    )
                    for each in vertex.states
                    if (each.id in holding or each.kind == "source") and number not in again
                ),
            )
            for number, vertex in enumerate(graph.vertices)
        )
        saved = tuple(self._saved_task(task, again) for task in tasks.values())
        positions: dict[str, dict[str, SavedSplit]] = {}
        for number, vertex in enumerate(graph.vertices):
            source = next((each.id for each in vertex.states if each.kind == "source"), None)
            if source is None or number in again:
                continue
            tables = [fact.positions for key, fact in self._taken.items() if key[0] == number]
            entries = [entry for table in tables for entry in unpack_positions(table)]
            # What an earlier savepoint had may still be there, of splits that others read.
            tables = [table for key, table in ended.items() if key[0] == number]
            entries += [entry for table in tables for entry in unpack_positions(table) if entry.done]
            positions[source] = {_split_name(entry): _saved_split(entry) for entry in entries}
        return vertices, saved, positions

    def _saved_task(self, task: Subtask, again: Collection[int]) -> SavedTask:
        taken, written = self._taken.get(task.key), self._written.get(task.key)
        if task.operator in again:
            return SavedTask(*task.key, "waiting")
        if taken is None or written is None:
            return SavedTask(*task.key, "ended")
        state = None
        if written.file:
            state = WrittenState(
                written.file, written.bytes, written.index_bytes, written.checksum, written.rows
            )
        return SavedTask(*task.key, "running", taken.watermark, state)


def unfetched(batches: int) -> str:
    """Why a savepoint fails whose job has collected rows that no client has."""
    return (
        f"nobody has fetched rows that were collected before it (batches: {batches}), which this cluster "
        "alone has: fetch them (JobHandle.rows), or write rows with to_files"
    )


def _split_name(entry: SplitPosition) -> str:
    return str(entry.split) if entry.cursor is None else entry.cursor.name


def _saved_split(entry: SplitPosition) -> SavedSplit:
    cursor, rows = (b"", 0) if entry.cursor is None else (entry.cursor.position, entry.cursor.rows)
    return SavedSplit(entry.split, entry.end, cursor, rows, entry.done)


def sides_of(graph: JobGraph) -> frozenset[int]:
    """Vertices that a restored job runs from their beginning: they lead to a broadcast side and nowhere else,
    and consumers that start anew get all of it again anyway."""
    kept = graph.kept_edges()
    return frozenset(
        vertex
        for vertex in range(len(graph.vertices))
        if (outputs := graph.outputs_of(vertex)) and kept.issuperset(outputs)
    )


def not_safe(
    graph: JobGraph,
    tasks: Mapping[TaskKey, Subtask],
    standing: Mapping[TaskKey, Standing],
    *,
    barrier: int,
) -> str:
    """Why a cut of a job that stands would lose rows at this moment; empty: it would not."""
    for key, stands in standing.items():
        if stands.unread:
            edge = graph.edges[stands.unread[0]]
            name = graph.vertices[edge.target].name
            return (
                f"rows before input {edge.input} of {name} are not read yet, since it reads another input to "
                "its end first: try again once that has ended"
            )
        if stands.barrier < barrier and stands.blocked:
            what = "waits for consumers that read another input first"
            return f"{tasks[key]} {what}: try again once that has ended"
        if stands.barrier < barrier:
            return f"{tasks[key]} has restarted, and does not stand yet: try again"
    for number, vertex in enumerate(graph.vertices):
        if any(task.state == WAITING for task in tasks.values() if task.operator == number):
            return f"{vertex.name} is not deployed yet: try again once it runs"
    return partly_ended(graph, [task for task in tasks.values() if task.state == "finished"])


def partly_ended(graph: JobGraph, ended_tasks: Iterable[Subtask]) -> str:
    """Why a cut in which these tasks have ended cannot be used; empty: it can."""
    of_vertex = [list[Subtask]() for _ in graph.vertices]
    for task in ended_tasks:
        of_vertex[task.operator].append(task)
    for vertex, ended in zip(graph.vertices, of_vertex, strict=True):
        if len(ended) in (0, vertex.parallelism):
            continue
        if not vertex.is_source or graph.settings.restart_strategy == "none":
            return (
                f"{names_of(ended)} has ended, and the rest of {vertex.name} has not: try again once all have"
            )
    return ""
