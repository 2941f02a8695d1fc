"""Repeated calls, on a loop whose time the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from minishuffle.counters import LAG_SECONDS_BOUNDS, Histogram
from minishuffle.worker.timers import Alarm, Timers


class Handle:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when, self.callback, self.cancelled = when, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """``late``: how long after its time a call comes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.late = 0.0
        self.handles: list[Handle] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None], /) -> Handle:
        self.handles.append(Handle(when, callback))
        return self.handles[-1]

    def run_until(self, end: float) -> None:
        while True:
            self.handles = [handle for handle in self.handles if not handle.cancelled]
            first = min(self.handles, key=lambda handle: handle.when, default=None)
            if first is None or first.when + self.late > end:
                self.now = end
                return
            self.handles.remove(first)
            self.now = first.when + self.late
            first.callback()


class Stand:
    def __init__(self) -> None:
        self.loop = Loop()
        self.lag = Histogram(LAG_SECONDS_BOUNDS)
        self.timers = Timers(self.loop, self.lag)
        self.called: list[float] = []

    def every(self, seconds: float | None, name: str = "flush") -> None:
        self.timers.every(name, seconds, lambda: self.called.append(self.loop.now - 100.0))


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_calls_repeat_until_they_are_cancelled(stand: Stand) -> None:
    stand.every(2.0)
    stand.every(5.0, "other")
    stand.loop.run_until(106.0)
    assert stand.called == [2.0, 4.0, 5.0, 6.0]
    stand.every(None)
    stand.loop.run_until(111.0)
    assert stand.called == [2.0, 4.0, 5.0, 6.0, 10.0]
    stand.timers.cancel()
    stand.loop.run_until(200.0)
    assert len(stand.called) == 5


def test_calls_come_in_time_however_often_they_are_asked_for(stand: Stand) -> None:
    for tenth in range(61):
        stand.loop.run_until(100.0 + tenth / 10)
        stand.every(2.0 if tenth % 2 else 3.0)
    assert stand.called == [2.0, 4.0, 5.0, 6.0]


def test_a_shorter_interval_holds_at_once_and_a_longer_one_after_the_next_call(stand: Stand) -> None:
    stand.every(10.0)
    stand.loop.run_until(101.0)
    stand.every(2.0)
    stand.loop.run_until(104.0)
    stand.every(10.0)
    stand.loop.run_until(120.0)
    assert stand.called == [2.0, 4.0, 6.0, 10.0, 20.0]


def test_all_calls_of_one_interval_come_together(stand: Stand) -> None:
    for begin, name in ((100.1, "one"), (100.5, "other"), (101.7, "third")):
        stand.loop.run_until(begin)
        stand.every(1.0, name)
    stand.loop.run_until(104.0)
    assert stand.called == [1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0]


def test_the_lag_is_how_late_calls_come(stand: Stand) -> None:
    stand.every(2.0)
    stand.loop.late = 0.5
    stand.loop.run_until(105.5)
    assert stand.called == [2.5, 4.5]
    assert (stand.lag.count, stand.lag.total) == (2, 1.0)


def test_the_latest_call_is_that_since_it_was_asked_for_last(stand: Stand) -> None:
    assert stand.timers.take_latest() == 0.0
    stand.every(2.0)
    for late in (0.25, 0.5, 0.125):
        stand.loop.late = late
        stand.loop.run_until(stand.loop.now + 2.5)
    assert stand.timers.take_latest() == 0.5
    assert stand.timers.take_latest() == 0.0


# --- the next deadline -----------------------------------------------------------------------------


def test_an_alarm_comes_at_the_earliest_deadline_and_once() -> None:
    loop, calls = Loop(), []
    alarm = Alarm(loop, lambda: calls.append(loop.now))
    for deadline in (105.0, 103.0, None, 104.0):
        alarm.set(deadline)
    loop.run_until(110.0)
    assert calls == [103.0]
    alarm.set(112.0)
    alarm.cancel()
    loop.run_until(120.0)
    assert calls == [103.0]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_deadline_that_is_past_may_be_set_again(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The handle of uvloop does not say when it is due then."""

    async def set_twice() -> list[str]:
        loop, calls = asyncio.get_running_loop(), list[str]()
        alarm = Alarm(loop, lambda: calls.append("called"))
        for early in (0.0, 1.0, 2.0):
            alarm.set(loop.time() - early)
        await asyncio.sleep(0.01)
        return calls

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(set_twice()) == ["called"]
