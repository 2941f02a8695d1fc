"""A real Prometheus on a real cluster, with the configuration that ``cluster up`` writes and prints."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minishuffle.observe.prometheus import prometheus_command
from support.prometheus import query, running_prometheus

pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.timeout(180)]

WORKERS = 2
SERIES_MAX = 200
SERIES_PER_SUBTASK_MAX = 50
LABELS_OF_THE_SCRAPER = {"job", "instance", "attempt", "port"}


@pytest.fixture
def cluster(command_line: Callable[[str], Any]) -> Iterator[tuple[Any, str]]:
    """Two workers with a keyed job that runs; gives the command line and what ``cluster up`` printed."""
    shell = command_line("state")
    out, _ = shell.run("cluster", "up", "--detach", "--workers", str(WORKERS), "--port", "0")
    shell.run("submit", "keyby", "--name", "toy job", "--parallelism", "2", "--set", "rate=100")
    yield shell, out
    shell.run("cluster", "down")


def web(shell: Any) -> str:
    address: str = json.loads((shell.state / "cluster.json").read_text())["web"]
    return address


def exposition(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


def expositions(shell: Any) -> dict[str, str]:
    """The text of ``/metrics`` of every process, by address, the coordinator's first."""
    with urllib.request.urlopen(f"http://{web(shell)}/sd/prometheus", timeout=10) as response:
        groups = json.load(response)
    return {target: exposition(target) for group in groups for target in group["targets"]}


def test_prometheus_scrapes_every_process_and_expositions_stay_small(
    cluster: tuple[Any, str], prometheus_binaries: Path, wait_until: Callable[..., Any]
) -> None:
    """Run by the very command that was printed, but for its own free port and more frequent scrapes."""
    shell, out = cluster
    config = shell.state / "prometheus.yml"
    assert prometheus_command(config) in [line.strip() for line in out.splitlines()]
    with running_prometheus(prometheus_binaries, config) as ask:
        check_expositions(shell, prometheus_binaries, wait_until)

        def targets_up() -> set[str]:
            targets = ask("targets?state=active").get("activeTargets", [])
            up = {target["scrapeUrl"] for target in targets if target["health"] == "up"}
            return up if len(up) == len(targets) == WORKERS + 1 else set()

        def rate() -> float:
            result = query(ask, "sum(rate(minishuffle_task_records_total[10s]))")
            return float(result[0]["value"][1]) if result else 0.0

        up = wait_until(targets_up, "that every target is up", 60)
        assert up == {f"http://{address}/metrics" for address in expositions(shell)}
        assert wait_until(rate, "a rate above 0", 60) > 0


def check_expositions(shell: Any, prometheus_binaries: Path, wait_until: Callable[..., Any]) -> None:
    """They pass promtool and have few series."""
    wait_until(lambda: "toy job" in "".join(expositions(shell).values()), "tasks in the metrics")
    found = expositions(shell)
    assert len(found) == WORKERS + 1
    coordinator = web(shell)
    for address, text in found.items():
        checked = subprocess.run(
            [prometheus_binaries / "promtool", "check", "metrics"],
            input=text,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert checked.returncode == 0, f"{address}: {checked.stdout}{checked.stderr}"
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        labels = {label for sample in samples for label in sample.labels}
        assert not labels & LABELS_OF_THE_SCRAPER
        subtasks = {
            (sample.labels["pipeline"], sample.labels["vertex"], sample.labels["subtask"])
            for sample in samples
            if "subtask" in sample.labels
        }
        assert len(samples) <= SERIES_MAX + SERIES_PER_SUBTASK_MAX * len(subtasks), address
        assert len(subtasks) == (0 if address == coordinator else 2), address
        own = [sample for sample in samples if sample.labels.get("pipeline") not in (None, "toy job")]
        assert own == []
