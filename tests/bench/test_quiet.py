"""``bench quiet``: processor time of a process, and what is made of it with a cluster that the test plays."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minishuffle.bench import quiet
from minishuffle.cli.main import cli
from minishuffle.errors import ShuffleError


class PlayedCluster:
    """A cluster whose processes have used 1 % (the coordinator) and 10 % (a worker) of a processor. Each
    sink gets three records, after 2 ms."""

    def __init__(self, workers: int, slots: int) -> None:
        self.workers = {number: 100 + number for number in range(1, workers + 1)}
        assert (workers, slots) in ((2, 1), (4, 2))

    def __enter__(self) -> PlayedCluster:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is to be stopped."""

    def status(self) -> Any:
        return SimpleNamespace(pid=100)

    def submit(self, stream: Any, *, name: str, parallelism: int) -> Any:
        self._parallelism = parallelism
        return self

    def info(self) -> Any:
        return SimpleNamespace(tasks=[SimpleNamespace(state="running")])

    def wait(self, timeout: float) -> Any:
        subtasks = range(self._parallelism)
        placed = [(0, index, 1) for index in subtasks] + [(1, index, 2) for index in subtasks]
        tasks = [
            SimpleNamespace(operator=operator, index=index, worker=worker)
            for operator, index, worker in placed
        ]
        late, times = ([np.array([one], np.int64).tobytes()] * self._parallelism for one in (2000, 5))
        value = {"received": 3, "late": late, "times": times}
        return SimpleNamespace(
            tasks=tasks, results=[SimpleNamespace(index=index, value=value) for index in subtasks]
        )


def test_what_each_process_used_is_shown_by_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(quiet, "LocalCluster", PlayedCluster)
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now[-1] + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: now[-1])
    monkeypatch.setattr(quiet, "cpu_seconds", lambda pid: (0.01 if pid == 100 else 0.1) * now[-1])
    options = ["bench", "quiet", "--rate", "10", "--seconds", "2.5", "--parallelism"]
    result = CliRunner().invoke(cli, [*options, "2", "--parallelism", "8", "--json"])
    assert result.exit_code == 1
    assert "50 records did not arrive" in result.stderr, "40 are made by each job, or 5 by each of 8 sources"
    first, second = json.loads(result.stdout)["points"]
    used = {"coordinator_cores": 0.01, "workers_cores": 0.2, "workers_us_per_record": 20_000.0}
    late = {"p50_ms": 2.0, "p99_ms": 2.0}
    assert first == {"parallelism": 2, "workers": 2, "rate": 10, **used, **late, "lost": 34}
    assert (second["workers"], second["workers_cores"], second["lost"]) == (4, 0.4, 16)


def test_processor_time_is_of_all_threads_of_a_process() -> None:
    before = time.process_time()
    found = quiet.cpu_seconds(os.getpid())
    assert before <= found <= time.process_time()
    with pytest.raises(ShuffleError, match="ended while it was measured"):
        quiet.cpu_seconds(2**25)
