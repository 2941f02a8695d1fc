"""Records for which a condition holds, of rows and of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.errors import WrongResult
from minishuffle.exchange.batch import Batch
from minishuffle.operators.base import Aside
from minishuffle.operators.filter import Filter
from support.batches import run_operator

NUMBERS = [3, None, 12, 10, 11]
CONDITIONS: dict[str, tuple[Filter, Any]] = {
    "rows": (Filter(lambda number: number is not None and number > 9), NUMBERS),
    "columns": (Filter(pc.field("n") > 9), pa.record_batch({"n": NUMBERS})),
}


@pytest.mark.parametrize("form", CONDITIONS)
def test_records_keep_their_times_and_null_is_not_true(form: str) -> None:
    operator, payload = CONDITIONS[form]
    found: list[Batch] = []
    batch = Batch(payload, None, np.arange(5) * 10)
    operator.process(batch, 0, found.append)
    operator.process(batch.slice(2, 5), 0, found.append)
    operator.process(batch.slice(0, 2), 0, found.append)
    operator.process(batch.slice(0, 0), 0, found.append)
    payloads = [each.payload if form == "rows" else each.payload["n"] for each in found]
    assert [list(map(plain, each)) for each in payloads] == [[12, 10, 11]] * 2
    assert [each.times.tolist() for each in found] == [[20, 30, 40]] * 2


def plain(value: Any) -> Any:
    return value.as_py() if isinstance(value, pa.Scalar) else value


def test_a_condition_of_nothing_but_nulls_holds_for_none() -> None:
    given = pa.record_batch({"n": pa.nulls(2), "b": [True, False]})
    assert run_operator(Filter(pc.if_else(pc.field("b"), pc.field("n"), pc.field("n"))), given) == []
    assert run_operator(Filter(pc.field("b")), given.slice(0, 0), given) == [given.slice(0, 1)]


def test_filter_takes_no_generator_for_true() -> None:
    with pytest.raises(WrongResult, match="filter: its function gave a generator, which counts as true"):
        run_operator(Filter(lambda n: (n > each for each in [1])), [1])


def test_a_row_for_a_side_output_is_not_what_a_filter_takes_for_true() -> None:
    with pytest.raises(WrongResult, match=r"filter: .* Aside\('odd', ...\), .*: write flat_map\(fn, sides="):
        run_operator(Filter(lambda n: n > 2 or Aside("odd", n), "skip"), [1, 3])
