"""A job whose function may be what ends its process is alone on a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import CancelTasks, TaskReport
from minishuffle.wire.requests import (
    CancelJob,
    DrainWorker,
    GetEvents,
    JobEvent,
    SubmitJob,
    UserCall,
    WorkerEnded,
)

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
SLOT_TIMEOUT = 60.0
FAILURES_MAX = 10


def run(cluster: FakeCluster, make_graph: MakeGraph, slots: int, name: str) -> str:
    graph = make_graph(slots, slots, restart_strategy="individual", restart_failures_max=FAILURES_MAX)
    job = cluster.submit(graph, name)
    cluster.report_all(job, "running")
    return job


def side_by_side(cluster: FakeCluster, make_graph: MakeGraph) -> tuple[str, str]:
    """Two workers of two slots, of which a job has three, and another, which is to be the killer, one."""
    for _ in range(2):
        add(cluster)
    healthy, killer = run(cluster, make_graph, 3, "healthy"), run(cluster, make_graph, 1, "killer")
    return healthy, killer


def kill(cluster: FakeCluster, job: str, *slots: int) -> FakeWorker:
    """The subtasks of a job in these slots end the process of the first one, and its launcher tells."""
    tasks = {task.index: task for task in cluster.show(job).tasks if task.operator == 1}
    (worker,) = [
        each for each in cluster.workers.values() if each.worker == tasks[slots[0]].worker and each.worker
    ]
    calls = [
        UserCall(job=job, operator=1, index=slot, attempt=tasks[slot].attempt, position=0, rows=5)
        for slot in slots
    ]
    cluster.lose(worker)
    del cluster.workers[worker.link]
    cluster.request(
        WorkerEnded(worker=worker.worker, epoch=worker.epoch, signal="SIGSEGV", recorded=True, calls=calls)
    )
    return worker


def replace(cluster: FakeCluster, *workers: FakeWorker) -> list[FakeWorker]:
    return [add(cluster, each.about.slots, requested_worker=each.worker) for each in workers]


def add(cluster: FakeCluster, slots: int = 2, **fields: Any) -> FakeWorker:
    return cluster.add(slots=slots, end_is_told=True, **fields)


def places(cluster: FakeCluster, job: str) -> list[int]:
    """The worker of each slot; 0: it has none."""
    tasks = [task for task in cluster.show(job).tasks if task.operator == 1]
    return [task.worker if task.state in ("created", "running") else 0 for task in tasks]


def events(cluster: FakeCluster, job: str, kind: str) -> list[JobEvent]:
    found: list[JobEvent] = cluster.request(GetEvents(job=job)).events
    return [event for event in found if event.kind == kind]


@pytest.fixture
def three(cluster: FakeCluster) -> list[FakeWorker]:
    """Three workers of two slots."""
    return [add(cluster) for _ in range(3)]


def suspected(cluster: FakeCluster, make_graph: MakeGraph) -> tuple[str, str]:
    """A killer of one slot, which has killed twice, and a healthy job of two; the workers are three of two
    slots, of which one is there."""
    healthy, killer = run(cluster, make_graph, 2, "healthy"), run(cluster, make_graph, 1, "killer")
    first = kill(cluster, killer, 0)
    second = kill(cluster, killer, 0)
    assert first.worker != second.worker
    return healthy, killer


def test_a_suspect_waits_for_a_worker_of_its_own_and_others_do_not_get_that(
    cluster: FakeCluster, three: list[FakeWorker], make_graph: MakeGraph
) -> None:
    healthy, killer = suspected(cluster, make_graph)
    (left,) = [each for each in cluster.workers.values() if each.worker]
    assert set(places(cluster, healthy)) == {left.worker}
    assert places(cluster, killer) == [0], "the healthy job is on the only worker that is left"
    new = add(cluster, requested_worker=next(n for n in (1, 2, 3) if n != left.worker))
    assert places(cluster, killer) == [new.worker]
    (isolated,) = events(cluster, killer, "worker isolated")
    assert isolated.worker == new.worker
    for _ in range(5):
        before = places(cluster, healthy)
        lost = kill(cluster, killer, 0)
        (new,) = replace(cluster, lost)
        assert places(cluster, killer) == [new.worker]
        assert places(cluster, healthy) == before
    assert cluster.show(healthy).restarts["lost"] <= 2 * 2 * 2
    while cluster.show(killer).state != "failed":
        replace(cluster, kill(cluster, killer, 0))
    assert len(events(cluster, killer, "death counted")) == FAILURES_MAX
    assert cluster.show(healthy).state in ("created", "running")


def test_a_job_that_waits_because_of_a_suspect_says_so_and_waits_on(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    healthy, killer = side_by_side(cluster, make_graph)
    assert sorted(places(cluster, healthy) + places(cluster, killer)) == [1, 1, 2, 2]
    for _ in range(2):
        lost = kill(cluster, killer, 0)
        replace(cluster, lost)
    assert places(cluster, killer) == [lost.worker]
    assert places(cluster, healthy).count(0) == 1, "it would fit on that worker"
    (wait,) = cluster.show(healthy).slot_waits
    assert (
        f"worker {lost.worker} is kept for job {killer} (killer), inside which 2 workers in a row died"
        in wait.text
    )
    cluster.report_all(killer, "running", attempt=3)
    cluster.advance(SLOT_TIMEOUT + 1)
    assert cluster.show(healthy).state in ("created", "running")
    assert places(cluster, healthy).count(0) == 1
    cluster.advance(SLOT_TIMEOUT)
    assert 0 not in places(cluster, healthy), "no further worker has died for twice that"


def test_others_get_their_slots_when_the_suspect_gets_past_the_place(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    healthy, killer = side_by_side(cluster, make_graph)
    for _ in range(2):
        (new,) = replace(cluster, kill(cluster, killer, 0))
    assert places(cluster, healthy).count(0) == 1
    cluster.report_all(killer, "running", attempt=3)
    report = TaskReport(
        attempt=AttemptId.of(killer, 1, 0, 3), counters=TaskCounters(), position=5, inside=True
    )
    cluster.heartbeat(new, tasks=[report])
    assert 0 not in places(cluster, healthy)
    assert len(events(cluster, killer, "task cleared")) == 1


def test_others_get_their_slots_when_the_suspect_is_cancelled(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    healthy, killer = side_by_side(cluster, make_graph)
    for _ in range(2):
        replace(cluster, kill(cluster, killer, 0))
    cluster.request(CancelJob(job=killer))
    cluster.report_all(killer, "canceled", attempt=3)
    assert 0 not in places(cluster, healthy)


def test_a_new_job_does_not_get_slots_beside_a_suspect(
    cluster: FakeCluster, three: list[FakeWorker], make_graph: MakeGraph
) -> None:
    killer = run(cluster, make_graph, 1, "killer")
    for _ in range(2):
        replace(cluster, kill(cluster, killer, 0))
    (place,) = places(cluster, killer)
    other = run(cluster, make_graph, 4, "other")
    assert place not in places(cluster, other)
    graph = make_graph(1, 1)
    _, text = cluster.refusal(SubmitJob(name="more", python="3.11", graph=graph.to_bytes()))
    assert (
        f"job needs 1 slots (greatest parallelism), 0 are free of 4 (worker {place} is kept for job {killer} "
        "(killer), inside which 2 workers in a row died): start more workers"
    ) in text


def test_a_single_worker_is_nobodys_alone(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    add(cluster, 4)
    healthy, killer = run(cluster, make_graph, 2, "healthy"), run(cluster, make_graph, 1, "killer")
    for _ in range(FAILURES_MAX - 1):
        (new,) = replace(cluster, kill(cluster, killer, 0))
        assert places(cluster, killer) == [new.worker], "at once: no other will come"
        assert set(places(cluster, healthy)) == {new.worker}
    kill(cluster, killer, 0)
    assert cluster.show(killer).state == "failed"


def test_the_first_worker_that_comes_back_is_for_the_others(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    first, second = add(cluster, 3), add(cluster, 3)
    healthy, killer = run(cluster, make_graph, 2, "healthy"), run(cluster, make_graph, 1, "killer")
    kill(cluster, killer, 0)
    kill(cluster, killer, 0)
    (back,) = replace(cluster, first)
    assert set(places(cluster, healthy)) == {back.worker} and places(cluster, killer) == [0]
    (wait,) = cluster.show(killer).slot_waits
    assert f"worker {back.worker} is not for a task inside which 2 workers in a row died" in wait.text
    (other,) = replace(cluster, second)
    assert places(cluster, killer) == [other.worker]


def test_a_suspect_for_which_no_worker_comes_takes_any_slot_after_a_while(
    cluster: FakeCluster, three: list[FakeWorker], make_graph: MakeGraph
) -> None:
    healthy, killer = suspected(cluster, make_graph)
    assert places(cluster, killer) == [0]
    cluster.advance(SLOT_TIMEOUT / 2 - 1)
    assert places(cluster, killer) == [0]
    add(cluster, 1)
    assert places(cluster, killer) != [0], "one that is empty is as good"
    replace(cluster, kill(cluster, killer, 0))


def test_a_suspect_takes_a_slot_beside_others_after_a_while(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    for _ in range(3):
        add(cluster, 4)
    healthy, killer = run(cluster, make_graph, 3, "healthy"), run(cluster, make_graph, 1, "killer")
    kill(cluster, killer, 0)
    kill(cluster, killer, 0)
    (left,) = [each for each in cluster.workers.values() if each.worker]
    assert set(places(cluster, healthy)) == {left.worker} and places(cluster, killer) == [0]
    cluster.advance(SLOT_TIMEOUT / 2 - 1)
    assert places(cluster, killer) == [0]
    cluster.advance(2)
    assert places(cluster, killer) == [left.worker], "those that are there stay"
    assert set(places(cluster, healthy)) == {left.worker}


def test_all_suspects_of_a_job_go_to_one_worker(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    for _ in range(4):
        add(cluster)
    killer = run(cluster, make_graph, 2, "killer")
    healthy = run(cluster, make_graph, 2, "healthy")
    lost: list[FakeWorker] = []
    for _ in range(2):
        for slot in (0, 1):
            if places(cluster, killer)[slot]:
                lost.append(kill(cluster, killer, slot))
    kept = places(cluster, healthy)
    replace(cluster, *lost[-2:])
    assert len(set(places(cluster, killer))) == 1 and 0 not in places(cluster, killer)
    assert not set(places(cluster, killer)) & set(places(cluster, healthy))
    assert kept


def test_the_job_that_has_died_most_often_is_the_suspect(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    for _ in range(3):
        add(cluster, 4)
    killer, other = run(cluster, make_graph, 1, "killer"), run(cluster, make_graph, 1, "other")
    run(cluster, make_graph, 1, "healthy")
    for _ in range(2):
        replace(cluster, kill(cluster, other, 0))
    for _ in range(3):
        replace(cluster, kill(cluster, killer, 0))
    suspect = cluster.state._isolation.look(cluster.state._jobs.active(), cluster.now)
    assert suspect is not None and suspect.id == killer
    (place,) = places(cluster, killer)
    assert place not in places(cluster, other)


def test_isolation_outlives_the_coordinator(
    cluster: FakeCluster, three: list[FakeWorker], make_graph: MakeGraph
) -> None:
    killer = run(cluster, make_graph, 1, "killer")
    for _ in range(2):
        replace(cluster, kill(cluster, killer, 0))
    (place,) = places(cluster, killer)
    living = [each for each in cluster.workers.values() if each.worker]
    cluster.lose_coordinator()
    for each in living:
        cluster.come_back(each)
    other = run(cluster, make_graph, 4, "other")
    assert place not in places(cluster, other)


@pytest.mark.parametrize("gone", [False, True])
def test_a_suspect_moves_off_a_worker_that_is_to_leave(
    cluster: FakeCluster, make_graph: MakeGraph, gone: bool
) -> None:
    """At once if no other worker will come, else when the suspicion has ended."""
    for _ in range(2):
        add(cluster)
    if gone:
        cluster.lose(add(cluster))
    healthy, killer = run(cluster, make_graph, 1, "healthy"), run(cluster, make_graph, 1, "killer")
    for _ in range(2):
        replace(cluster, kill(cluster, killer, 0))
    ((at,), (other,)) = places(cluster, killer), places(cluster, healthy)
    assert at != other
    (leaving,) = [each for each in cluster.workers.values() if each.worker == at]
    cluster.report_all(killer, "running", attempt=3)
    cluster.request(DrainWorker(worker=at))
    assert bool(leaving.got(CancelTasks)) is not gone
    if gone:
        report = TaskReport(
            attempt=AttemptId.of(killer, 1, 0, 3), counters=TaskCounters(), position=5, inside=True
        )
        cluster.heartbeat(leaving, tasks=[report])
    assert leaving.got(CancelTasks)


def test_a_suspect_of_a_job_that_loses_nothing_is_alone_and_not_with_its_own_snapshots(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    workers = [add(cluster) for _ in range(3)]
    graph = make_graph(2, 2, restart_strategy="individual", guarantee="at_least_once")
    job = cluster.submit(graph)
    cluster.report_all(job, "running")
    kill(cluster, job, 0)
    cluster.report_all(job, "running", attempt=2)
    lost = kill(cluster, job, 0)
    assert places(cluster, job)[0] == 0, "the worker that is left has the other slot, or the snapshots"
    (new,) = replace(cluster, lost)
    assert (
        places(cluster, job)[0]
        == new.worker
        not in {task.holder for task in cluster.show(job).tasks if task.index == 0}
    )
    assert [event.worker for event in events(cluster, job, "worker isolated")] == [new.worker]
    assert len(workers) == 3
