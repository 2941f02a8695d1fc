"""Reports of a worker about its attempts: facts on their way to the coordinator, and reports until they are
acknowledged. Pure.

Facts are sent in the order in which they occurred. Facts of one turn of the loop share a report:

==============================  ======================================================================
fact                            when it is sent, and with which others
==============================  ======================================================================
rows                            alone: they are not kept for a journal that cannot be written
completed files                 with others of their attempt: the coordinator refuses all or none of them, and
                                lists them at once
a task stands at a barrier      with others of its kind, and once: heartbeats repeat it
ends read                       together, ENDS_WAIT_SECONDS after the first of them; not at all if the
                                attempt itself ends within this time, since its end implies them
positions that may wait         together, when the clock reaches a multiple of HELD_SECONDS; or within half of
                                the time they have, or with an earlier report; those of all sources, which the
                                worker asks for every LEASE_SECONDS, at once
all others                      together
==============================  ======================================================================

Reports are numbered and kept until they are acknowledged, for when the link to the coordinator breaks.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, TypeAlias, TypeGuard

from minishuffle import limits
from minishuffle.ids import AttemptId
from minishuffle.wire.packed import SplitPosition, pack_positions, unpack_positions
from minishuffle.wire.reports import (
    AttemptReport,
    Collected,
    EndsRead,
    Fact,
    FileCompleted,
    SourcePositions,
    TaskReleased,
    TaskStands,
    TaskStateChanged,
)

__all__ = ["ACKNOWLEDGE_LOOKS", "ENDS_WAIT_SECONDS", "AttemptReports", "AwaitedFact"]

AwaitedFact: TypeAlias = SourcePositions | FileCompleted | Collected
"""A fact for which a task may wait until the coordinator has it."""

ENDS_WAIT_SECONDS: Final = 0.05
"""Seconds for which an end waits for others."""
HELD_SECONDS: Final = 0.05
"""All workers of a machine send positions at the same times: the coordinator wakes less often for them."""
ACKNOWLEDGE_LOOKS: Final = 4
"""Checks for acknowledgements within ``heartbeat_timeout``, the longest time that sources wait."""
FACTS_MAX: Final = 256
"""Most facts in one report."""
END_BYTES: Final = 8
FACT_BYTES: Final = 1_024
"""Estimated bytes of a producer, and of a fact."""


class AttemptReports:
    """The reports of one worker.

    Sources do not wait for an acknowledgement for long: see :meth:`unblock_sources`.

    Invariant: the numbers of kept reports ascend; the last number given is the last of them, if its
    report is kept.
    """

    def __init__(self) -> None:
        self.last = 0
        """The last number that was given; they begin with 1."""
        self._due: deque[list[Fact]] = deque()
        """The facts of the next reports."""
        self._ends: dict[tuple[AttemptId, int], list[int]] = {}
        """Producers read to the end, by attempt and edge, which are not due so far."""
        self._ends_due: float | None = None
        self._held: list[tuple[float, SourcePositions]] = []
        """Facts that wait for others, and since when; they go before any other fact."""
        self._held_due: float | None = None
        self._unblocked = 0
        """Sources wait for no acknowledgement up to that number."""
        self._looks = deque([0] * (ACKNOWLEDGE_LOOKS + 1), ACKNOWLEDGE_LOOKS + 1)
        """The number of the last report at each look; the first was ``heartbeat_timeout`` ago."""
        self._kept: deque[AttemptReport] = deque()
        self._bytes = 0

    # --- facts -----------------------------------------------------------------------------------

    def add(self, fact: Fact, now: float, *, held: bool = True) -> bool:
        """Something is to be reported, ``now`` in seconds of any clock. Gives whether it is the first of what
        is due at the end of the loop's turn. Not ``held``: it waits for nothing else."""
        if isinstance(fact, EndsRead):
            self._ends.setdefault((fact.attempt, fact.edge), []).extend(fact.producers)
            self._ends_due = now + ENDS_WAIT_SECONDS if self._ends_due is None else self._ends_due
            return False
        if held and isinstance(fact, SourcePositions) and fact.within:
            due = min(now + fact.within / 2, math.ceil(now / HELD_SECONDS) * HELD_SECONDS)
            self._held_due = due if self._held_due is None else min(due, self._held_due)
            self._held.append((now, fact))
            return False
        if isinstance(fact, TaskStateChanged) and fact.ends:
            self.forget_ends(fact.attempt)
        is_first = not self._due
        self._release_held(now)
        self._add_due(fact)
        return is_first

    def _add_due(self, fact: Fact) -> None:
        if self._due and _go_together(self._due[-1], fact):
            self._due[-1].append(fact)
        else:
            self._due.append([fact])

    def _release_held(self, now: float) -> None:
        for since, fact in self._held:
            left = max(fact.within - max(0.0, now - since), fact.within / 4)
            self._add_due(fact.model_copy(update={"within": left}))
        self._held.clear()
        self._held_due = None

    def forget_ends(self, attempt: AttemptId) -> None:
        """Drop an attempt's unsent ends: they are no longer needed."""
        for key in [key for key in self._ends if key[0] == attempt]:
            del self._ends[key]

    def next_deadline(self) -> float | None:
        """When :meth:`take` is to be called, if nothing is added."""
        return min((due for due in (self._ends_due, self._held_due) if due is not None), default=None)

    def take(self, term: int, now: float) -> AttemptReport | None:
        """The next report that is due, to a coordinator of that term; it is kept if it has a number. What is
        held goes with it, or alone: something else is about to be sent."""
        self._release_held(now)
        if self._ends_due is not None and now >= self._ends_due:
            for (attempt, edge), read in self._ends.items():
                self._add_due(EndsRead(attempt=attempt, edge=edge, producers=read))
            self._ends.clear()
            self._ends_due = None
        if not self._due:
            return None
        facts = self._due.popleft()
        if isinstance(facts[0], TaskStands):
            return AttemptReport(term=term, facts=facts)
        if self._kept and self._kept[0].number <= self._unblocked:
            facts = [self._united(fact) for fact in facts]
        self.last += 1
        report = AttemptReport(term=term, number=self.last, facts=facts)
        self._kept.append(report)
        self._bytes += _kept_bytes(report)
        return report

    def take_back(self, report: AttemptReport) -> None:
        """The report taken last cannot be sent. If it has several facts, each is due once more, alone."""
        if report.number:
            self.last -= 1
            self._bytes -= _kept_bytes(self._kept.pop())
        if len(report.facts) > 1:
            self._due.extendleft([fact] for fact in reversed(report.facts))

    def _united(self, fact: Fact) -> Fact:
        """A fact about positions, combined with and replacing earlier ones of its attempt that are no longer
        awaited."""
        if not isinstance(fact, SourcePositions) or fact.waits:
            return fact
        entries: dict[int, SplitPosition] = {}
        kept = deque[AttemptReport]()
        for report in self._kept:
            others = list[Fact]()
            for each in report.facts:
                if report.number <= self._unblocked and _of_one_source(each, fact):
                    entries.update((entry.split, entry) for entry in unpack_positions(each.positions))
                else:
                    others.append(each)
            if len(others) == len(report.facts):
                kept.append(report)
            elif others:
                kept.append(report.model_copy(update={"facts": others}))
        self._kept = kept
        entries.update((entry.split, entry) for entry in unpack_positions(fact.positions))
        return fact.model_copy(update={"positions": pack_positions(entries.values())})

    # --- reports that were sent ------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """No rows are to be sent until the coordinator has acknowledged some. Ends of tasks always are."""
        return self._bytes >= limits.UNACKNOWLEDGED_BYTES_MAX

    def __len__(self) -> int:
        """Reports that are not acknowledged, or not sent so far."""
        return len(self._kept) + len(self._due) + bool(self._ends) + bool(self._held)

    def acknowledge(self, number: int, *, refused: bool = False, files: bool = True) -> list[AwaitedFact]:
        """The coordinator has applied all reports up to ``number``. Returns the facts in them whose task
        waits for it.

        Args:
            refused: the last report has a file that is not listed.
            files: include facts about files. Otherwise these are kept and reported again, since the
                coordinator may have refused them.
        """
        applied: list[AwaitedFact] = []
        unanswered: list[AttemptReport] = []
        while self._kept and self._kept[0].number <= number:
            report = self._kept.popleft()
            if not files and isinstance(report.facts[0], FileCompleted):
                unanswered.append(report)
                continue
            self._bytes -= _kept_bytes(report)
            for fact in report.facts:
                match fact:
                    case FileCompleted() if not (refused and report.number == number):
                        applied.append(fact)
                    case Collected():
                        applied.append(fact)
                    case SourcePositions(waits=waits) if waits or report.number > self._unblocked:
                        applied.append(fact)
        self._kept.extendleft(reversed(unanswered))
        return applied

    def free_rows(self, number: int) -> list[Collected]:
        """The coordinator has applied all reports up to ``number``, but its journal does not have them. Rows
        for clients are dropped, since they are not journaled anyway, and returned; all other facts are
        kept."""
        rows = [each for each in self._kept if each.number <= number and isinstance(each.facts[0], Collected)]
        self._bytes -= sum(map(_kept_bytes, rows))
        numbers = {each.number for each in rows}
        self._kept = deque(each for each in self._kept if each.number not in numbers)
        return [fact for each in rows for fact in each.facts if isinstance(fact, Collected)]

    def unblock_sources(self, number: int) -> list[SourcePositions]:
        """The coordinator does not answer: return the positions up to ``number`` whose sources wait, so that
        the sources continue, see :mod:`~minishuffle.worker.sources.witnesses`. External writes keep waiting:
        their rows must not come twice."""
        waiting = [report for report in self._kept if self._unblocked < report.number <= number]
        self._unblocked = max(self._unblocked, number)
        facts = [fact for report in waiting for fact in report.facts]
        return [fact for fact in facts if isinstance(fact, SourcePositions) and not fact.waits]

    def look(self) -> list[SourcePositions]:
        """Called ACKNOWLEDGE_LOOKS times in each ``heartbeat_timeout``. Returns the positions whose sources
        stop waiting, because their reports are older than that."""
        self._looks.append(self.last)
        return self.unblock_sources(self._looks[0])

    def positions(self) -> list[SourcePositions]:
        """Positions of sources not acknowledged yet, up to report ``last``."""
        facts = [fact for report in self._kept for fact in report.facts]
        return [fact for fact in facts if isinstance(fact, SourcePositions) and not fact.waits]

    def kept(self, term: int, *, behind: int = 0) -> list[AttemptReport]:
        """Everything that is not acknowledged, to be sent to a coordinator of that term; only reports with
        numbers ``behind`` that one."""
        return [report.model_copy(update={"term": term}) for report in self._kept if report.number > behind]

    def first_kept(self, term: int) -> list[AttemptReport]:
        """The same from the first on, as much as goes into one message."""
        found, size = list[AttemptReport](), 0
        for report in self.kept(term):
            size += sum(FACT_BYTES + _size(fact) for fact in report.facts)
            if size > limits.RETURN_BYTES_MAX:
                break
            found.append(report)
        return found


