"""Latency markers on their way through an exchange: behind the rows, one at a time, and never as state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import RemoteProtocolError
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.limits import EVENTS_QUEUED_PER_CHANNEL_MAX
from minishuffle.wire.frames import CancelReason, EventKind, LatencyMarker

if TYPE_CHECKING:
    from conftest import Setup

FIRST, SECOND, THIRD = (LatencyMarker(2, 3, time) for time in (1_700_000_000_000_000, 7, -1))


def collected(setup: Setup) -> list[object]:
    """Rows and markers, in the order in which the task meets them; filled in by polls."""
    met: list[object] = []
    setup.gate.on_latency = met.append
    return met


def poll(setup: Setup, met: list[object]) -> None:
    while (item := setup.gate.poll()) is not None:
        met += setup.rows_of(item)


@pytest.mark.parametrize("remote", [True, False])
def test_a_marker_comes_behind_the_rows_that_were_written_before_it(
    make_setup: type[Setup], remote: bool
) -> None:
    setup = make_setup(remote=1 if remote else 0)
    partition = setup.partition(0)
    wire = setup.wire([partition]) if remote else None
    if not remote:
        setup.local(partition)
    met = collected(setup)
    partition.write(0, 1, [setup.element(["before"])])
    partition.emit_latency(FIRST)
    partition.write(0, 1, [setup.element(["after"])])
    partition.subpartitions[0].finish_open(ends=True)
    if wire is not None:
        wire.settle()
    poll(setup, met)
    assert met == ["before", FIRST, "after"]
    assert partition.rows_dropped() == {"upstream_unavailable": 0, "queue_discarded": 0}


def test_a_marker_costs_no_credit(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=1, exclusive=0, floating=1)
    partition = setup.partition(0)
    wire, met = setup.wire([partition]), collected(setup)
    partition.emit_latency(FIRST)
    wire.settle()
    poll(setup, met)
    assert met == [FIRST]


def test_one_that_waits_is_not_joined_by_others(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=1)
    partition = setup.partition(0)
    met = collected(setup)
    for time in range(10 * EVENTS_QUEUED_PER_CHANNEL_MAX):
        partition.emit_latency(FIRST if not time else SECOND)
        partition.broadcast_watermark(time, idle=False)
    (subpartition,) = partition.subpartitions
    assert subpartition.state().queued == 2, "a marker and a watermark"
    wire = setup.wire([partition])
    # The producer has sent that one: others may follow, and wait on the consumer's side.
    (channel,) = setup.remotes
    for time in range(10 * EVENTS_QUEUED_PER_CHANNEL_MAX):
        partition.emit_latency(SECOND)
        partition.broadcast_watermark(1_000 + time, idle=False)
        wire.settle()
    assert len(channel.queue) <= 3 and channel.events_queued == 0
    poll(setup, met)
    assert met == [FIRST]
    partition.emit_latency(THIRD)
    wire.settle()
    poll(setup, met)
    assert met == [FIRST, THIRD]


def test_a_reader_that_is_attached_anew_gets_no_marker_of_the_past() -> None:
    subpartition = PipelinedSubpartition(0, PipelinedSubpartition.attend, drops=True)
    first = subpartition.attach(1, lambda: None)
    subpartition.add_latency(FIRST)
    subpartition.add_watermark(5, False)
    assert [_kind(first.poll()), _kind(first.poll())] == [EventKind.LATENCY_MARKER, EventKind.WATERMARK]
    first.release(CancelReason.FAILED)
    subpartition.add_latency(SECOND)
    subpartition.attend()
    assert subpartition.state().queued == 0, "nobody reads it: it is freed"
    second = subpartition.attach(2, lambda: None)
    assert _kind(second.poll()) is EventKind.WATERMARK
    assert second.poll() is None
    subpartition.add_latency(THIRD)
    assert _kind(second.poll()) is EventKind.LATENCY_MARKER


def _kind(piece: object) -> EventKind:
    from minishuffle.exchange.buffers import Slice

    assert isinstance(piece, Slice)
    return EventKind(piece.payload[0])


def test_segments_that_are_broadcast_stay_the_same_for_all(make_setup: type[Setup]) -> None:
    from minishuffle.exchange.pipelined import PipelinedPartition

    setup = make_setup()
    pool = setup.network.create_pool("output", 8, 8)

    def acquire():  # type: ignore[no-untyped-def]
        return pool.request()

    made = PipelinedPartition(
        PartitionId(JobId("j1"), 0, 0), range(3), acquire, PipelinedSubpartition.attend, TaskCounters()
    )
    views = [each.attach(1, lambda: None) for each in made.subpartitions]
    element = setup.element(["x"])
    made.broadcast([0, 1, 2], 1, [element])
    made.emit_latency(FIRST)
    made.broadcast([0, 1, 2], 1, [element])
    kinds = []
    for view in views:
        pieces = list(iter(view.poll, None))
        kinds.append([int(piece.data_type) for piece in pieces])
        for piece in pieces:
            piece.released()
    assert sorted(map(len, kinds))[-1] == sorted(map(len, kinds))[0] + 1, "one of them has the marker"
    for each in made.subpartitions:
        each.discard()
    assert setup.network.free == setup.network.total


def test_a_marker_of_the_wrong_size_breaks_its_channel(make_setup: type[Setup]) -> None:
    setup = make_setup(remote=1)
    setup.arrive_event(setup.remotes[0], EventKind.LATENCY_MARKER)
    with pytest.raises(RemoteProtocolError, match="event of unknown kind 4 and 1 bytes"):
        setup.gate.poll()


def test_a_marker_is_as_long_as_it_says() -> None:
    assert LatencyMarker.unpack(FIRST.pack()) == FIRST
    assert len(FIRST.pack()) == 17 and FIRST.pack()[0] == EventKind.LATENCY_MARKER
