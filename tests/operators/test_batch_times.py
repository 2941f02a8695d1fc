"""Event times of batches, whatever holds them, and what is no time."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from minishuffle.errors import UsageError, WrongResult, ends_job
from minishuffle.exchange.batch import Batch
from minishuffle.operators.batch_times import TIME_MAX, TIME_MIN, datetime_of, event_times, given_times
from minishuffle.operators.event_time import EventTime

T = EventTime(column="t")
AT = datetime(2026, 11, 21, 7, 30, 0, 123456)
MICROS = 1_795_246_200_123_456
MIDNIGHT = 1_795_219_200_000_000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (AT, MICROS),
        (AT.replace(tzinfo=UTC), MICROS),
        (AT.replace(tzinfo=timezone(timedelta(hours=2))), MICROS - 7_200_000_000),
        (date(2026, 11, 21), MIDNIGHT),
        (MICROS, MICROS),
        (-1, -1),
        (datetime.min, TIME_MIN),
        (datetime.max, TIME_MAX),
    ],
    ids=str,
)
def test_times_of_rows(value: Any, expected: int) -> None:
    assert event_times(T, Batch([{"t": value}])).tolist() == [expected]
    assert event_times(EventTime(fn=lambda row: row), Batch([value], [1])).tolist() == [expected]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([AT], pa.timestamp("us")), MICROS),
        (pa.array([AT.replace(tzinfo=UTC)], pa.timestamp("us", "America/New_York")), MICROS),
        (pa.array([MICROS * 1000 + 999], pa.timestamp("ns", "UTC")), MICROS),
        (pa.array([-1], pa.timestamp("ns")), -1),
        (pa.array([7], pa.timestamp("ms")), 7000),
        (pa.array([-7], pa.timestamp("s")), -7_000_000),
        (pa.array([date(2026, 11, 21)], pa.date32()), MIDNIGHT),
        (pa.array([date(2026, 11, 21)], pa.date64()), MIDNIGHT),
        (pa.array([MICROS], pa.int64()), MICROS),
        (pa.array([MICROS], pa.uint64()), MICROS),
        (pa.array([12], pa.int16()), 12),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_times_of_columns(array: pa.Array, expected: int) -> None:
    several = pa.concat_arrays([array, array, array]).slice(1)
    assert event_times(T, Batch(pa.record_batch({"t": several}))).tolist() == [expected, expected]


def test_a_shift_is_added() -> None:
    shifted = EventTime(column="t", shift=-1)
    assert event_times(shifted, Batch([{"t": 5}])).tolist() == [4]
    assert event_times(shifted, Batch(pa.record_batch({"t": [5]}))).tolist() == [4]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"t": None}, r"column 't' of the record \{'t': None\}: None \(NoneType\) is no time: give it"),
        ({"t": "noon"}, r"'noon' \(str\) is no time: write .* datetime.fromisoformat\(row\['t'\]\)\) for"),
        ({"t": True}, "True .bool. is no time"),
        ({"t": 1.5}, "1.5 .float. is no time"),
        ({"s": 1}, "no column 't' for the event time: the row has s: name another column"),
        ((1, 2), r"a record is \(1, 2\): map the records to dicts"),
        ({"t": 10**18}, r"outside the years 1 to 9999"),
    ],
    ids=str,
)
def test_rows_without_a_time_are_named(row: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        event_times(T, Batch([{"t": 1}, row]))


def test_a_function_without_a_time_names_the_record() -> None:
    with pytest.raises(UsageError, match=r"the event time of the record 'x': None .* is no time"):
        event_times(EventTime(fn=lambda row: None), Batch(["x"]))
    with pytest.raises(KeyError) as caught:
        event_times(EventTime(fn=lambda row: {}[row]), Batch(["x"]))
    assert "record 'x'" in caught.value.__notes__[0]
    assert not ends_job(caught.value)


@pytest.mark.parametrize(
    ("fn", "rows", "ends"),
    [
        (lambda row: {}[row], ["x", "y"], True),
        (lambda row: row.at, ["x"], True),
        (int, ["x", "7"], False),
        (int, ["7", "x"], False),
        (lambda row: None, ["x", "y"], True),
        (lambda row: 7 if row == "y" else None, ["x", "y"], False),
    ],
)
def test_a_function_that_has_a_time_for_none_of_the_first_records_ends_the_job(
    fn: Any, rows: list[str], ends: bool
) -> None:
    with pytest.raises((LookupError, AttributeError, ValueError, UsageError)) as caught:
        event_times(EventTime(fn=fn), Batch(rows), first=True)
    assert (ends_job(caught.value) or isinstance(caught.value, WrongResult)) is ends


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (pa.array([1, None]), r"column 't' of the record \{'t': None\}: None is no time"),
        (pa.array([1, 10**18]), "a time in column 't' is outside the years 1 to 9999"),
        (pa.array([2**63], pa.uint64()), r"a time in column 't' of type uint64 does not fit"),
        (pa.array([2**62], pa.timestamp("s")), r"a time in column 't' .* does not fit"),
        (pa.array(["noon"]), "column 't' of type string holds no times: cast it"),
    ],
    ids=str,
)
def test_columns_without_times_are_named(array: pa.Array, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        event_times(T, Batch(pa.record_batch({"t": array})))


def test_moments_beyond_the_calendar_are_told() -> None:
    assert datetime_of(MICROS) == AT.replace(tzinfo=UTC)
    with pytest.raises(UsageError, match="outside the years 1 to 9999"):
        datetime_of(TIME_MIN - 1)


@pytest.mark.parametrize(
    "times",
    [
        [AT, MICROS],
        (AT.replace(tzinfo=UTC), MICROS),
        np.array([MICROS, MICROS]),
        np.array([AT, AT], dtype="datetime64[us]"),
        np.array([AT, AT]),
        pa.array([AT, AT]),
        pa.chunked_array([[AT], [AT]]),
    ],
    ids=lambda times: type(times).__name__,
)
def test_times_that_a_source_brings(times: Any) -> None:
    assert given_times(times, 2).tolist() == [MICROS, MICROS]
    assert given_times(np.array([]), 0).tolist() == []


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ([AT], "1 times for 2 rows: give each row one"),
        (MICROS, "1795246200123456 instead of the times of 2 rows: give a list or a vector"),
        ("at", "'at' instead of the times of 2 rows"),
        ([AT, None], r"None \(NoneType\) is no time: give datetimes or whole microseconds since 1970"),
        ([1.5, 2], r"1.5 \(float\) is no time"),
        ([0, 1 << 64], "give datetimes or whole microseconds"),
        ([0, TIME_MAX + 1], f"the time {TIME_MAX + 1}, which is outside the years 1 to 9999"),
        (pa.array([AT, None]), "a vector of times with 1 nulls: give each row a time"),
        (np.array([1.5, 2.0]), "a vector of times of type double holds no times: cast it to a timestamp"),
        ([AT, pd.NaT], "NaN to integer: give datetimes or whole microseconds"),
        (np.array([[1, 2], [3, 4]]), "times that are no vector of them"),
        (np.array(["2026", "2027"], dtype="datetime64[Y]"), "times that are no vector of them"),
        ({MICROS, 1}, r"instead of the times of 2 rows: give a list or a vector"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_times_of_a_source_that_are_none_are_told(times: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        given_times(times, 2)


def test_times_beside_the_records_have_to_be_there() -> None:
    with pytest.raises(WrongResult, match=r"a batch came without times: have the source yield TimedBatch"):
        event_times(EventTime(is_beside=True), Batch([1]))
