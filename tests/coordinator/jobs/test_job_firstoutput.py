"""Jobs whose consumers are deployed when there is something for them to read, and what happens before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import TaskFailed
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.messages import (
    CancelTasks,
    DeployTasks,
    DivideTasks,
    PauseTasks,
    ReleaseJob,
    Shutdown,
    TaskReport,
    TasksRestarted,
)
from minishuffle.wire.packed import SplitPosition, pack_positions
from minishuffle.wire.reports import SourcePositions
from minishuffle.wire.requests import CancelJob, DrainWorker, GetEvents, PauseJob, ResumeJob
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

EARLY, LATE, COUNT, OUT = 0, 1, 2, 3
NAMES = ("early", "late", "count", "out")
FROM_EARLY, FROM_LATE, BEHIND = 0, 1, 2
WAITS = ("waiting", 0, 0)
"""State, attempt and worker of a subtask that was not deployed."""


def counting(start_when: str = "any", *, width: int = 1, **settings: Any) -> JobGraph:
    """Two sources, a count of both, and what reads that; each vertex in slots of its own."""
    ends = [(EARLY, COUNT), (LATE, COUNT), (COUNT, OUT)]
    return JobGraph(
        vertices=[
            Vertex(
                name=name,
                parallelism=width,
                operators=[name],
                is_source=number < COUNT,
                program=b"p",
                slot_group=name,
            )
            for number, name in enumerate(NAMES)
        ],
        edges=[
            Edge(source=source, target=target, input=number % 2, partitioner="hash")
            for number, (source, target) in enumerate(ends)
        ],
        settings=JobSettings.model_validate(
            {"schedule": "first_output", "start_when": start_when, **settings}
        ),
    )


def start(cluster: FakeCluster, start_when: str = "any", **settings: Any) -> list[FakeWorker]:
    """The job j1, with one vertex on each of four workers, and its sources running."""
    workers = [cluster.add(slots=1) for _ in NAMES]
    cluster.submit(counting(start_when, **settings))
    for vertex in (EARLY, LATE):
        cluster.report(workers[vertex], ("j1", vertex, 0), "running")
    return workers


def where(cluster: FakeCluster) -> dict[str, tuple[str, int, int]]:
    """By vertex: state, attempt and worker of its first subtask."""
    return {
        NAMES[task.operator]: (task.state, task.attempt, task.worker if task.attempt else 0)
        for task in cluster.show("j1").tasks
        if task.index == 0
    }


def readable(cluster: FakeCluster, workers: list[FakeWorker], vertex: int, edge: int) -> None:
    cluster.readable(workers[vertex], ("j1", vertex, 0), edge)


def end_canceled(cluster: FakeCluster, workers: list[FakeWorker]) -> None:
    for worker in workers:
        for key, task in list(worker.tasks.items()):
            if worker.is_canceled(key, task.attempt):
                cluster.report(worker, key, "canceled", attempt=task.attempt)


def waits(cluster: FakeCluster) -> list[str]:
    return [wait.text for wait in cluster.show("j1").deploy_waits]


def events(cluster: FakeCluster, *kinds: str) -> list[str]:
    return [each.text for each in cluster.request(GetEvents(job="j1")).events if each.kind in kinds]


def test_each_vertex_is_deployed_with_the_first_buffer_that_it_can_read(cluster: FakeCluster) -> None:
    workers = start(cluster)
    assert where(cluster) == {
        "early": ("running", 1, 1),
        "late": ("running", 1, 2),
        "count": WAITS,
        "out": WAITS,
    }
    assert cluster.free_slots() == [0] * 4, "slots are held from the submission on"
    assert cluster.show("j1").state == "running"
    assert waits(cluster) == [
        "count waits for rows of early or rows of late",
        "out waits for rows of count",
    ]
    readable(cluster, workers, EARLY, FROM_EARLY)
    readable(cluster, workers, EARLY, FROM_EARLY)
    assert where(cluster)["count"] == ("created", 1, 3) and where(cluster)["out"] == WAITS
    (deployed,) = workers[COUNT].got(DeployTasks)
    assert [list(deployed.channels(gate)) for gate in deployed.tasks[0].inputs] == [[(0, 1, 1)], [(0, 1, 2)]]
    told = workers[EARLY].got(TasksRestarted)[-1]
    assert [(each.operator, each.attempt) for each in told.tasks] == [(COUNT, 1)]
    cluster.report(workers[COUNT], ("j1", COUNT, 0), "running")
    readable(cluster, workers, LATE, FROM_LATE)
    readable(cluster, workers, COUNT, BEHIND)
    assert where(cluster)["out"] == ("created", 1, 4) and waits(cluster) == []
    assert events(cluster, "partition readable") == [
        "early => count: partition 0 can be read, on worker 1",
        "count => out: partition 0 can be read, on worker 3",
    ]
    cluster.report_all("j1", "finished")
    info = cluster.show("j1")
    assert (info.state, info.restarts, info.rows_dropped) == ("finished", {}, {})


def test_all_inputs_are_waited_for_if_that_is_wanted(cluster: FakeCluster) -> None:
    workers = start(cluster, "all")
    readable(cluster, workers, EARLY, FROM_EARLY)
    assert where(cluster)["count"] == WAITS
    assert waits(cluster)[0] == "count waits for rows of late"
    readable(cluster, workers, LATE, FROM_LATE)
    assert where(cluster)["count"] == ("created", 1, 3)


def test_an_input_that_ends_without_a_row_has_its_end(cluster: FakeCluster) -> None:
    workers = start(cluster, "all")
    cluster.report(workers[LATE], ("j1", LATE, 0), "finished")
    assert where(cluster)["count"] == WAITS
    cluster.report(workers[EARLY], ("j1", EARLY, 0), "finished")
    assert where(cluster)["count"] == ("created", 1, 3)
    cluster.report(workers[COUNT], ("j1", COUNT, 0), "finished")
    assert where(cluster)["out"] == ("created", 1, 4)
    cluster.report(workers[OUT], ("j1", OUT, 0), "finished")
    assert cluster.show("j1").state == "finished"


def test_an_edge_that_is_stored_has_something_once_it_is_complete(cluster: FakeCluster) -> None:
    workers = [cluster.add(slots=2) for _ in NAMES]
    graph = counting(width=2)
    edges = [graph.edges[FROM_EARLY].model_copy(update={"kind": "blocking"}), *graph.edges[1:]]
    cluster.submit(graph.model_copy(update={"edges": edges}))
    sources = {key: worker for worker in workers for key in worker.tasks if key[1] == EARLY}
    assert len(sources) == 2
    for key, worker in sources.items():
        assert where(cluster)["count"] == WAITS
        cluster.readable(worker, key, FROM_EARLY)  # nobody says so of what is stored
        cluster.report(worker, key, "finished")
    assert where(cluster)["count"][:2] == ("created", 1)


@pytest.mark.parametrize("strategy", ["individual", "region", "full"])
@pytest.mark.parametrize("end", ["failed", "lost"])
def test_what_was_readable_of_an_attempt_that_ended_is_so_no_more(
    end: str, strategy: str, cluster: FakeCluster
) -> None:
    workers = start(cluster, "all", restart_strategy=strategy)
    spare = cluster.add(slots=1)
    readable(cluster, workers, EARLY, FROM_EARLY)
    if end == "failed":
        cluster.fail(workers[EARLY], ("j1", EARLY, 0), TaskFailed.code, "boom")
        holder = workers[EARLY]
    else:
        cluster.lose(workers[EARLY])
        holder = spare
    end_canceled(cluster, workers)
    assert where(cluster)["early"] == ("created", 2, holder.worker)
    late = workers[LATE].tasks["j1", LATE, 0]
    cluster.readable(workers[LATE], ("j1", LATE, 0), FROM_LATE)
    assert where(cluster)["count"] == WAITS, "it waits for the next attempt of the other"
    cluster.readable(holder, ("j1", EARLY, 0), FROM_EARLY)
    assert where(cluster)["count"] == ("created", 1, 3)
    (deployed,) = workers[COUNT].got(DeployTasks)
    channels = [list(deployed.channels(gate)) for gate in deployed.tasks[0].inputs]
    assert channels == [[(0, 2, holder.worker)], [(0, late.attempt, 2)]]


@pytest.mark.parametrize("strategy", ["individual", "full"])
def test_a_producer_that_has_finished_runs_again_only_if_its_worker_is_lost(
    strategy: str, cluster: FakeCluster
) -> None:
    workers = start(cluster, "all", restart_strategy=strategy)
    cluster.report(workers[EARLY], ("j1", EARLY, 0), "finished")
    cluster.fail(workers[LATE], ("j1", LATE, 0), TaskFailed.code, "boom")
    assert where(cluster)["early"] == ("finished", 1, 1), "who was not deployed reads it where it is"
    assert where(cluster)["late"] == ("created", 2, 2)
    spare = cluster.add(slots=1)
    cluster.lose(workers[EARLY])
    end_canceled(cluster, workers)
    assert where(cluster)["early"] == ("created", 2, spare.worker)


@pytest.mark.parametrize("deployed", [False, True], ids=["before", "after"])
def test_a_source_that_is_lost_before_anybody_has_read_of_it_begins_anew(
    deployed: bool, cluster: FakeCluster
) -> None:
    """Else it goes on where it was, and what was on its way is lost."""
    workers = start(cluster, "all")
    spare = cluster.add(slots=1)
    table = pack_positions([SplitPosition(0, 100, 10)])
    cluster.fact(workers[EARLY], SourcePositions(attempt=attempt(EARLY), positions=table))
    readable(cluster, workers, EARLY, FROM_EARLY)
    if deployed:
        readable(cluster, workers, LATE, FROM_LATE)
    cluster.lose(workers[EARLY])
    spec = spare.tasks["j1", EARLY, 0]
    assert (spec.attempt, spec.version, bool(spec.positions)) == (2, 1 - deployed, deployed)
    assert cluster.show("j1").rows_in_flight == (110 if deployed else 0)


def test_a_slot_that_is_lost_meanwhile_is_another_ones_when_it_is_needed(cluster: FakeCluster) -> None:
    workers = start(cluster)
    cluster.lose(workers[COUNT])
    cluster.advance(cluster.settings.slot_timeout + 10.0)
    assert cluster.show("j1").state == "running", "nothing that ran waits for a slot"
    readable(cluster, workers, EARLY, FROM_EARLY)
    assert where(cluster)["count"] == WAITS
    assert waits(cluster)[0] == "count waits for slots: no other worker has a free slot (3 of 3 are taken)"
    spare = cluster.add(slots=1)
    assert where(cluster)["count"] == ("created", 1, spare.worker)


@pytest.mark.parametrize("heard", [True, False], ids=["heard of", "on its way"])
def test_the_next_coordinator_goes_on_with_it(heard: bool, cluster: FakeCluster) -> None:
    """A report that is on its way is repeated; it has the number that the worker gave it."""
    workers = start(cluster, "all")
    if heard:
        readable(cluster, workers, EARLY, FROM_EARLY)
    cluster.lose_coordinator()
    cluster.check_journal()
    for worker in workers:
        cluster.come_back(worker)
    assert where(cluster)["count"] == WAITS and where(cluster)["early"] == ("running", 1, 1)
    if not heard:
        readable(cluster, workers, EARLY, FROM_EARLY)
    readable(cluster, workers, LATE, FROM_LATE)
    assert where(cluster)["count"] == ("created", 1, 3)
    cluster.report_all("j1", "running")
    readable(cluster, workers, COUNT, BEHIND)
    cluster.lose_coordinator()
    for worker in workers:
        cluster.come_back(worker)
    assert cluster.show("j1").restarts == {}
    cluster.report_all("j1", "finished")
    assert cluster.show("j1").state == "finished"


def test_a_job_is_cancelled_while_some_of_it_waits(cluster: FakeCluster) -> None:
    workers = start(cluster)
    cluster.request(CancelJob(job="j1"))
    assert workers[EARLY].got(CancelTasks) and not workers[COUNT].got(CancelTasks)
    readable(cluster, workers, EARLY, FROM_EARLY)
    for vertex in (EARLY, LATE):
        cluster.report(workers[vertex], ("j1", vertex, 0), "canceled")
    assert cluster.show("j1").state == "canceled" and cluster.free_slots() == [1] * 4
    assert not workers[COUNT].got(DeployTasks)


def test_a_pause_waits_for_nobody_who_was_not_deployed_and_deploys_nobody(cluster: FakeCluster) -> None:
    workers = start(cluster, "all")
    readable(cluster, workers, EARLY, FROM_EARLY)
    cluster.request(PauseJob(job="j1"))
    assert workers[EARLY].got(PauseTasks) and cluster.show("j1").state == "pausing"
    cluster.stand(workers[EARLY], ("j1", EARLY, 0), barrier=0, blocked=True)
    cluster.stand(workers[LATE], ("j1", LATE, 0))
    info = cluster.show("j1")
    assert info.state == "paused", "who waits for a consumer that is not there comes to no barrier"
    assert info.pause_left == ["rows before count, which is not deployed so far"]
    readable(cluster, workers, LATE, FROM_LATE)
    assert where(cluster)["count"] == WAITS and waits(cluster)[0] == "count waits for the end of the pause"
    cluster.request(ResumeJob(job="j1"))
    assert where(cluster)["count"] == ("created", 1, 3)
    assert not workers[COUNT].got(DeployTasks)[0].paused


def test_what_moves_has_its_rows_taken_first_whoever_waited_for_more(cluster: FakeCluster) -> None:
    """A worker that is to leave does not wait for other inputs, and no row is lost with it."""
    workers = start(cluster, "all")
    readable(cluster, workers, EARLY, FROM_EARLY)
    spare = cluster.add(slots=1)
    cluster.request(DrainWorker(worker=workers[EARLY].worker))
    assert where(cluster)["count"] == ("created", 1, 3), "without rows of the other input"
    assert where(cluster)["out"] == WAITS, "it reads nothing of what leaves"
    cluster.report(workers[COUNT], ("j1", COUNT, 0), "running")
    assert workers[EARLY].got(DivideTasks)
    cluster.report(workers[EARLY], ("j1", EARLY, 0), "canceled")
    assert where(cluster)["early"] == ("created", 2, spare.worker)
    assert workers[EARLY].got(Shutdown) and workers[EARLY].got(ReleaseJob)


def test_a_worker_with_nothing_but_what_waits_leaves_once_others_have_its_slots(cluster: FakeCluster) -> None:
    workers = start(cluster)
    cluster.request(DrainWorker(worker=workers[COUNT].worker))
    assert not workers[COUNT].got(Shutdown)
    spare = cluster.add(slots=1)
    assert workers[COUNT].got(Shutdown)
    readable(cluster, workers, EARLY, FROM_EARLY)
    assert where(cluster)["count"] == ("created", 1, spare.worker)


def test_rows_that_are_retained_are_there_to_be_read_and_come_again_from_the_next_attempt(
    cluster: FakeCluster,
) -> None:
    workers = start(cluster, "all", guarantee="at_least_once")
    cluster.hold(workers[LATE])
    readable(cluster, workers, EARLY, FROM_EARLY)
    assert waits(cluster)[0] == "count waits for rows of late"
    cluster.fail(workers[EARLY], ("j1", EARLY, 0), TaskFailed.code, "boom")
    readable(cluster, workers, LATE, FROM_LATE)
    assert where(cluster)["count"] == WAITS, "the next attempt has written nothing so far"
    readable(cluster, workers, EARLY, FROM_EARLY)
    assert where(cluster)["count"] == ("created", 1, 3)
    (deployed,) = [each for each in workers[COUNT].got(DeployTasks) if each.tasks]
    assert all(gate.guaranteed for gate in deployed.tasks[0].inputs)
    assert [list(deployed.channels(gate)) for gate in deployed.tasks[0].inputs] == [[(0, 2, 1)], [(0, 1, 2)]]


def test_what_a_program_has_written_is_read_whoever_waited_for_more_if_it_waits_for_a_durable_snapshot(
    cluster: FakeCluster,
) -> None:
    """None is taken before, and the program may write what the other input waits for behind it."""
    workers = start(cluster, "all", guarantee="at_least_once")
    readable(cluster, workers, EARLY, FROM_EARLY)
    report = TaskReport(attempt=AttemptId.of("j1", EARLY, 0, 1), counters=TaskCounters(), awaits_cut=0)
    cluster.heartbeat(workers[EARLY], [report])
    assert where(cluster)["count"] == ("created", 1, 3)


@pytest.mark.parametrize("guarantee", ["loss", "at_least_once"])
def test_what_a_full_worker_retains_is_read_whoever_waited_for_more(
    guarantee: str, cluster: FakeCluster
) -> None:
    """The other input may come from there, and have no room for its first row."""
    workers = start(cluster, "all", guarantee=guarantee)
    readable(cluster, workers, EARLY, FROM_EARLY)
    cluster.heartbeat(workers[COUNT], retains_much=True)
    assert where(cluster)["count"] == WAITS, "nothing for it is retained there"
    cluster.heartbeat(workers[EARLY], retains_much=True)
    if guarantee == "loss":
        assert where(cluster)["count"] == WAITS, "another job retains it"
    else:
        assert where(cluster)["count"] == ("created", 1, 3) and where(cluster)["out"] == WAITS
