"""Retained partitions: each row once for a consumer that leaves out rows by number, whatever breaks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minishuffle.errors import LocalProtocolError, PeerLost, Superseded, TaskCancelled
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.elements import encode
from minishuffle.wire.frames import CancelReason, EventKind, LatencyMarker
from support.retained import CAPACITY, UNREAD, VERSION, Consumer, Producer, Waiting

# --- a machine ------------------------------------------------------------------------------------


class Replay(RuleBasedStateMachine):
    """Two consumers of a partition that is broadcast to or not, in memory, on disk or both."""

    @initialize(
        memory=st.sampled_from([0, 3_000, 1 << 20]),
        first=st.sampled_from([0, 7]),
        broadcast=st.booleans(),
        flushing=st.sampled_from(list(Flush)),
    )
    def begin(self, memory: int, first: int, broadcast: bool, flushing: Flush) -> None:
        self.producer = Producer(
            2, memory_bytes=memory, flushing=flushing, first_rows=(first, first + 5), waits=lambda ready: None
        )
        self.broadcast = broadcast
        self.consumers = [Consumer(self.producer, 0), Consumer(self.producer, 1)]
        self.starts = [first, first + 5]
        self.written: list[list[Any]] = [[], []]
        self.mark = 0
        self.barrier = 0
        self.ended = False
        self.number = 0

    @precondition(lambda self: not self.ended)
    @rule(rows=st.integers(1, 4), size=st.sampled_from([0, 0, 0, 30, 400]), to=st.integers(0, 1))
    def write(self, rows: int, size: int, to: int) -> None:
        batch = [f"{self.number + row}" + "x" * size for row in range(rows)]
        self.number += rows
        if self.broadcast:
            self.producer.partition.broadcast([0, 1], *encode(Batch(batch)))
            for written in self.written:
                written += batch
        else:
            self.producer.write(batch, to)
            self.written[to] += batch

    @precondition(lambda self: not (self.ended or self.broadcast))
    @rule(rows=st.integers(1, 40), to=st.integers(0, 1))
    def hand_over(self, rows: int, to: int) -> None:
        values = [str(self.number + row) for row in range(rows)]
        batch = Batch(pa.record_batch({"value": values}))
        self.number += rows
        if not self.producer.partition.hand_over(to, batch):
            self.producer.partition.write(to, *encode(batch))
        self.written[to] += values

    @precondition(lambda self: not self.ended)
    @rule()
    def watermark(self) -> None:
        self.mark += 1
        self.producer.partition.broadcast_watermark(self.mark, False)

    @precondition(lambda self: not self.ended)
    @rule()
    def marker(self) -> None:
        self.producer.partition.emit_latency(LatencyMarker(0, 0, 0))

    @precondition(lambda self: not self.ended)
    @rule(ends=st.booleans())
    def put_barrier(self, ends: bool) -> None:
        self.barrier += 1
        self.producer.partition.broadcast_barrier(self.barrier)
        if ends:
            self.producer.partition.end_barriers(self.barrier)

    @precondition(lambda self: not self.ended)
    @rule()
    def end(self) -> None:
        self.producer.partition.finish()
        self.ended = True

    @rule(which=st.integers(0, 1), polls=st.sampled_from([1, 2, 100]), keeps=st.booleans())
    def read(self, which: int, polls: int, keeps: bool) -> None:
        consumer = self.consumers[which]
        for _ in range(polls):
            consumer.poll()
        if not keeps:
            consumer.give_back()
        if consumer.barrier and consumer.view is not None:
            consumer.view.resume(consumer.barrier)

    @rule()
    def turn_disk(self) -> None:
        if self.producer.disk.waiting:
            self.producer.disk.turn()

    @rule()
    def flush(self) -> None:
        self.producer.partition.flush()

    @rule(which=st.integers(0, 1), whole=st.booleans(), reason=st.sampled_from([None, *CancelReason]))
    def attach(self, which: int, whole: bool, reason: CancelReason | None) -> None:
        """The link breaks, and there is another; or there is another at once."""
        consumer = self.consumers[which]
        if consumer.view is not None and reason is not None:
            consumer.view.release(reason)
        consumer.attach(whole=whole)

    @rule(which=st.integers(0, 1), reason=st.sampled_from(list(CancelReason)))
    def lose(self, which: int, reason: CancelReason) -> None:
        consumer = self.consumers[which]
        if consumer.view is not None:
            consumer.view.release(reason)
            consumer.view = None

    @rule(which=st.integers(0, 1), data=st.data())
    def restart(self, which: int, data: st.DataObject) -> None:
        """The next attempt of a consumer begins at a snapshot of it."""
        consumer, start = self.consumers[which], self.starts[which]
        row = data.draw(st.integers(consumer.subpartition.stable, consumer.next))
        self.producer.partition.fence(which, consumer.attempt + 1)
        consumer.attempt += 1
        consumer.next, consumer.rows = row, consumer.rows[: row - start]
        consumer.attach()

    @rule(which=st.integers(0, 1), data=st.data(), old=st.booleans())
    def make_stable(self, which: int, data: st.DataObject, old: bool) -> None:
        consumer = self.consumers[which]
        if consumer.view is not None:
            row = data.draw(st.integers(0, consumer.next))
            before = consumer.subpartition.stable
            consumer.view.make_stable(VERSION - 1 if old else VERSION, row)
            assert consumer.subpartition.stable == (before if old else max(before, row))

    @rule(size=st.sampled_from([16, 60, CAPACITY]), which=st.integers(0, 1))
    def resize(self, size: int, which: int) -> None:
        view = self.consumers[which].view
        if view is not None:
            view.resize(size)

    @invariant()
    def is_right(self) -> None:
        if not hasattr(self, "producer"):
            return
        self.producer.validate()
        for consumer, written, start in zip(self.consumers, self.written, self.starts, strict=True):
            assert consumer.rows == written[: len(consumer.rows)] and consumer.next == start + len(
                consumer.rows
            )
            assert all(isinstance(error, Superseded) for error in consumer.errors)
            assert consumer.subpartition.rows == start + len(written)

    def teardown(self) -> None:
        if not hasattr(self, "producer"):
            return
        if not self.ended:
            self.producer.partition.finish()
        self.producer.partition.end_barriers(self.barrier)
        for consumer, written in zip(self.consumers, self.written, strict=True):
            view = consumer.attach()
            consumer.read()
            assert consumer.rows == written
            assert consumer.events[-2:] == [EventKind.END_OF_DATA, EventKind.END_OF_PARTITION]
            assert not self.mark or self.mark in consumer.events
            view.make_stable(VERSION, consumer.next)
            assert consumer.subpartition.freed == consumer.subpartition.rows
        assert self.producer.budget.used == 0
        self.producer.partition.release(written_off=False)


TestReplay = Replay.TestCase
TestReplay.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- cases ----------------------------------------------------------------------------------------


def numbers(begin: int, end: int) -> list[int]:
    return list(range(begin, end))


def test_a_writer_waits_for_a_consumer_that_reads_too_slowly_alone() -> None:
    producer = Producer(2)
    slow, quick = Consumer(producer, 0), Consumer(producer, 1)
    slow.attach()
    quick.attach()
    with pytest.raises(Waiting):
        for _ in range(100):
            producer.write(["x" * 20], 0)
    unread = slow.subpartition.bytes - slow.subpartition.position
    assert UNREAD <= unread < UNREAD + CAPACITY
    producer.write(["y"], 1)
    before = producer.wakes
    slow.poll()
    slow.poll()
    assert producer.wakes > before, "there is room again"
    producer.write(["x"], 0)


def test_a_writer_writes_on_while_a_consumer_is_away_or_replays_and_that_falls_no_further_behind() -> None:
    producer = Producer()
    consumer = Consumer(producer)
    consumer.attach()
    producer.write(["first"])
    consumer.read()
    assert consumer.view is not None
    consumer.view.release(CancelReason.SUSPECTED)
    for _ in range(200):
        producer.write(["x" * 20])
    view = consumer.attach(0)
    for _ in range(20):
        producer.write(["x" * 20])
    while view.read < UNREAD:
        consumer.poll()
    most = producer.only.bytes - producer.only.position + UNREAD
    for _ in range(50):
        while producer.only.has_room():
            producer.write(["x" * 20])
        assert producer.only.bytes - producer.only.position <= most + CAPACITY
        consumer.poll()
    consumer.read()
    assert producer.only.allowance == UNREAD and consumer.next == producer.only.next_row


def test_rows_cross_to_another_process_and_come_again_when_the_link_breaks(
    make_setup: Callable[..., Any],
) -> None:
    """By the bytes of two connections: the request says the row, and Stable frees what was taken."""
    producer = Producer(waits=lambda ready: None)
    setup = make_setup(tolerant=True, guaranteed=True)
    channel = setup.remote(0, VERSION)
    wire = setup.wire([producer.partition])
    found: list[str] = []
    written = [f"{number}" + "x" * (number % 7 * 40) for number in range(200)]
    for number, row in enumerate(written):
        producer.write([row])
        producer.only.attend()
        if number % 3 == 0:
            wire.settle()
            found += setup.rows()
        if number % 50 == 49:
            channel.detach(PeerLost("the link broke"))
            setup.request(channel, number, version=VERSION)
        if number % 40 == 39:
            setup.gate.make_stable(setup.gate.taken())
    for _ in range(100):
        wire.settle()
        found += setup.rows()
    assert found == written
    setup.gate.make_stable(setup.gate.taken())
    wire.settle()
    assert producer.only.stable == 200 and not any(setup.gate.rows_dropped().values())


def test_what_is_broadcast_is_held_once_until_nobody_wants_it() -> None:
    producer = Producer(3)
    consumers = [Consumer(producer, position) for position in range(3)]
    for consumer in consumers:
        consumer.attach()
    producer.partition.broadcast([0, 1, 2], *encode(Batch(["x" * 500])))
    used = producer.budget.used
    assert 500 < used < 1_500
    for consumer in consumers:
        assert producer.budget.used == used
        assert consumer.read() == ["x" * 500] and consumer.view is not None
        consumer.view.make_stable(VERSION, 1)
    assert producer.budget.used == 0 and producer.counters.records_out == 3


def test_a_consumer_of_another_version_gets_everything() -> None:
    producer = Producer(first_rows=(10,))
    producer.write(["a", "b"])
    old = Consumer(producer)
    view = old.attach(4, version=VERSION - 1)
    assert old.read() == ["a", "b"] and old.next == 12
    view.make_stable(VERSION - 1, 12)
    assert producer.only.freed == producer.only.stable == 10, (
        "rows of an older version end where this one begins"
    )
    again = Consumer(producer)
    again.next = 11
    again.attach(11)
    assert again.read() == ["b"]


@pytest.mark.parametrize(("row", "version"), [(0, VERSION), (0, VERSION - 1), (7, VERSION - 1)])
def test_a_consumer_that_knows_no_row_yet_gets_all_that_is_held(row: int, version: int) -> None:
    """So it is with a new attempt, which asks before it has its snapshot."""
    producer = Producer(first_rows=(5,))
    producer.write(["x" * 200])
    producer.write(["y" * 200])
    consumer = Consumer(producer)
    view = consumer.attach()
    consumer.read()
    view.make_stable(VERSION, 6)
    late = Consumer(producer)
    late.next = 6
    late.attach(row, version=version)
    assert late.read() == ["y" * 200]


def test_a_view_may_be_there_before_it_is_known_where_the_rows_begin() -> None:
    """The producer's attempt has yet to read its snapshot."""
    producer = Producer(2, limit_bytes=1_000)
    consumer, ahead = Consumer(producer), Consumer(producer, 1)
    consumer.attach(0)
    ahead.next = 43
    view = ahead.attach(43)
    view.make_stable(VERSION, 43)
    assert not consumer.poll() and producer.partition.stable() == [0, 43]
    consumer.next = 40
    producer.partition.begin_at([40, 41])
    assert producer.partition.written() == [40, 41] and producer.partition.stable() == [40, 43]
    with pytest.raises(LocalProtocolError, match="partition j1/edge0.0 has begun"):
        producer.partition.begin_at([40, 41])
    for number in range(3):
        producer.write([f"{number}" * 200], 0)
        producer.write([f"{number}" * 200], 1)
    producer.partition.finish()
    assert consumer.read() == [f"{number}" * 200 for number in range(3)]
    assert ahead.read() == ["2" * 200], "it has those before"
    assert producer.partition.written() == [43, 44]
    assert ahead.subpartition.freed == 43, "that were made again, and are not kept once they were passed by"
    producer.validate()


