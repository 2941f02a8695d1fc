"""The paths between the loop and the task threads: order, wake-ups, waiting, and what closing them means."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from minishuffle.counters import TaskCounters
from minishuffle.errors import TaskCancelled
from minishuffle.exchange.partition import Subpartition
from minishuffle.exchange.segments import LocalPool, NetworkBufferPool, Segment
from minishuffle.worker import handoff
from minishuffle.worker.handoff import DRAIN_ITEMS_MAX, LoopInbox, TaskBell, TaskPaths

SECONDS_MAX = 20.0
"""Bound of every wait here."""
ITEMS = 20_000


class Turns:
    """An event loop's two calls, whose turns the test takes."""

    def __init__(self) -> None:
        self.wakes = 0
        self.scheduled: deque[Callable[[], None]] = deque()

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.wakes += 1
        self.scheduled.append(call)

    def call_soon(self, call: Callable[[], None]) -> None:
        self.scheduled.append(call)

    def turn(self) -> None:
        for _ in range(len(self.scheduled)):
            self.scheduled.popleft()()


class WatchedBell(TaskBell):
    """Says when its task is about to wait."""

    __slots__ = ("waiting",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.waiting = threading.Event()

    def wait(self, seconds: float) -> None:
        self.waiting.set()
        super().wait(seconds)


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def inbox(turns: Turns) -> LoopInbox:
    return LoopInbox(cast(asyncio.AbstractEventLoop, turns))


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait ends by itself before the test does: a wake-up that is lost is seen."""
    monkeypatch.setattr(handoff, "WAIT_SECONDS_MAX", 10 * SECONDS_MAX)


@pytest.fixture
def busy_switching() -> Iterator[None]:
    """Have the interpreter switch threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def paths_of(
    inbox: LoopInbox, attend: Callable[[Subpartition], None] = lambda subpartition: None
) -> TaskPaths:
    return TaskPaths(inbox, attend, TaskCounters())


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


# --- the inbox ------------------------------------------------------------------------------------------


def test_items_run_in_order_with_one_wake_up_per_drain(turns: Turns, inbox: LoopInbox) -> None:
    ran: list[int] = []
    for number in range(5):
        inbox.post(ran.append, number)
    assert (turns.wakes, ran) == (1, [])
    turns.turn()
    assert ran == [0, 1, 2, 3, 4]
    inbox.post(ran.append, 5)
    assert turns.wakes == 2
    turns.turn()
    assert ran == [0, 1, 2, 3, 4, 5]
    assert not turns.scheduled


def test_a_turn_is_bounded_and_the_rest_runs_in_the_next(turns: Turns, inbox: LoopInbox) -> None:
    ran: list[int] = []
    for number in range(DRAIN_ITEMS_MAX + 10):
        inbox.post(ran.append, number)
    turns.turn()
    assert len(ran) == DRAIN_ITEMS_MAX
    turns.turn()
    assert ran == list(range(DRAIN_ITEMS_MAX + 10))
    assert turns.wakes == 1


def test_what_an_item_posts_runs_in_a_later_turn(turns: Turns, inbox: LoopInbox) -> None:
    ran: list[str] = []

    def first() -> None:
        inbox.post(ran.append, "second")
        ran.append("first")

    inbox.post(first)
    turns.turn()
    assert ran == ["first"]
    turns.turn()
    assert ran == ["first", "second"]


def test_an_item_that_raises_does_not_hold_up_the_others(turns: Turns, inbox: LoopInbox) -> None:
    ran: list[str] = []

    def broken() -> None:
        raise ZeroDivisionError

    inbox.post(broken)
    inbox.post(ran.append, "behind")
    with pytest.raises(ZeroDivisionError):
        turns.turn()
    turns.turn()
    assert ran == ["behind"]


def test_nothing_that_is_posted_after_close_runs(turns: Turns, inbox: LoopInbox) -> None:
    ran: list[str] = []
    inbox.post(ran.append, "before")
    inbox.close()
    inbox.post(ran.append, "after")
    turns.turn()
    turns.turn()
    assert ran == ["before"]
    assert turns.wakes == 1


def test_four_threads_lose_nothing_and_keep_their_order(busy_switching: None) -> None:
    threads = 4
    each = ITEMS // threads

    async def scenario() -> list[list[int]]:
        inbox = LoopInbox(asyncio.get_running_loop())
        arrived: list[list[int]] = [[] for _ in range(threads)]
        everything = asyncio.Event()

        def take(thread: int, number: int) -> None:
            arrived[thread].append(number)
            if sum(map(len, arrived)) == threads * each:
                everything.set()

        def post_all(thread: int) -> None:
            for number in range(each):
                inbox.post(take, thread, number)

        workers = [threading.Thread(target=post_all, args=(i,), daemon=True) for i in range(threads)]
        for worker in workers:
            worker.start()
        await asyncio.wait_for(everything.wait(), SECONDS_MAX)
        for worker in workers:
            worker.join(SECONDS_MAX)
        return arrived

    assert asyncio.run(scenario()) == [list(range(each))] * threads


# --- the bell -------------------------------------------------------------------------------------------


def test_the_bell_rings_once_and_at_the_end_of_the_turn(turns: Turns, inbox: LoopInbox) -> None:
    bell = paths_of(inbox).bell
    for _ in range(3):
        bell.ring()
    assert not bell._event.is_set()
    assert len(turns.scheduled) == 1
    turns.turn()
    assert bell._event.is_set()
    bell.ring()
    assert not turns.scheduled, "nobody has looked since"
    bell.clear()
    bell.ring()
    turns.turn()
    assert bell._event.is_set()


def test_no_wake_up_is_lost(turns: Turns, inbox: LoopInbox, long_waits: None, busy_switching: None) -> None:
    """The loop's half enqueues and rings in bursts, and waits until the task has caught up with each."""
    rng = random.Random(7)
    paths = paths_of(inbox)
    queue: deque[int] = deque()
    taken: list[int] = []
    caught_up = threading.Semaphore(0)

    def task() -> None:
        while len(taken) < ITEMS:
            paths.bell.clear()
            idle = True
            while queue:
                idle = False
                taken.append(queue.popleft())
                if taken[-1] < 0:
                    caught_up.release()
            if idle:
                paths.wait(10 * SECONDS_MAX)

    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    sent = 0
    while sent < ITEMS:
        burst = min(rng.randint(1, 12), ITEMS - sent)
        for number in range(sent, sent + burst - 1):
            queue.append(number)
            paths.bell.ring()
            if rng.random() < 0.3:
                turns.turn()
        queue.append(-1)
        paths.bell.ring()
        turns.turn()
        sent += burst
        assert caught_up.acquire(timeout=SECONDS_MAX), f"the task sleeps on {len(queue)} items"
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()
    assert len(taken) == ITEMS


# --- waiting for a segment ------------------------------------------------------------------------------


def test_a_free_segment_is_taken_without_a_wait(inbox: LoopInbox) -> None:
    counters = TaskCounters()
    paths = TaskPaths(inbox, lambda subpartition: None, counters)
    pool = NetworkBufferPool(1, 256).create_pool("p", 1, 1)
    assert isinstance(paths.acquire(pool), Segment)
    assert (counters.backpressured_seconds, counters.backpressure_block.count) == (0.0, 0)


def test_a_task_waits_until_a_segment_is_recycled_and_measures_it(
    turns: Turns, inbox: LoopInbox, long_waits: None
) -> None:
    counters = TaskCounters()
    pool, segment = taken_pool()
    asking = Asking(turns, TaskPaths(inbox, lambda subpartition: None, counters), pool)
    asking.until_waiting()
    assert asking.outcome is None
    segment.recycle()
    turns.turn()
    asking.until_done()
    assert asking.outcome is segment
    assert counters.backpressured_seconds > 0.0
    assert counters.backpressure_block.count == 1
    assert counters.backpressure_block.total == counters.backpressured_seconds


def test_input_that_came_while_the_task_waited_for_a_segment_is_looked_at(
    turns: Turns, inbox: LoopInbox, long_waits: None
) -> None:
    pool, segment = taken_pool()
    paths = paths_of(inbox)
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
    turns: Turns, inbox: LoopInbox, long_waits: None
) -> None:
    pool, segment = taken_pool()

    class LateByOne:
        """Finds the pool empty twice; the segment comes back right after the second look."""

        looks = 0

        def on_available(self, listener: Callable[[], None]) -> None:
            pool.on_available(listener)

        def request(self) -> Segment | None:
            found = pool.request()
            self.looks += 1
            if self.looks == 2:
                segment.recycle()
                turns.turn()
            return found

    asking = Asking(turns, paths_of(inbox), cast(LocalPool, LateByOne()))
    asking.until_done()
    assert asking.outcome is segment


