"""What :class:`~minishuffle.coordinator.state.CoordinatorState` tells its shell to do.

Each event gives one :class:`CoordinatorStep`, which says what the shell owes. Links are numbered by the
shell; a number is never used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from minishuffle.errors import ShuffleError
from minishuffle.ids import Changes
from minishuffle.wire.messages import ControlMessage, HostLook, WorkerAddress
from minishuffle.wire.requests import Failure

__all__ = [
    "CloseLink",
    "Instruction",
    "LookForHost",
    "Reply",
    "SendToWorker",
    "CoordinatorStep",
    "Stopped",
    "WatchProcess",
    "refusal",
]


@dataclass(frozen=True, slots=True)
class SendToWorker:
    worker: int
    link: int
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer request number ``request`` of that link."""

    link: int
    request: int
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Send what is queued, then close; ``why`` is for the log. ``refusal`` is the reason by which a link
    that is closed for cause is counted, or empty."""

    link: int
    why: str
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class WatchProcess:
    """The control link of that number closed: find out whether the worker's process is there, at its data
    port. Answer with ``process_found`` and ``process_gone``, or not at all if nobody knows."""

    link: int
    address: WorkerAddress


@dataclass(frozen=True, slots=True)
class LookForHost:
    """Find out whether a host answers, as a worker does that gets this message. Answer with
    ``host_looked``."""

    look: HostLook


@dataclass(frozen=True, slots=True)
class Stopped:
    """The cluster is shut down: end the process."""


Instruction: TypeAlias = SendToWorker | Reply | CloseLink | WatchProcess | LookForHost | Stopped


@dataclass(frozen=True, slots=True)
class CoordinatorStep:
    """What comes of one event: what must be durable, what may be sent once it is, and when the machine is to
    be called again. (The model: ``Ready`` of etcd's raft.)

    The shell's duties, for steps in the order in which it gets them:

    1. It calls ``handle_timer`` at ``timers`` of the latest step, whatever that waits for. Early is harmless.
    2. It writes ``records`` and ``submissions`` to the journal. Those of steps that came during a write go
       together into the next one: more is durable then than has to be before the first of them is sent.
    3. Once they are durable it carries out ``messages``, in order, and then says ``journaled`` for each of
       the submissions. Messages of later steps never overtake.
    4. If they cannot be written, it keeps ``records``, says ``journaled`` with the error for each submission,
       and goes on: ``write_ahead.failed`` leaves of ``messages`` what may be sent all the same. It tries
       again, with each submission and now and then, until all that it keeps is written; then it carries out
       what ``write_ahead.written`` gives. If the journal has lost what it had, it writes ``everything``.
    5. If another coordinator has begun a later term, nothing that waits is sent, and this one ends.
    """

    records: Changes = field(default_factory=dict)
    """By kind and name; None: it is forgotten."""
    submissions: Sequence[Changes] = ()
    """The records of jobs that were submitted: a job whose records cannot be written is refused, and they are
    not kept."""
    messages: Sequence[Instruction] = ()
    timers: float | None = None
    """None: nothing is due."""


def refusal(link: int, request: int, error: ShuffleError) -> Reply:
    """The answer to a request that cannot be granted."""
    return Reply(link, request, Failure(code=error.code, text=str(error)))
