"""``minishuffle drill``: failures in a running job, again and again, and what has to hold after each.

The job is that of ``bench recovery``, on a cluster of its own. After each failure every task runs again, no
attempt of another task was replaced, and the output of none of the others was silent for longer than it is at
other times of the same run, and ``GAP_ALLOWANCE_MS`` more. At the end the books balance: what is missing from
the collector's log is what the runtime counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from minishuffle.bench.failures import RECOVERY_SECONDS_MAX, FailureKind, FailureRound, FailureSeries
from minishuffle.bench.hosts import HostCluster
from minishuffle.bench.numbered import PARALLELISM, NumberedOutput, numbered_job
from minishuffle.errors import ShuffleError
from minishuffle.local import LocalCluster

__all__ = ["GAP_ALLOWANCE_MS", "Findings", "run_drill"]

GAP_ALLOWANCE_MS: Final = 250.0
RATE: Final = 2_000.0
"""Records per second."""
WORKERS: Final = 4
STANDBY: Final = 1
HEARTBEAT_TIMEOUT: Final = 1.5
"""Where workers or hosts are silent until they are declared lost."""


@dataclass(slots=True)
class Findings:
    """What a drill has found so far; ``failed`` says which checks have failed, and how."""

    rounds: list[FailureRound] = field(default_factory=list)
    outages: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """The longest silence of another keyed subtask around each failure, in milliseconds."""
    quiet: list[float] = field(default_factory=list)
    """The same in front of each failure."""
    books: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    recovered: int = 0
    """FailureSeries after which every check of theirs has passed."""

    @property
    def gap_limit(self) -> float:
        """Milliseconds that the others may be silent."""
        return max(self.quiet, default=0.0) + GAP_ALLOWANCE_MS

    def look(self, output: NumberedOutput, every: float) -> None:
        """Check each round against the collector's log."""
        for each in self.rounds:
            end = max(each.whole_at, each.at + int(every * 1e9))
            self.gaps.append(max(output.gaps(each.at, end, each.victims)))
            self.quiet.append(max(output.gaps(each.at - int(every * 1e9), each.at, frozenset())))
        for number, each in enumerate(self.rounds):
            problems = self._problems(number, each, output)
            self.failed += [f"failure {number + 1} ({each.kind}): {problem}" for problem in problems]
            self.recovered += not problems

    def _problems(self, number: int, each: FailureRound, output: NumberedOutput) -> list[str]:
        problems = []
        try:
            self.outages.append(output.outage(each.at, each.victims))
        except ShuffleError as error:
            problems.append(str(error))
        if each.restarted:
            problems.append(f"{each.restarted} attempts of other tasks were replaced")
        if self.gaps[number] > self.gap_limit:
            problems.append(
                f"another subtask was silent for {self.gaps[number]:.0f} ms, the limit is "
                f"{self.gap_limit:.0f} ms"
            )
        return problems

    def balance(self, kinds: set[FailureKind], books: dict[str, int]) -> None:
        """Compare what is missing from the log with what the runtime counts."""
        self.books = books
        missing, dropped, in_flight = books["missing"], books["dropped"], books["in_flight"]
        if books["duplicated"]:
            self.failed.append(f"books: {books['duplicated']} records came twice")
        if kinds <= {"task", "link"}:
            in_flight = 0  # nobody died
        if not dropped <= missing <= dropped + in_flight:
            self.failed.append(
                f"books: {missing} records are missing, {dropped} were dropped and at most {in_flight} more "
                "were in flight through what died"
            )


def run_drill(kinds: Sequence[FailureKind], *, every: float, seed: int) -> dict[str, Any]:
    """Bring these failures about, in order, at least ``every`` seconds apart; the seed decides whom they
    strike. Times are in milliseconds, ``failed_checks`` is empty if all is well.

    Raises:
        UsageError: hosts, which are network namespaces, cannot be made here.
        ShuffleError: the job did not come to its end.
    """
    findings = Findings()
    slow = {"stop", "host"} & set(kinds)
    settings: dict[str, Any] = {"heartbeat_timeout": HEARTBEAT_TIMEOUT} if slow else {}
    make = HostCluster if "host" in kinds else LocalCluster
    with tempfile.TemporaryDirectory(prefix="minishuffle-drill-") as directory:
        slots = PARALLELISM // WORKERS
        with make(workers=WORKERS, slots=slots, standby=STANDBY, **settings) as cluster:
            handle = cluster.submit(numbered_job(RATE, directory), name="drill", parallelism=PARALLELISM)
            choose = Random(seed).randrange
            failures = FailureSeries(cluster, handle, directory, standby=STANDBY, choose=choose)
            try:
                failures.wait_for_output()
                for kind in kinds:
                    failures.wait_until_whole()
                    time.sleep(every)
                    findings.rounds.append(failures.fail(kind, every))
            except ShuffleError as error:
                findings.failed.append(f"failure {len(findings.rounds) + 1}: {error}")
                return _report(kinds, every, seed, findings)
            time.sleep(every)
            Path(directory, "stop").touch()
            info = handle.wait_until_over(RECOVERY_SECONDS_MAX)
        if info.state not in ("finished", "finished_with_loss"):
            raise ShuffleError(f"the job ended as {info.state}")
        output = NumberedOutput(f"{directory}/log.npz", int(Path(directory, "begin").read_text()), RATE)
    findings.look(output, every)
    made = sum(task.counters.records_out for task in info.tasks if task.name == "Numbered")
    books = {
        "missing": made - output.distinct,
        "dropped": sum(info.rows_dropped.values()),
        "in_flight": info.rows_in_flight,
        "duplicated": len(output.numbers) - output.distinct,
    }
    findings.balance(set(kinds), books)
    return _report(kinds, every, seed, findings)


def _report(kinds: Sequence[FailureKind], every: float, seed: int, findings: Findings) -> dict[str, Any]:
    return {
        "kind": kinds[0] if len(set(kinds)) == 1 else "all",
        "times": len(kinds),
        "recovered": findings.recovered,
        "every": every,
        "seed": seed,
        "outage_ms": _spread(findings.outages),
        "others_gap_ms": _spread(findings.gaps),
        "others_gap_baseline_ms": _spread(findings.quiet),
        "others_restarted": sum(each.restarted for each in findings.rounds),
        **findings.books,
        "failed_checks": findings.failed,
    }


def _spread(values: Sequence[float]) -> Mapping[str, float]:
    return {"p50": round(statistics.median(values), 1), "max": round(max(values), 1)} if values else {}
