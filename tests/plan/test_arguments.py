"""What methods are given: what is accepted, as what, and what each mistake is answered with."""

from __future__ import annotations

import asyncio
import functools
import re
import types
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.errors import UnknownName, UsageError
from minishuffle.limits import ASYNC_CALLS_MAX, DURATION_MAX, NAME_BYTES_MAX, PARALLELISM_MAX
from minishuffle.plan.arguments import (
    check_callable,
    check_columns,
    check_distinct,
    check_key_types,
    check_late,
    check_time_type,
    checked_concurrency,
    checked_duration,
    checked_job_name,
    checked_name,
    checked_parallelism,
    checked_paths,
    discovery_seconds,
    key_columns,
)
from support.planned import rows

# --- functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["map", "filter", "flat_map", "partition"])
def test_what_is_no_function_is_refused(method: str) -> None:
    with pytest.raises(UsageError, match=rf"{method} takes a function, not 'upper' \(str\)"):
        getattr(rows(), method)("upper")


async def fetched(row: Any) -> Any:
    return row


class Fetch:
    async def __call__(self, row: Any) -> Any:
        return row


@pytest.mark.parametrize("fn", [fetched, Fetch(), functools.partial(fetched)])
@pytest.mark.parametrize("method", ["map", "filter", "flat_map", "partition"])
def test_what_is_to_be_awaited_is_left_to_map_async(method: str, fn: Any) -> None:
    with pytest.raises(UsageError, match=rf"{method} awaits nothing, .*: write map_async\(fn, concurrency"):
        getattr(rows(), method)(fn)
    rows().map_async(fn, concurrency=2)


class Session:
    def fetch(self, row: Any) -> Any:
        return fetched(row)

    def each(self, row: Any) -> Iterator[Any]:
        yield row

    async def all(self, row: Any) -> AsyncIterator[Any]:
        yield row

    @types.coroutine
    def awaited(self, row: Any) -> Generator[Any, Any, Any]:
        yield


class Steps:
    def __call__(self, row: Any) -> Iterator[Any]:
        yield row


class Request:
    """Its instances can be awaited."""

    def __init__(self, row: Any) -> None:
        self.row = row

    def __await__(self) -> Iterator[Any]:
        yield self.row


@pytest.mark.parametrize(
    "fn", [str, Session().each, Session().all, Steps(), functools.partial(functools.partial(str))]
)
def test_what_gives_nothing_to_await_is_refused(fn: Any) -> None:
    with pytest.raises(UsageError, match=r"map_async takes an asynchronous function, .* with 'async def'"):
        rows().map_async(fn, concurrency=2)


@pytest.mark.parametrize(
    "fn", [lambda row: fetched(row), Session().fetch, Session().awaited, Request, asyncio.Future, print]
)
def test_what_may_give_something_to_await_is_not_refused(fn: Any) -> None:
    check_callable(fn, "map_async", awaited=True)
    assert rows().map_async(fn, concurrency=2)


# --- choices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["map", "filter", "flat_map"])
def test_on_error_is_checked_where_it_is_written(method: str) -> None:
    with pytest.raises(UsageError, match="on_error is 'ignore'"):
        getattr(rows(), method)(str, on_error="ignore")
    assert getattr(rows(), method)(str, on_error="dead_letter")


def test_late_records_are_dropped_put_aside_or_fail_the_job() -> None:
    for late in ("drop", "side", "fail"):
        check_late(late)
    with pytest.raises(UsageError, match="^late is 'keep': write 'drop', 'side' or 'fail'$"):
        check_late("keep")


# --- numbers, times, names --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checked", "most", "says"),
    [
        (lambda count: checked_parallelism(count, "parallel"), PARALLELISM_MAX, "parallel takes a whole"),
        (checked_concurrency, ASYNC_CALLS_MAX, r"map_async\(concurrency=...\) takes 1 to"),
    ],
    ids=["parallelism", "concurrency"],
)
def test_a_count_is_a_whole_number_in_bounds(checked: Callable[[Any], int], most: int, says: str) -> None:
    assert [checked(1), checked(most)] == [1, most]
    for wrong in (0, -1, True, 1.5, "2", None, most + 1):
        with pytest.raises(UsageError, match=says):
            checked(wrong)


