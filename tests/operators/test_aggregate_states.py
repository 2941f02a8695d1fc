"""Aggregates as vectors by slot: sums, bounds and counts of each key, and the types of results."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.errors import UsageError, WrongColumns
from minishuffle.exchange.watermarks import END_OF_TIME
from minishuffle.operators.aggregate_states import (
    PIECE_ROWS,
    Aggregate,
    Fold,
    RowCount,
    ValueCount,
    grown,
    merge_states,
    pieces_of,
    renumbered,
    result_type,
    states_of,
)
from minishuffle.operators.aggregates import outputs_of
from minishuffle.operators.base import TaskContext, Watermark
from minishuffle.operators.event_time import EventTime
from minishuffle.operators.event_time_operator import Late
from minishuffle.operators.sessions import Closing, SessionAggregation, SessionOperator
from minishuffle.operators.window_assigner import tumbling
from minishuffle.operators.windows import Panes, WindowAggregation, WindowOperator
from support.batches import as_batch, collecting
from support.reducing import aggregating

SLOTS = np.array([0, 1, 0, 2, 0])
VALUES = pa.array([5, None, -3, None, 4])


def taken(aggregate: Aggregate, column: pa.Array = VALUES, slots: Any = SLOTS) -> list[Any]:
    """The values of all slots after a batch."""
    aggregate.grow(int(slots.max()) + 1)
    aggregate.update(slots, column)
    found: list[Any] = aggregate.at(slice(0, int(slots.max()) + 1)).to_pylist()
    return found


@pytest.mark.parametrize(
    ("aggregate", "values"),
    [
        (RowCount(), [3, 1, 1]),
        (ValueCount(), [3, 0, 0]),
        (Fold("sum", "v", pa.int64()), [6, None, None]),
        (Fold("min", "v", pa.int64()), [-3, None, None]),
        (Fold("max", "v", pa.int64()), [5, None, None]),
    ],
    ids=["rows", "values", "sum", "min", "max"],
)
def test_each_slot_has_the_value_of_its_rows(aggregate: Aggregate, values: list[Any]) -> None:
    assert taken(aggregate) == values
    assert aggregate.at(np.array([2, 0])).to_pylist() == [values[2], values[0]]
    aggregate.keep(np.array([1, 0]))
    assert aggregate.at(slice(0, 2)).to_pylist() == [values[1], values[0]]


@pytest.mark.parametrize(
    ("aggregate", "values"),
    [
        (RowCount(), [1, 1, 2, 1, 3]),
        (ValueCount(), [1, 0, 2, 0, 3]),
        (Fold("sum", "v", pa.int64()), [5, None, 2, None, 6]),
        (Fold("min", "v", pa.int64()), [5, None, -3, None, -3]),
        (Fold("max", "v", pa.int64()), [5, None, 5, None, 5]),
    ],
    ids=["rows", "values", "sum", "min", "max"],
)
def test_each_row_has_the_value_after_it(aggregate: Aggregate, values: list[Any]) -> None:
    aggregate.grow(3)
    assert aggregate.running(SLOTS, VALUES).to_pylist() == values


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        (pa.uint64(), 0, 2**64 - 1),
        (pa.int8(), -128, 127),
        (pa.float32(), -1.5, float("inf")),
        (pa.bool_(), False, True),
        (pa.timestamp("ns"), -5, 7),
        (pa.date32(), 0, 20_000),
    ],
    ids=str,
)
def test_bounds_keep_their_type(kind: pa.DataType, least: Any, most: Any) -> None:
    column = pa.array([most, None, least, most], kind)
    for function, row in (("min", 2), ("max", 0)):
        bound = Fold(function, "v", kind)
        bound.grow(1)
        bound.update(np.zeros(4, np.int64), column)
        assert bound.at(slice(0, 1)) == column.slice(row, 1)


def test_a_sum_beyond_int64_names_its_column() -> None:
    with pytest.raises(UsageError, match="^a sum of column 'v' leaves the range of int64: cast the"):
        taken(Fold("sum", "v", pa.int64()), pa.array([2**63 - 1, 1]), np.array([0, 0]))


def test_a_null_that_comes_late_leaves_the_values_before_it() -> None:
    total = Fold("sum", "v", pa.int64())
    assert taken(total, pa.array([1, 2]), np.array([0, 1])) == [1, 2]
    assert taken(total, pa.array([None, 5]), np.array([2, 1])) == [1, 7, None]


def test_states_are_columns_that_are_added_to_others() -> None:
    def made() -> Any:
        return [("s", "v", Fold("sum", "v", pa.int64())), ("c", "v", ValueCount())]

    one, other = made(), made()
    for outputs in (one, other):
        for _, _, aggregate in outputs:
            taken(aggregate)
    states = states_of(one, np.array([0, 2]))
    assert {name: column.to_pylist() for name, column in states.items()} == {"0.0": [6, None], "1.0": [3, 0]}
    merge_states(other, np.array([3, 0]), 4, pa.record_batch(states))
    assert [each.at(slice(0, 4)).to_pylist() for _, _, each in other] == [[6, None, None, 6], [3, 0, 0, 3]]


COLUMNS: Any = {"c": ("v", "count"), "s": ("v", "sum"), "m": ("x", "mean"), "d": ("v", "count_distinct")}
CHANGED: Any = {"new": ("x", "max"), **{name: COLUMNS[name] for name in ("m", "d", "c")}}


def by_window(columns: Any) -> WindowOperator:
    values = WindowAggregation(tumbling(100), ("k",), outputs_of(columns), Panes("panes", lateness=5))
    return WindowOperator(values, EventTime(column="t"), Late())


def by_session(columns: Any) -> SessionOperator:
    sessions = SessionAggregation(Closing(100), ("k",), outputs_of(columns))
    return SessionOperator(sessions, EventTime(column="t"), Late())


@pytest.mark.parametrize("make", [lambda columns: aggregating(("k",), columns, "end"), by_window, by_session])
def test_state_goes_to_the_aggregates_of_its_names_and_new_ones_begin(make: Callable[[Any], Any]) -> None:
    before = pa.record_batch({"k": ["a", "b", "a"], "v": [1, 2, 5], "x": [1.0, 2.0, 4.0], "t": [1, 2, 3]})
    after = pa.record_batch({"k": ["c", "a"], "v": [7, 1], "x": [9.0, 3.0], "t": [4, 5]})
    written, out = make(COLUMNS), list[Any]()
    written.open(TaskContext("job", "task", 0, 1, 1))
    written.process(as_batch(before), 0, collecting(out))
    written.on_mark(Watermark(3), 0, collecting(out))
    parts = [renumbered(part, list(COLUMNS), list(CHANGED)) for part in written.write_state()]
    operator = make(CHANGED)
    operator.open(TaskContext("job", "task", 0, 1, 1))
    operator.read_state(parts)
    operator.process(as_batch(after), 0, collecting(out))
    operator.on_mark(Watermark(END_OF_TIME), 0, collecting(out))
    operator.finish(collecting(out))
    tables = [each for each in out if isinstance(each, pa.RecordBatch)]
    rows = [{name: row[name] for name in ("k", *CHANGED)} for each in tables for row in each.to_pylist()]
    assert sorted(rows, key=itemgetter("k")) == [
        {"k": "a", "new": 3.0, "m": 8 / 3, "d": 2, "c": 3},
        {"k": "b", "new": None, "m": 2.0, "d": 1, "c": 1},
        {"k": "c", "new": 9.0, "m": 9.0, "d": 1, "c": 1},
    ]


# --- results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pa.decimal128(7, 3), pa.decimal32(7, 3), pa.decimal64(9, 3)], ids=str)
def test_types_of_results(kind: pa.DataType) -> None:
    values = pa.array([Decimal("1.125"), Decimal("-2.500"), None], pa.decimal128(7, 3)).cast(kind)
    batch = pa.record_batch({"k": [1, 1, 1], "v": values})
    functions = {name: ("v", name) for name in ("sum", "min", "max", "mean", "count")}
    out: list[pa.RecordBatch] = []
    operator = aggregating(("k",), functions, "end")
    operator.open(TaskContext("job", "task", 0, 1, 1))
    operator.process(as_batch(batch), 0, collecting(out))
    operator.finish(collecting(out))
    assert out[0].to_pylist() == [
        {
            "k": 1,
            "sum": Decimal("-1.375"),
            "min": Decimal("-2.5"),
            "max": Decimal("1.125"),
            "mean": -0.6875,
            "count": 2,
        }
    ]
    for name in functions:
        assert out[0].schema.field(name).type == result_type(name, "v", kind)
    assert result_type("sum", "v", kind) == pa.decimal128(38, 3)


@pytest.mark.parametrize(
    ("function", "kind", "result"),
    [
        ("count", pa.list_(pa.int8()), pa.int64()),
        ("sum", pa.int8(), pa.int64()),
        ("sum", pa.bool_(), pa.int64()),
        ("sum", pa.uint64(), pa.decimal128(38, 0)),
        ("sum", pa.float32(), pa.float64()),
        ("sum", pa.null(), pa.null()),
        ("mean", pa.int8(), pa.float64()),
        ("std", pa.float32(), pa.float64()),
        ("min", pa.dictionary(pa.int8(), pa.string()), pa.string()),
        ("max", pa.string_view(), pa.large_string()),
        ("max", pa.uint8(), pa.uint8()),
        ("first", pa.timestamp("s"), pa.timestamp("s")),
        ("count_distinct", pa.uuid(), pa.int64()),
    ],
)
def test_results_have_types_that_hold_them(function: str, kind: pa.DataType, result: pa.DataType) -> None:
    assert result_type(function, "v", kind) == result


@pytest.mark.parametrize(
    ("function", "kind", "says"),
    [
        ("sum", pa.string(), "^sum of column 'v' of type string is not supported: cast the column to int64"),
        ("mean", pa.timestamp("s"), r"^mean of column 'v' of type timestamp\[s\] is not supported"),
        ("min", pa.list_(pa.int8()), "lists and the like have no order; take their parts out first"),
        ("count_distinct", pa.month_day_nano_interval(), "make integers or a duration of it first"),
    ],
)
def test_what_cannot_be_aggregated_is_refused(function: str, kind: pa.DataType, says: str) -> None:
    with pytest.raises(WrongColumns, match=says):
        result_type(function, "v", kind)


# --- vectors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, PIECE_ROWS, PIECE_ROWS * 3 // 2, 2 * PIECE_ROWS + 1])
def test_pieces_are_of_like_size_and_follow_each_other(rows: int) -> None:
    pieces = list(pieces_of(rows))
    assert [begin for begin, _ in pieces] == [sum(each for _, each in pieces[:n]) for n in range(len(pieces))]
    assert sum(length for _, length in pieces) == rows
    assert all(length <= PIECE_ROWS * 3 / 2 for _, length in pieces)


def test_a_vector_grows_to_twice_its_length_at_least() -> None:
    vector = np.array([1, 2])
    assert grown(vector, 2, 0) is vector
    assert len(larger := grown(vector, 3, 7)) == 1024
    assert larger[:4].tolist() == [1, 2, 7, 7]
    assert len(grown(larger, 1025, 0)) == 2048
