"""``bench recovery``: how long a part of the output is missing after a failure, and what all others notice.

A source, keyed subtasks and a collector. Source and collector have parallelism 1 and share a slot on worker
1, which is never the victim. Each record carries its number, from which its key, its keyed subtask and the
time at which it was due follow. So the collector's log alone says what came when, what is missing and what
came twice. What the runtime counts is reported beside it; the two share no code.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import psutil

from minishuffle.bench.hosts import HostCluster
from minishuffle.client import JobHandle
from minishuffle.dataflow.operators.base import Batch, TaskContext
from minishuffle.dataflow.stream import Stream
from minishuffle.errors import ShuffleError
from minishuffle.exchange.keys import destination, hash_rows
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.local import LocalCluster
from minishuffle.wire.messages import JobInfo, TaskInfo

__all__ = ["Failure", "measure_recovery"]

Failure = Literal["process", "task", "stop", "host"]
"""A worker is killed, a function raises, a worker is stopped until it has been replaced, or its host has no
network until then."""
Vector = np.ndarray[Any, np.dtype[np.int64]]

WORKERS: Final = 4
PARALLELISM: Final = 8
KEYS: Final = 1_000
KEYED: Final = "process"
"""The name of the keyed operator."""
WARM_UP_SECONDS: Final = 2.0
WINDOW_SECONDS: Final = 2.0
"""Around each failure, and as long a time without one in front of it."""
RECOVERY_SECONDS_MAX: Final = 60.0
POLL_SECONDS: Final = 0.02
LOOK_EVERY: Final = 16
"""Records between two looks of a keyed subtask whether it is to fail."""
PHASES: Final = (
    "detected",
    "rescheduled",
    "deployed",
    "running",
    "reattached",
    "first batch",
    "first record",
)
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


# --- the job --------------------------------------------------------------------------------------


class Numbered:
    """Source of records (key, number) at ``rate`` per second, until the file ``stop`` is there.

    ``begin`` (a file) gets the monotonic time, in nanoseconds, at which record 0 was due.
    """

    format = "rows"
    bounded = False

    def __init__(self, rate: float, stop: str, begin: str) -> None:
        self._rate, self._stop, self._begin = rate, stop, begin

    def splits(self) -> Sequence[int]:
        return range(1)

    def read(self, split: int, offset: int) -> Iterator[Batch]:
        """As many at once as are due; nothing restarts this source."""
        begin, sent = time.monotonic_ns(), 0
        Path(self._begin).write_text(str(begin))
        while not os.path.exists(self._stop):
            due = int((time.monotonic_ns() - begin) * self._rate / 1e9) + 1
            if due <= sent:
                time.sleep(max(0.0, (begin + sent * 1e9 / self._rate - time.monotonic_ns()) / 1e9))
                continue
            due = min(due, sent + BATCH_ROWS_MAX)
            yield [(number % KEYS, number) for number in range(sent, due)]
            sent = due


class Log:
    """Sink that keeps the numbers of all records with the times at which they came, and writes them to the
    NumPy archive ``path`` at the end: ``numbers``, ``times`` (monotonic nanoseconds) and ``counts`` (records
    that came at each of these)."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, context: TaskContext) -> None:
        self._numbers: list[Vector] = []
        self._times: list[int] = []

    def write(self, batch: Batch) -> None:
        assert isinstance(batch, list)
        self._times.append(time.monotonic_ns())
        self._numbers.append(np.array([number for _, number in batch], np.int64))

    def close(self) -> None:
        counts = np.array([len(numbers) for numbers in self._numbers], np.int64)
        numbers = np.concatenate([np.empty(0, np.int64), *self._numbers])
        np.savez(self._path, numbers=numbers, times=np.array(self._times, np.int64), counts=counts)


def _keyed_subtasks() -> Vector:
    """The keyed subtask of each key."""
    found: Vector = np.asarray(destination(hash_rows(list(range(KEYS))), PARALLELISM), np.int64)
    return found


def _job(rate: float, directory: str) -> Stream[Any]:
    subtask_of = _keyed_subtasks().tolist()

    def pass_on(row: Any, context: Any) -> list[Any]:
        key, number = row
        if number % LOOK_EVERY == 0:
            wanted = f"{directory}/fail-{subtask_of[key]}"
            if os.path.exists(wanted):
                os.rename(wanted, f"{directory}/failed-{subtask_of[key]}")
                raise InjectedFailure(f"at record {number}")
        return [row]

    source = Numbered(rate, f"{directory}/stop", f"{directory}/begin")
    keyed = Stream.source(source).parallel(1).key_by(lambda row: row[0]).process(pass_on)
    return keyed.to(Log(f"{directory}/log.npz")).parallel(1)


class InjectedFailure(Exception):
    """Raised by a keyed subtask that was chosen to fail."""


