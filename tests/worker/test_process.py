"""Worker processes' loops against a coordinator that the test plays."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgpack
import pytest

from minishuffle.config import ClusterSettings
from minishuffle.coordinator.deployment import deployments
from minishuffle.counters import ConnectionCounters, WorkerSnapshot
from minishuffle.dataflow.compile import compile_job
from minishuffle.dataflow.stream import Stream
from minishuffle.errors import PeerLost, RemoteProtocolError, ResourceExhausted, ShuffleError, UsageError
from minishuffle.exchange.elements import unpack_rows
from minishuffle.ids import Address
from minishuffle.protocol.connection import ConnectionEvent
from minishuffle.transport.control import ControlLink, ControlServer
from minishuffle.transport.tcp import DataEndpoint, DataLink
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import HandshakeRefused, Identity
from minishuffle.wire.messages import (
    AskDial,
    CancelTasks,
    Collected,
    Dial,
    Failure,
    Heartbeat,
    LogLines,
    Register,
    Registered,
    ReleaseJob,
    Shutdown,
    TaskStateChanged,
    WorkerLost,
)
from minishuffle.wire.parts import ControlMessage, WorkerAddress
from minishuffle.worker import process
from minishuffle.worker.process import run_worker

HOST = "127.0.0.1"
SECRET = b"the cluster's"
CLUSTER = "test"
SECONDS_MAX = 20.0
TERM = 3
TEXT = ["to be or not to be", "that is the question", "to die to sleep no more"] * 40
SETTINGS = ClusterSettings(
    heartbeat_interval=0.02, heartbeat_timeout=5.0, network_memory_bytes=4 << 20, task_cancel_timeout=5.0
)

M = TypeVar("M", bound=ControlMessage)


class Endless:
    bounded = False

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        while True:
            yield ["row"] * 50


class Stuck:
    let_go = threading.Event()


def stuck(row: Any) -> Any:
    Stuck.let_go.wait(SECONDS_MAX)
    return row


class Web:
    """Stands in for the metrics server."""

    def __init__(self, snapshot: Callable[[], WorkerSnapshot]) -> None:
        self.snapshot = snapshot
        self.port = 9
        self.closed = False

    async def close(self) -> None:
        self.closed = True


@dataclass
class Running:
    """One worker: what it said when it was ready, its figures, and how to end it."""

    stop: asyncio.Event
    told: dict[str, Any] = field(default_factory=dict)
    web: list[Web] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def snapshot(self) -> WorkerSnapshot:
        return self.web[0].snapshot()

    async def ended(self) -> None:
        """Wait for the end; raises what ``run_worker`` raised."""
        assert self.task is not None
        await asyncio.wait_for(self.task, SECONDS_MAX)


class Coordinator:
    """Registers whoever asks, with the id that was asked for and the next epoch; passes AskDial on."""

    def __init__(self) -> None:
        self.server = ControlServer()
        self.links: dict[int, ControlLink] = {}
        self.addresses: dict[int, WorkerAddress] = {}
        self.messages: list[ControlMessage] = []
        self.requests: list[Register] = []
        self.answer: ControlMessage | None = None
        """Instead of a registration."""
        self.silent = False
        self.epoch = 0
        self.workers: list[Running] = []

    async def start(self) -> None:
        identity = Identity(Role.COORDINATOR, CLUSTER, 0, 0)
        await self.server.start(HOST, 0, identity, SECRET, self._on_link, lambda *refusal: None)

    @property
    def address(self) -> Address:
        return Address(HOST, self.server.port)

    def _on_link(self, link: ControlLink) -> None:
        link.start(lambda message, request: self._on_message(link, message), lambda error: None)

    def _on_message(self, link: ControlLink, message: ControlMessage) -> None:
        if not isinstance(message, Register):
            self.messages.append(message)
            if isinstance(message, AskDial):
                self.links[message.target].send(Dial(term=TERM, peer=self.addresses[message.worker]))
            return
        self.requests.append(message)
        if self.answer is not None:
            link.send(self.answer)
        elif not self.silent:
            self._register(link, message)

    def _register(self, link: ControlLink, message: Register) -> None:
        self.epoch += 1
        worker = message.requested_worker
        self.links[worker] = link
        self.addresses[worker] = WorkerAddress(
            worker=worker, epoch=self.epoch, host=message.host, data_port=message.data_port
        )
        link.send(
            Registered(
                term=TERM,
                worker=worker,
                epoch=self.epoch,
                heartbeat_interval=SETTINGS.heartbeat_interval,
                heartbeat_timeout=SETTINGS.heartbeat_timeout,
            )
        )

    # --- workers --------------------------------------------------------------------------------------

    def begin(
        self, worker: int = 1, settings: ClusterSettings = SETTINGS, address: Address | None = None
    ) -> Running:
        """Start a worker without waiting for anything."""
        running = Running(asyncio.Event())

        async def web(snapshot: Callable[[], WorkerSnapshot], host: str, port: int) -> Web:
            running.web.append(Web(snapshot))
            return running.web[0]

        running.task = asyncio.create_task(
            run_worker(
                settings,
                coordinator=address or self.address,
                secret=SECRET,
                cluster=CLUSTER,
                host=HOST,
                requested_worker=worker,
                web=web,
                ready=running.told.update,
                stop=running.stop,
            )
        )
        self.workers.append(running)
        return running

    async def worker(self, worker: int = 1, settings: ClusterSettings = SETTINGS) -> Running:
        running = self.begin(worker, settings)
        await self.until(lambda: running.told)
        return running

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while not condition():
                await asyncio.sleep(0.001)

    # --- what was said and what is to be said ---------------------------------------------------------

    def said(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]

    def states(self, job: str = "j1") -> list[tuple[int, int, str]]:
        """(operator, index, state), in the order of the messages."""
        return [(m.operator, m.index, m.state) for m in self.said(TaskStateChanged) if m.job == job]

    def ended(self, job: str = "j1") -> list[str]:
        return [state for _, _, state in self.states(job) if state != "running"]

    def deploy(self, stream: Stream[Any], placement: dict[int, int], job: str = "j1") -> int:
        """Deploy a job; ``placement`` is slot -> worker, as many as the parallelism. Returns its tasks."""
        graph = compile_job(stream, parallelism=len(placement))
        used = [self.addresses[worker] for worker in sorted(set(placement.values()))]
        slots = tuple(worker for _, worker in sorted(placement.items()))
        messages = deployments(graph, slots, used, term=TERM, job=job, name="a job")
        for worker, message in messages.items():
            self.links[worker].send(message)
        return sum(len(message.tasks) for message in messages.values())

    def send(self, message: ControlMessage) -> None:
        for link in self.links.values():
            link.send(message)

    async def close(self) -> None:
        for running in self.workers:
            running.stop.set()
        tasks = [running.task for running in self.workers if running.task is not None]
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SECONDS_MAX)
        await self.server.close()


@pytest.fixture(autouse=True)
def _interpreter_as_it_was() -> Iterator[None]:
    """A worker tunes its whole process."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    Stuck.let_go = threading.Event()
    yield
    Stuck.let_go.set()
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)
    gc.unfreeze()


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = Coordinator()
    await coordinator.start()
    yield coordinator
    await coordinator.close()


