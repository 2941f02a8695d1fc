"""Two connections that pass bytes to each other: no sockets, no clock, no sleeps."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minishuffle import limits
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import (
    LocalProtocolError,
    PartitionNotFound,
    PeerLost,
    PeerSuspected,
    RemoteProtocolError,
    Superseded,
    TaskFailed,
)
from minishuffle.exchange.subpartition import PipelinedSubpartition, PipelinedView
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import SubpartitionView
from minishuffle.protocol.connection import (
    LAST_LOOK_SECONDS,
    Connection,
    PartitionCancelled,
    PartitionReleased,
    PartitionRequested,
    PeerClosed,
    PeerSilent,
)
from minishuffle.wire.frames import (
    ROW_MAX,
    AddCredit,
    BacklogAnnouncement,
    BufferFlags,
    CancelPartitionRequest,
    CancelReason,
    DataType,
    Error,
    EventKind,
    Hello,
    NewBufferSize,
    PartitionRequest,
    Ping,
    Pong,
    Stable,
    encode_frame,
)
from support.frames import Piece

Peers = Any
BLOCK = bytes(range(64))


def buffer_for(
    channel: int,
    sequence: int,
    payload: bytes = b"x",
    data_type: int = DataType.DATA,
    *,
    row: int | None = None,
) -> bytes:
    """A buffer with one row."""
    memory = memoryview(bytearray(64 + len(payload)))
    memory[64:] = payload
    piece = Piece(memory, len(payload), data_type, BufferFlags.NONE, rows=1)
    piece.row = sequence if row is None else row
    return b"".join(piece.chunks(channel, sequence, 0))


def test_cancel_releases_the_view_and_frames_still_on_the_way_are_discarded(
    peers_of: Callable[..., Peers],
) -> None:
    """Cases 17, 18 and 58, NettyMessageClientDecoderDelegateTest and
    CreditBasedPartitionRequestClientHandlerTest."""
    peers = peers_of(channels=2)
    peers.request_all()
    peers.settle()
    peers.partition.write(0, 1, [BLOCK])
    peers.partition.write(1, 1, [BLOCK])
    chunks, pieces = peers.producer.data_to_send(16)
    peers.consumer.cancel(peers.gates[0].channel)
    peers.consumer.cancel(peers.gates[0].channel)
    peers.consumer.receive(b"".join(chunks), 0.0)
    for piece in pieces:
        piece.released()
    peers.settle()
    assert not peers.gates[0].queue
    assert len(peers.gates[1].queue) == 1
    assert peers.gates[0].channel.credit.idle == 0
    assert peers.counters[1].rows_discarded == 1
    assert peers.partition.subpartitions[0].view is None


def test_rows_of_a_buffer_that_was_half_there_at_the_cancel_count_as_discarded(
    peers_of: Callable[..., Peers],
) -> None:
    """Cases 56, 57 and 59, CreditBasedPartitionRequestClientHandlerTest."""
    peers = peers_of(channels=1)
    peers.request_all()
    peers.settle()
    whole = buffer_for(peers.gates[0].channel.id, 0, b"four")
    peers.consumer.receive(whole[:-1], 0.0)
    peers.consumer.cancel(peers.gates[0].channel)
    assert peers.gates[0].pool.in_use == 0, "the memory that it was copied into is free"
    peers.consumer.receive(whole[-1:], 0.0)
    assert not peers.gates[0].queue
    assert peers.counters[1].rows_discarded == 1


def test_a_request_says_what_the_generation_before_received(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1, attach=False)
    request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, generation=2, version=1, row=70)
    peers.consumer.request_partition(peers.gates[0].channel, request)
    peers.settle()
    assert peers.requested[0].request == replace(request, channel=1, initial_credit=2)


def test_a_gap_in_sequence_numbers_ends_that_channel_alone(peers_of: Callable[..., Peers]) -> None:
    """Case 82, RemoteInputChannelTest."""
    peers = peers_of(channels=2)
    peers.request_all()
    peers.settle()
    channel = peers.gates[0].channel.id
    peers.consumer.receive(buffer_for(channel, 7) + buffer_for(peers.gates[1].channel.id, 0), 0.0)
    assert isinstance(peers.gates[0].error, RemoteProtocolError)
    assert "buffer 7 arrived where 0 was expected" in str(peers.gates[0].error)
    assert peers.gates[1].error is None
    assert len(peers.gates[1].queue) == 1
    peers.settle()
    assert peers.partition.subpartitions[0].view is None


def test_rows_that_do_not_follow_each_other_end_their_channel_alone(
    peers_of: Callable[..., Peers],
) -> None:
    """The first buffer may begin with any row that can be counted."""
    peers = peers_of(channels=3)
    peers.request_all()
    peers.settle()
    for gate, rows in zip(peers.gates, ((7, 8), (7, 9), (ROW_MAX,)), strict=True):
        for sequence, row in enumerate(rows):
            peers.consumer.receive(buffer_for(gate.channel.id, sequence, row=row), 0.0)
    assert peers.gates[0].error is None and len(peers.gates[0].queue) == 2
    assert isinstance(peers.gates[1].error, RemoteProtocolError)
    assert "row 9 arrived where row 8 was expected" in str(peers.gates[1].error)
    assert f"row {ROW_MAX} arrived, and the last one can be {ROW_MAX}" in str(peers.gates[2].error)


def test_overdrawn_credit_is_an_error_and_not_a_wait(peers_of: Callable[..., Peers]) -> None:
    """Case 53, CreditBasedPartitionRequestClientHandlerTest."""
    peers = peers_of(channels=1)
    peers.request_all()
    peers.settle()
    channel = peers.gates[0].channel.id
    peers.consumer.receive(b"".join(buffer_for(channel, number) for number in range(3)), 0.0)
    assert "overdrew its credit of 2" in str(peers.gates[0].error)
    assert len(peers.gates[0].queue) == 2


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (buffer_for(0x55, 0), "never opened"),
        (encode_frame(BacklogAnnouncement(0x55, 1)), "never opened"),
        (
            encode_frame(PartitionRequest(PartitionId(JobId("j"), 0, 0), 0, channel=1, initial_credit=2)),
            "not the peer's to give",
        ),
        (encode_frame(Hello(1, "c", 1, 1, 2, bytes(32))), "has no place"),
    ],
)
def test_what_only_a_broken_peer_sends_ends_the_connection(
    peers_of: Callable[..., Peers], frame: bytes, says: str
) -> None:
    peers = peers_of(channels=1)
    with pytest.raises(RemoteProtocolError, match=says):
        peers.consumer.receive(frame, 0.0)


def test_channel_ids_are_never_used_again(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1)
    peers.request_all()
    peers.settle()
    used = peers.gates[0].channel.id
    peers.consumer.cancel(peers.gates[0].channel)
    peers.settle()
    request = PartitionRequest(
        PartitionId(JobId("j1"), 0, 0), 0, generation=2, channel=used, initial_credit=2
    )
    with pytest.raises(RemoteProtocolError, match="not the peer's to give"):
        peers.producer.receive(encode_frame(request), 0.0)


def test_channels_that_were_cancelled_leave_nothing_behind() -> None:
    connection = alone()

    def churn(first: int) -> None:
        for channel in range(first, first + 5_000):
            request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, channel=channel, initial_credit=2)
            cancel = CancelPartitionRequest(channel, CancelReason.MOVED)
            connection.receive(encode_frame(request) + encode_frame(cancel), 0.0)
            connection.events()

    churn(1)
    tracemalloc.start()
    try:
        churn(5_001)
        gc.collect()
        traces = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    ours = [tracemalloc.Filter(True, f"*/minishuffle/{part}/*") for part in ("protocol", "wire")]
    held = sum(
        each.size for each in traces.filter_traces(ours).traces
    )  # Not what other threads read meanwhile.
    assert held < 16_384


def test_control_for_a_closed_channel_is_ignored(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1)
    peers.request_all()
    peers.settle()
    channel = peers.gates[0].channel.id
    peers.consumer.cancel(peers.gates[0].channel)
    peers.settle()
    peers.producer.receive(encode_frame(AddCredit(((channel, 1),))), 0.0)
    peers.consumer.receive(encode_frame(BacklogAnnouncement(channel, 3)), 0.0)
    peers.settle()
    assert peers.counters[0].credits_received == 2


def sizes(peers: Peers, number: int, written: int) -> list[int]:
    """Bytes in the buffers that a channel receives of what is written now."""
    peers.partition.write(number, 1, [bytes(written)])
    peers.partition.broadcast_event(EventKind.END_OF_DATA)
    found: list[int] = []
    while True:
        peers.settle()
        if not (queue := peers.gates[number].queue):
            return found
        if queue[0].data_type == DataType.DATA:
            found.append(len(queue[0].payload))
        peers.consume(number)


def test_a_buffer_size_reaches_its_channel_and_holds_for_buffers_begun_later(
    peers_of: Callable[..., Peers],
) -> None:
    """Cases 31 (but for the first record, which spans buffers here), 38, 256 and 259:
    PartitionRequestQueueTest#testNotifyNewBufferSize, PartitionRequestServerHandlerTest#testNewBufferSize,
    ResultPartitionTest#testDifferentBufferSizeForSubpartitions and #testBufferSizeNotChanged."""
    peers = peers_of(channels=2)
    peers.request_all()
    peers.settle()
    peers.partition.write(0, 1, [bytes(10)])
    peers.consumer.announce_buffer_size(peers.gates[0].channel, 20)
    peers.settle()
    assert sizes(peers, 0, 54 + 30) == [64, 20, 10], "the one that was begun before is filled"
    assert sizes(peers, 0, 30) == [20, 10]
    assert sizes(peers, 1, 100) == [64, 36]
    peers.consumer.announce_buffer_size(peers.gates[0].channel, 1 << 20)
    peers.settle()
    assert sizes(peers, 0, 100) == [64, 36], "there is no room for more"


