"""How far the event time of several channels has come together.

Times are microseconds since 1970. (Flink: ``StatusWatermarkValve``.)
"""

from __future__ import annotations

from typing import Final

__all__ = ["BEGINNING_OF_TIME", "END_OF_TIME", "WatermarkValve"]

BEGINNING_OF_TIME: Final = -(1 << 63)
"""The watermark of a channel that has not told one yet."""
END_OF_TIME: Final = (1 << 63) - 1
"""The watermark of a channel that has ended: nothing waits for it any more."""


class WatermarkValve:
    """The least watermark of all channels that are neither idle nor ended.

    Invariants: ``watermark`` never goes back; while a channel is active, ``watermark`` is at most the
    greatest it has told, or what it was before. When every channel is idle or has ended, and not all have
    ended, it holds and ``idle`` is true; when all have ended it is ``END_OF_TIME``.
    """

    def __init__(self) -> None:
        self.watermark = BEGINNING_OF_TIME
        self.idle = False
        self._added = 0
        self._times: dict[int, int] = {}
        """Of channels that have not ended."""
        self._idle: set[int] = set()

    def add(self) -> int:
        """A further channel; returns its number."""
        number, self._added = self._added, self._added + 1
        self._times[number] = BEGINNING_OF_TIME
        return number

    def update(self, channel: int, time: int, idle: bool) -> bool:
        """The channel has told its status; True if watermark or idleness of all changed by it.

        A time before one that the channel told is taken as the later one. A time that comes together with
        idleness was reached before it.
        """
        if time == END_OF_TIME or channel not in self._times:
            return self.end(channel)
        changed = False
        if time > self._times[channel]:
            self._times[channel] = time
            self._idle.discard(channel)
            changed = self._combine()
        if idle:
            self._idle.add(channel)
        else:
            self._idle.discard(channel)
        return self._combine() or changed

    def end(self, channel: int) -> bool:
        """The channel tells nothing more; idempotent."""
        if self._times.pop(channel, None) is None:
            return False
        self._idle.discard(channel)
        return self._combine()

    def _combine(self) -> bool:
        before = (self.watermark, self.idle)
        counting = [time for channel, time in self._times.items() if channel not in self._idle]
        self.idle = bool(self._times) and not counting
        if not self._times:
            self.watermark = END_OF_TIME
        elif counting:
            self.watermark = max(self.watermark, min(counting))
        return (self.watermark, self.idle) != before