# --- registration ---------------------------------------------------------------------------------------


async def test_a_worker_registers_and_sends_heartbeats(coordinator: Coordinator) -> None:
    running = await coordinator.worker(4)
    (request,) = coordinator.requests
    assert (request.pid, request.slots, request.host) == (os.getpid(), SETTINGS.slots, HOST)
    assert request.python == ".".join(map(str, sys.version_info[:2]))
    assert request.segments * request.segment_bytes <= SETTINGS.network_memory_bytes
    assert running.told == {
        "worker": 4,
        "pid": os.getpid(),
        "data_port": request.data_port,
        "metrics_port": 9,
    }
    await coordinator.until(lambda: len(coordinator.said(Heartbeat)) >= 3)
    for beat in coordinator.said(Heartbeat):
        assert (beat.term, beat.worker, beat.epoch, beat.tasks, beat.peers) == (TERM, 4, 1, [], [])
        assert beat.report.segments_free == request.segments
    assert running.snapshot().worker == 4


async def test_shutdown_ends_a_worker_in_order(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.send(Shutdown(term=TERM, reason="bye"))
    await running.ended()
    assert running.web[0].closed


async def test_messages_of_another_term_are_not_obeyed(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.send(Shutdown(term=TERM + 1, reason="bye"))
    beats = len(coordinator.said(Heartbeat))
    await coordinator.until(lambda: len(coordinator.said(Heartbeat)) >= beats + 3)
    assert running.task is not None and not running.task.done()


async def test_stop_ends_a_worker_in_order(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    running.stop.set()
    await running.ended()
    assert running.web[0].closed


async def test_a_lost_coordinator_ends_the_worker(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    await coordinator.server.close()
    with pytest.raises(PeerLost, match="the coordinator is gone"):
        await running.ended()
    assert running.web[0].closed


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
    monkeypatch.setattr(process, "COORDINATOR_SECONDS_MAX", 0.5)
    coordinator.silent = True
    with pytest.raises(PeerLost, match=r"did not register this worker within 0\.5 s"):
        await coordinator.begin().ended()


async def test_stop_ends_a_worker_that_waits_for_its_registration(coordinator: Coordinator) -> None:
    coordinator.silent = True
    running = coordinator.begin()
    await coordinator.until(lambda: coordinator.requests)
    running.stop.set()
    await running.ended()
    assert running.web[0].closed


async def test_an_order_before_the_registration_ends_the_worker(coordinator: Coordinator) -> None:
    coordinator.answer = Shutdown(term=TERM, reason="too early")
    with pytest.raises(RemoteProtocolError, match="sent Shutdown before it registered this worker"):
        await coordinator.begin().ended()


# --- jobs -----------------------------------------------------------------------------------------------


async def test_a_job_on_one_worker_from_deploy_to_release(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    stream = Stream.items(range(5000)).rebalance().to_count()
    assert coordinator.deploy(stream, {0: 1}) == 2
    await coordinator.until(lambda: len(coordinator.ended()) == 2)
    assert set(coordinator.states()) == {(o, 0, s) for o in (0, 1) for s in ("running", "finished")}
    source, sink = sorted(
        (m for m in coordinator.said(TaskStateChanged) if m.state == "finished"), key=lambda m: m.operator
    )
    assert msgpack.unpackb(sink.result) == 5000
    assert source.counters.records_out == sink.counters.records_in == 5000
    assert {task.state for task in running.snapshot().tasks} == {"finished"}
    coordinator.send(ReleaseJob(term=TERM, job="j1"))
    await coordinator.until(lambda: running.snapshot().tasks == ())
    assert running.snapshot().segments_free == running.snapshot().segments_total
    assert running.snapshot().remote == ConnectionCounters(), "nothing of it went over a socket"


async def test_collected_rows_and_lines_reach_the_coordinator(coordinator: Coordinator) -> None:
    await coordinator.worker()
    rows = Stream.items(["a", "b"])
    coordinator.deploy(Stream.together(rows.collect(), rows.print()), {0: 1})
    await coordinator.until(lambda: len(coordinator.ended()) == 3)
    assert [unpack_rows(m.payload) for m in coordinator.said(Collected)] == [["a"], ["b"]]
    assert [line for m in coordinator.said(LogLines) for line in m.lines] == ["'a'", "'b'"]


async def test_a_deploy_said_twice_runs_once(coordinator: Coordinator) -> None:
    await coordinator.worker()
    stream = Stream.items([1]).to_count()
    for _ in range(2):
        coordinator.deploy(stream, {0: 1})
    coordinator.deploy(stream, {0: 1}, "j2")
    await coordinator.until(lambda: coordinator.ended("j2"))
    await coordinator.until(lambda: coordinator.ended())
    assert coordinator.states() == [(0, 0, "running"), (0, 0, "finished")]


async def test_cancel_ends_the_tasks_of_that_job_alone(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    for job in ("j1", "j2"):
        coordinator.deploy(Stream.source(Endless()).rebalance().to_count(), {0: 1}, job)

    def taken(job: str) -> int:
        return sum(task.counters.records_in for task in running.snapshot().tasks if task.job == job)

    await coordinator.until(lambda: taken("j1") and taken("j2"))
    coordinator.send(CancelTasks(term=TERM, job="j1"))
    await coordinator.until(lambda: coordinator.ended() == ["canceled"] * 2)
    before = taken("j2")
    await coordinator.until(lambda: taken("j2") > before)
    assert coordinator.ended("j2") == []


async def test_a_task_that_does_not_fit_fails_with_the_arithmetic(coordinator: Coordinator) -> None:
    settings = SETTINGS.model_copy(update={"network_memory_bytes": 70_000})
    running = await coordinator.worker(settings=settings)
    coordinator.deploy(Stream.items([1]).rebalance().to_count(), {0: 1})
    await coordinator.until(lambda: "failed" in coordinator.ended())
    (failed,) = [m for m in coordinator.said(TaskStateChanged) if m.state == "failed"]
    assert failed.error is not None
    assert failed.error.code == ResourceExhausted.code
    assert "2 of 2 are required by other tasks" in failed.error.text
    assert running.task is not None and not running.task.done()


async def test_tasks_that_ignore_their_cancel_are_abandoned_and_too_many_end_the_worker(
    coordinator: Coordinator,
) -> None:
    settings = SETTINGS.model_copy(update={"task_cancel_timeout": 0.05, "abandoned_max": 1})
    running = await coordinator.worker(settings=settings)
    for job in ("j1", "j2"):
        coordinator.deploy(Stream.items([1]).map(stuck).to_count(), {0: 1}, job)
    await coordinator.until(lambda: coordinator.states("j1") and coordinator.states("j2"))
    coordinator.send(CancelTasks(term=TERM, job="j1"))
    await coordinator.until(lambda: coordinator.ended("j1") == ["abandoned"])
    assert running.snapshot().abandoned_tasks == 1
    assert running.task is not None and not running.task.done()
    coordinator.send(CancelTasks(term=TERM, job="j2"))
    with pytest.raises(ShuffleError, match="2 tasks ran on after their cancel, at most 1 may"):
        await running.ended()
    assert coordinator.ended("j2") == ["abandoned"]


async def test_stop_cancels_what_runs(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    threads = set(threading.enumerate())
    coordinator.deploy(Stream.source(Endless()).rebalance().to_count(), {0: 1})
    await coordinator.until(lambda: len(coordinator.states()) == 2)
    assert len(set(threading.enumerate()) - threads) == 2
    running.stop.set()
    await running.ended()
    assert not set(threading.enumerate()) - threads


# --- several workers ------------------------------------------------------------------------------------


def _has_no_task(running: Running) -> bool:
    return running.snapshot().tasks == ()


async def test_two_workers_count_words_over_one_connection(coordinator: Coordinator) -> None:
    workers = [await coordinator.worker(number) for number in (1, 2)]
    words = Stream.items(TEXT).flat_map(str.split)
    stream = words.key_by(lambda word: word).count()
    count = coordinator.deploy(stream.collect(), {0: 1, 1: 2})
    await coordinator.until(lambda: len(coordinator.ended()) == count)
    assert set(coordinator.ended()) == {"finished"}
    rows = [row for m in coordinator.said(Collected) for row in unpack_rows(m.payload)]
    assert sorted(map(tuple, rows)) == sorted(Counter(" ".join(TEXT).split()).items())
    first, second = (running.snapshot() for running in workers)
    assert (first.connections, second.connections) == (1, 1)
    assert first.remote.rows_out > 0 and second.remote.rows_out > 0
    beats = len(coordinator.said(Heartbeat))
    await coordinator.until(lambda: len(coordinator.said(Heartbeat)) >= beats + 4)
    ends = {beat.worker: beat.peers for beat in coordinator.said(Heartbeat)[-4:]}
    ((one,), (two,)) = ends[1], ends[2]
    assert (one.worker, one.connections, two.worker, two.connections) == (2, 1, 1, 1)
    assert (one.local, one.remote) == (two.remote, two.local)
    coordinator.send(ReleaseJob(term=TERM, job="j1"))
    for running in workers:
        await coordinator.until(partial(_has_no_task, running))
        assert running.snapshot().segments_free == running.snapshot().segments_total


async def test_a_lost_peer_fails_the_tasks_that_read_from_it(coordinator: Coordinator) -> None:
    running = await coordinator.worker(1)
    other = await coordinator.worker(2)
    stream = Stream.source(Endless()).rebalance().to_count()
    coordinator.deploy(stream, {0: 1, 1: 2})
    await coordinator.until(lambda: running.snapshot().remote.payload_bytes_in > 0)
    coordinator.links[1].send(WorkerLost(term=TERM, worker=2, epoch=2))
    await coordinator.until(lambda: coordinator.ended().count("failed") == 2)
    failed = [m for m in coordinator.said(TaskStateChanged) if m.state == "failed"]
    assert {(m.operator, m.index) for m in failed} == {(1, 0), (1, 1)}
    texts = sorted(m.error.text for m in failed if m.error is not None)
    assert "connection to worker 1 broke" in texts[1] or "connection to worker 1 broke" in texts[0]
    assert any("worker 2 was declared lost" in text for text in texts)
    assert (running.snapshot().connections, other.snapshot().connections) == (0, 0)


# --- data connections -----------------------------------------------------------------------------------


class Peer:
    """Another worker's end of data connections."""

    def __init__(self, number: int, epoch: int, role: Role = Role.WORKER) -> None:
        self.down: list[ShuffleError] = []
        identity = Identity(role, CLUSTER, number, epoch)
        self.endpoint = DataEndpoint(self, identity, SECRET, ConnectionCounters(), 60.0)

    async def dial(self, running: Running, worker: int = 1) -> DataLink:
        return await self.endpoint.dial(Address(HOST, running.told["data_port"]), worker, None)

    def authorize(self, peer: Identity) -> str | None:
        return None

    def refused(self, reason: str, text: str, remote: str) -> None: ...

    def link_up(self, link: DataLink) -> None: ...

    def link_events(self, link: DataLink, events: list[ConnectionEvent]) -> None: ...

    def link_down(self, link: DataLink, error: ShuffleError) -> None:
        self.down.append(error)


async def test_a_second_connection_of_a_pair_is_refused_unless_its_epoch_is_newer(
    coordinator: Coordinator,
) -> None:
    running = await coordinator.worker(1)
    first, same, newer, older = Peer(9, 5), Peer(9, 5), Peer(9, 6), Peer(9, 4)
    await first.dial(running)
    for peer in (same, older):
        with pytest.raises(HandshakeRefused, match="worker 9 is connected already"):
            await peer.dial(running)
    assert first.down == []
    await newer.dial(running)
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


async def test_only_workers_connect_to_a_data_port(coordinator: Coordinator) -> None:
    running = await coordinator.worker(1)
    with pytest.raises(HandshakeRefused, match="only workers connect to a worker's data port"):
        await Peer(0, 0, Role.CLIENT).dial(running)
    assert running.snapshot().connections_refused == {"peer": 1}


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
    (link,) = coordinator.server._links - set(coordinator.links.values())
    coordinator._register(link, coordinator.requests[1])
    count = coordinator.deploy(Stream.items(range(100)).rebalance().to_count(), {0: 1, 1: 2})
    await coordinator.until(lambda: len(coordinator.ended()) == count)
    assert set(coordinator.ended()) == {"finished"}
    assert first.snapshot().connections_refused == other.snapshot().connections_refused == {}
