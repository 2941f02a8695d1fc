"""The consuming side of an exchange: InputGate, one in-edge of a task.

The loop thread delivers buffers to a channel's queue and puts the channel in the gate's line of ready
ones; the task thread takes one buffer per turn, puts elements together, and gives the buffer back
once its bytes are copied out. That is the moment at which it counts as consumed. (Flink:
``SingleInputGate``.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from minishuffle.counters import GateSnapshot, TaskCounters
from minishuffle.errors import PeerLost, RemoteProtocolError, ShuffleError, StateLost
from minishuffle.exchange.channels import (
    ChannelEvent,
    Detached,
    GivenBack,
    InputChannel,
    LocalBuffer,
    QueuedBarrier,
    QueuedEvent,
    ReadyLine,
    RemoteAttachment,
)
from minishuffle.exchange.debloater import BufferDebloater
from minishuffle.exchange.elements import (
    ELEMENT_HEADER,
    Assembler,
    AssemblyBudget,
    pack_header,
    read_header,
)
from minishuffle.exchange.elementstore import ElementLog, ElementStore
from minishuffle.exchange.gate_buffers import GateBuffers
from minishuffle.exchange.notices import Attached, Notice, QueuedLatency, QueuedWatermark
from minishuffle.exchange.rownumbers import ChannelRows, RetainedRowNumbers
from minishuffle.exchange.watermarks import BEGINNING_OF_TIME, END_OF_TIME, WatermarkValve
from minishuffle.wire.frames import EventKind, LatencyMarker
from minishuffle.wire.packed import SplitPosition

__all__ = ["Element", "InputGate", "SplitChange", "SplitChannels"]


@dataclass(slots=True)
class Element:
    """One whole element: see ``elements.decode`` for format and payload."""

    channel: InputChannel
    format: int
    rows: int
    payload: Any
    skip: int = 0
    """So many of its rows, the first, have been given out before."""


SplitChange: TypeAlias = tuple[int, Literal["open", "done", "none"]]
"""A split, and a state of ``SplitMark``."""


class SplitChannels(Protocol):
    """Whoever owns the channels of a gate if they are the splits of a source, and come and go."""

    changes: deque[SplitChange]
    """In their order."""

    @property
    def finished(self) -> bool:
        """No channel will come any more."""
        ...

    def polled(self, element: Element | None) -> None:
        """(Task.) The gate is about to give that out; may wait until it may.

        Raises:
            TaskCancelled: while it waits.
        """

    def over(self, channel: InputChannel) -> None:
        """(Task.) All that comes on the channel was read; ``channel.ended``: to the end of its partition."""

    def snapshot(self) -> list[SplitPosition]:
        """(Task.) Where each split is."""
        ...

    def resume(self, positions: Iterable[SplitPosition]) -> None:
        """The splits go on there, and channels may come."""


class InputGate:
    """One in-edge of a subtask.

    Args:
        wake: tells the task that there is something to poll.
        give_back: hands a consumed buffer, or the end of a partition, to the loop, which calls ``consumed``
            of its attachment.
        budget: for elements that are being put together.
        tolerant: a channel that fails is left out until it is attached again; else the task fails.
        tolerates: the kind of errors of which that is so; of others the task fails.
        kept: gives the store in which the elements of a producer wait for the end of its partition, see
            :mod:`~minishuffle.exchange.blocking`; None: they do not wait.
        waits: event time waits for a channel that has failed, since its rows may come once more.
        strict: the task fails if rows are missing since a link broke: all come again to its next attempt.
        guaranteed: no row may be missing, and event time waits: producers retain what they have sent until
            snapshots of the task cover it.
        redealt: the next attempt of a producer may give the task rows that others had before. So no snapshot
            says that it has ended; if it has, and there is such an attempt, the task fails.
        splits: adds and removes its channels, decides when they end, and makes its event time from them, so
            that ``valve`` says nothing; None: they are those of :meth:`add_channel`.
        debloater: says how full producers are to make their buffers; None: as full as they can.
    """

    def __init__(
        self,
        edge: int,
        input_number: int,
        buffers: GateBuffers,
        *,
        wake: Callable[[], None],
        give_back: Callable[[GivenBack], None],
        budget: AssemblyBudget,
        counters: TaskCounters,
        tolerant: bool = False,
        tolerates: type[ShuffleError] = ShuffleError,
        kept: Callable[[int], ElementStore] | None = None,
        waits: bool = False,
        strict: bool = False,
        guaranteed: bool = False,
        redealt: bool = False,
        splits: SplitChannels | None = None,
        debloater: BufferDebloater | None = None,
    ) -> None:
        self.edge = edge
        self.input = input_number
        self.buffers = buffers
        self.wake = wake
        self.budget = budget
        self.channels: list[InputChannel] = []
        self.ready = ReadyLine(wake)
        self.valve = WatermarkValve()
        self.marked = False
        """(Task.) ``valve`` says something new since whoever reads it took this back."""
        self.on_latency: Callable[[LatencyMarker], None] = lambda marker: None
        """(Task.) Called with each latency marker, behind all that came before it on its channel."""
        self.split_changes = None if splits is None else splits.changes
        """None in a gate whose channels are no splits."""
        self._give_back = give_back
        self._counters = counters
        self._tolerated: tuple[type[ShuffleError], ...] = (tolerates,) if tolerant else ()
        self._waits = waits or guaranteed or kept is not None
        self._strict = strict
        self._guaranteed, self._redealt = guaranteed, redealt
        self._splits = splits
        self._barriers_over = self._move = 0
        self._movers: set[InputChannel] = set()
        """(Task.) Channels whose producer has moved, and is not attached again yet."""
        self.debloater = debloater
        if debloater is not None:
            buffers.buffer_size = debloater.size
        self._unfinished = 0
        self._make_store = kept
        self._logs: dict[InputChannel, ElementLog] = {}
        """(Task.) What there is of partitions that are not whole yet."""
        self._whole: deque[tuple[InputChannel, ElementLog, int]] = deque()
        """(Task.) Partitions that are whole, and how many of their elements were given out."""

    def add_channel(
        self,
        producer: int,
        on_event: Callable[[int, ChannelEvent], object] = lambda generation, event: None,
    ) -> InputChannel:
        """A channel that is not attached yet; ``on_event``: see :class:`InputChannel`."""
        assembler = Assembler(self.budget)
        channel = InputChannel(
            producer,
            self.valve.add(),
            assembler,
            self.buffers,
            self.ready,
            on_event=on_event,
            retained=self._guaranteed,
        )
        channel.end_barriers(self._barriers_over)
        self.channels.append(channel)
        self._unfinished += 1
        return channel

    def add_ended_channel(self, producer: int) -> None:
        """A channel that an earlier attempt of the task has read to the end."""
        channel = self.add_channel(producer)
        channel.ended = True
        self._on_end(channel)

    # --- loop ------------------------------------------------------------------------------------

    def close(self, *, listens: bool = False) -> None:
        """The task is terminal, or was abandoned and may go on; idempotent. If it ``listens``, channels that
        were read to their end stay attached, or are attached once more, until its last snapshot covers
        that."""
        self.buffers.close()
        for channel in self.channels:
            if listens and channel.is_read_to_end:
                channel.listen()
            else:
                channel.close()
        self.ready.line.clear()
        whole = list(self._whole)  # at once: a task that was abandoned may still read
        for log in [*self._logs.values(), *(log for _, log, _ in whole)]:
            log.store.forget()

    def end_barriers(self, barrier: int) -> None:
        """Barriers up to that one have ended: channels that stand behind one go on."""
        self._barriers_over = max(barrier, self._barriers_over)
        for channel in self.channels:
            channel.end_barriers(barrier)

    def make_stable(self, rows: Sequence[ChannelRows]) -> None:
        """The task's next attempt begins behind these rows at the least: producers need not retain them. Call
        it with what :meth:`taken` gave for the oldest snapshot that is kept."""
        for channel, covered in zip(self._retained, rows, strict=True):
            channel.make_stable(covered)

    def expect_move(self, barrier: int) -> None:
        """Producers that stop at that barrier move, and go on with their state: event time waits for them."""
        self._move = barrier

    def debloat(self) -> None:
        """Look at how fast the task consumes, and tell the producers if their buffers are to be of another
        size."""
        debloater = self.debloater
        if debloater is None:
            return
        attachments = [each.attachment for each in self.channels if each.attachment is not None]
        size = debloater.look(sum(each.unread for each in attachments))
        if size is not None:
            self.buffers.buffer_size = size
            for each in attachments:
                each.resize(size)

    @property
    def has_read_all(self) -> bool:
        """(Loop.) Every channel that has not ended is attached, its producer has answered, and nothing that
        it has said to have waits to be read."""
        attachments = [each.attachment for each in self.channels if not each.ended]
        return all(each is not None and each.answered and not each.unread for each in attachments)

    @property
    def unused(self) -> bool:
        """Nothing waits to be read, and no channel for a buffer: none but free ones, if the loop has taken
        back what was read."""
        return not (self.ready.line or self.buffers.line)

    @property
    def rows_again(self) -> int:
        """Rows that were given out before, as far as producers have begun new versions before them."""
        return sum(each.rows.again for each in self.channels if isinstance(each.rows, RetainedRowNumbers))

    def snapshot(self) -> GateSnapshot:
        """Exclusive buffers count as long as their attachment lasts; a closed one has given them up."""
        remote = [
            channel.attachment.consumer.credit
            for channel in self.channels
            if isinstance(channel.attachment, RemoteAttachment)
        ]
        exclusive = sum(credit.exclusive_total for credit in remote)
        idle_exclusive = sum(len(credit.exclusive) for credit in remote)
        idle_floating = sum(len(credit.floating) for credit in remote)
        pool, credited = self.buffers.pool, self.buffers.credit
        watermark, debloater = self.valve.watermark, self.debloater
        return GateSnapshot(
            queue_buffers=sum(len(channel.queue) for channel in self.channels),
            exclusive_used=exclusive - idle_exclusive,
            exclusive_capacity=exclusive,
            floating_used=max(0, pool.in_use - exclusive - idle_floating),
            floating_capacity=max(0, min(self.buffers.floating, pool.size - exclusive)),
            channels=len(self.channels),
            channels_starved=len(self.buffers.line),
            credits_announced=sum(each.granted - each.received for each in remote) if credited else None,
            credits_unannounced=sum(each.unannounced for each in remote) if credited else None,
            watermark=watermark if BEGINNING_OF_TIME < watermark < END_OF_TIME else None,
            debloated_bytes=None if debloater is None else debloater.size,
            in_flight_seconds=None if debloater is None else debloater.seconds,
        )

    @property
    def kept(self) -> bool:
        """Its producers keep what they have sent."""
        return self._make_store is not None

    def rows_dropped(self) -> dict[str, int]:
        """Rows that were received and will not be read, by reason. The next attempt gets all of a blocking
        partition again, and what is retained; and what was not taken of a split is sent again by whoever
        writes it."""
        if self.kept or self._guaranteed or self._splits is not None:
            return {}
        return {
            "queue_discarded": sum(each.rows_discarded + each.rows.lost for each in self.channels),
            "partial_element": sum(channel.rows_incomplete for channel in self.channels),
        }

    # --- task ------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True once every channel has seen the end of its partition."""
        splits = self._splits
        return self._unfinished == 0 if splits is None else splits.finished and not self.channels

    @property
    def has_splits(self) -> bool:
        """Whether its channels are the splits of a source."""
        return self._splits is not None

    @property
    def guaranteed(self) -> bool:
        """No row may be missing."""
        return self._guaranteed

    def late_from(self, channel: InputChannel) -> int | None:
        """Rows of the channel that are late, and not before that time, are so since its producer has
        restarted; None: none are."""
        if self._guaranteed:
            return channel.rows.repeats_from
        return BEGINNING_OF_TIME if self.valve.lags(channel.number) else None

    def positions(self) -> list[SplitPosition]:
        """(Between elements.) How far the task is in each split, if its channels are splits."""
        return [] if self._splits is None else self._splits.snapshot()

    def resume(self, positions: Iterable[SplitPosition]) -> None:
        """An attempt before has read these splits up to there: see :meth:`positions`."""
        if self._splits is not None:
            self._splits.resume(positions)

    def taken(self) -> list[ChannelRows]:
        """(Between elements.) How far the task is in each channel of which no row may be missing."""
        return [
            ChannelRows(each.producer, each.rows.version, each.rows.next, each.ended and not self._redealt)
            for each in self._retained
        ]

    def dealt(self) -> list[tuple[int, int]]:
        """(Behind the end.) The producers whose next attempt may deal its rows out in another way, and the
        version of the rows that the task has read of each."""
        return [(each.producer, each.rows.version) for each in self.channels] if self._redealt else []

    @property
    def _retained(self) -> list[InputChannel]:
        """The channels of which no row may be missing."""
        return self.channels if self._guaranteed else []

    def begin_at(self, rows: Sequence[ChannelRows]) -> None:
        """(Before the first poll.) An earlier attempt has taken these rows: those of :meth:`taken`."""
        for channel, before in zip(self._retained, rows, strict=True):
            assert channel.producer == before.producer and isinstance(channel.rows, RetainedRowNumbers)
            channel.rows.restore(before.version, before.row)
            if before.ended and not channel.ended:
                channel.ended = True
                channel.rows.finish()
                self._on_end(channel)

    def is_aligned(self, barrier: int) -> bool:
        """Whether nothing that stands before that barrier is on its way to the task. Channels that have ended
        are not waited for; what is stored, and what external clients write, carries no barrier."""
        if self.kept or self._splits is not None:
            return True
        return all(channel.ended or channel.barrier >= barrier for channel in self.channels)

    def is_held(self, barrier: int) -> bool:
        """Whether a channel is held back behind that barrier."""
        return any(channel.barrier >= barrier and not channel.ended for channel in self.channels)

    def poll(self) -> Element | None:
        """The next element of any channel, one buffer per channel and turn; None if there is none.

        Look at ``marked`` after it: a change of the watermark comes before the element.

        Raises:
            ShuffleError: a channel of a gate that is not tolerant failed, or a partition is lost; what it had
                delivered before was given out first.
        """
        while True:
            element = self._next_kept() if self._whole else self._next_read()
            if element is not None or not self._whole:
                break
        if self.debloater is not None and element is None:
            self.debloater.meter.idle()
        if self._splits is not None:
            self._splits.polled(element)
        return element

    def _next_read(self) -> Element | None:
        """The next element that may be given out as it comes; None too if a partition is whole."""
        line = self.ready.line
        while line and not self._whole:
            channel = line[0]
            if channel.current is None and not self._take_buffer(channel):
                continue
            element = channel.assembler.next()
            if channel.assembler.exhausted:
                self._end_turn(channel)
            if element is not None and self._make_store is not None:
                self._keep(channel, *element)
            elif element is not None:
                kind, rows, payload = element
                skip = channel.rows.take(rows)
                if skip < rows or not rows:
                    return Element(channel, kind, rows, payload, skip)
        return None

    def _keep(self, channel: InputChannel, kind: int, rows: int, payload: Any) -> None:
        """Put an element aside until its partition is whole; one that was whole before is not read again."""
        assert self._make_store is not None
        if channel.ended:
            return
        log = self._logs.get(channel)
        if log is None:
            log = self._logs[channel] = ElementLog(self._make_store(channel.producer))
        log.append(rows, [pack_header(len(payload), rows, kind), payload])

    def _next_kept(self) -> Element | None:
        """The next element of a partition that is whole; behind the last its channel ends."""
        channel, log, at = self._whole.popleft()
        if at == len(log.elements):
            log.store.forget()
            self._on_end(channel)
            return self._next_read() if not self._whole else None
        self._whole.appendleft((channel, log, at + 1))
        data = log.read(at)
        _, rows, kind = read_header(data)
        return Element(channel, kind, rows, memoryview(data)[ELEMENT_HEADER.size :])

    def _take_buffer(self, channel: InputChannel) -> bool:
        """Make the next data buffer of the channel at the head of the line its current one."""
        try:
            item = channel.queue.popleft()
        except IndexError:
            self._end_turn(channel)
            return False
        if isinstance(item, Notice):
            self._on_notice(channel, item)
            self._end_turn(channel)
            return False
        counters = self._counters
        counters.buffers_in += 1
        channel.current = item
        if isinstance(item, LocalBuffer) and item.whole is not None:
            size = item.whole.size
            channel.assembler.put(item.whole.batch, item.rows)
        else:
            payload = item.payload
            size = len(payload)
            channel.assembler.feed(payload, item.rows)
        counters.bytes_in += size
        if self.debloater is not None:
            self.debloater.meter.take(size)
        if not channel.rows.begun:  # Its rows are the assembler's by now: if that raises, they are discarded.
            self._on_first(channel, item.row)
        return True

    def _on_first(self, channel: InputChannel, row: int) -> None:
        """What an attachment delivers begins with that row.

        Raises:
            StateLost: rows before it are missing, and none may be.
            PeerLost: so are they, and the task's next attempt gets them.
        """
        self._require_rows(channel, row)
        missed, half = channel.rows.begin(row)
        channel.rows_incomplete += half
        if missed and self._strict and not channel.ended:
            raise PeerLost(
                f"{missed} rows of subtask {channel.producer} before row {row} are missing, since a "
                "connection to it broke: what reads or writes blocking exchanges runs again"
            )

    def _require_rows(self, channel: InputChannel, row: int) -> None:
        """An attachment begins with that row, as its first buffer says or an event before that. Behind an
        event no row may follow for long, and state that is taken meanwhile is to have all rows before it.

        Raises:
            StateLost: rows before it are missing, and none may be.
        """
        missed = row - channel.rows.next
        if self._guaranteed and missed > 0 and not (channel.ended or channel.rows.begun):
            raise StateLost(
                f"subtask {channel.producer} goes on with row {row} of edge {self.edge}, and {missed} rows "
                "before it are missing: it gave them up, since a snapshot covers them that was lost"
            )

    def _end_turn(self, channel: InputChannel) -> None:
        """Give the current buffer back; the channel goes to the end of the line if it has more."""
        buffer, channel.current = channel.current, None
        if buffer is not None:
            self._give_back(buffer)
        self.ready.end_turn(channel)

    def _on_notice(self, channel: InputChannel, notice: Notice) -> None:
        match notice:
            case QueuedWatermark(row=row):
                self._require_rows(channel, row)
                time, idle = notice.take()
                if self._splits is None:
                    self.marked |= self.valve.update(channel.number, time, idle)
                channel.rows.reach(time, idle=idle, watermark=self.valve.watermark)
            case QueuedLatency(marker=LatencyMarker() as marker):
                notice.taken = True
                self.on_latency(marker)
            case QueuedBarrier(blocking=blocking, row=row):
                self._require_rows(channel, row)
                channel.events_read += 1
                if blocking:
                    channel.barrier = notice.barrier
                    self._give_back(notice)
            case QueuedEvent():
                channel.events_read += 1
                self._on_event(channel, notice)
            case Detached():
                self._on_detached(channel, notice)
            case Attached():
                self._on_attached(channel, notice)

    def _on_event(self, channel: InputChannel, event: QueuedEvent) -> None:
        payload = event.payload
        kind = payload[0]
        if kind == EventKind.END_OF_DATA:
            if self._splits is None:
                self.marked |= self.valve.end(channel.number)
        elif kind == EventKind.END_OF_PARTITION:
            if channel.ended and not (self.kept or channel.reopened):
                raise RemoteProtocolError(f"the partition of producer {channel.producer} ended twice")
            if channel.assembler.partial:
                lost = channel.assembler.clear()
                raise RemoteProtocolError(
                    f"the partition of producer {channel.producer} ended in the middle of an element: "
                    f"{lost} rows are lost"
                )
            if not (channel.ended or channel.rows.begun):
                self._on_first(channel, event.row)
            ended_before, channel.ended = channel.ended, True
            self._give_back(event)
            if ended_before:
                return
            if self._make_store is None:
                channel.rows.finish()
                self._on_end(channel)
            else:
                log = self._logs.pop(channel, None) or ElementLog(self._make_store(channel.producer))
                self._whole.append((channel, log, 0))
        else:
            raise RemoteProtocolError(f"event of unknown kind {kind} and {len(payload)} bytes")

    def _on_end(self, channel: InputChannel) -> None:
        """Nothing new follows on that channel."""
        if self._splits is not None:
            self._splits.over(channel)
            return
        self._unfinished -= 1
        self.marked |= self.valve.end(channel.number)

    def _on_detached(self, channel: InputChannel, notice: Detached) -> None:
        """What was delivered before has been read.

        Raises:
            ShuffleError: why nothing more comes, if the partition did not end before, and the gate is not
                tolerant.
        """
        if channel.ended:
            channel.assembler.clear()
            if self._guaranteed:
                self._give_back(notice)
            return
        half = channel.assembler.clear()
        if self._waits:
            channel.rows.detach(half)
        else:
            channel.rows_incomplete += half
        if self._splits is not None:
            self._splits.over(channel)
            return
        if (log := self._logs.pop(channel, None)) is not None:
            log.store.forget()
        if notice.error is not None and not isinstance(notice.error, self._tolerated):
            raise notice.error
        if channel.barrier == self._move > channel.moved:
            channel.moved = channel.barrier
            self._movers.add(channel)
        if not (self._waits or channel in self._movers):
            self.marked |= self.valve.suspend(channel.number)
        else:  # Nor is it idle now: what it sent behind that, or reads meanwhile, is yet to come.
            self.marked |= self.valve.update(channel.number, BEGINNING_OF_TIME, False)
        self._give_back(notice)

    def _on_attached(self, channel: InputChannel, notice: Attached) -> None:
        """The producer says anew how far it is.

        Raises:
            PeerLost: it had ended, and may give the task more rows now.
        """
        if self._redealt and channel.ended and notice.version != channel.rows.version:
            raise PeerLost(
                f"subtask {channel.producer} of edge {self.edge}, whose end was read, runs again, and may "
                "deal its rows out in another way: this task runs again from its last snapshot"
            )
        channel.rows_incomplete += channel.rows.attach(notice.version)
        if channel.ended:
            channel.reopened = True
        elif channel in self._movers:
            self._movers.remove(channel)
        elif not self._waits:
            self.marked |= self.valve.rejoin(channel.number)
