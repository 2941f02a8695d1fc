"""Jobs that are made sick on purpose, one for each cause that can be made on one machine, and healthy ones.

Each is made from a seed, which chooses rates, delays and sizes. Their functions travel by value.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import cloudpickle

from minishuffle.api.stream import Stream
from minishuffle.operators.base import TaskContext
from minishuffle.plan.graph import JobSettings

cloudpickle.register_pickle_by_value(sys.modules[__name__])


PAUSE_SECONDS = 0.1
"""Of a sleep at least: on a machine that is busy, who sleeps often waits for a processor as often."""
PADDING = bytes(400)
"""Makes rows long, so that buffers are soon full."""


@dataclass(frozen=True)
class SickJob:
    """A job for two workers, ``rule``, and the vertex that is to be named (an empty text: none)."""

    rule: str
    stream: Stream[Any]
    vertex: str = ""
    subtask: int | None = None
    parallelism: int = 2
    settings: JobSettings = JobSettings()
    hot_key: str = ""


class Pausing:
    """A sink that sleeps for its rows, now and then for many of them, in all subtasks or in one."""

    def __init__(self, row_seconds: float, subtask: int | None = None) -> None:
        self._row_seconds = row_seconds
        self._subtask = subtask
        self._sleeps = True
        self._debt = 0.0

    def open(self, context: TaskContext) -> None:
        self._sleeps = self._subtask in (None, context.index)

    def write(self, batch: Any) -> None:
        self._debt += self._row_seconds * len(batch)
        if self._sleeps and self._debt > PAUSE_SECONDS:
            time.sleep(self._debt)
            self._debt = 0.0

    def close(self) -> None:
        return None


class FailsOnce:
    """A sink that takes rows, and fails after some of them in its first attempt."""

    def __init__(self) -> None:
        self._attempt = 0
        self._rows = 0

    def open(self, context: TaskContext) -> None:
        self._attempt = context.attempt

    def write(self, batch: Any) -> None:
        self._rows += len(batch)
        if self._attempt == 1 and self._rows > 200:
            raise ValueError("once")

    def close(self) -> int:
        return self._rows


class Large:
    """Long rows without end, as fast as they are taken."""

    bounded = False

    def __init__(self, size: int) -> None:
        self._size = size

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        rows = [bytes(self._size)] * 64
        while True:
            yield rows


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def long_rows(start: int, count: int) -> list[tuple[int, bytes]]:
    return [(number, PADDING) for number in range(start, start + count)]


def burning(rounds: int) -> Callable[[int], int]:
    """A function that computes in pure Python."""

    def burn(row: int) -> int:
        total = row
        for number in range(rounds):
            total = (total * 31 + number) % 1_000_003
        return row

    return burn


def collecting(objects: int) -> Callable[[int], int]:
    """A function that has many objects, and the collector look at them again and again."""
    kept: list[Any] = []

    def collect(row: int) -> int:
        if not kept:
            kept.extend([] for _ in range(objects))
        if row % 200 == 0:
            gc.collect()
        return row

    return collect


class Numbered:
    """Long rows without end, in short batches: a task that is cancelled has little left to do."""

    bounded = False

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[list[Any]]:
        for begin in range(offset, 1 << 40, 50):
            yield long_rows(begin, 50)


def slow_sink(random: Random) -> SickJob:
    stream = Stream.generate(long_rows, rate=random.choice([20_000, 100_000])).rebalance()
    return SickJob("slow sink", stream.to(Pausing(random.uniform(0.002, 0.01))).name("slow"), "slow")


def skewed_key(random: Random) -> SickJob:
    share, key = random.uniform(0.7, 0.95), random.randrange(10_000)
    each = random.randrange(20, 60)  # so many rows take a tenth of a second

    def keyed(row: tuple[int, bytes]) -> int:
        return key if row[0] % 1000 < share * 1000 else row[0]

    def slow(taken: list[int], row: tuple[int, bytes]) -> list[int]:
        calls[0] += 1
        if calls[0] % each == 0:
            time.sleep(PAUSE_SECONDS)
        return taken

    calls = [0]
    stream = Stream.source(Numbered()).key_by(keyed).fold(list, slow, emit="batch").to_count()
    return SickJob("skewed key", stream, "fold", hot_key=str(key))


def slow_channel(random: Random) -> SickJob:
    subtask = random.randrange(2)
    stream = Stream.generate(long_rows, rate=random.choice([20_000, 100_000])).rebalance()
    sink = Pausing(random.uniform(0.002, 0.01), subtask)
    return SickJob("one slow channel", stream.to(sink).name("halting"), "halting", subtask)


def slow_function(random: Random) -> SickJob:
    burn = burning(random.choice([200, 1_000]))
    stream = Stream.generate(numbers).parallel(1).rebalance().map(burn).parallel(2).rebalance().to_count()
    return SickJob("slow function", stream, "map")


def garbage(random: Random) -> SickJob:
    collect = collecting(random.choice([200_000, 500_000]))
    stream = Stream.generate(numbers).parallel(1).rebalance().map(collect).parallel(2).rebalance().to_count()
    return SickJob("garbage collection", stream, "map")


def interpreter_lock(random: Random) -> SickJob:
    burn = burning(random.choice([300, 600]))
    stream = Stream.generate(numbers).parallel(1).rebalance().map(burn).parallel(8).rebalance().to_count()
    return SickJob("interpreter lock", stream, "map", parallelism=8)


def few_buffers(random: Random) -> SickJob:
    settings = JobSettings(
        buffers_per_channel=random.choice([0, 1]), floating_buffers_per_gate=1, buffer_timeout=-1
    )
    stream = Stream.source(Large(random.choice([2_000, 20_000]))).partition(
        lambda row, consumers: consumers - 1
    )
    return SickJob("too few buffers", stream.to_count(), "Large", settings=settings)


SICK: dict[str, Callable[[Random], SickJob]] = {
    "slow sink": slow_sink,
    "skewed key": skewed_key,
    "one slow channel": slow_channel,
    "slow function": slow_function,
    "garbage collection": garbage,
    "interpreter lock": interpreter_lock,
    "too few buffers": few_buffers,
}


def healthy(random: Random) -> SickJob:
    """A job that has time left."""
    rate = random.choice([500, 5_000, 20_000])
    keys = random.choice([2, 100, 10_000])
    stream = Stream.generate(numbers, rate=rate)
    shape = random.randrange(4)
    if shape == 0:
        made = stream.key_by(lambda number: number % keys).count(emit="batch").to_count()
    elif shape == 1:
        made = stream.rebalance().map(lambda number: number + 1).to_count()
    elif shape == 2:
        made = stream.broadcast().to_count()
    else:
        made = stream.key_by(lambda number: number % keys).reduce(max, emit="batch").to_count()
    return SickJob("none", made, settings=JobSettings(latency_interval=random.choice([0.0, 0.1])))
