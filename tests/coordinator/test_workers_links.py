"""Control links of workers that close: which processes have outlived that, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.errors import TaskFailed
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import DeployTasks, PrepareJob, TasksRestarted, WorkerLost
from minishuffle.wire.requests import Accepted, Failure, GetStatus, SubmitJob

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
Pair = tuple["FakeWorker", "FakeWorker"]
JUST_BEFORE = 0.001


@pytest.fixture
def pair(cluster: FakeCluster) -> Pair:
    return cluster.add(), cluster.add()


def states(cluster: FakeCluster) -> list[str]:
    return [worker.state for worker in cluster.request(GetStatus()).workers]


def attempts(cluster: FakeCluster) -> set[int]:
    return {task.attempt for task in cluster.show("j1").tasks}


def start(cluster: FakeCluster, graph: JobGraph) -> None:
    cluster.submit(graph)
    cluster.report_all("j1", "running")


def lost_causes(cluster: FakeCluster) -> list[str]:
    return [cause.text for cause in cluster.show("j1").causes]


def test_a_process_of_which_nothing_is_known_is_awaited_for_a_moment(
    cluster: FakeCluster, pair: Pair, make_graph: MakeGraph
) -> None:
    start(cluster, make_graph())
    cluster.break_link(pair[1])
    cluster.advance(limits.LINK_GRACE_SECONDS - JUST_BEFORE)
    assert states(cluster) == ["alive", "awaited"]
    cluster.advance(2 * JUST_BEFORE)
    assert states(cluster) == ["alive", "lost"]
    text = "its control link closed (reset), and it did not come back within 0.3 s"
    assert text in lost_causes(cluster)[0]


def test_a_process_that_is_there_may_be_silent_for_as_long_as_any_other(
    cluster: FakeCluster, pair: Pair
) -> None:
    """It may be stopped, or its loop held up."""
    cluster.break_link(pair[1])
    (link,) = cluster.watched
    cluster.do(cluster.state.process_found(link, cluster.now))
    timeout = cluster.settings.heartbeat_timeout
    cluster.advance(timeout - JUST_BEFORE)
    assert states(cluster) == ["alive", "awaited"]
    cluster.advance(2 * JUST_BEFORE)
    assert states(cluster) == ["alive", "lost"]


def test_what_is_found_of_an_earlier_link_says_nothing_of_this_one(cluster: FakeCluster, pair: Pair) -> None:
    cluster.break_link(pair[1])
    (first,) = cluster.watched
    cluster.come_back(pair[1])
    for _ in range(2):  # while it is there, and while it is away once more
        cluster.do(cluster.state.process_gone(first, cluster.now))
        cluster.do(cluster.state.process_found(first, cluster.now))
        assert "lost" not in states(cluster)
        if pair[1].link in cluster.workers:
            cluster.break_link(pair[1])
    cluster.advance(limits.LINK_GRACE_SECONDS)
    assert states(cluster) == ["alive", "lost"]


@pytest.mark.parametrize("forged", [{"pid": 7}, {"data_port": 7}, {"identity": "another host"}])
def test_only_the_same_process_comes_back(
    cluster: FakeCluster, pair: Pair, make_graph: MakeGraph, forged: dict[str, Any]
) -> None:
    """Another one that knows the secret, the id and the epoch takes no worker's place."""
    start(cluster, make_graph(restart_strategy="individual"))
    known = {"requested_worker": pair[1].worker, "epoch": pair[1].epoch}
    cluster.add(**pair[1].about.model_dump(exclude={"type"}) | known | forged)
    assert states(cluster) == ["alive", "alive"] and attempts(cluster) == {1}
    (refused,) = [each for each in cluster.replies.values() if isinstance(each, Failure)]
    assert "worker 2 is process" in refused.text and "register without an epoch" in refused.text


def test_a_new_process_takes_the_id_of_one_whose_link_closed(cluster: FakeCluster, pair: Pair) -> None:
    cluster.break_link(pair[1])
    fresh = cluster.add(requested_worker=2)
    assert (fresh.worker, fresh.epoch) == (2, 3)
    cluster.come_back(pair[1])
    assert isinstance(cluster.replies[pair[1].link, 0], Failure)