def test_cancel_wakes_a_task_that_waits_for_a_segment(
    turns: Turns, inbox: LoopInbox, long_waits: None
) -> None:
    pool, _ = taken_pool()
    paths = paths_of(inbox)
    asking = Asking(turns, paths, pool)
    asking.until_waiting()
    paths.cancel()
    asking.until_done()
    assert isinstance(asking.outcome, TaskCancelled)
    assert pool.in_use == 1


def test_a_cancelled_task_gets_no_segment_and_no_wait(inbox: LoopInbox) -> None:
    paths = paths_of(inbox)
    pool = NetworkBufferPool(1, 256).create_pool("p", 1, 1)
    paths.cancel()
    with pytest.raises(TaskCancelled):
        paths.acquire(pool)
    with pytest.raises(TaskCancelled):
        paths.wait(SECONDS_MAX)
    with pytest.raises(TaskCancelled):
        paths.check()
    assert pool.in_use == 0


def test_segments_go_round_between_a_task_and_the_loop(long_waits: None, busy_switching: None) -> None:
    """One segment, lent and recycled 20,000 times: the task is woken each time that it waits."""

    async def scenario() -> tuple[NetworkBufferPool, LocalPool]:
        paths = TaskPaths(LoopInbox(asyncio.get_running_loop()), lambda subpartition: None, TaskCounters())
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


