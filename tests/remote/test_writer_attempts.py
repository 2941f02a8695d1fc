"""Attempts at one partition: cut off, run again, at the same time, and with other rows than before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner

from minishuffle.api.stream import Table
from minishuffle.cli.main import cli
from minishuffle.client import JobHandle
from minishuffle.errors import PeerLost, ShuffleError, Superseded, UnknownName, UsageError
from minishuffle.remote.writer import StreamWriter, abort_write, commit_write, end_stream

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

SECONDS_MAX = 30.0
Rows = Callable[[int, int], pa.RecordBatch]


def taken(handle: Any) -> list[int]:
    return sorted(row["n"] for row in handle.wait(SECONDS_MAX).rows)


def records_in(handle: Any) -> int:
    return sum(task.counters.records_in for task in handle.info().tasks)


@pytest.mark.slow
def test_a_partition_cut_off_in_the_middle_arrives_once(field: Any, rows: Rows, until: Any, cut: Any) -> None:
    handle = field.submit(parallelism=1)
    with field.writer(attempt=1) as first:
        for step in range(50):
            first.write(rows(step * 100, 100))
        until(lambda: records_in(handle) > 1000, "rows of the first attempt")
        cut(first)
        with pytest.raises(PeerLost):
            first.finish()
    there = records_in(handle)
    with field.writer(attempt=2) as second:
        for step in range(100):
            second.write(rows(step * 100, 100))
        assert second.finish() == 10_000
    assert 1000 < there < 10_000
    commit_write(field.access, "orders", "w", [0])
    assert taken(handle) == list(range(10_000))


@pytest.mark.slow
def test_an_element_that_was_cut_in_half_comes_whole_from_the_next_attempt(
    field: Any, rows: Rows, until: Any, cut: Any, buffers_sent: Any
) -> None:
    """The consumer waits: of an element longer than all buffers only a part has arrived."""
    handle = field.submit(hold=True, parallelism=1)
    with field.writer(attempt=1) as first:
        first.write(rows(0, 10))

        def long() -> None:
            first.write(rows(10, 60_000))

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(long)
            until(lambda: buffers_sent(first) > 3, "a part of the element")
            cut(first)
            with pytest.raises(PeerLost):
                writing.result(SECONDS_MAX)
    field.go()
    with field.writer(attempt=2) as second:
        second.write(rows(0, 10))
        second.write(rows(10, 60_000))
        assert second.finish() == 60_010
    commit_write(field.access, "orders", "w", [0])
    assert taken(handle) == list(range(60_010))


def test_a_partition_that_is_complete_is_passed_over(field: Any, rows: Rows) -> None:
    handle = field.submit(parallelism=1)
    for attempt in (1, 2):
        with field.writer(attempt=attempt) as writer:
            writer.write(rows(0, 100))
            assert writer.finish() == 100
    commit_write(field.access, "orders", "w", [0])
    assert taken(handle) == list(range(100))


def test_a_write_that_is_repeated_with_other_partitions_is_refused(field: Any, rows: Rows) -> None:
    handle = field.submit(bounded=False, parallelism=1)
    with field.writer(write="q/3") as writer:
        writer.write(rows(0, 50))
        assert writer.finish() == 50
    with (
        field.writer(write="q/3", attempt=2) as writer,
        pytest.raises(UsageError, match=r"partition 0 has 100 rows, and 50 were delivered before"),
    ):
        writer.write(rows(0, 100))
        writer.finish()
    handle.cancel()
    handle.wait_until_over()


@pytest.mark.parametrize("changed", ["other rows", "fewer rows"])
def test_a_retry_with_other_rows_is_refused(
    field: Any, rows: Rows, until: Any, cut: Any, changed: str
) -> None:
    handle = field.submit(parallelism=1)
    with field.writer(attempt=1) as first:
        for step in range(20):
            first.write(rows(step * 100, 100))
        until(lambda: records_in(handle) >= 1000, "rows of the first attempt")
        cut(first)
    with (
        field.writer(attempt=2) as second,
        pytest.raises(UsageError, match=r"gave other rows than in the attempt before.*sortWithinPartitions"),
    ):
        second.write(rows(1, 100))
        if changed == "other rows":
            for step in range(1, 20):
                second.write(rows(step * 100, 100))
        second.finish()


@pytest.mark.parametrize(("step", "verifies"), [(100, True), (300, True), (300, False)])
def test_a_retry_whose_first_connection_fails_loses_no_row_and_is_compared(
    field: Any, rows: Rows, until: Any, cut: Any, monkeypatch: pytest.MonkeyPatch, step: int, verifies: bool
) -> None:
    """In other batches what is there ends in the middle of one; ``verifies``: whether they are compared."""
    connect = StreamWriter._connect
    failures = [PeerLost("the worker restarts")]

    def fails_once(writer: StreamWriter) -> None:
        if failures:
            raise failures.pop()
        connect(writer)

    handle = field.submit(parallelism=1)
    with field.writer(attempt=1) as first:
        for start in range(0, 1000, 100):
            first.write(rows(start, 100))
        until(lambda: records_in(handle) == 1000, "rows of the first attempt")
        cut(first)
    monkeypatch.setattr(StreamWriter, "_connect", fails_once)
    with field.writer(attempt=2) as second:
        second._verifies = second._verifies and verifies
        for start in range(0, 1500, step):
            if step == 300 and verifies and start == 900:
                with pytest.raises(UsageError, match="gave other rows than in the attempt before"):
                    second.write(rows(start, step))
                handle.cancel()
                return
            second.write(rows(start, step))
        assert second.finish() == 1500
    commit_write(field.access, "orders", "w", [0])
    assert sorted(row["n"] for row in handle.wait(SECONDS_MAX).rows) == list(range(1500))


def test_a_newer_attempt_takes_the_partition_over(field: Any, rows: Rows, until: Any, is_cut: Any) -> None:
    """While the job takes nothing; the older one waits until that one is done, and then says so."""
    handle = field.submit(hold=True, parallelism=1)
    pieces = [rows(step * 100, 100) for step in range(1000)]

    def write(attempt: int, opened: list[Any]) -> int:
        with field.writer(attempt=attempt) as writer:
            opened.append(writer)
            for piece in pieces:
                writer.write(piece)
            written: int = writer.finish()
            return written

    with ThreadPoolExecutor(2) as pool:
        writers: list[Any] = []
        older = pool.submit(write, 1, writers)
        until(lambda: writers, "the first attempt")
        newer = pool.submit(write, 2, writers)
        until(lambda: is_cut(writers[0]), "the end of the first attempt's connection")
        assert not older.done()
        field.go()
        assert newer.result(SECONDS_MAX) == 100_000
        with pytest.raises(Superseded, match="another attempt has written the partition"):
            older.result(SECONDS_MAX)
    commit_write(field.access, "orders", "w", [0])
    assert taken(handle) == list(range(100_000))


def test_an_attempt_that_is_not_newer_is_refused(field: Any) -> None:
    field.submit(parallelism=1)
    with (
        field.writer(attempt=2),
        pytest.raises(Superseded, match="attempt 1 of partition 0 of write w comes too late: attempt 2"),
        field.writer(attempt=1),
    ):
        pass


def test_a_write_to_a_stream_that_ended_is_refused(field: Any, rows: Rows) -> None:
    handle = field.submit(hold=True)
    with field.writer(attempt=1) as writer:
        writer.write(rows(0, 10))
        commit_write(field.access, "orders", "w", [])
        with pytest.raises(UsageError, match="has ended"), field.writer(write="late"):
            pass
        field.go()
        writer.finish()
    assert taken(handle) == list(range(10))


def test_of_two_saves_of_a_bounded_stream_the_job_gets_the_first_only(field: Any, rows: Rows) -> None:
    handle = field.submit()
    with field.writer(write="one", partitions=2) as writer:
        writer.write(rows(0, 10))
        writer.finish()
    refused = "stream 'orders' is being written by another save"
    with pytest.raises(UsageError, match=refused), field.writer(write="two"):
        pass
    with pytest.raises(UsageError, match=refused):
        commit_write(field.access, "orders", "two", [0])
    abort_write(field.access, "orders", "two", "it was refused")
    with field.writer(1, write="one", partitions=2) as writer:
        writer.write(rows(10, 10))
        writer.finish()
    commit_write(field.access, "orders", "one", [0, 1])
    assert taken(handle) == list(range(20))


def test_a_stream_without_end_is_ended_by_name(field: Any, rows: Rows) -> None:
    handle = field.submit(bounded=False)
    with field.writer() as writer:
        writer.write(rows(0, 10))
        writer.finish()
    end_stream(field.access, "orders")
    assert taken(handle) == list(range(10))


def test_a_writer_that_is_closed_twice_or_unused_leaves_nothing(field: Any, rows: Rows) -> None:
    field.submit()
    writer = field.writer()
    with writer:
        writer.write(rows(0, 10))
    writer.__exit__(None, None, None)
    names = [thread.name for thread in threading.enumerate()]
    assert "minishuffle connection" not in names


@pytest.mark.slow
def test_a_worker_that_is_lost_ends_the_write_if_its_job_does_not_restart(
    field_of_one: Any, rows: Rows
) -> None:
    field = field_of_one
    handle = field.submit(hold=True, parallelism=1, restarts=False)
    with field.writer() as writer:
        writer.write(rows(0, 1000))
        (worker,) = field.cluster.workers
        field.cluster.kill_worker(worker)
        handle.wait_until_over(SECONDS_MAX)
        with pytest.raises(ShuffleError, match=r"job j1 \(job\) is failed.*worker 1.* was lost"):
            writer.finish()


TIMED = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])


def windows(field: Any) -> JobHandle:
    """Counts of each second of the endless stream ``timed``, into which one write of 50 ms steps was made."""
    read = Table.from_spark("timed", TIMED, bounded=False).event_time("at")
    counts = read.with_columns(key=pc.field("n") * 0)
    stream = counts.key_by("key").window(timedelta(seconds=1)).count().collect()
    handle: JobHandle = field.cluster.submit(stream, parallelism=2)
    with field.writer(stream="timed", schema=TIMED) as writer:
        numbers = list(range(90))
        writer.write(pa.record_batch([numbers, [50_000 * number for number in numbers]], schema=TIMED))
        writer.finish()
    return handle


def counted(handle: JobHandle) -> list[int]:
    rows = handle.wait(SECONDS_MAX).rows
    return [row["count"] for row in sorted(rows, key=lambda row: row["window_start"])]


def test_the_last_windows_of_a_stream_come_out_when_its_handle_ends_it(field: Any, until: Any) -> None:
    handle, other = windows(field), field.submit()
    with pytest.raises(UsageError, match=f"'orders' is one of job {other.id}, not of job {handle.id}"):
        handle.end_stream("orders")
    with pytest.raises(UnknownName, match="'timid'"):
        handle.end_stream("timid")
    until(lambda: handle.info().state == "running", "the job, which neither refusal has ended, to run")
    handle.end_stream("timed")
    assert counted(handle) == [20, 20, 20, 20, 10]


def test_the_last_windows_of_a_stream_come_out_when_the_command_ends_it(field: Any) -> None:
    handle, access = windows(field), field.access
    options = ["--coordinator", f"{access.host}:{access.port}", "--cluster", "local"]
    options += ["--state-dir", str(field.cluster.state_dir)]
    ended = CliRunner().invoke(cli, ["jobs", "end-stream", handle.id, "timed", *options])
    assert (ended.output, ended.exit_code) == (f"stream timed of job {handle.id} has ended\n", 0)
    assert counted(handle) == [20, 20, 20, 20, 10]
