"""Control messages by which a client looks into workers: what they hold, and the frames of a channel.

What a worker answers is JSON that only the client reads; the coordinator passes it on.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from minishuffle.wire.messages import ControlMessage, Name

__all__ = ["AskWorkers", "TappedEdge", "TracedChannel", "WorkerAnswered", "WorkerAsked", "WorkersAnswered"]


class TracedChannel(ControlMessage):
    """The channels of a job from one subtask to another."""

    producer_operator: int
    producer: int
    operator: int
    index: int


class TappedEdge(ControlMessage):
    """A tap of an edge of a job; the first question opens it."""

    edge: int
    """Its number in the job graph."""
    tap: Name
    """An id that whoever asks has made."""
    ends: bool = False
    """Give what there is, and end it."""


# --- client -> coordinator, and back --------------------------------------------------------------


class AskWorkers(ControlMessage):
    """Ask workers that are alive; answered with WorkersAnswered when all have answered, or when a time is up
    that is short: one that does not answer is a part of what the client wants to know."""

    type: Literal["ask_workers"] = "ask_workers"
    job: str = ""
    """Say nothing of other jobs; empty: of all."""
    workers: list[int] = Field(default_factory=list)
    """Empty: all."""
    trace: TracedChannel | None = None
    """The frames of these channels since the question before."""
    tap: TappedEdge | None = None
    """The rows that cross this edge, since the question before. None of these: what the worker holds."""


class WorkersAnswered(ControlMessage):
    type: Literal["workers_answered"] = "workers_answered"
    answers: dict[int, bytes]
    """By worker: JSON."""
    silent: list[int] = Field(default_factory=list)
    """Those that have not answered in time."""


# --- coordinator -> worker, and back --------------------------------------------------------------


class WorkerAsked(ControlMessage):
    """See AskWorkers."""

    type: Literal["worker_asked"] = "worker_asked"
    term: int
    ticket: int
    job: str = ""
    trace: TracedChannel | None = None
    tap: TappedEdge | None = None


class WorkerAnswered(ControlMessage):
    type: Literal["worker_answered"] = "worker_answered"
    term: int
    ticket: int
    answer: bytes
