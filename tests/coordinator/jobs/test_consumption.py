"""What was read to the end: what is released, and who runs again for whom when a worker is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from minishuffle.coordinator.jobs.consumption import Ends, repeating
from minishuffle.coordinator.jobs.subtasks import Subtasks
from minishuffle.errors import TaskFailed
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.messages import (
    ConsumerEnds,
    ConsumersEnded,
    DeployTasks,
    ErrorInfo,
    RecoveryStep,
    RecoverySteps,
    ReleaseJob,
    TaskAttempt,
    TasksRestarted,
)
from minishuffle.wire.packed import SplitPosition, pack_positions
from minishuffle.wire.reports import EndsRead
from minishuffle.wire.requests import GetEvents

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
TERM = 7
READ0, READ1, READ2, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 0, 2), ("j1", 1, 0), ("j1", 1, 1)
BOOM = ErrorInfo(code=TaskFailed.code, text="boom")


def say_read(
    cluster: FakeCluster, worker: FakeWorker, consumer: int, *producers: int, attempt: int = 1
) -> None:
    """Tasks of the second operator have read these partitions of the first to the end."""
    reads = AttemptId.of("j1", 1, consumer, attempt)
    cluster.fact(worker, EndsRead(attempt=reads, edge=0, producers=list(producers)))


def attempt(operator: int, index: int, number: int = 1) -> TaskAttempt:
    return TaskAttempt(operator=operator, index=index, attempt=number)


@pytest.fixture
def apart(cluster: FakeCluster, make_graph: MakeGraph) -> list[FakeWorker]:
    """A job of three sources and two consumers, which waits; read[2] is alone on the third worker, and has
    finished. A fourth worker is free."""
    workers = [cluster.add(slots=1) for _ in range(4)]
    cluster.submit(make_graph(3, 2, restart_strategy="individual"))
    cluster.report_all("j1", "running")
    positions = pack_positions([SplitPosition(2, 40, done=True)])
    cluster.report(workers[2], READ2, "finished", positions=positions)
    return workers


# --- released --------------------------------------------------------------------------------------


def test_a_finished_producer_is_released_when_all_have_read_it(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    say_read(cluster, apart[0], 0, 2)
    assert apart[2].got(ReleaseJob) == []
    say_read(cluster, apart[1], 1, 2)
    assert apart[2].got(ReleaseJob) == [ReleaseJob(term=TERM, job="j1", attempts=[attempt(0, 2)])]
    say_read(cluster, apart[1], 1, 2)
    assert len(apart[2].got(ReleaseJob)) == 1


def test_one_that_was_read_before_its_end_was_heard_of_is_released_then(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    say_read(cluster, apart[0], 0, 0)
    cluster.report(apart[1], COUNT1, "finished")  # which says that it has read all
    assert apart[0].got(ReleaseJob) == []
    cluster.report(apart[0], READ0, "finished")
    assert apart[0].got(ReleaseJob) == [ReleaseJob(term=TERM, job="j1", attempts=[attempt(0, 0)])]


def test_a_consumer_that_starts_anew_hears_what_its_former_attempt_has_read(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    say_read(cluster, apart[0], 0, 2)
    say_read(cluster, apart[1], 1, 2)
    cluster.report(apart[1], COUNT1, "failed", error=BOOM)
    deploy = apart[1].got(DeployTasks)[-1]
    (gate,) = deploy.tasks[0].inputs
    assert gate.ended == [2] and [producer for producer, _, _ in deploy.channels(gate)] == [0, 1]


# --- lost ------------------------------------------------------------------------------------------


def test_a_producer_that_all_have_read_does_not_run_again(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    for consumer in (0, 1):
        say_read(cluster, apart[consumer], consumer, 2)
    cluster.lose(apart[2])
    assert apart[3].got(DeployTasks) == [] and cluster.show("j1").restarts == {}


def test_only_those_that_have_yet_to_read_it_get_its_rows_once_more(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    say_read(cluster, apart[0], 0, 2)
    cluster.lose(apart[2])
    (deploy,) = apart[3].got(DeployTasks)
    (task,) = deploy.tasks
    assert (task.operator, task.index, task.attempt, task.version) == (0, 2, 2, 1)
    assert task.outputs[0].closed == [0] and task.positions == b"", "from the first row on"
    assert apart[0].got(TasksRestarted) == [], "it has read the end"
    (restarted,) = apart[1].got(TasksRestarted)
    assert [(each.operator, each.index, each.attempt, each.version) for each in restarted.tasks] == [
        (0, 2, 2, 1)
    ]


def closed(*consumers: int) -> list[ConsumersEnded]:
    ends = ConsumerEnds(operator=0, index=2, attempt=2, edge=0, consumers=list(consumers))
    return [ConsumersEnded(term=TERM, job="j1", ends=[ends])]


def test_one_that_has_read_it_as_is_heard_when_it_runs_again_gets_none_of_its_rows(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    cluster.lose(apart[2])
    (deploy,) = apart[3].got(DeployTasks)
    assert deploy.tasks[0].outputs[0].closed == []
    say_read(cluster, apart[0], 0, 0, 2)
    say_read(cluster, apart[0], 0, 2)
    assert apart[3].got(ConsumersEnded) == closed(0), "once, and nothing of the first attempt of read[0]"
    assert [each for worker in apart[:3] for each in worker.got(ConsumersEnded)] == []
    cluster.report(apart[1], COUNT1, "finished")
    assert apart[3].got(ConsumersEnded)[1:] == closed(1)


def test_it_hears_of_that_before_it_is_released(cluster: FakeCluster, apart: list[FakeWorker]) -> None:
    """What it discards then is not lost."""
    cluster.lose(apart[2])
    cluster.report(apart[3], READ2, "finished", attempt=2)
    say_read(cluster, apart[1], 1, 2)
    say_read(cluster, apart[0], 0, 2)
    assert [type(each) for each in apart[3].inbox][-3:] == [ConsumersEnded, ConsumersEnded, ReleaseJob]


def test_the_last_to_finish_has_its_producers_hear_of_it_before_the_job_is_released(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    cluster.lose(apart[2])
    cluster.report(apart[3], READ2, "finished", attempt=2)
    for worker, key in ((apart[0], READ0), (apart[1], READ1), (apart[1], COUNT1), (apart[0], COUNT0)):
        cluster.report(worker, key, "finished")
    kinds = [type(each) for each in apart[3].inbox]
    assert cluster.show("j1").state == "finished" and kinds[-2:] == [ConsumersEnded, ReleaseJob]
    assert apart[3].got(ConsumersEnded) == [*closed(1), *closed(0)]


def test_a_worker_that_comes_back_hears_which_consumers_want_nothing(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    """What the coordinator before had sent may not have arrived."""
    cluster.lose(apart[2])
    say_read(cluster, apart[0], 0, 2)
    cluster.lose_coordinator()
    before = len(apart[3].inbox)
    for worker in (apart[0], apart[1], apart[3]):
        cluster.come_back(worker)
    assert [each for each in apart[3].inbox[before:] if isinstance(each, ConsumersEnded)]


@pytest.mark.parametrize("job_ends", [False, True])
def test_a_worker_that_comes_back_hears_of_ends_before_it_releases_what_they_make_of_no_use(
    cluster: FakeCluster, apart: list[FakeWorker], job_ends: bool
) -> None:
    cluster.lose(apart[2])
    cluster.report(apart[3], READ2, "finished", attempt=2)
    cluster.break_link(apart[3])
    if job_ends:
        for worker, key in ((apart[0], READ0), (apart[1], READ1), (apart[1], COUNT1), (apart[0], COUNT0)):
            cluster.report(worker, key, "finished")
        assert cluster.show("j1").state == "finished"
    else:
        say_read(cluster, apart[1], 1, 2)
        say_read(cluster, apart[0], 0, 2)
    before = len(apart[3].inbox)
    cluster.come_back(apart[3])
    kinds = [type(each) for each in apart[3].inbox[before:]]
    assert kinds.index(ConsumersEnded) < kinds.index(ReleaseJob)
    ended = {consumer for message in apart[3].got(ConsumersEnded) for consumer in message.ends[0].consumers}
    assert ended == {0, 1}


def test_a_consumer_that_was_deployed_with_a_producer_has_read_the_end_of_that(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    """Nobody waits for it, so nobody needs to be told: in a job of a thousand by a thousand tasks that has
    restarted that would be a million ends."""
    cluster.add(slots=2)
    cluster.submit(make_graph(2, 2, restart_strategy="full"))
    cluster.report_all("j1", "running")
    (worker,) = cluster.workers.values()
    cluster.report(worker, READ0, "failed", error=BOOM)
    for key in (READ1, COUNT0, COUNT1):
        cluster.report(worker, key, "canceled")
    cluster.advance(1.0)
    assert {task.attempt for task in worker.tasks.values()} == {2}
    for consumer in (0, 1):
        say_read(cluster, worker, consumer, 0, 1, attempt=2)
    assert cluster.state._jobs["j1"].ends.all_read((0, 0)) and worker.got(ConsumersEnded) == []


def test_who_keeps_what_it_writes_waits_for_no_consumer_and_is_not_told(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    """That one has ended is as good as that it has attached, though."""
    graph = make_graph(2, 2, restart_strategy="individual")
    edge = graph.edges[0].model_copy(update={"partitioner": "broadcast", "input": 1})
    graph = graph.model_copy(update={"edges": [edge]})
    assert graph.kept_edges() == {0}
    first, second, third = (cluster.add(slots=1) for _ in range(3))
    cluster.submit(graph)
    cluster.report_all("j1", "running")
    cluster.lose(second)
    say_read(cluster, first, 0, 0, 1)
    step = RecoveryStep(operator=0, index=1, attempt=2, step="outputs", channels=1)
    cluster.send(third, RecoverySteps(term=TERM, job="j1", steps=[step]))
    kinds = [event.kind for event in cluster.request(GetEvents(job="j1")).events if event.operator == 0]
    assert kinds[-1] == "outputs reattached" and third.got(ConsumersEnded) == []


def test_an_attempt_whose_consumer_has_ended_is_read_by_all_that_are_left(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    """The recovery does not wait for it to attach."""
    cluster.lose(apart[2])
    step = RecoveryStep(operator=0, index=2, attempt=2, step="outputs", channels=1)
    cluster.send(apart[1], RecoverySteps(term=TERM, job="j1", steps=[step]))
    kinds = [event.kind for event in cluster.request(GetEvents(job="j1")).events if event.index == 2]
    assert "outputs reattached" not in kinds
    say_read(cluster, apart[0], 0, 2)
    kinds = [event.kind for event in cluster.request(GetEvents(job="j1")).events if event.index == 2]
    assert kinds[-1] == "outputs reattached"


def test_a_consumer_that_has_restarted_meanwhile_gets_the_end_alone(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    """What its former attempt took it cannot know."""
    cluster.report(apart[1], COUNT1, "failed", error=BOOM)
    cluster.lose(apart[2])
    (deploy,) = apart[3].got(DeployTasks)
    assert deploy.tasks[0].outputs[0].closed == [1]
    assert apart[1].got(TasksRestarted)[-1].tasks[0].attempt == 2, "it has to read the end"


def test_what_was_written_once_more_is_so_as_long_as_it_is_needed(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    cluster.lose(apart[2])
    fifth = cluster.add(slots=1)
    cluster.lose(apart[3])
    (deploy,) = fifth.got(DeployTasks)
    assert (deploy.tasks[0].attempt, deploy.tasks[0].version) == (3, 1)


def test_a_job_that_drops_writes_nothing_once_more(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    workers = [cluster.add(slots=1) for _ in range(4)]
    cluster.submit(make_graph(3, 2, restart_strategy="individual", on_unavailable="drop"))
    cluster.report_all("j1", "running")
    cluster.report(workers[2], READ2, "finished")
    cluster.lose(workers[2])
    (deploy,) = workers[3].got(DeployTasks)
    assert (deploy.tasks[0].attempt, deploy.tasks[0].version) == (2, 0)


def test_rows_that_come_once_more_are_not_lost(cluster: FakeCluster, apart: list[FakeWorker]) -> None:
    cluster.lose(apart[2])
    assert cluster.show("j1").rows_in_flight == 0
    cluster.report(apart[1], COUNT1, "failed", error=BOOM)
    assert cluster.show("j1").rows_in_flight == 40, "count[1] gets none of them: a bound"


def test_ends_are_journaled(cluster: FakeCluster, apart: list[FakeWorker]) -> None:
    say_read(cluster, apart[0], 0, 2)
    cluster.lose_coordinator()
    for worker in apart:
        cluster.come_back(worker)
    assert cluster.state._jobs["j1"].ends.is_read(0, 2, 0) and not cluster.state._jobs["j1"].ends.is_read(
        0, 2, 1
    )


# --- seen ------------------------------------------------------------------------------------------


def test_a_consumer_that_finished_on_a_lost_worker_is_not_waited_for(
    cluster: FakeCluster, apart: list[FakeWorker]
) -> None:
    """All outputs are attached when those are that have yet to read the end."""
    say_read(cluster, apart[0], 0, 1)
    cluster.report(apart[1], COUNT1, "finished")
    cluster.report(apart[1], READ1, "finished")
    cluster.lose(apart[1])
    cluster.lose(apart[2])
    step = RecoveryStep(operator=0, index=2, attempt=2, step="outputs", channels=1)
    cluster.send(apart[0], RecoverySteps(term=TERM, job="j1", steps=[step]))
    events = [event for event in cluster.request(GetEvents(job="j1")).events if event.index == 2]
    assert [event.kind for event in events][-1] == "outputs reattached"


# --- bits ------------------------------------------------------------------------------------------


def test_what_is_kept_is_read_again_by_each_attempt(make_graph: MakeGraph) -> None:
    graph = make_graph(2, 2)
    ends = Ends(graph, frozenset({0}), Subtasks(graph, (1, 2)))
    assert ends.read((1, 0), 0, [0, 1, 9]) == [] and ends.read((1, 1), 0, [0, 1]) == [(0, 0), (0, 1)]
    ends.reset_consumer((1, 0))
    ends.validate()
    assert not ends.all_read((0, 0)) and not ends.is_released((0, 0))
    assert ends.read((1, 7), 3, [0]) == [] and ends.read((0, 0), 0, [0]) == [], "there is no such channel"


def test_sources_alone_write_once_more(make_graph: MakeGraph) -> None:
    graph = make_graph(2, 2, restart_strategy="individual")
    assert repeating(graph, frozenset()) == {0}
    assert repeating(graph, frozenset({0})) == set()
    for strategy in ("region", "full", "none"):
        assert repeating(make_graph(2, 2, restart_strategy=strategy), frozenset()) == set()
    chained = graph.model_copy(update={"edges": [*graph.edges, Edge(source=1, target=1, partitioner="hash")]})
    assert repeating(chained, frozenset()) == {0}


# --- with a guarantee -----------------------------------------------------------------------------


def chain(*, guarantee: str) -> JobGraph:
    """Each of three vertices has one subtask, and a slot of its own."""
    names = ("read", "map", "count")
    vertices = [
        Vertex(
            name=name,
            parallelism=1,
            operators=[name],
            is_source=name == "read",
            by_order=name == "read",
            slot_group=name,
            program=b"",
        )
        for name in names
    ]
    edges = [Edge(source=n, target=n + 1, partitioner="rebalance") for n in (0, 1)]
    settings = JobSettings.model_validate({"guarantee": guarantee})
    return JobGraph(vertices=vertices, edges=edges, settings=settings)


@pytest.mark.parametrize(("guarantee", "again"), [("loss", []), ("at_least_once", [("read", 1), ("map", 2)])])
def test_what_was_read_to_the_end_runs_again_while_what_it_leads_to_goes_on(
    cluster: FakeCluster, guarantee: str, again: list[tuple[str, int]]
) -> None:
    """Another loss would take the count back to a snapshot, from which it asks the others. Only the source
    makes the same rows as before."""
    workers = [cluster.add(slots=1) for _ in range(6)]
    cluster.submit(chain(guarantee=guarantee))
    cluster.report_all("j1", "running")
    for number in (0, 1):
        cluster.report(workers[number], ("j1", number, 0), "finished")
    cluster.fact(workers[2], EndsRead(attempt=AttemptId.of("j1", 2, 0, 1), edge=1, producers=[0]))
    assert [len(worker.got(ReleaseJob)) for worker in workers[:2]] == [0 if again else 1] * 2
    for number in (0, 1):
        cluster.lose(workers[number])
    deployed = [spec for worker in workers[3:] for each in worker.got(DeployTasks) for spec in each.tasks]
    named = {
        spec.name: attempt.version or attempt.attempt
        for worker in workers[3:]
        for message in worker.got(DeployTasks)
        for spec in message.tasks
        for attempt in message.attempts
        if attempt.operator == spec.operator - 1
    }
    assert [(spec.name, spec.version or spec.attempt) for spec in deployed] == again
    assert named == ({"map": 1} if again else {})
    info = cluster.show("j1")
    assert (info.rows_dropped, info.rows_in_flight, info.state_rows_lost) == ({}, 0, 0)


def test_nothing_is_retained_for_a_consumer_that_has_finished_for_good(cluster: FakeCluster) -> None:
    """Of two consumers one has finished, and nothing is behind it: nobody would say what is stable there."""
    workers = [cluster.add(slots=1) for _ in range(6)]
    graph = chain(guarantee="at_least_once")
    edges = [Edge(source=0, target=n, partitioner="rebalance") for n in (1, 2)]
    cluster.submit(graph.model_copy(update={"edges": edges}))
    cluster.report_all("j1", "running")
    cluster.report(workers[1], ("j1", 1, 0), "finished")
    cluster.lose(workers[0])
    (spec,) = [spec for worker in workers[3:] for each in worker.got(DeployTasks) for spec in each.tasks]
    assert {output.edge: output.closed for output in spec.outputs} == {0: [0], 1: []}


@pytest.mark.parametrize(("partitioner", "again"), [("rebalance", ["map", "count"]), ("hash", ["map"])])
def test_a_finished_consumer_runs_again_if_it_may_be_dealt_other_rows(
    cluster: FakeCluster, partitioner: str, again: list[str]
) -> None:
    """One of two subtasks of count has had all that was dealt to it; what deals to both is lost."""
    workers = [cluster.add(slots=1) for _ in range(6)]
    graph = chain(guarantee="at_least_once")
    vertices = [*graph.vertices[:2], graph.vertices[2].model_copy(update={"parallelism": 2})]
    edges = [graph.edges[0], graph.edges[1].model_copy(update={"partitioner": partitioner})]
    cluster.submit(graph.model_copy(update={"vertices": vertices, "edges": edges}))
    cluster.report_all("j1", "running")
    for number, task in enumerate([("j1", 0, 0), ("j1", 1, 0), ("j1", 2, 0)]):
        cluster.report(workers[number], task, "finished")
    cluster.lose(workers[1])
    deployed = [
        (spec.name, spec.index, spec.attempt)
        for worker in workers
        for each in worker.got(DeployTasks)
        for spec in each.tasks
        if spec.attempt > 1
    ]
    assert sorted(deployed) == sorted((name, 0, 2) for name in again)


@pytest.mark.parametrize(("version", "again"), [(1, [("count", 0, 2), ("map", 0, 2)]), (2, [("map", 0, 2)])])
def test_a_consumer_runs_again_that_finished_while_another_attempt_was_about_to_deal_it_other_rows(
    cluster: FakeCluster, version: int, again: list[tuple[str, int, int]]
) -> None:
    """The next attempt of what deals to it was deployed, and it had read the one before to its end."""
    workers = [cluster.add(slots=1) for _ in range(6)]
    graph = chain(guarantee="at_least_once")
    vertices = [*graph.vertices[:2], graph.vertices[2].model_copy(update={"parallelism": 2})]
    edges = [graph.edges[0], graph.edges[1].model_copy(update={"partitioner": "rebalance"})]
    cluster.submit(graph.model_copy(update={"vertices": vertices, "edges": edges}))
    cluster.report_all("j1", "running")
    for number, task in enumerate([("j1", 0, 0), ("j1", 1, 0)]):
        cluster.report(workers[number], task, "finished")
    cluster.lose(workers[1])
    cluster.report(workers[2], ("j1", 2, 0), "finished", dealt=[(1, 0, version)])
    deployed = {
        (spec.name, spec.index, spec.attempt)
        for worker in workers
        for each in worker.got(DeployTasks)
        for spec in each.tasks
        if spec.attempt > 1
    }
    assert sorted(deployed) == again
