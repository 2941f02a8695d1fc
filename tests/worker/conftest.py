"""A worker's tasks without its process: one deployment with its inbox, or the paths of one task."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest

from minishuffle.api.stream import Stream
from minishuffle.coordinator.scheduling.placement import deployments
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.collected import unpack_collected
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import AttemptId
from minishuffle.operators.row_conversion import rows_of
from minishuffle.plan.graph import JobGraph, JobSettings
from minishuffle.plan.planner import compile_job
from minishuffle.wire.messages import DeployTasks, LogLines, Step, TaskSpec, WorkerAddress, WriteState
from minishuffle.wire.reports import (
    Fact,
    FileCompleted,
    PartitionReadable,
    SnapshotsHeld,
    SourcePositions,
    SplitsDealt,
)
from minishuffle.worker.channels.registry import ChannelKey
from minishuffle.worker.instructions import StartTask, attempt_id
from minishuffle.worker.reports.outbox import Outbox
from minishuffle.worker.tasks import handoff
from minishuffle.worker.tasks.attempt import WorkerServices
from minishuffle.worker.tasks.deployment import Deployment
from minishuffle.worker.tasks.handoff import LoopInbox, TaskPaths
from minishuffle.worker.tasks.task import Task, TaskOutcome
from minishuffle.worker.wallclock import WallClock
from support.attempts import attempt

SECONDS_MAX = 20.0
WORKER = 1


class Site:
    """Worker 1 with everything on it. ``rows`` and ``lines`` are what tasks collected and logged."""

    def __init__(self, segments: int = 256, segment_bytes: int = 1024, retained_bytes: int = 1 << 24) -> None:
        self.inbox = LoopInbox(asyncio.get_running_loop())
        self.recovered: list[tuple[AttemptId, Step]] = []
        """Steps of recoveries; those of first attempts are none."""
        self.stood: list[Any] = []
        self.saved: dict[AttemptId, Any] = {}
        self.made: dict[AttemptId, Any] = {}
        """State that tasks have taken, and all parts of it."""
        self.snapshots_wanted = 0
        self.held: list[SnapshotsHeld] = []
        """Reports of holders."""
        self.readable: list[tuple[AttemptId, int]] = []
        """Attempts that have announced their first buffer, with its edge."""
        self.pool = NetworkBufferPool(segments, segment_bytes)
        services = WorkerServices(
            worker=WORKER,
            pool=self.pool,
            inbox=self.inbox,
            report=self._on_report,
            said=self._on_said,
            fact=self._on_fact,
            recovered=lambda attempt, step: self.recovered.append((attempt, step)),
            stands=self.stood.append,
            saved=self._on_saved,
            made=lambda key, message, made: self.made.update({key: made}),
            retained_bytes=retained_bytes,
            snapshot_wanted=self._on_snapshot_wanted,
            snapshots_held=self.held.append,
            clock=asyncio.get_running_loop().time,
            cpu=time.thread_time,
            wall=WallClock(),
        )
        self.deployment = Deployment(services)
        self.reports: list[tuple[AttemptId, TaskOutcome | None]] = []
        self.outcomes: dict[AttemptId, TaskOutcome] = {}
        self.rows: list[Any] = []
        self.batches = 0
        self.lines: list[str] = []
        self.positions: dict[AttemptId, list[bytes]] = {}
        """Tables that sources have reported."""
        self.dealt: list[int] = []
        """How many splits sources have."""
        self.files: dict[AttemptId, list[FileCompleted]] = {}
        """What sinks have completed."""
        self.acknowledges = True
        """Every report of a source or of a file at once."""

    def _on_report(self, task: Task, outcome: TaskOutcome | None) -> None:
        key = task.attempt_id
        self.reports.append((key, outcome))
        if outcome is not None:
            self.outcomes[key] = outcome
            self.deployment.attempts[key].end(moved=outcome.moved)

    def _on_saved(self, key: AttemptId, message: WriteState, taken: Any, stood: float) -> None:
        self.saved[key] = taken
        self.deployment.attempts[key].pass_barrier(message.barrier)

    def _on_snapshot_wanted(self) -> None:
        self.snapshots_wanted += 1

    def _on_fact(self, fact: Fact) -> None:
        there = self.deployment.attempts[fact.attempt]
        match fact:
            case SourcePositions(positions=positions):
                if positions:
                    self.positions.setdefault(fact.attempt, []).append(positions)
                if self.acknowledges:
                    there.task.leases.acknowledge()
            case SplitsDealt(splits=splits):
                self.dealt.append(splits)
            case FileCompleted():
                self.files.setdefault(fact.attempt, []).append(fact)
                if self.acknowledges:
                    there.task.files.acknowledge(fact.writer)
            case PartitionReadable(edge=edge):
                self.readable.append((fact.attempt, edge))

    def _on_said(self, outbox: Outbox) -> None:
        outbox.take_notice()
        while (message := outbox.take(1)) is not None:
            if isinstance(message, LogLines):
                self.lines += message.lines
                continue
            self.rows += rows_of(Batch(unpack_collected(message.payload)))
            self.batches += 1
            outbox.acknowledge(message.rows)

    def message(self, graph: JobGraph, job: str) -> DeployTasks:
        placement = (WORKER,) * graph.slots_needed
        address = WorkerAddress(worker=WORKER, epoch=1, host="127.0.0.1", data_port=1)
        return deployments(graph, placement, [address], term=1, job=job, name=job)[WORKER]

    def pass_barrier(self, number: int = 1) -> None:
        """Have all tasks take their state at a barrier of that number, and go on."""
        message = WriteState(term=1, job="j1", savepoint=number, barrier=number, folder="/s", goes_on=True)
        for each in self.deployment.attempts.values():
            assert each.paths.pause.save(message)
            each.paths.bell.ring()

    def deploy(
        self,
        stream: Stream[Any],
        job: str = "j1",
        *,
        parallelism: int = 1,
        settings: JobSettings | None = None,
        connect: bool = True,
        retained: bool = False,
    ) -> list[Task]:
        """Start a job's tasks and join them; ``connect=False`` leaves every exchange unread. ``retained``:
        every exchange is."""
        graph = compile_job(stream, parallelism=parallelism, settings=settings)
        message = self.message(graph, job)
        if retained:
            message = message.model_copy(update={"tasks": [_retaining(spec) for spec in message.tasks]})
        for spec in message.tasks:
            self.deployment.start(StartTask(message, spec))
        for spec in message.tasks if connect else ():
            for gate in spec.inputs:
                for producer, _, _ in message.channels(gate):
                    key = ChannelKey(attempt_id(job, spec), gate.edge, producer)
                    self.deployment.connect_local(
                        key, attempt(gate.operator, producer, job=job), 1, version=1
                    )
        return self.tasks(job)

    def tasks(self, job: str = "j1") -> list[Task]:
        return [each.task for key, each in self.deployment.attempts.items() if key.subtask.job == job]

    def release(self, job: str = "j1") -> None:
        self.deployment.release([key for key in self.deployment.attempts if key.subtask.job == job])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while not condition():
                await asyncio.sleep(0.001)

    async def finish(self, job: str = "j1") -> list[TaskOutcome]:
        """Wait for the outcome of every task of a job."""
        keys = [key for key in self.deployment.attempts if key.subtask.job == job]
        await self.until(lambda: all(key in self.outcomes for key in keys))
        return [self.outcomes[key] for key in keys]

    async def run(self, stream: Stream[Any], job: str = "j1", **options: Any) -> list[TaskOutcome]:
        self.deploy(stream, job, **options)
        return await self.finish(job)

    async def close(self) -> None:
        """Cancel what runs, release every job, and see that every segment came home."""
        tasks = [each.task for each in self.deployment.attempts.values()]
        for task in tasks:
            task.paths.cancel()
        await self.until(lambda: not any(task.thread and task.thread.is_alive() for task in tasks))
        await asyncio.sleep(0)  # the loop takes what threads gave back last
        self.deployment.release(list(self.deployment.attempts))
        assert self.deployment.attempts == {}
        self.deployment.services.disk.close()


def _retaining(spec: TaskSpec) -> TaskSpec:
    inputs = [each.model_copy(update={"guaranteed": True}) for each in spec.inputs]
    outputs = [each.model_copy(update={"retained": True}) for each in spec.outputs]
    return spec.model_copy(update={"inputs": inputs, "outputs": outputs})


class Turns:
    """An event loop's two calls, whose turns the test takes."""

    def __init__(self) -> None:
        self.wakes = 0
        self.scheduled: deque[Callable[[], None]] = deque()

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.wakes += 1
        self.scheduled.append(call)

    def call_soon(self, call: Callable[[], None]) -> None:
        self.scheduled.append(call)

    def turn(self) -> None:
        for _ in range(len(self.scheduled)):
            self.scheduled.popleft()()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """With 256 segments of 1 KiB; all of them have to be back in the end."""
    site = Site()
    yield site
    await site.close()
    site.pool.validate()
    assert site.pool.free == site.pool.total
    assert site.pool.required == 0


@pytest.fixture
def site_of() -> type[Site]:
    """For tests that choose the memory, or that write segments off."""
    return Site


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def inbox(turns: Turns) -> LoopInbox:
    return LoopInbox(cast(asyncio.AbstractEventLoop, turns))


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait ends by itself before the test does: a wake-up that is lost is seen."""
    monkeypatch.setattr(handoff, "WAIT_SECONDS_MAX", 10 * SECONDS_MAX)


@pytest.fixture
def busy_switching() -> Iterator[None]:
    """Have the interpreter switch threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def paths_of(inbox: LoopInbox) -> Callable[..., TaskPaths]:
    """Makes an attempt's paths; what the test does not care about may be left out."""

    def make() -> TaskPaths:
        return TaskPaths(inbox)

    return make
