"""A real cluster whose coordinator cannot write to its state directory."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from minishuffle.api.stream import Stream
from minishuffle.errors import ResourceExhausted
from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_full_disk_refuses_submissions_and_jobs_run_on() -> None:
    with LocalCluster(workers=1, slots=2) as cluster:
        endless = Stream.generate(lambda start, count: list(range(start, start + count)), rate=100).to_count()
        running = cluster.client.submit(endless, name="runs on", parallelism=1)
        pid = cluster.status().pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        for _ in range(2):
            with pytest.raises(
                ResourceExhausted, match="cannot be accepted: the journal .* make room"
            ) as raised:
                cluster.client.submit(Stream.items([1]).collect(), parallelism=1)
            assert len(str(raised.value).splitlines()) == 1
        assert running.info().state in ("created", "running")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        assert cluster.client.submit(Stream.items([1]).collect(), parallelism=1).wait(30).rows == [1]
        assert running.info().state == "running"
        running.cancel()
        assert running.wait_until_over(30).state == "canceled"


def test_no_row_is_in_two_files_if_the_coordinator_is_lost_before_there_is_room(
    wait_until: Callable[..., Any], tmp_path: Path
) -> None:
    """Everything but the first files happens while the journal cannot be written."""
    out, records = tmp_path / "out", 6_000
    with LocalCluster(workers=1, slots=2, heartbeat_interval=0.1) as cluster:
        numbers = Stream.generate(
            lambda start, count: list(range(start, start + count)), rate=2_000, records=records
        )
        handle = cluster.submit(numbers.rebalance().to_files(out, seconds=0.2), parallelism=1)
        wait_until(lambda: handle.info().files_listed >= 2, "two files")
        pid = cluster.status().pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        wait_until(lambda: cluster.status().journal_problem, "the journal cannot be written")
        named = set(out.glob("part-*"))
        wait_until(lambda: handle.info().tasks[1].counters.rows_filed == records, "all rows in files")
        assert set(out.glob("part-*")) - named == set(), "a file that the journal does not list"
        os.kill(pid, signal.SIGKILL)
        assert handle.wait(60).state == "finished"
        assert not cluster.status().journal_problem
        listed = {file.path for file in handle.files()}
    found = ds.dataset(out, format="parquet").to_table()["value"].to_pylist()
    assert sorted(found) == list(range(records))
    assert listed == set(map(str, out.iterdir()))


def test_a_job_whose_results_fill_the_disk_can_be_cancelled(wait_until: Callable[..., Any]) -> None:
    """Its restart waits for room, which comes only with its end."""
    numbers = Stream.generate(
        lambda start, count: [{"n": n} for n in range(start, start + count)], rate=2_000
    )
    rows = numbers.to_table({"n": "int64"}).to_spark()
    with LocalCluster(workers=1, slots=1, heartbeat_interval=0.1) as cluster:
        handle = cluster.submit(rows, name="rows", parallelism=1)
        wait_until(lambda: handle.info().tasks[0].counters.rows_kept, "rows that are kept")
        worker = cluster.workers[1]
        for pid in (cluster.status().pid, worker):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        wait_until(lambda: cluster.status().journal_problem, "the journal cannot be written")
        wait_until(lambda: [task.attempt for task in handle.info().tasks] == [2], "the sink has failed")
        assert kept_files(worker) and handle.info().tasks[0].state == "created"
        handle.cancel()
        assert handle.wait_until_over(10).state == "canceled"
        assert cluster.status().journal_problem
        wait_until(lambda: not kept_files(worker), "room on the disk")
        resource.prlimit(cluster.status().pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        wait_until(lambda: not cluster.status().journal_problem, "the journal is written")
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert cluster.client.submit(Stream.items([1]).collect(), parallelism=1).wait(30).rows == [1]


def kept_files(pid: int) -> list[str]:
    """Files with results that a worker has open."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if "minishuffle-rows-" in (target := os.readlink(each)):
                found.append(target)
    return found


def has_graph(journal: Path) -> bool:
    """Whether it knows a job."""
    if not journal.exists():
        return False
    with closing(sqlite3.connect(journal)) as database:
        try:
            found = database.execute("SELECT count(*) FROM records WHERE kind = 'graph'").fetchone()
        except sqlite3.OperationalError:  # It has no tables yet.
            return False
        return bool(found[0])


def test_a_journal_that_was_removed_is_written_anew(wait_until: Callable[..., Any]) -> None:
    """The next coordinator knows the job and its workers, which run on."""
    with LocalCluster(workers=1, slots=2, heartbeat_interval=0.1) as cluster:
        endless = Stream.generate(lambda start, count: list(range(start, start + count)), rate=100).to_count()
        handle = cluster.submit(endless, name="runs on", parallelism=1)
        wait_until(lambda: handle.info().state == "running", "the job runs")
        for file in cluster.state_dir.glob("journal.sqlite*"):
            file.unlink()
        wait_until(lambda: has_graph(cluster.state_dir / "journal.sqlite"), "a new journal")
        os.kill(cluster.status().pid, signal.SIGKILL)
        wait_until(lambda: cluster.status().term == 2, "the next coordinator")
        info = handle.info()
        assert info.state == "running" and not info.restarts
        handle.cancel()
        assert handle.wait_until_over(30).state == "canceled"
