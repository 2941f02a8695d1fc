"""A whole cluster: the package's own processes on simulated loops, sockets and threads.

The coordinator, the workers and a client are the real shells around the real machines; nothing of them is
written anew. What a seed draws is the job, the cluster, every delay and order, and the faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from minishuffle.config import ClusterSettings, CoordinatorPlace
from minishuffle.coordinator import process as coordinator_process
from minishuffle.coordinator import snapshotfolders
from minishuffle.coordinator.process import Coordinator
from minishuffle.errors import ResourceExhausted, ShuffleError, Superseded
from minishuffle.exchange.buffers import BufferBuilder
from minishuffle.ids import FIRST_ATTEMPT, Address, Changes, OperatorId, RecordKey, SubtaskId
from minishuffle.limits import SEGMENT_HEADROOM_BYTES
from minishuffle.runtime import inputs
from minishuffle.transport.control import ControlLink, connect_control
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import (
    Acknowledge,
    CancelTasks,
    ControlMessage,
    DeployTasks,
    Heartbeat,
    ReleaseJob,
    TasksRestarted,
    WorkerLost,
)
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.reports import AttemptReport, Fact, TaskStateChanged
from minishuffle.wire.requests import JOB_LIVE
from minishuffle.worker import diskthreads, process, wallclock
from minishuffle.worker.process import Worker, register
from minishuffle.worker.registration import UnregisteredWorker
from minishuffle.worker.reports import workerreports
from minishuffle.worker.reports.workerreports import registration
from minishuffle.worker.sources.witnesses import Witnesses
from minishuffle.worker.tasks import attempt as attempts
from minishuffle.worker.tasks import busytime, deployment, handoff, snapshotholder, task
from minishuffle.worker.tasks.attempt import Attempt
from support.simulated_jobs import AUDITS, TAKEN_ROWS, Audit, Sender
from support.simulated_loop import Host, World
from support.simulated_network import Network
from support.simulated_snapshots import SnapshotLog, log_snapshots
from support.simulated_threads import (
    SimulatedDisk,
    SimulatedFolderThreads,
    SimulatedTime,
    Threads,
    running_host,
)
from support.simulated_writes import WriteLog, log_writes

__all__ = ["SECRET", "Client", "Cluster", "SimulatedWorker", "simulated"]

CLUSTER = "simulated"
SECRET = b"s" * 32
COORDINATOR = Address("127.0.0.1", 1)
PID = 1
"""Of all simulated processes: it is in messages, and longer ones take another way through the sockets."""
PLACE_CHARS = 120
"""Of the path of snapshots, wherever temporary folders are, for the same reason."""
CHECK_EVERY = 16
"""Turns of loops between two checks of the invariants of a process."""
SMALL_TALK = (Heartbeat, Acknowledge)
"""What is not worth a line of the trace."""


JOURNAL_SECONDS = 0.001
"""Within which the journal has been written."""
CLIENT_RETRY_SECONDS = 0.05


class Journal:
    """What is on the disk: it outlives the coordinators that write it."""

    def __init__(self) -> None:
        self.term = 0
        self.records: dict[RecordKey, bytes] = {}
        self.full = False
        """Nothing can be written."""


class JournalTerm:
    """The journal as one coordinator has it; making it begins a term.

    Args:
        host: the process that writes. What it has not written when it dies is never written.
    """

    def __init__(self, journal: Journal, host: Host) -> None:
        journal.term += 1
        self.term = journal.term
        self.records = dict(journal.records)
        self._journal = journal
        self._host = host

    def write(self, changes: Changes, done: Callable[[Exception | None], None], *, whole: bool) -> None:
        self._host.world.within(JOURNAL_SECONDS, partial(self._write, changes, done))

    def _write(self, changes: Changes, done: Callable[[Exception | None], None]) -> None:
        if self._host.dead:
            return
        journal = self._journal
        error: Exception | None = ResourceExhausted("the disk is full") if journal.full else None
        if journal.term > self.term:
            error = Superseded(f"term {journal.term} has begun")
        for key, record in changes.items() if error is None else ():
            if record is None:
                journal.records.pop(key, None)
            else:
                journal.records[key] = record
        self._host.loop.call_soon(done, error)


TAKEOVER_SECONDS = 0.05
"""Within which a worker dies that has begun to take over."""


@dataclass
class SimulatedWorker:
    """A worker process."""

    host: Host
    start: UnregisteredWorker
    settings: ClusterSettings
    registered: Worker | None = None

    @property
    def worker(self) -> Worker:
        assert self.registered is not None, "it is not registered yet"
        return self.registered

    @property
    def number(self) -> int:
        """The worker's id; 0 before it is registered."""
        return self.start.endpoint.identity.worker

    @property
    def segments_out(self) -> int:
        """Segments that are not home and were not written off."""
        pool = self.start.pool
        return pool.total + pool.extra - pool.free - pool.written_off

    def validate(self) -> None:
        """Check the invariants of everything in the process."""
        self.start.pool.validate()
        if self.number:
            self.worker._state.validate()
            self._check_fences()
        for link in self.start.endpoint.links:
            link.machine.validate()

    def _check_fences(self) -> None:
        """No attempt reads here whose successor the coordinator has named."""
        known = self.worker._state.channels.partitions._attempts
        for attempt in self.worker._deployment.attempts.values():
            for output in attempt.spec.outputs:
                partition = attempt.partitions.get(output.edge)
                for part in partition.subpartitions if partition is not None else ():
                    if part.view is None:
                        continue
                    consumer = SubtaskId(attempt.id.subtask.job, OperatorId(output.operator), part.consumer)
                    newest = known.get(consumer, FIRST_ATTEMPT)
                    assert part.view.attempt >= newest, (
                        f"attempt {part.view.attempt} of {consumer} reads from {attempt.id} after {newest}"
                    )


