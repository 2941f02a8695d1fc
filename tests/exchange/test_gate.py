"""Input gates: the loop's and the task's half, driven by one thread in any order that is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minishuffle.counters import ConnectionCounters, GateSnapshot, TaskCounters
from minishuffle.errors import PeerLost, RemoteProtocolError
from minishuffle.exchange.elements import AssemblyBudget, decode, encode
from minishuffle.exchange.gate import Element, InputChannel, InputGate, LocalInputChannel, RemoteInputChannel
from minishuffle.exchange.partition import ResultPartition, Subpartition
from minishuffle.exchange.segments import LocalPool, NetworkBufferPool, Segment
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.channel import Outgoing
from minishuffle.protocol.connection import Connection, PartitionRequested
from minishuffle.wire.frames import BufferFlags, DataType, EventKind, PartitionRequest

SEGMENT_BYTES = 256


def element(rows: Sequence[Any]) -> bytes:
    """One whole element as an exchange carries it."""
    return b"".join(bytes(part) for part in encode(list(rows))[1])


def element_of(size: int, mark: str = "x") -> bytes:
    """One element, of one row, with exactly ``size`` bytes."""
    for length in range(size):
        found = element([mark.ljust(length)])
        if len(found) == size:
            return found
    raise AssertionError(f"no element has {size} bytes")


class Setup:
    """A gate over its own network memory. ``direct``: consumed buffers reach the loop at once."""

    def __init__(
        self, remote: int = 0, exclusive: int = 2, floating: int = 4, segments: int = 512, direct: bool = True
    ) -> None:
        self.network = NetworkBufferPool(segments, SEGMENT_BYTES)
        reserved = remote * exclusive
        self.pool = self.network.create_pool("gate", reserved + 1, reserved + floating)
        self.counters = TaskCounters()
        self.wakes = 0
        self.direct = direct
        self.returned: list[tuple[InputChannel, Any]] = []
        self.handed_over: list[Outgoing] = []
        budget = AssemblyBudget(1 << 20)
        self.gate = InputGate(
            0, 0, self.pool, SEGMENT_BYTES, self._wake, self._give_back, budget, None, self.counters
        )
        self.remotes = [RemoteInputChannel(self.gate, number, exclusive) for number in range(remote)]
        for channel in self.remotes:
            self.gate.add(channel)

    def _wake(self) -> None:
        self.wakes += 1

    def _give_back(self, channel: InputChannel, buffer: Any) -> None:
        self.returned.append((channel, buffer))
        if self.direct:
            channel.consumed(buffer)

    def partition(self, producer: int, segments: int = 16) -> ResultPartition:
        """A producer in this process, with a pool of its own and one consumer."""
        pool = self.network.create_pool(f"output {producer}", segments, segments)

        def acquire() -> Segment:
            segment = pool.request()
            assert segment is not None
            return segment

        partition_id = PartitionId(JobId("j1"), 0, producer)
        return ResultPartition(partition_id, 0, 1, acquire, _attend, TaskCounters())

    def local(self, partition: ResultPartition, credit: int) -> LocalInputChannel:
        channel = LocalInputChannel(self.gate, partition.id.producer, credit, self.handed_over.append)
        self.gate.add(channel)
        subpartition = partition.subpartitions[0]
        subpartition.attach(channel.pump)
        channel.connect(subpartition)
        return channel

    def rows(self) -> list[Any]:
        """Every row that the gate has now, polled to its end."""
        found: list[Any] = []
        while (item := self.gate.poll()) is not None:
            found += rows_of(item)
        return found

    def queues(self) -> list[int]:
        return [len(channel.queue) for channel in self.gate.channels]


def rows_of(item: Element) -> list[Any]:
    rows = decode(item.format, item.rows, item.payload)
    assert isinstance(rows, list)
    return rows


def _attend(subpartition: Subpartition) -> None:
    if subpartition.on_available is not None:
        subpartition.on_available()


def arrive(channel: RemoteInputChannel, data: bytes, backlog: int = 0) -> None:
    """A data buffer of the network; its producer has heard of all credit."""
    consumer = channel.consumer
    if consumer.credit.received == consumer.credit.granted:
        consumer.credit.take_unannounced()
    flags = BufferFlags.STARTS | BufferFlags.ENDS
    consumer.begin(consumer.expected, backlog, DataType.DATA, flags, 0, 1, len(data))[:] = data
    consumer.end()


def arrive_event(channel: RemoteInputChannel, kind: int) -> None:
    consumer = channel.consumer
    consumer.begin(consumer.expected, 0, DataType.EVENT, BufferFlags.NONE, 0, 0, 1)[0] = kind
    consumer.end()


class Wire:
    """Joins remote channels to partitions of another process by the bytes of two connections."""

    def __init__(self, setup: Setup, partitions: list[ResultPartition]) -> None:
        self.partitions = partitions
        self.producer = Connection(dialer=True, counters=ConnectionCounters(), ping_interval=5.0, now=0.0)
        self.consumer = Connection(dialer=False, counters=ConnectionCounters(), ping_interval=5.0, now=0.0)
        self.pokes = 0
        for channel in setup.remotes:
            channel.connect(self.consumer, self._poke)
            request = PartitionRequest(0, "j1", 0, channel.producer, 0, 1, 1, 1, 0)
            self.consumer.request_partition(channel.consumer, request)
        self.settle()

    def _poke(self) -> None:
        self.pokes += 1

    def settle(self) -> None:
        """Exchange frames until neither side has any."""
        for _ in range(1000):
            if not (self.producer.wants_to_send or self.consumer.wants_to_send):
                return
            self._move(self.consumer, self.producer)
            self._move(self.producer, self.consumer)
        raise AssertionError("still frames to send after 1000 rounds")

    def _move(self, sender: Connection, receiver: Connection) -> None:
        chunks, pieces = sender.data_to_send(16)
        data = b"".join(chunks)
        for piece in pieces:
            piece.released()
        if data:
            receiver.receive(data, 0.0)
        for event in receiver.events():
            assert isinstance(event, PartitionRequested)
            subpartition = self.partitions[event.request.producer].subpartitions[0]
            channel = event.request.channel
            subpartition.attach(lambda channel=channel: self.producer.available(channel))  # type: ignore[misc]
            self.producer.attach(channel, subpartition)
        sender.validate()
        receiver.validate()


def poll_fairly(setup: Setup, count: int) -> None:
    """Poll everything; the queues stay within one buffer of each other."""
    polled = 0
    while setup.gate.poll() is not None:
        polled += 1
        assert max(setup.queues()) - min(setup.queues()) <= 1
    assert polled == count
    assert max(setup.queues()) == 0


# --- turns --------------------------------------------------------------------------------------------


def test_remote_channels_take_turns() -> None:
    setup = Setup(remote=37, exclusive=4)
    for channel in setup.remotes:
        for number in range(4):
            arrive(channel, element([channel.producer, number]))
    assert setup.queues() == [4] * 37
    poll_fairly(setup, 37 * 4)


def test_local_channels_take_turns() -> None:
    setup = Setup()
    for producer in range(37):
        partition = setup.partition(producer, segments=4)
        for _ in range(4):
            partition.write(0, 1, [element_of(SEGMENT_BYTES)])
        setup.local(partition, credit=4)
    assert setup.queues() == [4] * 37
    poll_fairly(setup, 37 * 4)
    assert setup.network.free == setup.network.total


def test_a_channel_keeps_its_turn_for_the_elements_of_one_buffer_only() -> None:
    setup = Setup(remote=2)
    arrive(setup.remotes[0], element(["a1"]) + element(["a2"]))
    arrive(setup.remotes[0], element(["a3"]))
    arrive(setup.remotes[1], element(["b1"]))
    assert setup.rows() == ["a1", "a2", "b1", "a3"]


def test_a_channel_that_stands_in_line_twice_gives_each_element_once() -> None:
    setup = Setup(remote=2)
    arrive(setup.remotes[0], element([1]))
    setup.gate.ready.append(setup.remotes[0])
    arrive(setup.remotes[1], element([2]))
    assert setup.rows() == [1, 2]
    arrive(setup.remotes[0], element([3]))
    assert setup.rows() == [3]
    assert not setup.gate.ready


def test_what_arrives_between_two_polls_is_found_and_wakes_the_task() -> None:
    setup = Setup(remote=1)
    for number in range(5):
        arrive(setup.remotes[0], element([number]))
        assert setup.wakes == number + 1
        assert setup.rows() == [number]
    assert setup.gate.poll() is None


# --- consumption ----------------------------------------------------------------------------------------


def test_a_buffer_is_given_back_with_its_last_element_and_no_longer_looked_at() -> None:
    setup = Setup(remote=1)
    arrive(setup.remotes[0], element(["first"]) + element(["second"]))
    first = setup.gate.poll()
    assert setup.returned == []
    second = setup.gate.poll()
    ((channel, buffer),) = setup.returned
    assert channel is setup.remotes[0]
    buffer.memory[:] = bytes(len(buffer.memory))
    assert first is not None and second is not None
    assert rows_of(first) + rows_of(second) == ["first", "second"]
    assert (setup.counters.buffers_in, setup.counters.bytes_in) == (1, buffer.size)


def test_each_fragment_of_an_element_is_given_back_at_once() -> None:
    setup = Setup(remote=1, exclusive=1)
    (channel,) = setup.remotes
    text = "spanning" * 100
    data = element([text])
    pieces = [data[at : at + SEGMENT_BYTES] for at in range(0, len(data), SEGMENT_BYTES)]
    assert len(pieces) >= 4
    for number, piece in enumerate(pieces[:-1], 1):
        arrive(channel, piece)
        assert setup.gate.poll() is None
        assert len(setup.returned) == number
        assert channel.consumer.credit.take_unannounced() == 1
    arrive(channel, pieces[-1])
    assert setup.rows() == [text]
    assert channel.consumer.credit.idle == 1


def test_credit_of_a_paused_task_falls_to_zero_and_the_queue_stays_within_what_was_granted() -> None:
    setup = Setup(remote=1, exclusive=2, floating=4)
    (channel,) = setup.remotes
    partition = setup.partition(0, segments=64)
    wire = Wire(setup, [partition])
    for number in range(50):
        partition.write(0, 1, [element_of(SEGMENT_BYTES, str(number))])
        wire.settle()
        assert len(channel.queue) <= channel.consumer.credit.granted <= 2 + 4
    (sending,) = wire.producer._producers.channels.values()
    assert sending.credit.available == 0
    assert len(channel.queue) == 6
    assert partition.backlog() == 44
    read: list[str] = []
    for _ in range(50):
        item = setup.gate.poll()
        assert item is not None
        read += rows_of(item)
        wire.settle()
        assert len(channel.queue) <= channel.consumer.credit.granted - len(setup.returned) <= 6
    assert [int(row) for row in read] == list(range(50))
    assert wire.pokes >= 44


def test_a_local_channel_hands_over_as_much_as_its_credit_and_more_on_consumption() -> None:
    setup = Setup()
    partition = setup.partition(0, segments=10)
    channel = setup.local(partition, credit=3)
    for number in range(10):
        partition.write(0, 1, [element_of(SEGMENT_BYTES, str(number))])
    partition.broadcast_event(EventKind.END_OF_PARTITION)
    assert len(channel.queue) == 3
    assert len(setup.handed_over) == 3
    for number in range(10):
        item = setup.gate.poll()
        assert item is not None and int(rows_of(item)[0]) == number
        assert len([piece for piece in channel.queue if piece.data_type == DataType.DATA]) <= 3  # type: ignore[union-attr]
    assert setup.gate.poll() is None
    assert setup.gate.finished
    assert len(setup.handed_over) == 11
    assert setup.network.free == setup.network.total


# --- floating buffers -----------------------------------------------------------------------------------


def floating_all_at_one_channel(segments: int = 512) -> Setup:
    """Four channels with one exclusive buffer each; the first has all three floating ones in its queue,
    the others wait for two each."""
    setup = Setup(remote=4, exclusive=1, floating=3, segments=segments)
    first, *others = setup.remotes
    first.consumer.on_backlog(3)
    assert first.consumer.credit.take_unannounced() == 3
    for channel in others:
        channel.consumer.on_backlog(1)
        assert channel.consumer.credit.waiting
    assert list(setup.gate.line) == others
    for number in range(3):
        arrive(first, element([number]))
    return setup


def test_floating_buffers_go_to_the_waiting_channels_one_each_in_turn() -> None:
    setup = floating_all_at_one_channel()
    _, *others = setup.remotes
    for number in range(3):
        assert setup.gate.poll() is not None
        assert [len(channel.consumer.credit.floating) for channel in others] == [
            1 if position <= number else 0 for position in range(3)
        ]
    assert [channel.consumer.credit.unannounced for channel in others] == [1, 1, 1]
    assert not setup.gate.line
    assert setup.pool.in_use == 4 + 3


def test_a_channel_that_wants_more_goes_to_the_end_of_the_line() -> None:
    setup = floating_all_at_one_channel()
    _, second, third, fourth = setup.remotes
    second.consumer.on_backlog(2)
    assert setup.gate.poll() is not None
    assert list(setup.gate.line) == [third, fourth, second]
    assert setup.gate.poll() is not None
    assert setup.gate.poll() is not None
    assert list(setup.gate.line) == [second]
    assert setup.gate.snapshot().channels_starved == 1


def test_a_waiting_channel_that_fails_leaves_the_line_and_its_buffers_to_the_others() -> None:
    setup = floating_all_at_one_channel()
    _, second, third, fourth = setup.remotes
    second.consumer.fail(PeerLost("gone"))
    assert third.consumer.credit.unannounced == 1, "the exclusive buffer of the one that failed"
    assert list(setup.gate.line) == [fourth]
    with pytest.raises(PeerLost, match="gone"):
        setup.rows()


def test_a_shrunken_pool_takes_floating_buffers_back_and_serves_the_line_when_it_grows() -> None:
    setup = floating_all_at_one_channel(segments=7)
    _, *others = setup.remotes
    assert setup.network.free == 0
    other = setup.network.create_pool("other", 2, 2)
    assert setup.pool.size == 5
    assert setup.gate.poll() is not None
    assert setup.gate.poll() is not None
    assert setup.network.free == 2
    assert list(setup.gate.line) == others
    other.destroy()
    assert setup.pool.size == 7
    assert [channel.consumer.credit.unannounced for channel in others] == [1, 1, 0]
    assert list(setup.gate.line) == [others[2]]


def test_snapshot_says_what_is_used_and_who_starves() -> None:
    setup = floating_all_at_one_channel()
    assert setup.gate.snapshot() == GateSnapshot(
        queue_buffers=3,
        exclusive_used=0,
        exclusive_capacity=4,
        floating_used=3,
        floating_capacity=3,
        channels=4,
        channels_starved=3,
    )
    arrive(setup.remotes[1], element([9]))
    snapshot = setup.gate.snapshot()
    assert (snapshot.queue_buffers, snapshot.exclusive_used, snapshot.floating_used) == (4, 1, 3)
    setup.rows()
    snapshot = setup.gate.snapshot()
    assert (snapshot.queue_buffers, snapshot.exclusive_used, snapshot.floating_used) == (0, 0, 0)
    setup.gate.close()
    snapshot = setup.gate.snapshot()
    assert (snapshot.exclusive_used, snapshot.floating_used, snapshot.channels_starved) == (0, 0, 0)


# --- ends and failures ----------------------------------------------------------------------------------


def test_the_gate_is_finished_when_every_channel_is() -> None:
    setup = Setup(remote=2)
    for channel in setup.remotes:
        arrive_event(channel, EventKind.END_OF_DATA)
    assert setup.rows() == []
    arrive_event(setup.remotes[0], EventKind.END_OF_PARTITION)
    assert setup.rows() == []
    assert not setup.gate.finished
    arrive(setup.remotes[1], element(["late"]))
    arrive_event(setup.remotes[1], EventKind.END_OF_PARTITION)
    assert setup.rows() == ["late"]
    assert setup.gate.finished


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([EventKind.END_OF_PARTITION] * 2, "the partition of producer 0 ended twice"),
        ([99], "event of unknown kind 99"),
    ],
)
def test_events_that_may_not_come(kinds: list[int], message: str) -> None:
    setup = Setup(remote=2)
    for kind in kinds:
        arrive_event(setup.remotes[0], kind)
    with pytest.raises(RemoteProtocolError, match=message):
        setup.gate.poll()


def test_a_failure_is_seen_after_what_was_delivered_before_it() -> None:
    setup = Setup(remote=2)
    arrive(setup.remotes[0], element([1]))
    arrive(setup.remotes[0], element([2]))
    setup.remotes[0].consumer.fail(PeerLost("worker 7 is gone"))
    polled = [setup.gate.poll(), setup.gate.poll()]
    assert None not in polled
    with pytest.raises(PeerLost, match="worker 7 is gone"):
        setup.gate.poll()


# --- the end --------------------------------------------------------------------------------------------


def test_close_gives_queued_current_and_idle_buffers_back() -> None:
    setup = floating_all_at_one_channel()
    arrive(setup.remotes[1], element(["half"])[:-1])
    arrive(setup.remotes[2], element(["now"]) + element(["current"]))
    for _ in range(10):
        setup.gate.poll()
        if setup.remotes[2].current is not None:
            break
    assert setup.remotes[2].current is not None
    setup.gate.close()
    assert setup.pool.in_use == 0
    assert setup.network.free == setup.network.total
    assert setup.network.required == 0
    assert setup.gate.poll() is None
    setup.gate.close()
    assert setup.network.free == setup.network.total


def test_close_of_local_channels_gives_the_producers_segments_back() -> None:
    setup = Setup()
    partitions = [setup.partition(producer) for producer in range(2)]
    for partition in partitions:
        setup.local(partition, credit=4)
        partition.write(0, 1, [element(["a"]) + element(["b"])])
        partition.subpartitions[0].flush()
        _attend(partition.subpartitions[0])
        for _ in range(6):
            partition.write(0, 1, [element_of(SEGMENT_BYTES)])
    assert setup.gate.poll() is not None
    assert setup.gate.channels[0].current is not None
    setup.gate.close()
    for partition in partitions:
        assert partition.subpartitions[0].on_available is None
        partition.subpartitions[0].discard()
    assert setup.network.free == setup.network.total


def test_a_buffer_that_was_given_back_before_the_close_comes_home_after_it() -> None:
    setup = Setup(remote=1, direct=False)
    partition = setup.partition(5)
    setup.local(partition, credit=4)
    partition.write(0, 1, [element_of(SEGMENT_BYTES)])
    arrive(setup.remotes[0], element([1]))
    setup.rows()
    setup.gate.close()
    assert setup.network.total - setup.network.free == 2
    for channel, buffer in setup.returned:
        channel.consumed(buffer)
    assert setup.network.free == setup.network.total


def test_close_tells_the_producer_and_what_comes_later_takes_no_segment() -> None:
    setup = Setup(remote=1)
    partition = setup.partition(0, segments=8)
    wire = Wire(setup, [partition])
    partition.write(0, 1, [element_of(SEGMENT_BYTES)])
    chunks, pieces = wire.producer.data_to_send(16)
    data = b"".join(chunks)
    for piece in pieces:
        piece.released()
    setup.gate.close()
    wire.consumer.receive(data, 0.0)
    wire.settle()
    assert setup.pool.in_use == 0
    assert wire.producer._producers.channels == {}
    assert partition.subpartitions[0].on_available is None


def test_fewer_exclusive_buffers_than_asked_for_are_promised_as_what_they_are() -> None:
    network = NetworkBufferPool(8, SEGMENT_BYTES)
    pool: LocalPool = network.create_pool("gate", 1, 1)
    gate = InputGate(
        0,
        0,
        pool,
        SEGMENT_BYTES,
        lambda: None,
        lambda channel, buffer: None,
        AssemblyBudget(1 << 20),
        None,
        TaskCounters(),
    )
    channel = RemoteInputChannel(gate, 0, 2)
    assert (channel.consumer.credit.granted, channel.consumer.credit.exclusive_total) == (1, 1)
