"""The worker's decisions, as a pure machine: control messages and events in, instructions out.

It knows which attempts are deployed here, which peers are connected, which partition requests wait
for what, and when to give a task up. The shell (``process``) carries instructions out and reports
what came of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from minishuffle.config import ClusterSettings
from minishuffle.counters import TaskCounters
from minishuffle.errors import PartitionNotFound, PeerLost, ShuffleError
from minishuffle.ids import AttemptId, JobId, OperatorId, PartitionId, SubtaskId
from minishuffle.wire.clients import DropResult, EndWrite, ExpectUpstream, FreeRows, ServeResult
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.handshake import HandshakeRefused
from minishuffle.wire.messages import (
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

__all__ = [
    "AbandonTask",
    "Attach",
    "CancelTask",
    "ChannelKey",
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
class ChannelKey:
    """One input channel of an attempt here."""

    attempt: AttemptId
    edge: int
    producer: int


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
    """Connect a channel with what an attempt here writes for its edge."""

    channel: ChannelKey
    producer: AttemptId


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
    """A program that is no worker wants to read what a sink here kept, or has read it."""

    message: ServeResult | FreeRows | DropResult


@dataclass(frozen=True, slots=True)
class ServeStream:
    """A program that is no worker wants to write into a task here, or has written."""

    message: ExpectUpstream | EndWrite


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
    | Exit
)

# --- state ----------------------------------------------------------------------------------------

DIAL_RETRY_SECONDS: Final = 0.2
PEER_SECONDS_MAX: Final = 10.0
"""How long a connection to a peer is tried for before the tasks that need it fail."""


@dataclass(slots=True)
class _TaskEntry:
    spec: TaskSpec
    over: bool = False
    cancel_deadline: float | None = None


@dataclass(slots=True)
class _Peer:
    address: WorkerAddress
    up: bool = False
    dial_at: float | None = None
    """When to dial (again); None while a dial is under way or none is wanted."""
    give_up_at: float | None = None
    failure: str = ""
    """Why the last dial of this time failed, as the end of a sentence."""
    wanted: list[tuple[ChannelKey, PartitionRequest]] = field(default_factory=list)


@dataclass(slots=True)
class _Waiting:
    """A peer's request for a partition that is not registered yet."""

    link: int
    request: PartitionRequest
    deadline: float


