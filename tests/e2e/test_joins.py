"""Joins and process functions through real processes: late records, watermarks behind a join, who waits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.exchange.batch import Batch
from minishuffle.local import LocalCluster
from minishuffle.operators.keyed_process import ProcessContext

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("wider_resources")]

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
LEFT: list[dict[str, Any]] = [{"k": i % 5, "t": START + 3 * i * MINUTE, "a": i} for i in range(300)]
RIGHT: list[dict[str, Any]] = [{"k": i % 7, "t": START + 11 * i * MINUTE, "b": i} for i in range(100)]


class OneSplit:
    """Rows in their order."""

    format = "arrow"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[Batch]:
        for first in range(offset, len(self.rows), 20):
            yield pa.RecordBatch.from_pylist(self.rows[first : first + 20])


def pairs(left: list[dict[str, Any]], right: list[dict[str, Any]], how: str) -> list[tuple[Any, Any]]:
    """Numbers of left and right rows, by loops."""
    found = [
        (one["a"], other["b"])
        for one in left
        for other in right
        if one["k"] == other["k"] and abs(one["t"] - other["t"]) <= HOUR
    ]
    if how != "inner":
        matched = {a for a, _ in found}
        found += [(one["a"], None) for one in left if one["a"] not in matched]
    if how == "full":
        matched = {b for _, b in found}
        found += [(None, other["b"]) for other in right if other["b"] not in matched]
    return sorted(found, key=str)


@pytest.mark.parametrize("how", ["inner", "left", "full"])
def test_rows_and_arrow_are_joined_alike(cluster: LocalCluster, how: Any) -> None:
    expected = pairs(LEFT, RIGHT, how)
    left = Stream.items(LEFT).event_time("t", out_of_order=HOUR)
    right = Stream.items(RIGHT).event_time("t", out_of_order=HOUR)
    rows = cluster.run(left.key_by("k").join(right.key_by("k"), how, HOUR).collect(), timeout=60)
    assert sorted(((a and a["a"], b and b["b"]) for _, a, b in rows), key=str) == expected

    ones = Table.from_arrow(pa.Table.from_pylist(LEFT)).event_time("t", out_of_order=HOUR)
    others = Table.from_arrow(pa.Table.from_pylist(RIGHT)).event_time("t", out_of_order=HOUR)
    joined = ones.key_by("k").join(others.key_by("k"), how, within=HOUR)
    found = cluster.run(joined, timeout=60).to_pylist()
    assert sorted(((row["a"], row["b"]) for row in found), key=str) == expected

    windows = joined.key_by("k").window(HOUR, late="side").aggregate(n=("k", "count"))
    both = Stream.together(windows.collect("windows"), windows.late.collect("late"))
    parts = cluster.submit(both).wait(timeout=60).collected
    assert sum(row["n"] for row in parts["windows"]) == len(expected)
    assert parts["late"] == []


def test_late_records_of_each_side_are_the_ones_a_loop_names(cluster: LocalCluster) -> None:
    def mixed(rows: list[dict[str, Any]], number: str) -> tuple[list[dict[str, Any]], list[Any]]:
        arrived = sorted(rows, key=lambda row: (row[number] * 37 % 100 // 15, row[number]))
        late, latest = [], START - HOUR
        for row in arrived:
            if row["t"] < latest - HOUR:
                late.append(row[number])
            latest = max(latest, row["t"])
        return arrived, late

    (left, late_left), (right, late_right) = mixed(LEFT, "a"), mixed(RIGHT, "b")
    assert min(len(late_left), len(late_right)) > 10

    def keyed(rows: list[dict[str, Any]], number: str) -> Any:
        schema = pa.schema({"k": pa.int64(), "t": pa.timestamp("us", "UTC"), number: pa.int64()})
        source = Table.source(OneSplit(rows), schema).parallel(1)
        return source.event_time("t", out_of_order=HOUR, watermarks="each").key_by("k")

    joined = keyed(left, "a").join(keyed(right, "b"), "full", within=HOUR, late="side")
    ends = [
        joined.to_rows().map(lambda row: ("joined", row["a"], row["b"])),
        joined.late.to_rows().map(lambda row: ("late left", row["a"], None)),
        joined.late_right.to_rows().map(lambda row: ("late right", None, row["b"])),
    ]
    rows = cluster.run(Stream.together(*(end.collect(str(n)) for n, end in enumerate(ends))), timeout=60)
    assert sorted(a for kind, a, _ in rows if kind == "late left") == sorted(late_left)
    assert sorted(b for kind, _, b in rows if kind == "late right") == sorted(late_right)
    in_time = [row for row in LEFT if row["a"] not in late_left]
    right_in_time = [row for row in RIGHT if row["b"] not in late_right]
    expected = pairs(in_time, right_in_time, "full")
    assert sorted(((a, b) for kind, a, b in rows if kind == "joined"), key=str) == expected


def test_a_table_joins_itself(cluster: LocalCluster) -> None:
    timed = Table.from_arrow(pa.Table.from_pylist(LEFT)).event_time("t", out_of_order=HOUR)
    joined = timed.key_by("k").join(timed.key_by("k"))
    found = cluster.run(joined, timeout=60).to_pylist()
    assert sorted(row["a"] for row in found) == list(range(300))
    assert all(row["a"] == row["a_right"] for row in found)


class Slow:
    """A small side that says nothing at first: what comes before it has to wait."""

    def splits(self) -> list[int]:
        return [0, 1]

    def read(self, split: int, offset: int) -> Iterator[Batch]:
        for _ in range(20):
            yield []
        yield [{"k": key, "name": f"name {key}"} for key in range(split, 4, 2)]


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_the_small_side_is_known_before_the_big_one_passes(cluster: LocalCluster, columns: bool) -> None:
    big, small = Stream.items(LEFT), Stream.source(Slow())
    tables = big.to_table(), small.to_table({"k": int, "name": str})
    joined = (
        tables[0].broadcast_join(tables[1], "k", "left")
        if columns
        else big.broadcast_join(small, "k", "left")
    )
    rows = cluster.submit(joined.collect()).wait(timeout=60).rows
    assert sorted((row["a"], row["name"]) for row in rows if row["k"] != 4) == [
        (row["a"], f"name {row['k']}") for row in LEFT if row["k"] != 4
    ]
    assert len(rows) == 300
    assert all(row["name"] is None for row in rows if row["k"] == 4)


def test_timers_and_state_count_sessions(cluster: LocalCluster) -> None:
    def on_record(row: Any, context: ProcessContext) -> None:
        assert context.time is not None
        context.state[context.time] = row
        context.set_timer(context.time + HOUR)

    def on_timer(at: datetime, context: ProcessContext) -> list[Any] | None:
        times = [time for time in context.state if time <= at]
        if max(times) + HOUR > at:
            return None
        for time in times:
            del context.state[time]
        return [(context.key, at, len(times))]

    rows = [{"k": i % 3, "t": START + (i // 30 * 5) * HOUR + i * MINUTE} for i in range(120)]
    schema = {"k": int, "t": pa.timestamp("us", "UTC")}
    timed = Table.source(OneSplit(rows), schema).parallel(1).event_time("t", watermarks="each").to_rows()
    sessions = cluster.run(timed.key_by("k").process(on_record, on_timer).collect(), timeout=60)
    lasts = [START + 5 * part * HOUR + (30 * part + 27) * MINUTE for part in range(4)]
    expected = [(key, last + key * MINUTE + HOUR, 10) for last in lasts for key in range(3)]
    assert sorted(sessions) == sorted(expected)


def test_joins_keep_the_values_of_files_that_differ(cluster: LocalCluster, tmp_path: Path) -> None:
    for name, value in (("1", pa.array([1.5], pa.float32())), ("2", pa.array([0.1], pa.float64()))):
        pq.write_table(pa.table({"k": [1], "t": [START], "b": value}), tmp_path / f"{name}.parquet")
    files = Table.from_files(tmp_path)
    one = pa.table({"k": [1], "t": [START], "a": [1]})
    small = Table.from_arrow(one.select(["k"])).broadcast_join(files, on="k")
    assert sorted(cluster.run(small, timeout=60)["b"].to_pylist()) == [0.1, 1.5]
    left, right = (
        side.event_time("t", out_of_order=HOUR).key_by("k") for side in (Table.from_arrow(one), files)
    )
    joined = left.join(right, how="left", within=HOUR)
    assert sorted(cluster.run(joined, timeout=60)["b"].to_pylist()) == [0.1, 1.5]
