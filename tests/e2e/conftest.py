"""What end-to-end tests share: bounded waits, scrapes, the command line, and the Prometheus binaries."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from minishuffle.api.stream import Stream
from minishuffle.cli.demo import Samples, scrape, total
from minishuffle.cli.main import cli
from minishuffle.errors import UsageError
from minishuffle.ids import Address
from minishuffle.local import LocalCluster
from support.prometheus import fetched_binaries
from support.soak import SOAK
from support.waiting import until

MAKES_HOSTS = os.geteuid() == 0 or os.environ.get("CI") == "true"
collect_ignore = [] if MAKES_HOSTS else ["test_diagnosis_hosts.py", "test_lost_hosts.py"]
"""Network namespaces need root; where all tests are to run, those that make some say so if they cannot."""
collect_ignore += [] if SOAK else ["test_tcp_flow_control.py"]
SECONDS_MAX = 30.0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which seeds of simulated clusters have run, and how they ended."""
    seeds: defaultdict[str, set[int]] = defaultdict(set)
    ends: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "simulated":
                seeds[value[0]] |= {*range(value[1], value[2] + 1)}
                ends[value[0]].update(value[3])
    for test, passed in seeds.items():
        text = ", ".join(f"{count:,} {end}" for end, count in sorted(ends[test].items()))
        line = f"{test}: {len(passed):,} seeds from {min(passed)} to {max(passed)}: {text}"
        terminalreporter.write_line(line)


def runs(pid: int) -> bool:
    """Whether that process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Watch:
    """A running cluster as its tests look at it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    @property
    def flags(self) -> list[str]:
        """The global options with which the command line finds this cluster."""
        directory = self.cluster.state_dir
        where = str(self.cluster.client.address)
        return ["--coordinator", where, "--secret-file", str(directory / "secret"), "--cluster", "local"]

    def metrics_address(self, worker: int) -> Address:
        info = next(info for info in self.cluster.status().workers if info.worker == worker)
        return Address(info.host, info.metrics_port)

    def data_address(self, worker: int) -> Address:
        info = next(info for info in self.cluster.status().workers if info.worker == worker)
        return Address(info.host, info.data_port)

    def samples(self, *workers: int) -> Samples:
        """One scrape of these workers, or of all."""
        return scrape([self.metrics_address(worker) for worker in workers or self.cluster.workers])

    def total(self, name: str, *workers: int, **labels: str) -> float:
        """The sum of a metric over these workers, or over all."""
        return total(self.samples(*workers), name, **labels)

    def coordinator_total(self, name: str, **labels: str) -> float:
        return total(scrape([Address("127.0.0.1", self.cluster.web_port)]), name, **labels)

    def log(self, name: str) -> str:
        """What the process ``worker-1``, ``coordinator``, … wrote to its standard error."""
        return (self.cluster.state_dir / f"{name}.log").read_text()

    def calm(self) -> None:
        """Cancel every job that is not over, and see that the workers hold no tasks."""
        for job in self.cluster.client.jobs():
            with contextlib.suppress(UsageError):  # It is over.
                self.cluster.client.cancel(job.job)
            self.cluster.client.handle(job.job).wait_until_over(SECONDS_MAX)
        until(lambda: not self.total("minishuffle_worker_slots", state="used"), "the release of all slots")


class CommandLine:
    """Runs ``minishuffle`` with a state directory of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._started: list[subprocess.Popen[str]] = []
        self._recorded: dict[int, float] = {}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "minishuffle.cli", "--state-dir", str(self.state), *arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=4 * SECONDS_MAX)
        assert process.returncode == code, f"{arguments} gave {process.returncode}\n{out}\n{err}"
        return out, err

    def look(self, *arguments: str) -> Any:
        """What a command that only asks prints with ``--json``. It runs in this process: one of its own would
        take longer to load than to answer."""
        ran = CliRunner().invoke(cli, ["--state-dir", str(self.state), *arguments, "--json"])
        assert ran.exit_code == 0, ran.output
        return json.loads(ran.stdout)

    def pids(self) -> list[int]:
        """The processes of the cluster that is up."""
        record = json.loads((self.state / "cluster.json").read_text())["processes"].values()
        self._recorded |= {entry["pid"]: entry["started"] for entry in record}
        return [entry["pid"] for entry in record]

    def end(self) -> None:
        if (self.state / "cluster.json").exists():
            self.pids()
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=SECONDS_MAX)
        for pid, started in self._recorded.items():
            try:
                process_left = psutil.Process(pid)
                if abs(process_left.create_time() - started) < 2.0:
                    process_left.kill()
            except psutil.NoSuchProcess:
                continue


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    return until


@pytest.fixture(scope="session")
def is_running() -> Callable[[int], bool]:
    return runs


@pytest.fixture(scope="session")
def watch() -> type[Watch]:
    return Watch


@pytest.fixture
def command_line(tmp_path: Path) -> Iterator[Callable[[str], CommandLine]]:
    """Makes a command line with the state directory of that name."""
    made: list[CommandLine] = []

    def make(name: str) -> CommandLine:
        made.append(CommandLine(tmp_path / name))
        return made[-1]

    yield make
    for line in made:
        line.end()


@pytest.fixture(scope="session")
def prometheus_binaries() -> Path:
    """The folder with ``prometheus`` and ``promtool``, fetched once per machine; never skips."""
    return fetched_binaries()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """It suspects nobody for being slow, so that a connection breaks only if a test has broken it."""
    patient = {"suspect_after": 10.0, "heartbeat_timeout": 30.0}
    with LocalCluster(
        workers=2, slots=3, segment_bytes=4096, network_memory_bytes=1 << 20, **patient
    ) as made:
        yield made


@pytest.fixture(scope="module")
def endless(cluster: LocalCluster, watch: Any, wait_until: Callable[..., Any]) -> Iterator[Any]:
    """A job that runs through everything that the tests of this module do."""
    seen = watch(cluster)
    numbers = Stream.generate(lambda start, count: list(range(start, start + count)), rate=50)
    counted = numbers.key_by(lambda number: number % 100).count(emit="batch").to_count()
    seen.handle = cluster.submit(counted, name="endless", parallelism=2)
    wait_until(lambda: all(worker.peers for worker in cluster.status().workers), "the data connection")
    seen.link = sorted(peer.local for worker in cluster.status().workers for peer in worker.peers)
    yield seen
    assert seen.handle.info().state == "running"


@pytest.fixture
def goes_on(endless: Any, wait_until: Callable[..., Any]) -> Callable[[], None]:
    """Fails unless the endless job takes in further records over the same connection as ever."""

    def check() -> None:
        def taken() -> float:
            return float(endless.total("minishuffle_task_records_total", pipeline="endless", direction="in"))

        before = taken()
        wait_until(lambda: taken() > before, "that the other job goes on")
        workers = endless.cluster.status().workers
        assert sorted(peer.local for worker in workers for peer in worker.peers) == endless.link
        assert [worker.state for worker in workers] == ["alive", "alive"]

    return check