def test_a_duration_is_microseconds_of_a_timedelta() -> None:
    assert checked_duration(timedelta(seconds=1, microseconds=5), "x") == 1_000_005
    assert checked_duration(timedelta(0), "x") == 0
    assert checked_duration(DURATION_MAX, "x") == DURATION_MAX // timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("duration", "positive", "says"),
    [
        (5, False, r"^x takes a datetime.timedelta, not 5 \(int\)$"),
        (timedelta(microseconds=-1), False, "^x takes a time from 0, not"),
        (timedelta(0), True, "^x takes a time above 0, not 0:00:00$"),
        (DURATION_MAX + timedelta(microseconds=1), False, f"at most {DURATION_MAX.days} days, not"),
    ],
)
def test_other_durations_are_refused(duration: Any, positive: bool, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        checked_duration(duration, "x", positive=positive)


@pytest.mark.parametrize("name", ["", "  ", None, "a\nb", "a\x1b[31mb", "é" * (NAME_BYTES_MAX // 2 + 1)])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(UsageError, match=f"^sides takes a name of 1 to {NAME_BYTES_MAX} bytes"):
        checked_name(name, "sides")
    with pytest.raises(UsageError, match=r"^a job's name has 1 to .*: choose another --name$"):
        checked_job_name(name)


def test_a_name_is_a_text_that_can_be_printed() -> None:
    longest = "é" * (NAME_BYTES_MAX // 2)
    assert [checked_name(longest, "sides"), checked_job_name("a b")] == [longest, "a b"]


# --- columns ----------------------------------------------------------------------------------------


def test_columns_are_given_one_by_one_or_as_a_list() -> None:
    assert key_columns(("a", "b")) == key_columns((["a", "b"],)) == key_columns((("a", "b"),)) == ("a", "b")
    with pytest.raises(
        UsageError,
        match=r"^key_by takes column names or one function of a row, not \(\): for one group of all rows",
    ):
        key_columns(())
    with pytest.raises(UsageError, match=r"^select takes column names, not \('a', 1\)$"):
        key_columns(("a", 1), "select")
    with pytest.raises(UsageError, match="^drop names a column twice: a, b, a$"):
        key_columns((["a", "b", "a"],), "drop")


def test_a_column_that_is_not_there_is_named_with_one_that_is() -> None:
    check_columns(["b", "a"], ("a", "b"), "select")
    check_columns(["whatever"], None, "key_by")
    with pytest.raises(UnknownName) as raised:
        check_columns(["prise"], ("user", "price"), "select")
    assert str(raised.value) == (
        "select: there is no column 'prise'; did you mean 'price'? there are user, price"
    )
    with pytest.raises(UnknownName, match="^select: there is no column 'z'; there are user\n") as raised:
        check_columns(["z"], ("user",), "select")
    assert raised.value.__notes__ == ["(minishuffle explain MS-111)"]
    with pytest.raises(UsageError, match="^select: there are several columns 'a': give each a name"):
        check_columns(["a"], ("a", "b", "a"), "select")


def test_times_are_timestamps_dates_and_integers() -> None:
    kinds = [pa.timestamp("s"), pa.timestamp("ns", "UTC"), pa.date32(), pa.date64(), pa.int8(), pa.uint64()]
    for kind in [*kinds, pa.null()]:
        check_time_type(pa.schema({"t": kind}), "t")
    for kind in (pa.float64(), pa.string(), pa.time64("us"), pa.bool_()):
        cast = r" first, as with_columns\(at=col\('t'\)" if kind == pa.string() else " to a timestamp"
        with pytest.raises(
            UsageError, match=rf"'t' of type {re.escape(str(kind))} holds no times: cast it{cast}"
        ):
            check_time_type(pa.schema({"t": kind}), "t")


def test_keys_are_of_types_whose_values_can_be_compared() -> None:
    schema = pa.schema({"k": pa.dictionary(pa.int8(), pa.string()), "l": pa.list_(pa.int64())})
    check_key_types(schema, ["k"])
    with pytest.raises(UsageError, match="^key_by, column 'l': "):
        check_key_types(schema, ["k", "l"])


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.struct({"a": pa.int64()}),
        pa.map_(pa.string(), pa.int64()),
        pa.json_(),
    ],
)
def test_columns_that_can_be_no_key_and_no_time_are_refused_where_that_is_written(kind: pa.DataType) -> None:
    table = Table.from_arrow(pa.table({"k": pa.nulls(2, kind)}))
    with pytest.raises(UsageError, match="key_by, column 'k': a column of type .* cannot be a key"):
        table.key_by("k")
    with pytest.raises(UsageError, match="event_time: column 'k' of type .* holds no times"):
        table.event_time("k")


def test_two_columns_of_one_name_make_no_dicts() -> None:
    twice = Table.from_arrow(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]))
    for leave in (twice.collect, twice.to_rows):
        with pytest.raises(
            UsageError, match="dict rows cannot hold two columns of one name: rename some of a, a"
        ):
            leave()


def test_names_that_are_known_are_distinct() -> None:
    for names in (None, (), ("a", "b")):
        check_distinct(names, "collect")
    with pytest.raises(UsageError, match="^collect: dict rows cannot hold two .*: rename some of a, b, a$"):
        check_distinct(("a", "b", "a"), "collect")


# --- paths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [Stream.text, Table.from_files])
def test_sources_take_paths_only(source: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"takes paths, not 3 \(int\)"):
        source(3)
    with pytest.raises(UsageError, match="at least one file"):
        source()


def test_paths_are_given_one_by_one_or_as_a_list() -> None:
    paths = ["a", Path("b")]
    assert checked_paths(("a", Path("b")), "text") == checked_paths((paths,), "text") == paths
    assert checked_paths(("a",), "text") == ["a"]


# --- sources ----------------------------------------------------------------------------------------


class Discovering:
    """A source whose splits change, with other attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update({"replayable": True, "bounded": False, "discovery_interval": timedelta(seconds=2)})
        vars(self).update(attributes)

    def splits(self) -> list[str]:
        return []

    def read(self, split: str, position: bytes, /) -> Iterator[Any]:
        yield [], position


def test_how_often_splits_are_looked_for() -> None:
    assert discovery_seconds(Discovering()) == 2.0
    assert discovery_seconds(Discovering(discovery_interval=None, bounded=True)) is None
    unnamed = Discovering()
    del unnamed.replayable  # type: ignore[attr-defined]
    for source, message in (
        (Discovering(discovery_interval=2), r"Discovering\.discovery_interval takes a datetime\.timedelta"),
        (Discovering(bounded=True), "so that it never ends: set bounded = False"),
        (Discovering(rate=5.0), "leave one of them out"),
        (unnamed, "no names for its splits: give it the attribute replayable"),
    ):
        with pytest.raises(UsageError, match=message):
            Stream.source(source)
