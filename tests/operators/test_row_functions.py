"""One row, or the key, for each row."""

from __future__ import annotations

from typing import Any

import pytest

from minishuffle.errors import MissingColumn, UnknownName, UsageError, WrongColumns
from minishuffle.exchange.batch import Batch
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import TaskContext
from minishuffle.operators.row_functions import KeyRowsByColumns, MapRows
from support.batches import Calls, run_operator


@pytest.mark.parametrize(("names", "keys"), [(("a",), [1, 2]), (("b", "a"), [("x", 1), ("y", 2)])])
def test_key_by_columns(names: tuple[str, ...], keys: list[Any]) -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert run_operator(KeyRowsByColumns(names), rows, []) == [(keys, rows)]


def test_key_by_a_missing_column_lists_the_columns() -> None:
    with pytest.raises(UnknownName, match=r"no column 'c' to key by: the row has a, b"):
        run_operator(KeyRowsByColumns(("a", "c")), [{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}])
    with pytest.raises(UsageError, match="give key_by a function"):
        run_operator(KeyRowsByColumns(("a",)), [("a", 1)])


ROW, OTHER = {"a": 1}, {"b": 1}


@pytest.mark.parametrize(
    ("batches", "error"),
    [
        ([[OTHER, OTHER]], MissingColumn),
        ([[("a", 1), OTHER]], UsageError),
        ([[OTHER, ROW]], UnknownName),
        ([[ROW], [OTHER]], UnknownName),
        ([[("a", 1)]], WrongColumns),
        ([[ROW, ("a", 1)]], UsageError),
        ([[ROW], [("a", 1)]], UsageError),
    ],
)
def test_a_key_that_no_row_has_ends_the_job_at_once(batches: list[Any], error: type[UsageError]) -> None:
    """Another attempt would not find it either; one row that lacks it may be skipped."""
    with pytest.raises(UsageError) as caught:
        run_operator(KeyRowsByColumns(("a",)), *batches)
    assert type(caught.value) is error


@pytest.mark.parametrize("rows", [63, 64, 65, 200, 70_000])
def test_long_batches_are_mapped_row_by_row_in_order(rows: int) -> None:
    calls = Calls(lambda row: row + 1)
    out = run_operator(MapRows(calls), list(range(rows)))
    assert calls.seen == list(range(rows))
    assert [row for batch in out for row in batch] == list(range(1, rows + 1))
    assert (
        [len(batch) for batch in out] == [rows]
        if rows <= BATCH_ROWS_MAX
        else [BATCH_ROWS_MAX, rows - BATCH_ROWS_MAX]
    )


def test_results_that_are_long_go_out_a_few_at_a_time() -> None:
    passed = 0

    def take(batch: Batch) -> None:
        nonlocal passed
        passed += len(batch)

    def long(row: int) -> str:
        assert row - passed < 64
        return "x" * (1 << 20)

    operator = MapRows(long)
    operator.open(TaskContext("job", "task", 0, 1, 1))
    operator.process(Batch(list(range(500))), 0, take)
    assert passed == 500
