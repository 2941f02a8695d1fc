"""Plans that run in this process on the first rows of each source."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Stream, Table
from minishuffle.cli.firstrows import FirstRows
from minishuffle.errors import UsageError
from minishuffle.operators.row_conversion import rows_of


def given_to(stream: Any, count: int = 10) -> list[Any]:
    """What comes to the last step."""
    (end,) = stream.collect().plan.ends
    return [row for batch in FirstRows(count).given_to(end) for row in rows_of(batch)]


def numbers() -> Stream[Any]:
    return Stream.generate(lambda start, count: list(range(start, start + count)), records=1000)


def timed(rows: Stream[Any]) -> Stream[Any]:
    """Without an order: nothing is late all the same."""
    return rows.map(lambda n: {"k": n % 2, "n": n}).event_time(lambda row: -row["n"] * 1_000_000 - 1)


async def awaited(number: int) -> int:
    return number + 1


def test_steps_give_what_a_job_gives_of_the_first_rows() -> None:
    assert given_to(numbers().map_async(awaited, concurrency=3)) == list(range(1, 11))
    windows = timed(numbers()).key_by("k").window(timedelta(hours=1)).count()
    assert sorted((key, number) for key, _, number in given_to(windows)) == [(0, 5), (1, 5)]
    small = Table.from_arrow(pa.table({"k": [0], "name": ["even"]})).to_rows()
    assert len(given_to(timed(numbers()).broadcast_join(small, "k"))) == 5
    joined = timed(numbers()).key_by("k").join(timed(numbers()).key_by("k"), within=timedelta(0))
    assert len(given_to(joined)) == 10
    both = numbers().union(Stream.items([-1]))
    assert sorted(given_to(both)) == [-1, *range(10)]
    errors = numbers().map(lambda n: 1 // (n % 2), on_error="side").errors
    assert [row["record"] for row in given_to(errors)] == [0, 2, 4, 6, 8]


def test_nobody_sees_what_a_function_changes() -> None:
    rows = Stream.items([{"n": 1}])
    changed = rows.map(lambda row: row.update(n=2) or row)
    found = given_to(changed.union(rows.map(lambda row: row)))
    assert sorted(row["n"] for row in found) == [1, 2]


def test_what_spark_writes_is_not_there() -> None:
    written = Table.from_spark("events", {"n": int}).to_rows().map(str)
    with pytest.raises(UsageError, match="from_spark events gives rows while a job runs alone: declare"):
        given_to(written)
