"""Stats of local snapshots: which ages and bytes are in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from minishuffle.bench.snapshotages import SnapshotAges


def task(state: str = "running", **snapshot: float) -> Any:
    return SimpleNamespace(state=state, counters=SimpleNamespace(snapshot=snapshot))


def test_stats_are_of_all_looks() -> None:
    seen = SnapshotAges()
    assert seen.stats([]) == {
        "snapshots": 0,
        "snapshot_age_seconds": {"p50": None, "p99": None},
        "retained_peak_bytes": 0,
    }
    seen.look([task(age=1.0, taken=1), task(taken=1), task("finished", age=60.0)], [5.0, 9.0])
    seen.look([task(age=3.0), task(age=2.0)], [7.0])
    seen.look([], [0.0])
    assert seen.stats([task(taken=4), task(taken=3.0), task()]) == {
        "snapshots": 7,
        "snapshot_age_seconds": {"p50": 2.0, "p99": 2.98},
        "retained_peak_bytes": 9,
    }
