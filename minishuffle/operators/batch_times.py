"""Event times of whole batches: int64 vectors, microseconds since 1970 in UTC."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any, Final, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import (
    MissingColumn,
    UnknownName,
    UsageError,
    WrongColumns,
    WrongResult,
    did_you_mean,
    end_job_by,
)
from minishuffle.exchange.batch import Batch
from minishuffle.operators.chained import preview
from minishuffle.operators.event_time import EventTime

__all__ = ["TIME_MAX", "TIME_MIN", "datetime_of", "event_times", "given_times", "microseconds"]

Vector: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NAIVE_EPOCH: Final = datetime(1970, 1, 1)
_MICROSECOND: Final = timedelta(microseconds=1)
_MIDNIGHT: Final = time()

TIME_MIN: Final = (datetime.min - _NAIVE_EPOCH) // _MICROSECOND
TIME_MAX: Final = (datetime.max - _NAIVE_EPOCH) // _MICROSECOND
"""Event times are in the years 1 to 9999, so that sums of a few of them fit, and seconds or nanoseconds
given as microseconds are noticed more often than not."""

_MEND: Final = "give it a datetime or whole microseconds since 1970, or leave such records out before"


def microseconds(value: Any) -> int:
    """A datetime (without a time zone: in UTC), a date or int microseconds as int microseconds.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return (value - _NAIVE_EPOCH) // _MICROSECOND
        return (value - _EPOCH) // _MICROSECOND
    if isinstance(value, date):
        return (datetime.combine(value, _MIDNIGHT) - _NAIVE_EPOCH) // _MICROSECOND
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    raise TypeError(f"{value!r:.80} ({type(value).__name__}) is no time")


def datetime_of(time: int, zone: str = "UTC") -> datetime:
    """Microseconds as a datetime, as the clocks of a time zone show it. It has their offset, as if it had
    crossed an exchange, and not the zone: two of one ZoneInfo are subtracted by what these clocks show.

    Raises:
        UsageError: it is before the year 1 or after 9999.
    """
    try:
        moment = _EPOCH + timedelta(microseconds=time)
        if zone == "UTC":
            return moment
        offset = moment.astimezone(ZoneInfo(zone)).utcoffset()
        assert offset is not None
        return moment.astimezone(timezone(offset))
    except OverflowError as error:
        raise UsageError(
            f"the time {time} (microseconds since 1970) is outside the years 1 to 9999: check the unit of "
            "event_time(), or choose a smaller window"
        ) from error


def event_times(time: EventTime, batch: Batch, *, first: bool = False) -> Vector:
    """The event time of each record.

    Args:
        first: no record before these had a time: what is wrong with the column in all is so in others.

    Raises:
        UsageError: a record has no time, or what stands there is none.
        UnknownName: there is no such column.
        MissingColumn: in none of the first records.
        WrongColumns: none of the first records is a dict, or all have texts or floats there.
        WrongResult: the function gives no time for any of the first records, or a source brings none.
    """
    payload = batch.payload
    if time.is_beside:
        if batch.times is None:
            raise WrongResult(
                "event_time() has no column or function, and a batch came without times: have the source "
                "yield TimedBatch(batch, times), or say where they stand, event_time('at')"
            )
        times = batch.times
    elif not isinstance(payload, list):
        times = _arrow_times(time, payload)
    else:
        times = _row_times(time, payload, first)
    return times + time.shift if time.shift else times


def given_times(times: Any, rows: int) -> Vector:
    """The times that a source brings with a batch of so many rows, as :class:`~.base.TimedBatch` has them.

    Raises:
        UsageError: they are not as many, or not all are times in the years 1 to 9999.
    """
    if isinstance(times, np.ndarray) and times.dtype != object:
        try:
            times = pa.array(times)
        except pa.ArrowException as error:
            raise UsageError(f"times that are no vector of them ({error})") from error
    if isinstance(times, pa.ChunkedArray):
        times = times.combine_chunks()
    if not hasattr(times, "__len__") or isinstance(times, str | bytes | Set | Mapping):
        raise UsageError(
            f"{times!r:.80} instead of the times of {rows} rows: give a list or a vector of them"
        )
    if len(times) != rows:
        raise UsageError(f"{len(times)} times for {rows} rows: give each row one")
    if not rows:
        return np.empty(0, dtype=np.int64)
    if isinstance(times, pa.Array):
        if times.null_count:
            raise UsageError(f"a vector of times with {times.null_count} nulls: give each row a time")
        found = _column_times("a vector of times", times)
    else:
        try:
            found = np.array([microseconds(time) for time in times], dtype=np.int64)
        except (TypeError, OverflowError, ValueError) as error:  # ValueError: pandas' NaT, a datetime.
            raise UsageError(f"{error}: give datetimes or whole microseconds since 1970") from error
    if len(found) and not (found.min() >= TIME_MIN and found.max() <= TIME_MAX):
        odd = int(found.min() if found.min() < TIME_MIN else found.max())
        raise UsageError(
            f"the time {odd}, which is outside the years 1 to 9999: give datetimes or whole microseconds "
            "since 1970"
        )
    return found


