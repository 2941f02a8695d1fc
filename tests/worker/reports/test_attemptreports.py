"""What a worker reports: which facts go together and when, and what is kept until it is acknowledged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from minishuffle import limits
from minishuffle.wire.control import pack_message, unpack_message
from minishuffle.wire.messages import Standing
from minishuffle.wire.packed import SplitPosition, pack_positions, unpack_positions
from minishuffle.wire.reports import (
    AttemptReport,
    Collected,
    EndsRead,
    Fact,
    FileCompleted,
    PartitionReadable,
    SourcePositions,
    TaskReleased,
    TaskStands,
    TaskStateChanged,
)
from minishuffle.worker.reports import attemptreports
from minishuffle.worker.reports.attemptreports import ENDS_WAIT_SECONDS, AttemptReports
from support.attempts import attempt

TASK = attempt()
FINISHED = TaskStateChanged(attempt=TASK, state="finished")
RUNNING = TaskStateChanged(attempt=TASK, state="running")
FILE = FileCompleted(attempt=TASK, file=0, path="part-0", rows=1, bytes=9, checksum="")
STANDS = TaskStands(attempt=TASK, standing=Standing(barrier=1))


def rows_of(size: int) -> Collected:
    return Collected(attempt=TASK, payload=bytes(size))


def positions_of(split: int, position: int, number: int = 1) -> SourcePositions:
    table = pack_positions([SplitPosition(split, position, 5)])
    return SourcePositions(attempt=attempt(number=number), positions=table)


def read(operator: int, producer: int, edge: int = 0, job: str = "j1") -> EndsRead:
    return EndsRead(attempt=attempt(operator, job=job), edge=edge, producers=[producer])


def taken(reports: AttemptReports, now: float = 1.0) -> list[AttemptReport]:
    found = []
    while (report := reports.take(1, now)) is not None:
        found.append(report)
    return found


def sent(reports: AttemptReports, fact: Fact) -> AttemptReport:
    """In a report of its own."""
    reports.add(fact, 1.0)
    (report,) = taken(reports)
    assert report.facts[-1].kind == fact.kind
    return report


def kept(reports: AttemptReports) -> list[AttemptReport]:
    return reports.kept(1)


# --- what goes together ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "together"),
    [
        ([RUNNING, positions_of(0, 1), PartitionReadable(attempt=attempt(2), edge=0), FINISHED], [4]),
        ([FINISHED, TaskReleased(attempt=TASK, traffic=b"")], [2]),
        ([RUNNING, rows_of(1), rows_of(1), FINISHED], [1, 1, 1, 1]),
        ([FILE, FILE, FINISHED], [2, 1]),
        ([RUNNING, FILE, FILE.model_copy(update={"attempt": attempt(2)}), rows_of(1), FILE], [1, 1, 1, 1, 1]),
        ([RUNNING, STANDS, STANDS, FINISHED], [1, 2, 1]),
        ([TaskStateChanged(attempt=TASK, state="finished", result=bytes(60))] * 3, [1, 1, 1]),
    ],
)
def test_facts_keep_their_order_and_share_reports(
    facts: list[Fact], together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GATHERED_BYTES", 100)
    reports = AttemptReports()
    assert [reports.add(fact, 1.0) for fact in facts] == [True] + [False] * (len(facts) - 1)
    found = taken(reports)
    assert [len(report.facts) for report in found] == together
    assert [fact for report in found for fact in report.facts] == facts
    numbered = [report for report in found if report.number]
    assert [report.number for report in numbered] == [*range(1, len(numbered) + 1)]
    assert [report for report in found if not report.number] == [
        report for report in found if STANDS in report.facts
    ]


def test_ends_wait_for_each_other_and_not_for_their_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that ends within this time says all by that."""
    reports = AttemptReports()
    assert reports.next_deadline() is None
    for producer in (0, 1, 2):
        reports.add(read(1, producer), 1.0)
    reports.add(read(2, 0), 1.0)
    reports.add(read(1, 1, edge=2), 1.0 + ENDS_WAIT_SECONDS / 2)
    reports.add(read(4, 0, edge=5, job="j2"), 1.0 + ENDS_WAIT_SECONDS / 2)
    reports.add(TaskStateChanged(attempt=attempt(2), state="failed"), 1.0)
    reports.add(TaskStateChanged(attempt=attempt(1), state="running"), 1.0)
    now = 1.0 + ENDS_WAIT_SECONDS
    assert [[fact.kind for fact in each.facts] for each in taken(reports)] == [["task_state"] * 2]
    assert reports.next_deadline() == now
    first = EndsRead(attempt=attempt(1), edge=0, producers=[0, 1, 2])
    assert len(reports) == 2, "one was sent"
    (report,) = taken(reports, now)
    assert report.facts == [first, read(1, 1, edge=2), read(4, 0, edge=5, job="j2")]
    assert taken(reports, now + 1) == [] and reports.next_deadline() is None
    monkeypatch.setattr(attemptreports, "FACTS_MAX", 2)
    for operator in range(5):
        reports.add(read(operator, 0), 2.0)
    reports.forget_ends(attempt(0))
    assert [len(each.facts) for each in taken(reports, 3.0)] == [2, 2]
    monkeypatch.undo()
    for operator in range(20):
        reports.add(EndsRead(attempt=attempt(operator), edge=0, producers=list(range(32_768))), 4.0)
    for report in taken(reports, 5.0):
        assert unpack_message(pack_message(report)) == report, "it has no more values than a message may have"


