"""The worker's decisions, as a pure machine: control messages and events in, instructions out.

It knows which attempts are deployed here, which peers are connected, which partition requests wait
for what, and when to give a task up. The shell (``process``) carries instructions out and reports
what came of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from minishuffle.config import ClusterSettings
from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost, ShuffleError
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.ids import AttemptId, JobId, OperatorId, SubtaskId
from minishuffle.wire.clients import (
    BeginWrite,
    DropResult,
    EndWrite,
    ExpectUpstream,
    FreeRows,
    ServeResult,
)
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.handshake import HandshakeRefused
from minishuffle.wire.messages import (
    Acknowledge,
    AskDial,
    CancelTasks,
    ControlMessage,
    DeployTasks,
    Dial,
    ErrorInfo,
    ReleaseJob,
    Shutdown,
    TaskAttempt,
    TaskSpec,
    TaskStateChanged,
    WorkerAddress,
    WorkerLost,
)
from minishuffle.worker.registry import (
    ChannelKey,
    ChannelPhase,
    InputRegistry,
    PartitionRegistry,
    Waiting,
)

__all__ = [
    "AbandonTask",
    "Acknowledged",
    "Attach",
    "CancelTask",
    "CloseLinks",
    "ConnectLocal",
    "DialPeer",
    "Exit",
    "FailTask",
    "ForgetJob",
    "Instruction",
    "KeepResults",
    "Refuse",
    "Release",
    "RequestPartition",
    "Send",
    "ServeStream",
    "StartTask",
    "WorkerState",
    "attempt_id",
]


# --- instructions ---------------------------------------------------------------------------------
#
# What the worker's decisions ask of its shell.


def attempt_id(job: str, spec: TaskSpec | TaskAttempt) -> AttemptId:
    """The attempt that a message about ``job`` names."""
    return AttemptId(SubtaskId(JobId(job), OperatorId(spec.operator), spec.index), spec.attempt)


@dataclass(frozen=True, slots=True)
class StartTask:
    """Build the gates and partitions of one task of ``message`` and start its thread."""

    message: DeployTasks
    spec: TaskSpec


@dataclass(frozen=True, slots=True)
class CancelTask:
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class AbandonTask:
    """It still runs user code: close its paths and write it off."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class FailTask:
    """Have the task fail with this error, in order with what its channel delivered."""

    channel: ChannelKey
    error: ShuffleError


@dataclass(frozen=True, slots=True)
class Release:
    """Free the partitions, gates and pools of these attempts."""

    attempts: list[AttemptId]


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """The job has ended everywhere: no external client of it is expected any more."""

    job: str


@dataclass(frozen=True, slots=True)
class Send:
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class DialPeer:
    peer: WorkerAddress


@dataclass(frozen=True, slots=True)
class CloseLinks:
    """Let go of the link to that worker if it is of that epoch or an earlier one."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RequestPartition:
    """Send a PartitionRequest for that channel over the link to ``worker``."""

    worker: int
    channel: ChannelKey
    request: PartitionRequest


@dataclass(frozen=True, slots=True)
class ConnectLocal:
    """Attach a channel to what an attempt here writes for its edge."""

    channel: ChannelKey
    producer: AttemptId
    generation: int


@dataclass(frozen=True, slots=True)
class Attach:
    """Answer a peer's PartitionRequest with what that attempt writes for the edge.

    ``link`` is the peer's worker id.
    """

    link: int
    request: PartitionRequest
    producer: AttemptId


@dataclass(frozen=True, slots=True)
class Refuse:
    link: int
    channel: int
    error: ShuffleError


@dataclass(frozen=True, slots=True)
class KeepResults:
    """An external client wants to read what a sink here kept, or has read it."""

    message: ServeResult | FreeRows | DropResult


@dataclass(frozen=True, slots=True)
class ServeStream:
    """An external client wants to write into a task here, or has written."""

    message: BeginWrite | ExpectUpstream | EndWrite


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The coordinator has applied the reports up to that number."""

    number: int


@dataclass(frozen=True, slots=True)
class Exit:
    """Stop this worker; ``reason`` is empty for an orderly shutdown."""

    reason: str


