"""Ping into silence, and tell when even that stays unanswered."""

from __future__ import annotations

from typing import Final

from minishuffle.protocol.events import PeerSilent
from minishuffle.wire.frames import Ping

__all__ = ["KeepAlive"]

SILENT_AFTER_INTERVALS: Final = 3


class KeepAlive:
    """Any byte heard is a sign of life, not only a Pong.

    Args:
        interval: seconds of silence before a Ping; three times that, and the peer is called silent.
        now: the clock's reading, in seconds.
    """

    __slots__ = ("_heard_at", "_interval", "_pinged_at", "_token")

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._heard_at = now
        self._pinged_at: float | None = None
        self._token = 0

    def heard(self, now: float) -> None:
        self._heard_at = now
        self._pinged_at = None

    def next_deadline(self) -> float:
        if self._pinged_at is not None:
            return self._pinged_at + self._interval * SILENT_AFTER_INTERVALS
        return self._heard_at + self._interval

    def handle_timer(self, now: float) -> Ping | PeerSilent | None:
        """What is due: a Ping to send, an event to report, or nothing."""
        if now < self.next_deadline():
            return None
        waited, self._pinged_at = self._pinged_at is not None, now
        if waited:
            return PeerSilent(now - self._heard_at)
        self._token += 1
        return Ping(self._token)
