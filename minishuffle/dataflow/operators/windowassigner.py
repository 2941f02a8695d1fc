"""Which windows of event time a record is in: tumbling, sliding, or days of a time zone.

(Flink: ``WindowAssigner`` and its kinds. Sessions are none of these: see ``sessions.py``.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.dataflow.operators.moments import Vector, datetime_of, microseconds
from minishuffle.errors import UsageError

__all__ = ["CalendarWindows", "LastMoment", "Mask", "SlidingWindows", "WindowAssigner", "tumbling"]

DAY_MICROSECONDS: Final = 86_400_000_000
Mask: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


class WindowAssigner(Protocol):
    """Windows by their start; times are microseconds since 1970."""

    @property
    def per_record(self) -> int:
        """The greatest number of windows in which a record is."""
        ...

    def assigned(self, times: Vector) -> Iterator[tuple[Vector, Mask | None]]:
        """The latest window of each record, then the one before, and so on: where they begin, and which
        records are in them (None: all)."""
        ...

    def ends(self, starts: Vector) -> Vector:
        """The first microsecond after each window."""
        ...

    def last(self, start: int) -> int:
        """The last microsecond of a window."""
        ...


@dataclass(frozen=True, slots=True)
class SlidingWindows:
    """Windows of ``size`` that begin every ``slide`` microseconds, one of them at ``offset`` after 1970 UTC;
    tumbling ones if both are the same."""

    size: int
    slide: int
    offset: int = 0

    @property
    def per_record(self) -> int:
        """See :attr:`WindowAssigner.per_record`."""
        return -(-self.size // self.slide)

    def assigned(self, times: Vector) -> Iterator[tuple[Vector, Mask | None]]:
        """See :meth:`WindowAssigner.assigned`."""
        latest = times - (times - self.offset) % self.slide
        for before in range(0, self.size, self.slide):
            starts = latest - before
            # Only the earliest of them may end before some records: if slide does not divide size.
            yield starts, starts > times - self.size if before + self.slide > self.size else None

    def ends(self, starts: Vector) -> Vector:
        """See :meth:`WindowAssigner.ends`."""
        return starts + self.size

    def last(self, start: int) -> int:
        """See :meth:`WindowAssigner.last`."""
        return start + self.size - 1


def tumbling(size: int) -> SlidingWindows:
    """Windows of ``size`` microseconds, one after the other, aligned to 1970 UTC."""
    return SlidingWindows(size, size)


@dataclass(frozen=True, slots=True)
class CalendarWindows:
    """Windows of whole days of a time zone, which may have 23 or 25 hours; one begins ``offset`` days after
    1970-01-01.

    A day begins at its first moment: at one o'clock where the clocks are put forward at midnight.
    """

    days: int
    zone: str
    offset: int = 0
    per_record = 1

    def check(self) -> None:
        """Raises UsageError if the time zone is not known."""
        try:
            self._midnights(np.zeros(1, dtype=np.int64))
        except pa.ArrowException as error:
            raise UsageError(
                f"window(tz={self.zone!r}): there is no such time zone here: write a name of the IANA "
                "database, such as 'Europe/Zurich', and install Debian's package tzdata if that is missing"
            ) from error

    def assigned(self, times: Vector) -> Iterator[tuple[Vector, Mask | None]]:
        """See :meth:`WindowAssigner.assigned`."""
        starts = self._midnights(self._first_days(times))
        ends = self.ends(starts)
        # Where the clocks go back over midnight the end of the day before comes again, when that has ended.
        yield np.where(times < ends, starts, ends), None

    def ends(self, starts: Vector) -> Vector:
        """See :meth:`WindowAssigner.ends`."""
        return self._midnights(self._first_days(starts) + self.days)

    def last(self, start: int) -> int:
        """See :meth:`WindowAssigner.last`."""
        return _end_of_days(self, start) - 1

    def _first_days(self, times: Vector) -> Vector:
        """The number of the day, from 1970-01-01 on, with which the window of each time begins. (Where a zone
        left that day out, the window's first moment is in the day after.)"""
        local = pc.local_timestamp(pa.array(times, pa.timestamp("us", self.zone)))
        micros: Vector = local.cast(pa.int64()).to_numpy()
        days = micros // DAY_MICROSECONDS
        return days - (days - self.offset) % self.days

    def _midnights(self, days: Vector) -> Vector:
        """The first moments of days."""
        found = pa.array(days).dictionary_encode()
        local = pa.array(found.dictionary.to_numpy() * DAY_MICROSECONDS, pa.timestamp("us"))
        # A midnight that the clocks skip is the moment after; of one that comes twice it is the first.
        moments = pc.assume_timezone(local, self.zone, ambiguous="earliest", nonexistent="latest")
        starts: Vector = moments.cast(pa.int64()).to_numpy().take(found.indices.to_numpy())
        return starts


@lru_cache(maxsize=4096)
def _end_of_days(windows: CalendarWindows, start: int) -> int:
    return int(windows.ends(np.array([start], dtype=np.int64))[0])


@dataclass(frozen=True, slots=True)
class LastMoment:
    """The event time of (key, window start, value): the last microsecond of its window."""

    windows: WindowAssigner

    def __call__(self, row: tuple[Any, datetime, Any]) -> datetime:
        return datetime_of(self.windows.last(microseconds(row[1])))
