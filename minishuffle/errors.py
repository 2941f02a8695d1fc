"""The error tree, by whose fault it is.

::

    ShuffleError                    base; ``code`` crosses the wire, ``retriable`` steers the caller
    +-- UsageError                  the caller asked for something that cannot be (exit code 2)
    |   +-- UnknownName             no job, option, column, file or worker of that name
    |   |   +-- MissingColumn       a batch lacks a column that a step reads: no restart
    |   +-- InvalidGraph            the dataflow does not make sense as written
    |   +-- UnserializableRecord    a record that the row format cannot carry
    |   +-- CannotWrite             a sink's directory cannot be made, by no attempt: no restart
    |   +-- WrongResult             a function gave what its step has no place for: no restart
    |   +-- WrongColumns            a batch has columns or types that a step cannot take: no restart
    |   +-- WrongInput              a file cannot be read as it is declared: no restart
    |   +-- LateRecord              a record came too late, and none is to (``late="fail"``): no restart
    +-- ProtocolError               never raised itself
    |   +-- LocalProtocolError      we misused the machine: a bug here
    |   +-- RemoteProtocolError     the peer sent something that it must not
    +-- AuthenticationError         wrong or missing secret, another cluster, another version
    |   +-- UntrustedSnapshot       a snapshot that was not signed under this cluster's secret
    +-- PeerLost                    a connection or a process went away
    |   +-- PeerSuspected           or it may have: it answers no Ping
    +-- PartitionNotFound           the requested partition is not (or no longer) registered
    +-- PartitionLost               a partition that was stored cannot be read
    +-- UnreadableSnapshot          a file of a snapshot is missing, cut, changed or of another format
    +-- StorageUnavailable          the storage of snapshots cannot be written, or does not answer
    +-- StateLost                   a task was lost together with its snapshots
    +-- ResourceExhausted           slots, buffers, disk or a limit ran out
    +-- TaskFailed                  the user's function raised, or its process died
    +-- TaskCancelled               a task was cancelled
    +-- FatalRecord                 a record ended the process of each attempt that took it: no restart
    +-- RowsLost                    a job ended, but without some of its rows

Errors cross the wire as code and text, never as a pickle. To users a code is the class's ``number``, such as
MS-111, which is in the notes of each error and so under its traceback: ``minishuffle explain`` has cause,
example and fix, from ``cli/explanations.md``.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final

__all__ = [
    "AuthenticationError",
    "CannotWrite",
    "FatalRecord",
    "InvalidGraph",
    "LateRecord",
    "LocalProtocolError",
    "MissingColumn",
    "PartitionLost",
    "PartitionNotFound",
    "PeerLost",
    "PeerSuspected",
    "ProtocolError",
    "RemoteProtocolError",
    "ResourceExhausted",
    "RowsLost",
    "ShuffleError",
    "StateLost",
    "StorageUnavailable",
    "Superseded",
    "TaskCancelled",
    "TaskFailed",
    "UnknownName",
    "UnreadableSnapshot",
    "UnserializableRecord",
    "UntrustedSnapshot",
    "UsageError",
    "WrongColumns",
    "WrongInput",
    "WrongResult",
    "clipped",
    "described",
    "counted",
    "did_you_mean",
    "encodable",
    "end_job_by",
    "ends_job",
    "error_from_code",
    "text_of",
    "told_from_outside",
]


TEXT_SAYS_ALL: Final = ("MS-101", "MS-110")
"""Numbers of the general classes: what there is to say stands in the texts of their errors."""

CLIP_NOTE_CHARS: Final = 64
"""Room for saying how much was cut."""
_ENDS_JOB: Final = "_minishuffle_ends_job"


class ShuffleError(Exception):
    """Base of every error that minishuffle raises on purpose."""

    code: ClassVar[int] = 1
    retriable: ClassVar[bool] = False
    final: ClassVar[bool] = False
    """No other attempt of the task would end otherwise: the job fails at once."""
    number: str = "MS-101"
    """What ``minishuffle explain`` takes: MS- and 100 more than ``code``, or than that of what it reports."""

    def __init__(self, *args: object, number: str | None = None) -> None:
        super().__init__(*args)
        if number is not None:
            self.number = number
        if self.explain:
            self.add_note(self.explain)

    @property
    def explain(self) -> str:
        """The command that explains its class, in parentheses, as commands and tracebacks have it behind the
        text; empty where the text says all."""
        return "" if self.number in TEXT_SAYS_ALL else f"(minishuffle explain {self.number})"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.number = f"MS-{100 + cls.code}"


class UsageError(ShuffleError):
    """The caller asked for something that cannot be; the text suggests the fix."""

    code = 10


class UnknownName(UsageError):
    """No job, option, column, file or worker of that name."""

    code = 11


class MissingColumn(UnknownName):
    """A batch of columns that were not declared lacks one that a step reads: the job fails at once, since the
    others will lack it too."""

    code = 16
    final = True


class InvalidGraph(UsageError):
    """The dataflow does not make sense as written."""

    code = 12


class UnserializableRecord(UsageError):
    """A record holds a value that the row format cannot carry."""

    code = 13


class CannotWrite(UsageError):
    """The place where a sink should write cannot be made, by no attempt: the job fails at once."""

    code = 14
    final = True


class WrongResult(UsageError):
    """A function of the user gave what its step has no place for, or nothing for any record: the job fails at
    once."""

    code = 15
    final = True


class WrongColumns(UsageError):
    """A batch of columns that were not declared has some, or types, that a step cannot take: the job fails at
    once."""

    code = 17
    final = True


class WrongInput(UsageError):
    """A file holds what cannot be read as it is declared, by no attempt: the job fails at once."""

    code = 18
    final = True


class LateRecord(UsageError):
    """A record came behind the watermark, and ``late="fail"`` says that none is to: the job fails at once."""

    code = 19
    final = True


class ProtocolError(ShuffleError):
    """One side broke the protocol; see the two subclasses for whose fault it is."""

    code = 20


class LocalProtocolError(ProtocolError):
    """This side misused its own state machine: a bug in minishuffle."""

    code = 21


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol forbids at this point."""

    code = 22


