"""What a function of the user has raised, as the user is to see it: with their own frames."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

from minishuffle import limits
from minishuffle.errors import (
    ShuffleError,
    TaskCancelled,
    TaskFailed,
    WrongResult,
    clipped,
    clipped_inside,
    described,
    ends_job,
    text_of,
)
from minishuffle.wire.messages import ErrorInfo

__all__ = ["describe_failure", "is_users", "without_runtime"]

PACKAGE: Final = Path(__file__).parent.parent
RUNTIME_CODE: Final = f"{PACKAGE}{os.sep}"
MISTAKES: Final = frozenset(
    {
        AttributeError,
        ImportError,
        IndexError,
        KeyError,
        ModuleNotFoundError,
        NameError,
        TypeError,
        UnboundLocalError,
    }
)
"""What code that is wrong raises, whatever else goes on. Classes of libraries made of these may pass."""
USER_CODE_INSIDE: Final = tuple(f"{PACKAGE / part}{os.sep}" for part in ("examples", "bench"))


def describe_failure(error: BaseException, task: str) -> ErrorInfo:
    """An error as the user is to see it: their own frames, not the runtime's. A TaskCancelled is theirs: of a
    job that their function had waited for."""
    task = clipped(task, limits.TASK_NAME_CHARS_MAX)
    size = limits.ERROR_TEXT_BYTES_MAX // 4
    if isinstance(error, ShuffleError) and not isinstance(error, TaskFailed | TaskCancelled):
        return ErrorInfo(code=error.code, text=clipped(f"{task}: {text_of(error)}", size), task=task)
    summary = traceback.TracebackException.from_exception(error)
    _leave_runtime_out(summary)
    text = f"{task}: {described(error)}"
    frames = "".join(summary.format())
    code = WrongResult.code if ends_job(error) else TaskFailed.code
    return ErrorInfo(
        code=code,
        text=clipped(text, size),
        traceback=clipped_inside(frames, size),
        task=task,
        mistake=type(error) in MISTAKES,
    )


def _leave_runtime_out(summary: traceback.TracebackException) -> None:
    """Keep the user's frames only, of the error and of those that led to it."""
    behind: list[traceback.TracebackException | None] = [summary]
    while behind:
        each = behind.pop()
        if each is not None:
            own = [frame for frame in each.stack if is_users(frame.filename)]
            each.stack = traceback.StackSummary.from_list(own)
            behind += [each.__cause__, each.__context__, *(each.exceptions or ())]


def is_users(filename: str) -> bool:
    """Whether code of that file is not the runtime's."""
    return not filename.startswith(RUNTIME_CODE) or filename.startswith(USER_CODE_INSIDE)


def without_runtime(frames: TracebackType | None) -> TracebackType | None:
    """The user's own frames of a traceback; all of it if there are none."""
    own, each = [], frames
    while each is not None:
        if is_users(each.tb_frame.f_code.co_filename):
            own.append(each)
        each = each.tb_next
    kept: TracebackType | None = None
    for one in reversed(own):
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept or frames
