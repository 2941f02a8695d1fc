"""Programs that are no workers write into a running job: partitions, back-pressure, ends, and refusals."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pyarrow as pa
import pytest

from minishuffle.errors import ShuffleError, TaskFailed, UnknownName, UsageError
from minishuffle.remote.connection import ExternalConnection
from minishuffle.remote.writer import abort_write, commit_write, describe_stream
from minishuffle.wire.handshake import HandshakeRefused

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

SECONDS_MAX = 30.0
Rows = Callable[[int, int], pa.RecordBatch]


def taken(handle: Any) -> list[int]:
    return sorted(row["n"] for row in handle.wait(SECONDS_MAX).rows)


@pytest.mark.slow
def test_partitions_written_at_the_same_time_arrive_once(field: Any, rows: Rows) -> None:
    handle = field.submit()

    def write(partition: int) -> int:
        with field.writer(partition, partitions=12) as writer:
            for step in range(5):
                writer.write(rows(partition * 1000 + step * 200, 200))
            written: int = writer.finish()
            return written

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(write, range(12))) == [1000] * 12
    commit_write(field.access, "orders", "w", range(12))
    assert taken(handle) == list(range(12_000))


def test_a_stream_says_what_it_takes(field: Any) -> None:
    handle = field.submit(bounded=False)
    info = describe_stream(field.access, "orders")
    schema = pa.ipc.read_schema(pa.py_buffer(info.schema_message))
    assert (info.stream, info.job, info.bounded) == ("orders", handle.id, False)
    assert schema == pa.schema([("n", pa.int64()), ("text", pa.string())])


def test_access_pickles_and_does_not_show_its_secret(field: Any) -> None:
    assert pickle.loads(pickle.dumps(field.access)) == field.access
    assert repr(field.access.secret) not in repr(field.access)


def test_a_write_without_partitions_ends_a_bounded_stream(field: Any) -> None:
    handle = field.submit()
    commit_write(field.access, "orders", "w", [])
    assert taken(handle) == []


def test_a_partition_without_rows_is_complete(field: Any) -> None:
    handle = field.submit()
    with field.writer() as writer:
        assert writer.finish() == 0
    commit_write(field.access, "orders", "w", [0])
    assert taken(handle) == []


def test_a_stream_without_end_takes_one_write_after_another(field: Any, rows: Rows, until: Any) -> None:
    handle = field.submit(bounded=False, parallelism=1)
    for batch in range(12):
        with field.writer(write=f"query/{batch}") as writer:
            writer.write(rows(batch * 10, 10))
            writer.finish()
        commit_write(field.access, "orders", f"query/{batch}", [0])
    with field.writer(write="query/0", attempt=2) as again:  # one of the first, run again
        again.write(rows(0, 10))
        assert again.finish() == 10
    until(lambda: sum(task.counters.records_in for task in handle.info().tasks) == 120, "all 120 rows")
    assert handle.info().state == "running"


def test_what_a_slow_partition_wrote_last_does_not_wait_for_its_next_write(
    field: Any, rows: Rows, until: Any
) -> None:
    handle = field.submit(bounded=False, parallelism=1)
    with field.writer() as writer:
        for number in range(3):
            writer.write(rows(number, 1))
        until(lambda: sum(task.counters.records_in for task in handle.info().tasks) == 3, "all 3 rows")
        writer.finish()


# --- back-pressure -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_consumer_that_waits_makes_the_writer_wait(field: Any, rows: Rows, until: Any) -> None:
    handle = field.submit(hold=True, parallelism=1)
    sent = 0
    failed: list[BaseException] = []
    piece = rows(0, 1000)
    count = 3000

    def write() -> None:
        nonlocal sent
        try:
            with field.writer() as writer:
                for _ in range(count):
                    writer.write(piece)
                    sent += 1
                writer.finish()
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=write)
    thread.start()
    still = [0, -1]

    def stopped() -> bool:
        """Nothing was sent in 25 looks, half a second."""
        still[:] = [still[0] + 1, sent] if sent == still[1] and sent else [0, sent]
        return still[0] >= 25

    until(stopped, "the writer's stop")
    held = sent * piece.nbytes
    before = [psutil.Process(pid).memory_info().rss for pid in field.cluster.workers.values()]
    pools = 2 * (1 << 21) + 64 * 32768  # network memory of a worker and of the program, and some in sockets
    assert held < 4 * pools
    assert sent < count
    field.go()
    thread.join(SECONDS_MAX)
    assert not failed
    after = [psutil.Process(pid).memory_info().rss for pid in field.cluster.workers.values()]
    commit_write(field.access, "orders", "w", [0])
    counted = sum(task.counters.records_in for task in handle.wait(SECONDS_MAX).tasks)
    assert counted >= count * 1000
    assert all(there - then < count * piece.nbytes for then, there in zip(before, after, strict=True))


# --- ends ----------------------------------------------------------------------------------------


def test_a_commit_names_the_partitions_that_are_not_complete(field: Any, rows: Rows) -> None:
    field.submit()
    with field.writer(0, partitions=3) as writer:
        writer.write(rows(0, 10))
        writer.finish()
    with field.writer(1, partitions=3) as writer:
        writer.write(rows(10, 10))
    with pytest.raises(UsageError, match="partitions 1, 2 of the write are not complete"):
        commit_write(field.access, "orders", "w", range(3))


def test_an_aborted_write_fails_the_job_that_waits_for_its_end(field: Any) -> None:
    handle = field.submit()
    abort_write(field.access, "orders", "w", "Spark gave it up")
    with pytest.raises(TaskFailed, match="the write of stream 'orders' was aborted: Spark gave it up"):
        handle.wait(SECONDS_MAX)


def test_an_aborted_write_leaves_a_stream_without_end_running(field: Any, rows: Rows, until: Any) -> None:
    handle = field.submit(bounded=False)
    abort_write(field.access, "orders", "query/1", "Spark gave it up")
    with field.writer(write="query/1") as writer:
        writer.write(rows(0, 10))
        assert writer.finish() == 10
    until(lambda: handle.info().state == "running", "all tasks of the job, which goes on")


def test_a_job_cancelled_while_it_is_written_tells_the_writer(field: Any, rows: Rows) -> None:
    handle = field.submit(hold=True)

    def write() -> None:
        with field.writer() as writer:
            for _ in range(100_000):
                writer.write(rows(0, 1000))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        handle.cancel()
        field.go()
        with pytest.raises(ShuffleError, match=rf"job {handle.id} \(job\)|no running job reads"):
            writing.result(SECONDS_MAX)


def test_a_job_cancelled_before_the_writer_comes_tells_it(
    field: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = field.submit()
    enter = ExternalConnection.__enter__

    def late(connection: ExternalConnection) -> ExternalConnection:
        handle.cancel()
        handle.wait_until_over(SECONDS_MAX)
        return enter(connection)

    monkeypatch.setattr(ExternalConnection, "__enter__", late)
    with (
        pytest.raises(TaskFailed, match=rf"job {handle.id} \(job\) is canceled, and its stream 'orders'"),
        field.writer(),
    ):
        raise AssertionError("the writer was let in")


def test_a_job_that_fails_while_it_is_written_tells_the_writer_why(field: Any, rows: Rows) -> None:
    handle = field.submit(hold=True)
    with field.writer() as writer:
        writer.write(rows(0, 1000))
        abort_write(field.access, "orders", "w", "nobody wants it")
        field.go()
        handle.wait_until_over(SECONDS_MAX)
        with pytest.raises(TaskFailed, match="is failed, and its stream 'orders'.*nobody wants it"):
            writer.finish()


# --- refusals ------------------------------------------------------------------------------------


def test_a_stream_that_nobody_reads_is_told_with_those_that_are(field: Any) -> None:
    field.submit()
    with (
        pytest.raises(UnknownName, match=r"no running job reads a stream 'ordres' \(there are: orders\)"),
        field.writer(stream="ordres"),
    ):
        pass


def test_two_jobs_cannot_read_one_stream(field: Any) -> None:
    handle = field.submit()
    with pytest.raises(UsageError, match=rf"stream 'orders' is read by job {handle.id} \(job\) already"):
        field.submit()


def test_another_schema_is_refused_at_once_and_in_a_batch(field: Any) -> None:
    field.submit()
    other = pa.schema([("n", pa.int32()), ("text", pa.string())])
    with pytest.raises(UsageError, match="does not have its schema"), field.writer(schema=other):
        pass
    with field.writer() as writer, pytest.raises(UsageError, match="the batch has the columns"):
        writer.write(pa.record_batch([[1], ["a"]], schema=other))


def test_a_wrong_secret_is_refused(field: Any) -> None:
    field.submit()
    access = dataclasses.replace(field.access, secret=b"x" * 32)
    with pytest.raises(ShuffleError), field.writer(access=access):
        pass


def test_a_worker_lets_in_no_program_that_is_not_expected(field: Any, stray: Any) -> None:
    """Nor one whose ticket was used, and it counts them."""
    refused = field.refused()
    with pytest.raises(HandshakeRefused, match="client 4000000 is not expected here"):
        stray(field, 4_000_000)
    assert field.refused() == refused + 1
