"""When a silent host is looked at, by whom, and what follows; every order of what is heard and seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from minishuffle.coordinator.silenthosts import (
    LOOKS,
    OWN,
    HostSuspicion,
    HostVerdict,
    LookAtHost,
    SilentHosts,
)
from minishuffle.coordinator.workers import Worker
from minishuffle.ids import Address
from minishuffle.wire.registration import Register

HERE = "coordinator"
SECONDS = 0.6


def make(number: int, identity: str, host: str | None = None, seen: str = "") -> Worker:
    about = Register(
        host=host if host is not None else f"10.0.0.{number}",
        identity=identity,
        seen=seen,
        data_port=5000 + number,
        metrics_port=6000 + number,
        pid=40,
        slots=2,
        python="3.11",
        segments=8,
        segment_bytes=4096,
    )
    return Worker(number, number, number, about, 0.0)


@dataclass
class Cluster:
    """Worker 1 is beside the coordinator, 2 and 3 share a host, 4 and 5 have one each."""

    workers: dict[int, Worker] = field(
        default_factory=lambda: {
            number: make(number, identity)
            for number, identity in ((1, HERE), (2, "a"), (3, "a"), (4, "b"), (5, "c"))
        }
    )
    hosts: SilentHosts = field(default_factory=lambda: SilentHosts(1, HERE, SECONDS))
    now: float = 0.0
    suspected: list[Worker] = field(default_factory=list)
    """By the last step."""

    def __post_init__(self) -> None:
        self.hosts.joined(0.0)

    def hear(self, *numbers: int) -> None:
        for number in numbers:
            self.workers[number].last_seen_at = self.now

    def hear_all_but(self, *numbers: int) -> None:
        self.hear(*(self.workers.keys() - set(numbers)))

    def at(self, now: float) -> tuple[list[LookAtHost], list[HostVerdict]]:
        self.now = now
        return self.due()

    def due(self) -> tuple[list[LookAtHost], list[HostVerdict]]:
        found = self.hosts.due(self.workers.values(), self.now)
        self.hosts.validate(self.now)
        self.suspected = [
            worker for each in found if isinstance(each, HostSuspicion) for worker in each.workers
        ]
        return (
            [each for each in found if isinstance(each, LookAtHost)],
            [each for each in found if isinstance(each, HostVerdict)],
        )

    def answer(self, look: LookAtHost, answer: bool | None) -> tuple[list[LookAtHost], list[HostVerdict]]:
        self.hosts.answered(look.observer, look.look.ticket, answer)
        return self.due()

    def looks_of_all(self) -> list[LookAtHost]:
        """Those that a verdict on host ``a`` needs, once the coordinator's own glance has seen nothing."""
        self.at(0.28)
        self.hear_all_but(2, 3)
        (glance,), _ = self.at(0.30)
        self.now = 0.35
        looks, verdicts = self.answer(glance, False)
        assert [worker.worker for worker in self.suspected] == [2, 3]
        assert verdicts == []
        return looks


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_hosts_are_looked_at_in_the_order_in_which_they_came() -> None:
    """So that a simulation is the same in each process, whatever strings hash to there."""
    cluster = Cluster({number: make(number, f"host {number}") for number in range(1, 21)})
    looks, _ = cluster.at(SECONDS)
    addresses = [look.look.addresses[0] for look in looks]
    assert addresses == [f"10.0.0.{number}:{5000 + number}" for number in range(1, 20)], "one has to observe"


def test_a_host_that_is_heard_is_not_looked_at(cluster: Cluster) -> None:
    for step in range(1, 50):
        assert cluster.at(step * 0.29) == ([], [])
        cluster.hear(1, 2, 4, 5)


def test_the_coordinator_glances_first(cluster: Cluster) -> None:
    cluster.at(0.1)
    cluster.hear_all_but(2)
    cluster.now = 0.2
    cluster.hear(3)  # One process is enough.
    cluster.hear(4, 5)
    assert cluster.hosts.next_deadline() == pytest.approx(0.3)
    assert cluster.at(0.49) == ([], [])
    cluster.hear(4, 5)
    (look,), _ = cluster.at(0.5)
    assert (look.observer, look.look.times) == (OWN, 1)
    assert look.look.addresses == [
        "10.0.0.2:5002",
        "10.0.0.2:6002",
        "10.0.0.3:5003",
        "10.0.0.3:6003",
    ]
    assert cluster.at(0.54) == ([], []), "one look at a time"


