"""``bench recovery``: how long a part of the output is missing after a failure, and what all others notice.

The collector's log says what came when, what is missing and what came twice. What the runtime counts is
reported beside it; the two share no code.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from minishuffle.bench.failures import FailureRound
from minishuffle.bench.hosts import HostCluster
from minishuffle.bench.numbered import HEADLESS_PHASES, PARALLELISM, WORKERS, NumberedOutput, NumberedRun
from minishuffle.coordinator.jobs.failover import QUIET_SECONDS
from minishuffle.errors import ShuffleError
from minishuffle.local import LocalCluster
from minishuffle.wire.requests import JobInfo

__all__ = ["Failure", "measure_recovery", "seconds_until_quiet"]

Failure = Literal["process", "task", "stop", "host", "coordinator"]
"""Kinds whose outage is measured."""

WARM_UP_SECONDS: Final = 2.0
WINDOW_SECONDS: Final = 2.0
"""Around each failure, and as long a time without one in front of it."""
DRAWN_SECONDS: Final = 0.5
"""Each failure comes at a moment drawn from this time, a heartbeat interval: workers send heartbeats at its
multiples, and what the next failure waits for comes with them, so each would come right after one."""
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


def measure_recovery(*, failure: Failure, standby: int, kills: int, rate: float) -> dict[str, Any]:
    """Run it once. Times are in milliseconds; ``dropped``, ``in_flight`` and ``missing`` count rows.

    Without standby workers each worker has one slot to spare. Tasks fail in turn, and none a second time
    before its restart is at once again: a delay that is added on purpose is left out. The loss of a
    coordinator strikes no subtask: there is no outage then, and the others are all of them.

    Raises:
        UsageError: hosts, which are network namespaces, cannot be made here.
        ShuffleError: the job did not recover, or did not end as it should.
    """
    turn = itertools.count()
    slots = PARALLELISM // WORKERS + (0 if standby else 1)
    make = HostCluster if failure == "host" else LocalCluster
    with (
        tempfile.TemporaryDirectory(prefix="minishuffle-bench-") as directory,
        make(workers=WORKERS, slots=slots, standby=standby) as cluster,
    ):
        run = NumberedRun(
            cluster,
            "bench-recovery",
            rate,
            directory,
            standby=standby,
            choose=lambda count: next(turn) % count,
        )
        run.failures.wait_until_whole()
        time.sleep(WARM_UP_SECONDS)
        rounds: list[FailureRound] = []
        for _ in range(kills):
            if failure == "task":
                time.sleep(seconds_until_quiet(rounds, time.monotonic_ns()))
            time.sleep(random.uniform(0.0, DRAWN_SECONDS))
            rounds.append(run.failures.fail(failure, WINDOW_SECONDS))
        rss = run.rss_bytes()
        info, made = run.end()
        output = run.output()
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
