"""Input channels whose attachments replace each other: local by remote and back, at any moment.

One thread is producer, loop and task, and buffers come home as late as the test likes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minishuffle.errors import PeerLost, TaskFailed
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.channels import (
    ChannelEvent,
    InputChannel,
    LocalAttachment,
    QueuedEvent,
)
from minishuffle.exchange.elements import encode
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.ids import JobId, PartitionId
from minishuffle.wire.frames import (
    ROW_MAX,
    BufferFlags,
    CancelPartitionRequest,
    CancelReason,
    DataType,
    EventKind,
    PartitionRequest,
    encode_frame,
)
from support.exchanges import EXCLUSIVE, FLOATING, SEGMENT_BYTES, Exchange, credit_of
from support.frames import buffer_header
from support.links import consumer_of
from support.retained import VERSION, Producer

# --- one after another ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["local", "remote"])
@pytest.mark.parametrize("second", ["local", "remote"])
def test_an_attachment_takes_the_place_of_another_and_goes_on_behind_what_it_read(
    first: str, second: str
) -> None:
    exchange = Exchange()
    for kind in (first, second):
        getattr(exchange, f"attach_{kind}")(0)
        exchange.settle()
        for _ in range(4):
            exchange.write(0, 90)
        exchange.flush(0)
        exchange.settle()
    exchange.poll_all()
    exchange.give_back(99)
    exchange.settle()
    exchange.poll_all()
    assert exchange.read == [list(range(8))]
    assert isinstance(exchange.attachments[0], LocalAttachment) == (first == "local")
    exchange.validate()
    exchange.close()


def test_what_comes_home_late_credits_no_newer_attachment() -> None:
    exchange = Exchange()
    exchange.attach_remote(0)
    for _ in range(5):
        exchange.write(0, 100)
    exchange.flush(0)
    exchange.settle()
    exchange.poll_all()
    held = len(exchange.returned)
    assert held == EXCLUSIVE + FLOATING
    exchange.attach_local(0)
    exchange.attach_remote(0)
    assert credit_of(exchange.channels[0]) == (0, 0), "every buffer is still out"
    for number in range(1, held + 1):
        exchange.give_back(1)
        exclusive = min(number, EXCLUSIVE)
        assert credit_of(exchange.channels[0]) == (exclusive, exclusive), "and the rest is the pool's"
        exchange.validate()
    exchange.close()


def written(exchange: Exchange, size: int = 10) -> Any:
    """A buffer that was sent, read and not given back."""
    exchange.write(0, size)
    exchange.flush(0)
    exchange.partitions[0].subpartitions[0].attend()
    exchange.settle()
    exchange.poll_all()
    return exchange.returned[-1]


def test_a_local_buffer_is_spared_until_more_is_to_be_sent_of_its_segment() -> None:
    exchange = Exchange()
    exchange.attach_local(0)
    buffer = written(exchange)
    assert buffer.attachment.spares(buffer)
    exchange.write(0, 10)
    assert not buffer.attachment.spares(buffer), "what was published since waits for it"
    exchange.give_back(1)
    full = written(exchange, 2 * SEGMENT_BYTES)
    assert not full.attachment.spares(full), "its segment is to be free, or others wait behind it"
    exchange.close()


def test_remote_buffers_are_spared_while_the_producer_has_half_of_its_credit() -> None:
    exchange = Exchange()
    exchange.attach_remote(0)
    exchange.settle()
    spared = []
    for _ in range(EXCLUSIVE):
        buffer = written(exchange)
        spared.append(buffer.attachment.spares(buffer))
    assert spared == [EXCLUSIVE - number >= EXCLUSIVE / 2 for number in range(1, EXCLUSIVE)] + [False]
    exchange.give_back(99)
    exchange.settle()
    buffer = written(exchange)
    assert buffer.attachment.spares(buffer)
    exchange.attach_remote(0)
    assert not buffer.attachment.spares(buffer), "it goes to the pool"
    exchange.close()


def test_a_request_says_which_row_of_which_version_is_the_first_that_is_wanted() -> None:
    exchange = Exchange()
    requests: list[PartitionRequest] = []
    exchange.links[-1][0].connection.request_partition = (  # type: ignore[method-assign]
        lambda consumer, request: requests.append(request) or 1
    )
    exchange.attach_remote(0)
    exchange.attach_local(0)
    for _ in range(3):
        exchange.write(0, 100)
    exchange.flush(0)
    exchange.poll_all()
    exchange.attach_remote(0)
    other = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, version=2)
    exchange.channels[0].attach_remote(exchange.links[-1][0], other)
    assert [(request.version, request.row) for request in requests] == [(0, 0), (0, 3), (2, 0)]
    exchange.close()


def test_half_an_element_of_the_attachment_before_is_thrown_away_and_counted() -> None:
    exchange = Exchange()
    exchange.attach_remote(0)
    exchange.write(0, 1)
    exchange.write(0, 20 * SEGMENT_BYTES)
    exchange.settle()
    exchange.poll_all()
    exchange.attach_local(0)
    exchange.write(0, 1)
    exchange.flush(0)
    for _ in range(20):
        exchange.poll_all()
        exchange.give_back(99)
    assert exchange.read == [[0, 2]]
    assert exchange.channels[0].rows_incomplete == 1
    exchange.close()


def end(exchange: Exchange, number: int) -> None:
    exchange.partitions[number].broadcast_event(EventKind.END_OF_DATA)
    exchange.partitions[number].broadcast_event(EventKind.END_OF_PARTITION)
    exchange.settle()


def test_a_channel_is_attached_once_its_producer_answers_and_ends_with_its_partition() -> None:
    exchange = Exchange(channels=2)
    exchange.attach_remote(0)
    exchange.attach_local(1)
    exchange.settle()
    assert exchange.events == [], "nothing was sent yet, and whoever attaches a local one knows"
    for _ in range(2):
        exchange.write(0, 100)
        exchange.flush(0)
        exchange.settle()
    assert exchange.events == [(0, 1, "attach")]
    for number in range(2):
        end(exchange, number)
    assert exchange.events == [(0, 1, "attach")], "the task has not read the ends yet"
    exchange.poll_all()
    exchange.give_back(99)
    assert sorted(exchange.events) == [(0, 1, "attach"), (0, 1, "end"), (1, 1, "end")]
    exchange.close()
    assert len(exchange.events) == 3


def test_a_channel_whose_link_breaks_has_failed_and_ends_if_it_has_all() -> None:
    exchange = Exchange()
    exchange.attach_remote(0)
    end(exchange, 0)
    exchange.links[-1][0].connection.lost(PeerLost("the link is gone"))
    assert exchange.events == [(0, 1, "attach"), (0, 1, "fail")]
    exchange.poll_all()
    exchange.give_back(99)
    assert exchange.events == [(0, 1, "attach"), (0, 1, "fail"), (0, 1, "end")]
    exchange.close()


def test_a_backlog_without_credit_is_an_answer() -> None:
    exchange = Exchange()
    pool = exchange.gate.buffers.pool
    taken = [pool.request() for _ in range(pool.size)]
    exchange.attach_remote(0)
    exchange.write(0, 100)
    exchange.flush(0)
    exchange.settle()
    assert exchange.events == [(0, 1, "attach")]
    for segment in taken:
        assert segment is not None
        segment.recycle()
    exchange.close()


def test_an_end_stays_whatever_is_attached_after_it() -> None:
    """The loop may attach the next attempt of a producer before it hears that the end was read. Case 129,
    SingleInputGateTest."""
    exchange = Exchange(channels=2)
    for number in range(2):
        exchange.attach_local(number)
        exchange.partitions[number].broadcast_watermark(7, False)
    exchange.partitions[0].broadcast_event(EventKind.END_OF_DATA)
    exchange.partitions[0].broadcast_event(EventKind.END_OF_PARTITION)
    exchange.poll_all()
    assert exchange.channels[0].ended
    exchange.attach_remote(0)
    assert not exchange.poll() and exchange.channels[0].ended
    exchange.settle()
    exchange.poll_all()  # the end is state of the subpartition, and comes again
    assert not exchange.gate.finished
    exchange.partitions[1].broadcast_watermark(9, False)
    exchange.partitions[1].broadcast_event(EventKind.END_OF_PARTITION)
    exchange.poll_all()
    assert exchange.gate.finished
    exchange.close()


def test_a_detached_channel_holds_no_watermark_back() -> None:
    exchange = Exchange(channels=2)
    for number in range(2):
        exchange.attach_local(number)
        exchange.partitions[number].broadcast_watermark(5 + number, False)
    exchange.poll_all()
    assert exchange.gate.valve.watermark == 5
    exchange.channels[0].detach()
    exchange.poll_all()
    assert exchange.gate.marked and exchange.gate.valve.watermark == 6
    exchange.attach_local(0)
    exchange.partitions[0].broadcast_watermark(6, False)
    exchange.poll_all()
    exchange.partitions[1].broadcast_watermark(9, False)
    exchange.poll_all()
    assert exchange.gate.valve.watermark == 6, "it has come as far as the rest, which waits for it again"
    exchange.close()


def test_an_error_comes_behind_what_was_delivered_and_not_behind_the_end() -> None:
    exchange = Exchange(channels=2)
    for number in range(2):
        exchange.attach_local(number)
    exchange.partitions[0].broadcast_event(EventKind.END_OF_PARTITION)
    exchange.write(1, 110)
    exchange.flush(1)
    for channel in exchange.channels:
        channel.detach(PeerLost(f"gone {channel.producer}"))
    with pytest.raises(PeerLost, match="gone 1"):
        exchange.poll_all()
    assert exchange.read == [[], [0]]
    exchange.close()


def test_a_closed_channel_is_attached_to_nothing() -> None:
    exchange = Exchange()
    exchange.gate.close()
    request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0)
    exchange.channels[0].attach_remote(exchange.links[-1][0], request)
    exchange.channels[0].attach_local(exchange.partitions[0].subpartitions[0], 2, lambda piece: None)
    assert exchange.channels[0].attachment is None
    assert not exchange.links[-1][0].connection.wants_to_send
    exchange.close()


def test_a_new_attachment_that_was_short_and_ends_keeps_no_buffer() -> None:
    exchange = Exchange()
    exchange.attach_remote(0)
    exchange.write(0, 3 * SEGMENT_BYTES)
    exchange.flush(0)
    exchange.settle()
    exchange.attach_remote(0)
    assert 0 < consumer_of(exchange.channels[0]).credit.exclusive_total < EXCLUSIVE
    exchange.attach_local(0)
    exchange.close()


# --- the end of a partition -------------------------------------------------------------------------


def test_at_the_end_of_a_partition_buffers_go_to_the_next_in_line_and_the_producer_is_told() -> None:
    exchange = Exchange(channels=2)
    for number in range(2):
        exchange.attach_remote(number)
    exchange.settle()
    for _ in range(20):
        exchange.write(1, 100)
    exchange.partitions[0].broadcast_event(EventKind.END_OF_PARTITION)
    exchange.settle()
    waiting = consumer_of(exchange.channels[1])
    assert waiting.credit.waiting and waiting.credit.granted == EXCLUSIVE + FLOATING
    ended = consumer_of(exchange.channels[0])
    exchange.poll()
    exchange.poll()
    (end,) = (item for item in exchange.returned if isinstance(item, QueuedEvent))
    exchange.returned.remove(end)
    end.attachment.consumed(end)
    assert exchange.channels[0].attachment is None
    assert ended.credit.idle == 0
    assert exchange.gate.snapshot().exclusive_capacity == EXCLUSIVE
    chunks, _ = exchange.links[-1][0].connection.data_to_send(16)
    assert encode_frame(CancelPartitionRequest(ended.id, CancelReason.ENDED)) in b"".join(chunks)
    assert waiting.credit.granted == EXCLUSIVE + FLOATING + EXCLUSIVE
    exchange.links[-1][1].connection.receive(b"".join(chunks), 0.0)
    assert exchange.partitions[0].subpartitions[0].view is None
    exchange.links[-1][1].connection.receive(b"".join(chunks[-1:]), 0.0)
    exchange.validate()
    exchange.close()


def test_at_the_end_of_a_partition_here_its_view_is_released() -> None:
    exchange = Exchange()
    exchange.attach_local(0)
    exchange.write(0, 100)
    exchange.partitions[0].broadcast_event(EventKind.END_OF_PARTITION)
    exchange.poll_all()
    assert exchange.partitions[0].subpartitions[0].view is not None, "the task has yet to say so"
    exchange.give_back(99)
    assert exchange.channels[0].attachment is None
    assert exchange.partitions[0].subpartitions[0].view is None
    exchange.close()


# --- channels that fail in a gate that goes on without them -----------------------------------------


def test_a_channel_that_fails_is_left_out_until_it_is_attached_again() -> None:
    exchange = Exchange(channels=2, tolerant=True)
    exchange.attach_remote(0)
    exchange.attach_local(1)
    for number in range(2):
        exchange.write(number, 100)
        exchange.partitions[number].broadcast_watermark(5 + number, False)
        exchange.flush(number)
    exchange.settle()
    exchange.cut()
    assert exchange.events[-1] == (0, 1, "fail")
    exchange.poll_all()
    assert exchange.read == [[0], [1]], "what had come is read"
    assert exchange.gate.valve.watermark == 6, "and the watermark waits for nobody who is not there"
    exchange.give_back(99)
    assert exchange.events[-1] == (0, 1, "drain")
    exchange.attach_remote(0)
    exchange.write(0, 1)
    exchange.flush(0)
    exchange.settle()
    exchange.poll_all()
    assert exchange.read == [[0, 2], [1]]
    for number in range(2):
        end(exchange, number)
    exchange.poll_all()
    assert exchange.gate.finished
    exchange.close()


def test_a_channel_that_fails_before_it_is_attached_is_left_out_as_well() -> None:
    exchange = Exchange(channels=2, tolerant=True)
    exchange.attach_local(1)
    exchange.partitions[1].broadcast_watermark(7, False)
    exchange.channels[0].fail(1, PeerLost("nobody answers there"))
    exchange.channels[0].fail(1, PeerLost("and again"))
    exchange.poll_all()
    assert exchange.gate.valve.watermark == 7
    exchange.give_back(99)
    assert exchange.events == [(0, 1, "drain")], "once"
    exchange.generations[0] = 1
    exchange.attach_local(0)
    exchange.partitions[0].broadcast_watermark(8, False)
    exchange.poll_all()
    exchange.partitions[1].broadcast_watermark(20, False)
    exchange.poll_all()
    assert exchange.gate.valve.watermark == 8, "it is waited for again"
    exchange.close()


def test_all_unused_credit_of_a_channel_that_fails_is_void_and_goes_to_the_next_in_line() -> None:
    exchange = Exchange(channels=2, tolerant=True)
    for number in range(2):
        exchange.attach_remote(number)
    for _ in range(20):
        exchange.write(1, 100)
    exchange.settle()
    waiting, lost = consumer_of(exchange.channels[1]), consumer_of(exchange.channels[0])
    assert waiting.credit.waiting and lost.credit.idle == EXCLUSIVE
    exchange.channels[0].fail(1, PeerLost("gone"))
    assert (lost.credit.idle, lost.credit.granted - lost.credit.received) == (0, 0)
    exchange.settle()
    assert len(exchange.channels[1].queue) == EXCLUSIVE + FLOATING + EXCLUSIVE
    exchange.validate()
    exchange.close()


def test_a_producer_here_that_fails_is_an_end_behind_what_it_has_written() -> None:
    """Case 156, LocalInputChannelTest."""
    exchange = Exchange(tolerant=True)
    exchange.attach_local(0)
    exchange.write(0, 100)
    exchange.flush(0)
    exchange.partitions[0].fail(TaskFailed("the producer raised"))
    assert exchange.events == [(0, 1, "fail")]
    exchange.poll_all()
    exchange.give_back(99)
    assert exchange.read == [[0]] and exchange.events[-1] == (0, 1, "drain")
    exchange.close()


def test_what_was_not_taken_when_the_task_ends_is_counted() -> None:
    exchange = Exchange(tolerant=True)
    exchange.attach_remote(0)
    for size in (1, 1, 100, 100):
        exchange.write(0, size)
    exchange.flush(0)
    exchange.settle()
    assert exchange.poll()
    exchange.gate.close()
    assert exchange.gate.rows_dropped() == {"queue_discarded": 3, "partial_element": 0}
    exchange.gate.close()
    assert exchange.gate.rows_dropped() == {"queue_discarded": 3, "partial_element": 0}, "once"
    exchange.close()


def test_half_an_element_that_was_under_way_when_the_task_ends_is_counted() -> None:
    exchange = Exchange(tolerant=True)
    exchange.attach_local(0)
    exchange.write(0, 20 * SEGMENT_BYTES)
    exchange.poll_all()
    exchange.gate.close()
    assert exchange.gate.rows_dropped() == {"queue_discarded": 0, "partial_element": 1}
    exchange.close()


SIZES = [1, SEGMENT_BYTES // 2, 2 * SEGMENT_BYTES]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_an_element_that_is_cut_at_any_byte_is_thrown_away_and_counted_once(size: int, rows: int) -> None:
    """Behind a whole element, which is read; in front of one that a new attachment brings."""
    whole, again = (b"".join(encode(Batch([[number, ""]]))[1]) for number in (0, 9))
    cut = b"".join(encode(Batch([[number, "x" * size] for number in range(rows)]))[1])
    for at in range(len(cut)):
        exchange = Exchange(tolerant=True)
        exchange.attach_remote(0)
        data = whole + cut[:at]
        for begin in range(0, len(data), SEGMENT_BYTES):
            piece = data[begin : begin + SEGMENT_BYTES]
            starts = [start for start, there in ((0, 1), (len(whole), at)) if there]
            begun = sum((1 if not start else rows) for start in starts if 0 <= start - begin < len(piece))
            arrive(exchange.channels[0], piece, begun)
            exchange.poll_all()
            exchange.give_back(99)
        exchange.channels[0].fail(1, PeerLost("cut"))
        exchange.poll_all()
        assert exchange.gate.rows_dropped()["partial_element"] == (rows if at else 0)
        exchange.attach_remote(0)
        arrive(exchange.channels[0], again, 1, row=1 + (rows if at else 0))
        exchange.poll_all()
        assert exchange.read == [[0, 9]]
        exchange.gate.close()
        lost = rows if at else 0
        assert exchange.gate.rows_dropped() == {"queue_discarded": 0, "partial_element": lost}
        assert sum(each.rows_received for each in exchange.attachments) == 2 + lost
        exchange.close()


def arrive(channel: InputChannel, data: bytes, rows: int, *, row: int = 0) -> None:
    """A buffer from the network, in which ``rows`` rows begin; ``row``: of the first of an attachment."""
    consumer = consumer_of(channel)
    consumer.credit.take_unannounced()
    flags = BufferFlags.STARTS
    header = buffer_header(
        consumer.id,
        consumer.expected,
        DataType.DATA,
        len(data),
        flags=flags,
        rows=rows,
        row=max(row, consumer.row),
    )
    consumer.begin(header)[:] = data
    consumer.end()


def test_what_local_channels_may_need_one_day_is_not_lent_as_floating() -> None:
    pool = NetworkBufferPool(20, 256).create_pool("gate", 9, 11)
    buffers = GateBuffers(pool, 256, exclusive=2, floating=3)
    exclusive = buffers.take_exclusive()
    floating = [buffers.request_floating() for _ in range(4)]
    assert (len(exclusive), [each is None for each in floating]) == (2, [False, False, False, True])
    for segment in (*exclusive, *floating[:3]):
        assert isinstance(segment, Segment)
        segment.recycle()
    buffers.close()


# --- buffer sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "remote"])
@pytest.mark.parametrize(("size", "segment_bytes"), [(1, 128), (7, 128), (31, 128), (256, 4096)])
def test_elements_that_are_longer_than_all_buffers_together_arrive_whatever_the_size(
    kind: str, size: int, segment_bytes: int
) -> None:
    """Also where no buffer has room for the header of an element."""
    exchange = Exchange(segment_bytes=segment_bytes)
    exchange.resize(size)
    getattr(exchange, f"attach_{kind}")(0)
    exchange.settle()
    stuck = 0

    def acquire() -> Segment:
        """The task waits for a segment: consumer and loop go on meanwhile."""
        nonlocal stuck
        for _ in range(3):
            if (segment := exchange.output.request()) is not None:
                return segment
            stuck += 1
            exchange.poll_all()
            exchange.give_back(len(exchange.returned))
            exchange.settle()
        raise AssertionError("nobody gives a segment back")

    exchange.partitions[0]._acquire = acquire
    for length in (0, 10, 500 * size):
        exchange.write(0, length)
    exchange.partitions[0].broadcast_event(EventKind.END_OF_PARTITION)
    for _ in range(600):
        exchange.settle()
        exchange.poll_all()
        exchange.give_back(len(exchange.returned))
    assert exchange.read == [[0, 1, 2]]
    assert stuck, "all buffers were full"
    assert exchange.gate.finished
    exchange.close()


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_size_is_announced_to_who_is_attached_and_to_who_comes_later(kind: str) -> None:
    """Case 159, LocalInputChannelTest#testAnnounceNewBufferSize, and its remote twin."""
    exchange = Exchange(channels=2)
    subpartitions = [partition.subpartitions[0] for partition in exchange.partitions]
    getattr(exchange, f"attach_{kind}")(0)
    exchange.settle()
    assert [each.buffer_size for each in subpartitions] == [SEGMENT_BYTES, None], (
        "what a debloater begins with"
    )
    exchange.resize(50)
    exchange.settle()
    assert [each.buffer_size for each in subpartitions] == [50, None]
    getattr(exchange, f"attach_{kind}")(1)
    exchange.settle()
    assert [each.buffer_size for each in subpartitions] == [50, 50]
    exchange.gate.debloat()
    assert [each.buffer_size for each in subpartitions] == [50, 50], "nothing new"
    exchange.close()


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_size_is_announced_to_nobody_who_is_gone(kind: str) -> None:
    """Cases 104 and 142, RemoteInputChannelTest and SingleInputGateTest."""
    exchange = Exchange(channels=2)
    for number in range(2):
        getattr(exchange, f"attach_{kind}")(number)
    exchange.settle()
    exchange.channels[0].detach()
    exchange.resize(50)
    exchange.settle()
    sizes = [partition.subpartitions[0].buffer_size for partition in exchange.partitions]
    assert sizes == [SEGMENT_BYTES, 50]
    exchange.gate.close()
    for attachment in exchange.attachments:
        attachment.resize(20)
    exchange.resize(20)
    exchange.settle()
    assert [partition.subpartitions[0].buffer_size for partition in exchange.partitions] == sizes
    exchange.close()


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_buffers_count_as_unread_from_the_queue_of_the_producer_to_that_of_the_task(kind: str) -> None:
    """Case 49, CreditBasedPartitionRequestClientHandlerTest."""
    exchange = Exchange()
    getattr(exchange, f"attach_{kind}")(0)
    exchange.settle()
    for _ in range(12):
        exchange.write(0, SEGMENT_BYTES - 40)
    exchange.settle()
    attachment, view = exchange.attachments[0], exchange.partitions[0].subpartitions[0].view
    assert view is not None and view.backlog() > 0
    assert attachment.unread == view.backlog() + EXCLUSIVE + FLOATING
    exchange.channels[0].detach()
    assert exchange.gate.debloater is not None
    exchange.gate.debloat()
    exchange.close()


