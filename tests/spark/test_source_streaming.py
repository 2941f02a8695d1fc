"""Streaming queries into jobs and out of them, stopped and started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.local import LocalCluster
from minishuffle.remote.access import Access
from minishuffle.remote.writer import end_stream
from minishuffle.spark.schemas import arrow_schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("wider_resources"),
]

SECONDS_MAX = 180.0
FILES = 4
Options = dict[str, str]
Until = Callable[..., Any]


def ended(query: StreamingQuery) -> None:
    """Wait until a query with ``availableNow`` is through, and raise what it raised."""
    assert query.awaitTermination(int(SECONDS_MAX)), "the query is not through"


def to_stream(df: DataFrame, options: Options, stream: str, checkpoint: Path) -> StreamingQuery:
    writer = df.writeStream.format("minishuffle").options(**options).option("stream", stream)
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def test_a_query_into_a_job_that_is_stopped_and_started_again_brings_every_row_once(
    spark: SparkSession, cluster: LocalCluster, options: Options, access: Access, tmp_path: Path
) -> None:
    directory, checkpoint, rows = tmp_path / "in", tmp_path / "checkpoint", 3000
    schema = spark.range(1).schema
    stream = Table.from_spark("queried", arrow_schema_of(schema), bounded=False)
    handle = cluster.submit(stream.collect(), parallelism=2, name="queried")

    def put(begin: int) -> None:
        spark.range(begin, begin + rows, 1, FILES).write.mode("append").parquet(str(directory))

    put(0)
    files = spark.readStream.schema(schema).option("maxFilesPerTrigger", 2).parquet(str(directory))
    for begin in (rows, 2 * rows):
        query = to_stream(files, options, "queried", checkpoint)
        ended(query)
        assert len([batch for batch in query.recentProgress if batch.numInputRows]) == FILES // 2
        put(begin)
    ended(to_stream(files, options, "queried", checkpoint))
    ended(to_stream(files, options, "queried", checkpoint))  # Nothing new.
    end_stream(access, "queried")
    assert sorted(row["id"] for row in handle.wait(SECONDS_MAX).rows) == list(range(3 * rows))


def test_a_batch_that_is_run_again_brings_no_row_twice(
    spark: SparkSession, cluster: LocalCluster, options: Options, access: Access, tmp_path: Path
) -> None:
    """As after a driver that died between the batch and Spark's note of it."""
    directory, checkpoint, rows = tmp_path / "in", tmp_path / "checkpoint", 2000
    schema = spark.range(1).schema
    stream = Table.from_spark("again", arrow_schema_of(schema), bounded=False)
    handle = cluster.submit(stream.collect(), parallelism=2, name="again")
    spark.range(0, rows, 1, FILES).write.parquet(str(directory))
    files = spark.readStream.schema(schema).option("maxFilesPerTrigger", 2).parquet(str(directory))
    ended(to_stream(files, options, "again", checkpoint))
    noted = sorted((checkpoint / "commits").glob("[0-9]*"))
    assert len(noted) == FILES // 2
    for file in (noted[-1], noted[-1].with_name(f".{noted[-1].name}.crc")):
        file.unlink(missing_ok=True)
    query = to_stream(files, options, "again", checkpoint)
    ended(query)
    assert sum(batch.numInputRows for batch in query.recentProgress) == rows // 2
    end_stream(access, "again")
    assert sorted(row["id"] for row in handle.wait(SECONDS_MAX).rows) == list(range(rows))


class Slowly:
    """``count`` numbers in batches of ``size``; those from ``pause_at`` on wait for the file ``go``."""

    format = "rows"

    def __init__(self, count: int, size: int, pause_at: int, go: Path) -> None:
        self.count, self.size, self.pause_at, self.go = count, size, pause_at, go

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[dict[str, int]]]:
        for begin in range(0, self.count, self.size):
            while begin >= self.pause_at and not self.go.exists():
                yield []
            yield [{"id": number} for number in range(begin, min(begin + self.size, self.count))]


def from_job(
    spark: SparkSession, options: Options, job: str, out: Path, checkpoint: Path, **trigger: Any
) -> StreamingQuery:
    reader = spark.readStream.format("minishuffle").options(**options).option("job", job)
    df = reader.option("max-rows-per-batch", "1000").load()
    writer = df.writeStream.format("parquet").option("checkpointLocation", str(checkpoint))
    return writer.trigger(**trigger).start(str(out))


def test_a_query_out_of_a_job_that_is_stopped_and_started_again_gives_every_row_once(
    spark: SparkSession, cluster: LocalCluster, options: Options, tmp_path: Path, wait_until: Until
) -> None:
    rows, out, checkpoint, go = 6000, tmp_path / "out", tmp_path / "checkpoint", tmp_path / "go"
    source: Stream[Any] = Stream.source(Slowly(rows, 500, rows // 2, go)).rebalance()
    handle = cluster.submit(source.to_table({"id": "int64"}).to_spark(), parallelism=2, name="out")
    query = from_job(spark, options, "out", out, checkpoint, processingTime="0 seconds")
    try:
        wait_until(lambda: sum(batch.numInputRows for batch in query.recentProgress) > 0, "a first batch")
        assert query.isActive
    finally:
        query.stop()
    assert all(batch.numInputRows <= 1000 for batch in query.recentProgress)
    go.touch()
    assert handle.wait(SECONDS_MAX).state == "finished"
    query = from_job(spark, options, "out", out, checkpoint, availableNow=True)
    ended(query)
    assert len([batch for batch in query.recentProgress if batch.numInputRows]) >= 3
    assert all(batch.numInputRows <= 1000 for batch in query.recentProgress)
    ended(from_job(spark, options, "out", out, checkpoint, availableNow=True))  # Nothing new.
    found = [row["id"] for row in spark.read.parquet(str(out)).collect()]
    assert sorted(found) == list(range(rows))
