"""When pending subtasks go on: together, later, or once it is known how their worker ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minishuffle.coordinator.jobs.restarttimers import RestartTimers
from minishuffle.coordinator.jobs.subtasks import Subtasks
from minishuffle.plan.graph import JobGraph

READ, COUNT0, COUNT1 = (0, 0), (1, 0), (1, 1)


@pytest.fixture
def timers(make_graph: Callable[..., JobGraph]) -> RestartTimers:
    """Two subtasks restart, at 5 and 7 seconds; one waits for a slot, until 6."""
    subtasks = Subtasks(make_graph(1, 2), (1, 2))
    made = RestartTimers(subtasks)
    for key, state, due in ((READ, "restarting", 5.0), (COUNT0, "restarting", 7.0)):
        subtasks.enter(subtasks[key], state)
        made.begin(key, due)
    subtasks.enter(subtasks[COUNT1], "waiting for a slot")
    made.begin(COUNT1, 6.0)
    made.validate()
    subtasks.take_changed()
    return made


def due(timers: RestartTimers, at: float) -> list[tuple[int, int]]:
    return [task.key for task in timers.due(at)]


def test_what_waits_for_a_slot_is_due_at_any_time_and_overdue_in_the_end(timers: RestartTimers) -> None:
    assert due(timers, 0.0) == [COUNT1] and due(timers, 5.0) == [READ, COUNT1]
    assert timers.overdue(5.9) == [] and [task.key for task in timers.overdue(6.0)] == [COUNT1]
    timers.prolong([COUNT1], 9.0)
    assert timers.overdue(8.0) == [] and timers.first(timers.waiting()) == 9.0
    assert timers.next_time(lambda key: key == READ) == 7.0


def test_what_restarts_together_does_so_at_the_latest_time(timers: RestartTimers) -> None:
    timers.join([READ, COUNT0, COUNT1])
    assert due(timers, 6.9) == [COUNT1] and due(timers, 7.0) == [READ, COUNT0, COUNT1]
    assert [timers.record(key) for key in (READ, COUNT0, COUNT1)] == [7.0, 7.0, 6.0]
    timers.join([COUNT1])
    assert timers.record(COUNT1) == 6.0, "it does not restart"


def test_whoever_waits_to_know_how_its_worker_ended_goes_on_when_it_is_known(timers: RestartTimers) -> None:
    timers.hold([READ], 1, 8.0)
    assert (timers.held_until(READ, 3.0), timers.held_until(COUNT0, 3.0)) == (8.0, 3.0)
    assert (timers.release(2), timers.release(1), timers.release(1)) == ([], [READ], [])
    timers.hasten([READ, COUNT0, COUNT1], 6.0)
    assert [timers.record(key) for key in (READ, COUNT0, COUNT1)] == [5.0, 6.0, 6.0]
    timers.hold([READ], 1, 8.0)
    timers.end(READ)
    assert timers.release(1) == [] and list(timers) == [COUNT0, COUNT1]
