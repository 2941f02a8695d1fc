"""Entries of a channel's queue that carry no data, and know of no attachment."""

from __future__ import annotations

from minishuffle.exchange.rownumbers import NO_VERSION
from minishuffle.wire.frames import LatencyMarker

__all__ = ["Attached", "Notice", "QueuedLatency", "QueuedWatermark"]


class Notice:
    """An entry of a channel's queue that carries no data."""

    __slots__ = ()


class QueuedWatermark(Notice):
    """A watermark of the producer. The loop lets a newer one take its place until the task takes it. ``row``
    is the number of the row behind the first of them."""

    __slots__ = ("_state", "_taken", "row")

    def __init__(self, time: int, idle: bool, row: int = 0) -> None:
        self.row = row
        self._state = (time, idle)
        self._taken = False

    def overtake(self, time: int, idle: bool) -> bool:
        """(Loop.) Say something newer instead; False if the task may have taken it before."""
        self._state = (time, idle)  # one store, before the look: the task sees all of it or none
        return not self._taken

    def take(self) -> tuple[int, bool]:
        """(Task.) Time and idleness."""
        self._taken = True  # before the look at what it says: see overtake
        return self._state


class QueuedLatency(Notice):
    """A latency marker of the producer. The loop queues no other until the task has taken it; the first one
    of a channel follows one that never was."""

    __slots__ = ("marker", "taken")

    def __init__(self, marker: LatencyMarker | None = None) -> None:
        self.marker = marker
        self.taken = marker is None
        """Set by the task."""


class Attached(Notice):
    """What follows comes from a new attachment, is of ``version``, and begins with an element."""

    __slots__ = ("version",)

    def __init__(self, version: int = NO_VERSION) -> None:
        self.version = version
