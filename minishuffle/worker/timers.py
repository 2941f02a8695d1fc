"""A worker's repeated calls on its loop, which also tell how late the loop is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from minishuffle.counters import Histogram

__all__ = ["Timers"]


class _Handle(Protocol):
    def cancel(self) -> None: ...


class _Loop(Protocol):
    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> _Handle: ...


class Timers:
    """Calls by name. ``lag`` observes how late each comes, in seconds."""

    def __init__(self, loop: _Loop, lag: Histogram) -> None:
        self._loop = loop
        self._lag = lag
        self._due: dict[str, tuple[float, _Handle]] = {}

    def every(self, name: str, seconds: float | None, call: Callable[[], None]) -> None:
        """Run ``call`` every ``seconds``; None: no more.

        A new interval of a running timer counts from the next call, which never comes later than it was
        due: calls come however often the interval is set.
        """
        due, handle = self._due.pop(name, (None, None))
        if handle is not None:
            handle.cancel()
        if seconds is not None:
            in_time = self._loop.time() + seconds
            self._at(name, in_time if due is None else min(due, in_time), seconds, call)

    def _at(self, name: str, due: float, seconds: float, call: Callable[[], None]) -> None:
        def fire() -> None:
            now = self._loop.time()
            self._lag.observe(max(0.0, now - due))
            self._at(name, now + seconds, seconds, call)
            call()

        self._due[name] = due, self._loop.call_at(due, fire)

    def cancel(self) -> None:
        """End them all."""
        for _, handle in self._due.values():
            handle.cancel()
        self._due.clear()
