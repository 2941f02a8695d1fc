"""``bench recovery`` on real processes, and what its figures are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minishuffle.bench import recovery
from minishuffle.bench.recovery import Log, Numbered
from minishuffle.cli.main import cli
from minishuffle.dataflow.operators.base import TaskContext
from minishuffle.errors import ShuffleError

MILLISECOND = 1_000_000
RATE = 1_000.0
CONTEXT = TaskContext(job="j1", name="log", index=0, parallelism=1, attempt=1)


@pytest.mark.slow
@pytest.mark.parametrize(("failure", "standby"), [("process", 1), ("process", 0), ("task", 0)])
def test_only_what_failed_restarts_and_the_books_say_what_is_missing(failure: str, standby: int) -> None:
    options = ["--failure", failure, "--standby", str(standby), "--kills", "2", "--rate", "2000", "--json"]
    result = CliRunner().invoke(cli, ["bench", "recovery", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["failure"], found["standby"], found["kills"]) == (failure, standby, 2)
    assert (found["others_restarted"], found["duplicated"]) == (0, 0)
    assert found["dropped"] <= found["missing"] <= found["dropped"] + found["in_flight"]
    if failure == "task":
        assert (found["missing"], found["in_flight"]) == (found["dropped"], 0)
    assert list(found["phases_ms"]) == list(recovery.PHASES)
    assert 0 < found["outage_ms"]["p50"] <= found["outage_ms"]["p95"] <= found["outage_ms"]["max"]
    assert found["others_gap_ms"]["max"] > 0 and found["others_gap_baseline_ms"]["max"] > 0
    assert found["rss_bytes"] > 0


def test_the_source_makes_each_number_once_until_it_is_stopped(tmp_path: Path) -> None:
    source = Numbered(1e6, str(tmp_path / "stop"), str(tmp_path / "begin"))
    made: list[Any] = []
    for batch in source.read(0, 0):
        made += batch
        if len(made) > 5_000:
            (tmp_path / "stop").touch()
    assert made == [(number % recovery.KEYS, number) for number in range(len(made))]
    assert int((tmp_path / "begin").read_text()) > 0


def logged(path: Path, monkeypatch: pytest.MonkeyPatch, arrivals: list[tuple[int, list[int]]]) -> Any:
    """The log of these numbers, at these milliseconds; number n was due at n ms."""
    clock = iter([at * MILLISECOND for at, _ in arrivals])
    monkeypatch.setattr(recovery.time, "monotonic_ns", lambda: next(clock))
    sink = Log(str(path / "log.npz"))
    sink.open(CONTEXT)
    for _, numbers in arrivals:
        sink.write([(number % recovery.KEYS, number) for number in numbers])
    sink.close()
    monkeypatch.setattr(recovery, "_keyed_subtasks", lambda: np.arange(recovery.KEYS) % 2)
    monkeypatch.setattr(recovery, "PARALLELISM", 2)
    return recovery._Output(str(path / "log.npz"), 0, RATE)


def test_an_outage_lasts_until_a_record_of_after_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of subtask 1 record 9 was due before the failure at 10 ms; 15 is the first one after it."""
    output = logged(tmp_path, monkeypatch, [(9, [8]), (30, [9, 12]), (70, [15]), (80, [14, 17])])
    both = recovery._Round(10 * MILLISECOND, frozenset([0, 1]), 0)
    assert output.outage(both) == 60.0
    assert output.outage(recovery._Round(10 * MILLISECOND, frozenset([0]), 0)) == 20.0
    with pytest.raises(ShuffleError, match="keyed subtask 1 has had no output"):
        output.outage(recovery._Round(90 * MILLISECOND, frozenset([1]), 0))


def test_a_gap_is_the_longest_silence_of_each_that_did_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = logged(tmp_path, monkeypatch, [(5, [2]), (6, [3]), (20, [4]), (50, [5]), (60, [6])])
    begin, end = 0, 100 * MILLISECOND
    assert output.gaps(begin, end, frozenset()) == [40.0, 50.0], "edges of the time count"
    assert output.gaps(begin, end, frozenset([0])) == [50.0]
