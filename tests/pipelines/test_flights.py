"""The flights pipeline: Spark's answer against figures known from elsewhere, and which flights are late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from minishuffle.cli.loading import load_pipeline
from minishuffle.errors import ShuffleError, UsageError
from minishuffle.pipelines import DataDirectory
from minishuffle.pipelines.flights import RESULT, Flights, cleaned, not_late

LateFlights = Callable[[Path, timedelta], Counter[tuple[str, ...]]]

pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.usefixtures("wider_resources")]

KNOWN_SUMS = {
    "flights": 336_776,
    "departed": 328_521,
    "dep_delay_min": 4_152_200,
    "max_dep_delay_min": 2_619_743,
    "late15": 72_914,
    "with_weather": 335_220,
    "wet": 23_002,
    "precip_hundredths": 152_988,
    "low_visibility": 13_138,
}


def named(rows: DataFrame) -> Counter[tuple[str, ...]]:
    hour = F.date_format("time_hour", "yyyy-MM-dd'T'HH:mm:ss'Z'")
    found = rows.select("carrier", F.col("flight").cast("string"), "origin", hour).collect()
    return Counter(tuple(row) for row in found)


@pytest.fixture(scope="module")
def expected(spark: SparkSession, data: DataDirectory) -> DataFrame:
    return Flights().expected(spark, data).cache()


def test_sums_of_all_columns(expected: DataFrame) -> None:
    row = expected.agg(*(F.sum(name).alias(name) for name in KNOWN_SUMS)).first()
    assert row is not None and row.asDict() == KNOWN_SUMS
    assert expected.count() == 60_142
    assert Flights().stats(expected) == {"dep_delay_min": 4_152_200}


def test_columns_and_nulls(expected: DataFrame) -> None:
    kinds = {"carrier": "string", "airline": "string", "time_hour": "timestamp"}
    assert expected.dtypes == [(name, kinds.get(name, "bigint")) for name in RESULT]
    nulls = expected.agg(*(F.count_if(F.isnull(name)).alias(name) for name in RESULT)).first()
    assert nulls is not None
    known = {"dep_delay_min": 438, "max_dep_delay_min": 438, "precip_hundredths": 279}
    assert {name: count for name, count in nulls.asDict().items() if count} == known


def test_the_worst_hours(expected: DataFrame) -> None:
    rows = Flights().report(expected).toArrow().to_pylist()
    assert len(rows) == 10
    first, tenth = rows[0], rows[9]
    assert (first["carrier"], first["airline"], first["dep_delay_min"]) == (
        "DL",
        "Delta Air Lines Inc.",
        2_710,
    )
    assert first["time_hour"] == datetime(2013, 4, 19, 23, tzinfo=UTC)
    assert (tenth["carrier"], tenth["dep_delay_min"]) == ("B6", 2_029)
    assert tenth["time_hour"] == datetime(2013, 6, 29, 1, tzinfo=UTC)


def test_weather_ends_before_the_flights_do(spark: SparkSession, data: DataDirectory) -> None:
    inputs = Flights().inputs(spark, data)
    last = inputs["weather"].frame.agg(F.max("time_hour")).first()
    assert last is not None
    assert inputs["flights"].frame.where(F.col("time_hour") > F.lit(last[0])).count() == 932


def test_one_reading_is_cleaned_and_no_row_is_lost(spark: SparkSession, data: DataDirectory) -> None:
    from minishuffle.pipelines.flights import read_weather

    weather = read_weather(spark, data)
    clean = cleaned(weather)
    assert clean.count() == weather.count() == 26_115
    assert weather.where("wind_speed > 200").count() == 1 and clean.where("wind_speed > 200").count() == 0
    nulls = [frame.where("wind_speed IS NULL").count() for frame in (weather, clean)]
    assert nulls[1] == nulls[0] + 1


def test_every_split_spans_all_days_in_order_of_arrival(
    spark: SparkSession, data: DataDirectory, january: tuple[int, int]
) -> None:
    dealt = Flights(splits=3).inputs(spark, data)["flights"].dealt()
    assert dealt.rdd.getNumPartitions() == 3
    parts = dealt.groupBy(F.spark_partition_id()).agg(
        F.count("*"), F.min("time_hour").cast("string"), F.max("time_hour").cast("string")
    )
    for _, rows, first, last in parts.collect():
        assert 8_000 < rows < 10_000 and first < "2013-01-02" and last > "2013-01-31"
    order = ["arrival", "carrier", "flight", "origin", "time_hour"]
    told = dealt.where(F.spark_partition_id() == 1).select(*order).toArrow()
    keys = list(zip(*(column.to_pylist() for column in told.columns), strict=True))
    assert all(one < other for one, other in zip(keys, keys[1:], strict=False))


@pytest.mark.parametrize("hours, count", [(2, 331), (24, 0)])
def test_the_flights_that_are_late_are_those_of_a_loop_over_all(
    spark: SparkSession,
    data: DataDirectory,
    late_flights: LateFlights,
    january: tuple[int, int],
    hours: int,
    count: int,
) -> None:
    from minishuffle.pipelines.flights import read_flights

    everything = named(read_flights(spark, data))
    kept = named(not_late(read_flights(spark, data), timedelta(hours=hours)))
    late = late_flights(data.path / "flights.csv", timedelta(hours=hours))
    assert late.total() == count
    assert everything - kept == late and kept.total() == everything.total() - count


def test_data_of_another_size_are_refused(
    spark: SparkSession, data: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.pipelines.flights.WEATHER_ROWS", 26_116)
    with pytest.raises(ShuffleError, match=r"weather\.csv has 26,115 rows, not 26,116"):
        Flights().inputs(spark, data)


@pytest.mark.parametrize(
    "setting, problem",
    [
        ("out_of_order_hours=-1", "greater than or equal to 0"),
        ("out_of_order_hours=nan", "finite number"),
        ("splits=0", "greater than or equal to 1"),
    ],
)
def test_parameters_that_make_no_sense(setting: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        load_pipeline("flights").build([setting])
