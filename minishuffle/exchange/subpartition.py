"""The producing side of one channel: a subpartition, its views and their attachments.

The writer (task thread) fills one *open* segment per subpartition and publishes what it wrote by
storing one tuple; full segments go to the end of a queue. The reader (loop thread) takes finished
segments from the front, and slices of the open one when a flush was asked for. Each field is written
by one side only. A broadcast's open segment is the same in all its subpartitions, and each has a builder of
its own for it, which knows what its reader has sent. (Flink: ``PipelinedSubpartition``, ``BufferBuilder``.)

Consumers come and go: each reads through a view of one generation, and only the newest view of a
subpartition polls it. An attachment joins a view to the channel of the link that carries it.

A subpartition whose consumer has gone is *unavailable* until the next view is attached, if its partition
drops what nobody reads: what is queued is freed, and the writer skips it, an element at a time. Each row
that is written is counted in exactly one place::

    written = sent (by all views) + skipped by the writer + discarded from the queue + still queued

but for those that nobody wants, since the subpartition was *closed*: its consumer has read it to the end,
maybe from an earlier attempt of the producer.

What is dropped because the consumer's worker answers no Ping is counted apart, as *suspected*, until another
view is attached or the coordinator names the consumer's next attempt.

In this order they are numbered, from 0 on, those that nobody wants too: the number of a row is how many were
written before it. So a number that is missing where a view begins says that rows were dropped, or lost on
their way to an earlier one.

Rows count where their element begins: if that was sent or discarded, so were they, and the rest of the
element is left out whenever it comes.

Behind a barrier that blocks, a view gives nothing until its consumer resumes. The barrier is state until
then: the next view begins with it, behind the rows that precede it. Until the barrier has ended for its whole
job, nothing is dropped although the consumer has gone: whoever had the barrier put there has another attempt
of the consumer come, or says that it has ended. (Flink: ``PipelinedSubpartition.isBlocked``.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from minishuffle.errors import LocalProtocolError, ShuffleError, Superseded
from minishuffle.exchange.buffers import BufferBuilder, Event, EventState, Flush, Slice, WholeBatch
from minishuffle.exchange.partition import ProducerLink, SubpartitionState
from minishuffle.ids import FIRST_ATTEMPT
from minishuffle.limits import EVENTS_QUEUED_PER_CHANNEL_MAX, SEGMENT_HEADROOM_BYTES
from minishuffle.protocol.channel import NextType, ProducerChannel
from minishuffle.wire.frames import (
    NO_ELEMENT_START,
    BufferFlags,
    CancelReason,
    DataType,
    EventKind,
    LatencyMarker,
)

__all__ = ["PipelinedSubpartition", "PipelinedView"]


_STARTS, _CONTINUES, _ENDS = map(int, (BufferFlags.STARTS, BufferFlags.CONTINUES, BufferFlags.ENDS))
"""As plain numbers: an operation on flags takes ten times as long."""
_DATA = int(DataType.DATA)
_NOTHING = memoryview(b"")
_NONE, _PARTIAL = NextType.NONE, NextType.PARTIAL
_ON_REQUEST, _ADAPTIVE = Flush.ON_REQUEST, Flush.ADAPTIVE


# --- subpartition ---------------------------------------------------------------------------------


class PipelinedSubpartition:
    """Queue of one producer subtask towards one consumer subtask: a :class:`ResultSubpartition`.

    Invariants: ``polled ≤ written``; at most one builder is open, and it is not in the queue once its
    successor is open; at most one view is current; while this is unavailable there is none, or it is closed,
    and the view passes events on alone; a batch is handed over whole to a view that takes it so, and to any
    other as the segments that its bytes fill.

    ``rows`` is how many were written before the open segment: the number of the first that begins there.

    Args:
        consumer: index of the consumer subtask.
        drops: what is written while no consumer is attached is dropped, once there has been one.
        buffer_size: bytes that are put into a buffer before a consumer says otherwise; None: as many as have
            room.
        on_stable: (loop) the consumer's snapshots cover rows below that number. Nothing is retained here for
            that: whoever writes may keep them.
    """

    __slots__ = (
        "_barrier",
        "_discarded",
        "_drops",
        "_events_added",
        "_latency",
        "_lost",
        "_mark",
        "_notify",
        "_open",
        "_polled",
        "_queue",
        "_state",
        "_unfinished_rows",
        "_written",
        "available",
        "buffer_size",
        "buffers_out",
        "closed",
        "consumer",
        "dirty",
        "error",
        "flushing",
        "held",
        "notified",
        "on_stable",
        "rows",
        "rows_discarded",
        "rows_suspected",
        "suspected",
        "view",
        "whole",
    )

    def __init__(
        self,
        consumer: int,
        notify: Callable[[PipelinedSubpartition], None],
        flushing: Flush = Flush.ON_REQUEST,
        *,
        drops: bool = False,
        buffer_size: int | None = None,
        on_stable: Callable[[int], None] = lambda row: None,
    ) -> None:
        self.consumer = consumer
        self.buffer_size = buffer_size
        """(Set by the loop.) Bytes that are put into each buffer that is begun from now on, if there is room.
        None: until it is full."""
        self.flushing = flushing
        self.available = True
        """(Set by the loop.) False: nobody will read what is written until the next view is attached."""
        self.suspected = False
        """(Set by the loop.) It is unavailable since the consumer's worker answers no Ping."""
        self.closed = False
        """(Set by the loop.) Nobody will ever want a row of it: its consumer has them from an earlier attempt
        of the producer. Events are passed on."""
        self.whole = False
        """(Set by the loop.) The consumer is in this process, and takes batches whole."""
        self.held = False
        """The loop does not want to know of what is published before it looks anyhow."""
        self.dirty = False
        """Noted by its partition as to be flushed; set by the writer, cleared by the loop."""
        self.buffers_out = 0
        """(Reader.) Buffers with data that were handed to the consumer."""
        self.notified = False
        """Set by whoever queues this for the loop's attention, cleared by the loop."""
        self.view: PipelinedView | None = None
        """The current one (loop thread); None while no consumer is attached."""
        self.rows_discarded = 0
        """(Reader.) Rows of elements that were freed before any of them was sent."""
        self.rows_suspected = 0
        """(Reader.) The same, while ``suspected``."""
        self.error: ShuffleError | None = None
        """(Reader.) Why the producer has failed, if it has."""
        self._drops, self._notify, self.on_stable = drops, notify, on_stable
        self._queue: deque[BufferBuilder | WholeBatch | Event] = deque()
        self._open: BufferBuilder | None = None
        # The writer's.
        self.rows = self._written = self._events_added = 0
        """Unlike the queue, these may be read at any time."""
        self._mark: Event | None = None
        """The watermark or barrier that is the last thing queued, if any is."""
        self._latency: Event | None = None
        """The latency marker that was queued last."""
        self._barrier: Event | None = None
        """The barrier that was queued last."""
        # The reader's.
        self._lost: CancelReason | None = None
        """Why the consumer has gone whose rows a barrier keeps from being dropped."""
        self._discarded, self._polled = False, 0
        self._unfinished_rows: int | None = None
        """Rows of the element whose beginning was polled or discarded, and whose end was not; 0 once the
        view that has sent the beginning has ended. None: there is no such element."""
        self._state = EventState()

    # --- writer (task thread) ----------------------------------------------------------------

    @property
    def open(self) -> BufferBuilder | None:
        """The builder that is being written."""
        return self._open

    @open.setter
    def open(self, builder: BufferBuilder) -> None:
        self._open = builder
        self._mark = None

    def finish_open(self, ends: bool) -> None:
        """The open segment is complete. The queue sees it before it stops being the open one."""
        builder = self._open
        assert builder is not None
        builder.publish(ends)
        self.rows += builder.rows
        self._queue.append(builder)
        self._open = None
        self._written += 1  # last, so that the reader's backlog never has it twice
        self._notify(self)

    def add_whole(self, batch: WholeBatch) -> None:
        """Queue a batch behind everything written so far."""
        if self._open is not None:
            self.finish_open(ends=True)
        self._mark = None
        batch.first_row = self.rows
        self.rows += batch.rows
        self._queue.append(batch)
        self._written += batch.segments
        if self._discarded:  # nobody will look into the queue any more
            batch.free()
        self._notify(self)

    def add_event(self, kind: EventKind) -> None:
        """Queue an event behind everything written so far.

        Raises:
            LocalProtocolError: more events are queued than a channel may have.
        """
        queued = self._events_added - self._state.ends
        if queued >= EVENTS_QUEUED_PER_CHANNEL_MAX:
            raise LocalProtocolError(f"{queued} events are queued for one channel")
        self._append(Event(kind))
        self._events_added += 1

    def add_watermark(self, time: int, idle: bool) -> None:
        """Queue a watermark behind everything written so far. It takes the place of an unsent one that has
        no data behind it, so no more of them can be queued than segments."""
        mark = self._mark
        if mark is not None and mark.kind is EventKind.WATERMARK and mark.overtake(time, idle):
            return
        self._append(mark := Event(EventKind.WATERMARK, time, idle))
        self._mark = mark

    def add_latency(self, marker: LatencyMarker) -> None:
        """Queue a latency marker behind everything written so far, if none is queued: the one that has waited
        longer says more."""
        if self._latency is None or self._latency.taken:
            self._latency = Event(EventKind.LATENCY_MARKER, marker=marker)
            self._append(self._latency)

    def add_barrier(self, barrier: int) -> None:
        """Queue a barrier that blocks behind everything written so far. It takes the place of an unsent one
        that is the last thing queued, so no more of them can be queued than segments and watermarks.

        Numbers ascend: when there is another, those before it have ended, or about to be.
        """
        mark = self._mark
        if mark is not None and mark.kind is EventKind.BARRIER and mark.renumber(barrier):
            return
        self._append(mark := Event(EventKind.BARRIER, barrier=barrier, blocking=True))
        self._barrier = self._mark = mark

    def _append(self, event: Event) -> None:
        if self._open is not None:
            self.finish_open(ends=True)
        self._mark = None
        event.row = self.rows
        self._queue.append(event)
        self._notify(self)

    # --- reader (loop thread) ----------------------------------------------------------------

    def attach(
        self,
        generation: int,
        on_available: Callable[[], None],
        on_failed: Callable[[ShuffleError], None] = lambda error: None,
        *,
        attempt: int = FIRST_ATTEMPT,
        whole: bool = False,
        version: int = 0,
        row: int = 0,
    ) -> PipelinedView:
        """The view of a consumer that reads from now on, instead of any other.

        It begins with the state that earlier views have polled (watermark and ends), and at the
        beginning of an element. One of this process may take batches ``whole``.
        """
        before = self.view
        if before is not None:
            before.end()
        if not (self.available or self._discarded):
            self._discard_queued()  # what the writer leaves out now is not to follow what it wrote before
        self.view = view = PipelinedView(self, generation, self._state.events(), on_available, on_failed)
        view.attempt, view.whole = attempt, whole
        self._lost = None
        self.available = not (self._discarded or self.closed)
        self.whole = whole and self.available
        if before is not None:
            was, now = (f"generation {each.generation} of attempt {each.attempt}" for each in (before, view))
            text = f"subpartition {self.consumer} was requested again: {now} takes the place of {was}"
            before.on_failed(Superseded(text))
        return view

    def lose(self, reason: CancelReason) -> None:
        """Its consumer has gone. One that has read to the end wants nothing more, whatever there may be."""
        self.whole = False
        if reason is CancelReason.ENDED:
            self.close()
        elif self._drops and self.held_back:
            self._lost = reason
        elif self._drops:
            self.suspected = reason is CancelReason.SUSPECTED  # first: the writer looks at it second
            self.available = self.held = False
            self._discard_queued()

    @property
    def held_back(self) -> bool:
        """A barrier stands in the queue, or at its head, that was not resumed and has not ended."""
        barrier, state = self._barrier, self._state
        return barrier is not None and barrier.barrier > max(state.barriers_over, state.resumed)

    def resume(self, barrier: int) -> None:
        """The consumer wants what stands behind that barrier."""
        self._state.resumed = barrier
        self._state.resume(barrier)

    def end_barriers(self, barrier: int) -> None:
        """Barriers up to that one have ended: a consumer that has gone keeps nothing from being dropped.
        One that is there says by itself when it goes on."""
        self._state.barriers_over = max(barrier, self._state.barriers_over)
        if self.view is None:
            self._state.resume(barrier)
        lost = self._lost
        if lost is not None and not self.held_back:
            self._lost = None
            self.lose(lost)

    def close(self) -> None:
        """Nobody wants a row of it any more; what is queued is freed."""
        self.closed = True  # first: the writer looks at it second
        self.available = self.held = self.whole = False
        self._discard_queued()

    def fail(self, error: ShuffleError) -> None:
        """The producer has failed: tell the consumer, if there is one."""
        self.error = error
        if self.view is not None:
            self.view.fail(error)

    def attend(self) -> None:
        """The writer has notified the loop. The flag is cleared before the look."""
        self.notified = False
        if self.view is not None:
            self.view.on_available()
        elif not self.available:
            self._discard_queued()

    def take_event(self, event: Event) -> None:
        """``event`` has left the queue."""
        self._unfinished_rows = None
        self._state.take(event)

    def _discard_queued(self) -> None:
        """Free what is queued, and leave out what is published in the open segment; rows are counted."""
        queue, builder = self._queue, self._open  # the open one first: see PipelinedView._head
        while queue:  # one by one: the writer may append
            if isinstance(item := queue[0], Event):
                queue.popleft()
                self.take_event(item)
            else:
                self.leave_out_first()
        if builder is not None:
            self._leave_out(builder)

    def leave_out_first(self) -> None:
        """Free the first in the queue, which is no event."""
        builder = self._queue.popleft()
        assert not isinstance(builder, Event)
        self._polled += builder.segments
        self._leave_out(builder)
        if isinstance(builder, BufferBuilder) and not builder.drained:
            builder.drain()

    def cut_up_first(self) -> None:
        """Put the bytes of the batch that is first in the queue in its place."""
        batch = self._queue.popleft()
        assert isinstance(batch, WholeBatch)
        builders = batch.in_segments()
        self._queue.extendleft(reversed(builders))
        self._polled += batch.segments - len(builders)
        batch.leave()
        batch.free()

    def _leave_out(self, builder: BufferBuilder | WholeBatch) -> None:
        if builder.unsent():
            rows, cut = builder.leave_out()
            if self.closed:
                pass  # they are not lost
            elif self.suspected:
                self.rows_suspected += rows
            else:
                self.rows_discarded += rows
            self._unfinished_rows = 0 if cut else None

    def flush(self) -> bool:
        """The buffer timeout has passed: True if there is something published to be sent."""
        builder = self._open
        if builder is None or not builder.unsent():
            return False
        builder.flush_requested = True
        return True

    def goes_out(self, builder: BufferBuilder) -> bool:
        """Whether the open segment may be sent, as far as it is published."""
        return (
            (builder.flush_requested or self.flushing is not _ON_REQUEST)
            and not self.closed
            and builder.unsent()
            and (builder.holder is None or builder.holder is not self.view)
        )

    def state(self) -> SubpartitionState:
        builder = self._open
        return SubpartitionState(
            len(self._queue),
            builder.length - builder.sent_bytes if builder is not None else 0,
            self.available,
            self.suspected,
            self.closed,
        )

    def unsent_segments(self) -> int:
        """(Any thread.) Segments that were begun and are not all sent, more or less: the loop goes on."""
        return self._written - self._polled

    def backlog(self) -> int:
        """(Loop.) Finished segments that are not all sent, and the open one if it is to go out whatever the
        consumer does: one that keeps no buffers for this channel grants credit for nothing else."""
        queue, backlog, builder = self._queue, self._written - self._polled, self._open
        if queue and isinstance(head := queue[0], BufferBuilder) and not head.unsent():
            backlog -= 1
        if builder is not None and self.flushing is not _ADAPTIVE and self.goes_out(builder):
            backlog += 1
        return max(0, backlog)

    def discard(self, written_off: bool = False) -> None:
        """The partition is terminal: every segment that the transport does not hold goes back.

        The open segment of a writer that could not be stopped is ``written_off``: it may still be
        written to, so it is never lent again, and the pool promises it to nobody.
        """
        self._discarded, self.available, self.whole = True, False, False
        if self.view is not None:
            self.view.end()
        self._discard_queued()
        builder = self._open
        if builder is not None and not builder.drained:
            if written_off:
                builder.segment.write_off()
            else:
                builder.drain()
                self._open = None
        self._polled = self._written


