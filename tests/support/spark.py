"""One session of Spark, and so one JVM, and one cluster for each process of the test run.

A JVM takes seconds to start and gets faster the more it has run. Tests that need a Spark of their own say
``own_jvm``: the shared one is ended before them, and comes back with the next test that asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from minishuffle.local import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["end_spark", "new_jvm", "own_jvm", "shared_cluster", "spark"]

MASTER = "local[2,4]"
"""Two cores; a task is tried four times."""
PRELOADED = Path(__file__).with_name("preloaded")
"""Has each Python that Spark forks others from import what these need (see ``sitecustomize`` there)."""
_shared: list[SparkSession] = []
_clusters: list[LocalCluster] = []


@pytest.fixture(scope="module")
def new_jvm() -> None:
    """The module's first test that asks for a session starts one."""
    end_spark()


@pytest.fixture(scope="module")
def spark(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """The shared session; what a module caches in it goes with the module."""
    from minishuffle.spark.session import spark_session

    if not _shared:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(PRELOADED))
            _shared.append(spark_session("tests", master=MASTER))
        request.config.add_cleanup(end_spark)
    yield _shared[0]
    _shared[0].catalog.clearCache()


@pytest.fixture
def own_jvm() -> None:
    """Ends the shared session: a process has one JVM, with one master and one set of options."""
    end_spark()


def shared_cluster(config: pytest.Config) -> LocalCluster:
    """The one cluster; tests that end processes of theirs start one of their own."""
    if not _clusters:
        running = ExitStack()
        _clusters.append(running.enter_context(LocalCluster(workers=2, slots=4)))
        config.add_cleanup(running.close)
        assert _clusters[0].client.status()  # The client connects now and stays so.
    return _clusters[0]


def end_spark() -> None:
    """End the shared session if there is one."""
    from minishuffle.spark.session import stop_spark

    while _shared:
        stop_spark(_shared.pop())
