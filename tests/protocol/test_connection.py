"""Two connections that pass bytes to each other: no sockets, no clock, no sleeps."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minishuffle import limits
from minishuffle.counters import ConnectionCounters
from minishuffle.errors import (
    LocalProtocolError,
    PartitionNotFound,
    PeerLost,
    PeerSuspected,
    RemoteProtocolError,
    TaskFailed,
)
from minishuffle.exchange.buffers import Flush
from minishuffle.exchange.subpartition import PipelinedView, Subpartition
from minishuffle.protocol.connection import (
    LAST_LOOK_SECONDS,
    Connection,
    PartitionCancelled,
    PartitionRequested,
    PeerClosed,
    PeerSilent,
)
from minishuffle.wire.frames import (
    AddCredit,
    BacklogAnnouncement,
    BufferFlags,
    CancelPartitionRequest,
    CancelReason,
    DataType,
    EventKind,
    Hello,
    NewBufferSize,
    PartitionRequest,
    Ping,
    Pong,
    encode_frame,
)
from support.frames import Piece

Peers = Any
BLOCK = bytes(range(64))


def buffer_for(channel: int, sequence: int, payload: bytes = b"x", data_type: int = DataType.DATA) -> bytes:
    memory = memoryview(bytearray(64 + len(payload)))
    memory[64:] = payload
    piece = Piece(memory, len(payload), data_type, BufferFlags.NONE, rows=1)
    return b"".join(piece.chunks(channel, sequence, 0))


def test_each_credit_sends_one_buffer_and_no_more(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1, floating=1)
    peers.request_all()
    for _ in range(6):
        peers.partition.write(0, 1, [BLOCK])
    peers.settle()
    # 2 exclusive and the one floating buffer that the backlog asked for.
    assert len(peers.gates[0].queue) == 3
    assert peers.consume(0)
    peers.settle()
    assert len(peers.gates[0].queue) == 3


def test_credit_runs_dry_when_nothing_is_consumed_and_the_books_agree(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=2)
    peers.request_all()
    for _ in range(8):
        peers.partition.write(0, 1, [BLOCK])
    peers.settle()
    granted, received = peers.counters[1].credits_granted, peers.counters[0].credits_received
    assert granted == received == 2 + 2 + 4
    assert len(peers.gates[0].queue) == 6
    assert peers.gates[0].channel.credit.waiting


def test_events_need_no_credit_and_are_not_held_up_by_another_channel(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=2, exclusive=1, floating=1)
    peers.request_all()
    for _ in range(5):
        peers.partition.write(0, 1, [BLOCK])
    peers.partition.subpartitions[1].add_event(EventKind.END_OF_DATA)
    peers.settle()
    assert peers.consume(1)
    assert peers.events[1] == [EventKind.END_OF_DATA]


def test_channels_take_turns_one_buffer_each(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=4, floating=4)
    peers.request_all()
    peers.settle()
    for _ in range(2):
        for position in range(4):
            peers.partition.write(position, 1, [BLOCK])
    for _ in range(2):
        peers.move(peers.producer, peers.consumer, buffers=4)
        assert len({len(gate.queue) for gate in peers.gates}) == 1
    assert [len(gate.queue) for gate in peers.gates] == [2, 2, 2, 2]


def test_64_channels_never_differ_by_more_than_one_buffer(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=16, floating=16)
    peers.request_all()
    peers.settle()
    for position in range(16):
        peers.partition.write(position, 1, [BLOCK])
    for taken in range(1, 17):
        peers.move(peers.producer, peers.consumer, buffers=1)
        lengths = [len(gate.queue) for gate in peers.gates]
        assert sum(lengths) == taken
        assert max(lengths) - min(lengths) <= 1


def test_backlog_is_announced_when_there_is_no_credit_to_send_it_with(peers_of: Callable[..., Peers]) -> None:
    """A channel without exclusive buffers lives on announcements and floating buffers alone."""
    peers = peers_of(channels=1, exclusive=0, floating=2)
    peers.request_all()
    peers.settle()
    for _ in range(5):
        peers.partition.write(0, 1, [BLOCK])
    peers.settle()
    assert peers.counters[0].frames_out["backlog_announcement"] >= 1
    for _ in range(5):
        peers.settle()
        assert peers.consume(0)
    assert bytes(peers.read[0]) == BLOCK * 5


def test_an_unanswered_backlog_is_repeated_only_when_it_has_doubled(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1, exclusive=0, floating=1)
    peers.request_all()
    peers.settle()
    peers.partition.write(0, 1, [BLOCK])
    peers.settle()  # announced, answered, sent: the only floating buffer is now in use
    before = peers.counters[0].frames_out["backlog_announcement"]
    announced = []
    for _ in range(8):
        peers.partition.write(0, 1, [BLOCK])
        peers.move(peers.producer, peers.consumer)
        announced.append(peers.counters[0].frames_out["backlog_announcement"] - before)
    assert announced == [1, 2, 2, 3, 3, 3, 3, 4]


def test_idle_channels_hold_no_floating_buffers_for_what_is_sent_and_still_in_the_transport(
    peers_of: Callable[..., Peers],
) -> None:
    peers = peers_of(channels=5, exclusive=0, floating=4)
    peers.request_all()
    peers.settle()
    for number in range(4):
        peers.partition.write(number, 1, [b"row"])
        peers.partition.subpartitions[number].flush()
        peers.partition.subpartitions[number].attend()
    peers.move(peers.producer, peers.consumer)
    peers.move(peers.consumer, peers.producer)
    chunks, held = peers.producer.data_to_send(16)
    peers.consumer.receive(b"".join(chunks), 0.0)
    assert len(held) == 4
    peers.partition.broadcast_watermark(7, False)
    for number in range(4):
        assert peers.consume(number)
    peers.settle()
    for piece in held:
        piece.released()
    peers.partition.write(4, 1, [BLOCK])
    peers.settle()
    while peers.consume(4):
        peers.settle()
    assert peers.read[4] == BLOCK, "its floating buffers wait for data that never come"


def test_adaptive_elements_gather_until_the_consumer_has_read_what_was_sent_before(
    peers_of: Callable[..., Peers],
) -> None:
    peers = peers_of(channels=1, exclusive=2, floating=4)
    subpartition = peers.partition.subpartitions[0]
    subpartition.flushing = Flush.ADAPTIVE
    peers.request_all()
    peers.settle()
    peers.partition.write(0, 1, [b"a"])
    assert peers.move(peers.producer, peers.consumer) == 1, "nothing is unread: at once"
    for data in (b"b", b"c", b"d"):
        peers.partition.write(0, 1, [data])
        peers.settle()
    assert [bytes(received.payload) for received in peers.gates[0].queue] == [b"a"]
    assert subpartition.backlog() == 0, "no floating buffer is to wait for it"
    peers.consume(0)
    peers.settle()
    assert [bytes(received.payload) for received in peers.gates[0].queue] == [b"bcd"]
    peers.partition.write(0, 1, [BLOCK + b"e"])
    peers.settle()
    assert len(peers.gates[0].queue) == 2, "a full segment does not wait"
    while peers.consume(0):
        peers.settle()
    assert peers.read == [b"abcd" + BLOCK + b"e"]


def test_an_adaptive_writer_wakes_the_loop_once_while_its_elements_gather(
    peers_of: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = peers_of(channels=1)
    subpartition = peers.partition.subpartitions[0]
    subpartition.flushing = Flush.ADAPTIVE
    peers.request_all()
    peers.settle()
    peers.partition.write(0, 1, [b"a"])
    peers.settle()
    woken: list[Subpartition] = []
    monkeypatch.setattr(peers.partition, "_notify", lambda each: (woken.append(each), each.attend()))
    for _ in range(10):
        peers.partition.write(0, 1, [b"b"])
    assert len(woken) == 1
    peers.consume(0)
    peers.settle()
    peers.partition.write(0, 1, [b"c"])
    assert len(woken) == 2


@pytest.mark.parametrize(("exclusive", "floating"), [(1, 4), (0, 1)])
def test_an_adaptive_writer_wakes_the_loop_once_while_there_is_no_credit(
    peers_of: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch, exclusive: int, floating: int
) -> None:
    peers = peers_of(channels=1, exclusive=exclusive, floating=floating)
    peers.partition.subpartitions[0].flushing = Flush.ADAPTIVE
    peers.request_all()
    peers.settle()
    peers.partition.write(0, 1, [b"a"])
    peers.settle()
    woken: list[Subpartition] = []
    monkeypatch.setattr(peers.partition, "_notify", lambda each: (woken.append(each), each.attend()))
    for _ in range(10):
        peers.partition.write(0, 1, [b"b"])
        peers.settle()
    assert len(woken) == 1
    assert peers.consume(0)
    peers.settle()
    assert [bytes(received.payload) for received in peers.gates[0].queue] == [b"b" * 10]


def test_elements_that_are_sent_at_once_gather_while_the_link_or_the_credit_does_not_let_them(
    peers_of: Callable[..., Peers],
) -> None:
    peers = peers_of(channels=1, exclusive=2, floating=1)
    peers.partition.subpartitions[0].flushing = Flush.AT_ONCE
    peers.request_all()
    peers.settle()
    for data in (b"a", b"b"):
        peers.partition.write(0, 1, [data])
        assert peers.move(peers.producer, peers.consumer) == 1, "idle link, credit: at once"
    peers.partition.write(0, 1, [b"c"])
    peers.partition.write(0, 1, [b"d"])
    peers.settle()
    assert [bytes(received.payload) for received in peers.gates[0].queue] == [b"a", b"b", b"cd"]
    for data in (b"e", b"f", b"g"):
        peers.partition.write(0, 1, [data])
        assert peers.move(peers.producer, peers.consumer) == 0, "no credit"
    for _ in range(4):
        peers.consume(0)
        peers.settle()
    assert peers.read == [b"abcdefg"]
    assert peers.counters[0].buffers_out == 4


def test_cancel_releases_the_view_and_frames_still_on_the_way_are_discarded(
    peers_of: Callable[..., Peers],
) -> None:
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
    peers = peers_of(channels=1)
    peers.request_all()
    peers.settle()
    whole = buffer_for(peers.gates[0].channel.id, 0, b"four")
    peers.consumer.receive(whole[:-1], 0.0)
    peers.consumer.cancel(peers.gates[0].channel)
    peers.consumer.receive(whole[-1:], 0.0)
    assert not peers.gates[0].queue
    assert peers.counters[1].rows_discarded == 1


def test_a_request_says_what_the_generation_before_received(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1, attach=False)
    request = PartitionRequest(0, "j1", 0, 0, 0, 1, 1, 2, 0, rows_received=70, last_sequence=6)
    peers.consumer.request_partition(peers.gates[0].channel, request)
    peers.settle()
    assert peers.requested[0].request == replace(request, channel=1, initial_credit=2)


def test_credit_is_announced_at_half_of_the_initial_credit(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1, exclusive=5, floating=1)
    peers.request_all()
    peers.settle()
    announced = []
    for _ in range(7):
        peers.partition.write(0, 1, [BLOCK])
        peers.settle()
        assert peers.consume(0)
        peers.settle()
        announced.append(peers.counters[1].credits_granted - 5)
    assert announced == [0, 0, 3, 3, 3, 6, 6]


def test_credit_is_never_withheld_from_a_channel_that_has_none_left(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1, exclusive=5, floating=1)
    peers.request_all()
    peers.settle()
    for _ in range(4):
        peers.partition.write(0, 1, [BLOCK])
        peers.settle()
    assert peers.consume(0)
    peers.settle()
    assert peers.counters[1].credits_granted == 5  # one of five: withheld while the producer has one left
    for _ in range(2):
        peers.partition.write(0, 1, [BLOCK])
        peers.settle()
    # The last credit brought one buffer, and with it gone the withheld one the other.
    assert len(peers.gates[0].queue) == 5


def test_all_pending_credit_of_a_connection_leaves_in_one_frame(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=4, floating=4)
    peers.request_all()
    peers.settle()
    for number in range(4):
        for _ in range(2):
            peers.partition.write(number, 1, [BLOCK])
    peers.settle()
    before = peers.counters[1].frames_out.get("add_credit", 0)
    for number in range(4):
        assert peers.consume(number) and peers.consume(number)
    peers.settle()
    assert peers.counters[1].frames_out["add_credit"] == before + 1
    assert peers.counters[0].credits_received == peers.counters[1].credits_granted > 8


def test_a_gap_in_sequence_numbers_ends_that_channel_alone(peers_of: Callable[..., Peers]) -> None:
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


def test_overdrawn_credit_is_an_error_and_not_a_wait(peers_of: Callable[..., Peers]) -> None:
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
        (encode_frame(PartitionRequest(1, "j", 0, 0, 0, 1, 1, 1, 2)), "not the peer's to give"),
        (encode_frame(Hello(1, "c", 1, 1, 2, bytes(32))), "has no place"),
        (encode_frame(NewBufferSize(1, 256)), "has no place"),
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
    request = PartitionRequest(used, "j1", 0, 0, 0, 1, 1, 2, 2)
    with pytest.raises(RemoteProtocolError, match="not the peer's to give"):
        peers.producer.receive(encode_frame(request), 0.0)


def test_channels_that_were_cancelled_leave_nothing_behind() -> None:
    connection = alone()

    def churn(first: int) -> None:
        for channel in range(first, first + 5_000):
            request = PartitionRequest(channel, "j1", 0, 0, 0, 1, 1, 1, 2)
            cancel = CancelPartitionRequest(channel, CancelReason.MOVED)
            connection.receive(encode_frame(request) + encode_frame(cancel), 0.0)
            connection.events()

    churn(1)
    tracemalloc.start()
    try:
        churn(5_001)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
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
            peers.gates[0].channel, PartitionRequest(0, "j", 0, 0, 0, 1, 1, 1, 0)
        )


def test_close_and_connection_wide_errors_are_reported(peers_of: Callable[..., Peers]) -> None:
    peers = peers_of(channels=1)
    peers.producer.close()
    chunks, _ = peers.producer.data_to_send(1)
    peers.consumer.receive(b"".join(chunks), 0.0)
    assert peers.consumer.events() == [PeerClosed(None)]


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
    ours.handle_timer(104.9)
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
    ours, subpartition = alone(), Subpartition(0, lambda subpartition: None, drops=True)
    ours.receive(encode_frame(PartitionRequest(1, "j1", 0, 0, 0, 1, 1, 1, 2)), 100.0)
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
            ours.receive(encode_frame(PartitionRequest(channel, "j1", 0, 0, 0, 1, 1, 1, 2)), 100.0)
            ours.refuse(channel, PartitionNotFound("not here"))
    assert channel == 102


def test_a_peer_that_asks_for_too_many_channels_is_refused_and_then_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CHANNELS_PER_CONNECTION_MAX", 10)
    ours, answers = alone(), b""
    with pytest.raises(RemoteProtocolError, match="more than 10 channels, and went on asking"):
        for channel in range(1, 1_000):
            ours.receive(encode_frame(PartitionRequest(channel, "j1", 0, 0, 0, 1, 1, 1, 2)), 100.0)
            answers += b"".join(map(bytes, ours.data_to_send(1)[0]))
    assert channel == 10 + 10 + 1
    assert answers.count(b"more than 10 channels") == 10
    assert len(ours.events()) == 10


def test_a_request_that_is_cancelled_before_its_answer_is_reported(peers_of: Callable[..., Peers]) -> None:
    ours = alone()
    ours.receive(encode_frame(PartitionRequest(7, "j1", 0, 0, 0, 1, 1, 1, 2)), 100.0)
    (requested,) = ours.events()
    assert isinstance(requested, PartitionRequested)
    for _ in range(2):
        ours.receive(encode_frame(CancelPartitionRequest(7, CancelReason.FAILED)), 100.0)
    assert ours.events() == [PartitionCancelled(7)]


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


class TwoPeers(RuleBasedStateMachine):
    """Any order of writing, flushing, moving, and consuming: nothing lost, doubled or reordered."""

    @initialize(
        channels=st.integers(1, 3),
        exclusive=st.integers(0, 9),
        floating=st.integers(1, 4),
        flushing=st.sampled_from(Flush),
    )
    def begin(self, channels: int, exclusive: int, floating: int, flushing: Flush) -> None:
        from_fixture = PEERS[0]
        self.peers = from_fixture(channels=channels, exclusive=exclusive, floating=floating)
        for subpartition in self.peers.partition.subpartitions:
            subpartition.flushing = flushing
        self.peers.request_all()
        self.written = [bytearray() for _ in range(channels)]
        self.stamp = 0

    @rule(channel=st.integers(0, 2), size=st.integers(1, 200))
    def write(self, channel: int, size: int) -> None:
        channel %= len(self.written)
        if self.peers.output.size - self.peers.output.in_use < 5:
            return
        self.stamp += 1
        data = bytes((self.stamp + i) % 251 for i in range(size))
        self.peers.partition.write(channel, 1, [data[: size // 2], memoryview(data)[size // 2 :]])
        self.written[channel] += data

    @rule()
    def flush(self) -> None:
        for subpartition in self.peers.partition.subpartitions:
            if subpartition.flush():
                subpartition.attend()

    @rule(buffers=st.integers(1, 4))
    def send(self, buffers: int) -> None:
        self.peers.move(self.peers.producer, self.peers.consumer, buffers)

    @rule()
    def reply(self) -> None:
        self.peers.move(self.peers.consumer, self.peers.producer)

    @rule(channel=st.integers(0, 2))
    def consume(self, channel: int) -> None:
        self.peers.consume(channel % len(self.written))

    @precondition(lambda self: hasattr(self, "peers"))
    @invariant()
    def nothing_is_out_of_order(self) -> None:
        for read, written in zip(self.peers.read, self.written, strict=True):
            assert written.startswith(read)
        for gate in self.peers.gates:
            credit = gate.channel.credit
            assert len(gate.queue) <= credit.granted

    def teardown(self) -> None:
        if not hasattr(self, "peers"):
            return
        if self.peers.partition.subpartitions[0].flushing is not Flush.ON_REQUEST:
            self.read_all()
            assert self.peers.read == self.written, "it waits for a flush that never comes"
        self.peers.partition.broadcast_event(EventKind.END_OF_PARTITION)
        self.read_all()
        assert self.peers.read == self.written
        assert all(events == [EventKind.END_OF_PARTITION] for events in self.peers.events)
        assert self.peers.output.in_use == 0
        sent, received = self.peers.counters
        assert sent.credits_received == received.credits_granted
        assert sent.bytes_out == received.bytes_in
        assert sent.frames_out == received.frames_in

    def read_all(self) -> None:
        for _ in range(400):
            self.peers.settle()
            if not sum(self.peers.consume(number) for number in range(len(self.written))):
                break


PEERS: list[Callable[..., Peers]] = []


def test_any_order_of_events(peers_of: Callable[..., Peers]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    PEERS[:] = [peers_of]
    run_state_machine_as_test(TwoPeers)
    assert PEERS
