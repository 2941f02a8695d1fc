"""Windows of rows and of Arrow against a loop over the records: results, order, late records, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minishuffle.exchange.batch import Batch
from minishuffle.operators import row_store
from minishuffle.operators.aggregates import Function, outputs_of
from minishuffle.operators.assign_event_time import AssignEventTime
from minishuffle.operators.base import (
    END_OF_TIME,
    Idle,
    Mark,
    Side,
    TaskContext,
    Watermark,
)
from minishuffle.operators.batch_times import microseconds
from minishuffle.operators.chained import OnError
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import Late
from minishuffle.operators.row_conversion import rows_of
from minishuffle.operators.window_assigner import SlidingWindows, WindowAssigner, tumbling
from minishuffle.operators.windows import Panes, WindowAggregation, WindowFold, WindowOperator, one_more
from support.batches import as_batch, collecting
from support.soak import examples

T = EventTime(column="t")
SIZE = 10
FUNCTIONS: tuple[Function, ...] = ("sum", "count", "min", "max", "mean")

Row = tuple[Any, int, int | None]
"""Key, time, value."""


def context() -> TaskContext:
    return TaskContext("job", "task", 0, 1, 1)


def keyed(rows: list[Row]) -> Batch:
    return Batch([{"k": k, "t": t, "v": v} for k, t, v in rows], [key for key, _, _ in rows])


def arrow(rows: list[Row], key: pa.DataType | None = None) -> pa.RecordBatch:
    columns = {
        "k": pa.array([row[0] for row in rows], key or pa.int64()),
        "t": pa.array([row[1] for row in rows], pa.timestamp("us")),
        "v": pa.array([row[2] for row in rows], pa.int64()),
    }
    return pa.record_batch(columns)


def listed(values: list[Any], row: dict[str, Any]) -> list[Any]:
    return [*values, row["v"]]


ASIDE, DROPPED = Late("side", "late"), Late()
NO_PANES = Panes()


TUMBLING = tumbling(SIZE)


def on_rows(
    late: Late = DROPPED, panes: Panes = NO_PANES, assigner: WindowAssigner = TUMBLING
) -> WindowOperator:
    return WindowOperator(WindowFold(assigner, listed, list, panes), T, late)


def on_arrow(
    late: Late = DROPPED, panes: Panes = NO_PANES, assigner: WindowAssigner = TUMBLING
) -> WindowOperator:
    outputs = outputs_of({str(name): ("v", name) for name in FUNCTIONS}, T)
    return WindowOperator(WindowAggregation(assigner, ("k",), outputs, panes), T, late)


def runs_of(late: Late, panes: Panes, assigner: WindowAssigner) -> Iterator[tuple[Run, Callable[..., Any]]]:
    """An operator of rows, one whose values are packed from the first key on, and one of columns; and what
    makes their batches."""
    yield Run(on_rows(late, panes, assigner)), keyed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_store, "PACKED_KEYS_MIN", 1)
        patch.setattr(row_store, "PACKED_ROWS_MIN", 1)
        yield Run(on_rows(late, panes, assigner)), keyed
    yield Run(on_arrow(late, panes, assigner)), arrow


def aggregates(values: list[int | None]) -> tuple[Any, ...]:
    known = [value for value in values if value is not None]
    if not known:
        return (None, 0, None, None, None)
    return (sum(known), len(known), min(known), max(known), sum(known) / len(known))


def pane_of(row: Any) -> Any:
    if isinstance(row, tuple):
        key, start, values, pane, final = row
        return (key, microseconds(start), aggregates(values), pane, final)
    values = tuple(row[name] for name in FUNCTIONS)
    return (row["k"], microseconds(row["window_start"]), values, row["pane"], row["final"])


class Run:
    """What an operator gives, as (key, start, aggregates) tuples, marks, and late (key, time, value)."""

    def __init__(self, operator: WindowOperator) -> None:
        self.operator = operator
        self.out: list[Any] = []
        self.late: list[Row] = []
        self.panes: list[Any] = []
        """(key, start, aggregates, pane, final)."""
        self.context = context()
        operator.open(self.context)

    def emit(self, item: Any) -> None:
        if isinstance(item, Side) and item.tag == "panes":
            self.panes += list(map(pane_of, rows_of(item.batch)))
        elif isinstance(item, Side):
            records = rows_of(item.batch)
            self.late += [(row["k"], microseconds(row["t"]), row["v"]) for row in records]
        elif isinstance(item, Mark):
            self.out.append(item)
        elif isinstance(item.payload, list):
            self.out += [
                (key, microseconds(start), aggregates(values)) for key, start, values in item.payload
            ]
        else:
            for row in item.payload.to_pylist():
                assert row["window_end"] - row["window_start"] == timedelta(microseconds=SIZE)
                values = tuple(row[name] for name in FUNCTIONS)
                self.out.append((row["k"], microseconds(row["window_start"]), values))

    def take(self, item: Any) -> None:
        if isinstance(item, Mark):
            self.operator.on_mark(item, 0, self.emit)
        else:
            self.operator.process(as_batch(item), 0, self.emit)


def reference(items: list[list[Row] | int], slide: int = SIZE) -> tuple[list[Any], list[Row]]:
    """One record after the other; an int is a watermark. Windows begin every ``slide``."""
    windows: dict[int, dict[Any, list[int | None]]] = {}
    watermark = -(1 << 63)
    seen: set[int] = set()
    out: list[Any] = []
    late: list[Row] = []
    for item in items:
        if isinstance(item, int):
            watermark = max(watermark, item)
            for start in sorted(start for start in windows if start + SIZE - 1 <= watermark):
                window = windows.pop(start)
                out += [(key, start, aggregates(values)) for key, values in window.items()]
            if item not in seen:
                out.append(Watermark(item))
            seen.add(item)
            continue
        for key, time, value in item:
            starts = starts_of(time, slide)
            if starts[0] + SIZE - 1 <= watermark:
                late.append((key, time, value))
            for start in starts:
                if start + SIZE - 1 > watermark:
                    windows.setdefault(start, {}).setdefault(key, []).append(value)
    return out, late


def fired(items: list[list[Row] | int], slide: int) -> int:
    """How many values of keys and windows have gone out."""
    return sum(not isinstance(item, Watermark) for item in reference(items, slide)[0])


def starts_of(time: int, slide: int) -> list[int]:
    """Of the windows that a time is in, the latest first."""
    return [start for start in range(time, time - SIZE, -1) if start % slide == 0]


def with_panes(
    items: list[list[Row] | int], lateness: int, early: int, slide: int
) -> tuple[list[Any], list[list[Any]], list[Row]]:
    """Final values and marks, panes after each item, and late records: one record after the other."""
    windows: dict[int, dict[Any, list[int | None]]] = {}
    changed: dict[int, tuple[int, set[Any]]] = {}
    """By window the watermark at its first value that was not shown, and the keys of such values."""
    numbers: Counter[Any] = Counter()
    watermark = -(1 << 63)
    out: list[Any] = []
    panes: list[list[Any]] = []
    late: list[Row] = []

    def pane(start: int, key: Any, *, final: bool) -> Any:
        number = numbers[start, key]
        numbers[start, key] += 1
        return (key, start, aggregates(windows[start][key]), number, final)

    for item in items:
        panes.append([])
        if isinstance(item, list):
            for key, time, value in item:
                starts = [
                    start for start in starts_of(time, slide) if start + SIZE - 1 + lateness > watermark
                ]
                if not starts:
                    late.append((key, time, value))
                for start in starts:
                    windows.setdefault(start, {}).setdefault(key, []).append(value)
                    changed.setdefault(start, (watermark, set()))[1].add(key)
            continue
        is_new, watermark = item > watermark, item
        for start in sorted(start for start in windows if start + SIZE - 1 + lateness <= watermark):
            panes[-1] += [pane(start, key, final=True) for key in windows[start]]
            out += [(key, start, aggregates(values)) for key, values in windows.pop(start).items()]
            changed.pop(start, None)
        for start, (since, keys) in list(changed.items()):
            end = start + SIZE - 1
            points = [*(range(start - 1 + early, end, early) if early else ()), end]
            is_late = since >= end and since < watermark
            if is_late or any(since < point <= watermark for point in points):
                panes[-1] += [pane(start, key, final=False) for key in keys]
                del changed[start]
        if is_new:
            out.append(Watermark(watermark if watermark == END_OF_TIME else watermark - lateness))
    return out, panes, late


rows_strategy = st.lists(
    st.tuples(st.none() | st.integers(0, 3), st.integers(-40, 40), st.none() | st.integers(-9, 9)), max_size=8
)


@st.composite
def streams(draw: st.DrawFn) -> list[list[Row] | int]:
    """Batches, and watermarks that never go back, END_OF_TIME at last."""
    batches = draw(st.lists(rows_strategy, max_size=6))
    marks = sorted(draw(st.lists(st.integers(-45, 45), min_size=len(batches), max_size=len(batches))))
    items: list[list[Row] | int] = []
    for batch, mark in zip(batches, marks, strict=True):
        items += [batch, mark]
    return [*items, END_OF_TIME]


@given(items=streams(), slide=st.sampled_from([SIZE, 5, 4, 1]))
def test_rows_and_arrow_agree_with_a_loop_over_records(items: list[list[Row] | int], slide: int) -> None:
    out, late = reference(items, slide)
    for run, convert in runs_of(ASIDE, NO_PANES, SlidingWindows(SIZE, slide)):
        for number, item in enumerate(items, 1):
            run.take(Watermark(item) if isinstance(item, int) else convert(item))
            so_far = items[:number]
            open_keys = fired([*so_far, END_OF_TIME], slide) - fired(so_far, slide)
            assert run.operator.state_rows() == open_keys
        assert run.out == out
        assert run.late == late
        assert (run.context.counters.records_late, run.context.counters.late_dropped) == (len(late), 0)


@settings(max_examples=examples(40))
@given(
    items=streams(),
    lateness=st.integers(0, 15),
    early=st.sampled_from([0, 1, 3, 9]),
    slide=st.sampled_from([SIZE, 5, 4]),
)
def test_panes_agree_with_a_loop_over_records(
    items: list[list[Row] | int], lateness: int, early: int, slide: int
) -> None:
    out, panes, late = with_panes(items, lateness, early, slide)
    for run, convert in runs_of(ASIDE, Panes("panes", lateness, early), SlidingWindows(SIZE, slide)):
        for item, expected in zip(items, panes, strict=True):
            run.panes.clear()
            run.take(Watermark(item) if isinstance(item, int) else convert(item))
            assert sorted(run.panes, key=repr) == sorted(expected, key=repr)
        assert run.out == out
        assert run.late == late


def test_panes_go_out_before_a_chained_function_has_the_values() -> None:
    operator = on_rows(DROPPED, Panes("panes", lateness=1))
    run = Run(operator)
    seen: list[Any] = []

    def emit(item: Any) -> None:
        run.emit(item)
        if isinstance(item, Batch):
            for _, _, values in item.payload:
                values.clear()
        elif isinstance(item, Side):
            seen.extend(run.panes)

    operator.process(keyed([(1, 0, 5)]), 0, emit)
    operator.on_mark(Watermark(END_OF_TIME), 0, emit)
    assert seen == [(1, 0, (5, 1, 5, 5, 5.0), 0, True)]


@pytest.mark.slow
def test_the_state_of_windows_goes_when_the_last_of_their_panes_has() -> None:
    for make, convert in ((on_rows, keyed), (on_arrow, arrow)):
        run = Run(make(DROPPED, Panes("panes", lateness=12)))  # type: ignore[operator]
        for second in range(1000):
            run.take(convert([(second, 10 * second, 1)]))  # type: ignore[operator]
            run.take(Watermark(10 * second + 4))
            assert run.operator.state_rows() <= 3
        assert [final for *_, pane, final in run.panes if pane == 0] == [False] * 999
        assert [final for *_, pane, final in run.panes if pane == 1] == [True] * 998


@given(batches=st.lists(rows_strategy, max_size=6), out_of_order=st.integers(0, 15))
def test_with_a_watermark_after_each_record_the_batches_do_not_matter(
    batches: list[list[Row]], out_of_order: int
) -> None:
    greatest = -100
    items: list[list[Row] | int] = []
    for row in (row for batch in batches for row in batch):
        greatest = max(greatest, row[1])
        items += [[row], greatest - out_of_order - 1]
    out, late = reference([*items, END_OF_TIME])
    results = [item for item in out if not isinstance(item, Watermark)]
    for operator, is_arrow in ((on_rows(ASIDE), False), (on_arrow(ASIDE), True)):
        run = Run(operator)
        timing = AssignEventTime(T, out_of_order, watermarks="each")
        timing.open(context())

        def keyed_after(item: Any, run: Run = run, is_arrow: bool = is_arrow) -> None:
            is_ready = is_arrow or isinstance(item, Mark)
            run.take(item if is_ready else Batch(item.payload, [r["k"] for r in item.payload]))

        for batch in batches:
            timing.process(Batch(arrow(batch) if is_arrow else keyed(batch).payload), 0, keyed_after)
        timing.on_mark(Watermark(END_OF_TIME), 0, keyed_after)
        assert [item for item in run.out if not isinstance(item, Watermark)] == results
        assert run.late == late


both = pytest.mark.parametrize(
    ("make", "convert"), [(on_rows, keyed), (on_arrow, arrow)], ids=["rows", "arrow"]
)
Make = Callable[..., Any]


@both
def test_a_window_fires_at_its_last_microsecond_and_before_the_watermark(make: Make, convert: Make) -> None:
    run = Run(make())
    run.take(convert([(1, 0, 5), (1, 9, 6), (1, 10, 7)]))
    run.take(Watermark(8))
    run.take(Watermark(9))
    assert run.out == [Watermark(8), (1, 0, aggregates([5, 6])), Watermark(9)]


@both
def test_times_before_1970_fall_into_windows_too(make: Make, convert: Make) -> None:
    run = Run(make())
    run.take(convert([(1, -1, 5), (1, -10, 6), (1, -11, 7)]))
    run.take(Watermark(-1))
    assert run.out[:-1] == [(1, -20, aggregates([7])), (1, -10, aggregates([5, 6]))]


@both
def test_late_records_are_counted_and_dropped(make: Make, convert: Make) -> None:
    run = Run(make())
    run.take(Watermark(9))
    run.take(convert([(1, 9, 5), (1, 10, 6)]))
    run.take(Watermark(END_OF_TIME))
    assert run.out[1:-1] == [(1, 10, aggregates([6]))]
    assert run.late == []
    assert (run.context.counters.records_late, run.context.counters.late_dropped) == (1, 1)


@both
def test_idleness_passes(make: Make, convert: Make) -> None:
    run = Run(make())
    run.take(Idle())
    assert run.out == [Idle()]


@both
def test_what_is_left_goes_out_when_the_input_finishes(make: Make, convert: Make) -> None:
    run = Run(make())
    run.take(convert([(1, 25, 5)]))
    run.take(Watermark(END_OF_TIME))
    assert run.out == [(1, 20, aggregates([5])), Watermark(END_OF_TIME)]


@both
def test_fired_windows_leave_nothing_behind(make: Make, convert: Make) -> None:
    operator = make()
    run = Run(operator)
    for step in range(100):
        run.take(convert([(key, step * SIZE, key) for key in range(20)] + [(1, 5000, step)]))
        run.take(Watermark(step * SIZE + SIZE - 1))
        assert operator.state_rows() == 1
    run.take(Watermark(END_OF_TIME))
    results = [item for item in run.out if not isinstance(item, Watermark)]
    assert len(results) == 100 * 20 + 1
    assert results[-1] == (1, 5000, aggregates(list(range(100))))
    assert results[-2] == (19, 990, aggregates([19]))


# --- Arrow ----------------------------------------------------------------------------------------


def aggregating(keys: tuple[str, ...], columns: dict[str, tuple[str, Function]]) -> WindowOperator:
    return WindowOperator(WindowAggregation(TUMBLING, keys, outputs_of(columns)), T)


def test_the_columns_and_types_of_an_arrow_result() -> None:
    out: list[Any] = []
    operator = aggregating(("k", "t"), {"n": ("v", "count")})
    operator.open(context())
    operator.process(
        as_batch(arrow([("a", 3, 1), (None, 3, None), ("a", 3, 2)], pa.string())), 0, collecting(out)
    )
    operator.on_mark(Watermark(END_OF_TIME), 0, collecting(out))
    moment = pa.timestamp("us", "UTC")
    names = {"k": pa.string(), "t": pa.timestamp("us"), "window_start": moment, "window_end": moment}
    assert out[0].schema.equals(pa.schema({**names, "n": pa.int64()}))
    assert out[0].column("k").to_pylist() == ["a", None]
    assert out[0].column("n").to_pylist() == [2, 0]


def test_windows_of_windows() -> None:
    """The results of a window are in time for the next one, whose size is a multiple."""
    again = WindowAggregation(tumbling(2 * SIZE), ("k",), outputs_of({"total": ("sum", "sum")}))
    first, second = on_arrow(), WindowOperator(again, EventTime(column="window_end", shift=-1))
    out: list[Any] = []
    ctx = context()
    first.open(ctx)
    second.open(ctx)

    def between(item: Any) -> None:
        if isinstance(item, Mark):
            second.on_mark(item, 0, collecting(out))
        else:
            second.process(as_batch(item), 0, collecting(out))

    first.process(as_batch(arrow([(1, 0, 1), (1, 12, 2), (1, 19, 3), (1, 20, 4)])), 0, between)
    for time in (9, 19, END_OF_TIME):
        first.on_mark(Watermark(time), 0, between)
    rows = [
        (row["window_start"], row["total"])
        for b in out
        if isinstance(b, pa.RecordBatch)
        for row in b.to_pylist()
    ]
    assert rows == [
        (datetime(1970, 1, 1, tzinfo=UTC), 6),
        (datetime(1970, 1, 1, 0, 0, 0, 20, tzinfo=UTC), 4),
    ]
    assert [item.time for item in out if isinstance(item, Watermark)] == [9, 19, END_OF_TIME]
    assert ctx.counters.records_late == 0


# --- rows -----------------------------------------------------------------------------------------


def folding(
    add: Callable[[Any, Any], Any],
    create: Callable[[], Any] | None,
    on_error: OnError = "fail",
    *,
    assigner: WindowAssigner = TUMBLING,
) -> WindowOperator:
    return WindowOperator(WindowFold(assigner, add, create), T, on_error=on_error)


def test_a_key_is_shown_in_panes_as_its_first_record_brought_it() -> None:
    run = Run(on_rows(panes=Panes("panes", early=3)))
    for key, time in ((True, 0), (1, 3), (1.0, 6)):
        run.take(keyed([(key, time, 1)]))
        run.take(Watermark(time + 2))
    run.take(Watermark(END_OF_TIME))
    assert [(type(key), number) for key, *_, number, _ in run.panes] == [(bool, n) for n in range(4)]


def test_only_records_whose_function_did_not_raise_are_shown_in_panes() -> None:
    def add(total: int, row: dict[str, int]) -> int:
        return total + 10 // row["v"]

    fold = WindowFold(TUMBLING, add, int, Panes("panes", early=3))
    operator = WindowOperator(fold, T, on_error="skip")
    operator.open(context())
    out: list[Any] = []
    operator.process(keyed([(1, 0, 5), (2, 0, 0), (3, 0, 2)]), 0, out.append)
    operator.on_mark(Watermark(2), 0, out.append)
    operator.process(keyed([(1, 1, 0)]), 0, out.append)
    operator.on_mark(Watermark(5), 0, out.append)
    shown = [row for item in out if isinstance(item, Side) for row in item.batch.payload]
    assert [(key, value, number) for key, _, value, number, _ in shown] == [(1, 2, 0), (3, 5, 0)]


def test_equal_keys_of_several_kinds_are_one_and_shown_as_the_first() -> None:
    out: list[Any] = []
    operator = folding(one_more, int)
    operator.open(context())
    operator.process(keyed([(1.0, 0, 1), (1, 1, 1), (True, 2, 1), ("1", 3, 1)]), 0, collecting(out))
    operator.on_mark(Watermark(END_OF_TIME), 0, collecting(out))
    start = datetime(1970, 1, 1, tzinfo=UTC)
    assert out == [[(1.0, start, 3), ("1", start, 1)], Watermark(END_OF_TIME)]
    assert type(out[0][0][0]) is float


def test_the_first_row_is_the_first_value_without_create() -> None:
    out: list[Any] = []
    operator = folding(lambda value, row: {"v": value["v"] + row["v"]}, None)
    operator.open(context())
    operator.process(keyed([(1, 0, 1), (1, 1, 2), (2, 1, 7)]), 0, collecting(out))
    operator.on_mark(Watermark(END_OF_TIME), 0, collecting(out))
    assert [(key, value["v"]) for key, _, value in out[0]] == [(1, 3), (2, 7)]


def test_a_record_whose_function_raises_is_dropped_alone_or_fails_the_task() -> None:
    def add(total: int, row: dict[str, int]) -> int:
        return total + 10 // row["v"]

    out: list[Any] = []
    operator = folding(add, int, "skip")
    operator.open(context())
    operator.process(keyed([(1, 0, 0), (2, 0, 5), (2, 1, 0), (2, 2, 2)]), 0, collecting(out))
    operator.on_mark(Watermark(END_OF_TIME), 0, collecting(out))
    assert [(key, value) for key, _, value in out[0]] == [(2, 7)]
    assert operator.context.counters.user_errors == {"skip": 2}
    failing = folding(add, int)
    failing.open(context())
    with pytest.raises(ZeroDivisionError) as caught:
        failing.process(keyed([(1, 0, 0)]), 0, collecting(out))
    assert "'v': 0" in caught.value.__notes__[0]


def test_a_row_that_is_in_several_windows_is_each_ones_own() -> None:
    def add(value: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        value["v"] += row["v"]
        return value

    operator = folding(add, None, assigner=SlidingWindows(SIZE, 5))
    operator.open(context())
    out: list[Any] = []
    operator.process(keyed([(1, 7, 1), (1, 8, 2), (1, 11, 4)]), 0, collecting(out))
    operator.on_mark(Watermark(END_OF_TIME), 0, collecting(out))
    assert [(microseconds(start), row["v"]) for rows in out[:-1] for _, start, row in rows] == [
        (0, 3),
        (5, 7),
        (10, 4),
    ]