def test_an_answer_gives_the_host_as_much_patience_again(cluster: Cluster) -> None:
    cluster.at(0.29)
    cluster.hear_all_but(2, 3)
    (look,), _ = cluster.at(0.3)
    cluster.now = 0.31
    assert cluster.answer(look, True) == ([], [])
    cluster.hear_all_but(2, 3)
    assert cluster.hosts.next_deadline() == pytest.approx(0.59, abs=0.03)
    assert cluster.at(0.60) == ([], [])
    cluster.hear_all_but(2, 3)
    (again,), _ = cluster.at(0.62)
    assert again.look.ticket > look.look.ticket


def test_then_all_look_three_times(cluster: Cluster) -> None:
    looks = cluster.looks_of_all()
    assert {look.observer for look in looks} == {OWN, 4, 5}, "neither of its host, nor beside the coordinator"
    assert {look.look.times for look in looks} == {LOOKS}
    assert len({look.look.ticket for look in looks}) == 1


OBSERVED = [True, False, None]


@pytest.mark.parametrize(("own", "first", "second"), list(product(OBSERVED, repeat=3)))
def test_two_have_to_see_silence_and_nobody_an_answer(
    cluster: Cluster, own: bool | None, first: bool | None, second: bool | None
) -> None:
    looks = {look.observer: look for look in cluster.looks_of_all()}
    cluster.now = 0.601
    cluster.hear_all_but(2, 3)
    verdicts = []
    for observer, answer in ((4, first), (5, second), (OWN, own)):
        verdicts += cluster.answer(looks[observer], answer)[1]
    lost = own is False and False in (first, second) and True not in (first, second)
    assert bool(verdicts) is lost
    if lost:
        (verdict,) = verdicts
        assert [worker.worker for worker in verdict.workers] == [2, 3]
        assert (
            "nothing was heard of it for 0.60 s, and worker 4 and worker 5 and the coordinator" in verdict.why
        )


def test_whoever_does_not_report_is_not_waited_for(cluster: Cluster) -> None:
    looks = {look.observer: look for look in cluster.looks_of_all()}
    cluster.now = 0.601
    cluster.hear_all_but(2, 3)
    assert cluster.answer(looks[OWN], False) == ([], [])
    assert cluster.answer(looks[4], False) == ([], []), "worker 5 may have an answer"
    _, verdicts = cluster.at(0.80)
    assert [[worker.worker for worker in verdict.workers] for verdict in verdicts] == [[2, 3]]


def test_a_coordinator_that_is_cut_off_itself_gives_no_verdict(cluster: Cluster) -> None:
    for look in cluster.looks_of_all():
        if look.observer == OWN:
            cluster.answer(look, False)
    for step in range(8, 100):
        looks, verdicts = cluster.at(step * 0.1)
        assert verdicts == []
        for look in looks:
            if look.observer == OWN:
                assert cluster.answer(look, False)[1] == []


@pytest.mark.parametrize("heard", [2, 3])
def test_a_process_that_is_heard_meanwhile_ends_it(cluster: Cluster, heard: int) -> None:
    looks = cluster.looks_of_all()
    cluster.now = 0.5
    cluster.hear(heard)
    cluster.now = 0.61
    for look in looks:
        assert cluster.answer(look, False)[1] == []
    assert cluster.hosts.next_deadline() == pytest.approx(0.8)


def test_what_an_earlier_look_has_seen_does_not_count(cluster: Cluster) -> None:
    (glance,) = [look for look in cluster.looks_of_all() if look.observer == OWN]
    old = LookAtHost(OWN, glance.look.model_copy(update={"ticket": glance.look.ticket - 1}))
    assert cluster.answer(old, True) == ([], [])
    _, verdicts = cluster.answer(LookAtHost(1, glance.look), False)
    assert verdicts == [], "worker 1 was not asked"


