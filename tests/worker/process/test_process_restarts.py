"""Producers that fail and links that break under running workers: consumers go on, and the books balance."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import msgpack
import pytest

from minishuffle.api.stream import Stream
from minishuffle.coordinator.scheduling.placement import deployments
from minishuffle.errors import PeerLost
from minishuffle.plan.graph import JobSettings
from minishuffle.plan.planner import compile_job
from minishuffle.transport.tcp import DataLink
from minishuffle.wire.frames import Role
from minishuffle.wire.messages import (
    ConsumerEnds,
    ConsumersEnded,
    Heartbeat,
    PlacedAttempt,
    ReleaseJob,
    TaskAttempt,
    TasksRestarted,
    WorkerLost,
)
from minishuffle.wire.packed import pack_placement, unpack_traffic
from minishuffle.wire.reports import TaskReleased, TaskStateChanged
from minishuffle.worker.channels.peers import PeerLinks
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Coordinator, Running

SECONDS_MAX = 20.0
DROP = JobSettings(on_unavailable="drop")
SOURCE, SINK = 0, 1


class Control:
    """What the test and the threads of the tasks say to each other."""

    end = threading.Event()
    fail = threading.Event()
    held = threading.Event()
    let_go = threading.Event()
    read: ClassVar[set[tuple[str, int]]] = set()
    """Threads of sinks that called :func:`hold`, each with a split of which they had a row."""


@pytest.fixture(autouse=True)
def _anew(coordinator: Coordinator) -> Iterator[None]:
    """Threads are let go before their workers are closed, which would wait for them."""
    Control.end, Control.fail = threading.Event(), threading.Event()
    Control.held, Control.let_go = threading.Event(), threading.Event()
    Control.read = set()
    yield
    for event in (Control.end, Control.let_go):
        event.set()


class Numbers:
    """One split for each subtask: numbers until the test ends it."""

    bounded = False

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        number = 0
        while not Control.end.is_set():
            yield [(split, number + each) for each in range(50)]
            number += 50


class Bounded(Numbers):
    """Split 1 has more for each sink than its subpartition holds, split 0 a batch."""

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        for _ in range(100 if split else 1):
            yield [(split, "x" * 1_000)] * 50


class HeldAtTheEnd:
    """The sink of index 1 reads nearly all of split 1, and holds before its end."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, row: Any) -> Any:
        self.rows += row[0]
        if self.rows == 2_490 and threading.current_thread().name.endswith("[1]"):
            Control.held.set()
            Control.let_go.wait(SECONDS_MAX)
        return row


def fail_of_split_1(row: Any) -> Any:
    if row[0] == 1 and Control.fail.is_set():
        Control.fail.clear()
        raise ValueError("the producer raised")
    return row


def hold(row: Any) -> Any:
    Control.read.add((threading.current_thread().name, row[0]))
    if Control.fail.is_set():
        Control.held.set()
        Control.let_go.wait(SECONDS_MAX)
    return row


