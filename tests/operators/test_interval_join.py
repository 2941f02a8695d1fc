"""Interval joins of rows and of columns against nested loops over all records: results, late ones,
watermarks, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minishuffle.exchange.batch import Batch
from minishuffle.operators import interval_join
from minishuffle.operators.base import (
    BEGINNING_OF_TIME,
    END_OF_TIME,
    Active,
    Idle,
    Mark,
    Side,
    TaskContext,
    Watermark,
)
from minishuffle.operators.batch_times import microseconds
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import Late
from minishuffle.operators.interval_join import IntervalJoin
from minishuffle.operators.join_columns import JoinColumns
from minishuffle.operators.join_inputs import LEFT, RIGHT, Bounds, How
from minishuffle.operators.join_results import ColumnResults, JoinedTime, RowResults
from minishuffle.operators.row_conversion import rows_of
from support.batches import as_batch, collecting, shown
from support.soak import examples

Times: TypeAlias = tuple[EventTime, EventTime]
TIMES = (EventTime(column="t"), EventTime(column="u"))
LATE = ("late", "late_right")
ASIDE = (Late("side", "late"), Late("side", "late_right"))

Record: TypeAlias = tuple[Any, int, int]
"""Key, time, a number that tells it from the others."""
Pair: TypeAlias = tuple[Any, Record | None, Record | None]
Step: TypeAlias = tuple[int, "list[Record] | int"]
"""Input and a batch or a watermark."""

LEFT_SCHEMA = pa.schema({"t": pa.timestamp("us", "UTC"), "k": pa.int32(), "v": pa.int64()})
RIGHT_SCHEMA = pa.schema({"v": pa.int64(), "key": pa.int64(), "u": pa.timestamp("us", "UTC")})


def keyed(input: int, records: list[Record]) -> Batch:
    time = "u" if input else "t"
    return Batch([{time: t, "v": v, "k": key} for key, t, v in records], [key for key, _, _ in records])


def arrow(input: int, records: list[Record]) -> pa.RecordBatch:
    schema = RIGHT_SCHEMA if input else LEFT_SCHEMA
    columns = {"k": 0, "key": 0, "t": 1, "u": 1, "v": 2}
    arrays = [pa.array([each[columns[f.name]] for each in records], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def on_rows(how: How, before: int, after: int | None = None, times: Times = TIMES) -> IntervalJoin:
    bounds = Bounds(before, before if after is None else after)
    return IntervalJoin(RowResults(how), bounds, times, ASIDE)


def on_arrow(how: How, before: int, after: int | None = None, times: Times = TIMES) -> IntervalJoin:
    results = ColumnResults(JoinColumns(("k",), ("key",), how), (LEFT_SCHEMA, RIGHT_SCHEMA))
    return IntervalJoin(results, Bounds(before, before if after is None else after), times, ASIDE)


class Run:
    """What a join gives: pairs, late records by side, marks; checks that no pair comes behind a watermark."""

    def __init__(self, operator: IntervalJoin) -> None:
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
        batch, item = item, shown(item)
        if isinstance(item, Watermark):
            assert item.time > self.watermark
            self.watermark = item.time
        if isinstance(item, Mark):
            self.marks.append(item)
            return
        assert len(item)
        if isinstance(item, list):
            if isinstance(item[0], dict):  # of a semi or anti join
                item = [(row["k"], row, None) for row in item]
            time_of = JoinedTime(*TIMES)
            assert all(time_of(row) > self.watermark for row in item)
            self.pairs += [(key, self.of(left, "t"), self.of(right, "u")) for key, left, right in item]
        else:
            times = batch.times.tolist()
            assert min(times) > self.watermark
            self.pairs += map(self.of_arrow, item.to_pylist(), times)

    @staticmethod
    def of(row: dict[str, Any] | None, time: str) -> Record | None:
        return None if row is None else (row["k"], row[time], row["v"])

    @staticmethod
    def of_arrow(row: dict[str, Any], time: int) -> Pair:
        key, left, right = row["k"], None, None
        if row["v"] is not None:
            left = (key, microseconds(row["t"]), row["v"])
        if row.get("v_right") is not None:
            right = (key, microseconds(row["u"]), row["v_right"])
        assert time == max(record[1] for record in (left, right) if record)
        return (key, left, right)

    def take(self, input: int, item: Any) -> None:
        if isinstance(item, Mark):
            self.operator.on_mark(item, input, self.emit)
        else:
            self.operator.process(as_batch(item), input, self.emit)

    def end(self) -> None:
        for input in (LEFT, RIGHT):
            self.take(input, Watermark(END_OF_TIME))


def reference(
    steps: list[Step], how: How, before: int, after: int
) -> tuple[Counter[Pair], tuple[list[Record], ...]]:
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
        if left[0] is not None and left[0] == right[0] and -before <= right[1] - left[1] <= after
    ]
    result: Counter[Pair] = Counter(pairs if how not in ("semi", "anti") else [])
    lefts, rights = {left for _, left, _ in pairs}, {right for _, _, right in pairs}
    if how in ("left", "full", "semi", "anti"):
        is_wanted = how == "semi"
        result.update((left[0], left, None) for left in good[LEFT] if (left in lefts) == is_wanted)
    if how in ("right", "full"):
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


hows = pytest.mark.parametrize("how", ["inner", "left", "right", "full", "semi", "anti"])
both = pytest.mark.parametrize(
    ("make", "convert"), [(on_rows, keyed), (on_arrow, arrow)], ids=["rows", "arrow"]
)
Make: TypeAlias = Callable[..., Any]


@hows
@both
@settings(max_examples=examples(20))
@given(
    steps=interleavings(), before=st.sampled_from([0, 1, 4, 40]), after=st.sampled_from([None, 0, 1, 4, 40])
)
def test_joins_agree_with_nested_loops(
    make: Make, convert: Make, how: How, steps: list[Step], before: int, after: int | None
) -> None:
    pairs, late = reference(steps, how, before, before if after is None else after)
    run = Run(make(how, before, after))
    for input, item in steps:
        run.take(input, Watermark(item) if isinstance(item, int) else convert(input, item))
    run.end()
    assert Counter(run.pairs) == pairs
    assert run.late == late
    assert run.context.counters.records_late == sum(map(len, late))
    assert run.marks[-1] == Watermark(END_OF_TIME)
    assert held(run.operator) == (0, 0)
    assert run.operator.state_rows() == 0


@both
@pytest.mark.parametrize("how", ["semi", "anti"])
@pytest.mark.parametrize("first", [LEFT, RIGHT])
def test_right_rows_of_one_key_and_time_are_one_where_they_only_say_that_there_are_some(
    make: Make, convert: Callable[..., Any], how: How, first: int
) -> None:
    run = Run(make(how, 4))
    sides = {
        LEFT: convert(LEFT, [(key, 6, 10 * key + number) for key in (1, 2) for number in range(3)]),
        RIGHT: convert(RIGHT, [(1, 5, number) for number in range(300)] + [(1, 6, 300)]),
    }
    run.take(first, sides[first])
    run.take(1 - first, sides[1 - first])
    assert held(run.operator)[RIGHT] == 2
    run.end()
    matched = 1 if how == "semi" else 2
    assert Counter(run.pairs) == {(matched, (matched, 6, 10 * matched + n), None): 1 for n in range(3)}


def held(operator: Any) -> tuple[int, int]:
    return len(operator._held[LEFT]), len(operator._held[RIGHT])


@given(
    steps=interleavings(),
    within=st.sampled_from([0, 4]),
    idle=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 1)), max_size=4),
)
def test_idleness_never_makes_the_output_late(
    steps: list[Step], within: int, idle: list[tuple[int, int]]
) -> None:
    run = Run(on_rows("full", within))
    for number, (input, item) in enumerate(steps):
        run.take(input, Watermark(item) if isinstance(item, int) else keyed(input, item))
        for step, side in idle:
            if step == number:
                run.take(side, Idle())
    run.end()
    records = sum(len(item) for _, item in steps if not isinstance(item, int))
    lefts = {left for _, left, _ in run.pairs if left}
    rights = {right for _, _, right in run.pairs if right}
    assert len(lefts) + len(rights) + sum(map(len, run.late)) == records
    assert held(run.operator) == (0, 0)


def lone(run: Run) -> list[Pair]:
    """What has come out since the last look."""
    pairs, run.pairs = run.pairs, []
    return pairs


@both
def test_a_record_goes_alone_once_the_other_side_is_within_past_it(make: Make, convert: Make) -> None:
    run = Run(make("full", 5))
    run.take(LEFT, convert(LEFT, [(1, 10, 1)]))
    run.take(RIGHT, convert(RIGHT, [(2, 12, 2)]))
    run.take(RIGHT, Watermark(14))
    assert lone(run) == []
    run.take(RIGHT, Watermark(15))
    assert lone(run) == [(1, (1, 10, 1), None)]
    assert held(run.operator) == (0, 1)
    run.take(LEFT, Watermark(16))
    assert lone(run) == []
    run.take(LEFT, Watermark(17))
    assert lone(run) == [(2, None, (2, 12, 2))]
    assert held(run.operator) == (0, 0)


@both
def test_a_record_that_no_other_can_match_any_more_is_not_held(make: Make, convert: Make) -> None:
    run = Run(make("left", 5))
    run.take(RIGHT, convert(RIGHT, [(1, 25, 1)]))
    run.take(RIGHT, Watermark(30))
    run.take(LEFT, convert(LEFT, [(1, 24, 2), (2, 24, 3), (2, 25, 4), (2, 26, 5)]))
    assert sorted(lone(run)) == [
        (1, (1, 24, 2), (1, 25, 1)),
        (2, (2, 24, 3), None),
        (2, (2, 25, 4), None),
    ]
    assert held(run.operator) == (1, 1)


def test_late_is_said_of_each_side_by_its_own_watermark() -> None:
    run = Run(on_rows("inner", 5))
    run.take(LEFT, Watermark(100))
    run.take(RIGHT, keyed(RIGHT, [(1, 98, 1)]))
    run.take(LEFT, keyed(LEFT, [(1, 100, 2), (1, 101, 3)]))
    assert run.late == ([(1, 100, 2)], [])
    assert lone(run) == [(1, (1, 101, 3), (1, 98, 1))]
    run.take(RIGHT, Watermark(98))
    run.take(RIGHT, keyed(RIGHT, [(1, 98, 4)]))
    assert run.late == ([(1, 100, 2)], [(1, 98, 4)])
    assert run.context.counters.records_late == 2


def test_late_records_may_be_dropped() -> None:
    operator = on_rows("inner", 5)
    operator.lateness = (Late(), Late())
    run = Run(operator)
    run.take(LEFT, Watermark(100))
    run.take(LEFT, keyed(LEFT, [(1, 100, 2)]))
    assert run.late == ([], [])
    assert run.context.counters.records_late == 1


def test_the_watermark_waits_for_what_is_held() -> None:
    for how, told in (("inner", [8, 24, 25, 60]), ("left", [8, 19, 25, 60])):
        run = Run(on_rows(how, 5))
        run.take(LEFT, Watermark(10))
        assert run.marks == []
        run.take(RIGHT, Watermark(8))
        run.take(LEFT, keyed(LEFT, [(1, 20, 1)]))
        run.take(LEFT, Watermark(50))
        for time in (24, 25):
            run.take(RIGHT, Watermark(time))
        run.take(LEFT, Watermark(END_OF_TIME))
        run.take(RIGHT, Watermark(60))
        assert run.marks == list(map(Watermark, told))
        run.take(RIGHT, Watermark(END_OF_TIME))
        assert run.marks[-1] == Watermark(END_OF_TIME)


def test_an_idle_side_does_not_hold_the_other() -> None:
    run = Run(on_rows("left", 5))
    run.take(LEFT, keyed(LEFT, [(1, 10, 1)]))
    run.take(RIGHT, Idle())
    run.take(LEFT, Watermark(20))
    assert lone(run) == [(1, (1, 10, 1), None)]
    assert run.marks == [Watermark(20)]
    run.take(LEFT, Idle())
    run.take(LEFT, Idle())
    assert run.marks == [Watermark(20), Idle()]
    run.take(RIGHT, Active())
    run.take(RIGHT, keyed(RIGHT, [(1, 20, 2), (1, 21, 3)]))
    assert run.late == ([], [(1, 20, 2)])
    run.take(RIGHT, Idle())
    assert run.marks == [Watermark(20), Idle(), Active(), Idle()]


@both
def test_many_steps_leave_nothing_behind(make: Make, convert: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, and the numbers of keys that are never seen again."""
    monkeypatch.setattr(interval_join, "SPARE_KEYS", 50)
    run = Run(make("full", 3))
    run.take(LEFT, convert(LEFT, [(-1, 100_000, 0)]))
    most = 0
    for step in range(200):
        time, first = 10 * step, 10 * step
        run.take(LEFT, convert(LEFT, [(first + i, time + i, i + 1) for i in range(10)]))
        run.take(RIGHT, convert(RIGHT, [(first + i, time + i + 2, i + 1) for i in range(0, 10, 2)]))
        run.take(LEFT, Watermark(time + 9))
        run.take(RIGHT, Watermark(time + 9))
        most = max(most, sum(held(run.operator)))
        assert run.operator.state_rows() == sum(held(run.operator)) > 0
        assert len(run.operator._keys[LEFT]) <= 50 + 2 * 40
        assert sum(chunk.end - chunk.first for side in run.operator._held for chunk in side.chunks) <= 128
    assert most < 40
    run.end()
    matched = [pair for pair in run.pairs if pair[1] and pair[2]]
    assert len(matched) == 200 * 5
    assert len(run.pairs) == 200 * 10 + 1


