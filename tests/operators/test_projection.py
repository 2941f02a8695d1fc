"""Columns chosen, computed and cast: which ones come out, in which order, and with whose times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from minishuffle.errors import UsageError, WrongColumns
from minishuffle.exchange.batch import Batch
from minishuffle.operators.projection import Conform, Projection
from support.batches import run_operator

BATCH = pa.record_batch({"a": [1, 2], "b": ["x", "y"], "none": pa.nulls(2)})


def of(operator: Any, batch: pa.RecordBatch = BATCH) -> Any:
    (out,) = run_operator(operator, batch)
    return out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"outputs": {"b": "b", "a": "a"}}, {"b": ["x", "y"], "a": [1, 2]}),
        ({"outputs": {"c": pc.field("a") + 1}}, {"c": [2, 3]}),
        (
            {"outputs": None, "added": {"b": pc.field("a") * 2, "c": pc.scalar(7)}, "dropped": ["none"]},
            {"a": [1, 2], "b": [2, 4], "c": [7, 7]},
        ),
        ({"outputs": None, "renamed": {"a": "n"}, "dropped": ["none"]}, {"n": [1, 2], "b": ["x", "y"]}),
    ],
)
def test_the_columns_are_those_that_are_said_in_their_order(arguments: Any, expected: Any) -> None:
    out = of(Projection("select", **arguments))
    assert out.to_pydict() == expected
    assert out.schema.names == list(expected)


def test_expressions_read_the_columns_as_they_were() -> None:
    swapped = Projection("with_columns", None, {"a": pc.field("b"), "b": pc.field("a")})
    assert of(swapped).to_pydict() == {"a": ["x", "y"], "b": [1, 2], "none": [None, None]}


def test_times_stay_and_batches_without_rows_go() -> None:
    out: list[Batch] = []
    times = np.array([5, 6])
    operator = Projection("select", {"a": "a"})
    operator.process(Batch(BATCH, None, times), 0, out.append)  # type: ignore[arg-type]
    operator.process(Batch(BATCH.slice(0, 0), None, times[:0]), 0, out.append)  # type: ignore[arg-type]
    assert len(out) == 1
    assert out[0].times is times


def test_what_reads_columns_without_values_has_the_type_that_was_found() -> None:
    operator = Projection("with_columns", {"z": pc.field("none")}, untyped={"z": pa.int32()})
    assert of(operator).schema.field("z").type == pa.int32()
    operator = Projection("with_columns", {"z": pc.field("none").is_null()}, untyped={"z": pa.int32()})
    with pytest.raises(WrongColumns, match=r"^with_columns\(z=...\) reads a column without values"):
        of(operator)


def test_an_expression_that_fails_names_its_step() -> None:
    operator = Projection("with_columns", None, {"z": pc.field("a") * 2**62})
    with pytest.raises(UsageError, match=r"^with_columns: multiply_checked\(a, 46.*: overflow"):
        of(operator)


def test_batches_conform_to_a_schema_that_holds_them() -> None:
    schema = pa.schema({"b": pa.large_string(), "c": pa.int8(), "a": pa.float64()})
    out = of(Conform(schema), BATCH.select(["a", "b"]))
    assert out.schema == schema
    assert out.to_pydict() == {"b": ["x", "y"], "c": [None, None], "a": [1.0, 2.0]}
    with pytest.raises(UsageError, match="the union"):
        of(Conform(pa.schema({"a": pa.float64()})), pa.record_batch({"a": [2**53 + 1]}))
