"""A real Prometheus on a real cluster, with the configuration that ``cluster up`` writes and prints."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.timeout(180)]

HOST = "127.0.0.1"
WORKERS = 2
SERIES_MAX = 200
SERIES_PER_SUBTASK_MAX = 50
LABELS_OF_THE_SCRAPER = {"job", "instance", "attempt", "port"}

Ask = Callable[[str], Any]


@pytest.fixture
def cluster(command_line: Callable[[str], Any]) -> Iterator[tuple[Any, str]]:
    """Two workers with a keyed job that runs; gives the command line and what ``cluster up`` printed."""
    shell = command_line("state")
    out, _ = shell.run("cluster", "up", "--detach", "--workers", str(WORKERS), "--port", "0")
    shell.run("submit", "keyby", "--name", "toy job", "--parallelism", "2", "--set", "rate=1000")
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


@pytest.fixture
def ask(
    cluster: tuple[Any, str], prometheus_binaries: Path, tmp_path: Path
) -> Iterator[Callable[[str], Any]]:
    """The API of a Prometheus run by the very command that was printed, but for its own free port."""
    _, out = cluster
    printed = next(line for line in out.splitlines() if line.strip().startswith("prometheus "))
    with socket.create_server((HOST, 0)) as probe:
        address = f"{HOST}:{probe.getsockname()[1]}"
    arguments = [word.replace("127.0.0.1:9090", address) for word in shlex.split(printed)[1:]]
    assert f"--web.listen-address={address}" in arguments
    log = tmp_path / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [prometheus_binaries / "prometheus", *arguments], stdout=output, stderr=output
        )

    def get(path: str) -> Any:
        """``data`` of an API call; empty while the server starts."""
        assert process.poll() is None, log.read_text(errors="replace")
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=5) as response:
                return json.load(response)["data"]
        except (urllib.error.URLError, ConnectionError):
            return {}

    try:
        yield get
    finally:
        process.terminate()
        process.wait(30)


def test_every_target_is_up_and_records_have_a_rate(
    ask: Ask, cluster: tuple[Any, str], wait_until: Callable[..., Any]
) -> None:
    shell, _ = cluster

    def targets_up() -> set[str]:
        targets = ask("targets?state=active").get("activeTargets", [])
        up = {target["scrapeUrl"] for target in targets if target["health"] == "up"}
        return up if len(up) == len(targets) == WORKERS + 1 else set()

    def rate() -> float:
        query = urllib.parse.quote("sum(rate(minishuffle_task_records_total[10s]))")
        result = ask(f"query?query={query}").get("result", [])
        return float(result[0]["value"][1]) if result else 0.0

    up = wait_until(targets_up, "that every target is up", 60)
    assert up == {f"http://{address}/metrics" for address in expositions(shell)}
    assert wait_until(rate, "a rate above 0", 60) > 0


def test_expositions_pass_promtool_and_stay_small(
    cluster: tuple[Any, str], prometheus_binaries: Path, wait_until: Callable[..., Any]
) -> None:
    shell, _ = cluster
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
