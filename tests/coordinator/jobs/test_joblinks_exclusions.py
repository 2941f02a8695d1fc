"""Workers that others of a job cannot reach: who is excluded from it, what moves, and who is let in again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.coordinator.links import ANSWER_SECONDS
from minishuffle.errors import ResourceExhausted
from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import (
    Heartbeat,
    Probe,
    Probed,
    ReleaseJob,
    Shutdown,
    UnlinkedPeer,
    WorkerReport,
)
from minishuffle.wire.requests import CancelJob, DrainWorker, GetEvents, GetStatus

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
TIMEOUT = 10.0
WHY = "no answer within 3 s"


class Network:
    """Answers the probes of workers as what is cut says, and has them report links that their jobs need.

    Every worker of a job needs a link to each other one.
    """

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.cut: dict[frozenset[int], float] = {}
        """Since when, by pair of workers."""
        self._read: dict[int, int] = {}

    def between(self, one: FakeWorker, *others: FakeWorker) -> None:
        for other in others:
            self.cut[frozenset((one.worker, other.worker))] = self.cluster.now

    def mend(self) -> None:
        self.cut.clear()

    def answer(self) -> None:
        """Every probe that came since."""
        for worker in list(self.cluster.workers.values()):
            for message in worker.inbox[self._read.get(worker.link, 0) :]:
                for peer in message.peers if isinstance(message, Probe) else ():
                    why = WHY if frozenset((worker.worker, peer.worker)) in self.cut else ""
                    probed = Probed(term=self.cluster.term, worker=peer.worker, epoch=peer.epoch, why=why)
                    self.cluster.send(worker, probed)
            self._read[worker.link] = len(worker.inbox)

    def beat(self) -> None:
        """Every worker says what it misses."""
        there = {worker.worker: worker for worker in self.cluster.workers.values()}
        for number, worker in sorted(there.items()):
            missing = []
            for pair, since in self.cut.items():
                (other,) = pair - {number} if number in pair else (0,)
                if other in there:
                    jobs = sorted({key[0] for key in worker.tasks} & {key[0] for key in there[other].tasks})
                    seconds = self.cluster.now - since
                    fields: dict[str, Any] = {"worker": other, "epoch": there[other].epoch, "why": WHY}
                    missing += [UnlinkedPeer(seconds=seconds, jobs=jobs, **fields)] if jobs else []
            beat = Heartbeat(
                term=self.cluster.term,
                worker=number,
                epoch=worker.epoch,
                report=WorkerReport(),
                tasks=[],
                peers=[],
                unlinked=missing,
            )
            self.cluster.send(worker, beat)

    def pass_(self, seconds: float) -> None:
        """Let time pass."""
        end = self.cluster.now + seconds
        while self.cluster.now < end:
            self.cluster.advance(min(0.5, end - self.cluster.now), heartbeats=False)
            self.answer()
            self.beat()
            self.answer()


@pytest.fixture
def network(cluster: FakeCluster) -> Network:
    return Network(cluster)


def start(cluster: FakeCluster, graph: JobGraph) -> str:
    job = cluster.submit(graph)
    cluster.report_all(job, "running")
    return job


def kinds(cluster: FakeCluster, job: str, *kinds: str) -> list[tuple[str, int]]:
    wanted = kinds or ("worker excluded", "worker readmitted")
    return [
        (event.kind, event.worker)
        for event in cluster.request(GetEvents(job=job)).events
        if event.kind in wanted
    ]


def placed(cluster: FakeCluster, job: str) -> list[tuple[int, int]]:
    """Attempt and worker of each task."""
    return [(task.attempt, task.worker) for task in cluster.show(job).tasks]


def add(cluster: FakeCluster, count: int, **fields: Any) -> list[FakeWorker]:
    return [cluster.add(**fields) for _ in range(count)]


def test_the_one_that_most_others_cannot_reach_is_excluded_and_only_its_subtasks_move(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    workers = add(cluster, 4)
    job = start(cluster, make_graph(4, 4, restart_strategy="individual"))
    network.pass_(1.0)
    bad = workers[0]
    network.between(bad, workers[1], workers[3])
    network.pass_(TIMEOUT - 0.5)
    assert kinds(cluster, job, "link broken") == [], "links broken for less are repaired, and nothing follows"
    network.pass_(1.0)
    assert kinds(cluster, job) == [("worker excluded", bad.worker)]
    assert len(kinds(cluster, job, "link broken")) == 2
    others = {2: (1, 2), 3: (1, 3), 4: (1, 4)}
    by_index = [placed(cluster, job)[index::4] for index in range(4)]
    assert by_index[1:] == [[others[2]] * 2, [others[3]] * 2, [others[4]] * 2]
    assert {attempt for attempt, _ in by_index[0]} == {2} and {at for _, at in by_index[0]} <= {2, 3, 4}
    (released,) = (message for message in bad.got(ReleaseJob) if message.job == job)
    assert {(each.operator, each.index, each.attempt) for each in released.attempts} == {(0, 0, 1), (1, 0, 1)}
    assert not bad.tasks
    assert [worker.state for worker in cluster.request(GetStatus()).workers] == ["alive"] * 4
    (link,) = cluster.show(job).links_broken
    assert (link.excluded, bad.worker in link.workers) == (bad.worker, True)
    (shown,) = cluster.state.snapshot(cluster.now, {}).recoveries
    assert shown.links_broken == 1
    (event,) = (each for each in cluster.request(GetEvents(job=job)).events if each.kind == "worker excluded")
    assert "worker 1 (10.0.0.1:5001)" in event.text and WHY in event.text
    assert any(f"worker {other} (10.0.0.1:500{other})" in event.text for other in (2, 4))


@pytest.mark.parametrize("fewer", [True, False], ids=["fewer slots", "later registered"])
def test_of_two_that_are_equal_the_one_with_fewer_slots_or_the_later_one_is_excluded(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph, fewer: bool
) -> None:
    one = cluster.add(slots=1 if fewer else 3)
    other = cluster.add(slots=4)
    job = start(cluster, make_graph(3 if fewer else 2, 1, restart_strategy="individual"))
    network.between(one, other)
    network.pass_(TIMEOUT + ANSWER_SECONDS)
    excluded = one if fewer else other
    assert kinds(cluster, job) == [("worker excluded", excluded.worker)]
    stays = other if fewer else one
    assert {worker for _, worker in placed(cluster, job)} == {stays.worker}


def test_other_jobs_are_untouched_and_new_ones_get_slots_there(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    one, other = add(cluster, 2, slots=4)
    alone = start(cluster, make_graph(1, 1, restart_strategy="individual"))
    job = start(cluster, make_graph(2, 2, restart_strategy="individual"))
    before = placed(cluster, alone)
    network.between(one, other)
    network.pass_(TIMEOUT + 1)
    assert len(kinds(cluster, job)) == 1 and kinds(cluster, alone) == []
    assert placed(cluster, alone) == before
    later = start(cluster, make_graph(2, 2, restart_strategy="individual"))
    assert {worker for _, worker in placed(cluster, later)} == {1, 2}


def test_it_is_let_in_again_once_links_to_all_could_be_made_for_so_long(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    one, two, three = add(cluster, 3)
    job = start(cluster, make_graph(3, 3, restart_strategy="individual"))
    network.between(three, one)
    network.between(three, two)
    network.pass_(TIMEOUT + 1)
    assert kinds(cluster, job) == [("worker excluded", 3)]
    network.mend()
    network.between(three, two)
    network.pass_(2 * TIMEOUT)
    assert len(kinds(cluster, job)) == 1, "one of them cannot reach it"
    network.mend()
    network.pass_(TIMEOUT / 2)
    network.between(three, one)
    network.pass_(TIMEOUT)
    network.mend()
    network.pass_(TIMEOUT - 1)
    assert len(kinds(cluster, job)) == 1, "not for long enough"
    network.pass_(2 + TIMEOUT / 2)
    assert kinds(cluster, job)[1:] == [("worker readmitted", 3)]
    probes = len(one.got(Probe))
    network.pass_(2 * TIMEOUT)
    assert len(one.got(Probe)) == probes, "nobody watches it any more"
    cluster.lose(two)
    assert {worker for _, worker in placed(cluster, job)} == {1, 3}


def test_an_excluded_worker_takes_no_slots_of_the_job_until_then(
    make_cluster: Callable[..., FakeCluster], make_graph: MakeGraph
) -> None:
    cluster = make_cluster(slot_timeout=5.0)
    network = Network(cluster)
    workers = add(cluster, 3, slots=2)
    job = start(cluster, make_graph(3, 3, restart_strategy="individual"))
    network.between(workers[2], workers[0], workers[1])
    network.pass_(TIMEOUT + 1)
    assert kinds(cluster, job) == [("worker excluded", 3)]
    cluster.report_all(job, "running", attempt=2)
    cluster.lose(workers[0])
    assert 3 not in {task.worker for task in cluster.show(job).tasks if task.state in ("created", "running")}
    fresh = cluster.add()
    assert fresh.worker in {worker for _, worker in placed(cluster, job)}


def test_if_no_other_fits_the_job_fails_and_names_both(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    one, other = add(cluster, 2)
    job = start(cluster, make_graph(4, 4, restart_strategy="individual"))
    network.between(one, other)
    network.pass_(TIMEOUT + 1)
    info = cluster.show(job)
    assert info.state == "failing"
    cause = info.causes[0]
    assert cause.code == ResourceExhausted.code
    assert all(
        f"worker {each.worker} (10.0.0.1:{each.about.data_port})" in cause.text for each in (one, other)
    )
    assert "finds no slot on another worker" in cause.text
    for worker in (one, other):
        for key in list(worker.tasks):
            cluster.report(worker, key, "canceled", attempt=worker.tasks[key].attempt)
    assert cluster.show(job).state == "failed"
    assert one.tasks == {} and other.tasks == {}


def test_a_job_that_does_not_restart_fails_and_names_both(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    one, other = add(cluster, 2)
    job = start(cluster, make_graph(2, 2))
    network.between(one, other)
    network.pass_(TIMEOUT + 1)
    info = cluster.show(job)
    assert info.state == "failing"
    assert all(f"(10.0.0.1:{each.about.data_port})" in info.causes[0].text for each in (one, other))


def test_it_moves_once_in_link_timeout_and_within_the_limit_of_failures(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    """The next one is cut from the others at once, and so on."""
    workers = add(cluster, 5, slots=4)
    job = start(cluster, make_graph(2, 2, restart_strategy="individual", restart_failures_max=2))
    moved_at = []
    for _ in range(2):
        mine = placed(cluster, job)[0][1]
        bad = next(each for each in workers if each.worker == mine)
        network.between(bad, *(each for each in workers if each is not bad))
        since = [(TIMEOUT, pair) for pair in network.cut]
        network.cut = {pair: cluster.now - seconds for seconds, pair in since}
        before = len(kinds(cluster, job))
        for _ in range(80):
            network.pass_(0.5)
            if len(kinds(cluster, job)) > before or cluster.show(job).state == "failing":
                break
        moved_at.append(cluster.now)
        cluster.report_all(job, "running", attempt=2)
        if cluster.show(job).state == "failing":
            break
    assert moved_at[1] - moved_at[0] >= TIMEOUT
    info = cluster.show(job)
    assert info.state == "failing" and "restart_failures_max" in " ".join(each.text for each in info.causes)


def test_a_link_that_can_be_made_after_all_excludes_nobody(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    """A probe succeeds, while tasks still wait: their links are about to be repaired."""
    one, other = add(cluster, 2)
    job = start(cluster, make_graph(2, 2, restart_strategy="individual"))
    network.pass_(1.0)
    missing = UnlinkedPeer(worker=2, epoch=other.epoch, seconds=TIMEOUT, why=WHY, jobs=[job])
    cluster.advance(2 * TIMEOUT)
    for _ in range(20):
        cluster.heartbeat(one, unlinked=[missing])
        network.answer()
        cluster.advance(0.5, heartbeats=False)
    assert kinds(cluster, job) == [] and len(kinds(cluster, job, "link broken")) == 1


@pytest.mark.parametrize("order", ["lost before", "lost after"])
def test_a_worker_that_is_lost_is_excluded_from_nothing(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph, order: str
) -> None:
    one, two, three = add(cluster, 3, slots=3)
    job = start(cluster, make_graph(3, 3, restart_strategy="individual"))
    network.between(three, one, two)
    network.pass_(TIMEOUT - 1 if order == "lost before" else TIMEOUT + 1)
    cluster.lose(three)
    network.pass_(2 * TIMEOUT)
    assert len(kinds(cluster, job)) == (0 if order == "lost before" else 1)
    (found,) = (each for each in cluster.state._jobs.values() if each.id == job)
    assert found.links.excluded == {} and found.links.broken == {}
    again = cluster.add(requested_worker=3, slots=3)
    network.mend()
    cluster.report_all(job, "running", attempt=2)
    cluster.lose(two)
    cluster.lose(one)
    assert {worker for _, worker in placed(cluster, job)} == {again.worker}


def test_the_next_coordinator_knows_who_is_excluded_and_lets_it_in(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    workers = add(cluster, 3)
    job = start(cluster, make_graph(3, 3, restart_strategy="individual"))
    network.between(workers[2], *workers[:2])
    network.pass_(TIMEOUT + 1)
    cluster.report_all(job, "running", attempt=2)
    after = placed(cluster, job)
    cluster.lose_coordinator()
    cluster.check_journal()
    for worker in workers:
        cluster.come_back(worker)
    assert placed(cluster, job) == after
    network.pass_(TIMEOUT)
    assert len(kinds(cluster, job)) == 1
    network.mend()
    network.pass_(2 * TIMEOUT)
    assert kinds(cluster, job) == [("worker excluded", 3), ("worker readmitted", 3)]


def test_a_coordinator_that_is_lost_before_the_judgement_leaves_it_to_the_next(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    workers = add(cluster, 3)
    job = start(cluster, make_graph(3, 3, restart_strategy="individual"))
    network.between(workers[2], *workers[:2])
    network.pass_(TIMEOUT - 1)
    cluster.lose_coordinator()
    for worker in workers:
        cluster.come_back(worker)
    network.pass_(TIMEOUT - 1)
    assert kinds(cluster, job) == []
    network.pass_(2)
    assert kinds(cluster, job) == [("worker excluded", 3)]


def test_a_release_that_is_lost_with_a_link_is_made_good(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    """The excluded worker comes back over a new control link with what it has."""
    workers = add(cluster, 3)
    job = start(cluster, make_graph(3, 3, restart_strategy="individual"))
    had = dict(workers[2].tasks)
    network.between(workers[2], *workers[:2])
    network.pass_(TIMEOUT + 1)
    workers[2].tasks.update(had)
    cluster.break_link(workers[2])
    cluster.come_back(workers[2])
    assert workers[2].tasks == {}
    assert kinds(cluster, job) == [("worker excluded", 3)]


def test_it_is_told_when_the_job_ends(cluster: FakeCluster, network: Network, make_graph: MakeGraph) -> None:
    workers = add(cluster, 3)
    job = start(cluster, make_graph(3, 3, restart_strategy="individual"))
    network.between(workers[2], *workers[:2])
    network.pass_(TIMEOUT + 1)
    cluster.request(CancelJob(job=job))
    for worker in workers[:2]:
        for key in list(worker.tasks):
            cluster.report(worker, key, "canceled", attempt=worker.tasks[key].attempt)
    assert cluster.show(job).state == "canceled"
    assert ReleaseJob(term=cluster.term, job=job) in workers[2].inbox


@pytest.mark.parametrize("strategy", ["region", "full"])
def test_with_other_strategies_the_others_restart_with_its_subtasks(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph, strategy: str
) -> None:
    workers = add(cluster, 3)
    job = start(cluster, make_graph(3, 3, restart_strategy=strategy))
    network.between(workers[2], *workers[:2])
    network.pass_(TIMEOUT + 1)
    for worker in workers[:2]:
        for key in list(worker.tasks):
            cluster.report(worker, key, "canceled", attempt=1)
    assert {attempt for attempt, _ in placed(cluster, job)} == {2}
    assert {worker for _, worker in placed(cluster, job)} == {1, 2}


def test_it_is_let_in_again_when_the_one_that_could_not_reach_it_is_lost(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    """Of two that are left nobody is probed any more."""
    one, other = add(cluster, 2, slots=2)
    job = start(cluster, make_graph(2, 2, restart_strategy="individual"))
    network.between(one, other)
    network.pass_(TIMEOUT + 1)
    ((_, excluded),) = kinds(cluster, job)
    lost, left = (one, other) if excluded == other.worker else (other, one)
    cluster.report_all(job, "running", attempt=2)
    cluster.lose(lost)
    assert kinds(cluster, job)[1:] == [("worker readmitted", left.worker)]
    events = cluster.request(GetEvents(job=job)).events
    (text,) = (event.text for event in events if event.kind == "worker readmitted")
    assert text == f"worker {left.worker} may run tasks of this job again: no other has any"
    assert {worker for _, worker in placed(cluster, job)} == {left.worker}
    assert cluster.show(job).state in ("created", "running")


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_job_without_a_slot_waits_for_a_worker_that_is_about_to_come_back(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph, comes_back: bool
) -> None:
    one, two = add(cluster, 2, slots=1)
    job = start(cluster, make_graph(2, 2, restart_strategy="individual"))
    third = cluster.add(slots=1)
    network.between(one, two)
    network.pass_(TIMEOUT - 1)
    link = third.link
    cluster.break_link(third)
    cluster.do(cluster.state.process_found(link, cluster.now))
    while not kinds(cluster, job):
        network.pass_(0.5)
    ((_, excluded),) = kinds(cluster, job)
    assert cluster.show(job).state in ("created", "running")
    if comes_back:
        cluster.come_back(third)
    else:
        network.pass_(4.0)
        assert cluster.show(job).state in ("created", "running"), "it has waited, and does so on"
        third = cluster.add(slots=1)
    (stayed,) = {one.worker, two.worker} - {excluded}
    assert {worker for _, worker in placed(cluster, job)} == {stayed, third.worker}


def test_a_worker_that_only_keeps_what_others_have_yet_to_read_is_needed_as_well(
    cluster: FakeCluster, network: Network, make_graph: MakeGraph
) -> None:
    """Its slot has moved, since it is to leave: what it keeps is made anew if nobody can connect to it."""
    one, two = add(cluster, 2)
    job = start(cluster, make_graph(2, 2, restart_strategy="individual"))
    cluster.report(one, (job, 0, 0), "finished")
    cluster.request(DrainWorker(worker=one.worker))
    cluster.report(one, (job, 1, 0), "canceled")
    cluster.report(two, (job, 1, 0), "running", attempt=2)
    assert placed(cluster, job) == [(1, 1), (1, 2), (2, 2), (1, 2)]
    network.between(one, two)
    network.pass_(TIMEOUT + ANSWER_SECONDS)
    assert kinds(cluster, job, "link broken", "worker excluded")[-1] == ("worker excluded", one.worker)
    assert len(kinds(cluster, job, "link broken")) == 1, "what it does not keep any more nobody waits for"
    assert placed(cluster, job) == [(2, 2), (1, 2), (2, 2), (1, 2)]
    assert one.got(Shutdown), "it leaves: nothing of it is needed any more"
