"""Numbers of different values against sets of Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import UsageError
from minishuffle.operators.distinct import DistinctCount

ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.sampled_from(["", "x", "y", "z" * 80])), max_size=20
)


def counted(values: pa.Array) -> int:
    aggregate = DistinctCount("v")
    aggregate.grow(1)
    aggregate.update(np.zeros(len(values), np.int64), values)
    (found,) = aggregate.at(slice(0, 1)).to_pylist()
    assert isinstance(found, int)
    return found


@given(st.lists(ROWS, max_size=4))
def test_as_sets(parts: list[list[tuple[int, str | None]]]) -> None:
    """At the end, after each row, in parts that are merged, and in slots that are numbered anew."""
    ended, running, merged = (DistinctCount("v") for _ in range(3))
    sets: list[set[str]] = [set() for _ in range(4)]
    for aggregate in (ended, running, merged):
        aggregate.grow(4)
    for part in parts:
        slots = np.array([slot for slot, _ in part], np.int64)
        column = pa.array([value for _, value in part], pa.string())
        ended.update(slots, column)
        after = running.running(slots, column).to_pylist()
        for (slot, value), found in zip(part, after, strict=True):
            sets[slot] |= set() if value is None else {value}
            assert found == len(sets[slot])
        one = DistinctCount("v")
        one.grow(4)
        one.update(slots, column)
        merged.merge(np.array([3, 1]), one.as_columns(np.array([3, 1])))
        merged.merge(np.array([0, 2]), one.as_columns(np.array([0, 2])))
    wanted = [len(each) for each in sets]
    for aggregate in (ended, running, merged):
        assert aggregate.at(slice(0, 4)).to_pylist() == wanted
        aggregate.keep(np.array([2, 0]))
        again = pa.array([*sorted(sets[0]), "new"])
        aggregate.update(np.ones(len(again), np.int64), again)
        assert aggregate.at(np.array([0, 1])).to_pylist() == [wanted[2], wanted[0] + 1]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([math.nan, math.nan, 0.0, -0.0, None]), 2),
        (pa.array(["x", "y", "x"]).dictionary_encode(), 2),
        (pa.array(["x", None, "y", "x"], pa.string_view()), 2),
        (pa.array([b"x", None, b"y", b"x"], pa.binary_view()), 2),
        (pa.array([1, None, 2, 1], pa.duration("ms")), 2),
        (pa.array([1, None, 2**62, 2**62], pa.duration("s")), 2),
        (pa.array([1, None, 2, 1], pa.time32("s")), 2),
        (pa.array([1, None, 2, 1], pa.time64("ns")), 2),
        (pa.array([bytes(16), None, bytes(15) + b"x", bytes(16)], pa.uuid()), 2),
        (pa.nulls(3), 0),
        (pa.array([True, False, None, True]), 2),
    ],
    ids=str,
)
def test_values_of_all_kinds(values: Any, wanted: int) -> None:
    assert counted(values) == wanted


def test_views_are_merged_and_numbered_anew() -> None:
    one, other = (DistinctCount("v") for _ in range(2))
    for aggregate in (one, other):
        aggregate.grow(2)
        aggregate.update(np.array([0, 1, 1]), pa.array(["x", "y", "z"], pa.string_view()))
    other.merge(np.array([1, 0]), one.as_columns(slice(0, 2)))
    other.keep(np.array([1, 0]))
    assert other.at(slice(0, 2)).to_pylist() == [3, 3]


def test_lists_are_refused() -> None:
    with pytest.raises(UsageError, match="count_distinct of column 'v' of type list"):
        counted(pa.array([[1]]))
    with pytest.raises(UsageError, match="count_distinct of column 'v' of type extension<arrow.fixed_shape"):
        counted(pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((1, 2))))
