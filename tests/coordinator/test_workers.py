"""Registration, heartbeats and loss, through the machine's verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.wire.messages import PeerReport, Shutdown, WorkerLost
from minishuffle.wire.registration import Registered
from minishuffle.wire.requests import Failure, GetStatus, WorkerInfo

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

TERM = 7


def listed(cluster: FakeCluster) -> dict[int, WorkerInfo]:
    return {info.worker: info for info in cluster.request(GetStatus()).workers}


def refusal(cluster: FakeCluster, worker: FakeWorker) -> str:
    """Why a registration was refused; its link has to be closed."""
    failure = cluster.replies[worker.link, 0]
    assert isinstance(failure, Failure)
    assert worker.inbox == [] and worker.link in cluster.closed
    return failure.text


def test_ids_begin_at_1_and_epochs_grow(cluster: FakeCluster) -> None:
    workers = [cluster.add(), cluster.add(), cluster.add(requested_worker=7), cluster.add()]
    assert [(w.worker, w.epoch) for w in workers] == [(1, 1), (2, 2), (7, 3), (8, 4)]
    (registered,) = workers[1].got(Registered)
    assert (registered.term, registered.heartbeat_interval) == (TERM, 0.5)


def test_an_id_is_given_back_once_its_process_is_lost(cluster: FakeCluster) -> None:
    first = cluster.add(requested_worker=2)
    second = cluster.add(requested_worker=2, pid=77)
    assert refusal(cluster, second) == (
        f"worker id 2 is held by process {first.about.pid} on 10.0.0.1: stop that one, or choose "
        "another --id (0: any free one)"
    )
    cluster.lose(first)
    again = cluster.add(requested_worker=2, pid=78)
    assert (again.worker, again.epoch) == (2, 2)
    assert (listed(cluster)[2].state, listed(cluster)[2].pid) == ("alive", 78)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"python": "3.12"}, "the worker runs Python 3.12, this cluster runs Python 3.11, and functions are"),
        ({"releases": {"minishuffle": "99.1.0"}}, "the worker runs minishuffle 99.1.0, this cluster"),
        ({"segment_bytes": 4096}, "start it with --segment-bytes 32768"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused(
    cluster: FakeCluster, fields: dict[str, Any], text: str
) -> None:
    cluster.add()
    assert text in refusal(cluster, cluster.add(**fields))
    assert list(listed(cluster)) == [1]
    assert cluster.add().worker == 2


def test_a_closed_link_means_a_lost_worker_at_once_and_the_others_are_told(cluster: FakeCluster) -> None:
    first, second, third = cluster.add(), cluster.add(), cluster.add()
    cluster.lose(second)
    for other in (first, third):
        assert other.got(WorkerLost) == [WorkerLost(term=TERM, worker=2, epoch=2)]
    assert listed(cluster)[2].state == "lost"
    assert (listed(cluster)[2].slots, listed(cluster)[2].slots_free) == (2, 0)


def test_a_silent_worker_is_lost_and_its_link_closed(make_cluster: Any) -> None:
    cluster: FakeCluster = make_cluster(heartbeat_interval=0.5, heartbeat_timeout=2.0)
    silent, other = cluster.add(), cluster.add()
    cluster.workers.pop(silent.link)
    cluster.advance(1.75)
    assert listed(cluster)[1].state == "alive"
    assert listed(cluster)[1].heartbeat_age_seconds == pytest.approx(1.75)
    assert listed(cluster)[2].heartbeat_age_seconds == pytest.approx(0.25)
    cluster.advance(0.25)
    assert listed(cluster)[1].state == "lost"
    assert cluster.closed == {silent.link: "worker 1 is lost: it was silent for 2 s"}
    assert [lost.worker for lost in other.got(WorkerLost)] == [1]
    # What its process still says over the old link is of no effect.
    ignored = cluster.state.ignored
    cluster.heartbeat(silent)
    assert (listed(cluster)[1].state, cluster.state.ignored) == ("lost", ignored + 1)


def test_nobody_is_judged_by_a_coordinator_that_was_held_up_itself(make_cluster: Any) -> None:
    cluster: FakeCluster = make_cluster(heartbeat_interval=0.5, heartbeat_timeout=2.0)
    first, second = cluster.add(), cluster.add()
    cluster.now += 60.0
    cluster.do(cluster.state.handle_timer(cluster.now))
    assert [info.state for info in listed(cluster).values()] == ["alive", "alive"]
    # The heartbeats of one of them were waiting in the socket.
    cluster.heartbeat(second)
    cluster.workers.pop(first.link)
    cluster.advance(0.5)
    assert [info.state for info in listed(cluster).values()] == ["lost", "alive"]


@pytest.mark.parametrize("late", [0.06, 0.4])
def test_a_coordinator_that_was_held_up_for_a_moment_looks_once_more(make_cluster: Any, late: float) -> None:
    cluster: FakeCluster = make_cluster(heartbeat_interval=0.5, heartbeat_timeout=2.0)
    first, second = cluster.add(), cluster.add()
    for round in range(2):  # in each silence
        cluster.now += 2.0 + late
        cluster.do(cluster.state.handle_timer(cluster.now))
        assert [info.state for info in listed(cluster).values()] == ["alive", "alive"]
        cluster.heartbeat(second)
        if not round:
            cluster.heartbeat(first)
    cluster.workers.pop(first.link)
    cluster.now += 0.5 + late
    cluster.do(cluster.state.handle_timer(cluster.now))
    assert [info.state for info in listed(cluster).values()] == ["lost", "alive"], "late again, and judged"


def test_a_worker_that_says_goodbye_is_gone(cluster: FakeCluster) -> None:
    worker, other = cluster.add(), cluster.add()
    cluster.send(worker, Shutdown(term=TERM, reason="SIGTERM"))
    assert listed(cluster)[1].state == "gone"
    assert worker.link in cluster.closed
    assert [lost.worker for lost in other.got(WorkerLost)] == [1]
    cluster.lose(worker)
    assert listed(cluster)[1].state == "gone"


def test_lost_workers_stay_listed_for_ten_minutes(cluster: FakeCluster) -> None:
    lost, gone, alive = cluster.add(), cluster.add(), cluster.add()
    cluster.lose(lost)
    cluster.send(gone, Shutdown(term=TERM, reason=""))
    for worker in (lost, gone):
        cluster.workers.pop(worker.link)
    cluster.advance(599.0)
    states = [(entry.worker, entry.state) for entry in cluster.state.snapshot(cluster.now, {}).workers]
    assert states == [(1, "lost"), (2, "gone"), (3, "alive")]
    cluster.advance(1.0)
    assert list(listed(cluster)) == [alive.worker]
    # An id that was not asked for is never used again.
    assert cluster.add().worker == 4


def test_messages_of_an_earlier_term_or_epoch_or_of_another_worker_are_ignored(cluster: FakeCluster) -> None:
    cluster.add()
    worker = cluster.add()
    assert worker.epoch == 2
    report = PeerReport(worker=1, connections=1, local="a:1", remote="b:2")
    for count, wrong in enumerate([{"term": TERM - 1}, {"epoch": 1}, {"worker": 1}], start=1):
        cluster.heartbeat(worker, peers=[report], **wrong)
        assert cluster.state.ignored == count
        assert listed(cluster)[2].peers == []
    cluster.heartbeat(worker, peers=[report])
    assert listed(cluster)[2].peers == [report]


def test_a_later_epoch_is_no_reason_to_ignore_a_heartbeat(cluster: FakeCluster) -> None:
    worker = cluster.add()
    report = PeerReport(worker=2, connections=1, local="a:1", remote="b:2")
    cluster.heartbeat(worker, peers=[report], epoch=worker.epoch + 1)
    assert (listed(cluster)[1].peers, cluster.state.ignored) == ([report], 0)


def test_only_the_last_ones_of_those_that_ended_are_listed(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minishuffle.coordinator.workers.LISTED_MAX", 2)
    stays = cluster.add()
    for _ in range(4):
        cluster.lose(cluster.add())
        cluster.now += 1.0
    listed = cluster.request(GetStatus()).workers
    assert [(worker.worker, worker.state) for worker in listed] == [
        (stays.worker, "alive"),
        (4, "lost"),
        (5, "lost"),
    ]
