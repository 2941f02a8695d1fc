"""The toy job that runs until it is cancelled: records by key, counted per key."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import Field

from minishuffle.api.stream import Stream
from minishuffle.exchange.batch import Payload
from minishuffle.operators.base import TaskContext

__all__ = ["keyby"]


class SlowCount:
    """A sink that sleeps for each batch, and counts what it takes.

    Args:
        delay: seconds.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._count = 0

    def open(self, context: TaskContext) -> None:
        """Nothing to prepare."""

    def write(self, batch: Payload) -> None:
        time.sleep(self._delay)
        self._count += len(batch)

    def close(self) -> int:
        return self._count


def keyby(
    rate: int = 20_000,
    records: int | None = None,
    keys: Annotated[int, Field(ge=1)] = 1000,
    delay: Annotated[float, Field(ge=0, le=1)] = 0.0,
) -> Stream:
    """Count records by key, at ``rate`` records per second, until cancelled.

    ``records`` ends the job after that many; ``keys`` is the number of different keys. ``delay`` has the
    sink sleep that many seconds for each batch of counts, so that it throttles the job.
    """

    def numbers(start: int, count: int) -> list[int]:
        return list(range(start, start + count))

    source = Stream.generate(numbers, rate=rate, records=records)
    counts = source.key_by(lambda number: number % keys).count(emit="batch")
    return counts.to(SlowCount(delay)).name("slow_count") if delay else counts.to_count()
