"""Blocking partitions: whole for every view, from memory and disk; consumers give out what is whole, once."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import (
    LocalProtocolError,
    PartitionLost,
    PartitionNotFound,
    ShuffleError,
    TaskCancelled,
    TaskFailed,
)
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.blocking import BlockingPartition, BlockingView
from minishuffle.exchange.channels import GivenBack, LocalBuffer
from minishuffle.exchange.elements import AssemblyBudget, decode, encode
from minishuffle.exchange.elementstore import ElementStore, StorePlace
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import CancelReason, LatencyMarker
from support.batches import as_batch
from support.disks import HeldDisk

CAPACITY = 64
BATCHES = [[1, 2, 3], ["x" * 200], [4], ["y" * 5, "z" * 90]]
ROWS = [row for batch in BATCHES for row in batch]


def partition(
    consumers: int = 2,
    *,
    shared: bool = True,
    disk: HeldDisk | None = None,
    memory_bytes: int = 1 << 20,
    lost: Callable[[PartitionLost], None] = lambda error: None,
) -> BlockingPartition:
    return BlockingPartition(
        PartitionId(JobId("j1"), 0, 0),
        range(consumers),
        lambda subpartition: None,
        TaskCounters(),
        ElementStore("partition j1/edge0.0 on worker 1", StorePlace(), memory_bytes=memory_bytes),
        shared=shared,
        capacity=CAPACITY,
        disk=disk or HeldDisk(),
        lost=lost,
    )


def write(kept: BlockingPartition, batches: list[Any] = BATCHES, *, shared: bool = True) -> None:
    everybody = list(range(len(kept.subpartitions)))
    for batch in batches:
        rows, parts = encode(as_batch(batch))
        if shared:
            kept.broadcast(everybody, rows, parts)
        else:
            for position in everybody:
                assert not kept.skips(position, rows) and not kept.hand_over(position, as_batch(batch))
                kept.write(position, rows, parts)


class Consumer:
    """A gate that reads kept partitions of this process; the test takes its loop's turns."""

    def __init__(self, producers: int = 1) -> None:
        self._given: deque[GivenBack] = deque()
        pool = NetworkBufferPool(16, CAPACITY)
        self.gate = InputGate(
            0,
            1,
            GateBuffers(pool.create_pool("gate", 3, 8), CAPACITY, 1, 2),
            wake=lambda: None,
            give_back=self._given.append,
            budget=AssemblyBudget(1 << 20),
            counters=TaskCounters(),
            tolerant=True,
            kept=lambda producer: ElementStore("what was read", StorePlace(), memory_bytes=100),
        )
        self.channels = [self.gate.add_channel(number) for number in range(producers)]

    def attach(
        self, kept: BlockingPartition, generation: int = 1, *, producer: int = 0, consumer: int = 0
    ) -> None:
        subpartition = kept.subpartition(consumer)
        assert subpartition is not None
        self.channels[producer].attach_local(subpartition, generation, lambda piece: None)

    def read(self, disk: HeldDisk | None = None, *, ends: bool = True) -> list[Any]:
        """Everything that the gate gives out now, and once the disk has read; the loop hears of ends if it is
        to."""
        rows: list[Any] = []
        kept_back: list[GivenBack] = []
        while True:
            element = self.gate.poll()
            if element is not None:
                batch = decode(element.format, element.rows, element.payload).payload
                assert isinstance(batch, list)
                rows += batch
            elif disk is not None and disk.waiting:
                disk.turn()
            elif not self._given:
                self._given.extend(kept_back)
                return rows
            while self._given:
                item = self._given.popleft()
                if ends or isinstance(item, LocalBuffer):
                    item.attachment.consumed(item)
                else:
                    kept_back.append(item)


