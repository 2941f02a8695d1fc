"""A launcher's observation of the end of a worker process.

It has the exit status, whether the kernel has killed a process for lack of memory meanwhile, and the rows
that tasks had in hand. The coordinator decides what follows (``coordinator/jobs/deaths.py``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any, Final

from minishuffle.wire.requests import UserCall, WorkerEnded
from minishuffle.worker.tasks.crashrecord import RECORD_BYTES, calls_in, is_leaving, is_used

__all__ = ["Observation", "observed", "signal_name"]

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
FLAG: Final = "--crash-record"
RUNS: Final = ("R", "S")
"""States of a process that is neither stopped nor waits for a disk, in ``/proc``."""
LOOK_SECONDS: Final = 10.0
"""Seconds between two looks at the kernel's counter. A process that the kernel kills for lack of memory ends
within this time."""
_log = logging.getLogger("minishuffle.local")


class Observation:
    """A launcher's view of one worker process, from its start to its end.

    Args:
        memory: memory shared with the worker; None where the system does not have it.
    """

    def __init__(self, memory: mmap | None) -> None:
        self._memory = memory
        self._counter: Path | None = None
        """The kernel's counter of processes of this cgroup killed for lack of memory."""
        self._killed_before = self._killed_lately = 0
        """Values of the counter: a while ago, and at the last look."""
        self._look_at = -math.inf
        self._pid = 0
        self._hung = False
        """The process did not react, although it could run."""
        self._held: list[UserCall] = []
        """Calls of its tasks at that time."""

    def began(self, pid: int) -> None:
        """The process was started just now."""
        self._pid, self._counter = pid, _oom_counter(pid)
        self._killed_before = self._killed_lately = _oom_kills(self._counter)

    def look(self, now: float) -> None:
        """(Periodically.) The process runs, so a process killed a while ago was another one of its cgroup."""
        if now >= self._look_at:
            self._killed_before, self._killed_lately = self._killed_lately, _oom_kills(self._counter)
            self._look_at = now + LOOK_SECONDS

    def hangs(self) -> None:
        """The process does not react, and is about to be killed. It may be the cause itself, unless it is
        stopped or a disk does not answer. Then only calls that are still the same at its end count."""
        self._hung = _state(self._pid) in RUNS
        self._held = self._calls()

    def ended_by_itself(self, code: int) -> bool:
        """Whether an ended process had announced its end; ``code`` is negative for a signal. Without a
        record, the code of an orderly end counts as an announcement."""
        if self._memory is None or not is_used(self._memory):
            return code == 0
        return is_leaving(self._memory)

    def report(self, ready: dict[str, Any] | None, code: int) -> WorkerEnded | None:
        """The report for the coordinator; None if the worker was not registered, or ended by itself.

        Args:
            ready: the contents of its ready line.
            code: as in :meth:`ended_by_itself`.
        """
        if ready is None or "epoch" not in ready or self.ended_by_itself(code):
            return None
        return WorkerEnded(
            worker=ready["worker"],
            epoch=ready["epoch"],
            code=max(-1, code),
            signal=signal_name(-code) if code < 0 else "",
            out_of_memory=_oom_kills(self._counter) > self._killed_before,
            hung=self._hung,
            recorded=self._memory is not None and is_used(self._memory),
            calls=[call for call in self._calls() if not self._hung or call in self._held],
        )

    def _calls(self) -> list[UserCall]:
        return calls_in(self._memory) if self._memory is not None else []

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        if self._memory is not None:
            self._memory.close()


@contextlib.contextmanager
def observed() -> Iterator[tuple[Observation, list[str], tuple[int, ...]]]:
    """For the start of a worker process: its observation, further arguments of its command, and the
    descriptors that it is to inherit. If the block raises, nothing is left of it."""
    try:
        descriptor = os.memfd_create("minishuffle-crash-record")
    except (AttributeError, OSError) as error:  # only on Linux; there may be no more descriptors
        _log.warning("what tasks of a worker have in hand cannot be recorded: %s", error)
        yield Observation(None), [], ()
        return
    try:
        os.ftruncate(descriptor, RECORD_BYTES)
        observation = Observation(mmap(descriptor, RECORD_BYTES))
        try:
            yield observation, [FLAG, str(descriptor)], (descriptor,)
        except BaseException:
            observation.close()
            raise
    finally:
        os.close(descriptor)


def signal_name(number: int) -> str:
    """The name of a signal; signals between SIGRTMIN and SIGRTMAX have only a number."""
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")


def _state(pid: int) -> str:
    """The state of a process, as one letter of ``/proc``; empty if it is not known."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


# --- the memory killer ----------------------------------------------------------------------------


def _oom_counter(pid: int) -> Path | None:
    """The file that has a line ``oom_kill N`` for the cgroup of a process (version 2 or 1); None if there is
    none. In a container the path may be the host's, and the container's cgroup is the root."""
    try:
        lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = CGROUPS, "memory.events"
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", "memory.oom_control"
        else:
            continue
        for folder in (root / path.lstrip("/"), root):
            if (folder / name).exists():
                return folder / name
    return None


def _oom_kills(counter: Path | None) -> int:
    """How many processes of the cgroup the kernel has killed so far; 0 if nobody knows."""
    with contextlib.suppress(OSError, ValueError):
        for line in counter.read_text().splitlines() if counter is not None else ():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