# --- notices and the end --------------------------------------------------------------------------------


def test_a_subpartition_is_notified_of_once_until_it_was_attended_to(turns: Turns, inbox: LoopInbox) -> None:
    attended: list[Subpartition] = []

    def attend(subpartition: Subpartition) -> None:
        subpartition.notified = False
        attended.append(subpartition)

    paths = paths_of(inbox, attend)
    first, second = Subpartition(0, paths.notify), Subpartition(1, paths.notify)
    for _ in range(3):
        paths.notify(first)
    paths.notify(second)
    turns.turn()
    assert attended == [first, second]
    paths.notify(first)
    turns.turn()
    assert attended == [first, second, first]


def test_a_closed_attempt_is_cancelled_and_has_nothing_more_to_say(turns: Turns, inbox: LoopInbox) -> None:
    said: list[Any] = []

    class Channel:
        def consumed(self, buffer: object) -> None:
            said.append(buffer)

    paths = paths_of(inbox, said.append)
    subpartition = Subpartition(0, paths.notify)
    paths.close()
    paths.notify(subpartition)
    paths.give_back(Channel(), "buffer")
    paths.post(said.append, "result")
    turns.turn()
    assert (turns.wakes, said) == (0, [])
    assert not subpartition.notified
    with pytest.raises(TaskCancelled):
        paths.check()


def test_waiting_for_input_is_idle_time(turns: Turns, inbox: LoopInbox, long_waits: None) -> None:
    counters = TaskCounters()
    paths = TaskPaths(inbox, lambda subpartition: None, counters)
    paths.bell.ring()
    turns.turn()
    paths.wait(SECONDS_MAX)
    assert counters.idle_seconds > 0.0
    paths.bell.clear()
    paths.wait(-1.0)
    assert counters.backpressured_seconds == 0.0
