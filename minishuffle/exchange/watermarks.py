"""How far the event time of several channels has come together.

Times are microseconds since 1970. (Flink: ``StatusWatermarkValve``, ``HeapPriorityQueue``.)
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = ["BEGINNING_OF_TIME", "END_OF_TIME", "WatermarkValve"]

BEGINNING_OF_TIME: Final = -(1 << 63)
"""The watermark of a channel that has not sent one yet."""
END_OF_TIME: Final = (1 << 63) - 1
"""The watermark of a channel that has ended: nothing waits for it any more."""


class _Status(IntEnum):
    """Only active channels count for the least watermark. One that lags has a new producer, which has yet to
    come as far as the rest."""

    ACTIVE = 0
    IDLE = 1
    LAGGING = 2
    SUSPENDED = 3
    ENDED = 4


class WatermarkValve:
    """The least watermark of all channels that are active: neither idle, lagging, suspended nor ended.

    Invariants: ``watermark`` never goes back; while a channel is active, ``watermark`` is at most the
    greatest that it sent, or what it was before. While no channel is active and not all have ended, it
    holds, and ``idle`` is true unless a lagging or a suspended channel is among them; when all have ended it
    is ``END_OF_TIME``. Each step costs O(log channels).
    """

    def __init__(self) -> None:
        self.watermark = BEGINNING_OF_TIME
        self.greatest = BEGINNING_OF_TIME
        """The greatest time that any channel sent: what all have reached once all have ended."""
        self.idle = False
        self._times: list[int] = []
        self._statuses: list[_Status] = []
        self._lags: list[bool] = []
        """Whether each channel has a new producer that has not come as far as ``watermark`` yet."""
        self._counts = [0] * len(_Status)
        """Channels by status."""
        self._leaves = 1
        self._least = [END_OF_TIME, END_OF_TIME]
        """A binary tree in an array, node n above 2n and 2n + 1: the time of each active channel in the
        leaves, and the least one below each node. END_OF_TIME stands for a channel that does not count."""

    def add(self) -> int:
        """A further channel, which is active; returns its number."""
        number = len(self._times)
        self._times.append(BEGINNING_OF_TIME)
        self._statuses.append(_Status.ACTIVE)
        self._lags.append(False)
        self._counts[_Status.ACTIVE] += 1
        if number == self._leaves:
            self._grow()
        self._set_leaf(number, BEGINNING_OF_TIME)
        return number

    def update(self, channel: int, time: int, idle: bool) -> bool:
        """The channel has sent its status; True if watermark or idleness of all changed by it.

        A time before one that the channel sent is taken as the later one. A time that comes together with
        idleness was reached before it. A channel that is suspended or has ended sends nothing.
        """
        if time == END_OF_TIME:
            return self.end(channel)
        if self._statuses[channel] >= _Status.SUSPENDED:
            return False
        watermark, was_idle = self.watermark, self.idle
        if time > self._times[channel]:
            self._times[channel] = time
            self.greatest = max(self.greatest, time)
            self._lags[channel] = self._lags[channel] and time < watermark
            self._move(channel, self._counting(channel))
        status = _Status.IDLE if idle else self._counting(channel)
        if status is not self._statuses[channel]:
            self._move(channel, status)
        return self.watermark != watermark or self.idle is not was_idle

    def time_of(self, channel: int) -> int:
        """The greatest time that the producer of that channel has sent."""
        return self._times[channel]

    def lags(self, channel: int) -> bool:
        """Whether the channel has a new producer that has yet to come as far as the rest."""
        return self._lags[channel]

    def _counting(self, channel: int) -> _Status:
        """The status of a channel that is not idle."""
        return _Status.LAGGING if self._lags[channel] else _Status.ACTIVE

    def end(self, channel: int) -> bool:
        """The channel sends nothing more; idempotent."""
        return self._move(channel, _Status.ENDED)

    def suspend(self, channel: int) -> bool:
        """The channel has no producer for now: it is left out, even if it had ended, until it rejoins."""
        return self._move(channel, _Status.SUSPENDED)

    def rejoin(self, channel: int) -> bool:
        """A suspended channel, or one that had ended, has a producer again: it counts once that has come as
        far as the rest, so that a source that starts again holds nothing back."""
        self._times[channel] = BEGINNING_OF_TIME
        self._lags[channel] = self.watermark > BEGINNING_OF_TIME
        return self._move(channel, self._counting(channel))

    def _move(self, channel: int, status: _Status) -> bool:
        """Give the channel that status, and look at all of them anew."""
        self._counts[self._statuses[channel]] -= 1
        self._counts[status] += 1
        self._statuses[channel] = status
        self._set_leaf(channel, self._times[channel] if status is _Status.ACTIVE else END_OF_TIME)
        watermark, idle, counts = self.watermark, self.idle, self._counts
        if counts[_Status.ACTIVE]:
            self.idle = False
            self.watermark = max(self.watermark, self._least[1])
        elif counts[_Status.ENDED] < len(self._times):
            self.idle = counts[_Status.LAGGING] == counts[_Status.SUSPENDED] == 0
        else:
            self.idle = False
            self.watermark = END_OF_TIME
        return self.watermark != watermark or self.idle is not idle

    def _set_leaf(self, channel: int, time: int) -> None:
        least, node = self._least, self._leaves + channel
        least[node] = time
        while node > 1:
            other = least[node ^ 1]
            if other < time:
                time = other
            node >>= 1
            if least[node] == time:
                return
            least[node] = time

    def _grow(self) -> None:
        leaves = self._least[self._leaves :]
        self._leaves *= 2
        below = leaves + [END_OF_TIME] * len(leaves)
        tree = below
        while len(below) > 1:
            below = [min(below[at], below[at + 1]) for at in range(0, len(below), 2)]
            tree = below + tree
        self._least = [END_OF_TIME, *tree]
