"""The messages of a worker's registration, for the first time or again.

A worker that comes back sends all facts in one message, and gets its desired state in one reply.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from minishuffle import limits
from minishuffle.wire.clients import BeginWrite, DropResult, EndWrite, ExpectUpstream, ServeResult
from minishuffle.wire.messages import (
    AttemptRef,
    CancelTasks,
    ConsumersEnded,
    ControlMessage,
    Heartbeat,
    Name,
    PauseTasks,
    Port,
    ReleaseJob,
    TasksRestarted,
    WitnessedPositions,
    WorkerLost,
    WorkerNumber,
)
from minishuffle.wire.reports import AttemptReport

__all__ = ["Desired", "Register", "Registered", "WorkerDescription"]

Desired: TypeAlias = (
    WorkerLost
    | DropResult
    | ServeResult
    | ConsumersEnded
    | ReleaseJob
    | CancelTasks
    | TasksRestarted
    | PauseTasks
    | BeginWrite
    | ExpectUpstream
    | EndWrite
)
"""Commands of a desired state. Each names its attempts and its term, and may be applied any number of
times."""


class WorkerDescription(ControlMessage):
    """The constant properties of a worker process."""

    host: Name
    """The address at which it listens; in the coordinator, the address it advertises."""
    advertise: Name = ""
    """The address that others must use, if it was given one."""
    identity: Name = ""
    """Identity of its host, the same for all processes that share a loopback address: see
    ``host_identity``."""
    seen: Name = ""
    """The remote address of its control link; set by the coordinator's shell."""
    data_port: Port
    metrics_port: Port
    pid: int
    slots: Annotated[int, Field(ge=1, le=limits.SLOTS_MAX)]
    python: Name
    """Major.minor; functions are pickled, so it must equal the coordinator's."""
    releases: dict[Name, Name] = Field(default_factory=dict)
    """Versions by package, see ``releases_here``."""
    segments: Annotated[int, Field(ge=0, le=1 << 40)]
    segment_bytes: Annotated[int, Field(ge=1, le=limits.SEGMENT_BYTES_MAX)]
    standby: bool = False
    """It is a standby worker: it takes over slots of lost workers, and no others before."""
    end_is_told: bool = False
    """Its launcher will send WorkerEnded."""


class Register(WorkerDescription):
    """The registration of a worker; when it comes back, with the facts that its coordinator may have
    missed."""

    type: Literal["register"] = "register"
    requested_worker: WorkerNumber = 0
    """The id it asks for, 0 for any free one; refused while another process holds it."""
    epoch: int = 0
    """The epoch of its registration, if it has lost its control link and continues; 0: it is new."""
    term: int = 0
    """The highest term it knows."""
    attempts: list[AttemptRef] = Field(default_factory=list)
    """The attempts that it runs or keeps for others: all that were not released."""
    jobs: list[str] = Field(default_factory=list)
    """Jobs of which it has programs sent in advance, or had attempts."""
    prepared: list[str] = Field(default_factory=list)
    """The part of ``jobs`` with programs sent in advance: see PrepareJob."""
    reports: list[AttemptReport] = Field(default_factory=list)
    """Reports that were not acknowledged, from the first on. If they are too many, the rest follows."""
    witnessed: list[WitnessedPositions] = Field(default_factory=list)
    """Positions of other workers that perhaps no coordinator has."""
    heartbeat: Heartbeat | None = None
    """Counts and standings of its tasks, later than the reports."""

    def description(self) -> WorkerDescription:
        """The constant properties of the worker."""
        return WorkerDescription.model_validate(self, from_attributes=True)


class Registered(ControlMessage):
    """The reply to a registration, with the desired state of a worker that comes back."""

    type: Literal["registered"] = "registered"
    term: int
    worker: int
    epoch: int
    heartbeat_interval: float
    applied: int = 0
    """For a worker that comes back: the highest number of a report applied before. An Acknowledge follows for
    the reports in its registration."""
    desired: list[Annotated[Desired, Field(discriminator="type")]] = Field(default_factory=list)
    """For a worker that comes back: commands to release attempts, and to learn of changes, in this order. It
    may have received each before."""