# --- failures -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Round:
    """One failure; times are monotonic nanoseconds."""

    at: int
    victims: frozenset[int]
    """Keyed subtasks."""
    restarted: int
    """Attempts of other tasks that were replaced."""
    phases: dict[str, float] = field(default_factory=dict)
    """Milliseconds from the failure to the last victim's."""


class _Drill:
    """Brings failures about in a running job, one after the other."""

    def __init__(self, cluster: LocalCluster, handle: JobHandle, directory: str, standby: int) -> None:
        self._cluster, self._handle, self._directory = cluster, handle, directory
        self._standby = standby
        self._next = 0

    def wait_until_whole(self) -> JobInfo:
        """Until every task runs and there are as many standby workers as there were, with the job loaded.

        Raises:
            ShuffleError: the job has ended, or that took too long.
        """
        deadline = time.monotonic() + RECOVERY_SECONDS_MAX
        while time.monotonic() < deadline:
            info = self._handle.info()
            if info.state not in ("created", "running"):
                raise ShuffleError(f"the job is {info.state} instead of running")
            workers = self._cluster.status().workers
            spare = sum(
                worker.standby and worker.state == "alive" and worker.report.jobs_loaded > 0
                for worker in workers
            )
            if all(task.state == "running" for task in info.tasks) and spare >= self._standby:
                return info
            time.sleep(POLL_SECONDS)
        raise ShuffleError(f"the job has not recovered within {RECOVERY_SECONDS_MAX:g} s")

    def fail(self, failure: Failure) -> _Round:
        """Cause one failure, and wait until everything is whole again."""
        before = self.wait_until_whole()
        keyed = [task for task in before.tasks if task.name == KEYED]
        home = next(task.worker for task in before.tasks if task.name != KEYED)
        events = _last_event(self._handle)
        victim = 0
        if failure == "task":
            index = self._next % PARALLELISM
            victims = frozenset([index])
            at, wall = self._fail_task(index)
        else:
            workers = sorted({task.worker for task in keyed} - {home})
            victim = workers[self._next % len(workers)]
            victims = frozenset(task.index for task in keyed if task.worker == victim)
            at, wall = self._fail_worker(failure, victim)
        self._next += 1
        self._wait_for_attempts(keyed, victims)
        self._end(failure, victim)
        after = self.wait_until_whole()
        time.sleep(max(0.0, WINDOW_SECONDS - (time.monotonic_ns() - at) / 1e9))
        found = _Round(at, victims, _restarted(before, after, victims))
        for event in self._handle.events():
            if event.number > events and event.kind in _EVENTS:
                phase, passed = _EVENTS[event.kind], (event.at - wall) * 1000
                found.phases[phase] = max(found.phases.get(phase, 0.0), passed)
        return found

    def _fail_worker(self, failure: Failure, victim: int) -> tuple[int, float]:
        """Gives when: before the signal, or after the cut, which takes some milliseconds to be made."""
        if failure == "host":
            assert isinstance(self._cluster, HostCluster)
            self._cluster.hosts.cut(victim)
            return time.monotonic_ns(), time.time()
        at, wall = time.monotonic_ns(), time.time()
        self._cluster.kill_worker(victim, signal.SIGSTOP if failure == "stop" else signal.SIGKILL)
        return at, wall

    def _end(self, failure: Failure, victim: int) -> None:
        """What failed has been replaced: it comes back, and another process takes its place."""
        if failure == "stop":
            self._cluster.kill_worker(victim, signal.SIGCONT)
        elif failure == "host":
            assert isinstance(self._cluster, HostCluster)
            self._cluster.kill_worker(victim)
            self._cluster.hosts.restore(victim)

    def _fail_task(self, index: int) -> tuple[int, float]:
        wanted = Path(self._directory, f"fail-{index}")
        failed = Path(self._directory, f"failed-{index}")
        wanted.touch()
        deadline = time.monotonic() + RECOVERY_SECONDS_MAX
        while not failed.exists():
            if time.monotonic() > deadline:
                raise ShuffleError(f"keyed subtask {index} has not failed in time")
            time.sleep(0.001)
        wall = failed.stat().st_ctime_ns
        failed.unlink()
        return time.monotonic_ns() - (time.time_ns() - wall), wall / 1e9

    def _wait_for_attempts(self, keyed: Sequence[TaskInfo], victims: frozenset[int]) -> None:
        attempts = {task.index: task.attempt for task in keyed}
        deadline = time.monotonic() + RECOVERY_SECONDS_MAX
        while time.monotonic() < deadline:
            tasks = [task for task in self._handle.info().tasks if task.name == KEYED]
            if all(task.attempt > attempts[task.index] for task in tasks if task.index in victims):
                return
            time.sleep(POLL_SECONDS)
        raise ShuffleError("the victims were not deployed again in time")


def _last_event(handle: JobHandle) -> int:
    return max((event.number for event in handle.events()), default=0)


