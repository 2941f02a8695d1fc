"""A task whose consumers have gone: what it does not write, and what wakes it if it waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import TaskCancelled, UnserializableRecord
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.exchange.subpartition import PipelinedView
from minishuffle.ids import JobId, PartitionId
from minishuffle.operators.base import Output, Program
from minishuffle.runtime.chain import Chain
from minishuffle.wire.frames import CancelReason
from minishuffle.worker.tasks.handoff import TaskBell, TaskPaths

if TYPE_CHECKING:
    from conftest import Turns

SEGMENT_BYTES = 64
CONSUMERS = 3
SECONDS_MAX = 20.0

PathsOf = Callable[..., TaskPaths]


class Writer:
    """A task with one partition that drops; every consumer is attached, and has gone if ``lost`` names it."""

    def __init__(self, paths: TaskPaths, partitioner: str, lost: set[int], segments: int = 64) -> None:
        self.counters = TaskCounters()
        network = NetworkBufferPool(segments, SEGMENT_BYTES)
        self.pool = pool = network.create_pool("p", segments, segments)
        pool.on_available(paths.bell.ring)
        self.partition = PipelinedPartition(
            PartitionId(JobId("j1"), 0, 0),
            range(CONSUMERS),
            lambda: paths.acquire(pool),
            paths.notify,
            self.counters,
            drops=True,
        )
        self.views = [each.attach(1, lambda: None) for each in self.partition.subpartitions]
        for position in lost:
            self.views[position].release(CancelReason.FAILED)
        program = Program(None, [], [Output(0, partitioner, choose=lambda row, consumers: row[0])])
        take = Chain(program, {0: self.partition}, 0, self.counters).entrance(0)
        self.put = lambda rows: take(Batch(rows))

    def rows(self, view: PipelinedView) -> int:
        """How many the consumer gets."""
        self.partition.flush()
        while (piece := view.poll()) is not None:
            piece.released()
        return view.rows_sent


class Opaque:
    """The row format cannot carry it."""


@pytest.mark.parametrize("lost", [{1}, {0, 2}, set(range(CONSUMERS))])
def test_rows_for_consumers_that_have_gone_are_not_serialised(paths_of: PathsOf, lost: set[int]) -> None:
    writer = Writer(paths_of(), "custom", lost)
    for position in range(CONSUMERS):
        writer.put([(position, Opaque() if position in lost else "x")] * 2)
    assert [writer.rows(view) for view in writer.views] == [2 * (n not in lost) for n in range(CONSUMERS)]
    skipped = 2 * len(lost)
    assert writer.partition.rows_dropped() == {"upstream_unavailable": skipped, "queue_discarded": 0}
    assert writer.counters.records_out == 2 * CONSUMERS
    with pytest.raises(UnserializableRecord):
        Writer(paths_of(), "custom", set()).put([(0, Opaque())])


def test_a_broadcast_is_written_for_those_that_are_there(paths_of: PathsOf) -> None:
    writer = Writer(paths_of(), "broadcast", {1})
    writer.put(["x", "y"])
    assert [writer.rows(view) for view in writer.views] == [2, 0, 2]
    assert writer.partition.rows_dropped() == {"upstream_unavailable": 2, "queue_discarded": 0}
    assert writer.counters.records_out == 2 * CONSUMERS


def test_a_broadcast_that_nobody_gets_is_not_serialised(paths_of: PathsOf) -> None:
    writer = Writer(paths_of(), "broadcast", set(range(CONSUMERS)))
    writer.put([Opaque()] * 4)
    dropped = {"upstream_unavailable": 4 * CONSUMERS, "queue_discarded": 0}
    assert writer.partition.rows_dropped() == dropped
    assert writer.counters.bytes_out == 0


class WatchedBell(TaskBell):
    """Says when its task is about to wait."""

    __slots__ = ("waiting",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.waiting = threading.Event()

    def wait(self, seconds: float) -> None:
        self.waiting.set()
        super().wait(seconds)


def test_a_writer_that_waits_for_a_segment_that_only_a_lost_consumer_has_is_woken(
    turns: Turns, long_waits: None, paths_of: PathsOf
) -> None:
    """The writer waits in the middle of an element for another consumer."""
    paths = paths_of()
    paths.bell = bell = WatchedBell(cast(asyncio.AbstractEventLoop, turns))
    writer = Writer(paths, "custom", {2}, segments=4)
    raised: list[BaseException] = []

    def write() -> None:
        try:
            for position in (0, 0, 1):
                writer.put([(position, "x" * SEGMENT_BYTES)])
        except TaskCancelled as cancelled:
            raised.append(cancelled)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        assert bell.waiting.wait(SECONDS_MAX)
        assert (writer.pool.in_use, writer.partition.backlog()) == (4, 3)
        turns.turn()
        writer.views[0].release(CancelReason.FAILED)
        turns.turn()
        thread.join(SECONDS_MAX)
        assert not thread.is_alive()
    finally:
        paths.cancel()
        thread.join(SECONDS_MAX)
    assert raised == []
    assert writer.rows(writer.views[1]) == 1
    assert writer.partition.rows_dropped() == {"upstream_unavailable": 0, "queue_discarded": 2}
