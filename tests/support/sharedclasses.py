"""The classes of Spark as a JVM has them in memory, in a file that all JVMs of the tests map (Java's AppCDS).

They live for seconds, and each would load ten thousand classes out of 280 archives.

This file is also the program that writes that file, unless it is there: ``make test`` runs it. Without it the
tests are slower and nothing else; a JVM of another version, or with other archives, takes no notice of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql import SparkSession

__all__ = ["SHARED_CLASSES"]

SHARED_CLASSES: Final = Path(sys.prefix) / "spark-classes.jsa"
"""Where the archives are too."""
DUMP: Final = "DUMP_CLASSES"
DUMP_SECONDS_MAX: Final = 1800.0


def use(spark: SparkSession, folder: str) -> None:
    """What tests have a session do: Python, files, joins, sums, differences, a query of a stream."""
    from pyspark.sql import functions as F

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    numbers = spark.range(0, 100, 1, 2).selectExpr("id", "id % 7 AS key", "cast(id AS string) AS text")
    numbers.mapInArrow(same, numbers.schema).write.parquet(f"{folder}/numbers")
    read = spark.read.parquet(f"{folder}/numbers")
    sums = read.groupBy("key").agg(F.sum("id").alias("sum"), F.count_distinct("text").alias("texts"))
    read.join(sums, "key").join(F.broadcast(sums), "key", "left_anti").select(*read.columns).exceptAll(
        read
    ).collect()
    read.orderBy("id").write.option("header", True).csv(f"{folder}/csv")
    spark.read.option("header", True).csv(f"{folder}/csv", inferSchema=True).cache().count()
    spark.createDataFrame([(1, "a"), (2, None)], "number INT, text STRING").toArrow()
    stream = spark.readStream.schema(read.schema).parquet(f"{folder}/numbers").writeStream.format("parquet")
    once = stream.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    once.start(f"{folder}/streamed").awaitTermination()


def dump() -> None:
    """The JVM of this program writes the file when it ends (see the options in SPARK_SUBMIT_OPTS)."""
    from minishuffle.spark import gateway
    from minishuffle.spark.session import spark_session, stop_spark

    vars(gateway)["STOP_SECONDS"] = DUMP_SECONDS_MAX  # To write it takes longer than to end.
    with tempfile.TemporaryDirectory() as folder:
        spark = spark_session("classes", master="local[2]")
        try:
            use(spark, folder)
        finally:
            stop_spark(spark)


def is_there() -> bool:
    """Whether the file was written since Spark was installed."""
    import pyspark

    jars = Path(pyspark.__file__).with_name("jars")
    return SHARED_CLASSES.exists() and SHARED_CLASSES.stat().st_mtime > jars.stat().st_mtime


def main() -> None:
    if DUMP in os.environ:
        dump()
    elif not is_there():
        print("writing the classes of Spark to .venv as its JVMs have them in memory", file=sys.stderr)
        unfinished = SHARED_CLASSES.with_suffix(f".{os.getpid()}")
        options = f"-XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit={unfinished} -Xlog:disable"
        environment = {**os.environ, DUMP: "1", "SPARK_SUBMIT_OPTS": options}
        try:
            subprocess.run([sys.executable, __file__], env=environment, check=True)
            unfinished.rename(SHARED_CLASSES)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"that failed, so each JVM takes some seconds longer: {error}", file=sys.stderr)
        finally:
            unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
