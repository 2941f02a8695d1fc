"""A worker process' life with its coordinator, and who may connect to its data port."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import PartitionNotFound, ShuffleError, UsageError
from minishuffle.ids import Address, JobId, PartitionId
from minishuffle.protocol.connection import ConnectionEvent, MessageReceived
from minishuffle.transport.interfaces import host_identity
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.clients import ResultExpected, ServeResult
from minishuffle.wire.control import pack_message
from minishuffle.wire.frames import Message, PartitionRequest, Role
from minishuffle.wire.handshake import HandshakeRefused, Identity
from minishuffle.wire.messages import (
    Advertise,
    Advertised,
    CheckFolder,
    ControlMessage,
    DeployTasks,
    FolderChecked,
    Heartbeat,
    Shutdown,
    WitnessedPositions,
    WorkerAddress,
)
from minishuffle.worker import process
from minishuffle.worker.tasks import statewriter
from support.certificates import credentials
from support.reader import Reader

if TYPE_CHECKING:
    from conftest import Coordinator, Running

HOST = "127.0.0.1"
SECRET = b"the cluster's"
CLUSTER = "test"


# --- registration ---------------------------------------------------------------------------------------


async def test_a_worker_registers_and_sends_heartbeats(coordinator: Coordinator) -> None:
    running = await coordinator.worker(4)
    (request,) = coordinator.requests
    assert (request.pid, request.slots, request.host) == (os.getpid(), coordinator.settings.slots, HOST)
    assert request.python == ".".join(map(str, sys.version_info[:2]))
    assert request.segments * request.segment_bytes <= coordinator.settings.network_memory_bytes
    assert running.told == {
        "worker": 4,
        "epoch": 1,
        "pid": os.getpid(),
        "data_port": request.data_port,
        "metrics_port": 9,
    }
    await coordinator.until(lambda: len(coordinator.said(Heartbeat)) >= 3)
    for beat in coordinator.said(Heartbeat):
        assert (beat.term, beat.worker, beat.epoch, beat.tasks, beat.peers) == (
            coordinator.term,
            4,
            1,
            [],
            [],
        )
        assert beat.report.segments_free == request.segments
    assert running.snapshot().worker == 4


@pytest.mark.parametrize(
    ("host", "advertise", "way", "found"),
    [
        ("0.0.0.0", "", "10.1.2.3", "10.1.2.3"),
        ("0.0.0.0", "", "127.9.9.9", ""),
        ("0.0.0.0", "", "", ""),
        ("0.0.0.0", "node-1", "10.1.2.3", ""),
        ("127.0.0.1", "", "10.1.2.3", ""),
    ],
)
async def test_a_worker_says_by_which_address_another_host_reaches_it(
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    advertise: str,
    way: str,
    found: str,
) -> None:
    """If it listens on all addresses, and was not given the one to advertise. The next coordinator hears so
    too."""

    async def toward(host: str) -> str:
        assert host == "10.0.0.2"
        return way

    monkeypatch.setattr(process, "address_toward", toward)
    await coordinator.worker(host=host, advertise=advertise)
    (request,) = coordinator.requests
    assert (request.host, request.advertise, request.identity) == (host, advertise, host_identity())
    coordinator.send(Advertise(term=coordinator.term, toward="10.0.0.2"))
    await coordinator.until(lambda: coordinator.said(Advertised))
    assert [each.host for each in coordinator.said(Advertised)] == [found]
    await coordinator.lose()
    await coordinator.start_again()
    await coordinator.until(lambda: len(coordinator.requests) == 2)
    assert coordinator.requests[1].advertise == (found or advertise)


async def test_without_a_host_a_worker_listens_where_its_coordinator_is_reached(
    coordinator: Coordinator,
) -> None:
    running = await coordinator.worker(host="")
    assert [request.host for request in coordinator.requests] == [HOST]
    assert [server.bound for server in running.web] == [HOST], "its metrics are read there, and nowhere else"


async def test_a_worker_whose_certificate_is_for_another_address_does_not_register(
    coordinator: Coordinator,
) -> None:
    await coordinator.lose()
    coordinator.tls = credentials()
    await coordinator.start_again(0)
    for host, advertise in ((HOST, ""), ("0.0.0.0", ""), ("0.0.0.0", "127.0.0.3")):
        named = advertise or HOST
        problem = (
            f"is a certificate for elsewhere.example and not for {named}, by which this process is reached"
        )
        with pytest.raises(UsageError, match=problem):
            await coordinator.begin(
                1, host=host, advertise=advertise, tls=credentials("foreign name")
            ).ended()
    assert coordinator.requests == []
    worker = await coordinator.worker(2, host="0.0.0.0")
    assert worker.told["worker"] == 2


async def test_shutdown_ends_a_worker_in_order(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.send(Shutdown(term=coordinator.term, reason="bye"))
    await running.ended()
    assert running.web[0].closed


async def test_messages_of_a_lower_term_are_not_obeyed(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.send(Shutdown(term=coordinator.term - 1, reason="bye"))
    beats = len(coordinator.said(Heartbeat))
    await coordinator.until(lambda: len(coordinator.said(Heartbeat)) >= beats + 3)
    assert running.task is not None and not running.task.done()


async def test_threads_of_their_own_look_for_the_folders_of_savepoints(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tasks have stored is read although a storage hangs."""
    monkeypatch.setattr(statewriter, "_problem_with", lambda message: threading.current_thread().name)
    await coordinator.worker()
    fields = {
        "term": coordinator.term,
        "job": "j1",
        "savepoint": 1,
        "folder": "/s",
        "file": "f",
        "content": "",
    }
    coordinator.send(CheckFolder(**fields))
    await coordinator.until(lambda: coordinator.said(FolderChecked))
    assert coordinator.said(FolderChecked)[0].problem.startswith("snapshots")