def test_one_buffer_size_is_announced_for_each_channel_and_the_newest_one(
    peers_of: Callable[..., Peers],
) -> None:
    """Case 62, CreditBasedPartitionRequestClientHandlerTest#testAnnounceBufferSize."""
    peers = peers_of(channels=2)
    peers.request_all()
    peers.settle()
    for size in (9, 30, 17):
        for gate in peers.gates:
            peers.consumer.announce_buffer_size(gate.channel, size + gate.channel.id)
    assert peers.consumer.control_unsent == 2
    peers.settle()
    assert peers.counters[1].frames_out["new_buffer_size"] == 2
    assert [each.buffer_size for each in peers.partition.subpartitions] == [
        17 + gate.channel.id for gate in peers.gates
    ]


def test_a_buffer_size_that_comes_before_its_request_is_answered_counts(
    peers_of: Callable[..., Peers],
) -> None:
    """Flink loses it: case 39, where the reader is not there yet."""
    peers = peers_of(channels=1, attach=False)
    peers.request_all()
    peers.consumer.announce_buffer_size(peers.gates[0].channel, 20)
    peers.settle()
    peers.answer(peers.requested[0])
    assert sizes(peers, 0, 30) == [20, 10]


def test_a_request_may_say_the_buffer_size(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1)
    request = PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, buffer_size=20)
    peers.consumer.request_partition(peers.gates[0].channel, request)
    peers.settle()
    assert sizes(peers, 0, 30) == [20, 10]


