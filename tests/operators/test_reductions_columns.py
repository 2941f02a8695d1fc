"""Keyed aggregation of Arrow batches against plain Python: emissions, nulls, several keys, types."""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
from collections.abc import Callable
from decimal import Decimal
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import UsageError
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators import aggregate_states
from minishuffle.operators.aggregates import BY_TIME, Function
from minishuffle.operators.base import TaskContext
from minishuffle.operators.chained import Emission
from support.batches import as_batch, collecting
from support.reducing import aggregating, counting_columns

EMISSIONS: tuple[Emission, ...] = get_args(Emission)
every_emission = pytest.mark.parametrize("emit", EMISSIONS)


def run(operator: Any, *batches: pa.RecordBatch) -> list[pa.RecordBatch]:
    out: list[pa.RecordBatch] = []
    operator.open(TaskContext("job", "task", 0, 1, 1))
    for batch in batches:
        operator.process(as_batch(batch), 0, collecting(out))
    operator.finish(collecting(out))
    return out


REFERENCE: dict[str, Callable[[list[Any]], Any]] = {
    "sum": lambda values: sum(values) if values else None,
    "count": len,
    "min": lambda values: min(values, default=None),
    "max": lambda values: max(values, default=None),
    "mean": lambda values: sum(values) / len(values) if values else None,
    "std": lambda values: pytest.approx(statistics.stdev(values)) if len(values) > 1 else None,
    "count_distinct": lambda values: len(set(values)),
}
OUTPUTS = {function: ("v", function) for function in REFERENCE}


def test_each_aggregation_has_its_reference_unless_it_goes_by_time() -> None:
    assert REFERENCE.keys() == set(get_args(Function)) - set(BY_TIME)


def expected_of(batches: list[list[tuple[Any, Any]]], emit: Emission) -> list[Any]:
    """(key, aggregates) pairs as a loop over records gives them, batch by batch."""
    state: dict[Any, list[Any]] = {}
    out: list[list[Any]] = []
    for batch in batches:
        each = []
        for key, value in batch:
            values = state.setdefault(key, [])
            values.extend([] if value is None else [value])
            each.append((key, tuple(function(values) for function in REFERENCE.values())))
        out.append(each if emit == "each" else list(dict(each).items()))
    if emit != "end":
        return out
    end = [(key, tuple(function(values) for function in REFERENCE.values())) for key, values in state.items()]
    return [end] if end else []


def arrow_pairs(out: list[pa.RecordBatch], keys: list[str], names: list[str]) -> list[Any]:
    return [
        [(tuple(row[key] for key in keys), tuple(row[name] for name in names)) for row in batch.to_pylist()]
        for batch in out
    ]


def check(batches: list[pa.RecordBatch], keys: list[str], emit: Emission) -> None:
    """Compare with plain Python; the order of keys is promised for "each" only."""
    out = run(aggregating(tuple(keys), OUTPUTS, emit), *batches)
    records = [
        [(tuple(row[key] for key in keys), row["v"]) for row in batch.to_pylist()] for batch in batches
    ]
    found, expected = arrow_pairs(out, keys, list(OUTPUTS)), expected_of(records, emit)
    if emit == "each":
        assert found == expected
    else:
        assert [sorted(pairs, key=repr) for pairs in found] == [sorted(pairs, key=repr) for pairs in expected]


arrow_rows = st.lists(
    st.lists(
        st.tuples(
            st.none() | st.integers(-3, 3),
            st.sampled_from(["", "x", "yy"]),
            st.none() | st.integers(-1000, 1000),
        ),
        max_size=20,
    ),
    max_size=4,
)


