"""What the coordinator knows of links between workers, and the events, columns and metrics that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.coordinator.links import ANSWER_SECONDS, PROBES_PER_TIMEOUT, Links
from minishuffle.coordinator.workers import WorkerRegistry
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import PeerReport, Probe, Probed, UnlinkedPeer
from minishuffle.wire.requests import CancelJob, ClusterStatus, GetEvents, GetStatus

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
WHY = "no answer from 10.0.0.1:5002 within 3 s"
TIMEOUT = 10.0
AGAIN = TIMEOUT / PROBES_PER_TIMEOUT


def status(cluster: FakeCluster) -> ClusterStatus:
    found = cluster.request(GetStatus())
    assert isinstance(found, ClusterStatus)
    return found


def asked(worker: FakeWorker) -> list[list[int]]:
    """Whom it was told to probe, by message."""
    return [[peer.worker for peer in probe.peers] for probe in worker.got(Probe)]


def answer(cluster: FakeCluster, by: FakeWorker, other: FakeWorker, why: str = "", epoch: int = 0) -> None:
    message = Probed(term=cluster.term, worker=other.worker, epoch=epoch or other.epoch, why=why)
    cluster.send(by, message)


def told(cluster: FakeCluster) -> list[str]:
    return [f"{event.kind}: {event.text}" for event in status(cluster).events]


def place(worker: FakeWorker) -> str:
    return f"worker {worker.worker} ({worker.about.host}:{worker.about.data_port})"


def unlinked(peer: FakeWorker, seconds: float, *jobs: str, why: str = WHY) -> UnlinkedPeer:
    return UnlinkedPeer(worker=peer.worker, epoch=peer.epoch, seconds=seconds, why=why, jobs=list(jobs))


def beat(cluster: FakeCluster, worker: FakeWorker, *missing: UnlinkedPeer, **fields: Any) -> None:
    cluster.heartbeat(worker, unlinked=list(missing), **fields)


def events(cluster: FakeCluster, job: str) -> list[str]:
    found = cluster.request(GetEvents(job=job)).events
    return [f"{event.kind}: {event.text}" for event in found if event.kind.startswith("link ")]


# --- probes -----------------------------------------------------------------------------------------------


def test_the_worker_with_the_lower_id_probes_each_newcomer(cluster: FakeCluster) -> None:
    first, second = cluster.add(), cluster.add(requested_worker=5)
    between = cluster.add(requested_worker=3)
    assert (asked(first), asked(second), asked(between)) == ([[5], [3]], [], [[5]])
    assert {peer.host for probe in first.got(Probe) for peer in probe.peers} == {"10.0.0.1"}


def test_a_newcomer_that_all_can_reach_is_an_event_and_a_column(cluster: FakeCluster) -> None:
    one, two, three = (cluster.add() for _ in range(3))
    assert [worker.reachable for worker in status(cluster).workers] == [0, 0, 0]
    answer(cluster, one, two)
    answer(cluster, one, three)
    assert told(cluster) == [f"worker probed: {place(two)}: reachable: 1 of 2"]
    answer(cluster, two, three)
    assert [worker.reachable for worker in status(cluster).workers] == [2, 2, 2]
    assert told(cluster)[1:] == [f"worker probed: {place(three)}: reachable: 2 of 2"]


def test_one_that_somebody_cannot_reach_is_named_and_refused_nothing(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    one, two = cluster.add(), cluster.add()
    answer(cluster, one, two, WHY)
    text = f"no connection between {place(one)} and {place(two)}: {WHY}"
    assert told(cluster) == [f"worker probed: {place(two)}: reachable: 0 of 1; {text}"]
    assert status(cluster).unreached == [text]
    assert [worker.state for worker in status(cluster).workers] == ["alive", "alive"]
    job = cluster.submit(make_graph())
    assert {task.worker for task in cluster.show(job).tasks} == {1, 2}


def test_a_probe_that_fails_is_repeated_until_it_succeeds(cluster: FakeCluster) -> None:
    one, two = cluster.add(), cluster.add()
    answer(cluster, one, two, WHY)
    for times, again in ((2, AGAIN), (3, 2 * AGAIN)):
        cluster.advance(again - 0.01)
        assert len(asked(one)) == times - 1
        cluster.advance(0.02)
        assert len(asked(one)) == times
        answer(cluster, one, two, WHY if times == 2 else "")
    cluster.advance(10 * TIMEOUT)
    assert len(asked(one)) == 3
    assert told(cluster)[-1] == f"workers linked: {place(one)} and {place(two)} can connect again"
    assert status(cluster).unreached == [] and [each.reachable for each in status(cluster).workers] == [1, 1]


def test_a_probe_without_an_answer_is_repeated(cluster: FakeCluster) -> None:
    one, _ = cluster.add(), cluster.add()
    cluster.advance(ANSWER_SECONDS + 0.1)
    assert asked(one) == [[2], [2]]


def test_a_link_that_is_there_outweighs_probes_that_fail(cluster: FakeCluster) -> None:
    """A firewall lets none but old connections be."""
    one, two = cluster.add(), cluster.add()
    answer(cluster, one, two)
    link = PeerReport(worker=1, epoch=one.epoch, connections=1, local="a:1", remote="b:2")
    beat(cluster, two, peers=[link])
    before = told(cluster)
    for _ in range(4):
        answer(cluster, one, two, WHY)
        beat(cluster, two, peers=[link])
        cluster.advance(AGAIN)
    assert told(cluster) == before and status(cluster).workers[0].reachable == 1
    cluster.advance(TIMEOUT / 2)
    answer(cluster, one, two, WHY)
    text = f"workers apart: no connection between {place(one)} and {place(two)}: {WHY}"
    assert told(cluster) == [*before, text] and status(cluster).workers[0].reachable == 0


def test_pairs_that_can_connect_now_and_then_are_told_of_once_in_link_timeout(cluster: FakeCluster) -> None:
    one, two = cluster.add(), cluster.add()
    answer(cluster, one, two)
    before = len(told(cluster))
    for number in range(20):
        answer(cluster, one, two, "" if number % 2 else WHY)
        cluster.advance(TIMEOUT / 4)
    kinds = [text.split(":")[0] for text in told(cluster)[before:]]
    assert 2 <= len(kinds) <= 5 and kinds == (["workers apart", "workers linked"] * 3)[: len(kinds)]
    answer(cluster, one, two)
    sent = len(asked(one))
    cluster.advance(TIMEOUT)
    if kinds[-1] == "workers apart":
        assert len(asked(one)) > sent, "what is told is to become what is known"
        answer(cluster, one, two)
    assert told(cluster)[-1].startswith("workers linked")


def test_probes_that_no_job_needs_wait_for_each_other(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 7 pairs, 3 begin at once, 2 more in each second, and no more than 4 are under way."""
    monkeypatch.setattr(limits, "PROBES_BURST_MAX", 3)
    monkeypatch.setattr(limits, "PROBES_PER_SECOND_MAX", 2)
    monkeypatch.setattr(limits, "PROBES_UNDER_WAY_MAX", 4)
    monkeypatch.setattr(limits, "PROBES_PER_WORKER_MAX", 2)
    links, registry = Links(1, TIMEOUT), WorkerRegistry(cluster.settings, "3.11", "0")
    workers = {number: registry.register(number, cluster.add().about, 0.0) for number in range(1, 6)}
    for number in workers:
        links.joined(workers[number], [workers[each] for each in range(1, number)], 0.0)

    def due(now: float) -> list[tuple[int, int]]:
        found = links.due(registry, now)
        links.validate(workers)
        return [(by, peer.worker) for by, probe in found for peer in probe.peers]

    def found_out(by: int, worker: int, now: float, why: str = "") -> None:
        epoch = workers[worker].epoch
        links.probed(by, Probed(term=1, worker=worker, epoch=epoch, why=why), now)

    assert due(0.0) == [(1, 2), (1, 3), (2, 3)] and due(0.4) == []
    assert links.next_deadline() == 0.5 and due(0.5) == [(1, 4)]
    assert due(3.0) == [] and links.next_deadline() == ANSWER_SECONDS
    links.ask([(3, 4), (1, 2)], 3.0)
    assert links.next_deadline() == 3.0 and due(3.0) == [(3, 4)], "a job needs it; the other is under way"
    found_out(1, 2, 3.0)
    found_out(1, 3, 3.0, WHY)
    assert due(3.0) == [(2, 4)] and links.next_deadline() == ANSWER_SECONDS
    links.ask([(1, 3), (2, 5)], 3.1)
    assert due(3.1) == [(1, 3), (2, 5)], "one that failed waits for a while, and one was not to be tried"
    links.left(3)
    assert due(3.2) == [(1, 5)]


