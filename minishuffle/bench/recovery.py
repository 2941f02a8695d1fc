"""``bench recovery``: how long a part of the output is missing after a failure, and what all others notice.

The log of a job says what came when. What is lost and what came again says the log too, of the *hop*, and a
comparison of the files with a reference in plain Python, of the *chain*. What the runtime counts is reported
beside it; the two share no code.
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

from minishuffle.bench.chaingraph import ChainRun
from minishuffle.bench.failures import FailureRound
from minishuffle.bench.hosts import HostCluster
from minishuffle.bench.numbered import HEADLESS_PHASES, WORKERS, NumberedOutput, NumberedRun
from minishuffle.coordinator.jobs.failover import QUIET_SECONDS
from minishuffle.errors import ShuffleError
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import Guarantee, JobSettings
from minishuffle.wire.requests import JobInfo

__all__ = ["RATES", "Failure", "Graph", "is_late", "measure_recovery", "seconds_until_quiet"]

Graph = Literal["hop", "chain"]
"""One exchange between a source and a collector on a worker that is spared, or sources, a join, windows and
files on every worker."""
RATES: Final[Mapping[Graph, float]] = {"hop": 20_000.0, "chain": 2_000.0}
"""Records per second, of a chain in each of its sources."""
Failure = Literal["process", "task", "stop", "host", "coordinator"]
"""Kinds whose outage is measured."""

WARM_UP_SECONDS: Final = 2.0
WINDOW_SECONDS: Final = 2.0
"""Around each failure, and as long a time without one in front of it."""
CATCH_UP_SECONDS: Final = 4.0
"""What was struck is looked at for so much longer in a job with a guarantee: it has all to do again since its
snapshot."""
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
GUARANTEED_PHASES: Final = ("snapshot read", "replayed", "caught up")
"""More of a job with a guarantee, where a round had them: a task that has nothing yet reads none."""


def measure_recovery(
    *,
    graph: Graph,
    guarantee: Guarantee,
    failure: Failure,
    standby: int,
    kills: int,
    rate: float | None,
) -> dict[str, Any]:
    """Run it once. Times are in milliseconds, but for ``caught_up_s`` and ``snapshot_age_s``; ``lost``,
    ``again``, ``dropped`` and ``in_flight`` count rows.

    Without standby workers each worker has one slot to spare. Tasks fail in turn, and none a second time
    before its restart is at once again: a delay that is added on purpose is left out. The loss of a
    coordinator strikes no subtask: there is no outage then, and the others are all of them.

    Args:
        rate: see :data:`RATES`, which None stands for.

    Raises:
        UsageError: hosts, which are network namespaces, cannot be made here.
        ShuffleError: the job did not recover, or did not end as it should.
    """
    turn = itertools.count()

    def choose(count: int) -> int:
        return next(turn) % count

    rate = rate or RATES[graph]
    kind = ChainRun if graph == "chain" else NumberedRun
    slots = kind.parallelism // WORKERS + (0 if standby else 1)
    make = HostCluster if failure == "host" else LocalCluster
    with (
        tempfile.TemporaryDirectory(prefix="minishuffle-bench-") as directory,
        make(workers=WORKERS, slots=slots, standby=standby) as cluster,
    ):
        settings = JobSettings(guarantee=guarantee)
        run = kind(
            cluster, "bench-recovery", rate, directory, standby=standby, choose=choose, settings=settings
        )
        more = CATCH_UP_SECONDS if settings.is_guaranteed else 0.0
        rounds = _fail_again_and_again(run, failure, kills, more)
        rss = run.rss_bytes()
        info, made = run.end()
        output = run.output()
        lost, again, wrong = run.audit(made)
    if wrong:
        raise ShuffleError(f"{wrong} records are in rows of the output in which they do not belong")
    return {
        **{"graph": graph, "guarantee": guarantee, "failure": failure, "standby": standby, "kills": kills},
        "records": made,
        "lost": lost,
        "again": again,
        "others_restarted": sum(each.restarted for each in rounds),
        **_books(info),
        **_times(output, rounds, WINDOW_SECONDS + more),
        "rss_bytes": rss,
    }


def _fail_again_and_again(run: NumberedRun, failure: Failure, kills: int, more: float) -> list[FailureRound]:
    run.failures.wait_until_whole()
    time.sleep(WARM_UP_SECONDS)
    rounds: list[FailureRound] = []
    for _ in range(kills):
        if failure == "task":
            time.sleep(seconds_until_quiet(rounds, run.parallelism, time.monotonic_ns()))
        time.sleep(random.uniform(0.0, DRAWN_SECONDS))
        rounds.append(run.failures.fail(failure, WINDOW_SECONDS))
        time.sleep(more)
    return rounds


def seconds_until_quiet(rounds: Sequence[FailureRound], tasks: int, now: int) -> float:
    """Until the one of so many tasks whose turn is next has been quiet for long enough; ``now`` in monotonic
    nanoseconds."""
    if len(rounds) < tasks:
        return 0.0
    return max(0.0, QUIET_SECONDS - (now - rounds[-tasks].at) / 1e9)


# --- what is reported -------------------------------------------------------------------------------


def _times(output: NumberedOutput, rounds: Sequence[FailureRound], seconds: float) -> dict[str, Any]:
    """What was struck is looked at for so many seconds, or for as long as it may take: see
    :func:`_in_time`."""
    window = int(WINDOW_SECONDS * 1e9)
    outages = [output.outage(each.at, each.victims) for each in rounds if each.victims]
    for each, outage in zip(rounds, outages, strict=False):
        each.phases["first record"] = outage
    gaps = [gap.ms for each in rounds for gap in output.gaps(each.at, each.at + window, each.victims)]
    quiet = [gap.ms for each in rounds for gap in output.gaps(each.at - window, each.at, each.victims)]
    by_outage = sorted(range(len(outages)), key=outages.__getitem__)
    median = rounds[by_outage[(len(by_outage) - 1) // 2]] if by_outage else None
    tail = {f"p{share}": round(float(np.percentile(outages or [0.0], share)), 1) for share in (95, 99)}
    struck = [each for each in rounds if each.victims]
    ages = [each.snapshot_age for each in struck]
    until = [each.at + int(max(seconds, _in_time(age)) * 1e9) for each, age in zip(struck, ages, strict=True)]
    looks = zip(struck, until, strict=True)
    caught_up = [output.caught_up(each.at, each.victims, end) for each, end in looks]
    found = [each for each in caught_up if each is not None]
    return {
        "outage_ms": {**_spread(outages), **tail} if outages else None,
        "caught_up_s": _spread(found, 2) if found else None,
        "not_caught_up": caught_up.count(None),
        "snapshot_age_s": _spread(ages, 2) if any(ages) else None,
        "caught_up_late": sum(map(is_late, caught_up, ages)),
        "phases_ms": {
            phase: _spread([each.phases[phase] for each in rounds if phase in each.phases])
            for phase in (PHASES if outages else HEADLESS_PHASES)
            + tuple(each for each in GUARANTEED_PHASES if any(each in found.phases for found in rounds))
        },
        "others_gap_ms": _spread(gaps),
        "others_gap_baseline_ms": _spread(quiet),
        "output": _output_around(output, median) if median else None,
    }


def _in_time(age: float) -> float:
    """In how many seconds what was struck should have caught up that goes on from a snapshot of that age."""
    return 3 * age + 1


def is_late(caught_up: float | None, age: float) -> bool:
    """Whether it has not; all in seconds."""
    return caught_up is None or caught_up > _in_time(age)


def _output_around(output: NumberedOutput, failure: FailureRound) -> dict[str, Any]:
    """Records that came in each step of time, in percent of the mean before the failure: of the subtasks that
    were struck, and of all others."""
    window, step = int(WINDOW_SECONDS * 1e9), OUTPUT_STEP_MS * 1_000_000
    edges = range(failure.at + OUTPUT_FROM_MS * 1_000_000, failure.at + OUTPUT_UNTIL_MS * 1_000_000 + 1, step)
    others = frozenset(range(output.parallelism)) - failure.victims
    shares = {}
    for name, subtasks in (("struck", failure.victims), ("others", others)):
        (before,) = output.counts(subtasks, [failure.at - window, failure.at])
        shares[name] = (output.counts(subtasks, edges) * (100 * window / step / before)).round(1).tolist()
    return {"from_ms": OUTPUT_FROM_MS, "step_ms": OUTPUT_STEP_MS, **shares}


def _spread(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    if not values:
        raise ShuffleError("a phase of the recovery was not reported")
    return {"p50": round(statistics.median(values), digits), "max": round(max(values), digits)}


def _books(info: JobInfo) -> Mapping[str, int]:
    return {
        "dropped": sum(info.rows_dropped.values()),
        "in_flight": info.rows_in_flight,
        "state_lost": info.state_rows_lost,
        "rows_again": info.rows_again,
        "fallbacks": info.fallbacks,
    }
