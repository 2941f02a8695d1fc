"""Interval joins of rows and of Arrow against nested loops over all records: results, late ones, watermarks,
memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.dataflow.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    KeyedRows,
    Mark,
    Side,
    TaskContext,
    Watermark,
)
from minishuffle.dataflow.operators.convert import rows_of
from minishuffle.dataflow.operators.joinarrow import JoinArrow
from minishuffle.dataflow.operators.joincolumns import JoinColumns
from minishuffle.dataflow.operators.joinrows import JoinedTime, JoinRows
from minishuffle.dataflow.operators.joins import LEFT, RIGHT, How
from minishuffle.dataflow.operators.moments import microseconds
from minishuffle.dataflow.operators.times import EventTime

TIMES = (EventTime(column="t"), EventTime(column="u"))
LATE = ("late", "late_right")

Record: TypeAlias = tuple[Any, int, int]
"""Key, time, a number that tells it from the others."""
Pair: TypeAlias = tuple[Any, Record | None, Record | None]
Step: TypeAlias = tuple[int, "list[Record] | int"]
"""Input and a batch or a watermark."""

LEFT_SCHEMA = pa.schema({"t": pa.timestamp("us", "UTC"), "k": pa.int32(), "v": pa.int64()})
RIGHT_SCHEMA = pa.schema({"v": pa.int64(), "key": pa.int64(), "u": pa.timestamp("us", "UTC")})


def keyed(input: int, records: list[Record]) -> KeyedRows:
    time = "u" if input else "t"
    return KeyedRows([key for key, _, _ in records], [{time: t, "v": v, "k": key} for key, t, v in records])


def arrow(input: int, records: list[Record]) -> pa.RecordBatch:
    schema = RIGHT_SCHEMA if input else LEFT_SCHEMA
    columns = {"k": 0, "key": 0, "t": 1, "u": 1, "v": 2}
    arrays = [pa.array([each[columns[f.name]] for each in records], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def on_rows(how: How, within: int) -> JoinRows:
    return JoinRows(how, within, TIMES, LATE)


def on_arrow(how: How, within: int) -> JoinArrow:
    columns = JoinColumns(("k",), ("key",), how, TIMES[LEFT])
    return JoinArrow(columns, within, TIMES, (LEFT_SCHEMA, RIGHT_SCHEMA), LATE)


class Run:
    """What a join gives: pairs, late records by side, marks; checks that no pair comes behind a watermark."""

    def __init__(self, operator: JoinRows | JoinArrow) -> None:
        self.operator = operator
        self.pairs: list[Pair] = []
        self.late: tuple[list[Record], list[Record]] = ([], [])
        self.marks: list[Mark] = []
        self.watermark = BEGINNING_OF_TIME
        self.context = TaskContext("job", "task", 0, 1, 1)
        operator.open(self.context)

    def emit(self, item: Any) -> None:
        if isinstance(item, Side):
            input = LATE.index(item.tag)
            time, key = ("u", "key") if input else ("t", "k")
            self.late[input].extend(
                (row.get(key, row.get("k")), microseconds(row[time]), row["v"]) for row in rows_of(item.batch)
            )
            return
        if isinstance(item, Watermark):
            assert item.time > self.watermark
            self.watermark = item.time
        if isinstance(item, Mark):
            self.marks.append(item)
            return
        assert len(item)
        if isinstance(item, list):
            time_of = JoinedTime(*TIMES)
            assert all(time_of(row) > self.watermark for row in item)
            self.pairs += [(key, self.of(left, "t"), self.of(right, "u")) for key, left, right in item]
        else:
            assert all(microseconds(row["t"]) > self.watermark for row in item.to_pylist())
            self.pairs += [self.of_arrow(row) for row in item.to_pylist()]

    @staticmethod
    def of(row: dict[str, Any] | None, time: str) -> Record | None:
        return None if row is None else (row["k"], row[time], row["v"])

    @staticmethod
    def of_arrow(row: dict[str, Any]) -> Pair:
        key, left, right = row["k"], None, None
        if row["v"] is not None:
            left = (key, microseconds(row["t"]), row["v"])
        if row["v_right"] is not None:
            right = (key, microseconds(row["u"]), row["v_right"])
        assert left or row["t"] == row["u"]
        return (key, left, right)

    def take(self, input: int, item: Any) -> None:
        if isinstance(item, Mark):
            self.operator.on_mark(item, input, self.emit)
        else:
            self.operator.process(item, input, self.emit)

    def end(self) -> None:
        for input in (LEFT, RIGHT):
            self.take(input, Watermark(END_OF_TIME))


def reference(steps: list[Step], how: How, within: int) -> tuple[Counter[Pair], tuple[list[Record], ...]]:
    """Which records are in time, one after the other; then all against all."""
    watermarks = [BEGINNING_OF_TIME, BEGINNING_OF_TIME]
    good: tuple[list[Record], list[Record]] = ([], [])
    late: tuple[list[Record], list[Record]] = ([], [])
    for input, item in steps:
        if isinstance(item, int):
            watermarks[input] = item
        else:
            for record in item:
                (late if record[1] <= watermarks[input] else good)[input].append(record)
    pairs = [
        (left[0], left, right)
        for left in good[LEFT]
        for right in good[RIGHT]
        if left[0] is not None and left[0] == right[0] and abs(left[1] - right[1]) <= within
    ]
    result: Counter[Pair] = Counter(pairs)
    if how != "inner":
        lefts = {left for _, left, _ in pairs}
        result.update((left[0], left, None) for left in good[LEFT] if left not in lefts)
    if how == "full":
        rights = {right for _, _, right in pairs}
        result.update((right[0], None, right) for right in good[RIGHT] if right not in rights)
    return result, late


@st.composite
def interleavings(draw: st.DrawFn) -> list[Step]:
    """Batches and watermarks of both sides in any order; each side's watermarks only advance."""
    times = [-20, -20]
    number = 0
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, 14))):
        input = draw(st.integers(0, 1))
        if draw(st.booleans()):
            records = []
            for _ in range(draw(st.integers(1, 6))):
                number += 1
                key = draw(st.none() | st.integers(0, 2))
                records.append((key, times[input] + draw(st.integers(-2, 15)), number))
            steps.append((input, records))
        else:
            times[input] += draw(st.integers(1, 12))
            steps.append((input, times[input]))
    return steps


hows = pytest.mark.parametrize("how", ["inner", "left", "full"])
both = pytest.mark.parametrize(
    ("make", "convert"), [(on_rows, keyed), (on_arrow, arrow)], ids=["rows", "arrow"]
)
Make: TypeAlias = Callable[..., Any]


@hows
@both
@given(steps=interleavings(), within=st.sampled_from([0, 1, 4, 40]))
def test_joins_agree_with_nested_loops(
    make: Make, convert: Make, how: How, steps: list[Step], within: int
) -> None:
    pairs, late = reference(steps, how, within)
    run = Run(make(how, within))
    for input, item in steps:
        run.take(input, Watermark(item) if isinstance(item, int) else convert(input, item))
    run.end()
    assert Counter(run.pairs) == pairs
    assert run.late == late
    assert run.context.counters.records_late == sum(map(len, late))
    assert run.marks[-1] == Watermark(END_OF_TIME)
    assert held(run.operator) == (0, 0)


def held(operator: Any) -> tuple[int, int]:
    sides = operator._sides if isinstance(operator, JoinRows) else operator._held
    return len(sides[LEFT]), len(sides[RIGHT])