class Client:
    """A program that talks to the coordinator, and asks again what a coordinator that was lost did not
    answer.

    Args:
        home: where the coordinator is now.
    """

    def __init__(self, host: Host, home: Callable[[], Address]) -> None:
        self.replies: dict[int, ControlMessage] = {}
        self._home = home
        self._host = host
        self._link: Any = None
        self._requests = 0
        self._unanswered: dict[int, ControlMessage] = {}

    async def connect(self) -> None:
        """Connect, sooner or later."""
        identity = Identity(Role.CLIENT, CLUSTER, 0, 0)
        while True:
            try:
                link = await connect_control(self._home(), identity, SECRET, timeout=1.0)
                break
            except ShuffleError:
                await asyncio.sleep(CLIENT_RETRY_SECONDS)
        link.start(self._on_message, self._on_closed)
        self._link = link
        for request, message in self._unanswered.items():
            link.send(message, request)

    def reconnect(self) -> None:
        """Let go of a coordinator that does not answer."""
        if self._link is not None:
            self._link.close()

    def _on_message(self, message: ControlMessage, request: int) -> None:
        self._unanswered.pop(request, None)
        self.replies[request] = message

    def _on_closed(self, error: Exception | None) -> None:
        self._link = None
        self._host.run(self.connect(), "client")

    @property
    def connected(self) -> bool:
        return self._link is not None

    def ask(self, message: ControlMessage) -> int:
        """Send a request; gives its number."""
        self._requests += 1
        self._host.loop.call_soon(self._send, self._requests, message)
        return self._requests

    def _send(self, request: int, message: ControlMessage) -> None:
        self._unanswered[request] = message
        if self._link is not None:
            self._link.send(message, request)


