"""Kept results through real processes: read while the job runs and after it, by any number of readers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.config import read_secret
from minishuffle.errors import (
    AuthenticationError,
    PeerLost,
    RowsLost,
    TaskCancelled,
    TaskFailed,
    UnknownName,
    UsageError,
)
from minishuffle.exchange.batch import Batch
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from minishuffle.remote.access import Access
from minishuffle.remote.reader import ResultInfo, ResultReader, commit_result, describe_result, wait_result

if TYPE_CHECKING:
    from conftest import Watch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string()), ("at", pa.timestamp("us", "UTC"))])
BATCH_ROWS = 1_000
SECONDS_MAX = 30.0
Until = Callable[..., Any]


def batch(begin: int, rows: int) -> pa.RecordBatch:
    numbers = pa.array(range(begin, begin + rows), pa.int64())
    return pa.record_batch(
        [numbers, numbers.cast(pa.string()), numbers.cast(SCHEMA.field("at").type)], SCHEMA
    )


class Numbers:
    """As many batches as it is asked for, one split for each subtask; then it ends, or waits for more."""

    format = "arrow"

    def __init__(self, splits: int, batches: int, bounded: bool = True) -> None:
        self.count = splits
        self.batches = batches
        self.bounded = bounded

    def splits(self) -> list[int]:
        return list(range(self.count))

    def read(self, split: int, offset: int) -> Iterator[Batch]:
        for number in range(self.batches):
            yield batch((number * self.count + split) * BATCH_ROWS, BATCH_ROWS)
        while not self.bounded:
            yield []


def access_to(cluster: LocalCluster) -> Access:
    address = cluster.client.address
    return Access(address.host, address.port, "local", read_secret(cluster.state_dir / "secret"))


@pytest.fixture
def access(cluster: LocalCluster) -> Access:
    return access_to(cluster)


def submit(cluster: LocalCluster, source: Any, **options: Any) -> str:
    stream = Table.source(source, SCHEMA).to_spark()
    return cluster.submit(stream, parallelism=source.count, **options).id


def reader(access: Access, info: ResultInfo, subtask: int, begin: int, end: int) -> ResultReader:
    return ResultReader(access, info.job, info.sink, subtask, range(begin, end))


def table(access: Access, info: ResultInfo, subtask: int, begin: int, end: int) -> pa.Table:
    with reader(access, info, subtask, begin, end) as open_reader:
        return pa.Table.from_batches(open_reader.batches(), SCHEMA)


def test_a_result_reads_the_same_each_time_and_in_any_part(cluster: LocalCluster, access: Access) -> None:
    job = submit(cluster, Numbers(2, 30))
    info = wait_result(access, job, timeout=SECONDS_MAX)
    assert info.schema == SCHEMA and info.sink == "result" and info.bounded and info.terminal
    assert [tuple(rows) for rows in info.subtasks] == [(0, 0, 30_000), (1, 0, 30_000)]
    assert info.rows == 60_000
    for rows in info.subtasks:
        expected = pa.Table.from_batches(
            [batch((2 * number + rows.subtask) * BATCH_ROWS, BATCH_ROWS) for number in range(30)]
        )
        whole = [table(access, info, *rows) for _ in range(2)]
        assert whole[0].equals(expected) and whole[1].equals(expected)
        for begin, end in ((0, 1), (999, 1_001), (12_345, 23_456), (29_999, 30_000), (7, 7)):
            assert table(access, info, rows.subtask, begin, end).equals(expected.slice(begin, end - begin))


def test_two_readers_at_once_get_all(cluster: LocalCluster, access: Access) -> None:
    info = wait_result(access, submit(cluster, Numbers(1, 50)), timeout=SECONDS_MAX)
    with reader(access, info, 0, 0, 50_000) as one, reader(access, info, 0, 0, 50_000) as two:
        both = list(zip(one.batches(), two.batches(), strict=True))
    assert sum(first.num_rows for first, _ in both) == 50_000
    assert all(first.equals(second) for first, second in both)


def test_a_reader_that_leaves_half_way_leaves_nothing(
    cluster: LocalCluster, access: Access, watch: type[Watch], wait_until: Until
) -> None:
    info = wait_result(access, submit(cluster, Numbers(1, 400)), timeout=SECONDS_MAX)
    seen = watch(cluster)
    free = seen.total("minishuffle_network_segments", state="free")
    for _ in range(3):
        with reader(access, info, 0, 0, 400_000) as open_reader:
            batches = open_reader.batches()
            assert next(batches).num_rows
    wait_until(
        lambda: seen.total("minishuffle_network_segments", state="free") == free, "the segments' return"
    )
    assert table(access, info, 0, 0, 400_000).num_rows == 400_000


def test_a_slow_reader_holds_its_worker_back_by_credit(
    cluster: LocalCluster, access: Access, watch: type[Watch]
) -> None:
    info = wait_result(access, submit(cluster, Numbers(1, 400)), timeout=SECONDS_MAX)

    seen = watch(cluster)

    def sent() -> float:
        return seen.total("minishuffle_network_bytes_total", direction="out", path="remote")

    before = sent()
    with reader(access, info, 0, 0, 400_000) as open_reader:
        batches = open_reader.batches()
        first = next(batches)
        credits = seen.total("minishuffle_credits_total", direction="received")
        held = sent() - before
        rest = sum(each.num_rows for each in batches)
        assert seen.total("minishuffle_credits_total", direction="received") > credits
    assert first.num_rows + rest == 400_000
    # 64 segments of 4 KiB are lent, and what the first element came in has been given back.
    most = first.nbytes + 200 * 4096
    assert 0 < held < most
    assert sent() - before > 2 * most


def kept_bytes(cluster: LocalCluster) -> int:
    """The size of the files, which have no names, in which workers keep rows."""
    found = 0
    for worker in cluster.client.workers():
        for each in Path(f"/proc/{worker.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if "minishuffle-rows-" in os.readlink(each):
                    found += each.stat().st_size
    return found


def test_results_that_are_given_up_leave_the_disk(
    cluster: LocalCluster, access: Access, wait_until: Until
) -> None:
    others = kept_bytes(cluster)
    job = submit(cluster, Numbers(2, 30))
    assert wait_result(access, job, timeout=SECONDS_MAX).rows == 60_000
    assert kept_bytes(cluster) > others + 60_000 * 8
    handle = cluster.client.handle(job)
    with pytest.raises(UsageError, match="it is finished already"):
        handle.cancel()
    handle.cancel(give_up_results=True)
    wait_until(lambda: kept_bytes(cluster) <= others, "that the files are gone")
    with pytest.raises(UsageError, match="were given up"):
        describe_result(access, job)
    assert handle.info().state == "finished"


@pytest.mark.slow
def test_an_endless_job_is_read_while_it_runs_and_waits_for_its_readers(wait_until: Until) -> None:
    rows = 300 * BATCH_ROWS
    with LocalCluster(workers=1, slots=1, spool_bytes_max=256 * 1024, segment_bytes=4096) as cluster:
        access = access_to(cluster)
        job = submit(cluster, Numbers(1, 300, bounded=False), name="endless")
        wait_until(lambda: describe_result(access, "endless").rows, "the first rows")
        info = describe_result(access, "endless")
        assert (info.job, info.bounded, info.state, info.terminal) == (job, False, "running", False)
        ends, read = [0], SCHEMA.empty_table()
        while ends[-1] < rows:
            wait_until(lambda: describe_result(access, job).subtasks[0].end > ends[-1], "more rows")
            ends.append(describe_result(access, job).subtasks[0].end)
            # One element is a little more than 1 MiB, and two may lie above what was committed.
            assert ends[-1] - ends[-2] < 100_000
            read = pa.concat_tables([read, table(access, info, 0, ends[-2], ends[-1])])
            commit_result(access, job, "result", {0: ends[-1]})
        assert len(ends) > 4
        assert read["n"].to_pylist() == list(range(rows))
        begin = describe_result(access, job).subtasks[0].begin
        assert begin == ends[-3]
        assert table(access, info, 0, begin, rows).equals(read.slice(begin))
        with pytest.raises(UsageError, match=f"those below {begin} were given up"):
            table(access, info, 0, begin - 1, rows)
        cluster.client.cancel(job)
        with pytest.raises(TaskCancelled, match="endless"):
            wait_result(access, job, timeout=SECONDS_MAX)
        assert table(access, info, 0, begin, rows).equals(read.slice(begin))


def test_a_sink_that_waits_can_be_cancelled(wait_until: Until) -> None:
    with LocalCluster(workers=1, slots=1, spool_bytes_max=65_536) as cluster:
        job = submit(cluster, Numbers(1, 300, bounded=False))
        wait_until(lambda: describe_result(access_to(cluster), job).rows, "the first rows")
        cluster.client.cancel(job)
        assert cluster.client.handle(job).wait_until_over(SECONDS_MAX).state == "canceled"


def test_a_job_that_failed_says_why_to_who_waits_for_it(cluster: LocalCluster, access: Access) -> None:
    def broken(row: Any) -> Any:
        raise ValueError("no such number")

    stream = Stream.items([1, 2]).map(broken).to_table({"n": "int64"}).to_spark()
    settings = JobSettings(restart_strategy="none")
    job = cluster.submit(stream, name="broken", parallelism=1, settings=settings).id
    with pytest.raises(TaskFailed, match=rf"job {job} \(broken\) failed: .*no such number"):
        wait_result(access, "broken", timeout=SECONDS_MAX)


def test_a_wait_is_bounded(cluster: LocalCluster, access: Access, watch: type[Watch]) -> None:
    job = submit(cluster, Numbers(1, 1, bounded=False))
    with pytest.raises(TimeoutError, match=rf"job {job} \(job\) still runs after 0\.2 s"):
        wait_result(access, job, timeout=0.2)
    watch(cluster).calm()


def test_what_cannot_be_read_is_named(cluster: LocalCluster, access: Access) -> None:
    with pytest.raises(UnknownName, match="there is no job 'nobody'"):
        describe_result(access, "nobody")
    plain = cluster.submit(Stream.items([1]).to_count(), parallelism=1).id
    with pytest.raises(UnknownName, match=r"end the stream with to_spark\(\)"):
        describe_result(access, plain)
    info = wait_result(access, submit(cluster, Numbers(1, 1)), timeout=SECONDS_MAX)
    with pytest.raises(UnknownName, match="no sink 'other': name one of result"):
        describe_result(access, info.job, "other")
    with pytest.raises(UsageError, match="rows 0 to 1001 were asked for, and there are 1000"):
        table(access, info, 0, 0, 1_001)
    with pytest.raises(UsageError, match="has 1 subtasks, and subtask 1 was asked for"):
        table(access, info, 1, 0, 1)
    stranger = Access(access.host, access.port, access.cluster, b"another secret")
    with pytest.raises(AuthenticationError):
        describe_result(stranger, info.job)


@pytest.mark.slow
def test_rows_go_with_the_worker_that_kept_them(wait_until: Until) -> None:
    with LocalCluster(workers=2, slots=1, restart_workers=False) as cluster:
        access = access_to(cluster)
        info = wait_result(access, submit(cluster, Numbers(2, 400)), timeout=SECONDS_MAX)
        with reader(access, info, 1, 0, 400_000) as open_reader:
            batches = open_reader.batches()
            assert next(batches).num_rows
            cluster.kill_worker(2)
            with pytest.raises(PeerLost, match="worker 2"):
                list(batches)
        wait_until(lambda: cluster.status().workers[1].state == "lost", "the worker's loss")
        assert describe_result(access, info.job).rows_lost == 400_000
        with pytest.raises(RowsLost, match="400,000 rows that job j1 .* run the job again"):
            wait_result(access, info.job)
        with pytest.raises(PeerLost, match="worker 2, which kept rows of job j1"):
            table(access, info, 1, 0, 1)
        there = wait_result(access, info.job, allow_loss=True)
        assert there.rows == 400_000
        with ResultReader(access, info.job, info.sink, 1, range(5, 9), allow_loss=True) as lossy:
            assert list(lossy.batches()) == [] and lossy.lost == [range(5, 9)]
        assert table(access, info, 0, 0, 2_000).num_rows == 2_000


def test_nothing_of_a_result_has_a_name_on_disk() -> None:
    with LocalCluster(workers=1, slots=1) as cluster:
        wait_result(access_to(cluster), submit(cluster, Numbers(1, 5)), timeout=SECONDS_MAX)
        assert not [path for path in cluster.state_dir.rglob("*") if "rows" in path.name]
