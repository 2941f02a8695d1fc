"""The loss of the coordinator under a running job: how soon the next one knows all of it."""

from __future__ import annotations

import time
from typing import Final

import psutil

from minishuffle import limits
from minishuffle.bench.failures import POLL_SECONDS, RECOVERY_SECONDS_MAX, FailureRound, FailureSeries
from minishuffle.client import JobHandle
from minishuffle.errors import ShuffleError
from minishuffle.local import LocalCluster
from minishuffle.wire.requests import JobInfo

__all__ = ["HEADLESS_PHASES", "lose_coordinator"]

HEADLESS_PHASES: Final = ("started again", "job shown", "workers back")
"""From the loss to the start of the next process; from there to its first answer about the job, which is
right, and to the return of the last worker."""


def lose_coordinator(
    cluster: LocalCluster, handle: JobHandle, failures: FailureSeries, window: float
) -> FailureRound:
    """Kill it, and wait until the next one has all workers back and ``window`` seconds have passed.

    Raises:
        ShuffleError: the next one shows something else, or workers do not come back.
    """
    before = failures.wait_until_whole()
    age = time.time() - psutil.Process(cluster.status().pid).create_time()
    time.sleep(max(0.0, limits.COORDINATOR_YOUNG_SECONDS - age))  # Else the next one starts later.
    at, wall = time.monotonic_ns(), time.time()
    cluster.kill_coordinator()
    shown = handle.info()
    shown_at = time.time()
    started = psutil.Process(cluster.status().pid).create_time()
    if _attempts(shown) != _attempts(before):
        raise ShuffleError(f"the next coordinator shows {_attempts(shown)} instead of {_attempts(before)}")
    _wait_for_workers(cluster)
    back_at = time.time()
    after = failures.wait_until_whole()
    whole_at = time.monotonic_ns()
    time.sleep(max(0.0, window - (whole_at - at) / 1e9))
    restarted = sum(after.restarts.values()) - sum(before.restarts.values())
    times = (started - wall, shown_at - started, back_at - started)
    phases = {name: 1000 * passed for name, passed in zip(HEADLESS_PHASES, times, strict=True)}
    return FailureRound("coordinator", at, frozenset(), whole_at, restarted, phases=phases)


def _attempts(info: JobInfo) -> dict[str, tuple[int, int, str]]:
    """By subtask: attempt, worker and state."""
    return {f"{task.name}[{task.index}]": (task.attempt, task.worker, task.state) for task in info.tasks}


def _wait_for_workers(cluster: LocalCluster) -> None:
    deadline = time.monotonic() + RECOVERY_SECONDS_MAX
    pids = set(cluster.workers.values())
    while {each.pid for each in cluster.status().workers if each.state == "alive"} != pids:
        if time.monotonic() > deadline:
            raise ShuffleError(f"not all workers are back within {RECOVERY_SECONDS_MAX:g} s")
        time.sleep(POLL_SECONDS)
