"""Control messages with which a client inspects workers: their state, the frames of a channel, and the time
of a subtask.

The answers of workers are JSON for the client; the coordinator only passes them on.
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
    """A tap on an edge of a job; the first question opens it."""

    edge: int
    """Its number in the job graph."""
    tap: Name
    """An id made by the client."""
    ends: bool = False
    """Return the remaining rows, and end the tap."""


class ProfiledTask(ControlMessage):
    """A profile of one subtask, by samples of its thread's stack."""

    profile: Name
    """An id made by the client. The first question begins the profile; later ones repeat the same values."""
    operator: int
    index: int
    seconds: float = Field(5.0, ge=0.1, le=limits.PROFILE_SECONDS_MAX)
    hertz: float = Field(50.0, ge=1.0, le=limits.PROFILE_HERTZ_MAX)
    """Samples in a second."""


class ProfiledFrame(ControlMessage):
    """A place in samples. ``operator``: an operator of the chain, the source, or other work of the task;
    ``wait``: it waits for input or output; ``runtime``: code of minishuffle; ``code``: all other code."""

    function: str
    kind: FrameKind
    file: str = ""
    """Path relative to an entry of the module path, if possible. Empty for an operator and for a wait."""
    line: int = 0


class ProfiledStack(ControlMessage):
    samples: int
    frames: list[int]
    """Positions in the profile's frames, the outermost first."""


class TaskProfile(ControlMessage):
    """A worker's answer to a ProfiledTask, as JSON. Frames and stacks are present once it has ended."""

    state: Literal["sampling", "ended", "refused"]
    why: str = ""
    """Why it is refused, or ended early."""
    attempt: int = 0
    seconds: float = 0.0
    """Duration in seconds."""
    cpu_seconds: float = 0.0
    """Seconds of the duration in which the thread ran on a processor."""
    samples: dict[str, int] = Field(default_factory=dict)
    """Samples by the thread's state: busy, idle (waits for input), backpressured (waits for output). A sample
    delayed by a call that holds the interpreter's lock counts for all the samples it has delayed."""
    left_out: int = 0
    """Samples of stacks beyond the limit."""
    frames: list[ProfiledFrame] = Field(default_factory=list)
    stacks: list[ProfiledStack] = Field(default_factory=list)


# --- client -> coordinator, and back --------------------------------------------------------------


class AskWorkers(ControlMessage):
    """Ask alive workers. Answered with WorkersAnswered when all have answered, or after a short time: a
    worker that does not answer is information too."""

    type: Literal["ask_workers"] = "ask_workers"
    job: str = ""
    """Only about this job; empty: about all."""
    workers: list[int] = Field(default_factory=list)
    """Empty: all."""
    trace: TracedChannel | None = None
    """The frames of these channels since the last question."""
    tap: TappedEdge | None = None
    """The rows that crossed this edge since the last question."""
    profile: ProfiledTask | None = None
    """The profile of this subtask. If trace, tap and profile are all None, the worker's whole state is asked
    for."""


class WorkersAnswered(ControlMessage):
    type: Literal["workers_answered"] = "workers_answered"
    answers: dict[int, bytes]
    """JSON by worker."""
    silent: list[int] = Field(default_factory=list)
    """Workers that have not answered in time."""


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