@every_emission
@given(
    batches=arrow_rows,
    keys=st.sampled_from([["k"], ["s"], ["s", "k"]]),
    kind=st.sampled_from([pa.int64(), pa.float64(), pa.int16()]),
)
def test_arrow_as_plain_python(
    emit: Emission, batches: list[list[tuple[Any, Any, Any]]], keys: list[str], kind: pa.DataType
) -> None:
    tables = [
        pa.record_batch(
            {
                "k": pa.array([k for k, _, _ in rows], pa.int32()),
                "s": pa.array([s for _, s, _ in rows], pa.string()),
                "v": pa.array([v for _, _, v in rows], kind),
            }
        )
        for rows in batches
    ]
    check([table for table in tables if table.num_rows], keys, emit)


@pytest.mark.parametrize("emit", ["batch", "end"])
def test_arrow_in_pieces(emit: Emission, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate_states, "PIECE_ROWS", 7)
    generator = np.random.default_rng(5)
    batches = [
        pa.record_batch(
            {
                "k": generator.integers(0, 30, 100),
                "v": pa.array(generator.integers(-9, 9, 100), mask=generator.random(100) < 0.3),
            }
        )
        for _ in range(3)
    ]
    check(batches, ["k"], emit)


def test_arrow_each_in_pieces_keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate_states, "PIECE_ROWS", 4)
    batch = pa.record_batch({"k": [1, 2, 1, 1, 2, 1], "v": [1, 10, 2, 3, 20, 4]})
    out = run(aggregating(("k",), {"total": ("v", "sum")}, "each"), batch)
    assert pa.Table.from_batches(out).to_pydict() == {"k": [1, 2, 1, 1, 2, 1], "total": [1, 10, 3, 6, 30, 10]}


@every_emission
def test_arrow_counts_rows(emit: Emission) -> None:
    batch = pa.record_batch({"a": [1, 1, None, 1], "b": ["x", "y", "x", "x"]})
    out = run(counting_columns(("a", "b"), emit, name="n"), batch, batch)
    assert out[0].schema.names == ["a", "b", "n"]
    pairs = arrow_pairs(out, ["a", "b"], ["n"])
    both = {(1, "x"): (4,), (1, "y"): (2,), (None, "x"): (2,)}
    if emit == "each":
        assert [n for _, (n,) in pairs[0]] == [1, 1, 1, 2]
        assert [n for _, (n,) in pairs[1]] == [3, 2, 2, 4]
    else:
        assert dict(pairs[-1]) == both


def one_column(values: Any, kind: pa.DataType | None = None) -> pa.RecordBatch:
    column = values if isinstance(values, pa.Array) else pa.array(values, kind)
    return pa.record_batch({"k": np.zeros(len(column), np.int64), "v": column})


def aggregated(function: Any, emit: Emission, *columns: Any) -> list[Any]:
    operator = aggregating(("k",), {"out": ("v", function)}, emit)
    out = run(
        operator,
        *[column if isinstance(column, pa.RecordBatch) else one_column(column) for column in columns],
    )
    return [value for batch in out for value in batch.column("out").to_pylist()]


DAY = datetime.date(2026, 1, 1)
LATER = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("values", "kind", "least", "greatest"),
    [
        ([DAY, None, DAY.replace(day=3)], pa.date32(), DAY, DAY.replace(day=3)),
        ([LATER, LATER.replace(hour=1)], pa.timestamp("us", "UTC"), LATER.replace(hour=1), LATER),
        (
            [datetime.timedelta(5), datetime.timedelta(4)],
            pa.duration("s"),
            datetime.timedelta(4),
            datetime.timedelta(5),
        ),
        ([True, False, None], pa.bool_(), False, True),
        ([2**64 - 1, 5], pa.uint64(), 5, 2**64 - 1),
        ([-128, 127], pa.int8(), -128, 127),
        ([math.nan, 2.0, math.inf, None], pa.float32(), 2.0, math.inf),
        (["b", None, "", "a", "bé"], pa.string(), "", "bé"),
        (["b", "a"], pa.large_string(), "a", "b"),
        ([b"\xff", None, b"a"], pa.binary(), b"a", b"\xff"),
        ([b"ab", b"aa"], pa.binary(2), b"aa", b"ab"),
        ([Decimal("0.5"), None, Decimal("-1.5")], pa.decimal64(4, 1), Decimal("-1.5"), Decimal("0.5")),
    ],
    ids=str,
)
@every_emission
def test_least_and_greatest_keep_the_type(
    values: list[Any], kind: pa.DataType, least: Any, greatest: Any, emit: Emission
) -> None:
    batch = one_column(values, kind)
    for function, wanted in (("min", least), ("max", greatest)):
        assert aggregated(function, emit, batch)[-1] == wanted
        (*_, last) = run(aggregating(("k",), {"out": ("v", function)}, emit), batch)
        assert last.column("out").type == kind


