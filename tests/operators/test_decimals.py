"""Decimals: exact aggregates of any size, as keys, and between rows and Arrow."""

from __future__ import annotations

from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import UsageError
from minishuffle.exchange.rows import pack_rows, unpack_rows
from minishuffle.operators.base import TaskContext
from minishuffle.operators.chained import Emission
from minishuffle.operators.decimals import DecimalSum, exact_mean, wide
from minishuffle.operators.reductions import KeyedReduction
from minishuffle.operators.row_conversion import RowsToArrow, rows_of
from support.batches import as_batch, collecting
from support.reducing import aggregating

EXACT = Context(prec=80)
LARGE = pa.decimal128(38, 2)
TOP = Decimal((0, (9,) * 38, -2))
"""The greatest decimal128(38, 2)."""
BOTTOM = TOP.copy_negate()

amounts = st.one_of(
    st.integers(-(10**38) + 1, 10**38 - 1), st.integers(-(2**63), 2**63), st.integers(-99, 99)
).map(lambda units: Decimal(units).scaleb(-2, EXACT))


def run(operator: KeyedReduction, *batches: pa.RecordBatch) -> list[dict[str, Any]]:
    out: list[pa.RecordBatch] = []
    operator.open(TaskContext("job", "task", 0, 1, 1))
    for batch in batches:
        operator.process(as_batch(batch), 0, collecting(out))
    operator.finish(collecting(out))
    return [row for batch in out for row in batch.to_pylist()]


def batch_of(pairs: list[tuple[int, Decimal | None]], kind: pa.DataType = LARGE) -> pa.RecordBatch:
    return pa.record_batch(
        {"k": pa.array([k for k, _ in pairs], pa.int64()), "v": pa.array([v for _, v in pairs], kind)}
    )


def expected_of(batches: list[list[tuple[int, Decimal | None]]]) -> list[dict[str, Any]]:
    """What an aggregation that emits each gives."""
    values: dict[int, list[Decimal]] = {}
    out = []
    for key, value in (pair for batch in batches for pair in batch):
        seen = values.setdefault(key, [])
        seen.extend([] if value is None else [value])
        total = None
        if seen:
            total = Decimal(0)
            for item in seen:
                total = EXACT.add(total, item)
        out.append({"k": key, "s": total, "low": min(seen, default=None), "high": max(seen, default=None)})
    return out


pairs = st.lists(st.lists(st.tuples(st.integers(0, 2), st.none() | amounts), max_size=6), max_size=5)
OUTPUTS = {"s": ("v", "sum"), "low": ("v", "min"), "high": ("v", "max")}


@given(batches=pairs)
def test_sums_and_bounds_are_exact(batches: list[list[tuple[int, Decimal | None]]]) -> None:
    each = expected_of(batches)
    last = list({row["k"]: row for row in each}.values())
    emissions: dict[Emission, list[dict[str, Any]]] = {"each": each, "end": last}
    for emit, expected in emissions.items():
        operator = aggregating(("k",), OUTPUTS, emit)
        if any(row["s"] is not None and row["s"].copy_abs() > TOP for row in expected):
            with pytest.raises(
                UsageError, match=r"sum of column 'v' leaves the range of decimal128\(38, 2\)"
            ):
                run(operator, *map(batch_of, batches))
            continue
        found = run(operator, *map(batch_of, batches))
        if emit == "end":
            found.sort(key=lambda row: [r["k"] for r in expected].index(row["k"]))
        assert found == expected


def test_sums_may_be_beyond_38_digits_on_their_way() -> None:
    batches = [
        batch_of([(1, TOP), (1, TOP), (2, TOP)]),
        batch_of([(1, BOTTOM), (1, BOTTOM), (2, None), (1, BOTTOM)]),
    ]
    found = run(aggregating(("k",), {"s": ("v", "sum")}, "end"), *batches)
    assert found == [{"k": 1, "s": BOTTOM}, {"k": 2, "s": TOP}]
    with pytest.raises(UsageError, match=r"sum of column 'v' leaves the range of decimal128\(38, 2\)"):
        run(aggregating(("k",), {"s": ("v", "sum")}, "end"), batch_of([(1, TOP), (1, TOP)]))


