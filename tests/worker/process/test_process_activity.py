"""Busy, idle and back-pressured time of a task add up to what passes, waits under way included."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from minishuffle.api.stream import Stream
from minishuffle.counters import TaskCounters
from minishuffle.observe.metrics import worker_exposition
from minishuffle.wire.messages import CancelTasks
from support.scraped import scraped_families

if TYPE_CHECKING:
    from conftest import Coordinator, Running

SECONDS_MAX = 120.0
SPAN_SECONDS = 1.0
"""Between the scrapes that are compared."""
STEP_SECONDS = 0.1
"""Between all scrapes: the loop on which they are taken has the rows of the tasks to hand on too."""
TOLERANCE = 0.02
STATES = ("busy", "idle", "backpressured_hard")
Shares = dict[tuple[str, str], dict[str, float]]


class Gate:
    """Holds user functions up until the test is over."""

    let_go = threading.Event()


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    Gate.let_go = threading.Event()
    yield
    Gate.let_go.set()


class Endless:
    """As many rows as anybody takes."""

    bounded = False

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        number = 0
        while True:
            yield list(range(number, number + 500))
            number += 500


class Nothing(Endless):
    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        while True:
            yield []


def held_up(row: Any) -> Any:
    """One row takes the whole test."""
    Gate.let_go.wait(SECONDS_MAX)
    return row


def slow(row: Any) -> Any:
    Gate.let_go.wait(0.001)
    return row


def spin(row: int) -> int:
    """Keeps the interpreter for a while."""
    return row + sum(range(2_000))


def mostly_one(number: int) -> int:
    return 0 if number % 10 else number


@dataclass(frozen=True)
class Scrape:
    """Seconds by task and state as ``/metrics`` has them, taken between ``begin`` and ``end``."""

    begin: float
    end: float
    seconds: dict[tuple[str, str], dict[str, float]]

    @classmethod
    def of(cls, running: Running) -> Scrape:
        begin = time.monotonic()
        seconds: dict[tuple[str, str], dict[str, float]] = {}
        for family in scraped_families(worker_exposition(running.snapshot, "1.2.3")):
            if family.name != "minishuffle_task_time_seconds":
                continue
            for sample in family.samples:
                task = sample.labels["vertex"], sample.labels["subtask"]
                seconds.setdefault(task, {})[sample.labels["state"]] = sample.value
        return cls(begin, time.monotonic(), seconds)

    def total(self, vertex: str, state: str) -> float:
        return sum(states[state] for (name, _), states in self.seconds.items() if name == vertex)


async def come_to(coordinator: Coordinator, running: Running, meant: Callable[[Shares], bool]) -> None:
    """Wait for a second with such shares: however slow the machine is, what holds a task up goes on."""
    await coordinator.until(lambda: {task.state for task in running.snapshot().tasks} == {"running"})
    deadline = time.monotonic() + SECONDS_MAX
    while not meant(found := await shares(running)):
        assert time.monotonic() < deadline, found


async def shares(running: Running) -> Shares:
    """The share of each state in a second of each task, of which every scrape accounts for all.

    The time between two scrapes is known up to the time that each of them takes.
    """
    scrapes = [first := Scrape.of(running)]
    while scrapes[-1].begin - first.end < SPAN_SECONDS:
        await asyncio.sleep(STEP_SECONDS)
        scrapes.append(Scrape.of(running))
    for before, now in zip(scrapes, scrapes[1:], strict=False):
        check_sums(before, now)
    check_sums(first, scrapes[-1])
    found = {}
    for task, states in scrapes[-1].seconds.items():
        grown = {state: states[state] - first.seconds[task][state] for state in STATES}
        found[task] = {state: seconds / sum(grown.values()) for state, seconds in grown.items()}
    return found


def check_sums(before: Scrape, now: Scrape) -> None:
    assert now.seconds and now.seconds.keys() == before.seconds.keys()
    for task, states in now.seconds.items():
        assert set(states) == set(STATES)
        assert all(states[state] >= before.seconds[task][state] for state in STATES), "a counter fell"
        grown = sum(states.values()) - sum(before.seconds[task].values())
        least, most = now.begin - before.end, now.end - before.begin
        assert (1 - TOLERANCE) * least <= grown <= (1 + TOLERANCE) * most, (task, grown, least, most)


async def test_a_sink_that_sleeps_is_busy_and_its_producer_back_pressured(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.deploy(Stream.source(Endless()).rebalance().map(held_up).to_count(), {0: 1})
    await coordinator.until(lambda: Scrape.of(running).total("Endless", "backpressured_hard"))
    sink, source = ("map -> to_count", "0"), ("Endless", "0")
    await come_to(
        coordinator,
        running,
        lambda found: found[sink]["busy"] > 0.5 and found[source]["backpressured_hard"] > 0.5,
    )
    Gate.let_go.set()


@pytest.mark.slow
async def test_the_task_of_a_hot_key_is_busier_than_its_producer(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    stream = Stream.source(Endless()).key_by(mostly_one).reduce(lambda one, two: slow(one)).to_count()
    coordinator.deploy(stream, {0: 1, 1: 1})

    def consumers_are_busier(found: Shares) -> bool:
        consumers = [states["busy"] for (name, _), states in found.items() if "to_count" in name]
        producers = [states["busy"] for (name, _), states in found.items() if name == "Endless"]
        return max(consumers) > 0.5 and max(consumers) > max(producers)

    await come_to(coordinator, running, consumers_are_busier)


@pytest.mark.slow
async def test_a_map_that_spins_is_busy(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.deploy(Stream.source(Endless()).rebalance().map(spin).to_count(), {0: 1})
    await come_to(coordinator, running, lambda found: found["map -> to_count", "0"]["busy"] > 0.5)


async def test_tasks_behind_a_source_without_rows_are_idle(coordinator: Coordinator) -> None:
    running = await coordinator.worker()
    coordinator.deploy(Stream.source(Nothing()).rebalance().to_count(), {0: 1})
    await come_to(
        coordinator,
        running,
        lambda found: (
            {name for name, _ in found} == {"Nothing", "to_count"}
            and all(states["idle"] > 0.5 for states in found.values())
        ),
    )


@pytest.mark.slow
async def test_processor_time_tells_a_task_that_works_from_one_that_is_held_up(
    coordinator: Coordinator,
) -> None:
    running = await coordinator.worker()
    coordinator.deploy(Stream.source(Endless()).map(held_up).to_count(), {0: 1}, "held")
    coordinator.deploy(Stream.source(Endless()).map(spin).to_count(), {0: 1}, "spins")

    def counters(job: str) -> TaskCounters:
        (task,) = [task for task in running.snapshot().tasks if task.job == job]
        return task.counters

    await coordinator.until(lambda: len(running.snapshot().tasks) == 2)
    await coordinator.until(
        lambda: counters("held").busy_seconds > 1.0 and counters("spins").cpu_seconds > 0.5
    )
    held, spins = counters("held"), counters("spins")
    assert held.cpu_seconds < 0.5 * held.busy_seconds
    assert spins.cpu_seconds <= spins.busy_seconds + spins.idle_seconds + spins.backpressured_seconds
    coordinator.send(CancelTasks(term=coordinator.term, job="spins"))
    await coordinator.until(lambda: coordinator.ended("spins") == ["canceled"])
    ended = counters("spins")
    assert ended.cpu_seconds >= spins.cpu_seconds
    assert counters("spins") == ended, "a task that has ended stands still"
    Gate.let_go.set()
