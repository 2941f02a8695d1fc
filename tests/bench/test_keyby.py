"""``bench keyby`` on real processes: what it says, and that its verdict can fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from minishuffle.api.stream import Stream
from minishuffle.bench import keyby
from minishuffle.bench.records import TS_BEGIN, Checker
from minishuffle.cli.main import cli
from minishuffle.local import LocalCluster

pytestmark = pytest.mark.slow
RECORDS = 50_000


def run(*options: str) -> Any:
    return CliRunner().invoke(cli, ["bench", "keyby", "--records", str(RECORDS), *options])


@pytest.mark.parametrize(
    ("format", "record", "emit"),
    [
        ("arrow", "int", "batch"),
        ("arrow", "event", "each"),
        ("rows", "int", "batch"),
        ("rows", "event", "each"),
    ],
)
def test_a_run_is_verified(format: str, record: str, emit: str) -> None:
    result = run("--format", format, "--record", record, "--emit", emit, "--workers", "2", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["verified"] is True
    assert figures["records"] == RECORDS
    assert figures["records_per_second"] == pytest.approx(RECORDS / figures["seconds"], rel=0.05)
    assert 0.4 < figures["remote_fraction"] < 0.6
    assert figures["remote_payload_bytes_per_record"] >= 8
    assert 0 < figures["network_bytes"]["peak"] <= figures["network_bytes"]["cap"]
    assert figures["cpu_seconds"] > 0
    assert {sample["worker"] for sample in figures["rss_bytes"]} <= {1, 2}


def test_there_are_as_many_keys_as_asked_for() -> None:
    """Each in one output of the last batch at the most."""
    figures = json.loads(run("--keys", "7", "--record", "event", "--json").stdout)
    assert figures["verified"] is True and (figures["keys"], figures["guarantee"]) == (7, "loss")


def test_buffers_leave_as_the_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []
    submit = LocalCluster.submit

    def remember(cluster: LocalCluster, stream: Stream, **options: Any) -> Any:
        submitted.append(options["settings"].buffer_timeout)
        return submit(cluster, stream, **options)

    monkeypatch.setattr(LocalCluster, "submit", remember)
    assert json.loads(run("--buffer-timeout", "0.1", "--json").stdout)["flush"] == 0.1
    assert submitted == [0.1]


def _spoilt(source: Any, spoil: Any) -> Stream:
    keyed = Stream.source(source).key_by(lambda row: row[0])
    return keyed.fold(float, lambda total, row: total + spoil(row), "each").to(Checker("event"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: row[3] + (0.25 if row[2] == TS_BEGIN + 7 else 0.0),
        lambda row: 0.0 if row[2] == TS_BEGIN + 9_999 else row[3],
    ],
    ids=["a value is off by one", "a value is missing"],
)
def test_the_verdict_can_fail(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    monkeypatch.setattr(keyby, "keyby_stream", lambda source, emit: _spoilt(source, spoil))
    result = run("--format", "rows", "--record", "event", "--emit", "each")
    assert result.exit_code == 1
    assert "every key's sum checked" in result.stdout
    assert "NO" in result.stdout
    assert "the sums differ from the independent computation" in result.output


def test_a_lost_or_doubled_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(source: Any, emit: Any) -> Stream:
        def twice(row: Any) -> list[Any]:
            # Its amount is 0.25 * value; the copy adds nothing, so that only the count can tell.
            return [row, (*row[:3], 0.0, row[4])] if row[2] == TS_BEGIN + 7 else [row]

        keyed = Stream.source(source).flat_map(twice).key_by(lambda row: row[0])
        return keyed.fold(float, lambda total, row: total + row[3], "each").to(Checker("event"))

    monkeypatch.setattr(keyby, "keyby_stream", stream)
    result = run("--format", "rows", "--record", "event", "--emit", "each")
    assert result.exit_code == 1
    assert "the sums differ" in result.output


def test_records_and_seconds_are_one_too_many() -> None:
    result = run("--seconds", "1")
    assert result.exit_code == 2
    assert "give --records or --seconds, not both" in result.output
