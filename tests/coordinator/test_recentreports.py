"""Where a load begins: half a minute ago, or when an attempt had its first records."""

from __future__ import annotations

import pytest

from minishuffle.coordinator.recentreports import KEPT_EVERY_SECONDS, RECENT_SECONDS, RecentReports
from minishuffle.counters import TaskCounters
from minishuffle.ids import AttemptId
from minishuffle.wire.messages import Heartbeat, TaskReport, WorkerReport

HEARTBEAT_SECONDS = 0.5
KEY = (0, 0, 1)


def heartbeat(at: float, records: int, attempt: int = 1) -> Heartbeat:
    counters = TaskCounters(idle_seconds=at, records_in=records)
    task = TaskReport(attempt=AttemptId.of("j1", 0, 0, attempt), counters=counters)
    report = WorkerReport(clock_seconds=1000.0 + at)
    return Heartbeat(term=1, worker=1, epoch=1, report=report, tasks=[task], peers=[])


@pytest.mark.parametrize(
    ("seconds", "first_at", "earliest"),
    [
        (0.0, 0.0, 0.0),
        (2.0, 0.0, 0.0),
        (8.0, 3.0, 3.0),  # It had nothing to do before.
        (8.0, 9.0, 0.0),  # It has nothing to do.
        (29.5, 0.0, 0.0),
        (30.5, 0.0, 10.0),
        (3600.0, 0.0, 3570.0),
        (3605.0, 0.0, 3580.0),
    ],
)
def test_a_load_begins_half_a_minute_ago(seconds: float, first_at: float, earliest: float) -> None:
    recent = RecentReports()
    for number in range(1 + int(seconds / HEARTBEAT_SECONDS)):
        at = number * HEARTBEAT_SECONDS
        recent.note(heartbeat(at, records=int(at >= first_at)))
    assert recent.counters("j1")[KEY].seconds == earliest
    assert recent.counters("j2") == {}
    age = 1000.0 + seconds - recent.report[0].clock_seconds
    assert min(seconds, RECENT_SECONDS - KEPT_EVERY_SECONDS) <= age <= RECENT_SECONDS


def test_an_attempt_that_ended_is_forgotten() -> None:
    recent = RecentReports()
    recent.note(heartbeat(5.0, records=1))
    recent.note(heartbeat(1.0, records=1, attempt=2))
    assert list(recent.counters("j1")) == [(0, 0, 2)]