def test_a_view_that_is_ahead_of_its_producer_skips_no_row_in_between() -> None:
    """It looks while rows are written that its consumer has: what it skips, and what not, is one piece."""
    producer = Producer()
    consumer = Consumer(producer)
    consumer.next = 20
    consumer.attach(20)
    for number in range(40):
        producer.write([f"{number:02}" * (9 if number % 3 else 90)])
        consumer.poll()
    producer.partition.finish()
    consumer.read()
    assert [row[:2] for row in consumer.rows] == [f"{number:02}" for number in range(20, 40)]


def test_nobody_is_waited_for_where_nothing_bounds_what_is_unread() -> None:
    producer = Producer(unread_bytes=None)
    consumer = Consumer(producer)
    view = consumer.attach()
    for _ in range(100):
        producer.write(["x" * 200])
    assert producer.budget.used > 20_000 and len(consumer.read()) == 100
    view.make_stable(VERSION, 100)
    assert producer.budget.used == 0


def test_a_consumer_that_is_closed_gets_the_end_alone() -> None:
    producer = Producer(closed=[0])
    producer.write(["a"])
    producer.partition.broadcast_watermark(5, False)
    producer.partition.finish()
    consumer = Consumer(producer)
    consumer.attach()
    assert consumer.read() == [] and producer.only.next_row == 1
    assert consumer.events == [5, EventKind.END_OF_DATA, EventKind.END_OF_PARTITION]
    other = Producer()
    other.write(["x" * 200])
    other.partition.broadcast_watermark(7, False)
    reader = Consumer(other)
    reader.attach()
    other.partition.close([0])
    assert reader.read() == [] and reader.events == [7] and other.budget.used == 0


