"""A real Prometheus on a cluster that is made sick: each alert fires, each query of a dashboard has series.

Alerts take minutes on purpose. Here the times in the rules are shortened, and nothing else: see
:func:`shortened`.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from minishuffle.api.stream import Stream
from minishuffle.local import LocalCluster
from minishuffle.observe.prometheus import prometheus_config
from minishuffle.plan.graph import JobSettings
from support.prometheus import Ask, query, running_prometheus
from support.waiting import until

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("wider_resources"),
]

FIRES_SECONDS_MAX = 90.0
SHORT = {"1m": "5s", "5m": "20s", "10m": "20s"}
LOWER = {
    '{phase="first_record"} > 30': '{phase="first_record"} > 0.05',
    "snapshot_age_seconds > 300": "snapshot_age_seconds > 0.1",
    "durable_snapshot_timestamp_seconds > 600": "durable_snapshot_timestamp_seconds > 2",
    "retained_bytes_limit > 0) > 0.8": "retained_bytes_limit > 0) > 0",
}
OF_A_GUARANTEE = re.compile("minishuffle_(snapshot|durable|tasks_unprotected)")
"""Series of jobs with one."""
ROWS = ["x" * 1024] * 64
HELD_SECONDS = 0.5
RESTARTS = 9


def shortened(rules: str) -> str:
    """The same rules with ranges of 5 and 20 s, waits of 1 s, and lower bounds: of a slow recovery, of the
    age of snapshots, and of what is retained."""
    rules = re.sub(r"\[(\d+m)\]", lambda found: f"[{SHORT[found[1]]}]", rules)
    rules = re.sub(r"for: \d+m", "for: 1s", rules)
    short = rules
    for bound, lower in LOWER.items():
        assert bound in short or "alert:" not in rules
        short = short.replace(bound, lower)
    assert not re.search(r"\[\d+m\]|for: \d+m", short)
    return short


class Jobs:
    """One job for each kind of trouble. The functions of all of them come to an end with their workers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def slow(self) -> Stream[Any]:
        """It takes two milliseconds for each row; it has event time."""

        def slow(row: Any) -> Any:
            time.sleep(0.002)
            return row

        rows = Stream.generate(lambda start, count: [(start + n, ROWS[0]) for n in range(count)], rate=5000)
        timed = rows.event_time(lambda row: datetime.fromtimestamp(row[0] / 1000, UTC))
        return timed.rebalance().map(slow).to_count()

    def stuck(self) -> Stream[Any]:
        """It takes one row and never comes back."""

        def stuck(row: Any) -> Any:
            while True:
                time.sleep(0.1)

        rows = Stream.generate(lambda start, count: ROWS[:count] if count <= 64 else ROWS[:1] * count)
        return rows.rebalance().map(stuck).to_count()

    def greedy(self) -> Stream[Any]:
        """It holds the interpreter's lock."""

        def greedy(row: int) -> int:
            until_then = time.monotonic() + HELD_SECONDS
            while time.monotonic() < until_then:
                sum(range(40_000_000))  # one call that never gives way
            time.sleep(1.2)
            return row

        return Stream.generate(rate=100).map(greedy).to_count()

    def stormy(self) -> Stream[Any]:
        """Nine of its attempts fail, once there is a file "begin"."""
        left = self._directory

        def stormy(row: int) -> int:
            failed = len(list(left.glob("failed-*")))
            if failed < RESTARTS and (left / "begin").exists():
                (left / f"failed-{time.monotonic_ns()}").touch()
                raise ValueError("not yet")
            return row

        return Stream.generate(rate=100).rebalance().map(stormy).to_count()

    def paused(self) -> Stream[Any]:
        """It does nothing that anybody could object to."""
        return Stream.generate(rate=100).rebalance().to_count()

    def kept(self) -> Stream[Any]:
        """It loses nothing."""
        return Stream.generate(rate=100).rebalance().to_count()

    def failing(self) -> Stream[Any]:
        """It fails for good, once there is a file "begin"."""
        left = self._directory

        def fail(row: int) -> int:
            if (left / "begin").exists():
                raise ValueError("never")
            return row

        return Stream.generate(rate=100).map(fail).to_count()


