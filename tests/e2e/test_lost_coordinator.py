"""Real processes: coordinator and then a worker are killed under a running job, and another takes over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minishuffle.client import Client
from minishuffle.dataflow.stream import Stream
from minishuffle.local import LocalCluster, settings_flags
from minishuffle.wire.requests import JobInfo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

RATE = 2_000
SECONDS_MAX = 60.0
Until = Callable[..., Any]


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def attempts(info: JobInfo) -> dict[tuple[int, int], tuple[int, int, str]]:
    """By operator and index: attempt, worker and state."""
    return {(task.operator, task.index): (task.attempt, task.worker, task.state) for task in info.tasks}


@contextmanager
def started_again(cluster: LocalCluster) -> Iterator[Client]:
    """A coordinator at the port of the one that was killed, with its journal."""
    processes = cluster._running()
    state = str(cluster.state_dir)
    command = [sys.executable, "-m", "minishuffle.cli", "--cluster", "local", "--state-dir", state]
    command += ["coordinator", "start", "--port", str(processes.address.port), "--web-port", "0"]
    with subprocess.Popen([*command, *settings_flags(cluster._settings)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert b'"ready"' in process.stdout.readline()
            with Client(processes.address, cluster._secret, cluster="local") as client:
                yield client
        finally:
            process.terminate()
            assert process.wait(SECONDS_MAX) == 0


def test_tasks_run_on_without_a_coordinator_and_the_next_one_recovers_what_died_meanwhile(
    wait_until: Until, tmp_path: Path
) -> None:
    out = str(tmp_path)

    def write(number: int) -> int:
        with open(os.path.join(out, str(os.getpid())), "ab") as file:
            file.write(b".")
        return number

    def written(pid: int) -> int:
        path = tmp_path / str(pid)
        return path.stat().st_size if path.exists() else 0

    settings: dict[str, Any] = {"heartbeat_interval": 0.25, "heartbeat_timeout": 2.0}
    with LocalCluster(workers=3, slots=1, restart_workers=False, **settings) as cluster:
        stream = Stream.generate(numbers, rate=RATE).rebalance().map(write).to_count()
        job = cluster.submit(stream, parallelism=2).id
        before = wait_until(
            lambda: (info := cluster.client.job(job)).state == "running" and info, "the job to run"
        )
        pids = {number: cluster.workers[number] for number in {task.worker for task in before.tasks}}
        coordinator = cluster._running().coordinator.process
        coordinator.kill()
        coordinator.wait()
        for pid in pids.values():
            seen = written(pid)
            wait_until(lambda pid=pid, seen=seen: written(pid) > seen + RATE // 2, "output to go on")
        (survivor, *_), victim = sorted(pids), max(pids)
        cluster.kill_worker(victim, signal.SIGKILL)
        seen = written(pids[survivor])
        wait_until(lambda: written(pids[survivor]) > seen + RATE // 4, "the other to go on")
        with started_again(cluster) as client:
            assert attempts(client.job(job)) == attempts(before), "right at once, with nobody back"
            after = wait_until(
                lambda: (
                    (info := client.job(job)).restarts
                    and {task.state for task in info.tasks} == {"running"}
                    and info
                ),
                "the lost tasks to run again",
            )
            for key, (attempt, worker, _) in attempts(after).items():
                was = attempts(before)[key][1]
                assert (attempt, worker == was) == ((2, False) if was == victim else (1, True))
            assert client.status().term == 2
            assert {each.pid for each in client.status().workers if each.state == "alive"} >= {pids[survivor]}
            seen = written(pids[survivor])
            wait_until(lambda: written(pids[survivor]) > seen + RATE // 4, "output to go on")
