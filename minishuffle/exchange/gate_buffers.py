"""The receive buffers of a gate: exclusive to its remote channels, or floating between them.

(Flink: ``BufferManager`` of each channel, over the local buffer pool of its gate.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from minishuffle.exchange.segments import LocalPool, Segment
from minishuffle.protocol.channel import ChannelState, ConsumerChannel, FreeBuffer

__all__ = ["BufferUser", "GateBuffers"]


class BufferUser(Protocol):
    """An attachment that receives into a gate's buffers."""

    producer: int
    """Index of the subtask that it reads."""
    consumer: ConsumerChannel

    def add_exclusive(self, segment: FreeBuffer) -> None:
        """Take one that it is short of."""

    def announce(self) -> None:
        """Tell the producer of credit that it has not heard of."""


class GateBuffers:
    """The receive buffers of one gate: exclusive ones of its attachments, and floating ones that go round
    the attachments which wait for one.

    Args:
        pool: ``channels × exclusive + 1 … + floating`` segments; those of local channels are there in case
            they become remote.
        segment_bytes: payload bytes of each.
        exclusive, floating: buffers per remote channel, and for all of them together. A local channel may
            hold as many of its producer's segments as a remote one has of both.
        credit: remote producers send for credit; else as TCP lets them, and the whole pool goes round: see
            :mod:`~minishuffle.protocol.oneway`.
    """

    def __init__(
        self, pool: LocalPool, segment_bytes: int, exclusive: int, floating: int, *, credit: bool = True
    ) -> None:
        self.pool = pool
        self.segment_bytes = segment_bytes
        self.line: deque[BufferUser] = deque()
        """Attachments that wait for a floating buffer, in turn."""
        self.short: deque[BufferUser] = deque()
        """Attachments with fewer exclusive buffers than they should have: they are served first."""
        self.exclusive = exclusive if credit else 0
        self.floating = floating if credit else pool.maximum
        self.credit = credit
        self.exclusive_held = 0
        """Exclusive buffers of all attachments that are open."""
        self.local_credit = exclusive + floating
        self.buffer_size: int | None = None
        """Bytes that producers are to put into a buffer; None: as many as have room."""
        self.on_limit: Callable[[str], None] = lambda limit: None
        """Called with the name of each limit that a channel hits, the first time that one does: see
        :data:`~minishuffle.counters.LIMITS`."""
        self._limits_hit: set[str] = set()
        pool.on_available(self.serve)

    def take_exclusive(self) -> list[FreeBuffer]:
        """The exclusive buffers of a new attachment, as far as there are any."""
        taken: list[FreeBuffer] = []
        while len(taken) < self.exclusive and self._lends_exclusive and (segment := self.pool.request()):
            taken.append(segment)
            self.exclusive_held += 1
        return taken

    @property
    def _lends_exclusive(self) -> bool:
        """Whether the pool still owes the gate an exclusive buffer. Of its minimum, one segment always goes
        round."""
        return self.exclusive_held < self.pool.minimum - 1

    @property
    def _lends_floating(self) -> bool:
        return self.pool.in_use - self.exclusive_held < self.floating

    def request_floating(self) -> Segment | None:
        """A floating buffer; None if there is none now."""
        return self.pool.request() if self._lends_floating else None

    def release_floating(self, segment: FreeBuffer) -> None:
        """A floating buffer comes free: whoever is short of an exclusive one gets it, or the next in line,
        or the pool.

        A pool that was shrunk takes it back first.
        """
        if self.pool.in_use <= self.pool.size:
            if self.short and self._lend_exclusive(segment):
                return
            line = self.line
            while line:
                attachment = line.popleft()
                consumer = attachment.consumer
                if consumer.offer_floating(segment):
                    if consumer.credit.waiting:
                        line.append(attachment)
                    attachment.announce()
                    return
        assert isinstance(segment, Segment)
        segment.recycle()

    def _lend_exclusive(self, segment: FreeBuffer) -> bool:
        """Give it to the first that is short of an exclusive one; False if nobody is or none may be lent."""
        while self.short and self.short[0].consumer.state is ChannelState.CLOSED:
            self.short.popleft()
        if not self.short or not self._lends_exclusive:
            return False
        self.exclusive_held += 1
        self.short[0].add_exclusive(segment)
        return True

    def note_limits(self, channel: ConsumerChannel) -> None:
        """The channel is at a limit."""
        hit = self._limits_hit
        for limit in channel.credit.limits_hit() if self.credit else self._stages():
            if limit not in hit:
                hit.add(limit)
                self.on_limit(limit)

    def _stages(self) -> list[str]:
        """What a channel without credit is at that waits, by the names in
        :data:`~minishuffle.counters.TCP_LIMITS`: its connection is read no further from this turn on."""
        pool, stages = self.pool, ["channel"]
        if pool.in_use >= pool.size:
            stages.append("local_pool")
        if pool.in_use < pool.maximum:
            stages.append("global_pool")
        return [*stages, "reading"]

    def serve(self) -> None:
        """The pool may have segments again."""
        while (self.line and self._lends_floating) or (self.short and self._lends_exclusive):
            if (segment := self.pool.request()) is None:
                return
            self.release_floating(segment)

    def close(self) -> None:
        """Nobody waits any more; what is in use comes back later."""
        self.line.clear()
        self.short.clear()
        self.pool.destroy()
