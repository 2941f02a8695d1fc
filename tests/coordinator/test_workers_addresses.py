"""Which address each worker advertises, and what those get that other hosts cannot reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.plan.graph import JobGraph
from minishuffle.wire.messages import Advertise, Advertised, DeployTasks, Dial
from minishuffle.wire.requests import GetStatus, SubmitJob

if TYPE_CHECKING:
    from conftest import FakeCluster, FakeWorker

MakeGraph = Callable[..., JobGraph]
NEAR: dict[str, Any] = {"host": "0.0.0.0", "identity": "a", "seen": "127.0.0.1"}
"""It listens on all addresses of the coordinator's host."""
SHUT: dict[str, Any] = {"host": "127.0.0.1", "identity": "a", "seen": "127.0.0.1"}
"""It listens on loopback alone."""
FAR: dict[str, Any] = {"host": "0.0.0.0", "identity": "b", "seen": "10.0.0.2"}


def hosts(cluster: FakeCluster) -> list[str]:
    return [worker.host for worker in cluster.request(GetStatus()).workers]


def confined(cluster: FakeCluster) -> list[bool]:
    return [worker.confined for worker in cluster.request(GetStatus()).workers]


def toward(worker: FakeWorker) -> list[str]:
    return [message.toward for message in worker.got(Advertise)]


def answer(cluster: FakeCluster, worker: FakeWorker, host: str) -> None:
    cluster.send(worker, Advertised(term=cluster.term, host=host))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"host": "0.0.0.0"}, "cannot advertise '', which stands for all"),
        ({"host": "0.0.0.0", "advertise": "::"}, "cannot advertise '::', which stands for all"),
        (
            {"host": "10.0.0.1", "advertise": "239.1.2.3"},
            "cannot advertise '239.1.2.3', which is that of a group",
        ),
        ({"data_port": 0}, "cannot advertise port 0"),
    ],
)
def test_what_leads_nowhere_is_refused(cluster: FakeCluster, fields: dict[str, Any], problem: str) -> None:
    worker = cluster.add(**fields)
    assert problem in cluster.closed[worker.link]
    assert not worker.worker and cluster.request(GetStatus()).workers == []


def test_what_is_advertised_is_what_everybody_is_told(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    cluster.add(**FAR), cluster.add(host="10.0.0.3", advertise="node-3", identity="c")
    assert hosts(cluster) == ["10.0.0.2", "node-3"]
    cluster.submit(make_graph())
    deployed = [message for _, message in cluster.sent if isinstance(message, DeployTasks)]
    assert [address.host for address in deployed[0].workers] == ["10.0.0.2", "node-3"]
    assert [entry.host for entry in cluster.state.snapshot(cluster.now, {}).workers] == hosts(cluster)


def test_loopback_serves_as_long_as_all_are_on_one_host(cluster: FakeCluster, make_graph: MakeGraph) -> None:
    near = [cluster.add(**NEAR), cluster.add(**SHUT)]
    assert hosts(cluster) == ["127.0.0.1", "127.0.0.1"]
    cluster.submit(make_graph())
    assert [toward(worker) for worker in near] == [[], []]


def test_those_on_loopback_find_an_address_when_another_host_comes(
    cluster: FakeCluster, make_graph: MakeGraph
) -> None:
    near, shut, standby = cluster.add(**NEAR), cluster.add(**SHUT), cluster.add(**NEAR, standby=True)
    cluster.submit(make_graph(1, 1))
    far = cluster.add(**FAR)
    assert [toward(each) for each in (near, shut, standby, far)] == [["10.0.0.2"]] * 3 + [[]]
    answer(cluster, near, "10.0.0.1")
    assert hosts(cluster) == ["10.0.0.1", "127.0.0.1", "127.0.0.1", "10.0.0.2"]
    assert [dial.peer.host for dial in standby.got(Dial)] == ["10.0.0.2", "10.0.0.1"]
    answer(cluster, shut, "")
    answer(cluster, standby, "127.0.0.2")
    assert confined(cluster) == [False, True, True, False]


def test_one_that_comes_to_another_host_looks_for_its_own_address(cluster: FakeCluster) -> None:
    cluster.add(**FAR)
    near = cluster.add(**NEAR)
    assert toward(near) == ["10.0.0.2"]
    far = cluster.add(host="127.0.0.1", identity="c", seen="10.0.0.3")
    assert (toward(near), toward(far)) == (["10.0.0.2", "10.0.0.3"], ["10.0.0.2"])


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
def test_a_job_gets_slots_of_workers_that_can_link(
    cluster: FakeCluster, make_graph: MakeGraph, order: list[int]
) -> None:
    kinds = [SHUT, SHUT, FAR]
    added = {number: cluster.add(**kinds[number]) for number in order}
    job = cluster.submit(make_graph(4, 4))
    assert {task.worker for task in cluster.show(job).tasks} == {added[0].worker, added[1].worker}
    code, text = cluster.refusal(SubmitJob(name="wide", python="3.11", graph=make_graph(6, 6).to_bytes()))
    assert "job needs 6 slots" in text and "(4 more cannot be had together" in text
    assert all(f"worker {added[number].worker} (127.0.0.1:" in text for number in (0, 1))
    small = cluster.submit(make_graph(2, 2))
    assert {task.worker for task in cluster.show(small).tasks} == {added[2].worker}


def test_lost_slots_go_to_workers_that_can_link_with_the_others(
    make_cluster: Callable[..., FakeCluster], make_graph: MakeGraph
) -> None:
    cluster = make_cluster(slot_timeout=5.0)
    one, other = cluster.add(**SHUT, slots=1), cluster.add(**SHUT, slots=1)
    job = cluster.submit(make_graph(restart_strategy="individual"))
    cluster.report_all(job, "running")
    cluster.add(**FAR)
    cluster.lose(other)
    assert {task.state for task in cluster.show(job).tasks} == {"running", "waiting for a slot"}
    there = cluster.add(**NEAR)
    assert {task.worker for task in cluster.show(job).tasks} == {one.worker, there.worker}


def test_an_address_outlives_the_coordinator_and_a_new_one_comes_with_the_worker(
    cluster: FakeCluster,
) -> None:
    near, far = cluster.add(**NEAR), cluster.add(**FAR)
    answer(cluster, near, "10.0.0.1")
    cluster.lose_coordinator()
    assert hosts(cluster) == ["10.0.0.1", "10.0.0.2"]
    cluster.come_back(near)
    assert hosts(cluster) == ["10.0.0.1", "10.0.0.2"], "what this coordinator sees is loopback"
    far.about = far.about.model_copy(update={"seen": "10.0.7.7"})
    cluster.come_back(far)
    assert hosts(cluster) == ["10.0.0.1", "10.0.7.7"]
    assert len(toward(near)) == 1


def test_one_that_came_back_without_an_address_is_asked_again(cluster: FakeCluster) -> None:
    near, far = cluster.add(**NEAR), cluster.add(**FAR)
    cluster.lose_coordinator()
    cluster.come_back(near)
    cluster.come_back(far)
    assert toward(near) == ["10.0.0.2", "10.0.0.2"]


def test_a_worker_alone_on_another_host_than_the_coordinator_is_named(
    make_cluster: Callable[..., FakeCluster],
) -> None:
    cluster = make_cluster()
    cluster.add(host="127.0.0.1", identity="b", seen="10.0.0.2")
    assert confined(cluster) == [True]
