"""Cuts files into records: lines of JSON, and records of CSV, which may hold line ends in quotation marks.

Where a record ends does not depend on where the file was cut before, and not on what the records hold.
"""

from __future__ import annotations

import io
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

__all__ = ["Block", "CsvRecords", "JsonLines", "Splitter", "record_blocks", "line_at"]


@dataclass(frozen=True, slots=True)
class Block:
    """Whole records that follow each other in a file; the last one of the file may have no line end."""

    offset: int
    """The first byte, counted from 0 in the decompressed file."""
    data: bytes
    is_cut: bool = False
    """It is the beginning of one record that is too long."""


class Splitter(Protocol):
    """What a record is, in one format."""

    def end(self, data: bytes) -> int:
        """Behind the last record that has its line end in ``data``, which begins with a record; 0: none
        has."""
        ...

    def spans(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Begin and end of each record that is not empty, of a block."""
        ...

    def has_records(self, data: bytes, count: int) -> bool:
        """Whether what pyarrow takes for ``count`` records of a block is one record each."""
        ...

    def is_open(self, record: bytes) -> bool:
        """Whether the record, the last one of a file, ends too early."""
        ...

    def shortened(self, data: bytes) -> bytes:
        """The beginning of a shorter record, which ends where the one that begins with ``data`` does."""
        ...


def record_blocks(file: io.BufferedIOBase, splitter: Splitter, size: int) -> Iterator[Block]:
    """The file in blocks of about ``size`` bytes. A record that is longer may be cut; of twice that it is."""
    held, place = b"", 0
    while chunk := file.read(size):
        if not place and chunk.startswith(BOM_UTF8):
            place, chunk = len(BOM_UTF8), chunk[len(BOM_UTF8) :]
        place += len(chunk)
        held += chunk
        if end := splitter.end(held):
            yield Block(place - len(held), held[:end])
            held = held[end:]
        elif len(held) > size:
            yield Block(place - len(held), held[:size], is_cut=True)
            held, place = _behind(file, splitter, held, place, size)
    if held:
        yield Block(place - len(held), held)


def _behind(
    file: io.BufferedIOBase, splitter: Splitter, held: bytes, place: int, size: int
) -> tuple[bytes, int]:
    """What has been read behind a record that begins with ``held``, and how many bytes of the file have."""
    while True:
        held = splitter.shortened(held)
        chunk = file.read(size)
        place += len(chunk)
        held += chunk
        if splitter.end(held):
            _, end = next(splitter.spans(held))
            return held[end:], place
        if not chunk:
            return b"", place


def line_at(file: io.BufferedIOBase, offset: int) -> int:
    """The number of the line, counted from 1, that holds the byte."""
    data = file.read(offset)
    return 1 + (data.count(b"\n") or data.count(b"\r"))


class JsonLines:
    """Each line that is not blank is a record."""

    _LINE: Final = re.compile(rb"[^\r\n]*[^ \t\r\n][^\r\n]*")

    def end(self, data: bytes) -> int:
        """Blanks at the beginning of a line are no part of its record: none of them is cut."""
        ended = data.rfind(b"\n") + 1 or data.rfind(b"\r") + 1
        return ended or (0 if data.strip(b" \t") else len(data))

    def spans(self, data: bytes) -> Iterator[tuple[int, int]]:
        return (match.span() for match in self._LINE.finditer(data))

    def has_records(self, data: bytes, count: int) -> bool:
        return count == data.count(b"\n") + (not data.endswith(b"\n")) or count == len(list(self.spans(data)))

    def is_open(self, record: bytes) -> bool:
        return False

    def shortened(self, data: bytes) -> bytes:
        return b"x"


class CsvRecords:
    """Records as pyarrow reads them: a quotation mark counts only where a value begins, and ends that part of
    the value with the next one that is not doubled."""

    def __init__(self, delimiter: str) -> None:
        between = re.escape(delimiter.encode())
        rest = b"[^%s\r\n]*+" % between
        value = b'(?:"%s"%s|(?!")%s)' % (_repeated(b'[^"]++|""'), rest, rest)
        record = value + _repeated(between + value)
        self._empty_value = delimiter.encode()
        self._is_before_value = np.zeros(256, np.bool_)
        self._is_before_value[[ord(delimiter), *b'\r\n"']] = True
        self._values = re.compile(_repeated(value + between))
        self._value = re.compile(value)
        self._ended = re.compile(_repeated(record + b"(?:\r\n|\n|\r(?=[^\n]))"))
        self._record = re.compile(b"%s(?:\r\n?|\n|\\Z)" % record)

    def end(self, data: bytes) -> int:
        marks = np.flatnonzero(np.frombuffer(data, np.uint8) == ord('"'))
        if not len(marks):
            return data.rfind(b"\n") + 1 or data.rfind(b"\r", 0, len(data) - 1) + 1
        if self._are_pairs(data, marks) and (end := _line_end_outside(data, marks)):
            return end
        match = self._ended.match(data)
        return match.end() if match else 0

    def _are_pairs(self, data: bytes, marks: np.ndarray) -> bool:
        """Whether every other quotation mark is where a value begins, or follows one: then those between an
        odd number of marks and the next one are what is quoted."""
        opening = marks[2::2] if marks[0] == 0 else marks[::2]
        before = np.frombuffer(data, np.uint8)[opening - 1]
        return bool(self._is_before_value[before].all())

    def spans(self, data: bytes) -> Iterator[tuple[int, int]]:
        place = 0
        while place < len(data):
            match = self._record.match(data, place)
            end = len(data) if match is None else match.end()
            if data[place:end].strip(b"\r\n"):
                yield place, end
            place = end

    def has_records(self, data: bytes, count: int) -> bool:
        return True

    def is_open(self, record: bytes) -> bool:
        return self._record.match(record) is None

    def shortened(self, data: bytes) -> bytes:
        # What these mean depends on what follows.
        body = data.rstrip(b'"\r')
        match = self._values.match(body)
        rest = body[match.end() if match else 0 :]
        if rest.startswith(b'"') and not self._value.fullmatch(rest):
            return b'"' + data[len(body) :]
        return (b"x" if rest else self._empty_value) + data[len(body) :]


def _repeated(pattern: bytes) -> bytes:
    """As often as it matches, without trying fewer. The inner group is atomic because a possessive repetition
    keeps what the last try has taken in vain before Python 3.11.5 (CPython's gh-106052)."""
    return b"(?:(?>%s))*+" % pattern


def _line_end_outside(data: bytes, marks: np.ndarray) -> int:
    """Behind the last line end that is in no pair of marks."""
    limit = len(data)
    while (place := data.rfind(b"\n", 0, limit)) >= 0:
        before = int(np.searchsorted(marks, place))
        if before % 2 == 0:
            return place + 1
        limit = int(marks[before - 1])
    return 0
