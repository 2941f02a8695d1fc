"""Channels that failed come back at their times, the first first."""

from __future__ import annotations

from minishuffle.ids import AttemptId, SubtaskId
from minishuffle.worker.registry import ChannelKey
from minishuffle.worker.repairs import Repairs

CONSUMER = AttemptId(SubtaskId("j1", 1, 0), 1)
FIRST, SECOND = ChannelKey(CONSUMER, 0, 0), ChannelKey(CONSUMER, 0, 1)


def test_each_is_taken_when_its_time_has_come() -> None:
    repairs = Repairs()
    assert repairs.next_deadline() is None and repairs.take(100.0) is None
    repairs.plan(FIRST, 2, 3.0)
    repairs.plan(SECOND, 1, 1.0)
    repairs.plan(FIRST, 1, 1.0)
    assert repairs.next_deadline() == 1.0 and repairs.take(0.5) is None
    assert [repairs.take(1.0) for _ in range(3)] == [(SECOND, 1), (FIRST, 1), None]
    assert repairs.has(FIRST, 2) and not repairs.has(FIRST, 1)
    assert repairs.next_deadline() == 3.0
    assert repairs.take(3.0) == (FIRST, 2)