def test_a_barrier_stops_each_view_until_it_is_resumed_or_has_ended() -> None:
    producer = Producer()
    producer.write(["a"])
    producer.partition.broadcast_barrier(1)
    producer.write(["b"])
    consumer = Consumer(producer)
    for _ in range(2):
        view = consumer.attach(0)
        consumer.read()
        assert consumer.barrier == 1 and consumer.rows == ["a"] and not view.backlog()
    assert not producer.partition.is_read([]) and producer.partition.is_read([0])
    view.resume(2)
    assert consumer.read() == [], "it is at another"
    view.resume(1)
    assert consumer.read() == ["b"] and producer.partition.is_read([])
    producer.partition.broadcast_barrier(2)
    producer.write(["c"])
    producer.partition.end_barriers(2)
    consumer.attach()
    assert consumer.read() == ["c"] and consumer.barrier == 0


def test_a_barrier_behind_one_that_a_view_has_passed_over_reaches_it() -> None:
    """Its consumer reads another input first, for which a durable snapshot fails."""
    producer = Producer()
    consumer = Consumer(producer)
    consumer.attach()
    for barrier in (1, 2):
        producer.partition.broadcast_barrier(barrier)
        producer.partition.end_barriers(barrier)
        assert consumer.read() == [] and consumer.barrier == 0
    producer.partition.broadcast_barrier(3)
    consumer.read()
    assert consumer.barrier == 3


