"""Workers that are to leave: their slots move, or are given up in the end, and they shut down."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.coordinator.scheduling.draining import EVICTION_SECONDS_MAX, Drain
from minishuffle.errors import ResourceExhausted, TaskFailed, UnknownName
from minishuffle.ids import AttemptId
from minishuffle.plan.graph import Edge, JobGraph, JobSettings, Vertex
from minishuffle.wire.messages import (
    CancelTasks,
    DeployTasks,
    ErrorInfo,
    Leaving,
    ReleaseJob,
    Shutdown,
    TasksRestarted,
)
from minishuffle.wire.packed import SplitPosition, pack_positions, unpack_placement, unpack_positions
from minishuffle.wire.reports import EndsRead, SourcePositions
from minishuffle.wire.requests import CancelJob, DrainWorker, GetEvents, GetStatus, SubmitJob

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

READ, COUNT = 0, 1


def drain(cluster: FakeCluster, worker: FakeWorker, seconds: float | None = None) -> None:
    cluster.request(DrainWorker(worker=worker.worker, seconds=seconds))


def terminate(cluster: FakeCluster, worker: FakeWorker, seconds: float = 8.0) -> None:
    """Its process is sent SIGTERM."""
    cluster.send(worker, Leaving(term=cluster.term, seconds=seconds))


def leave(cluster: FakeCluster, worker: FakeWorker) -> None:
    """It does as it was told."""
    cluster.send(worker, Shutdown(term=cluster.term, reason="the worker is stopped"))
    del cluster.workers[worker.link]


def end(cluster: FakeCluster, worker: FakeWorker, job: str, **fields: Any) -> None:
    """What was cancelled there ends."""
    for key, task in list(worker.tasks.items()):
        if key[0] == job and worker.is_canceled(key, task.attempt):
            more = fields if key[1] == READ else {}
            cluster.report(worker, key, "canceled", attempt=task.attempt, **more)


def run(cluster: FakeCluster, worker: FakeWorker) -> None:
    """What was deployed there runs."""
    for key, task in worker.tasks.items():
        cluster.report(worker, key, "running", attempt=task.attempt)


def where(cluster: FakeCluster, job: str) -> dict[tuple[int, int], tuple[int, int, str]]:
    """By subtask: worker, attempt, state."""
    tasks = cluster.show(job).tasks
    return {(task.operator, task.index): (task.worker, task.attempt, task.state) for task in tasks}


def states(cluster: FakeCluster) -> dict[int, tuple[str, bool, int]]:
    """By worker: state, whether it drains, free slots."""
    workers = cluster.request(GetStatus()).workers
    return {each.worker: (each.state, each.draining, each.slots_free) for each in workers}


def table(*rows: tuple[int, int, int]) -> bytes:
    return pack_positions(SplitPosition(*row) for row in rows)


def test_a_worker_that_is_to_leave_gives_its_slots_to_others_and_shuts_down(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, two = pair
    leases = SourcePositions(attempt=AttemptId.of(job, READ, 0, 1), positions=table((0, 100, 50)))
    cluster.fact(one, leases)
    drain(cluster, one)
    assert states(cluster) == {1: ("alive", True, 0), 2: ("alive", False, 0)}
    (cancel,) = one.got(CancelTasks)
    assert {(each.operator, each.index, each.attempt) for each in cancel.attempts} == {(0, 0, 1), (1, 0, 1)}
    assert not one.got(Shutdown)
    cluster.report(one, (job, COUNT, 0), "canceled")
    assert where(cluster, job)[COUNT, 0] == (1, 1, "restarting"), "the slot moves when nothing runs in it"
    cluster.report(one, (job, READ, 0), "canceled", positions=table((0, 130, 0)))
    assert where(cluster, job) == {
        (READ, 0): (2, 2, "created"),
        (COUNT, 0): (2, 2, "created"),
        (READ, 1): (2, 1, "running"),
        (COUNT, 1): (2, 1, "running"),
    }
    (deployed,) = two.got(DeployTasks)[1:]
    (source,) = (task for task in deployed.tasks if task.operator == READ)
    assert unpack_positions(source.positions) == [SplitPosition(0, 130, 0)], "no lease is lost"
    assert one.got(ReleaseJob) and one.tasks == {}
    assert len(one.got(Shutdown)) == 1
    leave(cluster, one)
    run(cluster, two)
    info = cluster.show(job)
    assert info.restarts == {"drained": 2}
    assert info.state == "running" and not info.rows_in_flight and info.first_failure is None
    events = [(event.kind, event.worker) for event in cluster.request(GetEvents(job=job)).events]
    assert ("worker draining", 1) in events and ("task drained", 1) in events
    assert not {kind for kind, _ in events} & {"task failed", "task lost", "task canceled"}


def test_a_worker_without_tasks_leaves_at_once(cluster: FakeCluster) -> None:
    one = cluster.add()
    drain(cluster, one)
    assert len(one.got(Shutdown)) == 1


def test_orders_that_say_nothing_new_are_no_events(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    """Whoever is impatient asks again, and the events of a job are limited."""
    one = cluster.add()
    job = cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    for _ in range(3):
        drain(cluster, one)
    for _ in range(3):
        terminate(cluster, one)
    events = cluster.request(GetEvents(job=job)).events
    assert [event.text for event in events if event.kind == "worker draining"] == [
        f"worker 1 is to leave ({why}): its tasks move elsewhere"
        for why in ("a client asks for it", "its process was sent SIGTERM")
    ]


def test_only_a_worker_that_is_there_can_be_told_to_leave(cluster: FakeCluster) -> None:
    cluster.add()
    code, text = cluster.refusal(DrainWorker(worker=5))
    assert (code, text) == (UnknownName.code, "there is no worker 5; alive: 1")


def test_a_worker_that_is_to_leave_takes_no_new_slots(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one, two = cluster.add(slots=2), cluster.add(slots=1)
    job = cluster.submit(make_graph(restart_strategy="individual"))
    drain(cluster, one)
    assert states(cluster) == {1: ("alive", True, 0), 2: ("alive", False, 0)}
    code, text = cluster.refusal(SubmitJob(name="x", python="3.11", graph=make_graph(1, 1).to_bytes()))
    assert code == ResourceExhausted.code
    assert "needs 1 slots (greatest parallelism), 0 are free of 1 (2 more are of workers that are to" in text
    cluster.lose(two)
    assert where(cluster, job)[READ, 1] == (2, 1, "waiting for a slot")


def no_slot_free(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> tuple[str, FakeWorker, FakeWorker]:
    """A job that runs, and the two workers whose only slots it has."""
    one, two = cluster.add(slots=1), cluster.add(slots=1)
    job = cluster.submit(make_graph(restart_strategy="individual"))
    cluster.report_all(job, "running")
    return job, one, two


def test_tasks_run_on_where_no_slot_is_free_until_one_is(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    job, one, two = no_slot_free(cluster, make_graph)
    drain(cluster, one)
    cluster.advance(100.0)
    assert not one.got(CancelTasks) and not one.got(Shutdown)
    three = cluster.add(slots=1)
    end(cluster, one, job)
    assert where(cluster, job)[READ, 0] == (three.worker, 2, "created")
    assert one.got(Shutdown) and two.got(TasksRestarted)


def test_a_worker_leaves_when_the_job_that_could_not_move_ends(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one = cluster.add()
    job = cluster.submit(make_graph())
    drain(cluster, one)
    cluster.report_all(job, "running")
    assert not one.got(Shutdown)
    cluster.report_all(job, "finished")
    assert one.got(Shutdown) and cluster.show(job).state == "finished"


def test_a_slot_of_a_job_that_does_not_restart_stays(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one = cluster.add()
    job = cluster.submit(make_graph())
    cluster.report_all(job, "running")
    cluster.add(slots=4)
    terminate(cluster, one)
    cluster.advance(8.0)
    assert not one.got(CancelTasks) and not one.got(Shutdown)
    cluster.advance(EVICTION_SECONDS_MAX + 0.01)
    assert one.got(Shutdown)


def test_a_standby_worker_takes_the_slots(cluster: FakeCluster, make_graph: Callable[..., JobGraph]) -> None:
    one, two, spare = cluster.add(slots=1), cluster.add(slots=1), cluster.add(slots=2, standby=True)
    job = cluster.submit(make_graph(restart_strategy="individual"))
    cluster.report_all(job, "running")
    drain(cluster, two)
    end(cluster, two, job)
    assert where(cluster, job)[READ, 1] == (spare.worker, 2, "created")
    leave(cluster, two)
    assert cluster.add().worker == 4
    assert [each.standby for each in cluster.request(GetStatus()).workers if each.worker == 4] == [True]
    assert not one.got(CancelTasks)


def test_two_workers_leave_together(cluster: FakeCluster, make_graph: Callable[..., JobGraph]) -> None:
    one, two, three = (cluster.add(slots=1) for _ in range(3))
    job = cluster.submit(make_graph(3, 3, restart_strategy="individual"))
    cluster.report_all(job, "running")
    terminate(cluster, one)
    terminate(cluster, two)
    four = cluster.add(slots=2)
    end(cluster, one, job)
    end(cluster, two, job)
    assert {place[0] for place in where(cluster, job).values()} == {three.worker, four.worker}
    assert one.got(Shutdown) and two.got(Shutdown)
    assert cluster.show(job).restarts == {"drained": 4}


def test_a_slot_that_moves_to_a_worker_that_is_to_leave_as_well_moves_on(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one = cluster.add(slots=1)
    job = cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    two, three = cluster.add(slots=2), cluster.add(slots=1)
    drain(cluster, one)
    drain(cluster, two)
    assert not two.got(Shutdown), "a slot is on its way there"
    end(cluster, one, job)
    end(cluster, two, job)
    assert where(cluster, job)[READ, 0] == (three.worker, 3, "created")
    assert one.got(Shutdown) and two.got(Shutdown)


def test_when_its_time_is_over_what_runs_ends_in_order_and_waits_for_a_slot(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    job, one, two = no_slot_free(cluster, make_graph)
    terminate(cluster, one)
    cluster.advance(7.9)
    assert not one.got(CancelTasks)
    cluster.advance(0.2)
    assert one.got(CancelTasks) and not one.got(Shutdown)
    end(cluster, one, job, positions=table((0, 7, 0)))
    assert where(cluster, job)[READ, 0] == (1, 1, "waiting for a slot")
    assert one.got(Shutdown)
    leave(cluster, one)
    three = cluster.add(slots=1)
    (deployed,) = three.got(DeployTasks)
    assert unpack_positions(deployed.tasks[0].positions) == [SplitPosition(0, 7, 0)]
    assert cluster.show(job).restarts == {"drained": 2}
    assert not two.got(Shutdown)


def test_a_task_that_does_not_end_is_lost_with_its_worker(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one = cluster.add(slots=1)
    job = cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    cluster.report_all(job, "running")
    terminate(cluster, one, 1.0)
    cluster.advance(1.0)
    cluster.report(one, (job, COUNT, 0), "canceled")
    cluster.advance(EVICTION_SECONDS_MAX + 0.01)
    assert len(one.got(Shutdown)) == 1
    leave(cluster, one)
    assert where(cluster, job) == {
        (READ, 0): (1, 1, "waiting for a slot"),
        (COUNT, 0): (1, 1, "waiting for a slot"),
    }
    assert cluster.show(job).restarts == {"drained": 1, "lost": 1}


def test_all_that_leave_by_a_signal_go_at_once_when_none_stays(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one, two, three = (cluster.add(slots=1) for _ in range(3))
    job = cluster.submit(make_graph(3, 3, restart_strategy="individual"))
    cluster.report_all(job, "running")
    terminate(cluster, one)
    terminate(cluster, two)
    assert not one.got(CancelTasks) and not two.got(CancelTasks)
    terminate(cluster, three)
    for worker in (one, two, three):
        assert worker.got(CancelTasks) and not worker.got(Shutdown)
        end(cluster, worker, job)
        assert worker.got(Shutdown)
    assert {state for _, _, state in where(cluster, job).values()} == {"waiting for a slot"}


def test_one_that_leaves_goes_at_once_when_the_last_other_one_has_left(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one, two = cluster.add(slots=1), cluster.add(slots=1)
    job = cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    cluster.report_all(job, "running")
    busy, idle = (one, two) if one.tasks else (two, one)
    cluster.submit(make_graph(1, 1))
    terminate(cluster, busy)
    assert not busy.got(CancelTasks)
    leave(cluster, idle)
    assert busy.got(CancelTasks)


def test_the_last_worker_has_all_its_time(cluster: FakeCluster, make_graph: Callable[..., JobGraph]) -> None:
    one = cluster.add()
    cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    terminate(cluster, one)
    cluster.advance(7.9)
    assert not one.got(CancelTasks) and not one.got(Shutdown)


def test_one_that_a_client_asks_to_leave_waits_also_when_none_stays(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one, two = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(make_graph(restart_strategy="individual"))
    drain(cluster, one)
    drain(cluster, two)
    cluster.advance(100.0)
    assert not any(worker.got(CancelTasks) or worker.got(Shutdown) for worker in (one, two))
    drain(cluster, one, 5.0)
    cluster.advance(5.0)
    assert one.got(CancelTasks) and not two.got(CancelTasks)


def test_what_a_finished_task_wrote_stays_until_it_was_read(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, two = pair
    cluster.report(one, (job, READ, 0), "finished")
    drain(cluster, one)
    (cancel,) = one.got(CancelTasks)
    assert [(each.operator, each.index) for each in cancel.attempts] == [(COUNT, 0)]
    end(cluster, one, job)
    assert where(cluster, job)[READ, 0] == (1, 1, "finished")
    assert where(cluster, job)[COUNT, 0] == (2, 2, "created")
    (deployed,) = two.got(DeployTasks)[1:]
    assert unpack_placement(deployed.placement[READ]) == (1, 2), "it reads from the worker that is to leave"
    assert {address.worker for address in deployed.workers} == {1, 2}
    run(cluster, two)
    assert not one.got(Shutdown)
    for index, attempt in ((0, 2), (1, 1)):
        reads = AttemptId.of(job, COUNT, index, attempt)
        cluster.fact(two, EndsRead(attempt=reads, edge=0, producers=[0]))
    assert one.got(Shutdown) and not one.tasks
    leave(cluster, one)
    assert where(cluster, job)[READ, 0] == (1, 1, "finished")


def test_what_a_finished_task_wrote_is_lost_with_a_worker_that_has_left_it_no_time(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, two = pair
    cluster.report(one, (job, READ, 0), "finished")
    drain(cluster, one)
    end(cluster, one, job)
    cluster.lose(one)
    assert where(cluster, job)[READ, 0] == (2, 2, "created"), "it writes what was not read once more"
    assert cluster.show(job).restarts == {"drained": 1, "lost": 1}


def kept_side() -> JobGraph:
    """Rows 0, a side 1, and their join 2."""
    vertices = [
        Vertex(name=name, parallelism=1, operators=[name], is_source=name != "join", program=b"p")
        for name in ("rows", "side", "join")
    ]
    vertices[0] = vertices[0].model_copy(update={"bounded": False})
    edges = [
        Edge(source=0, target=2, partitioner="hash"),
        Edge(source=1, target=2, input=1, partitioner="broadcast"),
    ]
    settings = JobSettings(restart_strategy="individual")
    return JobGraph(vertices=vertices, edges=edges, settings=settings)


def test_a_side_that_is_kept_is_made_anew_elsewhere(cluster: FakeCluster) -> None:
    graph = kept_side()
    assert graph.kept_edges() == {1}
    one, two = cluster.add(slots=1), cluster.add(slots=1)
    job = cluster.submit(graph)
    cluster.report_all(job, "running")
    cluster.report(one, (job, 1, 0), "finished")
    drain(cluster, one)
    end(cluster, one, job)
    assert {place for key, place in where(cluster, job).items()} == {(2, 2, "created")}
    assert {(task.operator, task.attempt) for task in two.got(DeployTasks)[0].tasks} == {
        (0, 2),
        (1, 2),
        (2, 2),
    }
    assert one.got(Shutdown) and cluster.show(job).restarts == {"drained": 3}


def storing(*, external: bool = False, partitioner: str = "hash", **settings: Any) -> JobGraph:
    """A source 0 whose rows a blocking exchange stores for 1, each of two subtasks in a slot of its own."""
    vertices = [
        Vertex(
            name=name,
            parallelism=2,
            operators=[name],
            is_source=name == "read",
            program=b"p",
            slot_group=name,
            stream="rows" if external and name == "read" else "",
        )
        for name in ("read", "count")
    ]
    edge = {"source": 0, "target": 1, "partitioner": partitioner, "kind": "blocking"}
    return JobGraph(vertices=vertices, edges=[Edge(**edge)], settings=JobSettings(**settings))


def stored(cluster: FakeCluster, graph: JobGraph, *complete: int) -> tuple[list[FakeWorker], str]:
    """Slots of the producers on workers 1 and 2, of the consumers on 3 and 4; these producers have finished,
    all else runs."""
    workers = [cluster.add(slots=1) for _ in range(4)]
    job = cluster.submit(graph)
    cluster.report_all(job, "running")
    for index in complete:
        cluster.report(workers[index], (job, READ, index), "finished")
    return workers, job


@pytest.mark.parametrize("complete", [(), (0,), (0, 1)], ids=["half written", "waited for", "complete"])
def test_what_is_stored_is_made_anew_elsewhere_and_who_reads_it_does_not_restart(
    complete: tuple[int, ...], cluster: FakeCluster
) -> None:
    """If its rows and their division are the same, consumers read the next attempt, where they had not all of
    this one."""
    workers, job = stored(cluster, storing(), *complete)
    drain(cluster, workers[0])
    assert not workers[0].got(Shutdown), "no other worker has a slot"
    five = cluster.add(slots=1)
    end(cluster, workers[0], job)
    assert where(cluster, job)[READ, 0] == (5, 2, "created")
    assert workers[0].got(Shutdown)
    told = [each for worker in workers[2:] for each in worker.got(TasksRestarted)]
    assert [(each.tasks[0].worker, each.tasks[0].attempt) for each in told] == [(5, 2)] * 2
    leave(cluster, workers[0])
    run(cluster, five)
    cluster.report(five, (job, READ, 0), "finished", attempt=2)
    cluster.report(workers[1], (job, READ, 1), "finished")
    for index in (0, 1):
        assert where(cluster, job)[COUNT, index] == (3 + index, 1, "running")
        cluster.report(workers[2 + index], (job, COUNT, index), "finished")
    info = cluster.show(job)
    assert (info.state, info.restarts, info.rows_again) == ("finished", {"drained": 1}, 0)


def test_if_rows_would_be_divided_in_another_way_all_who_read_them_start_again(cluster: FakeCluster) -> None:
    workers, job = stored(cluster, storing(partitioner="rebalance"), 0, 1)
    five = cluster.add(slots=1)
    drain(cluster, workers[0])
    for worker in workers:
        end(cluster, worker, job)
    assert {key: place[:2] for key, place in where(cluster, job).items()} == {
        (READ, 0): (5, 2),
        (READ, 1): (2, 1),
        (COUNT, 0): (3, 2),
        (COUNT, 1): (4, 2),
    }
    assert five.got(DeployTasks) and workers[0].got(Shutdown)
    assert cluster.show(job).first_failure is None


@pytest.mark.parametrize("strategy", ["individual", "full"])
@pytest.mark.parametrize("complete", [(), (0, 1)], ids=["half written", "complete"])
def test_what_cannot_be_made_again_stays_until_all_have_read_it(
    complete: tuple[int, ...], strategy: str, cluster: FakeCluster
) -> None:
    """External clients have written it, once: the job would fail, or lack these rows."""
    workers, job = stored(cluster, storing(external=True, restart_strategy=strategy), *complete)
    cluster.add(slots=2)
    before = where(cluster, job)
    drain(cluster, workers[0])
    drain(cluster, workers[2])
    if strategy == "individual":
        end(cluster, workers[2], job)
        assert where(cluster, job)[COUNT, 0][:2] == (5, 2), "what reads it may move"
        before = where(cluster, job)
    for index in {0, 1}.difference(complete):
        cluster.report(workers[index], (job, READ, index), "finished")
        before[READ, index] = (1 + index, 1, "finished")
    assert where(cluster, job) == before
    assert not workers[0].got(Shutdown) and not workers[0].got(CancelTasks)
    consumers = [(worker, key) for worker in cluster.workers.values() for key in worker.tasks]
    for worker, key in consumers:
        if key[1] == COUNT:
            cluster.report(worker, key, "finished", attempt=worker.tasks[key].attempt)
    assert cluster.show(job).state == "finished" and workers[0].got(Shutdown)


@pytest.mark.parametrize("complete", [(), (0, 1)], ids=["half written", "complete"])
def test_a_failure_that_would_restart_what_cannot_be_made_again_fails_the_job(
    complete: tuple[int, ...], cluster: FakeCluster
) -> None:
    """With ``full``, a consumer's does: what was stored would be missing, and not counted."""
    workers, job = stored(cluster, storing(external=True, restart_strategy="full"), *complete)
    cluster.fail(workers[2], (job, COUNT, 0), TaskFailed.code, "boom")
    info = cluster.show(job)
    assert info.state == "failing"
    assert "read[0], read[1] cannot run again" in info.causes[0].text


