"""The gate that other programs write to: attempts, splits, writes that are forgotten, and its end."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost, ShuffleError, Superseded, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.elements import AssemblyBudget, decode, encode
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.segments import NetworkBufferPool
from minishuffle.ids import JobId, PartitionId
from minishuffle.runtime.inputs import Inputs
from minishuffle.wire.frames import BufferFlags, DataType, EventKind, PartitionRequest
from minishuffle.worker.external.clientgate import (
    UPSTREAM_EDGE,
    Progress,
    UpstreamChannel,
    UpstreamGate,
)
from minishuffle.worker.sources.leases import SourceLeases
from support.batches import as_batch, shown
from support.frames import buffer_header
from support.links import BareLink, consumer_of

SEGMENT_BYTES = 4096


class Stand:
    """A gate of which one thread is both task and loop. What the task posts runs in :meth:`turn`."""

    def __init__(self) -> None:
        self.network = NetworkBufferPool(16, SEGMENT_BYTES)
        pool = self.network.create_pool("stream", 3, 8)
        self.posted: list[tuple[Any, ...]] = []
        self.woken = 0
        paths: Any = SimpleNamespace(post=self.post)
        self.upstreams = UpstreamGate(
            lambda splits: InputGate(
                UPSTREAM_EDGE,
                0,
                GateBuffers(pool, SEGMENT_BYTES, 2, 4),
                wake=self.wake,
                give_back=lambda buffer: buffer.attachment.consumed(buffer),
                budget=AssemblyBudget(1 << 20),
                counters=TaskCounters(),
                splits=splits,
            ),
            SourceLeases(paths, None, rows=None),
            post=self.post,
            clock=lambda: 0.0,
        )
        self.gate = self.upstreams.gate
        self.told: list[Progress] = []
        self.disconnected: list[ShuffleError] = []

    def wake(self) -> None:
        self.woken += 1

    def post(self, *call: Any) -> None:
        self.posted.append(call)

    def expect(
        self, attempt: int = 1, partition: int = 0, write: str = "w", mine: range | None = None
    ) -> None:
        self.upstreams.begin(write, mine)
        self.upstreams.expect(write, partition, attempt, self.told.append)

    def open(self, attempt: int = 1, partition: int = 0, write: str = "w") -> UpstreamChannel:
        channel = self.upstreams.open_channel(write, partition, attempt)

        def disconnect(error: ShuffleError) -> None:
            if error not in self.disconnected:  # a link that is aborted twice ends once
                self.disconnected.append(error)
                if channel.attachment is not None:
                    consumer_of(channel).fail(error)

        channel.disconnect = disconnect
        channel.attach_remote(BareLink(), PartitionRequest(PartitionId(JobId("j1"), UPSTREAM_EDGE, 0), 0))
        return channel

    def take(self, *rows: str, attempt: int = 1) -> UpstreamChannel:
        """An attempt begins and brings an element with these rows, which the task takes."""
        self.expect(attempt)
        channel = self.open(attempt)
        arrive(channel, element(*rows))
        assert self.rows() == list(rows)
        return channel

    def rows(self) -> list[Any]:
        found: list[Any] = []
        while (item := self.gate.poll()) is not None:
            rows = decode(item.format, item.rows, item.payload).payload
            assert isinstance(rows, list)
            found += rows
        return found

    def turn(self) -> None:
        """The loop's."""
        posted, self.posted = self.posted, []
        for call, *arguments in posted:
            call(*arguments)

    def end_partition(self, channel: UpstreamChannel) -> None:
        arrive_end(channel)
        assert self.rows() == []
        self.turn()

    def changes(self) -> list[tuple[int, str]]:
        assert self.gate.split_changes is not None
        found = list(self.gate.split_changes)
        self.gate.split_changes.clear()
        return found


def element(*rows: str) -> bytes:
    return b"".join(bytes(part) for part in encode(Batch(list(rows)))[1])


