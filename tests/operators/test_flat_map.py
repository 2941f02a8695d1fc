"""Several records for each one, of rows and of columns."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.errors import WrongResult
from minishuffle.exchange.batch import Batch
from minishuffle.limits import BATCH_ROWS_MAX
from minishuffle.operators.base import Aside
from minishuffle.operators.chained import OnError
from minishuffle.operators.flat_map import FlatMap, ListColumn
from support.batches import run_operator


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int64())])
def test_values_of_lists_have_the_other_columns_and_the_time_of_theirs(kind: pa.DataType) -> None:
    lists = pa.array([[1, 2], None, [], [3]], kind)
    found: list[Batch] = []
    batch = Batch(pa.record_batch({"id": [10, 20, 30, 40], "l": lists}), None, np.arange(4))
    FlatMap(ListColumn("l")).process(batch, 0, found.append)
    (made,) = found
    assert made.payload.to_pylist() == [{"id": 10, "l": 1}, {"id": 10, "l": 2}, {"id": 40, "l": 3}]
    assert made.times is not None and made.times.tolist() == [0, 0, 3]


def test_values_under_a_null_list_belong_to_no_row() -> None:
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 3, 5], pa.int32()), pa.array([1, 2, 3, 4, 5]), mask=pa.array([False, True, False])
    )
    batch = pa.record_batch({"id": pa.array([10, 20, 30]), "l": lists})
    (made,) = run_operator(FlatMap(ListColumn("l")), batch)
    assert made.to_pylist() == [{"id": 10, "l": 1}, {"id": 30, "l": 4}, {"id": 30, "l": 5}]


def test_values_of_long_lists_are_cut_into_batches() -> None:
    batch = pa.record_batch({"l": [list(range(BATCH_ROWS_MAX + 1)), [7]]})
    sizes = [made.num_rows for made in run_operator(FlatMap(ListColumn("l")), batch)]
    assert sizes == [BATCH_ROWS_MAX, 2]


def test_flat_map_takes_generators_and_drops_a_record_that_raises_half_way_as_a_whole() -> None:
    def fn(row: int) -> Any:
        yield row
        if row == 1:
            raise ValueError("half-way")
        yield -row

    assert run_operator(FlatMap(fn, "skip"), [0, 1, 2]) == [[0, 0, 2, -2]]
    with pytest.raises(ValueError, match="half-way") as caught:
        run_operator(FlatMap(fn), [0, 1, 2])
    assert "record 1" in caught.value.__notes__[0]


def test_flat_map_cuts_what_it_emits_into_batches() -> None:
    out = run_operator(FlatMap(lambda row: range(BATCH_ROWS_MAX)), [0, 1], [])
    assert [len(batch) for batch in out] == [BATCH_ROWS_MAX, BATCH_ROWS_MAX]
    assert out[0] == out[1] == list(range(BATCH_ROWS_MAX))


@pytest.mark.parametrize("on_error", ["fail", "skip", "dead_letter"])
@pytest.mark.parametrize("timed", [False, True], ids=["rows", "pairs"])
@pytest.mark.parametrize(
    ("gave", "way"),
    [
        ({"a": 1}, "[row] for one, or [] for none"),
        (Aside("odd", 1), "[row] for one, or [] for none"),
        ("word", "[text] for one row, or list(text) for its letters"),
        (b"word", "[text] for one row, or list(text) for its letters"),
    ],
    ids=["dict", "aside", "text", "bytes"],
)
def test_flat_map_takes_no_single_row_for_several(
    gave: Any, way: str, timed: bool, on_error: OnError
) -> None:
    operator = FlatMap(lambda row: gave, on_error)
    wanted = f"the function gave {gave!r}, which is no list of rows: return {way}"
    with pytest.raises(WrongResult, match=re.escape(wanted)) as caught:
        run_operator(operator, Batch(["r"], None, np.array([7]) if timed else None))
    assert caught.value.__notes__[1:] == ["raised in operator 'flat_map' by the record 'r'"]
