"""Network memory: a fixed number of segments, allocated once, lent to local pools.

The global pool (Flink's ``NetworkBufferPool``) is the hard cap of a worker. A *local pool* has a
minimum that is guaranteed and a maximum; what no minimum claims is divided anew whenever a pool comes
or goes. Surplus above a shrunken size comes back as its segments are recycled, and that may wait for the
very pool that is new: the surplus stands in queues for a consumer that restarts here. So the minimum does
not wait for it: what it lacks is added as *extra* segments, each of which is freed when it is recycled::

    in use < minimum  implies  that a request succeeds
    extra segments of a pool ≤ its minimum
    extra segments when one is added ≤ what others hold above their sizes

Threads: a writer's task thread may call :meth:`LocalPool.request` on its own pool; everything else
happens on the loop thread. Each counter has one writer, so no lock is needed.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable

from minishuffle.errors import LocalProtocolError, ResourceExhausted
from minishuffle.limits import SEGMENT_HEADROOM_BYTES

__all__ = ["LocalPool", "LooseSegment", "NetworkBufferPool", "Segment"]


class Segment:
    """One network buffer: ``SEGMENT_HEADROOM_BYTES`` of headroom, then the payload area."""

    __slots__ = ("extra", "index", "memory", "owner", "readers", "written_off")

    def __init__(self, index: int, memory: memoryview, *, extra: bool = False) -> None:
        self.index = index
        self.memory = memory
        self.extra = extra
        """It is no part of the network memory, and is freed once it is recycled."""
        self.owner: LocalPool | None = None
        """The pool that lent it; None while it is free."""
        self.readers = 1
        """How many have yet to recycle it; whoever requested it may say so before it shares it. (Flink: the
        reference count of ``NetworkBuffer``.)"""
        self.written_off = False

    def recycle(self) -> None:
        """(Loop.) One reader has done with it; the last one gives it back to the pool that lent it.

        Raises:
            LocalProtocolError: it is free already.
        """
        if self.readers > 1:
            self.readers -= 1
            return
        owner = self.owner
        if owner is None:
            raise LocalProtocolError(f"segment {self.index} was recycled twice")
        owner.recycle(self)

    def write_off(self) -> None:
        """Whoever holds it cannot be stopped: it will probably never come back."""
        if self.owner is not None:
            self.owner.write_off(self)


class LooseSegment(Segment):
    """Memory like a segment's that is in no pool: it is freed once nobody refers to it.

    Args:
        segment_bytes: of payload.
    """

    __slots__ = ()

    def __init__(self, segment_bytes: int) -> None:
        super().__init__(-1, memoryview(bytearray(SEGMENT_HEADROOM_BYTES + segment_bytes)))

    def recycle(self) -> None:
        """There is nobody to give it back to."""


class NetworkBufferPool:
    """All segments of a worker.

    Invariants: ``free + Σ in_use = total + extra``; ``Σ minimum ≤ total - written off``; ``Σ size ≤ total``;
    ``minimum ≤ size ≤ maximum`` for each local pool.

    Args:
        segments: how many there are.
        segment_bytes: payload bytes of each.

    Raises:
        ResourceExhausted: the system does not give that much memory.
    """

    def __init__(self, segments: int, segment_bytes: int) -> None:
        stride = SEGMENT_HEADROOM_BYTES + segment_bytes
        self.total = segments
        self.segment_bytes = segment_bytes
        size = max(1, segments * stride)
        try:
            self._memory = mmap.mmap(-1, size)
        except (OSError, OverflowError) as error:
            raise ResourceExhausted(
                f"cannot allocate {size} bytes of network memory ({error}): lower network_memory_bytes"
            ) from error
        view = memoryview(self._memory)
        self._free = deque(Segment(i, view[i * stride : (i + 1) * stride]) for i in range(segments))
        self._extra: set[Segment] = set()
        """Those that are in use. Any thread adds one, each at once."""
        self._pools: list[LocalPool] = []
        self._starving: deque[LocalPool] = deque()
        """Pools that found nothing free, longest wait first; each at most once (``LocalPool.starving``)."""
        self.peak_used = 0
        self.written_off = 0
        """Segments that abandoned threads may still write to: no pool is promised them."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def extra(self) -> int:
        """Segments in use beside the network memory: see :meth:`lend`."""
        return len(self._extra)

    def starving(self) -> list[str]:
        """(Any thread.) Names of the pools that wait for a segment of any other, the longest wait first."""
        return [pool.name for pool in list(self._starving)]

    @property
    def required(self) -> int:
        """Segments that minimums claim."""
        return sum(pool.minimum for pool in self._pools)

    def create_pool(self, name: str, minimum: int, maximum: int) -> LocalPool:
        """A new local pool; the others shrink if need be.

        Raises:
            ResourceExhausted: the minimums would exceed the total; the text has the arithmetic.
        """
        if not 0 < minimum <= maximum:
            raise LocalProtocolError(f"pool {name}: needs 0 < minimum {minimum} ≤ maximum {maximum}")
        required, lost = self.required, self.written_off
        if required + minimum > self.total - lost:
            written_off = f" and {lost} were written off with abandoned tasks" if lost else ""
            raise ResourceExhausted(
                f"insufficient number of network buffers for {name}: needs {minimum}, but {required} of "
                f"{self.total} are required by other tasks{written_off}; raise network_memory_bytes or lower "
                "the parallelism" + (", or restart the worker" if lost else "")
            )
        pool = LocalPool(self, name, minimum, maximum)
        self._pools.append(pool)
        self._redistribute()
        return pool

    def destroy_pool(self, pool: LocalPool) -> None:
        """Forget a pool; its segments in use come back as they are recycled. Idempotent."""
        if pool in self._pools:
            self._pools.remove(pool)
            self._redistribute()

    def _redistribute(self) -> None:
        """Divide what no minimum claims in proportion to what each pool could still take."""
        spare = self.total - self.written_off - self.required
        growable = [pool for pool in self._pools if pool.maximum > pool.minimum]
        caps = [min(spare, pool.maximum - pool.minimum) for pool in growable]
        total_cap = sum(caps)
        to_share = min(spare, total_cap)
        given = cumulative = 0
        for pool, cap in zip(growable, caps, strict=True):
            cumulative += cap
            share = to_share * cumulative // total_cap - given if total_cap else 0
            given += share
            pool.resize(pool.minimum + share)

    def lend(self, pool: LocalPool) -> Segment | None:
        """One free segment for ``pool``, or None; the pool is notified when one comes back.

        Within its minimum a pool gets an extra one if nothing is free: others hold more than their share.
        """
        try:
            segment = self._free.pop()  # which came back last: a cache may have it
        except IndexError:
            if pool.in_use < pool.minimum:
                return self._lend_extra(pool)
            if not pool.starving:
                pool.starving = True
                self._starving.append(pool)
            if not self._free:
                return None
            # One came back between the look and the note: the note must not be the last word.
            return self.lend(pool)
        segment.owner = pool
        used = self.total - len(self._free)
        if used > self.peak_used:
            self.peak_used = used
        return segment

    def _lend_extra(self, pool: LocalPool) -> Segment:
        memory = memoryview(bytearray(SEGMENT_HEADROOM_BYTES + self.segment_bytes))
        segment = Segment(self.total, memory, extra=True)
        segment.owner = pool
        self._extra.add(segment)
        return segment

    def take_back(self, segment: Segment) -> None:
        segment.owner = None
        if segment.extra:
            self._extra.remove(segment)
            return
        if segment.written_off:
            segment.written_off = False
            self.written_off -= 1
        self._free.append(segment)
        if self._starving:
            # Only those that starve now: one that is notified and gets none again is back in line at once.
            for pool in [self._starving.popleft() for _ in range(len(self._starving))]:
                pool.starving = False  # before the notice: a look that fails from now on is noted anew
                pool.notify()

    def validate(self) -> None:
        assert self.required <= self.total - self.written_off
        assert sum(pool.size for pool in self._pools) <= self.total
        assert all(pool.minimum <= pool.size <= pool.maximum for pool in self._pools)
        assert 0 <= len(self._free) <= self.total
        assert len({segment.index for segment in self._free}) == len(self._free)
        assert all(segment.owner is None and not segment.extra for segment in self._free)


