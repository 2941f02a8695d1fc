"""Views of a log: from disk, of batches that were handed over, and while the writer goes on."""

from __future__ import annotations

import os
from collections.abc import Callable

import pyarrow as pa
import pytest

from minishuffle.errors import PartitionLost
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import encode
from minishuffle.exchange.retention import RetainedBlock, Spilled
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import CancelReason
from support.interleave import nested
from support.retained import CAPACITY, VERSION, Consumer, Producer


def test_what_is_on_disk_is_read_ahead_and_the_view_is_woken() -> None:
    producer = Producer(memory_bytes=0)
    consumer = Consumer(producer)
    for number in range(3):
        producer.write([f"{number}".ljust(CAPACITY)])
    view = consumer.attach()
    assert view.next_type() is NextType.NONE and view.poll() is None and view.backlog() > 0
    assert len(producer.disk.waiting) == 1, "it asks once"
    producer.disk.turn()
    assert view.next_type() is NextType.DATA
    assert [row.strip() for row in consumer.read()] == [f"{number}" for number in range(3)]
    view.make_stable(VERSION, 3)
    assert producer.budget.used == 0


def test_what_comes_from_disk_for_a_view_that_has_ended_is_dropped() -> None:
    producer = Producer(memory_bytes=0)
    producer.write(["x" * 300])
    consumer = Consumer(producer)
    first = consumer.attach()
    assert first.next_type() is NextType.NONE
    consumer.attach()
    producer.disk.turn()
    assert first.poll() is None and consumer.read() == ["x" * 300]


def test_a_block_that_cannot_be_read_has_the_producer_make_it_again() -> None:
    producer = Producer(memory_bytes=0)
    producer.write(["x" * 300])
    (block,) = producer.only.entries.things
    assert (
        isinstance(block, RetainedBlock)
        and isinstance(block.data, Spilled)
        and (file := block.data.element.file) is not None
    )
    os.pwrite(file.number, b"\xff\xff", 20)
    consumer = Consumer(producer)
    view = consumer.attach()
    consumer.read()
    (error,) = producer.lost
    assert isinstance(error, PartitionLost) and consumer.errors == [error] == [producer.only.error]
    producer.partition.lose(error)
    assert len(producer.lost) == 1 and not view.current


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_a_batch_that_was_handed_over_is_encoded_for_a_consumer_elsewhere(memory_bytes: int) -> None:
    producer = Producer(memory_bytes=memory_bytes)
    here = Consumer(producer)
    here.attach(whole=True)
    batch = Batch(pa.record_batch({"n": list(range(100))}))
    assert producer.partition.hand_over(0, batch)
    if memory_bytes:
        here.poll()
        (piece,) = here.lent
        assert piece.whole is not None and piece.whole.batch.payload.equals(batch.payload)
        assert here.rows == list(range(100))
    here.give_back()
    producer.only.view.release(CancelReason.MOVED)
    there = Consumer(producer)
    there.attach()
    assert not producer.partition.hand_over(0, batch)
    assert there.read() == list(range(100)), "by a thread for the disk"
    again = Consumer(producer)
    again.attach(whole=True)
    assert again.read() == list(range(100))
    assert batch.times is None and producer.budget.used > 0


def test_a_block_may_be_completed_or_moved_to_disk_while_views_are_in_it() -> None:
    producer = Producer(2, memory_bytes=10_000)
    readers = [Consumer(producer, position) for position in range(2)]
    for reader in readers:
        reader.attach()
    producer.partition.broadcast([0, 1], 1, [b"\0\0\0\2\0\0\0\1\1\1\0\0", b"\x91\1"])
    readers[0].read()
    producer.partition.broadcast([0, 1], 1, [b"\0\0\0\2\0\0\0\1\1\1\0\0", b"\x91\2"])
    producer.partition.broadcast_watermark(1, False)
    producer.budget.memory_bytes = 0
    producer.store.make_room()
    for reader in readers:
        assert reader.read()[-1] == 2 and reader.rows == [1, 2]
    producer.validate()


def test_a_view_at_the_end_gets_what_is_added_to_the_block_that_is_open() -> None:
    producer = Producer()
    consumer = Consumer(producer)
    consumer.attach()
    producer.write([1])
    assert consumer.read() == [1]
    consumer.attach()
    producer.write([2])
    assert consumer.read() == [2]


def test_a_consumer_that_was_sent_what_was_held_when_it_attached_has_all_replayed() -> None:
    said: list[tuple[int, int]] = []
    producer = Producer(replayed=lambda index, attempt: said.append((index, attempt)))
    consumer = Consumer(producer)
    consumer.attach()
    assert said == [(0, 1)], "there is nothing"
    for each in "abc":
        producer.write([each * 100])
    consumer.read()
    consumer.attempt = 2
    consumer.attach(0)
    producer.write(["later"])
    assert said == [(0, 1)]
    while len(said) == 1:
        assert consumer.poll()
    assert said == [(0, 1), (0, 2)] and "later" not in consumer.rows
    assert consumer.read()[-1] == "later" and len(said) == 2


def test_buffers_are_as_long_as_the_consumer_says() -> None:
    producer = Producer()
    consumer = Consumer(producer)
    view = consumer.attach()
    view.resize(40)
    producer.write(["x" * 100])
    while consumer.poll():
        pass
    assert [piece.size for piece in consumer.lent][:2] == [40, 40] and consumer.rows == ["x" * 100]
    assert producer.partition.buffers_out() == len(consumer.lent)
    assert [piece.rows for piece in consumer.lent] == [1, 0, 0]


@pytest.mark.parametrize("outer", ["writer", "loop"])
def test_at_each_instruction_of_one_thread_the_other_finds_what_is_there(outer: str) -> None:
    """The writer fills a block, opens one, hands over a batch; the loop reads, frees and attaches anew."""
    elements = [encode(Batch([letter * 40])) for letter in "abcd"]
    batch = Batch(pa.record_batch({"n": [1, 2]}))
    consumers: list[Consumer] = []

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        producer = Producer(unread_bytes=None)
        consumer = Consumer(producer)
        consumer.attach(whole=True)
        producer.partition.write(0, *elements[0])
        consumers.append(consumer)

        def write() -> None:
            for element in elements[1:3]:
                producer.partition.write(0, *element)
            assert producer.partition.hand_over(0, batch)
            producer.partition.write(0, *elements[3])

        def look() -> None:
            consumer.read()
            producer.only.make_stable(VERSION, consumer.next)
            consumer.attach(whole=True)

        return (write, look) if outer == "writer" else (look, write)

    for _ in nested(make):
        consumer = consumers.pop()
        producer = consumer.producer
        producer.validate()
        producer.partition.finish()
        consumer.read()
        assert consumer.rows == ["a" * 40, "b" * 40, "c" * 40, 1, 2, "d" * 40]
        producer.validate()
        producer.only.make_stable(VERSION, consumer.next)
        assert producer.budget.used == 0
