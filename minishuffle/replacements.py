"""The replacement of lost processes by a launcher, and the end of processes that hang. Pure.

A coordinator is restarted at once: nothing recovers without it. The start of a worker costs about a second of
processor time, most of it for imports, which tasks on the same machine need while they recover. A lower
priority does not help: an unprivileged process cannot raise it again, so the worker would keep it. So the
start waits until all tasks run and emit again, unless a task waits for a slot, which the new process has.

A process that hangs (it is stopped, a function holds the interpreter's lock, a disk does not answer) counts
as lost once the coordinator has declared it lost. It is ended then, while another one starts: they share no
locks or ports.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from minishuffle import limits
from minishuffle.backoff import Backoff
from minishuffle.wire.requests import JOB_LIVE, ClusterStatus, WorkerInfo

__all__ = ["CoordinatorRestarts", "Orders", "Replacements", "SignalSequence"]

RECOVERY_SECONDS_MAX: Final = 10.0
"""Longest recovery of a task for which a start waits; a task that keeps failing takes longer."""
SETTLE_SECONDS: Final = 0.5
"""Seconds that running tasks need to make their links and emit."""
BACKOFF: Final = Backoff(0.5, 8.0, at_once=1)
"""Wait between a loss and the next start, by losses in a row of young processes."""
ORDER_BACKOFF: Final = Backoff(1.0, 8.0)
"""Wait between orders of workers, by workers in a row that never registered."""
ORDER_FAILURES_MAX: Final = 5
"""Workers in a row that never registered after which no more are ordered."""
REGISTRATION_SECONDS_MAX: Final = 60.0
"""Seconds within which a started process must register. Without a coordinator it gives up earlier by
itself."""
TERM_SECONDS: Final = 1.0
"""Seconds between SIGTERM and SIGKILL to a process that hangs."""
KILL_SECONDS: Final = 2.0
"""Seconds for a process to end after SIGKILL. If it does not, it is in a system call that cannot be
interrupted."""
_RECOVERING: Final = frozenset({"lost", "restarting", "created"})


@dataclass(slots=True)
class _Process:
    """The last process of a coordinator, or with one worker id."""

    started_at: float = float("-inf")
    young_losses: int = 0
    """In a row."""
    lost_at: float | None = None
    registered: bool = True
    """The coordinator knows it; True for the first workers of a cluster."""

    def lose(self, now: float) -> None:
        """The process has ended, and not in order."""
        young = now < self.started_at + limits.YOUNG_SECONDS
        self.young_losses = self.young_losses + 1 if young else 0
        self.lost_at = now

    @property
    def due_at(self) -> float:
        """The earliest time at which a lost process may be replaced."""
        assert self.lost_at is not None
        return self.lost_at + BACKOFF.seconds(self.young_losses)


class Replacements:
    """The worker processes of one launcher, by worker id. A replacement gets the id of the lost worker; the
    coordinator decides whether it is a standby worker."""

    def __init__(self, workers: list[int]) -> None:
        self._processes = {worker: _Process() for worker in workers}
        self._recovering_at = -math.inf
        """The last time at which tasks were recovering."""

    @property
    def pending(self) -> bool:
        """Whether a lost process is not replaced yet."""
        return any(process.lost_at is not None for process in self._processes.values())

    def lost(self, worker: int, now: float) -> None:
        """The process of a worker has ended, and not in order."""
        self._processes[worker].lose(now)

    def hung(self, workers: Iterable[WorkerInfo], pids: Mapping[int, int], now: float) -> list[int]:
        """The worker ids of processes that hang: they run, but the coordinator has declared them lost, or has
        not seen them for ``REGISTRATION_SECONDS_MAX``. Each is returned once, and counts as lost from then
        on.

        Args:
            workers: the coordinator's list.
            pids: of running processes by worker id, without those already returned.
        """
        known = {info.worker: info for info in workers}
        found = []
        for worker, pid in pids.items():
            process, info = self._processes[worker], known.get(worker)
            if info is not None and info.pid == pid:
                process.registered = True
                is_hung = info.state == "lost"
            else:
                is_hung = not process.registered and now >= process.started_at + REGISTRATION_SECONDS_MAX
            if is_hung:
                self.lost(worker, now)
                found.append(worker)
        return found

    def due(self, status: ClusterStatus, now: float) -> list[int]:
        """The worker ids whose processes must be started now."""
        alive = {info.worker for info in status.workers if info.state == "alive"}
        states = {task.state for job in status.jobs if job.state in JOB_LIVE for task in job.tasks}
        urgent = "waiting for a slot" in states
        if states & _RECOVERING:
            self._recovering_at = now
        found = []
        for worker, process in self._processes.items():
            if process.lost_at is None or worker in alive or now < process.due_at:
                continue
            settled_at = max(process.lost_at, self._recovering_at) + SETTLE_SECONDS
            if states and not urgent and now < min(settled_at, process.lost_at + RECOVERY_SECONDS_MAX):
                continue
            process.started_at, process.lost_at, process.registered = now, None, False
            found.append(worker)
        return found


class Orders:
    """Orders of workers that another system starts, such as Spark on its executors: ``wanted`` of them are
    ordered or running. Each order has a unique number, which is its worker's id.

    Invariant: ``len(open) ≤ wanted``.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.open: set[int] = set()
        """Orders that have not ended, and whose workers are not lost."""
        self.first_failure = ""
        self._numbers = 0
        self._failures = 0
        """In a row."""
        self._not_before = 0.0

    def due(self, now: float) -> list[int]:
        """Numbers of the orders to place now."""
        if now < self._not_before or self.failed:
            return []
        placed = []
        while len(self.open) < self.wanted:
            self._numbers += 1
            self.open.add(self._numbers)
            placed.append(self._numbers)
        return placed

    def lost(self, order: int) -> None:
        """The worker of an order is lost: another order replaces this one, which may not have ended."""
        self.open.discard(order)

    def ended(self, order: int, reason: str, was_registered: bool, now: float) -> None:
        """An order has ended; ``reason`` is empty for an orderly end."""
        self.open.discard(order)
        if was_registered:
            self._failures = 0
            return
        self._failures += 1
        self.first_failure = self.first_failure or reason
        self._not_before = now + ORDER_BACKOFF.seconds(self._failures)

    @property
    def failed(self) -> bool:
        """Whether no more workers are ordered."""
        return self._failures >= ORDER_FAILURES_MAX


