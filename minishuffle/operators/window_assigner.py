"""Which windows of event time a record is in: tumbling, sliding, or days and months of a time zone.

(Flink: ``WindowAssigner`` and its kinds. Sessions are none of these: see ``minishuffle.operators.sessions``.)
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, ClassVar, Final, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Mask
from minishuffle.operators.batch_times import Vector, datetime_of, microseconds

__all__ = ["CalendarWindows", "LastMoment", "SlidingWindows", "WindowAssigner", "tumbling"]

DAY_MICROSECONDS: Final = 86_400_000_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)
_OFFSET: Final = re.compile(r"(UTC|GMT)?[+-]\d[\d:]*")
"""What is meant as a time zone without a name."""


class WindowAssigner(Protocol):
    """Windows by their start; times are microseconds since 1970."""

    @property
    def zone(self) -> str:
        """The time zone whose clocks show their start and end."""
        ...

    @property
    def per_record(self) -> int:
        """The greatest number of windows in which a record is."""
        ...

    def assigned(self, times: Vector) -> Iterator[tuple[Vector, Mask | None]]:
        """The latest window of each record, then the one before, and so on: where they begin, and which
        records are in them (None: all)."""
        ...

    def latest(self, time: int) -> int:
        """Where the latest window begins that a time is in."""
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
    zone: ClassVar[str] = "UTC"

    def __str__(self) -> str:
        every = f" each {_seconds(self.slide)}" if self.slide != self.size else ""
        return f"of {_seconds(self.size)}{every}" + (f" from {_seconds(self.offset)} on" * bool(self.offset))

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

    def latest(self, time: int) -> int:
        """See :meth:`WindowAssigner.latest`."""
        return time - (time - self.offset) % self.slide

    def ends(self, starts: Vector) -> Vector:
        """See :meth:`WindowAssigner.ends`."""
        return starts + self.size

    def last(self, start: int) -> int:
        """See :meth:`WindowAssigner.last`."""
        return start + self.size - 1


def _seconds(micros: int) -> str:
    return f"{micros / 1_000_000:.12g} s"


def tumbling(size: int) -> SlidingWindows:
    """Windows of ``size`` microseconds, one after the other, aligned to 1970 UTC."""
    return SlidingWindows(size, size)


@dataclass(frozen=True, slots=True)
class CalendarWindows:
    """Windows of ``days`` days, or of ``months`` months if that is above 0, on the clocks of a time zone.

    Windows of days begin ``offset`` microseconds after midnight of 1970-01-01 on these clocks, and any number
    of windows before and after that; windows of months so long after midnight of the first day of a month,
    which are counted from January 1970 on. A window begins when the clocks first show that time or a later
    one: at three o'clock where half past two is left out, at the first of two half past twos. So a day may
    have 23 or 25 hours.
    """

    zone: str
    days: int = 1
    months: int = 0
    offset: int = 0
    per_record = 1

    def __str__(self) -> str:
        size = f"{self.months} months" if self.months else f"{self.days} days"
        return f"of {size} in {self.zone}" + (f" from {_seconds(self.offset)} on" * bool(self.offset))

    def check(self) -> None:
        """Raises UsageError if the time zone is not known."""
        try:
            self._starts(np.zeros(1, dtype=np.int64))
            ZoneInfo(self.zone)
        except (pa.ArrowException, ZoneInfoNotFoundError, ValueError) as error:
            way = (
                "write the name of a place, such as 'Europe/Zurich', or 'Etc/GMT-1' for clocks that are "
                "always one hour ahead of UTC, with the sign turned round"
                if _OFFSET.fullmatch(self.zone)
                else "write a name of the IANA database, such as 'Europe/Zurich', and install Debian's "
                "package tzdata if that is missing"
            )
            raise UsageError(f"window(tz={self.zone!r}): there is no such time zone here: {way}") from error

    def assigned(self, times: Vector) -> Iterator[tuple[Vector, Mask | None]]:
        """See :meth:`WindowAssigner.assigned`."""
        numbers = self._numbers(times)
        starts, ends = self._starts(numbers), self._starts(numbers + 1)
        # Where the clocks go back over the start of a window, they show times of the one before once more.
        yield np.where(times < ends, starts, ends), None

    def latest(self, time: int) -> int:
        """See :meth:`WindowAssigner.latest`."""
        ((starts, _),) = self.assigned(np.array([time], dtype=np.int64))
        return int(starts[0])

    def ends(self, starts: Vector) -> Vector:
        """See :meth:`WindowAssigner.ends`."""
        return self._starts(self._numbers(starts) + 1)

    def last(self, start: int) -> int:
        """See :meth:`WindowAssigner.last`."""
        return _end_of(self, start) - 1

    def _numbers(self, times: Vector) -> Vector:
        """The number of the window that the clocks are in at each time. (Where they left out all of a window,
        its start is that of the next one.)"""
        days = (_shown_at(times, self.zone) - self.offset) // DAY_MICROSECONDS
        if not self.months:
            return days // self.days
        months: Vector = days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
        return months // self.months

    def _starts(self, numbers: Vector) -> Vector:
        """When windows of these numbers begin."""
        found = pa.array(numbers).dictionary_encode()
        distinct: Vector = found.dictionary.to_numpy()
        if self.months:
            months = (distinct * self.months).astype("datetime64[M]")
            days: Vector = months.astype("datetime64[D]").astype(np.int64)
        else:
            days = distinct * self.days
        starts: Vector = _first_shown(days * DAY_MICROSECONDS + self.offset, self.zone)
        starts = starts[found.indices.to_numpy()]
        return starts


def _shown_at(times: Vector, zone: str) -> Vector:
    """What the clocks of a zone show at each time, in microseconds since they showed 1970-01-01."""
    far = times >= FAR
    local = pc.local_timestamp(pa.array(np.where(far, 0, times), pa.timestamp("us", zone)))
    shown: Vector = local.cast(pa.int64()).to_numpy()
    if far.any():
        shown = shown.copy()
        spans, place = np.unique(times[far] // SPAN, return_inverse=True)
        offsets = [_far_offset(span, zone) for span in (spans * SPAN).tolist()]
        shown[far] = times[far] + np.array(offsets, dtype=np.int64)[place]
    return shown


def _first_shown(clocks: Vector, zone: str) -> Vector:
    """When the clocks of a zone first show each of these times, or a later one if they leave it out."""
    far = clocks > FAR
    local = pa.array(np.where(far, 0, clocks), pa.timestamp("us"))
    moments = pc.assume_timezone(local, zone, ambiguous="earliest", nonexistent="latest")
    times: Vector = moments.cast(pa.int64()).to_numpy()
    if far.any():
        times = times.copy()
        times[far] = [_far_moment(clock, zone) for clock in clocks[far].tolist()]
    return times


# Arrow follows a time zone to the last change of its clocks that stands in the database by itself, in 2037,
# and not by the rule for all later ones. The zoneinfo of Python does, to the year 9999. Calendars repeat
# after 400 years.


FAR: Final = 24_472 * DAY_MICROSECONDS
"""2037-01-01; later times are far."""
CYCLE: Final = 146_097 * DAY_MICROSECONDS
"""400 years, which are whole weeks."""
SPAN: Final = 900_000_000
"""Clocks change where a quarter of an hour begins, in UTC, in all those years."""


def _folded(time: int) -> tuple[datetime, int]:
    """The same time in the first cycle after FAR, by a clock in UTC, and how long before that is."""
    before = (time - FAR) // CYCLE * CYCLE
    return EPOCH + (time - before) * MICROSECOND, before


def _far_offset(time: int, zone: str) -> int:
    """How far the clocks of a zone are ahead of UTC."""
    offset = _folded(time)[0].astimezone(ZoneInfo(zone)).utcoffset()
    assert offset is not None
    return offset // MICROSECOND


def _far_shown_at(time: int, zone: str) -> int:
    return time + _far_offset(time, zone)


def _far_moment(clock: int, zone: str) -> int:
    """When the clocks first show a time after FAR, or a later one if they leave it out."""
    folded, before = _folded(clock)
    shown = folded.replace(tzinfo=ZoneInfo(zone))
    # As if they had not been changed before; they show it then, if they do not leave it out.
    moment = (shown - EPOCH) // MICROSECOND + before
    if _far_shown_at(moment, zone) == clock:
        return moment
    # They were put forward in the last hours.
    spans = range((clock - _far_offset(moment, zone)) // SPAN, moment // SPAN + 1)
    return SPAN * spans[bisect_left(spans, clock, key=lambda span: _far_shown_at(span * SPAN, zone))]


@lru_cache(maxsize=4096)
def _end_of(windows: CalendarWindows, start: int) -> int:
    return int(windows.ends(np.array([start], dtype=np.int64))[0])


@dataclass(frozen=True, slots=True)
class LastMoment:
    """The event time of (key, window start, value): the last microsecond of its window."""

    windows: WindowAssigner

    def __call__(self, row: tuple[Any, datetime, Any]) -> datetime:
        return datetime_of(self.windows.last(microseconds(row[1])))