def test_a_buffer_size_of_a_channel_that_is_not_there_is_ignored(peers_of: Callable[..., Peers]) -> None:
    """Case 39, PartitionRequestServerHandlerTest#testReceivingNewBufferSizeBeforeReaderIsCreated."""
    peers = peers_of(channels=1)
    peers.request_all()
    peers.settle()
    channel = peers.gates[0].channel
    peers.producer.receive(encode_frame(NewBufferSize(channel.id + 1, 20)), 0.0)
    peers.consumer.announce_buffer_size(channel, 20)
    peers.consumer.cancel(channel)
    peers.consumer.announce_buffer_size(channel, 20)
    peers.settle()
    assert "new_buffer_size" not in peers.counters[1].frames_out
    peers.producer.receive(encode_frame(NewBufferSize(channel.id, 20)), 0.0)
    assert peers.partition.subpartitions[0].buffer_size is None


class NotedView:
    """A view, and the Stable frames that reached it."""

    def __init__(self, view: SubpartitionView) -> None:
        self.view = view
        self.stable: list[tuple[int, int]] = []

    def make_stable(self, version: int, row: int) -> None:
        self.stable.append((version, row))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.view, name)


def noted_view(peers: Peers, number: int) -> NotedView:
    producer = peers.producer.producers.channels[peers.gates[number].channel.id]
    producer.view = noted = NotedView(producer.view)  # type: ignore[assignment]
    return noted


