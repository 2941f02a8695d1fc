"""The flights pipeline: what goes in, what the job does, and the same by Spark alone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from minishuffle.dataflow.stream import Stream
from minishuffle.errors import UsageError
from minishuffle.limits import PARALLELISM_MAX
from minishuffle.pipelines.contract import DataDirectory, Input, Pipeline
from minishuffle.pipelines.flights import data as files

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Flights", "flights"]

HOUR = timedelta(hours=1)
YEAR_HOURS = 8_760
WIND_SPEED_MAX = 200
"""Miles per hour; the one row above it is a misreading."""
LATE_MINUTES = 15
LOW_VISIBILITY_MILES = 3
WORST = 10

ARRIVAL = ("arrival", "carrier", "flight", "origin", "time_hour")
RESULT = (
    "carrier",
    "airline",
    "time_hour",
    "flights",
    "departed",
    "dep_delay_min",
    "max_dep_delay_min",
    "late15",
    "with_weather",
    "wet",
    "precip_hundredths",
    "low_visibility",
)


def flights(
    splits: int = 4, out_of_order_hours: float = 24.0, watermarks: Literal["batch", "each"] = "batch"
) -> Flights:
    """New York's flights of 2013 joined with the weather at their departure, by carrier and hour.

    ``splits`` are the parts in which the flights arrive, each from January to December;
    ``out_of_order_hours`` is how far behind the latest flight another may come before it is late.
    """
    return Flights(splits, out_of_order_hours, watermarks)


class Flights(Pipeline):
    """See :func:`flights`."""

    name = "flights"
    report_title = "the ten carriers and hours with the most minutes of delay"

    def __init__(
        self,
        splits: int = 4,
        out_of_order_hours: float = 24.0,
        watermarks: Literal["batch", "each"] = "batch",
    ) -> None:
        if not 1 <= splits <= PARALLELISM_MAX:
            raise UsageError(f"splits takes a number from 1 to {PARALLELISM_MAX}, not {splits}")
        if not 0 <= out_of_order_hours <= YEAR_HOURS:
            raise UsageError(
                f"out_of_order_hours takes hours from 0 to {YEAR_HOURS}, not {out_of_order_hours:g}"
            )
        self.splits = splits
        self.out_of_order = timedelta(hours=out_of_order_hours)
        self.watermarks = watermarks

    def inputs(self, spark: SparkSession, data: DataDirectory) -> dict[str, Input]:
        """Flights as they left, and the weather.

        Raises:
            ShuffleError: the data are not those of 2013.
        """
        flown, weather = files.read_flights(spark, data), files.read_weather(spark, data)
        files.check_rows(flown, "flights.csv", files.FLIGHTS_ROWS)
        files.check_rows(weather, "weather.csv", files.WEATHER_ROWS)
        return {
            "flights": Input(arriving(flown), ARRIVAL, self.splits),
            "weather": Input(cleaned(weather), ("time_hour", "origin")),
        }

    def job(self, streams: Mapping[str, Stream]) -> Stream:
        """Join by airport and hour, count by carrier and hour, and name the carriers."""
        flown = streams["flights"].event_time(
            "time_hour", out_of_order=self.out_of_order, watermarks=self.watermarks
        )
        weather = streams["weather"].event_time("time_hour")
        joined = flown.key_by("origin", "time_hour").join(
            weather.key_by("origin", "time_hour"), how="left", within=timedelta(0)
        )
        hours = (
            joined.map_batches(as_numbers)
            .schema(numbers_schema())
            .key_by("carrier", "time_hour")
            .window(HOUR)
            .aggregate(
                flights=("carrier", "count"),
                departed=("dep_delay", "count"),
                dep_delay_min=("dep_delay", "sum"),
                max_dep_delay_min=("dep_delay", "max"),
                late15=("late15", "sum"),
                with_weather=("matched", "count"),
                wet=("wet", "sum"),
                precip_hundredths=("precip_hundredths", "sum"),
                low_visibility=("low_visibility", "sum"),
            )
        )
        airlines = Stream.items(files.airlines_table().rename_columns(["carrier", "airline"]))
        named = hours.broadcast_join(airlines, on="carrier", how="left")
        return named.map_batches(as_result).schema(result_schema())

    def expected(self, spark: SparkSession, data: DataDirectory) -> DataFrame:
        """By Spark's batch engine, from the files."""
        from pyspark.sql import functions as F

        flown, weather = files.read_flights(spark, data), files.read_weather(spark, data)
        if self.splits == 1 and self.watermarks == "each":
            flown = not_late(flown, self.out_of_order)
        counted = (
            flown.join(weather.withColumn("matched", F.lit(1)), ["origin", "time_hour"], "left")
            .groupBy("carrier", "time_hour")
            .agg(
                F.count("*").alias("flights"),
                F.count("dep_delay").alias("departed"),
                F.sum("dep_delay").alias("dep_delay_min"),
                F.max("dep_delay").cast("bigint").alias("max_dep_delay_min"),
                F.count_if(F.col("dep_delay") >= LATE_MINUTES).alias("late15"),
                F.count("matched").alias("with_weather"),
                F.count_if(F.col("precip") > 0).alias("wet"),
                F.sum((F.col("precip") * 100).cast("bigint")).alias("precip_hundredths"),
                F.count_if(F.col("visib") < LOW_VISIBILITY_MILES).alias("low_visibility"),
            )
        )
        airlines = files.read_airlines(spark, data).withColumnRenamed("name", "airline")
        return counted.join(F.broadcast(airlines), "carrier", "left").select(*RESULT)

    def report(self, result: DataFrame) -> DataFrame:
        """The hours with the most minutes of delay."""
        columns = ("airline", "carrier", "time_hour", "flights", "dep_delay_min", "late15", "wet")
        worst = result.orderBy(result["dep_delay_min"].desc_nulls_last(), "time_hour", "carrier")
        return worst.select(*columns).limit(WORST)

    def figures(self, result: DataFrame) -> dict[str, int]:
        """Minutes of delay of the whole year."""
        row = result.agg({"dep_delay_min": "sum"}).first()
        return {"dep_delay_min": int(row[0] or 0) if row is not None else 0}


