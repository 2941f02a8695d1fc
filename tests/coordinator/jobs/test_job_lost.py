"""Tasks of lost workers: their slots move whole, or wait for one; what is needed of them runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.errors import ResourceExhausted, TaskFailed
from minishuffle.plan.graph import Edge, JobGraph, Vertex
from minishuffle.wire.messages import DeployTasks, ErrorInfo, PlacedAttempt, ReleaseJob, TasksRestarted
from minishuffle.wire.packed import SplitPosition, pack_positions, unpack_positions
from minishuffle.wire.reports import SourcePositions
from minishuffle.wire.requests import CancelJob, GetEvents, JobInfo
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)
SLOT_SECONDS = 60.0
TERM = 7
BOOM = ErrorInfo(code=TaskFailed.code, text="boom")


@pytest.fixture
def restarting(make_graph: MakeGraph) -> MakeGraph:
    """Graphs whose tasks restart alone."""

    def make(*counts: Any, **settings: Any) -> JobGraph:
        return make_graph(*counts, **{"restart_strategy": "individual", **settings})

    return make


@pytest.fixture
def three(cluster: FakeCluster) -> list[FakeWorker]:
    """Three workers of two slots; a job of parallelism 2 is on the first two."""
    return [cluster.add() for _ in range(3)]


def where(info: JobInfo) -> dict[str, tuple[str, int]]:
    """By subtask and attempt: state and worker."""
    return {f"{task.name}[{task.index}]#{task.attempt}": (task.state, task.worker) for task in info.tasks}


def kinds(cluster: FakeCluster, operator: int, index: int) -> list[str]:
    found = cluster.request(GetEvents(job="j1")).events
    return [event.kind for event in found if (event.operator, event.index) == (operator, index)]


# --- slots move ------------------------------------------------------------------------------------


def test_the_tasks_of_a_lost_worker_restart_together_in_a_free_slot(
    cluster: FakeCluster, three: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    cluster.report_all("j1", "running")
    cluster.lose(three[1])
    assert where(cluster.show("j1")) == {
        "read[0]#1": ("running", 1),
        "read[1]#2": ("created", 3),
        "count[0]#1": ("running", 1),
        "count[1]#2": ("created", 3),
    }
    assert (cluster.show("j1").state, cluster.show("j1").causes) == ("running", [])
    (deploy,) = three[2].got(DeployTasks)
    assert [(task.operator, task.index, task.attempt) for task in deploy.tasks] == [(0, 1, 2), (1, 1, 2)]
    gate = deploy.tasks[1].inputs[0]
    assert list(deploy.channels(gate)) == [(0, 1, 1), (1, 2, 3)]
    assert [address.worker for address in deploy.workers] == [1, 3]
    (restarted,) = three[0].got(TasksRestarted)
    assert three[2].got(TasksRestarted) == [restarted]
    assert restarted.tasks == [
        PlacedAttempt(operator=0, index=1, attempt=2, worker=3),
        PlacedAttempt(operator=1, index=1, attempt=2, worker=3),
    ]
    assert [address.worker for address in restarted.workers] == [3]
    assert three[0].got(ReleaseJob) == three[2].got(ReleaseJob) == []
    assert cluster.free_slots() == [1, 0, 1]
    assert kinds(cluster, 1, 1)[1:] == ["task lost", "task restarting", "task rescheduled", "task deployed"]


@pytest.mark.parametrize(("lease", "position"), [(None, 140), (0, 100)])
def test_the_source_of_a_lost_worker_goes_on_where_it_had_reported(
    cluster: FakeCluster, three: Any, restarting: MakeGraph, lease: Any, position: int
) -> None:
    """Behind its lease, whose rows may be lost; or at its position, so that some may be repeated."""
    cluster.submit(restarting(source_lease=lease))
    cluster.report_all("j1", "running")
    table = pack_positions([SplitPosition(split=1, position=100, lease=40)])
    cluster.fact(three[1], SourcePositions(attempt=attempt(0, 1), positions=table), 1)
    cluster.lose(three[1])
    (deploy,) = three[2].got(DeployTasks)
    read, count = deploy.tasks
    assert [(entry.split, entry.end) for entry in unpack_positions(read.positions)] == [(1, position)]
    assert count.positions == b""
    assert cluster.show("j1").rows_in_flight == 140


def test_lost_workers_count_as_no_failure_and_have_no_delay(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    cluster.add(slots=1)
    cluster.submit(restarting(1, 1, restart_failures_max=1))
    for _ in range(15):
        (last,) = [worker for worker in cluster.workers.values() if worker.tasks]
        cluster.add(slots=1)
        cluster.lose(last)
        cluster.workers.pop(last.link)
    info = cluster.show("j1")
    assert (info.state, [task.attempt for task in info.tasks]) == ("created", [16, 16])


def test_the_worker_with_the_fewest_slots_of_the_job_is_chosen(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    workers = [cluster.add(slots=slots) for slots in (3, 1, 1)]
    cluster.submit(restarting(3, 3))
    idle = cluster.add(slots=1)
    cluster.lose(workers[1])
    assert where(cluster.show("j1"))["count[1]#2"] == ("created", idle.worker)
    cluster.lose(workers[2])
    assert where(cluster.show("j1"))["count[2]#2"] == ("created", workers[0].worker)


def test_a_worker_without_the_buffers_for_a_slot_is_not_chosen(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    # A slot: gate 2 x 2 + 1, output 2 + 1; and 5 for one more task.
    cluster.submit(restarting())
    cluster.add(segments=12)
    enough = cluster.add(segments=13)
    cluster.lose(pair[1])
    assert where(cluster.show("j1"))["count[1]#2"] == ("created", enough.worker)


def test_a_task_that_waits_for_its_delay_when_its_worker_is_lost_restarts_elsewhere_when_it_is_due(
    cluster: FakeCluster, three: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    cluster.report(three[1], COUNT1, "failed", error=BOOM)
    cluster.report(three[1], COUNT1, "failed", error=BOOM, attempt=2)
    cluster.lose(three[1])
    assert where(cluster.show("j1"))["count[1]#2"] == ("restarting", 2)
    assert where(cluster.show("j1"))["read[1]#2"] == ("created", 3)
    cluster.advance(0.2)
    assert where(cluster.show("j1"))["count[1]#3"] == ("created", 3)
    assert three[2].got(ReleaseJob) == [], "the attempt before died with its worker"


def test_the_replacement_may_die_too(cluster: FakeCluster, three: Any, restarting: MakeGraph) -> None:
    cluster.submit(restarting())
    cluster.lose(three[1])
    cluster.report(three[2], COUNT1, "failed", error=BOOM, attempt=2)
    assert where(cluster.show("j1"))["count[1]#3"] == ("created", 3)
    cluster.lose(three[2])
    assert where(cluster.show("j1"))["count[1]#4"] == ("created", 1)
    assert where(cluster.show("j1"))["read[1]#3"] == ("created", 1)


def test_a_producer_that_is_not_deployed_yet_is_asked_for_at_the_consumers_own_worker(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting(3, 1))  # read[0], read[2] and count[0] on the first worker
    cluster.add(slots=1)
    cluster.lose(pair[0])
    info = where(cluster.show("j1"))
    assert [info[name] for name in ("read[0]#2", "count[0]#2")] == [("created", 3)] * 2
    assert info["read[2]#2"] == ("created", 2)
    (deploy,) = cluster.workers[max(cluster.workers)].got(DeployTasks)
    channels = list(deploy.channels(deploy.tasks[1].inputs[0]))
    assert channels == [(0, 2, 3), (1, 1, 2), (2, 2, 2)]


# --- slots wait ------------------------------------------------------------------------------------


def test_tasks_wait_for_a_slot_and_take_the_next_worker_that_registers(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first, second = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(restarting())
    cluster.report_all("j1", "running")
    cluster.lose(second)
    assert where(cluster.show("j1"))["count[1]#1"] == ("waiting for a slot", 2)
    assert cluster.show("j1").state == "running"
    cluster.advance(SLOT_SECONDS - 1)
    third = cluster.add(slots=1)
    assert where(cluster.show("j1"))["count[1]#2"] == ("created", third.worker)
    assert where(cluster.show("j1"))["read[1]#2"] == ("created", third.worker)
    assert len(first.got(TasksRestarted)) == 1
    cluster.advance(10 * SLOT_SECONDS)
    assert cluster.show("j1").state == "running"


def test_a_slot_goes_to_the_tasks_that_can_wait_no_longer(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    workers = [cluster.add(slots=1) for _ in range(3)]
    cluster.submit(restarting(3, 3))
    cluster.report_all("j1", "running")
    cluster.lose(workers[2])
    cluster.advance(SLOT_SECONDS - 1)
    cluster.lose(workers[0])
    fourth = cluster.add(slots=1)
    assert where(cluster.show("j1"))["read[2]#2"] == ("created", fourth.worker)
    assert where(cluster.show("j1"))["read[0]#1"] == ("waiting for a slot", workers[0].worker)
    cluster.advance(SLOT_SECONDS - 1)
    assert cluster.show("j1").state == "running"


def test_a_job_that_waits_for_a_slot_says_so_and_why(cluster: FakeCluster, restarting: MakeGraph) -> None:
    first, _ = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(restarting())
    assert cluster.show("j1").slot_waits == []
    cluster.heartbeat(first)
    for _ in range(9):
        cluster.advance(0.5, heartbeats=False)
        cluster.heartbeat(first)
    (wait,) = cluster.show("j1").slot_waits
    lost = "worker 2 (pid 42 on 10.0.0.1) was lost: it was silent for 3 s"
    taken = "no other worker has a free slot (1 of 1 are taken)"
    assert (wait.worker, wait.text) == (2, f"read[1], count[1] wait for a slot: {lost}; {taken}")
    said = [
        event
        for event in cluster.request(GetEvents(job="j1")).events
        if event.kind == "task waiting for a slot"
    ]
    assert {event.text for event in said} == {f"{taken}; waits {SLOT_SECONDS:g} s at most"}
    assert wait.until == pytest.approx(said[0].at + SLOT_SECONDS)
    cluster.add(slots=1)
    assert cluster.show("j1").slot_waits == []


def test_slots_that_are_free_and_do_not_do_are_named(cluster: FakeCluster, restarting: MakeGraph) -> None:
    _, second = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(restarting())
    cluster.add(slots=4, segments=1)
    cluster.lose(second)
    (wait,) = cluster.show("j1").slot_waits
    why = "have too few network buffers left for it, or cannot reach its other workers"
    assert wait.text.endswith(f"; 4 of 5 slots are free, on workers (3) that {why}")


def test_a_process_with_the_id_of_a_lost_worker_may_take_its_tasks(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first, second = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(restarting())
    cluster.lose(second)
    again = cluster.add(slots=1, requested_worker=2)
    assert where(cluster.show("j1"))["count[1]#2"] == ("created", 2)
    (restarted,) = first.got(TasksRestarted)
    assert [(each.worker, each.epoch) for each in restarted.workers] == [(2, again.epoch)]
    assert again.got(ReleaseJob) == []


def test_tasks_that_wait_take_the_slots_of_a_job_that_ends(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    other = cluster.submit(make_graph(1, 1))  # on the first worker, whose slots are taken now
    cluster.lose(pair[1])
    assert where(cluster.show("j1"))["count[1]#1"] == ("waiting for a slot", 2)
    cluster.report_all(other, "finished")
    assert where(cluster.show("j1"))["count[1]#2"] == ("created", 1)


def test_a_job_whose_tasks_found_no_slot_in_time_fails_and_says_so(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first, second = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(restarting())
    cluster.lose(second)
    cluster.advance(SLOT_SECONDS - 0.5)
    assert cluster.show("j1").state == "created"
    cluster.advance(1.0)
    info = cluster.show("j1")
    assert info.state == "failing"
    assert [(cause.code, cause.text) for cause in info.causes] == [
        (
            ResourceExhausted.code,
            "read[1], count[1] found no free slot in time: worker 2 (pid 42 on 10.0.0.1) was lost: its "
            "control link closed; no other worker has a free slot (1 of 1 are taken); start another worker "
            "('minishuffle worker start'), or raise slot_timeout",
        )
    ]
    for key in (READ0, COUNT0):
        cluster.report(first, key, "canceled")
    assert cluster.show("j1").state == "failed"


def test_a_consumer_can_restart_while_its_producer_waits_for_a_slot(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first, second = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(restarting())
    cluster.lose(second)
    cluster.report(first, COUNT0, "failed", error=BOOM)
    deploy = first.got(DeployTasks)[-1]
    assert list(deploy.channels(deploy.tasks[0].inputs[0])) == [(0, 1, 1), (1, 2, 1)]
    third = cluster.add(slots=1)
    (_, restarted) = first.got(TasksRestarted)
    assert {(each.operator, each.index, each.worker) for each in restarted.tasks} == {
        (0, 1, third.worker),
        (1, 1, third.worker),
    }


def test_a_job_that_waits_can_be_cancelled(cluster: FakeCluster, restarting: MakeGraph) -> None:
    only = cluster.add(slots=1)
    cluster.submit(restarting(1, 1))
    cluster.lose(only)
    cluster.request(CancelJob(job="j1"))
    assert cluster.show("j1").state == "canceled"
    assert cluster.add(slots=1).got(DeployTasks) == []


# --- what finished ---------------------------------------------------------------------------------


def test_a_finished_producer_runs_again_while_a_consumer_may_need_its_partition(
    cluster: FakeCluster, three: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    cluster.report(three[1], READ1, "finished")
    cluster.report(three[1], COUNT1, "finished")
    cluster.lose(three[1])
    info = where(cluster.show("j1"))
    assert info["read[1]#2"] == ("created", 3), "count[0] has yet to finish"
    assert info["count[1]#1"] == ("finished", 2), "nobody reads from it"


def test_a_finished_task_whose_consumers_have_all_finished_does_not_run_again(
    cluster: FakeCluster, three: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    for worker, key in ((three[1], READ1), (three[1], COUNT1), (three[0], COUNT0)):
        cluster.report(worker, key, "finished")
    cluster.lose(three[1])
    assert where(cluster.show("j1"))["read[1]#1"] == ("finished", 2)
    cluster.report(three[0], READ0, "finished")
    assert cluster.show("j1").state == "finished"


def test_what_a_lost_finished_task_has_read_does_not_run_again(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    """a -> b -> c, one slot each: c needs b, whose next attempt hears that it has read a to the end."""
    workers = [cluster.add(slots=1) for _ in range(3)]
    vertices = [
        Vertex(name=name, parallelism=count, operators=[name], is_source=name == "a", program=b"")
        for name, count in (("a", 1), ("b", 2), ("c", 3))
    ]
    edges = [Edge(source=i, target=i + 1, partitioner="hash") for i in range(2)]
    cluster.submit(JobGraph(vertices=vertices, edges=edges))
    cluster.report(workers[0], ("j1", 0, 0), "finished")
    for index in (0, 1):
        cluster.report(workers[index], ("j1", 1, index), "finished")
    cluster.report(workers[0], ("j1", 2, 0), "finished")
    spare = cluster.add(slots=1)
    cluster.lose(workers[0])
    (deploy,) = spare.got(DeployTasks)
    assert [each.ended for task in deploy.tasks for each in task.inputs] == [[0]]
    assert where(cluster.show("j1")) == {
        "a[0]#1": ("finished", 1),
        "b[0]#2": ("created", spare.worker),
        "b[1]#1": ("finished", 2),
        "c[0]#1": ("finished", 1),
        "c[1]#1": ("created", 2),
        "c[2]#1": ("created", 3),
    }


# --- what does not restart -------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["stream", "sink"])
def test_a_task_that_serves_external_clients_restarts_as_any_other(
    cluster: FakeCluster, three: Any, restarting: MakeGraph, side: str
) -> None:
    graph = restarting()
    operator = 0 if side == "stream" else 1
    vertices = list(graph.vertices)
    vertices[operator] = vertices[operator].model_copy(update={side: "orders"})
    cluster.submit(graph.model_copy(update={"vertices": vertices}))
    cluster.report(three[1], READ1, "failed", error=BOOM)
    assert where(cluster.show("j1"))["read[1]#2"] == ("created", 2)
    cluster.lose(three[1])
    found = where(cluster.show("j1"))
    assert (found["read[1]#3"], found["count[1]#2"]) == (("created", 3), ("created", 3))


def test_slots_of_abandoned_attempts_are_written_off_when_the_job_ends(
    cluster: FakeCluster, pair: Any, restarting: MakeGraph
) -> None:
    cluster.submit(restarting())
    cluster.report(pair[1], COUNT1, "abandoned")
    cluster.report(pair[1], COUNT1, "abandoned", attempt=2)
    cluster.report(pair[0], COUNT0, "abandoned")
    cluster.lose(pair[0])  # with its thread
    cluster.advance(0.5)
    cluster.request(CancelJob(job="j1"))
    cluster.report_all("j1", "canceled", attempt=2)
    cluster.report_all("j1", "canceled", attempt=1)
    cluster.report_all("j1", "canceled", attempt=3)
    assert cluster.show("j1").state == "canceled"
    assert cluster.free_slots() == [0, 1]
