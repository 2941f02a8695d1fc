"""Times of day, durations, UUIDs and booleans of 8 bits as keys, of streams and tables alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.api.stream_base import StreamBase
from minishuffle.errors import UsageError
from support.cutjobs import Cut, run

CUT = Cut(3, seed=1, rows=2)
HOUR = timedelta(hours=1)
TIMES = [time(12, 30, 7), time(0), None, time(12, 30, 7), time(0)]
SPANS = [timedelta(days=-2, seconds=1), timedelta(0), None, timedelta(days=-2, seconds=1), timedelta(0)]
NAMES = [UUID(int=1 << 127), UUID(int=0), None, UUID(int=1 << 127), UUID(int=0)]
TRUTHS = [True, False, None, True, False]
KEYS: dict[str, tuple[list[Any], pa.DataType]] = {
    **{
        str(kind): (TIMES, kind)
        for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))
    },
    **{str(pa.duration(unit)): (SPANS, pa.duration(unit)) for unit in ("s", "ms", "us", "ns")},
    "uuid": (NAMES, pa.uuid()),
    "bool8": (TRUTHS, pa.bool8()),
}
cases = pytest.mark.parametrize("case", KEYS)


def column(values: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values).cast(kind)


def given(case: str) -> pa.Table:
    values, kind = KEYS[case]
    return pa.table(
        {
            "k": column(values, kind),
            "t": pa.array(range(len(values)), pa.timestamp("us", "UTC")),
            "n": range(len(values)),
        }
    )


def rows_of(stream: StreamBase) -> list[Any]:
    return run(stream, CUT).rows


def counted(rows: list[dict[str, Any]]) -> dict[Any, int]:
    found = {row["k"]: row["count"] for row in rows}
    assert len(found) == len(rows)
    return found


def in_order(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=repr)


@cases
def test_rows_of_one_key_meet_whether_they_come_as_rows_or_as_columns(case: str) -> None:
    values, kind = KEYS[case]
    expected = dict(Counter(values))
    table = Table.from_arrow(given(case)).event_time("t")
    assert counted(rows_of(table.key_by("k").count().collect())) == expected
    assert {row["k"] for row in rows_of(table.key_by("k").distinct().collect())} == expected.keys()
    for windows in (table.key_by("k").window(HOUR), table.key_by("k").session_window(HOUR)):
        assert counted(rows_of(windows.count().collect())) == expected
    assert dict(rows_of(table.to_rows().key_by("k").count().collect())) == expected
    rows = Stream.items([{"k": value} for value in values])
    assert dict(rows_of(rows.key_by("k").count().collect())) == expected
    assert dict(rows_of(Stream.items(values).key_by(lambda value: (value, 1)).count().collect())) == {
        (value, 1): count for value, count in expected.items()
    }
    if kind != pa.bool8():  # which is made of no Python values
        assert counted(rows_of(rows.to_table({"k": kind}).key_by("k").count().collect())) == expected
    assert counted(rows_of(rows.to_table().key_by("k").count().collect())) == expected


@cases
def test_joins_pair_equal_keys(case: str) -> None:
    values, kind = KEYS[case]
    left = given(case)
    right = pa.table({"k": left["k"].slice(1, 2), "t": left["t"].slice(1, 2), "m": [7, 8]})
    pairs = [(value, n, 7) for n, value in enumerate(values) if value is not None and value == values[1]]

    def tables() -> tuple[Table, Table]:
        return Table.from_arrow(left).event_time("t"), Table.from_arrow(right).event_time("t")

    def found(joined: Table) -> list[Any]:
        return in_order([(row["k"], row["n"], row["m"]) for row in rows_of(joined.collect())])

    one, other = tables()
    assert found(one.key_by("k").join(other.key_by("k"), within=HOUR)) == in_order(pairs)
    alone = [(value, n, None) for n, value in enumerate(values) if value is None or value != values[1]]
    outer = one.key_by("k").join(other.key_by("k"), "full", within=HOUR)
    assert found(outer) == in_order([*pairs, *alone, (None, None, 8)])
    assert found(one.key_by("k").asof_join(other.key_by("k"))) == in_order([*pairs, *alone])
    small = Table.from_arrow(right.select(["k", "m"]))
    assert found(one.broadcast_join(small, "k", "left")) == in_order([*pairs, *alone])
    streams = one.to_rows().key_by("k").join(other.to_rows().key_by("k"), within=HOUR)
    assert in_order([(key, a["n"], b["m"]) for key, a, b in rows_of(streams.collect())]) == in_order(pairs)


@cases
def test_keys_go_through_files(case: str, tmp_path: Path) -> None:
    values, kind = KEYS[case]
    kept = Table.from_arrow(given(case)).key_by("k").top_n(5, "n")
    run(kept.to_files(tmp_path), CUT)
    read = Table.from_files(tmp_path)
    assert read.plan.gives.schema is not None
    assert read.plan.gives.schema.field("k").type in (
        kind,
        pa.time32("ms"),
    )  # Parquet has no times in seconds
    assert counted(rows_of(read.key_by("k").count().collect())) == dict(Counter(values))


OTHERS: dict[str, Callable[[], Any]] = {
    "time": lambda: pa.array([0], pa.int64()).cast(pa.time64("ns")),
    "duration": lambda: pa.array([0], pa.duration("s")),
    "uuid": lambda: pa.array([UUID(int=0)], pa.uuid()),
    "integer": lambda: pa.array([0]),
    "timestamp": lambda: pa.array([datetime(1970, 1, 1, tzinfo=UTC)]),
    "bytes": lambda: pa.array([bytes(16)], pa.binary(16)),
    "text": lambda: pa.array([str(UUID(int=0))]),
}


@pytest.mark.parametrize(
    ("one", "other"),
    [(one, other) for one in ("time", "duration", "uuid") for other in OTHERS if one != other],
)
def test_they_are_equal_to_nothing_of_another_kind(one: str, other: str) -> None:
    left, right = (Table.from_arrow(pa.table({"k": OTHERS[name]()})) for name in (one, other))
    with pytest.raises(
        UsageError, match=r"^join: the keys in 'k' of type .* are never equal: cast one of them"
    ):
        left.key_by("k").join(right.key_by("k"))
    rows = left.to_rows().key_by("k").join(right.to_rows().key_by("k"))
    assert rows_of(rows.collect()) == []


def test_what_the_refusal_suggests_joins_them() -> None:
    names = Table.from_arrow(pa.table({"k": OTHERS["uuid"]()}))
    texts = Table.from_arrow(pa.table({"t": OTHERS["text"]()}))
    with pytest.raises(UsageError, match="the texts in 't' to UUIDs, by map_batches"):
        names.key_by("k").join(texts.key_by("t"))

    def as_names(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch([pa.array(map(UUID, batch["t"].to_pylist()), pa.uuid())], ["t"])

    made = texts.map_batches(as_names, schema={"t": pa.uuid()})
    assert rows_of(names.key_by("k").join(made.key_by("t")).collect()) == [{"k": UUID(int=0)}]
    stored = Table.from_arrow(pa.table({"b": OTHERS["bytes"]()}))
    with pytest.raises(UsageError, match=r"with_columns\(k=col\('k'\).cast\('binary'\)\)"):
        names.key_by("k").join(stored.key_by("b"))


def test_a_time_of_day_with_a_time_zone_is_refused() -> None:
    rows = Stream.items([{"k": time(12, tzinfo=UTC)}])
    with pytest.raises(UsageError, match="a key of time 12:00:00.00:00 has a time zone: key by a datetime"):
        run(rows.key_by("k").count().collect(), Cut(1))
    with pytest.raises(UsageError, match="times of day with a time zone, which no type holds"):
        run(rows.to_table().key_by("k").count().collect(), Cut(1))


LISTS = pa.table({"k": [[1], [2]], "n": [1, 2]})
BY_KEY: dict[str, Callable[[Table], Table]] = {
    "count": lambda table: table.key_by("k").count(),
    "several": lambda table: table.key_by("n", "k").count(),
    "distinct": lambda table: table.key_by("k").distinct(),
    "top_n": lambda table: table.key_by("k").top_n(1, "n"),
    "join": lambda table: table.key_by("k").join(table.key_by("k")),
    "broadcast_join": lambda table: table.broadcast_join(Table.from_arrow(LISTS), "k"),
}


@pytest.mark.parametrize("case", BY_KEY)
def test_a_column_that_cannot_be_a_key_is_refused(case: str) -> None:
    with pytest.raises(UsageError, match="a column of type list.* cannot be a key"):
        BY_KEY[case](Table.from_arrow(LISTS))
