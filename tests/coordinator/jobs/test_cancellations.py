"""Which attempts are to end, for what reason, and who waits for that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minishuffle.coordinator.jobs.cancellations import Cancellations
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.lostpartitions import Replays
from minishuffle.coordinator.jobs.subtasks import first_attempts
from minishuffle.coordinator.scheduling.moving import JobMove
from minishuffle.plan.graph import JobGraph

READ0, READ1, COUNT0, COUNT1 = (0, 0), (0, 1), (1, 0), (1, 1)


def taken(found: Cancellations) -> list[TaskKey]:
    return [task.key for task in found.take()]


@pytest.mark.parametrize(("strategy", "all_of_it"), [("individual", False), ("full", True)])
def test_whoever_restarts_with_a_failed_attempt_is_cancelled_once_and_until_it_has_ended(
    make_graph: Callable[..., JobGraph], strategy: str, all_of_it: bool
) -> None:
    graph = make_graph(2, 2, restart_strategy=strategy)
    tasks = first_attempts(graph, (1, 2))
    found = Cancellations(graph, Replays(graph), JobMove(), tasks)
    tasks[COUNT0].state = "failed"
    found.restart_with([COUNT0])
    others = [READ0, READ1, COUNT1] if all_of_it else []
    assert (taken(found), taken(found)) == (others, [])
    assert {key for key in tasks if found.why(key) == "canceled"} == set(others)
    assert found.holds_back(COUNT0) is all_of_it
    assert found.deployed_with([COUNT0]) == {COUNT0}
    for key in others:
        found.ended(key)
    assert not any(map(found.why, tasks))
    assert found.regions.take_ended() == ([list(tasks)] if all_of_it else [])
    assert found.deployed_with([COUNT0]) == {COUNT0, *others}


def test_what_is_drained_ends_when_it_is_cancelled_and_nothing_restarts_with_more_meanwhile(
    make_graph: Callable[..., JobGraph],
) -> None:
    graph = make_graph(2, 2, restart_strategy="individual")
    tasks = first_attempts(graph, (1, 2))
    found = Cancellations(graph, Replays(graph), JobMove(), tasks)
    assert found.drain([READ1]) == [READ1]
    assert taken(found) == [], "it may take what was emitted for it"
    found.cancel([READ1, READ1])
    assert (taken(found), found.why(READ1)) == ([READ1], "drained")
    assert not found.widen("region") and found.regions.strategy == "individual"
    recalled = Cancellations(graph, Replays(graph), JobMove(), tasks)
    recalled.recall("individual", found.regions.record(), ((), ()), found.drained)
    assert taken(recalled) == [READ1], "the next coordinator says so again"
    found.ended(READ1)
    assert found.widen("region") and not found.widen("region")
    found.drain([COUNT0])
    found.give_up()
    assert not any(map(found.why, tasks))
