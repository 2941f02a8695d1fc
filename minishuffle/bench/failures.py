"""Failures in a running job, one after the other: which, when, and what became of the others.

Under ``bench recovery`` and ``drill``. How a failure is caused and whom it strikes differs, see
:class:`FailureCauses`; to wait until the job has recovered, and to say what that took, is the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeVar

from minishuffle.client import Client
from minishuffle.errors import ShuffleError
from minishuffle.wire.requests import JobInfo

__all__ = [
    "RECOVERY_SECONDS_MAX",
    "FailureCauses",
    "FailureKind",
    "FailureRound",
    "FailureSeries",
    "wait_for",
]

FailureKind = Literal["process", "task", "stop", "host", "link", "coordinator"]
"""A worker is killed, a function raises, a worker is stopped until it has been replaced, its host has no
network until then, or the data connection of two workers breaks; or the coordinator is killed."""

RECOVERY_SECONDS_MAX: Final = 60.0
POLL_SECONDS: Final = 0.02
_EVENTS: Final = {
    "task lost": "detected",
    "task failed": "detected",
    "task rescheduled": "rescheduled",
    "task deployed": "deployed",
    "task running": "running",
    "inputs reattached": "reattached",
    "outputs reattached": "reattached",
    "first record": "first batch",
    "snapshot read": "snapshot read",
    "replayed": "replayed",
    "caught up": "caught up",
}

T = TypeVar("T")


@dataclass(slots=True)
class FailureRound:
    """One failure; times are monotonic nanoseconds."""

    kind: FailureKind
    at: int
    victims: frozenset[int]
    """Subtasks whose output it interrupts, by numbers of who causes it."""
    whole_at: int = 0
    """When all tasks ran again, and as many workers were there as before, those on standby too."""
    restarted: int = 0
    """Attempts of other tasks that were replaced, since the end of the failure before."""
    suspicions: int = 0
    """How often a worker was suspected that was not struck, which broke a connection of it."""
    phases: dict[str, float] = field(default_factory=dict)
    """Milliseconds from the failure to the last victim's."""
    replaced: frozenset[int] = frozenset()
    """Tasks whose attempts it ends, by their places in the job."""
    worker: int = 0
    """The one that is struck; 0 if none is as a whole."""
    snapshot_age: float = 0.0
    """Seconds, as reported last before it: the greatest age of what next attempts of these tasks go on
    from."""


class FailureCauses(Protocol):
    """How failures come over a job."""

    def strike(self, kind: FailureKind, before: JobInfo) -> FailureRound:
        """Cause a failure in the job that looks like this. Raises ShuffleError: it cannot."""
        ...

    def heal(self, each: FailureRound) -> None:
        """What failed has been replaced: it comes back."""
        ...


class FailureSeries:
    """Brings failures about in a running job, one after the other.

    Args:
        workers: how many are to be alive before each failure.
        standby: how many of them are to be standby workers.
    """

    def __init__(
        self,
        client: Client,
        job: str,
        causes: FailureCauses,
        *,
        workers: Callable[[], int] = lambda: 0,
        standby: int,
    ) -> None:
        self._client, self._job, self._causes = client, job, causes
        self._workers, self._standby = workers, standby
        self._last: JobInfo | None = None
        """After the last failure; nothing is to change until the next one."""

    def wait_until_whole(self) -> JobInfo:
        """Until every task runs, all workers are alive, and enough of them on standby with the job loaded.

        Raises:
            ShuffleError: the job has ended, or that took too long.
        """
        found = ""

        def look() -> JobInfo | None:
            nonlocal found
            info = self._client.job(self._job)
            if info.state not in ("created", "running"):
                raise ShuffleError(f"the job is {info.state} instead of running")
            workers = [worker for worker in self._client.status().workers if worker.state == "alive"]
            spare = sum(worker.standby and worker.report.jobs_loaded > 0 for worker in workers)
            off = [each for each in info.tasks if each.state != "running"]
            if len(workers) >= self._workers() and spare >= self._standby and not off:
                return info
            found = f"{len(workers)} workers are alive, {spare} of them on standby with the job loaded; "
            away = ", ".join(f"{each.name}[{each.index}] {each.state}" for each in off)
            found += f"tasks that do not run: {away or 'none'}"
            return None

        return wait_for(look, lambda limit: f"the job has not recovered within {limit}: {found}")

    def fail(self, kind: FailureKind, window: float) -> FailureRound:
        """Cause one failure ``window`` seconds after everything is whole, and wait until it is so again, and
        until so many seconds have passed since the failure.

        Raises:
            ShuffleError: it cannot be caused, or the job has not recovered.
        """
        self.wait_until_whole()
        time.sleep(window)
        before = self.wait_until_whole()
        events = max((event.number for event in self._client.events(self._job)), default=0)
        found = self._causes.strike(kind, before)
        snapshots = [before.tasks[number].counters.snapshot for number in found.replaced]
        found.snapshot_age = max((each.get("age", 0.0) for each in snapshots), default=0.0)
        try:
            self._wait_for_attempts(before, found.replaced)
        finally:
            self._causes.heal(found)
        after = self.wait_until_whole()
        found.whole_at = time.monotonic_ns()
        passed = (found.whole_at - found.at) / 1e9
        wall = time.time() - passed
        time.sleep(max(0.0, window - passed))
        pairs = enumerate(zip((self._last or before).tasks, after.tasks, strict=True))
        found.restarted = sum(new.attempt - old.attempt for n, (old, new) in pairs if n not in found.replaced)
        self._last = after
        for event in self._client.events(self._job):
            if event.number > events and event.kind == "worker suspected" and event.worker != found.worker:
                found.suspicions += 1
            elif event.number > events and event.kind in _EVENTS:
                phase, after_ms = _EVENTS[event.kind], (event.at - wall) * 1000
                found.phases[phase] = max(found.phases.get(phase, 0.0), after_ms)
        return found

    def _wait_for_attempts(self, before: JobInfo, replaced: frozenset[int]) -> None:
        def look() -> bool:
            tasks = self._client.job(self._job).tasks
            return all(tasks[number].attempt > before.tasks[number].attempt for number in replaced)

        wait_for(look, lambda limit: "the victims were not deployed again in time")


def wait_for(look: Callable[[], T | None], problem: Callable[[str], str], pause: float = POLL_SECONDS) -> T:
    """Look until there is something, for :data:`RECOVERY_SECONDS_MAX`; gives what there is.

    Args:
        problem: the text of the error, from how long was waited.
        pause: seconds between two looks.

    Raises:
        ShuffleError: nothing came.
    """
    deadline = time.monotonic() + RECOVERY_SECONDS_MAX
    while not (found := look()):
        if time.monotonic() > deadline:
            raise ShuffleError(problem(f"{RECOVERY_SECONDS_MAX:g} s"))
        time.sleep(pause)
    return found
