"""``minishuffle drill``: each check on a log that was made up, all kinds of failures on real processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minishuffle.bench import drill, failures, numbered
from minishuffle.bench.drill import (
    Drill,
    Findings,
    GuaranteedDrill,
    Tally,
    books_problems,
    final_problems,
    guarantee_problems,
    lost_in_sockets,
    run_drill,
)
from minishuffle.bench.failures import FailureKind, FailureRound
from minishuffle.bench.numbered import (
    ENTRY,
    KEYS,
    PARALLELISM,
    Gap,
    LogReader,
    NumberedOutput,
    keyed_subtasks,
)
from minishuffle.cli.main import cli
from minishuffle.config import ClusterSettings
from minishuffle.errors import ShuffleError

SECOND = 1_000_000_000
KINDS: list[FailureKind] = ["task", "process", "link", "stop"]
if os.geteuid() == 0:
    KINDS.append("host")
TIMES = 1
"""Of each kind; 'make soak' has a hundred."""
SLOW_SECONDS_MAX = 300.0
"""For whatever takes less than a second on a machine that is not slow."""


class Output:
    """What a collector saw: silences of 40 ms, but for ``loud`` (by beginning, in seconds)."""

    def __init__(self, loud: dict[int, float], silent: int = -1) -> None:
        self._loud = loud
        self._silent = silent

    def gaps(self, begin: int, end: int, without: frozenset[int]) -> list[Gap]:
        longest = self._loud.get(begin // SECOND, 40.0)
        return [Gap(40.0, begin, 6), Gap(longest, begin + 5_000_000, 7)]

    def outage(self, at: int, victims: frozenset[int]) -> float:
        if self._silent in victims:
            raise ShuffleError(f"keyed subtask {self._silent} has had no output since it failed")
        return 12.0


def findings(count: int, output: Output, wrong: Sequence[str] = (), **fields: Any) -> Findings:
    """After failures of subtask n at 10, 20, … s, each behind a second without one."""
    found = Findings()
    for number in range(1, count + 1):
        at = 10 * number * SECOND
        made = {"kind": "task", "victims": frozenset([number]), "whole_at": at + 1, "restarted": 0, **fields}
        found.stay_quiet(output, at - SECOND, at)
        found.look(FailureRound(at=at, **made), output, at + SECOND, wrong)
    return found


def test_all_is_well() -> None:
    found = findings(3, Output({}))
    assert (found.failed, found.recovered, found.gap_limit) == ([], 3, 290.0)


def test_a_silence_is_held_against_the_quiet_times_of_the_same_run() -> None:
    found = findings(3, Output({9: 100.0, 20: 340.0, 30: 360.0}))
    assert found.failed == [
        "failure 3 (task): another subtask (7) was silent for 360 ms, from 5 ms after the failure on; the "
        "limit is 350 ms"
    ]
    assert found.recovered == 2


def test_each_failure_has_a_line_at_once() -> None:
    lines: list[str] = []
    found = Findings(progress=lines.append)
    found.stay_quiet(Output({}), 0, SECOND)
    for restarted in (0, 1):
        found.look(FailureRound("link", SECOND, frozenset(), SECOND, restarted), Output({}), 2 * SECOND, [])
    assert lines == [
        "failure 1 (link): recovered, others were silent for 40 ms",
        "failure 2 (link): 1 attempts of other tasks were replaced",
    ]


def test_quiet_times_behind_a_failure_excuse_nothing() -> None:
    found = findings(2, Output({10: 340.0, 19: 100.0}))
    assert [text[:16] for text in found.failed] == ["failure 1 (task)"]


def test_an_output_that_does_not_come_back_and_others_that_restart_fail_the_drill() -> None:
    found = findings(2, Output({}, silent=2), restarted=1)
    assert found.failed == [
        "failure 1 (task): 1 attempts of other tasks were replaced",
        "failure 2 (task): keyed subtask 2 has had no output since it failed",
        "failure 2 (task): 1 attempts of other tasks were replaced",
    ]
    assert found.recovered == 0


def test_books_that_do_not_balance_fail_the_drill() -> None:
    found = findings(1, Output({}), ["books: 3 records came twice"])
    assert (found.failed, found.recovered) == (["failure 1 (task): books: 3 records came twice"], 0)


BEFORE = Tally(missing=100, dropped=90, in_flight=15)


@pytest.mark.parametrize(
    ("kind", "after", "problem"),
    [
        ("task", Tally(110, 100, 15), ""),
        ("link", Tally(100, 90, 15), ""),
        ("task", Tally(111, 100, 15, in_sockets=1), ""),
        ("task", Tally(371, 110, 15, in_sockets=251), "251 records more are missing than were counted"),
        ("task", Tally(109, 100, 15), "9 records are missing, 10 were counted as dropped and 0 as in flight"),
        ("link", Tally(112, 100, 15, in_sockets=2), ""),
        (
            "link",
            Tally(371, 110, 15, in_sockets=251),
            "251 records more are missing than were counted, and 1 conn",
        ),
        ("link", Tally(109, 100, 15), "9 records are missing, 10 were counted as dropped and 0 as in flight"),
        ("link", Tally(110, 100, 16), ""),
        ("process", Tally(150, 120, 30), ""),
        ("process", Tally(151, 120, 30), "151 records are missing so far, 120 were dropped and at most 30"),
        ("stop", Tally(119, 120, 30), "119 records are missing so far, 120 were dropped"),
        ("host", Tally(200, 100, 265), ""),
        (
            "host",
            Tally(200, 100, 266),
            "251 records were in flight, more than 0.5 s of what a worker reads",
        ),
        ("stop", Tally(200, 100, 266), ""),
        ("process", Tally(100, 89, 20), "the count of dropped records fell by 1"),
        ("process", Tally(100, 90, 15, duplicated=2), "2 records came twice"),
        ("process", Tally(100, 90, 15, disordered=1), "1 records came behind a later one of their key"),
    ],
)
def test_the_books_balance_after_each_failure(kind: FailureKind, after: Tally, problem: str) -> None:
    """A worker runs two of the eight keyed subtasks: it reads 500 records per second."""
    problems = books_problems(FailureRound(kind, 0, frozenset([1, 5]), 0, 0), BEFORE, after)
    assert len(problems) == bool(problem)
    assert problem in "".join(problems)


@pytest.mark.parametrize(
    ("kind", "suspicions", "lost"),
    [("link", 0, 12), ("task", 0, 12), ("process", 0, 0), ("stop", 0, 0), ("stop", 1, 5)],
)
def test_what_was_in_sockets_is_what_nobody_counted(kind: FailureKind, suspicions: int, lost: int) -> None:
    """Whatever room the bound of what is in flight leaves, which may shrink later. It is 7 more now."""
    each = FailureRound(kind, 0, frozenset([1]), 0, 0, suspicions)
    assert lost_in_sockets(each, BEFORE, Tally(missing=132, dropped=110, in_flight=22)) == lost


@pytest.mark.parametrize(("dropped", "late", "problems"), [(113, 3, 0), (114, 4, 0), (115, 4, 2)])
def test_what_was_in_sockets_may_be_counted_at_the_next_failure(
    dropped: int, late: int, problems: int
) -> None:
    """4 records were: rows on their way to a task that raised are counted once its siblings have ended."""
    each = FailureRound("task", 0, frozenset([1]), 0, 0)
    before = Tally(missing=104, dropped=100, in_sockets=4)
    after = Tally(missing=114, dropped=dropped)
    found = lost_in_sockets(each, before, after)
    assert found == -late
    assert len(books_problems(each, before, replace(after, in_sockets=4 + found))) == problems


def test_a_suspicion_among_those_that_live_breaks_a_connection_too() -> None:
    """What it had in its sockets is counted at the end."""
    each = FailureRound("stop", 0, frozenset([1, 5]), 0, 0, suspicions=1)
    after = Tally(missing=120, dropped=100, in_flight=15, in_sockets=5)
    assert books_problems(each, BEFORE, after) == []
    each.suspicions = 0
    assert books_problems(each, BEFORE, after) == [
        "books: 5 records more are missing than were counted, and 0 connections broke between workers that "
        "live"
    ]


@pytest.mark.parametrize(
    ("kinds", "books", "problems"),
    [
        (["link", "task"], Tally(10, 10), 0),
        (["link", "task"], Tally(11, 10), 1),
        (["link", "task"], Tally(10, 10, in_flight=1), 1),
        (["link", "process"], Tally(11, 10, 1), 0),
        (["link", "process"], Tally(12, 10, 1), 1),
        (["host"], Tally(9, 10, 1), 1),
        (["task"], Tally(10, 10, disordered=1), 1),
    ],
)
def test_at_the_end_all_is_counted_that_no_dead_process_had(
    kinds: list[FailureKind], books: Tally, problems: int
) -> None:
    assert len(final_problems(kinds, books)) == problems


@pytest.mark.parametrize(
    ("books", "problem"),
    [
        (Tally(duplicated=9), ""),
        (Tally(missing=2), "2 records are missing, although"),
        (Tally(dropped=1), "1 records were counted as dropped and 0 as in flight"),
        (Tally(in_flight=4), "0 records were counted as dropped and 4 as in flight"),
    ],
)
def test_a_guarantee_lets_records_come_again_and_no_more(books: Tally, problem: str) -> None:
    found = guarantee_problems(books)
    assert len(found) == bool(problem) and problem in "".join(found)


def drill_of(path: Path, monkeypatch: pytest.MonkeyPatch, *, lost: int, dropped: int) -> Findings:
    """One failure of a task, on a log that was made up: ``lost`` records are not in it."""
    monkeypatch.setattr(drill, "BOOKS_SECONDS_MAX", 0.01)
    begin = time.monotonic_ns() - SECOND
    numbers = np.arange(lost, 40_000)
    log = np.empty(len(numbers), ENTRY)
    log["number"], log["time"] = numbers, begin + numbers * 1_000_000
    log.tofile(path / "log")
    each = FailureRound("task", begin + SECOND, frozenset([3]), begin + SECOND, 0)
    info = SimpleNamespace(rows_dropped={"queue_discarded": dropped}, rows_in_flight=0)
    run: Any = SimpleNamespace(
        wait_for_reports=lambda at: info,
        handle=SimpleNamespace(info=lambda: info),
        output=lambda stalls: NumberedOutput(LogReader(str(path / "log")).read_on(), begin, drill.RATE),
    )
    stalls: Any = SimpleNamespace(spans=lambda: [])
    made = Drill(run, 0.0, stalls=stalls)
    made.look(each)
    return made.findings


def test_what_is_missing_comes_from_the_log_and_what_is_counted_from_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drill_of(tmp_path, monkeypatch, lost=0, dropped=0)
    assert (found.failed, found.recovered) == ([], 1)
    found = drill_of(tmp_path, monkeypatch, lost=300, dropped=0)
    assert found.recovered == 0
    assert "300 records more are missing than were counted" in found.failed[0]
    found = drill_of(tmp_path, monkeypatch, lost=0, dropped=4)
    assert "0 records are missing, 4 were counted as dropped" in found.failed[0]


def test_what_catches_up_is_waited_for_as_long_as_more_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [0.0]

    def sleep(seconds: float) -> None:
        at[0] += seconds

    monkeypatch.setattr(drill, "time", SimpleNamespace(monotonic=lambda: at[0], sleep=sleep))
    info = SimpleNamespace(rows_dropped={}, rows_in_flight=0)
    each: Any = None

    def wait(missing: Callable[[float], int]) -> list[str]:
        output: Any = SimpleNamespace(missing=lambda count: missing(at[0]), duplicated=0, disordered=0)
        run: Any = SimpleNamespace(handle=SimpleNamespace(info=lambda: info), output=lambda stalls: output)
        stalls: Any = SimpleNamespace(spans=lambda: [])
        return GuaranteedDrill(run, 0.0, stalls=stalls)._balance(each, output, 100)

    assert wait(lambda now: max(0, int(20 - now))) == []
    assert at[0] == pytest.approx(19, abs=2 * drill.POLL_SECONDS)
    assert "7 records are missing" in wait(lambda now: max(7, int(40 - now)))[0]


def test_the_made_up_log_has_output_of_all_subtasks() -> None:
    assert set(keyed_subtasks(PARALLELISM)[np.arange(KEYS)]) == set(range(PARALLELISM))


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_takes_failures_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    # As users have it: what is on its way to a host that has gone is bounded by it.
    default = ClusterSettings.model_fields["suspect_after"].default
    monkeypatch.setenv("MINISHUFFLE_SUSPECT_AFTER", str(default))
    monkeypatch.setattr(drill, "RATE", 500.0)
    # How soon all is well and how long others are silent is for the command, on a machine of its own.
    monkeypatch.setattr(failures, "RECOVERY_SECONDS_MAX", SLOW_SECONDS_MAX)
    monkeypatch.setattr(numbered, "RECOVERY_SECONDS_MAX", SLOW_SECONDS_MAX)
    monkeypatch.setattr(drill, "BOOKS_SECONDS_MAX", SLOW_SECONDS_MAX)
    monkeypatch.setattr(drill, "GAP_ALLOWANCE_MS", 1000 * SLOW_SECONDS_MAX)
    found = run_drill(KINDS * TIMES, every=0.2, seed=1)
    assert found["failed_checks"] == [], found
    assert (found["kind"], found["times"]) == ("all", len(KINDS) * TIMES)
    assert found["recovered"] == found["times"]
    assert (found["others_restarted"], found["duplicated"], found["disordered"]) == (0, 0, 0)
    assert 0 < found["dropped"] <= found["missing"] <= found["dropped"] + found["in_flight"]


@pytest.mark.parametrize("failed", [[], ["books: 3 records came twice"]])
def test_the_command_says_which_check_failed(failed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(kinds: list[str], *, every: float, seed: int, guarantee: str, progress: Any) -> dict[str, Any]:
        asked.append((kinds, every, seed, guarantee))
        times = {"p50": 1.0, "max": 2.0}
        spreads = dict.fromkeys(
            ("outage_ms", "others_gap_ms", "others_gap_baseline_ms", "machine_stalls_ms"), times
        )
        return {
            "kind": "link",
            "times": 3,
            "seed": seed,
            "recovered": 3,
            **spreads,
            "missing": 10,
            "dropped": 10,
            "failed_checks": failed,
        }

    monkeypatch.setattr(drill, "run_drill", run)
    options = ["drill", "--kind", "link", "--times", "3", "--every", "0.5", "--seed", "7"]
    shown = CliRunner().invoke(cli, options)
    assert shown.exit_code == bool(failed)
    assert ("FAILED books: 3 records came twice" in shown.output) == bool(failed)
    assert "link, seed 7: 3 of 3 recovered" in shown.output
    assert json.loads(CliRunner().invoke(cli, [*options, "--json"]).stdout)["failed_checks"] == failed
    assert asked == [(["link"] * 3, 0.5, 7, "loss")] * 2
    CliRunner().invoke(cli, [*options, "--guarantee", "at_least_once"])
    assert asked[-1] == (["link"] * 3, 0.5, 7, "at_least_once")
    refused = CliRunner().invoke(cli, [*options, "--guarantee", "at_least_once", "--job", "j1"])
    assert refused.exit_code == 2 and "leave out --job" in refused.stderr


@pytest.mark.parametrize(
    ("user", "kinds"), [(0, "task process host stop link task"), (7, "task process stop link task process")]
)
def test_without_a_kind_all_are_drilled_that_this_user_can_cause(
    user: int, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(kinds: list[str], *, every: float, seed: int, guarantee: str, progress: Any) -> dict[str, Any]:
        asked.append(kinds)
        progress("failure 1 (task): recovered")
        return {"failed_checks": []}

    monkeypatch.setattr(drill, "run_drill", run)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    shown = CliRunner().invoke(cli, ["drill", "--times", "6", "--json"])
    assert (shown.exit_code, asked) == (0, [kinds.split()])
    assert ("only root can make" in shown.stderr) == bool(user)
    assert "failure 1 (task): recovered" in shown.stderr
