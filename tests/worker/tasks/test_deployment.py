"""Building and taking down tasks: memory that fits or not, joining, flushing, release and abandoning."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import ResourceExhausted
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.channels import LocalAttachment
from minishuffle.exchange.debloater import BufferDebloater
from minishuffle.exchange.elements import encode
from minishuffle.ids import JobId, PartitionId
from minishuffle.plan.graph import JobSettings, PartitionKind
from minishuffle.plan.planner import compile_job
from minishuffle.runtime import inputs
from minishuffle.wire.frames import BufferFlags, DataType, PartitionRequest
from minishuffle.wire.messages import WorkerAddress
from minishuffle.wire.packed import PeerRows, pack_placement, unpack_positions, unpack_traffic
from minishuffle.worker.channels.registry import ChannelKey
from minishuffle.worker.external.clientgate import UPSTREAM_EDGE
from minishuffle.worker.instructions import StartTask, state_change
from minishuffle.worker.reports.outbox import LINE_BYTES
from minishuffle.worker.tasks.task import Task
from support.attempts import attempt
from support.frames import buffer_header
from support.links import BareLink, consumer_of

if TYPE_CHECKING:
    from conftest import Site

SECONDS_MAX = 20.0


class Held:
    """A place in user code where a task is held until the test lets it go."""

    reached = threading.Event()
    let_go = threading.Event()


@pytest.fixture(autouse=True)
def _hold_anew() -> Iterator[None]:
    Held.reached, Held.let_go = threading.Event(), threading.Event()
    yield
    Held.let_go.set()


def hold_at_the_second(row: int) -> int:
    if row == 2:
        Held.reached.set()
        assert Held.let_go.wait(SECONDS_MAX)
    return row


class OnceThenSilent:
    """One small batch, and then nothing for ever."""

    bounded = False

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        yield [1, 2, 3]
        while True:
            yield []


def abandon(site: Site, task: Task) -> None:
    task.state = "abandoned"
    site.deployment.attempts[task.attempt_id].close()


async def joined(site: Site, task: Task) -> None:
    thread = task.thread
    assert thread is not None
    await site.until(lambda: not thread.is_alive())


def start_consumer(site: Site, worker: int, **settings: Any) -> Task:
    """A task with an input of two producers, both on ``worker``."""
    chosen = JobSettings(**settings)
    graph = compile_job(Stream.items([1]).rebalance().to_count(), parallelism=2, settings=chosen)
    message = site.message(graph, "j1")
    address = WorkerAddress(worker=worker, epoch=1, host="127.0.0.1", data_port=1)
    elsewhere = {"placement": {0: pack_placement([worker] * 2)}, "workers": [address]}
    message = message.model_copy(update=elsewhere)
    site.deployment.start(StartTask(message, next(spec for spec in message.tasks if spec.inputs)))
    return site.deployment.attempts[attempt(1)].task


# --- memory ---------------------------------------------------------------------------------------------


async def test_pools_have_the_minimum_that_keeps_every_channel_going(site: Site) -> None:
    """Cases 132, 162 and 253, SingleInputGateTest, GateBuffersSpecTest, ResultPartitionTest."""
    source, sink = site.deploy(Stream.items([1]).rebalance().to_count(), parallelism=3)[::3]
    minimums = {pool.name: pool.minimum for pool in site.pool._pools}
    assert minimums == {f"output j1/edge0.{i}": 4 for i in range(3)} | {
        f"input 0 of {sink.name}[{i}]": 3 * 2 + 1 for i in range(3)
    }
    assert source.gates == [] and list(source.partitions) == [0]


async def test_remote_channels_have_exclusive_buffers_and_give_them_back(site: Site) -> None:
    """Cases 133 and 134, SingleInputGateTest."""
    task = start_consumer(site, worker=2, buffers_per_channel=3, floating_buffers_per_gate=5)
    (gate,) = task.gates
    for channel in gate.channels:
        channel.attach_remote(BareLink(), PartitionRequest(PartitionId(JobId("j1"), 0, channel.producer), 0))
    pool = gate.buffers.pool
    assert (pool.minimum, pool.maximum, pool.in_use) == (7, 11, 6)
    site.deployment.attempts[task.attempt_id].close()
    assert site.pool.free == site.pool.total


async def test_an_input_that_does_not_fit_is_refused_with_the_arithmetic(site_of: type[Site]) -> None:
    site = site_of(segments=2)
    with pytest.raises(ResourceExhausted, match="needs 3, but 2 of 2 are required by other tasks"):
        site.deploy(Stream.items([1]).rebalance().to_count())
    assert list(site.deployment.attempts) == [attempt(0)]
    await site.close()
    assert (site.pool.free, site.pool.required) == (2, 0)


async def test_nothing_is_left_of_a_task_whose_thread_cannot_start(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(task: Task) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Task, "start", start)
    graph = compile_job(Stream.items([1]).rebalance().to_count(), parallelism=1)
    message = site.message(graph, "j1")
    for spec in message.tasks:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            site.deployment.start(StartTask(message, spec.model_copy(update={"sink": "kept"})))
    deployment = site.deployment
    assert (deployment.attempts, deployment.spools) == ({}, {})
    assert deployment.flush_intervals() == set()
    assert (site.pool.free, site.pool.required) == (site.pool.total, 0)


async def test_an_output_that_does_not_fit_takes_the_input_with_it(site_of: type[Site]) -> None:
    site = site_of(segments=6)
    stream = Stream.items([1]).rebalance().map(lambda row: row).rebalance().to_count()
    with pytest.raises(ResourceExhausted, match="output j1/edge1.0: needs 2, but 5 of 6"):
        site.deploy(stream)
    assert site.pool.required == 2
    assert list(site.deployment.attempts) == [attempt(0)]
    await site.close()
    assert (site.pool.free, site.pool.required) == (6, 0)


@pytest.mark.parametrize(
    ("kind", "most"), [("pipelined_bounded", 32), ("pipelined", 256), ("blocking", None)]
)
async def test_a_pipelined_output_may_have_all_that_is_free(
    site: Site, kind: PartitionKind, most: int | None
) -> None:
    site.deploy(Stream.items([1]).exchange(kind).rebalance().to_count())
    pools = site.deployment.attempts[attempt(0)].pools
    assert [pool.maximum for pool in pools.values()] == ([] if most is None else [most])


async def test_a_second_output_that_does_not_fit_takes_the_first_with_it(site_of: type[Site]) -> None:
    site = site_of(segments=3)
    rows = Stream.items([1])
    with pytest.raises(ResourceExhausted, match="output j1/edge1.0: needs 2, but 2 of 3"):
        site.deploy(Stream.together(rows.rebalance().to_count(), rows.rebalance().collect()))
    assert site.deployment.attempts == {}
    assert (site.pool.free, site.pool.required) == (3, 0)
    assert site.deployment.flush_intervals() == set()


# --- joining --------------------------------------------------------------------------------------------


async def test_channels_are_found_by_their_key(site: Site) -> None:
    site.deploy(Stream.items([1]).rebalance().to_count(), connect=False)
    task = attempt(1)
    channel = site.deployment.channel(ChannelKey(task, 0, 0))
    assert channel is not None and (channel.producer, channel.attachment) == (0, None)
    site.deployment.connect_local(ChannelKey(task, 0, 0), attempt(0), 1, version=1)
    assert isinstance(channel.attachment, LocalAttachment)
    assert site.deployment.channel(ChannelKey(task, 0, 7)) is None
    assert site.deployment.channel(ChannelKey(task, 5, 0)) is None
    assert site.deployment.channel(ChannelKey(attempt(1, job="j2"), 0, 0)) is None
    assert site.deployment.channel(ChannelKey(attempt(1, number=2), 0, 0)) is None


async def test_joining_what_is_gone_does_nothing(site: Site) -> None:
    site.deploy(Stream.items([1]).rebalance().to_count(), connect=False)
    site.deployment.connect_local(ChannelKey(attempt(1, job="j9"), 0, 0), attempt(0), 1, version=1)
    site.deployment.connect_local(ChannelKey(attempt(1), 0, 0), attempt(0, job="j9"), 1, version=1)
    partition = site.deployment.partition(attempt(0), 0)
    assert partition is not None and partition.subpartitions[0].view is None


# --- flushing -------------------------------------------------------------------------------------------


async def test_the_buffer_timeout_sends_what_is_published(site: Site) -> None:
    stream = Stream.source(OnceThenSilent()).rebalance().to_count()
    tasks = {
        timeout: site.deploy(stream, f"j{timeout}", settings=JobSettings(buffer_timeout=timeout))
        for timeout in (0.2, 5.0, -1.0)
    }
    assert site.deployment.flush_intervals() == {0.2, 5.0}, "a job without a time-out sends full buffers only"
    await site.until(lambda: all(source.counters.records_out == 3 for source, _ in tasks.values()))
    assert site.deployment.local_rows == 0
    for timeout, rows in ((0.2, 3), (0.2, 3), (5.0, 6)):
        site.deployment.flush(timeout)
        assert site.deployment.local_rows == rows, "each job has a time-out of its own"
    await site.until(lambda: [tasks[t][1].counters.records_in for t in (0.2, 5.0)] == [3, 3])
    assert tasks[-1.0][1].counters.records_in == 0


async def test_what_nobody_waited_for_is_taken_back_at_each_flush_and_look(site: Site) -> None:
    taken: list[str] = []
    for name, look in (("flush", lambda: site.deployment.flush(0.1)), ("look", site.deployment.look)):
        site.inbox.post(taken.append, name, wakes=False)
        assert name not in taken
        look()
        assert taken[-1] == name


async def test_the_flush_intervals_are_those_of_the_jobs_that_are_there(site: Site) -> None:
    for timeout in (0.2, 5.0):
        job, settings = f"j{timeout}", JobSettings(buffer_timeout=timeout)
        await site.run(Stream.items([1]).rebalance().to_count(), job, settings=settings)
    site.release("j0.2")
    assert site.deployment.flush_intervals() == {5.0}
    site.release("j5.0")
    assert site.deployment.flush_intervals() == set()


@pytest.mark.parametrize("settings", [JobSettings(), JobSettings(buffer_timeout=0)])
async def test_by_default_and_without_a_buffer_timeout_elements_go_at_once(
    site: Site, settings: JobSettings
) -> None:
    stream = Stream.source(OnceThenSilent()).rebalance().to_count()
    _, sink = site.deploy(stream, settings=settings)
    await site.until(lambda: sink.counters.records_in == 3)
    assert site.deployment.flush_intervals() == set()


# --- debloating -----------------------------------------------------------------------------------------


async def test_gates_of_jobs_with_a_target_are_looked_at_and_announce_sizes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream.source(OnceThenSilent()).rebalance().to_count()
    tasks = [site.deploy(stream, "j1")]
    assert not site.deployment.debloats
    tasks.append(site.deploy(stream, "j2", settings=JobSettings(debloat_target=0.5)))
    assert site.deployment.debloats

    def sizes() -> list[int | None]:
        return [source.partitions[0].subpartitions[0].buffer_size for source, _ in tasks]  # type: ignore[attr-defined]

    assert sizes() == [None, min(1024, site.pool.segment_bytes)]
    await site.until(lambda: all(sink.counters.records_in == 3 for _, sink in tasks))
    looks: list[BufferDebloater] = []

    def look(debloater: BufferDebloater, buffers: int) -> int:
        looks.append(debloater)
        return 77

    monkeypatch.setattr(BufferDebloater, "look", look)
    site.deployment.debloat()
    (gate,), (plain,) = tasks[1][1].gates, tasks[0][1].gates
    assert (sizes(), looks) == ([None, 77], [gate.debloater])
    assert plain.debloater is None
    assert looks[0].meter.bytes == tasks[1][1].counters.bytes_in > 0


# --- taking down ----------------------------------------------------------------------------------------


async def test_release_gives_everything_back_that_nobody_has_read(site: Site) -> None:
    settings = JobSettings(buffer_timeout=-1)
    stream = Stream.items(["row" * 100] * 20).rebalance().collect()
    source, sink = site.deploy(stream, settings=settings, connect=False)
    await site.until(lambda: attempt(0) in site.outcomes)
    assert site.pool.free < site.pool.total
    assert source.partitions[0].backlog() > 3
    sink.paths.cancel()
    await site.finish()
    site.release()
    assert site.pool.free == site.pool.total
    assert site.deployment.snapshots() == ()


async def test_release_of_one_job_leaves_the_others_alone(site: Site) -> None:
    stream = Stream.source(OnceThenSilent()).rebalance().to_count()
    source, sink = site.deploy(stream, "other")
    await site.run(Stream.items([1]).rebalance().to_count())
    site.release()
    assert {key.subtask.job for key in site.deployment.attempts} == {"other"}
    await site.until(lambda: source.counters.records_out == 3)
    await site.until(lambda: sink.counters.records_in == 3)


async def test_the_open_segment_of_an_abandoned_task_is_written_off_and_the_rest_comes_back(
    site_of: type[Site],
) -> None:
    site = site_of()
    source, sink = site.deploy(Stream.items([1, 2]).map(hold_at_the_second).rebalance().to_count())
    await site.until(lambda: Held.reached.is_set() and sink.state == "running")
    abandon(site, source)
    sink.paths.cancel()
    await site.until(lambda: attempt(1) in site.outcomes)
    site.release()
    assert site.pool.free == site.pool.total - 1
    reports = len(site.reports)
    Held.let_go.set()
    await joined(site, source)
    site.inbox.post(site.lines.append, "after everything else")
    await site.until(lambda: site.lines == ["after everything else"])
    assert len(site.reports) == reports
    assert site.pool.free == site.pool.total - 1
    assert (site.pool.required, site.pool.written_off) == (0, 1)


async def test_an_abandoned_task_that_ended_before_the_release_costs_nothing(site: Site) -> None:
    source, sink = site.deploy(Stream.items([1, 2]).map(hold_at_the_second).rebalance().to_count())
    await site.until(lambda: Held.reached.is_set() and sink.state == "running")
    abandon(site, source)
    Held.let_go.set()
    await joined(site, source)
    sink.paths.cancel()
    await site.until(lambda: attempt(1) in site.outcomes)
    site.release()
    assert site.pool.free == site.pool.total


def hold_a_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    Held.reached.set()
    assert Held.let_go.wait(SECONDS_MAX)
    return batch


async def test_an_abandoned_task_reports_where_it_is_in_what_external_clients_write(site: Site) -> None:
    """To the row: the rest of its lease was never taken, and the next attempt goes on there."""
    schema = pa.schema([("n", pa.int64())])
    stream = (
        Table.from_spark("orders", schema, bounded=False).map_batches(hold_a_batch, schema="same").to_count()
    )
    (task,) = site.deploy(stream, settings=JobSettings(source_lease=1000))
    abandoned = site.deployment.attempts[task.attempt_id]
    gate = abandoned.upstreams
    assert gate is not None
    gate.begin("w", range(1))
    gate.expect("w", 0, 1, lambda progress: None)
    channel = gate.open_channel("w", 0, 1)
    channel.attach_remote(BareLink(), PartitionRequest(PartitionId(JobId("j1"), UPSTREAM_EDGE, 0), 0))
    consumer = consumer_of(channel)
    consumer.credit.take_unannounced()
    for _ in range(2):
        rows, parts = encode(Batch(pa.record_batch([list(range(10))], schema)))
        data = b"".join(bytes(part) for part in parts)
        flags = BufferFlags.STARTS | BufferFlags.ENDS
        header = buffer_header(
            consumer.id,
            consumer.expected,
            DataType.DATA,
            len(data),
            flags=flags,
            rows=rows,
            row=max(0, consumer.row),
        )
        consumer.begin(header)[:] = data
        consumer.end()
        await site.until(Held.reached.is_set)
    abandoned.abandon()
    last = abandoned.completed(state_change(task.attempt_id, "abandoned"))
    (entry,) = unpack_positions(last.positions)
    assert entry.cursor is not None
    assert (entry.cursor.name, entry.position, entry.lease) == ("w/0", 10, 0)
    Held.let_go.set()
    await joined(site, task)


async def test_an_abandoned_consumer_gives_its_input_back_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "TAKEN_ROWS", 1)  # nothing is taken together
    settings = JobSettings(buffer_timeout=0, restart_strategy="none")
    stream = Stream.items([1, 2, *range(3, 60)]).rebalance().map(hold_at_the_second).to_count()
    source, sink = site.deploy(stream, settings=settings)
    (channel,) = sink.gates[0].channels
    await site.until(lambda: Held.reached.is_set() and len(channel.queue) > 0)
    abandon(site, sink)
    assert len(channel.queue) == 0
    assert sink.gates[0].buffers.pool.in_use == 0
    source.paths.cancel()
    await site.until(lambda: attempt(0) in site.outcomes)
    Held.let_go.set()
    await joined(site, sink)
    assert attempt(1) not in site.outcomes


async def test_two_attempts_of_a_subtask_are_there_at_once_and_leave_nothing(site: Site) -> None:
    """The second starts while the first still runs user code; each is closed and released by itself."""
    stream = Stream.items([1, 2]).map(hold_at_the_second).rebalance().to_count()
    first, _ = site.deploy(stream)
    await site.until(Held.reached.is_set)
    message = site.message(compile_job(stream, parallelism=1), "j1")
    spec = message.tasks[0].model_copy(update={"attempt": 2})
    site.deployment.start(StartTask(message, spec))
    assert list(site.deployment.attempts) == [attempt(0), attempt(1), attempt(0, number=2)]
    second = site.deployment.attempts[attempt(0, number=2)].task
    assert (first.paths.cancelled, second.paths.cancelled) == (False, False)
    first.paths.cancel()
    Held.let_go.set()
    await site.until(lambda: {attempt(0), second.attempt_id} <= site.outcomes.keys())
    assert site.outcomes[attempt(0)].state == "canceled"
    assert site.outcomes[second.attempt_id].state == "finished"
    site.deployment.release([attempt(0)])
    assert list(site.deployment.attempts) == [attempt(1), second.attempt_id]
    assert second.partitions[0].backlog() > 0, "what the second has written is still there"


# --- traffic --------------------------------------------------------------------------------------------


async def test_the_rows_of_attachments_that_were_replaced_are_added_up(site: Site) -> None:
    stream = Stream.items([1, 2, 3]).map(hold_at_the_second).rebalance().to_count()
    settings = JobSettings(buffer_timeout=0)
    site.deploy(stream, settings=settings)
    await site.until(Held.reached.is_set)
    source, sink = (site.deployment.attempts[attempt(operator)] for operator in (0, 1))
    await site.until(lambda: sum(p.received for p in unpack_traffic(sink.traffic.table())) > 0)
    before = site.deployment.channel(ChannelKey(attempt(1), 0, 0))
    assert before is not None
    old = before.attachment
    site.deployment.connect_local(ChannelKey(attempt(1), 0, 0), attempt(0), 2, version=1)
    assert before.attachment is not old
    Held.let_go.set()
    await site.finish()
    for _ in range(2):
        assert unpack_traffic(source.traffic.table()) == [PeerRows(0, 0, 1, sent=3)]
        assert unpack_traffic(sink.traffic.table()) == [PeerRows(0, 0, 1, received=3)]
    site.release()
    assert unpack_traffic(source.traffic.table()) == [PeerRows(0, 0, 1, sent=3)]


async def test_release_gives_the_attempts_with_rows_that_were_not_reported(site: Site) -> None:
    await site.run(Stream.items([1, 2, 3]).rebalance().to_count())
    source, sink = (site.deployment.attempts[attempt(operator)] for operator in (0, 1))
    sink.reported, source.reported = sink.rows(), None
    assert site.deployment.release([attempt(0), attempt(1)]) == [source]


# --- figures --------------------------------------------------------------------------------------------


async def test_snapshots_and_reports_say_the_same(site: Site) -> None:
    await site.run(Stream.items(range(100)).rebalance().to_count(), parallelism=2)
    snapshots, reports = site.deployment.snapshots(), site.deployment.reports()
    found = [attempt(s.operator, s.index, s.attempt, job=s.job) for s in snapshots]
    assert found == [r.attempt for r in reports]
    assert [s.counters for s in snapshots] == [r.counters for r in reports]
    assert {s.state for s in snapshots} == {"finished"}
    assert sum(r.counters.records_out for r in reports) == 100
    sinks = [s for s in snapshots if s.gates]
    assert [(s.gates[0].channels, s.gates[0].queue_buffers) for s in sinks] == [(2, 0), (2, 0)]
    assert all(partition.pool.used == 0 for s in snapshots for partition in s.partitions)


async def test_a_report_says_how_much_waits_in_the_outbox(site: Site) -> None:
    task = start_consumer(site, worker=2)
    task.outbox.log("a line")
    assert [report.standing.outbox for report in site.deployment.reports()] == [len("a line") + LINE_BYTES]
    await site.until(lambda: site.lines == ["a line"])
    assert [report.standing.outbox for report in site.deployment.reports()] == [0]


# --- consumers that are deployed later ------------------------------------------------------------------


async def test_the_first_buffer_of_a_partition_is_announced_and_rows_wait_for_who_never_ran(
    site: Site,
) -> None:
    """Whatever is done with rows for one that is restarting."""
    settings = JobSettings(schedule="first_output", on_unavailable="drop")
    numbers = list(range(20_000))
    source, sink = site.deploy(Stream.items(numbers).rebalance().collect(), settings=settings, connect=False)
    await site.until(lambda: source.paths.clock.present()[0] == "backpressured")
    await site.until(lambda: site.readable == [(source.attempt_id, 0)])
    site.deployment.connect_local(ChannelKey(sink.attempt_id, 0, 0), source.attempt_id, 1, version=1)
    await site.finish()
    assert sorted(site.rows) == numbers
    assert not sum(source.read_counters().rows_dropped.values())
    assert site.readable == [(source.attempt_id, 0)], "once"


async def test_nothing_is_announced_of_a_partition_without_rows_nor_to_consumers_that_are_there(
    site: Site,
) -> None:
    """The end of the task says that there are none."""
    settings = JobSettings(schedule="first_output")
    await site.run(Stream.items(list[int]()).rebalance().to_count(), settings=settings)
    site.release()
    await site.run(Stream.items([1, 2]).rebalance().to_count(), "j2")
    assert site.readable == []
