"""Steps whose columns nobody knows when the plan is built: the error for one, and what stands in its place
while ``minishuffle schema`` loads the plan to find them."""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from minishuffle.errors import InvalidGraph

if TYPE_CHECKING:
    from minishuffle.operators.unknown_columns import UnknownColumns

__all__ = ["CallPlace", "drafting", "is_draft", "place_of_call", "unknown_columns"]

_ROOMS = tuple(f"minishuffle.{room}." for room in ("api", "connectors", "operators", "plan"))
"""Modules whose frames lie between the user's call and the step that it adds."""
_STANDARD_LIBRARY: Final = f"{sysconfig.get_path('stdlib')}{os.sep}"
_DRAFTING: ContextVar[bool] = ContextVar("drafting", default=False)


@dataclass(frozen=True, slots=True)
class CallPlace:
    """A line of a program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def place_of_call() -> CallPlace:
    """Where the program called the method that is adding a step; the file relative to the working directory
    if it is below."""
    frame = _calling_frame()
    return CallPlace(_relative(frame.f_code.co_filename), frame.f_lineno)


def _calling_frame() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None, "Python has frames"
    while frame.f_back is not None and _module(frame).startswith(_ROOMS):
        frame = frame.f_back
    return frame


def _module(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."


def _relative(file: str) -> str:
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def _file_of_program() -> str:
    """The file where the program begins that adds a step, perhaps in a module that it imports: the one that
    a command loads, or Python runs. "FILE.py" if there is none."""
    file = "FILE.py"
    frame: FrameType | None = _calling_frame()
    while frame is not None and not _module(frame).startswith("minishuffle."):
        if _is_own(frame.f_code.co_filename):
            file = _relative(frame.f_code.co_filename)
        frame = frame.f_back
    return file


def _is_own(file: str) -> bool:
    """Whether it may be a program's own, and no library's."""
    is_file = file.endswith(".py") and not file.startswith(("<", _STANDARD_LIBRARY))
    return is_file and not {"site-packages", "dist-packages"} & set(Path(file).parts)


@contextmanager
def drafting() -> Iterator[None]:
    """Steps of unknown columns are accepted meanwhile, and so are all steps behind them."""
    token = _DRAFTING.set(True)
    try:
        yield
    finally:
        _DRAFTING.reset(token)


def is_draft() -> bool:
    """Whether the plan that is being built is a draft: checks of columns that are not known are put off."""
    return _DRAFTING.get()


def unknown_columns(step: str, why: str, write: str, form: str) -> UnknownColumns:
    """What stands behind a step of unknown columns in a draft.

    Args:
        step: the method, such as ``"map_batches"``.
        why: nobody knows its columns: what is missing, as half a sentence.
        write: what to write instead.
        form: how a schema is given to it, with ``{}`` in its place.

    Raises:
        InvalidGraph: unless a draft is made (:func:`drafting`): names the step, its place in the program,
            what to write and the command that shows the schema.
    """
    place = place_of_call()
    if not is_draft():
        raise InvalidGraph(
            f"{step} at {place}: {why}: {write}; `minishuffle schema {_file_of_program()}:JOB` shows one for "
            "the job (or function) JOB of that file"
        )
    from minishuffle.operators.unknown_columns import UnknownColumns

    return UnknownColumns(step, str(place), form)