class Cluster:
    """A coordinator, workers and a client.

    Args:
        seed: of everything.
        snapshots: the directory of savepoints and durable snapshots.
    """

    def __init__(self, seed: int, settings: ClusterSettings, *, snapshots: str) -> None:
        self.snapshots = snapshots
        self.world = world = World(seed)
        self.threads = Threads(world)
        self.seed = seed
        self.settings = settings
        self.network = Network(world)
        self.audit = AUDITS[seed] = Audit(lambda: world.now, self.threads.sleep, world.random)
        self.writes = WriteLog()
        self.snapshot_log = SnapshotLog()
        self.workers: list[SimulatedWorker] = []
        self.attempts: list[tuple[SimulatedWorker, Attempt]] = []
        """Every attempt that was ever built."""
        self._by_sender: dict[Sender, Attempt] = {}
        """The same, by operator, index and attempt: the last of each."""
        self.returns: dict[int, tuple[type[ControlMessage], Callable[[], None]]] = {}
        """By worker that is to come back: what is said first of which kind then, and what happens next."""
        self.kills_next = 0
        """So many workers are killed as soon as they have built the next attempt of something."""
        self.checked = True
        """Whether invariants are looked at now and then."""
        self.unwitnessed = 0
        """How often sources went on without a coordinator, with no peer to ask."""
        self.forgotten: list[str] = []
        """Threads that nobody woke."""
        self._back: set[int] = set()
        """Those of ``returns`` that have said so."""
        self._turns = self._started = 0
        self._by_host: dict[Host, SimulatedWorker] = {}
        world.after_turn = self._after_turn
        self.journal = Journal()
        self.place = CoordinatorPlace(COORDINATOR, 0)
        """Where the last coordinator is, as in the state directory."""
        self.coordinator_due = False
        """One is about to start."""
        self.coordinator_host: Host
        """The last one."""
        self.coordinator: Coordinator
        self._client_host = Host(world, self.network, "client")
        self.client = Client(self._client_host, lambda: self.place.address)

    def start(self) -> None:
        """Start the coordinator, and connect the client to it."""
        world = self.world
        self.start_coordinator()
        assert world.run_until(lambda: COORDINATOR.port in self.network.listeners, 1.0, 1_000)
        self._client_host.run(self.client.connect(), "client")
        assert world.run_until(lambda: self.client.connected, 1.0, 1_000)

    def start_coordinator(self, port: int = COORDINATOR.port) -> None:
        """Start a coordinator process with what is in the journal; another must not listen at that port."""
        self.coordinator_due = self.journal.full = False
        name = f"coordinator {self.journal.term + 1}" if self.journal.term else "coordinator"
        self.coordinator_host = Host(self.world, self.network, name)
        self.coordinator_host.run(self._run_coordinator(self.coordinator_host, port), name)

    async def _run_coordinator(self, host: Host, port: int) -> None:
        """What ``run_coordinator`` does, without a server for metrics and signals."""
        journal: Any = JournalTerm(self.journal, host)
        coordinator = self.coordinator = Coordinator(self.settings, CLUSTER, journal)
        await coordinator.listen(COORDINATOR.host, port, SECRET)
        self.place = CoordinatorPlace(Address(COORDINATOR.host, port), journal.term)
        try:
            await coordinator.stopped
        except Superseded as error:
            self.world.note(f"{host.name} ends: {error}")
            self.world.at(self.world.now, host.kill)

    def hand_over(self) -> Coroutine[Any, Any, None]:
        """What ``run_coordinator`` does when it is to leave: one that is stopped does so when it goes on,
        whatever coordinator there is by then."""
        return self._hand_over(self.coordinator, self.coordinator_host)

    async def _hand_over(self, coordinator: Coordinator, host: Host) -> None:
        with contextlib.suppress(ShuffleError):  # It cannot, or another one is there already.
            await coordinator.hand_over()
        await coordinator.close()
        self.world.at(self.world.now, host.kill)

    @property
    def forgetful(self) -> bool:
        """Something has happened that the next coordinator would not know."""
        return self.coordinator._unwritten is not None

    def add_worker(self, slots: int, segments: int, *, standby: bool = False) -> None:
        """Start a worker process; it registers when it can."""
        self._started += 1
        host = Host(self.world, self.network, f"worker process {self._started}")
        memory = segments * (self.settings.segment_bytes + SEGMENT_HEADROOM_BYTES)
        settings = self.settings.model_copy(update={"slots": slots, "network_memory_bytes": memory})
        host.run(self._start_worker(host, settings, standby), "worker")

    async def _start_worker(self, host: Host, settings: ClusterSettings, standby: bool) -> None:
        """What ``run_worker`` does, without a server for metrics and signals."""
        start = UnregisteredWorker(settings, CLUSTER, SECRET, find=lambda: self.place)
        simulated = SimulatedWorker(host, start, settings)
        self.workers.append(simulated)
        self._by_host[host] = simulated
        port = await start.endpoint.listen("127.0.0.1")
        try:
            reason = await self._serve(simulated, port, standby)
        except ShuffleError as error:
            reason = str(error)
        self.world.note(f"{host.name} ends: {reason}")
        self.world.at(self.world.now, host.kill)

    async def _serve(self, simulated: SimulatedWorker, port: int, standby: bool) -> str:
        start, name = simulated.start, simulated.host.name
        home = self.place.address
        control = await connect_control(home, Identity(Role.WORKER, CLUSTER, 0, 0), SECRET, timeout=10.0)
        request = registration(
            simulated.settings,
            start.pool,
            host="127.0.0.1",
            advertise="",
            data_port=port,
            metrics_port=0,
            requested_worker=0,
            standby=standby,
        )

        def began(worker: Worker) -> None:
            simulated.registered = worker

        registered = await register(start, control, request, home, began)
        self.world.note(f"{name} is worker {registered.worker}")
        reason = await start.ended
        if not reason:
            await simulated.worker.close()
        return reason

    def has_input(self, paths: handoff.TaskPaths) -> bool:
        """Whether the task with those paths has something to read."""
        attempt = next((each for _, each in self.attempts if each.paths is paths), None)
        if attempt is None:
            return False
        earlier = attempt.task.state_handover.earlier
        if earlier is not None:  # A task that takes state over looks at nothing else yet.
            return bool(earlier.gate.ready.line)
        ready = attempt.task.state == "running"
        return ready and any(gate.ready.line and not gate.finished for gate in attempt.gates)

    def said(self, message: ControlMessage) -> None:
        """A process has sent that to another one."""
        match message:
            case Register(requested_worker=worker) | Registered(worker=worker) | Heartbeat(worker=worker):
                kind, reached = self.returns.get(worker, (ControlMessage, lambda: None))
                if isinstance(message, Register) and worker in self.returns:
                    self._back.add(worker)
                if isinstance(message, kind) and worker in self._back:
                    self._back.discard(worker)
                    del self.returns[worker]
                    reached()

    def built(self, attempt: Attempt) -> None:
        """A process has built an attempt."""
        host = running_host()
        self.attempts.append((self._by_host[host], attempt))
        self._by_sender[(*attempt.id.subtask.key, attempt.id.attempt)] = attempt
        if self.kills_next and attempt.id.attempt > FIRST_ATTEMPT:
            self.kills_next -= 1
            self.world.within(TAKEOVER_SECONDS, host.kill)

    # --- checks ----------------------------------------------------------------------------------

    def _after_turn(self, host: Host) -> None:
        assert not host.loop.errors, f"{host.name}: {host.loop.errors}"
        assert not self.forgotten, self.forgotten
        self._turns += 1
        if self.checked and self._turns % CHECK_EVERY == 0:
            self.validate(host)
            self._check_snapshots()

    def _check_snapshots(self) -> None:
        """Whoever dies now, in whatever company, what its next attempt asks for is there."""
        if self.coordinator_host.dead:
            return
        alive = [each for each in self.workers if not each.host.dead and each.registered is not None]
        held = [each.worker._deployment.holders.items() for each in alive]
        holders = {(*id.subtask.key, id.attempt): holder for each in held for id, holder in each}
        for job in self.coordinator._state._jobs.values():
            if job.holders and job.state in JOB_LIVE:
                self.snapshot_log.check(job, self._by_sender, holders)

    def validate(self, host: Host) -> None:
        """Check the invariants of a process."""
        worker = self._by_host.get(host)
        if worker is not None:
            worker.validate()
        elif host is self.coordinator_host:
            self.coordinator._state.validate()

    @property
    def living(self) -> list[SimulatedWorker]:
        return [each for each in self.workers if not each.host.lost and each.number]