class SignalSequence:
    """The signals that end a process that hangs: it is continued and asked to end in order, in case it was
    only stopped, and killed ``TERM_SECONDS`` later.

    Args:
        began: the time of the first signal.
    """

    def __init__(self, began: float) -> None:
        self._due = [(began, (signal.SIGCONT, signal.SIGTERM)), (began + TERM_SECONDS, (signal.SIGKILL,))]
        self._said_at = began + TERM_SECONDS + KILL_SECONDS
        self._said = False

    def due(self, now: float) -> list[signal.Signals]:
        """The signals to send now, each once."""
        found: list[signal.Signals] = []
        while self._due and now >= self._due[0][0]:
            found += self._due.pop(0)[1]
        return found

    def outlived(self, now: float) -> bool:
        """Whether the running process should have ended by now; True once."""
        said, self._said = self._said, self._said or now >= self._said_at
        return self._said and not said


class CoordinatorRestarts:
    """The restarts of a launcher's coordinator."""

    def __init__(self, started: float) -> None:
        self._process = _Process(started)

    def started(self, now: float) -> None:
        """A coordinator process was started."""
        self._process.started_at = now

    def due(self, ended: float) -> float | None:
        """Note the end of its process. Returns the time at which the next one starts; None: restarts are too
        frequent."""
        self._process.lose(ended)
        often = self._process.young_losses > limits.COORDINATOR_RESTARTS_MAX
        return None if often else self._process.due_at
