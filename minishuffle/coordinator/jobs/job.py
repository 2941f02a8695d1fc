"""A job in the coordinator: its events and those of its tasks, by the rules of their life cycle.

The tables of transitions and effects are in :mod:`~minishuffle.coordinator.jobs.lifecycle`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, assert_never

from minishuffle import limits
from minishuffle.coordinator.jobs.cancellations import Cancellations
from minishuffle.coordinator.jobs.consumption import (
    Ends,
    EndsRecord,
    is_stale,
)
from minishuffle.coordinator.jobs.cuts import CutsRecord, JobCuts
from minishuffle.coordinator.jobs.deaths import STRATEGIES, Deaths, TaskDeaths
from minishuffle.coordinator.jobs.failover import (
    RESTART_BACKOFF,
    FailuresRecord,
    JobFailures,
    RegionsRecord,
)
from minishuffle.coordinator.jobs.fallback import BEGINNING, FallbackRecord, JobFallback, RestorePoint
from minishuffle.coordinator.jobs.history import History, HistoryRecord
from minishuffle.coordinator.jobs.holders import HeldTask, Holder, Holders, state_lost
from minishuffle.coordinator.jobs.joblinks import Exclusion, JobLinks, LinksRecord
from minishuffle.coordinator.jobs.lifecycle import (
    ENDED,
    JOB_ENDED,
    JOB_TRANSITIONS,
    NOT_DEPLOYED,
    PENDING,
    TASK_TRANSITIONS,
    WAITING,
    Actor,
    JobEffect,
    TaskEffect,
    effects_of,
    may,
)
from minishuffle.coordinator.jobs.lossaccounting import (
    Attempt,
    BooksRecord,
    PastRecord,
    TaskKey,
)
from minishuffle.coordinator.jobs.lostpartitions import Replays, ReplaysRecord
from minishuffle.coordinator.jobs.manifest import ManifestRecord
from minishuffle.coordinator.jobs.movedstate import MovedState
from minishuffle.coordinator.jobs.pausing import JobPause, PauseRecord
from minishuffle.coordinator.jobs.positions import PositionsRecord, Resumption
from minishuffle.coordinator.jobs.progress import JobProgress
from minishuffle.coordinator.jobs.recoveries import Recoveries
from minishuffle.coordinator.jobs.restarttimers import RestartTimers
from minishuffle.coordinator.jobs.restoring import resumptions_of
from minishuffle.coordinator.jobs.savepoints import (
    FETCH_SECONDS,
    FolderWork,
    JobSavepoint,
    SavepointRecord,
    not_safe,
    partly_ended,
    unfetched,
)
from minishuffle.coordinator.jobs.subtasks import (
    CountsRecord,
    Subtask,
    Subtasks,
    names_of,
    results_too_large,
)
from minishuffle.coordinator.journal.codec import Record
from minishuffle.coordinator.scheduling.firstoutput import FirstOutputs
from minishuffle.coordinator.scheduling.moving import JobMove
from minishuffle.coordinator.scheduling.slots import NOWHERE, Slots
from minishuffle.coordinator.scheduling.stageprogress import DueStage, StageProgress, StagesRecord
from minishuffle.counters import TaskCounters
from minishuffle.errors import (
    PartitionLost,
    PeerLost,
    ResourceExhausted,
    ShuffleError,
    StateLost,
    StorageUnavailable,
    TaskCancelled,
    UnreadableSnapshot,
    UsageError,
    error_from_code,
)
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import JobGraph, Placement
from minishuffle.plan.guarantee import never_cut, never_saved, receipted_by_cuts
from minishuffle.plan.stages import deploys_later
from minishuffle.snapshots.catalog import folder_name
from minishuffle.snapshots.sealedmanifest import SnapshotManifest
from minishuffle.snapshots.storage import place_below
from minishuffle.wire.messages import (
    DeployTasks,
    ErrorInfo,
    PoisonRow,
    RecoverySteps,
    Standing,
    TaskAttempt,
    TaskReport,
)
from minishuffle.wire.packed import pack_placement
from minishuffle.wire.reports import (
    Collected,
    SnapshotsHeld,
    StateTaken,
    StateWritten,
    TaskStateChanged,
)
from minishuffle.wire.requests import DeployWait, JobInfo, JobRows, SlotWait, UserCall

__all__ = ["Job"]

_STOPPING: Final = {"failing": "failed", "canceling": "canceled"}


@dataclass(frozen=True, slots=True)
class _Change:
    """A transition of a task under way."""

    before: str
    to: str
    at: float
    kind: str
    """Kind of its event."""
    text: str
    traceback: str
    due: float
    """Time at which its timer ends."""
    reason: str
    """Why it restarts; empty: because the last attempt ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(Record):
    """The state of a job, without its subtasks, events and files."""

    state: str
    ended_at: float
    released: bool
    placement: bytes
    """See :func:`unpack_placement`."""
    lost_slots: tuple[int, ...]
    moving: dict[int, int] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    drained: tuple[TaskKey, ...] = ()
    segments: dict[int, int]
    restarts: dict[str, int]
    abandoned: tuple[tuple[int, int], ...]
    history: HistoryRecord
    books: BooksRecord
    regions: RegionsRecord
    replays: ReplaysRecord = ((), ())
    strategy: str = ""
    manifest: ManifestRecord
    links: LinksRecord
    pause: PauseRecord = field(default_factory=PauseRecord)
    savepoint: SavepointRecord = field(default_factory=SavepointRecord)
    cut: SavepointRecord = field(default_factory=SavepointRecord)
    cuts: CutsRecord = field(default_factory=CutsRecord)
    origin: RestorePoint = BEGINNING
    fallback: FallbackRecord = field(default_factory=FallbackRecord)
    rows_collected: int = 0
    stages: StagesRecord = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord(Record):
    """A subtask and its current attempt."""

    task: Subtask
    due: float | None
    """Time of its next deployment."""
    recovery: float | None
    """Time of detection of the failure from which it recovers."""
    failures: FailuresRecord | None
    deaths: TaskDeaths | None = None
    poison: tuple[PoisonRow, ...] = ()
    ends: EndsRecord = ()
    holder: Holder | None = None