def arrive(channel: UpstreamChannel, data: bytes) -> None:
    consumer = consumer_of(channel)
    consumer.credit.take_unannounced()
    flags = BufferFlags.STARTS | BufferFlags.ENDS
    header = buffer_header(
        consumer.id,
        consumer.expected,
        DataType.DATA,
        len(data),
        flags=flags,
        rows=1,
        row=max(0, consumer.row),
    )
    consumer.begin(header)[:] = data
    consumer.end()


def arrive_end(channel: UpstreamChannel) -> None:
    consumer = consumer_of(channel)
    header = buffer_header(consumer.id, consumer.expected, DataType.EVENT, 1)
    consumer.begin(header)[0] = EventKind.END_OF_PARTITION
    consumer.end()


@pytest.fixture
def stand() -> Stand:
    return Stand()


# --- attempts ------------------------------------------------------------------------------------


def test_the_first_attempt_is_let_in_at_once_with_nothing_there(stand: Stand) -> None:
    stand.expect()
    (progress,) = stand.told
    assert (progress.rows, progress.checksum, progress.complete) == (0, 0, False)


def test_what_the_task_took_counts_and_what_is_queued_does_not_yet(stand: Stand) -> None:
    channel = stand.take("a", "b")
    arrive(channel, element("c"))
    (progress,) = stand.told
    assert progress.rows == 2
    stand.rows()
    assert progress.rows == 3


def test_the_checksum_is_that_of_the_payloads(stand: Stand) -> None:
    channel = stand.take("a", "b")
    arrive(channel, element("c"))
    stand.rows()
    payloads = b"".join(
        b"".join(bytes(part) for part in encode(as_batch(rows))[1][1:]) for rows in (["a", "b"], ["c"])
    )
    assert stand.told[0].checksum == zlib.crc32(payloads)


def test_a_newer_attempt_waits_for_what_is_queued_of_the_older(stand: Stand) -> None:
    channel = stand.take("a")
    arrive(channel, element("b"))
    stand.expect(attempt=2)
    assert len(stand.told) == 1 and len(stand.disconnected) == 1
    assert stand.rows() == ["b"]
    stand.turn()
    assert stand.told[1].rows == 2
    assert stand.gate.channels == []
    arrive(stand.open(attempt=2), element("c"))
    assert stand.rows() == ["c"]


def test_a_broken_link_drops_half_an_element_and_ends_the_channel_alone(stand: Stand) -> None:
    channel = stand.take("a")
    arrive(channel, element("b" * 100)[:40])
    consumer_of(channel).fail(PeerLost("cut"))
    assert stand.rows() == []
    stand.turn()
    stand.expect(attempt=2)
    assert stand.told[1].rows == 1
    arrive(stand.open(attempt=2), element("b"))
    assert stand.rows() == ["b"]


@pytest.mark.parametrize(
    ("attempt", "error", "text"),
    [
        (1, Superseded, "attempt 1 of partition 0 of write w comes too late: attempt 2 writes it now"),
        (2, PeerLost, "attempt 2 of partition 0 of write w comes twice"),
    ],
)
def test_an_attempt_that_is_not_newer_is_refused(stand: Stand, attempt: int, error: Any, text: str) -> None:
    stand.take("a", attempt=2)
    with pytest.raises(error, match=text):
        stand.expect(attempt)
    assert stand.disconnected == []


def test_an_older_attempt_is_refused_before_the_newer_has_come(stand: Stand) -> None:
    stand.expect(attempt=2)
    with pytest.raises(Superseded):
        stand.expect(attempt=1)


def test_an_attempt_overtaken_before_it_came_is_refused_at_the_door(stand: Stand) -> None:
    stand.expect(attempt=1)
    stand.expect(attempt=2)
    with pytest.raises(Superseded, match="a newer attempt than 1"):
        stand.open(attempt=1)
    assert stand.open(attempt=2).attachment


