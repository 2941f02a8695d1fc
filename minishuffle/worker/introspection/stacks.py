"""Samples of a task thread's stack, folded: each distinct stack once, with its number of samples. Pure.

A stack begins with the current operator, or with other work of the task; frames of the run loop around it are
left out. A downstream operator of the chain is called from inside the operators before it, but appears on its
own. A thread that waits for input or output appears only as a wait.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import CodeType, FrameType
from typing import Final

from minishuffle import limits
from minishuffle.errors import clipped
from minishuffle.runtime.chain import called_by
from minishuffle.runtime.usererrors import is_users
from minishuffle.wire.inquiries import FrameKind, ProfiledFrame, ProfiledStack
from minishuffle.worker.tasks.busytime import ThreadState
from minishuffle.worker.tasks.task import SOURCE, part_of

__all__ = ["FoldedStacks"]

WAITS: Final[dict[ThreadState, str]] = {
    "idle": "waits for input",
    "backpressured": "waits for output",
}
DEEPER: Final = "deeper"
"""Stands for the operator where a stack is too deep to find it."""
FILE_CHARS_MAX: Final = 300


class FoldedStacks:
    """The samples of one thread.

    Args:
        source: what the source of the task is called, if it has one.
    """

    def __init__(self, source: str) -> None:
        self.samples: Counter[str] = Counter()
        """By the state of the thread."""
        self.left_out = 0
        """Samples of stacks beyond the limits."""
        self.frames: list[ProfiledFrame] = []
        self._source = source
        self._places: dict[tuple[CodeType | str, int], int] = {}
        """Positions in ``frames``, by code and line, or by the name of an operator or wait."""
        self._stacks: dict[tuple[int, ...], int] = {}
        self._roots = sorted((f"{each}{os.sep}" for each in sys.path if each), key=len, reverse=True)

    def stacks(self) -> list[ProfiledStack]:
        """The different ones, those with the most samples first."""
        ordered = sorted(self._stacks.items(), key=lambda each: each[1], reverse=True)
        return [ProfiledStack(samples=samples, frames=list(stack)) for stack, samples in ordered]

    def add(self, frame: FrameType | None, state: ThreadState, samples: int = 1) -> None:
        """Count ``samples`` for a thread in that state whose innermost frame this is."""
        self.samples[state] += samples
        wait = WAITS.get(state)
        stack = self._stack(frame) if wait is None else [self._named(wait, "wait")]
        key = tuple(stack)
        known = key in self._stacks or len(self._stacks) < limits.PROFILE_STACKS_MAX
        if not known or -1 in key:
            self.left_out += samples
        else:
            self._stacks[key] = self._stacks.get(key, 0) + samples

    def _stack(self, frame: FrameType | None) -> list[int]:
        """From the operator that the thread is in on; -1 for what has no room."""
        found: list[int] = []
        while frame is not None and len(found) < limits.PROFILE_FRAMES_MAX:
            name = self._begins(frame)
            if name is not None:
                return [self._named(name, "operator"), *reversed(found)]
            found.append(self._place(frame))
            frame = frame.f_back
        return [self._named(DEEPER, "operator"), *reversed(found)]

    def _begins(self, frame: FrameType) -> str | None:
        """The name shown for a frame of the run loop and for frames around it; None: it is another frame."""
        part = part_of(frame.f_code)
        return called_by(frame) if part is None else self._source if part == SOURCE else part

    def _named(self, name: str, kind: FrameKind) -> int:
        return self._position((name, 0), kind)

    def _place(self, frame: FrameType) -> int:
        kind: FrameKind = "code" if is_users(frame.f_code.co_filename) else "runtime"
        return self._position((frame.f_code, frame.f_lineno or 0), kind)

    def _position(self, place: tuple[CodeType | str, int], kind: FrameKind) -> int:
        """The position of that place in ``frames``; -1: there is no room for another one."""
        position = self._places.get(place)
        if position is None:
            position = len(self.frames)
            if position >= limits.PROFILE_PLACES_MAX:
                return -1
            self._places[place] = position
            self.frames.append(self._shown(*place, kind))
        return position

    def _shown(self, code: CodeType | str, line: int, kind: FrameKind) -> ProfiledFrame:
        if isinstance(code, str):
            return ProfiledFrame(function=code, kind=kind)
        function = clipped(code.co_qualname, limits.MESSAGE_NAME_CHARS_MAX)
        return ProfiledFrame(function=function, kind=kind, file=self._short(code.co_filename), line=line)

    def _short(self, file: str) -> str:
        """As modules are found, if it is one of these."""
        root = next((root for root in self._roots if file.startswith(root)), "")
        return clipped(file.removeprefix(root), FILE_CHARS_MAX)
