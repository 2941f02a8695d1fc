"""``minishuffle drill --job``: failures in a job that runs already, on a cluster that others started.

Nothing of the job helps. Workers are killed and stopped by process id, and their connections are cut from
outside, so they have to be on this machine. What each subtask passes on is read from the workers'
``/metrics``, every :data:`WATCH_SECONDS`. There is no log of what should have come out: of the books it is
checked that no total falls, and that nothing is in flight through a process that died where none did.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Any, Final

import numpy as np

from minishuffle.bench.drill import QUIET_SECONDS, Findings, report
from minishuffle.bench.failures import FailureKind, FailureRound, FailureSeries, wait_for
from minishuffle.bench.numbered import Gap, cut_connections, longest_gaps
from minishuffle.client import Client
from minishuffle.errors import ShuffleError, UnknownName, UsageError
from minishuffle.ids import Address
from minishuffle.wire.requests import JobInfo, TaskInfo, WorkerInfo

__all__ = ["RUNNING_KINDS", "JobWatch", "RunningJob", "drill_running"]

RUNNING_KINDS: Final[tuple[FailureKind, ...]] = ("process", "link", "stop")
"""What can be brought about from outside."""
WATCH_SECONDS: Final = 0.1
SCRAPE_SECONDS_MAX: Final = 1.0
_RECORDS: Final = re.compile(r"^minishuffle_task_records_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Subtask = tuple[int, int]
"""Operator and index."""


def records_by_subtask(text: str, job: str) -> dict[Subtask, float]:
    """Records that the subtasks of a job took in and passed on, from one worker's ``/metrics``."""
    found: defaultdict[Subtask, float] = defaultdict(float)
    for labels, value in _RECORDS.findall(text):
        has = dict(_LABEL.findall(labels))
        if has["pipeline_id"] == job:
            found[int(has["vertex_id"]), int(has["subtask"])] += float(value)
    return dict(found)