class Job:
    """A submitted job; times are wall clock.

    Invariants: a terminal job has only ended tasks; a finished one has only finished tasks; a failing or
    failed job has a cause, and no other job has; a task is pending exactly if it has a time in the table of
    times; in a stopping job no task is pending or waits to be deployed; no consumer needs a finished task
    whose worker is lost.

    Args:
        segments: number of segments that the job requires on each worker.
        random: a number from 0 to 1, for the jitter of delays.
    """

    def __init__(
        self,
        job: str,
        name: str,
        graph: JobGraph,
        placement: Placement,
        segments: Mapping[int, int],
        *,
        at: float,
        random: Callable[[], float],
        submission: str = "",
    ) -> None:
        self.id, self.name, self.graph = job, name, graph
        self.submission = submission
        """The id that the client gave the submission; may be empty."""
        self.slots, self._first_slots = Slots(placement, segments), graph.first_slots()
        self.state = "created"
        self.submitted_at, self.ended_at = at, 0.0
        self.stop_sent = False
        """Whether CancelTasks was sent."""
        self.released = False
        """Whether ReleaseJob was sent."""
        self.history = History()
        self.subtasks = Subtasks(graph, placement, waiting=deploys_later(graph))
        kept = graph.kept_edges() | graph.retained_edges()
        self.ends, self.replays = Ends(graph, kept, self.subtasks), Replays(graph)
        self.progress = JobProgress(graph, self.subtasks, self.ends, self.replays)
        self.stages, self.first_outputs = StageProgress(graph), FirstOutputs(graph)
        self.timers = RestartTimers(self.subtasks)
        given = graph.settings
        self._failures = JobFailures(given.restart_failures_max, given.restart_mistakes_max, random)
        self.deaths = Deaths(given.restart_failures_max, at, searches=given.is_guaranteed)
        self.recoveries, self.links = Recoveries(guaranteed=given.is_guaranteed), JobLinks(self.history)
        self.pause, self.move, self.savepoint = JobPause(), JobMove(), JobSavepoint()
        self.origin, self.fallback = BEGINNING, JobFallback()
        self.cut, self.cuts = JobSavepoint(), JobCuts()
        if given.is_guaranteed and not never_cut(graph):
            self.cuts.want(at, given.durable_interval)
        self.holders = Holders(graph, self.subtasks)
        self.moved_state = MovedState(graph, self.progress, self.slots, self._note)
        self.cancellations = Cancellations(graph, self.replays, self.move, self.subtasks)
        self.history.note(at, "created", f"{name}: {len(self.subtasks)} tasks {self._where(placement)}")

    def restore(self, resumptions: Mapping[TaskKey, Resumption], origin: RestorePoint) -> None:
        """(A new job.) Its first attempts begin with what a savepoint holds for them."""
        self.origin, sources = origin, self.progress.sources
        for key, resumption in resumptions.items():
            sources.report(*key, resumption.positions, self.submitted_at)
            sources.resume(*key, self.submitted_at)
            self.subtasks[key].begin_from(resumption)
        self.history.note(self.submitted_at, "restored", f"from {origin}")

    def _where(self, placement: Placement) -> str:
        workers = ", ".join(map(str, sorted(set(placement))))
        return f"in {len(self.stages.order)} stages" if self.stages.order else f"on workers {workers}"

    # --- journal ---------------------------------------------------------------------------------

    def record(self) -> JobRecord:
        """For the journal: all except subtasks, events and files."""
        return JobRecord(
            state=self.state,
            ended_at=self.ended_at,
            released=self.released,
            placement=pack_placement(self.slots.placement),
            lost_slots=tuple(sorted(self.slots.vacant)),
            moving=self.slots.moving,
            left=tuple(sorted(self.slots.left)),
            drained=tuple(sorted(self.cancellations.drained)),
            segments=self.slots.segments,
            restarts=dict(self.recoveries.restarts),
            abandoned=tuple(sorted(self.slots.blocked)),
            history=self.history.record(),
            books=self.progress.books.record(),
            regions=self.cancellations.regions.record(),
            replays=self.replays.record(),
            strategy=self.cancellations.regions.strategy,
            manifest=self.progress.manifest.record(),
            links=self.links.record(),
            pause=self.pause,
            savepoint=self.savepoint,
            cut=self.cut,
            cuts=self.cuts,
            origin=self.origin,
            fallback=self.fallback,
            rows_collected=self.progress.rows_collected,
            stages=self.stages.record(),
        )

    def task_record(self, key: TaskKey) -> TaskRecord:
        """For the journal: a subtask without the counts of a running attempt, the positions of its source,
        and replaced attempts."""
        return TaskRecord(
            task=self.subtasks[key].record(),
            due=self.timers.record(key),
            recovery=self.recoveries.record(key),
            failures=self._failures.record(key),
            deaths=self.deaths.record(key),
            poison=self.deaths.poison_record(key),
            ends=self.ends.record(key),
            holder=self.holders.record(key),
        )

    def recall(
        self,
        record: JobRecord,
        tasks: Mapping[TaskKey, TaskRecord],
        counts: Mapping[TaskKey, CountsRecord],
        past: Mapping[TaskKey, PastRecord],
        positions: Mapping[TaskKey, PositionsRecord],
    ) -> None:
        """Restore a new job from its records; its history and manifest are restored separately."""
        self.state, self.ended_at, self.released = record.state, record.ended_at, record.released
        self.slots.recall(
            record.lost_slots, record.segments, record.moving, record.left, blocked=record.abandoned
        )
        self.links.recall(record.links)
        self.pause = JobPause(**asdict(record.pause))
        self.savepoint = JobSavepoint(**asdict(record.savepoint))
        self.cut = JobSavepoint(**asdict(record.cut))
        self.cuts, self.fallback = JobCuts(), JobFallback()
        self.cuts.recall(record.cuts)
        self.fallback.recall(record.fallback)
        self.origin = record.origin
        self.progress.recall_collected(record.rows_collected)
        self.recoveries.recall_restarts(record.restarts)
        self.progress.books.recall(record.books, past)
        self.subtasks.recall({key: each.task for key, each in tasks.items()}, counts)
        for key, each in tasks.items():
            self._recall_task(key, each)
        for key, source in positions.items():
            self.progress.sources.recall(*key, source)
        self.stop_sent = self.stopping
        self.cancellations.recall(record.strategy, record.regions, record.replays, record.drained)
        self.stages.recall(record.stages, self.subtasks)

    def _recall_task(self, key: TaskKey, record: TaskRecord) -> None:
        self.ends.recall(key, record.ends, record.task.round)
        self.holders.recall(key, record.holder)
        self.recoveries.recall(key, record.recovery)
        self.deaths.recall(key, record.deaths, record.poison)
        self.timers.recall(key, record.due)
        self._failures.recall(key, record.failures)

    # --- state -----------------------------------------------------------------------------------

    @property
    def terminal(self) -> bool:
        return self.state in JOB_ENDED

    @property
    def stopping(self) -> bool:
        """Whether the job is failing or canceling: its tasks are cancelled."""
        return self.state in _STOPPING

    def slot_of(self, key: TaskKey) -> int:
        """The slot that a subtask runs in."""
        return self._first_slots[key[0]] + key[1]

    def worker_of(self, operator: int, index: int) -> int:
        """The worker of a subtask: its slot's, unless it finished before the slot moved."""
        task = self.subtasks[operator, index]
        return task.worker if task.stays else self.slots.placement[self.slot_of((operator, index))]

    def workers(self) -> set[int]:
        """The workers that have slots of it, or had some and may keep partitions, or hold snapshots."""
        return self.slots.workers() | self.holders.workers()

    def holders_of(self, slot: int) -> set[int]:
        """The workers with snapshots of the tasks of a slot."""
        here = [key for key in self.subtasks if self.slot_of(key) == slot]
        return {worker for key in here for worker in self.holders.workers_of(key)}

    def stayed(self) -> dict[TaskKey, int]:
        """The workers of subtasks that finished before their slot moved or became vacant."""
        slots = self.slots
        return {
            task.key: task.worker
            for task in self.subtasks.values()
            if task.stays
            and ((slot := self.slot_of(task.key)) in slots.vacant or task.worker != slots.placement[slot])
        }

    def info(
        self,
        at: float = 0.0,
        *,
        results: bool,
        tasks: bool = True,
        recent: Mapping[Attempt, TaskCounters] | None = None,
    ) -> JobInfo:
        """The job for clients at the time ``at``; ``results`` of sinks, or all ``tasks``, may be left out.
        ``recent`` replaces the counters of its attempts."""
        return JobInfo(
            at=at,
            job=self.id,
            name=self.name,
            state=self.state,
            submitted_at=self.submitted_at,
            ended_at=self.ended_at,
            tasks=[
                task.info(
                    self.progress.totals(task, recent), results, holder=self.holders.worker_of(task.key)
                )
                for task in (self.subtasks.values() if tasks else ())
            ],
            causes=self.history.causes,
            collected_batches=self.history.batches,
            collects=[vertex.collects for vertex in self.graph.vertices if vertex.collects],
            restarts=dict(self.recoveries.restarts),
            rows_dropped=self.progress.losses().dropped,
            rows_in_flight=self.progress.losses().in_flight,
            state_rows_lost=self.progress.losses().state_rows,
            rows_again=self.progress.losses().again,
            unprotected=0 if self.terminal else len(self.holders.unprotected()),
            files_listed=self.progress.manifest.files,
            file_rows=self.progress.manifest.rows,
            task_states=dict(+self.subtasks.states),
            first_failure=self.history.first_failure,
            slot_waits=self._slot_waits(),
            deploy_waits=self._deploy_waits(),
            stages=self.stages.infos(),
            pause=self.pause.phase,
            pause_problem=self.pause.problem,
            pause_left=self._left() if self.pause.phase == "paused" else [],
            savepoint=self.savepoint.info(),
            durable=self.cuts.info({task.key for task in self.subtasks.values() if task.runs}),
            fallbacks=self.fallback.count,
            links_broken=self.links.infos(),
            flow_control=self.graph.settings.flow_control,
            guarantee=self.graph.settings.guarantee,
        )

    def _slot_waits(self) -> list[SlotWait]:
        """A wait for each lost worker whose tasks have no slot."""
        waiting: dict[int, list[Subtask]] = {}
        for task in self.timers.waiting():
            waiting.setdefault(task.worker, []).append(task)
        return [
            SlotWait(
                worker=worker,
                until=self.timers.first(tasks),
                text=f"{names_of(tasks)} wait for a slot: {self.slots.why_wanting(worker)}",
            )
            for worker, tasks in sorted(waiting.items())
        ]

    def _deploy_waits(self) -> list[DeployWait]:
        """A wait for each stage that is not deployed yet."""
        if not self.subtasks.states[WAITING]:
            return []
        if self.first_outputs.is_used:
            return self._vertex_waits()
        return [
            DeployWait(operators=list(stage.vertices), text=self._why_waiting(number))
            for number, stage in enumerate(self.stages.order)
            if self.stages.state(number) == WAITING
        ]

    def _why_waiting(self, stage: int) -> str:
        return self.stages.why_waiting(stage, is_paused=self.pause.phase != "none")

    def _vertex_waits(self) -> list[DeployWait]:
        """A wait for each vertex with subtasks that wait for the first rows of its inputs."""

        def wanted(edge: int) -> str:
            source = self.graph.vertices[self.graph.edges[edge].source].name
            return f"{'all' if self.first_outputs.is_stored(edge) else 'rows'} of {source}"

        found = []
        for number, vertex in enumerate(self.graph.vertices):
            if not self.subtasks.some_wait(number):
                continue
            if missing := self.first_outputs.missing(number, self._has_something):
                why = " and ".join(" or ".join(map(wanted, edges)) for edges in missing)
            elif self.pause.phase != "none":
                why = "the end of the pause"
            else:
                why = f"slots: {self.slots.shortage}" if self.slots.shortage else "its slots, which move"
            found.append(DeployWait(operators=[number], text=f"{vertex.name} waits for {why}"))
        return found

    def rows_after(self, number: int) -> JobRows:
        """Collected batches after the first ``number``.

        Raises:
            ResourceExhausted: some of them were dropped.
        """
        try:
            return self.history.rows_after(number, self.terminal)
        except ResourceExhausted as error:
            raise ResourceExhausted(f"the rows of job {self.id} ({self.name}) are gone: {error}") from None

    # --- what happens to it ----------------------------------------------------------------------

    def task_changed(self, task: Subtask, message: TaskStateChanged, at: float) -> bool:
        """Apply a reported state of a task's current attempt; False if the transition is not possible now."""
        if (task.state, message.state) == ("finished", "failed"):
            return self._partitions_lost(task, message.error, at)
        if not may(TASK_TRANSITIONS, task.state, message.state, "worker"):
            return False
        error, asked = message.error, self.cancellations.why(task.key)
        said = ErrorInfo(code=0, text=str(task)) if error is None else error
        if message.state != "running":
            task.counted(message.counters, message.traffic)
            self.progress.moved(task, message, at)
        self._transition(task, message.state, "worker", at, said.text, traceback=said.traceback)
        self.moved_state.reported(task, message, at)
        if message.state == "finished":
            if not self.subtasks.keep_result(task, message.result):
                self.fail(results_too_large(task), at)
            producer = self.ends.dealt_since(message.dealt)
            if asked == "replayed" and not self.stopping:
                self._restart(task, at, "with those beside it")
            elif producer is not None and not self.stopping:
                self._restart_dealt(task, producer, at)
        elif message.state != "running":
            if self.state == "canceling" and self.subtasks.keep_result(task, message.result):
                task.listed(message.counters.rows_in_result)
            self._ended_early(task, error, asked, at)
        self._advance(at)
        return True

    def _complete_exchange(self, task: Subtask, at: float) -> None:
        """Note the completion of a blocking exchange, when its last producer has finished."""
        for number in self.graph.outputs_of(task.operator):
            edge = self.graph.edges[number]
            producers = self.subtasks.of(task.operator)
            if edge.kind == "blocking" and all(each.state == "finished" for each in producers):
                text = f"{self.graph.exchange_name(number)}: all {len(producers)} partitions can be read"
                self.history.note(at, "exchange complete", text, operator=task.operator)

    def _partitions_lost(self, task: Subtask, error: ErrorInfo | None, at: float) -> bool:
        """The stored partition of a finished task cannot be read any more: run it again. False if no consumer
        needs it."""
        lost = error is not None and error.code == PartitionLost.code
        if error is None or not lost or self.stopping or not self.ends.needed(task.key):
            return False
        self._transition(task, "lost", "worker", at, error.text)
        if self._restarts:
            self._retry(task, error, at)
        else:
            self.fail(error, at)
        self._advance(at)
        return True

    def splits_dealt(self, task: Subtask, splits: int) -> None:
        """A task says how many splits of its source it has, of a source whose order of rows hangs on that."""
        if splits <= 1:
            self.subtasks.make_same_rows(task, self.graph)

    def ends_read(self, task: Subtask, edge: int, producers: Iterable[int]) -> None:
        """Note that a task has read these producers to the end."""
        self.ends.spend(self.ends.read(task.key, edge, producers))

    def partition_readable(self, task: Subtask, edge: int, at: float) -> bool:
        """Note that a partition has its first buffer; False if it can no longer be read."""
        if not (task.runs or task.stays) or edge not in self.graph.outputs_of(task.operator):
            return False
        if self.subtasks.some_wait(self.graph.edges[edge].target) and not self._has_something(edge):
            where = f"partition {task.index} can be read, on worker {task.worker}"
            text = f"{self.graph.exchange_name(edge)}: {where}"
            self.history.note(at, "partition readable", text, operator=task.operator, index=task.index)
        task.can_be_read(edge)
        return True

    def _ended_early(self, task: Subtask, error: ErrorInfo | None, asked: str, at: float) -> None:
        """Handle an attempt that ended before its work was done; ``asked``: see :meth:`Cancellations.why`."""
        gave_way = task.state in ("canceled", "abandoned") or asked == "replayed"
        if self.state == "canceling" or (self.stopping and gave_way):
            return
        if asked and gave_way and not self.stopping:
            where = self._after_the_move(task) if asked == "drained" else "with those beside it"
            self._restart(task, at, where, reason="drained" if asked == "drained" else "")
            return
        if error is None:
            text = f"{task}: the task was {task.state} although nobody asked for it"
            error = ErrorInfo(code=TaskCancelled.code, text=text, task=str(task))
        is_broken = error.code == UnreadableSnapshot.code and task.resumption.restoration is not None
        if is_broken and not self.stopping and self.fallback.last.number:
            self._pass_over(task, error, at)
        elif self.stopping or not self._restarts or error_from_code(error.code, "").final:
            self.fail(error, at)
        else:
            self._retry(task, error, at)

    def report(self, task: Subtask, report: TaskReport, at: float) -> None:
        """Apply a task's report from a heartbeat."""
        if task.state in ("created", "running"):
            task.counted(report.counters)
            if self.deaths.note_report(task.key, report, at):
                self.subtasks.touch(task.key)
                self._note(task, "task cleared", at, f"{task} got past the place at which it died")
                self._widen(at)
            self.task_stands(task, report.standing, at)
        self.progress.exchanged(task, report.traffic, report.counters.rows_dropped)

    def snapshots_held(self, worker: int, held: HeldTask, fact: SnapshotsHeld, at: float) -> bool:
        """A holder of a task's snapshots has all of them, or can hold no more; False if it is another's."""
        if held.key not in self.holders:
            return False
        before = replace(self.holders.of(held.key))
        if not self.holders.reported(worker, held, fact, at):
            return False
        task = self.subtasks[held.key]
        if fact.problem:
            text = f"worker {worker} can hold no more snapshots of {task}: {fact.problem}"
            if fact.problem != before.problem:
                self._note(task, "holder failed", at, text)
        else:
            task.has_begun()
            if before.is_bare:
                self._note(task, "task protected", at, f"worker {worker} has the snapshots of {task} again")
        return True

    def reconcile_holders(self, worker: int, there: Iterable[AttemptId]) -> None:
        """A worker has come back with these attempts: other holders of snapshots never came to it."""
        mine = {each for each in there if each.subtask.job == self.id}
        for held in self.holders.on(worker):
            if held.of(self.id) not in mine:
                self.holders.gone(worker, held)

    def task_stands(self, task: Subtask, standing: Standing, at: float) -> None:
        """Note the standing of a running task at the barriers of a pause or a move."""
        if standing.taken and standing.barrier == self.move.barrier and self.move.is_aligning:
            self.move.taken(task)
            self._advance(at)
        if self.pause.stands(task, standing) and self.state == "pausing":
            self._advance(at)

    def collected(self, task: Subtask, message: Collected, at: float) -> bool:
        """Keep a batch of rows for the client; False if the job is stopping."""
        if self.stopping:
            return False
        self.progress.collected(task, message)
        if not self.history.collect(self.graph.vertices[task.operator].collects, message.payload):
            text = (
                f"job collected more than {limits.COLLECT_BYTES_MAX} bytes of rows: write large results "
                "with to_files instead of collect"
            )
            self.fail(ErrorInfo(code=ResourceExhausted.code, text=text, task=str(task)), at)
        return True

    def lose_results(self, subtask: str, rows: range, worker: int, at: float) -> None:
        """Count uncommitted rows kept by a sink's subtask as lost with their worker."""
        self.progress.results_lost(len(rows))
        text = f"rows {rows.start} to {rows.stop} of {subtask}, which no reader had committed"
        self.history.note(at, "results lost", text, worker=worker)

    def worker_lost(
        self, worker: int, cause: ErrorInfo, at: float, end_reported_by: float | None = None
    ) -> None:
        """A worker is lost: its running tasks are lost, finished ones whose partitions are needed too, and
        its slots become vacant.

        Args:
            end_reported_by: time by which the launcher reports how the process ended. Slots of subtasks with
                counted deaths wait for it.
        """
        self.slots.worker_lost(worker, cause.text)
        self.holders.worker_lost(worker)
        here = self.subtasks.on(worker)
        for task in here:
            task.leave_worker()
            self.subtasks.touch(task.key)
        lost = [task for task in here if task.state in ("created", "running")]
        if (self._restarts or self.subtasks.states[WAITING]) and not self.stopping:
            lost += self.ends.tasks_to_rerun(lost, here)
        for task in lost:
            self._transition(task, "lost", "coordinator", at, f"{task} is lost: {cause.text}")
        if end_reported_by is not None and self._restarts and not self.stopping:
            slots = {self.slot_of(task.key) for task in lost if self.deaths.of(task.key) is not None}
            held = [task.key for task in lost if self.slot_of(task.key) in slots]
            self.timers.hold(held, worker, end_reported_by)
        self._go_on_without(lost, cause, "on another worker", at)

    def exclude(self, worker: int, exclusion: Exclusion, at: float) -> list[TaskAttempt]:
        """Exclude an alive worker that other workers of the job cannot reach: it loses its slots, and its
        running attempts count as failures. Returns the attempts that it must release."""
        here = self.subtasks.on(worker)
        named = [TaskAttempt(operator=task.operator, index=task.index, attempt=task.attempt) for task in here]
        named += [held.attempt for held in self.holders.on(worker)]
        failed = [task.key for task in here if task.runs]
        self.links.exclude(worker, exclusion, at)
        cause = ErrorInfo(code=PeerLost.code, text=exclusion.why)
        self.worker_lost(worker, cause, at)
        self.slots.excluded(worker)
        for key in failed:
            counted = self.replays.counts_for(key)
            self.subtasks.touch(counted)
            failures = self._failures.of(counted)
            if not self.stopping and failures.add(cause, at) is None:
                self.history.blame(failures.first, verdict=True)
                self.fail(failures.limit_reached(str(self.subtasks[key])), at)
        return named

    def end_reported(self, worker: int, at: float) -> None:
        """The end of a lost worker's process is explained, or will not be: its held tasks wait no longer."""
        self.timers.hasten(self.cancellations.deployed_with(self.timers.release(worker)), at)

    def linked_workers(self) -> dict[int, int]:
        """The workers between which tasks may need links, with their numbers of slots. A worker that has
        given up its slots may still keep partitions; an excluded worker keeps none."""
        held = self.slots.held()
        return {each: held[each] for each in self.slots.workers() if each not in self.links.excluded}

    def died_inside(self, calls: Iterable[UserCall], how: str, worker: int, at: float) -> None:
        """Count the deaths of attempts that were inside user code, and may have caused the end of their
        process."""
        counted: dict[TaskKey, TaskDeaths] = {}
        for call in calls:
            task = self.subtasks.get((call.operator, call.index))
            if task is None or call.attempt > task.attempt or self.stopping or self.terminal:
                continue
            deaths = self.deaths.count(call, how, at, self.recoveries.died_in(task.key) or "")
            if deaths is None:
                continue
            counted[task.key] = deaths
            self.subtasks.touch(task.key)
            self.history.note(
                at,
                "death counted",
                f"{task}: death {deaths.count} of {self.graph.settings.restart_failures_max}; {deaths}",
                operator=task.operator,
                index=task.index,
                attempt=call.attempt,
                worker=worker,
            )
        for key, deaths in counted.items():
            if not self.stopping:
                self._judge(self.subtasks[key], deaths, at, alone=len(counted) == 1)

    def _judge(self, task: Subtask, deaths: TaskDeaths, at: float, *, alone: bool) -> None:
        """Decide what follows from deaths of a subtask; ``alone``: the last one counts against no other."""
        vertex = self.graph.vertices[task.operator]
        operators = vertex.operators[1 if vertex.is_source else 0 :]
        if alone and (found := self.deaths.find_row(task.key)) is not None:
            self._note(task, "row found", at, self.deaths.row_found(str(task), found, operators))
            self._widen(at)
        elif self._restarts and self.deaths.too_many(task.key, alone=alone):
            self.fail(self.deaths.limit_reached(str(task), deaths, operators), at, verdict=True)
        elif self._widen(at) and task.state == "restarting":
            self.cancellations.restart_with([task.key])
            self._advance(at)

    def last_seen_inside(
        self, attempts: Iterable[tuple[TaskKey, int]], stalled_at: float | None = None
    ) -> list[UserCall]:
        """The attempts that were inside user code at their last report. With ``stalled_at``, only those that
        were stalled at this time."""
        return [
            UserCall(
                job=self.id, operator=key[0], index=key[1], attempt=attempt, position=seen[0], rows=seen[1]
            )
            for key, attempt in attempts
            if (stalled_at is None or self.deaths.is_stalled(key, stalled_at))
            and (seen := self.deaths.last_seen(key, attempt)) is not None
        ]

    def coordinator_lost(self, at: float) -> None:
        """The next one begins."""
        if self.savepoint.phase == "stopping":
            self.cancel(at, f"stopped behind savepoint {self.savepoint.where}")
        elif self.savepoint.under_way:
            self._fail_savepoint("the coordinator was lost meanwhile: take it again", at)
        self.cuts.coordinator_lost(self.id)
        self._give_cut_up("the coordinator was lost meanwhile", at)
        self.fallback.read(self.id, at)
        self.deaths.coordinator_lost(at)
        self.progress.coordinator_lost()

    def restart_undeployed(self, keys: Iterable[TaskKey], at: float) -> None:
        """Restart tasks whose deployment has not reached their worker, because the coordinator was lost."""
        lost = [self.subtasks[key] for key in keys]
        for task in lost:
            text = f"{task} had not reached worker {task.worker}"
            self._transition(task, "lost", "coordinator", at, text)
        if lost:
            text = "the coordinator was lost before it had deployed all tasks"
            self._go_on_without(lost, ErrorInfo(code=PeerLost.code, text=text), "on the same worker", at)

    def _go_on_without(self, lost: list[Subtask], cause: ErrorInfo, where: str, at: float) -> None:
        if self.stopping or not self._restarts:
            self._fail_of_loss(lost, cause, at)
        elif unreadable := self._unreadable(lost):
            self._fail_of_unreadable(unreadable, cause, at)
        else:
            for task in lost:
                self._restart(task, at, where, due=self.timers.held_until(task.key, at))
            self.cancellations.restart_with([task.key for task in lost])
            if bare := self.holders.without_state(self.subtasks[key] for key in self.timers):
                self._fall_back(state_lost(bare, cause.text), at)
        self._advance(at)

    def _fail_of_loss(self, lost: list[Subtask], cause: ErrorInfo, at: float) -> None:
        # Tasks on other workers may have failed earlier because of this worker, whatever the state of its own
        # tasks.
        explains = self.state == "failing" and not self.history.explained
        if (not lost and not explains) or self.state == "canceling":
            return
        text = f"{cause.text}; {names_of(lost)} ran there" if lost else cause.text
        self.fail(cause.model_copy(update={"text": text}), at, verdict=True)

    def _unreadable(self, gone: Sequence[Subtask]) -> list[Subtask]:
        """Tasks with stored rows that cannot be made again: among ``gone``, and among all tasks that restart
        with these."""
        keys = {task.key for task in gone}
        beside = [self.subtasks[key] for key in self.replays.cannot(self.cancellations.regions.of(keys))]
        return [task for task in beside if task.key in keys or task.runs or self._is_stored_for_others(task)]

    def _fail_of_unreadable(self, lost: Sequence[Subtask], cause: ErrorInfo, at: float) -> None:
        text = (
            f"{cause.text}; {names_of(lost)} cannot run again: a blocking exchange stores what an external "
            "client wrote, once. Write it again for another job, or leave exchange('blocking') out"
        )
        self.fail(cause.model_copy(update={"text": text}), at, verdict=True)

    def undeployed(self, worker: int, message: DeployTasks, error: ShuffleError | None, at: float) -> None:
        """End tasks whose DeployTasks was not sent: because of an ``error``, or without one because the job
        ends."""
        state, text = ("canceled", "the job ends") if error is None else ("failed", str(error))
        for spec in message.tasks:
            task = self.subtasks[spec.operator, spec.index]
            if (task.attempt, task.state) == (spec.attempt, "created"):
                self._transition(task, state, "coordinator", at, text)
        if error is not None:
            self.fail(ErrorInfo(code=error.code, text=f"deployment on worker {worker}: {error}"), at)
        self._advance(at)

    def fail(self, cause: ErrorInfo, at: float, *, verdict: bool = False) -> None:
        """Begin to fail, or add a cause if the job is failing."""
        begins = may(JOB_TRANSITIONS, self.state, "failing", "coordinator")
        if begins or self.state == "failing":
            self.history.blame(cause, verdict=verdict)
        if begins:
            self._transition_job("failing", "coordinator", at, cause.text)
            self._advance(at)

    def cancel(self, at: float, why: str) -> None:
        """Begin to cancel, unless the job has ended or is stopping."""
        if may(JOB_TRANSITIONS, self.state, "canceling", "user"):
            self._transition_job("canceling", "user", at, why)
            self._advance(at)

    # --- pauses ----------------------------------------------------------------------------------

    def pause_within(self, seconds: float, at: float) -> None:
        """Begin a pause with a limit of ``seconds``; no effect if one has begun.

        Raises:
            UsageError: the job has ended, or is stopping.
        """
        if self.terminal or self.stopping:
            raise UsageError(f"job {self.id} is {self.state}: only one that runs can be paused")
        self.savepoint.keep_paused()
        self._take_barrier_back("a client pauses the job", at)
        self.pause.want(at, seconds)
        self._advance(at)

    def resume(self, at: float) -> None:
        """Resume the job.

        Raises:
            UsageError: it is neither paused nor pausing.
        """
        if self.pause.phase == "none":
            raise UsageError(f"job {self.id} is {self.state}, not paused")
        if self.savepoint.needs_pause:
            self.savepoint.keep_paused()
            self._fail_savepoint("the job was resumed meanwhile", at)
        if self.pause.under_way:
            self._give_pause_up("it was resumed before it was paused", at, by="user")
        else:
            self._transition_job("running", "user", at, f"resumed after {at - self.pause.since:.3f} s")

    def _give_pause_up(self, problem: str, at: float, *, by: Actor = "coordinator") -> None:
        """Let the pause fail: stopped tasks continue."""
        self.pause.end(problem)
        self.history.note(at, "pause failed", problem)
        if self.state == "pausing":
            self._transition_job("running", by, at, "it goes on")
        if self.savepoint.phase == "aligning":
            self._fail_savepoint(problem, at)

    def end_overdue_pause(self, at: float) -> None:
        """Let the pause fail if its deadline has passed."""
        if self.pause.under_way and at >= self.pause.until:
            drained = self.cancellations.drained
            self._give_pause_up(self.pause.overdue(self.graph, self.subtasks.values(), drained), at)

    def _advance_pause(self, at: float) -> None:
        if self.state == "running" and self.pause.under_way:
            self._transition_job("pausing", "user", at, "a client asks for it")
        may_be = self.state == "pausing" and not (self.cancellations.drained or self.timers)
        if may_be and self.pause.look(self.graph, self.subtasks, at):
            left = "; ".join(self._left())
            text = f"after {at - self.pause.until + self.pause.seconds:.3f} s"
            text = f"{text}; where it is stays {left}" if left else text
            self._transition_job("paused", "coordinator", at, text)

    def _left(self) -> list[str]:
        """The data that stays where it is while the job is paused, in words."""
        counts = (self.progress.totals(task).counters.user_errors for task in self.subtasks.values())
        letters = sum(errors.get("dead_letter", 0) for errors in counts)
        return self.pause.left(self.graph, self.subtasks.values(), letters)

    # --- savepoints ------------------------------------------------------------------------------

    def save_within(
        self, seconds: float, pause_seconds: float, folder: str, at: float, *, token: str, stops: bool
    ) -> None:
        """Begin a savepoint with these limits, for it and for its pause.

        Raises:
            UsageError: the job does not run, cannot be saved, or another savepoint is under way.
        """
        if self.savepoint.token == token:
            return
        if self.terminal or self.stopping:
            raise UsageError(f"job {self.id} is {self.state}: a savepoint is taken of one that runs")
        if self.savepoint.under_way:
            raise UsageError(
                f"job {self.id} has a savepoint under way, into {self.savepoint.where}: wait for that"
            )
        if why := never_saved(self.graph):
            raise UsageError(f"no savepoint of job {self.id} ({self.name}) can be taken: {why}")
        self._give_cut_up("a client asks for a savepoint", at)
        number = self.next_snapshot
        self.savepoint.begin(self.id, folder, number=number, token=token, stops=stops, at=at, seconds=seconds)
        self.savepoint.pauses_within(pause_seconds)
        self.history.note(at, "savepoint begun", f"into {self.savepoint.where}")

    def folder_prepared(self, work: FolderWork, problem: str, at: float) -> None:
        """The folder of a savepoint or durable snapshot was made by the coordinator, or could not be."""
        checking = (work.savepoint, "checking")
        if (self.cut.number, self.cut.phase) == checking:
            self._take_cut(problem, at)
        elif (self.savepoint.number, self.savepoint.phase) != checking:
            if not problem:
                self.savepoint.prepared_too_late(work)
        else:
            if problem:
                self._fail_savepoint(problem, at)
            else:
                self.savepoint.prepared(self.subtasks.open_workers())
        self._advance(at)

    def folder_checked(self, worker: int, number: int, problem: str, at: float) -> None:
        """A worker has looked for the folder of a savepoint."""
        if (self.savepoint.number, self.savepoint.phase) != (number, "checking"):
            return
        if problem:
            text = f"worker {worker} does not find what the coordinator has written: {problem}"
            self._fail_savepoint(f"{text}; snapshot_dir must be a directory that all of them share", at)
        elif self.savepoint.checked(worker):
            self._align_savepoint(at)
        self._advance(at)

    def _align_savepoint(self, at: float) -> None:
        """All workers have found the folder: have a barrier pass through the job, or the job stand."""
        is_paused = self.pause.phase != "none"
        if is_paused or self.savepoint.stops or not self.graph.settings.aligns_in_passing:
            self.savepoint.align(at, holds=not is_paused)
            self.pause.want(at, self.savepoint.pause_seconds)
        else:
            self.savepoint.pass_through(at)

    def state_taken(self, task: Subtask, fact: StateTaken, at: float) -> None:
        """A task has taken its state; once all have that stand for that, the job goes on."""
        if fact.savepoint == self.cut.number:
            if self.cut.needs(task.key) and fact.problem:
                self._give_cut_up(f"{task}: {fact.problem}", at)
            else:
                self.cut.task_has_taken(task.key, fact)
        elif self.savepoint.needs(task.key) and fact.problem and fact.savepoint == self.savepoint.number:
            self._fail_savepoint(f"{task}: {fact.problem}", at)
        else:
            self.savepoint.task_has_taken(task.key, fact)
        self._advance(at)

    def state_written(self, task: Subtask, fact: StateWritten, at: float) -> None:
        """The state of a task is in the folder of a snapshot, or could not be written."""
        saving = self.cut if fact.savepoint == self.cut.number else self.savepoint
        if not (saving.needs(task.key) and fact.problem and fact.savepoint == saving.number):
            saving.task_has_written(task.key, fact)
        else:
            problem = f"worker {task.worker} cannot write the state of {task}: {fact.problem}"
            fail = self._give_cut_up if saving is self.cut else self._fail_savepoint
            fail(problem, at)
        self._advance(at)

    def savepoint_committed(self, number: int, problem: str, at: float) -> None:
        """The manifest of a savepoint or durable snapshot is there, or could not be written."""
        if (self.cut.number, self.cut.phase) == (number, "committing"):
            if problem:
                self._give_cut_up(problem, at)
            else:
                self.cut.committed(at)
                self.cuts.complete(self.id, self.cut)
                self.holders.freed(self.cuts.alone)
                vertices = self.graph.vertices
                if self.cuts.alone or any(each.acknowledges or each.stream or each.sink for each in vertices):
                    kept = self.cuts.kept[0].point.number
                    self.cut.announce(self.subtasks.open_workers(), kept, self.cuts.alone)
            return
        if (self.savepoint.number, self.savepoint.phase) != (number, "committing"):
            return
        if problem:
            self._fail_savepoint(problem, at)
            return
        self.savepoint.committed(at)
        self.history.note(at, "savepoint complete", self.savepoint.summary())
        if self.savepoint.stops:
            self.cancel(at, f"stopped behind savepoint {self.savepoint.where}")

    def look_at_savepoint(self, at: float) -> None:
        """Something may have happened that a savepoint waits for, or its deadline has passed."""
        if self.savepoint.under_way and at >= self.savepoint.until:
            self._fail_savepoint(self.savepoint.overdue(self.subtasks), at)
        self._advance(at)

    def _advance_savepoint(self, at: float) -> None:
        savepoint = self.savepoint
        if savepoint.phase == "aligning" and savepoint.goes_on:
            self._send_passing(at)
        elif savepoint.phase == "aligning" and self.state == "paused":
            live = [task for task in self.subtasks.values() if task.state != "finished"]
            standing = {task.key: self.pause.standing(task.key, task.attempt) for task in live}
            if why := not_safe(self.graph, self.subtasks, standing, barrier=self.pause.barrier):
                self._fail_savepoint(why, at)
            else:
                savepoint.take(self.pause.barrier, live)
        if savepoint.has_all_taken:
            self._all_taken(at)
        if savepoint.all_written:
            if (missing := savepoint.collected - self.history.fetched) > 0:
                savepoint.fetch_by(at + FETCH_SECONDS)
                if at >= savepoint.fetched_by:
                    self._fail_savepoint(unfetched(missing), at)
                return
            self._commit(savepoint)

    def _send_passing(self, at: float) -> None:
        """Send the barrier of a savepoint for which the job does not stand, once all tasks run."""
        if self.pause.phase != "none":
            self._align_savepoint(at)
        elif why := not_safe(self.graph, self.subtasks, {}, barrier=0):
            self._fail_savepoint(why, at)
        elif not self._why_no_barrier():
            live = [task for task in self.subtasks.values() if task.runs]
            self.savepoint.take_passing(self.pause.next_barrier(), live)

    def _all_taken(self, at: float) -> None:
        """All state for a savepoint is taken: its barrier ends, unless the job is to stand longer."""
        savepoint = self.savepoint
        ended = [task for task in self.subtasks.values() if savepoint.has_ended(task.key)]
        if why := partly_ended(self.graph, ended):
            self._fail_savepoint(why, at)
            return
        savepoint.all_taken(at, self.history.batches)
        if savepoint.goes_on:
            self.pause.repeat()
        elif savepoint.holds and not savepoint.stops:
            self._transition_job("running", "user", at, f"its state was taken in {savepoint.stood:.3f} s")

    def _commit(self, saving: JobSavepoint) -> None:
        """All files are there: have the manifest written."""
        sources = self.progress.sources
        ended = {
            key: record.splits
            for key in self.subtasks
            if saving.has_ended(key) and (record := sources.record(*key)) is not None
        }
        saving.commit(self.id, self.name, saving.saved(self.graph, self.subtasks, ended))

    def _fail_savepoint(self, problem: str, at: float) -> None:
        """Let the savepoint fail; a job that was paused for it goes on."""
        holds = self.savepoint.holds
        self.savepoint.fail(self.id, problem)
        self.history.note(at, "savepoint failed", problem)
        if self.savepoint.goes_on:
            self.pause.repeat()
        if holds and self.state == "paused":
            self._transition_job("running", "user", at, "it goes on")
        elif holds and self.pause.under_way:
            self._give_pause_up(problem, at)

    # --- durable snapshots -----------------------------------------------------------------------

    @property
    def next_snapshot(self) -> int:
        """The number of the next savepoint or durable snapshot."""
        return max(self.savepoint.number, self.cut.number) + 1

    def cut_within(self, seconds: float, pause_seconds: float, directory: str, at: float) -> None:
        """Begin a durable snapshot there if one is due and can be taken now, with limits for it and for its
        alignment; give up one whose deadline has passed."""
        self.fallback.look(self.id, at)
        if self.fallback.overdue(at):
            self._opened(StorageUnavailable("its storage does not answer"), at)
        if self.cut.under_way and at >= self.cut.until:
            self._give_cut_up(self.cut.overdue(self.subtasks), at)
        if self.cut.under_way or not self.cuts.is_due(at):
            return
        if not directory or self._why_no_cut():
            self.cuts.postpone(at)
            return
        number = self.next_snapshot
        folder = place_below(directory, f"{folder_name(self.id, 'durable', number)}-{int(at)}")
        self.cut.begin(self.id, folder, number=number, at=at, seconds=seconds, kind="durable")
        self.cut.pauses_within(pause_seconds)
        self.cuts.begin(at, self.graph.settings.durable_interval, self.progress.rows_published)

    def readers_of(self, worker: int) -> set[int]:
        """The other workers with tasks for which those of a worker may retain rows."""
        edges, here = self.graph.edges, {task.operator for task in self.subtasks.on(worker)}
        found = {edges[n].target for n in self.graph.retained_edges() if edges[n].source in here}
        return {task.worker for each in found for task in self.subtasks.of(each) if task.runs} - {worker}

    def hasten_cut(self, at: float) -> bool:
        """A worker retains much, which a durable snapshot frees if tasks have no holders, or have kept rows
        that nobody has read; False: none begins sooner for that. It begins at once where nothing else would
        free these."""
        is_alone = bool(self.holders.alone())
        is_freed = is_alone or any(each.sink for each in self.graph.vertices)
        began = -math.inf if is_alone else self.cut.began
        return is_freed and not self.cut.under_way and self.cuts.hasten(began, at)

    def receipts_wait(self, key: TaskKey, awaited: int, at: float) -> bool:
        """Receipts of a task wait for a durable snapshot, or for none if ``awaited`` is -1: see
        :meth:`JobCuts.hasten_receipts`; False: none begins sooner for that."""
        self.cuts.note_receipts(key, are_awaited=awaited >= 0)
        if awaited < 0 or self.cut.under_way:
            return False
        return self.cuts.hasten_receipts(awaited, self.cut.began, at)

    def worker_returned(self, worker: int, at: float) -> None:
        """A worker has come back, and may not have got what it was sent."""
        if (self.cut.is_passing or self.savepoint.is_passing) and any(self.subtasks.on(worker)):
            self._take_barrier_back(f"worker {worker} was away", at)
        self.savepoint.ask_again(worker, self.subtasks)

    def _why_no_cut(self) -> str:
        """Why no durable snapshot can be taken now; empty: one can."""
        return "a savepoint is taken" if self.savepoint.under_way else self._why_no_barrier()

    def _why_no_barrier(self) -> str:
        """Why no barrier can go through the job now; empty: it can."""
        if self.state != "running" or self.pause.phase != "none":
            return f"the job is {self.state}"
        if self.fallback.under_way or self.moves or self.move.barrier or self.timers:
            return "tasks restart or move"
        late = [task for task in self.subtasks.values() if task.state not in ("running", "finished")]
        return f"{names_of(late)} does not run yet" if late else ""

    def _take_cut(self, problem: str, at: float) -> None:
        """The folder is there, or could not be made: send the barrier."""
        if why := problem or self._why_no_cut():
            self._give_cut_up(why, at)
            return
        self.cut.prepared([])
        live = [task for task in self.subtasks.values() if task.runs]
        self.cut.take_within(self.pause.next_barrier(), live, at)
        self.cuts.take(self.holders.alone())

    def _advance_cut(self, at: float) -> None:
        cut = self.cut
        if cut.has_all_taken:
            cut.all_taken(at, 0)
            self.pause.repeat()
        if cut.all_written:
            self._commit(cut)

    def _take_barrier_back(self, why: str, at: float) -> None:
        """No snapshot can be taken with the barrier that passes through the job, if there is one."""
        self._give_cut_up(why, at)
        if self.savepoint.is_passing:
            self._fail_savepoint(f"{why} meanwhile: take it again", at)

    def _give_cut_up(self, problem: str, at: float) -> None:
        """Let the durable snapshot that is under way fail; its barrier, if it is out, is taken back."""
        if not self.cut.under_way:
            return
        self.cut.fail(self.id, problem)
        self.pause.repeat()
        if self.cuts.fail(self.cut):
            self.history.note(at, "durable snapshot failed", problem)

    def take_folder_work(self) -> list[FolderWork]:
        """Take what the coordinator's process is to do in folders of snapshots."""
        asked = (self.savepoint, self.cut, self.cuts, self.fallback)
        return [work for each in asked for work in each.take_work()]

    # --- back to a snapshot ----------------------------------------------------------------------

    def _fall_back(self, cause: ErrorInfo, at: float) -> None:
        """A task cannot go on alone: all of them go back to a snapshot of the whole job.

        Not to its beginning if some of its input may not come again: sources have acknowledged it, or the
        programs that wrote it have their receipts. These cover the last durable snapshot, and no other.
        """
        if not self.fallback.under_way:
            self._give_cut_up("the job goes back to one before it", at)  # else receipts follow from it
            self.history.note(at, "job falls back", cause.text)
            by_cuts, vertices = receipted_by_cuts(self.graph), self.graph.vertices
            is_said = self.cuts.taken and (by_cuts or any(each.acknowledges for each in vertices))
            is_written = any(each.stream and n not in by_cuts for n, each in enumerate(vertices))
            points = self.cuts.points()[: 1 if by_cuts else None]
            points += [] if is_said or is_written else [self.origin]
            if not self.fallback.begin(self.id, points, at):
                self.fail(cause, at, verdict=True)
                return
        self.cancellations.end_all()

    def snapshot_opened(
        self, work: FolderWork, found: SnapshotManifest | ShuffleError | None, at: float
    ) -> None:
        """The manifest of a snapshot to go back to was read, or cannot be: then an older one is."""
        if self.fallback.awaits(work.savepoint, work.folder):
            self._opened(found, at)

    def _opened(self, found: SnapshotManifest | ShuffleError | None, at: float) -> None:
        point = self.fallback.points[0]
        try:
            if not isinstance(found, SnapshotManifest):
                raise found or UnreadableSnapshot(f"there is no manifest of {point}")
            self.fallback.found(resumptions_of(self.graph, found, point))
        except ShuffleError as error:
            text = f"{point} cannot be read: {error}"
            if isinstance(error, StorageUnavailable) and at < self.fallback.until:
                if self.fallback.ask_again(text, at):
                    self.history.note(at, "snapshot awaited", text)
            elif self.fallback.unreadable(self.id, at):
                self.history.note(at, "snapshot passed over", text)
            else:
                self.fail(ErrorInfo(code=error.code, text=text), at, verdict=True)
        self._advance(at)

    def _pass_over(self, task: Subtask, error: ErrorInfo, at: float) -> None:
        """The durable snapshot to which the job went back is broken, in what it holds for a task."""
        self.fallback.pass_over()
        text = f"{self.fallback.last} cannot be read: {error.text}"
        self.history.note(at, "snapshot passed over", text)
        self._retry(task, error, at)
        if not self.stopping:
            self._fall_back(error, at)

    def _begin_again(self, at: float) -> None:
        """All attempts have ended, and what the next ones begin with is known."""
        if waiting := self.timers.waiting():
            until = self.timers.first(waiting) + self.fallback.lasted(at)
            self.timers.prolong([task.key for task in waiting], until)
        point, resumptions = self.fallback.end()
        for task in self.subtasks.values():
            if task.state == "finished":
                self._restart(task, at, f"from {point}")
            if task.state != WAITING:
                task.start_over(resumptions.get(task.key, Resumption()))
        self.ends.start_over()
        self.holders.start_over()
        self.progress.goes_back(point.published)
        self.cancellations.widen(self.deaths.strategy(self.graph.settings.restart_strategy))
        self.subtasks.touch(*self.subtasks)
        self.timers.join(self.subtasks)
        self.history.note(at, "job begins again", f"all tasks go on from {point}")

    def take_stop(self) -> bool:
        """Whether CancelTasks must be sent: True once."""
        stop_sent, self.stop_sent = self.stop_sent, True
        return not stop_sent

    def release(self) -> None:
        """ReleaseJob was sent: no task starts again."""
        self.released = True
        vertices = [vertex.model_copy(update={"program": b""}) for vertex in self.graph.vertices]
        self.graph = self.graph.model_copy(update={"vertices": vertices})

    # --- restarts --------------------------------------------------------------------------------

    @property
    def _restarts(self) -> bool:
        return self.graph.settings.restart_strategy != "none"

    def _retry(self, task: Subtask, error: ErrorInfo, at: float) -> None:
        """Restart a failed task in its slot, unless it has failed too often."""
        settings = self.graph.settings
        if unreadable := self._unreadable([task]):
            self._fail_of_unreadable(unreadable, error, at)
            return
        counted = self.replays.counts_for(task.key)
        self.subtasks.touch(counted)
        failures = self._failures.of(counted)
        delay = failures.add(error, at, rows_done=task.counters.rows_done)
        if delay is None:
            self.history.blame(failures.first, verdict=True)
            self.fail(failures.limit_reached(str(task)), at)
            return
        if task.state == "canceled":
            delay = max(delay, RESTART_BACKOFF.first)  # its worker may be about to report its shutdown
        when = f"in {delay:.1f} s" if delay else "at once"
        count = f"failure {failures.count} of {settings.restart_failures_max}"
        text = f"attempt {task.attempt + 1} follows {when} ({count}): {error.text}"
        self._transition(task, "restarting", "coordinator", at, text, due=at + delay)
        self.cancellations.restart_with([task.key])
        if error.code == StateLost.code:
            self._fall_back(error, at)
        elif bare := self.holders.without_state([task]):
            self._fall_back(state_lost(bare, error.text), at)

    def _widen(self, at: float) -> bool:
        """Use the restart strategy that the counted deaths require; True if it is wider than before. Without
        counted deaths it is the job's own strategy again."""
        own, before = self.graph.settings.restart_strategy, self.cancellations.regions.strategy
        strategy = self.deaths.strategy(own)
        if not self.cancellations.widen(strategy):
            return False
        text = f"{strategy}, for as long as attempts die in the same step of their recovery"
        self.history.note(at, "restart strategy", text if strategy != own else f"{own} again")
        return STRATEGIES.index(strategy) > STRATEGIES.index(before)

    # --- slots that move -------------------------------------------------------------------------

    @property
    def can_move(self) -> bool:
        """Whether its tasks can restart on other workers."""
        return self._restarts and not self.stopping and not self.terminal

    @property
    def moves(self) -> bool:
        """Whether attempts that move have not ended yet: their ends would interrupt the next move."""
        return self.move.is_aligning or bool(self.cancellations.drained)

    @property
    def moves_as_a_whole(self) -> bool:
        """Whether other tasks restart together with a moving one, so that all slots should move at once."""
        return self.cancellations.regions.joint

    def movable(self, slots: Iterable[int]) -> list[int]:
        """The slots among these that can leave their worker: all without stored rows that cannot be made
        again and are still needed. If tasks restart jointly, none can while there are rows of this kind."""
        tasks = [self.subtasks[key] for key in self.replays.cannot(self.subtasks)]
        tasks = [task for task in tasks if task.runs or self._is_stored_for_others(task)]
        fixed = {(self.slot_of(task.key), task.worker) for task in tasks}
        if fixed and self.moves_as_a_whole:
            return []
        return [slot for slot in slots if (slot, self.slots.placement[slot]) not in fixed]

    def _is_stored_for_others(self, task: Subtask) -> bool:
        """Whether a task has finished, and its worker has partitions that others still have to read."""
        return task.stays and not self.stopping and self.ends.needed(task.key)

    def slots_move(self, slots: Iterable[int], at: float, seconds: float = 0.0) -> None:
        """Move slots: their tasks end in order, at known source positions, and their next attempts follow in
        the slots' new places. None of this counts as a failure.

        Args:
            seconds: limit of the time for processing the rows already sent to them.
        """
        moving = set(slots)
        here = [key for key, task in self.subtasks.items() if task.runs and self.slot_of(key) in moving]
        self._take_barrier_back("tasks move", at)
        keys = self.cancellations.drain(here)
        aligns = not self.graph.settings.is_guaranteed  # else they go on from snapshots
        if keys and seconds and aligns and self.state in ("running", "pausing") and not self.pause.is_out:
            tasks = [self.subtasks[key] for key in keys]
            self.move.begin(self.pause.next_barrier(), tasks, at + seconds)
        else:
            self.cancellations.cancel(sorted(keys))
        self._advance(at)

    def end_overdue_move(self, at: float) -> None:
        """End an overdue move: its tasks end now, and held rows wait no longer."""
        if self.move.is_overdue(at):
            self.cancellations.cancel(self.move.end())
            self.pause.repeat()

    def evict(self, worker: int, at: float) -> None:
        """Take all movable slots from a worker, with or without a target."""
        self.cancellations.cancel(self.move.give_up())
        slots = self.movable(self.slots.on([worker]))
        self.slots.evict(worker, slots)
        self.slots_move(slots, at)

    def needs(self, worker: int) -> bool:
        """Whether a worker is needed: it runs a task, is about to run one, or keeps partitions or state that
        others still have to read."""
        if self.slots.coming(worker):
            return True
        here = set(self.slots.on([worker]))

        def is_needed(task: Subtask) -> bool:
            if task.state in PENDING or task.state == WAITING:
                return self.slot_of(task.key) in here
            if task.worker != worker or not task.on_worker:
                return False
            return task.runs or self._is_stored_for_others(task)

        def keeps_state(task: Subtask) -> bool:
            held = task.state_held
            return held is not None and held[0] == worker and not self.stopping

        if not self.stopping and self.holders.needs(worker):
            return True
        tasks = self.subtasks.values()
        there = worker in self.slots.workers()
        return there and any(is_needed(task) or keeps_state(task) for task in tasks)

    def _after_the_move(self, task: Subtask) -> str:
        slot = self.slot_of(task.key)
        worker = NOWHERE if slot in self.slots.vacant else self.slots.placement[slot]
        worker = self.slots.moving.get(slot, worker)
        return f"on worker {worker}" if worker != NOWHERE else "where a slot comes free"

    def _arrive(self, at: float) -> None:
        """Complete the moves of slots without running tasks. Partitions of finished tasks stay on the old
        worker while they are needed, except kept ones, which are made again."""
        if self.stopping or self.terminal or not self.slots.moving:
            return
        busy = {self.slot_of(task.key) for task in self.subtasks.values() if task.runs}
        for slot in sorted(self.slots.moving.keys() - busy):
            here = [task for task in self.subtasks.values() if self.slot_of(task.key) == slot]
            left = self.slots.placement[slot]
            self.slots.arrive(slot)
            kept = [task for task in here if self.ends.keeps(task.operator) and self._is_on(task, left)]
            pending = [task for task in here if task.state in PENDING]
            again = self.ends.tasks_to_rerun(pending, kept)
            for task in again:
                self._restart(task, at, self._after_the_move(task), reason="drained")
            self.cancellations.restart_with([task.key for task in again])

    @staticmethod
    def _is_on(task: Subtask, worker: int) -> bool:
        return task.on_worker and task.worker == worker

    def stored_on(self, workers: Collection[int]) -> list[Subtask]:
        """Finished subtasks with needed, repeatable partitions on these workers, whose slots are elsewhere by
        now."""
        slots = self.slots
        return [
            task
            for task in self.subtasks.values()
            if task.stays
            and task.worker in workers
            and self.ends.keeps(task.operator)
            and ((slot := self.slot_of(task.key)) in slots.vacant or slots.placement[slot] not in workers)
            and self.ends.needed(task.key)
            and not self.replays.cannot([task.key])
        ]

    def make_again(self, tasks: list[Subtask], at: float) -> None:
        """Run these tasks again elsewhere, since their workers are draining."""
        for task in tasks:
            self._restart(task, at, self._after_the_move(task), reason="drained")
        self.cancellations.restart_with([task.key for task in tasks])
        self._advance(at)

    def _restart_together(self, keys: list[TaskKey], at: float) -> None:
        """A region has ended: deploy it at the latest of its times. A finished task restarts as well if a
        restarting consumer has not read its end, or reads it again."""
        finished = [key for key in keys if self.subtasks[key].state == "finished"]
        but = {"finished", WAITING}  # a waiting task will read the new partitions
        while found := [self.subtasks[key] for key in finished if self.ends.needed(key, but)]:
            finished = [key for key in finished if self.subtasks[key] not in found]
            for task in found:
                self._restart(task, at, "with those that it feeds")
        self.timers.join(keys)

    def _replay(self, at: float) -> None:
        """End the tasks that run again with pending ones; then deploy all of them at the latest of their
        times."""
        if self.stopping or self.terminal:
            return
        again = self.replays.begin(self.timers, self.subtasks)
        if again.unreadable:
            lost = [self.subtasks[key] for key in sorted(again.unreadable)]
            text = "what others have stored is lost"
            self._fail_of_unreadable(lost, ErrorInfo(code=PeerLost.code, text=text), at)
            return
        for key in sorted(again.tasks):
            task = self.subtasks[key]
            if task.runs:
                self.cancellations.cancel([key])
            elif task.state == "finished":
                self._restart(task, at, "with those beside it")
        self.timers.join(self.replays.take_ready())

    def _read_again(self, at: float) -> None:
        """Finished consumers run again to which the next attempt of a pending task may deal other rows."""
        pending = list(self.timers)
        while pending:
            producer = self.subtasks[pending.pop()]
            for task in self.ends.dealt_otherwise(producer):
                self._restart_dealt(task, producer, at)
                pending.append(task.key)

    def _restart_dealt(self, task: Subtask, producer: Subtask, at: float) -> None:
        """A finished consumer runs again, as it may get other rows of a producer's next attempt."""
        self._restart(task, at, f"with {producer}, which deals its rows out anew")

    def _restart(
        self, task: Subtask, at: float, where: str, *, due: float | None = None, reason: str = ""
    ) -> None:
        """Let the next attempt of a task follow at ``due``, by default at once; ``where`` is for the
        event."""
        text = f"{task}: attempt {task.attempt + 1} follows {where}"
        due = at if due is None else due
        self._transition(task, "restarting", "coordinator", at, text, due=due, reason=reason)

    def next_time(self) -> float | None:
        """The next time at which a task is due, or a deadline passes: of a wait for a slot, a pause or a
        move."""
        times = [self.timers.next_time(self._holds_back)]
        if self.pause.under_way:
            times.append(self.pause.until)
        if self.move.barrier:
            times.append(self.move.until)
        times += [self.savepoint.next_time(), self.cut.next_time()]
        if self.cuts.next_at and not self.cut.under_way:
            times.append(self.cuts.next_at)
        times += [self.fallback.next_time(), self.holders.next_time()]
        return min((time for time in times if time is not None), default=None)

    def _holds_back(self, key: TaskKey) -> bool:
        """Whether a pending task waits until others have ended."""
        is_held = self.fallback.under_way or self.slot_of(key) in self.slots.moving
        return is_held or self.cancellations.holds_back(key)

    @property
    def waits_for_slot(self) -> bool:
        return self.subtasks.states["waiting for a slot"] > 0

    def due(self, at: float) -> list[Subtask]:
        """Pending tasks that may be deployed now, if they have a slot."""
        return [task for task in self.timers.due(at) if not self._holds_back(task.key)]

    def vacant_slots(self, tasks: Iterable[Subtask]) -> list[int]:
        """The vacant slots of these pending tasks, sorted by how long their tasks may wait: a job does not
        fail because a slot went to tasks that could have waited for longer."""
        wanted = {self.slot_of(task.key): math.inf for task in tasks}
        for task in self.timers.waiting():
            slot = self.slot_of(task.key)
            if slot in wanted:
                wanted[slot] = min(wanted[slot], self.timers.first([task]))
        return sorted(wanted.keys() & self.slots.vacant, key=lambda slot: (wanted[slot], slot))

    def wait_for_slot(self, task: Subtask, until: float, at: float, *, may_come: bool = False) -> None:
        """No slot is free for a task: let it wait until ``until``. ``may_come``: one may become free without
        a new worker. Otherwise a task of an excluded worker fails the job."""
        if not may(TASK_TRANSITIONS, task.state, "waiting for a slot", "coordinator"):  # it waits already
            return
        exclusion = self.links.excluded.get(task.worker)
        if exclusion is not None and not may_come:
            text = (
                f"{task} finds no slot on another worker: {self.slots.shortage}; {exclusion.why}: start "
                "another worker, or have the network let the two connect"
            )
            self.fail(ErrorInfo(code=ResourceExhausted.code, text=text, task=str(task)), at, verdict=True)
        else:
            text = f"{self.slots.shortage}; waits {until - at:g} s at most"
            self._transition(task, "waiting for a slot", "coordinator", at, text, due=until)

    def slots_overdue(self, at: float) -> set[int]:
        """Lost slots whose tasks have waited until their deadline."""
        return {self.slot_of(task.key) for task in self.timers.overdue(at)}

    def wait_on(self, slot: int, until: float) -> None:
        """Extend the wait of the tasks of a slot."""
        waiting = [task.key for task in self.timers.waiting()]
        self.timers.prolong([key for key in waiting if self.slot_of(key) == slot], until)

    def give_up_waiting(self, at: float) -> None:
        """Fail the job if a task has waited for a slot until its deadline. While the job goes back nobody
        looks for slots."""
        if not self.fallback.under_way and (waiting := self.timers.overdue(at)):
            text = (
                f"{names_of(waiting)} found no free slot in time: "
                f"{self.slots.why_wanting(waiting[0].worker)}; "
                "start another worker ('minishuffle worker start'), or raise slot_timeout"
            )
            self.fail(ErrorInfo(code=ResourceExhausted.code, text=text, task=str(waiting[0])), at)

    def deployed(self, task: Subtask, at: float) -> int | None:
        """Deploy the next attempt of a task. Returns the worker that still has the previous one, or None."""
        last = task.worker if task.on_worker else None
        self._transition(task, "created", "coordinator", at, str(task))
        return last

    def _begin_next(self, task: Subtask, at: float) -> None:
        """Begin the next attempt from the state of the last one, whose account is closed."""
        key, worker = task.key, self.slots.placement[self.slot_of(task.key)]
        running_at = self.pause.since if self.pause.phase == "paused" else at
        resumption = task.begun_again(self.progress.next_attempt(task, running_at))
        resumption = self.moved_state.for_next(task, resumption, at)
        resumption = self.holders.for_next(key, resumption)._replace(poison=self.deaths.search(key))
        in_place = task.on_worker and task.worker == worker
        where = "in its slot" if in_place else f"in place of worker {task.worker}"
        self.subtasks.begin_next(task, worker, self.ends.round, resumption)
        self.replays.deployed(key)
        inputs, outputs = self.ends.channels_left(key)
        held = key in self.holders
        self.recoveries.deployed(key, at, inputs=inputs, outputs=outputs, snapshots=held)
        self._note(task, "task rescheduled", at, f"{task} to worker {worker}, {where}")

    def recovered(self, message: RecoverySteps, at: float) -> None:
        """Apply the recovery steps seen by workers; steps of replaced attempts are ignored."""
        for step in message.steps:
            task = self.subtasks.get((step.operator, step.index))
            if task is None or task.attempt != step.attempt or task.state in PENDING:
                continue
            done = self.recoveries.reached(task.key, step, at)
            if done is not None:
                self._note(task, done.kind, done.at, f"{task} {done.text}")

    # --- states ----------------------------------------------------------------------------------

    def _transition(
        self,
        task: Subtask,
        to: str,
        by: Actor,
        at: float,
        text: str,
        *,
        due: float = 0.0,
        reason: str = "",
        traceback: str = "",
    ) -> None:
        """Change the state of a task, with all effects of the transition.

        Args:
            due: time at which its timer ends, if one begins.
            reason: why it restarts; empty: because the last attempt ended.

        Raises:
            AssertionError: the transition is not in the table, or not for this actor.
        """
        effects = effects_of(TASK_TRANSITIONS, str(task), task.state, to, by)
        kind = "drained" if to == "canceled" and task.key in self.cancellations.drained else to
        kind = "task deployed" if to == "created" else f"task {kind}"
        change = _Change(task.state, to, at, kind, text, traceback, due, reason)
        self.subtasks.enter(task, to)
        self.progress.state_changed()
        for effect in effects:
            self._apply(effect, task, change)

    def _apply(self, effect: TaskEffect, task: Subtask, change: _Change) -> None:
        """Apply an effect of a task's transition."""
        key, at = task.key, change.at
        match effect:
            case "leave channels":
                self._leave_channels(task, change)
            case "count lost rows":
                self.progress.attempt_lost(task)
            case "move stage":
                self._move_stage(task, change)
            case "settle files":
                self.progress.manifest.settled(*key)
                if key not in self.holders:
                    task.has_begun()
            case "end attempt":
                self._end_attempt(task, change)
            case "end move":
                self.move.taken(task)
            case "interrupt":
                self._interrupt(task, change)
            case "block slot":
                self.slots.block(task.worker, self.slot_of(key))
            case "count restart":
                self._count_restart(task, change)
            case "begin timer":
                self.timers.begin(key, change.due)
            case "end timer":
                self.timers.end(key)
            case "begin first":
                task.begin_first(self.slots.placement[self.slot_of(key)], self.ends.round)
            case "begin next":
                self._begin_next(task, at)
            case "record event":
                self._note(task, change.kind, at, change.text, traceback=change.traceback)
            case "clear deaths":
                if self.deaths.finished(key):
                    self._widen(at)
            case "read inputs":
                self.ends.spend([*self.ends.finished(key), key])
            case "complete exchange":
                self._complete_exchange(task, at)
            case _:
                assert_never(effect)

    def _move_stage(self, task: Subtask, change: _Change) -> None:
        if self.stages.moved(task.key, change.before, change.to):
            stage = self.stages.stage_of(task.operator)
            text = f"{self.stages.name(stage)} runs again, version {self.stages.version(stage)}"
            self.history.note(change.at, "stage restarting", text)

    def _end_attempt(self, task: Subtask, change: _Change) -> None:
        """The end of its attempt is no longer awaited."""
        self.cancellations.ended(task.key)
        for each in (self.cut, self.savepoint):
            each.task_has_finished(task.key)
        task.ended(change.to)
        if self.savepoint.phase == "stopping":
            task.hold_nothing()
        self.recoveries.moved(task.key, change.to, change.at)

    def _interrupt(self, task: Subtask, change: _Change) -> None:
        """Interrupt a move or a pause that waits for an attempt, which ended before its work was done."""
        if self.move.is_aligning or change.to == "lost":
            self.cancellations.cancel(self.move.interrupt(change.at))
        if problem := self.pause.interrupted(task):
            self._give_pause_up(problem, change.at)
        if self.cut.phase == "taking" or self.cut.needs(task.key):
            self._give_cut_up(f"{task} ended before its state was written ({change.text})", change.at)
        savepoint = self.savepoint
        if savepoint.phase == "checking" or savepoint.is_passing or savepoint.needs(task.key):
            self._fail_savepoint(f"{task} ended before its state was written ({change.text})", change.at)

    def _count_restart(self, task: Subtask, change: _Change) -> None:
        self.recoveries.restarts_after(change.reason or change.before)
        if change.before == "finished" and self.progress.repeats_rows(task.operator):
            task.ended(change.to)
        self.recoveries.moved(task.key, change.to, change.at)

    def _leave_channels(self, task: Subtask, change: _Change) -> None:
        """Update the ends of channels when an attempt ends early, or a finished one is lost."""
        self.ends.reset_consumer(task.key)
        consumers = [self.subtasks[key] for key in self.graph.consumers(*task.key)]
        lost = change.to == "lost" and bool(consumers)
        unread = lost and all(each.state == WAITING for each in consumers)
        comes_again = change.before == "finished" or task.version < task.attempt or unread
        if task.operator in self.ends.repeating and comes_again:
            left = [each for each in consumers if not self.ends.read_between(task.key, each.key)]
            task.repeats("part" if any(is_stale(each, task) for each in left) else "all")
        for key in self.graph.producers(*task.key):
            if key[0] in self.ends.repeating and not self.ends.read_between(key, task.key):
                self.progress.repeats_in_part(key)

    def _note(self, task: Subtask, kind: str, at: float, text: str, *, traceback: str = "") -> None:
        self.history.note(
            at,
            kind,
            text,
            operator=task.operator,
            index=task.index,
            attempt=task.attempt,
            worker=task.worker,
            since=self.recoveries.since(task.key, at),
            traceback=traceback,
        )

    def _transition_job(self, to: str, by: Actor, at: float, text: str) -> None:
        """Change the state of the job, with all effects of the transition.

        Raises:
            AssertionError: the transition is not in the table, or not for this actor.
        """
        effects = effects_of(JOB_TRANSITIONS, f"job {self.id}", self.state, to, by)
        self.state = to
        for effect in effects:
            self._apply_to_job(effect, at, text)

    def _apply_to_job(self, effect: JobEffect, at: float, text: str) -> None:
        """Apply an effect of the job's transition."""
        match effect:
            case "record event":
                self.history.note(at, self.state, text)
            case "end pause":
                problem = "the job has ended" if self.terminal else f"the job is {self.state}"
                if self.savepoint.phase not in ("none", "stopping") and self.state != "running":
                    self._fail_savepoint(problem, at)
                if self.cut.under_way and self.state != "running":
                    self.cut.fail(self.id, problem)
                self.pause.end(problem if self.pause.under_way else "", tells=self.state == "running")
            case "stop tasks":
                self._stop_tasks(at)
            case "resume clocks":
                self.progress.sources.stand_still(at - self.pause.since)
                self.recoveries.resumed()
                self.subtasks.touch(*self.subtasks)
            case "end":
                self.ended_at = at
                self.links.end()
                self.cuts.end(self.id)
                if self.savepoint.phase == "stopping":
                    self.savepoint.end()
            case _:
                assert_never(effect)

    def _stop_tasks(self, at: float) -> None:
        """Cancel pending and waiting tasks, and give up restarts, moves and stages."""
        for task in self.subtasks.values():
            if task.state in PENDING or task.state == WAITING:
                self._transition(task, "canceled", "coordinator", at, "the job ends")
        self.stages.give_up()
        self.cancellations.give_up()
        self.fallback.give_up()

    def _advance(self, at: float) -> None:
        """Derive the places of slots, and the states of regions and of the job, from the states of the
        tasks."""
        self.cancellations.cancel(self.move.take_ready())
        self._arrive(at)
        for keys in self.cancellations.regions.take_ended():
            self._restart_together(keys, at)
        if self.fallback.is_read and self.cancellations.regions.at_rest:
            self._begin_again(at)
        self._read_again(at)
        self._replay(at)
        states = self.subtasks.states
        if self.state == "created" and not (states["created"] or self.timers or self.subtasks.all_wait):
            text = "all tasks run" if not states[WAITING] else "all tasks that are deployed run"
            self._transition_job("running", "coordinator", at, text)
        self._advance_pause(at)
        self._advance_savepoint(at)
        self._advance_cut(at)
        if not self.subtasks.all_ended:
            self._give_slots_back(at)
            return
        if self.stopping:
            causes = self.history.causes
            text = causes[0].text if causes else "cancelled"
            self._transition_job(_STOPPING[self.state], "coordinator", at, text)
        elif not self.terminal:
            end = "finished_with_loss" if self.progress.losses().certain else "finished"
            self._transition_job(end, "coordinator", at, f"after {at - self.submitted_at:.3f} s")

    # --- stages ----------------------------------------------------------------------------------

    @property
    def wants_slots(self) -> bool:
        """Whether a stage or a waiting subtask lacks only slots, or a kept slot was lost."""
        if self.stages.some_lack_slots or self.kept_slots_lost():
            return True
        return any(self.slot_of(task.key) in self.slots.vacant for task in self.first_due())

    def kept_slots_lost(self) -> list[int]:
        """Lost slots that running stages keep for the stages they wait for."""
        return sorted(self.stages.slots_kept() & self.slots.vacant)

    def first_due(self) -> list[Subtask]:
        """Waiting subtasks whose inputs are ready, to be deployed if their slots have workers."""
        if not self.first_outputs.is_used or not self.subtasks.states[WAITING] or self.pause.phase != "none":
            return []
        waiting = [task for task in self.subtasks.values() if task.state == WAITING]
        vertices = sorted({task.operator for task in waiting})
        due = self.first_outputs.due(vertices, self._has_something)
        return [task for task in waiting if task.operator in due]

    def _has_something(self, edge: int) -> bool:
        """Whether an edge is ready: it has its first buffer, or is complete if it is stored or has no
        rows."""
        source = self.graph.edges[edge].source
        tasks = self.subtasks.of(source)
        if all(task.state == "finished" for task in tasks):
            return True
        there = not self.first_outputs.is_stored(edge)
        return there and any(edge in task.readable and (task.runs or task.stays) for task in tasks)

    def deploys_ahead(self, leaving: Collection[int]) -> bool:
        """Let waiting vertices be deployed that have rows on these workers, so that no rows are lost in a
        move. False: there are none."""
        found = {
            self.graph.edges[edge].target
            for task in (self.subtasks.values() if self.first_outputs.is_used else ())
            if task.worker in leaving and (task.runs or task.stays)
            for edge in self.graph.outputs_of(task.operator)
            if not self.first_outputs.is_stored(edge)
            and self.subtasks.some_wait(self.graph.edges[edge].target)
        }
        self.first_outputs.go_ahead(found)
        return bool(found)

    def reads_ahead(self, worker: int) -> bool:
        """A worker retains much: let waiting vertices be deployed for which it retains rows. They might wait
        for rows that a producer there has no room to write. False: there are none."""
        return self.graph.settings.is_guaranteed and self.deploys_ahead([worker])

    def stages_due(self) -> list[DueStage]:
        """The stages that may be deployed now, if they have slots, in their order."""
        is_pausing = self.pause.phase != "none" and self.state != "created"
        return [] if self.stopping or self.terminal or is_pausing else self.stages.due()

    def tasks_of(self, stage: int) -> list[Subtask]:
        """The subtasks of a stage."""
        vertices = self.stages.order[stage].vertices
        return [task for task in self.subtasks.values() if task.operator in vertices]

    def stage_short(self, stage: int, why: str, at: float) -> None:
        """A due stage is not deployed, for the reason ``why``."""
        if self.stages.lacks_slots(stage, why):
            self.history.note(at, "stage waiting", self._why_waiting(stage))

    def stage_starts(self, stage: int, at: float) -> None:
        """A stage has its slots, and is about to be deployed."""
        self.stages.starts(stage)
        slots = {self.slot_of(task.key) for task in self.tasks_of(stage)}
        workers = ", ".join(map(str, sorted({self.slots.placement[slot] for slot in slots})))
        noun = "slot" if len(slots) == 1 else "slots"
        text = f"{self.stages.name(stage)} in {len(slots)} {noun} of workers {workers}"
        self.history.note(at, "stage deployed", text)

    def _give_slots_back(self, at: float) -> None:
        """Give back slots that neither running stages, nor stages they wait for, need."""
        if self.stopping or self.terminal:
            return
        there = set(range(len(self.slots.placement))) - self.slots.vacant - self.slots.moving.keys()
        idle = self.stages.take_idle(there) if self.stages.changed else []
        if idle:
            self.slots.give_back(idle)
            self.history.note(at, "slots given back", f"{len(idle)}, in which nothing is to run for now")

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        self.subtasks.validate()
        states = +self.subtasks.states
        if self.terminal:
            assert set(states) <= ENDED and self.ended_at >= self.submitted_at
        else:
            assert any(state not in ENDED for state in states)
        if self.state in ("finished", "finished_with_loss"):
            assert set(states) == {"finished"}
        assert bool(self.history.causes) == (self.state in ("failing", "failed"))
        self.timers.validate()
        assert not (self.stopping and (self.timers or states[WAITING]))
        never = sum(task.attempt == NOT_DEPLOYED for task in self.subtasks.values())
        assert never == states[WAITING] or self.stopping or self.terminal
        if self.stages.order and not (self.stopping or self.terminal):
            idle = set(range(len(self.slots.placement))) - self.slots.vacant - self.stages.slots_wanted()
            assert not idle, f"slots {sorted(idle)} are held for nothing"
        assert all(self.subtasks[key].runs for key in self.cancellations.drained)
        for task in self.subtasks.values():
            if task.runs and not self.released:
                assert task.on_worker and self.slot_of(task.key) not in self.slots.vacant
                assert task.worker == self.slots.placement[self.slot_of(task.key)]
            if not task.on_worker and task.state == "finished" and not (self.stopping or self.terminal):
                assert not self._restarts or not self.ends.needed(task.key)
        assert (self.state == "paused") == (self.pause.phase == "paused")
        assert self.pause.under_way or self.state != "pausing"
        assert self.fallback.under_way or not self.fallback.is_read
        passing = [each for each in (self.cut, self.savepoint) if each.is_passing]
        assert not passing or (len(passing) == 1 and self.state == "running" and self.pause.phase == "none")
        self.cuts.validate()
        self.slots.validate()
        self.stages.validate()
        self.ends.validate()
        self.holders.validate()
        self.history.validate()
