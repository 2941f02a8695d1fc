"""Calls of the methods that a user wrote: whatever they raise is told as theirs, with the place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from minishuffle.dataflow.arguments import checked_name
from minishuffle.errors import ShuffleError, UsageError, told_from_outside
from minishuffle.pipelines.contract import Pipeline
from minishuffle.spark.errors import spark_error

__all__ = ["asked", "check_name", "is_frame"]

HERE: Final = f"{Path(__file__).resolve().parents[1]}{os.sep}"
LIBRARIES: Final = ("site-packages", "dist-packages")


def check_name(pipeline: Pipeline) -> None:
    """Raises UsageError unless the pipeline's name can be that of a job and of a directory."""
    where = f"{type(pipeline).__name__}.name"
    name = checked_name(pipeline.name, where)
    if "/" in name or name in (".", ".."):
        raise UsageError(f"{where} is also that of a directory, which {name!r} cannot be: leave out slashes")


def asked(pipeline: Pipeline, method: str, *arguments: Any) -> Any:
    """What the pipeline's method returns.

    Raises:
        ShuffleError: it raised; the text says what, and where in the user's own code.
    """
    what = f"pipeline {pipeline.name}: {method}()"
    try:
        return getattr(pipeline, method)(*arguments)
    except UsageError as error:
        raise type(error)(f"{what}{_place(error)}: {error}") from error
    except ShuffleError:
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("pyspark", "py4j"):
            # In one sentence: the stack is that of Java, and longer than a screen.
            raise spark_error(error, f"{what}{_place(error)}") from error
        raise ShuffleError(f"{what} raised {told_from_outside(error, _is_ours)}") from error


def is_frame(value: Any) -> bool:
    """Whether it is a DataFrame of Spark."""
    from pyspark.sql import DataFrame

    return isinstance(value, DataFrame)


def _place(error: BaseException) -> str:
    """The innermost line of the user's own that led to the error, if there is one."""
    own = [frame for frame in _frames(error.__traceback__) if not _is_library(_file(frame))]
    return f", {_file(own[-1])}:{own[-1].tb_lineno}" if own else ""


def _frames(frame: TracebackType | None) -> Iterator[TracebackType]:
    while frame is not None:
        yield frame
        frame = frame.tb_next


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _is_ours(file: str) -> bool:
    return file.startswith(HERE)


def _is_library(file: str) -> bool:
    if _is_ours(file) or file.startswith("<") or any(part in Path(file).parts for part in LIBRARIES):
        return True
    return file.startswith(str(Path(sys.base_prefix, "lib", "python")))