class AuthenticationError(ShuffleError):
    """The peer did not prove that it knows the secret of this cluster."""

    code = 30


class UntrustedSnapshot(AuthenticationError):
    """A snapshot was not signed under the secret of this cluster, or its manifest was changed since."""

    code = 31


class PeerLost(ShuffleError):
    """A connection or the process at its other end went away."""

    code = 40
    retriable = True


class PeerSuspected(PeerLost):
    """A worker answers no Ping on a data connection. Only the coordinator can say that it is lost."""

    code = 43


class Superseded(ShuffleError):
    """A newer attempt has taken over what this one did."""

    code = 42


class PartitionNotFound(ShuffleError):
    """The requested partition is not registered on that worker."""

    code = 41
    retriable = True


class PartitionLost(ShuffleError):
    """What was stored of a partition cannot be read; the text names the block."""

    code = 44


class UnreadableSnapshot(ShuffleError):
    """A file of a snapshot is missing, cut, changed, or of a format that this release does not read; the text
    names the file. A job that goes on from it fails at once."""

    code = 45
    final = True


class StorageUnavailable(ShuffleError):
    """The directory or object store of snapshots cannot be written, or does not answer; the text names the
    file and what was refused."""

    code = 46
    retriable = True


class StateLost(ShuffleError):
    """A task of a job with a guarantee, and all workers with its snapshots, were lost: without them it would
    have to begin anew, or with an older one, and rows would be lost. The whole job goes back to a snapshot of
    all its tasks."""

    code = 47


class ResourceExhausted(ShuffleError):
    """Slots, network buffers, disk or a limit ran out; the text has the arithmetic."""

    code = 50


class TaskFailed(ShuffleError):
    """A task ended because the user's function raised or its process died; or a job failed, whatever the
    cause, whose ``number`` it has."""

    code = 60


