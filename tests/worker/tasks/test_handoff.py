"""The paths between the loop and the task threads: order, wake-ups, and what closing them means."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.errors import TaskCancelled
from minishuffle.exchange.channels import LocalBuffer
from minishuffle.exchange.subpartition import PipelinedSubpartition
from minishuffle.worker.tasks.handoff import DRAIN_ITEMS_MAX, LoopInbox, TaskPaths, WakeFlag
from support.interleave import interleaved

if TYPE_CHECKING:
    from conftest import Turns

SECONDS_MAX = 20.0
"""Bound of every wait here."""
ITEMS = 20_000

PathsOf = Callable[..., TaskPaths]


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


# --- flags ----------------------------------------------------------------------------------------------


def test_a_flag_is_set_until_it_is_cleared_however_often_it_is_set() -> None:
    flag = WakeFlag()
    assert not (flag.is_set() or flag.wait(-1.0))
    for _ in range(2):
        flag.set()
        assert flag.is_set()
    assert flag.wait(SECONDS_MAX)
    assert not flag.is_set(), "it was waited for"
    for _ in range(2):
        flag.set()
        flag.clear()
        assert not (flag.is_set() or flag.wait(0.0))


# --- the bell -------------------------------------------------------------------------------------------


def test_the_bell_rings_once_and_at_the_end_of_the_turn(turns: Turns, paths_of: PathsOf) -> None:
    bell = paths_of().bell
    for _ in range(3):
        bell.ring()
    assert not bell._rung.is_set()
    assert len(turns.scheduled) == 1
    turns.turn()
    assert bell._rung.is_set()
    bell.ring()
    assert not turns.scheduled, "nobody has looked since"
    bell.clear()
    bell.ring()
    turns.turn()
    assert bell._rung.is_set()


def test_no_wake_up_is_lost(turns: Turns, long_waits: None, busy_switching: None, paths_of: PathsOf) -> None:
    """The loop's half enqueues and rings in bursts, and waits until the task has caught up with each."""
    rng = random.Random(7)
    paths = paths_of()
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


# --- notices and the end --------------------------------------------------------------------------------


def test_a_subpartition_is_notified_of_once_until_it_was_attended_to(turns: Turns, paths_of: PathsOf) -> None:
    attended: list[PipelinedSubpartition] = []
    paths = paths_of()
    first, second = PipelinedSubpartition(0, paths.notify), PipelinedSubpartition(1, paths.notify)
    for each in (first, second):
        each.attach(1, lambda each=each: attended.append(each))  # type: ignore[misc]
    for _ in range(3):
        paths.notify(first)
    paths.notify(second)
    turns.turn()
    assert attended == [first, second]
    paths.notify(first)
    turns.turn()
    assert attended == [first, second, first]


class Buffer:
    """Its own attachment."""

    def __init__(self, name: str, said: list[str], fails: bool = False) -> None:
        self.attachment: Any = self
        self._name, self._said, self._fails = name, said, fails

    def consumed(self, buffer: object) -> None:
        assert buffer is self
        self._said.append(self._name)
        if self._fails:
            raise RuntimeError(self._name)


def given_back(paths: TaskPaths, *buffers: Any) -> None:
    for buffer in buffers:
        paths.give_back(buffer)


def test_what_is_given_back_until_the_loop_looks_is_one_call_and_in_order(
    turns: Turns, inbox: LoopInbox, paths_of: PathsOf
) -> None:
    said: list[str] = []
    paths = paths_of()
    inbox.post(said.append, "before")
    given_back(paths, *(Buffer(name, said) for name in "abc"))
    inbox.post(said.append, "behind")
    given_back(paths, Buffer("d", said))
    turns.turn()
    assert said == ["before", "a", "b", "c", "d", "behind"]
    given_back(paths, Buffer("e", said))
    turns.turn()
    assert said[-1] == "e"


class SparedBuffer(Buffer, LocalBuffer):
    """A buffer that nobody waits for, as long as ``wanted`` is empty."""

    def __init__(self, name: str, said: list[str], wanted: list[str]) -> None:
        Buffer.__init__(self, name, said)
        self._wanted = wanted

    def spares(self, buffer: object) -> bool:
        return not self._wanted