def test_newcomers_are_tried_with_others_on_as_many_hosts_as_may_be(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PROBES_PER_WORKER_MAX", 3)
    for identity in ("a", "a", "b", "b", "c"):
        cluster.add(identity=identity)
    last = cluster.add(identity="a")
    asked_by = [each.worker for each in cluster.workers.values() if [last.worker] in asked(each)]
    assert asked_by == [3, 4, 5] and status(cluster).workers[-1].tried == 3
    for identity in ("d", "e"):
        last = cluster.add(identity=identity)
    asked_by = [each.worker for each in cluster.workers.values() if [last.worker] in asked(each)]
    assert asked_by == [1, 3, 5], "the first ones of hosts a, b, c and d, spread over all"


def test_what_is_said_of_a_process_that_is_gone_changes_nothing(cluster: FakeCluster) -> None:
    one, two = cluster.add(), cluster.add()
    ignored = cluster.state.ignored
    answer(cluster, one, two, WHY, epoch=two.epoch + 1)
    cluster.lose(two)
    answer(cluster, one, two, WHY)
    assert cluster.state.ignored == ignored + 2 and told(cluster) == []
    again = cluster.add(requested_worker=two.worker)
    assert asked(one) == [[2], [2]]
    answer(cluster, one, again)
    assert status(cluster).workers[-1].reachable == 1


def test_workers_that_are_lost_are_no_reason_to_wait_for_answers(cluster: FakeCluster) -> None:
    one, two, three = (cluster.add() for _ in range(3))
    answer(cluster, one, three)
    cluster.lose(two)
    cluster.advance(0.1)
    assert told(cluster) == [f"worker probed: {place(three)}: reachable: 1 of 1"]
    assert [worker.reachable for worker in status(cluster).workers if worker.state == "alive"] == [1, 1]


def test_a_link_that_is_there_is_as_good_as_a_probe(cluster: FakeCluster) -> None:
    one, two = cluster.add(), cluster.add()
    link = PeerReport(worker=1, epoch=one.epoch, connections=1, local="a:1", remote="b:2")
    beat(cluster, two, peers=[link.model_copy(update={"epoch": 99})])
    beat(cluster, one, peers=[link])
    assert [worker.reachable for worker in status(cluster).workers] == [0, 0], "it is none to another"
    beat(cluster, two, peers=[link])
    assert [worker.reachable for worker in status(cluster).workers] == [1, 1]


def test_the_next_coordinator_probes_anew(cluster: FakeCluster) -> None:
    one, two = cluster.add(), cluster.add()
    answer(cluster, one, two)
    cluster.lose_coordinator()
    cluster.come_back(two)
    assert asked(one) == [[2]]
    cluster.come_back(one)
    assert asked(one) == [[2], [2]]


def test_a_worker_that_has_another_address_is_probed_there(cluster: FakeCluster) -> None:
    from minishuffle.wire.messages import Advertised

    one, two = cluster.add(host="0.0.0.0", seen="127.0.0.1"), cluster.add(host="0.0.0.0", seen="127.0.0.1")
    cluster.send(two, Advertised(term=cluster.term, host="10.0.0.2"))
    assert [probe.peers[0].host for probe in one.got(Probe)] == ["127.0.0.1", "10.0.0.2"]


# --- links that tasks of a job need -----------------------------------------------------------------------


def test_a_link_that_a_job_needs_for_too_long_is_an_event_of_the_job(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, two = pair
    cluster.advance(2 * TIMEOUT)
    beat(cluster, two, unlinked(one, TIMEOUT - 0.5, job))
    assert events(cluster, job) == [] and cluster.show(job).links_broken == []
    cluster.advance(0.5, heartbeats=False)
    beat(cluster, two, unlinked(one, TIMEOUT, job))
    beat(cluster, one, unlinked(two, TIMEOUT, job))
    beat(cluster, two, unlinked(one, TIMEOUT + 0.5, job))
    text = f"no connection between {place(one)} and {place(two)} for 10 s: {WHY}"
    assert events(cluster, job) == [f"link broken: {text}"]
    (link,) = cluster.show(job).links_broken
    assert (link.workers, link.text) == ([1, 2], text)
    (shown,) = cluster.state.snapshot(cluster.now, {}).recoveries
    assert shown.links_broken == 1
    beat(cluster, two)
    assert len(events(cluster, job)) == 1, "the other still waits"
    beat(cluster, one)
    assert events(cluster, job)[1:] == [
        "link restored: worker 1 and worker 2 are connected again, or need no connection any more"
    ]
    assert cluster.show(job).links_broken == []


def test_links_that_break_for_less_are_no_event(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str
) -> None:
    one, two = pair
    cluster.advance(2 * TIMEOUT)
    for _ in range(5):
        beat(cluster, two, unlinked(one, TIMEOUT - 0.5, job))
        beat(cluster, two)
    assert events(cluster, job) == []


def test_time_without_a_coordinator_does_not_count(cluster: FakeCluster, job: str) -> None:
    """The worker with the higher id asks through it for a link."""
    one, two = cluster.workers.values()
    cluster.advance(TIMEOUT)
    cluster.lose_coordinator()
    cluster.come_back(one)
    cluster.come_back(two)
    beat(cluster, two, unlinked(one, 60.0, job))
    assert events(cluster, job) == []
    cluster.advance(TIMEOUT)
    beat(cluster, two, unlinked(one, 70.0, job))
    assert len(events(cluster, job)) == 1


@pytest.mark.parametrize("order", ["lost first", "reported first"])
def test_a_worker_that_is_lost_explains_its_links(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, order: str
) -> None:
    one, two = pair
    cluster.advance(2 * TIMEOUT)
    if order == "lost first":
        cluster.lose(one)
        beat(cluster, two, unlinked(one, TIMEOUT, job))
        assert events(cluster, job) == []
    else:
        beat(cluster, two, unlinked(one, TIMEOUT, job))
        cluster.lose(one)
        assert len(events(cluster, job)) == 1
    assert cluster.show(job).links_broken == []


def test_jobs_that_do_not_need_the_link_hear_nothing_and_one_that_ends_forgets_it(
    cluster: FakeCluster, pair: tuple[FakeWorker, FakeWorker], job: str, make_graph: MakeGraph
) -> None:
    one, two = pair
    other = cluster.submit(make_graph())
    cluster.advance(2 * TIMEOUT)
    beat(cluster, two, unlinked(one, TIMEOUT, job), unlinked(two, TIMEOUT, job))
    assert (len(events(cluster, job)), events(cluster, other)) == (1, [])
    cluster.request(CancelJob(job=job))
    cluster.report_all(job, "canceled")
    assert cluster.show(job).state == "canceled" and cluster.show(job).links_broken == []


def test_heartbeat_timeout_comes_first(
    make_cluster: Callable[..., FakeCluster], make_graph: MakeGraph
) -> None:
    """A worker that says nothing at all is lost, which explains its links."""
    cluster = make_cluster(link_timeout=1.0, heartbeat_timeout=4.0)
    one, two = cluster.add(), cluster.add()
    job = cluster.submit(make_graph(restart_strategy="individual"))
    cluster.advance(5.0)
    beat(cluster, two, unlinked(one, 3.9, job))
    assert events(cluster, job) == []
    beat(cluster, two, unlinked(one, 4.0, job))
    assert len(events(cluster, job)) == 1


def test_a_status_shows_so_many_pairs_and_events(cluster: FakeCluster) -> None:
    workers = [cluster.add() for _ in range(12)]
    for number, by in enumerate(workers):
        for other in workers[number + 1 :]:
            answer(cluster, by, other, WHY)
    assert len(status(cluster).unreached) == limits.CLUSTER_EVENTS_SHOWN
    assert len(status(cluster).events) == 11
