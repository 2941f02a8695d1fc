"""External writers whose job restarts tasks under them: killed workers and functions that raise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Table
from minishuffle.config import read_secret
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import Guarantee, JobSettings
from minishuffle.remote.access import Access
from minishuffle.remote.writer import StreamWriter, commit_write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

SECONDS_MAX = 30.0
SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
PIECE = 100
ALL = {*range(30_000), *range(1_000_000, 1_030_000)}
"""What two writers bring in 300 pieces each."""


class Writing:
    """A cluster of two workers, a job that reads the stream ``orders`` with two subtasks, and writers."""

    def __init__(self, cluster: LocalCluster, rows: Any, folder: Path) -> None:
        self.cluster = cluster
        self._rows = rows
        self._folder = folder
        address = cluster.client.address
        self.access = Access(address.host, address.port, "local", read_secret(cluster.state_dir / "secret"))

    def submit(self, lease: int | None, *, raises_at: int = -1, guarantee: Guarantee = "loss") -> Any:
        """``raises_at``: the function raises when it sees that number, the first time."""
        once = self._folder / "raised"

        def taken(batch: pa.RecordBatch) -> pa.RecordBatch:
            if raises_at in batch.column("n").to_pylist() and not once.exists():
                once.touch()
                raise ValueError("as the test wants it")
            return batch.select(["n"])

        stream = Table.from_spark("orders", SCHEMA).map_batches(taken).collect()
        settings = JobSettings(
            source_lease=lease, guarantee=guarantee, snapshot_interval=0.1, durable_interval=1.0
        )
        return self.cluster.submit(stream, parallelism=2, settings=settings)

    def writer(self, partition: int, attempt: int = 1) -> StreamWriter:
        return StreamWriter(
            self.access,
            "orders",
            SCHEMA,
            write="w",
            partition=partition,
            partitions=2,
            attempt=attempt,
        )

    def pieces(self, partition: int, first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Partition p has the numbers from p million on."""
        for step in range(first, end):
            yield self._rows(partition * 1_000_000 + step * PIECE, PIECE)


@pytest.fixture
def writing(rows: Any, tmp_path: Path) -> Iterator[Writing]:
    with LocalCluster(workers=2, slots=2, segment_bytes=4096) as cluster:
        yield Writing(cluster, rows, tmp_path)


def numbers(handle: Any) -> Counter[int]:
    return Counter(row["n"] for row in handle.wait(SECONDS_MAX, allow_loss=True).rows)


def records_in(handle: Any) -> int:
    return sum(task.counters.records_in for task in handle.info().tasks)


def kill_worker_of(writing: Writing, handle: Any, index: int) -> None:
    writing.cluster.kill_worker(handle.info().tasks[index].worker)


def write_through_kills(writing: Writing, handle: Any, until: Any) -> Counter[int]:
    """Two writers; in between the workers of both tasks are killed. Gives how often each row came."""
    with writing.writer(0) as one, writing.writer(1) as two:
        for begin in (0, 100):
            for writer, partition in ((one, 0), (two, 1)):
                for piece in writing.pieces(partition, begin, begin + 100):
                    writer.write(piece)
            until(lambda before=begin * PIECE: records_in(handle) > before, "rows of both")
            until(lambda: not handle.info().unprotected, "holders")
            kill_worker_of(writing, handle, begin // 100)
        for writer, partition in ((one, 0), (two, 1)):
            for piece in writing.pieces(partition, 200, 300):
                writer.write(piece)
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(StreamWriter.finish, (one, two))) == [30_000, 30_000]
    commit_write(writing.access, "orders", "w", [0, 1])
    found = numbers(handle)
    assert handle.info().restarts["lost"] >= 2
    assert set(found) <= ALL
    return found


def test_writers_go_on_when_their_worker_is_killed(writing: Writing, until: Any) -> None:
    """What was in the lease of what died is lost and counted, and nothing comes twice."""
    handle = writing.submit(None)
    found = write_through_kills(writing, handle, until)
    assert set(found.values()) == {1}
    info = handle.info()
    missing = len(ALL - set(found))
    assert sum(info.rows_dropped.values()) <= missing <= sum(info.rows_dropped.values()) + info.rows_in_flight


