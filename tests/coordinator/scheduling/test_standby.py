"""Standby workers: they admit no job, are prepared for all, and take lost slots before anybody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.errors import ResourceExhausted, TaskFailed
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import (
    DeployTasks,
    Dial,
    ErrorInfo,
    Leaving,
    PeerSuspicion,
    PrepareJob,
    ReleaseJob,
    Shutdown,
    TasksRestarted,
)
from minishuffle.wire.requests import CancelJob, GetStatus, StopCluster, SubmitJob

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
PROGRAMS = {0: b"read", 1: b"count"}


@pytest.fixture
def restarting(make_graph: MakeGraph) -> MakeGraph:
    """Graphs whose tasks restart alone."""

    def make(sources: int = 2, sinks: int = 2) -> JobGraph:
        return make_graph(sources, sinks, restart_strategy="individual")

    return make


def placed(cluster: FakeCluster, job: str = "j1") -> dict[tuple[str, int], tuple[int, int]]:
    """By subtask: attempt and worker."""
    return {(task.name, task.index): (task.attempt, task.worker) for task in cluster.show(job).tasks}


def standby(cluster: FakeCluster) -> list[int]:
    """The workers that are on standby, as clients see it."""
    workers = cluster.request(GetStatus()).workers
    assert all(worker.slots_free == 0 for worker in workers if worker.standby)
    return [worker.worker for worker in workers if worker.standby and worker.state == "alive"]


def kill(cluster: FakeCluster, worker: FakeWorker) -> None:
    del cluster.workers[worker.link]
    cluster.lose(worker)


# --- what it does not do --------------------------------------------------------------------------


def test_a_standby_worker_admits_no_job(cluster: FakeCluster, restarting: MakeGraph) -> None:
    cluster.add()
    spare = cluster.add(standby=True)
    assert standby(cluster) == [2]
    code, text = cluster.refusal(SubmitJob(name="x", python="3.11", graph=restarting(3, 1).to_bytes()))
    assert code == ResourceExhausted.code
    assert "2 are free of 2 (2 more are on standby, for those of lost workers alone): start more" in text
    cluster.submit(restarting())
    assert spare.got(DeployTasks) == []
    assert cluster.state.snapshot(cluster.now, {}).slots == {"used": 2, "free": 0, "standby": 2}


def test_a_task_that_fails_stays_where_it_is(cluster: FakeCluster, restarting: MakeGraph) -> None:
    worker, spare = cluster.add(), cluster.add(standby=True)
    cluster.submit(restarting())
    cluster.report_all("j1", "running")
    cluster.fail(worker, ("j1", 1, 0), TaskFailed.code, "boom")
    assert placed(cluster)["count", 0] == (2, 1)
    assert spare.got(DeployTasks) == []
    assert standby(cluster) == [2]


# --- takeovers ------------------------------------------------------------------------------------


def test_it_takes_all_slots_of_a_lost_worker_before_any_free_slot(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first, second = cluster.add(), cluster.add(slots=4)
    spare, other = cluster.add(standby=True), cluster.add(standby=True)
    cluster.submit(restarting(4, 4))
    lost = {index for (_, index), (_, worker) in placed(cluster).items() if worker == 1}
    assert len(lost) == 2
    for each in (spare, other):
        cluster.heartbeat(each, loaded=1)
    kill(cluster, first)
    assert {index for (_, index), (_, worker) in placed(cluster).items() if worker == spare.worker} == lost
    assert standby(cluster) == [other.worker], "one is enough"
    (deploy,) = spare.got(DeployTasks)
    assert {(task.operator, task.index, task.attempt) for task in deploy.tasks} == {
        (operator, index, 2) for operator in (0, 1) for index in lost
    }
    assert deploy.programs == {}, "it has them"
    assert [address.worker for address in deploy.workers] == [2, 3]
    assert [each.worker for each in second.got(TasksRestarted)[0].workers] == [3]
    assert other.got(DeployTasks) == []


def test_it_is_a_regular_worker_after_that(cluster: FakeCluster, restarting: MakeGraph) -> None:
    first, spare = cluster.add(), cluster.add(standby=True)
    cluster.submit(restarting(1, 1))
    kill(cluster, first)
    assert standby(cluster) == []
    assert cluster.free_slots() == [0, 1]
    cluster.submit(restarting(1, 1))
    assert placed(cluster, "j2")["read", 0] == (1, spare.worker)
    assert spare.got(DeployTasks)[1].programs == PROGRAMS


def test_jobs_that_lost_the_same_worker_share_a_standby_worker(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first = cluster.add()
    spare, other = cluster.add(standby=True), cluster.add(standby=True)
    for _ in range(2):
        cluster.submit(restarting(1, 1))
    kill(cluster, first)
    assert placed(cluster, "j1")["read", 0] == placed(cluster, "j2")["read", 0] == (2, spare.worker)
    assert standby(cluster) == [other.worker]


def test_slots_that_do_not_fit_go_to_the_next_and_then_to_free_slots(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first = cluster.add(slots=3)
    cluster.submit(restarting(3, 3))
    cluster.add(slots=1)
    spares = [cluster.add(slots=1, standby=True, segments=segments) for segments in (2048, 1, 2048)]
    for spare in spares:
        cluster.heartbeat(spare, loaded=1)
    kill(cluster, first)
    assert {index: where for (_, index), where in placed(cluster).items()} == {
        0: (2, 3),
        1: (2, 5),
        2: (2, 2),
    }
    assert standby(cluster) == [4], "it has too few buffers"


def test_a_standby_worker_that_still_loads_comes_behind_a_free_slot(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first = cluster.add(slots=2)
    cluster.submit(restarting(2, 2))
    free, spare = cluster.add(slots=1), cluster.add(slots=1, standby=True)
    kill(cluster, first)
    assert {worker for _, worker in placed(cluster).values()} == {free.worker, spare.worker}
    assert placed(cluster)["read", 0][1] == free.worker


def test_two_losses_take_two_and_a_third_waits_for_the_next(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first = cluster.add(slots=1)
    cluster.submit(restarting(1, 1))
    spares = [cluster.add(slots=1, standby=True) for _ in range(2)]
    for attempt, (dies, takes) in enumerate(zip([first, spares[0]], spares, strict=True), 2):
        kill(cluster, dies)
        assert placed(cluster)["count", 0] == (attempt, takes.worker)
    kill(cluster, spares[1])
    assert {task.state for task in cluster.show("j1").tasks} == {"waiting for a slot"}
    late = cluster.add(slots=1, standby=True)
    assert placed(cluster)["count", 0] == (4, late.worker)
    assert standby(cluster) == []


def test_a_standby_worker_that_is_lost_or_leaves_takes_nothing(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first = cluster.add()
    cluster.submit(restarting())
    spare, leaver = cluster.add(standby=True), cluster.add(standby=True)
    free = cluster.add()
    kill(cluster, spare)
    cluster.send(leaver, Shutdown(term=7, reason=""))
    assert standby(cluster) == []
    assert {attempt for attempt, _ in placed(cluster).values()} == {1}
    kill(cluster, first)
    assert set(placed(cluster).values()) == {(2, free.worker)}


def test_a_new_process_with_the_id_of_a_standby_worker_is_prepared_anew(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first = cluster.add()
    cluster.submit(restarting())
    spare = cluster.add(standby=True)
    kill(cluster, spare)
    again = cluster.add(requested_worker=spare.worker)
    assert standby(cluster) == [again.worker]
    (prepared,) = again.got(PrepareJob)
    assert prepared.programs == PROGRAMS
    kill(cluster, first)
    (deploy,) = again.got(DeployTasks)
    assert deploy.programs == {}, "it has them"


# --- who takes its place --------------------------------------------------------------------------


def test_the_next_worker_is_on_standby_in_place_of_one_that_was_called_upon(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first, spare = cluster.add(), cluster.add(standby=True)
    cluster.submit(restarting())
    kill(cluster, first)
    assert standby(cluster) == []
    heir = cluster.add()
    assert standby(cluster) == [heir.worker]
    assert len(heir.got(PrepareJob)) == 1
    cluster.heartbeat(heir, loaded=1)
    another = cluster.add()
    assert standby(cluster) == [heir.worker], "there was one, and there is one"
    kill(cluster, spare)
    assert {worker for _, worker in placed(cluster).values()} == {heir.worker}
    kill(cluster, another)
    assert standby(cluster) == []
    assert standby_after(cluster, cluster.add(standby=True)) == [5]
    assert standby_after(cluster, cluster.add()) == [5], "one that was started as such has taken the place"


@pytest.mark.parametrize("dies", [True, False])
def test_a_cluster_that_starts_anew_has_no_place_on_standby_to_fill(
    cluster: FakeCluster, restarting: MakeGraph, dies: bool
) -> None:
    """It was stopped, or all of its processes have died."""
    first, spare = cluster.add(), cluster.add(standby=True)
    job = cluster.submit(restarting())
    kill(cluster, first)
    unused = cluster.add(standby=True)
    cluster.request(CancelJob(job=job))
    cluster.report_all(job, "canceled")
    if not dies:
        cluster.request(StopCluster())
        cluster.lose(spare)
        cluster.lose(unused)
        assert cluster.stopped
    cluster.lose_coordinator(workers_anew=dies)
    cluster.add(requested_worker=unused.worker)
    cluster.add()
    assert standby_after(cluster, cluster.add(standby=True)) == [5]


def standby_after(cluster: FakeCluster, registered: FakeWorker) -> list[int]:
    """Once that worker is there."""
    assert registered.worker
    return standby(cluster)


@pytest.mark.parametrize("as_standby", [[False, False], [True, False], [False, True], [True, True]])
def test_of_two_that_come_after_two_losses_the_first_runs_the_tasks_that_wait(
    cluster: FakeCluster, restarting: MakeGraph, as_standby: list[bool]
) -> None:
    workers = [cluster.add(slots=1) for _ in range(2)]
    cluster.add(slots=1, standby=True)
    cluster.submit(restarting(2, 2))
    for worker in workers:
        kill(cluster, worker)
    assert "waiting for a slot" in {task.state for task in cluster.show("j1").tasks}
    early, late = (cluster.add(slots=1, standby=each) for each in as_standby)
    assert early.worker in {worker for _, worker in placed(cluster).values()}
    assert standby(cluster) == [late.worker]


def test_a_standby_worker_that_leaves_in_order_has_no_successor(cluster: FakeCluster) -> None:
    spare = cluster.add(standby=True)
    cluster.send(spare, Shutdown(term=7, reason=""))
    cluster.add()
    assert standby(cluster) == []


def test_the_next_coordinator_knows_that_one_is_short(
    cluster: FakeCluster, make_cluster: Any, restarting: MakeGraph
) -> None:
    first, _ = cluster.add(), cluster.add(standby=True)
    cluster.submit(restarting())
    kill(cluster, first)
    following: FakeCluster = make_cluster(cluster.journal)
    heir = following.add()
    assert standby(following) == [heir.worker]


# --- preparation ----------------------------------------------------------------------------------


def test_a_job_that_starts_is_prepared_on_every_standby_worker(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    regular = cluster.add()
    spares = [cluster.add(standby=True) for _ in range(2)]
    cluster.submit(restarting())
    for spare, others in zip(spares, ([1, 3], [1, 2]), strict=True):
        (prepare,) = spare.got(PrepareJob)
        assert (prepare.job, prepare.programs) == ("j1", PROGRAMS)
        assert [address.worker for address in prepare.workers] == others
    assert regular.got(PrepareJob) == []


def test_one_that_joins_later_is_prepared_for_what_runs_and_announced(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    regular, early = cluster.add(slots=3), cluster.add(standby=True)
    assert early.got(Dial) == [], "nothing runs so far"
    for _ in range(3):
        cluster.submit(restarting(1, 1))
    cluster.report_all("j1", "finished")
    cluster.request(CancelJob(job="j2"))
    late = cluster.add(standby=True)
    (prepare,) = late.got(PrepareJob)
    assert (prepare.job, [address.worker for address in prepare.workers]) == ("j3", [1, 2])
    (dial,) = early.got(Dial)
    assert (dial.peer.worker, dial.peer.epoch) == (late.worker, late.epoch)
    another = cluster.add()
    assert early.got(Dial)[1].peer == late.got(Dial)[0].peer
    assert early.got(Dial)[1].peer.worker == another.worker
    assert regular.got(Dial) == another.got(Dial) == another.got(PrepareJob) == []


def test_a_job_that_ends_is_forgotten_by_all_that_were_prepared_for_it(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    worker, spare = cluster.add(), cluster.add(standby=True)
    for _ in range(2):
        cluster.submit(restarting(1, 1))
    cluster.report_all("j1", "finished")
    assert [message.job for message in spare.got(ReleaseJob)] == ["j1"]
    assert set(spare.prepared) == {"j2"}
    kill(cluster, worker)
    cluster.report_all("j2", "finished", attempt=2)
    assert [message.job for message in spare.got(ReleaseJob)] == ["j1", "j2"]
    assert spare.prepared == {}


@pytest.mark.parametrize("coordinator", ["the same", "the next"])
def test_one_that_was_away_when_a_job_ended_forgets_it_when_it_comes_back(
    cluster: FakeCluster, restarting: MakeGraph, coordinator: str
) -> None:
    worker, spare = cluster.add(), cluster.add(standby=True)
    for _ in range(2):
        cluster.submit(restarting(1, 1))
    cluster.report_all("j1", "running")
    cluster.report_all("j2", "running")
    if coordinator == "the same":
        cluster.break_link(spare)
    else:
        cluster.lose_coordinator()
        cluster.come_back(worker)
    cluster.report_all("j1", "finished")
    cluster.come_back(spare)
    assert set(spare.prepared) == {"j2"}


def test_one_that_took_over_forgets_the_other_jobs_too(cluster: FakeCluster, restarting: MakeGraph) -> None:
    first, second = cluster.add(slots=1), cluster.add(slots=1)
    spare = cluster.add(standby=True)
    for _ in range(2):
        cluster.submit(restarting(1, 1))
    kill(cluster, first)
    cluster.report(second, ("j2", 0, 0), "finished")
    cluster.report(second, ("j2", 1, 0), "finished")
    assert cluster.show("j2").state == "finished"
    assert set(spare.prepared) == {"j1"}


def test_who_would_take_over_from_a_suspected_worker_is_prepared_once(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    first, second = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(restarting(2, 2), name="pair")
    idle, other = cluster.add(slots=2), cluster.add(slots=1)
    assert {worker for _, worker in placed(cluster).values()} == {first.worker, second.worker}
    suspicion = PeerSuspicion(term=cluster.term, worker=first.worker, epoch=first.epoch, suspected=True)
    cluster.send(second, suspicion)
    (message,) = idle.got(PrepareJob)
    assert (message.job, message.programs) == ("j1", PROGRAMS)
    assert first.worker not in [each.worker for each in message.workers]
    assert not other.got(PrepareJob) and not second.got(PrepareJob), "one slot needs one heir"
    cluster.send(second, suspicion.model_copy(update={"suspected": False}))
    cluster.send(second, suspicion)
    assert len(idle.got(PrepareJob)) == 1
    kill(cluster, first)
    (deployed,) = idle.got(DeployTasks)
    assert deployed.programs == {}, "it has them"


@pytest.mark.parametrize("is_lost", [False, True], ids=["its link breaks", "the coordinator is lost"])
def test_one_that_was_prepared_and_came_back_forgets_the_job_when_that_ends(
    cluster: FakeCluster, restarting: MakeGraph, is_lost: bool
) -> None:
    workers = one, two, three = [cluster.add() for _ in range(3)]
    job = cluster.submit(restarting())
    cluster.report_all(job, "running")
    suspicion = PeerSuspicion(term=cluster.term, worker=two.worker, epoch=two.epoch, suspected=True)
    cluster.send(one, suspicion)
    assert three.prepared.keys() == {job}
    if is_lost:
        cluster.lose_coordinator()
        for worker in workers:
            cluster.come_back(worker)
    else:
        cluster.break_link(three)
        cluster.come_back(three)
    cluster.request(CancelJob(job=job))
    cluster.report_all(job, "canceled")
    assert cluster.show(job).state == "canceled" and three.prepared == {}


@pytest.mark.parametrize("standby", [False, True])
def test_nobody_is_prepared_who_is_to_leave(
    cluster: FakeCluster, restarting: MakeGraph, standby: bool
) -> None:
    first, second = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(restarting(2, 2))
    leaving, heir = cluster.add(slots=4, standby=standby), cluster.add(slots=2)
    if not standby:
        cluster.submit(restarting(1, 1))  # It stays until that has moved.
    before = len(leaving.got(PrepareJob))
    terminate = Leaving(term=cluster.term, seconds=8.0)
    cluster.send(leaving, terminate)
    suspicion = PeerSuspicion(term=cluster.term, worker=first.worker, epoch=first.epoch, suspected=True)
    cluster.send(second, suspicion)
    assert len(leaving.got(PrepareJob)) == before
    assert [message.job for message in heir.got(PrepareJob)] == ["j1"]


def test_a_standby_worker_makes_that_needless(cluster: FakeCluster, restarting: MakeGraph) -> None:
    first, second, idle = cluster.add(slots=1), cluster.add(slots=1), cluster.add()
    cluster.add(standby=True)
    cluster.submit(restarting(2, 2), name="pair")
    cluster.send(
        second, PeerSuspicion(term=cluster.term, worker=first.worker, epoch=first.epoch, suspected=True)
    )
    assert not idle.got(PrepareJob)


def test_programs_that_are_too_large_to_be_kept_come_with_the_takeover(
    cluster: FakeCluster, restarting: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PREPARED_PROGRAM_BYTES_MAX", 10)
    worker, spare = cluster.add(), cluster.add(standby=True)
    for _ in range(2):
        cluster.submit(restarting(1, 1))
    assert [message.programs for message in spare.got(PrepareJob)] == [PROGRAMS, {}]
    kill(cluster, worker)
    assert [message.programs for message in spare.got(DeployTasks)] == [{}, PROGRAMS]


def test_a_deployment_that_fails_ends_the_job_on_a_standby_worker_too(
    cluster: FakeCluster, restarting: MakeGraph
) -> None:
    worker, spare = cluster.add(), cluster.add(standby=True)
    cluster.submit(restarting(1, 1))
    kill(cluster, worker)
    error = ErrorInfo(code=TaskFailed.code, text="no such module")
    for _ in range(12):
        for key, task in list(spare.tasks.items()):
            cluster.report(spare, key, "failed", attempt=task.attempt, error=error)
        cluster.advance(11.0)
    info = cluster.show("j1")
    assert (info.state, info.causes[0].text) == ("failed", "no such module")
    assert spare.prepared == {}