def test_a_glance_that_was_held_up_is_taken_again(cluster: Cluster) -> None:
    cluster.at(0.29)
    cluster.hear_all_but(2, 3)
    (glance,), _ = cluster.at(0.30)
    cluster.now = 0.7
    cluster.hear_all_but(2, 3)
    assert cluster.answer(glance, None) == ([], [])
    cluster.hear_all_but(2, 3)
    (again,), _ = cluster.at(0.76)
    assert again.observer == OWN


@pytest.mark.parametrize(
    "identities", [[HERE, "a"], ["a", "a", "b"][:2], [HERE, "a", "a"], [HERE, HERE], ["", "a"], [HERE, ""]]
)
def test_fewer_than_two_observers_look_at_nobody(identities: list[str]) -> None:
    workers = {number: make(number, identity) for number, identity in enumerate(identities, 1)}
    cluster = Cluster(workers)
    for step in range(100):
        assert cluster.at(step * 0.1) == ([], [])
        cluster.hear(1)


def test_off_is_off() -> None:
    cluster = Cluster(hosts=SilentHosts(1, HERE, None))
    assert cluster.at(10.0) == ([], [])
    assert cluster.hosts.next_deadline() is None


@pytest.mark.parametrize(
    ("host", "seen", "dialed"),
    [
        ("10.0.0.9", "10.0.0.7", "10.0.0.9"),
        ("node.example", "10.0.0.7", "10.0.0.7"),
        ("127.0.0.1", "10.0.0.7", "10.0.0.7"),
        ("fd00::9", "", "fd00::9"),
        ("node.example", "", ""),
        ("127.0.0.1", "127.0.0.1", ""),
    ],
)
def test_only_numbers_are_dialed(host: str, seen: str, dialed: str) -> None:
    workers = {1: make(1, "a", host=host, seen=seen), 2: make(2, "b")}
    cluster = Cluster(workers)
    cluster.at(0.29)
    cluster.hear(2)
    looks, _ = cluster.at(0.31)
    assert [Address.parse(each).host for look in looks for each in look.look.addresses] == [dialed] * (
        2 if dialed else 0
    )


class AnyOrder(RuleBasedStateMachine):
    """Hosts are cut off and come back, are stopped and busy; observers are slow and held up."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.asked: list[LookAtHost] = []
        self.dead: set[str] = set()
        self.lost: set[str] = set()

    def note(self, found: tuple[list[LookAtHost], list[HostVerdict]]) -> None:
        looks, verdicts = found
        self.asked += looks
        for verdict in verdicts:
            (host,) = {worker.about.identity for worker in verdict.workers}
            assert host in self.dead, "its kernel has answered all along"
            assert host != HERE
            last_seen_at = max(worker.last_seen_at for worker in verdict.workers)
            assert self.cluster.now - last_seen_at >= SECONDS - 1e-9
            self.lost.add(host)
            for worker in verdict.workers:
                del self.cluster.workers[worker.worker]

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.1, 0.25, 0.3, 0.6, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.note(self.cluster.at(self.cluster.now + seconds))

    @rule(number=st.integers(1, 5))
    def heartbeat(self, number: int) -> None:
        worker = self.cluster.workers.get(number)
        if worker is not None and worker.about.identity not in self.dead:
            self.cluster.hear(number)

    @rule(host=st.sampled_from("abc"))
    def cut(self, host: str) -> None:
        self.dead.add(host)

    @rule(data=st.data())
    def observer_reports(self, data: st.DataObject) -> None:
        """A dead host is silent to all; one that lives has an answer for who looks in time, or is held up."""
        if not self.asked:
            return
        look = data.draw(st.sampled_from(self.asked))
        self.asked.remove(look)
        observer = self.cluster.workers.get(look.observer)
        if look.observer != OWN and (observer is None or observer.about.identity in self.dead):
            return
        port = Address.parse(look.look.addresses[0]).port
        seen = {5002: "a", 5003: "a", 5004: "b", 5005: "c"}[port]
        answer = data.draw(st.sampled_from([None, False] if seen in self.dead else [None, True]))
        if observer is not None:
            self.cluster.hear(observer.worker)
        self.note(self.cluster.answer(look, answer))

    @invariant()
    def one_set_of_books(self) -> None:
        self.cluster.hosts.validate(self.cluster.now)


TestAnyOrder = AnyOrder.TestCase
