"""What jobs gave at one time, as data: entries of several parts, and those that have changed since.

A part is files ``<part>.<number>.json.xz`` in ``tests/api/ledger``: by name what is ``given`` and the
``value`` that came of it. Files are added and never edited. An entry that gives something else from some
commit on stands in ``changed.json`` there, under the line of the CHANGELOG that is its cause, with its old
and its new value.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Ledger", "PARTS", "Value", "digest", "plain", "unplain"]

Value: TypeAlias = Any
"""What JSON holds."""
PARTS = ("pipelines", "widened", "types", "counts", "deaths", "refusals", "documents")
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "api" / "ledger"


def digest(answer: Any) -> str:
    """Sixteen letters for an answer, by its ``repr``."""
    return hashlib.sha256(repr(answer).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Rows as JSON holds them: a tuple is an object with its items."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return {"()": [plain(each) for each in value]}
    return [plain(each) for each in value] if isinstance(value, list) else value


def unplain(value: Any) -> Any:
    """The rows of :func:`plain`."""
    if isinstance(value, dict):
        if value.keys() == {"()"}:
            return tuple(unplain(each) for each in value["()"])
        return {name: unplain(each) for name, each in value.items()}
    return [unplain(each) for each in value] if isinstance(value, list) else value


@dataclass
class Ledger:
    """The parts in a folder, and the changes beside them."""

    folder: Path = FOLDER
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Those that were read."""

    def write(self, part: str, entries: Mapping[str, tuple[Any, Value]]) -> int:
        """Add what is given and the value of those entries that are not there yet; gives how many."""
        there = self.part(part)
        new = {
            name: {"given": given, "value": value}
            for name, (given, value) in entries.items()
            if name not in there
        }
        if new:
            text = json.dumps(new, separators=(",", ":"))
            with (self.folder / f"{part}.{len(self._files(part))}.json.xz").open("xb") as file:
                file.write(lzma.compress(text.encode()))
            there |= new
        return len(new)

    def _files(self, part: str) -> list[Path]:
        return sorted(self.folder.glob(f"{part}.*.json.xz"))

    def part(self, part: str) -> dict[str, Any]:
        """By entry what is given and its value."""
        if part not in self.parts:
            found: dict[str, Any] = {}
            for file in self._files(part):
                found |= json.loads(lzma.decompress(file.read_bytes()))
            self.parts[part] = found
        return self.parts[part]

    def changes(self) -> dict[str, dict[str, dict[str, Value]]]:
        """By cause and entry (``part/name``), the old and the new value."""
        found: dict[str, dict[str, dict[str, Value]]] = json.loads((self.folder / "changed.json").read_text())
        return found

    def wanted(self, part: str) -> dict[str, Value]:
        """By entry the value that it is to have now."""
        values = {name: entry["value"] for name, entry in self.part(part).items()}
        for entries in self.changes().values():
            for entry, change in entries.items():
                its, _, name = entry.partition("/")
                if its == part:
                    values[name] = change["new"]
        return values

    def check_changes(self, changelog: str) -> list[str]:
        """What is wrong with the list of changes."""
        problems, seen = [], set()
        text = re.sub(r"\s+", " ", changelog)
        for cause, entries in self.changes().items():
            if re.sub(r"\s+", " ", cause) not in text:
                problems.append(f"{cause!r} is no line of the CHANGELOG")
            for entry, change in entries.items():
                part, _, name = entry.partition("/")
                if entry in seen:
                    problems.append(f"{entry} has two causes")
                seen.add(entry)
                if part not in PARTS or name not in self.part(part):
                    problems.append(f"{entry} is not in the ledger")
                elif change["old"] != (value := self.part(part)[name]["value"]):
                    problems.append(f"{entry} had {value!r}, not {change['old']!r}")
                elif change["new"] == change["old"]:
                    problems.append(f"{entry} has not changed")
        return problems

    def differing(
        self, part: str, play: Callable[[Any], Value], names: Iterable[str] | None = None
    ) -> dict[str, dict[str, Value]]:
        """Entries that give something else, as ``changed.json`` would have them; ``names``: those alone."""
        entries, wanted = self.part(part), self.wanted(part)
        found = {}
        for name in entries if names is None else names:
            given = entries[name]["given"]
            if part == "refusals" and wanted[name] is not None:
                given = wanted[name]  # Which tests expect now.
            value = play(given)
            if value != wanted[name]:
                found[f"{part}/{name}"] = {"old": entries[name]["value"], "new": value}
        return found
