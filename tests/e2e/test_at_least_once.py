"""Jobs with a guarantee under failures, in real processes: two sources, a join, further exchanges by key, a
broadcast side, windows, sessions, counts, files; parallelism 4. What comes out is compared with plain Python.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream
from minishuffle.bench.chaingraph import Rereadable, micros_of
from minishuffle.client import JobHandle
from minishuffle.errors import UnknownName
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.usefixtures("wider_resources")]

PARALLELISM = 4
RATE = 400.0
KEYS = 7
BURST = 100
"""Consecutive numbers that make a session: these of one key are six bursts apart."""
GAP = timedelta(milliseconds=500)
WINDOW = timedelta(seconds=1)
SECOND = 1_000_000
WITHIN = timedelta(milliseconds=100)
LEAD_SECONDS = 1.0
SECONDS_MAX = 60.0
OPERATORS = ("left", "right", "pairs", "windows", "sessions", "named")
FaultKind = Literal[
    *("worker", "task", "two", "during recovery", "without coordinator", "standby", "drain", "terminate")
]
"""A worker is killed, alone or with another, at once or soon after, while the coordinator is away, or on
standby; a function raises; a worker leaves in order."""
Until = Callable[..., Any]


class Ending(Rereadable):
    """Says that it makes the same rows in each attempt, so that none comes twice to its consumers."""

    bounded = True


@dataclass(frozen=True)
class Notes:
    """Files by which the job and the test talk."""

    directory: Path

    def checked(self, operator: str) -> Callable[[Any], Any]:
        """(Job.) A function that gives back what it is given, and raises if this operator is to."""

        def check(row: Any) -> Any:
            with suppress(FileNotFoundError):
                self.to_raise(operator).unlink()
                raise ValueError(f"{operator} is to raise")
            return row

        return check

    def to_raise(self, operator: str) -> Path:
        """A file that has a subtask of the operator raise, and is gone when one has."""
        return self.directory / f"raise-{operator}"


def graph(notes: Notes, begin: int) -> Stream[Any]:
    stop, out = str(notes.directory / "stop"), notes.directory

    def source(name: str, kind: type[Rereadable]) -> Stream[Any]:
        rows = Stream.source(kind(begin, RATE, stop)).name(name).map(notes.checked(name))
        return rows.event_time(lambda row: row[1])

    def add(numbers: list[int], row: tuple[int, int]) -> list[int]:
        return [*numbers, row[1]]

    def as_row(found: tuple[Any, ...]) -> dict[str, Any]:
        return {"key": found[0], "start": found[1], "numbers": found[-1]}

    left, right = source("left", Ending), source("right", Rereadable)
    joined = left.key_by(lambda row: row[0]).join(right.key_by(lambda row: row[0]), within=WITHIN)
    pairs = joined.map(lambda pair: (pair[0] % KEYS, notes.checked("pairs")(pair[0])))
    windows = pairs.key_by(lambda row: row[0]).window(WINDOW).fold(list, add).map(notes.checked("windows"))
    bursts = pairs.key_by(lambda row: row[1] // BURST % KEYS)
    sessions = bursts.session_window(GAP).fold(list, add).map(notes.checked("sessions"))
    names = Stream.items([{"key": key, "name": f"key {key}"} for key in range(KEYS)])
    rows = pairs.rebalance().map(lambda row: {"key": row[0], "number": notes.checked("named")(row[1])})
    return Stream.together(
        left.key_by(lambda row: row[0] % KEYS).count(emit="end").collect(),
        windows.map(as_row).to_files(out / "windows", seconds=1.0),
        sessions.map(as_row).to_files(out / "sessions", seconds=1.0),
        rows.broadcast_join(names, "key", "left").to_files(out / "rows", seconds=1.0),
    )


# --- the job under failures -----------------------------------------------------------------------


class Run:
    """The job on its cluster."""

    def __init__(self, cluster: LocalCluster, notes: Notes, wait_until: Until, random: Random) -> None:
        self.cluster, self.notes, self.wait_until, self.random = cluster, notes, wait_until, random
        self.begin = time.monotonic_ns()
        settings = JobSettings(
            guarantee="at_least_once", snapshot_interval=0.2, durable_interval=1.0, restart_failures_max=100
        )
        self.handle: JobHandle = cluster.submit(
            graph(notes, self.begin), parallelism=PARALLELISM, settings=settings
        )

    def runs(self) -> bool:
        """Whether all run."""
        info = self.handle.info()
        assert info.state in ("created", "running"), (info.state, info.causes)
        return all(task.state in ("running", "finished") for task in info.tasks)

    def progress(self) -> None:
        """Wait until all run, and have taken more rows: a drawn number, so that what fails next does so at a
        moment of its own."""
        self.wait_until(self.runs, "the recovery", SECONDS_MAX)
        goal = self.rows() + self.random.uniform(1.0, 8.0) * RATE
        self.wait_until(lambda: self.rows() > goal, "rows", SECONDS_MAX)

    def rows(self) -> int:
        return sum(task.counters.records_in for task in self.handle.info().tasks)

    def restarts(self) -> int:
        return sum(self.handle.info().restarts.values())

    def workers(self, *, standby: bool = False) -> list[int]:
        there = [each for each in self.cluster.status().workers if each.state == "alive"]
        return [each.worker for each in there if each.standby == standby]

    def fail(self, kind: FaultKind) -> None:
        random, cluster, restarts = self.random, self.cluster, self.restarts()
        there = self.wait_until(lambda: len(found := self.workers()) > 1 and found, "two workers")
        one, other = random.sample(there, 2)
        if kind in ("drain", "terminate") and len(there) < PARALLELISM:
            kind = "worker"  # Nobody takes the place of one that leaves.
        if kind == "task":
            self.notes.to_raise(random.choice(OPERATORS)).touch()
        elif kind == "standby":
            one = next(iter(self.workers(standby=True)), one)
            cluster.kill_worker(one)
        elif kind == "drain":
            with suppress(UnknownName):  # It was leaving, and has left.
                cluster.client.drain(one)
        elif kind == "terminate":
            cluster.kill_worker(one, signal.SIGTERM)
        else:
            runs = any(task.worker == one and task.state == "running" for task in self.handle.info().tasks)
            if kind == "without coordinator":
                cluster.kill_coordinator()
            cluster.kill_worker(one)
            if kind == "during recovery" and runs:
                self.wait_until(lambda: self.restarts() > restarts, "a restart")
            if kind in ("during recovery", "two"):
                with suppress(UnknownName):
                    cluster.kill_worker(other)

    def end(self) -> None:
        """Have the sources end, and compare what comes out with what they have made."""
        count = int(((time.monotonic_ns() - self.begin) / 1e9 + LEAD_SECONDS) * RATE)
        written = self.notes.directory / "stopping"
        written.write_text(str(count))
        written.rename(self.notes.directory / "stop")
        found = self.handle.wait(SECONDS_MAX)
        assert set(found.rows) == set(Counter(number % KEYS for number in range(count)).items())
        info = self.handle.info()
        assert not (info.rows_dropped.keys() - {"late"} or info.rows_in_flight or info.state_rows_lost)
        self.audit_rows(count, info.rows_again)
        self.audit_lists(count)

    def audit_rows(self, count: int, again: int) -> None:
        """Each pair is there, and so is its key's name. No more came twice than was counted."""
        rows = Counter((row["number"], row["name"]) for row in self.read("rows"))
        expected = Counter((number, f"key {number % KEYS}") for number in range(count))
        assert rows.keys() <= expected.keys()
        assert not (lost := expected - rows), f"{len(lost)} rows are lost: {sorted(lost)[:5]}"
        assert (rows - expected).total() <= again

    def audit_lists(self, count: int) -> None:
        windows, sessions = defaultdict[Any, set[int]](set), defaultdict[Any, set[int]](set)
        for number in range(count):
            windows[number % KEYS, micros_of(number, RATE) // SECOND].add(number)
            sessions[number // BURST].add(number)
        audit(windows, self.read("windows"), lambda row: (row["key"], micros(row["start"]) // SECOND))
        audit(sessions, self.read("sessions"), lambda row: row["numbers"][0] // BURST)

    def read(self, name: str) -> list[dict[str, Any]]:
        files = sorted((self.notes.directory / name).glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]


def audit(expected: dict[Any, set[int]], rows: list[dict[str, Any]], place: Callable[[Any], Any]) -> None:
    """All numbers of a window or session are in one row of it, and none has others."""
    best = defaultdict[Any, set[int]](set)
    for row in rows:
        numbers, at = set(row["numbers"]), place(row)
        assert numbers <= expected[at], f"{sorted(numbers - expected[at])[:5]} do not belong to {at}"
        best[at] = max(best[at], numbers, key=len)
    lost = [number for at, numbers in expected.items() for number in numbers - best[at]]
    assert not lost, f"{len(lost)} rows are lost: {sorted(lost)[:5]}"


def micros(at: datetime) -> int:
    return (at.replace(tzinfo=UTC) - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def play(kinds: list[FaultKind], random: Random, directory: Path, wait_until: Until) -> None:
    """One failure after the other, as soon as rows have come behind the last one."""
    with LocalCluster(workers=PARALLELISM, slots=2, standby=1) as cluster:
        run = Run(cluster, Notes(directory), wait_until, random)
        run.progress()
        for kind in kinds:
            run.fail(kind)
            run.progress()
        run.end()


def test_nothing_is_lost_when_workers_are_killed(tmp_path: Path, wait_until: Until) -> None:
    play(["without coordinator", "two"], Random(0), tmp_path, wait_until)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_lost_whatever_fails(seed: int, tmp_path: Path, wait_until: Until) -> None:
    random = Random(seed)
    play(random.choices(get_args(FaultKind), k=8), random, tmp_path, wait_until)
