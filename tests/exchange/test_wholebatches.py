"""Batches that stay in their process: the consumer gets the object, within credit and bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import LocalProtocolError, TaskCancelled
from minishuffle.exchange import wholebatches
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import ByteBudget, decode, encode
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition, PipelinedView
from minishuffle.exchange.wholebatches import WholeBatches
from minishuffle.ids import JobId, PartitionId
from minishuffle.limits import OUTPUT_BUFFERS_PER_SUBPARTITION_MAX
from minishuffle.wire.frames import CancelReason, EventKind
from support.batches import as_batch
from support.producers import read

if TYPE_CHECKING:
    from conftest import Setup

SEGMENT_BYTES = 256
ROW_BYTES = 8


def numbers(count: int, begin: int = 0) -> pa.RecordBatch:
    """In memory that nobody can write to."""
    values = np.arange(begin, begin + count)
    values.flags.writeable = False
    return pa.record_batch({"n": values})


class Writer:
    """A partition for one consumer, whose writer never waits unless ``wait`` is replaced."""

    def __init__(self, room: int = 1 << 20, drops: bool = False) -> None:
        self.budget = ByteBudget(room)
        self.wakes = 0
        self.wait: Callable[[Callable[[], bool]], None] = lambda ready: None
        self.counters = TaskCounters()
        self.network = NetworkBufferPool(256, SEGMENT_BYTES)
        self.pool = self.network.create_pool("p", 1, 256)
        self.partition = PipelinedPartition(
            PartitionId(JobId("j1"), 0, 0),
            range(1),
            self._acquire,
            PipelinedSubpartition.attend,
            self.counters,
            drops=drops,
            whole_batches=WholeBatches(
                self.budget, SEGMENT_BYTES, lambda ready: self.wait(ready), self._wake
            ),
        )
        self.subpartition = self.partition.subpartitions[0]

    def _acquire(self) -> Segment:
        segment = self.pool.request()
        assert segment is not None
        return segment

    def _wake(self) -> None:
        self.wakes += 1

    def write(self, batch: Any) -> bool:
        """As a task does; whether it was handed over."""
        if self.partition.skips(0, len(batch)):
            return False
        handed = self.partition.hand_over(0, as_batch(batch))
        if not handed:
            self.partition.write(0, *encode(as_batch(batch)))
        return handed

    def view(self, *, whole: bool) -> PipelinedView:
        return self.subpartition.attach(1, lambda: None, whole=whole)


# --- what is handed over ------------------------------------------------------------------------------


def test_a_batch_is_handed_over_as_it_is() -> None:
    writer, batch = Writer(), numbers(100)
    view = writer.view(whole=True)
    assert writer.write(batch)
    assert (writer.counters.records_out, writer.counters.bytes_out) == (100, 800)
    assert writer.budget.used == 800
    piece = view.poll()
    assert piece is not None and piece.whole is not None
    assert piece.whole.batch.payload is batch
    assert (piece.rows, piece.size, piece.whole.segments) == (100, 800, 4)
    assert writer.pool.in_use == 0
    piece.released()
    assert writer.budget.used == 0


def test_a_batch_is_not_handed_over_behind_the_end() -> None:
    """Case 246, ResultPartitionTest#testAddOnFinishedPipelinedPartition."""
    writer = Writer()
    writer.view(whole=True)
    writer.partition.finish()
    with pytest.raises(LocalProtocolError, match="(?m)^partition j1/edge0.0 is finished$"):
        writer.write(numbers(3))
    assert (writer.counters.records_out, writer.budget.used, writer.partition.backlog()) == (0, 0, 0)


def test_a_batch_counts_for_as_many_buffers_as_its_bytes_would_fill_to_their_size() -> None:
    writer, batch = Writer(), numbers(100)
    view = writer.view(whole=True)
    view.resize(50)
    assert writer.write(batch)
    piece = view.poll()
    assert piece is not None and piece.whole is not None
    assert piece.whole.segments == 16
    view.resize(1 << 20)
    assert writer.write(batch)
    piece = view.poll()
    assert piece is not None and piece.whole is not None
    assert piece.whole.segments == 4


