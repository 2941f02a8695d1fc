"""The one place where sessions of Spark are made."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minishuffle.errors import UsageError
from minishuffle.spark.errors import spark_error
from minishuffle.spark.java import checked_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["activate", "after_interrupt", "is_local", "spark_session", "stop_spark"]

JAVA_OPTIONS: Final = (
    "-Duser.timezone=UTC -XX:+UseParallelGC "
    # Spark's own accesses to Arrow's memory are within bounds; checking each took about a tenth of a write.
    "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
)


def is_local(master: str) -> bool:
    """Whether driver and executors are one process here."""
    return master == "local" or master.startswith("local[")


def spark_session(
    app: str,
    *,
    master: str = "local[*]",
    spark_ui: bool = False,
    spark_python: str | None = None,
    options: Mapping[str, str] | None = None,
    debug: bool = False,
) -> SparkSession:
    """A session with the data source ``minishuffle``; :func:`stop_spark` ends it.

    Args:
        spark_python: the executors' Python; by default this one.
        options: further settings of Spark; they win.
        debug: log what tasks and queries fail with, stack and all, beside raising it.

    Raises:
        UsageError: no Spark, no Java that will do, or a Python on the executors that will not.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise UsageError("Spark is not installed: run pip install 'minishuffle[spark]'")
    java = checked_java()
    os.environ.setdefault("JAVA_HOME", str(java.path.resolve().parent.parent))
    python = spark_python or sys.executable
    os.environ["PYSPARK_PYTHON"] = python
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if is_local(master) or master.startswith("local-cluster["):
        # Before the JVM starts: it looks its own name up otherwise, which may need a network.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    from minishuffle.spark.gateway import end_jvm, own_interrupts, quiet_accumulators, start_jvm

    settings: dict[str, Any] = {**_settings(master, spark_ui, debug), **(options or {})}
    try:
        start_jvm(settings)
        with own_interrupts():
            builder = SparkSession.builder.master(master).appName(app).config(map=settings)
            spark = builder.getOrCreate()
    except Exception as error:
        failed = spark_error(error, f"Spark does not start on {master}")  # for which the JVM is asked
        end_jvm()
        raise failed from error
    except BaseException:
        end_jvm()
        raise
    try:
        spark.sparkContext.setLogLevel("ERROR")
        quiet_accumulators(spark.sparkContext)
        _log_queries(debug)
        if not is_local(master):
            _probe(spark, python)
        from minishuffle.spark.datasource import MinishuffleDataSource

        spark.dataSource.register(MinishuffleDataSource)
    except BaseException:
        stop_spark(spark)
        raise
    return spark


def _settings(master: str, spark_ui: bool, debug: bool) -> dict[str, str]:
    java_options = f"-Dlog4j2.configurationFile={_log_settings(debug)} {JAVA_OPTIONS}"
    settings = {
        "spark.ui.enabled": str(spark_ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # With a limit Spark adds up the bytes of the whole batch for every row: half the time of a write.
        # A batch has at most spark.sql.execution.arrow.maxRecordsPerBatch rows, 10,000 unless it is set.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
        "spark.driver.extraJavaOptions": java_options,
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "minishuffle-spark-warehouse"),
    }
    if is_local(master) or master.startswith("local-cluster["):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return settings


def _log_settings(debug: bool) -> str:
    """The file that keeps Spark quiet from its first line on."""
    name = "log4j2-debug.properties" if debug else "log4j2.properties"
    return Path(__file__).with_name(name).as_uri()


def _log_queries(debug: bool) -> None:
    """Have PySpark log what is wrong with a query, as JSON with the stack of Java, or only raise it."""
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.WARNING if debug else logging.CRITICAL)


def _python_there(_: Any) -> list[str]:
    """(In an executor.) The version of Python, and of minishuffle if it is there."""
    from importlib import metadata

    return [".".join(platform.python_version_tuple()[:2]), metadata.version("minishuffle")]


def _probe(spark: SparkSession, python: str) -> None:
    """One task that shows whether the executors' Python will do.

    Raises:
        UsageError: another minor version, or no minishuffle there.
    """
    try:
        found = spark.sparkContext.parallelize([0], 1).mapPartitions(_python_there).collect()
    except Exception as error:
        raise spark_error(
            error,
            f"the executors cannot run minishuffle with {python}: install it there, or name another Python "
            "with --spark-python",
        ) from error
    here = ".".join(platform.python_version_tuple()[:2])
    if found[0] != here:
        raise UsageError(
            f"the executors run Python {found[0]} ({python}) and this program {here}, and functions are "
            "pickled between them: name another one with --spark-python"
        )


def activate(spark: SparkSession) -> None:
    """Make the session known to this thread, as threads other than the main one need it: Spark looks for
    data sources written in Python in the active session only."""
    jvm = spark._jvm
    assert jvm is not None
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)


def after_interrupt(spark: SparkSession) -> None:
    """Make the session fit for use in this thread after Ctrl-C broke off what was asked of it."""
    from minishuffle.spark.gateway import renew_connection

    renew_connection()
    activate(spark)


def stop_spark(spark: SparkSession) -> None:
    """End the session and its JVM; nothing of it runs on. Either may have ended before."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    from minishuffle.spark.gateway import end_jvm, renew_connection

    context = spark.sparkContext
    try:
        renew_connection()  # Ctrl-C may be what brought us here.
        if context._jsc is not None:  # Else somebody has stopped it.
            context.setLogLevel("OFF")  # executors that say goodbye late are no errors
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # PySpark's, of a JVM that ends meanwhile
            spark.stop()
    except (Py4JError, OSError):
        # The JVM is gone or on its way, as when SIGTERM came to it too; what the caller ends with says more.
        _forget(spark)
    finally:
        end_jvm()


def _forget(spark: SparkSession) -> None:
    """What ``spark.stop()`` leaves in this process when there is no JVM to ask: else a new session would be
    the old one."""
    from pyspark.sql import SparkSession

    context: Any = spark.sparkContext
    context._jsc = None
    context.stop()
    SparkSession._instantiatedSession = SparkSession._activeSession = None
