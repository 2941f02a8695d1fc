"""Count the words of text files."""

from __future__ import annotations

import re
from pathlib import Path

from minishuffle.api.stream import Stream

__all__ = ["SHIPPED_TEXT", "wordcount", "words"]

SHIPPED_TEXT = Path(__file__).with_name("alice.txt")
"""Alice's Adventures in Wonderland, 26,457 words; see NOTICE beside it."""

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


def words(line: str) -> list[str]:
    """The words of one line, in lower case: letters, with apostrophes inside."""
    return _WORD.findall(line.lower())


def wordcount(files: str = str(SHIPPED_TEXT)) -> Stream:
    """Count the words of text files: one (word, count) row for each word.

    ``files`` is a path or a glob pattern.
    """
    return Stream.text(files).flat_map(words).key_by(lambda word: word).count().collect()