def test_stable_reaches_the_view_of_its_channel_and_the_newest_one_goes(
    peers_of: Callable[..., Peers],
) -> None:
    peers = peers_of(channels=2)
    peers.request_all()
    peers.settle()
    first, second = noted_view(peers, 0), noted_view(peers, 1)
    for row in (7, 1 << 40):
        peers.consumer.announce_stable(peers.gates[0].channel, 3, row)
    peers.consumer.announce_stable(peers.gates[1].channel, 3, 9)
    assert peers.consumer.wants_to_send and peers.consumer.control_unsent == 2
    peers.settle()
    assert (first.stable, second.stable) == ([(3, 1 << 40)], [(3, 9)])
    assert peers.counters[1].frames_out["stable"] == 2 and peers.counters[0].frames_in["stable"] == 2


def test_stable_of_a_channel_that_is_not_attached_is_ignored(peers_of: Callable[..., Peers]) -> None:
    """Of one that was fenced too: its producer has closed it. One that comes before its request is answered
    is not kept: another follows."""
    peers = peers_of(channels=1, attach=False)
    peers.request_all()
    channel = peers.gates[0].channel
    peers.consumer.announce_stable(channel, 3, 7)
    peers.settle()
    peers.answer(peers.requested[0])
    noted = noted_view(peers, 0)
    peers.producer.receive(encode_frame(Stable(channel.id + 1, 3, 7)), 0.0)
    peers.consumer.announce_stable(channel, 3, 8)
    peers.producer.fail_producer(channel.id, Superseded("attempt 1 was replaced by 2"))
    peers.settle()
    peers.consumer.announce_stable(channel, 3, 9)
    assert not peers.consumer.wants_to_send, "it is closed here as well"
    assert noted.stable == []


@pytest.mark.parametrize("size", [0, (16 << 20) + 1])
def test_an_absurd_buffer_size_ends_the_connection(peers_of: Callable[..., Peers], size: int) -> None:
    """Case 189, PipelinedSubpartitionTest#testNegativeNewBufferSize."""
    with pytest.raises(RemoteProtocolError, match=f"buffer size {size}, 1 to 16777216 is allowed"):
        peers_of(channels=1).producer.receive(encode_frame(NewBufferSize(1, size)), 0.0)


def test_credit_that_comes_before_its_request_is_answered_counts(peers_of: Callable[..., Peers]) -> None:
    """A gate that was short of exclusive buffers gets them back while the producer is not there yet."""
    peers = peers_of(channels=1, exclusive=0, floating=1, attach=False)
    peers.request_all()
    peers.settle()
    gate = peers.gates[0]
    gate.channel.credit.on_exclusive(gate.pool.request())
    peers.consumer.announce_credit(gate.channel)
    peers.settle()
    peers.answer(peers.requested[0])
    peers.partition.write(0, 1, [BLOCK])
    peers.settle()
    assert len(gate.queue) == 1
    assert peers.counters[0].credits_received == peers.counters[1].credits_granted == 1


