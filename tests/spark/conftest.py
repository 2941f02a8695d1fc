"""What tests with Spark share: its session, one cluster, and bounded waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.local import LocalCluster
from minishuffle.remote.access import Access, find_access
from support.spark import new_jvm, own_jvm, shared_cluster, spark  # noqa: F401  (fixtures)
from support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SECONDS_MAX = 180.0
Options = dict[str, str]


def differences(one: DataFrame, other: DataFrame) -> tuple[int, int]:
    """How many rows only the one has and how many only the other, each counted as often as it is there."""
    return one.exceptAll(other).count(), other.exceptAll(one).count()


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> LocalCluster:
    return shared_cluster(request.config)


@pytest.fixture
def options(cluster: LocalCluster) -> Options:
    """With which a program of Spark finds the cluster."""
    return cluster.spark_options()


@pytest.fixture
def access(cluster: LocalCluster) -> Access:
    return find_access(cluster.spark_options())


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    return partial(until, seconds=SECONDS_MAX)


@pytest.fixture(scope="session")
def count_differences() -> Callable[..., tuple[int, int]]:
    return differences
