"""The verdict on results that are right, and on every kind that is not."""

from __future__ import annotations

from datetime import datetime

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from minishuffle.pipelines.run import Verdict, compare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("wider_resources")]

ROWS = [(f"c{number % 5}", datetime(2013, 1, 1, number % 24), number) for number in range(100)]
SCHEMA = "carrier STRING, time_hour TIMESTAMP, minutes BIGINT"


@pytest.fixture(scope="module")
def expected(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(ROWS, SCHEMA)


def test_the_same_rows_in_another_order_are_equal(spark: SparkSession, expected: DataFrame) -> None:
    verdict = compare(spark.createDataFrame(ROWS[::-1], SCHEMA), expected)
    assert verdict == Verdict(100, 100, 0, 0) and verdict.equal
    assert str(verdict) == "EQUAL: 100 rows of minishuffle and of Spark"


def test_whether_a_column_may_be_null_is_no_difference(spark: SparkSession, expected: DataFrame) -> None:
    other = spark.createDataFrame(ROWS, SCHEMA.replace("BIGINT", "BIGINT NOT NULL"))
    assert other.schema != expected.schema and compare(other, expected).equal


@pytest.mark.parametrize(
    "rows, counts",
    [
        (ROWS[1:], (99, 100, 0, 1)),
        ([*ROWS, ROWS[7]], (101, 100, 1, 0)),
        ([*ROWS[:-1], (*ROWS[-1][:2], 100)], (100, 100, 1, 1)),
        ([*ROWS[:-1], (*ROWS[-1][:2], None)], (100, 100, 1, 1)),
        ([*ROWS[:-1], ROWS[0]], (100, 100, 1, 1)),
        ([], (0, 100, 0, 100)),
    ],
    ids=["dropped", "doubled", "off by one", "null", "one for another", "nothing"],
)
def test_a_result_that_is_wrong(
    spark: SparkSession,
    expected: DataFrame,
    rows: list[tuple[str, datetime, int | None]],
    counts: tuple[int, int, int, int],
) -> None:
    verdict = compare(spark.createDataFrame(rows, SCHEMA), expected)
    assert (verdict.rows, verdict.rows_spark, verdict.only_minishuffle, verdict.only_spark) == counts
    assert not verdict.equal and str(verdict).startswith("NOT EQUAL: ")
    assert len(verdict.differences) == min(5, counts[2] + counts[3])


def test_differences_name_their_side_and_values(spark: SparkSession, expected: DataFrame) -> None:
    wrong = [*ROWS[:-1], ("c4", datetime(2013, 1, 1, 3), 100)]
    differences = compare(spark.createDataFrame(wrong, SCHEMA), expected).differences
    assert [text.partition(":")[0] for text in differences] == ["only of minishuffle", "only of Spark"]
    assert differences[0].endswith("minutes=100") and differences[1].endswith("minutes=99")


def test_schemas_that_differ(spark: SparkSession, expected: DataFrame) -> None:
    narrow = expected.withColumn("minutes", F.col("minutes").cast("int"))
    verdict = compare(narrow, expected)
    assert not verdict.equal
    assert verdict.differences == ("the column minutes is int of minishuffle and bigint of Spark",)
    verdict = compare(expected.drop("carrier"), expected)
    assert verdict.differences == ("the column carrier is not there of minishuffle and string of Spark",)
    turned = expected.select("minutes", "carrier", "time_hour")
    assert not compare(turned, expected).equal