def test_a_slice_is_copied_out_of_what_it_would_keep_in_memory() -> None:
    writer, batch = Writer(), numbers(100_000).slice(7, 10)
    view = writer.view(whole=True)
    assert writer.write(batch)
    piece = view.poll()
    assert piece is not None and piece.whole is not None
    assert piece.whole.batch.payload.equals(numbers(10, begin=7))
    assert piece.whole.batch.payload.get_total_buffer_size() == piece.whole.size == 80


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_function_may_still_write_to_is_copied(nested: bool) -> None:
    values = np.arange(100)
    column = pa.StructArray.from_arrays([pa.array(values)], ["n"]) if nested else pa.array(values)
    writer = Writer()
    view = writer.view(whole=True)
    batch = pa.record_batch({"c": column})
    expected = batch.to_pylist()
    assert writer.write(batch)
    values[:] = 7
    assert batch.to_pylist() != expected, "pyarrow has copied it itself"
    piece = view.poll()
    assert piece is not None and piece.whole is not None
    assert piece.whole.batch.payload.to_pylist() == expected


def test_a_consumer_gets_the_columns_that_one_in_another_process_would_get() -> None:
    batch = pa.record_batch({"c": pa.array(["x", "y", "x"]).dictionary_encode()})
    writer = Writer()
    view = writer.view(whole=True)
    assert writer.write(batch)
    piece = view.poll()
    assert piece is not None and piece.whole is not None
    rows, parts = encode(as_batch(batch))
    assert piece.whole.batch.payload.equals(decode(3, rows, b"".join(map(bytes, parts[1:]))).payload)
    assert piece.whole.batch.payload.schema.types == [pa.string()]


def test_rows_and_what_goes_to_other_processes_are_written_as_bytes() -> None:
    writer = Writer()
    assert not writer.write(numbers(3)), "nobody is attached yet"
    view = writer.view(whole=False)
    assert not writer.write(numbers(3))
    writer.partition.flush()
    assert b"".join(read(view)) == 2 * b"".join(map(bytes, encode(Batch(numbers(3)))[1]))
    writer.view(whole=True)
    assert not writer.write([(1,), (2,)])
    assert writer.budget.used == 0


def test_what_finds_no_room_in_the_worker_is_written_as_bytes() -> None:
    writer = Writer(room=100 * ROW_BYTES)
    view = writer.view(whole=True)
    assert not writer.write(numbers(101))
    assert writer.write(numbers(60))
    assert not writer.write(numbers(60)), "the other has the room"
    assert sum(map(len, read(view))) > 161 * ROW_BYTES
    assert writer.write(numbers(60))


def test_a_batch_that_is_too_long_is_left_to_be_cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wholebatches, "BATCH_BYTES_MAX", 50 * ROW_BYTES)
    writer = Writer()
    writer.view(whole=True)
    assert writer.write(numbers(100))
    assert not writer.write(numbers(101))


# --- the queue ----------------------------------------------------------------------------------------