# --- barriers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_channel_stops_behind_a_barrier_until_that_is_over(kind: str) -> None:
    """While the other channel, whose barrier has not come, is read on; in the end both go on. Cases 157 and
    293."""
    exchange = Exchange(channels=2)
    for number in range(2):
        getattr(exchange, f"attach_{kind}")(number)
        exchange.write(number, 90)
    exchange.partitions[0].broadcast_barrier(1)
    exchange.write(0, 90)
    _run(exchange)
    assert exchange.read == [[0], [1]]
    assert not exchange.gate.is_aligned(1)
    assert exchange.gate.is_held(1) and not exchange.gate.is_held(2)
    exchange.write(1, 90)
    _run(exchange)
    assert exchange.read == [[0], [1, 3]], "no alignment holds the other one up"
    exchange.partitions[1].broadcast_barrier(1)
    _run(exchange)
    assert exchange.gate.is_aligned(1) and not exchange.gate.is_aligned(2)
    exchange.gate.end_barriers(1)
    _run(exchange)
    assert exchange.read == [[0, 2], [1, 3]]
    exchange.close()


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_barrier_that_is_over_stops_nothing(kind: str) -> None:
    """Case 294: the channel of an older one is resumed at once."""
    exchange = Exchange()
    getattr(exchange, f"attach_{kind}")(0)
    exchange.gate.end_barriers(3)
    exchange.partitions[0].broadcast_barrier(3)
    exchange.write(0, 90)
    _run(exchange)
    assert exchange.read == [[0]]
    exchange.close()


