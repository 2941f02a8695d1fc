"""Event time through real processes: watermarks over exchanges, windows, windows of windows, late records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.exchange.batch import Batch
from minishuffle.local import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
ROWS: list[dict[str, Any]] = [{"k": i % 3, "t": START + timedelta(minutes=7 * i), "v": i} for i in range(300)]


def hour(at: datetime) -> datetime:
    return at.replace(minute=0, second=0)


class OneSplit:
    """Rows in their order."""

    def __init__(self, rows: list[dict[str, Any]], format: str) -> None:
        self.rows = rows
        self.format = format
        self.schema = pa.RecordBatch.from_pylist(rows[:1]).schema

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Batch]:
        for first in range(offset, len(self.rows), 50):
            rows = self.rows[first : first + 50]
            yield rows if self.format == "rows" else pa.RecordBatch.from_pylist(rows)


def test_windows_and_windows_of_windows_see_every_record(cluster: LocalCluster) -> None:
    timed = Table.from_arrow(pa.Table.from_pylist(ROWS)).event_time("t", out_of_order=HOUR)
    hours = timed.key_by("k").window(HOUR).aggregate(n=("v", "count"), total=("v", "sum"))
    longer = hours.key_by("k").window(3 * HOUR).aggregate(n=("n", "sum"))
    counts = (
        Stream.items(ROWS).event_time(lambda row: row["t"]).key_by(lambda row: row["k"]).window(HOUR).count()
    )
    expected = Counter((row["k"], hour(row["t"])) for row in ROWS)

    found = cluster.run(hours, timeout=60).to_pylist()
    assert {(row["k"], row["window_start"]): row["n"] for row in found} == expected
    assert sum(row["total"] for row in found) == sum(range(300))
    assert sum(cluster.run(longer, timeout=60)["n"].to_pylist()) == 300
    pairs = cluster.run(counts.collect(), timeout=60)
    assert {(key, start): n for key, start, n in pairs} == expected


async def key_later(row: dict[str, Any]) -> int:
    """All that is left of a row."""
    return int(row["k"])


@pytest.mark.parametrize("hidden", [True, False])
def test_rows_keep_their_time_through_functions_that_leave_it_out(
    cluster: LocalCluster, hidden: bool
) -> None:
    table = Table.from_arrow(pa.Table.from_pylist(ROWS)).event_time("t", out_of_order=HOUR)
    rows = table.drop("t").to_rows() if hidden else Stream.items(ROWS).event_time(lambda row: row["t"])
    keys = rows.map_async(key_later, concurrency=4).map(str).filter(len)
    counts = keys.key_by(int).process(lambda key, context: [key]).key_by(int).window(HOUR).count()
    found = cluster.run(counts.collect(), timeout=60)
    assert {(key, start): n for key, start, n in found} == Counter((row["k"], hour(row["t"])) for row in ROWS)


@pytest.mark.parametrize("format", ["rows", "arrow"])
def test_late_records_are_the_ones_a_loop_names(cluster: LocalCluster, format: str) -> None:
    rows = sorted(ROWS, key=lambda row: (row["v"] * 37 % 300 // 40, row["v"]))
    late: list[int] = []
    latest = START - HOUR
    for row in rows:
        latest = max(latest, row["t"])
        if hour(row["t"]) + HOUR <= latest - HOUR:
            late.append(row["v"])
    assert 10 < len(late) < 290

    make: Any = Stream if format == "rows" else Table
    timed = (
        make.source(OneSplit(rows, format)).parallel(1).event_time("t", out_of_order=HOUR, watermarks="each")
    )
    windows = timed.key_by("k").window(HOUR, late="side").count()
    both = Stream.together(windows.collect("windows"), windows.late.collect("late"))
    parts = cluster.submit(both).wait(timeout=60).collected
    assert sorted(row["v"] for row in parts["late"]) == sorted(late)
    found = parts["windows"]
    in_time = [row for row in ROWS if row["v"] not in late]
    expected = Counter((row["k"], hour(row["t"])) for row in in_time)
    if format == "rows":
        assert {(key, start): n for key, start, n in found} == expected
    else:
        assert {(row["k"], row["window_start"]): row["count"] for row in found} == expected


def test_late_records_and_windows_in_one_job_are_all_records(cluster: LocalCluster) -> None:
    source = Table.source(OneSplit(ROWS[::-1], "arrow")).parallel(1)
    timed = source.event_time("t", watermarks="each")
    windows = timed.key_by("k").window(HOUR, late="side").aggregate(n=("v", "count")).name("hours")
    late = windows.late.to_rows().map(lambda row: ("late", row["v"]))
    counted = windows.to_rows().map(lambda row: ("in time", row["n"]))
    rows = cluster.run(Stream.together(late.collect("late"), counted.collect()), timeout=60)
    in_time = sum(n for kind, n in rows if kind == "in time")
    assert in_time == sum(hour(row["t"]) == hour(ROWS[-1]["t"]) for row in ROWS)
    assert len([v for kind, v in rows if kind == "late"]) == 300 - in_time


class Alone:
    """Rows of one split, each in a batch of its own."""

    bounded = True

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Batch]:
        for row in self.rows[offset:]:
            yield [row]


def test_the_parts_of_a_union_say_by_themselves_which_of_their_records_are_late(
    cluster: LocalCluster,
) -> None:
    def part(*seconds: int) -> Stream[int]:
        source = Stream.source(Alone(list(seconds))).parallel(1)
        return source.event_time(lambda second: second * 1_000_000, watermarks="each")

    for _ in range(4):
        both = part(1, 10, 2, 20, 3).union(part(5, 1, 30, 2))
        windows = both.key_by(lambda second: 0).window(timedelta(seconds=1), late="side").count()
        sinks = Stream.together(windows.collect("windows"), windows.late.collect("late"))
        found = cluster.submit(sinks).wait(timeout=60).collected
        assert (len(found["windows"]), sorted(found["late"])) == (5, [1, 2, 2, 3])


class Silent:
    """A source that has nothing now, and never will."""

    bounded = False

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Batch]:
        while True:
            yield []


def test_a_silent_source_holds_nothing_back_once_it_is_idle(
    cluster: LocalCluster, wait_until: Callable[..., Any]
) -> None:
    def numbered(start: int, count: int) -> list[dict[str, int]]:
        return [{"k": number % 3, "t": number * 10_000} for number in range(start, start + count)]

    numbers = Stream.generate(numbered, rate=2_000).event_time("t")
    silent: Stream[Any] = Stream.source(Silent()).event_time("t", idle_after=timedelta(seconds=1))
    windows = numbers.union(silent).key_by("k").window(timedelta(seconds=1)).count()
    job = cluster.submit(windows.print(), name="idle")
    try:
        wait_until(lambda: list(job.logs()), "the first window")
    finally:
        job.cancel()
        job.wait_until_over(timeout=30)
