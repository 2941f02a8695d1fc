"""Programs that write into a task over whole connections: what they may take as a receipt.

One thread drives the programs, the loop and the task.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import PeerLost, RemoteProtocolError, ShuffleError, Superseded
from minishuffle.exchange.elements import ELEMENT_HEADER, AssemblyBudget, decode, encode
from minishuffle.exchange.gate import InputGate
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.partition import serve
from minishuffle.exchange.pipelined import PipelinedPartition
from minishuffle.exchange.segments import NetworkBufferPool, Segment
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.ids import JobId, PartitionId
from minishuffle.protocol.connection import Connection, PartitionRequested
from minishuffle.wire.frames import EventKind, PartitionRequest
from minishuffle.worker.external.clientgate import UPSTREAM_EDGE, Progress, UpstreamChannel, UpstreamGate
from minishuffle.worker.sources.leases import SourceLeases
from support.batches import as_batch
from support.links import BareLink

SEGMENTS = 64
SEGMENT_BYTES = 256
EXCLUSIVE = 2
LONG = "x" * 8192
"""Makes an element longer than all buffers of the gate."""


class Reading:
    """The gate of a task whose loop takes its turns when the test says so."""

    def __init__(self) -> None:
        self.network = NetworkBufferPool(SEGMENTS, SEGMENT_BYTES)
        self.pool = self.network.create_pool("gate", 1 + EXCLUSIVE, 2 * (1 + EXCLUSIVE) + 4)
        self.wakes = 0
        self._posts: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        paths: Any = SimpleNamespace(post=self.post)
        self.upstreams = UpstreamGate(
            lambda splits: InputGate(
                UPSTREAM_EDGE,
                0,
                GateBuffers(self.pool, SEGMENT_BYTES, EXCLUSIVE, 4),
                wake=self._wake,
                give_back=self._give_back,
                budget=AssemblyBudget(1 << 20),
                counters=TaskCounters(),
                splits=splits,
            ),
            SourceLeases(paths, None, rows=None),
            post=self.post,
            clock=lambda: 0.0,
        )
        self.gate = self.upstreams.gate

    def _wake(self) -> None:
        self.wakes += 1

    def _give_back(self, buffer: Any) -> None:
        self.post(buffer.attachment.consumed, buffer)

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        self._posts.append((call, arguments))

    def turn(self) -> None:
        """(Loop.) Do what was posted."""
        while self._posts:
            call, arguments = self._posts.popleft()
            call(*arguments)

    def rows(self) -> list[Any]:
        """(Task.) Every row that the gate has now; the loop takes its turn after that."""
        found: list[Any] = []
        while (item := self.gate.poll()) is not None:
            rows = decode(item.format, item.rows, item.payload).payload
            assert isinstance(rows, list)
            found += rows
        self.turn()
        return found

    def expect(
        self, attempt: int, write: str = "w", partition: int = 0, mine: range | None = None
    ) -> list[tuple[int, int, bool]]:
        """Rows, checksum and completeness; empty until the attempt may begin."""
        told: list[tuple[int, int, bool]] = []

        def ready(progress: Progress) -> None:
            told.append((progress.rows, progress.checksum, progress.complete))

        self.upstreams.begin(write, mine)
        self.upstreams.expect(write, partition, attempt, ready)
        return told

    def come(self, attempt: int, write: str = "w", partition: int = 0) -> Program:
        """The program of an attempt that is expected."""
        return Program(self, self.upstreams.open_channel(write, partition, attempt))

    def write(self, attempt: int, write: str = "w", partition: int = 0, mine: range | None = None) -> Program:
        assert self.expect(attempt, write, partition, mine)
        return self.come(attempt, write, partition)

    def whole(self, attempt: int, rows: list[Any], write: str = "w", partition: int = 0) -> None:
        """A partition that is written in one go."""
        program = self.write(attempt, write, partition)
        program.send(rows)
        program.finish()
        program.exchange()
        assert self.rows() == rows

    def changes(self) -> list[tuple[int, str]]:
        """What became of splits since the last look."""
        assert self.gate.split_changes is not None
        found: list[tuple[int, str]] = list(self.gate.split_changes)
        self.gate.split_changes.clear()
        return found


class Program:
    """One attempt, with a connection and network memory of its own."""

    def __init__(self, reading: Reading, channel: UpstreamChannel) -> None:
        self.channel = channel
        self.error: ShuffleError | None = None
        """Why its link is gone."""
        self._pool = NetworkBufferPool(SEGMENTS, SEGMENT_BYTES).create_pool("output", 2, SEGMENTS)
        partition_id = PartitionId(JobId("j1"), 0, 0)
        self._partition = PipelinedPartition(
            partition_id, range(1), self._acquire, self._notify, TaskCounters()
        )
        self._subpartition = self._partition.subpartitions[0]
        self._writing, self._reading = BareLink(dialer=True), BareLink()
        self._here, self._there = self._writing.connection, self._reading.connection
        channel.disconnect = lambda error: reading.post(self.cut, error)
        request = PartitionRequest(PartitionId(JobId("j1"), UPSTREAM_EDGE, 0), 0)
        channel.attach_remote(self._reading, request)
        self.exchange()

    def _acquire(self) -> Segment:
        segment = self._pool.request()
        assert segment is not None
        return segment

    @staticmethod
    def _notify(subpartition: PipelinedSubpartition) -> None:
        subpartition.attend()

    def send(self, rows: list[Any]) -> bytes:
        """Write one element; gives its payload."""
        count, parts = encode(as_batch(rows))
        data = b"".join(bytes(part) for part in parts)
        self._partition.write(0, count, parts)
        if self._subpartition.flush():
            self._notify(self._subpartition)
        return data[ELEMENT_HEADER.size :]

    def send_half(self, rows: list[Any]) -> None:
        """Write an element without its last byte."""
        count, parts = encode(as_batch(rows))
        data = b"".join(bytes(part) for part in parts)
        self._partition.write(0, count, [data[:-1]])

    def finish(self) -> None:
        self._partition.broadcast_event(EventKind.END_OF_DATA)
        self._partition.broadcast_event(EventKind.END_OF_PARTITION)

    def exchange(self) -> None:
        """Frames go to and fro until neither side has any."""
        for _ in range(1000):
            if self.error or not (self._here.wants_to_send or self._there.wants_to_send):
                return
            self._move(self._there, self._here)
            self._move(self._here, self._there)
        raise AssertionError("still frames to send after 1000 rounds")

    def _move(self, sender: Connection, receiver: Connection) -> None:
        chunks, pieces = sender.data_to_send(16)
        data = b"".join(chunks)
        for piece in pieces:
            piece.released()
        if data:
            receiver.receive(data, 0.0)
        for event in receiver.events():
            if isinstance(event, PartitionRequested):
                serve(self._writing, event.request, self._subpartition)
        sender.validate()
        receiver.validate()

    def cut(self, error: ShuffleError | None = None) -> None:
        """Its link breaks."""
        if self.error is None:
            self.error = error or PeerLost("cut by the test")
            self._there.lost(self.error)
            self._here.lost(self.error)

    @property
    def receipt(self) -> bool:
        """The task has read to the end, and let go of the channel over a link that stands."""
        self.exchange()
        return self.error is None and self._subpartition.view is None


@pytest.fixture
def reading() -> Reading:
    return Reading()


# --- receipts ---------------------------------------------------------------------------------------


def test_the_program_gets_its_receipt_once_the_task_has_read_everything(reading: Reading) -> None:
    assert reading.expect(1) == [(0, 0, False)]
    program = reading.come(1)
    program.send(["a", "b"])
    program.send(["c"])
    program.finish()
    program.exchange()
    assert not program.receipt
    assert reading.rows() == ["a", "b", "c"]
    assert program.receipt
    ((rows, _, complete),) = reading.expect(2)
    assert (rows, complete) == (3, True)


# --- links that break --------------------------------------------------------------------------------


def test_half_an_element_is_dropped_and_the_next_attempt_goes_on(reading: Reading) -> None:
    first = reading.write(1)
    payload = first.send(["whole"])
    first.exchange()
    first.send([LONG])
    first.exchange()
    assert reading.rows() == ["whole"]
    first.exchange()
    first.cut()
    assert reading.rows() == []
    assert reading.gate.channels == [] and reading.pool.in_use == 0
    assert reading.upstreams.end_write("w", [0]) == [0]
    assert reading.expect(2) == [(1, zlib.crc32(payload), False)]
    second = reading.come(2)
    second.send([LONG])
    second.finish()
    found: list[Any] = []
    for _ in range(20):
        second.exchange()
        found += reading.rows()
    assert found == [LONG] and second.receipt
    assert second.channel.progress.rows == 2


def test_a_partition_whose_end_had_arrived_is_complete_although_its_link_broke(reading: Reading) -> None:
    first = reading.write(1)
    first.send(["a"])
    first.finish()
    first.exchange()
    first.cut()
    told = reading.expect(2)
    assert reading.rows() == ["a"]
    assert [complete for _, _, complete in told] == [True]
    assert not first.receipt and reading.gate.channels == []


def test_a_link_that_breaks_between_the_end_and_the_receipt_changes_nothing(reading: Reading) -> None:
    program = reading.write(1, mine=range(1))
    program.finish()
    program.exchange()
    assert reading.gate.poll() is None  # the loop has yet to close the channel
    program.cut()
    assert reading.rows() == []
    assert reading.changes() == [(0, "open"), (0, "done")]
    assert reading.upstreams.end_write("w", [0]) == [] and not program.receipt
    assert reading.pool.in_use == 0


def test_an_end_in_the_middle_of_an_element_is_an_error_of_the_task(reading: Reading) -> None:
    program = reading.write(1)
    program.send_half(["half"])
    program.finish()
    program.exchange()
    with pytest.raises(RemoteProtocolError, match="ended in the middle of an element: 1 rows are lost"):
        reading.rows()


# --- attempts ----------------------------------------------------------------------------------------


def test_an_attempt_may_ask_again_as_long_as_it_does_not_write(reading: Reading) -> None:
    assert reading.expect(1) == reading.expect(1) == [(0, 0, False)]
    program = reading.come(1)
    with pytest.raises(PeerLost, match="attempt 1 of partition 0 of write w comes twice: number each"):
        reading.expect(1)
    reading.turn()
    assert program.error is None


def test_of_several_attempts_that_wait_the_newest_writes(reading: Reading) -> None:
    first = reading.write(1)
    first.send(["a"])
    first.exchange()
    told = [reading.expect(2), reading.expect(3)]
    assert reading.rows() == ["a"]
    assert reading.rows() == []  # the link is hung up on the loop's turn
    assert [[rows for rows, _, _ in answers] for answers in told] == [[1], [1]]
    with pytest.raises(Superseded):
        reading.come(2)
    assert reading.come(3).channel.progress.rows == 1


def test_programs_share_the_buffers_however_many_they_are(reading: Reading) -> None:
    programs = [reading.write(1, partition=number) for number in range(12)]
    for number, program in enumerate(programs):
        program.send([number])
        program.finish()
    found: list[int] = []
    for _ in range(12):
        for program in programs:
            program.exchange()
        found += reading.rows()
    assert sorted(found) == list(range(12))
    assert all(program.receipt for program in programs)
    assert reading.pool.in_use == 0


def test_a_program_starves_for_none_of_those_that_write_without_an_end(reading: Reading) -> None:
    programs = [reading.write(1, partition=number) for number in range(9)]
    for turn in range(3):
        for number, program in enumerate(programs):
            program.send([10 * turn + number])
        found: list[int] = []
        for _ in range(12):
            for program in programs:
                program.exchange()
            found += reading.rows()
        assert sorted(found) == [10 * turn + number for number in range(9)]


def test_a_pool_that_shrinks_to_its_minimum_keeps_a_buffer_for_everybody(reading: Reading) -> None:
    programs = [reading.write(1, partition=number) for number in range(3)]
    reading.network.create_pool("another job", SEGMENTS - 3, SEGMENTS - 3)
    assert reading.pool.size == 3
    programs.append(reading.write(1, partition=3))
    for number, program in enumerate(programs):
        program.send([number])
    found: list[int] = []
    for _ in range(12):
        for program in programs:
            program.exchange()
        found += reading.rows()
    assert sorted(found) == [0, 1, 2, 3]


# --- splits and ends ---------------------------------------------------------------------------------


def test_splits_open_with_the_write_and_are_done_with_their_partition(reading: Reading) -> None:
    first = reading.write(1, partition=0, mine=range(0, 6, 2))
    assert reading.changes() == [(0, "open"), (1, "open"), (2, "open")]
    second = reading.write(1, partition=4, mine=range(0, 6, 2))
    third = reading.write(1, write="v", partition=7, mine=range(7, 8))
    assert reading.changes() == [(3, "open")]
    assert [program.channel.producer for program in (first, second, third)] == [0, 2, 3]
    for program in (second, first):
        program.finish()
        program.exchange()
        reading.rows()
    third.cut()
    reading.rows()
    assert reading.changes() == [(2, "done"), (0, "done")]
    assert reading.write(2, write="v", partition=7).channel.producer == 3
    assert reading.changes() == []  # the same split goes on


def test_it_is_finished_after_the_end_and_with_no_program_left(reading: Reading) -> None:
    program = reading.write(1)
    reading.upstreams.end()
    assert not reading.gate.finished
    program.send(["a"])
    program.finish()
    program.exchange()
    assert reading.gate.poll() is not None and reading.gate.poll() is None
    assert not reading.gate.finished
    wakes = reading.wakes
    reading.turn()
    assert reading.gate.finished and reading.wakes > wakes


def test_closing_hangs_up_and_returns_every_segment(reading: Reading) -> None:
    programs = [reading.write(1, partition=number) for number in range(3)]
    for program in programs:
        program.send([LONG])
        program.finish()
        program.exchange()
    assert reading.gate.poll() is None and reading.pool.in_use > 0
    reading.upstreams.close()
    reading.turn()
    assert all("the task that reads the stream has ended" in str(program.error) for program in programs)
    assert not any(program.receipt for program in programs)
    assert reading.network.free == SEGMENTS
    reading.network.validate()
    reading.upstreams.close()
