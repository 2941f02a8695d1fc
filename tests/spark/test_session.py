"""Sessions of Spark: what they are like, how they end, and what is said when there can be none."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark import SparkContext

from minishuffle.errors import UsageError
from minishuffle.spark.session import SparkFailed, spark_session, stop_spark

pytestmark = [pytest.mark.extra, pytest.mark.timeout(600), pytest.mark.usefixtures("own_jvm")]

SECONDS_MAX = 180.0
Until = Callable[..., Any]
PROGRAM = """
import time
from pathlib import Path

from pyspark.errors import AnalysisException
from minishuffle.spark.session import spark_session, stop_spark

started = Path("{started}")

def wait(batches):
    started.touch()
    for batch in batches:
        time.sleep(600)
        yield batch

try:
    spark = spark_session("interrupted", master="local[1]")
    try:
        print(spark.sql("select current_timezone() zone").first().zone)
        print(spark.conf.get("spark.ui.enabled"), spark.conf.get("spark.driver.host"), flush=True)
        print(spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch"), flush=True)
        for wrong in (lambda: spark.sql("select absent"), lambda: spark.range(1).select("absent")):
            try:
                wrong()
            except AnalysisException:
                print("refused", flush=True)
        spark.range(4).mapInArrow(wait, "id long").collect()
    finally:
        stop_spark(spark)
except KeyboardInterrupt:
    print("interrupted")
"""


def family_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def java_in(process: subprocess.Popen[str]) -> bool:
    """Whether the JVM of Spark is being started; others only say their version."""
    for child in family_of(process):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "org.apache.spark.deploy.SparkSubmit" in child.cmdline():
                return True
    return False


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """A program with a session; the file ``started`` is there once its task runs."""
    code = PROGRAM.format(started=tmp_path / "started")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while Java starts", "in a job"])
def test_ctrl_c_ends_everything_and_says_nothing_of_stacks(
    program: subprocess.Popen[str], tmp_path: Path, wait_until: Until, moment: str
) -> None:
    if moment == "in a job":
        wait_until((tmp_path / "started").exists, "the task")
    else:
        wait_until(lambda: java_in(program), "Java")
    family = family_of(program)
    assert family
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=SECONDS_MAX)
    settings = "UTC\nfalse 127.0.0.1\n2147483647\nrefused\nrefused\n" if moment == "in a job" else ""
    assert (program.returncode, out, err) == (0, f"{settings}interrupted\n", "")
    assert psutil.wait_procs(family, SECONDS_MAX)[1] == []


def test_spark_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'minishuffle\[spark\]'"):
        spark_session("absent")


@pytest.mark.slow
def test_a_master_that_is_none_is_named_and_leaves_no_java() -> None:
    with pytest.raises(SparkFailed, match=r"Spark does not start on nowhere: .*nowhere"):
        spark_session("nowhere", master="nowhere")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning")  # PySpark's own pipe
def test_what_java_said_last_is_told_if_it_does_not_start() -> None:
    with pytest.raises(UsageError, match=r"Java ended before Spark had started: .*nonsense"):
        spark_session("unable", options={"spark.driver.memory": "nonsense"})


@pytest.mark.slow
def test_a_session_whose_java_is_gone_is_ended_and_the_next_one_names_a_python_that_executors_lack(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """That the next one comes so far says that it has another JVM."""
    first = spark_session("ended", master="local[1]")
    jvm = SparkContext._gateway.proc  # type: ignore[union-attr]
    jvm.terminate()
    jvm.wait(SECONDS_MAX)
    stop_spark(first)
    assert SparkContext._gateway is None and SparkContext._active_spark_context is None
    with pytest.raises(SparkFailed, match=r"cannot run minishuffle with /absent/python: .*--spark-python"):
        spark_session("absent", master="local-cluster[1,1,1024]", spark_python="/absent/python")
    assert [str(found.message) for found in recwarn if "JVM" in str(found.message)] == []


def test_what_is_loaded_is_passed_over_by_collections() -> None:
    """In a process of its own: what is frozen here would stay so."""
    program = (
        "import gc, sys; from minishuffle.spark.source import settle_memory; gc.collect(); "
        "before = len(gc.get_objects()); settle_memory(); frozen = gc.get_freeze_count(); settle_memory(); "
        "assert gc.get_freeze_count() == frozen > before // 2 > len(gc.get_objects()); "
        "assert 'wave' not in sys.modules; import wave; settle_memory(); "
        "assert gc.get_freeze_count() > frozen"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=SECONDS_MAX)
