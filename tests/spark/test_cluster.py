"""Workers on executors of a Spark that has two of them, in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from pyspark import SparkContext

from minishuffle import replacements
from minishuffle.client import JobHandle
from minishuffle.errors import ResourceExhausted, ShuffleError, UsageError
from minishuffle.examples.ads import ads
from minishuffle.examples.wordcount import wordcount
from minishuffle.spark import cluster as clusters
from minishuffle.spark.cluster import SPECULATION_DURATION, SparkCluster
from minishuffle.spark.session import spark_session, stop_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("wider_resources"),
]

EXECUTORS = 2
SECONDS_MAX = 180.0
Until = Callable[..., Any]
Processes = Callable[[], list[psutil.Process]]


@pytest.fixture(scope="module")
def spark(own_imports: None, new_jvm: None) -> Iterator[SparkSession]:
    """With executors that are processes of their own, which the shared session has not."""
    session = spark_session("tests", master=f"local-cluster[{EXECUTORS},1,1024]")
    try:
        yield session
    finally:
        stop_spark(session)


def below(word: str) -> list[psutil.Process]:
    """Processes below this one with ``word`` in their command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def own() -> Processes:
    """Processes of the package that the test has started and that are still there."""
    before = below("minishuffle.cli")
    return lambda: [process for process in below("minishuffle.cli") if process not in before]


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def executor_of(worker: int) -> psutil.Process:
    """The executor under which the worker with that process id runs."""
    above = psutil.Process(worker).parents()
    return next(each for each in above if "CoarseGrainedExecutorBackend" in " ".join(each.cmdline()))


def attempts(handle: JobHandle) -> dict[str, tuple[int, int]]:
    """Attempt and worker of each task."""
    tasks = handle.info().tasks
    return {f"{task.name}[{task.index}]": (task.attempt, task.worker) for task in tasks}


def test_a_lost_executor_is_a_lost_worker_and_another_takes_its_place(
    spark: SparkSession, wait_until: Until
) -> None:
    """Under a join: only the tasks that were there restart, on the worker that takes the place."""
    with SparkCluster(spark, workers=EXECUTORS, slots=2) as cluster:
        processes = [psutil.Process(pid) for pid in cluster.workers.values()]
        coordinator = below(str(cluster.state_dir))
        assert len(processes) == EXECUTORS and coordinator
        words = sorted(cluster.run(wordcount(), timeout=SECONDS_MAX))
        assert words

        join = cluster.submit(ads(rate=1_000, within=0.5, sources=1), name="ads", parallelism=2 * EXECUTORS)
        wait_until(lambda: join.info().state == "running", "the join")
        placed = attempts(join)
        lost = placed[f"{join.info().tasks[-1].name}[{2 * EXECUTORS - 1}]"][1]
        before = set(cluster.workers)
        begun = time.monotonic()
        os.kill(executor_of(cluster.workers[lost]).pid, signal.SIGKILL)
        wait_until(lambda: lost not in cluster.workers, "the loss")
        wait_until(lambda: lost not in {worker for _, worker in attempts(join).values()}, "other workers")
        wait_until(lambda: join.info().state == "running", "the join again")
        wait_until(lambda: all(task.state == "running" for task in join.info().tasks), "its tasks")
        print(f"all tasks ran {time.monotonic() - begun:.1f} s after an executor was lost")
        (new,) = {worker for _, worker in attempts(join).values()} - before
        assert attempts(join) == {
            name: (2, new) if worker == lost else (1, worker) for name, (_, worker) in placed.items()
        }
        join.cancel()
        join.wait_until_over(SECONDS_MAX)
        assert sorted(cluster.run(wordcount(), timeout=SECONDS_MAX)) == words
        processes += [psutil.Process(pid) for pid in cluster.workers.values()]
        state_dir = cluster.state_dir
    wait_until(lambda: all(is_gone(process) for process in [*processes, *coordinator]), "their end")
    assert not state_dir.exists()
    assert spark.range(10).count() == 10  # The session is free for other work.


def test_a_spark_with_too_few_cores_is_told_of(
    spark: SparkSession, wait_until: Until, own: Processes
) -> None:
    with pytest.raises(ResourceExhausted) as raised:
        SparkCluster(spark, workers=EXECUTORS + 1, slots=1, startup_timeout=5.0).__enter__()
    came_up, _, sentence = str(raised.value).partition(" ")
    assert int(came_up) in range(EXECUTORS + 1)  # A busy machine has started fewer by then.
    assert sentence == (
        f"of {EXECUTORS + 1} workers came up within 5 s: give Spark {EXECUTORS + 1} free "
        "cores, or ask for fewer workers"
    )
    wait_until(lambda: not own(), "the end of all processes")
    assert spark.range(10).count() == 10


def test_why_executors_run_no_worker_is_told(
    spark: SparkSession, wait_until: Until, own: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "ORDER_FAILURES_MAX", 1)
    monkeypatch.setattr(clusters, "settings_flags", lambda _: ["--no-such-flag"])
    with pytest.raises(
        ShuffleError, match=r"^the executors run no more workers: worker 1 ended .*no-such-flag"
    ):
        SparkCluster(spark, workers=1).__enter__()
    wait_until(lambda: not own(), "the end of all processes")


def test_a_job_is_refused_once_lost_workers_are_not_replaced(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SparkCluster(spark, workers=1) as cluster:
        monkeypatch.setattr(cluster._supplier, "_broken", "no cores are left")
        with pytest.raises(ShuffleError, match="^the executors run no more workers: no cores are left$"):
            cluster.run(wordcount())


def test_speculation_that_would_end_workers_is_refused(
    spark: SparkSession, own: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = {"spark.speculation": "true", SPECULATION_DURATION: "60s"}
    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: conf)
    with pytest.raises(UsageError, match=f"leave out {SPECULATION_DURATION}"):
        SparkCluster(spark, workers=1).__enter__()
    assert not own()


@pytest.mark.parametrize("extra", [{"standby": 1}, {"restart_workers": True}])
def test_what_only_local_workers_have_is_refused(spark: SparkSession, extra: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"executors are ordered anew: leave out {min(extra)}"):
        SparkCluster(spark, workers=1, **extra)


def test_a_session_of_spark_connect_is_refused(own: Processes) -> None:
    class Connect:
        conf: dict[str, str] = {}

    session: Any = Connect()
    with pytest.raises(UsageError, match="^workers cannot be started through Spark Connect: "):
        SparkCluster(session, workers=1).__enter__()
    assert not own()


def test_a_session_that_its_user_has_stopped_is_ended_without_an_error(
    spark: SparkSession, recwarn: pytest.WarningsRecorder
) -> None:
    """The last test of this session, which its fixture ends once more."""
    spark.stop()
    stop_spark(spark)
    assert SparkContext._gateway is None and SparkContext._active_spark_context is None
    assert [str(found.message) for found in recwarn if "JVM" in str(found.message)] == []
