"""Messages and instructions as a few words, and back: what transcripts are written in.

A message is its ``type`` and the fields that have not their default: ``worker_lost worker=1 epoch=1``. A
field that is True is its name alone, one that is False is ``name=no``, one that is empty is left out; so is
the term if it is the present one. Some things have a form of their own:

=====================  =========================================================================
``j1/read[0]#2``       attempt 2 of a subtask of job j1: job, operator, index, attempt
``read[0..1]``         a range of subtasks: operator, first, count
``holder_of_read[0]``  the holders of a subtask's snapshots
``w3/epoch1``          the address of a worker; with host and port if they are not its usual ones
``+2.5s``              a wall time, since the beginning of the transcript
``<20 bytes>``         a binary value that is no short word; ``programs=read``: the program of read is
                       ``b"read"``
=====================  =========================================================================

A part that has fields of its own stands on a line of its own below, with the name of the field that it is in,
or between parentheses.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from itertools import repeat
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel

from minishuffle.errors import ShuffleError
from minishuffle.ids import AttemptId, PartitionId, SubtaskId, held_operator, holder_operator, is_holder
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.messages import TaskAttempt, WorkerAddress
from minishuffle.wire.packed import (
    Cursor,
    PeerRows,
    SplitPosition,
    pack_placement,
    pack_positions,
    pack_traffic,
    unpack_placement,
    unpack_positions,
    unpack_traffic,
)
from minishuffle.worker.channels.registry import ChannelKey

__all__ = ["WALL", "Words", "split_words"]

WALL: Final = 1_000_000.0
"""The wall clock at the beginning of a transcript."""
SUBTASK: Final = re.compile(r"(?:(\w+)/)?([a-z_]+)\[(\d+)\](?:#(\d+))?")
RANGE: Final = re.compile(r"([a-z_]+)\[(\d+)\.\.(-?\d+)\]")
ADDRESS: Final = re.compile(r"w(\d+)/epoch(\d+)(?:/(.+):(\d+))?")
HOLDER: Final = "holder_of_"
WORD_BYTES_MAX: Final = 12
"""Binary values that are longer are not shown."""
SETTINGS: Final = JobSettings().model_dump()
MESSAGES: Final = ("message", "desired")
"""Fields whose parts are messages, and shown with their types."""


def split_words(text: str, separator: str = " ") -> list[str]:
    """The parts of a text between separators that are not inside quotes or parentheses."""
    parts, depth, quoted = [""], 0, False
    for char in text:
        quoted ^= char == '"'
        depth += 0 if quoted else (char == "(") - (char == ")")
        if char == separator and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += char
    assert not depth and not quoted, f"what is open in {text!r}?"
    return [each for each in parts if each]


def _number(value: float) -> str:
    if isinstance(value, float) and value >= WALL / 2:
        return f"{value - WALL:+.3f}".rstrip("0").rstrip(".") + "s"
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _text(text: str) -> str:
    return (
        text if re.fullmatch(r"[\w.:/-]+", text) else '"' + text.replace('"', "'").replace("\n", " | ") + '"'
    )


def _is_part(value: Any) -> bool:
    return isinstance(value, BaseModel) or (is_dataclass(value) and not isinstance(value, type))


def _defaults(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            yield name, info.get_default(call_default_factory=True)
        return
    for each in fields(value):
        made = each.default_factory() if each.default_factory is not MISSING else each.default
        yield each.name, made


class Words:
    """What the transcript calls things."""

    def __init__(self) -> None:
        self.term = 0
        self.vertices: dict[str, list[str]] = {}
        """By job, the names of its operators."""

    # --- from objects to words -------------------------------------------------------------------

    def lines(self, head: str, value: Any) -> list[str]:
        """``head`` and a message or an instruction, with a line below for each part."""
        job = getattr(value, "job", "") or "j1"
        words, below = self._words(value, job, nested=False)
        return [" ".join([head, *words]), *(f"    {each}" for each in below)]

    def token(self, value: Any) -> str:
        return self._token("", value, "j1")

    def _vertex(self, job: str, operator: int) -> str:
        if is_holder(operator):
            return HOLDER + self._vertex(job, held_operator(operator))
        return self.vertices.get(job, {})[operator] if job in self.vertices else f"operator{operator}"

    def _words(self, value: Any, job: str, *, nested: bool) -> tuple[list[str], list[str]]:
        shown = {
            name: getattr(value, name)
            for name, default in _defaults(value)
            if name != "type" and getattr(value, name) not in (default, None, "", b"", [], {}, ())
        }
        if shown.get("term") == self.term:
            del shown["term"]
        words, below = [*self._identity(value, shown, job)], list[str]()
        for name, each in shown.items():
            parts = each if isinstance(each, (list, tuple)) else [each]
            if all(map(_is_part, parts)):
                tokens = [self._token(name, part, job) for part in parts]
                tokens = [token for token in tokens if token != "()"]
                if nested or not any(token.startswith("(") for token in tokens):
                    words += [f"{name}={','.join(tokens)}"] if tokens else []
                else:
                    kinds = [getattr(part, "type", "") if name in MESSAGES else "" for part in parts]
                    texts = [token.removeprefix("(").removesuffix(")") for token in tokens]
                    below += [" ".join(filter(None, each)) for each in zip(repeat(name), kinds, texts)]
            elif isinstance(each, bool):
                words.append(name if each else f"{name}=no")
            else:
                words.append(f"{name}={self._token(name, each, job)}")
        return words, below

    def _identity(self, value: Any, shown: dict[str, Any], job: str) -> Iterator[str]:
        """The subtask that a message is about; its fields are not shown once more."""
        if isinstance(attempt := shown.get("attempt"), AttemptId) and isinstance(value, BaseModel):
            yield self._token("attempt", shown.pop("attempt"), attempt.subtask.job)
            return
        operator = getattr(value, "operator", -1)
        if operator is None or operator < 0 or isinstance(value, AttemptId):
            return
        named = self._vertex(job, operator)
        if shown.get("name") == named:
            del shown["name"]
        if hasattr(value, "first") and hasattr(value, "count"):
            yield f"{named}[{value.first}..{value.first + value.count - 1}]"
            taken = {"operator", "first", "count"}
        elif hasattr(value, "index"):
            attempt = "task_attempt" if hasattr(value, "task_attempt") else "attempt"
            prefix = f"{value.job}/" if hasattr(value, "job") else ""
            number = f"#{getattr(value, attempt)}" if hasattr(value, attempt) else ""
            yield f"{prefix}{named}[{value.index}]{number}"
            taken = {"job", "operator", "index", attempt}
        else:
            yield f"operator={named}"
            taken = {"operator"}
        for each in taken & shown.keys():
            del shown[each]

    def _token(self, name: str, value: Any, job: str) -> str:
        match value:
            case WorkerAddress(worker=worker, epoch=epoch, host=host, data_port=port):
                usual = (host, port) == (f"10.0.0.{worker}", 5000 + worker)
                return f"w{worker}/epoch{epoch}" + ("" if usual else f"/{host}:{port}")
            case AttemptId(subtask, attempt):
                return f"{self._token(name, subtask, job)}#{attempt}"
            case SubtaskId():
                return f"{value.job}/{self._vertex(value.job, value.operator)}[{value.index}]"
            case ChannelKey(attempt, edge, producer):
                return f"edge{edge}.{producer}->{self._token(name, attempt, job)}"
            case PartitionId(job=of, edge=edge, producer=producer):
                return f"{of}/edge{edge}.{producer}"
            case ShuffleError():
                return _text(f"{type(value).__name__}: {value}")
            case Enum():
                return str(value.value)
            case bytes():
                return self._packed(name, value)
            case bool():
                return "yes" if value else "no"
            case int() | float():
                return _number(value)
            case Mapping():
                return self._mapping(name, value, job)
            case list() | tuple() | frozenset():
                ordered = sorted(value) if isinstance(value, frozenset) else value
                if name == "operators":
                    return ",".join(
                        str(each) if isinstance(each, str) else self._vertex(job, each) for each in ordered
                    )
                if name == "subtasks":
                    return ",".join(f"{self._vertex(job, operator)}[{index}]" for operator, index in ordered)
                return ",".join(self._token(name, each, job) for each in ordered)
            case _ if _is_part(value):
                words, _ = self._words(value, getattr(value, "job", "") or job, nested=True)
                return words[0] if len(words) == 1 and SUBTASK.fullmatch(words[0]) else f"({' '.join(words)})"
        return _text(str(value))

    def _packed(self, name: str, value: bytes) -> str:
        if name == "positions":
            return ",".join(
                f"{each.split}:{each.position}+{each.lease}"
                + (":done" if each.done else "")
                + (f"@{each.cursor.name}" if each.cursor is not None else "")
                for each in unpack_positions(value)
            )
        if name == "traffic":
            return ",".join(":".join(map(str, each)) for each in unpack_traffic(value))
        is_word = len(value) <= WORD_BYTES_MAX and re.fullmatch(rb"[ -~]+", value)
        return _text(value.decode()) if is_word else f"<{len(value)} bytes>"

    def _mapping(self, name: str, value: Mapping[Any, Any], job: str) -> str:
        entries = []
        for key, each in value.items():
            if name == "settings":
                if each != SETTINGS[key]:
                    entries.append(f"{key}:{self._token(name, each, job)}")
            elif name == "placement":
                workers = "+".join(map(str, unpack_placement(each)))
                entries.append(f"{self._vertex(job, key)}:{workers}")
            elif name == "programs":
                named = self._vertex(job, key)
                entries.append(named if each == named.encode() else f"{named} {self._packed(name, each)}")
            else:
                entries.append(f"{key}:{self._token(name, each, job)}")
        return ",".join(entries) or "-"

    # --- from words to objects -------------------------------------------------------------------

    def subtasks(self, tokens: Iterable[str]) -> list[re.Match[str]]:
        """The subtasks that are named first."""
        return [match for token in tokens if (match := SUBTASK.fullmatch(token))]

    def _operator(self, job: str, name: str) -> int:
        if name.startswith(HOLDER):
            return holder_operator(self._operator(job, name.removeprefix(HOLDER)))
        return self.vertices[job].index(name)

    def identity(self, match: re.Match[str]) -> dict[str, Any]:
        job, name, index, attempt = match.groups()
        job = job or "j1"
        return {
            "job": job,
            "operator": self._operator(job, name),
            "index": int(index),
            "attempt": int(attempt or 1),
        }

    def attempt(self, text: str) -> AttemptId:
        match = SUBTASK.fullmatch(text)
        assert match is not None, text
        return AttemptId.of(**self.identity(match))

    def made(
        self, kind: type[Any], tokens: Iterable[str], given: Mapping[str, Any], below: Iterable[str] = ()
    ) -> Any:
        """A message or a part of one. ``given`` is for fields that are not named; ``below`` are its parts."""
        values = self._values(kind, tokens, str(given.get("job", "j1")))
        for line in below:
            name, *words = split_words(line)
            part = self._part(kind, name, words, values.get("job", "j1"))
            if _kind(kind, name)[0] is list:
                values.setdefault(name, []).append(part)
            else:
                values[name] = part
        for name, info in kind.model_fields.items():
            if name not in values and (name in given or info.is_required()):
                values[name] = given[name] if name in given else (_kind(kind, name)[0] or dict)()
        return kind(**values)

    def _part(self, kind: type[Any], name: str, words: list[str], job: str) -> Any:
        inner = _kind(kind, name)[1]
        if inner is WorkerAddress:
            return self._address(words[0])
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return self._values(inner, words, job)
        return self.made(inner, words, {"job": job, "term": self.term})

    def _values(self, kind: Any, tokens: Iterable[str], job: str) -> dict[str, Any]:
        known = getattr(kind, "model_fields", {})
        values: dict[str, Any] = {}
        for token in tokens:
            if match := RANGE.fullmatch(token):
                name, first, last = match.groups()
                values |= {"operator": self.vertices[job].index(name), "first": int(first)}
                values["count"] = int(last) - int(first) + 1
                continue
            if match := SUBTASK.fullmatch(token):
                found = self.identity(match)
                if "task_attempt" in known:
                    found["task_attempt"] = found.pop("attempt")
                if "name" in known and kind is not TaskAttempt:
                    found["name"] = match[2]
                job = found["job"]
                if "attempt" in known and known["attempt"].annotation is AttemptId:
                    found = {"attempt": self.attempt(token)}
                values |= {name: each for name, each in found.items() if name in known}
                continue
            name, equals, text = token.partition("=")
            values[name] = self._value(kind, name, text, job) if equals else True
        return values

    def _value(self, kind: Any, name: str, text: str, job: str) -> Any:
        outer, inner = _kind(kind, name)
        if inner is AttemptId and outer is list:
            return [self.attempt(each) for each in text.split(",")]
        is_model = isinstance(inner, type) and issubclass(inner, BaseModel)
        if text.startswith("(") or (is_model and outer is list) or inner is WorkerAddress:
            parts = [
                self._part(kind, name, split_words(each[1:-1] if each[0] == "(" else each), job)
                for each in split_words(text, ",")
            ]
            return parts if outer is list else parts[0]
        text = text.strip('"')
        if name == "operator" and not text.isdigit():
            return self.vertices[job].index(text)
        if name in PACKED:
            return PACKED[name](text)
        if name == "programs":
            return {self.vertices[job].index(each): each.encode() for each in text.split(",")}
        if name == "placement":
            pairs = (each.split(":") for each in text.split(","))
            return {
                self.vertices[job].index(of): pack_placement([*map(int, workers.split("+"))])
                for of, workers in pairs
            }
        if outer is list:
            return text.split(",") if text else []
        if outer is dict:
            pairs = [each.split(":", 1) for each in text.split(",")]
            return {key: each.split("+") if inner is list else each for key, each in pairs}
        return text

    def _address(self, text: str) -> WorkerAddress:
        match = ADDRESS.fullmatch(text)
        assert match is not None, text
        worker, epoch, host, port = match.groups()
        return WorkerAddress(
            worker=int(worker),
            epoch=int(epoch),
            host=host or f"10.0.0.{worker}",
            data_port=int(port or 5000 + int(worker)),
        )


def _positions(text: str) -> bytes:
    entries = []
    for each in text.split(","):
        where, _, name = each.partition("@")
        split, rows, *done = where.split(":")
        position, _, lease = rows.partition("+")
        cursor = Cursor(name, rows=int(position)) if name else None
        entries.append(SplitPosition(int(split), int(position), int(lease or 0), bool(done), cursor))
    return pack_positions(entries)


def _traffic(text: str) -> bytes:
    return pack_traffic(PeerRows(*map(int, each.split(":"))) for each in text.split(","))


PACKED: Final[Mapping[str, Callable[[str], bytes]]] = {"positions": _positions, "traffic": _traffic}


def _kind(kind: Any, name: str) -> tuple[Any, Any]:
    """What a field holds: list or dict or None, and the type of what is in it."""
    info = getattr(kind, "model_fields", {}).get(name)
    found: Any = info.annotation if info is not None else str
    while get_origin(found) in (Annotated, Union, types.UnionType):
        found = next(each for each in get_args(found) if each is not type(None))
    outer = get_origin(found)
    if outer is None:
        return None, found
    if outer not in (list, dict):
        return None, found
    inner = get_args(found)[-1]
    return outer, get_args(inner)[0] if get_origin(inner) is Annotated else get_origin(inner) or inner
