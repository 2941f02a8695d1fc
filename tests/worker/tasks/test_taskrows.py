"""What a task has lost of its inputs when it ends."""

from __future__ import annotations

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.worker.tasks.taskrows import TaskRows


@pytest.mark.parametrize(
    ("passed_on", "kept", "lost"),
    [(0, 0, 10), (4, 0, 6), (4, 3, 3), (10, 0, 0), (15, 0, 0), (4, -4, 10), (0, -4, 10)],
    ids=["all", "some", "some kept", "none", "one makes several", "kept before", "state that went"],
)
def test_a_batch_that_raises_has_lost_what_was_neither_passed_on_nor_kept(
    passed_on: int, kept: int, lost: int
) -> None:
    counters = TaskCounters(records_out=100, rows_filed=5)
    rows = TaskRows(counters)
    rows.take(7)
    rows.done(repeated=False)
    rows.take(2)
    rows.done(repeated=True)
    rows.take(10)
    counters.records_out += passed_on
    rows.fail(kept)
    assert (rows.taken, rows.dropped()) == (7, {"failed_batch": lost} if lost else {})


def test_an_abandoned_task_has_lost_what_it_has_in_hand_and_has_not_taken() -> None:
    counters = TaskCounters()
    rows = TaskRows(counters)
    rows.write_off()
    assert rows.dropped() == {}
    rows.take(10)
    counters.rows_filed = 4
    rows.write_off()
    rows.leave(3)
    rows.drop_late(2)
    assert rows.dropped() == {"failed_batch": 6, "queue_discarded": 3, "late_after_recovery": 2}