def _restarted(before: JobInfo, after: JobInfo, victims: frozenset[int]) -> int:
    attempts = {(task.name, task.index): task.attempt for task in before.tasks}
    return sum(
        task.attempt - attempts[task.name, task.index]
        for task in after.tasks
        if not (task.name == KEYED and task.index in victims)
    )


# --- what it shows --------------------------------------------------------------------------------


class _Output:
    """What the collector saw."""

    def __init__(self, path: str, begin: int, rate: float) -> None:
        with np.load(path) as log:
            self.numbers: Vector = log["numbers"]
            times, counts = log["times"], log["counts"]
        self._arrived: Vector = np.repeat(times, counts)
        self._due: Vector = begin + (self.numbers * (1e9 / rate)).astype(np.int64)
        self._subtask: Vector = _keyed_subtasks()[self.numbers % KEYS]

    def outage(self, failure: _Round) -> float:
        """Milliseconds from the failure to the first output of a record that was due after it, of the victim
        that took longest."""
        longest = 0.0
        for victim in failure.victims:
            found = self._arrived[(self._subtask == victim) & (self._due > failure.at)]
            if not len(found):
                raise ShuffleError(f"keyed subtask {victim} has had no output since it failed")
            longest = max(longest, (int(found.min()) - failure.at) / 1e6)
        return longest

    def gaps(self, begin: int, end: int, without: frozenset[int]) -> list[float]:
        """The longest silence, in milliseconds, of each keyed subtask but these between two times."""
        found = []
        for subtask in sorted(set(range(PARALLELISM)) - without):
            times = self._arrived[self._subtask == subtask]
            times = times[(times >= begin) & (times <= end)]
            edges = np.concatenate([[begin], times, [end]])
            found.append(float(np.diff(edges).max()) / 1e6)
        return found


def measure_recovery(*, failure: Failure, standby: int, kills: int, rate: float) -> dict[str, Any]:
    """Run it once. Times are in milliseconds; ``dropped``, ``in_flight`` and ``missing`` count rows.

    Without standby workers each worker has one slot to spare.

    Raises:
        UsageError: hosts, which are network namespaces, cannot be made here.
        ShuffleError: the job did not recover, or did not end as it should.
    """
    with tempfile.TemporaryDirectory(prefix="minishuffle-bench-") as directory:
        slots = PARALLELISM // WORKERS + (0 if standby else 1)
        kind = HostCluster if failure == "host" else LocalCluster
        with kind(workers=WORKERS, slots=slots, standby=standby) as cluster:
            handle = cluster.submit(_job(rate, directory), name="bench-recovery", parallelism=PARALLELISM)
            drill = _Drill(cluster, handle, directory, standby)
            drill.wait_until_whole()
            time.sleep(WARM_UP_SECONDS)
            rounds = []
            for _ in range(kills):
                time.sleep(WINDOW_SECONDS)
                rounds.append(drill.fail(failure))
            rss = _rss(cluster)
            Path(directory, "stop").touch()
            info = handle.wait_until_over(RECOVERY_SECONDS_MAX)
        if info.state not in ("finished", "finished_with_loss"):
            raise ShuffleError(f"the job ended as {info.state}")
        begin = int(Path(directory, "begin").read_text())
        output = _Output(f"{directory}/log.npz", begin, rate)
    made = sum(task.counters.records_out for task in info.tasks if task.name == "Numbered")
    return {
        "failure": failure,
        "standby": standby,
        "kills": kills,
        **_times(output, rounds),
        "others_restarted": sum(each.restarted for each in rounds),
        **_books(info),
        "missing": made - len(np.unique(output.numbers)),
        "duplicated": len(output.numbers) - len(np.unique(output.numbers)),
        "rss_bytes": rss,
    }


def _times(output: _Output, rounds: Sequence[_Round]) -> dict[str, Any]:
    window = int(WINDOW_SECONDS * 1e9)
    outages = [output.outage(each) for each in rounds]
    for each, outage in zip(rounds, outages, strict=True):
        each.phases["first record"] = outage
    gaps = [gap for each in rounds for gap in output.gaps(each.at, each.at + window, each.victims)]
    quiet = [gap for each in rounds for gap in output.gaps(each.at - window, each.at, each.victims)]
    return {
        "outage_ms": {**_spread(outages), "p95": round(float(np.percentile(outages, 95)), 1)},
        "phases_ms": {
            phase: _spread([each.phases[phase] for each in rounds if phase in each.phases])
            for phase in PHASES
        },
        "others_gap_ms": _spread(gaps),
        "others_gap_baseline_ms": _spread(quiet),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        raise ShuffleError("a phase of the recovery was not reported")
    return {"p50": round(statistics.median(values), 1), "max": round(max(values), 1)}


def _books(info: JobInfo) -> Mapping[str, int]:
    return {"dropped": sum(info.rows_dropped.values()), "in_flight": info.rows_in_flight}


def _rss(cluster: LocalCluster) -> int:
    """Resident bytes of all workers."""
    return sum(psutil.Process(pid).memory_info().rss for pid in cluster.workers.values())