def test_positions_that_may_wait_go_together_in_time_and_before_what_follows() -> None:
    reports = AttemptReports()
    waiting = [
        positions_of(0, index).model_copy(update={"within": within})
        for index, within in ((0, 0.1), (1, 0.016), (2, 0.1))
    ]
    for fact, now, due in zip(waiting, (1.001, 1.002, 1.003), (1.05, 1.01, 1.01), strict=True):
        assert not reports.add(fact, now), "an alarm is enough"
        assert reports.next_deadline() == pytest.approx(due), "a multiple of HELD_SECONDS, or in time"
    (report,) = taken(reports, 1.01)
    facts = [fact for fact in report.facts if isinstance(fact, SourcePositions)]
    assert [fact.within for fact in facts] == pytest.approx([0.091, 0.008, 0.093]), "what is left of it"
    assert [fact.positions for fact in facts] == [fact.positions for fact in waiting]
    assert not reports.add(waiting[0], 2.0) and reports.add(waiting[1], 2.01, held=False)
    (report,) = taken(reports, 2.01)
    assert [fact.attempt for fact in report.facts] == [each.attempt for each in waiting[:2]]
    assert reports.next_deadline() is None, "nothing is to be called for it"
    assert not reports.add(waiting[0], 2.0) and reports.add(FINISHED, 2.0)
    (report,) = taken(reports, 2.0)
    assert [fact.kind for fact in report.facts] == ["source_positions", "task_state"]
    assert reports.next_deadline() is None


def test_a_report_that_cannot_be_sent_leaves_no_gap_and_is_divided() -> None:
    reports = AttemptReports()
    sent(reports, rows_of(10))
    reports.add(RUNNING, 1.0)
    reports.add(FINISHED, 1.0)
    both = reports.take(1, 1.0)
    assert both is not None and both.facts == [RUNNING, FINISHED]
    reports.take_back(both)
    again = taken(reports)
    assert [(report.number, report.facts) for report in again] == [(2, [RUNNING]), (3, [FINISHED])]
    reports.take_back(again[1])
    assert taken(reports) == [] and reports.last == 2
    assert [report.number for report in kept(reports)] == [1, 2]


def test_reports_are_made_by_one_collector_and_judged_at_one_place() -> None:
    package = Path(attemptreports.__file__).parents[2]
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    made = {name for name, text in sources.items() if re.search(r"(?<!class )\bAttemptReport\(\w", text)}
    assert made == {"worker/reports/attemptreports.py", "bench/scale.py"}
    judged = {name for name, text in sources.items() if re.search(r"\bjob\.subtasks\.current\(", text)}
    assert judged == {"coordinator/jobs/attemptreports.py"}


# --- what is kept ---------------------------------------------------------------------------------------


def test_reports_are_kept_until_they_are_acknowledged() -> None:
    reports = AttemptReports()
    found = [sent(reports, rows_of(10)) for _ in range(3)]
    found.append(sent(reports, FINISHED))
    sent(reports, STANDS)
    assert [report.number for report in found] == [1, 2, 3, 4]
    assert kept(reports) == found and len(reports) == 4
    reports.acknowledge(2)
    reports.acknowledge(1)
    assert kept(reports) == found[2:]
    reports.acknowledge(9)
    assert kept(reports) == []
    assert sent(reports, rows_of(1)).number == 5


