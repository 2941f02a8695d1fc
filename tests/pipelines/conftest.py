"""What tests of pipelines share: the session of Spark, one cluster, and a plain loop."""

import csv
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partialmethod
from pathlib import Path

import pytest

from minishuffle import Client, LocalCluster
from minishuffle.pipelines import DataDirectory
from support.january import january, january_files  # noqa: F401  (fixtures)
from support.settings import NO_RESTARTS
from support.spark import shared_cluster, spark  # noqa: F401  (fixtures)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> LocalCluster:
    return shared_cluster(request.config)


@pytest.fixture(scope="module")
def options(cluster: LocalCluster) -> dict[str, str]:
    """By which Spark finds the cluster."""
    return cluster.spark_options()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataDirectory:
    return DataDirectory(Path(tmp_path_factory.mktemp("data")))


def late_in_order(path: Path, out_of_order: timedelta) -> Counter[tuple[str, ...]]:
    """Carrier, number, airport and hour of the flights that are late: one flight after the other."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    arrivals = []
    for row in rows:
        hour = datetime.strptime(row["time_hour"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        delay = 0 if row["dep_delay"] == "NA" else int(row["dep_delay"])
        arrival = hour + timedelta(minutes=int(row["minute"]) + delay)
        arrivals.append((arrival, row["carrier"], int(row["flight"]), row["origin"], hour, row["time_hour"]))
    late: Counter[tuple[str, ...]] = Counter()
    latest = datetime.min.replace(tzinfo=UTC) + timedelta(days=2)
    for _, carrier, flight, origin, hour, text in sorted(arrivals):
        if hour <= latest - out_of_order - timedelta(microseconds=1):
            late[carrier, str(flight), origin, text] += 1
        latest = max(latest, hour)
    return late


@pytest.fixture(scope="session")
def late_flights() -> Callable[[Path, timedelta], Counter[tuple[str, ...]]]:
    return late_in_order


@pytest.fixture
def no_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure ends a pipeline's job."""
    monkeypatch.setattr(Client, "submit", partialmethod(Client.submit, settings=NO_RESTARTS))