class Job:
    """Subtasks of each operator on workers 1 and 2 deal to those of the next; the test is the coordinator."""

    def __init__(
        self, coordinator: Coordinator, stream: Stream[Any], settings: JobSettings = DROP, operators: int = 2
    ) -> None:
        self.coordinator = coordinator
        self.graph = compile_job(stream, parallelism=2, settings=settings)
        self.placement = {(operator, index): index + 1 for operator in range(operators) for index in (0, 1)}
        self.attempts = dict.fromkeys(self.placement, 1)
        self.deploy([(operator, index) for operator, index in self.placement])

    def deploy(self, tasks: list[tuple[int, int]]) -> None:
        addresses = list(self.coordinator.addresses.values())
        plain = deployments(self.graph, (1, 2), addresses, term=self.coordinator.term, job="j1", name="job")
        specs = {(spec.operator, spec.index): spec for message in plain.values() for spec in message.tasks}
        newer = [TaskAttempt(operator=o, index=i, attempt=n) for (o, i), n in self.attempts.items() if n > 1]
        for worker in (1, 2):
            chosen = [
                specs[task].model_copy(update={"attempt": self.attempts[task]})
                for task in tasks
                if self.placement[task] == worker
            ]
            operators = sorted({operator for operator, _ in self.placement})
            update = {
                "tasks": chosen,
                "workers": addresses,
                "placement": {o: pack_placement([self.placement[o, i] for i in (0, 1)]) for o in operators},
                "attempts": newer,
                "programs": {each: self.graph.vertices[each].program for each in operators},
            }
            if chosen:
                self.coordinator.links[worker].send(plain[worker].model_copy(update=update))

    def restart(self, task: tuple[int, int], worker: int) -> None:
        """The next attempt of a task, on that worker, which everybody hears of."""
        operator, index = task
        old = TaskAttempt(operator=operator, index=index, attempt=self.attempts[task])
        release = ReleaseJob(term=self.coordinator.term, job="j1", attempts=[old])
        self.coordinator.links[self.placement[task]].send(release)
        self.attempts[task] += 1
        self.placement[task] = worker
        self.deploy([task])
        self.announce(task)

    def announce(self, task: tuple[int, int]) -> None:
        operator, index = task
        attempt, worker = self.attempts[task], self.placement[task]
        placed = PlacedAttempt(operator=operator, index=index, attempt=attempt, worker=worker)
        addresses = list(self.coordinator.addresses.values())
        self.coordinator.send(
            TasksRestarted(term=self.coordinator.term, job="j1", tasks=[placed], workers=addresses)
        )

    # --- books -----------------------------------------------------------------------------------

    def ended(self, state: str = "finished") -> list[TaskStateChanged]:
        return [m for m in self.coordinator.said(TaskStateChanged) if m.state == state]

    async def finish(self, count: int = 4) -> None:
        """The sources end, the tasks finish, and their partitions are released."""
        Control.end.set()
        await self.coordinator.until(lambda: len(self.ended()) == count)
        self.coordinator.send(ReleaseJob(term=self.coordinator.term, job="j1"))

    async def lost(self, workers: list[Running]) -> int:
        """Rows that were written and not counted at the end, by the books of the tasks. Those of a batch that
        failed were never written."""
        await self.coordinator.until(lambda: all(not worker.snapshot().tasks for worker in workers))
        beats = len(self.coordinator.said(Heartbeat))
        ids = {worker.snapshot().worker for worker in workers}
        await self.coordinator.until(  # what was said of the release came before
            lambda: (
                {beat.worker for beat in self.coordinator.said(Heartbeat)[beats:] if not beat.tasks} == ids
            )
        )
        final = {each.attempt: each.traffic for each in self.ended() + self.ended("failed")}
        final |= {each.attempt: each.traffic for each in self.coordinator.said(TaskReleased)}
        rows = [entry for table in final.values() for entry in unpack_traffic(table)]
        ended = self.ended() + self.ended("failed")
        reasons = [each for m in ended for each in m.counters.rows_dropped.items()]
        dropped = sum(count for reason, count in reasons if reason != "failed_batch")
        return dropped + sum(entry.sent for entry in rows) - sum(entry.received for entry in rows)

    def written(self) -> int:
        """Rows that sources, of all attempts, handed to their partitions."""
        ended = self.ended() + self.ended("failed")
        return sum(m.counters.records_out for m in ended if m.attempt.subtask.operator == SOURCE)

    def counted(self) -> int:
        return sum(msgpack.unpackb(m.result) for m in self.ended() if m.attempt.subtask.operator == SINK)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[DataLink]:
    """The links between workers, as they come up; the last is the one in use."""
    found: list[DataLink] = []
    link_up = PeerLinks.link_up

    def note(peers: PeerLinks, link: DataLink) -> None:
        if link.peer.role == Role.WORKER:
            found.append(link)
        link_up(peers, link)

    monkeypatch.setattr(PeerLinks, "link_up", note)
    return found


async def two_workers(coordinator: Coordinator) -> list[Running]:
    return [await coordinator.worker(number) for number in (1, 2)]


def records_in(workers: list[Running]) -> dict[tuple[int, int], int]:
    return {
        (worker.snapshot().worker, task.index): task.counters.records_in
        for worker in workers
        for task in worker.snapshot().tasks
        if task.operator == SINK
    }


