"""Who holds the snapshots of which task, and what workers hear of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.errors import ResourceExhausted
from minishuffle.ids import AttemptId, holder_operator
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import (
    CancelTasks,
    DeployTasks,
    DivideTasks,
    ReleaseJob,
    Shutdown,
    TaskSpec,
    TasksRestarted,
    UnlinkedPeer,
)
from minishuffle.wire.reports import SnapshotsHeld
from minishuffle.wire.requests import DrainWorker, GetEvents, SubmitJob

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)


@pytest.fixture
def guaranteed(make_graph: MakeGraph) -> Callable[..., JobGraph]:
    def make(*parallelism: int, **settings: Any) -> JobGraph:
        return make_graph(*parallelism, restart_strategy="individual", guarantee="at_least_once", **settings)

    return make


def held(worker: FakeWorker) -> list[tuple[int, int, int]]:
    """Operator and index of the tasks that a worker holds for, and the number of the holder."""
    first = holder_operator(0)
    return sorted((operator - first, index, number) for _, operator, index, number in worker.holders)


def deployed(worker: FakeWorker) -> list[TaskSpec]:
    return [task for message in worker.got(DeployTasks) for task in message.tasks]


def sources(worker: FakeWorker, attempt: int = 2) -> list[tuple[int, int, int, bool, int]]:
    """Of deployed tasks of this attempt: operator, worker and number of the holder that they go on from,
    whether there must be something, and the number of the next holder."""
    return [
        (task.operator, task.state_worker, task.state_attempt, task.needs_state, task.holder)
        for task in deployed(worker)
        if task.attempt == attempt and task.state_holder == bool(task.state_attempt)
    ]


def start(cluster: FakeCluster, graph: JobGraph, later: int = 0) -> list[FakeWorker]:
    """Two workers of one slot each, and so many that come when the job runs."""
    workers = [cluster.add(slots=1) for _ in range(2)]
    cluster.submit(graph)
    cluster.report_all("j1", "running")
    return [*workers, *(cluster.add(slots=1) for _ in range(later))]


def test_each_task_has_a_holder_on_another_worker_from_its_beginning(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    one, two = start(cluster, guaranteed())
    assert held(one) == [(0, 1, 1), (1, 1, 1)] and held(two) == [(0, 0, 1), (1, 0, 1)]
    assert sources(one, attempt=1) == [(0, 0, 0, False, 1), (1, 0, 0, False, 1)]
    (message,) = [each for each in one.got(DeployTasks) if each.holders]
    assert [(each.task_attempt, each.task_worker) for each in message.holders] == [(1, 2), (1, 2)]
    info = cluster.show("j1")
    assert [task.holder for task in info.tasks] == [2, 1, 2, 1] and info.unprotected == 0
    assert info.guarantee == "at_least_once"
    events = cluster.request(GetEvents(job="j1")).events
    assert [each.text for each in events if each.kind == "holder named"] == [
        "worker 1 holds the snapshots of read[1], count[1]",
        "worker 2 holds the snapshots of read[0], count[0]",
    ]
    cluster.report_all("j1", "finished")
    assert not one.holders and not two.holders


def test_a_job_on_one_worker_is_refused_without_durable_snapshots_and_has_no_holders_without_a_guarantee(
    cluster: FakeCluster, guaranteed: MakeGraph, make_graph: MakeGraph
) -> None:
    cluster.add()
    submission = SubmitJob(name="words", python="3.11", graph=guaranteed(1, 1, durable_interval=0).to_bytes())
    code, text = cluster.refusal(submission)
    assert code == ResourceExhausted.code and 'guarantee="at_least_once" needs two workers' in text
    assert not any(worker.holders for worker in start(cluster, make_graph(1, 1)))


def test_a_job_whose_receipts_wait_for_no_durable_snapshot_is_refused_on_one_worker(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    cluster.add()
    job = guaranteed(1, 1)
    written = [job.vertices[0].model_copy(update={"stream": "clicks"}), job.vertices[1]]
    side = [job.edges[0].model_copy(update={"partitioner": "broadcast", "input": 1})]
    job = job.model_copy(update={"vertices": written})
    refused = SubmitJob(name="side", python="3.11", graph=job.model_copy(update={"edges": side}).to_bytes())
    code, text = cluster.refusal(refused)
    assert code == ResourceExhausted.code and "needs two workers" in text
    assert "read what stream 'clicks' gives from a source of the job's own" in text
    cluster.submit(job)


@pytest.mark.parametrize(
    ("others", "holder"),
    [
        ([{}], 2),
        ([{}, {"standby": True}], 3),
        ([{"standby": True}, {"identity": "b"}], 3),
        ([{"identity": "b"}, {"identity": "b", "standby": True}], 3),
    ],
)
def test_another_host_comes_first_and_then_standby_workers(
    cluster: FakeCluster, guaranteed: MakeGraph, others: list[dict[str, Any]], holder: int
) -> None:
    cluster.add(slots=1, identity="a")
    for fields in others:
        cluster.add(**{"slots": 1, "identity": "a", **fields})
    cluster.submit(guaranteed(1, 1))
    assert {task.holder for task in cluster.show("j1").tasks} == {holder}


def test_they_are_spread_evenly_over_all_jobs(cluster: FakeCluster, guaranteed: MakeGraph) -> None:
    workers = [cluster.add(slots=2) for _ in range(3)]
    for _ in range(3):
        cluster.submit(guaranteed(2, 2))
    assert [len(worker.holders) for worker in workers] == [4, 4, 4]


def test_a_lost_task_goes_on_from_its_holder_which_hears_of_it(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    """The holder is on another host, and its worker is not the one that takes the slot."""
    one = cluster.add(slots=1, identity="a")
    two = cluster.add(slots=1, identity="a")
    away = cluster.add(slots=1, identity="b", standby=True)
    cluster.submit(guaranteed(1, 1))
    cluster.report_all("j1", "running")
    cluster.hold(away)
    cluster.lose(one)
    assert sources(two) == [(0, 3, 1, False, 1), (1, 3, 1, False, 1)]
    (message,) = away.got(TasksRestarted)
    assert [(each.operator, each.attempt, each.worker) for each in message.tasks] == [(0, 2, 2), (1, 2, 2)]


def test_a_task_that_comes_to_its_holder_gets_another_and_the_old_one_stays_until_that_has_all(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    """The holder is on the standby worker, which takes the slot."""
    one = cluster.add(slots=1)
    two = cluster.add(slots=1)
    standby = cluster.add(slots=1, standby=True)
    cluster.submit(guaranteed(1, 1))
    cluster.report_all("j1", "running")
    assert held(standby) == [(0, 0, 1), (1, 0, 1)] and not held(two)
    cluster.heartbeat(standby, loaded=1)
    cluster.hold(standby)
    cluster.lose(one)
    assert sources(standby) == [(0, 3, 1, False, 2), (1, 3, 1, False, 2)]
    assert held(two) == [(0, 0, 2), (1, 0, 2)] and held(standby) == [(0, 0, 1), (1, 0, 1)]
    (named,) = [
        {(each.operator, each.attempt, each.worker) for each in message.tasks}
        for message in standby.got(TasksRestarted)
        if message.tasks[0].operator >= holder_operator(0)
    ]
    assert named == {(holder_operator(0), 2, 2), (holder_operator(1), 2, 2)}
    assert cluster.show("j1").unprotected == 2
    cluster.report_all("j1", "running", attempt=2)
    cluster.hold(two)
    assert not held(standby) and cluster.show("j1").unprotected == 0


def test_a_worker_that_comes_while_a_job_runs_alone_protects_nothing_before_it_has_snapshots(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    """What tasks have sent so far is not for it: durable snapshots may have freed the rows behind that."""
    one = cluster.add(slots=1)
    cluster.submit(guaranteed(1, 1))
    cluster.report_all("j1", "running")
    two = cluster.add(slots=1)
    (named,) = one.got(TasksRestarted)
    assert [(task.operator, task.attempt, task.worker) for task in named.tasks] == [
        (holder_operator(operator), 2, two.worker) for operator in (0, 1)
    ]
    assert cluster.show("j1").unprotected == 2
    cluster.hold(two)
    assert cluster.show("j1").unprotected == 0


@pytest.mark.parametrize("others", [1, 0])
def test_where_the_link_to_a_holder_is_broken_another_takes_over_if_there_is_one(
    cluster: FakeCluster, guaranteed: MakeGraph, others: int
) -> None:
    one = cluster.add(slots=1)
    cluster.submit(guaranteed(1, 1))
    cluster.report_all("j1", "running")
    away = cluster.add(slots=1)
    cluster.hold(away)
    spare = [cluster.add(slots=1) for _ in range(others)]
    cluster.advance(20.0)
    assert held(away) == [(0, 0, 2), (1, 0, 2)]
    missing = UnlinkedPeer(worker=one.worker, epoch=one.epoch, seconds=10.0, why="no route", jobs=["j1"])
    cluster.heartbeat(away, unlinked=[missing])
    for worker in spare:
        assert held(worker) == [(0, 0, 3), (1, 0, 3)] and held(away) == [(0, 0, 2), (1, 0, 2)]
        cluster.hold(worker)
    assert held(away) == ([] if spare else [(0, 0, 2), (1, 0, 2)])
    cluster.heartbeat(away)
    assert cluster.show("j1").unprotected == 0 and len(one.got(CancelTasks)) == 0


def test_the_last_worker_keeps_what_it_holds_and_a_new_one_takes_over(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    one, two = start(cluster, guaranteed(1, 1))
    cluster.hold(two)
    cluster.lose(one)
    assert sources(two) == [(0, 2, 1, False, 1), (1, 2, 1, False, 1)]
    cluster.report_all("j1", "running", attempt=2)
    assert cluster.show("j1").unprotected == 2
    three = cluster.add(slots=1)
    assert held(three) == [(0, 0, 2), (1, 0, 2)] and held(two) == [(0, 0, 1), (1, 0, 1)]
    cluster.hold(three)
    assert not held(two) and cluster.show("j1").unprotected == 0


@pytest.mark.parametrize("has_all", [True, False])
def test_a_task_that_is_lost_after_its_holder_goes_on_if_the_next_has_anything(
    cluster: FakeCluster, guaranteed: MakeGraph, has_all: bool
) -> None:
    one, two, three = start(cluster, guaranteed(1, 1), 1)
    cluster.lose(two)
    assert held(three) == [(0, 0, 2), (1, 0, 2)]
    assert cluster.show("j1").unprotected == 2
    if has_all:
        cluster.hold(three)
        assert cluster.show("j1").unprotected == 0
    cluster.lose(one)
    assert sources(three) == [(0, 3, 2, not has_all, 2), (1, 3, 2, not has_all, 2)]


def test_a_holder_that_can_hold_no_more_is_replaced(cluster: FakeCluster, guaranteed: MakeGraph) -> None:
    _, two, three = start(cluster, guaranteed(1, 1), 1)
    cluster.hold(two)
    cluster.hold(two, problem="disk full")
    assert held(three) == [(0, 0, 2), (1, 0, 2)] and not held(two)
    cluster.lose(three)
    assert not held(two) and cluster.show("j1").unprotected == 2
    cluster.lose(two)
    again = cluster.add(slots=1, requested_worker=2)
    assert held(again) == [(0, 0, 3), (1, 0, 3)]
    kinds = [each.kind for each in cluster.request(GetEvents(job="j1")).events]
    assert kinds.count("holder failed") == 2
    ignored = cluster.state.ignored
    stale = AttemptId.of("j1", holder_operator(0), 0, 1)
    cluster.fact(two, SnapshotsHeld(attempt=stale))
    assert cluster.state.ignored == ignored + 1


def test_one_whose_disk_is_full_serves_what_it_has_until_another_has_all(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    _, two, three = start(cluster, guaranteed(1, 1), 1)
    cluster.hold(two)
    cluster.hold(two, problem="disk full", readable=True)
    assert held(three) == [(0, 0, 2), (1, 0, 2)] and held(two) == [(0, 0, 1), (1, 0, 1)]
    cluster.hold(three)
    assert not held(two) and cluster.show("j1").unprotected == 0


def test_where_no_other_can_hold_the_tasks_are_unprotected_and_are_offered_again(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    _, two = start(cluster, guaranteed(1, 1))
    cluster.hold(two)
    for number, seconds in ((1, 10.0), (2, 20.0)):
        cluster.hold(two, problem="disk full", readable=True)
        assert not held(two) and cluster.show("j1").unprotected == 2
        cluster.advance(seconds)
        assert held(two) == [(0, 0, number + 1), (1, 0, number + 1)]
    assert cluster.show("j1").unprotected == 2
    cluster.hold(two)
    assert cluster.show("j1").unprotected == 0
    events = cluster.request(GetEvents(job="j1")).events
    said = [each.text for each in events if each.kind in ("tasks unprotected", "task protected")]
    assert said == [
        *(
            f"no other worker can hold the snapshots of {name}[0], lost if its own is: they are offered "
            "again after a while"
            for name in ("read", "count")
        ),
        "worker 2 has the snapshots of read[0] again",
        "worker 2 has the snapshots of count[0] again",
    ]
    kinds = [each.kind for each in events]
    assert kinds.count("holder failed") == 2, "once for each task, not at each try"


def test_a_worker_that_drains_is_taken_over_from_before_it_ends(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    """It has no slot of the job, and what it holds is needed until another has all."""
    _, two, three = start(cluster, guaranteed(1, 1), 1)
    cluster.hold(two)
    cluster.request(DrainWorker(worker=2))
    assert held(three) == [(0, 0, 2), (1, 0, 2)] and held(two)
    assert not two.got(ReleaseJob) and not two.got(Shutdown)
    cluster.hold(three)
    assert not held(two) and two.got(Shutdown)


def test_tasks_that_move_are_cancelled_without_a_barrier(cluster: FakeCluster, guaranteed: MakeGraph) -> None:
    one, two, three = start(cluster, guaranteed(1, 1), 1)
    cluster.hold(two)
    cluster.request(DrainWorker(worker=1))
    assert one.got(CancelTasks) and not one.got(DivideTasks)
    cluster.report(one, READ0, "canceled")
    cluster.report(one, COUNT0, "canceled")
    assert {each[1:3] for each in sources(two) + sources(three)} == {(2, 1)}
    assert cluster.show("j1").restarts == {"drained": 2}


def test_the_next_coordinator_knows_the_holders_and_takes_them_back(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    one, two, three = start(cluster, guaranteed(1, 1), 1)
    cluster.hold(two)
    cluster.lose_coordinator()
    cluster.check_journal()
    for worker in (one, two, three):
        cluster.come_back(worker)
    assert held(two) == [(0, 0, 1), (1, 0, 1)] and not held(three)
    assert cluster.show("j1").unprotected == 0
    cluster.lose(one)
    assert {each[1:4] for each in sources(two) + sources(three)} == {(2, 1, False)}


def test_a_holder_that_never_came_to_its_worker_is_named_again(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    one, two = start(cluster, guaranteed(1, 1))
    cluster.lose_coordinator()
    two.holders.clear()
    cluster.come_back(one)
    cluster.come_back(two)
    assert held(two) == [(0, 0, 2), (1, 0, 2)]


def test_a_worker_that_comes_back_releases_what_others_hold_by_now(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    one, two = start(cluster, guaranteed(1, 1))
    two.holders.add(("j1", holder_operator(0), 0, 7))
    cluster.break_link(two)
    cluster.come_back(two)
    assert held(two) == [(0, 0, 1), (1, 0, 1)] and one.tasks


def test_a_worker_hears_again_of_holders_and_tasks_when_it_comes_back(
    cluster: FakeCluster, guaranteed: MakeGraph
) -> None:
    one, two, three = start(cluster, guaranteed(1, 1), 1)
    cluster.lose(two)
    cluster.break_link(one)
    one.inbox.clear()
    cluster.come_back(one)
    (message,) = one.got(TasksRestarted)
    assert [(each.operator, each.attempt, each.worker) for each in message.tasks] == [
        (holder_operator(0), 2, 3),
        (holder_operator(1), 2, 3),
    ]
    assert [each.worker for each in message.workers] == [three.worker]
