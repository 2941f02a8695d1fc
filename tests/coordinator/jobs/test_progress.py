"""How far a job has come: what is counted until something changes, and where the next attempt goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minishuffle.coordinator.jobs.consumption import Ends
from minishuffle.coordinator.jobs.lostpartitions import Replays
from minishuffle.coordinator.jobs.positions import Resumption
from minishuffle.coordinator.jobs.progress import JobProgress
from minishuffle.coordinator.jobs.subtasks import Subtasks
from minishuffle.counters import TaskCounters
from minishuffle.plan.graph import JobGraph, JobSettings
from minishuffle.wire.packed import SplitPosition, pack_positions, unpack_positions
from minishuffle.wire.reports import Collected, FileCompleted, SourcePositions
from support.attempts import attempt

READ, COUNT = (0, 0), (1, 0)


@pytest.fixture
def subtasks(make_graph: Callable[..., JobGraph]) -> Subtasks:
    return Subtasks(make_graph(1, 1), (1,))


@pytest.fixture
def progress(make_graph: Callable[..., JobGraph], subtasks: Subtasks) -> JobProgress:
    graph = make_graph(1, 1)
    return JobProgress(graph, subtasks, Ends(graph, graph.kept_edges(), subtasks), Replays(graph))


def test_losses_are_counted_anew_when_an_attempt_has_exchanged_more(
    progress: JobProgress, subtasks: Subtasks
) -> None:
    assert progress.losses().dropped == {}
    progress.exchanged(subtasks[COUNT], b"", {"late": 2})
    assert progress.losses().dropped == {"late": 2}
    progress.results_lost(3)
    assert progress.losses().dropped == {"late": 2, "result_lost": 3}


def test_the_next_attempt_goes_on_behind_the_lease_and_the_rows_that_the_sink_kept(
    progress: JobProgress, subtasks: Subtasks
) -> None:
    task = subtasks[READ]
    entry = SplitPosition(split=0, position=10, lease=5)
    progress.moved(task, SourcePositions(attempt=attempt(), positions=pack_positions([entry])), 1.0)
    subtasks.enter(task, "lost")
    progress.state_changed()
    progress.attempt_lost(task)
    assert (task.rows_made, task.rows_leased) == (15, 0)
    resumption = progress.next_attempt(task, 4.0)
    assert [each.end for each in unpack_positions(resumption.positions)] == [15]
    assert (resumption.positions_age, resumption.first_row) == (3.0, 0)


@pytest.mark.parametrize(("guarantee", "again"), [("at_least_once", 5), ("loss", 0)])
def test_rows_that_a_client_gets_twice_are_counted(
    make_graph: Callable[..., JobGraph], guarantee: str, again: int
) -> None:
    graph = make_graph(1, 1)
    graph = graph.model_copy(update={"settings": JobSettings(guarantee=guarantee)})
    subtasks = Subtasks(graph, (1,))
    progress = JobProgress(graph, subtasks, Ends(graph, graph.kept_edges(), subtasks), Replays(graph))
    task = subtasks[COUNT]
    for first_row, rows in ((0, 10), (10, 5), (8, 4), (12, 1), (13, 6), (19, 1)):
        progress.collected(task, Collected(attempt=attempt(1), payload=b"", rows=rows, first_row=first_row))
    assert (task.rows_collected, task.collected_end) == (27, 20)
    assert progress.losses().again == again + 2 * (again > 0)
    task.begin_next(1, 1, progress.next_attempt(task, 1.0))
    assert (task.rows_collected, task.collected_end) == (0, 20)
    assert task.resumption.rows_collected == (20 if again else 0)


@pytest.mark.parametrize("guarantee", ["at_least_once", "loss"])
def test_the_next_attempt_hears_what_earlier_ones_have_had_listed_and_have_counted(
    make_graph: Callable[..., JobGraph], guarantee: str
) -> None:
    graph = make_graph(1, 1)
    graph = graph.model_copy(update={"settings": JobSettings(guarantee=guarantee)})
    subtasks = Subtasks(graph, (1,))
    progress = JobProgress(graph, subtasks, Ends(graph, graph.kept_edges(), subtasks), Replays(graph))
    task, counts = subtasks[COUNT], guarantee != "loss"
    for number in (1, 2):
        task.counted(TaskCounters(rows_again=3))
        for file, committable in enumerate((b"", b"c")):
            message = FileCompleted(
                attempt=attempt(1, 0, number),
                file=file,
                path="",
                rows=5,
                bytes=1,
                checksum="",
                committable=committable,
            )
            assert progress.file_completed(task, message)
        task.begin_next(1, number, progress.next_attempt(task, 1.0))
        begins = task.resumption
        assert (begins.rows_listed, begins.rows_again) == ((10 * number, 3 * number) if counts else (0, 0))
    task.start_over(Resumption())
    progress.goes_back(5)
    assert progress.losses().again == 6 + 15, "what was committed is published, too"
    task.begin_next(1, 3, progress.next_attempt(task, 1.0))
    assert task.resumption.rows_listed == task.listed_before == 0, "these rows were counted"


def test_what_others_have_counts_as_before_until_the_worker_is_back(
    progress: JobProgress, subtasks: Subtasks
) -> None:
    progress.coordinator_lost()
    assert subtasks.take_changed() == {READ, COUNT} and subtasks[READ].passed_on_max == 0
    progress.worker_back(2)
    assert subtasks.take_changed() == set()
    progress.worker_back(1)
    assert subtasks.take_changed() == {READ, COUNT} and subtasks[READ].passed_on_max is None