async def goes_on(coordinator: Coordinator, workers: list[Running]) -> None:
    """Every sink has read more than it has now."""
    before = records_in(workers)
    await coordinator.until(lambda: all(n > before[key] + 1_000 for key, n in records_in(workers).items()))


async def received_again(coordinator: Coordinator, workers: list[Running]) -> None:
    """Both ways over the link, more than now."""
    before = [worker.snapshot().remote.buffers_in for worker in workers]
    await coordinator.until(
        lambda: all(w.snapshot().remote.buffers_in > n + 5 for w, n in zip(workers, before, strict=True))
    )


@pytest.mark.slow
async def test_a_link_between_two_live_workers_that_breaks_is_repaired_and_its_loss_counted(
    coordinator: Coordinator, links: list[DataLink]
) -> None:
    workers = await two_workers(coordinator)
    job = Job(coordinator, Stream.source(Numbers()).rebalance().to_count())
    for _ in range(4):
        await received_again(coordinator, workers)
        links[-1].abort(PeerLost("the test cuts it"))
        await goes_on(coordinator, workers)
    await received_again(coordinator, workers)
    assert len(links) == 2 * 5
    await job.finish()
    assert {m.attempt.attempt for m in coordinator.said(TaskStateChanged)} == {1}, "no task has restarted"
    lost = await job.lost(workers)
    assert job.written() - job.counted() == lost > 0
    assert all(w.snapshot().segments_free == w.snapshot().segments_total for w in workers)


async def test_rows_wait_for_a_link_that_is_repaired_if_the_job_says_so(
    coordinator: Coordinator, links: list[DataLink]
) -> None:
    workers = await two_workers(coordinator)
    settings = JobSettings(on_unavailable="wait")
    job = Job(coordinator, Stream.source(Numbers()).rebalance().to_count(), settings)
    for _ in range(2):
        await received_again(coordinator, workers)
        links[-1].abort(PeerLost("the test cuts it"))
        await goes_on(coordinator, workers)
    await job.finish()
    lost = await job.lost(workers)
    assert job.written() - job.counted() == lost
    dropped = [m.counters.rows_dropped for m in job.ended() if m.attempt.subtask.operator == SOURCE]
    assert dropped == [{}, {}], "nothing but what was on its way is lost"


@pytest.mark.parametrize("worker", [2, 1], ids=["in its place", "elsewhere"])
async def test_a_producer_that_raises_is_read_again_from_its_next_attempt(
    coordinator: Coordinator, worker: int
) -> None:
    workers = await two_workers(coordinator)
    job = Job(coordinator, Stream.source(Numbers()).map(fail_of_split_1).rebalance().to_count())
    await received_again(coordinator, workers)
    Control.fail.set()
    await coordinator.until(lambda: job.ended("failed"))
    await goes_on(coordinator, workers)
    job.restart((SOURCE, 1), worker)
    await coordinator.until(
        lambda: attempt(SOURCE, 1, 2) in {m.attempt for m in coordinator.said(TaskStateChanged)}
    )
    await goes_on(coordinator, workers)
    await job.finish()
    (failed,) = job.ended("failed")
    assert failed.error is not None and "the producer raised" in failed.error.text
    assert {(*m.attempt.subtask.key, m.attempt.attempt) for m in job.ended()} == {
        (SOURCE, 0, 1),
        (SOURCE, 1, 2),
        (SINK, 0, 1),
        (SINK, 1, 1),
    }
    lost = await job.lost(workers)
    assert job.written() - job.counted() == lost
    assert all(w.snapshot().segments_free == w.snapshot().segments_total for w in workers)


async def test_a_job_goes_on_without_a_worker_that_is_lost_until_its_tasks_are_elsewhere(
    coordinator: Coordinator,
) -> None:
    workers = await two_workers(coordinator)
    job = Job(coordinator, Stream.source(Numbers()).rebalance().to_count())
    await received_again(coordinator, workers)
    first, second = workers
    second.stop.set()
    coordinator.links[1].send(WorkerLost(term=coordinator.term, worker=2, epoch=2))
    await second.ended()
    await goes_on(coordinator, [first])
    del coordinator.links[2]
    for operator in (SOURCE, SINK):
        job.attempts[operator, 1] += 1
        job.placement[operator, 1] = 1
    job.deploy([(SOURCE, 1), (SINK, 1)])
    for operator in (SOURCE, SINK):
        job.announce((operator, 1))
    await coordinator.until(lambda: {(1, 0), (1, 1)} == set(records_in([first])))
    await goes_on(coordinator, [first])
    canceled = len(job.ended("canceled"))
    Control.end.set()
    await coordinator.until(lambda: len(job.ended()) == 4)
    assert canceled == len(job.ended("canceled")) and not job.ended("failed")
    assert {(*m.attempt.subtask.key, m.attempt.attempt) for m in job.ended()} == {
        (operator, index, 1 + index) for operator in (SOURCE, SINK) for index in (0, 1)
    }


