"""The instructions of :class:`~minishuffle.worker.state.WorkerState` to its shell: each event gives one
:class:`WorkerStep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from minishuffle.counters import TaskCounters
from minishuffle.errors import ShuffleError
from minishuffle.ids import AttemptId, holder_operator
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
    CheckFolder,
    ControlMessage,
    CutComplete,
    DeployTasks,
    ErrorInfo,
    HolderSpec,
    HostLook,
    TakeSnapshots,
    TaskAttempt,
    TaskSpec,
    WorkerAddress,
    WriteState,
)
from minishuffle.wire.reports import Fact, TaskStateChanged
from minishuffle.worker.channels.registry import ChannelKey

__all__ = [
    "AbandonTask",
    "Acknowledged",
    "LookThere",
    "AnswerQuestion",
    "Attach",
    "CancelTask",
    "CloseLinks",
    "CloseSubpartitions",
    "ConnectLocal",
    "DialPeer",
    "Exit",
    "FailChannel",
    "Fence",
    "ForgetJob",
    "Instruction",
    "KeepResults",
    "KeptState",
    "LoadPrograms",
    "MoveTasks",
    "Refuse",
    "Release",
    "Report",
    "RequestPartition",
    "Send",
    "SaveTasks",
    "ServeStream",
    "SetPause",
    "StartHolder",
    "StartTask",
    "WorkerStep",
    "attempt_id",
    "holder_id",
]


def attempt_id(job: str, spec: TaskSpec | TaskAttempt) -> AttemptId:
    """The attempt that a message about ``job`` names."""
    return AttemptId.of(job, spec.operator, spec.index, spec.attempt)


def holder_id(job: str, spec: HolderSpec) -> AttemptId:
    """The attempt of the holder that a message about ``job`` names."""
    return AttemptId.of(job, holder_operator(spec.operator), spec.index, spec.attempt)


def state_change(
    key: AttemptId,
    state: str,
    error: ErrorInfo | None = None,
    result: bytes = b"",
    *,
    counters: TaskCounters | None = None,
) -> TaskStateChanged:
    """The report of an attempt's new state."""
    fields = {"error": error, "result": result, "counters": counters or TaskCounters()}
    return TaskStateChanged.model_validate({"attempt": key, "state": state, **fields})


class KeptState(NamedTuple):
    """How an attempt ended that was to move: see ``TaskStateChanged``."""

    moved: bool = False
    bytes: int = 0
    lost: str = ""


@dataclass(frozen=True, slots=True)
class StartTask:
    """Build the gates and partitions of one task of ``message`` and start its thread."""

    message: DeployTasks
    spec: TaskSpec


@dataclass(frozen=True, slots=True)
class StartHolder:
    """Begin to hold the snapshots of a task."""

    holder: AttemptId
    spec: HolderSpec


@dataclass(frozen=True, slots=True)
class LoadPrograms:
    """Load what the programs of a job import: its tasks may come to run here."""

    job: str
    programs: list[bytes]


@dataclass(frozen=True, slots=True)
class CancelTask:
    attempt: AttemptId
    job_ends: bool = False
    """No other attempt will follow."""


@dataclass(frozen=True, slots=True)
class AbandonTask:
    """It still runs user code: close its paths and write it off."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class FailChannel:
    """Nothing more comes of that generation of a channel: have the task see that, in order with what was
    delivered. It fails with this error if its job does not restart."""

    channel: ChannelKey
    generation: int
    error: ShuffleError


@dataclass(frozen=True, slots=True)
class Release:
    """Free what these attempts have here: partitions, gates and pools, or snapshots."""

    attempts: list[AttemptId]


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """The job has ended everywhere: no external client of it is expected any more."""

    job: str


@dataclass(frozen=True, slots=True)
class Send:
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class Report:
    """Report a fact about an attempt to the coordinator, exactly once."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class DialPeer:
    peer: WorkerAddress


@dataclass(frozen=True, slots=True)
class ProbePeer:
    """Probe a worker, and report whether a link can be made."""

    peer: WorkerAddress


@dataclass(frozen=True, slots=True)
class FindAddress:
    """Find the address of this host from which ``toward`` is reached, and advertise it from now on."""

    toward: str


@dataclass(frozen=True, slots=True)
class LookThere:
    """Check whether a host answers, and report it."""

    look: HostLook


@dataclass(frozen=True, slots=True)
class CloseLinks:
    """Close the link to ``worker`` if its epoch is ``epoch`` or earlier."""

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
    version: int
    """The version of the producer's rows."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Answer a peer's PartitionRequest with what that attempt writes for the edge.

    ``link`` is the peer's worker id.
    """

    link: int
    request: PartitionRequest
    producer: AttemptId


@dataclass(frozen=True, slots=True)
class Fence:
    """An attempt of ``consumer`` replaces earlier ones, which must read no more from ``producer`` over
    ``edge``."""

    producer: AttemptId
    edge: int
    consumer: AttemptId


@dataclass(frozen=True, slots=True)
class CloseSubpartitions:
    """These consumers want none of the rows that ``producer`` writes for ``edge``."""

    producer: AttemptId
    edge: int
    consumers: Sequence[int]


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
class SetPause:
    """Stop the tasks of a job at a barrier, or end the barrier."""

    job: str
    barrier: int
    paused: bool


@dataclass(frozen=True, slots=True)
class SaveTasks:
    """Look into the folder of a savepoint, have tasks write their state there, free what a durable snapshot
    covers, or have tasks take local ones."""

    message: CheckFolder | WriteState | CutComplete | TakeSnapshots


@dataclass(frozen=True, slots=True)
class MoveTasks:
    """These subtasks of a job, by operator and index, are to move: see ``DivideTasks``."""

    job: str
    barrier: int
    subtasks: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The coordinator has applied the reports up to that number; see :class:`Acknowledge`."""

    number: int
    refused: bool = False
    journaled: bool = True


@dataclass(frozen=True, slots=True)
class AnswerQuestion:
    """A client looks into this worker."""

    message: WorkerAsked


@dataclass(frozen=True, slots=True)
class Exit:
    """Stop this worker; ``reason`` is empty for an orderly shutdown."""

    reason: str


Instruction: TypeAlias = (
    StartTask
    | StartHolder
    | LoadPrograms
    | CancelTask
    | AbandonTask
    | FailChannel
    | Release
    | ForgetJob
    | Send
    | Report
    | DialPeer
    | ProbePeer
    | FindAddress
    | LookThere
    | CloseLinks
    | RequestPartition
    | ConnectLocal
    | Attach
    | CloseSubpartitions
    | Fence
    | Refuse
    | ServeStream
    | KeepResults
    | SetPause
    | SaveTasks
    | MoveTasks
    | Acknowledged
    | AnswerQuestion
    | Exit
)


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """The result of one event: the instructions to carry out, and the time of the next call.

    The shell's duties, in this order:

    1. It calls ``handle_timer`` at ``timers`` of the latest step. An early call is harmless.
    2. It carries out ``messages`` in order and at once. If a message leads to another event, the step of that
    event goes before the next message.

    There are no records, as in a ``CoordinatorStep``: a worker has no journal. It repeats each report that
    must outlive it until the coordinator acknowledges that the report is in the journal: see
    ``attemptreports``.
    """

    messages: Sequence[Instruction] = ()
    timers: float | None = None
    """None: nothing is due."""
