"""Jobs on one worker process and on two, from deploy to release."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from minishuffle import limits
from minishuffle.api.stream import Stream
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import ResourceExhausted, ShuffleError
from minishuffle.exchange.channels import ChannelEvent
from minishuffle.exchange.elements import unpack_rows
from minishuffle.limits import DEBLOATED_BYTES_START
from minishuffle.plan.graph import JobSettings
from minishuffle.plan.planner import compile_job
from minishuffle.wire.messages import (
    Acknowledge,
    AskDial,
    CancelTasks,
    Heartbeat,
    LogLines,
    PrepareJob,
    ReleaseJob,
    WorkerLost,
)
from minishuffle.wire.packed import unpack_traffic
from minishuffle.wire.reports import (
    AttemptReport,
    Collected,
    FileCompleted,
    TaskReleased,
    TaskStateChanged,
)
from minishuffle.worker.channels.registry import ChannelKey, InputRegistry
from minishuffle.worker.tasks.task import Task

if TYPE_CHECKING:
    from conftest import Coordinator, Running

SECONDS_MAX = 20.0
ROWS = 10_000
WITHOUT_LEASES = JobSettings(restart_strategy="none")
"""For sources whose coordinator answers nothing."""
TEXT = ["to be or not to be", "that is the question", "to die to sleep no more"] * 40


class Endless:
    bounded = False

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        while True:
            yield ["row"] * 50


class Quiet(Endless):
    """Far less than a segment, and then nothing."""

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        yield ["row"]
        Stuck.let_go.wait(SECONDS_MAX)


def fails_soon(row: Any) -> Any:
    raise ValueError(row)


def long_failure(row: Any) -> Any:
    raise ValueError("x" * 20_000)


class Long:
    """More than the sockets hold, in rows of 5,000 characters."""

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        for _ in range(ROWS // 100):
            yield ["x" * 5_000] * 100


def rows_of(batch: Collected) -> int:
    return len(unpack_rows(batch.payload))


class Stuck:
    let_go = threading.Event()
    reached: list[Any] = []
    """What tasks are stuck with, or were."""


def stuck(row: Any) -> Any:
    Stuck.reached.append(row)
    Stuck.let_go.wait(SECONDS_MAX)
    return row


def busy(row: Any) -> Any:
    """Takes some time, so that its task always has something to read."""
    return sum(range(row % 7, 10_000))


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    """Nobody is stuck any more when the test is over."""
    Stuck.let_go, Stuck.reached = threading.Event(), []
    yield
    Stuck.let_go.set()


# --- jobs -----------------------------------------------------------------------------------------------


async def test_a_job_on_one_worker_from_deploy_to_release(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    stream = Stream.items(range(5000)).rebalance().to_count()
    assert coordinator.deploy(stream, {0: 1}) == 2
    await coordinator.until(lambda: len(coordinator.ended()) == 2)
    assert set(coordinator.states()) == {(o, 0, s) for o in (0, 1) for s in ("running", "finished")}
    finished = [m for m in coordinator.said(TaskStateChanged) if m.state == "finished"]
    source, sink = sorted(finished, key=lambda m: m.attempt)
    assert msgpack.unpackb(sink.result) == 5000
    assert source.counters.records_out == sink.counters.records_in == 5000
    assert {task.state for task in running.snapshot().tasks} == {"finished"}
    coordinator.send(ReleaseJob(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: running.snapshot().tasks == ())
    assert running.snapshot().segments_free == running.snapshot().segments_total
    assert running.snapshot().remote == ConnectionCounters(), "nothing of it went over a socket"


async def test_a_standby_worker_has_links_and_programs_before_it_has_tasks(coordinator: Coordinator) -> None:
    await coordinator.worker(1)
    standby = await coordinator.worker(2, standby=True)
    assert [request.standby for request in coordinator.requests] == [False, True]
    stream = Stream.items(range(5000)).key_by(lambda number: number % 7).count()
    graph = compile_job(stream.to_count(), parallelism=2)
    programs = {number: vertex.program for number, vertex in enumerate(graph.vertices)}
    workers = [coordinator.addresses[1]]
    coordinator.links[2].send(PrepareJob(term=coordinator.term, job="j1", programs=programs, workers=workers))
    await coordinator.until(lambda: standby.snapshot().connections == 1)
    tasks = coordinator.deploy(stream.to_count(), {0: 1, 1: 2}, prepared=2)
    await coordinator.until(lambda: coordinator.ended() == ["finished"] * tasks)
    assert len(coordinator.said(AskDial)) == 1
    assert [report.connections for report in coordinator.said(Heartbeat)[-1].peers] == [1]


async def test_collected_rows_and_lines_reach_the_coordinator(coordinator: Coordinator) -> None:
    await coordinator.worker()
    rows = Stream.items(["a", "b"])
    coordinator.deploy(Stream.together(rows.collect(), rows.print()), {0: 1})
    await coordinator.until(lambda: len(coordinator.ended()) == 3)
    assert [unpack_rows(m.payload) for m in coordinator.said(Collected)] == [["a"], ["b"]]
    assert [line for m in coordinator.said(LogLines) for line in m.lines] == ["'a'", "'b'"]


@pytest.mark.slow
@pytest.mark.parametrize("sink", ["collect", "print"])
async def test_a_task_waits_for_a_coordinator_that_takes_its_rows_slowly(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, sink: str
) -> None:
    monkeypatch.setattr(limits, "CONTROL_UNSENT_BYTES_MAX", 4 << 20)
    running = await coordinator.worker()
    pace = coordinator.links[1]._transport
    pace.pause_reading()
    coordinator.deploy(getattr(Stream.source(Long()), sink)(), {0: 1}, settings=WITHOUT_LEASES)

    def waits() -> bool:
        tasks = running.snapshot().tasks
        return bool(tasks) and tasks[0].counters.records_out >= 1 and running.snapshot().loop_lag.count > 5

    await coordinator.until(waits)
    taken = -1
    while (now := running.snapshot().tasks[0].counters.records_out) > taken:
        taken = now
        await asyncio.sleep(0.2)
    assert taken < ROWS and running.task is not None and not running.task.done()
    pace.resume_reading()
    await coordinator.until(lambda: coordinator.ended() == ["finished"])
    said = [m for m in coordinator.everything() if isinstance(m, Collected | LogLines | TaskStateChanged)]
    assert isinstance(said[-1], TaskStateChanged), "what it said comes before its end"
    numbers = sum(rows_of(m) for m in said if isinstance(m, Collected))
    lines = [line for m in said if isinstance(m, LogLines) for line in m.lines]
    assert (numbers or len(lines)) == ROWS


async def test_cancel_ends_a_task_whose_lines_nobody_takes(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await coordinator.worker()
    pace = coordinator.links[1]._transport
    pace.pause_reading()
    coordinator.deploy(Stream.source(Endless()).print(), {0: 1}, settings=WITHOUT_LEASES)
    await coordinator.until(lambda: running.snapshot().tasks)
    await coordinator.until(lambda: running.snapshot().tasks[0].counters.records_out > 1_000)
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: {task.state for task in running.snapshot().tasks} == {"canceled"})
    pace.resume_reading()
    await coordinator.until(lambda: coordinator.ended() == ["canceled"])


async def test_a_deploy_said_twice_runs_once(coordinator: Coordinator) -> None:
    await coordinator.worker()
    stream = Stream.items([1]).to_count()
    for _ in range(2):
        coordinator.deploy(stream, {0: 1})
    coordinator.deploy(stream, {0: 1}, "j2")
    await coordinator.until(lambda: coordinator.ended("j2"))
    await coordinator.until(lambda: coordinator.ended())
    assert coordinator.states() == [(0, 0, "running"), (0, 0, "finished")]


async def test_rows_are_flushed_in_time_while_jobs_come_and_go(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    settings = JobSettings(buffer_timeout=0.1)
    coordinator.deploy(Stream.source(Quiet()).rebalance().to_count(), {0: 1}, settings=settings)

    def taken() -> int:
        coordinator.send(ReleaseJob(term=coordinator.term, job="another"))
        return sum(task.counters.records_in for task in running.snapshot().tasks if task.operator)

    await coordinator.until(taken)
    Stuck.let_go.set()


async def test_cancel_ends_the_tasks_of_that_job_alone(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    for job in ("j1", "j2"):
        coordinator.deploy(Stream.source(Endless()).rebalance().to_count(), {0: 1}, job)

    def taken(job: str) -> int:
        return sum(task.counters.records_in for task in running.snapshot().tasks if task.job == job)

    await coordinator.until(lambda: taken("j1") and taken("j2"))
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: coordinator.ended() == ["canceled"] * 2)
    before = taken("j2")
    await coordinator.until(lambda: taken("j2") > before)
    assert coordinator.ended("j2") == []


async def test_a_task_that_does_not_fit_fails_with_the_arithmetic(coordinator: Coordinator) -> None:
    settings = coordinator.settings.model_copy(update={"network_memory_bytes": 70_000})
    running = await coordinator.worker(settings=settings)
    coordinator.deploy(Stream.items([1]).rebalance().to_count(), {0: 1})
    await coordinator.until(lambda: "failed" in coordinator.ended())
    (failed,) = [m for m in coordinator.said(TaskStateChanged) if m.state == "failed"]
    assert failed.error is not None
    assert failed.error.code == ResourceExhausted.code
    assert "2 of 2 are required by other tasks" in failed.error.text
    assert running.task is not None and not running.task.done()


async def test_a_task_that_cannot_start_fails_alone(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await coordinator.worker()
    start = Task.start

    def start_sources(task: Task) -> None:
        if task.gates:
            raise RuntimeError("can't start new thread")
        start(task)

    monkeypatch.setattr(Task, "start", start_sources)
    coordinator.deploy(Stream.source(Endless()).rebalance().to_count(), {0: 1})
    await coordinator.until(lambda: "failed" in coordinator.ended())
    (failed,) = [m for m in coordinator.said(TaskStateChanged) if m.state == "failed"]
    assert failed.attempt.subtask.operator == 1
    assert (
        failed.error is not None and failed.error.text == "to_count[0]: RuntimeError: can't start new thread"
    )
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: coordinator.ended() == ["failed", "canceled"])
    monkeypatch.undo()
    count = coordinator.deploy(Stream.items([1]).rebalance().to_count(), {0: 1}, "j2")
    await coordinator.until(lambda: coordinator.ended("j2") == ["finished"] * count)
    assert running.task is not None and not running.task.done()


async def test_a_report_that_cannot_be_sent_is_replaced_by_a_short_one(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await coordinator.worker()
    monkeypatch.setattr(limits, "CONTROL_FRAME_BYTES_MAX", 10_000)
    coordinator.deploy(Stream.items([1]).map(long_failure).to_count(), {0: 1})
    await coordinator.until(lambda: coordinator.ended() == ["failed"])
    (failed,) = [m for m in coordinator.said(TaskStateChanged) if m.state == "failed"]
    assert failed.error is not None
    assert failed.error.text.startswith("task j1/0.0#1 ended as failed, which could not be reported: ")
    assert "is too large for the control plane" in failed.error.text
    assert running.task is not None and not running.task.done()


async def test_tasks_that_ignore_their_cancel_are_abandoned_and_too_many_end_the_worker(
    coordinator: Coordinator,
) -> None:
    settings = coordinator.settings.model_copy(update={"task_cancel_timeout": 0.05, "abandoned_max": 1})
    running = await coordinator.worker(settings=settings)
    for job in ("j1", "j2"):
        coordinator.deploy(Stream.items([1]).map(stuck).to_count(), {0: 1}, job)
    await coordinator.until(lambda: len(Stuck.reached) == 2)
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: coordinator.ended("j1") == ["abandoned"])
    assert running.snapshot().abandoned_tasks == 1
    assert running.task is not None and not running.task.done()
    coordinator.send(CancelTasks(term=coordinator.term, job="j2"))
    with pytest.raises(ShuffleError, match="2 tasks were abandoned, at most 1 may be"):
        await running.ended()
    assert coordinator.ended("j2") == ["abandoned"]


async def test_the_heartbeat_names_the_slots_of_abandoned_tasks_until_their_threads_have_ended(
    coordinator: Coordinator,
) -> None:
    await coordinator.worker(settings=coordinator.settings.model_copy(update={"task_cancel_timeout": 0.05}))
    coordinator.deploy(Stream.items([1]).map(stuck).to_count(), {0: 1})
    await coordinator.until(lambda: len(Stuck.reached) == 1)
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: coordinator.ended("j1") == ["abandoned"])
    beats = len(coordinator.said(Heartbeat))
    await coordinator.until(lambda: len(coordinator.said(Heartbeat)) > beats)
    assert coordinator.said(Heartbeat)[-1].report.stuck == {"j1": [0]}
    Stuck.let_go.set()
    await coordinator.until(lambda: coordinator.said(Heartbeat)[-1].report.stuck == {})


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


@pytest.mark.slow
async def test_a_consumer_tells_producers_of_both_workers_how_large_buffers_are_to_be(
    coordinator: Coordinator,
) -> None:
    workers = [await coordinator.worker(worker) for worker in (1, 2)]
    numbers = Stream.generate(lambda start, count: list(range(start, start + count)))
    settings = JobSettings(debloat_target=0.5)
    coordinator.deploy(numbers.rebalance().map(busy).to_count(), {0: 1, 1: 2}, settings=settings)

    def sizes() -> list[int | None]:
        tasks = [task for running in workers for task in running.snapshot().tasks]
        return [gate.debloated_bytes for task in tasks for gate in task.gates]

    await coordinator.until(lambda: len(sizes()) == 2 and None not in sizes())
    for running in workers:
        await coordinator.until(lambda r=running: r.snapshot().remote.frames_in.get("new_buffer_size", 0) > 0)
    assert set(sizes()) != {DEBLOATED_BYTES_START}
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: len(coordinator.ended()) == 4)


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
    coordinator.send(ReleaseJob(term=coordinator.term, job="j1"))
    for running in workers:
        await coordinator.until(partial(_has_no_task, running))
        assert running.snapshot().segments_free == running.snapshot().segments_total


async def test_channels_are_attached_and_end_whether_they_are_local_or_not(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: dict[ChannelKey, list[str]] = {}
    move = InputRegistry.move

    def note(registry: InputRegistry, key: ChannelKey, generation: int, event: ChannelEvent) -> bool:
        events.setdefault(key, []).append(event.value)
        return move(registry, key, generation, event)

    monkeypatch.setattr(InputRegistry, "move", note)
    for number in (1, 2):
        await coordinator.worker(number)
    stream = Stream.items(range(5_000)).key_by(lambda number: number % 7).count().to_count()
    count = coordinator.deploy(stream, {0: 1, 1: 2})
    await coordinator.until(lambda: coordinator.ended() == ["finished"] * count)
    assert len(events) == 4
    assert set(map(tuple, events.values())) == {("request", "attach", "end")}


def traffic_of(coordinator: Coordinator) -> dict[tuple[int, int], bytes]:
    """The last table of each task, by operator and index, in the order in which the worker sent them."""
    tables: dict[tuple[int, int], bytes] = {}
    for message in coordinator.everything():
        if isinstance(message, Heartbeat):
            tables.update((task.attempt.subtask.key, task.traffic) for task in message.tasks)
        elif isinstance(message, TaskReleased | TaskStateChanged) and message.traffic:
            tables[message.attempt.subtask.key] = message.traffic
    return tables


def rows_by_edge(coordinator: Coordinator) -> dict[int, Counter[str]]:
    """Rows of all attempts together."""
    edges: dict[int, Counter[str]] = {}
    for table in traffic_of(coordinator).values():
        for peer in unpack_traffic(table):
            of_edge = edges.setdefault(peer.edge, Counter())
            of_edge.update(sent=peer.sent, received=peer.received, lost=peer.skipped + peer.incomplete)
    return edges


async def test_producers_have_sent_what_consumers_have_received_by_edge_and_peer(
    coordinator: Coordinator,
) -> None:
    workers = [await coordinator.worker(number) for number in (1, 2)]
    numbers = Stream.items(range(9_000)).rebalance().map(abs)
    stream = numbers.key_by(lambda number: number % 97).count(emit="each").collect()
    count = coordinator.deploy(stream, {0: 1, 1: 2})
    await coordinator.until(lambda: coordinator.ended() == ["finished"] * count)
    coordinator.send(ReleaseJob(term=coordinator.term, job="j1"))
    for running in workers:
        await coordinator.until(partial(_has_no_task, running))
    await coordinator.until(
        lambda: all(edge["sent"] == edge["received"] for edge in rows_by_edge(coordinator).values())
    )
    edges = rows_by_edge(coordinator)
    assert {edge: rows["sent"] for edge, rows in edges.items()} == {0: 9_000, 1: 9_000}
    assert not any(rows["lost"] for rows in edges.values())
    pairs: dict[tuple[int, int, int], list[int]] = {}
    for (_, own), table in traffic_of(coordinator).items():
        for peer in unpack_traffic(table):
            assert peer.attempt == 1
            if peer.sent:
                pairs.setdefault((peer.edge, own, peer.subtask), [0, 0])[0] += peer.sent
            if peer.received:
                pairs.setdefault((peer.edge, peer.subtask, own), [0, 0])[1] += peer.received
    assert all(sent == received for sent, received in pairs.values())
    assert {(1, producer, consumer) for producer in (0, 1) for consumer in (0, 1)} <= set(pairs)


async def test_what_a_task_that_failed_did_not_take_was_discarded(coordinator: Coordinator) -> None:
    workers = [await coordinator.worker(number) for number in (1, 2)]
    stream = Stream.source(Endless()).rebalance().map(fails_soon).to_count()
    coordinator.deploy(stream, {0: 1, 1: 2})
    await coordinator.until(lambda: coordinator.ended().count("failed") == 2)
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: len(coordinator.ended()) == 4)

    def books() -> tuple[int, int]:
        rows = rows_by_edge(coordinator)[0]
        discarded = sum(running.snapshot().remote.rows_discarded for running in workers)
        return rows["sent"], rows["received"] + discarded

    await coordinator.until(lambda: books()[0] == books()[1] > 0)
    beats = len(coordinator.said(Heartbeat))
    await coordinator.until(lambda: len(coordinator.said(Heartbeat)) >= beats + 4)
    assert books()[0] == books()[1], "and nothing is counted twice"
    reports = {beat.worker: beat.report for beat in coordinator.said(Heartbeat)[-4:]}
    assert sum(report.remote_records_discarded for report in reports.values()) == sum(
        running.snapshot().remote.rows_discarded for running in workers
    )


async def test_a_lost_peer_fails_the_tasks_that_read_from_it(coordinator: Coordinator) -> None:
    running = await coordinator.worker(1)
    other = await coordinator.worker(2)
    stream = Stream.source(Endless()).rebalance().to_count()
    coordinator.deploy(stream, {0: 1, 1: 2}, settings=JobSettings(restart_strategy="none"))
    await coordinator.until(lambda: running.snapshot().remote.buffers_in > 0)
    coordinator.links[1].send(WorkerLost(term=coordinator.term, worker=2, epoch=2))
    await coordinator.until(lambda: coordinator.ended().count("failed") == 2)
    failed = [m for m in coordinator.said(TaskStateChanged) if m.state == "failed"]
    assert {m.attempt.subtask.key for m in failed} == {(1, 0), (1, 1)}
    texts = sorted(m.error.text for m in failed if m.error is not None)
    assert "connection to worker 1 broke" in texts[1] or "connection to worker 1 broke" in texts[0]
    assert any("worker 2 was declared lost" in text for text in texts)
    assert (running.snapshot().connections, other.snapshot().connections) == (0, 0)


async def test_everything_that_a_worker_says_has_the_term_that_it_heard_last(
    coordinator: Coordinator,
) -> None:
    await coordinator.worker()
    coordinator.term += 1
    rows = Stream.items(["a", "b"])
    coordinator.deploy(Stream.together(rows.collect(), rows.print()), {0: 1})
    await coordinator.until(lambda: len(coordinator.ended()) == 3)
    assert coordinator.said(Collected) and coordinator.said(LogLines) and coordinator.said(TaskStateChanged)
    said = [each for each in coordinator.messages if isinstance(each, AttemptReport | LogLines)]
    assert {message.term for message in said} == {coordinator.term}


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("refused", [False, True])
async def test_a_file_that_the_coordinator_refuses_gets_no_name(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: bool, breaks: bool
) -> None:
    """Also when the refusal is lost with a control link that breaks: then the file is reported again."""
    coordinator.acknowledges = False
    monkeypatch.setattr(limits, "FILE_LINGER_SECONDS_MAX", 0.05)
    await coordinator.worker()
    coordinator.deploy(Stream.items([1, 2]).to_files(tmp_path, rows=1), {0: 1}, settings=WITHOUT_LEASES)
    await coordinator.until(lambda: len(coordinator.said(FileCompleted)) == 2)
    if breaks:
        coordinator.applied = max(each.number for each in coordinator.reports(FileCompleted))
        coordinator.links[1].close()
        await coordinator.until(lambda: len(coordinator.said(FileCompleted)) == 4)
    for each in coordinator.reports(FileCompleted)[-2:]:
        coordinator.send(Acknowledge(term=coordinator.term, number=each.number, refused=refused))
    coordinator.send(CancelTasks(term=coordinator.term, job="j1"))
    await coordinator.until(lambda: len(coordinator.ended()) == 1)
    assert len([path for path in tmp_path.iterdir() if path.name[0] != "."]) == (0 if refused else 2)


async def test_rows_wait_for_acknowledgements_when_too_many_are_kept(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.acknowledges = False
    monkeypatch.setattr(limits, "UNACKNOWLEDGED_BYTES_MAX", 1)
    await coordinator.worker()
    rows_to_collect = Stream.items(["row" * 100] * 3_000).rebalance().collect()
    coordinator.deploy(rows_to_collect, {0: 1}, settings=WITHOUT_LEASES)
    await coordinator.until(lambda: coordinator.said(Collected))
    beats = len(coordinator.said(Heartbeat))
    await coordinator.until(lambda: len(coordinator.said(Heartbeat)) >= beats + 3)
    assert len(coordinator.said(Collected)) == 1
    assert len(coordinator.ended()) == 1, "the source has ended; the sink has rows left"
    rows = 0
    while rows < 3_000:
        rows += rows_of(coordinator.said(Collected)[-1])
        number = coordinator.reports(Collected)[-1].number
        coordinator.send(Acknowledge(term=coordinator.term, number=number))
        seen = len(coordinator.said(Collected))
        await coordinator.until(
            lambda seen=seen: len(coordinator.said(Collected)) > seen or len(coordinator.ended()) == 2
        )
    assert sum(rows_of(batch) for batch in coordinator.said(Collected)) == 3_000
    numbers = [each.number for each in coordinator.said(AttemptReport)]
    assert numbers == list(range(1, len(numbers) + 1))


# --- memory ---------------------------------------------------------------------------------------------


class Circle:
    """A sink that refers to itself, as an object of the user's may."""

    opened: list[weakref.ref[Any]] = []

    def open(self, context: Any) -> None:
        self.itself = self
        self.opened.append(weakref.ref(self))

    def write(self, batch: Any) -> None: ...

    def close(self) -> None: ...


async def test_cycles_of_user_code_go_once_no_task_runs(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    Circle.opened.clear()
    gc.disable()
    try:
        coordinator.deploy(Stream.source(Endless()).to_count(), {0: 1}, "other")
        coordinator.deploy(Stream.items([1]).to(Circle()), {0: 1})
        await coordinator.until(coordinator.ended)
        coordinator.send(ReleaseJob(term=coordinator.term, job="j1"))
        await coordinator.until(lambda: {task.job for task in running.snapshot().tasks} == {"other"})
        assert Circle.opened[0]() is not None, "a collection would hold a running job up"
        coordinator.send(CancelTasks(term=coordinator.term, job="other"))
        await coordinator.until(lambda: coordinator.ended("other"))
        coordinator.send(ReleaseJob(term=coordinator.term, job="other"))
        await coordinator.until(lambda: running.snapshot().tasks == ())
        await coordinator.until(lambda: Circle.opened[0]() is None)
    finally:
        gc.enable()
