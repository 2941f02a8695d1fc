"""The job of ``bench recovery`` and ``drill``: numbered records through keyed subtasks into a log.

A source, keyed subtasks and a collector. Source and collector have parallelism 1 and share a slot on worker
1, which is never the victim. Each record carries its number, from which its key, its keyed subtask and the
time at which it was due follow. So the collector's log alone says what came when, what is missing and what
came twice; it shares no code with what the runtime counts.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import psutil

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.bench.failures import (
    RECOVERY_SECONDS_MAX,
    FailureKind,
    FailureRound,
    FailureSeries,
    wait_for,
)
from minishuffle.bench.hosts import HostCluster
from minishuffle.bench.stalls import Span, awake
from minishuffle.errors import ShuffleError, UsageError
from minishuffle.exchange.batch import Payload
from minishuffle.exchange.keys import destination, hash_rows
from minishuffle.ids import Address
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.local import LocalCluster
from minishuffle.operators.base import TaskContext
from minishuffle.plan.graph import JobSettings
from minishuffle.wire.requests import JobInfo, TaskInfo

__all__ = [
    "OutputAudit",
    "Gap",
    "HEADLESS_PHASES",
    "KEYED",
    "Log",
    "LogReader",
    "Numbered",
    "NumberedOutput",
    "NumberedRun",
    "PARALLELISM",
    "WORKERS",
    "asked_in",
    "connections_to",
    "cut_connections",
    "longest_gaps",
    "numbered_job",
]

Vector = np.ndarray[Any, np.dtype[np.int64]]
Entries = np.ndarray[Any, np.dtype[np.void]]
"""Of :data:`ENTRY`."""

PARALLELISM: Final = 8
KEYS: Final = 1_000
KEYED: Final = "process"
"""The name of the keyed operator."""
LOOK_EVERY: Final = 16
"""Records between two looks of a keyed subtask whether it is to fail, or to cut a connection."""
FLUSH_NANOSECONDS: Final = 20_000_000
"""Between two times at which the log is written to its file."""
ENTRY: Final = np.dtype([("number", "<i8"), ("time", "<i8")])
"""One record in the log's file: its number, and when it came, in monotonic nanoseconds."""
STEP_NANOSECONDS: Final = 50_000_000
CALM_STEPS: Final = 4
LATER_MAX: Final = 1.1
PIDFD_GETFD: Final = 438
"""A system call of Linux from 5.6 on, on every processor."""
WORKERS: Final = 4
"""How many the cluster has that it runs on."""
HEADLESS_PHASES: Final = ("started again", "job shown", "workers back")
"""With a coordinator: from its loss to the start of the next process, and from there to its first answer
about the job, which is right, and to the return of the last worker."""


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

    def read(self, split: int, offset: int) -> Iterator[Payload]:
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
    """Sink that appends an :data:`ENTRY` for each record to the file ``path``, to be read at any time.

    Args:
        held: nanoseconds for which entries may be kept in memory; 0: each is in the file when written.
    """

    result_only = False

    def __init__(self, path: str, held: int = FLUSH_NANOSECONDS) -> None:
        self._path, self._held = path, held

    def open(self, context: TaskContext) -> None:
        self._file: BinaryIO = Path(self._path).open("ab")  # noqa: SIM115
        self._flushed = 0

    def write(self, batch: Payload) -> None:
        assert isinstance(batch, list)
        entries = np.empty(len(batch), ENTRY)
        entries["number"] = [number for _, number in batch]
        entries["time"] = now = time.monotonic_ns()
        self._file.write(entries.tobytes())
        if now - self._flushed >= self._held:
            self._file.flush()
            self._flushed = now

    def close(self) -> None:
        self._file.close()


def keyed_subtasks(parallelism: int) -> Vector:
    """The keyed subtask of each key, of so many."""
    found: Vector = np.asarray(destination(hash_rows(list(range(KEYS))), parallelism), np.int64)
    return found


def numbered_job(rate: float, directory: str) -> Stream[Any]:
    """The job; its keyed subtasks do what :func:`asked_in` says."""
    source = Numbered(rate, f"{directory}/stop", f"{directory}/begin")
    keyed = Stream.source(source).parallel(1).key_by(lambda row: row[0])
    return keyed.process(asked_in(directory, PARALLELISM)).to(Log(f"{directory}/log")).parallel(1)


