"""``minishuffle drill``: failures in a running job, again and again, and what has to hold after each.

On a cluster and a job of its own, which is the hop of ``bench recovery``, or its chain if the job is to lose
nothing. After each failure

- every task runs again, and what failed has output;
- no attempt of another task was replaced;
- the output of none of the others was silent for longer than in the times of the same run in which nothing
  failed, and :data:`GAP_ALLOWANCE_MS` more;
- the books balance: what is missing from the collector's log is what the runtime counts. What a process takes
  with it when it dies is bounded. Rows that were in sockets when a function raised or a connection broke are
  counted when all attempts there have ended: they are bounded until the job ends, and exact then. With a
  guarantee nothing is missing and nothing is counted, and at the end the files are those of a run without
  failures, but for what came again.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

from minishuffle.bench.chaingraph import ChainRun
from minishuffle.bench.failures import POLL_SECONDS, FailureKind, FailureRound, wait_for
from minishuffle.bench.hosts import HostCluster
from minishuffle.bench.numbered import WORKERS, Gap, NumberedOutput, NumberedRun
from minishuffle.bench.stalls import Span, Stalls
from minishuffle.errors import ShuffleError, UsageError
from minishuffle.local import LocalCluster
from minishuffle.plan.graph import Guarantee, JobSettings
from minishuffle.wire.requests import JobInfo

__all__ = ["GAP_ALLOWANCE_MS", "QUIET_SECONDS", "Tally", "Findings", "books_problems", "report", "run_drill"]

GAP_ALLOWANCE_MS: Final = 250.0
RATE: Final = 2_000.0
"""Records per second."""
CHAIN_RATE: Final = 1_000.0
"""Those of each source of the chain."""
STANDBY: Final = 1
HEARTBEAT_TIMEOUT: Final = 1.5
"""Where workers or hosts are silent until they are declared lost."""
QUIET_SECONDS: Final = 2.0
"""In front of the first failure."""
BOOKS_SECONDS_MAX: Final = 5.0
"""How long the last reports of what failed may take, and the next record that it catches up with."""
EXACT: Final = frozenset[FailureKind]({"task", "link"})
"""Kinds by which no process dies: whatever is lost is counted."""
IN_FLIGHT_SECONDS_MAX: Final = 0.5
"""What may be lost uncounted of the input of a worker that is killed, vanishes or loses a connection."""


# --- checks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tally:
    """Rows: what is not in the log or should not be, and what the runtime counts."""

    missing: int = 0
    dropped: int = 0
    in_flight: int = 0
    """At most so many more were lost in what died."""
    duplicated: int = 0
    disordered: int = 0
    """Came behind a later one of their key."""
    in_sockets: int = 0
    """Lost with connections that broke, and not counted yet."""


class OutputTimes(Protocol):
    """When which subtask had output."""

    def outage(self, at: int, victims: frozenset[int]) -> float: ...

    def gaps(self, begin: int, end: int, without: frozenset[int]) -> list[Gap]: ...


@dataclass(slots=True)
class Findings:
    """What a drill has found so far; ``failed`` says which checks have failed, and how."""

    rounds: list[FailureRound] = field(default_factory=list)
    outages: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """The longest silence of another subtask around each failure, in milliseconds."""
    quiet: list[float] = field(default_factory=list)
    """The same in times without a failure."""
    progress: Callable[[str], None] = lambda text: None
    """Is given a line after each failure."""
    books: Tally | None = None
    """None: there is no log to compare with."""
    stalls: list[Span] = field(default_factory=list)
    """When the machine stood still."""
    failed: list[str] = field(default_factory=list)
    recovered: int = 0
    """Failures after which every check has passed."""

    @property
    def gap_limit(self) -> float:
        """Milliseconds that the others may be silent."""
        return max(self.quiet, default=0.0) + GAP_ALLOWANCE_MS

    def stay_quiet(self, output: OutputTimes, begin: int, end: int) -> None:
        """Nothing failed between these times (monotonic nanoseconds)."""
        self.quiet.append(max(output.gaps(begin, end, frozenset())).ms)

    def look(self, each: FailureRound, output: OutputTimes, end: int, wrong: Sequence[str]) -> None:
        """Check a failure, whose effects end at that time; ``wrong``: what was found already."""
        self.rounds.append(each)
        problems = [*wrong, *self._problems(each, output, end)]
        self.failed += [f"failure {len(self.rounds)} ({each.kind}): {problem}" for problem in problems]
        self.recovered += not problems
        found = "; ".join(problems) or f"recovered, others were silent for {self.gaps[-1]:.0f} ms"
        self.progress(f"failure {len(self.rounds)} ({each.kind}): {found}")

    @contextmanager
    def early_end(self) -> Iterator[None]:
        """A failure that cannot be caused, or that the job does not recover from, is the last one, and fails
        the drill."""
        try:
            yield
        except UsageError:
            raise
        except ShuffleError as error:
            self.failed.append(f"failure {len(self.rounds) + 1}: {error}")

    def _problems(self, each: FailureRound, output: OutputTimes, end: int) -> list[str]:
        problems = []
        try:
            self.outages.append(output.outage(each.at, each.victims))
        except ShuffleError as error:
            problems.append(str(error))
        if each.restarted:
            problems.append(f"{each.restarted} attempts of other tasks were replaced")
        gap = max(output.gaps(each.at, end, each.victims))
        self.gaps.append(gap.ms)
        if gap.ms > self.gap_limit:
            problems.append(
                f"another subtask ({gap.subtask}) was silent for {gap.ms:.0f} ms, from "
                f"{(gap.begin - each.at) / 1e6:.0f} ms after the failure on; the limit is "
                f"{self.gap_limit:.0f} ms"
            )
        return problems


def books_problems(each: FailureRound, before: Tally, after: Tally) -> list[str]:
    """What does not balance after a failure. Totals of the whole run."""
    problems = []
    missing, dropped = after.missing - before.missing, after.dropped - before.dropped
    in_flight = after.in_flight - before.in_flight
    read = IN_FLIGHT_SECONDS_MAX * RATE / WORKERS
    broken = _broken_links(each)
    died = after.in_flight > before.in_flight == 0  # once one has, what its peers do moves that bound
    late = max(0, before.in_sockets - after.in_sockets)
    if each.kind in EXACT and (missing + late < dropped or missing > dropped and not broken or died):
        problems.append(
            f"{missing} records are missing, {dropped} were counted as dropped and {in_flight} as in flight, "
            "although no process died"
        )
    if after.in_sockets - before.in_sockets > broken * read:
        problems.append(
            f"{after.in_sockets - before.in_sockets} records more are missing than were counted, and "
            f"{broken} connections broke between workers that live"
        )
    if not after.dropped <= after.missing <= after.dropped + after.in_flight + after.in_sockets:
        problems.append(
            f"{after.missing} records are missing so far, {after.dropped} were dropped and at most "
            f"{after.in_flight + after.in_sockets} more were in flight through what died or broke"
        )
    if each.kind in ("process", "host") and in_flight > read:
        problems.append(
            f"{in_flight} records were in flight, more than {IN_FLIGHT_SECONDS_MAX:g} s of what a worker "
            f"reads ({read:.0f})"
        )
    if dropped < 0:
        problems.append(f"the count of dropped records fell by {-dropped}")
    if after.duplicated > before.duplicated:
        problems.append(f"{after.duplicated - before.duplicated} records came twice")
    if after.disordered > before.disordered:
        problems.append(
            f"{after.disordered - before.disordered} records came behind a later one of their key"
        )
    return [f"books: {problem}" for problem in problems]


def _broken_links(each: FailureRound) -> int:
    """Connections between workers that live, which had rows in their sockets. So had those of a task that
    raised: rows on their way to it are counted once its siblings on that worker have ended as well."""
    return (each.kind in EXACT) + each.suspicions


def guarantee_problems(books: Tally) -> list[str]:
    """What does not hold of a job that is to lose nothing."""
    problems = []
    if books.missing:
        problems.append(f"{books.missing} records are missing")
    if books.dropped or books.in_flight:
        problems.append(f"{books.dropped} records were counted as dropped and {books.in_flight} as in flight")
    return [f"books: {problem}, although nothing may be lost" for problem in problems]


def lost_in_sockets(each: FailureRound, before: Tally, after: Tally) -> int:
    """How many records were in the sockets of connections that broke: missing, and not counted so far. Below
    0: so many of those that were in sockets before are counted now."""
    lost = after.missing - before.missing - (after.dropped - before.dropped)
    if each.kind not in EXACT:  # some of it is in flight through what died
        return max(0, lost - (after.in_flight - before.in_flight)) if _broken_links(each) else 0
    return max(-before.in_sockets, lost)


def final_problems(kinds: Iterable[FailureKind], books: Tally) -> list[str]:
    """What does not balance once the job has ended: nothing is in sockets then."""
    kind: FailureKind = "task" if set(kinds) <= EXACT else "stop"
    return books_problems(FailureRound(kind, 0, frozenset(), 0, 0), Tally(), books)


# --- on a job of its own --------------------------------------------------------------------------


class Drill:
    """What has to hold after each failure of a numbered job.

    Args:
        every: seconds, at least, between two failures.
        stalls: of the machine, which are nobody's silence.
    """

    def __init__(
        self,
        run: NumberedRun,
        every: float,
        *,
        stalls: Stalls,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._stalls = stalls
        self._books = Tally()
        self._quiet_since = 0
        """Monotonic nanoseconds at which what had failed before was back."""
        self.findings = Findings(progress=progress, books=self._books)
        self._run = run
        self._every = every

    def begin(self) -> None:
        """Wait for output everywhere, and see what is usual.

        Raises:
            ShuffleError: that took too long.
        """
        self._run.wait_for_output()
        self._run.failures.wait_until_whole()
        self._quiet_since = time.monotonic_ns()
        time.sleep(QUIET_SECONDS)

    def look(self, each: FailureRound) -> None:
        """What has to hold after a failure.

        Raises:
            ShuffleError: the job has not recovered.
        """
        end = max(each.whole_at, each.at + int(self._every * 1e9))
        self._output_behind(time.monotonic_ns())  # what failed is back, and nothing more is dropped
        back = time.monotonic_ns()
        output, count = self._output_behind(back)
        self.findings.stay_quiet(output, self._quiet_since, each.at)
        self._quiet_since = back
        self.findings.look(each, output, end, self._balance(each, output, count))

    def _output_behind(self, at: int) -> tuple[NumberedOutput, int]:
        """The log once every subtask has passed on what was due by that time, and how many records that is.

        Raises:
            ShuffleError: that took too long.
        """

        def look() -> tuple[NumberedOutput, int] | None:
            output = self._output()
            count = output.due_by(at)
            return (output, count) if output.has_passed(count) else None

        return wait_for(look, lambda limit: f"not every keyed subtask has had output within {limit}")

    def _output(self) -> NumberedOutput:
        self.findings.stalls = self._stalls.spans()
        return self._run.output(self.findings.stalls)

    def _balance(self, each: FailureRound, output: NumberedOutput, count: int) -> list[str]:
        """Compare what is missing of the first ``count`` records with what the runtime counts."""
        info = self._run.wait_for_reports(time.monotonic_ns())
        before, deadline = self._books, time.monotonic() + BOOKS_SECONDS_MAX
        while True:
            after = _books(output, count, info, before.in_sockets)
            after = replace(after, in_sockets=before.in_sockets + lost_in_sockets(each, before, after))
            problems = books_problems(each, before, after)
            if not problems or time.monotonic() > deadline:
                self._books = self.findings.books = after
                return problems
            time.sleep(POLL_SECONDS)
            info = self._run.handle.info()

    def end(self) -> None:
        """Have the job end, and check the books of the whole run.

        Raises:
            ShuffleError: it ended in another way than it should.
        """
        info, made = self._run.end()
        self.findings.books = _books(self._output(), made, info, 0)
        kinds = [each.kind for each in self.findings.rounds]
        problems = final_problems(kinds, self.findings.books)
        self.findings.failed += [f"at the end: {problem}" for problem in problems]


class GuaranteedDrill(Drill):
    """The same for a job that is to lose nothing."""

    def _balance(self, each: FailureRound, output: NumberedOutput, count: int) -> list[str]:
        """Wait until the first ``count`` records have all come, as long as more of them come: what failed has
        to catch up, and takes its time on a machine that is busy with other things."""
        fewest, deadline = math.inf, 0.0
        while True:
            books = self._books = self.findings.books = _books(output, count, self._run.handle.info(), 0)
            problems = guarantee_problems(books)
            if books.missing < fewest:
                fewest, deadline = books.missing, time.monotonic() + BOOKS_SECONDS_MAX
            if not problems or time.monotonic() > deadline:
                return problems
            time.sleep(POLL_SECONDS)
            output = self._output()

    def end(self) -> None:
        """Have the job end, and compare its files with what its sources made.

        Raises:
            ShuffleError: it ended in another way than it should.
        """
        info, made = self._run.end()
        lost, again, wrong = self._run.audit(made)
        books = replace(_books(self._output(), made, info, 0), missing=lost, duplicated=again)
        self.findings.books = books
        problems = guarantee_problems(books)
        if wrong:
            problems.append(f"{wrong} records are in rows of the output in which they do not belong")
        self.findings.failed += [f"at the end: {problem}" for problem in problems]


def _books(output: NumberedOutput, count: int, info: JobInfo, in_sockets: int) -> Tally:
    return Tally(
        missing=output.missing(count),
        dropped=sum(info.rows_dropped.values()),
        in_flight=info.rows_in_flight,
        duplicated=output.duplicated,
        disordered=output.disordered,
        in_sockets=in_sockets,
    )


def run_drill(
    kinds: Sequence[FailureKind],
    *,
    every: float,
    seed: int,
    guarantee: Guarantee = "loss",
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Bring these failures about, in order, at least ``every`` seconds apart; the seed decides whom they
    strike. Times are in milliseconds, ``failed_checks`` is empty if all is well.

    Args:
        progress: is given a line after each failure.

    Raises:
        UsageError: hosts, which are network namespaces, cannot be made here.
        ShuffleError: the job did not come to its end.
    """
    slow = {"stop", "host"} & set(kinds)
    settings: dict[str, Any] = {"heartbeat_timeout": HEARTBEAT_TIMEOUT} if slow else {}
    make = HostCluster if "host" in kinds else LocalCluster
    job, drilled, rate = NumberedRun, Drill, RATE
    if guarantee != "loss":
        job, drilled, rate = ChainRun, GuaranteedDrill, CHAIN_RATE
    with (
        tempfile.TemporaryDirectory(prefix="minishuffle-drill-") as directory,
        Stalls(Path(directory, "stalls")) as stalls,
        make(workers=WORKERS, slots=job.parallelism // WORKERS, standby=STANDBY, **settings) as cluster,
    ):
        choose = Random(seed).randrange
        asked = JobSettings(guarantee=guarantee)
        run = job(cluster, "drill", rate, directory, standby=STANDBY, choose=choose, settings=asked)
        drill = drilled(run, every, stalls=stalls, progress=progress)
        with drill.findings.early_end():
            drill.begin()
            for kind in kinds:
                drill.look(run.failures.fail(kind, every))
        if len(drill.findings.rounds) == len(kinds):
            drill.end()
    return {"guarantee": guarantee, **report(kinds, every, seed, drill.findings)}


def report(kinds: Sequence[FailureKind], every: float, seed: int, findings: Findings) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "kind": kinds[0] if len(set(kinds)) == 1 else "all",
        "times": len(kinds),
        "recovered": findings.recovered,
        "every": every,
        "seed": seed,
        "outage_ms": _spread(findings.outages),
        "others_gap_ms": _spread(findings.gaps),
        "others_gap_baseline_ms": _spread(findings.quiet),
        "machine_stalls_ms": _spread([(end - begin) / 1e6 for begin, end in findings.stalls]),
        "others_restarted": sum(each.restarted for each in findings.rounds),
        **(asdict(findings.books) if findings.books is not None else {}),
        "failed_checks": findings.failed,
    }


def _spread(values: Sequence[float]) -> Mapping[str, float]:
    return {"p50": round(statistics.median(values), 1), "max": round(max(values), 1)} if values else {}