class LocalPool:
    """A share of the global pool for one gate or one result partition.

    Invariant: ``in_use ≤ size`` whenever a request succeeds (a shrink may leave more in use until
    they come back).
    """

    __slots__ = (
        "_global",
        "_listener",
        "_returned",
        "_taken",
        "maximum",
        "minimum",
        "name",
        "size",
        "starving",
    )

    def __init__(self, pool: NetworkBufferPool, name: str, minimum: int, maximum: int) -> None:
        self._global = pool
        self.name = name
        self.minimum = minimum
        self.maximum = maximum
        self.size = minimum
        self.starving = False
        """Noted as waiting for a notice; set by the requesting thread, cleared by the loop."""
        self._taken = 0
        """Written by the requesting thread only."""
        self._returned = 0
        """Written by the loop thread only."""
        self._listener: Callable[[], None] | None = None

    @property
    def in_use(self) -> int:
        return self._taken - self._returned

    @property
    def available(self) -> bool:
        """True if a request now would probably succeed."""
        in_use = self.in_use
        return in_use < self.size and (in_use < self.minimum or self._global.free > 0)

    def request(self) -> Segment | None:
        """One segment, always within the minimum; else None when the pool is used up or the global pool is
        empty."""
        if self._taken - self._returned >= self.size:
            return None
        segment = self._global.lend(self)
        if segment is not None:
            self._taken += 1
        return segment

    def recycle(self, segment: Segment) -> None:
        self._returned += 1
        self._global.take_back(segment)
        self.notify()

    def write_off(self, segment: Segment) -> None:
        if not segment.written_off and not segment.extra:
            segment.written_off = True
            self._global.written_off += 1

    def on_available(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` (on the loop) whenever a request may succeed again."""
        self._listener = listener

    def resize(self, size: int) -> None:
        grown = size > self.size
        self.size = size
        if grown:
            self.notify()

    def notify(self) -> None:
        if self._listener is not None:
            self._listener()

    def destroy(self) -> None:
        """Give the share up: it lends nothing more, and segments still in use come back later."""
        self._listener = None
        self.size = 0
        self._global.destroy_pool(self)
