"""Blocks of the documents, by section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "SPARK", "Block", "blocks", "sections"]

ROOT = Path(__file__).resolve().parents[2]
SPARK = "minishuffle/spark/README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$\n?((?:\n*    [^\n]*\n)*)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``printed`` is the indented text right below it."""

    language: str
    code: str
    printed: str


def sections(document: str) -> Iterator[tuple[str, list[Block]]]:
    """Each section of the second level with its blocks."""
    for part in (ROOT / document).read_text(encoding="utf-8").split("\n## ")[1:]:
        found = []
        for language, code, below in BLOCK.findall(part):
            printed = "".join(re.findall(r"^    (.*\n)", below, re.MULTILINE))
            found.append(Block(language, code, printed))
        yield part.partition("\n")[0], found


def blocks(document: str, title: str, language: str = "python") -> list[Block]:
    found = [block for block in dict(sections(document))[title] if block.language == language]
    assert found, f"{document} has no {language} block in {title!r}"
    return found
