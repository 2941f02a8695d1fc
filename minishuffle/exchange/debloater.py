"""Buffer debloating: how much producers put into a buffer, so that what is in flight to a gate is consumed
in a given time.

The number of buffers between a producer and a slow consumer is fixed, and all of them are full. A *debloater*
measures how fast its gate consumes, and says how many bytes are to be in each buffer; the gate announces that
to its producers (NewBufferSize), which fill the buffers that they begin from then on so far and no further.
(Flink: FLIP-183, ``BufferDebloater``, ``ThroughputCalculator``.)

Where this differs from Flink:

* the rate is smoothed, over ``SMOOTHING_SECONDS`` of activity, and not the size over 20 looks of 0.2 s: a
  consumer that becomes six times slower has the right size after a second and not after six;
* a look at which nothing was consumed changes nothing: a function that works for long on each batch consumes
  at the rate of its batches;
* a size is announced if it differs by 5 %, not by a quarter, from the one before;
* a buffer may be smaller than the first record in it: what is written here are batches, which span buffers
  anyway, and one of which may be larger than all that is to be in flight;
* a writer that finds no free buffer does not fill the one it has beyond its size (FLINK-33077): its thread
  has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import Final

from minishuffle.limits import DEBLOATED_BYTES_MIN, DEBLOATED_BYTES_START

__all__ = ["BufferDebloater", "ConsumptionMeter", "DEBLOAT_SECONDS", "starting_bytes"]

DEBLOAT_SECONDS: Final = 0.2
"""Between two looks at a gate."""
SMOOTHING_SECONDS: Final = 0.5
GROWTH_MAX: Final = 2.0
"""The size at most doubles from one look to the next: buffers that are few now may soon be many."""
CHANGE_MIN: Final = 0.05
"""A size that differs by less, in proportion, is not announced."""


def starting_bytes(segment_bytes: int) -> int:
    """What is put into each buffer before anything was consumed, at both ends of a channel."""
    return min(DEBLOATED_BYTES_START, segment_bytes)


class ConsumptionMeter:
    """How much a gate has consumed, and for how many seconds there was something to consume. The task writes,
    the loop reads.

    Args:
        clock: monotonic, in seconds.
    """

    __slots__ = ("_activity", "_clock", "bytes")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.bytes = 0
        """(Task.) Of all buffers that were taken."""
        self._activity: tuple[float, float | None] = (0.0, None)
        """Active seconds before, and since when it is active, in one: so they belong together."""

    def take(self, size: int) -> None:
        """(Task.) A buffer of so many bytes is about to be consumed."""
        self.bytes += size
        seconds, since = self._activity
        if since is None:
            self._activity = (seconds, self._clock())

    def idle(self) -> None:
        """(Task.) There is nothing to consume."""
        seconds, since = self._activity
        if since is not None:
            self._activity = (seconds + self._clock() - since, None)

    def seconds(self) -> float:
        """(Any thread.) How long it was active."""
        seconds, since = self._activity
        return seconds if since is None else seconds + max(0.0, self._clock() - since)


class BufferDebloater:
    """Says how many bytes the producers of one gate are to put into a buffer.

    Invariant: ``min(DEBLOATED_BYTES_MIN, segment_bytes) ≤ size ≤ segment_bytes``.

    Args:
        target: seconds in which what is in flight is to be consumed.
        segment_bytes: what a buffer has room for.
        clock: monotonic, in seconds.
    """

    def __init__(self, target: float, segment_bytes: int, clock: Callable[[], float]) -> None:
        self.meter = ConsumptionMeter(clock)
        self._target = target
        self.size = starting_bytes(segment_bytes)
        """As announced last, or as producers begin with."""
        self.seconds: float | None = None
        """In which what was in flight at the last look will be consumed; None: nothing was so far."""
        self._size_max = segment_bytes
        self._size_min = min(DEBLOATED_BYTES_MIN, segment_bytes)
        self._bytes, self._active = 0, 0.0
        """What the meter said at the last look at which something had been consumed."""
        self._recent_bytes = self._recent_seconds = 0.0
        """Sums that forget what is longer ago than SMOOTHING_SECONDS of activity: of bytes, and of these."""

    def look(self, buffers: int) -> int | None:
        """A look at the gate, a few times a second; gives the size to announce, or None if it stays.

        Args:
            buffers: with data that its producers have yet to send or its task has yet to read.
        """
        consumed, active = self.meter.bytes, self.meter.seconds()
        seconds, size = active - self._active, consumed - self._bytes
        if seconds > 0 and size:
            self._bytes, self._active = consumed, active
            kept = exp(-seconds / SMOOTHING_SECONDS)
            self._recent_bytes = kept * self._recent_bytes + size
            self._recent_seconds = kept * self._recent_seconds + seconds
        if not self._recent_seconds:
            return None
        buffers, rate = max(1, buffers), self._recent_bytes / self._recent_seconds
        wanted = min(rate * self._target / buffers, GROWTH_MAX * self.size)
        chosen = round(min(max(wanted, self._size_min), self._size_max))
        at_bound = chosen in (self._size_min, self._size_max)
        changed = chosen != self.size and (at_bound or abs(chosen - self.size) >= CHANGE_MIN * self.size)
        if changed:
            self.size = chosen
        self.seconds = buffers * self.size / rate
        return chosen if changed else None
