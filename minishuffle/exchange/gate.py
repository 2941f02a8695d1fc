"""The consuming side of an exchange: InputGate and its channels.

The loop thread delivers buffers to a channel's queue and puts the channel in the gate's line of ready
ones; the task thread takes one buffer per turn, puts elements together, and gives the buffer back
once its bytes are copied out. That is the moment at which it counts as consumed. Floating buffers
belong to the gate and go round its waiting channels one by one. (Flink: ``SingleInputGate``,
``RemoteInputChannel``, ``LocalInputChannel``.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from minishuffle.counters import GateSnapshot, TaskCounters
from minishuffle.errors import RemoteProtocolError, ShuffleError
from minishuffle.exchange.elements import Assembler, AssemblyBudget
from minishuffle.exchange.segments import LocalPool, Segment
from minishuffle.exchange.watermarks import WatermarkValve
from minishuffle.protocol.channel import (
    ChannelState,
    ConsumerChannel,
    FreeBuffer,
    NextType,
    Outgoing,
    Received,
    SubpartitionView,
)
from minishuffle.protocol.connection import Connection
from minishuffle.wire.frames import WATERMARK_EVENT, DataType, EventKind

__all__ = ["Element", "InputChannel", "InputGate", "LocalInputChannel", "RemoteInputChannel"]


@dataclass(slots=True)
class Element:
    """One whole element: see ``elements.decode`` for format and payload."""

    channel: InputChannel
    format: int
    rows: int
    payload: Any


class _Buffer(Protocol):
    """What a queue holds: a ``Received`` of the network or an ``Outgoing`` of this very worker."""

    data_type: int

    @property
    def payload(self) -> memoryview: ...


class InputChannel:
    """Common half of both kinds: the queue between loop and task, and the element under way."""

    def __init__(self, gate: InputGate, producer: int) -> None:
        self.gate = gate
        self.producer = producer
        """Index of the producer subtask."""
        self.number = gate.valve.add()
        self.queue: deque[_Buffer | ShuffleError] = deque()
        self.enqueued = False
        self.assembler = Assembler(gate.budget, gate.spill_directory)
        self.current: _Buffer | None = None
        self.finished = False
        """The task has seen the end of the partition."""

    def deliver(self, item: _Buffer | ShuffleError) -> None:
        """(Loop.) Put a buffer or a failure at the end of the queue and wake the task."""
        self.queue.append(item)
        if not self.enqueued:
            self.enqueued = True
            self.gate.ready.append(self)
        self.gate.wake()

    def broken(self, error: ShuffleError) -> None:
        """(Task.) What was delivered before ``error`` has been read."""
        raise error

    def consumed(self, buffer: Any) -> None:
        """(Loop.) The task has given ``buffer`` back."""
        raise AssertionError("each kind of channel says what becomes of its buffers")

    def close(self) -> None:
        """(Loop.) The task is over: let go of everything; idempotent."""
        queue, self.queue = self.queue, deque()
        current, self.current = self.current, None
        for item in (current, *queue):
            if item is not None and not isinstance(item, ShuffleError):
                self.consumed(item)
        self.assembler.clear()


class RemoteInputChannel(InputChannel):
    """A channel whose producer is another process: the ``Gate`` of its ``ConsumerChannel``."""

    def __init__(self, gate: InputGate, producer: int, exclusive: int) -> None:
        super().__init__(gate, producer)
        buffers: list[FreeBuffer] = []
        for _ in range(exclusive):
            segment = gate.pool.request()
            if segment is None:
                break
            buffers.append(segment)
        self.consumer = ConsumerChannel(self, buffers, gate.segment_bytes)
        self.connection: Connection | None = None
        self._poke: Callable[[], None] = lambda: None

    def connect(self, connection: Connection, poke: Callable[[], None]) -> None:
        """The connection that carries it; ``poke`` makes it flush soon."""
        self.connection = connection
        self._poke = poke

    @property
    def open(self) -> bool:
        return self.consumer.state is ChannelState.OPEN

    def announce(self) -> None:
        if self.connection is not None:
            self.connection.announce_credit(self.consumer)
            self._poke()

    def request_floating(self) -> FreeBuffer | None:
        return self.gate.pool.request()

    def wait_in_line(self, channel: ConsumerChannel) -> None:
        self.gate.line.append(self)

    def leave_line(self, channel: ConsumerChannel) -> None:
        if self in self.gate.line:
            self.gate.line.remove(self)

    def release_floating(self, buffer: FreeBuffer) -> None:
        assert isinstance(buffer, Segment)
        self.gate.release_floating(buffer)

    def release_exclusive(self, buffer: FreeBuffer) -> None:
        assert isinstance(buffer, Segment)
        buffer.recycle()

    def fail(self, error: ShuffleError) -> None:
        self.deliver(error)

    def consumed(self, buffer: Any) -> None:
        assert isinstance(buffer, Received)
        self.consumer.consumed(buffer)
        self.announce()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.cancel(self.consumer)
            self._poke()
        self.consumer.close()
        super().close()


class LocalInputChannel(InputChannel):
    """A channel whose producer is in the same worker: segments change hands, nothing is copied.

    At most ``credit`` segments of the producer's pool may wait here: the bound that exclusive and
    floating buffers are for a remote channel.
    """

    def __init__(
        self, gate: InputGate, producer: int, credit: int, handed_over: Callable[[Outgoing], None]
    ) -> None:
        super().__init__(gate, producer)
        self._credit = credit
        self._outstanding = 0
        self._handed_over = handed_over
        self._view: SubpartitionView | None = None

    def connect(self, view: SubpartitionView) -> None:
        self._view = view
        self.pump()

    def pump(self) -> None:
        """(Loop.) Hand over what is available and allowed."""
        view = self._view
        while view is not None:
            if self._outstanding >= self._credit and view.next_type() is not NextType.EVENT:
                return
            piece = view.poll()
            if piece is None:
                return
            if piece.data_type == DataType.DATA:
                self._outstanding += 1
            self._handed_over(piece)
            self.deliver(piece)  # type: ignore[arg-type]

    def consumed(self, buffer: Any) -> None:
        if buffer.data_type == DataType.DATA:
            self._outstanding -= 1
        buffer.released()
        self.pump()

    def close(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.release()
        super().close()


_Returned: TypeAlias = Callable[[InputChannel, _Buffer], None]


class InputGate:
    """One in-edge of a subtask.

    Args:
        pool: ``remote channels × exclusive + 1 … + floating`` segments.
        wake: tells the task that there is something to poll.
        give_back: hands a consumed buffer to the loop, which calls ``channel.consumed``.
        budget, spill_directory: for elements that are being put together.
    """

    def __init__(
        self,
        edge: int,
        input_number: int,
        pool: LocalPool,
        segment_bytes: int,
        wake: Callable[[], None],
        give_back: _Returned,
        budget: AssemblyBudget,
        spill_directory: str | None,
        counters: TaskCounters,
    ) -> None:
        self.edge = edge
        self.input = input_number
        self.pool = pool
        self.segment_bytes = segment_bytes
        self.wake = wake
        self.budget = budget
        self.spill_directory = spill_directory
        self.channels: list[InputChannel] = []
        self.ready: deque[InputChannel] = deque()
        self.line: deque[RemoteInputChannel] = deque()
        """Channels that wait for a floating buffer, in turn."""
        self.valve = WatermarkValve()
        self.marked = False
        """(Task.) ``valve`` says something new since whoever reads it took this back."""
        self.split_changes: deque[tuple[int, Literal["open", "done"]]] | None = None
        """Of a gate whose channels are the splits of a source and come and go: which of them began and
        ended, in order. Their watermarks are made behind the gate, not in ``valve``."""
        self._give_back = give_back
        self._counters = counters
        self._unfinished = 0
        pool.on_available(self._serve_line)

    def add(self, channel: InputChannel) -> None:
        self.channels.append(channel)
        self._unfinished += 1

    # --- loop ------------------------------------------------------------------------------------

    def release_floating(self, segment: Segment) -> None:
        """A floating buffer comes free: the next in line gets it, or the pool does.

        A pool that was shrunk takes it back first.
        """
        while self.line and self.pool.in_use <= self.pool.size:
            channel = self.line.popleft()
            if channel.consumer.offer_floating(segment):
                if channel.consumer.credit.waiting:
                    self.line.append(channel)
                channel.announce()
                return
        segment.recycle()

    def _serve_line(self) -> None:
        while self.line:
            segment = self.pool.request()
            if segment is None:
                return
            self.release_floating(segment)

    def close(self) -> None:
        """The task is over; idempotent."""
        for channel in self.channels:
            channel.close()
        self.ready.clear()
        self.pool.destroy()

    def snapshot(self) -> GateSnapshot:
        """Exclusive buffers count as long as their channel is open; a closed one has given them up."""
        remote = [
            channel.consumer.credit
            for channel in self.channels
            if isinstance(channel, RemoteInputChannel) and channel.consumer.state is ChannelState.OPEN
        ]
        exclusive = sum(credit.exclusive_total for credit in remote)
        idle_exclusive = sum(len(credit.exclusive) for credit in remote)
        idle_floating = sum(len(credit.floating) for credit in remote)
        return GateSnapshot(
            queue_buffers=sum(len(channel.queue) for channel in self.channels),
            exclusive_used=exclusive - idle_exclusive,
            exclusive_capacity=exclusive,
            floating_used=max(0, self.pool.in_use - exclusive - idle_floating),
            floating_capacity=max(0, self.pool.size - exclusive),
            channels=len(self.channels),
            channels_starved=len(self.line),
        )

    # --- task ------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True once every channel has seen the end of its partition."""
        return self._unfinished == 0

    def poll(self) -> Element | None:
        """The next element of any channel, one buffer per channel and turn; None if there is none.

        Look at ``marked`` after it: a change of the watermark comes before the element.

        Raises:
            ShuffleError: a channel failed; what it had delivered before was given out first.
        """
        while self.ready:
            channel = self.ready[0]
            if channel.current is None and not self._take_buffer(channel):
                continue
            element = channel.assembler.next()
            if channel.assembler.exhausted:
                self._end_turn(channel)
            if element is not None:
                return Element(channel, *element)
        return None

    def _take_buffer(self, channel: InputChannel) -> bool:
        """Make the next data buffer of the channel at the head of the line its current one."""
        try:
            item = channel.queue.popleft()
        except IndexError:
            self._end_turn(channel)
            return False
        if isinstance(item, ShuffleError):
            channel.broken(item)
            self._end_turn(channel)
            return False
        payload = item.payload
        if item.data_type == DataType.EVENT:
            event = bytes(payload)
            self._give_back(channel, item)
            self._on_event(channel, event)
            self._end_turn(channel)
            return False
        self._counters.buffers_in += 1
        self._counters.bytes_in += len(payload)
        channel.current = item
        channel.assembler.feed(payload)
        return True

    def _on_event(self, channel: InputChannel, event: bytes) -> None:
        kind = event[0]
        if kind == EventKind.WATERMARK and len(event) == WATERMARK_EVENT.size:
            _, idle, time = WATERMARK_EVENT.unpack(event)
            self.marked |= self.valve.update(channel.number, time, bool(idle))
        elif kind == EventKind.END_OF_DATA:
            self.marked |= self.valve.end(channel.number)
        elif kind == EventKind.END_OF_PARTITION:
            if channel.finished:
                raise RemoteProtocolError(f"the partition of producer {channel.producer} ended twice")
            if lost := channel.assembler.clear():
                raise RemoteProtocolError(
                    f"the partition of producer {channel.producer} ended in the middle of an element of "
                    f"{lost} rows"
                )
            channel.finished = True
            self._over(channel)
        else:
            raise RemoteProtocolError(f"event of unknown kind {kind} and {len(event)} bytes")

    def _over(self, channel: InputChannel) -> None:
        """Nothing follows on that channel."""
        self._unfinished -= 1
        self.marked |= self.valve.end(channel.number)

    def _end_turn(self, channel: InputChannel) -> None:
        """Give the current buffer back; the channel goes to the end of the line if it has more."""
        buffer, channel.current = channel.current, None
        if buffer is not None:
            self._give_back(channel, buffer)
        self.ready.popleft()
        if channel.queue:
            self.ready.append(channel)
            return
        channel.enqueued = False
        # The loop may have delivered between the look and the flag; twice in line does no harm.
        if channel.queue and not channel.enqueued:
            channel.enqueued = True
            self.ready.append(channel)
