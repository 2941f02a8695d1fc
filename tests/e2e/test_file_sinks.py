"""Files of real processes under failures: what is listed is there, once, and the books have the rest."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream
from minishuffle.client import JobHandle, results_of
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings

pytestmark = pytest.mark.timeout(120)

SECONDS_MAX = 60.0
RECORDS = 16_000
RATE = 4_000
FILE_ROWS = 3_000
Until = Callable[..., Any]


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def sink_task(handle: JobHandle, index: int) -> Any:
    return next(task for task in handle.info().tasks if (task.operator, task.index) == (1, index))


def values(out: Path) -> list[int]:
    """As any reader of the directory has them."""
    read: list[int] = ds.dataset(out, format="parquet").to_table()["value"].to_pylist()
    return read


def check_listed(handle: JobHandle, out: Path) -> None:
    """The manifest and the directory say the same."""
    listed = list(handle.files())
    assert {Path(file.path).name for file in listed} == {path.name for path in out.iterdir()}
    for file in listed:
        content = Path(file.path).read_bytes()
        assert (file.bytes, file.checksum) == (len(content), hashlib.sha256(content).hexdigest())
        assert file.rows == pq.read_metadata(file.path).num_rows
    info = handle.info()
    assert (info.files_listed, info.file_rows) == (len(listed), sum(file.rows for file in listed))


@pytest.mark.slow
def test_a_killed_sink_leaves_its_listed_files_and_the_books_have_the_rest(
    wait_until: Until, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stream = Stream.generate(numbers, rate=RATE, records=RECORDS).parallel(1).rebalance()
    with LocalCluster(workers=3, slots=1, heartbeat_interval=0.1, restart_workers=False) as cluster:
        handle = cluster.submit(stream.to_files(out, rows=FILE_ROWS).parallel(2), parallelism=2)

        def in_the_middle_of_its_second_file() -> bool:
            filed = sink_task(handle, 1).counters.rows_filed
            listed = sum(file.rows for file in handle.files() if file.index == 1)
            return listed > 0 and bool(filed > listed + 200)

        wait_until(in_the_middle_of_its_second_file, "a complete file and another")
        victim = sink_task(handle, 1).worker
        assert victim != next(task.worker for task in handle.info().tasks if task.operator == 0)
        cluster.kill_worker(victim, signal.SIGKILL)
        result = handle.wait(SECONDS_MAX, allow_loss=True)
        assert result.state == "finished_with_loss"
        check_listed(handle, out)
        info, found = handle.info(), values(out)
    assert len(set(found)) == len(found), "a row is in two files"
    missing = len(set(range(RECORDS)) - set(found))
    dropped = sum(info.rows_dropped.values())
    assert info.rows_dropped["sink_unfinished"] >= 100
    assert dropped <= missing <= dropped + info.rows_in_flight
    assert {path.name.split("-")[2] for path in out.iterdir() if "part-00001" in path.name} == {"1", "2"}
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.usefixtures("wider_resources")
def test_files_have_each_row_once_when_workers_of_a_guaranteed_sink_are_killed(
    wait_until: Until, tmp_path: Path
) -> None:
    """Some of them hold snapshots of the other tasks, and the source's is killed too."""
    out, gate = tmp_path / "out", tmp_path / "gate"
    stream = Stream.source(Gated(gate)).rebalance().to_files(out, rows=2_000)
    settings = JobSettings(guarantee="at_least_once", snapshot_interval=0.1)
    with LocalCluster(workers=3, slots=2, heartbeat_interval=0.1, slot_timeout=100.0) as cluster:
        handle = cluster.submit(stream, parallelism=2, settings=settings)
        attempts = listed = 0
        for victim in ((1, 1), (1, 0), (0, 0), (1, 1)):

            def is_to_die(attempts: int = attempts, listed: int = listed) -> bool:
                """All that was lost is back, and another file is listed since."""
                info = handle.info()
                runs = all(task.state == "running" for task in info.tasks)
                runs = runs and sum(task.attempt for task in info.tasks) > attempts
                return runs and not info.unprotected and info.files_listed > listed

            wait_until(is_to_die, "another file, and snapshots of all tasks")
            info = handle.info()
            attempts, listed = sum(task.attempt for task in info.tasks), info.files_listed
            workers = {(task.operator, task.index): task.worker for task in info.tasks}
            cluster.kill_worker(workers[victim], signal.SIGKILL)
        gate.touch()
        result = handle.wait(SECONDS_MAX)
        info = handle.info()
        check_listed(handle, out)
    assert (result.state, info.rows_dropped, info.rows_in_flight) == ("finished", {}, 0)
    assert (info.fallbacks, info.rows_again) == (0, 0)
    assert sorted(values(out)) == list(range(2 * Gated.ROWS)), "each row is there, and none twice"


class Gated:
    """Numbers, slowly until a file is there."""

    bounded = True
    ROWS = 200_000

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        while offset < self.ROWS:
            is_open = self.gate.exists()
            if not is_open:
                threading.Event().wait(0.01)
            end = min(self.ROWS, offset + (1_000 if is_open else 20))
            yield [2 * number + split for number in range(offset, end)]
            offset = end


@pytest.mark.slow
def test_files_of_an_endless_stream_are_there_while_it_runs_and_after_a_cancel(
    wait_until: Until, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with LocalCluster(workers=1) as cluster:
        stream = Stream.generate(numbers, rate=2_000).to_files(out, seconds=0.2)
        handle = cluster.submit(stream, parallelism=1)
        wait_until(lambda: handle.info().files_listed >= 2, "two files")
        assert len(values(out)) > 0
        handle.cancel()
        info = handle.wait_until_over(SECONDS_MAX)
        check_listed(handle, out)
        found = values(out)
    assert sorted(found) == list(range(len(found)))
    assert len(found) == info.file_rows
    (closed,) = results_of(info)
    assert closed.value == {"files": info.files_listed, "rows": info.file_rows}
    assert info.state == "canceled" and info.rows_dropped.keys() <= {"sink_unfinished", "failed_batch"}
