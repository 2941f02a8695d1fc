"""``bench spark``: DataFrames into a job and back, against Spark's own ``noop`` sink and Parquet from disk.

All ways are measured in one session and run, in turn and several times; the medians are printed. The rows are
the ``event`` records of ``bench keyby`` without their last column. What is written comes from Parquet files,
and what is read goes to ``noop``, in every case. ``python`` is what Spark hands over to Python at all: its
rows as Arrow batches to a function that drops them (``mapInArrow``), the bound of every sink that is written
in Python.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from minishuffle.api.stream import Table
from minishuffle.bench.records import Numbers
from minishuffle.errors import ShuffleError
from minishuffle.local import LocalCluster
from minishuffle.spark.session import spark_session, stop_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["measure_spark"]

JOB_SECONDS_MAX: Final = 600.0
SCHEMA: Final = pa.schema(
    [("user", pa.string()), ("city", pa.string()), ("ts", pa.int64()), ("amount", pa.float64())]
)
SPARK_SCHEMA: Final = "user string, city string, ts long, amount double"


def _four_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(SCHEMA.names)


def _drop(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """(In an executor.) Take every batch, give none."""
    for _ in batches:
        pass
    return iter(())


def measure_spark(records: int, warm_up: int, rounds: int, partitions: int) -> dict[str, Any]:
    """Rows per second of each way, medians over ``rounds`` after those of the warm-up.

    While the JVM compiles, the ways get faster from round to round.

    Raises:
        ShuffleError: a job did not count every row, or a read gave another number of them.
    """
    spark = spark_session("bench spark", master=f"local[{partitions}]")
    try:
        with LocalCluster(workers=2, slots=2) as cluster, tempfile.TemporaryDirectory() as directory:
            return _Bench(spark, cluster, directory, records, partitions).run(warm_up, rounds)
    finally:
        stop_spark(spark)


class _Bench:
    def __init__(
        self, spark: SparkSession, cluster: LocalCluster, directory: str, records: int, partitions: int
    ) -> None:
        self._spark = spark
        self._cluster = cluster
        self._records = records
        self._partitions = partitions
        self._parquet = f"{directory}/rows"
        self._options = cluster.spark_options()
        self._rounds = 0

    def run(self, warm_up: int, rounds: int) -> dict[str, Any]:
        self._result = self._kept()
        self._read_frame().write.parquet(self._parquet)
        self._check(self._rows().count())
        ways: dict[str, Callable[[], None]] = {
            "write": self._write,
            "noop": self._noop,
            "python": self._python,
            "read": self._read,
            "parquet_read": self._parquet_read,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(warm_up + rounds):
            for name, way in ways.items():
                began = time.monotonic()
                way()
                if number >= warm_up:
                    times[name].append(time.monotonic() - began)
        rates = {name: round(self._records / median(seconds)) for name, seconds in times.items()}
        return {
            **{f"{name}_rows_per_second": rate for name, rate in rates.items()},
            "write_to_noop": round(rates["write"] / rates["noop"], 3),
            "write_to_python": round(rates["write"] / rates["python"], 3),
            "read_to_parquet": round(rates["read"] / rates["parquet_read"], 3),
            "records": self._records,
            "rounds": rounds,
        }

    def _rows(self) -> DataFrame:
        """What both sinks are given: data as Spark has them, in files."""
        return self._spark.read.schema(SPARK_SCHEMA).parquet(self._parquet)

    def _kept(self) -> str:
        """A finished job whose result are the rows."""
        numbers = Numbers("event", "arrow", self._partitions, self._records, None)
        table = Table.source(numbers).map_batches(_four_columns, schema=SCHEMA)
        handle = self._cluster.submit(table.to_spark(), name="bench-read", parallelism=self._partitions)
        handle.wait(JOB_SECONDS_MAX)
        return handle.id

    def _write(self) -> None:
        """The job counts the rows; its end is part of the time."""
        self._rounds += 1
        name = f"bench-{self._rounds}"
        handle = self._cluster.submit(Table.from_spark(name, SCHEMA).to_count(), name=name, parallelism=2)
        writer = self._rows().write.format("minishuffle").options(**self._options)
        writer.option("stream", name).option("partitions", self._partitions).mode("append").save()
        counted = sum(result.value for result in handle.wait(JOB_SECONDS_MAX).results)
        self._check(counted)

    def _noop(self) -> None:
        self._rows().write.format("noop").mode("overwrite").save()

    def _python(self) -> None:
        dropped = self._rows().mapInArrow(_drop, SPARK_SCHEMA)
        dropped.write.format("noop").mode("overwrite").save()

    def _read_frame(self) -> DataFrame:
        frame = self._spark.read.format("minishuffle").options(**self._options)
        return frame.option("job", self._result).load()

    def _read(self) -> None:
        self._read_frame().write.format("noop").mode("overwrite").save()

    def _parquet_read(self) -> None:
        self._noop()  # the same rows from the same files

    def _check(self, counted: int) -> None:
        if counted != self._records:
            raise ShuffleError(f"{counted} rows arrived, not {self._records}")
