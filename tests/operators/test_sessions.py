"""Sessions of rows and of Arrow against a loop over all records in order of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minishuffle.exchange.batch import Batch
from minishuffle.operators import sessions
from minishuffle.operators.aggregates import outputs_of
from minishuffle.operators.base import (
    END_OF_TIME,
    Idle,
    Mark,
    Side,
    TaskContext,
    Watermark,
)
from minishuffle.operators.batch_times import microseconds
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import Late
from minishuffle.operators.row_conversion import rows_of
from minishuffle.operators.sessions import (
    Closing,
    SessionAggregation,
    SessionFold,
    SessionOperator,
    last_of_session,
)
from support.batches import as_batch, collecting
from support.soak import examples

T = EventTime(column="t")
GAP = 5
SESSIONS = Closing(GAP)
Row = tuple[Any, int, int]
"""Key, time, value."""
Items = list[list[Row] | int]
Convert = Callable[[list[Row]], Any]


def keyed(rows: list[Row]) -> Batch:
    return Batch([{"k": k, "t": t, "v": v} for k, t, v in rows], [key for key, _, _ in rows])


def arrow(rows: list[Row]) -> pa.RecordBatch:
    kinds = {"k": pa.int64(), "t": pa.timestamp("us"), "v": pa.int64()}
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds.values(), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, list(kinds))


def listed(values: list[Any], row: dict[str, Any]) -> list[Any]:
    return [*values, row["v"]]


def on_rows(closing: Closing = SESSIONS) -> SessionOperator:
    return SessionOperator(SessionFold(closing, listed, list), T, Late("side", "late"))


def on_arrow(closing: Closing = SESSIONS) -> SessionOperator:
    outputs = outputs_of({"n": ("v", "count"), "s": ("v", "sum")}, T)
    return SessionOperator(SessionAggregation(closing, ("k",), outputs), T, Late("side", "late"))


BOTH = [(on_rows, keyed), (on_arrow, arrow)]


class Run:
    """What an operator gives, as (key, first, end, number, sum), and late records."""

    def __init__(self, operator: SessionOperator) -> None:
        self.operator = operator
        self.out: list[Any] = []
        self.late: list[Row] = []
        operator.open(TaskContext("job", "task", 0, 1, 1))

    def emit(self, item: Any) -> None:
        if isinstance(item, Side):
            self.late += [(row["k"], microseconds(row["t"]), row["v"]) for row in rows_of(item.batch)]
        elif isinstance(item, Mark):
            self.out.append(item)
        else:
            self.out += map(self._session, rows_of(item))

    def _session(self, row: Any) -> tuple[Any, ...]:
        if isinstance(row, tuple):
            key, first, end, values = row
            assert microseconds(last_of_session(row)) == microseconds(end) - 1
            return (key, microseconds(first), microseconds(end), len(values), sum(values))
        return (
            row["k"],
            microseconds(row["window_start"]),
            microseconds(row["window_end"]),
            row["n"],
            row["s"],
        )

    def take(self, items: Items, convert: Convert) -> None:
        for item in items:
            if isinstance(item, int):
                self.operator.on_mark(Watermark(item), 0, self.emit)
            else:
                self.operator.process(as_batch(convert(item)), 0, self.emit)


def reference(items: Items, size: int = 0) -> tuple[list[Any], list[Row]]:
    """The sessions of records in time, between the watermarks at which they end, and late records; with
    ``size`` windows of so many records."""
    watermark = -(1 << 63)
    late: list[Row] = []
    rows: list[Row] = []
    for item in items:
        if isinstance(item, int):
            watermark = max(watermark, item)
            continue
        late += [row for row in item if row[1] <= watermark]
        rows += [row for row in item if row[1] > watermark]
    found: dict[Any, list[list[Row]]] = {}
    for row in sorted(rows, key=lambda row: row[1]):
        mine = found.setdefault(row[0], [])
        if mine and (len(mine[-1]) < size if size else row[1] < mine[-1][-1][1] + GAP):
            mine[-1].append(row)
        else:
            mine.append([row])
    ended = [
        (key, some[0][1], some[-1][1] + (1 if size else GAP), len(some), sum(value for _, _, value in some))
        for key, mine in found.items()
        for some in mine
        if len(some) == size or not size
    ]
    out, before = [], -(1 << 63)
    for item in items:
        if isinstance(item, int) and item > before:
            due = [session for session in ended if before < session[2] - 1 <= item]
            out += [set(due), Watermark(item)]
            before = item
    return out, late


def by_watermark(out: list[Any]) -> list[Any]:
    """What came before each watermark, whatever the order of sessions that end at one time."""
    found: list[Any] = [[]]
    for item in out:
        if isinstance(item, Mark):
            ends = [session[2] for session in found[-1]]
            assert ends == sorted(ends)
            found[-1] = set(found[-1])
            found += [item, []]
        else:
            found[-1].append(item)
    return found[:-1]


@st.composite
def streams(draw: st.DrawFn) -> Items:
    rows = st.lists(
        st.tuples(st.none() | st.integers(0, 3), st.integers(-20, 20), st.integers(-9, 9)), max_size=8
    )
    batches = draw(st.lists(rows, max_size=6))
    marks = sorted(draw(st.lists(st.integers(-25, 25), min_size=len(batches), max_size=len(batches))))
    items: Items = []
    for batch, mark in zip(batches, marks, strict=True):
        items += [batch, mark]
    return [*items, END_OF_TIME]


@given(items=streams(), spare=st.sampled_from([0, 4096]), size=st.sampled_from([0, 0, 1, 2, 3]))
def test_rows_and_arrow_agree_with_a_loop_over_records(items: Items, spare: int, size: int) -> None:
    out, late = reference(items, size)
    closing = Closing.with_size(size) if size else Closing(GAP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "SPARE_SESSIONS", spare)
        for make, convert in BOTH:
            run = Run(make(closing))
            run.take(items, convert)
            assert by_watermark(run.out) == out and run.late == late
            assert run.operator.state_rows() == 0


@settings(max_examples=examples(30))
@given(items=streams())
def test_what_is_held_is_counted(items: Items) -> None:
    """Records whose time is to come, and open sessions."""
    for make, convert in BOTH:
        run = Run(make())
        for number, item in enumerate(items, 1):
            run.take([item], convert)
            reached = max((mark for mark in items[:number] if isinstance(mark, int)), default=-(1 << 63))
            late = Run(make())
            late.take(items[:number], convert)
            in_time = [row for some in items[:number] if isinstance(some, list) for row in some]
            for row in late.late:
                in_time.remove(row)
            waiting = sum(time > reached for _, time, _ in in_time)
            begun = reference([[row for row in in_time if row[1] <= reached], reached])[0]
            all_sessions = reference([[row for row in in_time if row[1] <= reached], END_OF_TIME])[0]
            open_ones = sum(map(len, all_sessions[::2])) - sum(map(len, begun[::2]))
            assert run.operator.state_rows() == waiting + open_ones


@pytest.mark.parametrize("make, convert", BOTH, ids=["rows", "arrow"])
def test_a_session_ends_a_gap_after_its_last_record(make: Any, convert: Convert) -> None:
    run = Run(make())
    run.take([[(1, 4, 1), (1, 0, 2), (1, 9, 3)], 13], convert)
    assert run.out == [(1, 0, 9, 2, 3), (1, 9, 14, 1, 3), Watermark(13)]
    run.operator.on_mark(Idle(), 0, run.emit)
    assert run.out[-1] == Idle()


@pytest.mark.parametrize("make, convert", BOTH, ids=["rows", "arrow"])
def test_a_window_of_so_many_records_takes_them_in_order_of_time(make: Any, convert: Convert) -> None:
    run = Run(make(Closing.with_size(3)))
    run.take([[(1, 4, 1), (1, 0, 2), (2, 1, 9), (1, 9, 3), (1, 8, 4)], 7], convert)
    assert run.out == [Watermark(7)] and run.operator.state_rows() == 4  # two to come, a window of each key
    run.take([8], convert)
    assert run.out[1:] == [(1, 0, 9, 3, 7), Watermark(8)]
    run.take([END_OF_TIME], convert)
    assert run.out[3:] == [Watermark(END_OF_TIME)] and run.operator.state_rows() == 0


@pytest.mark.parametrize("make, convert", BOTH, ids=["rows", "arrow"])
def test_what_is_left_goes_out_when_the_input_finishes(make: Any, convert: Convert) -> None:
    run = Run(make())
    run.take([[(1, 4, 1), (2, 7, 2)], 5], convert)
    assert run.out == [Watermark(5)]
    run.take([END_OF_TIME], convert)
    assert run.out[1:] == [(1, 4, 9, 1, 1), (2, 7, 12, 1, 2), Watermark(END_OF_TIME)]


def test_a_record_whose_function_raises_is_dropped_alone_or_fails_the_task() -> None:
    def add(total: int, row: dict[str, Any]) -> int:
        return total + 10 // row["v"]

    rows = [(1, 1, 5), (1, 2, 0), (2, 3, 0)]
    skipping = SessionOperator(SessionFold(SESSIONS, add, int), T, Late(), "skip")
    skipping.open(context := TaskContext("job", "task", 0, 1, 1))
    out: list[Any] = []
    skipping.process(keyed(rows), 0, collecting(out))
    skipping.on_mark(Watermark(END_OF_TIME), 0, collecting(out))
    assert [(key, value) for key, _, _, value in out[0]] == [(1, 2)]
    assert context.counters.user_errors == {"skip": 2}
    failing = SessionOperator(SessionFold(SESSIONS, add, int), T, Late())
    failing.open(TaskContext("job", "task", 0, 1, 1))
    failing.process(keyed(rows), 0, collecting(out))
    with pytest.raises(ZeroDivisionError) as raised:
        failing.on_mark(Watermark(END_OF_TIME), 0, collecting(out))
    assert raised.value.__notes__ == ["raised in operator 'window' by the record {'k': 1, 't': 2, 'v': 0}"]


def test_a_session_is_shown_with_the_key_of_its_first_record() -> None:
    """Also where one before it, in the same batch, had the key in another type."""
    run = Run(on_rows())
    run.take([[(True, 0, 1), (1, 1, 1), (1.0, 20, 1), (1, 21, 1)], END_OF_TIME], keyed)
    assert [type(session[0]) for session in run.out[:-1]] == [bool, float]


def test_records_of_one_time_are_in_the_order_in_which_they_came_after_a_restart_too() -> None:
    def spelt(text: str, row: dict[str, Any]) -> str:
        return text + str(row["v"])

    def operator() -> SessionOperator:
        made = SessionOperator(SessionFold(SESSIONS, spelt, str), T, Late())
        made.open(TaskContext("job", "task", 0, 1, 1))
        return made

    out: list[Any] = []
    before, after = operator(), operator()
    for value in range(3):
        before.process(keyed([(1, 7, value), (1, 5, value)]), 0, out.append)
    after.read_state(list(before.write_state()))
    after.process(keyed([(1, 5, 3)]), 0, out.append)
    after.on_mark(Watermark(END_OF_TIME), 0, out.append)
    assert [row[3] for batch in out[:-1] for row in batch.payload] == ["0123012"]