def test_sums_beyond_38_digits_are_taken_to_another_subtask() -> None:
    first, second = (aggregating(("k",), {"s": ("v", "sum"), "m": ("v", "mean")}, "end") for _ in range(2))
    first.open(TaskContext("job", "task", 0, 1, 1))
    first.process(as_batch(batch_of([(1, TOP), (1, TOP)])), 0, lambda batch: None)
    second.read_state(list(first.write_state()))
    assert run(second, batch_of([(1, BOTTOM), (1, Decimal(0))])) == [{"k": 1, "s": TOP, "m": float(TOP) / 4}]


# --- means ------------------------------------------------------------------------------------------


def mean_of(values: list[Any], kind: pa.DataType, emit: Emission = "end") -> list[Any]:
    batch = pa.record_batch({"k": pa.array([1] * len(values)), "v": pa.array(values, kind)})
    return [row["m"] for row in run(aggregating(("k",), {"m": ("v", "mean")}, emit), batch)]


def test_a_mean_is_the_exact_sum_divided_and_rounded_once() -> None:
    price = Decimal("99.99")
    assert mean_of([price] * 2, pa.decimal128(4, 2)) == [99.99]
    assert mean_of([price, None, price], pa.decimal32(4, 2), "each") == [99.99] * 3
    assert mean_of([TOP] * 3, LARGE) == [float(TOP)]
    assert mean_of([2**53 + 1, 2**53 + 1], pa.int64()) == [float(2**53 + 1)]
    assert mean_of([None], LARGE) == [None]
    assert mean_of([Decimal(1200), Decimal(1300)], pa.decimal128(4, -2)) == [1250.0]


@given(
    st.integers(0, 37).flatmap(
        lambda scale: st.tuples(
            st.just(scale),
            st.lists(
                st.integers(-(10**38) + 1, 10**38 - 1) | st.integers(-(10**7), 10**7), min_size=1, max_size=9
            ),
        )
    )
)
def test_means_are_the_floats_nearest_to_them(units: tuple[int, list[int]]) -> None:
    scale, numbers = units
    values = [Decimal(number).scaleb(-scale, EXACT) for number in numbers]
    nearest = float(Fraction(sum(numbers), len(numbers) * 10**scale))
    assert mean_of(values, pa.decimal128(38, scale)) == [nearest]


def test_exact_means_of_slices() -> None:
    sums = pa.array([Decimal(5), None, Decimal(10**60), Decimal(-1)], wide(pa.decimal128(1, 0)))
    counts = pa.array([2, 0, 3, 3])
    assert exact_mean(sums, counts).to_pylist() == [2.5, None, 10**60 / 3, -1 / 3]
    assert exact_mean(sums.slice(2), counts.slice(2)).to_pylist() == [10**60 / 3, -1 / 3]
    total = DecimalSum("sum of column 'v'", wide(LARGE))
    total.grow(1)
    assert total.at(slice(0, 1)).to_pylist() == [None]


def test_decimals_are_keys_and_cross_between_rows_and_arrow() -> None:
    rows = [{"d": Decimal("1.50"), "n": 1}, {"d": Decimal("2.25"), "n": 2}, {"d": None, "n": 3}]
    schema = pa.schema({"d": pa.decimal128(20, 2), "n": pa.int64()})
    batch = RowsToArrow(schema).convert(rows)
    assert batch.schema.equals(schema)
    assert rows_of(as_batch(batch)) == rows
    assert unpack_rows(pack_rows(rows)) == rows
    found = run(aggregating(("d",), {"s": ("n", "sum")}, "end"), batch, batch)
    assert {row["d"]: row["s"] for row in found} == {Decimal("1.50"): 2, Decimal("2.25"): 4, None: 6}


def test_a_row_with_too_many_digits_is_refused() -> None:
    schema = pa.schema({"d": pa.decimal128(4, 2)})
    for value in (Decimal("123.45"), Decimal("1.234")):
        with pytest.raises(UsageError, match=r"column 'd': the value Decimal.* does not fit"):
            RowsToArrow(schema).convert([{"d": value}])
