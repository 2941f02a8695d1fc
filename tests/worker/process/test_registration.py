"""A worker process between its start and its registration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from minishuffle.errors import PeerLost, RemoteProtocolError, UsageError
from minishuffle.wire.messages import Shutdown
from minishuffle.wire.requests import Failure
from minishuffle.worker import registration

if TYPE_CHECKING:
    from conftest import Coordinator

HOST = "127.0.0.1"


async def test_a_coordinator_that_is_not_there_is_named(coordinator: Coordinator) -> None:
    address = coordinator.address
    await coordinator.server.close()
    running = coordinator.begin(address=address)
    with pytest.raises(PeerLost, match=f"cannot connect to {re.escape(str(address))}"):
        await running.ended()
    assert running.web[0].closed


async def test_a_refused_registration_is_raised_as_what_it_is(coordinator: Coordinator) -> None:
    coordinator.answer = Failure(code=UsageError.code, text="worker 1 runs already; ask for another id")
    running = coordinator.begin()
    with pytest.raises(UsageError, match="worker 1 runs already"):
        await running.ended()
    assert running.told == {}


async def test_a_registration_that_is_never_answered_ends_the_worker(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "COORDINATOR_SECONDS_MAX", 0.5)
    coordinator.silent = True
    with pytest.raises(PeerLost, match=r"did not register this worker within 0\.5 s"):
        await coordinator.begin().ended()


async def test_metrics_are_served_before_the_registration_is_answered(coordinator: Coordinator) -> None:
    coordinator.silent = True
    worker = coordinator.begin()
    await coordinator.until(lambda: coordinator.requests)
    snapshot = worker.snapshot()
    assert (snapshot.worker, snapshot.tasks, snapshot.local_bytes) == (0, (), 0)
    assert snapshot.segments_free == snapshot.segments_total > 0
    worker.stop.set()
    await worker.ended()


async def test_stop_ends_a_worker_that_waits_for_its_registration(coordinator: Coordinator) -> None:
    coordinator.silent = True
    running = coordinator.begin()
    await coordinator.until(lambda: coordinator.requests)
    running.stop.set()
    await running.ended()
    assert running.web[0].closed


async def test_an_order_before_the_registration_ends_the_worker(coordinator: Coordinator) -> None:
    coordinator.answer = Shutdown(term=coordinator.term, reason="too early")
    with pytest.raises(RemoteProtocolError, match="sent Shutdown before it registered this worker"):
        await coordinator.begin().ended()