def test_a_channel_that_breaks_the_protocol_hangs_up(stand: Stand) -> None:
    """Else its cancellation would look like the receipt."""
    channel = stand.take("a")
    consumer_of(channel).fail(ShuffleError("too long a buffer"))
    assert [str(error) for error in stand.disconnected] == ["too long a buffer"]


def test_a_complete_partition_stays_complete(stand: Stand) -> None:
    stand.end_partition(stand.take("a"))
    for attempt in (1, 2):
        stand.expect(attempt)
        assert stand.told[-1].complete and stand.told[-1].rows == 1
    assert stand.upstreams.end_write("w", [0, 2]) == [2]
    assert stand.upstreams.end_write("w", [0]) == []


def test_buffers_come_back_when_a_channel_ends(stand: Stand) -> None:
    free = stand.network.free
    channel = stand.take("a")
    assert stand.network.free < free
    stand.end_partition(channel)
    assert stand.network.free == free
    stand.network.validate()


# --- splits --------------------------------------------------------------------------------------


def test_all_partitions_of_a_write_are_splits_from_the_first_on(stand: Stand) -> None:
    stand.expect(partition=3, mine=range(1, 6, 2))
    assert stand.changes() == [(0, "open"), (1, "open"), (2, "open")]
    channel = stand.open(partition=3)
    assert channel.producer == 1
    stand.end_partition(channel)
    assert stand.changes() == [(1, "done")]
    stand.expect(partition=5, mine=range(1, 6, 2))
    assert stand.changes() == []


def test_splits_of_another_write_have_other_numbers(stand: Stand) -> None:
    stand.expect(write="a", mine=range(2))
    stand.expect(write="b", mine=range(2))
    stand.expect(write="c", partition=7)
    stand.expect(write="c", partition=8)
    assert stand.changes() == [(number, "open") for number in range(7)]


def test_a_write_of_unknown_size_has_an_open_split_until_it_ends(stand: Stand) -> None:
    """Whatever has not begun of it may bring the earliest time of all."""
    stand.upstreams.begin("w", None)
    assert stand.changes() == [(0, "open")]
    stand.expect(partition=2)
    stand.end_partition(stand.open(partition=2))
    assert stand.changes() == [(1, "open"), (1, "done")]
    assert stand.upstreams.end_write("w", [2, 4]) == [4]
    assert stand.changes() == []
    assert stand.upstreams.end_write("w", [2]) == []
    assert stand.changes() == [(0, "done")]


def test_a_write_that_began_already_does_not_begin_again(stand: Stand) -> None:
    stand.expect(mine=range(0, 4, 2))
    stand.end_partition(stand.open())
    stand.changes()
    stand.upstreams.begin("w", range(0, 4, 2))
    stand.upstreams.begin("w", None)
    assert stand.changes() == []


@pytest.mark.parametrize("mine", [range(1, 1, 2), None], ids=["known", "unknown"])
def test_a_subtask_to_which_nothing_of_a_write_comes_has_no_split(stand: Stand, mine: range | None) -> None:
    stand.upstreams.begin("w", mine)
    assert stand.upstreams.end_write("w", []) == []
    assert stand.changes()[-1] == (-1, "none")
    assert stand.woken == 2, "the task may be waiting"


def test_a_subtask_has_a_split_as_long_as_another_write_has_one(stand: Stand) -> None:
    stand.expect(write="a", mine=range(2))
    stand.upstreams.begin("b", range(0))
    assert stand.changes() == [(0, "open"), (1, "open")]


def test_partitions_that_never_began_are_done_with_the_write(stand: Stand) -> None:
    """Of a write that was aborted, or said that it had more than it has."""
    stand.expect(mine=range(3))
    stand.end_partition(stand.open())
    stand.changes()
    assert stand.upstreams.end_write("w", [0]) == []
    assert stand.changes() == [(1, "done"), (2, "done")]


