"""Event time of what Spark writes: partitions that have not begun hold the watermark, subtasks without any do
not, and micro-batches move it on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.api.stream import Table
from minishuffle.client import JobHandle
from minishuffle.local import LocalCluster
from minishuffle.remote.access import Access
from minishuffle.remote.reader import describe_result
from minishuffle.remote.writer import end_stream
from minishuffle.spark.schemas import arrow_schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("wider_resources"),
]

SECONDS_MAX = 180.0
HOUR = timedelta(hours=1)
Options = dict[str, str]
Until = Callable[..., Any]
COLUMNS = ("id % 8 as k", "timestamp_micros(id * 1000000) as at")
"""One row a second: 3600 in an hour's window."""


def numbered(spark: SparkSession, begin: int, end: int, partitions: int) -> DataFrame:
    return spark.range(begin, end, 1, partitions).selectExpr(*COLUMNS)


def counting(
    cluster: LocalCluster, df: DataFrame, name: str, *, bounded: bool, out_of_order: timedelta = timedelta()
) -> JobHandle:
    """A job that counts the stream's rows by key and hour."""
    stream = Table.from_spark(name, arrow_schema_of(df.schema), bounded=bounded)
    timed = stream.event_time("at", out_of_order=out_of_order)
    return cluster.submit(timed.key_by("k").window(HOUR).count().to_spark(), parallelism=2, name=name)


def write(df: DataFrame, options: Options, stream: str, **more: str) -> None:
    df.write.format("minishuffle").options(**options, **more).option("stream", stream).mode("append").save()


def counted(spark: SparkSession, options: Options, job: str) -> int:
    """The rows that all windows of a job counted that is finished."""
    df = spark.read.format("minishuffle").options(**options).option("job", job).load()
    return int(df.selectExpr("sum(count)").first()[0])


def test_partitions_that_have_not_begun_hold_the_watermark_also_if_their_number_is_not_known(
    spark: SparkSession, cluster: LocalCluster, options: Options
) -> None:
    """Two tasks at once write the later half of the time after the earlier: nothing may be late."""
    rows = 400_000
    df = numbered(spark, 0, rows, 4)
    handle = counting(cluster, df, "halves", bounded=True)
    # Tasks take partitions in order; the two that begin last bring the earliest times.
    late_first = df.selectExpr("k", f"timestamp_micros({rows}000000L - unix_micros(at)) as at")
    write(late_first, options, "halves")
    assert handle.wait(SECONDS_MAX).state == "finished"
    assert counted(spark, options, handle.id) == rows


@pytest.mark.parametrize("said", [True, False], ids=["number known", "number not known"])
def test_a_subtask_that_has_no_partition_holds_nobody_back(
    spark: SparkSession,
    cluster: LocalCluster,
    options: Options,
    access: Access,
    wait_until: Until,
    said: bool,
) -> None:
    name = f"single{said}"
    df = numbered(spark, 0, 8 * 3600, 1)
    handle = counting(cluster, df, name, bounded=False)
    write(df, options, name, **({"partitions": "1"} if said else {}))
    wait_until(lambda: describe_result(access, handle.id).rows == 7 * 8, "the windows of 7 of 8 hours")
    end_stream(access, name)
    assert handle.wait(SECONDS_MAX).state == "finished"
    assert counted(spark, options, handle.id) == 8 * 3600


def test_the_watermark_goes_on_with_each_micro_batch_and_none_of_its_rows_is_late(
    spark: SparkSession,
    cluster: LocalCluster,
    options: Options,
    access: Access,
    tmp_path: Path,
    wait_until: Until,
) -> None:
    """Each batch has four partitions of six hours, and the two tasks take the later ones first."""
    directory, day = tmp_path / "in", 24 * 3600
    directory.mkdir()
    schema = numbered(spark, 0, 1, 1).schema
    handle = counting(cluster, numbered(spark, 0, 1, 1), "batches", bounded=False)
    files = spark.readStream.schema(schema).option("maxFilesPerTrigger", 4).parquet(str(directory))
    for begin in (0, day):
        later_first = numbered(spark, begin, begin + day, 4).selectExpr(
            "k", f"timestamp_micros({2 * begin + day - 1}000000L - unix_micros(at)) as at"
        )
        later_first.write.mode("append").parquet(str(directory))
        writer = files.writeStream.format("minishuffle").options(**options).option("stream", "batches")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(int(SECONDS_MAX)), "the query is not through"
        windows = (begin // 3600 + 11) * 8  # A subtask may have the two partitions of the earlier half.
        wait_until(lambda n=windows: describe_result(access, handle.id).rows >= n, "the batch's windows")
    end_stream(access, "batches")
    assert handle.wait(SECONDS_MAX).state == "finished"
    assert counted(spark, options, handle.id) == 2 * day