def test_equal_keys_of_several_kinds_match_as_rows() -> None:
    run = Run(on_rows("full", 0))
    left = [(1, 5, 1), (True, 5, 2), ((1, "a"), 5, 3), ((None, 1), 5, 4), (float("nan"), 5, 5)]
    right = [(1.0, 5, 6), ((1.0, "a"), 5, 7), ((None, 1), 5, 8), ("1", 5, 9)]
    run.take(LEFT, keyed(LEFT, left))
    run.take(RIGHT, keyed(RIGHT, right))
    run.end()
    found = sorted((left and left[2], right and right[2]) for _, left, right in run.pairs if left and right)
    assert found == [(1, 6), (2, 6), (3, 7)]
    assert len(run.pairs) == 3 + 2 + 2


@hows
@both
def test_without_times_all_of_a_key_match_and_what_is_alone_goes_at_the_end(
    make: Make, convert: Make, how: How
) -> None:
    join = make(how, 0, times=(EventTime(), EventTime()))
    out: list[Any] = []
    join.open(TaskContext("job", "task", 0, 1, 1))
    for input, records in ((1, [(1, 5, 1), (3, 9, 2)]), (0, [(1, 70, 3), (2, 1, 4)]), (1, [(1, 900, 5)])):
        join.process(as_batch(convert(input, records)), input, collecting(out))
    for input in (0, 1):
        join.on_mark(Watermark(END_OF_TIME), input, collecting(out))
    assert out.pop() == Watermark(END_OF_TIME)
    found: Counter[Any] = Counter()
    for row in (row for batch in out for row in rows_of(as_batch(batch))):
        if isinstance(row, tuple):
            found[tuple(None if side is None else side["v"] for side in row[1:])] += 1
        else:
            found[row["v"], row.get("v_right")] += 1
    pairs, left, right = [(3, 1), (3, 5)], [(4, None)], [(None, 2)]
    expected = {
        "inner": pairs,
        "left": pairs + left,
        "right": pairs + right,
        "full": pairs + left + right,
        "semi": [(3, None)],
        "anti": left,
    }
    assert found == Counter(expected[how])
