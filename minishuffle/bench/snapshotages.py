"""Local snapshots of a job, as they are seen twice a second while a benchmark runs.

A job without a guarantee is looked at as often: a look holds up those whom it asks for a millisecond or two.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import count
from typing import Any, Final

import numpy as np

from minishuffle.bench.siblings import metrics_text, sum_of
from minishuffle.client import JobHandle, JobResult
from minishuffle.local import LocalCluster
from minishuffle.wire.requests import TaskInfo

__all__ = ["SnapshotAges", "wait_watching"]

LOOK_SECONDS: Final = 0.5


class SnapshotAges:
    """The age of each task's snapshot, and what workers retain, at each look."""

    def __init__(self) -> None:
        self._ages: list[float] = []
        self._retained = 0

    def look(self, tasks: Iterable[TaskInfo], retained: Iterable[float]) -> None:
        """Take a look; ``retained`` are the bytes that each worker retains."""
        found = (task.counters.snapshot.get("age") for task in tasks if task.state == "running")
        self._ages += [age for age in found if age is not None]
        self._retained = max([self._retained, *map(int, retained)])

    def stats(self, tasks: Iterable[TaskInfo]) -> dict[str, Any]:
        """How many snapshots these tasks have taken, percentiles of all ages in seconds (None: none was
        seen), and the most bytes that one worker retained."""
        ages = {
            f"p{share}": round(float(np.percentile(self._ages, share)), 3) if self._ages else None
            for share in (50, 99)
        }
        taken = sum(int(task.counters.snapshot.get("taken", 0)) for task in tasks)
        return {"snapshots": taken, "snapshot_age_seconds": ages, "retained_peak_bytes": self._retained}


def wait_watching(
    cluster: LocalCluster, handle: JobHandle, seconds: float, *, guaranteed: bool
) -> tuple[JobResult, dict[str, Any]]:
    """Wait for the end of the job, and look meanwhile: at all tasks, and at what one worker, each in turn,
    retains. The stats are empty if it is not ``guaranteed``.

    Raises: as :meth:`JobHandle.wait`, and OSError if a worker cannot be asked.
    """
    seen, deadline = SnapshotAges(), time.monotonic() + seconds
    for look in count():
        try:
            result = handle.wait(LOOK_SECONDS)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise
            workers = cluster.status().workers
            text = metrics_text(cluster.client, workers[look % len(workers)])
            seen.look(handle.info().tasks, [sum_of(text, "minishuffle_retained_bytes", "")])
        else:
            break
    return result, seen.stats(result.tasks) if guaranteed else {}