def test_watermarks_take_little_room_and_the_last_one_is_known_to_each_view() -> None:
    producer = Producer()
    consumer = Consumer(producer)
    consumer.attach()
    producer.write(["a"])
    for time in range(100):
        producer.partition.broadcast_watermark(time, False)
        producer.partition.emit_latency(LatencyMarker(0, 0, 0))
        if time % 3:
            consumer.read()
    consumer.read()
    assert len(producer.only.entries.things) <= 2
    consumer.events.clear()
    view = consumer.attach()
    consumer.read()
    assert consumer.events == [99]
    producer.write(["b"])
    consumer.read()
    view.make_stable(VERSION, 2)
    consumer.events.clear()
    consumer.attach()
    consumer.read()
    assert consumer.events == [99], "also once it is freed"


@pytest.mark.parametrize("flushing", list(Flush))
def test_what_fills_no_buffer_goes_out_when_the_flush_policy_says(flushing: Flush) -> None:
    producer = Producer(flushing=flushing)
    consumer = Consumer(producer)
    view = consumer.attach()
    producer.write(["a"])
    if flushing is Flush.ON_REQUEST:
        assert not producer.notified and not consumer.poll()
        producer.partition.flush()
    else:
        assert producer.notified
    if flushing is Flush.ADAPTIVE:
        view.hold()
        producer.notified.clear()
        producer.write(["b"])
        assert not producer.notified
    assert consumer.read()[0] == "a"


