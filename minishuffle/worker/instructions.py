"""What the worker's decisions ask of its shell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from minishuffle.errors import ShuffleError
from minishuffle.ids import PartitionId
from minishuffle.wire.clients import (
    DropResult,
    EndWrite,
    ExpectUpstream,
    FreeRows,
    ServeResult,
)
from minishuffle.wire.frames import PartitionRequest
from minishuffle.wire.messages import ControlMessage, TaskSpec, WorkerAddress

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
    "Instruction",
    "KeepResults",
    "Refuse",
    "Release",
    "RequestPartition",
    "Send",
    "ServeStream",
    "StartTask",
    "TaskKey",
]

TaskKey: TypeAlias = tuple[str, int, int]
"""(job, operator, index)"""


@dataclass(frozen=True, slots=True)
class ChannelKey:
    """One input channel of a task here."""

    task: TaskKey
    edge: int
    producer: int


@dataclass(frozen=True, slots=True)
class StartTask:
    """Build the task's gates and partitions and start its thread."""

    job: str
    job_name: str
    spec: TaskSpec
    program: bytes
    settings: dict[str, object]


@dataclass(frozen=True, slots=True)
class CancelTask:
    task: TaskKey


@dataclass(frozen=True, slots=True)
class AbandonTask:
    """It still runs user code: close its paths and write it off."""

    task: TaskKey


@dataclass(frozen=True, slots=True)
class FailTask:
    """Have the task fail with this error, in order with what its channel delivered."""

    channel: ChannelKey
    error: ShuffleError


@dataclass(frozen=True, slots=True)
class Release:
    """The job is over: free its partitions, gates and pools."""

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
    channel: ChannelKey
    partition: PartitionId


@dataclass(frozen=True, slots=True)
class Attach:
    """Answer a peer's PartitionRequest with that partition; ``link`` is the shell's number."""

    link: int
    request: PartitionRequest
    partition: PartitionId


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
