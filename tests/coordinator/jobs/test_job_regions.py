"""Tasks that restart together: the strategies ``region`` and ``full``, and what blocking exchanges join."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.errors import PartitionLost, TaskFailed
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.messages import (
    CancelTasks,
    DeployTasks,
    ErrorInfo,
    ReleaseJob,
    TaskAttempt,
    TaskSpec,
    TasksRestarted,
)
from minishuffle.wire.packed import SplitPosition, pack_positions, unpack_positions
from minishuffle.wire.reports import SourcePositions
from minishuffle.wire.requests import CancelJob, GetEvents, JobInfo

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)
BOOM = ErrorInfo(code=TaskFailed.code, text="count[1]: ZeroDivisionError: division by zero", traceback="here")
TOGETHER = pytest.mark.parametrize("strategy", ["region", "full"])


def two_jobs_in_one(strategy: Any, **settings: Any) -> JobGraph:
    """Two parts that no exchange connects: read (0) to count (1), and pull (2) to sum (3)."""
    names = ["read", "count", "pull", "sum"]
    vertices = [
        Vertex(name=name, parallelism=1, operators=[name], is_source=n % 2 == 0, program=name.encode())
        for n, name in enumerate(names)
    ]
    edges = [Edge(source=0, target=1, partitioner="hash"), Edge(source=2, target=3, partitioner="hash")]
    values = JobSettings(restart_strategy=strategy, **settings)
    return JobGraph(vertices=vertices, edges=edges, settings=values)


def states(info: JobInfo) -> dict[str, str]:
    return {f"{task.name}[{task.index}]#{task.attempt}": task.state for task in info.tasks}


def since(worker: FakeWorker, count: int) -> list[Any]:
    """What a worker was sent after its first so many messages."""
    return [message for message in worker.inbox[count:] if message.type != "acknowledge"]


def named(*keys: tuple[str, int, int], attempt: int = 1) -> list[TaskAttempt]:
    return [TaskAttempt(operator=operator, index=index, attempt=attempt) for _, operator, index in keys]


@TOGETHER
def test_what_is_connected_with_a_task_that_fails_is_cancelled_and_restarts_with_it(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    first, second = pair
    cluster.submit(make_graph(restart_strategy=strategy))
    cluster.report_all("j1", "running")
    before = [len(worker.inbox) for worker in pair]
    cluster.report(second, COUNT1, "failed", error=BOOM)
    assert since(first, before[0]) == [CancelTasks(term=7, job="j1", attempts=named(READ0, COUNT0))]
    assert since(second, before[1]) == [CancelTasks(term=7, job="j1", attempts=named(READ1))]
    cluster.report(first, READ0, "canceled")
    cluster.report(second, READ1, "canceled")
    cluster.advance(5.0)
    assert not any(worker.got(ReleaseJob) for worker in pair), "something restarts before all has ended"
    before = [len(worker.inbox) for worker in pair]
    cluster.report(first, COUNT0, "canceled")
    for worker, number, keys in ((first, 0, (READ0, COUNT0)), (second, 1, (READ1, COUNT1))):
        release, deploy, restarted = since(worker, before[number])
        assert sorted(release.attempts, key=lambda each: each.operator) == named(*keys)
        assert {("j1", task.operator, task.index, task.attempt) for task in deploy.tasks} == {
            (*key, 2) for key in keys
        }
        assert isinstance(restarted, TasksRestarted)
        assert {("j1", each.operator, each.index) for each in restarted.tasks} == set(keys), (
            "what is deployed at the same time is named with the deployment"
        )
    info = cluster.show("j1")
    assert (info.state, info.causes) == ("running", [])
    assert info.restarts == {"failed": 1, "canceled": 3}
    assert set(states(info)) == {"read[0]#2", "read[1]#2", "count[0]#2", "count[1]#2"}
    texts = [event.text for event in cluster.request(GetEvents(job="j1")).events]
    assert any(text.endswith("[0]: attempt 2 follows with those beside it") for text in texts)


@pytest.mark.parametrize(("strategy", "restarted"), [("region", {1: 0, 3: 1}), ("full", {1: 0, 3: 0})])
def test_a_region_ends_where_no_exchange_leads(
    cluster: FakeCluster, strategy: str, restarted: dict[int, int]
) -> None:
    worker = cluster.add()
    cluster.submit(two_jobs_in_one(strategy))
    cluster.report_all("j1", "running")
    cluster.report(worker, ("j1", 1, 0), "failed", error=BOOM)
    for key in list(worker.tasks):
        if worker.is_canceled(key, 1):
            cluster.report(worker, key, "canceled")
    attempts = [task.attempt for task in cluster.show("j1").tasks]
    assert attempts == ([2, 2, 1, 1] if strategy == "region" else [2, 2, 2, 2])


def test_subtasks_that_forward_to_one_other_are_a_region(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph(2, 2, "forward", restart_strategy="region"))
    cluster.report_all("j1", "running")
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    cluster.report(pair[1], READ1, "canceled")
    assert not pair[0].got(CancelTasks)
    assert set(states(cluster.show("j1"))) == {"read[0]#1", "read[1]#2", "count[0]#1", "count[1]#2"}


@TOGETHER
def test_sources_go_on_where_they_ended(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    """Exactly: a source that was cancelled says what it has emitted, and no lease is open."""
    cluster.submit(make_graph(restart_strategy=strategy))
    cluster.report_all("j1", "running")
    reported = pack_positions([SplitPosition(split=0, position=10, lease=50)])
    cluster.fact(pair[0], SourcePositions(attempt=AttemptId.of("j1", 0, 0, 1), positions=reported))
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    ended = pack_positions([SplitPosition(split=0, position=37, lease=0)])
    cluster.report(pair[0], READ0, "canceled", positions=ended)
    cluster.report(pair[0], COUNT0, "canceled")
    cluster.report(pair[1], READ1, "canceled")
    again: TaskSpec = next(task for task in pair[0].got(DeployTasks)[-1].tasks if task.operator == 0)
    assert unpack_positions(again.positions) == [SplitPosition(split=0, position=37, lease=0)]


@TOGETHER
def test_the_delay_of_the_task_that_failed_is_that_of_all(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    cluster.submit(make_graph(restart_strategy=strategy))
    for attempt in (1, 2):
        cluster.report(pair[1], COUNT1, "failed", error=BOOM, attempt=attempt)
        for worker, key in ((pair[0], READ0), (pair[0], COUNT0), (pair[1], READ1)):
            cluster.report(worker, key, "canceled", attempt=attempt)
    assert set(states(cluster.show("j1")).values()) == {"restarting"}
    cluster.advance(0.05)
    assert [len(worker.got(DeployTasks)) for worker in pair] == [2, 2]
    cluster.advance(0.1)
    assert [len(worker.got(DeployTasks)) for worker in pair] == [3, 3]


@TOGETHER
def test_what_has_finished_restarts_if_a_consumer_of_it_does(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    """A sink that has finished has read all that was written for it."""
    cluster.submit(make_graph(restart_strategy=strategy))
    cluster.report_all("j1", "running")
    for worker, key in ((pair[0], READ0), (pair[1], READ1), (pair[0], COUNT0)):
        cluster.report(worker, key, "finished")
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    info = cluster.show("j1")
    assert set(states(info)) == {"read[0]#2", "read[1]#2", "count[0]#1", "count[1]#2"}
    assert info.restarts == {"failed": 1, "finished": 2}
    (restarted,) = pair[0].got(TasksRestarted)
    assert {(each.operator, each.index) for each in restarted.tasks} == {(0, 0)}, "count[0] reads no more"


@TOGETHER
def test_a_task_may_finish_before_it_is_cancelled(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    cluster.submit(make_graph(restart_strategy=strategy))
    cluster.report_all("j1", "running")
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    cluster.report(pair[0], READ0, "finished")
    cluster.report(pair[1], READ1, "canceled")
    cluster.report(pair[0], COUNT0, "finished")
    assert set(states(cluster.show("j1"))) == {"read[0]#2", "read[1]#2", "count[0]#1", "count[1]#2"}
    for worker, key in ((pair[0], READ0), (pair[1], READ1), (pair[1], COUNT1)):
        cluster.report(worker, key, "finished", attempt=2)
    assert cluster.show("j1").state == "finished"


@TOGETHER
def test_the_tasks_of_a_lost_worker_restart_with_all_others(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    third = cluster.add(slots=1)
    cluster.submit(make_graph(restart_strategy=strategy))
    cluster.report_all("j1", "running")
    del cluster.workers[pair[1].link]
    cluster.lose(pair[1])
    assert pair[0].got(CancelTasks) == [CancelTasks(term=7, job="j1", attempts=named(READ0, COUNT0))]
    assert not third.got(DeployTasks)
    cluster.report(pair[0], COUNT0, "canceled")
    cluster.report(pair[0], READ0, "abandoned")
    assert {("j1", task.operator, task.index) for task in third.got(DeployTasks)[0].tasks} == {READ1, COUNT1}
    info = cluster.show("j1")
    assert {task.attempt for task in info.tasks} == {2}
    assert info.restarts == {"lost": 2, "canceled": 1, "abandoned": 1}


@TOGETHER
def test_a_worker_that_is_lost_while_a_region_ends_has_ended(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    cluster.add()
    cluster.submit(make_graph(restart_strategy=strategy))
    cluster.report_all("j1", "running")
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    cluster.report(pair[1], READ1, "canceled")
    del cluster.workers[pair[0].link]
    cluster.lose(pair[0])
    assert {(task.attempt, task.state) for task in cluster.show("j1").tasks} == {(2, "created")}


@TOGETHER
def test_tasks_that_fail_while_their_region_ends_count_their_failures(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    cluster.submit(make_graph(restart_strategy=strategy, restart_failures_max=2))
    cluster.report_all("j1", "running")
    for attempt in (1, 2):
        cluster.report(pair[1], COUNT1, "failed", error=BOOM, attempt=attempt)
        for key in (READ0, COUNT0):
            cluster.report(pair[0], key, "failed", error=BOOM, attempt=attempt)
        cluster.report(pair[1], READ1, "canceled", attempt=attempt)
        cluster.advance(1.0)
    info = cluster.show("j1")
    assert info.state == "failed" and "count[1] failed 2 times" in info.causes[1].text
    assert info.restarts == {"failed": 3, "canceled": 1}


@TOGETHER
def test_a_slot_that_is_not_there_holds_up_no_other(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    cluster.submit(make_graph(3, 3, restart_strategy=strategy))
    cluster.report_all("j1", "running")
    del cluster.workers[pair[1].link]
    cluster.lose(pair[1])
    for key in list(pair[0].tasks):
        cluster.report(pair[0], key, "canceled")
    waiting = [task for task in cluster.show("j1").tasks if task.state == "waiting for a slot"]
    assert {(task.index, task.attempt) for task in waiting} == {(1, 1)}
    cluster.add()
    assert {(task.attempt, task.state) for task in cluster.show("j1").tasks} == {(2, "created")}


@TOGETHER
def test_a_job_that_is_cancelled_while_a_region_ends_restarts_nothing(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, strategy: str
) -> None:
    cluster.submit(make_graph(restart_strategy=strategy))
    cluster.report_all("j1", "running")
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    cluster.request(CancelJob(job="j1"))
    for worker, key in ((pair[0], READ0), (pair[0], COUNT0), (pair[1], READ1)):
        cluster.report(worker, key, "canceled")
    assert cluster.show("j1").state == "canceled"
    assert [len(worker.got(DeployTasks)) for worker in pair] == [1, 1]


# --- blocking exchanges ---------------------------------------------------------------------------


def stored(make_graph: MakeGraph, partitioner: str = "hash", **settings: Any) -> JobGraph:
    """What read stores for count goes on, pipelined, from count to a sink."""
    graph = make_graph(2, 2, partitioner, **{"restart_strategy": "individual", **settings})
    sink = graph.vertices[1].model_copy(update={"name": "sink"})
    edges = [
        graph.edges[0].model_copy(update={"kind": "blocking"}),
        Edge(source=1, target=2, partitioner="hash"),
    ]
    return graph.model_copy(update={"vertices": [*graph.vertices, sink], "edges": edges})


def end_what_is_cancelled(cluster: FakeCluster, pair: Any, attempt: int = 1) -> set[tuple[int, int]]:
    """Gives it, by operator and index."""
    found = set()
    for worker in pair:
        for key, task in list(worker.tasks.items()):
            if task.attempt == attempt and worker.is_canceled(key, attempt):
                found.add(key[1:])
                cluster.report(worker, key, "canceled", attempt=attempt)
    return found


def finish(cluster: FakeCluster, pair: Any, *keys: tuple[str, int, int], attempt: int = 1) -> None:
    for key in keys:
        (worker,) = [each for each in pair if key in each.tasks]
        cluster.report(worker, key, "finished", attempt=attempt)


def test_a_consumer_of_a_blocking_exchange_restarts_with_its_region_and_no_producer(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(stored(make_graph))
    cluster.report_all("j1", "running")
    finish(cluster, pair, READ0, READ1)
    kinds = [event.kind for event in cluster.request(GetEvents(job="j1")).events]
    assert kinds.count("exchange complete") == 1
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    assert end_what_is_cancelled(cluster, pair) == {(1, 0), (2, 0), (2, 1)}
    assert set(states(cluster.show("j1"))) == {
        *("read[0]#1", "read[1]#1"),
        *("count[0]#2", "count[1]#2", "sink[0]#2", "sink[1]#2"),
    }
    cluster.report_all("j1", "running", attempt=2)
    finish(cluster, pair, COUNT1, COUNT0, ("j1", 2, 0), ("j1", 2, 1), attempt=2)
    info = cluster.show("j1")
    assert (info.state, info.rows_dropped, info.rows_again) == ("finished", {}, 0)


def test_one_that_finishes_while_it_is_cancelled_runs_again_all_the_same(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(stored(make_graph))
    cluster.report_all("j1", "running")
    finish(cluster, pair, READ0, READ1)
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    finish(cluster, pair, COUNT0)
    end_what_is_cancelled(cluster, pair)
    assert cluster.show("j1").tasks[2].attempt == 2


@pytest.mark.parametrize(
    ("partitioner", "again"), [("hash", {(0, 1)}), ("rebalance", {(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)})]
)
def test_a_lost_partition_is_made_again(
    cluster: FakeCluster, make_graph: MakeGraph, partitioner: str, again: set[tuple[int, int]]
) -> None:
    """What its consumers have of it stays if the same rows come again."""
    first, second, third = (cluster.add(slots=2) for _ in range(3))
    graph = stored(make_graph, partitioner)
    away = graph.vertices[0].model_copy(update={"slot_group": "away"})
    cluster.submit(graph.model_copy(update={"vertices": [away, *graph.vertices[1:]]}))
    cluster.report_all("j1", "running")
    workers = (first, second, third)
    finish(cluster, workers, READ0, READ1)
    (lost,) = [each for each in workers if READ1 in each.tasks]
    rest = [each for each in workers if each is not lost]
    others = {key[1:] for key in lost.tasks if key != READ1}
    assert others == set() or partitioner == "hash"
    cluster.lose(lost)
    end_what_is_cancelled(cluster, rest)
    attempts = {(task.operator, task.index): task.attempt for task in cluster.show("j1").tasks}
    assert {key for key, attempt in attempts.items() if attempt == 2} == again | others


def test_what_is_stored_and_cannot_be_read_is_lost(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(stored(make_graph))
    cluster.report_all("j1", "running")
    finish(cluster, pair, READ0, READ1)
    cluster.report(pair[0], READ0, "failed", error=BOOM)
    assert cluster.show("j1").tasks[0].attempt == 1, "one that has finished does not fail"
    corrupt = ErrorInfo(code=PartitionLost.code, text="block 3 cannot be read")
    cluster.report(pair[0], READ0, "failed", error=corrupt)
    info = cluster.show("j1")
    assert states(info)["read[0]#2"] == "created" and info.restarts == {"lost": 1}
    assert {task.attempt for task in info.tasks[1:]} == {1}


def test_failures_of_a_replayed_region_count_together(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(stored(make_graph, restart_failures_max=2))
    cluster.report_all("j1", "running")
    finish(cluster, pair, READ0, READ1)
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    end_what_is_cancelled(cluster, pair)
    cluster.report_all("j1", "running", attempt=2)
    cluster.report(pair[0], ("j1", 2, 0), "failed", error=BOOM, attempt=2)
    assert cluster.show("j1").state == "failing"


def test_a_job_that_has_stored_what_a_client_wrote_fails_with_it(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    graph = stored(make_graph)
    written = graph.vertices[0].model_copy(update={"stream": "rows"})
    cluster.submit(graph.model_copy(update={"vertices": [written, *graph.vertices[1:]]}))
    cluster.report_all("j1", "running")
    cluster.lose(pair[1])
    (cause,) = cluster.show("j1").causes
    assert "read[1] cannot run again: a blocking exchange stores what an external client wrote" in cause.text


def test_the_next_coordinator_goes_on_with_what_runs_again(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(stored(make_graph))
    cluster.report_all("j1", "running")
    finish(cluster, pair, READ0, READ1)
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    cluster.lose_coordinator()
    cluster.check_journal()
    for worker in pair:
        cluster.come_back(worker)
    assert end_what_is_cancelled(cluster, pair) == {(1, 0), (2, 0), (2, 1)}
    assert {task.attempt for task in cluster.show("j1").tasks[2:]} == {2}


def test_rows_that_the_client_has_of_what_runs_again_count_as_repeated(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(stored(make_graph))
    cluster.report_all("j1", "running")
    (worker,) = [each for each in pair if ("j1", 2, 0) in each.tasks]
    cluster.collect(worker, ("j1", 2, 0), b"rows", rows=5)
    finish(cluster, pair, READ0, READ1)
    cluster.report(pair[1], COUNT1, "failed", error=BOOM)
    end_what_is_cancelled(cluster, pair)
    info = cluster.show("j1")
    assert (info.rows_again, info.rows_dropped, info.rows_in_flight) == (5, {}, 0)
