"""``bench latency`` on real processes for a short time, and what its figures are made of."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minishuffle.bench import latency
from minishuffle.bench.latency import Arrivals, Paced
from minishuffle.cli.main import cli
from minishuffle.client import JobResult, SinkResult
from minishuffle.counters import TaskCounters
from minishuffle.operators.base import TaskContext
from minishuffle.wire.requests import TaskInfo

KEYS = {
    *("flush", "guarantee", "rate", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms"),
    *("remote_records", "lost", "echo_p50_ms"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("timeout", "flush"), [(None, "adaptive"), ("0", 0), ("0.05", 0.05)])
def test_a_run_loses_nothing_and_tells_every_figure(timeout: str | None, flush: Any) -> None:
    options = ["--rate", "1000", "--seconds", "1", "--json"]
    given = [] if timeout is None else ["--buffer-timeout", timeout]
    result = CliRunner().invoke(cli, ["bench", "latency", *options, *given])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert set(figures) == KEYS
    assert (figures["flush"], figures["rate"], figures["lost"]) == (flush, 1000, 0)
    assert 300 < figures["remote_records"] < 700, "about half of those after the warm-up"
    assert 0 < figures["p50_ms"] <= figures["p90_ms"] <= figures["p99_ms"] <= figures["p999_ms"]
    assert figures["p999_ms"] <= figures["max_ms"]
    assert figures["echo_p50_ms"] > 0


@pytest.mark.parametrize("timeout", ["soon", "", "-3", "-0.5", "nan"])
def test_a_buffer_timeout_that_is_none_is_refused(timeout: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "latency", "--buffer-timeout", timeout])
    assert result.exit_code == 2
    assert "is neither 'adaptive' nor seconds from 0 on nor -1" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_record_carries_the_time_at_which_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch is asked for 5 s too late: its records are stamped as if it had not been."""
    clock = iter([100.0, 100.0, 107.0, 107.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(latency, "WARM_UP_SECONDS", 0.5)
    source = Paced(rate=2.0, seconds=3.5)
    batches = list(source.read(0, 0))
    assert source.records == 4
    assert batches == [[(0, 0)], [(0, 101 * 10**9), (0, 102 * 10**9), (0, 103 * 10**9)]]


def result_of(sinks: list[Any], workers: dict[tuple[int, int], int]) -> JobResult:
    tasks = [
        TaskInfo(
            operator=operator,
            name="x",
            index=index,
            attempt=1,
            state="finished",
            worker=worker,
            counters=TaskCounters(),
        )
        for (operator, index), worker in workers.items()
    ]
    results = [SinkResult("x", index, value) for index, value in enumerate(sinks)]
    return JobResult("j1", "x", "finished", results, tasks, 1.0)


def test_latencies_are_of_records_that_went_from_worker_to_worker() -> None:
    sinks = []
    for index in range(2):
        sink = Arrivals()
        sink.open(TaskContext(job="j1", name="x", index=index, parallelism=2, attempt=1))
        now = time.monotonic_ns()
        sink.write([(index, now - 10**9), (1 - index, now - 2 * 10**9), (1 - index, 0)])
        value = sink.close()
        assert value["received"] == 3
        sinks.append(value)
    placed = {(0, 0): 1, (0, 1): 2, (1, 0): 1, (1, 1): 2}
    micros, times = latency.remote_latencies(result_of(sinks, placed))
    assert times.sum() == 2
    assert all(2e6 <= late < 3e6 for late in micros)
    none, _ = latency.remote_latencies(result_of(sinks, dict.fromkeys(placed, 1)))
    assert not len(none)


def test_percentiles_count_each_record() -> None:
    micros, times = np.array([1000, 2000, 50_000]), np.array([50, 49, 1])
    found = [latency.percentile(micros, times, share) for share in latency.PERCENTILES.values()]
    assert found == [1.0, 2.0, 2.0, 50.0, 50.0]