# --- Spark's side ----------------------------------------------------------------------------------


def with_arrival(flown: DataFrame) -> DataFrame:
    """With the moment at which each flight is told of: its departure, or when that was to be."""
    from pyspark.sql import functions as F

    minutes = F.col("minute") + F.coalesce("dep_delay", F.lit(0))
    return flown.withColumn("arrival", F.col("time_hour") + F.make_dt_interval(mins=minutes))


def arriving(flown: DataFrame) -> DataFrame:
    """The columns of a flight that the job is told."""
    columns = ("carrier", "flight", "tailnum", "origin", "dest", "time_hour", "arrival")
    return with_arrival(flown).selectExpr(*columns, "CAST(dep_delay AS BIGINT) AS dep_delay")


def cleaned(weather: DataFrame) -> DataFrame:
    """The columns of the weather that the job is told; no row is left out, and ``observed`` is 1."""
    from pyspark.sql import functions as F

    speed = F.when(F.col("wind_speed") <= WIND_SPEED_MAX, F.col("wind_speed"))
    observed = F.lit(1).cast("bigint").alias("observed")
    return weather.select("origin", "time_hour", speed.alias("wind_speed"), "precip", "visib", observed)


def not_late(flown: DataFrame, out_of_order: timedelta) -> DataFrame:
    """The flights that are not late when they come one by one, with a watermark after each."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    so_far = Window.orderBy(*ARRIVAL).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    latest = with_arrival(flown).withColumn("latest", F.max("time_hour").over(so_far))
    return latest.where(F.col("time_hour") >= F.col("latest") - F.lit(out_of_order))


# --- the job's side --------------------------------------------------------------------------------


def numbers_schema() -> pa.Schema:
    """What :func:`as_numbers` gives."""
    import pyarrow as pa

    keys = [("carrier", pa.string()), ("time_hour", pa.timestamp("us", "UTC"))]
    numbers = ("dep_delay", "late15", "matched", "wet", "precip_hundredths", "low_visibility")
    return pa.schema([*keys, *((name, pa.int64()) for name in numbers)])


def as_numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Flights with their weather as whole numbers to add up; 0 or 1 where a condition is counted."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def ones(condition: Any) -> Any:
        return pc.cast(pc.fill_null(condition, False), pa.int64())

    delay, precip = batch.column("dep_delay"), batch.column("precip")
    hundred = pa.scalar(100, pa.decimal128(3, 0))
    columns = [
        batch.column("carrier"),
        batch.column("time_hour"),
        delay,
        ones(pc.greater_equal(delay, LATE_MINUTES)),
        batch.column("observed"),
        ones(pc.greater(precip, pa.scalar(0, pa.decimal128(4, 2)))),
        pc.cast(pc.multiply(precip, hundred), pa.int64()),
        ones(pc.less(batch.column("visib"), LOW_VISIBILITY_MILES)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=numbers_schema())


def result_schema() -> pa.Schema:
    """Of the result: see ``RESULT``."""
    import pyarrow as pa

    kinds = {"carrier": pa.string(), "airline": pa.string(), "time_hour": pa.timestamp("us", "UTC")}
    return pa.schema([(name, kinds.get(name, pa.int64())) for name in RESULT])


def as_result(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns of the result alone, in its order."""
    return batch.select(list(RESULT))