def test_a_fenced_view_reads_and_frees_nothing() -> None:
    producer = Producer()
    producer.write(["x" * 200])
    consumer = Consumer(producer)
    view = consumer.attach()
    consumer.poll()
    producer.partition.fence(0, 2)
    assert isinstance(consumer.errors[0], Superseded)
    view.make_stable(VERSION, 1)
    assert not consumer.poll() and producer.only.stable == 0


def test_behind_the_end_or_once_it_is_released_nothing_is_written() -> None:
    producer = Producer()
    producer.write(["a" * 200])
    producer.partition.finish()
    with pytest.raises(LocalProtocolError, match="partition j1/edge0.0 is finished"):
        producer.write(["b"])
    other = Producer()
    other.partition.release(written_off=True)
    other.partition.write(0, *encode(Batch(["a" * 200])))
    assert other.budget.used == 0 and not other.only.entries.things
    with pytest.raises(TaskCancelled):
        other.write(["a"])


@pytest.mark.parametrize("way", ["write", "hand over", "broadcast"])
def test_the_first_element_is_said_to_be_there_once(way: str) -> None:
    said: list[str] = []
    producer = Producer(2, begun=lambda: said.append("begun"))
    partition, batch = producer.partition, Batch(pa.record_batch({"a": [1, 2]}))
    partition.broadcast_watermark(5, False)
    partition.broadcast_barrier(1)
    assert not said, "events are nothing to read"
    if way == "hand over":
        Consumer(producer).attach(whole=True)
        Consumer(producer, 1).attach(whole=True)
    for position in (0, 1):
        if way == "broadcast":
            partition.broadcast([0, 1], *encode(batch))
        elif way == "write":
            partition.write(position, *encode(batch))
        else:
            assert partition.hand_over(position, batch)
        assert said == ["begun"]


def test_few_objects_stay_for_a_block() -> None:
    """Each stands in the way of memory that rows are taken from: the block, a view of its page, and what that
    stands on; the page and its bytes are used again later."""
    producer = Producer(memory_bytes=1 << 22, unread_bytes=None)
    row = encode(Batch(["x" * 20]))
    size = sum(map(len, row[1]))
    blocks = 1_000

    def write() -> None:
        for _ in range(blocks * (CAPACITY // size)):
            producer.partition.write(0, *row)

    write()
    before = sys.getallocatedblocks()
    write()
    assert len(producer.only.entries.things) == 2 * blocks
    assert (sys.getallocatedblocks() - before) / blocks < 6
