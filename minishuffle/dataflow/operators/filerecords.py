"""Cuts CSV files into records, which may hold line ends in quotation marks, as pyarrow does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

__all__ = ["csv_lines"]


@cache
def _csv_record(delimiter: str) -> re.Pattern[bytes]:
    """A record and its line end. A quotation mark counts only where a value begins."""
    between = re.escape(delimiter.encode())
    rest = b"[^%s\r\n]*+" % between
    value = b'(?:"(?:[^"]++|"")*+"%s|(?!")%s)' % (rest, rest)
    return re.compile(b"%s(?:%s%s)*+(?:\r\n?|\n|\\Z)" % (value, between, value))


def csv_lines(data: bytes, delimiter: str) -> Iterator[int]:
    """The line in which each record begins, of those that are not empty."""
    record, place, line = _csv_record(delimiter), 0, 1
    while place < len(data) and (match := record.match(data, place)) is not None:
        if match[0].strip(b"\r\n"):
            yield line
        line += match[0].count(b"\n") or match[0].count(b"\r")
        place = match.end()
