"""The verdict on results that are right, and on every kind that is not."""

from __future__ import annotations

from datetime import datetime

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    TimestampNTZType,
    TimestampType,
)

from minishuffle.pipelines.verdict import Verdict, compare, wider_type

pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.usefixtures("wider_resources")]

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
        ([*ROWS[:-1], (*ROWS[-1][:2], None)], (100, 100, 1, 1)),
        ([*ROWS[:-1], ROWS[0]], (100, 100, 1, 1)),
        ([], (0, 100, 0, 100)),
    ],
    ids=["dropped", "doubled", "null", "one for another", "nothing"],
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
    verdict = compare(spark.createDataFrame(wrong, SCHEMA), expected)
    assert verdict == Verdict(100, 100, 1, 1, verdict.differences) and not verdict.equal
    one, other = verdict.differences
    assert one.startswith("only of minishuffle:") and one.endswith("minutes=100")
    assert other.startswith("only of Spark:") and other.endswith("minutes=99")


def test_values_of_columns_with_two_types_are_compared_in_the_wider_one(
    spark: SparkSession, expected: DataFrame
) -> None:
    narrow = expected.withColumn("minutes", F.col("minutes").cast("decimal(12,2)"))
    verdict = compare(narrow, expected)
    assert verdict.equal and (verdict.only_minishuffle, verdict.only_spark) == (0, 0)
    assert verdict.widened == (
        "the column minutes is decimal(12,2) of minishuffle and bigint of Spark, compared as decimal(21,2)",
    )
    verdict = compare(
        narrow.withColumn("minutes", F.col("minutes") + F.lit(0.25).cast("decimal(2,2)")), expected
    )
    assert (verdict.only_minishuffle, verdict.only_spark) == (100, 100) and not verdict.equal


def test_columns_that_cannot_be_compared(spark: SparkSession, expected: DataFrame) -> None:
    text = expected.withColumn("minutes", F.col("minutes").cast("string"))
    verdict = compare(text, expected)
    assert not verdict.equal and (verdict.only_minishuffle, verdict.only_spark) == (0, 0)
    assert verdict.differences == ("the column minutes is string of minishuffle and bigint of Spark",)
    verdict = compare(expected.drop("carrier").limit(90), expected)
    assert verdict.differences[0] == "the column carrier is not there of minishuffle and string of Spark"
    assert (verdict.only_minishuffle, verdict.only_spark) == (0, 10)
    turned = expected.select("minutes", "carrier", "time_hour")
    assert not compare(turned, expected).equal
    verdict = compare(expected.select("carrier"), expected.select("minutes"))
    assert (verdict.only_minishuffle, verdict.only_spark) == (100, 100)


@pytest.mark.parametrize(
    "left, right, wider",
    [
        (IntegerType(), LongType(), LongType()),
        (FloatType(), DoubleType(), DoubleType()),
        (DecimalType(12, 2), DecimalType(22, 4), DecimalType(22, 4)),
        (DecimalType(12, 2), ByteType(), DecimalType(12, 2)),
        (DecimalType(38, 20), LongType(), None),
        (DoubleType(), LongType(), None),
        (DecimalType(12, 2), DoubleType(), None),
        (TimestampType(), TimestampNTZType(), None),
        (TimestampType(), DateType(), None),
        (ArrayType(LongType()), ArrayType(LongType()), ArrayType(LongType())),
    ],
    ids=str,
)
def test_the_type_that_holds_the_values_of_both(
    left: DataType, right: DataType, wider: DataType | None
) -> None:
    assert wider_type(left, right) == wider_type(right, left) == wider
