"""Sliding windows and days of time zones against arithmetic on one time after the other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.dataflow.operators.moments import datetime_of, microseconds
from minishuffle.dataflow.operators.windowassigner import (
    CalendarWindows,
    LastMoment,
    SlidingWindows,
    WindowAssigner,
    tumbling,
)
from minishuffle.errors import UsageError

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
    days, moment = CalendarWindows(1, zone), naive.replace(tzinfo=UTC)
    (start,) = windows_of(days, microseconds(moment))
    end = days.last(start) + 1
    assert start <= microseconds(moment) < end
    local = ZoneInfo(zone)
    day = moment.astimezone(local).date()
    assert datetime_of(start).astimezone(local).date() == day
    assert datetime_of(start - 1).astimezone(local).date() < day < datetime_of(end).astimezone(local).date()
    assert windows_of(days, end) == [end]


@pytest.mark.parametrize("zone", ["America/St_Johns", "America/Goose_Bay", "America/Moncton"])
@pytest.mark.parametrize("days", [1, 2])
def test_a_day_ends_once_where_the_clocks_go_back_over_midnight(zone: str, days: int) -> None:
    """At 00:01 on 29 October 2006 it was 23:01 again."""
    windows, reached = CalendarWindows(days, zone), 0
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
    windows = CalendarWindows(days, "Pacific/Apia", offset % days)
    moment = microseconds(datetime(2011, 12, 30, 10, tzinfo=UTC)) + hours * HOUR
    (start,) = windows_of(windows, moment)
    end = windows.last(start) + 1
    assert start <= moment < end
    assert windows_of(windows, end - 1) == [start]
    assert windows_of(windows, end) == [end]


def test_days_have_as_many_hours_as_their_clocks_say() -> None:
    days = CalendarWindows(1, "Europe/Zurich")
    hours = {}
    for month, day in ((3, 29), (3, 30), (10, 25)):
        (start,) = windows_of(days, microseconds(datetime(2026, month, day, 12, tzinfo=UTC)))
        hours[month, day] = (days.last(start) + 1 - start) / HOUR
    assert hours == {(3, 29): 23, (3, 30): 24, (10, 25): 25}


def test_weeks_begin_on_the_day_of_their_offset() -> None:
    noon = microseconds(datetime(2026, 11, 25, 12, tzinfo=UTC))
    (thursday,) = windows_of(CalendarWindows(7, "UTC"), noon)
    (monday,) = windows_of(CalendarWindows(7, "UTC", offset=4), noon)
    assert [datetime_of(start).strftime("%a %d") for start in (thursday, monday)] == ["Thu 19", "Mon 23"]


def test_a_day_in_summer_is_one_in_all_years_to_come() -> None:
    """Arrow knows no summer time after 2037."""
    evening = microseconds(datetime(2040, 7, 1, 22, 30, tzinfo=UTC))
    (start,) = windows_of(CalendarWindows(1, "Europe/Zurich"), evening)
    assert datetime_of(start) == datetime(2040, 7, 1, 22, tzinfo=UTC)
    assert CalendarWindows(1, "Europe/Zurich").last(start) + 1 == start + 24 * HOUR
    long_after = 40 * 146_097 * 24 * HOUR  # 16,000 years
    (start,) = windows_of(CalendarWindows(1, "Europe/Zurich"), evening + long_after)
    assert start == microseconds(datetime(2040, 7, 1, 22, tzinfo=UTC)) + long_after


def test_an_unknown_time_zone_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no such time zone here: write a name"):
        CalendarWindows(1, "Mars/Olympus").check()


def test_the_time_of_a_window_is_its_last_microsecond() -> None:
    row = ("key", datetime(2026, 3, 28, 23, tzinfo=UTC), 3)
    last = timedelta(microseconds=-1)
    assert LastMoment(tumbling(HOUR))(row) == row[1] + timedelta(hours=1) + last
    assert LastMoment(CalendarWindows(1, "Europe/Zurich"))(row) == row[1] + timedelta(hours=23) + last
