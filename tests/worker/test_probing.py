"""What one probe is to others that are under way."""

from __future__ import annotations

import asyncio

import pytest

from minishuffle.counters import ConnectionCounters
from minishuffle.errors import ShuffleError
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import WorkerAddress
from minishuffle.worker.probing import Prober


async def test_a_peer_that_is_being_tried_is_not_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator asks again for a probe without an answer; it may wait for a turn here."""
    answer, dialed = asyncio.Event(), list[str]()

    async def dial(self: Prober, peer: WorkerAddress) -> ShuffleError | None:
        dialed.append(peer.host)
        await answer.wait()
        return ShuffleError("no route to host")

    monkeypatch.setattr(Prober, "_dial", dial)
    prober = Prober(Identity(Role.WORKER, "c", 1, 1), b"s" * 32, ConnectionCounters(), 1.0)
    peer = WorkerAddress(worker=2, epoch=2, host="10.0.0.2", data_port=5)
    elsewhere = peer.model_copy(update={"host": "10.0.0.3"})
    first, moved = asyncio.create_task(prober.probe(peer)), asyncio.create_task(prober.probe(elsewhere))
    await asyncio.sleep(0)
    assert await prober.probe(peer) is None
    answer.set()
    assert [await first, await moved] == ["no route to host"] * 2
    assert await prober.probe(peer) == "no route to host"
    assert dialed == ["10.0.0.2", "10.0.0.3", "10.0.0.2"]
    await prober.close()
