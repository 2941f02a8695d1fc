"""What every kind of result partition does, whoever writes and reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import ShuffleError, Superseded, TaskFailed
from minishuffle.exchange.blocking import BlockingPartition
from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.elementstore import ElementStore, StorePlace
from minishuffle.exchange.partition import PartitionView, ResultPartition, serve
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.retained import RetainedPartition
from minishuffle.exchange.retention import RetainedBytes, RetainedStore
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import CancelReason, DataType, PartitionRequest
from support.disks import HeldDisk
from support.links import BareLink

CAPACITY = 16
NAME = PartitionId(JobId("j1"), 3, 0)
FIRST = 4
"""Index of the first of three consumers."""
CONSUMERS = range(FIRST, FIRST + 3)


class Kind:
    """One partition, whose notices and disk reads are attended to in :meth:`turn`."""

    def __init__(self, kind: str) -> None:
        self.counters = TaskCounters()
        self.network = NetworkBufferPool(64, CAPACITY)
        self.disk = HeldDisk()
        self.notified: list[Any] = []
        self._files = set(os.listdir("/proc/self/fd"))
        if kind == "pipelined":
            pool = self.network.create_pool("p", 1, 64)
            self.partition: ResultPartition = PipelinedPartition(
                NAME,
                CONSUMERS,
                lambda: pool.request(),  # type: ignore[arg-type, return-value]
                self.notified.append,
                self.counters,
                flushing=Flush.AT_ONCE,
            )
        elif kind.startswith("retained"):
            budget = RetainedBytes(1 << 30, 1 << 29 if kind == "retained" else 0, CAPACITY)
            self.partition = RetainedPartition(
                NAME,
                CONSUMERS,
                self.notified.append,
                self.counters,
                RetainedStore(
                    budget, lambda: ElementStore("p", StorePlace()), keep_bytes=0, wake=lambda: None
                ),
                version=1,
                flushing=Flush.AT_ONCE,
                wait=lambda ready: None,
                wake=lambda: None,
                capacity=CAPACITY,
                unread_bytes=1 << 20,
                disk=self.disk,
            )
        else:
            self.partition = BlockingPartition(
                NAME,
                CONSUMERS,
                self.notified.append,
                self.counters,
                ElementStore("p", StorePlace(), memory_bytes=1 << 20 if kind == "memory" else 0),
                shared=kind == "shared",
                capacity=CAPACITY,
                disk=self.disk,
            )

    def view(self, consumer: int, generation: int = 1, **arguments: Any) -> PartitionView:
        subpartition = self.partition.subpartition(consumer)
        assert subpartition is not None
        return subpartition.attach(generation, lambda: None, **arguments)

    def read(self, view: PartitionView) -> list[bytes]:
        """What there is, buffer by buffer; events as they are."""
        found: list[bytes] = []
        while True:
            if (piece := view.poll()) is not None:
                found.append(bytes(piece.payload) if piece.data_type == DataType.DATA else b"end")
                piece.released()
            elif self.disk.waiting:
                self.disk.turn()
            else:
                return found

    @property
    def clean(self) -> bool:
        """It holds no segment and no file."""
        return self.network.free == self.network.total and set(os.listdir("/proc/self/fd")) == self._files


@pytest.fixture(params=["pipelined", "memory", "disk", "shared", "retained", "retained on disk"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    kind = Kind(request.param)
    yield kind
    for subpartition in kind.partition.subpartitions:
        kind.read(subpartition.attach(99, lambda: None))
    kind.partition.release(written_off=False)
    assert kind.clean


def data_of(pieces: list[bytes]) -> bytes:
    return b"".join(piece for piece in pieces if piece != b"end")


def test_each_consumer_reads_what_was_written_and_then_the_end(kind: Kind) -> None:
    """Cases 266 and 269, RecordWriterTest#testBroadcastEventNoRecords,
    #testBroadcastEmitBufferIndependence: the end reaches everybody, and each reads at its own pace."""
    views = [kind.view(each) for each in CONSUMERS]
    kind.partition.broadcast([0, 1, 2], 2, [b"a" * 20, memoryview(b"b" * 9)])
    early = data_of(kind.read(views[0]))
    kind.partition.broadcast([0, 1, 2], 1, [b"c" * 5])
    kind.partition.finish()
    assert early == b"a" * 20 + b"b" * 9
    assert data_of(kind.read(views[0])) == b"c" * 5
    for view in views[1:]:
        pieces = kind.read(view)
        assert data_of(pieces) == b"a" * 20 + b"b" * 9 + b"c" * 5 and pieces[-1] == b"end"
        assert view.next_type() is NextType.NONE and view.poll() is None
    assert [view.rows_sent for view in views] == [3, 3, 3]


