"""What is written for a user: escaped where the terminal lacks a character, and named when it cannot be."""

from __future__ import annotations

import io
import sys
from typing import Any, Final, TextIO

import click

from minishuffle.errors import ShuffleError, encodable

__all__ = ["STDOUT", "drop_stdout", "echo", "own_stdout", "with_number"]

STDOUT: Final = "standard output"
"""The file name of an OSError that writing to it raised."""


def echo(text: str = "", *, err: bool = False) -> None:
    """A line on the standard output, or error output. (By itself click writes UTF-8 where the encoding is
    ASCII.)"""
    stream = sys.stderr if err else sys.stdout
    click.echo(encodable(text, getattr(stream, "encoding", None)), err=err)


def with_number(text: str, error: ShuffleError) -> str:
    """The text of an error and, where that has more, the command that explains its class."""
    gap = "\n" if "\n" in text else " "
    return f"{text}{gap}{error.explain}" if error.explain else text


class _NamedOutput(io.FileIO):
    """A file whose errors say that it is the standard output."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STDOUT
            raise


def own_stdout(stdout: TextIO) -> TextIO:
    """The standard output for this process, in place of the interpreter's: what the encoding lacks is
    escaped whoever writes, and an OSError has the file name ``STDOUT``."""
    raw = _NamedOutput(stdout.fileno(), "wb", closefd=False)
    unbuffered = getattr(stdout, "write_through", False)
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=stdout.encoding,
        errors="backslashreplace",
        line_buffering=getattr(stdout, "line_buffering", False),
        write_through=unbuffered,
    )


def drop_stdout() -> None:
    """What waits to be written to it, and whatever else comes: the interpreter would try once more at its
    end, and complain."""
    sys.stdout = None
