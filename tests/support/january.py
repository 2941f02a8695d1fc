"""The flights of one month, in place of those of the year."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from minishuffle.pipelines import flights
from minishuffle.pipelines.flights import packaged_file

__all__ = ["january", "january_files"]

JANUARY_FLIGHTS = 27_004
"""Of the 336,776 of the year: what is true of a month in order is true of twelve, and a twelfth of the work.
The whole year goes from Spark through a cluster and back in the soak, in the test of ``demo``."""


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
