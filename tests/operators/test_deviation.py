"""Standard deviations against pandas, in one piece and in parts."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minishuffle.errors import UsageError
from minishuffle.operators.deviation import Deviation

ROWS = st.lists(st.tuples(st.integers(0, 2), st.none() | st.floats(-1e6, 1e6)), max_size=30)


@given(st.lists(ROWS, max_size=4))
def test_parts_add_up_to_what_pandas_gives(parts: list[list[tuple[int, float | None]]]) -> None:
    whole = Deviation("v")
    whole.grow(3)
    for part in parts:
        one = Deviation("v")
        one.grow(3)
        one.update(
            np.array([slot for slot, _ in part], np.int64), pa.array([v for _, v in part], pa.float64())
        )
        whole.merge(np.arange(3), one.as_columns(slice(0, 3)))
    frame = pd.DataFrame([row for part in parts for row in part], columns=["slot", "v"])
    wanted = frame.astype({"v": "float64"}).groupby("slot").v.std().to_dict()
    for slot, found in enumerate(whole.at(slice(0, 3)).to_pylist()):
        plain = wanted.get(slot, math.nan)
        assert found is None if math.isnan(plain) else math.isclose(found, plain, rel_tol=1e-9, abs_tol=1e-9)


def test_a_great_mean_takes_no_digits_from_the_deviation() -> None:
    aggregate = Deviation("v")
    aggregate.grow(1)
    aggregate.update(np.zeros(3, np.int64), pa.array([10**9 + n for n in (4, 7, 13)]))
    assert aggregate.at(slice(0, 1)).to_pylist() == pytest.approx([math.sqrt(21)], rel=1e-12)


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (pa.array([True, False]), math.sqrt(0.5)),
        (pa.array([Decimal("1.5"), Decimal("2.5")]), math.sqrt(0.5)),
        (pa.array([5]), None),
        (pa.nulls(3), None),
    ],
    ids=str,
)
def test_numbers_of_all_kinds(column: Any, wanted: float | None) -> None:
    aggregate = Deviation("v")
    aggregate.grow(1)
    assert aggregate.running(np.zeros(len(column), np.int64), column)[-1].as_py() == (
        None if wanted is None else pytest.approx(wanted)
    )


@pytest.mark.parametrize("values", [[1.0, math.inf], [math.inf, 1.0], [math.nan, 1.0, 2.0]])
def test_what_is_not_finite_gives_nan_in_any_order(values: list[float]) -> None:
    aggregate = Deviation("v")
    aggregate.grow(2)
    aggregate.update(np.array([*[0] * len(values), 1, 1]), pa.array([*values, 1.0, 3.0]))
    odd, other = aggregate.at(slice(0, 2)).to_pylist()
    assert math.isnan(odd)
    assert other == pytest.approx(math.sqrt(2))


def test_texts_are_refused() -> None:
    with pytest.raises(UsageError, match="std of column 'v' of type string is not supported"):
        Deviation("v").update(np.zeros(1, np.int64), pa.array(["x"]))
