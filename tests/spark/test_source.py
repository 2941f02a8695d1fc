"""DataFrames into running jobs and results of jobs as DataFrames, through a Spark of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import pytest
from pyspark import TaskContext

from minishuffle.api.stream import Table
from minishuffle.config import create_secret
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import JobSettings
from minishuffle.spark.schemas import arrow_schema_of
from minishuffle.spark.session import SparkFailed, activate, spark_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # New, since the memory of Python processes is measured: those of tests before would count.
    pytest.mark.usefixtures("new_jvm", "wider_resources"),
]

SECONDS_MAX = 180.0
PAUSE_SECONDS = 20.0 if os.environ.get("MINISHUFFLE_SOAK") == "1" else 5.0
LOOK_SECONDS = 0.5
MIB = 1 << 20
Options = dict[str, str]
Until = Callable[..., Any]

EVERY_TYPE = (
    "id",
    "cast(id as int) as i",
    "cast(id as smallint) as h",
    "cast(id % 100 as tinyint) as t",
    "id / 7.0D as d",
    "cast(id / 7.0D as float) as f",
    "if(id % 3 = 0, null, concat('zeile ', id, ' ü')) as s",
    "id % 2 = 0 as b",
    "if(id % 5 = 0, null, date_add(date'1960-01-01', cast(id as int))) as day",
    "if(id % 7 = 0, null, timestamp_micros(id * 1234567 - 5000000000)) as at",
    "cast(timestamp_micros(id * 1234567) as timestamp_ntz) as naive",
    "if(id % 4 = 0, null, cast(id - 500 as decimal(10,2)) / 4) as ratio",
    "if(id % 6 = 0, null, cast(id * 0.25 as decimal(10,2))) as price",
    "if(id % 9 = 0, null, cast(concat('b', id) as binary)) as raw",
    "cast(null as string) as never",
)


def write(df: DataFrame, options: Options, stream: str, mode: str = "append", **more: str) -> None:
    df.write.format("minishuffle").options(**options, **more).option("stream", stream).mode(mode).save()


def read(spark: SparkSession, options: Options, job: str) -> DataFrame:
    return spark.read.format("minishuffle").options(**options).option("job", job).load()


def sentence(error: BaseException) -> str:
    """What a user is shown: one line, and nothing of a stack."""
    found = spark_error(error, "the write failed")
    assert isinstance(found, SparkFailed)
    text = str(found)
    assert "\n" not in text and "Traceback" not in text and ".java:" not in text
    return text.removeprefix("the write failed: ")


def test_every_type_goes_in_and_comes_out_as_it_was(
    spark: SparkSession, cluster: LocalCluster, options: Options, count_differences: Any
) -> None:
    df = spark.range(0, 2000, 1, 4).selectExpr(*EVERY_TYPE)
    stream = Table.from_spark("types", arrow_schema_of(df.schema)).rebalance().to_spark()
    handle = cluster.submit(stream, parallelism=2, name="types")
    write(df, options, "types", partitions="4")
    out = read(spark, options, handle.id)
    assert handle.wait(SECONDS_MAX).state == "finished"
    assert [(field.name, field.dataType) for field in out.schema] == [
        (field.name, field.dataType) for field in df.schema
    ]
    assert out.count() == 2000
    assert count_differences(df, out) == (0, 0)


def test_naive_times_stay_as_they_are_in_any_time_zone(
    spark: SparkSession, cluster: LocalCluster, options: Options
) -> None:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        df = spark.sql("select timestamp_ntz'2020-07-01 12:00:00' naive, timestamp'2020-07-01 12:00:00' at")
        stream = Table.from_spark("naive", arrow_schema_of(df.schema)).to_spark()
        handle = cluster.submit(stream, parallelism=1, name="naive")
        write(df, options, "naive")
        assert handle.wait(SECONDS_MAX).state == "finished"
        out = read(spark, options, handle.id)
        assert out.dtypes == [("naive", "timestamp_ntz"), ("at", "timestamp")]
        texts = out.selectExpr("cast(naive as string) naive", "cast(at as string) at").first()
        assert texts is not None and tuple(texts) == ("2020-07-01 12:00:00", "2020-07-01 12:00:00")
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_a_dataframe_without_rows_ends_the_stream(
    spark: SparkSession, cluster: LocalCluster, options: Options
) -> None:
    df = spark.range(0, 10, 1, 2).where("id < 0")
    handle = cluster.submit(Table.from_spark("none", {"id": "int64"}).to_spark(), parallelism=2, name="none")
    write(df, options, "none")
    assert handle.wait(SECONDS_MAX).state == "finished"
    assert read(spark, options, "none").collect() == []


def test_a_task_killed_in_the_middle_of_a_write_is_tried_again_and_no_row_is_lost_or_doubled(
    spark: SparkSession,
    cluster: LocalCluster,
    options: Options,
    tmp_path: Path,
    count_differences: Any,
) -> None:
    rows, partitions, killed = 400_000, 4, 1
    arrived, retried = tmp_path / "arrived", tmp_path / "retried"
    first = rows // partitions * killed

    def seen(batch: pa.RecordBatch) -> pa.RecordBatch:
        ids = batch.column("id").to_pylist()
        if any(first <= number < first + rows // partitions for number in ids):
            arrived.touch()
        return batch

    def kill_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if context.partitionId() == killed and number == 5:
                if context.attemptNumber() == 0:
                    deadline = time.monotonic() + SECONDS_MAX
                    while not arrived.exists() and time.monotonic() < deadline:
                        time.sleep(0.02)
                    os.kill(os.getpid(), signal.SIGKILL)
                retried.touch()
            yield batch

    df = spark.range(0, rows, 1, partitions).selectExpr("id", "repeat(cast(id as string), 4) as s")
    stream = Table.from_spark("killed", arrow_schema_of(df.schema)).map_batches(
        seen, schema=arrow_schema_of(df.schema)
    )
    handle = cluster.submit(stream.to_spark(), parallelism=2, name="kill")
    write(df.mapInArrow(kill_once, df.schema), options, "killed", partitions=str(partitions))
    assert handle.wait(SECONDS_MAX).state == "finished"
    assert arrived.exists() and retried.exists()
    assert count_differences(df, read(spark, options, "kill")) == (0, 0)


@pytest.fixture
def open_stream(cluster: LocalCluster) -> Iterator[str]:
    """A stream of ``id int64, s string`` that a job reads."""
    stream = Table.from_spark("open", {"id": "int64", "s": "string"})
    handle = cluster.submit(stream.to_spark(), parallelism=1, name="open")
    yield "open"
    handle.cancel()
    handle.wait_until_over(SECONDS_MAX)


@pytest.mark.parametrize(
    "columns, said",
    [
        (
            ["cast(id as int) as id", "'a' as s"],
            "takes column 'id' as int64, the DataFrame has int32: cast it, or declare it so",
        ),
        (["id"], "stream 'open' takes the columns id, s, the DataFrame has id: select them in that order"),
        (["'a' as s", "id"], "takes the columns id, s, the DataFrame has s, id: select them in that order"),
    ],
)
def test_columns_that_the_stream_does_not_take_are_refused_in_one_sentence(
    spark: SparkSession, options: Options, open_stream: str, columns: list[str], said: str
) -> None:
    with pytest.raises(Exception) as raised:
        write(spark.range(10).selectExpr(*columns), options, open_stream)
    assert said in sentence(raised.value)


def test_a_stream_cannot_be_overwritten(spark: SparkSession, options: Options, open_stream: str) -> None:
    df = spark.range(10).selectExpr("id", "'a' as s")
    with pytest.raises(Exception) as raised:
        write(df, options, open_stream, mode="overwrite")
    assert sentence(raised.value) == "a stream cannot be overwritten: write with mode('append')"


def test_names_that_nobody_knows_are_refused_in_one_sentence(spark: SparkSession, options: Options) -> None:
    with pytest.raises(Exception) as raised:
        write(spark.range(10).toDF("id"), options, "nobody")
    assert "'nobody'" in sentence(raised.value)
    with pytest.raises(Exception) as raised:
        read(spark, options, "no-job").collect()
    assert "'no-job'" in sentence(raised.value)


def test_options_that_are_missing_are_asked_for(spark: SparkSession, options: Options) -> None:
    with pytest.raises(Exception) as raised:
        spark.range(1).write.format("minishuffle").options(**options).mode("append").save()
    assert "option('stream', ...)" in sentence(raised.value)
    with pytest.raises(Exception) as raised:
        spark.read.format("minishuffle").options(**options).load()
    assert "option('job', ...)" in sentence(raised.value)


def test_a_wrong_secret_is_refused_in_one_sentence(
    spark: SparkSession, options: Options, open_stream: str, tmp_path: Path
) -> None:
    create_secret(tmp_path / "secret")
    df = spark.range(10).selectExpr("id", "'a' as s")
    with pytest.raises(Exception) as raised:
        write(df, {**options, "secret-file": str(tmp_path / "secret")}, open_stream)
    assert "secret" in sentence(raised.value)


def test_a_job_that_fails_ends_the_write(
    spark: SparkSession, cluster: LocalCluster, options: Options
) -> None:
    def refuse(row: dict[str, int]) -> dict[str, int]:
        if row["id"] == 70_000:
            raise ValueError("seventy thousand is too much")
        return row

    handle = cluster.submit(
        Table.from_spark("failing", {"id": "int64"})
        .to_rows()
        .map(refuse)
        .to_table({"id": "int64"})
        .to_spark(),
        parallelism=2,
        name="failing",
        settings=JobSettings(restart_strategy="none"),
    )
    with pytest.raises(Exception) as raised:
        write(spark.range(0, 1_000_000, 1, 2).toDF("id"), options, "failing")
    assert "(failing)" in sentence(raised.value) and "seventy thousand is too much" in sentence(raised.value)
    assert handle.wait_until_over(SECONDS_MAX).state == "failed"


def test_a_dataframe_that_fails_fails_the_job_that_waits_for_it(
    spark: SparkSession, cluster: LocalCluster, options: Options
) -> None:
    handle = cluster.submit(
        Table.from_spark("given-up", {"id": "int64"}).to_spark(), parallelism=2, name="given-up"
    )
    df = spark.range(0, 10, 1, 2).selectExpr("if(id = 7, raise_error('no sevens'), id) as id")
    with pytest.raises(Exception) as raised:
        write(df.selectExpr("cast(id as bigint) as id"), options, "given-up")
    assert "no sevens" in sentence(raised.value)
    assert handle.wait_until_over(SECONDS_MAX).state == "failed"


class Write:
    """A save in a thread of its own; what it raised is in ``raised``."""

    def __init__(self, spark: SparkSession, df: DataFrame, options: Options, stream: str) -> None:
        self.raised: list[BaseException] = []

        def run() -> None:
            try:
                activate(spark)
                write(df, options, stream)
            except BaseException as error:
                self.raised.append(error)

        self.thread = threading.Thread(target=run, name="write")
        self.thread.start()


def python_bytes() -> int:
    """Memory of all Python processes of Spark below this one."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            if "pyspark" in " ".join(process.cmdline()) and "java" not in process.name():
                total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def test_a_job_that_takes_nothing_pauses_the_write_and_spark_holds_no_more_for_it(
    spark: SparkSession,
    cluster: LocalCluster,
    options: Options,
    tmp_path: Path,
    wait_until: Until,
) -> None:
    rows, row_bytes = 1_000_000, 200
    taken, go = tmp_path / "taken", tmp_path / "go"

    def wait(batch: pa.RecordBatch) -> pa.RecordBatch:
        deadline = time.monotonic() + 2 * SECONDS_MAX
        while not go.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return batch.select(["id"])

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with taken.open("ab") as file:  # One byte for each thousand rows.
                file.write(b"." * (batch.num_rows // 1000))
            yield batch

    df = spark.range(0, rows, 1, 2).selectExpr("id", f"repeat('x', {row_bytes}) as s")
    stream = Table.from_spark("paused", arrow_schema_of(df.schema)).map_batches(wait, schema={"id": "int64"})
    handle = cluster.submit(stream.to_spark(), parallelism=2, name="paused")
    writing = Write(spark, df.mapInArrow(count, df.schema), options, "paused")
    try:
        wait_until(lambda: taken.exists(), "the first batch")
        sizes = [-1, taken.stat().st_size]
        deadline = time.monotonic() + SECONDS_MAX
        while len(sizes) < 6 or len(set(sizes[-4:])) > 1:  # What buffers hold on the way is taken first.
            assert time.monotonic() < deadline, f"Spark's rows are taken although nobody takes them: {sizes}"
            time.sleep(2 * LOOK_SECONDS)
            sizes.append(taken.stat().st_size)
        still, memory = sizes[-1], python_bytes()
        assert 0 < still < rows // 1000
        assert memory > 0
        for _ in range(int(PAUSE_SECONDS / LOOK_SECONDS)):
            time.sleep(LOOK_SECONDS)
            assert taken.stat().st_size == still
            assert python_bytes() < memory + 16 * MIB
        assert writing.thread.is_alive()
    finally:
        go.touch()
        writing.thread.join(SECONDS_MAX)
    assert not writing.thread.is_alive()
    assert not writing.raised
    assert handle.wait(SECONDS_MAX).state == "finished"
    out = read(spark, options, "paused")
    assert (out.count(), out.distinct().count()) == (rows, rows)
