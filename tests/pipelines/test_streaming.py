"""Pipelines as streaming queries: stopped, started again, and started over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from minishuffle import LocalCluster, Table
from minishuffle.errors import TaskFailed
from minishuffle.pipelines import DataDirectory, Input, Pipeline, streaming
from minishuffle.pipelines.flights import Flights
from minishuffle.pipelines.run import judged, late_rows, rows_taken
from minishuffle.pipelines.streaming import StreamingRun, run_streaming
from minishuffle.spark.session import spark_error
from support.waiting import until

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("wider_resources"),
]

SECONDS_MAX = 120.0
RESULT_ROWS = 5_133
"""Of the flights of January."""
ROWS = 8_000
SCHEMA = {"key": "int64", "value": "int64"}

Make = Callable[[Pipeline], StreamingRun]


class Sums(Pipeline):
    """Numbers, each for itself and by key, so that one that is lost or comes twice is seen."""

    name = "sums"

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def inputs(self, spark: SparkSession, data: DataDirectory) -> dict[str, Input]:
        return {"numbers": Input(spark.range(ROWS).selectExpr("id % 7 AS key", "id AS value"), ("value",), 2)}

    def job(self, tables: Mapping[str, Table]) -> Table:
        numbers = tables["numbers"]
        if self.fails:

            def fail(batch: Any) -> Any:
                raise ValueError("a mistake of the user")

            numbers = numbers.map_batches(fail, schema=SCHEMA)
        return numbers

    def expected(self, spark: SparkSession, data: DataDirectory) -> DataFrame:
        return spark.range(ROWS).selectExpr("id % 7 AS key", "id AS value")


@pytest.fixture
def make(
    spark: SparkSession, cluster: LocalCluster, options: dict[str, str], tmp_path: Path
) -> Iterator[Make]:
    """Makes a run in the test's own directory; whatever is left of it in the end is stopped."""
    cluster.status()  # Connects, so that no test opens what outlives it.
    made: list[StreamingRun] = []

    def make_one(pipeline: Pipeline) -> StreamingRun:
        place = DataDirectory(tmp_path / "data")
        run = StreamingRun(pipeline, spark, cluster.client, options, place, output=str(tmp_path / "out"))
        made.append(run)
        return run

    yield make_one
    for run in made:
        run.stop()
    for job in cluster.client.jobs():
        if job.state == "running":
            cluster.client.cancel(job.job)
            cluster.client.handle(job.job).wait_until_over(30)


def batches(run: StreamingRun, name: str) -> int:
    """How many micro-batches of an input are written, as its checkpoint has it."""
    commits = Path(run.place("checkpoints", name, "commits"))
    return sum(path.name.isdigit() for path in commits.glob("*")) if commits.is_dir() else 0


def stop_after(run: StreamingRun, name: str, count: int) -> None:
    run.start()
    until(lambda: batches(run, name) >= count, f"batch {count} of {name}", SECONDS_MAX)
    run.stop()


def test_flights_that_are_stopped_twice_are_what_spark_computes(
    make: Make, spark: SparkSession, january: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "ROWS_PER_FILE", 3_000)
    jobs = set()
    for count in (2, 4):
        run = make(Flights())
        run.prepare(2)
        jobs.add(run.handle.id)
        stop_after(run, "flights", count)
        assert batches(run, "flights") < 10 and run.handle.info().state == "running"
    run = make(Flights())
    run.prepare(2)
    jobs.add(run.handle.id)
    parts = Path(run.place("minishuffle"))
    read_before = spark.read.parquet(str(parts)).count() if any(parts.glob("_spark_metadata/*")) else 0
    run.start()
    run.finish()
    run.stop()
    assert len(jobs) == 1 and batches(run, "flights") == 10
    assert 0 < run.taken_before < sum(january) and run.read_before == read_before
    ended = run.handle.info()
    assert (rows_taken(ended), late_rows(ended)) == (sum(january), 0)
    result = spark.read.parquet(run.place("minishuffle"))
    verdict = judged(Flights(), spark, DataDirectory(run.record.parent), result, run.output)
    assert verdict is not None and verdict.equal and verdict.rows == RESULT_ROWS, verdict


def test_a_run_that_is_over_is_not_gone_on_with(
    make: Make,
    spark: SparkSession,
    cluster: LocalCluster,
    options: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "ROWS_PER_FILE", 3_000)
    place = DataDirectory(tmp_path / "data")
    for _ in range(2):
        outcome = run_streaming(
            Sums(), spark, cluster.client, options, place, output=str(tmp_path / "out"), parallelism=2
        )
        assert outcome.verdict is not None and outcome.verdict.equal and outcome.verdict.rows == ROWS
        assert outcome.rows_in == ROWS
        assert not (tmp_path / "data" / "streaming.json").exists()


def test_a_run_whose_job_is_gone_starts_over(
    make: Make, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "ROWS_PER_FILE", 1_000)
    run = make(Sums())
    run.prepare(1)
    stop_after(run, "numbers", 2)
    gone = run.handle
    gone.cancel()
    gone.wait_until_over(30)
    run = make(Sums())
    run.prepare(1)
    assert run.handle.id != gone.id and batches(run, "numbers") == 0
    run.start()
    run.finish()
    result = spark.read.parquet(run.place("minishuffle"))
    assert result.count() == ROWS and result.agg(F.count_distinct("value")).collect()[0][0] == ROWS


def test_a_record_of_another_cluster_or_another_place_is_not_gone_on_with(make: Make) -> None:
    run = make(Sums())
    run.prepare(1)
    record = run.record.read_text()
    again = make(Sums())
    again.prepare(1)
    assert again.handle.id == run.handle.id
    moment = str(run.handle.info().submitted_at)
    for changed in (record.replace(moment, "1.5"), record.replace("/out", "/other"), "{}", "[1", "3"):
        assert changed != record
        run.record.write_text(changed)
        other = make(Sums())
        with pytest.raises(Exception, match="stream numbers|'numbers'"):  # The first job reads it still.
            other.prepare(1)
        assert not other.record.exists()


@pytest.mark.usefixtures("no_restarts")
def test_a_job_that_fails_ends_the_run_with_its_reason(make: Make) -> None:
    run = make(Sums(fails=True))
    run.prepare(1)
    run.start()
    with pytest.raises(Exception) as raised:
        run.finish()
    run.stop()
    told = str(raised.value if isinstance(raised.value, TaskFailed) else spark_error(raised.value, "sums"))
    assert "ValueError: a mistake of the user" in told
    assert run.handle.info().state == "failed"