def test_an_absurd_grant_before_the_answer_refuses_its_request_alone(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=2, attach=False)
    peers.request_all()
    peers.settle()
    peers.producer.receive(encode_frame(AddCredit(((peers.gates[0].channel.id, 1 << 20),))), 0.0)
    for request in peers.requested:
        peers.answer(request)
    peers.settle()
    assert isinstance(peers.gates[0].error, RemoteProtocolError)
    assert peers.partition.subpartitions[0].view is None
    assert peers.gates[1].error is None


def test_an_absurd_grant_ends_its_channel_alone(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=2)
    peers.request_all()
    peers.settle()
    frame = encode_frame(AddCredit(((peers.gates[0].channel.id, 1 << 20),)))
    peers.producer.receive(frame, 0.0)
    peers.settle()
    assert isinstance(peers.gates[0].error, RemoteProtocolError)
    assert peers.gates[1].error is None


def test_refusal_and_failure_reach_the_channel_with_their_kind(peers_of: Callable[..., Peers]) -> None:
    """Cases 54 and 103, CreditBasedPartitionRequestClientHandlerTest and RemoteInputChannelTest."""
    peers = peers_of(channels=2, attach=False)
    peers.request_all()
    peers.settle()
    first, second = peers.requested
    peers.producer.refuse(first.request.channel, PartitionNotFound("not here"))
    peers.answer(second)
    peers.producer.fail_producer(second.request.channel, TaskFailed("boom"))
    peers.settle()
    assert isinstance(peers.gates[0].error, PartitionNotFound)
    assert isinstance(peers.gates[1].error, TaskFailed)


def test_a_failure_whose_text_is_no_utf8_blocks_nobody_else(peers_of: Callable[..., Peers]) -> None:
    """Case 64, ClientTransportErrorHandlingTest."""
    peers = peers_of(channels=2)
    peers.request_all()
    peers.settle()
    peers.partition.write(1, 1, [BLOCK])
    peers.producer.fail_producer(peers.gates[0].channel.id, TaskFailed("no file a\udcff"))
    peers.settle()
    assert str(peers.gates[0].error) == "no file a\\udcff"
    assert len(peers.gates[1].queue) == 1


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, CancelReason]]:
    """The consumers whose views are released, and why."""
    found: list[tuple[int, CancelReason]] = []
    release = PipelinedView.release

    def note(view: PipelinedView, reason: CancelReason) -> None:
        found.append((view._subpartition.consumer, reason))
        release(view, reason)

    monkeypatch.setattr(PipelinedView, "release", note)
    return found


@pytest.mark.parametrize("reason", CancelReason)
def test_the_reason_of_a_cancel_reaches_the_view(
    peers_of: Callable[..., Peers], released: list[tuple[int, CancelReason]], reason: CancelReason
) -> None:
    peers = peers_of(channels=2)
    peers.request_all()
    peers.settle()
    peers.consumer.cancel(peers.gates[1].channel, reason)
    peers.settle()
    assert released == [(1, reason)]


def test_views_of_a_lost_connection_or_a_broken_channel_are_released_as_failed(
    peers_of: Callable[..., Peers], released: list[tuple[int, CancelReason]]
) -> None:
    """Cases 41 and 42, CancelPartitionRequestTest and ServerTransportErrorHandlingTest."""
    peers = peers_of(channels=3)
    peers.request_all()
    peers.settle()
    peers.producer.receive(encode_frame(AddCredit(((peers.gates[1].channel.id, 1 << 20),))), 0.0)
    assert released == [(1, CancelReason.FAILED)]
    peers.producer.lost(None)
    assert released == [(number, CancelReason.FAILED) for number in (1, 0, 2)]


