"""When the whole machine stood still: a process of its own that sleeps a moment at a time, and wakes late.

A virtual machine is put aside now and then for as long as a second, and all that is measured in it is silent
then. Whoever only waits for a processor that others use wakes soon, so that shorter delays are not looked at.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from minishuffle.errors import ShuffleError

__all__ = ["STALL_SECONDS", "Span", "Stalls", "awake"]

Vector = np.ndarray[Any, np.dtype[np.int64]]

STALL_SECONDS: Final = 0.1
"""Shorter ones may be others' use of the processors."""
SLEEP_SECONDS: Final = 0.01
END_SECONDS_MAX: Final = 10.0
_ANSWER: Final = "so far\n"

Span = tuple[int, int]
"""Monotonic nanoseconds of a beginning and an end."""

_WATCH: Final = """
import os, select, sys, time
sleep, stall = float(sys.argv[1]), float(sys.argv[2])
last = time.monotonic_ns()
while True:
    asked = select.select([0], [], [], sleep)[0]
    now = time.monotonic_ns()
    if now - last > stall * 1e9:
        os.write(1, b"%d %d\\n" % (last, now))
    last = now
    if asked:
        if not os.read(0, 1):
            break
        os.write(1, b"so far\\n")
"""
"""Says "so far" for each byte of its standard input, until that ends, as it does with whoever started it."""


class Stalls:
    """Watches from its entry on; ``path`` is a file for what it sees."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Stalls:
        command = [sys.executable, "-I", "-S", "-c", _WATCH, str(SLEEP_SECONDS), str(STALL_SECONDS)]
        with self._path.open("wb") as out:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spans(self) -> list[Span]:
        """All so far, in order, also one that ended just now.

        Raises:
            ShuffleError: the watching process does not answer.
        """
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(b"?")
        self._process.stdin.flush()
        self._asked += 1
        deadline = time.monotonic() + END_SECONDS_MAX
        while (text := self._path.read_text()).count(_ANSWER) < self._asked:
            if time.monotonic() > deadline:
                raise ShuffleError(f"the process that watches for stalls is silent: {text[-200:]!r}")
            time.sleep(SLEEP_SECONDS)
        lines = text.replace(_ANSWER, "").splitlines()
        return [(int(begin), int(end)) for begin, end in map(str.split, lines)]


def awake(edges: Vector, stalls: Sequence[Span]) -> Vector:
    """The nanoseconds between each two of these times without those at which the machine stood still."""
    lengths = np.diff(edges)
    for begin, end in stalls:
        lengths = lengths - np.maximum(0, np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin))
    return lengths