def test_what_became_of_a_file_is_not_known_from_a_number_alone() -> None:
    reports = AttemptReports()
    file = sent(reports, FILE)
    rows = sent(reports, rows_of(10))
    later = sent(reports, rows_of(10))
    assert reports.acknowledge(2, files=False) == rows.facts
    assert kept(reports) == [file, later]
    assert reports.acknowledge(1) == [FILE]
    assert kept(reports) == [later]
    refused = sent(reports, FILE)
    assert reports.acknowledge(refused.number, refused=True) == later.facts and not kept(reports)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNACKNOWLEDGED_BYTES_MAX", 100)
    reports = AttemptReports()
    sent(reports, rows_of(99))
    assert not reports.full
    sent(reports, rows_of(1))
    assert reports.full
    reports.acknowledge(1)
    assert not reports.full
    result = sent(reports, TaskStateChanged(attempt=TASK, state="finished", result=bytes(200)))
    assert reports.full
    reports.take_back(result)
    assert not reports.full


def test_what_is_not_journaled_is_kept_but_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNACKNOWLEDGED_BYTES_MAX", 100)
    reports = AttemptReports()
    file = sent(reports, FILE)
    sent(reports, rows_of(60))
    end = sent(reports, FINISHED)
    later = sent(reports, rows_of(60))
    assert reports.full
    assert [len(rows.payload) for rows in reports.free_rows(end.number)] == [60]
    assert kept(reports) == [file, end, later] and not reports.full
    assert reports.acknowledge(end.number) == [FILE]
    assert kept(reports) == [later]


# --- without a coordinator ------------------------------------------------------------------------------


def test_sources_are_unblocked_once_and_not_acknowledged_again() -> None:
    reports = AttemptReports()
    first, second, third = (positions_of(0, number) for number in (10, 20, 30))
    reports.add(RUNNING, 1.0)
    sent(reports, first)
    rows = sent(reports, rows_of(1))
    later = sent(reports, second)
    assert reports.unblock_sources(rows.number) == [first]
    assert reports.unblock_sources(later.number) == [second]
    assert reports.unblock_sources(later.number) == []
    last = sent(reports, third)
    assert reports.acknowledge(last.number) == [rows.facts[0], last.facts[0]]


def test_positions_that_nobody_reads_become_one_fact_of_each_attempt() -> None:
    """What else was reported with them stays where it was."""
    reports = AttemptReports()
    reports.add(RUNNING, 1.0)
    other = sent(reports, positions_of(0, 7, 2))
    reports.add(PartitionReadable(attempt=TASK, edge=0), 1.0)
    for fact in (positions_of(0, 10), positions_of(1, 20), positions_of(0, 30)):
        reports.unblock_sources(sent(reports, fact).number)
    kept_now = reports.kept(9)
    assert reports.positions() == [positions_of(0, 7, 2), kept_now[-1].facts[0]]
    assert [report.term for report in kept_now] == [9, 9, 9]
    assert [report.number for report in kept_now] == [other.number, 2, 4]
    assert [fact.kind for report in kept_now for fact in report.facts] == [
        "task_state",
        "source_positions",
        "partition_readable",
        "source_positions",
    ]
    last: Any = kept_now[-1].facts[0]
    table = {entry.split: entry for entry in unpack_positions(last.positions)}
    assert table == {0: SplitPosition(0, 30, 5), 1: SplitPosition(1, 20, 5)}


def test_positions_that_a_source_waits_for_stay_a_fact_of_their_own() -> None:
    reports = AttemptReports()
    first = sent(reports, positions_of(0, 10))
    assert reports.unblock_sources(first.number) == first.facts
    second, third = sent(reports, positions_of(0, 20)), sent(reports, positions_of(0, 30))
    assert kept(reports) == [second, third], "the first is in the second, which the source waits for"
    assert reports.unblock_sources(third.number) == [*second.facts, *third.facts]


def test_a_worker_comes_back_with_the_first_reports_that_go_into_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others follow; to leave one out between them would have the coordinator take it for applied."""
    reports = AttemptReports()
    found = [sent(reports, fact) for fact in (RUNNING, rows_of(5_000), FINISHED)]
    assert reports.first_kept(1) == found
    monkeypatch.setattr(limits, "RETURN_BYTES_MAX", 6_000)
    assert reports.first_kept(1) == found[:1]
    assert reports.kept(1, behind=found[0].number) == found[1:]
