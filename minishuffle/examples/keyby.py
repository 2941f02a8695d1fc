"""The toy job that runs until it is cancelled: records by key, counted per key."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from minishuffle.dataflow.stream import Stream

__all__ = ["keyby"]


def keyby(rate: int = 20_000, records: int | None = None, keys: Annotated[int, Field(ge=1)] = 1000) -> Stream:
    """Count records by key, at ``rate`` records per second, until cancelled.

    ``records`` ends the job after that many; ``keys`` is the number of different keys.
    """

    def numbers(start: int, count: int) -> list[int]:
        return list(range(start, start + count))

    source = Stream.generate(numbers, rate=rate, records=records)
    return source.key_by(lambda number: number % keys).count(emit="batch").to_count()
