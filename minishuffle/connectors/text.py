"""Lines of text files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from minishuffle.connectors.files import (
    BEGINNING_BYTES,
    Paths,
    compression_of,
    decompressed,
    files_of,
    opened,
    refuse_compressed,
)
from minishuffle.errors import WrongInput
from minishuffle.limits import LIST_ROWS, MIB

__all__ = ["TextSource"]

TextSplit: TypeAlias = tuple[str, int, int | None]

TEXT_SPLIT_BYTES = 8 * MIB


class TextSource:
    """Lines of UTF-8 text files, without their line ends (LF or CRLF).

    A split is (path, first byte, byte after the last): about 8 MiB of whole lines; one file that is
    compressed, whose last byte is None.

    Raises:
        UnknownName: no such file.
        UsageError: a file cannot be read.
        WrongInput: (from ``read``) a file is not UTF-8, or has changed since it was listed.
    """

    bounded = True
    format: Literal["rows"] = "rows"

    def __init__(self, paths: Paths) -> None:
        listed = files_of(paths)
        self._splits = [split for file in listed for split in _text_splits(file.path)]
        self._listed = {file.path: file for file in listed}

    def splits(self) -> list[TextSplit]:
        return self._splits

    def read(self, split: TextSplit, offset: int) -> Iterator[list[str]]:
        path = split[0]
        self._listed[path].check_unchanged()
        for start, data in _text_of(split):
            try:
                text = data.decode("utf-8-sig" if start == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise WrongInput(
                    f"{path} is not UTF-8 at byte {start + error.start}: convert it first, with iconv for "
                    "example"
                ) from error
            lines = text.replace("\r\n", "\n").split("\n")
            if not lines[-1]:
                lines.pop()
            for first in range(min(offset, len(lines)), len(lines), LIST_ROWS):
                yield lines[first : first + LIST_ROWS]
            offset = max(0, offset - len(lines))


def _text_splits(path: str) -> Iterator[TextSplit]:
    """The splits of a file. Each ends at the first line start TEXT_SPLIT_BYTES or more after its own start,
    or at the end of the file; a compressed file is a single split with end None."""
    with opened(path) as file:
        if compression_of(path) is not None:
            yield path, 0, None
            return
        refuse_compressed(path, file.read(BEGINNING_BYTES))
        size = file.seek(0, 2)
        start = 0
        while start < size:
            end = size
            if start + TEXT_SPLIT_BYTES < size:
                file.seek(start + TEXT_SPLIT_BYTES - 1)
                file.readline()
                end = file.tell()
            yield path, start, end
            start = end


def _text_of(split: TextSplit) -> Iterator[tuple[int, bytes]]:
    """Pieces of whole lines, each with the number of its first byte."""
    path, start, end = split
    if end is not None:
        with opened(path) as file:
            file.seek(start)
            yield start, file.read(end - start)
        return
    with decompressed(path) as stream:
        while data := stream.read(TEXT_SPLIT_BYTES):
            data += stream.readline()
            yield start, data
            start += len(data)
