"""Subtasks that move first take what was emitted for them, for so long at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from minishuffle.errors import TaskFailed
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import CancelTasks, DeployTasks, DivideTasks, PauseTasks, Shutdown
from minishuffle.wire.requests import DrainWorker, PauseJob

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)


@pytest.fixture
def leaving(cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str) -> FakeWorker:
    """The second worker is to leave, and there is a third one; its tasks have yet to take what is emitted."""
    cluster.takes = False
    cluster.add()
    cluster.request(DrainWorker(worker=pair[1].worker))
    return pair[1]


def moving(worker: FakeWorker) -> list[tuple[int, list[tuple[int, int]]]]:
    """Barriers that it has heard of, and the subtasks that are to move."""
    return [(each.barrier, [(e.operator, e.index) for e in each.moving]) for each in worker.got(DivideTasks)]


def take(cluster: FakeCluster, worker: FakeWorker, *keys: tuple[str, int, int]) -> None:
    for key in keys:
        cluster.stand(worker, key, barrier=1, taken=True)


def test_tasks_end_once_all_of_them_have_taken_what_was_emitted(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], leaving: FakeWorker
) -> None:
    """Whoever feeds them hears of it too: what it emits from then on waits for the next attempts."""
    assert [moving(worker) for worker in pair] == [[(1, [(0, 1), (1, 1)])]] * 2
    take(cluster, leaving, READ1)
    cluster.stand(leaving, COUNT1, barrier=1)
    assert not leaving.got(CancelTasks)
    take(cluster, leaving, COUNT1)
    (cancelled,) = leaving.got(CancelTasks)
    assert [(each.operator, each.index) for each in cancelled.attempts] == [(0, 1), (1, 1)]
    for key in (READ1, COUNT1):
        cluster.report(leaving, key, "canceled")
    (third,) = [worker for worker in cluster.workers.values() if worker not in pair]
    deployed = third.got(DeployTasks)[-1]
    assert (deployed.barrier, deployed.paused) == (1, False), "they resume what waits for them"
    assert leaving.got(Shutdown)
    assert not pair[0].got(PauseTasks)


def test_the_next_move_waits_until_what_was_to_end_for_this_one_has_ended(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], leaving: FakeWorker
) -> None:
    """The end of an attempt interrupts a move: the tasks of the second one would end without their state."""
    cluster.add()
    take(cluster, leaving, READ1, COUNT1)
    cluster.request(DrainWorker(worker=pair[0].worker))
    for key in (READ1, COUNT1):
        assert [barrier for barrier, _ in moving(pair[0])] == [1]
        cluster.report(leaving, key, "canceled")
    assert moving(pair[0])[1:] == [(2, [(0, 0), (1, 0)])]
    assert not pair[0].got(CancelTasks), "they have yet to take what was emitted for them"


def test_one_that_finishes_is_not_waited_for(cluster: FakeCluster, leaving: FakeWorker) -> None:
    cluster.report(leaving, READ1, "finished")
    take(cluster, leaving, COUNT1)
    assert [len(each.attempts) for each in leaving.got(CancelTasks)] == [1]


def test_what_takes_too_long_is_not_waited_for_and_nothing_is_held_back_any_more(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], leaving: FakeWorker
) -> None:
    cluster.advance(7.9)
    assert not leaving.got(CancelTasks)
    cluster.advance(0.2)
    assert len(leaving.got(CancelTasks)) == 1
    assert [(each.barrier, each.paused) for each in pair[0].got(PauseTasks)] == [(1, False)]


def test_a_failure_makes_the_wait_void(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], leaving: FakeWorker
) -> None:
    """The next attempt of a producer has put no barrier anywhere: nothing is held back any more."""
    cluster.fail(pair[0], READ0, TaskFailed.code, "boom")
    assert len(leaving.got(CancelTasks)) == 1
    cluster.advance(0.01)
    assert [(each.barrier, each.paused) for each in pair[0].got(PauseTasks)] == [(1, False)]


def test_the_next_coordinator_has_them_end_at_once(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], leaving: FakeWorker
) -> None:
    cluster.lose_coordinator()
    for worker in pair:
        cluster.come_back(worker)
    assert leaving.got(CancelTasks)


def test_a_job_that_moves_is_paused_afterwards_and_one_that_is_being_paused_moves_then(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], leaving: FakeWorker
) -> None:
    cluster.request(PauseJob(job="j1"))
    assert (cluster.show("j1").pause, pair[0].got(PauseTasks)) == ("wanted", [])
    take(cluster, leaving, READ1, COUNT1)
    for key in (READ1, COUNT1):
        cluster.report(leaving, key, "canceled")
    (third,) = [worker for worker in cluster.workers.values() if worker not in pair]
    for key in (READ1, COUNT1):
        cluster.report(third, key, "running", attempt=2)
    assert [(each.barrier, each.paused) for each in third.got(PauseTasks)] == [(2, True)]
    cluster.add()
    cluster.request(DrainWorker(worker=third.worker))
    assert len(moving(third)) == 0
    cluster.stand_all("j1")
    assert cluster.show("j1").state == "paused"
    assert third.got(CancelTasks), "nothing is on its way: they move at once"


def test_a_pause_that_a_move_does_not_leave_time_for_names_what_moves(
    cluster: FakeCluster, leaving: FakeWorker
) -> None:
    """They were cancelled after 8 s, and have yet to end after 10."""
    cluster.request(PauseJob(job="j1"))
    cluster.advance(10.1)
    info = cluster.show("j1")
    problem = "read[1], count[1] did not move from a worker that is to leave within 10 s (pause_timeout)"
    assert info.state == "running" and info.pause_problem.startswith(problem)


def test_a_job_that_is_to_be_paused_and_waits_for_a_task_loses_nothing_to_a_move(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    cluster.takes = False
    cluster.add()
    cluster.fail(pair[0], READ0, TaskFailed.code, "boom")
    cluster.request(PauseJob(job=job))
    assert cluster.show(job).pause == "wanted"
    cluster.request(DrainWorker(worker=pair[1].worker))
    assert not pair[1].got(CancelTasks)
    assert [each.barrier for each in pair[1].got(DivideTasks)] == [1]
    cluster.report(pair[0], READ0, "running", attempt=2)
    assert not pair[1].got(PauseTasks)
    take(cluster, pair[1], READ1, COUNT1)
    assert len(pair[1].got(CancelTasks)) == 1
