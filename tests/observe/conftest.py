"""Synthetic snapshots, and the Prometheus binaries."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minishuffle.counters import (
    BLOCK_SECONDS_BOUNDS,
    LAG_SECONDS_BOUNDS,
    ConnectionCounters,
    CoordinatorSnapshot,
    GateSnapshot,
    Histogram,
    PartitionSnapshot,
    PoolSnapshot,
    TaskCounters,
    TaskSnapshot,
    WorkerEntry,
    WorkerSnapshot,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make_task() -> Callable[..., TaskSnapshot]:
    """A task with one gate and one partition, fields replaced as asked."""

    def make(**fields: Any) -> TaskSnapshot:
        task = TaskSnapshot(
            job="j1",
            job_name="wordcount",
            operator=0,
            name="count",
            index=0,
            attempt=1,
            state="running",
            counters=TaskCounters(watermark=1_000_000),
            blocks=Histogram(BLOCK_SECONDS_BOUNDS),
            gates=(GateSnapshot(3, 2, 4, 1, 8, 2, 1),),
            partitions=(PartitionSnapshot(5, PoolSnapshot(2, 8)),),
        )
        return replace(task, **fields)

    return make


@pytest.fixture
def make_worker() -> Callable[..., WorkerSnapshot]:
    """A worker without tasks, fields replaced as asked."""

    def make(**fields: Any) -> WorkerSnapshot:
        worker = WorkerSnapshot(
            worker=1,
            epoch=1,
            slots=4,
            slots_used=1,
            remote=ConnectionCounters(),
            local_bytes=0,
            local_buffers=0,
            connections=1,
            segments_total=64,
            segments_free=60,
            segments_peak=9,
            segment_bytes=32768,
            assembly_bytes=0,
            loop_lag=Histogram(LAG_SECONDS_BOUNDS),
            abandoned_tasks=0,
            connections_refused={},
            tasks=(),
        )
        return replace(worker, **fields)

    return make


@pytest.fixture
def make_coordinator() -> Callable[..., CoordinatorSnapshot]:
    """A coordinator with one worker, fields replaced as asked."""

    def make(**fields: Any) -> CoordinatorSnapshot:
        coordinator = CoordinatorSnapshot(
            term=3,
            workers=(WorkerEntry(1, "alive", "127.0.0.1", 9000, 0.25),),
            slots={"used": 1, "free": 3},
            jobs={"running": 1},
            tasks={"running": 2},
            connections_refused={},
        )
        return replace(coordinator, **fields)

    return make


@pytest.fixture(scope="session")
def prometheus_binaries() -> Path:
    """The folder with ``prometheus`` and ``promtool``, fetched once per machine; never skips."""
    cache = Path.home() / ".cache" / "minishuffle" / "prometheus"
    script = ROOT / "scripts" / "fetch-prometheus"
    fetched = subprocess.run([script, cache], capture_output=True, text=True, timeout=600, check=False)
    if fetched.returncode:
        pytest.fail(f"{script.name} {cache} failed:\n{fetched.stdout}{fetched.stderr}", pytrace=False)
    return cache / "usr" / "bin"
