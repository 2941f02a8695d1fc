"""Sliding windows, and days and months of time zones, against arithmetic on one time after the other."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import UsageError
from minishuffle.operators.batch_times import datetime_of, microseconds
from minishuffle.operators.window_assigner import (
    CalendarWindows,
    LastMoment,
    SlidingWindows,
    WindowAssigner,
    tumbling,
)
from support.cutjobs import Cut, run
from support.soak import examples

HOUR = 3_600_000_000


def windows_of(assigner: WindowAssigner, time: int) -> list[int]:
    """The starts of the windows in which a time is, the latest first."""
    found = assigner.assigned(np.array([time]))
    return [int(starts[0]) for starts, within in found if within is None or within[0]]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 11), st.integers(-50, 50))
def test_a_time_is_in_each_window_that_spans_it(size: int, slide: int, offset: int, time: int) -> None:
    slide = min(slide, size)
    assigner = SlidingWindows(size, slide, offset % slide)
    spanning = [start for start in range(time, time - size, -1) if (start - offset) % slide == 0]
    assert windows_of(assigner, time) == spanning
    assert assigner.latest(time) == spanning[0]
    for start in spanning:
        assert assigner.last(start) == int(assigner.ends(np.array([start]))[0]) - 1 == start + size - 1


@given(
    st.sampled_from(
        ["Europe/Zurich", "America/Havana", "America/Sao_Paulo", "Asia/Kathmandu", "Pacific/Apia"]
    ),
    st.datetimes(datetime(2010, 1, 1), datetime(2019, 1, 1))
    | st.datetimes(datetime(2036, 12, 1), datetime(2100, 1, 1))
    | st.datetimes(datetime(2430, 1, 1), datetime(2450, 1, 1)),
)
def test_days_of_a_time_zone_are_those_of_its_clocks(zone: str, naive: datetime) -> None:
    """A moment is in the window that has the local date, and windows follow each other without a gap."""
    days, moment = CalendarWindows(zone), naive.replace(tzinfo=UTC)
    (start,) = windows_of(days, microseconds(moment))
    end = days.last(start) + 1
    assert start <= microseconds(moment) < end
    assert days.latest(microseconds(moment)) == start
    local = ZoneInfo(zone)
    day = moment.astimezone(local).date()
    assert datetime_of(start).astimezone(local).date() == day
    assert datetime_of(start - 1).astimezone(local).date() < day < datetime_of(end).astimezone(local).date()
    assert windows_of(days, end) == [end]


@pytest.mark.parametrize("zone", ["America/St_Johns", "America/Goose_Bay", "America/Moncton"])
@pytest.mark.parametrize("days", [1, 2])
def test_a_day_ends_once_where_the_clocks_go_back_over_midnight(zone: str, days: int) -> None:
    """At 00:01 on 29 October 2006 it was 23:01 again."""
    windows, reached = CalendarWindows(zone, days), 0
    first = microseconds(datetime(2006, 10, 28, 12, tzinfo=UTC))
    for moment in range(first, first + 300 * HOUR // 6, HOUR // 6):
        (start,) = windows_of(windows, moment)
        assert start <= moment <= windows.last(start) and start >= reached
        assert windows_of(windows, start) == [start]
        reached = start


@given(st.integers(2, 8), st.integers(0, 7), st.integers(-40, 40))
def test_windows_of_days_follow_each_other_where_a_day_was_left_out(
    days: int, offset: int, hours: int
) -> None:
    """Samoa had no 30 December 2011."""
    windows = CalendarWindows("Pacific/Apia", days, offset=offset % days * 24 * HOUR)
    moment = microseconds(datetime(2011, 12, 30, 10, tzinfo=UTC)) + hours * HOUR
    (start,) = windows_of(windows, moment)
    end = windows.last(start) + 1
    assert start <= moment < end
    assert windows_of(windows, end - 1) == [start]
    assert windows_of(windows, end) == [end]


def test_days_have_as_many_hours_as_their_clocks_say() -> None:
    days = CalendarWindows("Europe/Zurich")
    hours = {}
    for month, day in ((3, 29), (3, 30), (10, 25)):
        (start,) = windows_of(days, microseconds(datetime(2026, month, day, 12, tzinfo=UTC)))
        hours[month, day] = (days.last(start) + 1 - start) / HOUR
    assert hours == {(3, 29): 23, (3, 30): 24, (10, 25): 25}


def test_weeks_begin_on_the_day_of_their_offset() -> None:
    noon = microseconds(datetime(2026, 11, 25, 12, tzinfo=UTC))
    (thursday,) = windows_of(CalendarWindows("UTC", 7), noon)
    (monday,) = windows_of(CalendarWindows("UTC", 7, offset=4 * 24 * HOUR), noon)
    assert [datetime_of(start).strftime("%a %d") for start in (thursday, monday)] == ["Thu 19", "Mon 23"]


def test_a_day_in_summer_is_one_in_all_years_to_come() -> None:
    """Arrow knows no summer time after 2037."""
    evening = microseconds(datetime(2040, 7, 1, 22, 30, tzinfo=UTC))
    (start,) = windows_of(CalendarWindows("Europe/Zurich"), evening)
    assert datetime_of(start) == datetime(2040, 7, 1, 22, tzinfo=UTC)
    assert CalendarWindows("Europe/Zurich").last(start) + 1 == start + 24 * HOUR
    long_after = 40 * 146_097 * 24 * HOUR  # 16,000 years
    (start,) = windows_of(CalendarWindows("Europe/Zurich"), evening + long_after)
    assert start == microseconds(datetime(2040, 7, 1, 22, tzinfo=UTC)) + long_after


def test_an_unknown_time_zone_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no such time zone here: write a name"):
        CalendarWindows("Mars/Olympus").check()


@pytest.mark.parametrize("zone", ["+02:00", "UTC+1:00", "CET-1CEST", ""])
def test_what_only_one_of_two_readers_of_time_zones_knows_is_refused(zone: str) -> None:
    way = "write the name of a place, .*, or 'Etc/GMT-1' for" if "0" in zone else "write a name of the IANA"
    with pytest.raises(UsageError, match=f"there is no such time zone here: {way}"):
        CalendarWindows(zone).check()


def hours_of(windows: CalendarWindows, moment: datetime) -> tuple[str, float]:
    """When the window of a moment begins on its clocks, and its length."""
    (start,) = windows_of(windows, microseconds(moment.astimezone(UTC)))
    begin = datetime_of(start).astimezone(ZoneInfo(windows.zone))
    return f"{begin:%Y-%m-%d %H:%M %Z}", (windows.last(start) + 1 - start) / HOUR


@pytest.mark.parametrize(
    ("zone", "moment", "offset", "window"),
    [
        # A day that begins at six has one hour less where the clocks go forward within it, and one more.
        ("Europe/Zurich", datetime(2026, 3, 28, 12), 6 * HOUR, ("2026-03-28 06:00 CET", 23)),
        ("Europe/Zurich", datetime(2026, 10, 24, 12), 6 * HOUR, ("2026-10-24 06:00 CEST", 25)),
        ("Europe/Zurich", datetime(2040, 3, 24, 12), 6 * HOUR, ("2040-03-24 06:00 CET", 23)),
        # Half past two is left out: at three. It comes twice: the first.
        ("Europe/Zurich", datetime(2026, 3, 29, 12), 5 * HOUR // 2, ("2026-03-29 03:00 CEST", 23.5)),
        ("Europe/Zurich", datetime(2026, 10, 25, 12), 5 * HOUR // 2, ("2026-10-25 02:30 CEST", 25)),
        ("Europe/Zurich", datetime(2040, 3, 25, 12), 5 * HOUR // 2, ("2040-03-25 03:00 CEST", 23.5)),
        ("Europe/Zurich", datetime(2040, 10, 28, 12), 5 * HOUR // 2, ("2040-10-28 02:30 CEST", 25)),
        # The clocks go forward at midnight; by half an hour.
        ("America/Havana", datetime(2026, 3, 8, 12), 0, ("2026-03-08 01:00 CDT", 23)),
        ("Australia/Lord_Howe", datetime(2026, 10, 4, 12), 2 * HOUR, ("2026-10-04 02:30 +11", 23.5)),
    ],
)
def test_days_begin_so_long_after_midnight_as_their_clocks_say(
    zone: str, moment: datetime, offset: int, window: tuple[str, float]
) -> None:
    local = moment.replace(tzinfo=ZoneInfo(zone))
    assert hours_of(CalendarWindows(zone, offset=offset), local) == window


def test_months_quarters_and_years_are_those_of_the_calendar() -> None:
    def days(months: int, offset: int = 0) -> tuple[str, float]:
        noon = datetime(2028, 2, 29, 12, tzinfo=ZoneInfo("Europe/Zurich"))
        begin, hours = hours_of(CalendarWindows("Europe/Zurich", months=months, offset=offset), noon)
        return begin, hours / 24

    assert days(1) == ("2028-02-01 00:00 CET", 29)
    assert days(1, offset=27 * 24 * HOUR) == ("2028-02-28 00:00 CET", 29 - 1 / 24)
    assert days(3) == ("2028-01-01 00:00 CET", 91 - 1 / 24)
    assert days(12) == ("2028-01-01 00:00 CET", 366)
    assert days(12, offset=24 * HOUR * 27 + 6 * HOUR) == ("2028-01-28 06:00 CET", 366)


# --- against the clocks of Python, one moment after the other ---------------------------------------

ZONES = (
    "UTC",
    "Europe/Zurich",
    "America/Havana",  # Forward at midnight.
    "America/St_Johns",  # Until 2011 back at one minute past midnight.
    "Asia/Kathmandu",
    "Australia/Lord_Howe",  # By half an hour.
    "Africa/Casablanca",  # Back before Ramadan.
    "Pacific/Apia",  # Without 30 December 2011.
)
MONTHS = {"month": 1, "quarter": 3, "year": 12}
Size: TypeAlias = Any


def first_shown(clock: datetime, zone: ZoneInfo) -> datetime:
    """When the clocks of a zone first show that time or a later one."""
    moment = clock.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if moment.astimezone(zone).replace(tzinfo=None) == clock:
        return moment
    low, high = microseconds(moment - timedelta(days=1)), microseconds(moment)
    while low < high:
        middle = (low + high) // 2
        if datetime_of(middle).astimezone(zone).replace(tzinfo=None) >= clock:
            high = middle
        else:
            low = middle + 1
    return datetime_of(low)


def window_of(moment: datetime, size: Size, zone: ZoneInfo, offset: timedelta) -> tuple[datetime, datetime]:
    """Start and end of the window in which a moment is."""
    clock = moment.astimezone(zone).replace(tzinfo=None)
    if isinstance(size, timedelta):
        near = (clock - offset - datetime(1970, 1, 1)) // size
        begins = [datetime(1970, 1, 1) + number * size + offset for number in range(near - 2, near + 4)]
    else:
        near = ((clock.year - 1970) * 12 + clock.month - 1) // MONTHS[size]
        months = [number * MONTHS[size] for number in range(near - 2, near + 4)]
        begins = [datetime(1970 + month // 12, month % 12 + 1, 1) + offset for month in months]
    starts = [first_shown(begin, zone) for begin in begins]
    number = max(number for number, start in enumerate(starts) if start <= moment)
    return starts[number], starts[number + 1]


@cache
def near_changes(zone: str) -> st.SearchStrategy[datetime]:
    """Moments within two days of some change of the clocks."""
    changes, known = [], ZoneInfo(zone)
    for years in ((2005, 2013), (2024, 2027), (2036, 2041)):
        hours = range(24 * 366 * (years[1] - years[0]))
        moments = [datetime(years[0], 1, 1, tzinfo=UTC) + timedelta(hours=hour) for hour in hours[::6]]
        offsets = [moment.astimezone(known).utcoffset() for moment in moments]
        changes += [moments[i] for i in range(1, len(moments)) if offsets[i] != offsets[i - 1]]
    around = st.integers(-48 * 60, 48 * 60).map(lambda minutes: timedelta(minutes=minutes))
    return st.builds(
        lambda at, by: at + by, st.sampled_from(changes or [datetime(2012, 1, 1, tzinfo=UTC)]), around
    )


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, Size, timedelta, list[datetime]]:
    """A time zone, the size and the offset of windows, and moments."""
    zone = draw(st.sampled_from(ZONES))
    size = draw(st.sampled_from([timedelta(days=1), timedelta(days=1), timedelta(days=7), *MONTHS]))
    days = size.days if isinstance(size, timedelta) else 28
    offset = timedelta(days=draw(st.integers(0, days - 1)))
    offset += timedelta(minutes=draw(st.sampled_from([0, 30, 120, 150, 180, 360]) | st.integers(0, 1439)))
    ever = st.datetimes(datetime(1902, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))
    return zone, size, offset, draw(st.lists(near_changes(zone) | ever, min_size=1, max_size=20))


@given(cuts())
def test_windows_are_those_that_the_clocks_of_python_show(
    cut: tuple[str, Size, timedelta, list[datetime]],
) -> None:
    zone, size, offset, moments = cut
    months = MONTHS.get(size, 0)
    windows = CalendarWindows(zone, 1 if months else size.days, months, offset // timedelta(microseconds=1))
    times = np.array([microseconds(moment) for moment in moments])
    ((starts, _),) = windows.assigned(times)
    found = zip(starts.tolist(), windows.ends(starts).tolist(), strict=True)
    expected = [window_of(moment, size, ZoneInfo(zone), offset) for moment in moments]
    assert [(datetime_of(start), datetime_of(end)) for start, end in found] == expected


@settings(max_examples=examples(20))
@given(cuts())
def test_rows_and_tables_have_the_same_windows(cut: tuple[str, Size, timedelta, list[datetime]]) -> None:
    zone, size, offset, moments = cut
    rows = Stream.items([{"at": moment, "k": 1} for moment in moments]).parallel(1)
    table = Table.from_arrow(
        pa.table({"at": pa.array(moments, pa.timestamp("us", "UTC")), "k": [1] * len(moments)})
    )
    found = []
    for given_as in (rows, table):
        timed = given_as.event_time("at", out_of_order=timedelta(days=36_500)).key_by("k")
        counted = timed.window(size, offset=offset, tz=zone).count()
        found.append(run(counted.collect(), Cut(seed=1)).rows)
    expected = Counter(window_of(moment, size, ZoneInfo(zone), offset) for moment in moments)
    assert Counter({start: count for _, start, count in found[0]}) == Counter(
        {start: count for (start, _), count in expected.items()}
    )
    for _, start, _ in found[0]:
        assert start.utcoffset() == start.astimezone(ZoneInfo(zone)).utcoffset()
    assert counted.schema.field("window_start").type == pa.timestamp("us", zone)
    assert {
        (row["window_start"].astimezone(UTC), row["window_end"].astimezone(UTC)): row["count"]
        for row in found[1]
    } == expected


def test_the_time_of_a_window_is_its_last_microsecond() -> None:
    row = ("key", datetime(2026, 3, 28, 23, tzinfo=UTC), 3)
    last = timedelta(microseconds=-1)
    assert LastMoment(tumbling(HOUR))(row) == row[1] + timedelta(hours=1) + last
    assert LastMoment(CalendarWindows("Europe/Zurich"))(row) == row[1] + timedelta(hours=23) + last