def _go_together(facts: list[Fact], fact: Fact) -> bool:
    """Whether a fact goes with those that are due."""
    first = facts[0]
    alone = isinstance(fact, Collected) or isinstance(first, Collected)
    alike = isinstance(fact, TaskStands) == isinstance(first, TaskStands)
    if isinstance(fact, FileCompleted) or isinstance(first, FileCompleted):
        alike = isinstance(fact, type(first)) and fact.attempt == first.attempt
    if alone or not alike or len(facts) >= FACTS_MAX:
        return False
    return _size(fact) + sum(map(_size, facts)) <= limits.GATHERED_BYTES


def _size(fact: Fact) -> int:
    """Bytes of what it carries in bytes and lists: a report has a bound of values, too."""
    match fact:
        case TaskStateChanged(result=result, traffic=traffic, positions=positions, error=error):
            texts = 0 if error is None else len(error.text) + len(error.traceback)
            return len(result) + len(traffic) + len(positions) + texts
        case TaskReleased(traffic=traffic):
            return len(traffic)
        case SourcePositions(positions=positions):
            return len(positions)
        case EndsRead(producers=producers):
            return END_BYTES * len(producers)
        case Collected(payload=payload):
            return len(payload)
    return 0


def _kept_bytes(report: AttemptReport) -> int:
    """Bytes of rows and results, of which no more are sent while too many are kept."""
    rows = [fact for fact in report.facts if isinstance(fact, Collected)]
    results = [fact for fact in report.facts if isinstance(fact, TaskStateChanged)]
    return sum(len(each.payload) for each in rows) + sum(len(each.result) for each in results)


def _of_one_source(fact: Fact, other: SourcePositions) -> TypeGuard[SourcePositions]:
    """Whether it is positions of the same attempt, and of a source of its own."""
    return isinstance(fact, SourcePositions) and fact.attempt == other.attempt and not fact.waits
