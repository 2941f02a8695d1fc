"""Kept partitions: whole for every view, in memory and in a file; consumers give out what is whole, once."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from minishuffle import limits
from minishuffle.counters import TaskCounters
from minishuffle.errors import ResourceExhausted, TaskFailed
from minishuffle.exchange.channels import GivenBack, LocalBuffer
from minishuffle.exchange.elements import AssemblyBudget, decode, encode
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.kept import ElementLog, KeptPartition
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.exchange.subpartition import Subpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import CancelReason, EventKind

CAPACITY = 64
BATCHES = [[1, 2, 3], ["x" * 200], [4], ["y" * 5, "z" * 90]]
ROWS = [row for batch in BATCHES for row in batch]


def partition(consumers: int = 2, *, shared: bool = True, directory: Path | None = None) -> KeptPartition:
    notified: list[Subpartition] = []
    return KeptPartition(
        PartitionId(JobId("j1"), 0, 0),
        range(consumers),
        notified.append,
        TaskCounters(),
        shared=shared,
        capacity=CAPACITY,
        directory=str(directory) if directory else None,
    )


def write(kept: KeptPartition, batches: list[Any] = BATCHES) -> None:
    for batch in batches:
        rows, parts = encode(batch)
        for position in range(len(kept.subpartitions)):
            assert not kept.skips(position, rows)
            kept.write(position, rows, parts)


def end(kept: KeptPartition) -> None:
    kept.broadcast_watermark(5, False)
    kept.broadcast_event(EventKind.END_OF_DATA)
    kept.broadcast_event(EventKind.END_OF_PARTITION)


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
            kept=lambda: ElementLog(None, 100),
        )
        self.channels = [self.gate.add_channel(number) for number in range(producers)]

    def attach(
        self, kept: KeptPartition, generation: int = 1, *, producer: int = 0, consumer: int = 0
    ) -> None:
        subpartition = kept.subpartition(consumer)
        assert subpartition is not None
        self.channels[producer].attach_local(subpartition, generation, lambda piece: None)

    def read(self, *, ends: bool = True) -> list[Any]:
        """Everything that the gate gives out now; the loop hears of ends if it is to."""
        rows: list[Any] = []
        kept_back: list[GivenBack] = []
        while True:
            element = self.gate.poll()
            if element is not None:
                batch = decode(element.format, element.rows, element.payload)
                assert isinstance(batch, list)
                rows += batch
            elif not self._given:
                self._given.extend(kept_back)
                return rows
            while self._given:
                item = self._given.popleft()
                if ends or isinstance(item, LocalBuffer):
                    item.attachment.consumed(item)
                else:
                    kept_back.append(item)


# --- the log --------------------------------------------------------------------------------------


def test_a_log_has_its_elements_in_order_in_memory_and_beyond(tmp_path: Path) -> None:
    log = ElementLog(str(tmp_path), 10)
    elements = [bytes([number]) * (number + 1) for number in range(20)]
    for number, element in enumerate(elements):
        log.append(number, [element[:1], memoryview(element)[1:]])
    assert len(log) == 20 and log.bytes == sum(map(len, elements))
    assert [log.read(number) for number in range(20)] == list(enumerate(elements))
    assert list(tmp_path.iterdir()) == [], "its file has no name"
    log.clear()
    assert (len(log), log.bytes) == (0, 0)


def test_a_log_has_limits_that_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ResourceExhausted, match="cannot be kept on disk.*--state-dir"):
        ElementLog(str(tmp_path / "none"), 0).append(1, [b"x"])
    monkeypatch.setattr(limits, "KEPT_BYTES_MAX", 10)
    log = ElementLog(None, 100)
    log.append(1, [b"0123456789"])
    with pytest.raises(ResourceExhausted, match="more than 10 bytes .* broadcast less"):
        log.append(1, [b"x"])


# --- producers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_each_view_reads_everything_whenever_it_comes(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_MEMORY_BYTES", 50)
    kept = partition(shared=shared)
    first, late = Consumer(), Consumer()
    first.attach(kept)
    write(kept, BATCHES[:2])
    kept.subpartitions[0].attend()
    assert first.read() == [], "it is not whole"
    write(kept, BATCHES[2:])
    end(kept)
    kept.subpartitions[0].attend()
    assert first.read() == ROWS and first.gate.finished
    late.attach(kept, consumer=1)
    assert late.read() == ROWS and late.gate.finished
    again = Consumer()
    again.attach(kept)
    assert again.read() == ROWS, "the next attempt of a consumer that had read the end"
    assert kept.rows_dropped() == {"upstream_unavailable": 0, "queue_discarded": 0}


def test_a_view_says_how_much_there_is(tmp_path: Path) -> None:
    kept = partition(1, directory=tmp_path)
    view = kept.subpartitions[0].attach(1, lambda: None)
    assert (view.next_type(), view.backlog(), kept.backlog()) == (NextType.NONE, 0, 0)
    write(kept)
    total = sum(sum(map(len, encode(batch)[1])) for batch in BATCHES)
    assert view.backlog() == kept.backlog() == -(-total // CAPACITY)
    assert view.poll(data=False) is None
    left = view.backlog()
    while (piece := view.poll()) is not None:
        left -= 1
        assert piece.backlog == left
    assert left == 0
    end(kept)
    assert view.next_type() is NextType.EVENT
    assert view.poll(data=False) is not None and view.poll() is None
    assert kept.buffers_out() == -(-total // CAPACITY)
    view.release(CancelReason.ENDED)
    assert not view.current and view.next_type() is NextType.NONE


def test_what_is_discarded_is_gone(tmp_path: Path) -> None:
    kept = partition(1)
    write(kept)
    view = kept.subpartitions[0].attach(1, lambda: None)
    kept.discard(written_off=False)
    assert not view.current and view.poll() is None
    assert kept.backlog() == 0


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
    end(following)
    consumer.attach(following, 2)
    assert consumer.read() == ROWS, "nothing of the first attempt"
    assert consumer.gate.finished and consumer.gate.rows_dropped() == {}


def test_event_time_waits_while_a_producer_is_away() -> None:
    lost, other, consumer = partition(), partition(), Consumer(2)
    consumer.attach(lost)
    consumer.attach(other, producer=1)
    write(other)
    end(other)
    other.subpartitions[0].attend()
    lost.fail(TaskFailed("its worker died"))
    assert consumer.read() == ROWS
    before = consumer.gate.valve.watermark
    assert not consumer.gate.finished
    following = partition()
    end(following)
    consumer.attach(following, 2)
    assert consumer.read() == []
    assert consumer.gate.finished and consumer.gate.valve.watermark > before


def test_a_partition_that_was_read_whole_is_not_read_again() -> None:
    """The link breaks behind its end, and the channel is attached anew before the loop knows of the end."""
    kept, consumer = partition(), Consumer()
    write(kept)
    end(kept)
    consumer.attach(kept)
    rows = consumer.read(ends=False)
    assert consumer.channels[0].ended
    consumer.channels[0].attach_local(kept.subpartitions[0], 2, lambda piece: None)
    assert rows + consumer.read() == ROWS
    assert consumer.gate.finished and consumer.read() == []
