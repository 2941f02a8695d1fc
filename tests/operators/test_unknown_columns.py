"""Columns that a draft's placeholder finds in what comes to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.operators.unknown_columns import FoundColumns, UnknownColumns


class Point(NamedTuple):
    x: int
    y: float


def of_rows(*batches: list[Any]) -> FoundColumns | None:
    return UnknownColumns("to_table", "job.py:7", "to_table({})").columns_of(
        [Batch(rows) for rows in batches]
    )


def of_columns(*batches: pa.RecordBatch) -> FoundColumns | None:
    placeholder = UnknownColumns("map_batches", "job.py:7", "schema={}")
    return placeholder.columns_of([Batch(batch) for batch in batches])


def test_rows_have_the_columns_of_all_in_types_for_all() -> None:
    expected = pa.schema({"n": pa.float64(), "s": pa.string()})
    assert of_rows([{"n": 1}], [], [{"n": 1.5, "s": "a"}]) == FoundColumns(expected, are_named=True)
    point = FoundColumns(pa.schema({"x": pa.int64(), "y": pa.float64()}), are_named=True)
    assert of_rows([Point(1, 2.5)]) == point


def test_tuples_have_columns_by_position_which_get_a_name() -> None:
    expected = pa.schema({"column_1": pa.string(), "column_2": pa.int64()})
    assert of_rows([("a", 1)], [["b", 2]]) == FoundColumns(expected, are_named=False)


def test_batches_have_the_columns_of_all_that_have_rows() -> None:
    small, large = pa.record_batch({"n": pa.array([1], pa.int8())}), pa.record_batch({"n": [2], "s": ["a"]})
    none = pa.record_batch({"other": pa.array([], pa.string())})
    expected = pa.schema({"n": pa.int64(), "s": pa.string()})
    assert of_columns(small, none, large) == FoundColumns(expected, are_named=True)


def test_nothing_that_comes_has_no_columns() -> None:
    assert of_rows() is of_rows([]) is of_columns() is None


def test_what_has_no_columns_is_an_error_of_the_step_and_its_place() -> None:
    with pytest.raises(UsageError, match=r"(?m)^to_table at job\.py:7: "):
        of_rows([1])
    with pytest.raises(UsageError, match=r"^map_batches at job\.py:7: "):
        of_columns(pa.record_batch({"n": [1]}), pa.record_batch({"n": ["a"]}))


def test_a_draft_does_not_run() -> None:
    placeholder = UnknownColumns("to_table", "job.py:7", "to_table({})")
    with pytest.raises(
        InvalidGraph, match=r"(?m)^to_table at job\.py:7 has no schema yet: this plan is a draft$"
    ):
        placeholder.process(Batch([1]), 0, lambda item: None)
