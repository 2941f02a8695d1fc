"""Event time and windows: what a user may write, what is known afterwards, what each mistake is told."""

from __future__ import annotations

from datetime import timedelta
from zoneinfo import ZoneInfo

import pytest

from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.sessions import last_of_session
from minishuffle.operators.window_assigner import LastMoment, tumbling
from support.planned import HOUR, last, rows, table, timed

HOUR_MICROSECONDS = 3_600_000_000
ZURICH = "Europe/Zurich"


# --- windows --------------------------------------------------------------------------------------


def test_windows_need_a_size_and_event_time() -> None:
    keyed = timed().key_by("user")
    for size, told in (
        (5, "takes a datetime.timedelta"),
        (timedelta(0), "takes a time above 0"),
        (timedelta.max, "takes a time of at most 36500 days"),
    ):
        with pytest.raises(UsageError, match=f"window {told}"):
            keyed.window(size)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="write 'drop', 'side' or 'fail'"):
        keyed.window(HOUR, late="keep")  # type: ignore[arg-type]
    for wrong, told in (
        ({"slide": 2 * HOUR}, r"slide=...\) takes at most the window's size"),
        ({"slide": timedelta(seconds=3)}, "each record would be in 1,200 windows, and 1,000 are possible"),
        ({"offset": HOUR}, r"offset=...\) takes a time below"),
        ({"tz": "Europe/Zurich"}, "takes a size of whole days"),
        ({"tz": "Europe/Zurich", "offset": HOUR}, "takes a size of whole days"),
    ):
        with pytest.raises(UsageError, match=told):
            keyed.window(HOUR, **wrong)  # type: ignore[arg-type]
    for size, wrong, told in (
        (24 * HOUR, {"tz": "UTC", "slide": HOUR}, "follow each other: leave out slide="),
        (24 * HOUR, {"tz": "UTC", "offset": 24 * HOUR}, "takes less than 24 hours"),
        ("month", {"slide": HOUR}, "follow each other: leave out slide="),
        ("month", {"offset": timedelta(days=28)}, "takes less than 672 hours"),
        ("year", {"tz": 3}, "takes the name of a time zone"),
        ("year", {"early": timedelta(days=28)}, "early=...\\) takes a time below"),
        (
            "week",
            {},
            "or 'month', 'quarter' or 'year', not 'week': write timedelta\\(days=7\\)$",
        ),
    ):
        with pytest.raises(UsageError, match=told):
            keyed.window(size, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no such time zone here"):
        keyed.window(24 * HOUR, tz="Europe/Zürich")
    by_name, by_zone = (keyed.window("month", tz=zone)._windowing for zone in (ZURICH, ZoneInfo(ZURICH)))
    assert by_name == by_zone
    with pytest.raises(InvalidGraph, match=r"(?m)call event_time\(...\) before key_by$"):
        rows().key_by("user").window(HOUR)
    assert "of 3600 s" in repr(keyed.window(HOUR))
    assert "of a quarter" in repr(keyed.window("quarter", tz="Asia/Kathmandu", offset=timedelta(days=27)))


def test_windows_of_so_many_records_need_a_number_and_event_time() -> None:
    for size in (0, -1, 2.0, True, HOUR):
        with pytest.raises(UsageError, match="count_window takes a whole number from 1 on, not "):
            timed().key_by("user").count_window(size)  # type: ignore[arg-type]
    with pytest.raises(InvalidGraph, match="count_window needs the event time"):
        table().key_by("user").count_window(3)
    counted = timed().key_by("user").count_window(1_000, late="side")
    assert "of windows of 1,000 records" in repr(counted)
    assert counted.count().late is not None


def test_sessions_need_a_gap_and_event_time() -> None:
    with pytest.raises(UsageError, match="session_window takes a time above 0"):
        timed().key_by("user").session_window(timedelta(0))
    with pytest.raises(InvalidGraph, match="session_window needs the event time"):
        rows().key_by("user").session_window(HOUR)
    sessions = timed().key_by("user").session_window(HOUR, late="side")
    assert "of sessions with gaps of 3600 s" in repr(sessions)
    counted = sessions.count()
    assert counted.plan.gives.time == EventTime(fn=last_of_session) and counted.late is not None
    by_columns = table().event_time("t").key_by("user").session_window(HOUR).count()
    assert by_columns.plan.gives.columns == ("user", "window_start", "window_end", "count")


def test_results_on_rows_have_a_time() -> None:
    windows = rows().event_time("t").key_by("user").window(HOUR)
    for stream in (windows.count(), windows.reduce(max), windows.fold(list, list.__add__)):
        assert stream.plan.gives.time == EventTime(fn=LastMoment(tumbling(HOUR_MICROSECONDS)))
    assert last(windows.fold(list, list.__add__)).label == "window_fold"
    with pytest.raises(
        UsageError, match=r"aggregate\(\) works on columns, and this is a WindowedStream of rows"
    ):
        windows.aggregate(n=("t", "count"))  # type: ignore[attr-defined]
