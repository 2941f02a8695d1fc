"""The audit of a run in which a worker is killed: what is compared, and by whose word rows were lost."""

from __future__ import annotations

import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from minishuffle import LocalCluster
from minishuffle.errors import UsageError
from minishuffle.pipelines import DataDirectory, Pipeline
from minishuffle.pipelines.audit import Audit, Completeness, audited, check_audit, worker_killed
from minishuffle.pipelines.flights import Flights
from minishuffle.pipelines.run import Fault, run_once

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("wider_resources"),
]

ROWS = [(f"c{number % 3}", datetime(2013, 1, 1, number // 3), number) for number in range(30)]
SCHEMA = "carrier STRING, time_hour TIMESTAMP, minutes BIGINT"
JANUARY_ROWS = 5_133


class Hours(Pipeline):
    name = "hours"
    audit_key = ("carrier", "time_hour")
    audit_by = "carrier"

    def inputs(self, spark: Any, data: Any) -> Any:
        raise NotImplementedError

    def job(self, streams: Any) -> Any:
        raise NotImplementedError


def test_rows_are_equal_wrong_or_missing_by_their_key(spark: SparkSession) -> None:
    """c0 lacks one row and has one with another value; c1 has one twice and one that is none of Spark's."""
    ours = [row for row in ROWS if row != ROWS[0]]
    ours[ours.index(ROWS[3])] = ("c0", ROWS[3][1], None)  # type: ignore[call-overload]
    ours += [ROWS[1], ("c1", datetime(2014, 1, 1), 7)]
    result, expected = spark.createDataFrame(ours, SCHEMA), spark.createDataFrame(ROWS, SCHEMA)
    audit = audited(Hours(), result, expected, "the reason")
    assert audit.groups == (
        Completeness("c0", 8, 1, 1),
        Completeness("c1", 9, 2, 0),
        Completeness("c2", 10, 0, 0),
    )
    assert audit.total == Completeness("all", 27, 3, 1) and audit.lost == "the reason"
    assert [round(group.percent, 1) for group in audit.groups] == [80.0, 81.8, 100.0]
    assert Audit((), "").total.percent == 100.0


def test_a_pipeline_that_does_not_say_what_tells_its_rows_apart_is_not_audited() -> None:
    class Plain(Hours):
        audit_key = ()

    with pytest.raises(UsageError, match="set audit_key to the columns that identify a row"):
        check_audit(Plain())
    check_audit(Hours())


def test_a_worker_is_killed_in_time_or_not_at_all() -> None:
    killed = threading.Event()

    def kill() -> int:
        killed.set()
        return 7

    with worker_killed(0.0, kill) as done:
        assert killed.wait(30)
    assert done.worker == 7
    with worker_killed(3_600.0, kill) as done:
        pass
    assert done.worker == 0


def test_flights_with_a_killed_worker_are_audited_by_spark(
    spark: SparkSession, data: DataDirectory, tmp_path: Path, january: tuple[int, int]
) -> None:
    """What is not equal is explained by what the job says it lost, and most of it is there."""
    with LocalCluster(workers=2, slots=4) as cluster:
        options = cluster.spark_options()

        def kill() -> int:
            """As soon as rows of both inputs are in the job."""
            cluster.kill_worker(2)
            return 2

        outcome = run_once(
            Flights(),
            spark,
            cluster.client,
            options,
            data,
            output=str(tmp_path),
            parallelism=2,
            fault=Fault(0.5, kill),
        )
        assert outcome.killed == 2 and outcome.audit is not None
        (job,) = cluster.client.jobs()
    total = outcome.audit.total
    assert job.restarts.get("lost", 0) >= 1
    assert total.equal + total.missing <= JANUARY_ROWS <= total.equal + total.wrong + total.missing
    is_equal = (total.wrong, total.missing) == (0, 0)
    assert is_equal or (job.state == "finished_with_loss" and "rows were lost" in outcome.audit.lost)
