"""Reports of a worker about its attempts: one message, with facts as its parts.

Each fact names its attempt. The coordinator checks in a single place that it is the current attempt and runs
on this worker. A fact of another attempt is stale: it has no effect, and is acknowledged with the others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.wire.messages import (
    COUNT_MAX,
    AttemptRef,
    ControlMessage,
    Counters,
    ErrorInfo,
    Name,
    Standing,
)
from minishuffle.wire.packed import PositionTable, TrafficTable

__all__ = [
    "AttemptReport",
    "Collected",
    "EndsRead",
    "Fact",
    "FileCompleted",
    "PartitionReadable",
    "SnapshotsHeld",
    "SourcePositions",
    "SplitsDealt",
    "StateTaken",
    "StateWritten",
    "TaskReleased",
    "TaskStands",
    "TaskStateChanged",
]


class TaskStateChanged(ControlMessage):
    """``state`` is running, finished, failed, canceled or abandoned."""

    kind: Literal["task_state"] = "task_state"
    attempt: AttemptRef
    state: Literal["running", "finished", "failed", "canceled", "abandoned"]
    error: ErrorInfo | None = None
    result: bytes = b""
    """Return value of the sink's ``close`` as msgpack; empty if None."""
    counters: Counters = Field(default_factory=TaskCounters)
    """Not sent if all are zero, as for an attempt that begins to run."""
    traffic: TrafficTable = b""
    positions: PositionTable = b""
    """Final positions of a source, without leases."""
    moved: bool = False
    """It ended at the barrier of a move: it had processed all rows before, and holds nothing that is lost."""
    state_bytes: int = 0
    """Size of the state that its worker keeps for the next attempt; 0: there is none."""
    state_lost: str = ""
    """Why it could not keep its state; of one that runs, why it does not go on with the state kept for it."""
    dealt: list[tuple[int, int, int]] = Field(default_factory=list)
    """Edge, producer and version of the rows that a finished task has read, for each producer whose next
    attempt may deal its rows out in another way."""

    @model_serializer(mode="wrap")
    def _pack(self, pack: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = pack(self)
        if self.counters == TaskCounters():
            del fields["counters"]
        return fields

    @property
    def ends(self) -> bool:
        """The attempt has ended."""
        return self.state != "running"

    @property
    def is_short(self) -> bool:
        """It has no result and no counters."""
        return not self.result and self.counters == TaskCounters()


class TaskReleased(ControlMessage):
    """The final rows exchanged and dropped by a released attempt, if there are more than at its end."""

    kind: Literal["task_released"] = "task_released"
    attempt: AttemptRef
    traffic: TrafficTable
    rows_dropped: dict[str, int] = Field(default_factory=dict)
    """Dropped rows by reason."""


class SourcePositions(ControlMessage):
    """The positions of a source's subtask, and the rows it may emit before its next report.

    The source emits no row after the ``end`` of a split before this report is acknowledged, unless the
    coordinator does not answer. An entry replaces the previous one of its split, or of its partition of a
    write.
    """

    kind: Literal["source_positions"] = "source_positions"
    attempt: AttemptRef
    positions: PositionTable = b""
    within: float = Field(0.0, ge=0.0)
    """Seconds within which the acknowledgement is needed, so that other reports can share it; 0: at once."""
    waits: bool = False
    """The source waits for that however long the coordinator does not answer: external clients write it, who
    are to send no row twice."""


class SplitsDealt(ControlMessage):
    """The number of splits of a source's subtask, before it emits anything: see ``TaskSpec.one_split``."""

    kind: Literal["splits_dealt"] = "splits_dealt"
    attempt: AttemptRef
    splits: int = Field(ge=0)


class EndsRead(ControlMessage):
    """The producers that an attempt has read to the end over one edge. A finished attempt has read all of
    them without this report."""

    kind: Literal["ends_read"] = "ends_read"
    attempt: AttemptRef
    edge: int
    producers: list[int]


class PartitionReadable(ControlMessage):
    """The first buffer of a pipelined partition exists, on an edge whose consumers may wait for it to be
    deployed. For an empty partition, the end of its task counts instead."""

    kind: Literal["partition_readable"] = "partition_readable"
    attempt: AttemptRef
    edge: int


_Committable = Annotated[bytes, Field(max_length=limits.COMMITTABLE_BYTES_MAX)]


class FileCompleted(ControlMessage):
    """A completed file of a sink, to be listed; ``file`` is its number in the attempt, from 0."""

    kind: Literal["file_completed"] = "file_completed"
    attempt: AttemptRef
    file: int
    path: str
    rows: int
    bytes: int
    checksum: Name
    """SHA-256 of its bytes, in hexadecimal."""
    committable: _Committable = b""
    """In place of a file: what the sink commits."""
    writer: int = 0
    """The attempt that has written it, if this one has it from its snapshot: ``file`` is its number there."""
    is_last: bool = False
    """No row of the subtask follows: what its next attempt makes again is in listed files."""


class Collected(ControlMessage):
    """Rows for the client, from a ``collect`` sink: msgpack or Arrow, see ``exchange.collected``."""

    kind: Literal["collected"] = "collected"
    attempt: AttemptRef
    payload: bytes
    rows: int = Field(default=0, ge=0)
    first_row: int = Field(default=0, ge=0)
    """The number of the first one: of those of its attempt, or of its subtask if that takes snapshots."""


class TaskStands(ControlMessage):
    """A task has stopped at a barrier, or waits and cannot reach it. Heartbeats repeat it."""

    kind: Literal["task_stands"] = "task_stands"
    attempt: AttemptRef
    standing: Standing


class StateTaken(ControlMessage):
    """A task has taken its state at a barrier, which it is about to write: one that stands may go on. With a
    ``problem`` it has not."""

    kind: Literal["state_taken"] = "state_taken"
    attempt: AttemptRef
    savepoint: int
    positions: PositionTable = b""
    """Where its source is in each split."""
    watermark: Annotated[int, Field(ge=-COUNT_MAX)] | None = None
    """The last one that it has passed on, microseconds since 1970; None: none."""
    operators: list[str] = Field(default_factory=list)
    """Ids of its operators that hold anything."""
    stood: Annotated[float, Field(ge=0)] = 0.0
    """For how many seconds it has stood, if it goes on: while channels were held back and others had nothing,
    and for its state."""
    problem: str = ""


class StateWritten(ControlMessage):
    """The state of a task is in a file, see ``WrittenState`` in :mod:`minishuffle.snapshots.sealedmanifest`.
    With a ``problem`` it is not."""

    kind: Literal["state_written"] = "state_written"
    attempt: AttemptRef
    savepoint: int
    file: Name = ""
    """Empty: the task has no state."""
    bytes: int = 0
    index_bytes: int = 0
    checksum: Name = ""
    rows: int = 0
    problem: str = ""


class SnapshotsHeld(ControlMessage):
    """The holder of a task's snapshots has all that are to be kept, for the first time: the task can go on
    from what it has. With a ``problem`` it can hold no more; if what it has is ``readable``, it serves that
    until it is released. ``attempt`` is that of the holder."""

    kind: Literal["snapshots_held"] = "snapshots_held"
    attempt: AttemptRef
    problem: str = ""
    readable: bool = False


Fact: TypeAlias = (
    TaskStateChanged
    | TaskReleased
    | SourcePositions
    | SplitsDealt
    | EndsRead
    | PartitionReadable
    | FileCompleted
    | Collected
    | TaskStands
    | StateTaken
    | StateWritten
    | SnapshotsHeld
)


class AttemptReport(ControlMessage):
    """Facts about attempts on a worker, in the order in which they occurred.

    The coordinator applies each report once. The worker repeats numbered reports until they are acknowledged.
    """

    type: Literal["attempt_report"] = "attempt_report"
    term: int
    number: int = 0
    """Number of the report, counted by worker from 1; see Acknowledge. 0: it is sent once."""
    facts: list[Annotated[Fact, Field(discriminator="kind")]]
