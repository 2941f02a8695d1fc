"""What ``show()`` prints of the first rows, how far it reads for that, and what it leaves alone."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.api import firstrows
from minishuffle.api.firstrows import rows_before
from minishuffle.api.stream import Stream, Table
from minishuffle.errors import UsageError
from minishuffle.limits import SHOWN_SOURCE_ROWS_MAX
from minishuffle.operators.row_conversion import rows_of
from support.cutjobs import run

CUT = "from the first {} of each source: counts, joins and windows are of these"


class Counted:
    """Numbers without an end, or up to one, that say how many were read, and whether it was closed."""

    last: Counted
    """The copy that was read last."""

    def __init__(self, end: int | None = None, rate: float | None = None, *, silent: bool = False) -> None:
        self.bounded, self.end, self.rate, self.silent = end is not None, end, rate, silent
        self.read_rows, self.closed = 0, False

    def splits(self) -> list[int]:
        return [0]

    def read(self, split: int, offset: int) -> Iterator[list[int]]:
        Counted.last = self
        try:
            for number in itertools.count(offset) if self.end is None else range(offset, self.end):
                self.read_rows += 1
                yield [number]
            while self.silent:
                yield []
        finally:
            self.closed = True


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    """The lines that were printed, without the spaces that fill them up."""
    return lambda: [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firstrows, "SHOWN_SECONDS_MAX", 0.2)


def test_a_table_is_shown_with_its_schema(printed: Any) -> None:
    table = Table.from_arrow(pa.table({"user": ["ann", None], "n": [1, 2], "long": ["x" * 99, ""]}))
    table.select("user", "n").show()
    assert printed() == ["user    n", "string  int64", "ann     1", "null    2"]
    table.select("long").show(1)
    assert printed()[2:] == ["x" * 59 + "…", CUT.format("row")]
    table.filter(pc.field("n") > 9).select("n").show()
    assert printed() == ["n", "int64", "no rows"]
    ages = [[2**60], [10**9], [None], None]
    Table.from_arrow(pa.table({"ages": pa.array(ages, pa.list_(pa.timestamp("us")))})).show()
    beyond, known, *missing = printed()[2:]
    assert "<value out of range: 1152921504606846976>" in beyond
    assert (known, missing) == ("[datetime.datetime(1970, 1, 1, 0, 16, 40)]", ["[None]", "null"])


def test_rows_are_shown_by_name_or_as_they_are(printed: Any) -> None:
    Stream.items([{"a": 1, "b": [2]}, {"c": None}]).show()
    assert printed() == ["a  b    c", "1  [2]", "        null"]
    Stream.items(["one two"]).flat_map(str.split).show()
    assert printed() == ["row", "'one'", "'two'"]
    Stream.items(["3", "x"]).map(int, on_error="skip").show()
    assert printed() == ["row", "3", "dropped: 1 record (map.errors)"]
    words = Stream.items(["one two"])
    Stream.together(words.map(len).collect("sizes"), words.print()).show()
    assert printed() == ["sizes:", "row", "7", "print:", "row", "'one two'"]


def test_no_more_is_read_than_it_takes(printed: Any) -> None:
    source = Counted()
    Stream.source(source).map(lambda n: n * n).show(5)
    assert printed() == ["row", "0", "1", "4", "9", "16", CUT.format("5 rows")]
    assert (Counted.last.read_rows, Counted.last.closed, source.read_rows) == (5, True, 0)
    Stream.source(Counted()).filter(lambda n: n > 10**6).show()
    assert printed() == ["row", "no rows", CUT.format("10,000 rows")]
    assert (Counted.last.read_rows, Counted.last.closed) == (SHOWN_SOURCE_ROWS_MAX, True)
    Stream.source(Counted(SHOWN_SOURCE_ROWS_MAX)).key_by(lambda n: n % 3).count(emit="end").show(2)
    assert printed() == ["[0]  [1]", "0    3334", "1    3333", "… and more rows"]
    Stream.source(Counted(SHOWN_SOURCE_ROWS_MAX)).key_by(lambda n: n % 2).count(emit="end").show()
    assert printed() == ["[0]  [1]", "0    5000", "1    5000"]
    Stream.source(Counted(SHOWN_SOURCE_ROWS_MAX + 1)).key_by(lambda n: 0).count(emit="end").show()
    assert printed() == ["[0]  [1]", "0    10000", CUT.format("10,000 rows")]


@pytest.mark.usefixtures("hurried")
def test_a_slow_or_silent_source_does_not_hang(printed: Any) -> None:
    Stream.generate(rate=0.001).map(str).show()
    assert printed() == ["row", "'0'", CUT.format("row")]
    timed = Stream.source(Counted(1, silent=True)).event_time(lambda n: n * 1_000_000)
    timed.key_by(lambda n: "k").window(timedelta(hours=1)).count().map(lambda row: row[2]).show()
    assert printed() == ["row", "1", CUT.format("row")]


class Numbering:
    """Has a state of its own, and after open() what no job takes along."""

    def __init__(self) -> None:
        self.number = 0

    def open(self, context: Any) -> None:
        self.lock = threading.Lock()

    def __call__(self, row: Any) -> int:
        self.number += 1
        return self.number


def test_a_job_does_not_find_what_was_shown(printed: Any) -> None:
    seen: set[int] = set()
    fresh = Stream.items([5, 5, 6]).filter(lambda n: n not in seen and not seen.add(n))  # type: ignore[func-returns-value]
    numbered = fresh.map(Numbering())
    for _ in range(2):
        numbered.show()
        assert printed() == ["row", "1", "2"]
    assert run(numbered.collect()).rows == [1, 2]


async def looked_up(number: int) -> int:
    await asyncio.sleep(0)
    return 6 // number


def test_nothing_is_opened_or_written(printed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        found = Stream.items([0, 2, 3]).map_async(looked_up, concurrency=2, on_error="dead_letter")
        found.to_files(tmp_path / "out").show()
        assert printed() == ["row", "3", "2", "dropped: 1 record (map_async.errors)"]
    assert [*tmp_path.iterdir()] == []
    assert not [record for record in caplog.records if record.name.startswith("minishuffle")]
    with pytest.raises(ZeroDivisionError) as raised:
        Stream.items([0]).map(lambda n: 1 // n).show()
    assert raised.value.__notes__ == ["raised in operator 'map' by the record 0"]


def test_what_cannot_be_shown_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="from_spark seen gives rows while a job runs alone, so that"):
        Table.from_spark("seen", {"n": int}).select("n").show()
    lock = threading.Lock()
    with pytest.raises(UsageError, match="operator 'map' cannot be sent to the workers: .*variable 'lock'"):
        Stream.items([1]).map(lambda n: lock.locked()).show()
    for wrong in (0, True, "5"):
        with pytest.raises(UsageError, match="show takes a number of rows from 1 on, not"):
            Stream.items([1]).show(wrong)  # type: ignore[arg-type]


# --- what comes to a step ------------------------------------------------------------------------------


def given_to(stream: Any, count: int = 10) -> list[Any]:
    """What comes to the last step."""
    (end,) = stream.collect().plan.ends
    return [row for batch in rows_before(end, count)[0] for row in rows_of(batch)]


def numbers() -> Stream[Any]:
    return Stream.source(Counted(1000))


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
