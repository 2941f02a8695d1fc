"""What tests with Spark share: its session, one cluster for each module, and bounded waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.local import LocalCluster
from minishuffle.remote.access import Access, find_access
from support.spark import new_jvm, own_jvm, spark  # noqa: F401  (fixtures)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SECONDS_MAX = 60.0
Options = dict[str, str]


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS_MAX) -> Any:
    """The first true value of ``condition``."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)
    return found


def differences(one: DataFrame, other: DataFrame) -> tuple[int, int]:
    """How many rows only the one has and how many only the other, each counted as often as it is there."""
    return one.exceptAll(other).count(), other.exceptAll(one).count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=2, slots=4) as running:
        assert running.client.status()  # The client connects now and stays so.
        yield running


@pytest.fixture
def options(cluster: LocalCluster) -> Options:
    """With which a program of Spark finds the cluster."""
    return {
        "coordinator": str(cluster.client.address),
        "cluster": "local",
        "secret-file": str(cluster.state_dir / "secret"),
    }


@pytest.fixture
def access(cluster: LocalCluster) -> Access:
    secret_file = str(cluster.state_dir / "secret")
    return find_access(str(cluster.client.address), "local", None, secret_file)


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    return until


@pytest.fixture(scope="session")
def count_differences() -> Callable[..., tuple[int, int]]:
    return differences
