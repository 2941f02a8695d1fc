"""The one place where sessions of Spark are made."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minishuffle.errors import ShuffleError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "INSTALL",
    "Java",
    "SparkFailed",
    "activate",
    "after_interrupt",
    "checked_java",
    "find_java",
    "is_local",
    "spark_error",
    "spark_session",
    "stop_spark",
]


# --- errors ---------------------------------------------------------------------------------------
#
# The one sentence in what Spark throws: minishuffle's own if it raised it inside a task, else Spark's.


OWN: Final = re.compile(r"minishuffle\.errors\.(\w+): (.+)")
"""The last line of a Python traceback, as Spark carries it inside its own text."""
HANDSHAKE: Final = re.compile(r"minishuffle\.wire\.handshake\.HandshakeRefused: (.+)")
OTHER: Final = re.compile(r"^(?:Caused by: |: )?(?:[\w.$]*\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)
"""The last line of a Python traceback, or a line that begins a Java stack; the last is the first cause."""


class SparkFailed(ShuffleError):
    """Spark could not do what it was asked for; the cause has its stack."""

    code = 70


def spark_error(error: BaseException, what: str) -> ShuffleError:
    """``error`` in one sentence, behind ``what`` failed. The caller raises it from ``error``."""
    if isinstance(error, ShuffleError):
        return error
    text = _all_text(error)
    own = [found[-1] for found in (HANDSHAKE.findall(text), OWN.findall(text)) if found]
    if own:
        sentence = own[0] if isinstance(own[0], str) else own[0][1]
        return SparkFailed(f"{what}: {sentence.strip()}")
    found = OTHER.findall(text)
    sentence = f"{found[-1][0]}: {found[-1][1]}" if found else text.strip().splitlines()[0]
    return SparkFailed(f"{what}: {sentence.strip()[:2000]}")


def _all_text(error: BaseException) -> str:
    """What the error and those that it hides say."""
    texts = []
    seen: BaseException | None = error
    while seen is not None:
        texts.append(f"{type(seen).__module__}.{type(seen).__name__}: {seen}")
        seen = seen.__cause__ or seen.__context__
    return "\n".join(texts)


# --- java -----------------------------------------------------------------------------------------
#
# Which Java Spark would start, and whether it will do: PySpark itself says only JAVA_GATEWAY_EXITED.


VERSION_MIN: Final = 17
MODULE: Final = "jdk.incubator.vector"
"""Spark starts every JVM with ``--add-modules`` of it, which ends one that lacks it."""
INSTALL: Final = "sudo apt-get install openjdk-17-jre-headless"
SECONDS_MAX: Final = 30.0


@dataclass(frozen=True, slots=True)
class Java:
    """``lacks`` is empty if Spark can use it."""

    path: Path
    version: str
    lacks: str = ""


def find_java() -> Java | None:
    """The Java that Spark takes: ``$JAVA_HOME/bin/java``, else the first on the path; None: there is none."""
    home = os.environ.get("JAVA_HOME", "")
    found = Path(home) / "bin" / "java" if home else shutil.which("java")
    if found is None:
        return None
    path = Path(found)
    try:
        said = _output(path, "-version")
        version = re.search(r'version "([^"]+)"', said)
        if version is None:
            return Java(path, "", "it does not tell its version")
        number = version[1]
        if _major(number) < VERSION_MIN:
            return Java(path, number, f"it is older than Java {VERSION_MIN}")
        modules = _output(path, "--list-modules")
    except OSError as error:
        return Java(path, "", f"it cannot be run ({error.strerror})")
    except subprocess.TimeoutExpired:
        return Java(path, "", f"it does not answer within {SECONDS_MAX:g} s")
    if MODULE not in modules:
        return Java(path, number, f"it lacks the module {MODULE}")
    return Java(path, number)


def _output(path: Path, flag: str) -> str:
    ran = subprocess.run([path, flag], capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    return ran.stdout + ran.stderr


def _major(version: str) -> int:
    """17 of "17.0.15", 8 of "1.8.0_402"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def checked_java() -> Java:
    """A Java that Spark can use.

    Raises:
        UsageError: there is none; the text has the command that installs one.
    """
    java = find_java()
    if java is None:
        raise UsageError(f"Spark needs Java {VERSION_MIN} or newer, and there is none: run '{INSTALL}'")
    if java.lacks:
        raise UsageError(
            f"Spark cannot use the Java at {java.path}: {java.lacks}; run '{INSTALL}', and let JAVA_HOME "
            "name that one or be unset"
        )
    return java


# --- session --------------------------------------------------------------------------------------

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
        from minishuffle.spark.source import MinishuffleDataSource

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
            context.setLogLevel("OFF")  # executors that leave late are no errors
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
