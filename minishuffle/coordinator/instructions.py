"""What :class:`~minishuffle.coordinator.state.CoordinatorState` tells its shell to do.

Links are numbered by the shell; a number is never used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from minishuffle.errors import ShuffleError
from minishuffle.ids import Changes
from minishuffle.wire.messages import ControlMessage, HostLook, WorkerAddress
from minishuffle.wire.requests import Failure

__all__ = [
    "CloseLink",
    "Instruction",
    "Journal",
    "LookForHost",
    "Reply",
    "SendToWorker",
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
class Journal:
    """Have these records in the journal before anything that follows is carried out. If they cannot be
    written, the state's ``write_ahead`` says what is carried out instead."""

    changes: Changes
    submission: bool = False
    """Answer with ``journaled``."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The cluster is shut down: end the process."""


Instruction: TypeAlias = SendToWorker | Reply | CloseLink | WatchProcess | LookForHost | Journal | Stopped


def refusal(link: int, request: int, error: ShuffleError) -> Reply:
    """The answer to a request that cannot be granted."""
    return Reply(link, request, Failure(code=error.code, text=str(error)))
