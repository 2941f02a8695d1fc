"""``bench recovery``: how long a part of the output is missing after a failure, and what all others notice.

The collector's log says what came when, what is missing and what came twice. What the runtime counts is
reported beside it; the two share no code.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import psutil

from minishuffle import limits
from minishuffle.bench.failures import POLL_SECONDS, RECOVERY_SECONDS_MAX, FailureRound, FailureSeries
from minishuffle.bench.hosts import HostCluster
from minishuffle.bench.numbered import PARALLELISM, NumberedOutput, numbered_job
from minishuffle.client import JobHandle
from minishuffle.coordinator.failover import QUIET_SECONDS
from minishuffle.errors import ShuffleError
from minishuffle.local import LocalCluster
from minishuffle.wire.requests import JobInfo

__all__ = ["HEADLESS_PHASES", "Failure", "lose_coordinator", "measure_recovery", "seconds_until_quiet"]

Failure = Literal["process", "task", "stop", "host", "coordinator"]
"""Kinds whose outage is measured."""

WORKERS: Final = 4
WARM_UP_SECONDS: Final = 2.0
WINDOW_SECONDS: Final = 2.0
"""Around each failure, and as long a time without one in front of it."""
OUTPUT_FROM_MS, OUTPUT_UNTIL_MS, OUTPUT_STEP_MS = -300, 600, 20
"""The output around a failure that is reported."""
PHASES: Final = (
    "detected",
    "rescheduled",
    "deployed",
    "running",
    "reattached",
    "first batch",
    "first record",
)
HEADLESS_PHASES: Final = ("started again", "job shown", "workers back")
"""With a coordinator: from its loss to the start of the next process, and from there to its first answer
about the job, which is right, and to the return of the last worker."""


def measure_recovery(*, failure: Failure, standby: int, kills: int, rate: float) -> dict[str, Any]:
    """Run it once. Times are in milliseconds; ``dropped``, ``in_flight`` and ``missing`` count rows.

    Without standby workers each worker has one slot to spare. Tasks fail in turn, and none a second time
    before its restart is at once again: a delay that is added on purpose is left out. The loss of a
    coordinator strikes no subtask: there is no outage then, and the others are all of them.

    Raises:
        UsageError: hosts, which are network namespaces, cannot be made here.
        ShuffleError: the job did not recover, or did not end as it should.
    """
    with tempfile.TemporaryDirectory(prefix="minishuffle-bench-") as directory:
        slots = PARALLELISM // WORKERS + (0 if standby else 1)
        kind = HostCluster if failure == "host" else LocalCluster
        with kind(workers=WORKERS, slots=slots, standby=standby) as cluster:
            handle = cluster.submit(
                numbered_job(rate, directory), name="bench-recovery", parallelism=PARALLELISM
            )
            turn = itertools.count()
            failures = FailureSeries(
                cluster, handle, directory, standby=standby, choose=lambda count: next(turn) % count
            )
            failures.wait_until_whole()
            time.sleep(WARM_UP_SECONDS)
            rounds: list[FailureRound] = []
            for _ in range(kills):
                time.sleep(WINDOW_SECONDS)
                if failure == "task":
                    time.sleep(seconds_until_quiet(rounds, time.monotonic_ns()))
                if failure == "coordinator":
                    rounds.append(lose_coordinator(cluster, handle, failures, WINDOW_SECONDS))
                else:
                    rounds.append(failures.fail(failure, WINDOW_SECONDS))
            rss = _rss(cluster)
            Path(directory, "stop").touch()
            info = handle.wait_until_over(RECOVERY_SECONDS_MAX)
        if info.state not in ("finished", "finished_with_loss"):
            raise ShuffleError(f"the job ended as {info.state}")
        begin = int(Path(directory, "begin").read_text())
        output = NumberedOutput(f"{directory}/log", begin, rate)
    made = sum(task.counters.records_out for task in info.tasks if task.name == "Numbered")
    return {
        "failure": failure,
        "standby": standby,
        "kills": kills,
        **_times(output, rounds),
        "others_restarted": sum(each.restarted for each in rounds),
        **_books(info),
        "missing": output.missing(made),
        "duplicated": output.duplicated,
        "rss_bytes": rss,
    }


def seconds_until_quiet(rounds: Sequence[FailureRound], now: int) -> float:
    """Until the task whose turn is next has been quiet for long enough; ``now`` in monotonic nanoseconds."""
    if len(rounds) < PARALLELISM:
        return 0.0
    return max(0.0, QUIET_SECONDS - (now - rounds[-PARALLELISM].at) / 1e9)


# --- the loss of the coordinator --------------------------------------------------------------------


def lose_coordinator(
    cluster: LocalCluster, handle: JobHandle, failures: FailureSeries, window: float
) -> FailureRound:
    """Kill the coordinator, and wait until the next one has all workers back, and ``window`` seconds.

    Raises:
        ShuffleError: the next one shows something else, or workers do not come back.
    """
    before = failures.wait_until_whole()
    age = time.time() - psutil.Process(cluster.status().pid).create_time()
    time.sleep(max(0.0, limits.YOUNG_SECONDS - age))  # Else the next one starts later.
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


# --- what is reported -------------------------------------------------------------------------------


def _times(output: NumberedOutput, rounds: Sequence[FailureRound]) -> dict[str, Any]:
    window = int(WINDOW_SECONDS * 1e9)
    outages = [output.outage(each.at, each.victims) for each in rounds if each.victims]
    for each, outage in zip(rounds, outages, strict=False):
        each.phases["first record"] = outage
    gaps = [gap.ms for each in rounds for gap in output.gaps(each.at, each.at + window, each.victims)]
    quiet = [gap.ms for each in rounds for gap in output.gaps(each.at - window, each.at, each.victims)]
    by_outage = sorted(range(len(outages)), key=outages.__getitem__)
    median = rounds[by_outage[(len(by_outage) - 1) // 2]] if by_outage else None
    p95 = round(float(np.percentile(outages, 95)), 1) if outages else 0.0
    return {
        "outage_ms": {**_spread(outages), "p95": p95} if outages else None,
        "phases_ms": {
            phase: _spread([each.phases[phase] for each in rounds if phase in each.phases])
            for phase in (PHASES if outages else HEADLESS_PHASES)
        },
        "others_gap_ms": _spread(gaps),
        "others_gap_baseline_ms": _spread(quiet),
        "output": _output_around(output, median) if median else None,
    }


def _output_around(output: NumberedOutput, failure: FailureRound) -> dict[str, Any]:
    """Records that came in each step of time, in percent of the mean before the failure: of the subtasks that
    were struck, and of all others."""
    window, step = int(WINDOW_SECONDS * 1e9), OUTPUT_STEP_MS * 1_000_000
    edges = range(failure.at + OUTPUT_FROM_MS * 1_000_000, failure.at + OUTPUT_UNTIL_MS * 1_000_000 + 1, step)
    others = frozenset(range(PARALLELISM)) - failure.victims
    shares = {}
    for name, subtasks in (("struck", failure.victims), ("others", others)):
        (before,) = output.counts(subtasks, [failure.at - window, failure.at])
        shares[name] = (output.counts(subtasks, edges) * (100 * window / step / before)).round(1).tolist()
    return {"from_ms": OUTPUT_FROM_MS, "step_ms": OUTPUT_STEP_MS, **shares}


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        raise ShuffleError("a phase of the recovery was not reported")
    return {"p50": round(statistics.median(values), 1), "max": round(max(values), 1)}


def _books(info: JobInfo) -> Mapping[str, int]:
    return {"dropped": sum(info.rows_dropped.values()), "in_flight": info.rows_in_flight}


def _rss(cluster: LocalCluster) -> int:
    """Resident bytes of all workers."""
    return sum(psutil.Process(pid).memory_info().rss for pid in cluster.workers.values())
