"""Failures in a running numbered job, one after the other: which, when, and what became of the others."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from minishuffle.bench.hosts import HostCluster
from minishuffle.bench.numbered import KEYED, PARALLELISM
from minishuffle.client import JobHandle
from minishuffle.errors import ShuffleError
from minishuffle.ids import Address
from minishuffle.local import LocalCluster
from minishuffle.wire.requests import ClusterStatus, JobInfo, TaskInfo

__all__ = [
    "POLL_SECONDS",
    "RECOVERY_SECONDS_MAX",
    "FailureKind",
    "FailureRound",
    "FailureSeries",
    "wait_until_whole",
]

FailureKind = Literal["process", "task", "stop", "host", "link", "coordinator"]
"""A worker is killed, a function raises, a worker is stopped until it has been replaced, its host has no
network until then, or the data connection of two workers breaks; or the coordinator is killed, see
:func:`~minishuffle.bench.recovery.lose_coordinator`."""

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
}


@dataclass(slots=True)
class FailureRound:
    """One failure; times are monotonic nanoseconds."""

    kind: FailureKind
    at: int
    victims: frozenset[int]
    """Keyed subtasks that the failure strikes."""
    whole_at: int
    """When all tasks ran again, and as many workers were there as before, those on standby too."""
    restarted: int
    """Attempts of other tasks that were replaced, since the end of the failure before."""
    suspicions: int = 0
    """How often a worker was suspected that was not struck, which broke a connection of it."""
    phases: dict[str, float] = field(default_factory=dict)
    """Milliseconds from the failure to the last victim's."""


