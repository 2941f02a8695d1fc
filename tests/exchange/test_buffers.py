"""A segment that is being filled, its slices, and events; test_subpartition.py has what is made of them."""

from __future__ import annotations

import pytest

from minishuffle.exchange.buffers import BufferBuilder, Event, Slice
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.limits import SEGMENT_HEADROOM_BYTES
from minishuffle.wire.frames import WATERMARK_EVENT, DataType, EventKind

CAPACITY = 16


class Releases:
    """A view that notes what comes back."""

    def __init__(self) -> None:
        self.builders: list[BufferBuilder] = []

    def slice_released(self, builder: BufferBuilder) -> None:
        self.builders.append(builder)


@pytest.fixture
def builder() -> BufferBuilder:
    segment = NetworkBufferPool(1, CAPACITY).create_pool("p", 1, 1).request()
    assert segment is not None
    return BufferBuilder(segment)


def test_only_what_fits_is_appended_and_only_what_is_published_is_unsent(builder: BufferBuilder) -> None:
    """Cases 276 and 277, BufferBuilderAndConsumerTest."""
    builder.begin(3)
    part = memoryview(bytes(range(20)))
    assert builder.append(part, 0) == CAPACITY
    assert builder.append(part, CAPACITY) == 0
    assert not builder.unsent()
    builder.publish(ends=False)
    assert builder.unsent()
    assert builder.published == (CAPACITY, 3, 1, False)
    assert bytes(builder.segment.memory[SEGMENT_HEADROOM_BYTES:]) == bytes(range(CAPACITY))


def test_a_drained_segment_is_recycled_unless_the_transport_holds_a_slice(builder: BufferBuilder) -> None:
    builder.holder = Releases()
    builder.drain()
    assert builder.segment.owner is not None
    builder.holder = None
    builder.drain()
    assert builder.segment.owner is None


def test_the_rest_of_an_element_is_skipped_to_the_first_start_or_to_its_end(builder: BufferBuilder) -> None:
    """Case 211, BufferConsumerWithPartialRecordLengthTest."""
    assert not builder.skip_rest(), "nothing is there yet"
    builder.flush_requested = True
    builder.append(memoryview(b"tail"), 0)
    builder.publish(ends=False)
    assert not builder.skip_rest()
    assert not builder.flush_requested, "that was for what is left out"
    assert (builder.sent_bytes, builder.unsent()) == (4, False)
    builder.begin(2)
    builder.append(memoryview(b"next"), 0)
    builder.publish()
    assert builder.skip_rest()
    assert (builder.sent_bytes, builder.sent_rows) == (4, 0)


def test_nothing_is_skipped_of_a_segment_that_was_sent(builder: BufferBuilder) -> None:
    """Case 211, BufferConsumerWithPartialRecordLengthTest."""
    builder.begin(2)
    builder.append(memoryview(b"head"), 0)
    builder.publish(ends=False)
    builder.sent_bytes, builder.sent_rows, builder.sent_starts = 4, 2, 1
    assert not builder.skip_rest(), "the element goes on in the next"
    assert (builder.sent_bytes, builder.unsent()) == (4, False)


def test_a_slice_comes_back_once(builder: BufferBuilder) -> None:
    view = Releases()
    piece = Slice(builder.segment.memory, 64, 4, DataType.DATA, 1)
    piece.view, piece.builder = view, builder
    piece.released()
    piece.released()
    assert view.builders == [builder]
    Slice(memoryview(bytes(65)), 64, 1, DataType.EVENT, 0).released()
    assert view.builders == [builder]


def test_a_watermark_is_overtaken_until_it_is_taken() -> None:
    event = Event(EventKind.WATERMARK, 5)
    assert event.overtake(6, True)
    piece = event.slice()
    assert WATERMARK_EVENT.unpack(piece.payload) == (EventKind.WATERMARK, 1, 6)
    assert not event.overtake(7, False)
    assert bytes(Event(EventKind.END_OF_DATA).slice().payload) == bytes([EventKind.END_OF_DATA])