def test_when_its_time_is_up_what_cannot_be_made_again_is_lost_in_words(cluster: FakeCluster) -> None:
    workers, job = stored(cluster, storing(external=True), 0, 1)
    drain(cluster, workers[0], seconds=5.0)
    cluster.advance(5.1)
    assert not workers[0].got(Shutdown) and cluster.show(job).state == "running"
    cluster.advance(EVICTION_SECONDS_MAX)
    assert workers[0].got(Shutdown)
    leave(cluster, workers[0])
    info = cluster.show(job)
    assert info.state == "failing"
    assert "read[0] cannot run again: a blocking exchange stores what an external client wrote" in (
        info.causes[0].text
    )


@pytest.mark.parametrize("strategy", ["region", "full"])
def test_tasks_that_restart_together_move_together(
    strategy: str, cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one, two = cluster.add(slots=2), cluster.add(slots=1)
    job = cluster.submit(make_graph(3, 3, restart_strategy=strategy))
    cluster.report_all(job, "running")
    drain(cluster, one)
    three = cluster.add(slots=1)
    assert not one.got(CancelTasks), "one move of all its slots, and not one after the other"
    four = cluster.add(slots=1)
    assert one.got(CancelTasks) and two.got(CancelTasks)
    end(cluster, one, job)
    assert not three.got(DeployTasks) and not four.got(DeployTasks)
    end(cluster, two, job)
    assert {place[:2] for place in where(cluster, job).values()} == {(2, 2), (3, 2), (4, 2)}
    assert one.got(Shutdown) and cluster.show(job).restarts == {"drained": 6}


def test_a_worker_that_is_killed_while_it_leaves_is_lost(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, two = pair
    drain(cluster, one)
    cluster.report(one, (job, COUNT, 0), "canceled")
    cluster.lose(one)
    assert {place[0] for place in where(cluster, job).values()} == {2}
    assert where(cluster, job)[READ, 0][1:] == where(cluster, job)[COUNT, 0][1:] == (2, "created")
    assert cluster.show(job).restarts == {"drained": 1, "lost": 1}
    assert len(two.got(DeployTasks)) >= 2


def test_a_slot_whose_new_worker_is_lost_on_the_way_goes_to_another(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one = cluster.add(slots=1)
    job = cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    cluster.report_all(job, "running")
    two, three = cluster.add(slots=2), cluster.add(slots=1)
    drain(cluster, one)
    cluster.lose(two)
    end(cluster, one, job)
    end(cluster, one, job)
    assert where(cluster, job)[READ, 0][0] == three.worker
    assert one.got(Shutdown) and "lost" not in cluster.show(job).restarts


def test_the_next_coordinator_goes_on_with_workers_that_are_to_leave(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, two = pair
    drain(cluster, one)
    cluster.report(one, (job, COUNT, 0), "canceled")
    cluster.check_journal()
    cluster.lose_coordinator()
    cluster.come_back(one)
    cluster.come_back(two)
    assert states(cluster)[1] == ("alive", True, 0)
    assert one.got(CancelTasks)[-1].attempts[0].operator == READ, "it may not have heard of it"
    cluster.report(one, (job, READ, 0), "canceled")
    assert {place[:2] for place in where(cluster, job).values()} == {(2, 1), (2, 2)}
    assert one.got(Shutdown)
    cluster.lose_coordinator()
    cluster.come_back(two)
    cluster.come_back(one)
    assert len(one.got(Shutdown)) == 2, "it may not have heard of it"


def test_a_time_limit_outlives_the_coordinator(
    cluster: FakeCluster, make_graph: Callable[..., JobGraph]
) -> None:
    one = cluster.add()
    cluster.submit(make_graph(1, 1, restart_strategy="individual"))
    drain(cluster, one, 20.0)
    cluster.advance(10.0)
    cluster.lose_coordinator()
    cluster.come_back(one)
    cluster.advance(9.9)
    assert not one.got(CancelTasks)
    cluster.advance(0.2)
    assert one.got(CancelTasks)


def test_nothing_moves_while_another_worker_of_the_job_is_awaited(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, two = pair
    three = cluster.add()
    cluster.break_link(two)
    drain(cluster, one)
    assert not one.got(CancelTasks)
    cluster.come_back(two)
    assert one.got(CancelTasks)
    end(cluster, one, job)
    assert where(cluster, job)[READ, 0][0] == three.worker


def test_nothing_moves_while_the_journal_cannot_be_written(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, two = pair
    cluster.journal_error = ResourceExhausted("the disk is full")
    cluster.report(two, (job, READ, 1), "finished")
    drain(cluster, one)
    cluster.advance(5.0)
    assert where(cluster, job)[READ, 0] == (1, 1, "running") and not one.got(CancelTasks)
    cluster.journal_error = None
    cluster.report(two, (job, COUNT, 1), "finished")
    cluster.advance(1.0)
    assert one.got(CancelTasks)


def test_a_job_that_is_cancelled_while_it_moves_ends(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, two = pair
    drain(cluster, one)
    cluster.report(one, (job, COUNT, 0), "canceled")
    cluster.request(CancelJob(job=job))
    end(cluster, one, job)
    end(cluster, two, job)
    assert cluster.show(job).state == "canceled"
    assert one.got(Shutdown) and cluster.free_slots()[1] == 2


def test_a_failure_of_a_task_in_a_slot_that_moves_counts_as_one(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, _ = pair
    drain(cluster, one)
    cluster.report(one, (job, COUNT, 0), "failed", error=ErrorInfo(code=50, text="user"))
    end(cluster, one, job)
    assert where(cluster, job)[COUNT, 0] == (2, 2, "created")
    assert cluster.show(job).restarts == {"drained": 1, "failed": 1}


@pytest.mark.parametrize(
    ("drain", "at", "stays", "evicts"),
    [
        (Drain(None, False), 1e9, False, False),
        (Drain(10.0, False), 9.9, True, False),
        (Drain(10.0, False), 10.0, True, True),
        (Drain(10.0, True), 1.0, False, False),
        (Drain(10.0, True, others_leave=True), 1.0, True, False),
        (Drain(10.0, True, others_leave=True), 1.0, False, True),
        (Drain(None, False, others_leave=True), 1.0, False, False),
    ],
)
def test_tasks_are_evicted_when_the_time_is_over_or_nobody_stays(
    drain: Drain, at: float, stays: bool, evicts: bool
) -> None:
    assert drain.is_to_evict(at, others_stay=stays) == evicts
    assert not drain.is_to_evict(at, others_stay=stays), "once"


def test_the_stricter_of_two_orders_counts() -> None:
    drain = Drain(None, False)
    drain.order(20.0, signalled=True)
    drain.order(None, signalled=False)
    assert drain == Drain(20.0, True)
    drain.order(30.0, signalled=False)
    assert drain.until == 20.0
    assert drain.is_to_evict(20.0, others_stay=True) and drain.is_to_end(20.0, needed=False)
    drain.order(1.0, signalled=False)
    assert drain.until is None, "it was told to shut down"


def test_a_shutdown_that_is_lost_with_a_control_link_is_sent_again(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    one, _ = pair
    drain(cluster, one)
    assert len(one.got(Shutdown)) == 1
    cluster.break_link(one)
    cluster.come_back(one)
    assert len(one.got(Shutdown)) == 2, "it has not heard of the first"