class PipelinedView:
    """What one consumer reads of a subpartition, at one generation: a :class:`PartitionView`.

    Once released, or once there is a newer view, it polls nothing, and slices of it that the transport
    still holds wake nobody when they come back.
    """

    __slots__ = (
        "_barrier",
        "_next",
        "_queue",
        "_skipping",
        "_state",
        "_subpartition",
        "attempt",
        "channel",
        "generation",
        "link",
        "on_available",
        "on_failed",
        "rows_sent",
        "rows_skipped",
        "whole",
    )

    def __init__(
        self,
        subpartition: PipelinedSubpartition,
        generation: int,
        state: list[Event],
        on_available: Callable[[], None],
        on_failed: Callable[[ShuffleError], None],
    ) -> None:
        self.generation = generation
        self.attempt = FIRST_ATTEMPT
        """The consumer's."""
        self.channel: ProducerChannel | None = None
        self.link: ProducerLink | None = None
        """The link that carries it, and its channel there; None in one process."""
        self.whole = False
        """It takes batches as they are."""
        self.on_available = on_available
        """Wakes the consumer's side: there is something to poll."""
        self.on_failed = on_failed
        """Tells the consumer's side why nothing more comes; the view has ended before."""
        self.rows_sent = 0
        """Rows of elements that began in what was polled."""
        self.rows_skipped = 0
        """Rows, of those, of an element whose end was not polled when this view ended: nobody gets it."""
        self._skipping = subpartition._unfinished_rows is not None
        self._subpartition = subpartition
        self._queue = subpartition._queue
        self._state = deque(state)
        self._next: BufferBuilder | WholeBatch | Event | None = None
        """What the last look found at the head. None: look again."""
        self._barrier = 0
        """The barrier that it has polled last, and that blocks it; 0: none does."""

    @property
    def current(self) -> bool:
        return self._subpartition.view is self

    def resize(self, size: int) -> None:
        """So many bytes are to be in each buffer that is begun from now on."""
        if self.current:
            self._subpartition.buffer_size = size

    def resume(self, barrier: int) -> None:
        """The consumer wants what stands behind that barrier; no effect if it is at another, or at none."""
        if self.current and self._barrier == barrier:
            self._barrier = 0
            self._subpartition.resume(barrier)

    def make_stable(self, version: int, row: int) -> None:
        if self.current:
            self._subpartition.on_stable(row)

    def release(self, reason: CancelReason) -> None:
        """The consumer went away. What is queued stays for the next view, or is dropped; idempotent."""
        if self.current:
            self.end()
            self._subpartition.lose(reason)

    def fail(self, error: ShuffleError) -> None:
        """Nothing more comes: end this view, and tell the consumer why; idempotent."""
        if self.current:
            self.release(CancelReason.FAILED)
            self.on_failed(error)

    def end(self) -> None:
        """It polls no more. What is queued stays, but for the rest of an element."""
        subpartition = self._subpartition
        subpartition.view = self._next = None
        if subpartition._unfinished_rows is not None:
            self.rows_skipped += subpartition._unfinished_rows
            subpartition._unfinished_rows = 0

    def _head(self) -> BufferBuilder | WholeBatch | Event | None:
        """What a poll would take now; finished builders that were sent in slices leave the queue, whether or
        not the transport has let go of the last slice."""
        subpartition, queue = self._subpartition, self._queue
        if subpartition.view is not self or self._barrier:
            return None
        subpartition.held = False  # before the look
        if self._state:
            return self._state[0]
        while True:
            # Read before the look at the queue: the writer queues a builder before it opens the next, so
            # one that was open then cannot be overtaken.
            builder = subpartition._open
            if not queue:
                break
            head = queue[0]
            if isinstance(head, Event):
                return head
            if subpartition.closed:
                subpartition.leave_out_first()
                continue
            if self._skipping:
                self._skip(head)
            if isinstance(head, WholeBatch):
                if self.whole:
                    return head
                subpartition.cut_up_first()
                continue
            if head.unsent():
                return head if head.holder is not self else None
            queue.popleft()
            subpartition._polled += 1
            head.drain()
        if builder is None:
            return None
        if self._skipping:
            self._skip(builder)
        return builder if subpartition.goes_out(builder) else None

    def _skip(self, builder: BufferBuilder | WholeBatch) -> None:
        if builder.skip_rest():
            subpartition = self._subpartition
            self._skipping, subpartition._unfinished_rows = False, None

    def next_type(self) -> NextType:
        if self._next is None:
            self._next = self._head()
        return self._type(self._next)

    def _type(self, head: BufferBuilder | WholeBatch | Event | None) -> NextType:
        if head is None:
            return _NONE
        subpartition = self._subpartition
        if subpartition.flushing is _ADAPTIVE and head is subpartition._open:
            return _PARTIAL
        return head.next_type

    def hold(self) -> None:
        self._next = None
        self._subpartition.held = True

    def backlog(self) -> int:
        return 0 if self._barrier else self._subpartition.backlog()

    def poll(self, data: bool = True) -> Slice | None:
        """The next piece; None if there is none, or if it is data and ``data`` is False."""
        head = self._next
        if head is None:
            head = self._next = self._head()
            if head is None:
                return None
        if isinstance(head, Event):
            self._take_event(head)
            piece = head.slice()
            if head.blocking:
                self._barrier = head.given
        elif not data:
            return None
        elif isinstance(head, BufferBuilder):
            piece, subpartition = self._slice(head), self._subpartition
            if head is subpartition._open and not self._queue:  # what is published from now on is noted
                self._next = None
                return piece
        else:
            piece = self._take_whole(head)
        self._next = self._head()
        piece.next_type = self._type(self._next)
        piece.backlog = 0 if self._barrier else self._subpartition.backlog()
        return piece

    def _take_event(self, event: Event) -> None:
        if self._state:
            self._state.popleft()
            return
        self._queue.popleft()
        self._skipping = False
        self._subpartition.take_event(event)

    def _take_whole(self, batch: WholeBatch) -> Slice:
        subpartition = self._subpartition
        self._queue.popleft()
        subpartition._polled += batch.segments
        subpartition.buffers_out += 1
        self.rows_sent += batch.rows
        piece = Slice(_NOTHING, 0, batch.size, _DATA, batch.rows)
        piece.flags, piece.first_start, piece.whole = _STARTS | _ENDS, 0, batch
        piece.row = batch.first_row
        batch.leave()
        return piece

    def _slice(self, builder: BufferBuilder) -> Slice:
        subpartition = self._subpartition
        final = bool(self._queue) and self._queue[0] is builder
        if final:
            self._queue.popleft()
            subpartition._polled += 1
            builder.drained = True
        else:
            # Reset before the look at what is published: a flush asked for from now on is kept.
            builder.flush_requested = False
        length, rows, starts, ends = builder.published
        begin = builder.sent_bytes
        flags = _ENDS if ends else 0
        first_start = NO_ELEMENT_START
        if builder.sent_starts < starts:
            flags |= _STARTS
            first_start = builder.starts[builder.sent_starts] - begin
            if not ends:
                subpartition._unfinished_rows = builder.last_rows
        if ends:
            subpartition._unfinished_rows = None
        if first_start:
            flags |= _CONTINUES
        rows_begun = rows - builder.sent_rows
        self.rows_sent += rows_begun
        memory, start, size = builder.segment.memory, SEGMENT_HEADROOM_BYTES + begin, length - begin
        holds: BufferBuilder | None = builder
        if builder.holder is None:
            builder.holder = self
        else:  # The transport has a slice of an earlier view's, just before this one, where the header goes.
            copied = bytearray(SEGMENT_HEADROOM_BYTES)
            copied += memory[start : start + size]
            memory, start, holds = memoryview(copied), SEGMENT_HEADROOM_BYTES, None
        piece = Slice(memory, start, size, _DATA, rows_begun)
        piece.row = builder.first_row + builder.sent_rows
        piece.shared = builder.shared and holds is builder
        piece.flags, piece.first_start = flags, first_start
        piece.view, piece.builder = self, holds
        builder.sent_bytes, builder.sent_rows, builder.sent_starts = length, rows, starts
        subpartition.buffers_out += 1
        return piece

    def slice_released(self, builder: BufferBuilder) -> None:
        """The transport has let go of a slice of ``builder``."""
        builder.holder = None
        subpartition = self._subpartition
        # A writer that could not be stopped may finish its segment after the subpartition was discarded.
        if builder.drained:
            builder.segment.recycle()
        elif subpartition._discarded and builder is not subpartition._open:
            builder.drain()
        elif subpartition.view is self and builder.unsent():  # else nothing has waited for it
            self.on_available()