def test_a_channel_that_has_ended_is_not_waited_for() -> None:
    """Case 297."""
    exchange = Exchange(channels=2)
    exchange.attach_local(0)
    exchange.attach_remote(1)
    exchange.partitions[0].broadcast_barrier(1)
    exchange.partitions[1].broadcast_event(EventKind.END_OF_PARTITION)
    assert not exchange.gate.is_aligned(1)
    _run(exchange)
    assert exchange.gate.is_aligned(1)
    exchange.close()


@pytest.mark.parametrize("second", ["local", "remote"])
@pytest.mark.parametrize("over", [False, True])
def test_a_barrier_is_said_again_to_the_next_attachment(second: str, over: bool) -> None:
    exchange = Exchange(tolerant=True)
    exchange.attach_remote(0)
    exchange.write(0, 90)
    exchange.partitions[0].broadcast_barrier(1)
    exchange.write(0, 90)
    _run(exchange)
    exchange.cut()
    if over:
        exchange.gate.end_barriers(1)
    getattr(exchange, f"attach_{second}")(0)
    _run(exchange)
    assert exchange.read == ([[0, 1]] if over else [[0]])
    exchange.gate.end_barriers(1)
    _run(exchange)
    assert exchange.read == [[0, 1]]
    exchange.close()


def _run(exchange: Exchange) -> None:
    """Until nothing is on its way."""
    for _ in range(4):
        for number in range(len(exchange.channels)):
            exchange.flush(number)
        exchange.settle()
        exchange.poll_all()
        exchange.give_back(99)


