"""Spark attached to jobs whose workers and coordinator are killed in turn: a save and a streaming query."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as pads
import pytest

from minishuffle.api.stream import Table
from minishuffle.client import JobHandle
from minishuffle.local import LocalCluster
from minishuffle.spark.schemas import arrow_schema_of
from minishuffle.spark.session import activate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("wider_resources"),
]

SECONDS_MAX = 180.0
ROWS = 100_000
LAST = ROWS * 3 // 10
"""First row of a partition that waits for the second kill."""
SCHEMA = pa.schema([("n", pa.int64())])
Options = dict[str, str]
Until = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Its processes are killed here."""
    with LocalCluster(workers=2, slots=4) as running:
        assert running.client.status()  # The client connects now and stays so.
        yield running


def kill_worker_of(cluster: LocalCluster, handle: JobHandle, task: int, wait_until: Until) -> None:
    """Kill the worker that the task is on, and see that it restarts."""
    before = handle.info().tasks[task]
    cluster.kill_worker(before.worker)
    wait_until(lambda: handle.info().tasks[task].attempt > before.attempt, "the loss")
    wait_until(lambda: all_run(handle), "the next attempts")


def all_run(handle: JobHandle) -> bool:
    return {task.state for task in handle.info().tasks} == {"running"}


def kill_coordinator(cluster: LocalCluster, handle: JobHandle, wait_until: Until) -> None:
    """Kill the coordinator; the next one has taken the tasks back before anything else is killed."""
    term, attempts = cluster.status().term, [task.attempt for task in handle.info().tasks]
    cluster.kill_coordinator()
    wait_until(lambda: cluster.status().term > term, "the next coordinator")
    wait_until(lambda: all_run(handle), "its word on the tasks")
    assert [task.attempt for task in handle.info().tasks] == attempts


def test_a_save_goes_on_when_the_workers_and_the_coordinator_are_killed_in_turn(
    spark: SparkSession, cluster: LocalCluster, options: Options, wait_until: Until, tmp_path: Path
) -> None:
    """No row comes twice, what is missing is what the job counts, and all come that are behind the kills."""
    go, deadline = str(tmp_path), time.time() + 2 * SECONDS_MAX

    def gated(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The third batch of each partition waits for the first kill, the fourth for the second."""
        for batch in batches:
            row = batch.column(0)[0].as_py() % (ROWS // 2)
            kills = [f"{go}/{kill}" for kill, first in ((1, ROWS // 5), (2, LAST)) if row >= first]
            while not all(os.path.exists(path) for path in kills) and time.time() < deadline:
                threading.Event().wait(0.02)
            yield batch

    numbers = spark.range(0, ROWS, 1, 2).mapInArrow(gated, "id long")
    stream = Table.from_spark("attached", arrow_schema_of(numbers.schema))
    out = str(tmp_path / "out")
    handle = cluster.submit(stream.to_files(out), parallelism=2, name="attached")
    writer = numbers.write.format("minishuffle").options(**options).option("stream", "attached")
    writer = writer.option("partitions", 2).mode("append")

    def save() -> None:
        activate(spark)
        writer.save()

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save)

        def taken_rows() -> int:
            if saving.done():
                saving.result()
            return sum(each.counters.records_in for each in handle.info().tasks)

        before = 0
        for task in (0, 1):
            wait_until(lambda before=before: taken_rows() > before, "rows")
            kill_worker_of(cluster, handle, task, wait_until)
            kill_coordinator(cluster, handle, wait_until)
            before = taken_rows()
            (tmp_path / str(task + 1)).touch()
        saving.result(SECONDS_MAX)
    handle.wait(SECONDS_MAX, allow_loss=True)
    written = pads.dataset(out, format="parquet", schema=pa.schema([("id", pa.int64())]))
    found = written.to_table()["id"].to_pylist()
    behind = {row for row in range(ROWS) if row % (ROWS // 2) >= LAST}
    assert len(found) == len(set(found)) and behind <= set(found) <= set(range(ROWS))
    info = handle.info()
    dropped = sum(info.rows_dropped.values())
    assert dropped <= ROWS - len(found) <= dropped + info.rows_in_flight


def test_a_streaming_query_goes_on_when_the_workers_and_the_coordinator_are_killed_in_turn(
    spark: SparkSession, cluster: LocalCluster, options: Options, wait_until: Until, tmp_path: Path
) -> None:
    """No row comes twice, and the rows that its batches passed over are those that the job counts."""

    def numbers(start: int, count: int) -> pa.RecordBatch:
        return pa.record_batch([pa.array(range(start, start + count), pa.int64())], SCHEMA)

    stream = Table.generate(numbers, rate=2_000, schema=SCHEMA).rebalance().to_spark()
    handle = cluster.submit(stream, parallelism=2, name="endless")
    reader = spark.readStream.format("minishuffle").options(**options).option("job", handle.id).load()
    writer = reader.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(processingTime="0 seconds").start(str(tmp_path / "out"))

    def rows_read() -> int:
        if (error := query.exception()) is not None:
            raise error
        return sum(batch.numInputRows for batch in query.recentProgress)

    try:
        for task in (-2, -1):
            before = rows_read()
            wait_until(lambda before=before: rows_read() > before, "rows")
            kill_worker_of(cluster, handle, task, wait_until)
            kill_coordinator(cluster, handle, wait_until)
        before = rows_read()
        wait_until(lambda before=before: rows_read() > before + 2_000, "rows after the kills")
        assert query.isActive
    finally:
        query.stop()
    handle.cancel()
    found = [row["n"] for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert len(found) == len(set(found)) > 2_000