def test_what_is_written_is_counted_for_each_consumer(kind: Kind) -> None:
    """Case 261, ResultPartitionTest#testResultPartitionBytesCounterForBroadcast."""
    kind.partition.broadcast([0, 1, 2], 2, [b"a" * 20])
    assert (kind.counters.records_out, kind.counters.bytes_out) == (6, 60)
    assert not kind.partition.rows_dropped() or not any(kind.partition.rows_dropped().values())


def test_the_backlog_is_that_of_buffers_that_can_be_read(kind: Kind) -> None:
    """Cases 174 and 177, PipelinedSubpartitionWithReadViewTest
    #testBacklogConsistentWithConsumableBuffersForFinishedPartition."""
    view = kind.view(FIRST)
    kind.partition.broadcast([0, 1, 2], 1, [b"a" * (3 * CAPACITY)])
    kind.partition.finish()
    assert view.backlog() == 3, "without the end"
    assert len(kind.read(view)) - 1 >= 3 and view.backlog() == 0
    assert kind.partition.buffers_out() == 3


def test_a_consumer_that_this_producer_does_not_feed_has_nothing_here(kind: Kind) -> None:
    """Case 262, ResultPartitionTest#testCreateSubpartitionOnFailingPartition."""
    assert kind.partition.subpartition(FIRST - 1) is None and kind.partition.subpartition(FIRST + 3) is None
    assert [each.consumer for each in kind.partition.subpartitions] == list(CONSUMERS)
    assert {each.state()[1:] for each in kind.partition.subpartitions} == {(0, True, False, False)}


def test_a_newer_view_takes_the_place_of_another_and_an_older_attempt_is_fenced(kind: Kind) -> None:
    """Case 202, PipelinedApproximateSubpartitionTest#testRecreateReadView."""
    errors: list[ShuffleError] = []
    first = kind.view(FIRST, on_failed=errors.append)
    second = kind.view(FIRST, 2, on_failed=errors.append)
    assert [type(error) for error in errors] == [Superseded]
    assert (first.current, second.current, second.generation, second.attempt) == (False, True, 2, 1)
    kind.partition.broadcast([0, 1, 2], 1, [b"a" * 3])
    assert first.poll() is None and data_of(kind.read(second)) == b"aaa"
    kind.partition.fence(FIRST, 1)
    assert second.current
    kind.partition.fence(FIRST, 2)
    assert not second.current and "attempt 1 of consumer 4 was replaced by 2" in str(errors[1])


def test_a_failure_reaches_those_who_read_and_those_who_ask_later(kind: Kind) -> None:
    """Case 201, ProducerFailedExceptionTest: the cause arrives."""
    errors: list[ShuffleError] = []
    error = TaskFailed("it is broken")
    view = kind.view(FIRST, on_failed=errors.append)
    kind.partition.fail(error)
    view.fail(error)
    assert errors == [error] and not view.current
    subpartition = kind.partition.subpartition(FIRST + 1)
    assert subpartition is not None and subpartition.error is error
    link = BareLink()
    request = PartitionRequest(NAME, FIRST + 1, channel=0x8000_0001, initial_credit=2)
    link.connection.producers.expect(request)
    attachment = serve(link, request, subpartition)
    assert not attachment.view.current and subpartition.view is None
    assert b"it is broken" in b"".join(map(bytes, link.connection.data_to_send(9)[0]))


def test_what_is_released_is_given_back(kind: Kind) -> None:
    """Cases 186, 187, 197 and 254: PipelinedSubpartitionTest#testCleanupReleasedPartitionWithView,
    #testIsReleasedChecksParent, PipelinedResultPartitionReleaseOnConsumptionTest
    #testMultipleReleaseCallsAreIdempotent, ResultPartitionTest#testReleaseMemoryOnPipelinedPartition."""
    view = kind.view(FIRST)
    kind.partition.broadcast([0, 1, 2], 1, [b"a" * 40])
    view.release(CancelReason.MOVED)
    view = kind.view(FIRST)
    for _ in range(2):
        kind.partition.release(written_off=False)
        assert (view.current, view.poll(), view.next_type(), view.backlog()) == (
            False,
            None,
            NextType.NONE,
            0,
        )
        assert kind.partition.backlog() == 0
    assert kind.clean


@pytest.mark.parametrize("kind", ["memory", "disk", "shared", "retained", "retained on disk"], indirect=True)
@pytest.mark.parametrize("reason", list(CancelReason))
def test_one_that_is_stored_is_read_again_whatever_became_of_the_reader(
    reason: CancelReason, kind: Kind
) -> None:
    kind.partition.broadcast([0, 1, 2], 1, [b"a" * 40])
    kind.partition.finish()
    view = kind.view(FIRST)
    assert data_of(kind.read(view)) == b"a" * 40
    for _ in range(2):
        view.release(reason)
    assert data_of(kind.read(kind.view(FIRST))) == b"a" * 40
