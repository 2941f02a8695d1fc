"""What one probe is to others that are under way, and what it finds where connections use TLS."""

from __future__ import annotations

import asyncio

import pytest

from minishuffle.counters import ConnectionCounters
from minishuffle.errors import ShuffleError
from minishuffle.protocol.connection import ConnectionEvent
from minishuffle.transport.hostlook import host_answers
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import WorkerAddress
from minishuffle.worker.channels.probing import Prober
from support.certificates import credentials


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


class Probed:
    """The handler of an endpoint that is probed."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def link_up(self, link: DataLink) -> None: ...
    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None: ...
    def link_down(self, link: DataLink, error: ShuffleError) -> None: ...

    def refused(self, reason: str, text: str, remote: str) -> None:
        self.reasons.append(reason)

    def authorize(self, peer: Identity) -> str | None:
        return None


async def test_probes_and_looks_at_hosts_find_workers_that_use_tls() -> None:
    handler, secret = Probed(), b"s" * 32
    there = DataEndpoint(
        handler, Identity(Role.WORKER, "c", 2, 2), secret, ConnectionCounters(), 1.0, tls=credentials()
    )
    peer = WorkerAddress(worker=2, epoch=2, host="127.0.0.1", data_port=await there.listen("127.0.0.1"))
    said = []
    for tls in (credentials("another"), credentials("stranger"), None):
        prober = Prober(Identity(Role.WORKER, "c", 1, 1), secret, ConnectionCounters(), 1.0, tls=tls)
        said.append(await prober.probe(peer))
        await prober.close()
    assert said[0] == ""
    assert str(said[1]).startswith("the certificate of the other side is of another CA than that in tls_ca")
    assert str(said[2]).startswith("the side that was dialed uses TLS, and the side that dialed it does not")
    assert await host_answers([f"127.0.0.1:{peer.data_port}"], 1, 5.0) is True
    assert handler.reasons == ["tls", "tls"]
    await there.close()
