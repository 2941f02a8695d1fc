from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from minishuffle.transport.admission import (
    REFUSAL_LINES,
    REFUSAL_SECONDS,
    RefusalLog,
    UnprovenConnections,
)


class Clock:
    """A clock that calls what is due when it is moved on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self._calls.append((when, call))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [call for when, call in self._calls if when <= self.now]
        self._calls = [(when, call) for when, call in self._calls if when > self.now]
        for call in due:
            call()


def test_the_oldest_connection_makes_room() -> None:
    unproven = UnprovenConnections[str](2, greeted=lambda name: False)
    assert [unproven.add(name) for name in "abc"] == [None, None, "a"]
    assert list(unproven) == ["b", "c"]
    unproven.remove("b")
    unproven.remove("a")
    assert unproven.add("d") is None
    assert unproven.add("e") == "c"
    assert unproven.eviction() == "it made room for a newer connection: 2 wait for their handshake at most"


def test_one_that_has_sent_a_hello_makes_room_last() -> None:
    unproven = UnprovenConnections[str](3, greeted=str.isupper)
    assert [unproven.add(name) for name in "AbCdEF"] == [None, None, None, "b", "d", "A"]
    assert list(unproven) == ["C", "E", "F"]


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 9))))
def test_no_more_than_the_limit_wait_whatever_comes_and_goes(
    limit: int, steps: list[tuple[bool, int]]
) -> None:
    unproven = UnprovenConnections[tuple[int, int]](limit, greeted=lambda connection: False)
    model: list[tuple[int, int]] = []
    for number, (comes, which) in enumerate(steps):
        if comes:
            evicted = unproven.add((number, which))
            assert evicted == (model.pop(0) if len(model) == limit else None)
            model.append((number, which))
        elif model:
            unproven.remove(model.pop(which % len(model)))
        assert list(unproven) == model and len(unproven) == len(model) <= limit


def test_refusals_are_counted_by_reason_and_the_first_few_logged() -> None:
    lines: list[str] = []
    log = RefusalLog(lines.append, Clock().call_at)
    for number in range(26_000):
        log.refused("limit" if number % 2 else "secret", "why", f"host:{number}", number / 10_000)
    assert log.counts == {"secret": 13_000, "limit": 13_000}
    assert len(lines) == REFUSAL_LINES
    assert lines[0] == "connection from host:0 refused (secret): why"


def test_the_others_are_summed_up_once_an_interval_also_when_no_more_come() -> None:
    lines: list[str] = []
    clock = Clock()
    log = RefusalLog(lines.append, clock.call_at)

    def refuse(count: int) -> None:
        for _ in range(count):
            log.refused("timeout", "why", "host:1", clock.now)

    refuse(REFUSAL_LINES + 1_000)
    clock.advance(REFUSAL_SECONDS)
    assert lines[REFUSAL_LINES:] == ["1,000 more connections refused in 60 s (timeout 1,000)"]
    refuse(7)
    clock.advance(REFUSAL_SECONDS)
    assert lines[REFUSAL_LINES + 1 :] == ["7 more connections refused in 60 s (timeout 7)"]
    clock.advance(REFUSAL_SECONDS)
    assert len(lines) == REFUSAL_LINES + 2, "nothing to say"
    refuse(1)
    assert lines[-1] == "connection from host:1 refused (timeout): why", "after a quiet interval"


def test_few_refusals_in_each_interval_are_all_logged() -> None:
    lines: list[str] = []
    clock = Clock()
    log = RefusalLog(lines.append, clock.call_at)
    for number in range(20):
        log.refused("peer", "why", f"host:{number}", clock.now)
        clock.advance(REFUSAL_SECONDS / 3)
    assert len(lines) == 20