class Seen:
    """Alerts that were seen firing, with the jobs that they name."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._found: set[tuple[str, str]] = set()

    def until(self, *alerts: tuple[str, str]) -> None:
        for alert in alerts:
            until(lambda alert=alert: alert in self._now(), f"alert {alert}", FIRES_SECONDS_MAX)

    def _now(self) -> set[tuple[str, str]]:
        for alert in self._ask("alerts").get("alerts", []):
            if alert["state"] == "firing":
                labels = alert["labels"]
                name = labels["alertname"].removeprefix("Minishuffle")
                self._found.add((name, labels.get("pipeline", "")))
        return self._found

    def of(self, job: str) -> set[str]:
        return {name for name, named in self._found if named == job}

    def names(self) -> set[str]:
        return {name for name, _ in self._found}


class Sick(NamedTuple):
    cluster: LocalCluster
    ask: Ask
    alerts: Seen


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory, prometheus_binaries: Path, deploy: Path) -> Iterator[Sick]:
    """Three workers with all of the jobs, and the Prometheus."""
    directory = tmp_path_factory.mktemp("sick")
    jobs = Jobs(directory)
    # Nobody is to suspect the greedy worker, nor to give one up that is stopped for a moment.
    patient = {"suspect_after": 2.0, "heartbeat_timeout": 60.0, "pause_timeout": 60.0}
    with LocalCluster(
        workers=3, slots=4, restart_workers=False, restart_coordinator=False, web_auth="token", **patient
    ) as cluster:
        for name in ("rules.yml", "alerts.yml"):
            (directory / name).write_text(shortened((deploy / "prometheus" / name).read_text()))
        config = prometheus_config(f"127.0.0.1:{cluster.web_port}", directory, cluster.client.read_token)
        text = config.read_text().replace("global:\n", "global:\n  evaluation_interval: 1s\n")
        config.write_text(f"{text}rule_files: [rules.yml, alerts.yml]\n")
        few = JobSettings(floating_buffers_per_gate=4)
        with running_prometheus(prometheus_binaries, config) as ask:
            cluster.submit(jobs.slow(), name="slow", parallelism=2, settings=few)
            # On the third worker: the slow job is on the other two.
            cluster.submit(jobs.greedy(), name="greedy", parallelism=1)
            cluster.submit(jobs.stuck(), name="stuck", parallelism=2, settings=few)
            cluster.submit(jobs.stormy(), name="stormy", parallelism=2)
            cluster.submit(
                jobs.failing(), name="failing", parallelism=1, settings=JobSettings(restart_strategy="none")
            )
            cluster.submit(jobs.paused(), name="paused", parallelism=1).pause()
            kept = JobSettings(guarantee="at_least_once", durable_interval=5.0)
            cluster.submit(jobs.kept(), name="kept", parallelism=3, settings=kept)
            # Counters are to be seen at zero before they grow.
            watched = 'minishuffle_task_restarts_total{pipeline="stormy"}'
            until(lambda: query(ask, watched), "a scrape before the storm", FIRES_SECONDS_MAX)
            (directory / "begin").touch()
            yield Sick(cluster, ask, Seen(ask))
            for worker in cluster.workers:  # some of their tasks do not stop
                cluster.kill_worker(worker)


def expressions(dashboard: Path, jobs: Mapping[str, str]) -> Iterator[str]:
    """What Grafana would ask, with the variables filled in; ``jobs`` has their ids by name."""
    board = json.loads(dashboard.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    found += [note["expr"] for note in board["annotations"]["list"]]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            series = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert series is not None
            found.append(f"{series[1].replace('$pipeline', 'slow')}")
    for text in found:
        text = text.replace("$__rate_interval", "20s").replace("[10m]", "[20s]")
        yield text.replace("$pipeline_id", jobs["kept" if OF_A_GUARANTEE.search(text) else "slow"])


def test_alerts_fire_on_jobs_that_are_sick(sick: Sick) -> None:
    sick.alerts.until(
        ("RestartStorm", "stormy"),
        ("RecoverySlow", "stormy"),
        ("JobFailed", ""),
        ("TaskBackpressured", "slow"),
        ("InputPoolSaturated", "slow"),
        ("ChannelStalled", "stuck"),
        ("EventLoopLag", ""),
        ("JobPaused", "paused"),
    )


def test_each_query_of_the_dashboards_has_series(sick: Sick, deploy: Path) -> None:
    jobs = {job.name: job.job for job in sick.cluster.status().jobs}
    for dashboard in sorted((deploy / "grafana" / "dashboards").iterdir()):
        asked = list(expressions(dashboard, jobs))
        assert asked
        if dashboard.stem == "job":  # its own tasks have not restarted, so nothing is to be marked
            asked = [text for text in asked if not text.startswith("sum by (pipeline, pipeline_id) (changes")]
        for text in asked:
            # Restarts may be over for as long as the dashboard marks them.
            ever = f"max_over_time(({text})[15m:5s])" if "(changes(" in text else text
            until(
                lambda ever=ever: query(sick.ask, ever),
                f"a series of {text} in {dashboard.name}",
                FIRES_SECONDS_MAX,
            )


def test_alerts_fire_on_snapshots_that_are_old(sick: Sick) -> None:
    sick.alerts.until(("SnapshotOld", "kept"), ("DurableSnapshotOld", "kept"), ("RetainedBytesHigh", ""))


def test_alerts_fire_on_processes_that_die(sick: Sick, deploy: Path) -> None:
    alerts, cluster = sick.alerts, sick.cluster
    cluster.kill_worker(2, signal.SIGSTOP)
    try:
        alerts.until(("RecordsDropped", "slow"))
    finally:
        cluster.kill_worker(2, signal.SIGCONT)
    assert not alerts.names() & {"WorkerDown", "CoordinatorDown"}
    cluster.kill_worker(3)
    alerts.until(("WorkerDown", ""))
    cluster.kill_worker(2)  # nobody is left to hold the snapshots of the other
    alerts.until(("TasksUnprotected", "kept"))
    coordinator = cluster.status().pid
    resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (0, 0))
    alerts.until(("JournalUnwritable", ""))
    psutil.Process(coordinator).kill()
    alerts.until(("CoordinatorDown", ""))
    shipped = re.findall(r"alert: Minishuffle(\w+)", (deploy / "prometheus" / "alerts.yml").read_text())
    # Workers are cut from each other on hosts of their own, in tests/e2e/test_lost_hosts.py.
    assert alerts.names() == set(shipped) - {"LinkBroken"}
    assert alerts.of("paused") == {"JobPaused"}