def test_the_loop_is_not_woken_for_a_buffer_that_nobody_waits_for(
    turns: Turns, inbox: LoopInbox, paths_of: PathsOf
) -> None:
    said: list[str] = []
    wanted: list[str] = []
    paths = paths_of()
    given_back(paths, *(SparedBuffer(name, said, wanted) for name in "ab"))
    assert (turns.wakes, paths.returned) == (0, 2)
    inbox.post(said.append, "behind")
    turns.turn()
    assert said == ["a", "b", "behind"]
    given_back(paths, SparedBuffer("c", said, wanted))
    wanted.append("room")
    given_back(paths, SparedBuffer("d", said, wanted))
    assert turns.wakes == 2
    turns.turn()
    assert said[3:] == ["c", "d"]
    wanted.clear()
    given_back(paths, SparedBuffer("e", said, wanted))
    inbox.drain()
    assert (turns.wakes, said[-1], paths.returned) == (2, "e", 0)


def test_what_was_given_back_without_a_wake_is_taken_when_the_attempt_ends(
    turns: Turns, paths_of: PathsOf
) -> None:
    said: list[str] = []
    paths = paths_of()
    given_back(paths, SparedBuffer("a", said, []))
    assert turns.wakes == 0
    paths.close()
    turns.turn()
    assert said == ["a"]


def test_a_buffer_whose_return_raises_holds_up_no_other(turns: Turns, paths_of: PathsOf) -> None:
    said: list[str] = []
    paths = paths_of()
    given_back(paths, Buffer("a", said), Buffer("bad", said, fails=True), Buffer("b", said))
    with pytest.raises(RuntimeError, match="bad"):
        turns.turn()
    turns.turn()
    assert said == ["a", "bad", "b"]


@pytest.mark.slow
def test_a_buffer_given_back_while_the_loop_looks_is_taken_now_or_in_the_next_turn(
    turns: Turns, paths_of: PathsOf
) -> None:
    said: list[str] = []

    def make() -> tuple[Callable[[], object], Callable[[], object]]:
        said.clear()
        turns.scheduled.clear()
        paths = paths_of()
        given_back(paths, Buffer("a", said))
        return paths._take_returned, lambda: given_back(paths, Buffer("b", said))

    for _ in interleaved(make):
        while turns.scheduled:
            turns.turn()
        assert said == ["a", "b"]


def test_a_closed_attempt_is_cancelled_and_has_nothing_more_to_say(turns: Turns, paths_of: PathsOf) -> None:
    said: list[Any] = []
    paths = paths_of()
    subpartition = PipelinedSubpartition(0, paths.notify)
    paths.close()
    paths.notify(subpartition)
    given_back(paths, Buffer("buffer", said))
    paths.post(said.append, "result")
    turns.turn()
    assert (turns.wakes, said) == (0, [])
    assert not subpartition.notified
    with pytest.raises(TaskCancelled):
        paths.check()


def test_waiting_for_input_is_idle_time(turns: Turns, long_waits: None, paths_of: PathsOf) -> None:
    paths = paths_of()
    paths.bell.ring()
    turns.turn()
    paths.wait(SECONDS_MAX)
    seconds = paths.clock.read()
    assert seconds.idle > 0.0
    assert seconds.backpressured == 0.0
    paths.bell.clear()
    paths.wait(-1.0)
    assert paths.clock.read().idle > seconds.idle


def test_a_rest_is_idle_time_that_a_cancel_ends_and_no_bell(paths_of: PathsOf) -> None:
    paths, rested = paths_of(), 0.001
    paths.bell.ring_now()
    paths.rest(rested)
    assert paths.clock.read().idle >= rested
    paths.rest(-1.0)
    paths.cancel()
    with pytest.raises(TaskCancelled):
        paths.rest(SECONDS_MAX)
    assert paths.clock.read().idle < SECONDS_MAX
