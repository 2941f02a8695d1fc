"""What file sinks report of their files, and what they wait for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from minishuffle.api.stream import Stream
from minishuffle.exchange.rows import unpack_result
from minishuffle.operators.base import CompleteFile, TaskContext
from minishuffle.plan.planner import compile_job
from minishuffle.worker.reports.filereports import FileReports
from minishuffle.worker.state import StartTask
from support.attempts import attempt

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