# --- what is retained -----------------------------------------------------------------------------


def retained_channel(make_setup: Callable[..., Any]) -> tuple[Producer, list[Any], Any, Any, Any]:
    """A producer that retains what it sends, and the events, setup, channel and wire of its consumer."""
    producer, events = Producer(), list[tuple[int, ChannelEvent]]()
    setup = make_setup(tolerant=True, guaranteed=True)
    channel = setup.gate.add_channel(0, lambda *event: events.append(event))
    setup.request(channel, version=VERSION)
    return producer, events, setup, channel, setup.wire([producer.partition])


def test_a_retained_partition_has_ended_once_a_snapshot_covers_its_end(
    make_setup: Callable[..., Any],
) -> None:
    """Until then its producer is attached, and what is stable is said to each attachment that answers."""
    producer, events, setup, channel, wire = retained_channel(make_setup)
    producer.write(["a" * 200])
    producer.write(["b" * 200])
    producer.partition.finish()
    producer.attend()
    wire.settle()
    element = setup.gate.poll()
    assert element is not None and setup.rows_of(element) == ["a" * 200]
    oldest = setup.gate.taken()
    assert setup.rows() == ["b" * 200] and setup.gate.finished
    setup.gate.make_stable(oldest)
    wire.settle()
    assert events == [(1, ChannelEvent.ATTACH)] and producer.partition.stable() == [1]

    channel.detach(PeerLost("the link broke"))
    setup.gate.make_stable(setup.gate.taken())
    assert setup.rows() == [] and events[1:] == [(1, ChannelEvent.FAIL), (1, ChannelEvent.DRAIN)]
    assert producer.partition.stable() == [1] and producer.budget.used
    setup.request(channel, 2, version=VERSION)
    wire.settle()
    assert producer.partition.stable() == [ROW_MAX], "it wants no row, written or not"
    assert setup.rows() == [] and events[3:] == [(2, ChannelEvent.ATTACH), (2, ChannelEvent.END)]
    wire.settle()
    assert producer.budget.used == 0 and channel.attachment is None


