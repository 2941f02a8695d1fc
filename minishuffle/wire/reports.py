"""What a worker reports of its attempts: one message, whose parts are facts.

Each fact names its attempt; the coordinator checks at one place whether that is the current one and runs on
this worker. A fact of another attempt is stale: it changes nothing, and is acknowledged with the rest.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.wire.messages import (
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
    "SourcePositions",
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
    """What the sink's ``close`` returned, msgpacked; empty when nothing."""
    counters: Counters = Field(default_factory=TaskCounters)
    """Not sent if it has counted nothing, as one that begins to run."""
    traffic: TrafficTable = b""
    positions: PositionTable = b""
    """Where a source that has ended stands, without any lease."""

    @model_serializer(mode="wrap")
    def _pack(self, pack: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = pack(self)
        if self.counters == TaskCounters():
            del fields["counters"]
        return fields

    @property
    def ends(self) -> bool:
        """The attempt does nothing more."""
        return self.state != "running"

    @property
    def is_short(self) -> bool:
        """It carries no result and no counters."""
        return not self.result and self.counters == TaskCounters()


class TaskReleased(ControlMessage):
    """What an attempt that is released has exchanged and dropped in all, if that is more than at its end."""

    kind: Literal["task_released"] = "task_released"
    attempt: AttemptRef
    traffic: TrafficTable
    rows_dropped: dict[str, int] = Field(default_factory=dict)
    """By reason."""


class SourcePositions(ControlMessage):
    """How far a source's subtask is, and how far it may go before its next report.

    It emits nothing behind the ``end`` of a split before this is acknowledged, unless the coordinator does
    not answer. An entry replaces the one of its split that was reported before.
    """

    kind: Literal["source_positions"] = "source_positions"
    attempt: AttemptRef
    positions: PositionTable = b""
    within: float = Field(0.0, ge=0.0)
    """Seconds within which it is to be acknowledged, so that others can be with it; 0: at once."""
    waits: bool = False
    """The source waits for that however long the coordinator does not answer: external clients write it, who
    are to send no row twice."""


class EndsRead(ControlMessage):
    """The producers whose partitions an attempt has read to the end, over one edge. One that finishes has
    read everything, and says so by that."""

    kind: Literal["ends_read"] = "ends_read"
    attempt: AttemptRef
    edge: int
    producers: list[int]


class PartitionReadable(ControlMessage):
    """A pipelined partition, of an edge whose consumers may wait for that to be deployed, has its first
    buffer. One that is empty says so by the end of its task."""

    kind: Literal["partition_readable"] = "partition_readable"
    attempt: AttemptRef
    edge: int


_Committable = Annotated[bytes, Field(max_length=limits.COMMITTABLE_BYTES_MAX)]


class FileCompleted(ControlMessage):
    """A file of a sink that is to be listed; ``file`` counts those of the attempt from 0. Or what a sink of
    the user has prepared, which is to be durable before it is committed."""

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


class Collected(ControlMessage):
    """Rows for the client, from a ``collect`` sink: msgpack or Arrow, see ``exchange.collected``."""

    kind: Literal["collected"] = "collected"
    attempt: AttemptRef
    payload: bytes
    rows: int = Field(default=0, ge=0)


class TaskStands(ControlMessage):
    """A task has stopped behind a barrier, or waits and cannot come to it. Heartbeats repeat it."""

    kind: Literal["task_stands"] = "task_stands"
    attempt: AttemptRef
    standing: Standing


Fact: TypeAlias = (
    TaskStateChanged
    | TaskReleased
    | SourcePositions
    | EndsRead
    | PartitionReadable
    | FileCompleted
    | Collected
    | TaskStands
)


class AttemptReport(ControlMessage):
    """Facts about attempts on a worker, in the order in which they came about.

    The coordinator applies each report once: the worker repeats those with a number until they are
    acknowledged.
    """

    type: Literal["attempt_report"] = "attempt_report"
    term: int
    number: int = 0
    """Counts the reports of a worker from 1; see Acknowledge. 0: it is sent once."""
    facts: list[Annotated[Fact, Field(discriminator="kind")]]
