"""A task waits for a segment: when it is woken, what it measures, and what cancels it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest

from minishuffle.errors import TaskCancelled
from minishuffle.exchange.segments import LocalPool, NetworkBufferPool, Segment
from minishuffle.worker.tasks.handoff import LoopInbox, TaskBell, TaskPaths

if TYPE_CHECKING:
    from conftest import Turns

SECONDS_MAX = 20.0
"""Bound of every wait here."""
ITEMS = 20_000

PathsOf = Callable[..., TaskPaths]


class WatchedBell(TaskBell):
    """Says when its task is about to wait."""

    __slots__ = ("waiting",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.waiting = threading.Event()

    def wait(self, seconds: float) -> None:
        self.waiting.set()
        super().wait(seconds)


class Asking(threading.Thread):
    """A task that asks for a segment; ``outcome`` is the segment, or what was raised."""

    def __init__(self, turns: Turns, paths: TaskPaths, pool: LocalPool) -> None:
        super().__init__(daemon=True)
        self.paths, self.pool = paths, pool
        self.paths.bell = self.bell = WatchedBell(cast(asyncio.AbstractEventLoop, turns))
        self.pool.on_available(self.bell.ring)
        self.outcome: Segment | TaskCancelled | None = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self.paths.acquire(self.pool)
        except TaskCancelled as cancelled:
            self.outcome = cancelled

    def until_waiting(self) -> None:
        assert self.bell.waiting.wait(SECONDS_MAX)

    def until_done(self) -> None:
        self.join(SECONDS_MAX)
        assert not self.is_alive()


def taken_pool() -> tuple[LocalPool, Segment]:
    pool = NetworkBufferPool(1, 256).create_pool("p", 1, 1)
    segment = pool.request()
    assert segment is not None
    return pool, segment


def test_a_free_segment_is_taken_without_a_wait(paths_of: PathsOf) -> None:
    paths = paths_of()
    pool = NetworkBufferPool(1, 256).create_pool("p", 1, 1)
    assert isinstance(paths.acquire(pool), Segment)
    assert (paths.clock.read().backpressured, paths.clock.blocks.count) == (0.0, 0)


def test_a_task_waits_until_a_segment_is_recycled_and_measures_it(
    turns: Turns, long_waits: None, paths_of: PathsOf
) -> None:
    """Cases 251 and 252, ResultPartitionTest."""
    pool, segment = taken_pool()
    paths = paths_of()
    clock = paths.clock
    asking = Asking(turns, paths, pool)
    asking.until_waiting()
    assert asking.outcome is None
    first, second = (clock.read().backpressured for _ in range(2))
    assert 0.0 < first < second, "the wait that goes on is told"
    assert clock.blocks.count == 0
    segment.recycle()
    turns.turn()
    asking.until_done()
    assert asking.outcome is segment
    assert clock.blocks.count == 1
    assert second < clock.blocks.total == clock.read().backpressured


def test_input_that_came_while_the_task_waited_for_a_segment_is_looked_at(
    turns: Turns, long_waits: None, paths_of: PathsOf
) -> None:
    pool, segment = taken_pool()
    paths = paths_of()
    asking = Asking(turns, paths, pool)
    asking.until_waiting()
    paths.bell.ring()  # a buffer came
    segment.recycle()
    turns.turn()
    asking.until_done()
    looking = threading.Thread(target=paths.wait, args=(10 * SECONDS_MAX,), daemon=True)
    looking.start()
    looking.join(SECONDS_MAX)
    assert not looking.is_alive()


def test_a_segment_that_comes_free_just_after_the_look_is_not_missed(
    turns: Turns, long_waits: None, paths_of: PathsOf
) -> None:
    """Case 271, RecordWriterTest."""
    pool, segment = taken_pool()

    class LateByOne:
        """Finds the pool empty twice; the segment comes back right after the second look."""

        looks = 0
        in_use = size = 1

        def on_available(self, listener: Callable[[], None]) -> None:
            pool.on_available(listener)

        def request(self) -> Segment | None:
            found = pool.request()
            self.looks += 1
            if self.looks == 2:
                segment.recycle()
                turns.turn()
            return found

    asking = Asking(turns, paths_of(), cast(LocalPool, LateByOne()))
    asking.until_done()
    assert asking.outcome is segment


def test_cancel_wakes_a_task_that_waits_for_a_segment(
    turns: Turns, long_waits: None, paths_of: PathsOf
) -> None:
    """Case 234, NetworkBufferPoolTest."""
    pool, _ = taken_pool()
    paths = paths_of()
    asking = Asking(turns, paths, pool)
    asking.until_waiting()
    paths.cancel()
    asking.until_done()
    assert isinstance(asking.outcome, TaskCancelled)
    assert pool.in_use == 1
    assert paths.clock.blocks.count == 1, "a wait that was cut short is one too"


def test_a_task_that_is_cancelled_when_a_segment_comes_free_gets_none(
    turns: Turns, long_waits: None, paths_of: PathsOf
) -> None:
    pool, segment = taken_pool()
    paths = paths_of()
    asking = Asking(turns, paths, pool)
    asking.until_waiting()
    paths.cancelled = True
    segment.recycle()
    paths.close()
    asking.until_done()
    assert isinstance(asking.outcome, TaskCancelled)
    assert pool.in_use == 0


def test_a_cancelled_task_gets_no_segment_and_no_wait(paths_of: PathsOf) -> None:
    paths = paths_of()
    pool = NetworkBufferPool(1, 256).create_pool("p", 1, 1)
    paths.cancel()
    with pytest.raises(TaskCancelled):
        paths.acquire(pool)
    with pytest.raises(TaskCancelled):
        paths.wait(SECONDS_MAX)
    with pytest.raises(TaskCancelled):
        paths.check()
    assert pool.in_use == 0


@pytest.mark.slow
def test_segments_go_round_between_a_task_and_the_loop(long_waits: None, busy_switching: None) -> None:
    """One segment, lent and recycled 20,000 times: the task is woken each time that it waits. Case 229,
    LocalBufferPoolTest."""

    async def scenario() -> tuple[NetworkBufferPool, LocalPool]:
        paths = TaskPaths(LoopInbox(asyncio.get_running_loop()))
        network = NetworkBufferPool(1, 256)
        pool = network.create_pool("p", 1, 1)
        pool.on_available(paths.bell.ring)
        done = asyncio.Event()

        def task() -> None:
            for _ in range(ITEMS):
                paths.post(paths.acquire(pool).recycle)
            paths.post(done.set)

        thread = threading.Thread(target=task, daemon=True)
        thread.start()
        await asyncio.wait_for(done.wait(), SECONDS_MAX)
        thread.join(SECONDS_MAX)
        return network, pool

    network, pool = asyncio.run(scenario())
    network.validate()
    assert (pool.in_use, network.free) == (0, 1)


def test_the_last_segment_of_an_output_is_a_limit(paths_of: PathsOf) -> None:
    hits: list[str] = []
    paths = paths_of()
    pool = NetworkBufferPool(2, 16).create_pool("p", 1, 2)
    paths.acquire(pool, hits.append)
    assert hits == []
    paths.acquire(pool, hits.append)
    assert hits == ["pool"]
