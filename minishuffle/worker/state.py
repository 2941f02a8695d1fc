"""The worker's decisions, as a pure state machine: control messages and events in, steps out.

It knows the deployed attempts, the connected peers, the partition requests that wait and their reasons, and
the deadlines of tasks. The shell (``process``) carries out each step and reports the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from minishuffle.config import ClusterSettings
from minishuffle.counters import TaskCounters
from minishuffle.errors import (
    PartitionLost,
    RemoteProtocolError,
    ShuffleError,
)
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import AttemptId, is_holder
from minishuffle.wire.clients import (
    BeginWrite,
    DropResult,
    EndWrite,
    ExpectUpstream,
    FreeRows,
    ServeResult,
)
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.inquiries import WorkerAsked
from minishuffle.wire.messages import (
    Acknowledge,
    Advertise,
    CancelTasks,
    CheckFolder,
    ConsumersEnded,
    ControlMessage,
    CutComplete,
    DeployTasks,
    Dial,
    DivideTasks,
    ErrorInfo,
    HolderSpec,
    HostLook,
    Leaving,
    PauseTasks,
    PrepareJob,
    Probe,
    ReleaseJob,
    Shutdown,
    Step,
    TakeSnapshots,
    TaskSpec,
    TasksRestarted,
    WorkerAddress,
    WorkerLost,
    WriteState,
)
from minishuffle.wire.registration import Registered
from minishuffle.wire.reports import SnapshotsHeld
from minishuffle.worker.channels.attaching import Attaching
from minishuffle.worker.channels.registry import (
    ChannelKey,
    Progress,
)
from minishuffle.worker.instructions import (
    AbandonTask,
    Acknowledged,
    AnswerQuestion,
    CancelTask,
    CloseSubpartitions,
    Exit,
    FindAddress,
    ForgetJob,
    Instruction,
    KeepResults,
    KeptState,
    LoadPrograms,
    LookThere,
    MoveTasks,
    Release,
    Report,
    SaveTasks,
    Send,
    ServeStream,
    SetPause,
    StartHolder,
    StartTask,
    WorkerStep,
    attempt_id,
    holder_id,
    state_change,
)
from minishuffle.worker.tasks.tasktable import TaskTable

__all__ = ["LEAVE_GRACE_SECONDS", "WorkerState"]

NOTHING_KEPT: Final = KeptState()
LEAVE_GRACE_SECONDS: Final = 1.2
"""How much longer than ``drain_timeout`` a worker waits for Shutdown: its tasks end meanwhile."""


class WorkerState:
    """One registration of a worker.

    Args:
        progress: see :meth:`Attempt.progress`, of an attempt that runs here.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        worker: int,
        epoch: int,
        term: int,
        progress: Callable[[AttemptId], Progress],
    ) -> None:
        self.worker = worker
        self.epoch = epoch
        self.term = term
        self._settings = settings
        self.tasks = TaskTable()
        self.channels = Attaching(settings, worker, lambda: self.term, self.tasks, progress)
        self.leaving = False
        """The process was sent SIGTERM."""
        self._leave_by: float | None = None
        """When it ends although the coordinator has not sent Shutdown."""

    def tolerates_silence(self, silence: float) -> bool:
        """Whether to keep the link to a peer that has been silent for ``silence`` seconds.

        If every task here waits for its consumers, closing the link would only lose rows: the peer gets as
        much time as the coordinator gives it, ``heartbeat_timeout``."""
        return self.tasks.all_wait() and silence < self._settings.heartbeat_timeout

    def taken_back(self, message: Registered) -> None:
        """A coordinator, which may be another one, has registered this worker again.

        Raises:
            RemoteProtocolError: it is one that was replaced, or means another worker.
        """
        if message.term < self.term:
            raise RemoteProtocolError(
                f"a coordinator of term {message.term} answered, and this worker obeys term {self.term}"
            )
        if (message.worker, message.epoch) != (self.worker, self.epoch):
            raise RemoteProtocolError(f"the coordinator took worker {self.worker} for another one")
        self.term = message.term

    def leave(self, now: float) -> WorkerStep:
        """The process got SIGTERM: the coordinator moves its tasks, and says when to end."""
        seconds = self._settings.drain_timeout
        self.leaving, self._leave_by = True, now + seconds + LEAVE_GRACE_SECONDS
        return self._step([Send(Leaving(term=self.term, seconds=seconds))])

    def _step(self, messages: Sequence[Instruction] = ()) -> WorkerStep:
        return WorkerStep(messages, self._next_deadline())

    # --- control messages ------------------------------------------------------------------------

    def handle(self, message: ControlMessage, now: float) -> WorkerStep:
        """Handle a message of the coordinator; messages of a lower term are ignored."""
        term: int = getattr(message, "term", self.term)
        if term < self.term:
            return self._step()
        self.term = term
        return self._step(self._handle(message, now))

    def _handle(self, message: ControlMessage, now: float) -> list[Instruction]:
        match message:
            case DeployTasks():
                return self._deploy(message, now)
            case PrepareJob():
                return self._prepare(message, now)
            case CancelTasks():
                return self._cancel(message, now)
            case ReleaseJob():
                return self._release(message)
            case TasksRestarted():
                return self.channels.restarted(message, now)
            case ConsumersEnded(job=job, ends=ends):
                return [CloseSubpartitions(attempt_id(job, each), each.edge, each.consumers) for each in ends]
            case PauseTasks(job=job, barrier=barrier, paused=paused):
                return [SetPause(job, barrier, paused)]
            case CheckFolder() | WriteState() | CutComplete() | TakeSnapshots():
                return [SaveTasks(message)]
            case DivideTasks(job=job, barrier=barrier, moving=moving):
                return [MoveTasks(job, barrier, frozenset((each.operator, each.index) for each in moving))]
            case Dial(peer=peer):
                return self.channels.dial(peer, now)
            case WorkerLost(worker=self.worker, epoch=epoch, reason=reason) if epoch >= self.epoch:
                return [Exit(f"the coordinator declared this worker lost: {reason}; start it again")]
            case WorkerLost():
                return self.channels.worker_lost(message, now)
            case BeginWrite() | ExpectUpstream() | EndWrite():
                return [ServeStream(message)]
            case ServeResult() | FreeRows() | DropResult():
                return [KeepResults(message)]
            case Acknowledge():
                return [Acknowledged(message.number, message.refused, message.journaled)]
            case Probe(peers=peers):
                return self.channels.probe(peers)
            case Advertise(toward=toward):
                return [FindAddress(toward)]
            case HostLook():
                return [LookThere(message)]
            case WorkerAsked():
                return [AnswerQuestion(message)]
            case Shutdown():
                return [Exit("")]
            case _:
                return []

    def _prepare(self, message: PrepareJob, now: float) -> list[Instruction]:
        """Keep what a takeover would need, and make the links that it would use."""
        instructions = [each for address in message.workers for each in self.channels.dial(address, now)]
        if message.programs:
            self.tasks.prepare(message.job, message.programs)
            instructions.append(LoadPrograms(message.job, list(message.programs.values())))
        return instructions

    def _deploy(self, message: DeployTasks, now: float) -> list[Instruction]:
        if not message.programs:
            message = message.model_copy(update={"programs": self.tasks.prepared(message.job)})
        named = [attempt_id(message.job, each) for each in message.attempts]
        instructions = self.channels.learn_named(message.workers, named, now)
        waits = message.settings.get("on_unavailable") == "wait"
        is_guaranteed = message.settings.get("guarantee", "loss") != "loss"
        new: list[tuple[AttemptId, TaskSpec]] = []
        for spec in message.tasks:
            key = attempt_id(message.job, spec)
            if not self.tasks.add(key, spec, waits=waits, is_guaranteed=is_guaranteed):
                continue
            instructions += self.channels.add(key, self.tasks[key])
            new.append((key, spec))
            instructions.append(StartTask(message, spec))
        for key, spec in new:
            instructions += self.channels.connect(message, key, spec, now)
        for held in message.holders:
            instructions += self._hold(message.job, held, now)
        return [*instructions, *self.channels.serve_waiting(now)]

    def _hold(self, job: str, held: HolderSpec, now: float) -> list[Instruction]:
        """Begin to hold the snapshots of a task."""
        key = holder_id(job, held)
        spec = self.tasks.add_holder(key, held)
        if spec is None:
            return []
        instructions = [*self.channels.add(key, spec), StartHolder(key, held)]
        return instructions + self.channels.connect_holder(key, held, now)

    def _named(self, message: CancelTasks | ReleaseJob) -> list[AttemptId]:
        """The attempts here that the message is about."""
        if message.attempts:
            named = (attempt_id(message.job, each) for each in message.attempts)
            return [key for key in named if key in self.tasks]
        return [key for key in self.tasks.held() if key.subtask.job == message.job]

    def _cancel(self, message: CancelTasks, now: float) -> list[Instruction]:
        """Holders stay until they are released: what they hold may be asked for."""
        by = now + self._settings.task_cancel_timeout
        tasks = [key for key in self._named(message) if not is_holder(key.subtask.operator)]
        job_ends = not message.attempts
        return [CancelTask(key, job_ends) for key in tasks if self.tasks.cancel(key, by)]

    def _release(self, message: ReleaseJob) -> list[Instruction]:
        released = list(dict.fromkeys(self._named(message)))
        for key in released:
            self._end(key)
            self.channels.partitions.release(key, self.tasks.remove(key).outputs)
        if message.attempts:
            return [Release(released)]
        self.channels.partitions.forget(message.job)
        self.tasks.forget(message.job)
        return [Release(released), ForgetJob(message.job)]

    # --- what came of instructions ---------------------------------------------------------------

    def task_running(self, key: AttemptId, *, state_lost: str = "") -> WorkerStep:
        """The attempt is about to read its inputs; ``state_lost``: why without the state kept for it."""
        if not self.tasks.runs(key):
            return self._step()
        self.channels.state_taken(key)
        running = state_change(key, "running").model_copy(update={"state_lost": state_lost})
        return self._step([Report(running)])

    def recovered(self, key: AttemptId, step: Step, now: float) -> WorkerStep:
        """The attempt has come to that step of its recovery, by one channel if it has any."""
        self.channels.reattachments.reached(step, key, now)
        return self._step()

    def task_ended(
        self,
        key: AttemptId,
        outcome: str,
        error: ErrorInfo | None,
        result: bytes,
        counters: TaskCounters,
        *,
        traffic: bytes = b"",
        positions: bytes = b"",
        state: KeptState = NOTHING_KEPT,
        dealt: Sequence[tuple[int, int, int]] = (),
    ) -> WorkerStep:
        """The attempt's thread came to its end; a second report changes nothing."""
        if not self.tasks.runs(key):
            return self._step()
        self._end(key, finished=outcome == "finished")
        if state.bytes:
            self.channels.keep_state(key)
        ended = state_change(key, outcome, error, result, counters=counters)
        kept = {"moved": state.moved, "state_bytes": state.bytes, "state_lost": state.lost}
        said = {"traffic": traffic, "positions": positions, "dealt": list(dealt)}
        ended = ended.model_copy(update={**said, **kept})
        return self._step([Report(ended), *self._tell_lost(key)])

    def snapshots_held(self, fact: SnapshotsHeld) -> WorkerStep:
        """A holder has all snapshots that are to be kept, or takes no more."""
        if not self.tasks.runs(fact.attempt):
            return self._step()
        if fact.problem:
            self._end(fact.attempt)
        return self._step([Report(fact)])

    def partition_lost(self, key: AttemptId, error: PartitionLost) -> WorkerStep:
        """The stored partition of an attempt cannot be read; this is reported once the attempt has
        finished."""
        if key not in self.tasks:
            return self._step()
        self.tasks.lose(key, error)
        return self._step(self._tell_lost(key))

    def _tell_lost(self, key: AttemptId) -> list[Instruction]:
        error = self.tasks.take_lost(key)
        return [Report(state_change(key, "failed", error))] if error is not None else []

    def _end(self, key: AttemptId, *, finished: bool = False) -> None:
        """The attempt is terminal: it reads nothing any more."""
        self.tasks.end(key, finished=finished)
        self.channels.end(key, listens=finished and self.tasks.listens(key))

    # --- channels --------------------------------------------------------------------------------

    def channel_event(
        self, channel: ChannelKey, generation: int, event: ChannelEvent, now: float
    ) -> WorkerStep:
        """Something happened to that generation of an input channel."""
        return self._step(self.channels.channel_event(channel, generation, event, now))

    # --- peers -----------------------------------------------------------------------------------

    def peer_up(self, worker: int, now: float) -> WorkerStep:
        """A link to that worker, of the epoch that the coordinator announced, replaces any before."""
        return self._step(self.channels.peer_up(worker, now))

    def peer_down(self, worker: int, error: ShuffleError, now: float) -> WorkerStep:
        """The link of that worker that was up last is gone."""
        return self._step(self.channels.peer_down(worker, error, now))

    def dial_failed(self, dialed: WorkerAddress, error: ShuffleError, now: float) -> WorkerStep:
        """A dial came to nothing: it is tried again, or what needs that peer fails."""
        return self._step(self.channels.dial_failed(dialed, error, now))

    def partition_requested(self, link: int, request: PartitionRequest, now: float) -> WorkerStep:
        """A peer, whose worker id ``link`` is, wants a partition: granted now, later, or never."""
        return self._step(self.channels.requested(link, request, None, now))

    def partition_cancelled(self, link: int, channel: int) -> WorkerStep:
        """The peer takes a request back that was not answered."""
        self.channels.partitions.take_back(link, channel)
        return self._step()

    # --- time ------------------------------------------------------------------------------------

    def _next_deadline(self) -> float | None:
        """When :meth:`handle_timer` wants to be called; None for not at all."""
        times = [self.tasks.next_deadline(), self.channels.next_deadline(), self._leave_by]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> WorkerStep:
        stuck = self.tasks.stuck
        instructions = self._abandon_stuck(now)
        limit = self._settings.abandoned_max
        if self.tasks.stuck > max(stuck, limit):
            instructions.append(Exit(f"{self.tasks.stuck} tasks were abandoned, at most {limit} may be"))
        if self._leave_by is not None and now >= self._leave_by:
            self._leave_by = None
            instructions.append(Exit(""))
        return self._step(instructions + self.channels.due(now))

    def _abandon_stuck(self, now: float) -> list[Instruction]:
        """Give up tasks that still run although they were cancelled long ago, and stuck tasks, if other
        tasks wait for them."""
        instructions: list[Instruction] = []
        for key in self.tasks.overdue(now):
            instructions += self._abandon(key, None)
        for key, error in self.channels.stuck(now):
            instructions += self._abandon(key, error)
        return instructions

    def _abandon(self, key: AttemptId, error: ErrorInfo | None) -> list[Instruction]:
        self.tasks.abandon(key)
        self.channels.end(key)
        return [AbandonTask(key), Report(state_change(key, "abandoned", error))]

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        self.tasks.validate()
        self.channels.validate()