# --- producers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("memory_bytes", [0, 50, 1 << 20])
def test_each_view_reads_everything_whenever_it_comes(shared: bool, memory_bytes: int) -> None:
    disk = HeldDisk()
    kept = partition(shared=shared, disk=disk, memory_bytes=memory_bytes)
    first, late = Consumer(), Consumer()
    first.attach(kept)
    write(kept, BATCHES[:2], shared=shared)
    kept.subpartitions[0].attend()
    assert first.read(disk) == [], "it is not whole"
    write(kept, BATCHES[2:], shared=shared)
    kept.finish()
    kept.subpartitions[0].attend()
    assert first.read(disk) == ROWS and first.gate.finished
    late.attach(kept, consumer=1)
    assert late.read(disk) == ROWS and late.gate.finished
    again = Consumer()
    again.attach(kept)
    assert again.read(disk) == ROWS, "the next attempt of a consumer that had read the end"
    assert kept.rows_dropped() == {}


def test_what_is_broadcast_is_stored_once() -> None:
    kept = partition(3)
    write(kept)
    logs = [each.log for each in kept.subpartitions]
    assert logs[0] is logs[1] is logs[2] and len(logs[0].elements) == len(BATCHES)
    with pytest.raises(LocalProtocolError, match="goes to all consumers"):
        kept.write(0, 1, [b"x"])


