"""What tests of pipelines share: the session of Spark, one cluster, and a plain loop."""

import csv
import io
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partialmethod
from pathlib import Path
from typing import TextIO

import pytest

from minishuffle import Client, LocalCluster
from minishuffle.pipelines import DataDirectory, flights
from minishuffle.pipelines.flights import packaged_file
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


JANUARY_FLIGHTS = 27_004
"""Of the 336,776 of the year: what is true of a month in order is true of twelve, and a twelfth of the work.
The whole year goes from Spark through a cluster and back once in all tests, in those of ``demo``."""


def january_of(file: TextIO) -> Iterator[str]:
    """The header of a CSV file and its rows of January."""
    header = next(file)
    month = header.split(",").index("month")
    yield header
    yield from (line for line in file if line.split(",")[month] == "1")


@pytest.fixture(scope="session")
def january_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data files of the pipeline, cut down to January."""
    folder = Path(tmp_path_factory.mktemp("january"))
    with zipfile.ZipFile(packaged_file("flights.csv.zip")) as whole, whole.open("flights.csv") as file:
        rows = "".join(january_of(io.TextIOWrapper(file)))
    with zipfile.ZipFile(folder / "flights.csv.zip", "w", zipfile.ZIP_DEFLATED) as cut:
        cut.writestr("flights.csv", rows)
    with packaged_file("weather.csv").open() as weather:
        (folder / "weather.csv").write_text("".join(january_of(weather)))
    shutil.copy(packaged_file("airlines.csv"), folder)
    return folder


@pytest.fixture
def january(january_files: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Has the pipeline of flights read January alone; the rows of flights and of weather."""
    weather = (january_files / "weather.csv").read_text().count("\n") - 1
    monkeypatch.setattr(flights, "packaged_file", lambda name: january_files / name)
    monkeypatch.setattr(flights, "FLIGHTS_ROWS", JANUARY_FLIGHTS)
    monkeypatch.setattr(flights, "WEATHER_ROWS", weather)
    return JANUARY_FLIGHTS, weather


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