async def test_a_finished_producer_that_runs_again_does_not_wait_for_consumers_that_have_read_it(
    coordinator: Coordinator,
) -> None:
    """The coordinator hears of that when the producer runs again already."""
    workers = await two_workers(coordinator)
    job = Job(coordinator, Stream.source(Bounded()).rebalance().map(HeldAtTheEnd()).to_count())
    await coordinator.until(lambda: len(job.ended()) == 3 and Control.held.is_set())
    assert {m.attempt.subtask.key for m in job.ended()} == {(SOURCE, 0), (SOURCE, 1), (SINK, 0)}
    job.restart((SOURCE, 1), 1)
    Control.let_go.set()
    await coordinator.until(lambda: (SINK, 1) in {m.attempt.subtask.key for m in job.ended()})
    read = ConsumerEnds(operator=SOURCE, index=1, attempt=2, edge=0, consumers=[0, 1])
    coordinator.links[1].send(ConsumersEnded(term=coordinator.term, job="j1", ends=[read]))
    await job.finish(5)
    assert {(*m.attempt.subtask.key, m.attempt.attempt) for m in job.ended()} >= {
        (SOURCE, 1, 1),
        (SOURCE, 1, 2),
    }
    assert {m.attempt.attempt for m in job.ended() if m.attempt.subtask.operator == SINK} == {1}
    await coordinator.until(lambda: all(not worker.snapshot().tasks for worker in workers))
    assert all(w.snapshot().segments_free == w.snapshot().segments_total for w in workers)


async def test_a_task_that_is_stuck_while_a_producer_waits_to_be_read_is_abandoned(
    coordinator: Coordinator,
) -> None:
    settings = coordinator.settings.model_copy(update={"reconnect_timeout": 0.1})
    for number in (1, 2):
        await coordinator.worker(number, settings)
    stream = Stream.source(Numbers()).rebalance().map(hold).to_count()
    job = Job(coordinator, stream)
    # Each sink reads from each source: a channel without a link has nothing that would be left of source 1.
    await coordinator.until(lambda: len(Control.read) == 4)
    Control.fail.set()
    await coordinator.until(Control.held.is_set)
    job.restart((SOURCE, 1), 2)
    await coordinator.until(lambda: job.ended("abandoned"))
    abandoned = job.ended("abandoned")[0]
    assert abandoned.attempt.subtask.operator == SINK and abandoned.error is not None
    assert "is stuck: for 0.1 s its function has not returned" in (abandoned.error.text)


@pytest.mark.slow
async def test_a_task_that_waits_for_its_consumers_is_not_abandoned(coordinator: Coordinator) -> None:
    """What it has yet to read of a producer that was replaced stays in its queue for long."""
    settings = coordinator.settings.model_copy(update={"reconnect_timeout": 0.1})
    workers = [await coordinator.worker(number, settings) for number in (1, 2)]
    Control.fail.set()
    stream = Stream.source(Numbers()).rebalance().map(list).rebalance().map(hold).to_count()
    job = Job(coordinator, stream, operators=3)
    between = 1

    def held_up() -> list[float]:
        """Seconds so far, of each task between."""
        tasks = [task for worker in workers for task in worker.snapshot().tasks if task.operator == between]
        return sorted(task.counters.backpressured_seconds for task in tasks)

    await coordinator.until(lambda: len(held_up()) == 2 and held_up()[0])
    job.restart((SOURCE, 1), 2)
    later = held_up()[1] + 0.5
    await coordinator.until(lambda: job.ended("abandoned") or held_up()[0] > later)
    assert not job.ended("abandoned")
