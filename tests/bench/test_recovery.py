"""``bench recovery`` on real processes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from minishuffle.bench import failures, numbered, recovery
from minishuffle.bench.failures import FailureRound
from minishuffle.cli.main import cli

SLOW_SECONDS_MAX = 150.0
"""For what takes less than a second on a machine that is not slow."""


@pytest.fixture(autouse=True)
def _look_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around each failure, where who measures looks for two; at a quarter of the usual rate."""
    monkeypatch.setattr(recovery, "WARM_UP_SECONDS", 0.5)
    monkeypatch.setattr(recovery, "WINDOW_SECONDS", 1.0)
    for module in (failures, numbered):
        monkeypatch.setattr(module, "RECOVERY_SECONDS_MAX", SLOW_SECONDS_MAX)


@pytest.mark.slow
@pytest.mark.parametrize(("failure", "standby"), [("process", 1), ("process", 0), ("task", 0)])
def test_only_what_failed_restarts_and_the_books_say_what_is_missing(failure: str, standby: int) -> None:
    options = ["--failure", failure, "--standby", str(standby), "--kills", "2", "--rate", "500", "--json"]
    result = CliRunner().invoke(cli, ["bench", "recovery", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["failure"], found["standby"], found["kills"]) == (failure, standby, 2)
    assert (found["others_restarted"], found["again"]) == (0, 0)
    assert found["dropped"] <= found["lost"] <= found["dropped"] + found["in_flight"]
    if failure == "task":
        assert (found["lost"], found["in_flight"]) == (found["dropped"], 0)
    assert list(found["phases_ms"]) == list(recovery.PHASES)
    assert 0 < found["outage_ms"]["p50"] <= found["outage_ms"]["p95"] <= found["outage_ms"]["max"]
    assert found["others_gap_ms"]["max"] > 0 and found["others_gap_baseline_ms"]["max"] > 0
    assert found["rss_bytes"] > 0
    steps = (recovery.OUTPUT_UNTIL_MS - recovery.OUTPUT_FROM_MS) // recovery.OUTPUT_STEP_MS
    for name in ("struck", "others"):
        assert len(found["output"][name]) == steps and max(found["output"][name]) > 0


@pytest.mark.slow
def test_a_chain_without_a_guarantee_loses_rows_and_says_how_many() -> None:
    """The audit of its files can fail: it finds more than the log beside the windows lacks."""
    options = ["--graph", "chain", "--kills", "1", "--rate", "400", "--json"]
    result = CliRunner().invoke(cli, ["bench", "recovery", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["graph"], found["guarantee"], found["others_restarted"]) == ("chain", "loss", 0)
    assert (found["fallbacks"], found["snapshot_age_s"]) == (0, None)
    assert 0 < found["lost"] < found["records"] and found["again"] == 0


@pytest.mark.slow
def test_the_loss_of_the_coordinator_costs_no_row_and_no_attempt() -> None:
    options = ["--failure", "coordinator", "--standby", "0", "--kills", "1", "--rate", "500", "--json"]
    result = CliRunner().invoke(cli, ["bench", "recovery", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["outage_ms"], found["output"]) == (None, None)
    assert list(found["phases_ms"]) == list(numbered.HEADLESS_PHASES)
    assert 0 < found["phases_ms"]["job shown"]["max"] <= found["phases_ms"]["workers back"]["max"]
    books = ("others_restarted", "dropped", "in_flight", "lost", "again")
    assert [found[name] for name in books] == [0] * len(books)
    assert found["others_gap_ms"]["max"] > 0 and found["others_gap_baseline_ms"]["max"] > 0


def test_a_task_fails_again_once_its_restart_is_at_once() -> None:
    second, tasks = 10**9, 8
    rounds = [FailureRound("task", at * second, frozenset([at]), at, 0) for at in range(tasks)]
    assert recovery.seconds_until_quiet(rounds[:-1], tasks, 0) == 0.0, "the last one has not failed yet"
    quiet = recovery.QUIET_SECONDS
    assert recovery.seconds_until_quiet(rounds, tasks, 10 * second) == quiet - 10
    assert recovery.seconds_until_quiet([rounds[-1], *rounds], tasks, 10 * second) == quiet - 10
    assert recovery.seconds_until_quiet(rounds, tasks, int(quiet) * second) == 0.0


@pytest.mark.parametrize(
    ("caught_up", "age", "late"),
    [(1.0, 0.0, False), (1.01, 0.0, True), (4.0, 1.0, False), (4.1, 1.0, True), (None, 9.0, True)],
)
def test_who_goes_on_from_an_older_snapshot_has_longer_to_catch_up(
    caught_up: float | None, age: float, late: bool
) -> None:
    assert recovery.is_late(caught_up, age) is late