@pytest.mark.parametrize("breaks", ["before", "behind"])
@pytest.mark.parametrize("covered", ["meanwhile", "behind"])
def test_a_producer_hears_what_the_last_snapshot_of_a_finished_task_covers_though_their_link_broke(
    make_setup: Callable[..., Any], breaks: str, covered: str
) -> None:
    """It breaks before the task has ended or behind that, and the snapshot is safe meanwhile or then."""
    producer, events, setup, channel, wire = retained_channel(make_setup)
    producer.write(["a" * 200])
    producer.partition.finish()
    producer.attend()
    wire.settle()
    assert setup.rows() == ["a" * 200] and setup.gate.finished
    last = setup.gate.taken()
    if breaks == "before":
        channel.detach(PeerLost("the link broke"))
    setup.gate.close(listens=True)
    if breaks == "behind":
        channel.detach(PeerLost("the link broke"))
    assert events[1:] == [(1, ChannelEvent.FAIL), (1, ChannelEvent.DRAIN)], "nobody reads what came before"
    if covered == "meanwhile":
        setup.gate.make_stable(last)
    setup.request(channel, 2, version=VERSION)
    wire.settle()
    if covered == "behind":
        assert producer.budget.used
        setup.gate.make_stable(last)
        wire.settle()
    assert producer.partition.stable() == [ROW_MAX] and producer.budget.used == 0
    assert events[3:] == [(2, ChannelEvent.ATTACH), (2, ChannelEvent.END)] and channel.attachment is None


