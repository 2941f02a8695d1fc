"""Identifiers, in the words of the field.

A *job graph* has *operators* (vertices: chains of functions that share a thread) and *edges*; an
operator runs as *subtasks*, each incarnation of which is an *attempt*. The producer subtask of an
edge owns a *ResultPartition* with one *subpartition* for each consumer. A *generation* counts the
connections of one logical channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NewType, TypeAlias

from minishuffle.errors import UsageError

__all__ = [
    "Address",
    "AttemptId",
    "ChannelId",
    "Changes",
    "Epoch",
    "FIRST_ATTEMPT",
    "Generation",
    "JobId",
    "OperatorId",
    "PartitionId",
    "READERS_EDGE",
    "RecordKey",
    "SubtaskId",
    "Term",
    "WorkerId",
    "held_operator",
    "holder_operator",
    "is_holder",
    "is_snapshot_edge",
    "is_state_edge",
    "snapshot_edge",
    "state_edge",
]

WorkerId = NewType("WorkerId", int)
"""Given by the coordinator at registration, from 1; the lower of two dials."""

Epoch = NewType("Epoch", int)
"""Counts the registrations that a coordinator accepted, over all workers."""

Term = NewType("Term", int)
"""Counts the starts of the coordinator; a worker refuses a lower one."""

JobId = NewType("JobId", str)
"""``j1``, ``j2``, …: never used again within a cluster's journal."""

OperatorId = NewType("OperatorId", int)
"""Index of a vertex of the job graph."""

ChannelId = NewType("ChannelId", int)
"""u32 given by the consumer; the top bit says whether the dialer of the connection gave it."""

Generation = NewType("Generation", int)
"""Counts the connections of one logical channel, from 1."""

RecordKey: TypeAlias = tuple[str, str]
"""Kind and name of a record in the coordinator's journal."""

Changes: TypeAlias = dict[RecordKey, bytes | None]
"""Records that take the place of others; None: there is none any more."""

FIRST_ATTEMPT: Final = 1
"""The number of a subtask's first incarnation."""


@dataclass(frozen=True, slots=True, order=True)
class SubtaskId:
    """One parallel instance of an operator; stable over restarts."""

    job: JobId
    operator: OperatorId
    index: int

    @property
    def key(self) -> tuple[OperatorId, int]:
        """Operator and index: which subtask of its job it is."""
        return self.operator, self.index

    def __str__(self) -> str:
        return f"{self.job}/{self.operator}.{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """One incarnation of a subtask; ``attempt`` grows from 1."""

    subtask: SubtaskId
    attempt: int

    def __str__(self) -> str:
        return f"{self.subtask}#{self.attempt}"

    @classmethod
    def of(cls, job: str, operator: int, index: int, attempt: int) -> AttemptId:
        """The attempt with these numbers."""
        return cls(SubtaskId(JobId(job), OperatorId(operator), index), attempt)


@dataclass(frozen=True, slots=True, order=True)
class PartitionId:
    """What one producer subtask writes for one edge of the job graph."""

    job: JobId
    edge: int
    producer: int

    def __str__(self) -> str:
        return f"{self.job}/edge{self.edge}.{self.producer}"


READERS_EDGE: Final = -1
"""The edge to external clients that read what a sink keeps: no edge of the graph."""

_STATE_EDGES: Final = 1 << 31
_SNAPSHOT_EDGES: Final = 3 << 30
_HOLDERS: Final = 1 << 31


def state_edge(operator: int) -> int:
    """The edge in the :class:`PartitionId` of what an attempt, or the holder of its snapshots, keeps of its
    state for the next attempt of its subtask: no edge of the graph."""
    return _STATE_EDGES + operator


def is_state_edge(edge: int) -> bool:
    """Whether it is the edge of an operator's state."""
    return _STATE_EDGES <= edge < _SNAPSHOT_EDGES


def snapshot_edge(operator: int) -> int:
    """The edge in the :class:`PartitionId` of the snapshots that an attempt sends to their holder: no edge of
    the graph."""
    return _SNAPSHOT_EDGES + operator


def is_snapshot_edge(edge: int) -> bool:
    """Whether it is the edge of an operator's snapshots."""
    return edge >= _SNAPSHOT_EDGES


def holder_operator(operator: int) -> OperatorId:
    """Holders of the snapshots of an operator's tasks have attempts of their own, under this number: no
    vertex of the graph. The attempt counts the holders that a task has had, from 1."""
    return OperatorId(_HOLDERS + operator)


def held_operator(operator: int) -> OperatorId:
    """The operator whose snapshots the holders with this number hold."""
    return OperatorId(operator - _HOLDERS)


def is_holder(operator: int) -> bool:
    """Whether attempts with this operator are holders of snapshots."""
    return operator >= _HOLDERS


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a process listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``HOST:PORT``.

        Raises:
            UsageError: the text is not of that form or the port is not in 1..65535.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f"{text!r} is not an address: write HOST:PORT, for example 127.0.0.1:8471")
        return cls(host.strip("[]"), int(port))
