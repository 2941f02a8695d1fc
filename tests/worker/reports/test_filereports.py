"""What file sinks report of their files, and what they wait for."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream
from minishuffle.connectors import filesink
from minishuffle.connectors.filesink import FileSink, Roll
from minishuffle.coordinator.jobs.manifest import Manifest
from minishuffle.exchange.rows import unpack_result
from minishuffle.operators.base import CompleteFile, TaskContext
from minishuffle.plan.planner import compile_job
from minishuffle.wire.reports import FileCompleted
from minishuffle.worker.reports.attemptreports import AttemptReports
from minishuffle.worker.reports.filereports import FileReports
from minishuffle.worker.state import StartTask
from support.attempts import attempt
from support.batches import as_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Site, Turns
    from minishuffle.worker.tasks.handoff import TaskPaths

SINK = attempt(0, 0)


def complete(number: int) -> CompleteFile:
    return CompleteFile(number, f"/out/{number}", 1, 2, "ab")


def test_files_are_reported_on_the_loop_in_order(turns: Turns, paths_of: Callable[..., TaskPaths]) -> None:
    heard: list[CompleteFile] = []
    reports = FileReports(paths_of(), heard.append, {1: 2})
    reports.wait()
    reports.complete(complete(0))
    reports.complete(complete(1))
    assert (heard, reports.listed) == ([], {1: 2})
    turns.turn()
    assert heard == [complete(0), complete(1)]
    reports.acknowledge()
    reports.acknowledge()
    reports.wait()


def test_lingering_ends_with_the_acknowledgement_the_paths_or_its_time(
    turns: Turns, paths_of: Callable[..., TaskPaths], long_waits: None
) -> None:
    paths = paths_of()
    reports = FileReports(paths, lambda file: None, {})
    reports.complete(complete(0))
    paths.cancel()
    thread = threading.Thread(target=reports.linger, daemon=True)
    thread.start()
    reports.acknowledge()
    paths.bell.ring_now()
    thread.join(20.0)
    assert not thread.is_alive()
    reports.complete(complete(1))
    paths.close()
    reports.linger()
    assert reports.acknowledged == 1


async def test_the_end_of_a_sink_waits_for_its_files_to_be_listed(site: Site, tmp_path: Path) -> None:
    site.acknowledges = False
    (task,) = site.deploy(Stream.items([1, 2, 3]).to_files(tmp_path, rows=2))
    await site.until(lambda: len(site.positions.get(SINK, ())) > 0)
    task.leases.acknowledge()
    await site.until(lambda: len(site.files.get(SINK, ())) == 2)
    assert SINK not in site.outcomes
    assert [path.name[0] for path in tmp_path.iterdir()] == [".", "."]
    for _ in range(2):
        task.files.acknowledge()
    (outcome,) = await site.finish()
    assert outcome.state == "finished"
    assert [file.rows for file in site.files[SINK]] == [2, 1]
    assert pq.read_table(tmp_path)["value"].to_pylist() == [1, 2, 3]
    assert site.deployment.attempts[SINK].task.read_counters().rows_filed == 3


class Committing:
    """Prepares its number of rows; its result is what it has committed."""

    def open(self, context: TaskContext) -> None:
        self.rows = 0
        self.committed: list[bytes] = []

    def write(self, batch: Any) -> None:
        self.rows += len(batch)

    def prepare(self) -> bytes:
        return b"%d" % self.rows

    def commit(self, prepared: bytes) -> None:
        self.committed.append(prepared)

    def close(self) -> list[bytes]:
        return self.committed


async def test_a_sink_commits_what_an_earlier_attempt_has_prepared_and_then_its_own(site: Site) -> None:
    message = site.message(compile_job(Stream.items([1, 2, 3]).to(Committing())), "j1")
    spec = message.tasks[0].model_copy(update={"attempt": 2, "committable": b"before"})
    site.deployment.start(StartTask(message, spec))
    await site.until(lambda: bool(site.outcomes))
    assert unpack_result(site.outcomes[attempt(number=2)].result) == [b"before", b"3"]
    (prepared,) = site.files[attempt(number=2)]
    assert (prepared.path, prepared.rows, prepared.committable) == ("", 3, b"3")


async def test_rows_that_a_sink_had_taken_are_not_of_the_batch_that_failed(
    site: Site, tmp_path: Path
) -> None:
    """They are in its files, or unfinished."""
    stream = Stream.items([1, 2, 3, "x"]).to_files(tmp_path, rows=3)
    (outcome,) = await site.run(stream)
    assert outcome.state == "failed"
    counters = site.deployment.attempts[SINK].task.read_counters()
    assert counters.rows_filed + counters.rows_dropped.get("failed_batch", 0) == 4


# --- files that wait for snapshots ----------------------------------------------------------------------


def held_reports(
    paths: Any, heard: list[CompleteFile], listed: dict[int, int] | None = None, *, number: int = 2
) -> FileReports:
    return FileReports(paths, heard.append, listed or {}, attempt=number, held=True)


def test_a_held_file_is_reported_once_a_snapshot_behind_it_is_safe(
    turns: Turns, paths_of: Callable[..., TaskPaths]
) -> None:
    heard: list[CompleteFile] = []
    reports = held_reports(paths_of(), heard)
    assert reports.snapshot(1) == b""
    reports.complete(complete(0))
    first = reports.snapshot(2)
    reports.complete(complete(1))
    turns.turn()
    reports.safe(1)
    assert heard == []
    reports.safe(2)
    reports.safe(2)
    assert heard == [complete(0)]
    reports.acknowledge()
    reports.keep(b"rows")
    second = reports.snapshot(3)
    third = held_reports(paths_of(), later := [], {2: 1}, number=3)
    third.restore(second)
    assert [(file.attempt, file.number) for file in third.adopted] == [(2, 1)]
    assert third.sink_state == b"rows"
    turns.turn()
    assert later == [CompleteFile(1, "/out/1", 1, 2, "ab", attempt=2)]
    again = third.snapshot(1)
    third.acknowledge(2)
    assert third.listed == {2: 2}
    assert len(third.snapshot(2)) < len(again)
    fourth = held_reports(paths_of(), known := [], {2: 1})
    fourth.restore(first)
    turns.turn()
    assert known == [], "it is listed already"
    assert [(file.attempt, file.number) for file in fourth.adopted] == [(2, 0)]


@pytest.mark.parametrize(
    ("listed", "is_complete", "again"),
    [(2, False, 0), (3, False, 1), (7, False, 5), (7, True, 0)],
    ids=["covered", "one behind", "several", "nothing follows"],
)
def test_rows_that_are_listed_and_in_no_snapshot_are_counted_when_they_come_again(
    paths_of: Callable[..., TaskPaths], listed: int, is_complete: bool, again: int
) -> None:
    """Where nobody holds snapshots, files are listed without."""
    first = held_reports(paths_of(), [])
    first.complete(complete(0))
    first.complete(complete(1))
    begun = first.snapshot(1)
    second = FileReports(
        paths_of(), lambda file: None, {2: 2}, attempt=3, held=True, is_complete=is_complete, rows=listed
    )
    second.restore(begun, is_end=True)
    assert second.rows_again == again
    second.complete(complete(0))
    third = FileReports(paths_of(), lambda file: None, {2: 2, 3: 1}, attempt=4, held=True, rows=listed + 1)
    third.restore(second.snapshot(1))
    assert third.rows_again == 0


class Calls:
    """The paths of a task whose loop has its turns while the task waits."""

    def __init__(self, turn: Callable[[], None]) -> None:
        self.posted: deque[tuple[Any, ...]] = deque()
        self.bell = self
        self.job_ends = False
        self._turn = turn

    def ring(self) -> None: ...

    def post(self, call: Callable[..., None], *args: Any) -> None:
        self.posted.append((call, *args))

    def run_posted(self) -> None:
        while self.posted:
            call, *args = self.posted.popleft()
            call(*args)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        for _ in range(10):
            if ready():
                return
            self._turn()
        raise AssertionError("it waits for nothing")

    def linger(self, ready: Callable[[], bool], seconds: float) -> None: ...


@pytest.mark.parametrize("is_end", [True, False])
def test_a_subtask_is_complete_behind_a_snapshot_that_is_behind_its_inputs(
    is_end: bool, paths_of: Callable[..., TaskPaths]
) -> None:
    reports = FileReports(paths_of(), lambda file: None, {}, held=True, is_complete=True)
    reports.restore(b"", is_end=is_end)
    assert reports.is_complete == is_end


def test_what_is_held_when_the_job_ends_is_not_reported_any_more(
    paths_of: Callable[..., TaskPaths],
) -> None:
    heard: list[CompleteFile] = []
    paths = paths_of()
    reports = FileReports(paths, heard.append, {}, held=True)
    for number in range(3):
        reports.complete(complete(number))
        reports.snapshot(number + 1)
    reports.safe(1)
    assert reports.may_be_listed == 3, "another attempt may have the others listed"
    paths.cancel(job_ends=True)
    reports.safe(2)
    assert len(heard) == reports.may_be_listed == 1


def test_the_end_reports_what_is_held_and_names_the_last() -> None:
    heard: list[CompleteFile] = []

    def turn() -> None:
        paths.run_posted()
        if reports.acknowledged < len(heard):
            reports.acknowledge()

    paths = Calls(turn)
    reports = held_reports(paths, heard)
    reports.complete(complete(0))
    reports.complete(complete(1))
    reports.linger()
    reports.finish()
    assert [(file.number, file.is_last) for file in heard] == [(0, False), (1, True)]
    assert reports.acknowledged == 2


class SinkRestarts:
    """A subtask that writes 0, 1, … into files, and whose worker dies between any two steps; with its
    coordinator and the holder of its snapshots."""

    ROWS = 60

    def __init__(self, path: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.manifest = Manifest()
        self.path, self.made = path, FileSink(path, Roll(seconds=1e9, rows=7, bytes=1 << 40))
        self.attempt = 0
        self.deaths = 0
        self.kept: dict[int, tuple[int, bytes]] = {}
        """Snapshots at the holder: how many rows were taken, and what is pending."""
        self.number = 0
        self.begin()

    def begin(self) -> None:
        self.attempt += 1
        oldest = min(self.kept, default=0)
        self.kept = {each: snapshot for each, snapshot in self.kept.items() if each == oldest}
        self.taken, pending = self.kept.get(oldest, (0, b""))
        self.safe_at: deque[int] = deque()
        self.sent = AttemptReports()
        self.paths = Calls(self.turn)
        self.files = FileReports(
            self.paths,  # type: ignore[arg-type]
            self.report,
            self.manifest.counts(0, 0),
            attempt=self.attempt,
            held=True,
            is_complete=self.manifest.is_complete(0, 0),
        )
        self.files.restore(pending, is_end=self.taken == self.ROWS)
        self.files.secure_by(self.secure)
        self.sink: FileSink = FileSink.__new__(FileSink)
        self.sink.__dict__.update(self.made.__dict__)
        self.sink.open(TaskContext("j1", "task", 0, 1, self.attempt, files=self.files))

    def report(self, file: CompleteFile) -> None:
        fact = FileCompleted(
            attempt=attempt(0, 0, self.attempt),
            file=file.number,
            path=file.path,
            rows=file.rows,
            bytes=file.bytes,
            checksum=file.checksum,
            writer=file.attempt,
            is_last=file.is_last,
        )
        self.sent.add(fact, 1.0)

    def turn(self) -> None:
        """The loop has a turn, and the coordinator answers one report."""
        self.paths.run_posted()
        if (report := self.sent.take(1, 1.0)) is not None:
            for fact in report.facts:
                assert isinstance(fact, FileCompleted)
                self.manifest.add(fact)
                assert self.manifest.lists(fact)
            for applied in self.sent.acknowledge(report.number):
                assert isinstance(applied, FileCompleted)
                self.files.acknowledge(applied.writer)

    def snapshot(self, *, kept: bool = False) -> None:
        """It is at the holder at once, and the only one there; the task hears of that later. Unless it is
        ``kept`` it may never arrive."""
        if not self.sink.defers_snapshot(urgent=kept or self.random.random() < 0.3):
            self.sink.before_snapshot(nothing)
            self.number += 1
            pending = self.files.snapshot(self.number)
            assert not self.files.is_ahead
            if kept or self.random.random() < 0.8:
                self.kept = {self.number: (self.taken, pending)}
                self.safe_at.append(self.number)

    def secure(self) -> None:
        self.snapshot(kept=True)
        while self.safe_at:
            self.hear()

    def hear(self) -> None:
        if self.safe_at:
            self.files.safe(self.safe_at.popleft())

    def write(self) -> None:
        rows = range(self.taken, min(self.ROWS, self.taken + self.random.randint(1, 5)))
        self.taken = rows.stop
        self.sink.process(as_batch(list(rows)), 0, nothing)
        if self.sink.deadline() == 0.0:
            self.sink.on_clock(0.0, nothing)

    def stand(self) -> None:
        """At a barrier: all that precedes it is listed."""
        self.sink.on_barrier(nothing)

    def die(self) -> None:
        """Some of what was sent arrives all the same."""
        for _ in range(self.random.randint(0, 2)):
            self.turn()
        self.deaths += 1
        self.begin()

    def run(self) -> None:
        steps: list[Callable[[], None]] = [self.write] * 4 + [self.snapshot] * 2 + [self.hear] * 2
        steps += [self.turn] * 2 + [self.die, self.stand]
        while True:
            self.random.choice(steps)()
            if self.taken == self.ROWS:
                self.secure()
                if self.random.random() < 0.2:
                    self.die()
                    continue
                self.sink.finish(nothing)
                self.sink.close()
                if self.random.random() < 0.7:
                    return
                self.die()


def nothing(batch: Any) -> None:
    raise AssertionError(f"a sink emits nothing, and not {batch!r}")


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_in_listed_files_once_whenever_their_worker_dies(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesink, "BATCH_ROWS_MAX", 3)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    job = SinkRestarts(tmp_path, seed)
    job.run()
    listed = job.manifest.after(0).files
    assert {Path(file.path) for file in listed} == set(tmp_path.iterdir()), "no other, and none hidden"
    rows = [row for file in listed for row in pq.read_table(file.path)["value"].to_pylist()]
    assert sorted(rows) == list(range(job.ROWS))