def asked_in(directory: str, parallelism: int) -> Callable[[Any, Any], list[Any]]:
    """What keyed subtasks call with each record, which they pass on. Subtask ``n`` raises once the file
    ``fail-n`` is in the directory, which becomes ``failed-n``, and cuts its process's connections to the
    address (HOST:PORT) in the file ``cut-n``, which becomes ``done-n``."""
    subtask_of = keyed_subtasks(parallelism).tolist()

    def pass_on(row: Any, context: Any) -> list[Any]:
        key, number = row
        if number % LOOK_EVERY == 0:
            subtask = subtask_of[key]
            wanted = f"{directory}/fail-{subtask}"
            if os.path.exists(wanted):
                os.rename(wanted, f"{directory}/failed-{subtask}")
                raise InjectedFailure(f"at record {number}")
            wanted = f"{directory}/cut-{subtask}"
            if os.path.exists(wanted) and cut_connections(Address.parse(Path(wanted).read_text())):
                os.rename(wanted, f"{directory}/done-{subtask}")
        return [row]

    return pass_on


def cut_connections(peer: Address, process: int | None = None) -> int:
    """Shut the TCP connections down that a process has made to that address; gives how many.

    Both ends see the connection end, as when a middlebox resets it.

    Args:
        process: its id, of this user; None: this process.

    Raises:
        UsageError: see :func:`connections_to`.
    """
    found = 0
    for connection in connections_to(peer, process):
        connection.shutdown(socket.SHUT_RDWR)
        found += 1
    return found


