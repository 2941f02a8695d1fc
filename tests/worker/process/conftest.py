"""Worker processes' loops with a coordinator around them that the test plays."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from minishuffle.api.stream import Stream
from minishuffle.config import ClusterSettings, CoordinatorPlace
from minishuffle.coordinator.scheduling.placement import deployments
from minishuffle.counters import WorkerSnapshot
from minishuffle.ids import Address
from minishuffle.plan.graph import JobSettings
from minishuffle.plan.planner import compile_job
from minishuffle.transport.control import ControlLink, ControlServer
from minishuffle.transport.credentials import Credentials
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.wire.messages import (
    Acknowledge,
    AskDial,
    ControlMessage,
    Dial,
    WorkerAddress,
)
from minishuffle.wire.registration import Register, Registered
from minishuffle.wire.reports import AttemptReport, TaskStateChanged
from minishuffle.worker.service import run_worker
from minishuffle.worker.tasks.crashrecord import CrashRecord

HOST = "127.0.0.1"
SECRET = b"the cluster's"
CLUSTER = "test"
SECONDS_MAX = 120.0
TERM = 3
SETTINGS = ClusterSettings(
    heartbeat_interval=0.02,
    heartbeat_timeout=5.0,
    network_memory_bytes=4 << 20,
    task_cancel_timeout=5.0,
)

M = TypeVar("M", bound=ControlMessage)


class Web:
    """Stands in for the metrics server."""

    def __init__(self, snapshot: Callable[[], WorkerSnapshot], bound: str) -> None:
        self.snapshot, self.bound = snapshot, bound
        self.port = 9
        self.closed = False

    async def close(self) -> None:
        self.closed = True


@dataclass
class Running:
    """One worker: what it said when it was ready, its figures, and how to end it."""

    stop: asyncio.Event
    leave: asyncio.Event
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
        self.term, self.settings = TERM, SETTINGS
        self.server = ControlServer()
        self.tls: Credentials | None = None
        """From the next start on; also of workers."""
        self.links: dict[int, ControlLink] = {}
        self.addresses: dict[int, WorkerAddress] = {}
        self.messages: list[ControlMessage] = []
        self.requests: list[Register] = []
        self.answer: ControlMessage | None = None
        """Instead of a registration."""
        self.silent = False
        self.acknowledges = True
        self.epoch = 0
        self.applied = 0
        """The highest number of a report, of the one worker."""
        self.workers: list[Running] = []

    async def start(self, port: int = 0) -> None:
        identity = Identity(Role.COORDINATOR, CLUSTER, 0, 0)
        await self.server.start(
            HOST, port, identity, SECRET, on_link=self._on_link, refused=lambda *refusal: None, tls=self.tls
        )

    async def lose(self) -> None:
        """It is gone, with all its links."""
        await self.server.close()

    async def start_again(self, port: int | None = None) -> None:
        """One of the next term, at the same port unless another is given."""
        before = self.server.port
        self.term += 1
        self.server = ControlServer()
        await self.start(before if port is None else port)

    @property
    def address(self) -> Address:
        return Address(HOST, self.server.port)

    def _on_link(self, link: ControlLink) -> None:
        link.start(lambda message, request: self._on_message(link, message), lambda error: None)

    def _on_message(self, link: ControlLink, message: ControlMessage) -> None:
        if not isinstance(message, Register):
            self.messages.append(message)
            if self.acknowledges and isinstance(message, AttemptReport) and message.number:
                self.applied = message.number
                link.send(Acknowledge(term=self.term, number=message.number))
            if isinstance(message, AskDial):
                self.links[message.target].send(Dial(term=self.term, peer=self.addresses[message.worker]))
            return
        self.requests.append(message)
        if self.answer is not None:
            link.send(self.answer)
        elif not self.silent:
            self._register(link, message)

    def _register(self, link: ControlLink, message: Register) -> None:
        worker = message.requested_worker
        if message.epoch:  # it comes back
            self.links[worker] = link
            welcome = Registered(
                term=self.term,
                worker=worker,
                epoch=message.epoch,
                heartbeat_interval=SETTINGS.heartbeat_interval,
                applied=self.applied,
            )
            link.send(welcome)
            for report in message.reports:
                self._on_message(link, report)
            return
        self.epoch += 1
        self.links[worker] = link
        self.addresses[worker] = WorkerAddress(
            worker=worker, epoch=self.epoch, host=message.host, data_port=message.data_port
        )
        link.send(
            Registered(
                term=self.term,
                worker=worker,
                epoch=self.epoch,
                heartbeat_interval=SETTINGS.heartbeat_interval,
            )
        )

    # --- workers --------------------------------------------------------------------------------------

    def begin(
        self,
        worker: int = 1,
        settings: ClusterSettings = SETTINGS,
        address: Address | None = None,
        standby: bool = False,
        find: Callable[[], CoordinatorPlace | None] = lambda: None,
        *,
        host: str = HOST,
        advertise: str = "",
        tls: Credentials | None = None,
    ) -> Running:
        """Start a worker without waiting for anything."""
        running = Running(asyncio.Event(), asyncio.Event())

        async def web(snapshot: Callable[[], WorkerSnapshot], bound: str) -> Web:
            running.web.append(Web(snapshot, bound))
            return running.web[0]

        running.task = asyncio.create_task(
            run_worker(
                # The loop is in the thread of all tests, whose children would take its policy over.
                settings.model_copy(update={"loop_lets_tasks_finish": False}),
                coordinator=address or self.address,
                secret=SECRET,
                cluster=CLUSTER,
                host=host,
                advertise=advertise,
                requested_worker=worker,
                standby=standby,
                find=find,
                record=CrashRecord(),
                tls=tls or self.tls,
                web=web,
                ready=running.told.update,
                stop=running.stop,
                leave=running.leave,
            )
        )
        self.workers.append(running)
        return running

    async def worker(self, worker: int = 1, settings: ClusterSettings = SETTINGS, **options: Any) -> Running:
        running = self.begin(worker, settings, **options)
        await self.until(lambda: running.told)
        return running

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while not condition():
                await asyncio.sleep(0.001)

    # --- what was said and what is to be said ---------------------------------------------------------

    def said(self, kind: type[M]) -> list[M]:
        return [each for each in self.everything() if isinstance(each, kind)]

    def everything(self) -> list[ControlMessage]:
        """The messages, with the facts of each report behind it."""
        return [
            each
            for message in self.messages
            for each in (message, *(message.facts if isinstance(message, AttemptReport) else ()))
        ]

    def reports(self, kind: type[ControlMessage]) -> list[AttemptReport]:
        """Reports that have such a fact."""
        return [
            each for each in self.said(AttemptReport) if any(isinstance(fact, kind) for fact in each.facts)
        ]

    def states(self, job: str = "j1") -> list[tuple[int, int, str]]:
        """(operator, index, state), in the order of the messages."""
        changes = ((m.attempt.subtask, m.state) for m in self.said(TaskStateChanged))
        return [(*subtask.key, state) for subtask, state in changes if subtask.job == job]

    def ended(self, job: str = "j1") -> list[str]:
        return [state for _, _, state in self.states(job) if state != "running"]

    def deploy(
        self,
        stream: Stream[Any],
        placement: dict[int, int],
        job: str = "j1",
        settings: JobSettings | None = None,
        prepared: int = 0,
    ) -> int:
        """Deploy a job; ``placement`` is slot -> worker, as many as the parallelism. Returns its tasks.

        ``prepared`` is a worker that has the programs.
        """
        graph = compile_job(stream, parallelism=len(placement), settings=settings)
        used = [self.addresses[worker] for worker in sorted(set(placement.values()))]
        slots = tuple(worker for _, worker in sorted(placement.items()))
        messages = deployments(graph, slots, used, term=self.term, job=job, name="a job")
        for worker, message in messages.items():
            short = {"programs": {}} if worker == prepared else {}
            self.links[worker].send(message.model_copy(update=short))
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
def _interpreter_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker tunes its whole process, and would have collections pass over what the test made."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = Coordinator()
    await coordinator.start()
    yield coordinator
    await coordinator.close()
