"""Synthetic snapshots, and the Prometheus binaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minishuffle.counters import (
    RECOVERY_SECONDS_BOUNDS,
    CoordinatorSnapshot,
    GateSnapshot,
    Histogram,
    JobRecoveries,
    OperatorCounters,
    PartitionSnapshot,
    PoolSnapshot,
    TaskCounters,
    TaskSnapshot,
    WorkerEntry,
    WorkerSnapshot,
)
from minishuffle.worker.tasks.busytime import BLOCK_SECONDS_BOUNDS
from support.prometheus import fetched_binaries
from support.snapshots import idle_worker

SNAPSHOT = {"taken": 3, "bytes": 4096, "seconds": 0.002, "age": 0.5}


@pytest.fixture
def make_gate() -> Callable[..., GateSnapshot]:
    """A gate of two channels, fields replaced as asked."""

    def make(**fields: Any) -> GateSnapshot:
        gate = GateSnapshot(
            queue_buffers=3,
            exclusive_used=2,
            exclusive_capacity=4,
            floating_used=1,
            floating_capacity=8,
            channels=2,
            channels_starved=1,
            credits_announced=2,
            credits_unannounced=0,
            watermark=1_000_000,
            debloated_bytes=512,
            in_flight_seconds=0.25,
        )
        return replace(gate, **fields)

    return make


@pytest.fixture
def make_task(make_gate: Callable[..., GateSnapshot]) -> Callable[..., TaskSnapshot]:
    """A task of one operator with one gate and one partition, fields replaced as asked."""

    def make(**fields: Any) -> TaskSnapshot:
        task = TaskSnapshot(
            job="j1",
            job_name="wordcount",
            operator=0,
            name="count",
            index=0,
            attempt=1,
            state="running",
            counters=TaskCounters(watermark=1_000_000, snapshot=SNAPSHOT),
            blocks=Histogram(BLOCK_SECONDS_BOUNDS),
            operators=(OperatorCounters("count"),),
            gates=(make_gate(),),
            partitions=(PartitionSnapshot(5, PoolSnapshot(2, 8)),),
        )
        return replace(task, **fields)

    return make


@pytest.fixture
def make_worker() -> Callable[..., WorkerSnapshot]:
    """A worker without tasks, fields replaced as asked."""

    def make(**fields: Any) -> WorkerSnapshot:
        taken = {"slots_used": 1, "segments_free": 60, "segments_peak": 9, "segments_extra": 3}
        return idle_worker(**{"slots": 4, **taken, **fields})

    return make


@pytest.fixture
def make_coordinator() -> Callable[..., CoordinatorSnapshot]:
    """A coordinator with one worker, fields replaced as asked."""

    reattach = Histogram(RECOVERY_SECONDS_BOUNDS)
    reattach.observe(0.02)

    def make(**fields: Any) -> CoordinatorSnapshot:
        coordinator = CoordinatorSnapshot(
            term=3,
            journal_writable=False,
            workers=(WorkerEntry(1, "alive", "127.0.0.1", 9000, 0.25),),
            slots={"used": 1, "free": 3},
            jobs={"running": 1},
            tasks={"running": 2},
            recoveries=(
                JobRecoveries(
                    "j1",
                    "words",
                    {"lost": 2},
                    {"queue_discarded": 7},
                    11,
                    {"reattach": reattach},
                    4,
                    durable_at=5_000.0,
                    durable_failed=2,
                    fallbacks=1,
                    holders={("count", 2, 1): 3},
                ),
                JobRecoveries("j2", "clicks", {}, {}, paused=True),
            ),
            connections_refused={},
        )
        return replace(coordinator, **fields)

    return make


@pytest.fixture(scope="session")
def prometheus_binaries() -> Path:
    """The folder with ``prometheus`` and ``promtool``, fetched once per machine; never skips."""
    return fetched_binaries()
