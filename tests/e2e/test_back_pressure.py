"""Back-pressure is seen while it lasts: in ``jobs show``, by somebody who has only just typed it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from minishuffle.cli.main import cli
from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SPAN_SECONDS = 1.0
STATES = ("busy_seconds", "idle_seconds", "backpressured_seconds")


@pytest.fixture(scope="module")
def seen(watch: Any) -> Iterator[Any]:
    with LocalCluster(workers=2, slots=1) as cluster:
        cluster.status()  # The client connects at first use.
        yield watch(cluster)


def command(seen: Any, *arguments: str, code: int = 0) -> Result:
    """In this process: one of its own would take longer to load than to answer, and this one asks often."""
    ended = CliRunner().invoke(cli, [*seen.flags, *arguments])
    assert ended.exit_code == code, ended.output
    return ended


def shares(seen: Any, job: str, wait_until: Callable[..., Any]) -> dict[tuple[str, int], dict[str, float]]:
    """Of each task's time between two looks at a job, between which every task ran for a while."""

    def look() -> dict[tuple[str, int], dict[str, float]]:
        tasks = json.loads(command(seen, "jobs", "show", job, "--json").stdout)["tasks"]
        return {
            (task["name"], task["index"]): {state: task["counters"][state] for state in STATES}
            for task in tasks
        }

    def passed() -> dict[tuple[str, int], dict[str, float]] | None:
        now = look()
        grown = {task: {state: now[task][state] - before[task][state] for state in STATES} for task in now}
        enough = all(sum(states.values()) >= SPAN_SECONDS for states in grown.values())
        return grown if enough else None

    before = look()
    found = wait_until(passed, "time in every task")
    return {
        task: {state: seconds / sum(states.values()) for state, seconds in states.items()}
        for task, states in found.items()
    }


def test_a_slow_consumer_back_pressures_its_producers_while_the_job_runs(
    seen: Any, wait_until: Callable[..., Any]
) -> None:
    options = ("--set", "rate=1000000", "--set", "delay=0.2", "--json")
    job = json.loads(command(seen, "submit", "keyby", *options).stdout)["job"]

    def throttled() -> dict[tuple[str, int], dict[str, float]] | None:
        found = shares(seen, job, wait_until)
        producers = [states for (name, _), states in found.items() if name == "generate"]
        assert len(producers) == 2
        return found if all(each["backpressured_seconds"] > 0.5 for each in producers) else None

    try:
        found = wait_until(throttled, "back-pressure of both producers")
        consumers = [states for (name, _), states in found.items() if name != "generate"]
        assert len(consumers) == 2
        assert all(states["busy_seconds"] > 0.5 for states in consumers)
        table = command(seen, "jobs", "show", job).stdout
        assert "back-pressured" in table and "busy" in table and "idle" in table
        chosen = ("--vertex", "generate", "--once", "--json")
        (shown,) = json.loads(command(seen, "top", job, *chosen).stdout)["jobs"]
        source, sink = shown["vertices"]
        assert (source["name"], source["level"], sink["level"]) == ("generate", "HIGH", "OK")
        assert sink["busy"] > 0.5 and sink["records_in"] > 0
        assert shown["vertex"] == 0 and shown["silent"] == []
        assert [(pool["side"], pool["in_use"] > 0) for pool in shown["pools"]] == [("out", True)] * 2
        channels = {each["channel"]: each for each in shown["channels"]}
        assert sorted(channels) == ["0.0:1.0", "0.0:1.1", "0.1:1.0", "0.1:1.1"]
        assert sum(each["backlog"] for each in channels.values()) > 0
        credits = [each["credit"] for each in channels.values()]
        assert credits.count(None) == 2, "half of the channels stay within a worker"
    finally:
        command(seen, "jobs", "cancel", job)
    assert seen.cluster.client.handle(job).wait_until_over(30).state == "canceled"
    assert "--vertex is of one job" in command(seen, "top", "--vertex", "1", code=2).stderr
    ended = command(seen, "top", job, code=2).stderr
    assert f"job {job} is canceled: 'minishuffle jobs show {job}' has its totals" in ended
