"""Control messages by which a client looks into workers: what they hold, the frames of a channel, and where a
subtask spends its time.

What a worker answers is JSON that only the client reads; the coordinator passes it on.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from minishuffle import limits
from minishuffle.wire.messages import ControlMessage, Name

__all__ = [
    "AskWorkers",
    "FrameKind",
    "ProfiledFrame",
    "ProfiledStack",
    "ProfiledTask",
    "TappedEdge",
    "TaskProfile",
    "TracedChannel",
    "WorkerAnswered",
    "WorkerAsked",
    "WorkersAnswered",
]

FrameKind: TypeAlias = Literal["operator", "wait", "runtime", "code"]


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


class ProfiledTask(ControlMessage):
    """A profile of one subtask, by samples of its thread's stack."""

    profile: Name
    """Made by the client. The first question begins it; those that follow say the same."""
    operator: int
    index: int
    seconds: float = Field(5.0, ge=0.1, le=limits.PROFILE_SECONDS_MAX)
    hertz: float = Field(50.0, ge=1.0, le=limits.PROFILE_HERTZ_MAX)
    """Samples in a second."""


class ProfiledFrame(ControlMessage):
    """A place in samples. ``operator``: an operator of the chain, the source, or what the task does beside
    these; ``wait``: it waits for input or output; ``runtime``: code of minishuffle; ``code``: all else."""

    function: str
    kind: FrameKind
    file: str = ""
    """Relative to where modules are found, if it is there. Empty of an operator and of a wait."""
    line: int = 0


class ProfiledStack(ControlMessage):
    samples: int
    frames: list[int]
    """Positions in the profile's frames, the outermost first."""


class TaskProfile(ControlMessage):
    """What a worker answers to a ProfiledTask, as JSON. Frames and stacks are there once it has ended."""

    state: Literal["sampling", "ended", "refused"]
    why: str = ""
    """Why it is refused, or ended early."""
    attempt: int = 0
    seconds: float = 0.0
    """How long it took."""
    cpu_seconds: float = 0.0
    """Seconds of these in which the thread had a processor."""
    samples: dict[str, int] = Field(default_factory=dict)
    """By the thread's state: busy, idle (waits for input), backpressured (waits for output). A sample that
    comes late, because a call has not let go of the interpreter's lock, counts for those that it has delayed.
    """
    left_out: int = 0
    """Samples of stacks beyond the limit."""
    frames: list[ProfiledFrame] = Field(default_factory=list)
    stacks: list[ProfiledStack] = Field(default_factory=list)


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
    """The rows that cross this edge, since the question before."""
    profile: ProfiledTask | None = None
    """The profile of this subtask. None of these: what the worker holds."""


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
    profile: ProfiledTask | None = None


class WorkerAnswered(ControlMessage):
    type: Literal["worker_answered"] = "worker_answered"
    term: int
    ticket: int
    answer: bytes