async def test_stop_ends_a_worker_in_order(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    running.stop.set()
    await running.ended()
    assert running.web[0].closed


# --- data connections -----------------------------------------------------------------------------------


class Peer:
    """Another worker's end of data connections."""

    def __init__(self, number: int, epoch: int, role: Role = Role.WORKER) -> None:
        self.down: list[ShuffleError] = []
        self.messages: list[Message] = []
        identity = Identity(role, CLUSTER, number, epoch)
        self.endpoint = DataEndpoint(self, identity, SECRET, ConnectionCounters(), 60.0)

    async def dial(self, running: Running, worker: int = 1) -> DataLink:
        return await self.endpoint.dial(Address(HOST, running.told["data_port"]), worker, None)

    def authorize(self, peer: Identity) -> str | None:
        return None

    def refused(self, reason: str, text: str, remote: str) -> None: ...

    def link_up(self, link: DataLink) -> None: ...

    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None:
        self.messages += [event.message for event in events if isinstance(event, MessageReceived)]

    def link_down(self, link: DataLink, error: ShuffleError) -> None:
        self.down.append(error)


async def announce(coordinator: Coordinator, peer: Peer) -> None:
    """The coordinator's word on a worker: its epoch. Waits until worker 1 has read it."""
    identity = peer.endpoint.identity
    address = WorkerAddress(worker=identity.worker, epoch=identity.epoch, host=HOST, data_port=1)
    message = DeployTasks(
        term=coordinator.term, job="j0", name="", settings={}, programs={}, tasks=[], workers=[address]
    )
    coordinator.send(message)
    asked = len(coordinator.said(ResultExpected))
    sink = {"job": "j0", "operator": 0, "index": 0, "task_attempt": 1}
    coordinator.links[1].send(ServeResult(term=coordinator.term, ticket=1, begin=0, end=0, **sink))
    await coordinator.until(lambda: len(coordinator.said(ResultExpected)) > asked)


async def test_a_second_connection_of_a_pair_is_refused_unless_its_epoch_is_newer(
    coordinator: Coordinator,
) -> None:
    running = await coordinator.worker(1)
    first, same, newer, older = Peer(9, 5), Peer(9, 5), Peer(9, 6), Peer(9, 4)
    await announce(coordinator, first)
    await first.dial(running)
    with pytest.raises(HandshakeRefused, match="worker 9 is connected already"):
        await same.dial(running)
    with pytest.raises(HandshakeRefused, match="worker 9 has epoch 5"):
        await older.dial(running)
    assert first.down == []
    await newer.dial(running)
    await announce(coordinator, newer)
    await coordinator.until(lambda: first.down)
    assert newer.down == []
    assert running.snapshot().connections == 1
    assert running.snapshot().connections_refused == {"peer": 2}
    await newer.endpoint.close()
    await coordinator.until(lambda: running.snapshot().connections == 0)
    again = Peer(9, 6)
    await again.dial(running)
    assert running.snapshot().connections == 1
    await again.endpoint.close()


async def test_a_link_of_an_epoch_that_nobody_announced_changes_nothing_for_the_pair(
    coordinator: Coordinator,
) -> None:
    running = await coordinator.worker(1)
    await coordinator.worker(2)
    stream = Stream.items(range(100)).rebalance().to_count()
    count = coordinator.deploy(stream, {0: 1, 1: 2})
    await coordinator.until(lambda: len(coordinator.ended()) == count)
    forged = Peer(2, 99)
    link = await forged.dial(running)
    count = coordinator.deploy(stream, {0: 1, 1: 2}, job="j2")
    await coordinator.until(lambda: len(coordinator.ended("j2")) == count)
    assert set(coordinator.ended("j2")) == {"finished"}
    link.close()
    await coordinator.until(lambda: forged.down)
    count = coordinator.deploy(stream, {0: 1, 1: 2}, job="j3")
    await coordinator.until(lambda: len(coordinator.ended("j3")) == count)
    assert set(coordinator.ended("j3")) == {"finished"}
    assert running.snapshot().connections_refused == {}


async def test_what_an_early_link_asks_for_is_answered_once_its_epoch_is_announced(
    coordinator: Coordinator,
) -> None:
    settings = coordinator.settings.model_copy(update={"partition_request_timeout": 0.01})
    running = await coordinator.worker(1, settings)
    early = Peer(9, 6)
    link = await early.dial(running)
    reader = Reader()
    link.connection.request_partition(reader.channel, PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0))
    positions = WitnessedPositions(worker=9, epoch=6, last_report=1, sources=[])
    link.connection.send_message(Message(1, pack_message(positions)))  # Nobody may be there to announce it.
    link.flush_soon()
    await coordinator.until(lambda: early.messages == [Message(1, b"")])
    sent = len(coordinator.said(Heartbeat))
    await coordinator.until(lambda: len(coordinator.said(Heartbeat)) > sent + 10)
    assert reader.error is None and early.down == []
    assert coordinator.said(Heartbeat)[-1].peers == []
    await announce(coordinator, early)
    await coordinator.until(lambda: reader.error)
    assert isinstance(reader.error, PartitionNotFound)
    assert early.down == []
    await early.endpoint.close()