class JobWatch:
    """When the subtasks of a job passed records on, as far as the metrics of its workers show it.

    A thread asks each worker, so that one which does not answer holds nobody up.
    """

    def __init__(self, job: str, subtasks: Sequence[Subtask], read_token: str) -> None:
        self._job = job
        self._headers = {"Authorization": f"Bearer {read_token}"}
        self._numbers = {subtask: number for number, subtask in enumerate(subtasks)}
        self._seen: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By subtask, monotonic nanoseconds at which it had moved on, and the worker it was on."""
        self._threads: dict[tuple[int, int], threading.Thread] = {}
        """By worker and epoch."""
        self._stopping = threading.Event()

    def follow(self, workers: Sequence[WorkerInfo]) -> None:
        """Ask these workers too from now on."""
        for each in workers:
            key = each.worker, each.epoch
            if each.state == "alive" and each.metrics_port and key not in self._threads:
                arguments = each.worker, Address(each.host, each.metrics_port)
                thread = threading.Thread(target=self._watch, args=arguments, name="watch", daemon=True)
                self._threads[key] = thread
                thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads.values():
            thread.join()

    def _watch(self, worker: int, address: Address) -> None:
        before: dict[Subtask, float] = {}
        while not self._stopping.wait(WATCH_SECONDS):
            try:
                request = urllib.request.Request(f"http://{address}/metrics", headers=self._headers)
                with urllib.request.urlopen(request, timeout=SCRAPE_SECONDS_MAX) as response:
                    text = response.read().decode()
            except (OSError, http.client.HTTPException):  # it is stopped, or gone
                continue
            now, records = time.monotonic_ns(), records_by_subtask(text, self._job)
            for subtask, count in records.items():
                if before and count != before.get(subtask) and subtask in self._numbers:
                    self._seen[self._numbers[subtask]].append((now, worker))
            before = records

    def moving(self, begin: int, end: int) -> frozenset[int]:
        """Subtasks that passed something on between these times."""
        return frozenset(
            number for number, seen in self._seen.items() if any(begin <= at <= end for at, _ in list(seen))
        )

    def gaps(self, begin: int, end: int, subtasks: frozenset[int]) -> list[Gap]:
        """The longest silence of each of these between two times."""
        times = ((each, np.array([at for at, _ in list(self._seen[each])], np.int64)) for each in subtasks)
        return longest_gaps(times, begin, end)

    def outage(self, at: int, victims: frozenset[int], lost: int) -> float:
        """Milliseconds until each of the victims passed something on, on another worker than the lost one.

        Raises:
            ShuffleError: one has not.
        """
        longest = 0.0
        for each in sorted(victims):
            first = next((seen for seen, worker in list(self._seen[each]) if seen > at and worker != lost), 0)
            if not first:
                raise ShuffleError(f"subtask {self.name(each)} has passed nothing on since it failed")
            longest = max(longest, (first - at) / 1e6)
        return longest

    def name(self, number: int) -> str:
        """The subtask of that number, as operator[index]."""
        operator, index = next(subtask for subtask, each in self._numbers.items() if each == number)
        return f"{operator}[{index}]"


class _Around:
    """What a failure of one worker showed, for :class:`Findings`."""

    def __init__(self, watch: JobWatch, moving: frozenset[int], lost: int) -> None:
        self._watch, self._moving, self._lost = watch, moving, lost

    def gaps(self, begin: int, end: int, without: frozenset[int]) -> list[Gap]:
        return self._watch.gaps(begin, end, self._moving - without)

    def outage(self, at: int, victims: frozenset[int]) -> float:
        return self._watch.outage(at, victims & self._moving, self._lost)


class RunningJob:
    """The :class:`~minishuffle.bench.failures.FailureCauses` of a job that runs already; subtasks go by their
    places in it.

    Args:
        send: sends a signal to the process of a worker of this machine; raises UsageError.
        choose: one of so many victims, by number.
    """

    def __init__(
        self,
        client: Client,
        job: str,
        watch: JobWatch,
        send: Callable[[WorkerInfo, Signals], None],
        choose: Callable[[int], int],
    ) -> None:
        self._client, self._job, self._watch = client, job, watch
        self._send, self._choose = send, choose
        self._struck: WorkerInfo | None = None
        """The last one."""

    def strike(self, kind: FailureKind, before: JobInfo) -> FailureRound:
        """Cause a failure in the job that looks like this.

        Raises:
            UsageError: there is no worker that can be struck.
            ShuffleError: two workers have no connection that could be cut.
        """
        workers = {each.worker: each for each in self.followed() if each.state == "alive"}
        possible = victims_of(before.tasks)
        if not possible:
            raise UsageError(
                f"each worker of job {self._job} has the only subtask of an operator: whichever fails, "
                "nobody has output. Give the job a greater parallelism, or the cluster more workers"
            )
        victim = self._struck = workers[possible[self._choose(len(possible))]]
        if kind == "link":
            others = sorted({task.worker for task in before.tasks} - {victim.worker})
            at = self._cut(victim, workers[others[self._choose(len(others))]])
            return FailureRound(kind, at, frozenset(), worker=victim.worker)
        struck = frozenset(n for n, task in enumerate(before.tasks) if task.worker == victim.worker)
        at = time.monotonic_ns()
        self._send(victim, SIGSTOP if kind == "stop" else SIGKILL)
        return FailureRound(kind, at, struck, replaced=struck, worker=victim.worker)

    def heal(self, each: FailureRound) -> None:
        """A worker that was stopped goes on; those that have come are watched."""
        if each.kind == "stop" and self._struck is not None:
            with suppress(UnknownName):  # Who started it has ended it.
                self._send(self._struck, SIGCONT)
        self.followed()

    def followed(self) -> list[WorkerInfo]:
        """All workers, which are watched from then on."""
        workers = self._client.status().workers
        self._watch.follow(workers)
        return workers

    def _cut(self, one: WorkerInfo, other: WorkerInfo) -> int:
        """Break the connection of two workers; gives when. The one with the lower id has dialed the other."""
        dialer, listener = sorted((one, other), key=lambda each: each.worker)
        self._send(dialer, SIGCONT)  # of this machine, and ours: or it is refused

        def cut() -> int:
            at = time.monotonic_ns()
            return at if cut_connections(Address(listener.host, listener.data_port), dialer.pid) else 0

        problem = f"workers {dialer.worker} and {listener.worker} have no connection"
        return wait_for(cut, lambda limit: problem)


def victims_of(tasks: Sequence[TaskInfo]) -> list[int]:
    """Workers without which every operator of the job still has a subtask."""
    homes: defaultdict[int, set[int]] = defaultdict(set)
    for task in tasks:
        homes[task.operator].add(task.worker)
    return sorted(
        worker
        for worker in {task.worker for task in tasks}
        if all(workers - {worker} for workers in homes.values())
    )


def totals_problems(kind: FailureKind, before: JobInfo, after: JobInfo) -> list[str]:
    """What does not hold of a job's totals after a failure."""
    problems = []
    dropped = sum(after.rows_dropped.values()) - sum(before.rows_dropped.values())
    if dropped < 0:
        problems.append(f"books: the count of dropped records fell by {-dropped}")
    if kind == "link" and after.rows_in_flight > before.rows_in_flight:
        problems.append("books: rows are counted as in flight, although no process died")
    for old, new in zip(before.tasks, after.tasks, strict=True):
        for what in ("records_in", "records_out"):
            if getattr(new.counters, what) < getattr(old.counters, what):
                problems.append(f"books: {what} of {new.name}[{new.index}] fell")
    return problems


