"""The worker's decisions, as a pure machine: control messages and events in, steps out.

It knows which attempts are deployed here, which peers are connected, which partition requests wait
for what, and when to give a task up. The shell (``process``) carries each step out and reports what came
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from minishuffle import limits
from minishuffle.config import ClusterSettings
from minishuffle.counters import TaskCounters
from minishuffle.errors import (
    PartitionLost,
    PeerLost,
    PeerSuspected,
    RemoteProtocolError,
    ShuffleError,
    Superseded,
    clipped,
)
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import AttemptId, OperatorId, PartitionId, SubtaskId
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
    AskDial,
    CancelTasks,
    ConsumersEnded,
    ControlMessage,
    DeployTasks,
    Dial,
    DivideTasks,
    ErrorInfo,
    HostLook,
    Leaving,
    PauseTasks,
    PeerSuspicion,
    PrepareJob,
    Probe,
    Probed,
    Registered,
    ReleaseJob,
    Shutdown,
    TaskSpec,
    TasksRestarted,
    UnlinkedPeer,
    WorkerAddress,
    WorkerLost,
    WritePosition,
)
from minishuffle.wire.reports import EndsRead
from minishuffle.worker.channels.dialing import Dialing
from minishuffle.worker.channels.registry import (
    ChannelKey,
    Progress,
)
from minishuffle.worker.instructions import (
    AbandonTask,
    Acknowledged,
    AnswerQuestion,
    Attach,
    CancelTask,
    CloseLinks,
    CloseSubpartitions,
    ConnectLocal,
    DialPeer,
    Exit,
    FailChannel,
    Fence,
    FindAddress,
    ForgetJob,
    Instruction,
    KeepResults,
    LoadPrograms,
    LookThere,
    MoveTasks,
    ProbePeer,
    Refuse,
    Release,
    Report,
    RequestPartition,
    Send,
    ServeStream,
    SetPause,
    StartTask,
    WorkerStep,
    attempt_id,
    state_change,
)
from minishuffle.worker.tasks.tasktable import TaskTable

__all__ = ["LEAVE_GRACE_SECONDS", "WorkerState"]

NO_WORKER: Final = 0
"""The worker of a producer that is not deployed yet; a channel that needs it sends no request."""
GOOD_LINK_SECONDS_MIN: Final = 1.0
"""Shortest time that a link must have been up before it counts as good."""

LEAVE_GRACE_SECONDS: Final = 1.2
"""How much longer than ``drain_timeout`` a worker waits for Shutdown: its tasks end meanwhile."""


class WorkerState:
    """One registration of a worker.

    Invariants: an attempt that is terminal has no channel in the registry; no channel waits for a link to a
    peer that is up or lost.

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
        self.abandoned = self.stuck = 0
        """Tasks abandoned so far, and how many of their threads still run."""
        self.suspicions = 0
        """How often a peer has answered no Ping."""
        self.inputs = InputRegistry()
        self._settings = settings
        self._progress = progress
        self._tasks = TaskTable()
        self._prepared: dict[str, dict[int, bytes]] = {}
        """By job and operator: programs that came ahead of need."""
        self.partitions = PartitionRegistry()
        self._reattachments = Reattachments()
        self._peers = Dialing(worker, max(GOOD_LINK_SECONDS_MIN, 2.0 * settings.suspect_after))
        self.leaving = False
        """The process was sent SIGTERM."""
        self._leave_by: float | None = None
        """When it ends although the coordinator has not sent Shutdown."""

    def held(self) -> list[AttemptId]:
        """Every attempt that was deployed here and not released."""
        return self._tasks.held()

    def jobs(self) -> list[str]:
        """Jobs to release when they have ended."""
        return sorted(self._prepared.keys() | self._tasks.jobs())

    def tolerates_silence(self, silence: float) -> bool:
        """Whether to keep the link to a peer that has been silent for ``silence`` seconds.

        If every task here waits for its consumers, closing the link would only lose rows: the peer gets as
        much time as the coordinator gives it, ``heartbeat_timeout``."""
        return self._tasks.all_wait() and silence < self._settings.heartbeat_timeout

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

    def still_run(self, threads: int) -> None:
        """That many threads of abandoned tasks have not ended."""
        self.stuck = threads

    def leave(self, now: float) -> WorkerStep:
        """The process was sent SIGTERM: the coordinator has the tasks move, and says when to end."""
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
                return self._restarted(message, now)
            case ConsumersEnded(job=job, ends=ends):
                return [CloseSubpartitions(attempt_id(job, each), each.edge, each.consumers) for each in ends]
            case PauseTasks(job=job, barrier=barrier, paused=paused):
                return [SetPause(job, barrier, paused)]
            case DivideTasks(job=job, barrier=barrier, moving=moving):
                return [MoveTasks(job, barrier, frozenset((each.operator, each.index) for each in moving))]
            case Dial(peer=peer):
                return self._dial(peer, now)
            case WorkerLost(worker=self.worker, epoch=epoch, reason=reason) if epoch >= self.epoch:
                return [Exit(f"the coordinator declared this worker lost: {reason}; start it again")]
            case WorkerLost():
                return self._worker_lost(message, now)
            case BeginWrite() | ExpectUpstream() | EndWrite():
                return [ServeStream(message)]
            case ServeResult() | FreeRows() | DropResult():
                return [KeepResults(message)]
            case Acknowledge():
                return [Acknowledged(message.number, message.refused, message.journaled)]
            case Probe(peers=peers):
                return self._probe(peers)
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
        instructions = [each for address in message.workers for each in self._dial(address, now)]
        if message.programs:
            self._prepared[message.job] = message.programs
            instructions.append(LoadPrograms(message.job, list(message.programs.values())))
        return instructions

    def _deploy(self, message: DeployTasks, now: float) -> list[Instruction]:
        if not message.programs:
            message = message.model_copy(update={"programs": self._prepared.get(message.job, {})})
        instructions = [each for address in message.workers for each in self._announce(address, now)]
        for named in message.attempts:
            instructions += self._learn(attempt_id(message.job, named))
        new: list[tuple[AttemptId, TaskSpec]] = []
        for spec in message.tasks:
            key = attempt_id(message.job, spec)
            if not self._tasks.add(key, spec, waits=message.settings.get("on_unavailable") == "wait"):
                continue
            self.partitions.add(key, spec.outputs, repeats=bool(spec.base))
            instructions += self._learn(key)
            new.append((key, spec))
            instructions.append(StartTask(message, spec))
        for key, spec in new:
            instructions += self._connect(message, key, spec, now)
        return [*instructions, *self._serve_waiting(now)]

    def _connect(self, message: DeployTasks, key: AttemptId, spec: TaskSpec, now: float) -> list[Instruction]:
        """Ask for what a task reads, as soon as its producers can be asked."""
        instructions: list[Instruction] = []
        repairs = message.settings.get("restart_strategy") != "none"
        for gate in spec.inputs:
            bases, later = message.bases(gate.operator), set(gate.later)
            for producer, attempt, worker in message.channels(gate):
                partition = PartitionId(key.subtask.job, gate.edge, producer)
                request = PartitionRequest(partition, spec.index, attempt, spec.attempt)
                channel = ChannelKey(key, gate.edge, producer)
                subtask = SubtaskId(key.subtask.job, OperatorId(gate.operator), producer)
                is_there = producer not in later
                entry = ChannelEntry(
                    subtask,
                    worker if is_there else NO_WORKER,
                    request,
                    repairs,
                    base=bases.get(producer, 0),
                )
                self.inputs.want(channel, entry)
                instructions += self._request(channel, entry, now) if is_there else []
        return instructions

    def _restarted(self, message: TasksRestarted, now: float) -> list[Instruction]:
        """Channels that read from earlier attempts are attached to the new ones, and what reads for earlier
        attempts here is let go."""
        instructions: list[Instruction] = []
        for address in message.workers:
            instructions += self._announce(address, now)
        for placed in message.tasks:  # first: what reads for an earlier attempt is not attached once more
            instructions += self._learn(attempt_id(message.job, placed))
        for placed in message.tasks:
            for channel in self.inputs.readers(attempt_id(message.job, placed).subtask):
                upstream = Upstream(placed.attempt, placed.worker, placed.base)
                instructions += self._reattach(channel, upstream, now)
        return [*instructions, *self._serve_waiting(now)]

    def _learn(self, attempt: AttemptId) -> list[Instruction]:
        """The coordinator speaks of an attempt: what reads here for earlier ones is let go."""
        return [Fence(producer, edge, attempt) for producer, edge in self.partitions.learn(attempt)]

    def _worker_lost(self, message: WorkerLost, now: float) -> list[Instruction]:
        """Channels that read from the lost worker wait until the coordinator says where they continue."""
        worker, epoch = message.worker, message.epoch
        instructions: list[Instruction] = [CloseLinks(worker, epoch)]
        if self._peers.declare_lost(worker, epoch):
            error = PeerLost(f"worker {worker} was declared lost")
            instructions += self._abandon_worker(worker, error, now)
        return instructions

    def _named(self, message: CancelTasks | ReleaseJob) -> list[AttemptId]:
        """The attempts here that the message is about."""
        if message.attempts:
            named = (attempt_id(message.job, each) for each in message.attempts)
            return [key for key in named if key in self._tasks]
        return [key for key in self._tasks.held() if key.subtask.job == message.job]

    def _cancel(self, message: CancelTasks, now: float) -> list[Instruction]:
        by = now + self._settings.task_cancel_timeout
        return [CancelTask(key) for key in self._named(message) if self._tasks.cancel(key, by)]

    def _release(self, message: ReleaseJob) -> list[Instruction]:
        released = list(dict.fromkeys(self._named(message)))
        for key in released:
            self._end(key)
            self.partitions.remove(key, self._tasks.remove(key).outputs)
        if message.attempts:
            return [Release(released)]
        self._prepared.pop(message.job, None)
        self.partitions.forget(message.job)
        self._tasks.forget(message.job)
        return [Release(released), ForgetJob(message.job)]

    # --- what came of instructions ---------------------------------------------------------------

    def task_running(self, key: AttemptId) -> WorkerStep:
        if not self._tasks.runs(key):
            return self._step()
        return self._step([Report(state_change(key, "running"))])

    def first_record(self, key: AttemptId, now: float) -> WorkerStep:
        """The attempt has passed its first batch on."""
        self._reattachments.first_record(key, now)
        return self._step()

    def task_ended(
        self,
        key: AttemptId,
        state: str,
        error: ErrorInfo | None,
        result: bytes,
        counters: TaskCounters,
        *,
        traffic: bytes = b"",
        positions: bytes = b"",
        writes: Sequence[WritePosition] = (),
    ) -> WorkerStep:
        """The attempt's thread came to its end; a second report changes nothing."""
        if not self._tasks.runs(key):
            return self._step()
        self._end(key, finished=state == "finished")
        ended = state_change(key, state, error, result, counters=counters)
        found = {"traffic": traffic, "positions": positions, "writes": list(writes)}
        return self._step([Report(ended.model_copy(update=found)), *self._tell_lost(key)])

    def partition_lost(self, key: AttemptId, error: PartitionLost) -> WorkerStep:
        """The stored partition of an attempt cannot be read; this is reported once the attempt has
        finished."""
        if key not in self._tasks:
            return self._step()
        self._tasks.lose(key, error)
        return self._step(self._tell_lost(key))

    def _tell_lost(self, key: AttemptId) -> list[Instruction]:
        error = self._tasks.take_lost(key)
        return [Report(state_change(key, "failed", error))] if error is not None else []

    def _end(self, key: AttemptId, *, finished: bool = False) -> None:
        """The attempt is terminal: it reads nothing any more."""
        self._tasks.end(key, finished=finished)
        for channel in self.inputs.remove(key):
            self.partitions.take_back(self.worker, channel)

    # --- channels --------------------------------------------------------------------------------

    def channel_event(
        self, channel: ChannelKey, generation: int, event: ChannelEvent, now: float
    ) -> WorkerStep:
        """Something happened to that generation of an input channel."""
        return self._step(self._channel_event(channel, generation, event, now))

    def _channel_event(
        self, channel: ChannelKey, generation: int, event: ChannelEvent, now: float
    ) -> list[Instruction]:
        before = self.inputs.get(channel)
        live = before is not None and before.phase in LIVE_PHASES
        entry = self.inputs.move(channel, generation, event)
        if entry is None:
            return []
        match event:
            case ChannelEvent.END:
                read = EndsRead(attempt=channel.attempt, edge=channel.edge, producers=[channel.producer])
                return [Report(read)]
            case ChannelEvent.ATTACH:
                self.inputs.answered(channel)
                self._attached(channel, entry, now)
            case ChannelEvent.FAIL if live:
                self._repair_later(channel, entry, now)
            case ChannelEvent.DRAIN if entry.phase is ChannelPhase.WANTED:
                return self._request(channel, entry, now)
            case ChannelEvent.DRAIN if entry.retry_at is not None and now >= entry.retry_at:
                return self._renew(channel, entry.upstream, now)
        return []

    def _attached(self, channel: ChannelKey, entry: ChannelEntry, now: float) -> None:
        producer = AttemptId(entry.producer, entry.request.producer_attempt)
        self._reattachments.attached(channel.attempt, producer, now)

    def _request(self, channel: ChannelKey, entry: ChannelEntry, now: float) -> list[Instruction]:
        """Ask for what a channel wants, as soon as that worker can be asked."""
        worker, request = entry.worker, entry.request
        if worker == self.worker:
            self.inputs.move(channel, request.generation, ChannelEvent.REQUEST)
            return self._requested(worker, request, channel, now)
        if self._peers.is_lost(worker):
            return [self._fail(channel, PeerLost(f"worker {worker} was declared lost"), now)]
        if self._peers.is_up(worker):
            self.inputs.move(channel, request.generation, ChannelEvent.REQUEST)
            return [RequestPartition(worker, channel, request, entry.base)]
        self._peers.need(worker, now)
        return self._want_link(worker, now)

    def _renew(self, channel: ChannelKey, upstream: Upstream, now: float) -> list[Instruction]:
        """The next generation reads from ``upstream``, now or when the channel is drained."""
        drain_by = now + self._settings.reconnect_timeout
        entry = self.inputs.renew(channel, upstream, drain_by, self._progress(channel.attempt))
        return self._request(channel, entry, now) if entry.phase is ChannelPhase.WANTED else []

    def _reattach(self, channel: ChannelKey, upstream: Upstream, now: float) -> list[Instruction]:
        """The coordinator has named the attempt to read from; an older word changes nothing, nor does any
        once the end was read."""
        entry = self.inputs[channel]
        if entry.phase is ChannelPhase.ENDED or upstream == entry.upstream:
            return []
        if upstream.attempt < entry.upstream.attempt:
            return []
        instructions: list[Instruction] = []
        if entry.phase in (ChannelPhase.REQUESTED, ChannelPhase.ATTACHED):
            text = f"attempt {upstream.attempt} of subtask {entry.producer} takes the place of its attempt "
            error = Superseded(text + str(entry.request.producer_attempt))
            instructions.append(self._fail(channel, error, now))
        return instructions + self._renew(channel, upstream, now)

    def _fail(self, channel: ChannelKey, error: ShuffleError, now: float) -> FailChannel:
        """Nothing more comes of the current generation, which had not failed before."""
        entry = self.inputs[channel]
        generation = entry.request.generation
        self.partitions.take_back(self.worker, channel)
        self.inputs.move(channel, generation, ChannelEvent.FAIL)
        self._repair_later(channel, entry, now)
        return FailChannel(channel, generation, error)

    def _repair_later(self, channel: ChannelKey, entry: ChannelEntry, now: float) -> None:
        """Request the same attempt again in a while, unless it is known that this is of no use."""
        if entry.worker == self.worker or not self._peers.is_lost(entry.worker):
            self.inputs.retry_later(channel, now)

    def _repair(self, now: float) -> list[Instruction]:
        """Request what failed a while ago."""
        instructions: list[Instruction] = []
        for channel in self.inputs.take_retries(now):
            instructions += self._renew(channel, self.inputs[channel].upstream, now)
        return instructions

    def _fence_stuck(self, now: float) -> list[Instruction]:
        """Give up tasks that are stuck although the next attempt of a producer waits for them.

        Only time in one and the same call of the user's code counts. A task that waits for its consumers does
        what it should: to fence it would lose what it has read, and its next attempt would wait for the same
        consumers. A slow one gets there in the end, and so does a task that waits for another input.
        """
        instructions: list[Instruction] = []
        for channel in self.inputs.undrained(now):
            key, seconds = channel.attempt, self._settings.reconnect_timeout
            if not self._tasks.runs(key):  # another channel of it was looked at before
                continue
            progress, entry = self._progress(key), self.inputs[channel]
            if progress is None or progress != entry.progress:
                self.inputs.put_off(channel, progress, now + seconds)
                continue
            unread = f"what is left of edge {channel.edge} from subtask {entry.producer}"
            waits = f"whose attempt {entry.upstream.attempt} waits"
            error = stuck_error(self._tasks[key], seconds, f"{unread}, {waits}")
            instructions += self._abandon(key, error)
        return instructions

    # --- peers -----------------------------------------------------------------------------------

    def announced(self, worker: int) -> int:
        """The newest epoch of that worker that the coordinator named; 0 if it named none."""
        return self._peers.announced(worker)

    def address(self, worker: int) -> WorkerAddress:
        """Where that worker is, as the coordinator has announced."""
        return self._peers.address(worker)

    def refusal(self, worker: int, epoch: int) -> str | None:
        """Why no link is made to that worker in that epoch; None: it may be."""
        announced = self._peers.announced(worker)
        if epoch < announced:
            return f"worker {worker} has epoch {announced} by now"
        if epoch == announced and self._peers.is_lost(worker):
            return f"worker {worker} was declared lost"
        return None

    def _announce(self, address: WorkerAddress, now: float) -> list[Instruction]:
        """The coordinator gives a worker's address. A later epoch is a new process, without any state of the
        process before it."""
        worker = address.worker
        if not self._peers.announce(address):
            return []
        error = PeerLost(f"worker {worker} has epoch {address.epoch} by now")
        return self._abandon_worker(worker, error, now)

    def _abandon_worker(self, worker: int, error: ShuffleError, now: float) -> list[Instruction]:
        """A process is gone for good: nothing is requested of it again."""
        self.partitions.drop_link(worker)
        instructions: list[Instruction] = []
        for channel in self.inputs.of_worker(worker):
            entry = self.inputs[channel]
            if entry.phase in LIVE_PHASES:
                instructions.append(self._fail(channel, error, now))
            self.inputs.give_up(channel)
        return instructions

    def _want_link(self, worker: int, now: float) -> list[Instruction]:
        return [self._reach(worker)] if self._peers.want(worker, now) else []

    def _reach(self, worker: int) -> Instruction:
        if self.worker < worker:
            return DialPeer(self._peers.address(worker))
        return Send(AskDial(term=self.term, worker=self.worker, target=worker))

    def _dial(self, address: WorkerAddress, now: float) -> list[Instruction]:
        worker = address.worker
        if worker == self.worker:
            return []
        instructions = self._announce(address, now)
        return instructions if self._peers.is_up(worker) else instructions + self._want_link(worker, now)

    def peer_up(self, worker: int, now: float) -> WorkerStep:
        """A link to that worker, of the epoch that the coordinator announced, replaces any before."""
        instructions = self._link_gone(worker, PeerLost(f"worker {worker} connected anew"), now)
        instructions += self._suspect(worker, False)
        self._peers.link_up(worker, now)
        for channel in self.inputs.wanting(worker):
            instructions += self._request(channel, self.inputs[channel], now)
        return self._step(instructions)

    def peer_down(self, worker: int, error: ShuffleError, now: float) -> WorkerStep:
        """The link of that worker that was up last is gone. Until the coordinator's verdict the channels of a
        peer that is suspected are repaired like any others."""
        self._peers.link_down(worker, error, now)
        if self._jobs_reading(worker):
            self._peers.need(worker, now)
        if not isinstance(error, PeerSuspected):
            self._restore(worker, now)
            return self._step(self._link_gone(worker, error, now))
        suspicion = self._suspect(worker, True) + self._link_gone(worker, error, now)
        # At once, whoever needs the link: a process that was stopped finds it in its socket when it goes on.
        return self._step(suspicion + self._want_link(worker, now))

    def _restore(self, worker: int, now: float) -> None:
        """Until the verdict, a link that is gone is dialed as long as there are tasks here: if none of them
        reads over it, one may serve."""
        if self._tasks:
            self._peers.restore(worker, now)

    def _suspect(self, worker: int, suspected: bool) -> list[Instruction]:
        """Tell the coordinator what is new."""
        if not self._peers.suspect(worker, suspected):
            return []
        self.suspicions += suspected
        epoch = self._peers.announced(worker)
        return [Send(PeerSuspicion(term=self.term, worker=worker, epoch=epoch, suspected=suspected))]

    def _link_gone(self, worker: int, error: ShuffleError, now: float) -> list[Instruction]:
        """Requests on the link, in both directions, are dropped: other links do not know their channels."""
        self.partitions.drop_link(worker)
        return [self._fail(channel, error, now) for channel in self.inputs.reading(worker)]

    def _jobs_reading(self, worker: int) -> list[str]:
        """The jobs of tasks here that have something to read from a worker, now or when it can be asked."""
        keys = self.inputs.of_worker(worker)
        unread = (key for key in keys if self.inputs[key].phase is not ChannelPhase.ENDED)
        return sorted({key.attempt.subtask.job for key in unread})

    def unlinked(self, now: float) -> list[UnlinkedPeer]:
        """The peers that channels here need a link to and have none, or none that is known to be good."""
        found = []
        for address, seconds, why in self._peers.unlinked(now):
            jobs = self._jobs_reading(address.worker)
            if not jobs:
                self._peers.spare(address.worker)
                continue
            found.append(
                UnlinkedPeer(
                    worker=address.worker,
                    epoch=address.epoch,
                    seconds=seconds,
                    why=clipped(why, limits.LINK_ERROR_CHARS_MAX),
                    jobs=list(jobs),
                )
            )
        return found

    def _probe(self, peers: Sequence[WorkerAddress]) -> list[Instruction]:
        """Peers that a link leads to are reached; the others are dialed."""
        linked = [each for each in peers if self.announced(each.worker) == each.epoch]
        linked = [each for each in linked if self._peers.is_up(each.worker)]
        answers = [Probed(term=self.term, worker=each.worker, epoch=each.epoch) for each in linked]
        return [*map(Send, answers), *(ProbePeer(each) for each in peers if each not in linked)]

    def dial_failed(self, dialed: WorkerAddress, error: ShuffleError, now: float) -> WorkerStep:
        """A dial came to nothing: it is tried again, or what needs that peer fails."""
        given_up = self._peers.dial_failed(dialed, error, now)
        return self._step(self._give_peer_up(dialed.worker, error, now) if given_up else [])

    def _give_peer_up(self, worker: int, error: ShuffleError, now: float) -> list[Instruction]:
        if error.retriable:
            self._restore(worker, now)
        return [self._fail(channel, error, now) for channel in self.inputs.wanting(worker)]

    # --- requests --------------------------------------------------------------------------------

    def partition_requested(self, link: int, request: PartitionRequest, now: float) -> WorkerStep:
        """A peer wants a partition: granted now, later, or never.

        ``link`` is the peer's worker id.
        """
        return self._step(self._requested(link, request, None, now))

    def partition_cancelled(self, link: int, channel: int) -> WorkerStep:
        """The peer takes a request back that was not answered."""
        self.partitions.take_back(link, channel)
        return self._step()

    def _requested(
        self, link: int, request: PartitionRequest, channel: ChannelKey | None, now: float
    ) -> list[Instruction]:
        """Requests of peers and of this worker's own channels stand in one line."""
        waiting = Waiting(link, request, channel, now + self._settings.partition_request_timeout)
        try:
            producer = self.partitions.request(waiting)
        except ShuffleError as error:
            return [self._answer(waiting, error, now)]
        return [self._answer(waiting, producer, now)] if producer is not None else []

    def _answer(self, waiting: Waiting, answer: AttemptId | ShuffleError, now: float) -> Instruction:
        """Attach who asked to that attempt, or say why not."""
        request, channel = waiting.request, waiting.channel
        if isinstance(answer, ShuffleError):
            if channel is None:
                return Refuse(waiting.link, request.channel, answer)
            return self._fail(channel, answer, now)
        if channel is None:
            return Attach(waiting.link, request, answer)
        entry = self.inputs.move(channel, request.generation, ChannelEvent.ATTACH)
        assert entry is not None
        self._attached(channel, entry, now)
        return ConnectLocal(channel, answer, request.generation, entry.base)

    def _serve_waiting(self, now: float) -> list[Instruction]:
        return [self._answer(waiting, answer, now) for waiting, answer in self.partitions.take_answers()]

    # --- time ------------------------------------------------------------------------------------

    def _next_deadline(self) -> float | None:
        """When :meth:`handle_timer` wants to be called; None for not at all."""
        times = [self._peers.next_deadline(), self.inputs.next_deadline(), self._leave_by]
        times += [self._reattachments.next_deadline(), self.partitions.next_deadline()]
        times.append(self._tasks.next_deadline())
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> WorkerStep:
        stuck = self.stuck
        instructions = [*self._abandon_uncancelled(now), *self._fence_stuck(now)]
        limit = self._settings.abandoned_max
        if self.stuck > max(stuck, limit):
            instructions.append(Exit(f"{self.stuck} tasks were abandoned, at most {limit} may be"))
        if self._leave_by is not None and now >= self._leave_by:
            self._leave_by = None
            instructions.append(Exit(""))
        instructions += self._refuse_expired(now)
        instructions += self._repair(now)
        instructions += map(Send, self._reattachments.take(self.term, now))
        return self._step(instructions + self._chase_peers(now))

    def _abandon_uncancelled(self, now: float) -> list[Instruction]:
        """Give up tasks that still run although they were cancelled long ago."""
        instructions: list[Instruction] = []
        for key in self._tasks.overdue(now):
            instructions += self._abandon(key, None)
        return instructions

    def _abandon(self, key: AttemptId, error: ErrorInfo | None) -> list[Instruction]:
        self._end(key)
        self.abandoned += 1
        self.stuck += 1
        return [AbandonTask(key), Report(state_change(key, "abandoned", error))]

    def _refuse_expired(self, now: float) -> list[Instruction]:
        return [self._answer(each, why, now) for each, why in self.partitions.take_late(now, self.worker)]

    def _chase_peers(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for worker, error in self._peers.due(now):
            instructions += [self._reach(worker)] if error is None else self._give_peer_up(worker, error, now)
        return instructions

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        self.inputs.validate()
        self._peers.validate()
        self._tasks.validate()
        self.partitions.validate({key: self._tasks[key].outputs for key in self._tasks.held()})
        local = {each.channel for each in self.partitions.waiting() if each.channel is not None}
        for key, entry in self.inputs.phases():
            assert self._tasks.runs(key.attempt)
            is_local = entry.worker == self.worker
            if entry.phase is ChannelPhase.WANTED:
                assert not is_local
                there = self._peers.is_up(entry.worker) or self._peers.is_lost(entry.worker)
                assert entry.worker == NO_WORKER or not there
            assert (key in local) == (is_local and entry.phase is ChannelPhase.REQUESTED)
