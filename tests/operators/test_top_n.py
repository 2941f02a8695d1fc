"""Which rows are the greatest of their key."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from minishuffle.api.stream import Table
from minishuffle.errors import UsageError
from minishuffle.operators.top_n import TopN
from support.batches import as_batch, collecting
from support.cutjobs import Cut, run

CUTS = (Cut(1), Cut(1, rows=1), Cut(2, seed=5, rows=2, merges=True))


def top(columns: dict[str, Any], by: str, descending: bool = True) -> dict[str, Any]:
    """The first row of the only key ``k``."""
    table = Table.from_arrow(pa.table({"k": [1] * len(next(iter(columns.values()))), **columns})).parallel(1)
    found = [run(table.key_by("k").top_n(1, by, descending=descending).collect(), cut).rows for cut in CUTS]
    assert all(list(map(repr, each)) == list(map(repr, found[0])) for each in found)
    (row,) = found[0]
    return dict(row)


@pytest.mark.parametrize(
    ("values", "descending", "taken"),
    [
        ([1.0, None, 2.0], True, 2.0),
        ([1.0, None, 2.0], False, None),
        ([math.nan, 1.0, None], True, 1.0),
        ([None, math.nan], True, math.nan),
        ([math.nan, 1.0], False, 1.0),
        ([None, math.nan], False, None),
    ],
)
def test_a_null_is_smaller_than_all_values_and_nan_comes_after_all_numbers(
    values: list[Any], descending: bool, taken: Any
) -> None:
    found = top({"v": values}, "v", descending)["v"]
    assert repr(found) == repr(taken)


@pytest.mark.parametrize("descending", [True, False])
def test_of_rows_of_one_value_the_smallest_of_the_others_is_taken(descending: bool) -> None:
    assert top({"v": [1, 1], "o": [None, 5]}, "v", descending)["o"] is None
    assert top({"v": [1, 1], "o": [math.nan, 5.0]}, "v", descending)["o"] == 5.0
    assert top({"v": [1, 1], "o": [7, 5], "p": [1, 2]}, "v", descending) == {"k": 1, "v": 1, "o": 5, "p": 2}


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1.5, 2.5]).cast(pa.float16()),
        pa.array([1, 2], pa.decimal32(3)),
        pa.array([1, 2], pa.duration("s")),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array(["a", "b"], pa.string_view()),
        pa.array([b"a", b"b"], pa.binary_view()),
    ],
    ids=lambda values: str(values.type),
)
def test_values_of_all_types_have_an_order(values: pa.Array) -> None:
    smallest, greatest = values.to_pylist()
    turned = pa.array([greatest, smallest], values.type)
    assert top({"v": values}, "v") == {"k": 1, "v": greatest}
    assert top({"v": turned, "o": [1, 2]}, "v", False)["o"] == 2
    assert top({"v": [1, 1], "o": turned}, "v")["o"] == smallest


def test_columns_without_an_order_come_along() -> None:
    moments = pa.array([(1, 2, 3), (0, 0, 1)], pa.month_day_nano_interval())
    table = Table.from_arrow(pa.table({"k": [1, 1], "v": [1, 2], "o": moments, "p": [[1], [2]]}))
    found = table.key_by("k").top_n(1, "v").map_batches(as_texts, schema={"o": str, "p": str})
    assert run(found.collect()).rows == [{"o": str(moments[1].as_py()), "p": "[2]"}]


def as_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({name: [str(value) for value in batch[name].to_pylist()] for name in "op"})


def test_views_of_texts_stay_views() -> None:
    kind = pa.string_view()
    columns = {"k": pa.array(["x"] * 2, kind), "v": [1, 2], "o": pa.array([["a"], ["b"]], pa.list_(kind))}
    batch = pa.record_batch(columns)
    operator, out = TopN(("k",), 1, "v", descending=True), list[Any]()
    operator.process(as_batch(batch), 0, collecting(out))
    operator.finish(collecting(out))
    assert out == [batch.slice(1)]


def test_lists_are_no_values_to_order_by() -> None:
    says = "top_n by column 'v' of type list.*, which has no order"
    with pytest.raises(UsageError, match=says):
        Table.from_arrow(pa.table({"k": [1], "v": [[1]]})).key_by("k").top_n(1, "v")
    assert top({"v": pa.nulls(2), "o": [2, 1]}, "v")["o"] == 1
