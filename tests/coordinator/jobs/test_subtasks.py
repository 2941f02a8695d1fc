"""The table of a job's subtasks: what it counts over all of them, and what the journal is behind with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minishuffle import limits
from minishuffle.coordinator.jobs.lossaccounting import TaskKey
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.jobs.subtasks import Subtasks
from minishuffle.ids import AttemptId, OperatorId, SubtaskId
from minishuffle.plan.graph import JobGraph

READ, COUNT0, COUNT1 = (0, 0), (1, 0), (1, 1)


@pytest.fixture
def table(make_graph: Callable[..., JobGraph]) -> Subtasks:
    return Subtasks(make_graph(1, 2), (1, 2))


def test_subtasks_are_counted_by_state_and_the_journal_hears_of_each_change_once(table: Subtasks) -> None:
    assert list(table) == [READ, COUNT0, COUNT1] and table.states == {"created": 3}
    table.enter(table[COUNT1], "running")
    table.enter(table[READ], "finished")
    assert +table.states == {"created": 1, "running": 1, "finished": 1} and not table.all_ended
    assert (table.take_changed(), table.take_changed()) == ({COUNT1, READ}, set())
    assert table.open_workers() == [1, 2] and table.attempts_on(1) == [(COUNT0, 1)]
    table.validate()


@pytest.mark.parametrize(
    ("worker", "attempt", "lost", "is_current"),
    [(2, 1, False, True), (2, 2, False, False), (1, 1, False, False), (2, 1, True, False)],
)
def test_an_attempt_is_the_current_one_on_the_worker_that_has_it(
    table: Subtasks, worker: int, attempt: int, lost: bool, is_current: bool
) -> None:
    if lost:
        table[COUNT1].leave_worker()
    named = AttemptId(SubtaskId("j1", OperatorId(1), 1), attempt)
    assert table.current(worker, named) is (table[COUNT1] if is_current else None)
    assert table[COUNT1].is_reachable is not lost


def test_results_are_kept_up_to_a_bound_over_all_subtasks_and_attempts(
    table: Subtasks, make_graph: Callable[..., JobGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RESULT_BYTES_MAX", 5)
    assert table.keep_result(table[COUNT0], b"abc") and not table.keep_result(table[COUNT1], b"def")
    recalled = Subtasks(make_graph(1, 2), (1, 2))
    recalled.recall({COUNT0: table[COUNT0].record()}, {})
    assert not recalled.keep_result(table[COUNT1], b"def")
    table.begin_next(table[COUNT0], 1, 1, table[COUNT0].resumption)
    assert table.keep_result(table[COUNT1], b"def") and table[COUNT0].result == b""


def test_the_numbers_of_kept_rows_go_on_when_the_job_goes_back(table: Subtasks) -> None:
    """An attempt that has kept nothing yet begins behind what readers know of."""
    task = table[COUNT0]
    table.begin_next(task, 2, 1, Resumption(first_row=70))
    task.start_over(Resumption())
    assert task.rows_kept == 70


def test_subtasks_that_wait_have_no_attempt(make_graph: Callable[..., JobGraph]) -> None:
    table = Subtasks(make_graph(1, 2), (1, 2), waiting=True)
    assert table.all_wait and table.some_wait(1) and table.on(1) == []
    for task in table.of(1):
        task.begin_first(2, 0)
        table.enter(task, "created")
    assert not table.all_wait and table.some_wait(0) and not table.some_wait(1) and len(table.on(2)) == 2


@pytest.mark.parametrize(("version", "keep"), [(1, [READ, COUNT0, COUNT1]), (2, [READ])])
def test_who_gets_all_rows_from_a_subtask_keeps_its_version_with_it(
    make_graph: Callable[..., JobGraph], version: int, keep: list[TaskKey]
) -> None:
    """If the source has begun another version, its consumers may have had rows of the first that never come
    again."""
    graph = make_graph(1, 2, guarantee="at_least_once")
    read, count = (vertex.model_copy(update={"by_order": True}) for vertex in graph.vertices)
    graph = graph.model_copy(update={"vertices": [read.model_copy(update={"in_turn": True}), count]})
    table = Subtasks(graph, (1, 2))
    for _ in range(version - 1):
        table.begin_next(table[READ], 1, 1, table[READ].resumption)
    assert not any(table[key].same_rows for key in table)
    table.make_same_rows(table[READ], graph)
    assert [key for key in table if table[key].same_rows] == keep
    assert table.take_changed() == set(keep)
    for key in table:
        table.begin_next(table[key], 1, 2, table[key].resumption)
    assert {table[key].version for key in keep} == {version}