class FailureSeries:
    """Brings failures about in a running job, one after the other.

    Args:
        directory: of the job, see :func:`numbered_job`.
        standby: so many standby workers there are to be before each failure.
        choose: one of so many victims, by number.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        handle: JobHandle,
        directory: str,
        *,
        standby: int,
        choose: Callable[[int], int],
    ) -> None:
        self._cluster, self._handle, self._directory = cluster, handle, directory
        self._standby = standby
        self._choose = choose
        self._last: JobInfo | None = None
        """After the last failure; nothing is to change until the next one."""

    def wait_until_whole(self) -> JobInfo:
        """See :func:`wait_until_whole`."""
        workers = len(self._cluster.workers)
        return wait_until_whole(self._handle.info, self._cluster.status, self._standby, workers)

    def wait_for_reports(self, since: int) -> JobInfo:
        """Until every worker has said what it counts, later than that monotonic nanosecond.

        Raises:
            ShuffleError: that took too long.
        """
        deadline = time.monotonic() + RECOVERY_SECONDS_MAX
        while time.monotonic() < deadline:
            workers = [each for each in self._cluster.status().workers if each.state == "alive"]
            seconds = (time.monotonic_ns() - since) / 1e9
            if all(each.heartbeat_age_seconds < seconds for each in workers):
                return self._handle.info()
            time.sleep(POLL_SECONDS)
        raise ShuffleError(f"not every worker has reported within {RECOVERY_SECONDS_MAX:g} s")

    def wait_for_output(self) -> None:
        """Until every keyed subtask has passed records on.

        Raises:
            ShuffleError: that took too long.
        """
        deadline = time.monotonic() + RECOVERY_SECONDS_MAX
        while not all(task.counters.records_out for task in self._handle.info().tasks if task.name == KEYED):
            if time.monotonic() > deadline:
                raise ShuffleError(f"the job has had no output within {RECOVERY_SECONDS_MAX:g} s")
            time.sleep(POLL_SECONDS)

    def fail(self, kind: FailureKind, window: float) -> FailureRound:
        """Cause one failure, and wait until everything is whole again and ``window`` seconds have passed.

        Raises:
            ShuffleError: the job has not recovered.
        """
        before = self.wait_until_whole()
        keyed = {task.index: task for task in before.tasks if task.name == KEYED}
        home = next(task.worker for task in before.tasks if task.name != KEYED)
        events = max((event.number for event in self._handle.events()), default=0)
        worker = 0
        if kind == "task":
            victims = frozenset([self._choose(PARALLELISM)])
            at, wall = self._ask_task("fail", "failed", min(victims))
            self._wait_for_attempts(keyed, victims)
        else:
            workers = sorted({task.worker for task in keyed.values()} - {home})
            worker = workers[self._choose(len(workers))]
            victims = frozenset(index for index, task in keyed.items() if task.worker == worker)
            if kind == "link":
                at, wall = self._cut(keyed, home, worker)
            else:
                at, wall = self._fail_worker(kind, worker)
                self._wait_for_attempts(keyed, victims)
                self._end(kind, worker)
        after = self.wait_until_whole()
        whole_at = time.monotonic_ns()
        time.sleep(max(0.0, window - (whole_at - at) / 1e9))
        struck = frozenset[int]() if kind == "link" else victims
        found = FailureRound(kind, at, victims, whole_at, _restarted(self._last or before, after, struck))
        self._last = after
        for event in self._handle.events():
            if event.number > events and event.kind == "worker suspected" and event.worker != worker:
                found.suspicions += 1
            elif event.number > events and event.kind in _EVENTS:
                phase, passed = _EVENTS[event.kind], (event.at - wall) * 1000
                found.phases[phase] = max(found.phases.get(phase, 0.0), passed)
        return found

    def _fail_worker(self, kind: FailureKind, victim: int) -> tuple[int, float]:
        """Gives when: before the signal, or after the cut, which takes some milliseconds to be made."""
        if kind == "host":
            assert isinstance(self._cluster, HostCluster)
            self._cluster.hosts.cut(victim)
            return time.monotonic_ns(), time.time()
        at, wall = time.monotonic_ns(), time.time()
        self._cluster.kill_worker(victim, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        return at, wall

    def _end(self, kind: FailureKind, victim: int) -> None:
        """What failed has been replaced: it comes back, and another process takes its place."""
        if kind == "stop":
            self._cluster.kill_worker(victim, signal.SIGCONT)
        elif kind == "host":
            assert isinstance(self._cluster, HostCluster)
            self._cluster.kill_worker(victim)
            self._cluster.hosts.restore(victim)

    def _cut(self, keyed: Mapping[int, TaskInfo], one: int, other: int) -> tuple[int, float]:
        """Break the connection of two workers; gives when. The one with the lower id has dialed the other."""
        dialer, listener = sorted((one, other))
        cutter = min(index for index, task in keyed.items() if task.worker == dialer)
        return self._ask_task("cut", "done", cutter, str(self._data_address(listener)))

    def _data_address(self, worker: int) -> Address:
        workers = self._cluster.status().workers
        return next(Address(each.host, each.data_port) for each in workers if each.worker == worker)

    def _ask_task(self, what: str, answer: str, index: int, text: str = "") -> tuple[int, float]:
        """Have a keyed subtask do something, see :func:`numbered_job`; gives when it did."""
        written = Path(self._directory, f"asked-{index}")
        written.write_text(text)
        written.rename(Path(self._directory, f"{what}-{index}"))
        done = Path(self._directory, f"{answer}-{index}")
        deadline = time.monotonic() + RECOVERY_SECONDS_MAX
        while not done.exists():
            if time.monotonic() > deadline:
                raise ShuffleError(f"keyed subtask {index} has not answered to {what!r} in time")
            time.sleep(0.001)
        wall = done.stat().st_ctime_ns
        done.unlink()
        return time.monotonic_ns() - (time.time_ns() - wall), wall / 1e9

    def _wait_for_attempts(self, keyed: Mapping[int, TaskInfo], victims: frozenset[int]) -> None:
        deadline = time.monotonic() + RECOVERY_SECONDS_MAX
        while time.monotonic() < deadline:
            tasks = [task for task in self._handle.info().tasks if task.name == KEYED]
            if all(task.attempt > keyed[task.index].attempt for task in tasks if task.index in victims):
                return
            time.sleep(POLL_SECONDS)
        raise ShuffleError("the victims were not deployed again in time")


def wait_until_whole(
    info_of: Callable[[], JobInfo], status: Callable[[], ClusterStatus], standby: int, alive: int = 0
) -> JobInfo:
    """Until every task runs, so many workers are alive, and so many of them on standby with the job loaded.

    Raises:
        ShuffleError: the job has ended, or that took too long.
    """
    deadline, found = time.monotonic() + RECOVERY_SECONDS_MAX, ""
    while time.monotonic() < deadline:
        info = info_of()
        if info.state not in ("created", "running"):
            raise ShuffleError(f"the job is {info.state} instead of running")
        workers = [worker for worker in status().workers if worker.state == "alive"]
        spare = sum(worker.standby and worker.report.jobs_loaded > 0 for worker in workers)
        away = [f"{task.name}[{task.index}] {task.state}" for task in info.tasks if task.state != "running"]
        if len(workers) >= alive and spare >= standby and not away:
            return info
        found = f"{len(workers)} workers are alive, {spare} of them on standby with the job loaded; "
        found += f"tasks that do not run: {', '.join(away) or 'none'}"
        time.sleep(POLL_SECONDS)
    raise ShuffleError(f"the job has not recovered within {RECOVERY_SECONDS_MAX:g} s: {found}")


def _restarted(before: JobInfo, after: JobInfo, victims: frozenset[int]) -> int:
    attempts = {(task.name, task.index): task.attempt for task in before.tasks}
    return sum(
        task.attempt - attempts[task.name, task.index]
        for task in after.tasks
        if not (task.name == KEYED and task.index in victims)
    )