class WorkerState:
    """One registration of a worker. Invariant: a task that is over has no cancel deadline."""

    def __init__(self, settings: ClusterSettings, worker: int, epoch: int, term: int) -> None:
        self.worker = worker
        self.epoch = epoch
        self.term = term
        self.abandoned = 0
        self._settings = settings
        self._tasks: dict[AttemptId, _TaskEntry] = {}
        self._newest: dict[SubtaskId, int] = {}
        """The highest attempt of each subtask that was ever deployed here."""
        self._partitions: dict[PartitionId, dict[int, AttemptId]] = {}
        """Registered partitions by attempt: several attempts of a producer may be here at once."""
        self._peers: dict[int, _Peer] = {}
        self._announced: dict[int, int] = {}
        """The epoch of each other worker by the coordinator's word."""
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        """By link and channel, in the order of their deadlines."""

    # --- control messages ------------------------------------------------------------------------

    def handle(self, message: ControlMessage, now: float) -> list[Instruction]:
        """A message of the coordinator. One of another term is ignored."""
        if getattr(message, "term", self.term) != self.term:
            return []
        match message:
            case DeployTasks():
                return self._deploy(message, now)
            case CancelTasks():
                return self._cancel(message, now)
            case ReleaseJob():
                return self._release(message)
            case Dial(peer=peer):
                return self._dial(peer, now)
            case WorkerLost(worker=worker, epoch=epoch):
                return [CloseLinks(worker, epoch)]
            case ExpectUpstream() | EndWrite():
                return [ServeStream(message)]
            case ServeResult() | FreeRows() | DropResult():
                return [KeepResults(message)]
            case Shutdown():
                return [Exit("")]
            case _:
                return []

    def _deploy(self, message: DeployTasks, now: float) -> list[Instruction]:
        for address in message.workers:
            self._meet(address)
        starts: list[Instruction] = []
        connects: list[Instruction] = []
        for spec in message.tasks:
            key = attempt_id(message.job, spec)
            if self._newest.get(key.subtask, 0) >= spec.attempt:
                continue
            self._newest[key.subtask] = spec.attempt
            self._tasks[key] = _TaskEntry(spec)
            for output in spec.outputs:
                partition = PartitionId(key.subtask.job, output.edge, spec.index)
                self._partitions.setdefault(partition, {})[spec.attempt] = key
            starts.append(StartTask(message, spec))
            connects.extend(self._connect_inputs(message, key, spec, now))
        return [*starts, *connects, *self._serve_waiting()]

    def _meet(self, address: WorkerAddress) -> None:
        if address.worker == self.worker:
            return
        self._announced[address.worker] = max(address.epoch, self.announced(address.worker))
        peer = self._peers.get(address.worker)
        if peer is None or peer.address.epoch < address.epoch:
            self._peers[address.worker] = _Peer(address)
        elif peer.address.epoch == address.epoch:
            # Its link may be up already; what that told has no port.
            peer.address = address

    def _connect_inputs(
        self, message: DeployTasks, key: AttemptId, spec: TaskSpec, now: float
    ) -> list[Instruction]:
        instructions: list[Instruction] = []
        for gate in spec.inputs:
            for producer, attempt, worker in message.channels(gate):
                channel_key = ChannelKey(key, gate.edge, producer)
                if worker == self.worker:
                    writer = TaskAttempt(operator=gate.operator, index=producer, attempt=attempt)
                    instructions.append(ConnectLocal(channel_key, attempt_id(message.job, writer)))
                    continue
                request = PartitionRequest(
                    0, message.job, gate.edge, producer, spec.index, attempt, spec.attempt, 1, 0
                )
                instructions.extend(self._request(worker, channel_key, request, now))
        return instructions

    def _request(
        self, worker: int, channel: ChannelKey, request: PartitionRequest, now: float
    ) -> list[Instruction]:
        peer = self._peers[worker]
        if peer.up:
            return [RequestPartition(worker, channel, request)]
        peer.wanted.append((channel, request))
        return self._want_link(worker, peer, now)

    def _want_link(self, worker: int, peer: _Peer, now: float) -> list[Instruction]:
        if peer.give_up_at is not None:
            return []
        peer.give_up_at = now + PEER_SECONDS_MAX
        peer.failure = ""
        if self.worker < worker:
            return [DialPeer(peer.address)]
        return [Send(AskDial(term=self.term, worker=self.worker, target=worker))]

    def _dial(self, address: WorkerAddress, now: float) -> list[Instruction]:
        self._meet(address)
        peer = self._peers[address.worker]
        if peer.up or peer.give_up_at is not None:
            return []
        return self._want_link(address.worker, peer, now)

    def _named(self, message: CancelTasks | ReleaseJob) -> list[AttemptId]:
        """The attempts here that the message is about."""
        if message.attempts:
            named = (attempt_id(message.job, each) for each in message.attempts)
            return [key for key in named if key in self._tasks]
        return [key for key in self._tasks if key.subtask.job == message.job]

    def _cancel(self, message: CancelTasks, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for key in self._named(message):
            entry = self._tasks[key]
            if not entry.over and entry.cancel_deadline is None:
                entry.cancel_deadline = now + self._settings.task_cancel_timeout
                instructions.append(CancelTask(key))
        return instructions

    def _release(self, message: ReleaseJob) -> list[Instruction]:
        released = self._named(message)
        for key in released:
            for output in self._tasks.pop(key).spec.outputs:
                partition = PartitionId(key.subtask.job, output.edge, key.subtask.index)
                attempts = self._partitions[partition]
                del attempts[key.attempt]
                if not attempts:
                    del self._partitions[partition]
        gone = set(released)
        for peer in self._peers.values():
            peer.wanted = [wanted for wanted in peer.wanted if wanted[0].attempt not in gone]
        if message.attempts:
            return [Release(released)]
        self._newest = {key: value for key, value in self._newest.items() if key.job != message.job}
        return [Release(released), ForgetJob(message.job)]

    # --- what came of instructions ---------------------------------------------------------------

    def task_running(self, key: AttemptId) -> list[Instruction]:
        entry = self._tasks.get(key)
        if entry is None or entry.over:
            return []
        return [Send(self._state_message(key, "running"))]

    def task_ended(
        self,
        key: AttemptId,
        state: str,
        error: ErrorInfo | None,
        result: bytes,
        counters: TaskCounters,
    ) -> list[Instruction]:
        """The attempt's thread came to its end; a second report changes nothing."""
        entry = self._tasks.get(key)
        if entry is None or entry.over:
            return []
        entry.over = True
        entry.cancel_deadline = None
        return [Send(self._state_message(key, state, error, result, counters))]

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
        return self._announced.get(worker, 0)

    def peer_up(self, address: WorkerAddress) -> list[Instruction]:
        """A link to that worker is established (whoever dialed); ``address`` may have no port.

        A worker that came back with its old id may dial before its new epoch is heard of from the
        coordinator. A link of an older epoch leads to a process that is written off.
        """
        peer = self._peers.setdefault(address.worker, _Peer(address))
        if address.epoch < peer.address.epoch:
            return []
        if address.epoch > peer.address.epoch:
            peer.address = address
        peer.up = True
        peer.dial_at = peer.give_up_at = None
        # Requests that came over an older link name channels that this one does not know.
        self._forget_waiting(address.worker)
        wanted, peer.wanted = peer.wanted, []
        return [RequestPartition(address.worker, channel, request) for channel, request in wanted]

    def peer_down(self, worker: int) -> list[Instruction]:
        peer = self._peers.get(worker)
        if peer is not None:
            peer.up = False
        self._forget_waiting(worker)
        return []

    def _forget_waiting(self, link: int) -> None:
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if key[0] != link}

    def dial_failed(self, worker: int, error: ShuffleError, now: float) -> list[Instruction]:
        """Dial again shortly, or fail what needs that peer.

        Who answers there may change: a worker that was registered a moment ago does not know its id
        before it has read so, and another's old link may not be gone yet.
        """
        peer = self._peers[worker]
        if peer.up:
            return []
        passing = error.retriable or (isinstance(error, HandshakeRefused) and error.reason == "peer")
        if passing and peer.give_up_at is not None and now < peer.give_up_at:
            peer.dial_at = now + DIAL_RETRY_SECONDS
            peer.failure = f": {error}"
            return []
        return self._give_peer_up(peer, error)

    def _give_peer_up(self, peer: _Peer, error: ShuffleError) -> list[Instruction]:
        peer.dial_at = peer.give_up_at = None
        wanted, peer.wanted = peer.wanted, []
        return [FailTask(channel, error) for channel, _ in wanted]

    def partition_requested(self, link: int, request: PartitionRequest, now: float) -> list[Instruction]:
        """A peer wants a partition: now, or when it is registered, or not at all.

        ``link`` is the peer's worker id.
        """
        instruction = self._answer(link, request)
        if instruction is not None:
            return [instruction]
        deadline = now + self._settings.partition_request_timeout
        self._waiting[link, request.channel] = _Waiting(link, request, deadline)
        return []

    def partition_cancelled(self, link: int, channel: int) -> None:
        """The peer takes a request back that was not answered."""
        self._waiting.pop((link, channel), None)

    def _answer(self, link: int, request: PartitionRequest) -> Attach | None:
        partition = PartitionId(JobId(request.job), request.edge, request.producer)
        producer = self._partitions.get(partition, {}).get(request.producer_attempt)
        return Attach(link, request, producer) if producer is not None else None

    def _serve_waiting(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        for key, waiting in list(self._waiting.items()):
            answer = self._answer(waiting.link, waiting.request)
            if answer is not None:
                del self._waiting[key]
                instructions.append(answer)
        return instructions

    # --- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`handle_timer` wants to be called; None for not at all."""
        times = [entry.cancel_deadline for entry in self._tasks.values()]
        times += [waiting.deadline for waiting in itertools.islice(self._waiting.values(), 1)]
        times += [time for peer in self._peers.values() for time in (peer.dial_at, peer.give_up_at)]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> list[Instruction]:
        return [*self._abandon_stuck(now), *self._refuse_expired(now), *self._chase_peers(now)]

    def _abandon_stuck(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for key, entry in self._tasks.items():
            if entry.cancel_deadline is not None and now >= entry.cancel_deadline:
                entry.over = True
                entry.cancel_deadline = None
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
        expired = list(itertools.takewhile(lambda waiting: now >= waiting.deadline, self._waiting.values()))
        refusals: list[Instruction] = []
        for waiting in expired:
            request = waiting.request
            del self._waiting[waiting.link, request.channel]
            partition = PartitionId(JobId(request.job), request.edge, request.producer)
            text = f"partition {partition} attempt {request.producer_attempt} is not on worker {self.worker}"
            refusals.append(Refuse(waiting.link, request.channel, PartitionNotFound(text)))
        return refusals

    def _chase_peers(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for worker, peer in self._peers.items():
            if peer.give_up_at is not None and now >= peer.give_up_at:
                text = f"no connection to worker {worker} within {PEER_SECONDS_MAX:g} s{peer.failure}"
                instructions.extend(self._give_peer_up(peer, PeerLost(text)))
            elif peer.dial_at is not None and now >= peer.dial_at:
                peer.dial_at = None
                instructions.append(DialPeer(peer.address))
        return instructions

    def validate(self) -> None:
        """Check the invariants; for tests, after each step."""
        assert all(entry.cancel_deadline is None for entry in self._tasks.values() if entry.over)
        assert all(not peer.wanted for peer in self._peers.values() if peer.up)
        assert self.worker not in self._peers
        registered = {key for attempts in self._partitions.values() for key in attempts.values()}
        assert registered == {key for key, entry in self._tasks.items() if entry.spec.outputs}
        for attempts in self._partitions.values():
            assert attempts and all(number == key.attempt for number, key in attempts.items())
        for key in self._tasks:
            assert key.attempt <= self._newest[key.subtask]