def test_without_a_lease_what_is_not_known_to_be_taken_is_sent_again(writing: Writing, until: Any) -> None:
    """Of what was sent only what the workers that died had taken and not handed on is missing."""
    handle = writing.submit(0)
    found = write_through_kills(writing, handle, until)
    assert len(found) > len(ALL) - handle.info().rows_in_flight - 1


def test_with_a_guarantee_each_row_comes_and_those_that_come_twice_are_counted(
    writing: Writing, until: Any
) -> None:
    handle = writing.submit(None, guarantee="at_least_once")
    found = write_through_kills(writing, handle, until)
    info = handle.info()
    assert set(found) == ALL and found.total() - len(ALL) <= info.rows_again
    assert not (info.rows_dropped or info.rows_in_flight)


def test_what_has_its_receipt_is_there_when_all_workers_are_killed_at_once(
    writing: Writing, until: Any
) -> None:
    """The job goes back to its last durable snapshot, and the writer to what that has of its partition."""
    handle = writing.submit(None, guarantee="at_least_once")
    with writing.writer(0) as one:
        for piece in writing.pieces(0, 0, 300):
            one.write(piece)
        assert one.finish() == 30_000
    with writing.writer(1) as two:
        for piece in writing.pieces(1, 0, 200):
            two.write(piece)
        until(lambda: records_in(handle) > 45_000, "rows of both")
        for worker in writing.cluster.status().workers:
            writing.cluster.kill_worker(worker.worker)
        for piece in writing.pieces(1, 200, 300):
            two.write(piece)
        assert two.finish() == 30_000
    commit_write(writing.access, "orders", "w", [0, 1])
    found, info = numbers(handle), handle.info()
    assert info.fallbacks == 1
    assert set(found) == ALL and found.total() - len(ALL) <= info.rows_again
    assert not (info.rows_dropped or info.rows_in_flight)


def test_writers_go_on_when_the_function_raises(writing: Writing) -> None:
    """The rows that it had in hand are lost, and nothing else."""
    handle = writing.submit(None, raises_at=10_050)
    with writing.writer(0) as writer:
        for piece in writing.pieces(0, 0, 300):
            writer.write(piece)
        assert writer.finish() == 30_000
    with writing.writer(1) as writer:
        assert writer.finish() == 0
    commit_write(writing.access, "orders", "w", [0, 1])
    found = numbers(handle)
    info = handle.info()
    assert info.restarts == {"failed": 1}
    assert set(found) == set(range(30_000)) - set(range(10_000, 10_100)) and set(found.values()) == {1}
    assert sum(info.rows_dropped.values()) == PIECE


def test_another_attempt_goes_on_where_a_killed_worker_was(writing: Writing, until: Any, cut: Any) -> None:
    """The program has died with the worker: the next one passes over what may have been taken."""
    handle = writing.submit(None)
    with writing.writer(0) as first:
        for piece in writing.pieces(0, 0, 100):
            first.write(piece)
        until(lambda: records_in(handle) > 5_000, "rows of the first attempt")
        cut(first)
        kill_worker_of(writing, handle, 0)
    with writing.writer(0, attempt=2) as second, writing.writer(1) as other:
        for piece in writing.pieces(0, 0, 300):
            second.write(piece)
        assert (second.finish(), other.finish()) == (30_000, 0)
    commit_write(writing.access, "orders", "w", [0, 1])
    found = numbers(handle)
    info = handle.info()
    assert set(found.values()) == {1}
    assert len(found) >= 30_000 - info.rows_in_flight - sum(info.rows_dropped.values())


def test_what_is_complete_stays_so_when_its_worker_is_killed(writing: Writing) -> None:
    handle = writing.submit(None)
    with writing.writer(0) as writer:
        for piece in writing.pieces(0, 0, 3):
            writer.write(piece)
        assert writer.finish() == 3 * PIECE
    kill_worker_of(writing, handle, 0)
    with writing.writer(0, attempt=2) as writer:
        for piece in writing.pieces(0, 0, 3):
            writer.write(piece)
        assert writer.finish() == 3 * PIECE
    with writing.writer(1) as writer:
        assert writer.finish() == 0
    commit_write(writing.access, "orders", "w", [0, 1])
    found = numbers(handle)
    assert set(found.values()) <= {1}, "the second attempt brought nothing"
    assert handle.info().tasks[0].counters.records_in <= 3 * PIECE