def test_a_request_that_was_cancelled_meanwhile_is_not_attached(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1, attach=False)
    peers.request_all()
    peers.settle()
    peers.consumer.cancel(peers.gates[0].channel)
    peers.settle()
    peers.answer(peers.requested[0])
    assert peers.partition.subpartitions[0].view is None


def test_a_lost_connection_takes_its_channels_and_gives_every_buffer_back(
    peers_of: Callable[..., Peers],
) -> None:
    """Case 66, ClientTransportErrorHandlingTest."""
    peers = peers_of(channels=2)
    peers.request_all()
    for _ in range(6):
        peers.partition.write(0, 1, [BLOCK])
    peers.settle()
    chunks, _ = peers.producer.data_to_send(1)
    peers.consumer.receive(b"".join(chunks)[:30], 0.0)
    peers.producer.lost(None)
    peers.consumer.lost(PeerLost("cut"))
    peers.consumer.lost(PeerLost("again"))
    assert [str(gate.error) for gate in peers.gates] == ["cut", "cut"]
    while peers.gates[0].queue:
        peers.gates[0].channel.consumed(peers.gates[0].queue.popleft())
    assert peers.receive_pool.free == peers.receive_pool.total
    peers.partition.subpartitions[0].discard()
    peers.partition.subpartitions[1].discard()
    with pytest.raises(LocalProtocolError):
        peers.consumer.request_partition(
            peers.gates[0].channel, PartitionRequest(PartitionId(JobId("j"), 0, 0), 0)
        )


def test_close_and_connection_wide_errors_are_reported(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1)
    peers.producer.close()
    chunks, _ = peers.producer.data_to_send(1)
    peers.consumer.receive(b"".join(chunks), 0.0)
    assert peers.consumer.events() == [PeerClosed(None)]


def test_an_error_of_the_whole_connection_stays_one_and_reaches_every_channel(
    peers_of: Callable[..., Peers],
) -> None:
    """Cases 9 and 64, NettyMessageClientSideSerializationTest and ClientTransportErrorHandlingTest."""
    peers = peers_of(channels=2)
    peers.request_all()
    peers.settle()
    peers.consumer.receive(encode_frame(Error(0, PeerLost.code, "worker 7 shuts down")), 0.0)
    (closed,) = peers.consumer.events()
    assert isinstance(closed, PeerClosed) and isinstance(closed.error, PeerLost)
    peers.consumer.lost(closed.error)
    assert [str(gate.error) for gate in peers.gates] == ["worker 7 shuts down"] * 2


def test_a_channel_that_is_cancelled_in_the_line_holds_nobody_up(peers_of: Callable[..., Peers]) -> None:
    """Cases 26 and 29, PartitionRequestQueueTest."""
    peers = peers_of(channels=3)
    peers.request_all()
    peers.settle()
    for position in range(3):
        peers.partition.write(position, 1, [BLOCK])
    assert len(peers.producer.producers.ready) == 3
    for reason in (CancelReason.MOVED, CancelReason.FAILED):
        cancel = CancelPartitionRequest(peers.gates[0].channel.id, reason)
        peers.producer.receive(encode_frame(cancel), 0.0)
    assert peers.partition.subpartitions[0].view is None
    peers.partition.subpartitions[1].discard()
    assert peers.move(peers.producer, peers.consumer) == 1, "the first two have nothing to give any more"
    assert [len(gate.queue) for gate in peers.gates] == [0, 0, 1]


def test_credit_of_a_cancelled_channel_is_not_announced(peers_of: Callable[..., Peers]) -> None:
    """Case 48, CreditBasedPartitionRequestClientHandlerTest."""
    peers = peers_of(channels=2)
    peers.request_all()
    for position in range(2):
        peers.partition.write(position, 1, [BLOCK])
    peers.settle()
    assert peers.consume(0) and peers.consume(1)
    credits = [gate.channel.credit.unannounced for gate in peers.gates]
    assert credits == [1, 1]
    peers.consumer.cancel(peers.gates[0].channel)
    chunks, _ = peers.consumer.data_to_send(1)
    cancelled, other = (gate.channel.id for gate in peers.gates)
    assert b"".join(chunks) == (
        encode_frame(CancelPartitionRequest(cancelled, CancelReason.ENDED))
        + encode_frame(AddCredit(((other, 1),)))
    )