def test_a_task_that_has_finished_is_not_attached_to_rows_that_it_will_not_read(
    make_setup: Callable[..., Any],
) -> None:
    """Its producer would wait for it."""
    producer = Producer()
    setup = make_setup(tolerant=True, guaranteed=True)
    channel = setup.gate.add_channel(0)
    setup.request(channel, version=VERSION)
    wire = setup.wire([producer.partition])
    producer.partition.finish()
    producer.attend()
    wire.settle()
    assert setup.rows() == [] and setup.gate.finished
    setup.gate.close(listens=True)
    channel.detach(PeerLost("the worker was lost"))
    setup.request(channel, 2, version=VERSION + 1)
    assert channel.attachment is None
    setup.gate.close()


def test_what_is_stable_goes_out_before_its_channel_is_cancelled(make_setup: Callable[..., Any]) -> None:
    producer = Producer()
    setup = make_setup(tolerant=True, guaranteed=True)
    setup.remote(0, version=VERSION)
    wire = setup.wire([producer.partition])
    producer.write(["a" * 200])
    producer.partition.finish()
    producer.attend()
    wire.settle()
    assert setup.rows() == ["a" * 200]
    setup.gate.make_stable(setup.gate.taken())
    setup.gate.close()
    wire.settle()
    assert producer.partition.stable() == [ROW_MAX] and producer.budget.used == 0