def connections_to(
    listener: Address, process: int | None = None, *, accepted: bool = False
) -> Iterator[socket.socket]:
    """The TCP connections that a process has made to that address, or has accepted there, each as a copy that
    is closed afterwards.

    Raises:
        UsageError: the kernel does not hand out the sockets of that process.
    """
    directory = f"/proc/{process or 'self'}/fd"
    with _descriptors(process) as copy:
        for name in os.listdir(directory):
            try:
                if not os.readlink(f"{directory}/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=copy(int(name))) as connection:
                    if connection.family != socket.AF_INET:
                        continue
                    ends = connection.getsockname(), connection.getpeername()
                    if ends[not accepted] == (listener.host, listener.port):
                        yield connection
            except PermissionError as error:
                raise UsageError(
                    f"the sockets of process {process} are out of reach ({error.strerror}): look at or break "
                    "connections as root, or as its user where ptrace is allowed"
                ) from error
            except OSError:  # it was closed meanwhile, or is not connected
                continue


@contextmanager
def _descriptors(process: int | None) -> Iterator[Callable[[int], int]]:
    """How to get a descriptor of this process for one of that process: see pidfd_getfd(2)."""
    if process is None:
        yield os.dup
        return
    system = ctypes.CDLL(None, use_errno=True).syscall
    handle = os.pidfd_open(process)

    def copy(number: int) -> int:
        copied = int(system(PIDFD_GETFD, handle, number, 0))
        if copied < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return copied

    try:
        yield copy
    finally:
        os.close(handle)


class InjectedFailure(Exception):
    """Raised by a keyed subtask that was chosen to fail."""


# --- while it runs --------------------------------------------------------------------------------


class OutputAudit(NamedTuple):
    """Records: missing from the output; in it more than once; and where they do not belong."""

    lost: int
    again: int
    wrong: int


class NumberedRun:
    """A numbered job on a cluster of its own; its :class:`~minishuffle.bench.failures.FailureCauses` number
    keyed subtasks. The worker of source and collector is never the victim.

    Args:
        name: of the job.
        rate: of its records, per second.
        directory: of its files.
        choose: one of so many victims, by number.
    """

    parallelism = PARALLELISM

    def __init__(
        self,
        cluster: LocalCluster,
        name: str,
        rate: float,
        directory: str,
        *,
        standby: int,
        choose: Callable[[int], int],
        settings: JobSettings | None = None,
    ) -> None:
        self._cluster, self._directory = cluster, Path(directory)
        self._log = LogReader(f"{directory}/log")
        self._rate, self._choose = rate, choose
        self.handle = cluster.submit(
            self._job(), name=name, parallelism=self.parallelism, settings=settings or JobSettings()
        )
        self.failures = FailureSeries(
            cluster.client, self.handle.id, self, workers=lambda: len(cluster.workers), standby=standby
        )

    def _job(self) -> Stream[Any]:
        return numbered_job(self._rate, str(self._directory))

    def _spared(self, tasks: Iterable[TaskInfo]) -> int:
        """The worker that is never the victim; 0: there is none."""
        return next(task.worker for task in tasks if not task.name.startswith(KEYED))

    def wait_for_reports(self, since: int) -> JobInfo:
        """Until every worker has said what it counts, later than that monotonic nanosecond.

        Raises:
            ShuffleError: that took too long.
        """

        def look() -> bool:
            workers = [each for each in self._cluster.status().workers if each.state == "alive"]
            seconds = (time.monotonic_ns() - since) / 1e9
            return all(each.heartbeat_age_seconds < seconds for each in workers)

        wait_for(look, lambda limit: f"not every worker has reported within {limit}")
        return self.handle.info()

    def wait_for_output(self) -> None:
        """Until every keyed subtask has passed records on.

        Raises:
            ShuffleError: that took too long.
        """

        def look() -> bool:
            return all(task.counters.records_in for task in keyed_tasks(self.handle.info().tasks).values())

        wait_for(look, lambda limit: f"the job has had no output within {limit}")

    def output(self, stalls: Sequence[Span] = ()) -> NumberedOutput:
        """What has been logged so far."""
        begin = int((self._directory / "begin").read_text())
        return self._output(begin, stalls)

    def _output(self, begin: int, stalls: Sequence[Span]) -> NumberedOutput:
        return NumberedOutput(self._log.read_on(), begin, self._rate, stalls, parallelism=self.parallelism)

    def audit(self, count: int) -> OutputAudit:
        """What its log has of the first ``count`` records."""
        output = self.output()
        return OutputAudit(output.missing(count), output.duplicated, 0)

    def rss_bytes(self) -> int:
        """Resident bytes of all workers."""
        return sum(psutil.Process(pid).memory_info().rss for pid in self._cluster.workers.values())

    def end(self) -> tuple[JobInfo, int]:
        """Have the job end; gives how many records its source made, too.

        Raises:
            ShuffleError: it ended in another way than it should.
        """
        (self._directory / "stop").touch()
        info = self._wait_for_end()
        return info, sum(task.counters.records_out for task in info.tasks if task.name == "Numbered")

    def _wait_for_end(self) -> JobInfo:
        info = self.handle.wait_until_over(RECOVERY_SECONDS_MAX)
        if info.state not in ("finished", "finished_with_loss"):
            raise ShuffleError(f"the job ended as {info.state}")
        return info

    # --- failures --------------------------------------------------------------------------------

    def strike(self, kind: FailureKind, before: JobInfo) -> FailureRound:
        """Cause a failure in the job that looks like this.

        Raises:
            ShuffleError: a subtask does not do what it is asked for, or the next coordinator shows something
                else than the lost one.
        """
        if kind == "coordinator":
            return self._lose_coordinator(before)
        keyed = keyed_tasks(before.tasks)
        if kind == "task":
            index = self._choose(len(keyed))
            at = self._ask_task("fail", "failed", index)
            replaced = frozenset([before.tasks.index(keyed[index])])
            return FailureRound(kind, at, frozenset([index]), replaced=replaced)
        spared = self._spared(before.tasks)
        workers = sorted({task.worker for task in keyed.values()} - {spared})
        worker = workers[self._choose(len(workers))]
        victims = frozenset(index for index, task in keyed.items() if task.worker == worker)
        if kind == "link":
            other = spared or next(each for each in workers if each != worker)
            return FailureRound(kind, self._cut(keyed, other, worker), victims, worker=worker)
        at = self._fail_worker(kind, worker)
        replaced = frozenset(number for number, task in enumerate(before.tasks) if task.worker == worker)
        return FailureRound(kind, at, victims, worker=worker, replaced=replaced)

    def _fail_worker(self, kind: FailureKind, victim: int) -> int:
        """Gives when: before the signal, or after the cut, which takes some milliseconds to be made."""
        if kind == "host":
            assert isinstance(self._cluster, HostCluster)
            self._cluster.hosts.cut(victim)
            return time.monotonic_ns()
        at = time.monotonic_ns()
        self._cluster.kill_worker(victim, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        return at

    def heal(self, each: FailureRound) -> None:
        """A worker that was stopped goes on; in place of one whose host is back another process starts."""
        if each.kind == "stop":
            self._cluster.kill_worker(each.worker, signal.SIGCONT)
        elif each.kind == "host":
            assert isinstance(self._cluster, HostCluster)
            self._cluster.kill_worker(each.worker)
            self._cluster.hosts.restore(each.worker)

    def _cut(self, keyed: Mapping[int, TaskInfo], one: int, other: int) -> int:
        """Break the connection of two workers; gives when. The one with the lower id has dialed the other."""
        dialer, listener = sorted((one, other))
        cutter = min(index for index, task in keyed.items() if task.worker == dialer)
        workers = self._cluster.status().workers
        address = next(Address(each.host, each.data_port) for each in workers if each.worker == listener)
        return self._ask_task("cut", "done", cutter, str(address))

    def _ask_task(self, what: str, answer: str, index: int, text: str = "") -> int:
        """Have a keyed subtask do something, see :func:`numbered_job`; gives when it did."""
        written = self._directory / f"asked-{index}"
        written.write_text(text)
        written.rename(self._directory / f"{what}-{index}")
        done = self._directory / f"{answer}-{index}"
        problem = f"keyed subtask {index} has not answered to {what!r} in time"
        wait_for(done.exists, lambda limit: problem, pause=0.001)
        wall = done.stat().st_ctime_ns
        done.unlink()
        return time.monotonic_ns() - (time.time_ns() - wall)

    def _lose_coordinator(self, before: JobInfo) -> FailureRound:
        """Kill the coordinator, and wait until the next one shows the same and has all workers back."""
        age = time.time() - psutil.Process(self._cluster.status().pid).create_time()
        time.sleep(max(0.0, limits.YOUNG_SECONDS - age))  # Else the next one starts later.
        at, wall = time.monotonic_ns(), time.time()
        self._cluster.kill_coordinator()
        shown = self.handle.info()
        shown_at = time.time()
        started = psutil.Process(self._cluster.status().pid).create_time()
        if _attempts(shown) != _attempts(before):
            raise ShuffleError(
                f"the next coordinator shows {_attempts(shown)} instead of {_attempts(before)}"
            )
        pids = set(self._cluster.workers.values())
        wait_for(
            lambda: {each.pid for each in self._cluster.status().workers if each.state == "alive"} == pids,
            lambda limit: f"not all workers are back within {limit}",
        )
        times = (started - wall, shown_at - started, time.time() - started)
        phases = {name: 1000 * passed for name, passed in zip(HEADLESS_PHASES, times, strict=True)}
        return FailureRound("coordinator", at, frozenset(), phases=phases)


def keyed_tasks(tasks: Iterable[TaskInfo]) -> dict[int, TaskInfo]:
    """The keyed subtasks, by index."""
    return {task.index: task for task in tasks if task.name.startswith(KEYED)}


def _attempts(info: JobInfo) -> dict[str, tuple[int, int, str]]:
    """By subtask: attempt, worker and state."""
    return {f"{task.name}[{task.index}]": (task.attempt, task.worker, task.state) for task in info.tasks}


# --- what it shows --------------------------------------------------------------------------------


class Gap(NamedTuple):
    """The longest silence of a subtask: milliseconds, and the monotonic nanoseconds of its beginning."""

    ms: float
    begin: int
    subtask: int


def longest_gaps(
    arrivals: Iterable[tuple[int, Vector]], begin: int, end: int, stalls: Sequence[Span] = ()
) -> list[Gap]:
    """The longest silence of each subtask between two times, by its number and when its output came; both
    edges count as output, and times at which the machine stood still do not count."""
    found = []
    for subtask, times in arrivals:
        times = times[(times >= begin) & (times <= end)]
        edges = np.concatenate([[begin], times, [end]])
        silences = awake(edges, stalls)
        longest = int(silences.argmax())
        found.append(Gap(float(silences[longest]) / 1e6, int(edges[longest]), subtask))
    return found


class LogReader:
    """Reads the file of a :class:`Log` while it grows, each time from where it stopped the time before.

    Sinks only append to it. So the entry that was read last is read again: when it is another one, this is
    not the file that it was.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._entries: Entries = np.empty(0, ENTRY)
        """With room for more behind those that were read; what was given away is never written to again."""
        self._count = 0

    def read_on(self) -> Entries:
        """All entries so far. One that is in the file in part is left for the next time.

        Raises:
            ShuffleError: the file was cut short or replaced.
        """
        last = self._entries[max(0, self._count - 1) : self._count]
        with Path(self._path).open("rb") as file:
            file.seek((self._count - len(last)) * ENTRY.itemsize)
            data = file.read()
        found = np.frombuffer(data, ENTRY, len(data) // ENTRY.itemsize)
        if not np.array_equal(found[: len(last)], last):
            raise ShuffleError(f"{self._path} no longer has entry {self._count - 1}, to which sinks append")
        known, self._count = self._count, self._count - len(last) + len(found)
        if self._count > len(self._entries):
            longer = np.empty(2 * self._count, ENTRY)
            longer[:known] = self._entries[:known]
            self._entries = longer
        self._entries[known : self._count] = found[len(last) :]
        return self._entries[: self._count]


class NumberedOutput:
    """What the collector has logged so far.

    Args:
        log: its entries.
        begin: monotonic nanoseconds at which record 0 was due.
        rate: of the records, per second.
    """

    def __init__(
        self,
        log: Entries,
        begin: int,
        rate: float,
        stalls: Sequence[Span] = (),
        *,
        parallelism: int = PARALLELISM,
    ) -> None:
        self.parallelism = parallelism
        self.numbers: Vector = log["number"]
        self._arrived: Vector = log["time"]
        self._begin, self._rate = begin, rate
        self._stalls = stalls

    @cached_property
    def _due(self) -> Vector:
        return self._begin + (self.numbers * (1e9 / self._rate)).astype(np.int64)

    @cached_property
    def _subtask(self) -> Vector:
        return self._subtasks_of(self.numbers)

    @cached_property
    def _times(self) -> Vector:
        """How often each number came, from 0 on."""
        return np.bincount(self.numbers)

    def _subtasks_of(self, numbers: Vector) -> Vector:
        found: Vector = keyed_subtasks(self.parallelism)[numbers % KEYS]
        return found

    def outage(self, at: int, victims: frozenset[int]) -> float:
        """Milliseconds from the failure at that time to the first output of a record that was due after it,
        of the victim that took longest.

        Raises:
            ShuffleError: there is none of some victim.
        """
        longest = 0.0
        for victim in sorted(victims):
            found = self._arrived[(self._subtask == victim) & (self._due > at)]
            if not len(found):
                raise ShuffleError(f"keyed subtask {victim} has had no output since it failed")
            longest = max(longest, (int(found.min()) - at) / 1e6)
        return longest

    def gaps(self, begin: int, end: int, without: frozenset[int]) -> list[Gap]:
        """The longest silence of each keyed subtask but these between two times."""
        others = sorted(set(range(self.parallelism)) - without)
        arrivals = ((subtask, self._arrived[self._subtask == subtask]) for subtask in others)
        return longest_gaps(arrivals, begin, end, self._stalls)

    def caught_up(self, at: int, victims: frozenset[int], until: int) -> float | None:
        """Seconds from the failure at that time until the victims' records are as late as they were before:
        the beginning of the first :data:`CALM_STEPS` steps of time in each of which nine tenths of the
        records are at most a tenth later than in the worst step of the second before the failure. None: not
        until then."""
        near = (self._arrived >= at - 10**9) & (self._arrived < until)
        mine = near & np.isin(self._subtask, list(victims))
        late = (self._arrived[mine] - self._due[mine]) / 1e9
        steps = (self._arrived[mine] - at) // STEP_NANOSECONDS
        by_step = {int(each): float(np.percentile(late[steps == each], 90)) for each in np.unique(steps)}
        before = range(-(10**9) // STEP_NANOSECONDS, -1)
        limit = LATER_MAX * max((by_step[each] for each in before if each in by_step), default=0.0)
        calm = 0
        for each in range((until - at) // STEP_NANOSECONDS):
            calm = calm + 1 if by_step.get(each, math.inf) <= limit else 0
            if calm == CALM_STEPS:
                return (each + 1 - CALM_STEPS) * STEP_NANOSECONDS / 1e9
        return None

    def counts(self, subtasks: frozenset[int], edges: Sequence[int]) -> Vector:
        """How many records of these keyed subtasks came between each two of the times."""
        found: Vector = np.histogram(self._arrived[np.isin(self._subtask, list(subtasks))], edges)[0]
        return found

    # --- the books -------------------------------------------------------------------------------

    def due_by(self, at: int) -> int:
        """How many records were due by that time."""
        return int((at - self._begin) * self._rate / 1e9) + 1

    def has_passed(self, count: int) -> bool:
        """Every keyed subtask has passed a record on that comes behind the first ``count``: of these nothing
        comes any more, since each subtask gets and passes its records on in order."""
        later = self.numbers[self.numbers >= count]
        return len(np.unique(self._subtasks_of(later))) == self.parallelism

    def missing(self, count: int) -> int:
        """How many of the first ``count`` records are not in the log."""
        return count - int(np.count_nonzero(self._times[:count]))

    @property
    def duplicated(self) -> int:
        """Records that came once more than they should."""
        return len(self.numbers) - int(np.count_nonzero(self._times))

    @property
    def disordered(self) -> int:
        """Records that came behind a later one of their key."""
        keys = (self.numbers % KEYS).astype(np.int16)  # which numpy sorts by radix
        by_key = np.argsort(keys, kind="stable")
        same_key = np.diff(keys[by_key]) == 0
        return int(np.count_nonzero(same_key & (np.diff(self.numbers[by_key]) < 0)))