def alone(now: float = 100.0) -> Connection:
    return Connection(dialer=True, counters=ConnectionCounters(), ping_interval=5.0, now=now)


def run_timers(connection: Connection, until: float) -> None:
    """Call the timer whenever it wants to be called."""
    while connection.next_deadline() <= until:
        connection.handle_timer(connection.next_deadline())


def test_silence_is_answered_with_a_ping_and_then_reported() -> None:
    ours, theirs = (
        alone(),
        Connection(dialer=False, counters=ConnectionCounters(), ping_interval=5.0, now=0.0),
    )
    assert ours.next_deadline() == 105.0
    ours.handle_timer(103.7)
    assert not ours.wants_to_send
    ours.handle_timer(105.0)
    ping, _ = ours.data_to_send(1)
    theirs.receive(b"".join(ping), 105.0)
    pong, _ = theirs.data_to_send(1)
    ours.receive(b"".join(pong), 105.1)
    assert ours.next_deadline() == pytest.approx(110.1)
    run_timers(ours, 125.0)
    assert ours.events() == []
    run_timers(ours, 125.2)
    (event,) = ours.events()
    assert isinstance(event, PeerSilent)
    assert event.seconds == pytest.approx(20.0 + LAST_LOOK_SECONDS)
    run_timers(ours, 130.2)
    (event,) = ours.events()
    assert isinstance(event, PeerSilent), (
        "again after each interval: whoever bears it may be asked until when"
    )
    assert event.seconds == pytest.approx(25.0 + LAST_LOOK_SECONDS)


def test_a_ping_that_goes_early_makes_nothing_else_early() -> None:
    ours = alone()
    ours.handle_timer(104.0)
    assert ours.data_to_send(1)[0] == [encode_frame(Ping(1))]
    assert ours.next_deadline() == 110.0
    ours.handle_timer(109.0)
    assert not ours.wants_to_send
    run_timers(ours, 120.0)
    assert ours.events() == []
    run_timers(ours, 120.1)
    (event,) = ours.events()
    assert isinstance(event, PeerSilent)


def test_the_sockets_are_looked_at_once_more_before_a_peer_is_called_silent() -> None:
    """What has come while this process was held up has not been read when the timer comes."""
    ours = alone()
    run_timers(ours, 119.0)
    ours.handle_timer(124.0)  # late, but by less than an interval
    assert ours.events() == []
    ours.receive(encode_frame(Pong(1)), 124.0)
    run_timers(ours, 139.0)
    assert ours.events() == []
    assert ours.next_deadline() == pytest.approx(144.0)


def test_a_process_that_was_stopped_at_its_last_look_waits_for_another_answer() -> None:
    ours = alone()
    run_timers(ours, 120.0)
    assert ours.data_to_send(1)[0] == [encode_frame(Ping(1))]
    ours.handle_timer(200.0)
    assert ours.events() == []
    assert ours.data_to_send(1)[0] == [encode_frame(Ping(2))]
    run_timers(ours, 206.0)
    (event,) = ours.events()
    assert isinstance(event, PeerSilent)


@pytest.mark.parametrize("error", [PeerSuspected("worker 2 has answered no Ping"), PeerLost("it broke")])
def test_the_producers_know_whether_a_link_ended_under_suspicion(error: PeerLost) -> None:
    ours, subpartition = alone(), PipelinedSubpartition(0, lambda subpartition: None, drops=True)
    ours.receive(
        encode_frame(PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, channel=1, initial_credit=2)), 100.0
    )
    ours.attach(1, subpartition.attach(1, lambda: None))
    ours.lost(error)
    assert not subpartition.available
    assert subpartition.suspected == isinstance(error, PeerSuspected)