def test_what_was_sent_into_a_link_that_broke_is_made_up_for(
    cluster: FakeCluster, pair: Pair, make_graph: MakeGraph
) -> None:
    """A task was about to restart there: it is deployed anew."""
    start(cluster, make_graph(restart_strategy="individual"))
    worker = pair[1]
    tasks = dict(worker.tasks)
    cluster.fail(worker, ("j1", 0, 1), TaskFailed.code, "boom")
    assert len(worker.got(DeployTasks)) == 2
    worker.tasks = tasks
    cluster.break_link(worker)
    cluster.come_back(worker)
    assert worker.tasks["j1", 0, 1].attempt == 3
    assert worker.tasks["j1", 1, 1].attempt == 1


def test_a_task_restarts_once_the_workers_of_its_job_are_back(
    cluster: FakeCluster, pair: Pair, make_graph: MakeGraph
) -> None:
    """Those beside it could not hear of the next attempt."""
    start(cluster, make_graph(restart_strategy="individual"))
    cluster.break_link(pair[1])
    cluster.fail(pair[0], ("j1", 0, 0), TaskFailed.code, "boom")
    assert attempts(cluster) == {1}
    cluster.come_back(pair[1])
    assert pair[0].tasks["j1", 0, 0].attempt == 2
    assert pair[1].got(TasksRestarted)


def test_a_job_without_tasks_on_the_awaited_worker_goes_on(
    cluster: FakeCluster, pair: Pair, make_graph: MakeGraph
) -> None:
    """Its tasks restart, also on another worker, and others are accepted beside it."""
    start(cluster, make_graph(restart_strategy="individual"))
    third, fourth = cluster.add(slots=1), cluster.add(slots=1)
    cluster.break_link(pair[0])
    cluster.break_link(pair[1])
    cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    cluster.report_all("j2", "running")
    host, other = (third, fourth) if ("j2", 0, 0) in third.tasks else (fourth, third)
    cluster.fail(host, ("j2", 0, 0), TaskFailed.code, "boom")
    assert host.tasks["j2", 0, 0].attempt == 2
    cluster.lose(host)
    assert (other.tasks["j2", 0, 0].attempt, other.tasks["j2", 1, 0].attempt) == (3, 2)
    assert attempts(cluster) == {1}


def test_a_job_that_fits_nowhere_else_waits_for_the_awaited_worker(
    cluster: FakeCluster, pair: Pair, make_graph: MakeGraph
) -> None:
    cluster.break_link(pair[1])
    request = SubmitJob(name="s", python="3.11", graph=make_graph(3, 3).to_bytes())
    wait = cluster.ask(request)
    assert cluster.reply(wait) is None
    cluster.come_back(pair[1])
    assert cluster.reply(wait) == Accepted(job="j1")
    cluster.break_link(pair[1])
    wait = cluster.ask(request)
    cluster.advance(limits.LINK_GRACE_SECONDS)
    assert isinstance(cluster.reply(wait), Failure)


def test_verdicts_of_the_meantime_are_heard_on_return(cluster: FakeCluster, pair: Pair) -> None:
    third = cluster.add()
    cluster.break_link(pair[1])
    cluster.lose(third)
    cluster.come_back(pair[1])
    assert [lost.worker for lost in pair[1].got(WorkerLost)] == [3]


@pytest.mark.parametrize("arrived", [True, False])
def test_a_standby_worker_is_prepared_anew(
    cluster: FakeCluster, pair: Pair, make_graph: MakeGraph, arrived: bool
) -> None:
    """It gets the programs that it was sent and that did not arrive: a takeover names none."""
    standby = cluster.add(standby=True)
    start(cluster, make_graph(restart_strategy="individual"))
    if not arrived:
        standby.prepared.clear()
    cluster.break_link(standby)
    cluster.come_back(standby)
    assert [bool(each.programs) for each in standby.got(PrepareJob)] == [True, not arrived]
    cluster.heartbeat(standby, loaded=1)
    cluster.lose(pair[1])
    assert {key[1:] for key in standby.tasks} == {(0, 1), (1, 1)}