def test_an_attempt_that_still_writes_when_its_write_ends_has_a_split_until_its_link_ends(
    stand: Stand,
) -> None:
    channel = stand.take("a")
    stand.expect(partition=1)
    stand.changes()
    assert stand.upstreams.end_write("w", []) == []
    assert stand.changes() == [(0, "done"), (2, "done")]
    with pytest.raises(UsageError, match="write w has ended without partition 1"):
        stand.open(partition=1)
    arrive(channel, element("b"))
    assert stand.rows() == ["b"]
    consumer_of(channel).fail(PeerLost("its task was killed"))
    stand.rows()
    stand.turn()
    assert stand.changes() == [(1, "done")]
    for partition in (0, 5):
        with pytest.raises(UsageError, match=f"write w has ended without partition {partition}"):
            stand.expect(attempt=2, partition=partition)
    assert stand.changes() == []


def test_a_split_whose_attempt_was_cut_is_not_done(stand: Stand) -> None:
    channel = stand.take("a")
    stand.changes()
    consumer_of(channel).fail(PeerLost("cut"))
    stand.rows()
    stand.turn()
    assert stand.changes() == []


# --- ends ----------------------------------------------------------------------------------------


def test_it_is_finished_when_the_stream_ended_and_every_channel_has(stand: Stand) -> None:
    channel = stand.take("a")
    stand.upstreams.end()
    assert not stand.gate.finished
    stand.end_partition(channel)
    assert stand.gate.finished


def test_it_is_not_finished_while_more_may_come(stand: Stand) -> None:
    stand.end_partition(stand.take("a"))
    assert not stand.gate.finished


def test_a_task_that_is_over_hangs_up(stand: Stand) -> None:
    stand.take("a")
    stand.upstreams.close()
    assert [str(error) for error in stand.disconnected] == ["the task that reads the stream has ended"]


def test_a_write_that_has_ended_is_known_until_it_is_to_be_forgotten(stand: Stand) -> None:
    stand.end_partition(stand.take("a"))
    assert stand.upstreams.end_write("w", [0]) == []
    assert stand.upstreams.end_write("w", [0]) == [], "asked again"
    stand.upstreams.forget("w")
    stand.upstreams.forget("never there")
    assert stand.upstreams.end_write("w", [0]) == [0] and not stand.upstreams.cursors


@pytest.mark.parametrize("mine", [range(0, 4, 2), None], ids=["known", "not known"])
def test_an_idle_write_holds_nobody_back_until_it_comes_back(mine: range | None) -> None:
    stand = Stand()
    channel = stand.take("a")
    stand.upstreams.begin("other", mine)
    assert stand.upstreams.connected() == ["w"]
    opened = {split for split, state in stand.changes() if state == "open"}
    stand.upstreams.begin("other", mine, idle=True)
    stand.upstreams.begin("other", mine, idle=True)
    others = {split for split, state in stand.changes() if state == "done"}
    assert len(others) == (2 if mine is not None else 1)
    channel.detach(PeerLost("killed"))
    assert stand.rows() == []
    stand.turn()
    assert stand.upstreams.connected() == [] and stand.changes() == [], "it may come back soon"
    stand.upstreams.begin("w", None, idle=True)
    assert {split for split, state in stand.changes() if state == "done"} == opened - others
    stand.expect(2, partition=2, write="other")
    assert {split for split, state in stand.changes() if state == "open"} >= others
    arrive(stand.open(2, partition=2, write="other"), element("b"))
    assert stand.rows() == ["b"]


def test_a_task_reads_what_programs_write_split_by_split() -> None:
    stand = Stand()
    stand.expect()
    arrive(stand.open(), element("a"))
    inputs = Inputs([stand.gate], None)
    taken = []
    while (item := inputs.poll()) is not None:
        taken.append(item[1])
    assert shown(taken[-1]) == ["a"] and inputs.late_from is None