def test_a_view_says_how_much_there_is() -> None:
    """Cases 174 and 177, PipelinedSubpartitionWithReadViewTest: the backlog is that of data buffers."""
    kept = partition(1)
    view = kept.subpartitions[0].attach(1, lambda: None)
    assert (view.next_type(), view.backlog(), kept.backlog()) == (NextType.NONE, 0, 0)
    write(kept)
    total = sum(sum(map(len, encode(as_batch(batch))[1])) for batch in BATCHES)
    assert view.backlog() == kept.backlog() == -(-total // CAPACITY)
    assert view.poll(data=False) is None
    left = view.backlog()
    while (piece := view.poll()) is not None:
        left -= 1
        assert piece.backlog == left
    assert left == 0
    kept.finish()
    assert view.next_type() is NextType.EVENT and view.backlog() == 0
    assert view.poll(data=False) is not None and view.poll() is None
    assert kept.buffers_out() == -(-total // CAPACITY)
    view.release(CancelReason.ENDED)
    assert not view.current and view.next_type() is NextType.NONE


def test_what_is_released_is_gone_without_the_garbage_collector() -> None:
    """Each snapshot that a worker holds is in a partition of its own."""
    kept = partition(1)
    write(kept)
    view = kept.subpartitions[0].attach(1, lambda: None)
    view.poll()
    gc.disable()
    try:
        there = weakref.ref(kept)
        kept.release(False)
        del kept
        assert there() is None and view.poll() is None and view.backlog() == 0
    finally:
        gc.enable()


def test_nothing_but_elements_and_the_end_is_stored() -> None:
    kept = partition(1)
    view = kept.subpartitions[0].attach(1, lambda: None)
    kept.emit_latency(LatencyMarker(1, 0, 0))
    kept.broadcast_watermark(5, False)
    kept.flush()
    kept.close([0])
    assert view.poll() is None and view.current


def test_what_is_written_behind_the_end_is_refused() -> None:
    """Case 246, ResultPartitionTest#testAddOnFinishedPipelinedPartition."""
    kept = partition(1)
    kept.finish()
    with pytest.raises(LocalProtocolError, match="partition j1/edge0.0 is finished"):
        write(kept)
    assert kept._counters.records_out == 0


def test_what_is_released_is_gone_and_nothing_more_is_stored() -> None:
    """Cases 247, 254 and 263: ResultPartitionTest#testAddOnReleasedPipelinedPartition,
    #testReleaseMemoryOnPipelinedPartition, ResultPartitionManagerTest#testCreateViewForReleasedPartition."""
    before = set(os.listdir("/proc/self/fd"))
    kept = partition(1, memory_bytes=50)
    write(kept)
    view = kept.subpartitions[0].attach(1, lambda: None)
    written = kept._counters.records_out
    kept.release(written_off=False)
    kept.release(written_off=False)
    assert not view.current and view.poll() is None and kept.backlog() == 0
    assert set(os.listdir("/proc/self/fd")) == before
    write(kept)
    assert kept._counters.records_out == 2 * written
    assert kept._store.bytes == 0 and set(os.listdir("/proc/self/fd")) == before
    assert isinstance(kept.subpartitions[0].error, PartitionNotFound)
    kept.finish()
    late = Consumer()
    late.attach(kept)
    assert late.read() == [] and not late.gate.finished, "an end with nothing before it would be wrong"
    kept.release(written_off=True)
    with pytest.raises(TaskCancelled, match="abandoned"):
        kept.skips(0, 1)


# --- the disk -------------------------------------------------------------------------------------


class Woken:
    """A view of a partition that is on disk, and how often it was woken."""

    def __init__(self, kept: BlockingPartition, position: int = 0) -> None:
        self.wakes = 0
        self.ready = True
        """It may have something: it is new, was woken, or its last poll said that there is more."""
        self.errors: list[ShuffleError] = []
        self.view: BlockingView = kept.subpartitions[position].attach(1, self._wake, self.errors.append)

    def _wake(self) -> None:
        self.wakes += 1
        self.ready = True

    def poll(self) -> bytes | None:
        piece = self.view.poll()
        self.ready = piece is not None and piece.next_type is not NextType.NONE
        return None if piece is None else bytes(piece.payload)


def test_a_view_whose_element_is_on_disk_gives_none_and_is_woken() -> None:
    disk = HeldDisk()
    kept = partition(1, disk=disk, memory_bytes=0)
    write(kept)
    kept.finish()
    reader = Woken(kept)
    for _ in range(2):  # it asks once
        assert reader.view.next_type() is NextType.NONE and reader.poll() is None
    assert len(disk.waiting) == 1 and reader.wakes == 0
    assert reader.view.backlog() > 0, "credit for it may be there by then"
    disk.turn()
    assert reader.wakes == 1 and reader.view.next_type() is NextType.DATA
    pieces = list(iter(reader.poll, None))
    assert b"".join(pieces[:-1]) == b"".join(b"".join(encode(as_batch(each))[1]) for each in BATCHES)
    assert not disk.waiting, "the end comes behind it"


def test_what_is_read_ahead_is_bounded_for_all_views_together() -> None:
    disk = HeldDisk()
    kept = partition(2, disk=disk, memory_bytes=0)
    kept.services.read_bytes = 200
    element = encode(Batch(["x" * 60]))[1]
    size = sum(map(len, element))
    for _ in range(40):
        kept.broadcast([0, 1], 1, element)
    readers = [Woken(kept, 0), Woken(kept, 1)]
    dice, got = Random(3), [b"", b""]
    while len(got[0]) + len(got[1]) < 2 * 40 * size:
        number = dice.randrange(2)
        if disk.waiting and dice.random() < 0.3:
            disk.turn()
        else:
            got[number] += readers[number].poll() or b""
        for reader in readers:
            ahead = reader.view._at * size - reader.view._sent
            assert ahead < 2 * (kept.services.read_bytes + size), "also of those that the disk is asked for"
    assert got == [b"".join(element) * 40] * 2
    assert not disk.waiting


@pytest.mark.parametrize("seed", range(40))
def test_readers_get_everything_in_any_order_of_writes_reads_and_wakes(seed: int) -> None:
    """Elements of all sizes, in memory and on disk; readers come late, and anew, and poll once they were told
    or have more."""
    dice, disk = Random(seed), HeldDisk()
    kept = partition(3, shared=bool(seed % 2), disk=disk, memory_bytes=dice.choice([0, 200, 1 << 20]))
    kept.services.read_bytes = dice.choice([1, 100, 1_000])
    batches = [["x" * dice.choice([0, 10, 300])] * dice.randrange(1, 4) for _ in range(dice.randrange(20))]
    left, finished = list(batches), False
    readers: dict[int, Woken] = {}
    got = [b""] * 3
    while not (finished and len(readers) == 3 and not any(each.ready for each in readers.values())):
        number = dice.randrange(3)
        reader = readers.get(number)
        if left and dice.random() < 0.2:
            write(kept, [left.pop(0)], shared=bool(seed % 2))
            kept.subpartitions[number].attend()
        elif not left and not finished and dice.random() < 0.2:
            kept.finish()
            finished = True
            for each in kept.subpartitions:
                each.attend()
        elif disk.waiting and dice.random() < 0.5:
            disk.turn()
        elif reader is None or dice.random() < 0.02:
            readers[number], got[number] = Woken(kept, number), b""
        elif reader.ready or dice.random() < 0.1:
            got[number] += reader.poll() or b""
        if disk.waiting and finished:
            disk.turn()
    assert not disk.waiting
    whole = b"".join(b"".join(encode(as_batch(each))[1]) for each in batches)
    assert [each[:-1] for each in got] == [whole] * 3 and [each[-1:] for each in got] == [b"\x02"] * 3


def test_an_element_that_comes_back_for_a_view_that_has_ended_is_dropped() -> None:
    disk = HeldDisk()
    kept = partition(1, disk=disk, memory_bytes=0)
    write(kept)
    kept.finish()
    before = Woken(kept)
    assert before.poll() is None
    after = Woken(kept)
    assert "requested again" in str(before.errors[0]) and not before.view.current
    assert after.poll() is None and len(disk.waiting) == 2
    disk.turn()
    assert (before.wakes, before.poll(), after.wakes) == (0, None, 0)
    disk.turn()
    assert (before.wakes, after.wakes) == (0, 1) and after.poll() is not None
    third = Woken(kept)
    assert third.poll() is None
    kept.release(written_off=False)
    disk.turn()
    assert (third.wakes, third.errors, third.poll()) == (0, [], None)


def test_a_partition_with_a_block_that_cannot_be_read_is_lost() -> None:
    """Its readers wait for that of the producer's next attempt."""
    disk, lost = HeldDisk(), list[PartitionLost]()
    kept = partition(2, disk=disk, memory_bytes=0, lost=lost.append)
    write(kept)
    kept.finish()
    (file,) = {each.file for each in kept.subpartitions[0].log.elements}
    assert file is not None
    os.pwrite(file.number, b"\xff\xff", 20)
    consumer = Consumer()
    consumer.attach(kept)
    assert consumer.read(disk) == []
    (error,) = lost
    assert re.match("block [01] of partition j1/edge0.0 on worker 1 cannot be read, .* at offset", str(error))
    assert [each.error for each in kept.subpartitions] == [error] * 2, "nor can others read it"
    kept.lose(error)
    assert lost == [error], "that is said once"
    following = partition()
    write(following)
    following.finish()
    consumer.attach(following, 2)
    assert consumer.read() == ROWS


# --- consumers ------------------------------------------------------------------------------------


def test_a_partition_whose_producer_is_lost_is_read_whole_from_its_next_attempt() -> None:
    lost, following, consumer = partition(), partition(), Consumer()
    consumer.attach(lost)
    write(lost, BATCHES[:3])
    lost.subpartitions[0].attend()
    assert consumer.read() == []
    lost.fail(TaskFailed("its worker died"))
    assert consumer.read() == []
    write(following)
    following.finish()
    consumer.attach(following, 2)
    assert consumer.read() == ROWS, "nothing of the first attempt"
    assert consumer.gate.finished and consumer.gate.rows_dropped() == {}


def test_event_time_waits_while_a_producer_is_away() -> None:
    lost, other, consumer = partition(), partition(), Consumer(2)
    consumer.attach(lost)
    consumer.attach(other, producer=1)
    write(other)
    other.finish()
    other.subpartitions[0].attend()
    lost.fail(TaskFailed("its worker died"))
    assert consumer.read() == ROWS
    before = consumer.gate.valve.watermark
    assert not consumer.gate.finished
    following = partition()
    following.finish()
    consumer.attach(following, 2)
    assert consumer.read() == []
    assert consumer.gate.finished and consumer.gate.valve.watermark > before


def test_a_partition_that_was_read_whole_is_not_read_again() -> None:
    """The link breaks behind its end, and the channel is attached anew before the loop knows of the end."""
    kept, consumer = partition(), Consumer()
    write(kept)
    kept.finish()
    consumer.attach(kept)
    rows = consumer.read(ends=False)
    assert consumer.channels[0].ended
    consumer.channels[0].attach_local(kept.subpartitions[0], 2, lambda piece: None)
    assert rows + consumer.read() == ROWS
    assert consumer.gate.finished and consumer.read() == []
