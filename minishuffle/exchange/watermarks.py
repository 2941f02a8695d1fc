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
        self._times: list[int] = []
        self._held: list[bool] = []
        """Whether the channel counts: it is not idle."""

    def add(self) -> int:
        """A further channel; returns its number."""
        self._times.append(BEGINNING_OF_TIME)
        self._held.append(True)
        return len(self._times) - 1

    def update(self, channel: int, time: int, idle: bool) -> bool:
        """The channel has told its status; True if watermark or idleness of all changed by it.

        A time before one that the channel told is taken as the later one. A time that comes together with
        idleness was reached before it.
        """
        changed = False
        if time > self._times[channel]:
            self._times[channel] = time
            self._held[channel] = True
            changed = self._combine()
        self._held[channel] = not idle
        return self._combine() or changed

    def end(self, channel: int) -> bool:
        return self.update(channel, END_OF_TIME, False)

    def active(self, channel: int) -> bool:
        """Data came: an idle channel counts again."""
        if self._held[channel]:
            return False
        self._held[channel] = True
        return self._combine()

    def _combine(self) -> bool:
        before = (self.watermark, self.idle)
        counting = [
            time for time, held in zip(self._times, self._held, strict=True) if held and time != END_OF_TIME
        ]
        if counting:
            self.idle = False
            self.watermark = max(self.watermark, min(counting))
        elif all(time == END_OF_TIME for time in self._times):
            self.idle = False
            self.watermark = END_OF_TIME
        else:
            self.idle = True
        return (self.watermark, self.idle) != before