def _row_times(time: EventTime, rows: Sequence[Any], first: bool) -> Vector:
    if time.fn is not None:
        times = _times_given(time.fn, rows, first)
    else:
        times = _times_in(str(time.column), rows, first)
    if times and not (min(times) >= TIME_MIN and max(times) <= TIME_MAX):
        odd = next(row for row, at in zip(rows, times, strict=True) if not TIME_MIN <= at <= TIME_MAX)
        raise UsageError(f"the event time of {preview(odd)} is outside the years 1 to 9999: {_MEND}")
    return np.array(times, dtype=np.int64)


def _times_given(fn: Callable[[Any], Any], rows: Sequence[Any], first: bool) -> list[int]:
    """What a function gives for each row. What it raises for the first of them, and has no time for any other
    either, ends the job."""
    times: list[int] = []
    for row in rows:
        try:
            given = fn(row)
        except Exception as error:
            error.add_note(f"raised by the function of event_time() for the record {preview(row)}")
            if first and not times and all(_gives_no_time(fn, other) for other in rows[1:]):
                end_job_by(error)
            raise
        try:
            times.append(microseconds(given))
        except TypeError as error:
            of_all = first and not times and all(_gives_no_time(fn, other) for other in rows[1:])
            kind = WrongResult if of_all else UsageError
            raise kind(f"the event time of the record {preview(row)}: {error}: {_MEND}") from error
    return times


def _gives_no_time(fn: Callable[[Any], Any], row: Any) -> bool:
    """Whether a function raises for the row, or gives what is no time."""
    try:
        microseconds(fn(row))
    except Exception:
        return True
    return False


def _times_in(name: str, rows: Sequence[Any], first: bool) -> list[int]:
    """What stands in a column of each row."""
    times: list[int] = []
    for row in rows:
        try:
            times.append(microseconds(row[name]))
        except (LookupError, TypeError) as error:
            found = _no_time(name, row, error)
            kind = _fault_of_all(name, rows) if first else None
            raise (found if kind is None else kind(str(found))) from error
    return times


def _fault_of_all(name: str, rows: Sequence[Any]) -> type[UsageError] | None:
    """What is wrong with the column in all rows alike; None: nothing."""
    dicts = [row for row in rows if isinstance(row, dict)]
    if not dicts:
        return WrongColumns
    if not any(name in row for row in dicts):
        return MissingColumn
    values = [row.get(name) for row in dicts]
    no_time = all(isinstance(value, str | bytes | float | bool) for value in values)
    return WrongColumns if no_time else None


def _no_time(name: str, row: Any, error: Exception) -> UsageError:
    if not isinstance(row, dict):
        return UsageError(
            f"the event time is in the column {name!r}, but a record is {preview(row)}: map the "
            "records to dicts first, or give event_time() a function"
        )
    if name not in row:
        there = f"{did_you_mean(name, row)}the row has {', '.join(map(str, row))}"
        return UnknownName(
            f"no column {name!r} for the event time: {there}: name "
            "another column in event_time(), or give it a function"
        )
    way = _MEND
    if isinstance(row[name], str):
        way = (
            f"write event_time(lambda row: datetime.fromisoformat(row[{name!r}])) for ISO texts, else {_MEND}"
        )
    return UsageError(f"column {name!r} of the record {preview(row)}: {error}: {way}")


def _arrow_times(time: EventTime, batch: pa.RecordBatch) -> Vector:
    name = str(time.column)
    column = batch.column(name)
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        shown = preview(batch.slice(row, 1).to_pylist()[0])
        raise UsageError(f"column {name!r} of the record {shown}: None is no time: {_MEND}")
    times = _column_times(f"column {name!r}", column)
    if len(times) and not (times.min() >= TIME_MIN and times.max() <= TIME_MAX):
        raise UsageError(f"a time in column {name!r} is outside the years 1 to 9999: {_MEND}")
    return times


_PER_UNIT: Final = {"s": 1_000_000, "ms": 1000, "us": 1}


def _column_times(what: str, column: pa.Array) -> Vector:
    """Whatever the unit; parts of a microsecond are cut off downwards."""
    kind = column.type
    try:
        if pa.types.is_timestamp(kind) and kind.unit == "ns":
            nanoseconds: Vector = column.cast(pa.int64()).to_numpy()
            return nanoseconds // 1000
        if pa.types.is_timestamp(kind):
            column = pc.multiply_checked(column.cast(pa.int64()), _PER_UNIT[kind.unit])
        elif pa.types.is_date(kind):
            column = column.cast(pa.timestamp("us")).cast(pa.int64())
        elif pa.types.is_integer(kind) or pa.types.is_null(kind):
            column = column.cast(pa.int64())
        else:
            raise WrongColumns(
                f"{what} of type {kind} holds no times: cast it to a timestamp, a date, or int64 "
                "microseconds since 1970"
            )
    except pa.ArrowException as error:
        raise UsageError(f"a time in {what} of type {kind} does not fit ({error}): {_MEND}") from error
    times: Vector = column.to_numpy()
    return times
