"""The books of a result partition: whatever its consumers do, each row is counted in exactly one place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minishuffle.exchange.buffers import Flush, Slice, WholeBatch
from minishuffle.protocol.channel import NextType
from minishuffle.wire.frames import (
    BUFFER_HEADER_BYTES,
    WATERMARK_EVENT,
    CancelReason,
    DataType,
    EventKind,
    write_buffer,
)
from support.interleave import Stepped
from support.producers import CAPACITY, Producer, check_elements, payload_of

FAILED, MOVED = CancelReason.FAILED, CancelReason.MOVED
SUSPECTED = CancelReason.SUSPECTED


class TheBooksBalance(RuleBasedStateMachine):
    """A task writes while its consumers come and go; the loop acts between any two of its instructions.

    A consumer may be in the same process, and take elements whole.

    At every step: rows written = sent + skipped + discarded + queued; the rows of the element that is being
    written may be counted already or not.
    """

    @initialize(drops=st.booleans(), flushing=st.sampled_from(Flush), broadcasts=st.booleans())
    def begin(self, drops: bool, flushing: Flush, broadcasts: bool) -> None:
        self.broadcasts = broadcasts
        """Each element is for both consumers."""
        self.producer = Producer(consumers=2, drops=drops, flushing=flushing, segments=2_000)
        self.subpartitions = self.producer.subpartitions
        self.call: Stepped | None = None
        self.written = 0
        """Rows of the calls that have returned."""
        self.writing = 0
        """Rows of the call under way."""
        self.elements: list[list[tuple[int, int, int]]] = [[], []]
        """Of each consumer: (number, bytes, rows)."""
        self.number = self.marks = 0
        self.finished = False
        self.held: list[tuple[Slice, list[bytes | memoryview], bytes]] = []
        """What the transport holds: each piece, its frame, and the payload as it was polled."""
        self.read: list[list[bytearray]] = [[], []]
        """By consumer and view."""
        self.times: list[list[list[int]]] = [[], []]
        self.ends: list[list[int]] = [[], []]
        self.next_row = [0, 0]
        """By consumer, the number behind the rows that its view has read last."""
        self.attach(0, whole=False)

    # --- writer ----------------------------------------------------------------------------------

    def start(self, call: Callable[[], object], steps: int) -> None:
        """End the task's last call, and run so many instructions of the next, or all if that is 0."""
        self.finish_call()
        self.call = Stepped(call)
        if steps:
            self.call.step(steps)
        else:
            self.finish_call()

    @precondition(lambda self: self.call is not None)
    @rule(steps=st.integers(1, 300))
    def go_on(self, steps: int) -> None:
        assert self.call is not None
        if self.call.step(steps) < steps:
            self.finish_call()

    @precondition(lambda self: self.call is not None)
    @rule()
    def finish_call(self) -> None:
        if self.call is not None:
            self.call.finish()
            self.call = None
            self.written += self.writing
            self.writing = 0

    @precondition(lambda self: not self.finished and self.number < 240)
    @rule(
        sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
        positions=st.sampled_from([(0,), (1,), (0, 1)]),
        steps=st.integers(0, 600),
    )
    def write(self, sizes: list[int], positions: tuple[int, ...], steps: int) -> None:
        self.finish_call()
        positions = (0, 1) if self.broadcasts else positions
        elements = []
        for size in sizes:
            self.number += 1
            element = (self.number, size, self.number % 5)
            elements += [(*element, position) for position in positions]
            for position in positions:
                self.elements[position].append(element)
        self.writing = sum(rows for _, _, rows, _ in elements)

        def write() -> None:
            for number, size, rows, position in elements:
                if not self.broadcasts:
                    self.producer.write(number, size, rows, position)
                elif not position:
                    self.producer.broadcast(number, size, rows)

        self.start(write, steps)

    @precondition(lambda self: not self.finished)
    @rule(idle=st.booleans(), steps=st.integers(0, 150))
    def mark(self, idle: bool, steps: int) -> None:
        self.marks += 1
        time = self.marks
        self.start(lambda: self.producer.partition.broadcast_watermark(time, idle), steps)

    @precondition(lambda self: not self.finished and self.number > 10)
    @rule(steps=st.integers(0, 150))
    def finish(self, steps: int) -> None:
        self.finished = True
        self.start(lambda: self.producer.partition.broadcast_event(EventKind.END_OF_DATA), steps)

    # --- loop ------------------------------------------------------------------------------------

    @rule(position=st.integers(0, 1), whole=st.booleans())
    def attach(self, position: int, whole: bool) -> None:
        self.producer.attach(position, whole=whole)
        self.read[position].append(bytearray())
        self.times[position].append([])
        self.ends[position].append(0)

    @rule(position=st.integers(0, 1), size=st.sampled_from([11, CAPACITY - 1, CAPACITY, 100]))
    def resize(self, position: int, size: int) -> None:
        if (view := self.subpartitions[position].view) is not None:
            view.resize(size)

    @rule(position=st.integers(0, 1), reason=st.sampled_from([FAILED, SUSPECTED, MOVED, None]))
    def lose(self, position: int, reason: CancelReason | None) -> None:
        """None: a newer attempt of the consumer is named."""
        view = self.subpartitions[position].view
        if reason is None:
            self.producer.partition.fence(position, 2)
        elif view is not None:
            view.release(reason)
        assert self.subpartitions[position].view is None

    @precondition(lambda self: self.producer.inbox)
    @rule()
    def attend(self) -> None:
        self.producer.inbox.pop(0).attend()

    @rule()
    def flush(self) -> None:
        self.producer.partition.flush()

    @rule(position=st.integers(0, 1), hold=st.booleans(), pieces=st.integers(1, 4))
    def poll(self, position: int, hold: bool, pieces: int) -> None:
        view = self.subpartitions[position].view
        if view is None:
            return
        for _ in range(pieces):
            if hold and view.next_type() is NextType.PARTIAL:
                view.hold()
                return
            piece = view.poll()
            if piece is None:
                return
            self.take(position, piece)

    def take(self, position: int, piece: Slice) -> None:
        payload = payload_of(piece)
        if piece.data_type == DataType.DATA:
            if not self.read[position][-1]:
                assert piece.first_start == 0, "a view begins with an element"
            else:
                assert piece.row == self.next_row[position], "within a view rows follow each other"
            self.next_row[position] = piece.row + piece.rows
            self.producer.check_number(piece, position)
            self.read[position][-1] += payload
            if piece.whole is not None:
                view = self.subpartitions[position].view
                assert view is not None and view.whole
                piece.released()
                return
            frame: list[bytes | memoryview] = []
            write_buffer(piece, position, 0, 0, frame)
            self.held.append((piece, frame, payload))
            return
        piece.released()
        if payload[0] == EventKind.WATERMARK:
            _, _, time = WATERMARK_EVENT.unpack(payload)
            self.times[position][-1].append(time)
        else:
            self.ends[position][-1] += 1

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 50))
    def let_go(self, which: int) -> None:
        self.release(*self.held.pop(which % len(self.held)))

    def release(self, piece: Slice, frame: list[bytes | memoryview], payload: bytes) -> None:
        assert b"".join(frame)[BUFFER_HEADER_BYTES:] == payload, "no header was written over it meanwhile"
        piece.released()

    # --- what holds ------------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "producer"))
    @invariant()
    def every_row_is_in_one_place(self) -> None:
        producer = self.producer
        found = producer.sent + sum(producer.dropped) + producer.suspected + producer.queued
        assert self.written <= found <= self.written + self.writing
        if self.call is None:
            assert found == self.written
        assert producer.cut <= producer.sent
        queued = [each for subpartition in self.subpartitions for each in subpartition._queue]
        assert self.call is not None or producer.handing.held == {
            each for each in queued if isinstance(each, WholeBatch)
        }
        producer.network.validate()

    @precondition(lambda self: hasattr(self, "producer"))
    @invariant()
    def nothing_stays_for_a_consumer_that_is_unavailable(self) -> None:
        for subpartition in self.subpartitions:
            assert subpartition.available or subpartition.view is None
            if not (subpartition.available or subpartition.notified or self.call):
                assert not subpartition._queue and subpartition.backlog() == 0

    def teardown(self) -> None:
        if not hasattr(self, "producer"):
            return
        self.finish_call()
        producer = self.producer
        producer.attend()
        self.release_all()
        for position in range(2):
            self.attach(position, whole=position == 1)
        while True:
            producer.partition.flush()
            before = sum(len(view) for views in self.read for view in views)
            for position in range(2):
                self.poll(position, hold=False, pieces=10_000)
            self.release_all()
            if sum(len(view) for views in self.read for view in views) == before:
                break
        producer.check_books(self.written)
        found = [
            check_elements(
                self.read[position], {number: (size, rows) for number, size, rows in self.elements[position]}
            )
            for position in range(2)
        ]
        assert producer.counters.records_out == self.written
        assert producer.sent == sum(sent for sent, _ in found)
        assert producer.cut == sum(cut for _, cut in found)
        for position in range(2):
            assert all(times == sorted(times) for times in self.times[position])
            assert self.times[position][-1][-1:] == [self.marks] * bool(self.marks)
            assert self.ends[position][-1] == self.finished
        producer.check_all_home()

    def release_all(self) -> None:
        while self.held:
            self.release(*self.held.pop())


TestTheBooksBalance: Callable[..., object] = pytest.mark.slow(TheBooksBalance.TestCase)
