"""Which processes a launcher starts in place of lost ones, and when. Pure.

A coordinator starts again at once: nothing recovers without it. The start of a worker costs about a second
of processor time, most of it for imports, which tasks on the same machine would miss while they recover. A
lower priority is no way out: without privilege no process can raise its own again, and the worker would keep
it. So the start waits until all tasks run again, unless one waits for a slot, which the new process brings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minishuffle import limits
from minishuffle.wire.requests import ClusterStatus

__all__ = ["CoordinatorRestarts", "Replacements"]

RECOVERY_SECONDS_MAX: Final = 10.0
"""A task that restarts for longer, since it fails again and again, holds no start up."""
YOUNG_SECONDS: Final = 5.0
"""A process that is lost sooner after its start may be lost each time."""
BACKOFF_SECONDS: Final = 0.5
BACKOFF_SECONDS_MAX: Final = 8.0
_RECOVERING: Final = frozenset({"lost", "restarting", "created"})


@dataclass(slots=True)
class _Process:
    """The last process with one worker id."""

    started_at: float = float("-inf")
    young_losses: int = 0
    """In a row."""
    lost_at: float | None = None


class Replacements:
    """The worker processes of one launcher, by worker id; a lost one's id goes to the next. Which of the new
    ones are on standby the coordinator says."""

    def __init__(self, workers: list[int]) -> None:
        self._processes = {worker: _Process() for worker in workers}

    @property
    def pending(self) -> bool:
        """Some process was lost and no other has been started so far."""
        return any(process.lost_at is not None for process in self._processes.values())

    def lost(self, worker: int, now: float) -> None:
        """The process with that id has ended, and not in order."""
        process = self._processes[worker]
        young = now < process.started_at + YOUNG_SECONDS
        process.young_losses = process.young_losses + 1 if young else 0
        process.lost_at = now

    def due(self, status: ClusterStatus, now: float) -> list[int]:
        """The ids to start processes for now."""
        alive = {info.worker for info in status.workers if info.state == "alive"}
        states = {
            task.state for job in status.jobs if job.state in ("created", "running") for task in job.tasks
        }
        urgent = "waiting for a slot" in states
        recovering = bool(states & _RECOVERING) and not urgent
        found = []
        for worker, process in self._processes.items():
            if process.lost_at is None or worker in alive or now < process.lost_at + _delay(process):
                continue
            if recovering and now < process.lost_at + RECOVERY_SECONDS_MAX:
                continue
            process.started_at, process.lost_at = now, None
            found.append(worker)
        return found


def _delay(process: _Process) -> float:
    """Seconds between a loss and the next start: none for the first that is soon after a start."""
    if process.young_losses <= 1:
        return 0.0
    return min(BACKOFF_SECONDS * 2.0 ** min(process.young_losses - 2, 10), BACKOFF_SECONDS_MAX)


class CoordinatorRestarts:
    """When the one coordinator of a launcher starts again."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._young_losses = 0
        """In a row."""

    def started(self, now: float) -> None:
        """A process of it."""
        self._started = now

    def due(self, ended: float) -> float | None:
        """Its process ended then: when to start the next one; None if that happens too often."""
        young = ended < self._started + limits.COORDINATOR_YOUNG_SECONDS
        self._young_losses = self._young_losses + 1 if young else 0
        if self._young_losses > limits.COORDINATOR_RESTARTS_MAX:
            return None
        return ended + (BACKOFF_SECONDS * 2.0 ** (self._young_losses - 2) if self._young_losses > 1 else 0.0)