async def test_what_an_early_link_may_ask_for_is_bounded(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EARLY_REQUESTS_MAX", 3)
    running = await coordinator.worker(1)
    early = Peer(9, 6)
    link = await early.dial(running)
    for _ in range(4):
        link.connection.request_partition(
            Reader().channel, PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0)
        )
    link.flush_soon()
    await coordinator.until(lambda: early.down)


async def test_early_links_are_bounded_and_go_when_a_newer_epoch_is_announced(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EARLY_LINKS_MAX", 2)
    running = await coordinator.worker(1)
    peers = [Peer(9, epoch) for epoch in (5, 6, 7)]
    for peer in peers:
        await peer.dial(running)
    await coordinator.until(lambda: peers[0].down)
    await announce(coordinator, Peer(9, 8))
    await coordinator.until(lambda: peers[1].down and peers[2].down)
    assert running.snapshot().connections == 0


async def test_a_half_open_link_can_be_dialed_again_at_once(coordinator: Coordinator) -> None:
    """The dialer has seen its link break; this worker has not."""
    running = await coordinator.worker(1)
    peer = Peer(9, 5)
    await announce(coordinator, peer)
    first = await peer.dial(running)
    second = await peer.dial(running)
    await coordinator.until(lambda: len(peer.down) == 1)
    assert first not in peer.endpoint.links and second in peer.endpoint.links
    assert running.snapshot().connections == 1
    assert running.snapshot().connections_refused == {}
    await peer.endpoint.close()


async def test_only_workers_and_expected_clients_connect_to_a_data_port(coordinator: Coordinator) -> None:
    running = await coordinator.worker(1)
    with pytest.raises(HandshakeRefused, match="client 7 is not expected here"):
        await Peer(7, 1, Role.CLIENT).dial(running)
    with pytest.raises(HandshakeRefused, match="only workers connect to a worker's data port"):
        await Peer(0, 0, Role.COORDINATOR).dial(running)
    assert running.snapshot().connections_refused == {"peer": 2}


async def test_a_worker_that_is_not_registered_yet_is_nobodys_peer(coordinator: Coordinator) -> None:
    coordinator.silent = True
    running = coordinator.begin(1)
    await coordinator.until(lambda: coordinator.requests)
    running.told["data_port"] = coordinator.requests[0].data_port
    with pytest.raises(HandshakeRefused, match="worker 1 was dialed"):
        await Peer(9, 5).dial(running)


async def test_a_worker_is_its_new_self_before_it_handles_the_next_message(coordinator: Coordinator) -> None:
    """Registered, a deploy and a dial in one piece: the dial proves the id that was just given."""
    other = await coordinator.worker(2)
    coordinator.silent = True
    first = coordinator.begin(1)
    await coordinator.until(lambda: len(coordinator.requests) == 2)
    (link,) = coordinator.server._links.keys() - set(coordinator.links.values())
    coordinator._register(link, coordinator.requests[1])
    count = coordinator.deploy(Stream.items(range(100)).rebalance().to_count(), {0: 1, 1: 2})
    await coordinator.until(lambda: len(coordinator.ended()) == count)
    assert set(coordinator.ended()) == {"finished"}
    assert first.snapshot().connections_refused == other.snapshot().connections_refused == {}


class Held:
    """A control link whose messages are on their way until the test says so."""

    def __init__(self) -> None:
        self.messages: list[ControlMessage] = []

    def send(self, message: ControlMessage) -> None:
        self.messages.append(message)


async def test_a_worker_is_dialed_until_it_knows_its_id(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """The deploy reaches the other worker before Registered reaches this one."""
    await coordinator.worker(1)
    coordinator.silent = True
    coordinator.begin(2)
    await coordinator.until(lambda: len(coordinator.requests) == 2)
    (link,) = coordinator.server._links.keys() - set(coordinator.links.values())
    held: Any = Held()
    coordinator._register(held, coordinator.requests[1])
    count = coordinator.deploy(Stream.items(range(100)).rebalance().to_count(), {0: 1, 1: 2})
    await coordinator.until(lambda: "worker 2 was dialed, but a worker answers there" in caplog.text)
    for message in held.messages:
        link.send(message)
    await coordinator.until(lambda: len(coordinator.ended()) == count)
    assert set(coordinator.ended()) == {"finished"}
