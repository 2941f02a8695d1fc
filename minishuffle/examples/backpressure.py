"""Back-pressure explained: a producer, a consumer that is slower and later faster, and what fills in between.

One producer sends all rows to the last consumer, over the network if there are two workers. The buffers in
between fill up one limit after the other (:data:`~minishuffle.counters.LIMITS`), then the producer is as slow
as the consumer; when the consumer becomes faster, so does the producer. Every row carries the time at which
it was made, so the consumer knows both rates.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field

from minishuffle.api.stream import Stream
from minishuffle.operators.base import TaskContext

__all__ = ["backpressure"]

Row: TypeAlias = tuple[int, float, bytes]
"""Number, time at which it was made, payload."""

MB: Final = 1_000_000
ROW_BYTES: Final = 1000
BATCH_ROWS: Final = 8
WINDOW: Final = 1 / 3
"""The part of a span, its last one, in which rates are measured."""


class Pace:
    """Waits so that bytes pass at a rate. Time that was lost is not made up for.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._due = time.monotonic()

    def wait(self, size: int) -> None:
        """Until ``size`` bytes more may have passed."""
        now = time.monotonic()
        # A sleep that took too long is made up for, a wait of seconds for the other side is not.
        self._due = max(self._due, now - 0.05) + size / self.rate
        if self._due > now:
            time.sleep(self._due - now)


class PacedSource:
    """A source of so many rows at a rate of bytes per second, if it is not held up."""

    def __init__(self, rate: float, rows: int) -> None:
        self._rate = rate
        self._rows = rows

    def splits(self) -> Sequence[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[Row]]:
        pace, payload = Pace(self._rate), bytes(ROW_BYTES)
        for begin in range(offset, self._rows, BATCH_ROWS):
            numbers = range(begin, min(begin + BATCH_ROWS, self._rows))
            pace.wait(len(numbers) * ROW_BYTES)
            made = time.time()
            yield [(number, made, payload) for number in numbers]


class PacedSink:
    """A sink that takes ``first`` bytes at one rate, pauses, and takes what follows at another.

    Its result is a map: ``rows``, ``distinct``, and of the end of each span the bytes per second that were
    ``produced`` and ``consumed``, ``slow`` and ``fast``; None if it gets nothing.
    """

    def __init__(self, rates: tuple[float, float], first: int, pause: float, span: float) -> None:
        self._rates = rates
        self._first = first
        self._pause = pause
        self._window = span * WINDOW
        self._numbers: set[int] = set()
        self._rows = 0
        self._made: list[tuple[float, int]] = []
        """Times at which rows were made, with their bytes."""
        self._taken: list[tuple[float, int]] = []
        self._switched = 0.0

    def open(self, context: TaskContext) -> None:
        self._pace = Pace(self._rates[0])

    def write(self, batch: Any) -> None:
        size = len(batch) * ROW_BYTES
        self._pace.wait(size)
        self._numbers.update(number for number, _, _ in batch)
        self._rows += len(batch)
        self._made += [(made, ROW_BYTES) for _, made, _ in batch]
        self._taken.append((time.time(), size))
        if not self._switched and self._rows * ROW_BYTES >= self._first:
            self._switched = self._taken[-1][0]
            time.sleep(self._pause)
            self._pace = Pace(self._rates[1])

    def close(self) -> dict[str, Any] | None:
        if not self._rows:
            return None
        ends = {"slow": self._switched, "fast": self._made[-1][0]}
        rates = {
            span: {"produced": self._rate(self._made, end), "consumed": self._rate(self._taken, end)}
            for span, end in ends.items()
        }
        return {"rows": self._rows, "distinct": len(self._numbers), **rates}

    def _rate(self, events: Sequence[tuple[float, int]], end: float) -> float:
        """Bytes per second in the window before that time."""
        begin = end - self._window
        return round(sum(size for at, size in events if begin < at <= end) / self._window)


def backpressure(
    produce: Annotated[float, Field(gt=0, le=1000)] = 2.0,
    consume: Annotated[float, Field(gt=0, le=1000)] = 1.0,
    later: Annotated[float, Field(gt=0, le=1000)] = 4.0,
    seconds: Annotated[float, Field(gt=0, le=3600)] = 8.0,
    pause: Annotated[float, Field(ge=0, le=3600)] = 0.0,
) -> Stream:
    """A producer of ``produce`` MB/s, and a consumer of ``consume`` MB/s that takes ``later`` MB/s later.

    The consumer is slow for ``seconds``, stands still for ``pause`` seconds, and is fast for about as long
    as it was slow. 'submit backpressure --wait' shows when which limit was first hit.
    """
    rows = round((consume + produce) * seconds * MB / ROW_BYTES)
    source = Stream.source(PacedSource(produce * MB, rows)).parallel(1).name("producer")
    sink = PacedSink((consume * MB, later * MB), round(consume * seconds * MB), pause, seconds)
    return source.partition(lambda row, consumers: consumers - 1).to(sink).name("consumer")