def _brief_fact(fact: Fact) -> str:
    subtask, number = fact.attempt.subtask, fact.attempt.attempt
    what, why = fact.kind, ""
    if isinstance(fact, TaskStateChanged):
        what, why = fact.state, f": {fact.error.text[:120]}" if fact.error is not None else ""
    return f"{subtask.operator}[{subtask.index}]#{number} {what}{why}"


def brief(message: ControlMessage) -> str:
    """A message on one line of the trace."""
    match message:
        case AttemptReport(facts=facts):
            names = [_brief_fact(fact) for fact in facts]
        case DeployTasks(tasks=found) | TasksRestarted(tasks=found) | CancelTasks(attempts=found):
            names = [f"{each.operator}[{each.index}]#{each.attempt}" for each in found]
        case ReleaseJob(attempts=found):
            names = [f"{each.operator}[{each.index}]#{each.attempt}" for each in found] or ["everything"]
        case Register(reports=reports):
            names = [_brief_fact(fact) for report in reports for fact in report.facts]
        case Registered(desired=desired):
            names = [f"({brief(each)})" for each in desired]
        case WorkerLost(worker=worker):
            names = [f"worker {worker}"]
        case _:
            names = []
    return " ".join([type(message).__name__, *names])


@contextmanager
def simulated(seed: int, settings: ClusterSettings) -> Iterator[Cluster]:
    """A cluster of which only the coordinator runs so far; everything of it is ended behind the block."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        place = folder + "/".ljust(PLACE_CHARS - len(folder), "s")
        os.mkdir(place)
        settings = settings.model_copy(update={"snapshot_dir": place})
        cluster = Cluster(seed, settings, snapshots=place)
        _simulate_threads_and_clocks(patch, cluster)
        _watch(patch, cluster)
        cluster.writes = log_writes(patch)
        cluster.snapshot_log = log_snapshots(patch)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.world.close()
            del AUDITS[seed]


def _simulate_threads_and_clocks(patch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    time = SimulatedTime(cluster.world)
    for module in (task, handoff):
        patch.setattr(module, "threading", cluster.threads)
        patch.setattr(module, "time", time)
    patch.setattr(snapshotholder, "threading", cluster.threads)
    patch.setattr(handoff, "WakeFlag", cluster.threads.Event)
    patch.setattr(coordinator_process, "time", time)
    patch.setattr(diskthreads, "ThreadPoolExecutor", SimulatedDisk)
    patch.setattr(snapshotfolders, "threading", SimulatedFolderThreads)
    patch.setattr(inputs, "TAKEN_ROWS", TAKEN_ROWS)
    for module in (wallclock, busytime, process):
        patch.setattr(module, "time", time)
    patch.setattr(random, "random", cluster.world.random.random)
    for module in (workerreports, coordinator_process):
        patch.setattr(module, "os", SimpleNamespace(getpid=lambda: PID))
    patch.setattr(process, "collect_garbage", lambda *, settled: None)
    patch.setattr(attempts, "TaskPaths", _pausing_paths(cluster))
    publish = BufferBuilder.publish

    def publish_and_pause(self: BufferBuilder, ends: bool = True) -> None:
        publish(self, ends)
        cluster.threads.pause()

    patch.setattr(BufferBuilder, "publish", publish_and_pause)


def _pausing_paths(cluster: Cluster) -> type[handoff.TaskPaths]:
    """Task threads may be interrupted wherever they meet the loop, and are not to be forgotten there."""
    threads = cluster.threads

    class WatchedBell(handoff.TaskBell):
        __slots__ = ("_overdue",)

        def __init__(self, loop: Any, overdue: Callable[[], bool]) -> None:
            super().__init__(loop)
            self._overdue = overdue

        def wait(self, seconds: float) -> None:
            super().wait(seconds)
            if not (self._ringing or self._rung.is_set()) and self._overdue():
                cluster.forgotten.append(f"a thread waits for what is there, at {cluster.world.now:.6f}")

    class PausingPaths(handoff.TaskPaths):
        def __init__(self, inbox: handoff.LoopInbox, *pause: Any) -> None:
            super().__init__(inbox, *pause)
            self.overdue: Callable[[], bool] = lambda: False
            """Whether there is what the thread waits for."""
            self.bell = WatchedBell(inbox.loop, lambda: self.overdue())

        def notify(self, subpartition: Any) -> None:
            threads.pause()
            super().notify(subpartition)
            threads.pause()

        def give_back(self, buffer: Any) -> None:
            threads.pause()
            super().give_back(buffer)
            threads.pause()

        def acquire(self, pool: Any, *hit: Any) -> Any:
            threads.pause()
            self.overdue = lambda: pool.available
            try:
                return super().acquire(pool, *hit)
            finally:
                self.overdue = lambda: False

        def wait(self, seconds: float) -> None:
            self.overdue = partial(cluster.has_input, self)
            try:
                super().wait(seconds)
            finally:
                self.overdue = lambda: False

    return PausingPaths


def _watch(patch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    """Keep every attempt that is built, and note every message between processes."""
    send = ControlLink.send

    class RecordedAttempt(Attempt):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            cluster.built(self)

    def note_and_send(self: ControlLink, message: ControlMessage, request: int = 0) -> None:
        if not isinstance(message, SMALL_TALK):
            cluster.world.note(f"{running_host().name} sends {brief(message)}")
        send(self, message, request)
        cluster.said(message)

    ask = Witnesses.ask

    def count_and_ask(self: Witnesses, *asked: Any, last: int) -> None:
        cluster.unwitnessed += not self._linked()
        ask(self, *asked, last=last)

    patch.setattr(Witnesses, "ask", count_and_ask)
    patch.setattr(deployment, "Attempt", RecordedAttempt)
    patch.setattr(ControlLink, "send", note_and_send)