def test_of_pongs_that_nobody_reads_the_newest_is_kept() -> None:
    ours = alone()
    for token in range(1_000):
        ours.receive(encode_frame(Ping(token)), 100.0)
    assert ours.data_to_send(1)[0] == [encode_frame(Pong(999))]
    assert not ours.wants_to_send


def test_a_peer_that_reads_no_answers_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONTROL_FRAMES_UNSENT_MAX", 100)
    ours = alone()
    with pytest.raises(RemoteProtocolError, match="more than 100 control frames wait to be read"):
        for channel in range(1, 1_000):
            ours.receive(
                encode_frame(
                    PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, channel=channel, initial_credit=2)
                ),
                100.0,
            )
            ours.refuse(channel, PartitionNotFound("not here"))
    assert channel == 102


def test_a_peer_that_asks_for_too_many_channels_is_refused_and_then_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CHANNELS_PER_CONNECTION_MAX", 10)
    ours, answers = alone(), b""
    with pytest.raises(RemoteProtocolError, match="more than 10 channels, and went on asking"):
        for channel in range(1, 1_000):
            ours.receive(
                encode_frame(
                    PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, channel=channel, initial_credit=2)
                ),
                100.0,
            )
            answers += b"".join(map(bytes, ours.data_to_send(1)[0]))
    assert channel == 10 + 10 + 1
    assert answers.count(b"more than 10 channels") == 10
    assert len(ours.events()) == 10


def test_a_request_that_is_cancelled_before_its_answer_is_reported(peers_of: Callable[..., Peers]) -> None:
    ours = alone()
    ours.receive(
        encode_frame(PartitionRequest(PartitionId(JobId("j1"), 0, 0), 0, channel=7, initial_credit=2)), 100.0
    )
    (requested,) = ours.events()
    assert isinstance(requested, PartitionRequested)
    for _ in range(2):
        ours.receive(encode_frame(CancelPartitionRequest(7, CancelReason.FAILED)), 100.0)
    assert ours.events() == [PartitionCancelled(7)]


def test_a_partition_that_its_consumer_is_done_with_is_reported_once(peers_of: Callable[..., Peers]) -> None:
    """Case 37, PartitionRequestServerHandlerTest."""
    peers = peers_of(channels=1)
    peers.request_all()
    peers.settle()
    channel = peers.gates[0].channel.id
    for _ in range(2):
        peers.producer.receive(encode_frame(CancelPartitionRequest(channel, CancelReason.ENDED)), 0.0)
    assert peers.producer.events() == [PartitionReleased(channel)]


def test_an_event_of_absurd_size_ends_its_channel(
    peers_of: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENT_BYTES_MAX", 16)
    peers = peers_of(channels=1)
    peers.request_all()
    peers.settle()
    big = buffer_for(peers.gates[0].channel.id, 0, bytes(17), DataType.EVENT)
    peers.consumer.receive(big, 0.0)
    assert "event of 17 bytes, at most 16" in str(peers.gates[0].error)


@pytest.mark.parametrize("stopped_at", [104.0, 106.0, 111.0, 116.0, 119.9])
def test_a_process_that_was_paused_reads_before_it_calls_its_peer_silent(stopped_at: float) -> None:
    ours = alone()
    run_timers(ours, stopped_at)
    ours.handle_timer(1000.0)
    assert ours.events() == []
    assert ours.wants_to_send  # a Ping
    ours.receive(encode_frame(Pong(1)), 1000.1)
    run_timers(ours, 1019.9)
    assert ours.events() == []
    run_timers(ours, 1020.2)
    assert [type(event) for event in ours.events()] == [PeerSilent]


def test_a_process_that_is_paused_again_and_again_still_finds_its_peer_silent() -> None:
    ours, now = alone(), 100.0
    while now < 1000.0 and not (events := ours.events()):
        now = ours.next_deadline() + (30.0 if int(now) % 2 else 0.0)
        ours.handle_timer(now)
    assert [type(event) for event in events] == [PeerSilent]
