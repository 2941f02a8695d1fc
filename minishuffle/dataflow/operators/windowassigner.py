"""Which windows of event time a record is in: tumbling, sliding, or days of a time zone.

(Flink: ``WindowAssigner`` and its kinds. Sessions are none of these: see ``sessions.py``.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.dataflow.operators.moments import Vector, datetime_of, microseconds
from minishuffle.errors import UsageError

__all__ = ["CalendarWindows", "LastMoment", "Mask", "SlidingWindows", "WindowAssigner", "tumbling"]

DAY_MICROSECONDS: Final = 86_400_000_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
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
        far = times >= FAR_DAY * DAY_MICROSECONDS
        local = pc.local_timestamp(pa.array(np.where(far, 0, times), pa.timestamp("us", self.zone)))
        micros: Vector = local.cast(pa.int64()).to_numpy()
        days = micros // DAY_MICROSECONDS
        if far.any():
            days[far] = _far_days(times[far], self.zone)
        return days - (days - self.offset) % self.days

    def _midnights(self, days: Vector) -> Vector:
        """The first moments of days."""
        found = pa.array(days).dictionary_encode()
        distinct = found.dictionary.to_numpy()
        far = distinct > FAR_DAY
        local = pa.array(np.where(far, 0, distinct) * DAY_MICROSECONDS, pa.timestamp("us"))
        # A midnight that the clocks skip is the moment after; of one that comes twice it is the first.
        moments = pc.assume_timezone(local, self.zone, ambiguous="earliest", nonexistent="latest")
        starts: Vector = moments.cast(pa.int64()).to_numpy().copy()
        if far.any():
            starts[far] = [_far_midnight(day, self.zone) for day in distinct[far].tolist()]
        starts = starts[found.indices.to_numpy()]
        return starts


# Arrow follows a time zone to the last change of its clocks that stands in the database by itself, in 2037,
# and not by the rule for all later ones. The zoneinfo of Python does, to the year 9999. Calendars repeat
# after 400 years.


FAR_DAY: Final = 24_472
"""2037-01-01, in days from 1970-01-01 on; later ones are far."""
CYCLE_DAYS: Final = 146_097
"""400 years, which are whole weeks."""
SPAN: Final = 900_000_000
"""Clocks change where a quarter of an hour begins, in UTC, in all those years."""


def _folded(day: int) -> tuple[int, int]:
    """The same day of the first cycle after FAR_DAY, and how many days it lies before."""
    before = (day - FAR_DAY) // CYCLE_DAYS * CYCLE_DAYS
    return day - before, before


def _far_days(times: Vector, zone: str) -> Vector:
    """The days of times after FAR_DAY."""
    spans, place = np.unique(times // SPAN, return_inverse=True)
    offsets = np.array([_far_offset(span, zone) for span in (spans * SPAN).tolist()], dtype=np.int64)
    days: Vector = (times + offsets[place]) // DAY_MICROSECONDS
    return days


def _far_offset(time: int, zone: str) -> int:
    """How far the clocks of a zone are ahead of UTC, in microseconds."""
    day, within = divmod(time, DAY_MICROSECONDS)
    moment = EPOCH + timedelta(days=_folded(day)[0], microseconds=within)
    offset = moment.astimezone(ZoneInfo(zone)).utcoffset()
    assert offset is not None
    return offset // timedelta(microseconds=1)


def _far_midnight(day: int, zone: str) -> int:
    """The first moment of a day after FAR_DAY."""
    folded, before = _folded(day)
    midnight = (EPOCH + timedelta(days=folded)).replace(tzinfo=ZoneInfo(zone))
    return (midnight - EPOCH) // timedelta(microseconds=1) + before * DAY_MICROSECONDS


@lru_cache(maxsize=4096)
def _end_of_days(windows: CalendarWindows, start: int) -> int:
    return int(windows.ends(np.array([start], dtype=np.int64))[0])


@dataclass(frozen=True, slots=True)
class LastMoment:
    """The event time of (key, window start, value): the last microsecond of its window."""

    windows: WindowAssigner

    def __call__(self, row: tuple[Any, datetime, Any]) -> datetime:
        return datetime_of(self.windows.last(microseconds(row[1])))