@every_emission
def test_an_infinite_value_of_one_key_leaves_the_others_alone(emit: Emission) -> None:
    batch = pa.record_batch({"k": [1, 2, 1, 2, 1], "v": [math.inf, 1.0, 1e300, 0.5, -1.0]})
    out = run(aggregating(("k",), {"s": ("v", "sum")}, emit), batch)
    assert dict(arrow_pairs(out, ["k"], ["s"])[-1]) == {(1,): (math.inf,), (2,): (1.5,)}


@every_emission
def test_nulls_that_come_late(emit: Emission) -> None:
    batches = [
        pa.record_batch({"k": [1], "v": [5]}),
        pa.record_batch({"k": [2, 1, 2], "v": pa.array([None, None, 7], pa.int64())}),
        pa.record_batch({"k": [3, 1], "v": pa.array([None, 1], pa.int64())}),
    ]
    check(batches, ["k"], emit)


@every_emission
def test_sums_are_exact_up_to_int64_and_refused_beyond(emit: Emission) -> None:
    top = 2**63 - 1
    assert aggregated("sum", emit, [top - 5, 3], [2])[-1] == top
    assert aggregated("sum", emit, [-top, -1])[-1] == -top - 1
    assert aggregated("sum", emit, *[[2**62, -(2**62)]] * 9)[-1] == 0
    with pytest.raises(UsageError, match=r"a sum of column 'v' leaves the range of int64: cast the column"):
        aggregated("sum", emit, [top - 5, 3], [3])
    with pytest.raises(UsageError, match="leaves the range of int64"):
        aggregated("sum", emit, [-top, -2])


def test_sums_take_booleans_and_those_of_unsigned_values_are_decimals() -> None:
    assert aggregated("sum", "end", [True, None, True, False]) == [2]
    assert aggregated("sum", "end", one_column([5, 6], pa.uint32())) == [11]
    large = one_column([2**64 - 1, None, 2**64 - 2], pa.uint64())
    assert aggregated("sum", "end", large) == [Decimal(2**65 - 3)]
    assert aggregated("mean", "end", large) == [2.0**64]


NULLS = [None, None]


@pytest.mark.parametrize(
    ("columns", "kind", "results"),
    [
        ([NULLS, [5]], pa.int64(), (5, 1, 5, 5, 5.0)),
        ([NULLS, NULLS], pa.null(), (None, 0, None, None, None)),
        ([[1.5], NULLS, [2.0]], pa.float64(), (3.5, 2, 1.5, 2.0, 1.75)),
        ([[1], [7]], pa.int8(), (8, 2, 1, 7, 4.0)),
        ([[True, None], [False]], pa.bool_(), (1, 2, False, True, 0.5)),
        ([[Decimal("1.5")], NULLS], pa.decimal128(2, 1), ("1.5", 1, "1.5", "1.5", 1.5)),
        ([[2**53 + 1], [0]], pa.int64(), (2**53 + 1, 2, 0, 2**53 + 1, 2.0**52)),
    ],
    ids=str,
)
@every_emission
def test_nulls_may_come_before_and_after_values(
    columns: list[list[Any]], kind: pa.DataType, results: tuple[Any, ...], emit: Emission
) -> None:
    names = ("sum", "count", "min", "max", "mean")
    outputs = {name: ("v", name) for name in names}
    wanted = [Decimal(value) if isinstance(value, str) else value for value in results]
    for order in itertools.permutations(columns):
        batches = [one_column(pa.array(column, kind)) for column in order]
        last = run(aggregating(("k",), outputs, emit), *batches)[-1]
        assert [last.column(name).to_pylist()[-1] for name in names] == wanted
        assert last.column("min").type == last.column("max").type == kind


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("sum", pa.decimal256(5, 2)),
        ("sum", pa.string()),
        ("mean", pa.date32()),
        ("min", pa.float16()),
        ("max", pa.decimal256(5, 2)),
    ],
    ids=str,
)
def test_types_that_cannot_be_aggregated(function: Any, kind: pa.DataType) -> None:
    with pytest.raises(UsageError, match=r"of column 'v' of type .* is not supported: cast the column"):
        aggregated(function, "end", pa.record_batch({"k": [1], "v": pa.array([None], kind)}))