Instruction: TypeAlias = (
    StartTask
    | CancelTask
    | AbandonTask
    | FailTask
    | Release
    | ForgetJob
    | Send
    | DialPeer
    | CloseLinks
    | RequestPartition
    | ConnectLocal
    | Attach
    | Refuse
    | ServeStream
    | KeepResults
    | Acknowledged
    | Exit
)

# --- state ----------------------------------------------------------------------------------------

DIAL_RETRY_SECONDS: Final = 0.2
PEER_SECONDS_MAX: Final = 10.0
"""How long a connection to a peer is tried for before the tasks that need it fail."""


@dataclass(slots=True)
class _TaskEntry:
    spec: TaskSpec
    terminal: bool = False


@dataclass(slots=True)
class _Peer:
    """Another worker, by the coordinator's word; a link changes nothing of that."""

    address: WorkerAddress
    up: bool = False
    """There is a link to the process of that epoch."""
    dialing: bool = False
    """A dial of this process is under way; another's link would take the place of this one's."""
    dial_at: float | None = None
    """When to dial again; None while a dial is under way or none is wanted."""
    give_up_at: float | None = None
    failure: str = ""
    """Why the last dial of this time failed, as the end of a sentence."""


class WorkerState:
    """One registration of a worker.

    Invariants: an attempt that is terminal has no cancel deadline and no channel in the registry; no
    channel waits for a link to a peer that is up.
    """

    def __init__(self, settings: ClusterSettings, worker: int, epoch: int, term: int) -> None:
        self.worker = worker
        self.epoch = epoch
        self.term = term
        self.abandoned = 0
        self.inputs = InputRegistry()
        self._settings = settings
        self._tasks: dict[AttemptId, _TaskEntry] = {}
        self._newest: dict[SubtaskId, int] = {}
        """The highest attempt of each subtask that was ever deployed here."""
        self._canceling: dict[AttemptId, float] = {}
        """When attempts that were cancelled are abandoned; the earliest first."""
        self._partitions = PartitionRegistry()
        self._waiting: dict[tuple[int, int | ChannelKey], Waiting] = {}
        """Requests that cannot be answered yet, by link and channel, in the order of their deadlines."""
        self._peers: dict[int, _Peer] = {}
        self._trying: dict[int, _Peer] = {}
        """Peers that a link is wanted to."""

    # --- control messages ------------------------------------------------------------------------

    def handle(self, message: ControlMessage, now: float) -> list[Instruction]:
        """A message of the coordinator. One of a lower term is ignored."""
        term: int = getattr(message, "term", self.term)
        if term < self.term:
            return []
        self.term = term
        match message:
            case DeployTasks():
                return self._deploy(message, now)
            case CancelTasks():
                return self._cancel(message, now)
            case ReleaseJob():
                return self._release(message)
            case Dial(peer=peer):
                return self._dial(peer, now)
            case WorkerLost(worker=self.worker, epoch=epoch, reason=reason) if epoch >= self.epoch:
                return [Exit(f"the coordinator declared this worker lost: {reason}; start it again")]
            case WorkerLost(worker=worker, epoch=epoch):
                return [CloseLinks(worker, epoch)]
            case BeginWrite() | ExpectUpstream() | EndWrite():
                return [ServeStream(message)]
            case ServeResult() | FreeRows() | DropResult():
                return [KeepResults(message)]
            case Acknowledge(number=number):
                return [Acknowledged(number)]
            case Shutdown():
                return [Exit("")]
            case _:
                return []

    def _deploy(self, message: DeployTasks, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for address in message.workers:
            instructions += self._announce(address, now)
        for named in message.attempts:
            self._partitions.learn(attempt_id(message.job, named))
        new: list[tuple[AttemptId, TaskSpec]] = []
        for spec in message.tasks:
            key = attempt_id(message.job, spec)
            if self._newest.get(key.subtask, 0) >= spec.attempt:
                continue
            self._newest[key.subtask] = spec.attempt
            self._tasks[key] = _TaskEntry(spec)
            self._partitions.add(key, spec.outputs)
            self._partitions.learn(key)
            new.append((key, spec))
            instructions.append(StartTask(message, spec))
        for key, spec in new:
            for gate in spec.inputs:
                for producer, attempt, worker in message.channels(gate):
                    request = PartitionRequest(
                        0, message.job, gate.edge, producer, spec.index, attempt, spec.attempt, 1, 0
                    )
                    channel = ChannelKey(key, gate.edge, producer)
                    instructions += self._connect(channel, worker, request, now)
        return [*instructions, *self._serve_waiting()]

    def _connect(
        self, channel: ChannelKey, worker: int, request: PartitionRequest, now: float
    ) -> list[Instruction]:
        """Ask for what a channel reads, as soon as its producer can be asked."""
        self.inputs.want(channel, worker, request)
        if worker == self.worker:
            self.inputs.move(channel, request.generation, ChannelEvent.REQUEST)
            return self._requested(worker, request, channel, now)
        if self._peers[worker].up:
            self.inputs.move(channel, request.generation, ChannelEvent.REQUEST)
            return [RequestPartition(worker, channel, request)]
        return self._want_link(worker, now)

    def _named(self, message: CancelTasks | ReleaseJob) -> list[AttemptId]:
        """The attempts here that the message is about."""
        if message.attempts:
            named = (attempt_id(message.job, each) for each in message.attempts)
            return [key for key in named if key in self._tasks]
        return [key for key in self._tasks if key.subtask.job == message.job]

    def _cancel(self, message: CancelTasks, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for key in self._named(message):
            if not self._tasks[key].terminal and key not in self._canceling:
                self._canceling[key] = now + self._settings.task_cancel_timeout
                instructions.append(CancelTask(key))
        return instructions

    def _release(self, message: ReleaseJob) -> list[Instruction]:
        released = list(dict.fromkeys(self._named(message)))
        for key in released:
            self._end(key)
            self._partitions.remove(key, self._tasks.pop(key).spec.outputs)
        if message.attempts:
            return [Release(released)]
        self._partitions.forget(message.job)
        self._newest = {key: value for key, value in self._newest.items() if key.job != message.job}
        return [Release(released), ForgetJob(message.job)]

    # --- what came of instructions ---------------------------------------------------------------

    def task_running(self, key: AttemptId) -> list[Instruction]:
        entry = self._tasks.get(key)
        if entry is None or entry.terminal:
            return []
        return [Send(self._state_message(key, "running"))]

    def task_ended(
        self,
        key: AttemptId,
        state: str,
        error: ErrorInfo | None,
        result: bytes,
        counters: TaskCounters,
        *,
        traffic: bytes = b"",
    ) -> list[Instruction]:
        """The attempt's thread came to its end; a second report changes nothing."""
        entry = self._tasks.get(key)
        if entry is None or entry.terminal:
            return []
        self._end(key)
        ended = self._state_message(key, state, error, result, counters)
        return [Send(ended.model_copy(update={"traffic": traffic}))]

    def _end(self, key: AttemptId) -> None:
        """The attempt is terminal, or is released: it reads nothing any more."""
        self._tasks[key].terminal = True
        self._canceling.pop(key, None)
        self.inputs.remove(key)
        self._drop_waiting(lambda each: each.channel is not None and each.channel.attempt == key)

    def _state_message(
        self,
        key: AttemptId,
        state: str,
        error: ErrorInfo | None = None,
        result: bytes = b"",
        counters: TaskCounters | None = None,
    ) -> TaskStateChanged:
        return TaskStateChanged(
            term=self.term,
            job=key.subtask.job,
            operator=key.subtask.operator,
            index=key.subtask.index,
            attempt=key.attempt,
            state=state,
            error=error,
            result=result,
            counters=counters or TaskCounters(),
        )

    # --- peers -----------------------------------------------------------------------------------

    def announced(self, worker: int) -> int:
        """The newest epoch of that worker that the coordinator named; 0 if it named none."""
        peer = self._peers.get(worker)
        return peer.address.epoch if peer is not None else 0

    def _announce(self, address: WorkerAddress, now: float) -> list[Instruction]:
        """The coordinator says where a worker is. A later epoch is another process."""
        worker, epoch = address.worker, address.epoch
        if worker == self.worker or epoch <= self.announced(worker):
            return []
        self._stop_trying(worker)
        self._link_gone(worker)
        self._peers[worker] = _Peer(address)
        return self._want_link(worker, now) if self.inputs.wants(worker) else []

    def _want_link(self, worker: int, now: float) -> list[Instruction]:
        if worker in self._trying:
            return []
        peer = self._trying[worker] = self._peers[worker]
        peer.give_up_at = now + PEER_SECONDS_MAX
        peer.failure = ""
        if peer.dialing:
            return []
        if self.worker < worker:
            return [self._dial_peer(peer)]
        return [Send(AskDial(term=self.term, worker=self.worker, target=worker))]

    @staticmethod
    def _dial_peer(peer: _Peer) -> Instruction:
        peer.dialing, peer.dial_at = True, None
        return DialPeer(peer.address)

    def _stop_trying(self, worker: int) -> None:
        peer = self._trying.pop(worker, None)
        if peer is not None:
            peer.dial_at = peer.give_up_at = None

    def _dial(self, address: WorkerAddress, now: float) -> list[Instruction]:
        if address.worker == self.worker:
            return []
        instructions = self._announce(address, now)
        if not self._peers[address.worker].up:
            instructions += self._want_link(address.worker, now)
        return instructions

    def peer_up(self, worker: int) -> list[Instruction]:
        """A link to that worker, of the epoch that the coordinator announced, replaces any before."""
        peer = self._peers[worker]
        self._link_gone(worker)
        self._stop_trying(worker)
        peer.up, peer.dialing = True, False
        wanted = self.inputs.request_wanted(worker)
        return [RequestPartition(worker, channel, request) for channel, request in wanted]

    def peer_down(self, worker: int) -> list[Instruction]:
        """The link of that worker that was up last is gone."""
        self._peers[worker].up = False
        self._link_gone(worker)
        return []

    def _link_gone(self, worker: int) -> None:
        """What was asked over the link, either way, names channels that no other link knows."""
        self._drop_waiting(lambda each: each.link == worker)
        self.inputs.link_down(worker)

    def dial_failed(self, dialed: WorkerAddress, error: ShuffleError, now: float) -> list[Instruction]:
        """Dial again shortly, or fail what needs that peer. A dial of an epoch that is past says nothing.

        Who answers there may change: a worker that was registered a moment ago does not know its id
        before it has read so, and another's old link may not be gone yet.
        """
        worker = dialed.worker
        peer = self._peers[worker]
        if dialed.epoch != peer.address.epoch:
            return []
        peer.dialing = False
        if peer.up:
            return []
        passing = error.retriable or (isinstance(error, HandshakeRefused) and error.reason == "peer")
        if passing and peer.give_up_at is not None and now < peer.give_up_at:
            peer.dial_at = now + DIAL_RETRY_SECONDS
            peer.failure = f": {error}"
            return []
        return self._give_peer_up(worker, error)

    def _give_peer_up(self, worker: int, error: ShuffleError) -> list[Instruction]:
        self._stop_trying(worker)
        return [FailTask(channel, error) for channel in self.inputs.fail_wanted(worker)]

    # --- requests --------------------------------------------------------------------------------

    def partition_requested(self, link: int, request: PartitionRequest, now: float) -> list[Instruction]:
        """A peer wants a partition: granted now, later, or never.

        ``link`` is the peer's worker id.
        """
        return self._requested(link, request, None, now)

    def partition_cancelled(self, link: int, channel: int) -> None:
        """The peer takes a request back that was not answered."""
        self._waiting.pop((link, channel), None)

    def _requested(
        self, link: int, request: PartitionRequest, channel: ChannelKey | None, now: float
    ) -> list[Instruction]:
        """Requests of peers and of this worker's own channels stand in one line."""
        waiting = Waiting(link, request, channel, now + self._settings.partition_request_timeout)
        answer = self._answer(waiting)
        if answer is not None:
            return [answer]
        self._waiting[link, channel or request.channel] = waiting
        return []

    def _answer(self, waiting: Waiting) -> Instruction | None:
        """What becomes of a request; None: it waits."""
        request, channel = waiting.request, waiting.channel
        try:
            producer = self._partitions.grant(request)
        except ShuffleError as error:
            return self._refused(waiting, error)
        if producer is None:
            return None
        if channel is None:
            return Attach(waiting.link, request, producer)
        self.inputs.move(channel, request.generation, ChannelEvent.ATTACH)
        return ConnectLocal(channel, producer, request.generation)

    def _refused(self, waiting: Waiting, error: ShuffleError) -> Instruction:
        if waiting.channel is None:
            return Refuse(waiting.link, waiting.request.channel, error)
        self.inputs.move(waiting.channel, waiting.request.generation, ChannelEvent.FAIL)
        return FailTask(waiting.channel, error)

    def _serve_waiting(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        for number, waiting in list(self._waiting.items()):
            answer = self._answer(waiting)
            if answer is not None:
                del self._waiting[number]
                instructions.append(answer)
        return instructions

    def _drop_waiting(self, gone: Callable[[Waiting], bool]) -> None:
        for number in [number for number, waiting in self._waiting.items() if gone(waiting)]:
            del self._waiting[number]

    # --- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`handle_timer` wants to be called; None for not at all."""
        times = [time for peer in self._trying.values() for time in (peer.dial_at, peer.give_up_at)]
        times.append(next(iter(self._canceling.values()), None))
        times.append(next((waiting.deadline for waiting in self._waiting.values()), None))
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> list[Instruction]:
        return [*self._abandon_stuck(now), *self._refuse_expired(now), *self._chase_peers(now)]

    def _abandon_stuck(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for key in [key for key, deadline in self._canceling.items() if now >= deadline]:
            self._end(key)
            self.abandoned += 1
            instructions.append(AbandonTask(key))
            instructions.append(Send(self._state_message(key, "abandoned")))
        if instructions and self.abandoned > self._settings.abandoned_max:
            limit = self._settings.abandoned_max
            instructions.append(
                Exit(f"{self.abandoned} tasks ran on after their cancel, at most {limit} may")
            )
        return instructions

    def _refuse_expired(self, now: float) -> list[Instruction]:
        expired = [number for number, waiting in self._waiting.items() if now >= waiting.deadline]
        late = [self._waiting.pop(number) for number in expired]
        return [self._refused(each, self._partitions.late(each.request, self.worker)) for each in late]

    def _chase_peers(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for worker, peer in list(self._trying.items()):
            if peer.give_up_at is not None and now >= peer.give_up_at:
                text = f"no connection to worker {worker} within {PEER_SECONDS_MAX:g} s{peer.failure}"
                instructions.extend(self._give_peer_up(worker, PeerLost(text)))
            elif peer.dial_at is not None and now >= peer.dial_at:
                instructions.append(self._dial_peer(peer))
        return instructions

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        self.inputs.validate()
        self._partitions.validate({key: entry.spec.outputs for key, entry in self._tasks.items()})
        assert self.worker not in self._peers
        live = {key for key, entry in self._tasks.items() if not entry.terminal}
        assert set(self._canceling) <= live
        assert list(self._canceling.values()) == sorted(self._canceling.values())
        assert all(key.attempt <= self._newest[key.subtask] for key in self._tasks)
        local = {each.channel for each in self._waiting.values() if each.channel is not None}
        for key, entry in self.inputs.phases():
            assert key.attempt in live
            is_local = entry.worker == self.worker
            assert not (entry.phase is ChannelPhase.WANTED and (is_local or self._peers[entry.worker].up))
            assert (key in local) == (is_local and entry.phase is ChannelPhase.REQUESTED)
        deadlines = [each.deadline for each in self._waiting.values()]
        assert deadlines == sorted(deadlines)
        for worker, peer in self._peers.items():
            assert (self._trying.get(worker) is peer) == (peer.give_up_at is not None)
            assert peer.dial_at is None or (peer.give_up_at is not None and not peer.dialing)
            assert not (peer.up and (peer.dialing or worker in self._trying))
        assert set(self._trying) <= set(self._peers)
