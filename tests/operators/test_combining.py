"""Batches combined before an exchange, and what is added up behind it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.exchange.batch import Batch
from minishuffle.operators import combining
from minishuffle.operators.aggregates import outputs_of
from minishuffle.operators.combining import CombineBatches, CombinedAggregation
from minishuffle.operators.reductions import Aggregation, KeyedReduction

COLUMNS: Any = {"n": ("v", "count"), "s": ("v", "sum"), "low": ("v", "min"), "high": ("v", "max")}


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "SHORT_ROWS", 1)


def combined(operator: CombineBatches, batch: pa.RecordBatch) -> pa.RecordBatch:
    """What is sent for a batch."""
    sent: list[Batch] = []
    operator.process(Batch(batch), 0, sent.append)
    (one,) = sent
    result: pa.RecordBatch = one.payload
    return result


def aggregated(reduction: Aggregation, batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    operator, given = KeyedReduction(reduction, "end"), []
    for batch in batches:
        operator.process(Batch(batch), 0, given.append)
    operator.finish(given.append)
    return [row for batch in given for row in batch.payload.to_pylist()]


def batch_of(keys: list[Any], values: list[Any], kind: pa.DataType | None = None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"k": keys, "v": pa.array(values, kind or pa.int8())})


def test_a_batch_of_few_keys_becomes_a_row_for_each() -> None:
    operator = CombineBatches(["k"], partial(outputs_of, COLUMNS), "partial ")
    rows = combined(operator, batch_of(["a", None, "a", "a", None, None], [100, None, 100, None, None, None]))
    assert rows.to_pylist() == [
        {"k": "a", "partial n": 2, "partial s": 200, "partial low": 100, "partial high": 100},
        {"k": None, "partial n": 0, "partial s": None, "partial low": None, "partial high": None},
    ]


def test_rows_and_states_are_added_up_to_the_same() -> None:
    batches = [
        batch_of([float("nan"), 2.0, None], [5, 6, 7]),
        batch_of([1.5, -0.0], [None, 3]),
        batch_of([1.5, 1.5, -0.0, 0.0], [1, None, 3, -4]),
        batch_of([float("nan")] * 3 + [None] * 3, [1, 2, 3, None, None, None]),
        batch_of([], []).cast(pa.schema({"k": pa.float64(), "v": pa.int8()})),
    ]
    operator = CombineBatches(["k"], partial(outputs_of, COLUMNS), "partial ")
    sent = [combined(operator, batch) for batch in batches]
    assert ["partial n" in batch.schema.names for batch in sent] == [False, False, True, True, False]
    whole = aggregated(Aggregation(["k"], outputs_of(COLUMNS)), batches)
    halves = aggregated(CombinedAggregation(["k"], outputs_of(COLUMNS), "partial "), sent)
    assert str(halves) == str(whole)  # NaN is a key.
    assert len(whole) == 5 and whole[3] == {"k": 1.5, "n": 1, "s": 1, "low": 1, "high": 1}


def test_where_keys_are_many_fewer_and_fewer_batches_are_looked_at() -> None:
    operator = CombineBatches(["k"], partial(outputs_of, COLUMNS), "partial ")
    many, few = batch_of(list(range(8)), [1] * 8), batch_of([1] * 8, [1] * 8)
    sent = [combined(operator, many if number < 63 else few) for number in range(160)]
    # Looked at are 0, 2, 6, 14, 30, 62 and 126, and from there on each one.
    assert ["partial n" in rows.schema.names for rows in sent] == [number >= 126 for number in range(160)]


def test_short_batches_pass_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "SHORT_ROWS", 4)
    operator, short = (
        CombineBatches(["k"], partial(outputs_of, COLUMNS), "partial "),
        batch_of([1] * 3, [1] * 3),
    )
    assert combined(operator, short) is short
    assert combined(operator, batch_of([1] * 4, [1] * 4)).num_rows == 1


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([2.5, float("nan"), -0.0, 0.0, None], pa.float32()),
        (["b", "", None, "ä"], pa.string()),
        (["b", "", None, "ä"], pa.dictionary(pa.int8(), pa.large_string())),
        ([3, None, 1], pa.timestamp("ns", "UTC")),
        ([3, None, 1], pa.decimal128(5, 0)),
        ([2**64 - 1, 0], pa.uint64()),
        ([None, None], pa.null()),
    ],
    ids=str,
)
def test_extremes_of_all_types_are_those_of_the_rows(values: list[Any], kind: pa.DataType) -> None:
    columns: Any = {"low": ("v", "min"), "high": ("v", "max"), "n": ("v", "count")}
    rows = [
        batch_of([1, 2] * 5, [*values, *values[::-1], *values * 5][start : start + 10], kind)
        for start in (0, 3)
    ]
    operator = CombineBatches(["k"], partial(outputs_of, columns), "partial ")
    sent = [combined(operator, each) for each in rows]
    assert all("partial low" in each.schema.names for each in sent)
    for batches in (sent, [rows[0], sent[1]], [sent[0], rows[1]]):
        halves = aggregated(CombinedAggregation(["k"], outputs_of(columns), "partial "), batches)
        assert str(halves) == str(aggregated(Aggregation(["k"], outputs_of(columns)), rows))
