"""The instructions of :class:`~minishuffle.coordinator.state.CoordinatorState` to its shell.

Each event gives one :class:`CoordinatorStep`. The shell numbers links; a number is never used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from minishuffle.coordinator.jobs.savepoints import FolderWork
from minishuffle.errors import ShuffleError
from minishuffle.ids import Changes
from minishuffle.wire.messages import ControlMessage, HostLook, WorkerAddress
from minishuffle.wire.requests import Failure, SubmitJob

__all__ = [
    "CloseLink",
    "Instruction",
    "LookForHost",
    "ReadSnapshot",
    "Reply",
    "SendToWorker",
    "CoordinatorStep",
    "Stopped",
    "WatchProcess",
    "WorkInFolder",
    "refusal",
]


@dataclass(frozen=True, slots=True)
class SendToWorker:
    worker: int
    link: int
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to request number ``request`` of a link."""

    link: int
    request: int
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Send the queued messages, then close the link. ``why`` is for the log. ``refusal`` is the reason by
    which a link closed for cause is counted, or empty."""

    link: int
    why: str
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class WatchProcess:
    """A worker's control link has closed: find out whether its process still listens at its data port. Answer
    with ``process_found`` or ``process_gone``, or not at all if it cannot be known."""

    link: int
    address: WorkerAddress


@dataclass(frozen=True, slots=True)
class LookForHost:
    """Find out whether a host answers, as a worker does on this message. Answer with ``host_looked``."""

    look: HostLook


@dataclass(frozen=True, slots=True)
class WorkInFolder:
    """Prepare or remove the folder of a savepoint, or write its manifest. Answer with ``folder_ready``,
    unless it is to be removed."""

    work: FolderWork


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """Read the manifest of the savepoint from which a submitted job goes on. Answer with
    ``snapshot_read``."""

    ticket: int
    message: SubmitJob


@dataclass(frozen=True, slots=True)
class Stopped:
    """The cluster is shut down: end the process."""


Instruction: TypeAlias = (
    SendToWorker | Reply | CloseLink | WatchProcess | LookForHost | WorkInFolder | ReadSnapshot | Stopped
)


@dataclass(frozen=True, slots=True)
class CoordinatorStep:
    """The result of one event: records that must be durable, messages that may be sent once they are, and the
    time of the next call. (The model: ``Ready`` of etcd's raft.)

    The shell's duties, for steps in the order in which it gets them:

    1. It calls ``handle_timer`` at ``timers`` of the latest step, without waiting for the journal. An early
    call is harmless.
    2. It writes ``records`` and ``submissions`` to the journal. Records of steps that arrive during a write
    go together into the next write, so more may be durable than the first of these steps needs.
    3. Once they are durable it carries out ``messages``, in order, and then calls ``journaled`` for each of
    the submissions. Messages of later steps never overtake.
    4. If they cannot be written, it keeps ``records``, calls ``journaled`` with the error for each
    submission, and goes on with the messages that ``write_ahead.failed`` permits. It tries again with each
    submission, and periodically, until all it keeps is written; then it carries out the result of
    ``write_ahead.written``. If the journal has lost its contents, it writes ``everything``.
    5. If another coordinator has begun a later term, it sends no waiting messages, and ends.
    """

    records: Changes = field(default_factory=dict)
    """Records by kind and name; None: the record is deleted."""
    submissions: Sequence[Changes] = ()
    """The records of submitted jobs. A job whose records cannot be written is refused, and they are not
    kept."""
    messages: Sequence[Instruction] = ()
    timers: float | None = None
    """Time of the next call of ``handle_timer``; None: not needed."""


def refusal(link: int, request: int, error: ShuffleError) -> Reply:
    """The reply to a refused request."""
    return Reply(link, request, Failure(code=error.code, text=str(error)))