def test_unknown_functions() -> None:
    with pytest.raises(UsageError, match=r"no aggregate 'median' \(of column 'v'\): write one of sum, count"):
        aggregating(("k",), {"out": ("v", "median")}, "each")  # type: ignore[dict-item]


def test_arrow_state_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate_states, "PIECE_ROWS", 1000)
    keys = np.arange(5000, dtype=np.int64) % 2500
    out = run(aggregating(("k",), OUTPUTS, "end"), pa.record_batch({"k": keys, "v": keys}))
    assert {row["k"]: (row["sum"], row["count"]) for row in out[0].to_pylist()} == {
        key: (2 * key, 2) for key in range(2500)
    }


def test_the_end_comes_in_chunks() -> None:
    keys = list(range(BATCH_ROWS_MAX + 1))
    out = run(counting_columns(("k",), "end"), pa.record_batch({"k": keys}))
    assert [len(chunk) for chunk in out] == [BATCH_ROWS_MAX, 1]
    assert sorted(row["k"] for chunk in out for row in chunk.to_pylist()) == keys


@every_emission
def test_sums_of_decimals_go_on_beyond_64_bits_within_a_batch(emit: Emission) -> None:
    large = Decimal(2**62)
    column = pa.array([large, large, None, large, -large], pa.decimal128(30, 0))
    running = [large, 2 * large, 2 * large, 3 * large, 2 * large]
    found = aggregated("sum", emit, column, column)
    assert found[-1] == 4 * large
    if emit == "each":
        assert found == [*running, *(2 * large + after for after in running)]


@pytest.mark.parametrize("rows", [0, 1, 9, 10, 14, 15, 16, 25, 99, 1000])
def test_pieces_are_of_like_size_and_hold_each_row_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate_states, "PIECE_ROWS", 10)
    pieces = list(aggregate_states.pieces_of(rows))
    assert [row for begin, size in pieces for row in range(begin, begin + size)] == list(range(rows))
    assert all(0 < size <= 15 for _, size in pieces)
    assert len(pieces) <= 1 or min(size for _, size in pieces) > 5


def test_each_of_a_thousand_batches_emits_its_own_keys_once() -> None:
    """There are 255 stamps of batches; a key may come again after as many of them, and new keys after any."""
    batches = [pa.record_batch({"k": [n % 7, 1000 + n // 300, n % 7]}) for n in range(1000)]
    for number, out in enumerate(run(counting_columns(("k",), "batch"), *batches)):
        assert out.column("k").to_pylist() == [number % 7, 1000 + number // 300]
    alone = [pa.record_batch({"k": [1]}), *[pa.record_batch({"k": [2]})] * 254, pa.record_batch({"k": [1]})]
    found = [out.to_pylist() for out in run(counting_columns(("k",), "batch"), *alone)]
    assert found[-1] == [{"k": 1, "count": 2}]
