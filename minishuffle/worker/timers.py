"""A worker's calls at times: repeated ones, which also tell how late the loop is, and its next deadline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from minishuffle.counters import Histogram

__all__ = ["Alarm", "Timers"]


class _Handle(Protocol):
    def cancel(self) -> None: ...


class _Loop(Protocol):
    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> _Handle: ...


class Alarm:
    """A call at the next deadline of a state machine; an early call is harmless.

    It keeps the time itself: for a time in the past, uvloop's handle has no ``when``.
    """

    def __init__(self, loop: _Loop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._set: tuple[float, _Handle] | None = None

    def set(self, deadline: float | None) -> None:
        """Call then, unless a call before that is set already; None: nothing is due."""
        if deadline is None or (self._set is not None and self._set[0] <= deadline):
            return
        self.cancel()
        self._set = deadline, self._loop.call_at(deadline, self._fire)

    def _fire(self) -> None:
        self._set = None
        self._call()

    def cancel(self) -> None:
        if self._set is not None:
            self._set[1].cancel()
        self._set = None


class Timers:
    """Calls by name, each when the loop's clock comes to a multiple of its interval: what is due at one time
    wakes the process once, and all workers of a machine report together. ``lag`` observes how late each
    comes, in seconds."""

    def __init__(self, loop: _Loop, lag: Histogram) -> None:
        self._loop = loop
        self._lag = lag
        self._due: dict[str, tuple[float, _Handle]] = {}
        self._latest = 0.0

    def take_latest(self) -> float:
        """How late the latest call was since this was asked for last, in seconds."""
        latest, self._latest = self._latest, 0.0
        return latest

    def every(self, name: str, seconds: float | None, call: Callable[[], None]) -> None:
        """Run ``call`` every ``seconds``; None: no more.

        A new interval of a running timer counts from the next call, which never comes later than it was
        due: calls come however often the interval is set.
        """
        due, handle = self._due.pop(name, (None, None))
        if handle is not None:
            handle.cancel()
        if seconds is not None:
            in_time = _next_multiple(self._loop.time(), seconds)
            self._at(name, in_time if due is None else min(due, in_time), seconds, call)

    def _at(self, name: str, due: float, seconds: float, call: Callable[[], None]) -> None:
        def fire() -> None:
            now = self._loop.time()
            self._lag.observe(max(0.0, now - due))
            self._latest = max(self._latest, now - due)
            self._at(name, _next_multiple(now, seconds), seconds, call)
            call()

        self._due[name] = due, self._loop.call_at(due, fire)

    def cancel(self) -> None:
        """End them all."""
        for _, handle in self._due.values():
            handle.cancel()
        self._due.clear()


def _next_multiple(now: float, seconds: float) -> float:
    """The next multiple of an interval; a loop that counts in milliseconds may call a little early."""
    return math.ceil(now / seconds + 0.1) * seconds
