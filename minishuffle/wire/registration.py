"""What a worker and its coordinator tell each other when it registers, for the first time or again.

A worker that comes back says everything in one message, and hears everything in one: facts one way, what is
desired of it the other.
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
"""Each names its attempts and its term, and may be applied any number of times."""


class WorkerDescription(ControlMessage):
    """What a worker process is, from its start to its end."""

    host: Name
    """Where it listens; in the coordinator, what it advertises."""
    advertise: Name = ""
    """The address that others are to use, if it was given one."""
    identity: Name = ""
    """The same for all processes that share a loopback address: see ``host_identity``."""
    seen: Name = ""
    """The address that its control link comes from, as the coordinator's shell sees it."""
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
    """It is to take over slots of lost workers, and no others before that."""
    end_is_told: bool = False
    """Its launcher will send WorkerEnded."""


class Register(WorkerDescription):
    """A worker is there; and, when it comes back, the facts: all that its coordinator may have missed."""

    type: Literal["register"] = "register"
    requested_worker: WorkerNumber = 0
    """An id to be given back (0: any free one); refused while another process holds it."""
    epoch: int = 0
    """That of the registration that it has, if it lost its control link and goes on; 0: it is new."""
    term: int = 0
    """The highest that it has heard of."""
    attempts: list[AttemptRef] = Field(default_factory=list)
    """What it runs, or keeps for others: attempts that were not released."""
    jobs: list[str] = Field(default_factory=list)
    """Jobs of which it knows anything: programs that came ahead of need, or attempts that were here."""
    reports: list[AttemptReport] = Field(default_factory=list)
    """Those that were not acknowledged, from the first on. If they are too many, the rest follows."""
    witnessed: list[WitnessedPositions] = Field(default_factory=list)
    """Positions of other workers, which no coordinator may have heard of."""

    def description(self) -> WorkerDescription:
        """What stays true of it."""
        return WorkerDescription.model_validate(self, from_attributes=True)


class Registered(ControlMessage):
    """The worker is registered, or taken back; and then what is desired of it."""

    type: Literal["registered"] = "registered"
    term: int
    worker: int
    epoch: int
    heartbeat_interval: float
    applied: int = 0
    """To a worker that comes back: the highest number of a report that was applied before it did. Acknowledge
    follows for those that have come with it."""
    desired: list[Annotated[Desired, Field(discriminator="type")]] = Field(default_factory=list)
    """To a worker that comes back: what it is to let go of, and to know of the rest, in this order. It may
    have heard each of them before."""
