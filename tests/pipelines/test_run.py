"""Pipelines from Spark through a cluster of real processes and back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from minishuffle import LocalCluster, Table
from minishuffle.errors import ShuffleError, TaskFailed, UsageError
from minishuffle.pipelines import DataDirectory, Input, Pipeline
from minishuffle.pipelines.flights import Flights
from minishuffle.pipelines.run import Outcome, run_once
from minishuffle.spark.session import spark_error

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("wider_resources"),
]

LateFlights = Callable[[Path, timedelta], Counter[tuple[str, ...]]]
RESULT_ROWS, DELAY_MINUTES, LATE_FLIGHTS = 5_133, 265_801, 331
"""Of January, the last one with records that may come two hours out of order."""
ROWS = 20_000
SCHEMA = {"key": "int64", "value": "int64"}
OVER = ("finished", "failed", "canceled")


@pytest.fixture
def run(
    spark: SparkSession,
    cluster: LocalCluster,
    options: dict[str, str],
    data: DataDirectory,
    tmp_path: Path,
) -> Callable[[Pipeline], Outcome]:
    cluster.status()  # Connects, so that no test opens what outlives it.
    return lambda pipeline: run_once(
        pipeline, spark, cluster.client, options, data, output=str(tmp_path / "answers"), parallelism=2
    )


class Sums(Pipeline):
    """Sums of numbers by key; what goes wrong with them is for the tests to say."""

    name = "sums"

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def inputs(self, spark: SparkSession, data: DataDirectory) -> dict[str, Input]:
        numbers = spark.range(ROWS).selectExpr("id % 7 AS key", "id AS value")
        if self.wrong == "spark":
            unlucky = F.when(F.col("value") == 19_000, F.raise_error(F.lit("no luck")))
            numbers = numbers.withColumn("value", unlucky.otherwise(F.col("value")))
        return {
            "numbers": Input(numbers, ("value", "key"), splits=2),
            "others": Input(spark.range(3).selectExpr("id % 7 AS key", "id AS value"), ("value",)),
        }

    def job(self, tables: Mapping[str, Table]) -> Table:
        numbers = tables["numbers"].union(tables["others"])
        if self.wrong == "job":

            def fail(batch: Any) -> Any:
                raise ValueError("a mistake of the user")

            numbers = numbers.map_batches(fail, schema=SCHEMA)
        return numbers.key_by("key").aggregate(total=("value", "sum"))

    def expected(self, spark: SparkSession, data: DataDirectory) -> DataFrame:
        numbers = spark.range(ROWS).union(spark.range(3)).selectExpr("id % 7 AS key", "id AS value")
        if self.wrong == "result":
            numbers = numbers.where("value < 19999")
        return numbers.groupBy("key").agg(F.sum("value").alias("total"))


def jobs_over(cluster: LocalCluster) -> bool:
    return all(job.state in OVER for job in cluster.client.jobs())


def test_the_flights_are_what_spark_computes(
    run: Callable[[Pipeline], Outcome], tmp_path: Path, january: tuple[int, int]
) -> None:
    outcome = run(Flights())
    verdict = outcome.verdict
    assert verdict is not None and verdict.equal, verdict
    assert (verdict.rows, verdict.rows_spark, outcome.late) == (RESULT_ROWS, RESULT_ROWS, 0)
    assert outcome.rows_in == sum(january)
    assert Flights().stats(outcome.result) == {"dep_delay_min": DELAY_MINUTES}
    assert {path.name for path in (tmp_path / "answers").iterdir()} == {"minishuffle", "spark"}


def test_late_flights_are_those_of_a_loop_over_all_and_the_rest_is_what_spark_computes(
    run: Callable[[Pipeline], Outcome],
    spark: SparkSession,
    data: DataDirectory,
    late_flights: LateFlights,
    january: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strict = Flights(splits=1, out_of_order_hours=2, watermarks="each")
    strict.inputs(spark, data)  # Unpacks the file.
    late = late_flights(data.path / "flights.csv", timedelta(hours=2))
    names = spark.createDataFrame(list(late), "carrier STRING, number STRING, origin STRING, hour STRING")

    def others(flown: DataFrame, _: timedelta) -> DataFrame:
        """All flights but those that the loop names."""
        hour = F.date_format("time_hour", "yyyy-MM-dd'T'HH:mm:ss'Z'")
        told = flown.withColumn("number", F.col("flight").cast("string")).withColumn("hour", hour)
        return told.join(F.broadcast(names), ["carrier", "number", "origin", "hour"], "left_anti")

    monkeypatch.setattr("minishuffle.pipelines.flights.not_late", others)
    outcome = run(strict)
    assert outcome.late == late.total() == LATE_FLIGHTS
    assert outcome.verdict is not None and outcome.verdict.equal, outcome.verdict
    flown = outcome.result.agg({"flights": "sum"}).first()
    assert flown is not None and flown[0] == january[0] - LATE_FLIGHTS


def test_a_pipeline_of_ones_own(run: Callable[[Pipeline], Outcome]) -> None:
    outcome = run(Sums())
    assert outcome.verdict is not None and str(outcome.verdict) == "EQUAL: 7 rows of minishuffle and of Spark"
    assert (outcome.rows_in, outcome.late) == (ROWS + 3, 0)


def test_a_result_that_is_not_what_spark_computes(run: Callable[[Pipeline], Outcome]) -> None:
    verdict = run(Sums("result")).verdict
    assert verdict is not None and not verdict.equal
    assert (verdict.rows, verdict.only_minishuffle, verdict.only_spark) == (7, 1, 1)


@pytest.mark.usefixtures("no_restarts")
def test_a_function_of_the_job_that_raises(run: Callable[[Pipeline], Outcome], cluster: LocalCluster) -> None:
    with pytest.raises(TaskFailed, match="ValueError: a mistake of the user") as raised:
        run(Sums("job"))
    assert 'raise ValueError("a mistake of the user")' in str(raised.value)
    assert jobs_over(cluster)


def test_a_dataframe_that_cannot_be_computed(
    run: Callable[[Pipeline], Outcome], cluster: LocalCluster
) -> None:
    with pytest.raises(Exception) as raised:
        run(Sums("spark"))
    told = str(spark_error(raised.value, "pipeline sums"))
    assert "no luck" in told and "\n" not in told, told
    assert jobs_over(cluster)
    assert run(Sums()).verdict is not None  # Nothing stands in the way of the next one.


class Wrong(Sums):
    """Gives what its maker says instead of inputs and a stream."""

    def __init__(self, inputs: Any = None, job: Any = None) -> None:
        super().__init__()
        self._inputs, self._job = inputs, job

    def inputs(self, spark: SparkSession, data: DataDirectory) -> Any:
        return super().inputs(spark, data) if self._inputs is None else self._inputs(spark)

    def job(self, streams: Mapping[str, Table]) -> Any:
        return super().job(streams) if self._job is None else self._job(streams)


@pytest.mark.parametrize(
    "pipeline, problem",
    [
        (Wrong(lambda spark: {}), "inputs must return a dict of stream name to Input"),
        (Wrong(lambda spark: {"a": spark.range(3)}), "the input 'a' is a DataFrame: write Input"),
        (Wrong(lambda spark: {"a": Input(spark.range(3), ())}), "takes column names"),
        (Wrong(lambda spark: {"a": Input(spark.range(3), "id")}), r"write order_by=\('id',\)"),
        (Wrong(lambda spark: {"a": Input(spark.range(3), ("at",))}), "no column 'at'; there are id"),
        (
            Wrong(lambda spark: {"a": Input(spark.range(3), ("id",), 0)}),
            "splits=.* takes a whole number",
        ),
        (Wrong(job=lambda streams: 3), "job must return a Table, not int"),
        (Wrong(job=lambda streams: streams["others"].to_count()), "leave out the sink 'to_count'"),
    ],
)
def test_what_is_no_pipeline_is_refused(
    run: Callable[[Pipeline], Outcome], pipeline: Pipeline, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        run(pipeline)


def test_a_stream_that_another_job_reads_is_refused(
    run: Callable[[Pipeline], Outcome], cluster: LocalCluster
) -> None:
    handle = cluster.submit(Table.from_spark("numbers", SCHEMA).to_count(), parallelism=1)
    try:
        with pytest.raises(ShuffleError, match="numbers"):
            run(Sums())
    finally:
        handle.cancel()
        handle.wait_until_over(30)


def test_files_for_all_machines_are_copied_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shared = tmp_path / "our own", tmp_path / "of all"  # Spark takes %20 for what it says.
    own.mkdir()
    (own / "numbers.json").write_text(json.dumps({"number": 3}))
    place = DataDirectory(own, f"file://{shared}")
    there = place.readable(spark, own / "numbers.json")
    assert there == f"file:{shared}/numbers.json"
    assert spark.read.json(there).collect()[0].number == 3
    written = (shared / "numbers.json").stat().st_mtime_ns
    assert place.readable(spark, own / "numbers.json") == there
    assert (shared / "numbers.json").stat().st_mtime_ns == written
    here = DataDirectory(own).readable(spark, own / "numbers.json")
    assert here == f"file://{own}/numbers.json"
    assert spark.read.json(here).collect()[0].number == 3