class TaskCancelled(ShuffleError):
    """A task was cancelled; not a failure."""

    code = 61


class FatalRecord(ShuffleError):
    """A record of a job that loses nothing ended the process of each attempt that took it: the job fails, or
    leaves the record out by ``on_error``."""

    code = 63
    final = True


class RowsLost(ShuffleError):
    """A job came to its end, but tasks or workers failed on the way and rows were lost with them."""

    code = 62


def _subclasses(base: type[ShuffleError]) -> list[type[ShuffleError]]:
    found = [base]
    for child in base.__subclasses__():
        found.extend(_subclasses(child))
    return found


def error_from_code(code: int, text: str) -> ShuffleError:
    """Rebuild an error that crossed the wire; an unknown code becomes a plain ShuffleError."""
    for cls in _subclasses(ShuffleError):
        if cls.code == code:
            return cls(text)
    return ShuffleError(text)


def end_job_by(error: BaseException) -> None:
    """Say of an error that a function of the user raises in every record: no other attempt of the task would
    end otherwise, so that it ends the job."""
    setattr(error, _ENDS_JOB, True)


def ends_job(error: BaseException) -> bool:
    """Whether :func:`end_job_by` was called for it."""
    return getattr(error, _ENDS_JOB, False) is True


def text_of(error: BaseException) -> str:
    """``str(error)``, also where a ``__str__`` of the user's raises: the error has to be reported even so.
    What the operating system refuses is said in its words, without their number."""
    try:
        if isinstance(error, OSError) and isinstance(error.strerror, str):
            names = [repr(name) for name in (error.filename, error.filename2) if name is not None]
            return f"{error.strerror}: {' -> '.join(names)}" if names else error.strerror
        return str(error)
    except Exception as broken:
        return f"(its text cannot be had: __str__ raised {type(broken).__name__})"


def described(error: BaseException) -> str:
    """The error's type and, if it has any, its text."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def did_you_mean(name: str, known: Iterable[Any]) -> str:
    """A question for an error about a name that is not among the known ones, with a space behind it; empty if
    none of these is near."""
    near = difflib.get_close_matches(name, [each for each in known if isinstance(each, str)], 1)
    return f"did you mean {near[0]!r}? " if near else ""


def counted(count: int, one: str, many: str = "") -> str:
    """A number of things: ``1 row``, ``1,001 rows``; ``many`` if it is not ``one`` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def encodable(text: str, encoding: str | None) -> str:
    """The text; characters that the encoding lacks as Python's escapes, such as ``\\xfc``."""
    known = encoding or "utf-8"
    return text.encode(known, "backslashreplace").decode(known)


def clipped(text: str, chars_max: int) -> str:
    """``text`` as control messages and terminals take it: cut if it is longer, with control characters
    escaped and with ``?`` for lone surrogates."""
    text = _escaped(text)
    if len(text) > chars_max:
        kept = chars_max - CLIP_NOTE_CHARS
        text = f"{text[:kept]}… ({len(text) - kept:,} more characters)"
    return text.encode("utf-8", "replace").decode()


def clipped_inside(text: str, chars_max: int) -> str:
    """Like :func:`clipped`, but what is cut is in the middle: a traceback keeps where it begins, and the
    frame that raised."""
    text = _escaped(text)
    if len(text) > chars_max:
        kept = chars_max - CLIP_NOTE_CHARS
        end = kept - kept // 4
        text = f"{text[: kept // 4]}… ({len(text) - kept:,} more characters) …{text[-end:]}"
    return text.encode("utf-8", "replace").decode()


def _escaped(text: str) -> str:
    return _CONTROLS.sub(lambda found: rf"\x{ord(found[0]):02x}", text)


_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tabs and the ends of lines. A terminal would obey them."""


def told_from_outside(error: BaseException, is_ours: Callable[[str], bool]) -> str:
    """The error and its traceback, without the frames at its beginning whose file ``is_ours``."""
    frames = error.__traceback__
    while frames is not None and is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames, chain=False)
    return f"{described(error)}\n{''.join(lines).rstrip()}"
