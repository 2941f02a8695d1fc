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

from minishuffle.bench.failures import RECOVERY_SECONDS_MAX, FailureRound, FailureSeries
from minishuffle.bench.headless import HEADLESS_PHASES, lose_coordinator
from minishuffle.bench.hosts import HostCluster
from minishuffle.bench.numbered import PARALLELISM, NumberedOutput, numbered_job
from minishuffle.coordinator.failover import QUIET_SECONDS
from minishuffle.errors import ShuffleError
from minishuffle.local import LocalCluster
from minishuffle.wire.requests import JobInfo

__all__ = ["Failure", "measure_recovery", "seconds_until_quiet"]

Failure = Literal["process", "task", "stop", "host", "coordinator"]
"""Kinds whose outage is measured."""

WORKERS: Final = 4
WARM_UP_SECONDS: Final = 2.0
WINDOW_SECONDS: Final = 2.0
"""Around each failure, and as long a time without one in front of it."""
PHASES: Final = (
    "detected",
    "rescheduled",
    "deployed",
    "running",
    "reattached",
    "first batch",
    "first record",
)


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


def _times(output: NumberedOutput, rounds: Sequence[FailureRound]) -> dict[str, Any]:
    window = int(WINDOW_SECONDS * 1e9)
    outages = [output.outage(each.at, each.victims) for each in rounds if each.victims]
    for each, outage in zip(rounds, outages, strict=False):
        each.phases["first record"] = outage
    gaps = [gap.ms for each in rounds for gap in output.gaps(each.at, each.at + window, each.victims)]
    quiet = [gap.ms for each in rounds for gap in output.gaps(each.at - window, each.at, each.victims)]
    p95 = round(float(np.percentile(outages, 95)), 1) if outages else 0.0
    return {
        "outage_ms": {**_spread(outages), "p95": p95} if outages else None,
        "phases_ms": {
            phase: _spread([each.phases[phase] for each in rounds if phase in each.phases])
            for phase in (PHASES if outages else HEADLESS_PHASES)
        },
        "others_gap_ms": _spread(gaps),
        "others_gap_baseline_ms": _spread(quiet),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        raise ShuffleError("a phase of the recovery was not reported")
    return {"p50": round(statistics.median(values), 1), "max": round(max(values), 1)}


def _books(info: JobInfo) -> Mapping[str, int]:
    return {"dropped": sum(info.rows_dropped.values()), "in_flight": info.rows_in_flight}


def _rss(cluster: LocalCluster) -> int:
    """Resident bytes of all workers."""
    return sum(psutil.Process(pid).memory_info().rss for pid in cluster.workers.values())
