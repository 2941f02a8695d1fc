"""Sums by (namespace and) key against a dict, and slots that are numbered anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from minishuffle.operators import column_store
from minishuffle.operators.aggregates import outputs_of
from minishuffle.operators.column_store import Columns, ColumnStore


class Sums:
    """A store with the sum of each key."""

    def __init__(self) -> None:
        self.outputs = outputs_of({"total": ("v", "sum")}, None)
        self.store = ColumnStore(self.outputs)

    def add(self, keys: list[Any], values: list[int], namespaces: list[int] | None = None) -> None:
        starts = None if namespaces is None else np.array(namespaces, np.int64)
        slots = self.store.take([pa.array(keys, pa.string())], starts)
        for _, _, aggregate in self.outputs:
            aggregate.update(slots, pa.array(values, pa.int64()))


def listed(found: Any) -> list[Any]:
    return [each for some in found for each in _rows(some)]


def _rows(columns: Columns) -> Any:
    namespaces, (keys,), (totals,) = columns
    starts = [None] * len(keys) if namespaces is None else namespaces.tolist()
    return zip(starts, keys.to_pylist(), totals.to_pylist(), strict=True)


def test_keys_without_namespace_are_in_the_order_in_which_they_came() -> None:
    sums = Sums()
    assert (list(sums.store.columns()), list(sums.store.namespaces)) == ([], [])
    sums.add(["b", None, "a"], [1, 2, 3])
    sums.add(["c", "a"], [4, 5])
    assert listed(sums.store.columns()) == [(None, "b", 1), (None, None, 2), (None, "a", 8), (None, "c", 4)]
    assert (len(sums.store), list(sums.store.namespaces)) == (4, [None])


def test_a_namespace_that_comes_again_is_a_new_one() -> None:
    sums = Sums()
    sums.add(["a", "b", "a"], [1, 2, 3], [20, 10, 10])
    assert listed(sums.store.pop([10, 99])) == [(10, "b", 2), (10, "a", 3)]
    assert (len(sums.store), list(sums.store.namespaces)) == (1, [20])
    sums.add(["c", "b"], [7, 8], [10, 10])
    assert listed(sums.store.columns()) == [(20, "a", 1), (10, "c", 7), (10, "b", 8)]
    assert listed(sums.store.pop([10])) == [(10, "c", 7), (10, "b", 8)]
    assert len(sums.store) == 1


def test_most_slots_are_not_of_what_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_store, "_SPARE_SLOTS", 4)
    sums = Sums()
    for start in range(100):
        sums.add(["a", "b"], [start, 1], [start, start + 1])
        assert listed(sums.store.pop([start])) == ([(start, "b", 1)] if start else []) + [(start, "a", start)]
        assert len(sums.store._index) < 12
    assert listed(sums.store.columns()) == [(100, "b", 1)]


def test_slots_that_are_numbered_anew_meanwhile_are_not_read() -> None:
    sums = Sums()
    sums.add(["a"], [1], [0])
    popped = sums.store.pop([0])
    sums.add(["a"], [2], [0])
    with pytest.raises(RuntimeError, match="has changed while it was read"):
        list(popped)
