"""Workers that look whether they could link with others, without any link being left."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from minishuffle import limits
from minishuffle.wire.messages import Probe, Probed, WorkerAddress

if TYPE_CHECKING:
    from conftest import Coordinator

HOST = "127.0.0.1"


async def found(coordinator: Coordinator, *peers: WorkerAddress) -> dict[tuple[int, int], str]:
    """What worker 1 says of these."""
    before = len(coordinator.said(Probed))
    coordinator.links[1].send(Probe(term=coordinator.term, peers=list(peers)))
    await coordinator.until(lambda: len(coordinator.said(Probed)) == before + len(peers))
    return {(each.worker, each.epoch): each.why for each in coordinator.said(Probed)[before:]}


async def test_a_worker_that_can_be_reached_is_and_nothing_is_left_of_it(coordinator: Coordinator) -> None:
    one, two = await coordinator.worker(1), await coordinator.worker(2)
    address = coordinator.addresses[2]
    for _ in range(3):
        assert await found(coordinator, address) == {(2, address.epoch): ""}
    await coordinator.until(lambda: one.snapshot().connections == two.snapshot().connections == 0)
    assert one.snapshot().connections_refused == two.snapshot().connections_refused == {}


async def test_who_is_not_there_or_is_another_one_is_not_reached(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address of another host may lead to a worker of this one."""
    monkeypatch.setattr(limits, "PROBE_SECONDS_MAX", 0.5)
    await coordinator.worker(1)
    await coordinator.worker(2)
    address = coordinator.addresses[2]
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        closed = address.model_copy(update={"worker": 3, "data_port": taken.getsockname()[1]})
        taken.listen()
        silent = closed.model_copy(update={"worker": 4})
        other = address.model_copy(update={"worker": 5})
        later = address.model_copy(update={"epoch": address.epoch + 1})
        assert "within 0.5 s" in (await found(coordinator, silent))[4, address.epoch]
    said = await found(coordinator, closed, other, later, address)
    assert "cannot connect to" in said[3, address.epoch]
    assert "worker 5 was dialed, but worker 2 answers there" in said[5, address.epoch]
    assert "epoch" in said[2, later.epoch]
    assert said[2, address.epoch] == ""


async def test_a_probe_that_is_under_way_ends_with_its_worker(coordinator: Coordinator) -> None:
    running = await coordinator.worker(1)
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        peer = WorkerAddress(worker=2, epoch=1, host=HOST, data_port=silent.getsockname()[1])
        silent.setblocking(False)
        coordinator.send(Probe(term=coordinator.term, peers=[peer]))
        accepted, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(silent), 60.0)
        with accepted:
            running.stop.set()
            await running.ended()
        assert coordinator.said(Probed) == []
