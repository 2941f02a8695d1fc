"""What a task counts that does not finish: the batch that it had in hand, and the state that goes with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.operators.base import Active
from minishuffle.plan.graph import JobSettings
from minishuffle.runtime import inputs
from minishuffle.runtime.inputs import Inputs
from minishuffle.wire.packed import unpack_positions
from minishuffle.wire.reports import TaskStateChanged
from minishuffle.worker.channels.registry import ChannelKey
from minishuffle.worker.tasks.task import Task
from support.attempts import attempt

if TYPE_CHECKING:
    from conftest import Site

SECONDS_MAX = 20.0
START = datetime(2026, 1, 1, tzinfo=UTC)


class Batches:
    """One split of batches of ten numbers, a hundred in all; then it is silent, or ends."""

    def __init__(self, bounded: bool = True) -> None:
        self.bounded = bounded

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        for first in range(offset, 100, 10):
            yield list(range(first, first + 10))
        while not self.bounded:
            yield []


class Held:
    holds = threading.Event()
    let_go = threading.Event()
    last = threading.Event()


@pytest.fixture(autouse=True)
def _hold_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(inputs, "TAKEN_ROWS", 1)  # Tasks take the batches of ten as they come.
    Held.holds, Held.let_go, Held.last = threading.Event(), threading.Event(), threading.Event()
    yield
    Held.let_go.set()
    Held.last.set()


def ill_at_55(row: Any) -> Any:
    if row == 55:
        raise ValueError(row)
    return row


def twice_but_ill_at_55(row: int) -> list[int]:
    return [ill_at_55(row), row]


def held_at_55(row: int) -> int:
    if row == 55:
        Held.holds.set()
        assert Held.let_go.wait(SECONDS_MAX)
    return row


def failed(task: Task) -> int:
    return task.read_counters().rows_dropped.get("failed_batch", 0)


async def test_a_batch_that_raises_is_lost_and_nothing_else(site: Site) -> None:
    source, sink = site.deploy(Stream.source(Batches()).map(ill_at_55).rebalance().to_count())
    await site.until(lambda: len(site.outcomes) >= 1)
    counters = source.read_counters()
    assert counters.records_out == 50
    dropped = counters.rows_dropped
    assert dropped.pop("failed_batch") == 10
    assert set(dropped) <= {"queue_discarded"}, "what the sink had not read yet"
    assert failed(sink) == 0


async def test_what_a_count_has_taken_of_a_batch_that_raises_is_lost_with_it_once(site: Site) -> None:
    (source,) = site.deploy(Stream.source(Batches()).map(ill_at_55).to_count())
    await site.until(lambda: source.state == "failed")
    assert source.read_counters().rows_filed + failed(source) == 60


async def test_a_consumer_counts_the_batch_that_it_took(site: Site) -> None:
    _, sink = site.deploy(Stream.source(Batches()).rebalance().map(ill_at_55).collect())
    await site.until(lambda: len(site.outcomes) >= 2)
    assert sink.read_counters().records_in == len(site.rows) + failed(sink) == 60
    assert len(site.rows) == 50


async def test_rows_that_become_more_count_as_they_were_taken(site: Site) -> None:
    stream = Stream.source(Batches()).flat_map(twice_but_ill_at_55).rebalance().to_count()
    source, _ = site.deploy(stream)
    await site.until(lambda: source.state == "failed")
    assert (source.read_counters().records_out, failed(source)) == (100, 10)


async def test_a_cancelled_batch_is_lost_too(site: Site) -> None:
    (source, *_) = site.deploy(Stream.source(Batches()).map(held_at_55).rebalance().to_count())
    await site.until(lambda: source.read_counters().records_out == 50 and Held.holds.is_set())
    source.paths.cancel()
    Held.let_go.set()
    await site.until(lambda: source.state == "canceled")
    counters = source.read_counters()
    assert counters.records_out + failed(source) == 60


@pytest.mark.parametrize("stuck", ["source", "consumer"])
async def test_an_abandoned_task_has_lost_the_batch_in_hand_whatever_it_does_with_it(
    site_of: type[Site], stuck: str
) -> None:
    site = site_of()
    numbers = Stream.source(Batches())
    stream = numbers if stuck == "source" else numbers.rebalance()
    tasks = site.deploy(stream.map(held_at_55).rebalance().to_count())
    task = tasks[0] if stuck == "source" else tasks[1]
    await site.until(lambda: task.read_counters().records_out == 50 and Held.holds.is_set())
    attempt = site.deployment.attempts[task.attempt_id]
    message = TaskStateChanged(attempt=task.attempt_id, state="abandoned")
    attempt.abandon()
    report = attempt.completed(message)
    assert (report.counters.records_out, report.counters.rows_dropped["failed_batch"]) == (50, 10)
    (position, *_) = unpack_positions(report.positions) or (None,)
    assert position is None or (position.position, position.lease) == (60, 0), "where a source is, exactly"
    Held.let_go.set()
    assert task.thread is not None
    task.thread.join(SECONDS_MAX)
    after = task.read_counters()
    assert (after.rows_dropped, after.records_in) == (
        report.counters.rows_dropped,
        report.counters.records_in,
    )
    for other in tasks:
        other.paths.cancel()
    await site.until(lambda: not any(each.thread and each.thread.is_alive() for each in tasks))
    site.deployment.release(list(site.deployment.attempts))


def counted_each() -> Stream[Any]:
    """One row for each that is taken, and a group for each key."""
    return Stream.source(Batches()).key_by(by_three).count(emit="each").map(ill_at_sixth).collect()


def ill_at_sixth(counted: Any) -> Any:
    return ill_at_55(55 if counted == (0, 20) else 0) or counted


async def test_what_a_group_took_and_passed_on_is_lost_once(site: Site) -> None:
    """The groups are lost apart from the batch: none of their rows was to come out again."""
    _, task = site.deploy(counted_each())
    await site.until(lambda: task.state == "failed")
    counters = task.read_counters()
    assert (counters.records_in, len(site.rows), failed(task)) == (60, 50, 10)
    assert counters.state_rows == 3


async def test_what_a_join_keeps_is_lost_as_state_and_not_with_its_batch(site_of: type[Site]) -> None:
    def ill(pair: Any) -> Any:
        raise ValueError(pair)

    site = site_of(segment_bytes=32_768)
    left, right = (Table.source(Tables()).event_time("at") for _ in range(2))
    pairs = left.key_by("number").join(right.key_by("number"), how="inner", within=timedelta(hours=1))
    *sources, join = site.deploy(pairs.to_rows().map(ill).collect())
    await site.until(lambda: join.state == "failed")
    counters = join.read_counters()
    assert counters.records_in == counters.state_rows + failed(join) == 200
    assert counters.state_rows >= 100 and site.rows == []
    for source in sources:
        source.paths.cancel()
    await site.finish()
    await site.close()


async def test_state_that_expires_by_the_clock_is_not_lost_later(site: Site) -> None:
    stream = Stream.source(Batches(bounded=False)).key_by(by_three)
    _, task = site.deploy(stream.process(noted, ttl=timedelta(milliseconds=1)).collect())
    await site.until(lambda: task.read_counters().records_in == 100)
    await site.until(lambda: task.read_counters().state_rows == 0)


class Seconds:
    """One split of rows that are seconds behind START: two that are late, and later one more."""

    bounded = True

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        for rows, event in (([0, 10], Held.let_go), ([1, 2, 60], Held.last), ([3], Held.last)):
            yield rows
            while not event.is_set():
                yield []


def second(row: int) -> datetime:
    return START + timedelta(seconds=row)


async def test_rows_that_are_late_since_their_producer_restarted_are_lost(site: Site) -> None:
    windows = Stream.source(Seconds()).event_time(second).key_by(by_three).window(timedelta(seconds=1))
    _, task = site.deploy(windows.count().collect(), settings=JobSettings(buffer_timeout=0))
    (gate,) = site.deployment.attempts[attempt(1)].gates

    def reached(row: int) -> bool:
        return gate.valve.watermark >= second(row - 1).timestamp() * 1_000_000

    await site.until(lambda: reached(10) and task.counters.records_in == 2)
    gate.valve.suspend(0)
    gate.valve.rejoin(0)
    Held.let_go.set()
    await site.until(lambda: reached(60) and task.counters.records_in == 5)
    Held.last.set()
    await site.finish()
    counters = task.read_counters()
    assert (counters.late_dropped, counters.rows_dropped) == (3, {"late_after_recovery": 2})


async def test_a_task_is_done_with_rows_that_it_leaves_out(site: Site) -> None:
    tens = Stream.source(Batches(bounded=False)).filter(lambda row: row % 10 == 0)
    source, filter_ = site.deploy(tens.rebalance().filter(lambda row: row % 20 == 0).rebalance().to_count())[
        :2
    ]
    await site.until(lambda: filter_.read_counters().rows_done == 10)
    await site.until(lambda: source.read_counters().rows_done == 100)
    assert source.read_counters().records_out == 10
    assert filter_.read_counters().records_out == 5


async def test_a_task_is_not_done_with_rows_on_their_way_to_the_client(site: Site) -> None:
    (task,) = site.deploy(Stream.source(Batches(bounded=False)).collect())
    await site.until(lambda: len(site.rows) == task.read_counters().rows_done == 100)
    task.outbox.collect(b"\x90", 7)
    assert task.read_counters().rows_done == 93


async def test_a_task_is_done_with_the_rows_of_a_window_once_it_is_closed(site: Site) -> None:
    windows = Stream.source(Seconds()).event_time(second).key_by(by_three).window(timedelta(seconds=1))
    _, task = site.deploy(windows.count().collect(), settings=JobSettings(buffer_timeout=0))
    await site.until(lambda: task.counters.records_in == 2 and task.read_counters().rows_done == 1)
    assert task.read_counters().state_rows == 1
    Held.let_go.set()
    Held.last.set()
    await site.finish()
    assert task.read_counters().rows_done == task.read_counters().records_in == 6


async def test_a_task_that_finishes_has_lost_nothing(site: Site) -> None:
    tasks = site.deploy(Stream.source(Batches()).key_by(lambda row: row).count().to_count())
    await site.finish()
    assert [task.read_counters().rows_dropped for task in tasks] == [{}, {}]
    assert [task.read_counters().state_rows for task in tasks] == [0, 0]


def by_three(row: int) -> int:
    return row % 3


def added(value: int, row: int) -> int:
    return value + row


def noted(row: int, context: Any) -> None:
    context.state["last"] = row


def counted() -> Stream[Any]:
    return Stream.source(Batches(bounded=False)).key_by(by_three).count(emit="batch").collect()


def reduced() -> Stream[Any]:
    return Stream.source(Batches(bounded=False)).key_by(by_three).reduce(added).collect()


def processed() -> Stream[Any]:
    return Stream.source(Batches(bounded=False)).key_by(by_three).process(noted).collect()


def columns() -> Table:
    table = Table.source(Tables()).key_by("key").aggregate(total=("number", "sum"))
    return table.collect()


class Tables:
    """One batch with keys 0 to 2 and numbers 0 to 99, and then nothing."""

    bounded = False
    format = "arrow"
    schema = pa.schema({"key": pa.int64(), "number": pa.int64(), "at": pa.timestamp("us", "UTC")})

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Any]:
        if not offset:
            numbers = list(range(100))
            at = [START + timedelta(seconds=number) for number in numbers]
            yield pa.RecordBatch.from_pydict(
                {
                    "key": pa.array([number % 3 for number in numbers]),
                    "number": pa.array(numbers),
                    "at": pa.array(at, pa.timestamp("us", "UTC")),
                }
            )
        while True:
            yield pa.RecordBatch.from_pydict({"key": [], "number": [], "at": []})


def joined() -> Table:
    left, right = (Table.source(Tables()).event_time("at") for _ in range(2))
    pairs = left.key_by("number").join(right.key_by("number"), how="inner", within=timedelta(hours=1))
    return pairs.collect()


@pytest.mark.parametrize(
    ("make", "rows"), [(counted, 3), (reduced, 3), (processed, 3), (columns, 3), (joined, 200)]
)
async def test_the_state_that_a_task_holds_is_counted(site_of: type[Site], make: Any, rows: int) -> None:
    site = site_of(segment_bytes=32_768)
    tasks = site.deploy(make())
    await site.until(lambda: sum(task.read_counters().state_rows for task in tasks) == rows)
    for task in tasks:
        task.paths.cancel()
    await site.finish()
    assert sum(task.read_counters().state_rows for task in tasks) == rows, "lost with them"
    await site.close()


async def test_a_batch_that_was_read_and_not_taken_counts_as_discarded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watermark in front of it is taken, and the task is cancelled before it looks again."""
    read_gate = Inputs._read_gate

    def read_and_cancel(inputs: Inputs, each: Any) -> None:
        read_gate(inputs, each)
        if inputs._ready:
            inputs._ready.appendleft((0, Active()))
            sink.paths.cancel()

    monkeypatch.setattr(Inputs, "_read_gate", read_and_cancel)
    _, sink = site.deploy(Stream.items([1]).rebalance().to_count(), connect=False)
    site.deployment.connect_local(ChannelKey(sink.attempt_id, 0, 0), attempt(0), 1, version=1)
    await site.until(lambda: sink.attempt_id in site.outcomes)
    counters = sink.read_counters()
    assert (counters.records_in, counters.rows_dropped) == (0, {"queue_discarded": 1})