@contextmanager
def _watching(client: Client, job: str) -> Iterator[JobWatch]:
    tasks = client.job(job).tasks
    watch = JobWatch(job, [(task.operator, task.index) for task in tasks], client.read_token)
    try:
        yield watch
    finally:
        watch.stop()


def drill_running(
    client: Client,
    job: str,
    kinds: Sequence[FailureKind],
    send: Callable[[WorkerInfo, Signals], None],
    *,
    every: float,
    seed: int,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Like :func:`run_drill`, on a job that runs already.

    Raises:
        UsageError: a kind cannot be caused from outside, or there is nobody whom it could strike.
        ShuffleError: the job is not running, or passes nothing on.
    """
    for kind in kinds:
        if kind not in RUNNING_KINDS:
            raise UsageError(
                f"{kind}: a running job can be drilled with {', '.join(RUNNING_KINDS)}; without --job the "
                "drill starts a job of its own, which takes all kinds"
            )
    findings = Findings(progress=progress)
    with _watching(client, job) as watch:
        running = RunningJob(client, job, watch, send, Random(seed).randrange)
        standby = sum(each.standby and each.state == "alive" for each in running.followed())
        failures = FailureSeries(client, job, running, standby=standby)
        before = failures.wait_until_whole()
        time.sleep(2 * WATCH_SECONDS)
        begin = time.monotonic_ns()
        time.sleep(max(QUIET_SECONDS, every))
        end = time.monotonic_ns()
        moving = watch.moving(begin, end)
        if not moving:
            raise ShuffleError(f"job {job} has passed no records on within {max(QUIET_SECONDS, every):g} s")
        findings.stay_quiet(_Around(watch, moving, 0), begin, end)
        with findings.early_end():
            for kind in kinds:
                each = failures.fail(kind, every)
                around, window = _Around(watch, moving, each.worker), int(every * 1e9)
                findings.stay_quiet(around, each.at - window, each.at)
                after = client.job(job)
                wrong = totals_problems(kind, before, after)
                findings.look(each, around, max(each.whole_at, each.at + window), wrong)
                before = after
    counted = {"dropped": sum(before.rows_dropped.values()), "in_flight": before.rows_in_flight}
    return {**report(kinds, every, seed, findings), **counted, "subtasks_watched": len(moving)}
