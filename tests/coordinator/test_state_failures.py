"""Jobs that fail: what fails them, the causes that are told, and the slots that come free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minishuffle.errors import PeerLost, TaskCancelled, TaskFailed
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import (
    CancelTasks,
    HostLook,
    HostLooked,
    PeerSuspicion,
    ReleaseJob,
    Shutdown,
    WorkerLost,
)
from minishuffle.wire.requests import GetEvents, GetStatus, JobInfo

if TYPE_CHECKING:
    from conftest import FakeCluster

MakeGraph = Callable[..., JobGraph]
READ0, READ1, COUNT0, COUNT1 = ("j1", 0, 0), ("j1", 0, 1), ("j1", 1, 0), ("j1", 1, 1)


def states(info: JobInfo) -> dict[str, str]:
    return {f"{task.name}[{task.index}]": task.state for task in info.tasks}


def causes(info: JobInfo) -> list[str]:
    return [cause.text for cause in info.causes]


def test_a_function_that_raises_fails_the_job(cluster: FakeCluster, pair: Any, make_graph: MakeGraph) -> None:
    cluster.submit(make_graph())
    cluster.report_all("j1", "running")
    cluster.fail(pair[1], COUNT1, TaskFailed.code, "count[1]: ZeroDivisionError: division by zero")
    assert cluster.show("j1").state == "failing"
    assert [worker.got(CancelTasks)[0].job for worker in pair] == ["j1", "j1"]
    cluster.fail(pair[0], COUNT0, PeerLost.code, "count[0]: peer")
    cluster.report(pair[0], READ0, "canceled")
    assert (cluster.show("j1").state, cluster.free_slots()) == ("failing", [1, 1])
    cluster.report(pair[1], READ1, "finished")
    info = cluster.show("j1")
    assert info.state == "failed"
    assert causes(info) == ["count[1]: ZeroDivisionError: division by zero", "count[0]: peer"]
    assert all(len(worker.got(CancelTasks)) == len(worker.got(ReleaseJob)) == 1 for worker in pair)
    assert cluster.free_slots() == [2, 2]
    assert cluster.submit(make_graph(2, 2)) == "j2"


def test_a_lost_worker_fails_the_job_and_is_its_first_cause(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.report_all("j1", "running")
    # The peer notices first.
    cluster.fail(pair[0], COUNT0, PeerLost.code, "count[0]: the connection to worker 2 broke")
    cluster.lose(pair[1])
    assert cluster.show("j1").state == "failing"
    assert (len(pair[0].got(CancelTasks)), len(pair[1].got(CancelTasks))) == (1, 1)
    cluster.fail(pair[0], READ0, TaskCancelled.code, "read[0]: cancelled")
    info = cluster.show("j1")
    assert info.state == "failed"
    assert causes(info) == [
        f"worker 2 (pid {pair[1].about.pid} on 10.0.0.1) was lost: its control link closed; "
        "read[1], count[1] ran there",
        "count[0]: the connection to worker 2 broke",
        "read[0]: cancelled",
    ]
    assert states(info) == {"read[0]": "failed", "read[1]": "lost", "count[0]": "failed", "count[1]": "lost"}
    assert (len(pair[0].got(ReleaseJob)), len(pair[1].got(ReleaseJob))) == (1, 0)
    assert cluster.submit(make_graph(2, 2)) == "j2"


def test_the_loss_of_every_worker_ends_the_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    for worker in pair:
        cluster.lose(worker)
    info = cluster.show("j1")
    assert (info.state, len(info.causes)) == ("failed", 2)
    assert info.causes[0].text.startswith("worker 1 ")


def test_a_worker_whose_tasks_are_finished_may_go(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    first, second = cluster.add(slots=1), cluster.add(slots=1)
    cluster.submit(make_graph(2, 1))
    cluster.report(second, READ1, "finished")
    cluster.lose(second)
    assert cluster.show("j1").state == "created"
    cluster.report(first, READ0, "finished")
    cluster.report(first, COUNT0, "finished")
    assert cluster.show("j1").state == "finished"


def test_a_lost_worker_explains_what_others_missed_though_its_own_tasks_were_over(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    for key in (READ1, COUNT1):
        cluster.report(pair[1], key, "finished")
    cluster.fail(pair[0], COUNT0, PeerLost.code, "count[0]: the connection to worker 2 broke")
    cluster.lose(pair[1])
    cluster.report(pair[0], READ0, "canceled")
    info = cluster.show("j1")
    assert (info.state, len(info.causes)) == ("failed", 2)
    assert causes(info)[0].endswith("was lost: its control link closed")


def test_a_worker_that_is_stopped_is_the_cause_though_its_tasks_say_canceled_first(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.report(pair[1], READ1, "canceled")
    cluster.send(pair[1], Shutdown(term=7, reason="SIGTERM"))
    assert causes(cluster.show("j1")) == [
        f"worker 2 (pid {pair[1].about.pid} on 10.0.0.1) was lost: it was stopped (SIGTERM); "
        "count[1] ran there",
        "read[1]: the task was canceled although nobody asked for it",
    ]


def test_a_new_process_with_the_id_of_a_lost_one_holds_nothing_of_its_jobs(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.lose(pair[1])
    again = cluster.add(requested_worker=2, slots=1, segments=3)
    assert (cluster.show("j1").state, cluster.free_slots()) == ("failing", [1, 1])
    cluster.report(again, READ1, "finished")
    assert states(cluster.show("j1"))["read[1]"] == "lost"
    cluster.report(pair[0], READ0, "canceled")
    cluster.report(pair[0], COUNT0, "canceled")
    assert cluster.show("j1").state == "failed"
    assert again.got(ReleaseJob) == []


def test_a_task_that_was_cancelled_unasked_fails_the_job(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    cluster.submit(make_graph())
    cluster.report(pair[0], READ0, "canceled")
    info = cluster.show("j1")
    assert info.state == "failing"
    assert causes(info) == ["read[0]: the task was canceled although nobody asked for it"]


def test_a_suspicion_is_an_event_of_the_jobs_that_both_workers_run_and_changes_nothing_else(
    cluster: FakeCluster, pair: Any, make_graph: MakeGraph
) -> None:
    third = cluster.add(slots=2)
    cluster.submit(make_graph())
    cluster.report_all("j1", "running")
    before = cluster.show("j1")

    def say(worker: Any, about: Any, suspected: bool, epoch: int = 0) -> None:
        epoch = epoch or about.epoch
        cluster.send(worker, PeerSuspicion(term=7, worker=about.worker, epoch=epoch, suspected=suspected))

    say(pair[0], pair[1], True)
    say(third, pair[1], True)
    say(pair[0], pair[1], False)
    ignored = cluster.state.ignored
    say(pair[0], pair[1], True, epoch=pair[1].epoch + 1)
    assert cluster.state.ignored == ignored + 1
    events = cluster.request(GetEvents(job="j1")).events
    assert [(event.kind, event.text, event.worker) for event in events[-2:]] == [
        ("worker suspected", "worker 1 gets no answer from worker 2", 2),
        ("worker trusted", "worker 1 gets answers again from worker 2", 2),
    ]
    assert cluster.show("j1") == before
    snapshot = cluster.state.snapshot(cluster.now, {})
    assert [(entry.worker, entry.suspicions) for entry in snapshot.workers] == [(1, 0), (2, 2), (3, 0)]


def test_a_silent_host_is_lost_with_all_its_workers_before_any_of_them(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    """Two workers on a host, and two on others that have no answer from it either."""
    first, second = cluster.add(identity="a"), cluster.add(identity="a")
    others = [cluster.add(identity="b"), cluster.add(identity="c")]
    cluster.submit(make_graph(4, 4, restart_strategy="individual"))
    cluster.report_all("j1", "running")

    def pass_time(seconds: float) -> None:
        cluster.advance(seconds)
        for other in others:
            cluster.heartbeat(other)

    pass_time(0.25)
    pass_time(0.1)
    (glance,) = cluster.looks
    assert (glance.times, [each.got(HostLook) for each in others]) == (1, [[], []])
    cluster.do(cluster.state.host_looked(glance.ticket, False, cluster.now))
    look = cluster.looks[-1]
    assert [each.got(HostLook) for each in others] == [[look], [look]]
    pass_time(0.26)
    cluster.do(cluster.state.host_looked(look.ticket, False, cluster.now))
    for other in others:
        assert {each.state for each in cluster.request(GetStatus()).workers} == {"alive"}
        cluster.send(other, HostLooked(term=cluster.term, ticket=look.ticket, answer=False))
    found = {each.worker: each.state for each in cluster.request(GetStatus()).workers}
    assert [found[each.worker] for each in (first, second, *others)] == ["lost", "lost", "alive", "alive"]
    (cause, *_) = [
        event.text for event in cluster.request(GetEvents(job="j1")).events if "lost" in event.kind
    ]
    assert "its host did not answer: nothing was heard of it for 0.6" in cause
    (verdict,) = first.got(WorkerLost)
    assert "its host did not answer" in verdict.reason, "it may be there, and is to stop"