def test_a_writer_waits_while_the_queue_is_full() -> None:
    writer = Writer()
    view = writer.view(whole=True)
    assert writer.write(numbers(OUTPUT_BUFFERS_PER_SUBPARTITION_MAX * SEGMENT_BYTES // ROW_BYTES))
    asked: list[bool] = []

    def wait(ready: Callable[[], bool]) -> None:
        asked.append(ready())
        assert view.poll() is not None
        asked.append(ready())

    writer.wait = wait
    assert writer.write(numbers(1))
    assert asked == [False, True]
    assert writer.wakes == 1, "the poll made room"
    assert writer.write(numbers(1))
    assert len(asked) == 2


def test_a_writer_that_waits_goes_on_when_its_consumer_is_lost() -> None:
    writer = Writer(drops=True)
    view = writer.view(whole=True)
    assert writer.write(numbers(OUTPUT_BUFFERS_PER_SUBPARTITION_MAX * SEGMENT_BYTES // ROW_BYTES))

    def wait(ready: Callable[[], bool]) -> None:
        view.release(CancelReason.FAILED)
        assert ready()

    writer.wait = wait
    assert not writer.write(numbers(5))
    writer.subpartition.attend()
    assert writer.wakes == 1
    assert writer.partition.rows_dropped()["queue_discarded"] == writer.counters.records_out
    assert writer.budget.used == 0


def test_a_writer_that_is_cancelled_while_it_waits_holds_nothing() -> None:
    writer = Writer()
    view = writer.view(whole=True)
    assert writer.write(numbers(OUTPUT_BUFFERS_PER_SUBPARTITION_MAX * SEGMENT_BYTES // ROW_BYTES))

    def wait(ready: Callable[[], bool]) -> None:
        raise TaskCancelled("stop")

    writer.wait = wait
    with pytest.raises(TaskCancelled):
        writer.write(numbers(5))
    writer.partition.release(False)
    assert view.poll() is None
    assert writer.budget.used == 0


def test_a_thread_that_could_not_be_stopped_keeps_no_room() -> None:
    writer = Writer()
    writer.view(whole=True)
    handing = writer.partition._whole_batches
    assert handing is not None
    batch = handing.take(Batch(numbers(5)), None)
    assert batch is not None
    writer.partition.release(True)
    writer.subpartition.add_whole(batch)
    assert writer.budget.used == 0


def test_a_consumer_in_another_process_gets_the_bytes_of_what_was_queued_whole() -> None:
    writer = Writer()
    writer.view(whole=True)
    first, second = numbers(100), numbers(10, begin=100)
    assert writer.write(first)
    assert writer.write(second)
    view = writer.view(whole=False)
    assert not writer.write(first)
    assert writer.subpartition.backlog() > 4 + 1
    expected = b"".join(
        bytes(part) for batch in (first, second, first) for part in encode(as_batch(batch))[1]
    )
    writer.partition.broadcast_event(EventKind.END_OF_DATA)
    assert b"".join(read(view)) == expected + bytes([EventKind.END_OF_DATA])
    assert view.rows_sent == 210
    assert writer.budget.used == 0
    assert writer.network.free == writer.network.total


# --- a gate -------------------------------------------------------------------------------------------


def test_a_batch_enters_if_any_credit_is_free_and_what_follows_waits_for_the_debt(
    make_setup: type[Setup],
) -> None:
    setup, writer = make_setup(exclusive=1, floating=1, direct=False), Writer()
    channel = setup.gate.add_channel(0)
    channel.attach_local(writer.subpartition, 1, setup.handed_over.append)
    batches = [numbers(begin + 100, begin) for begin in range(3)]
    for batch in batches:
        assert writer.write(batch)
    assert setup.queues() == [1], "its four segments are more than both credits"
    for batch in batches:
        element = setup.gate.poll()
        assert element is not None
        assert decode(element.format, element.rows, element.payload).payload is batch
        assert setup.gate.poll() is None
        (buffer,) = setup.returned
        setup.returned.clear()
        buffer.attachment.consumed(buffer)
    assert [piece.size for piece in setup.handed_over] == [800, 808, 816]
    assert (setup.counters.buffers_in, setup.counters.bytes_in) == (3, 2424)
    assert writer.budget.used == 0


def test_events_and_segments_keep_their_order_among_batches(make_setup: type[Setup]) -> None:
    setup, writer = make_setup(), Writer()
    channel = setup.gate.add_channel(0)
    assert not writer.write(["a"])
    channel.attach_local(writer.subpartition, 1, setup.handed_over.append)
    assert writer.write(numbers(2))
    assert not writer.write(["b", "c"])
    assert writer.write(numbers(3))
    writer.partition.broadcast_event(EventKind.END_OF_PARTITION)
    found = []
    while (element := setup.gate.poll()) is not None:
        found.append(decode(element.format, element.rows, element.payload).payload)
    assert found == [["a"], numbers(2), ["b", "c"], numbers(3)]
    assert setup.gate.finished


def test_a_gate_that_closes_counts_the_batches_in_its_queue(make_setup: type[Setup]) -> None:
    setup, writer = make_setup(), Writer(drops=True)
    channel = setup.gate.add_channel(0)
    channel.attach_local(writer.subpartition, 1, setup.handed_over.append)
    for _ in range(3):
        assert writer.write(numbers(100))
    assert setup.queues() == [2]
    setup.gate.close()
    assert setup.gate.rows_dropped()["queue_discarded"] == 200
    assert writer.partition.rows_dropped()["queue_discarded"] == 100
    assert writer.budget.used == 0
