"""Whole jobs in one thread: who reads what first, what time it is, and that all is closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.connectors.pushed import PushedSource
from minishuffle.plan.detached import DetachedPlan, detached
from minishuffle.runtime.onethread import OneThread

SECOND = 1_000_000


class Opened:
    """A function that says when it is opened and closed, and may raise then."""

    def __init__(self, name: str, seen: list[str], raises: str = "") -> None:
        self.name, self.seen, self.raises = name, seen, raises

    def open(self, context: Any) -> None:
        self._say("open")

    def __call__(self, row: Any) -> Any:
        return row

    def close(self) -> None:
        self._say("close")

    def _say(self, what: str) -> None:
        self.seen.append(f"{what} {self.name}")
        if what == self.raises:
            raise OSError(f"{self.name} does not {what}")


class Stuck:
    """What a source reads with that cannot be closed."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> list[Any]:
        return [0]

    def close(self) -> None:
        raise OSError("it cannot be closed")


def started(stream: Stream[Any]) -> tuple[DetachedPlan[PushedSource], OneThread]:
    plan = detached(stream)
    return plan, OneThread(plan.programs, plan.edges, job="j", now=lambda: 0.0, wall=lambda: 0.0)


def test_the_small_side_of_a_join_is_read_first() -> None:
    big, small = Stream.items([0]).name("big"), Stream.items([0]).name("small")
    plan, run = started(big.broadcast_join(small, on="k"))
    sources = {source.name: source for source in plan.sources}
    sources["big"].push([{"k": 1, "a": 1}])
    run.drain()
    sources["small"].push([{"k": 1, "b": 2}])
    sources["big"].end()
    run.drain()
    assert (plan.ends["collect"].sink.take(), run.ended) == ([], False)
    sources["small"].end()
    run.drain()
    assert (plan.ends["collect"].sink.take(), run.ended) == ([[{"k": 1, "a": 1, "b": 2}]], True)


def test_watermarks_cross_hand_overs_behind_the_rows() -> None:
    timed = Stream.items([0]).event_time(lambda row: row[1] * SECOND).rebalance()
    windows = timed.key_by(lambda row: row[0]).window(timedelta(seconds=10))
    plan, run = started(windows.count().rebalance().map(lambda row: row[2]))
    (source,), (end,) = plan.sources, plan.ends.values()
    source.push([("a", 1), ("a", 2), ("b", 9)])
    run.drain()
    assert end.sink.take() == []
    source.push([("b", 11)])
    run.drain()
    assert sorted(sum(end.sink.take(), [])) == [1, 2]
    run.advance(20 * SECOND - 2)
    assert end.sink.take() == []
    run.advance(20 * SECOND - 1)
    assert end.sink.take() == [[1]]
    assert (run.has_event_time, run.deadline()) == (True, None)
    run.close()


def test_what_was_opened_is_closed_whatever_happens() -> None:
    seen: list[str] = []
    stream = Stream.items([0]).map(Opened("a", seen)).rebalance().map(Opened("b", seen, "open"))
    with pytest.raises(OSError, match="b does not open"):
        started(stream)
    assert seen == ["open a", "open b", "close a"]
    seen.clear()
    stream = Stream.items([0]).map(Opened("a", seen, "close")).rebalance().map(Opened("b", seen, "close"))
    plan, run = started(stream)
    error = ValueError("first")
    run.close(error)
    assert seen == ["open a", "open b", "close a", "close b"]
    assert [note.partition("raised ")[2] for note in error.__notes__] == [
        "OSError: a does not close",
        "OSError: b does not close",
    ]
    run.close()
    assert len(seen) == 4
    for given in (None, error):
        seen.clear()
        plan = detached(Stream.items([0]).map(Opened("a", seen)))
        plan.sources[0].read = lambda split, offset: Stuck()  # type: ignore[method-assign]
        run = OneThread(plan.programs, plan.edges, job="j", now=lambda: 0.0, wall=lambda: 0.0)
        run.step()
        with nullcontext() if given is not None else pytest.raises(OSError, match="cannot be closed"):
            run.close(given)
        assert seen == ["open a", "close a"]
    assert error.__notes__[-1] == "and closing its source raised OSError: it cannot be closed"
