"""``minishuffle drill``: each check on a log that was made up, all kinds of failures on real processes."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from click.testing import CliRunner

from minishuffle.bench import drill
from minishuffle.bench.drill import Findings, run_drill
from minishuffle.bench.failures import FailureKind, FailureRound
from minishuffle.cli.main import cli
from minishuffle.errors import ShuffleError

SECOND = 1_000_000_000
KINDS: list[FailureKind] = ["task", "process", "link", "stop"]
TIMES = 25 if os.environ.get("MINISHUFFLE_SOAK") == "1" else 5
"""Of each kind."""
BOOKS = {"missing": 10, "dropped": 10, "in_flight": 0, "duplicated": 0}


class Output:
    """What a collector saw: gaps of 40 ms, but for ``loud`` (beginnings of windows, in seconds)."""

    def __init__(self, loud: dict[int, float], silent: int = -1) -> None:
        self._loud = loud
        self._silent = silent

    def gaps(self, begin: int, end: int, without: frozenset[int]) -> list[float]:
        return [40.0, self._loud.get(begin // SECOND, 40.0)]

    def outage(self, at: int, victims: frozenset[int]) -> float:
        if self._silent in victims:
            raise ShuffleError(f"keyed subtask {self._silent} has had no output since it failed")
        return 12.0


def rounds(count: int, **fields: Any) -> Findings:
    """Failures of subtask n at 10, 20, … s."""
    made = [
        FailureRound(
            **{
                "kind": "task",
                "at": 10 * number * SECOND,
                "victims": frozenset([number]),
                "whole_at": 10 * number * SECOND + 1,
                "restarted": 0,
                **fields,
            }
        )
        for number in range(1, count + 1)
    ]
    return Findings(rounds=made)


def look(findings: Findings, output: Any) -> Findings:
    findings.look(output, 1.0)
    return findings


def test_all_is_well() -> None:
    findings = look(rounds(3), Output({}))
    findings.balance({"task"}, BOOKS)
    assert (findings.failed, findings.recovered, findings.gap_limit) == ([], 3, 290.0)


def test_a_silence_is_held_against_the_quiet_times_of_the_same_run() -> None:
    findings = look(rounds(3), Output({9: 100.0, 20: 340.0, 30: 360.0}))
    assert findings.failed == ["failure 3 (task): another subtask was silent for 360 ms, the limit is 350 ms"]
    assert findings.recovered == 2


def test_an_output_that_does_not_come_back_and_others_that_restart_fail_the_drill() -> None:
    findings = look(rounds(2, restarted=1), Output({}, silent=2))
    assert findings.failed == [
        "failure 1 (task): 1 attempts of other tasks were replaced",
        "failure 2 (task): keyed subtask 2 has had no output since it failed",
        "failure 2 (task): 1 attempts of other tasks were replaced",
    ]
    assert findings.recovered == 0


@pytest.mark.parametrize(
    ("kinds", "change", "fails"),
    [
        ({"task"}, {}, False),
        ({"link"}, {"missing": 11, "in_flight": 5}, True),
        ({"link", "process"}, {"missing": 11, "in_flight": 5}, False),
        ({"stop"}, {"missing": 16, "in_flight": 5}, True),
        ({"process"}, {"missing": 9, "in_flight": 5}, True),
        ({"task"}, {"duplicated": 1}, True),
    ],
)
def test_the_books_balance(kinds: set[FailureKind], change: dict[str, int], fails: bool) -> None:
    findings = Findings()
    findings.balance(kinds, BOOKS | change)
    assert bool(findings.failed) == fails


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(3_000)
def test_a_job_takes_failures_of_every_kind() -> None:
    found = run_drill(KINDS * TIMES, every=0.2, seed=1)
    assert found["failed_checks"] == [], found
    assert (found["kind"], found["times"], found["recovered"]) == ("all", 4 * TIMES, 4 * TIMES)
    assert (found["others_restarted"], found["duplicated"]) == (0, 0)
    assert 0 < found["dropped"] <= found["missing"] <= found["dropped"] + found["in_flight"]


@pytest.mark.parametrize("failed", [[], ["books: 3 records came twice"]])
def test_the_command_says_which_check_failed(failed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(kinds: list[str], *, every: float, seed: int) -> dict[str, Any]:
        asked.append((kinds, every, seed))
        times = {"p50": 1.0, "max": 2.0}
        spreads = dict.fromkeys(("outage_ms", "others_gap_ms", "others_gap_baseline_ms"), times)
        return {"kind": "link", "times": 3, "recovered": 3, **spreads, **BOOKS, "failed_checks": failed}

    monkeypatch.setattr(drill, "run_drill", run)
    options = ["drill", "--kind", "link", "--times", "3", "--every", "0.5", "--seed", "7"]
    shown = CliRunner().invoke(cli, options)
    assert shown.exit_code == bool(failed)
    assert ("FAILED books: 3 records came twice" in shown.output) == bool(failed)
    assert "link: 3 of 3 recovered" in shown.output
    assert json.loads(CliRunner().invoke(cli, [*options, "--json"]).stdout)["failed_checks"] == failed
    assert asked == [(["link"] * 3, 0.5, 7)] * 2
