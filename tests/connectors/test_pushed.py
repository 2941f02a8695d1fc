"""What is pushed comes in order and in batches of a length that others take; what is taken is one's own."""

from __future__ import annotations

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from minishuffle.connectors.pushed import PushedSource, TakenSink
from minishuffle.errors import UsageError
from minishuffle.exchange.batch import Batch
from minishuffle.limits import BATCH_ROWS_MAX, LIST_ROWS

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("s", pa.string())])


def test_batches_come_in_order_until_the_end() -> None:
    source = PushedSource("numbers", None, bounded=False)
    (split,) = source.splits()
    batches = source.read(split, 0)
    assert next(batches) == []
    source.push(range(LIST_ROWS + 1))
    source.push(["last"])
    source.end()
    assert [len(batch) for batch in batches] == [LIST_ROWS, 1, 1]
    with pytest.raises(UsageError, match="'numbers' has ended"):
        source.push([1])


def test_columns_come_in_the_order_of_the_schema() -> None:
    source = PushedSource("table", SCHEMA, bounded=True)
    long = pa.table({"s": ["x"] * (BATCH_ROWS_MAX + 1), "n": range(BATCH_ROWS_MAX + 1)})
    source.push(long)
    source.push(pa.RecordBatch.from_pydict({"n": [1], "s": [None]}))
    source.push([])
    source.push(pd.DataFrame({"n": [1, 2], "s": ["x", "y"]}).query("n > 1"))  # which has an index
    for texts in (pa.array(["x"], pa.large_string()), pa.array(["x"], pa.string_view()), ["x"]):
        source.push(pa.table({"n": [1.0], "s": texts}))
    source.push(pl.DataFrame({"n": [1], "s": pl.Series(["x"], dtype=pl.Categorical)}))
    source.end()
    batches = list(source.read(0, 0))
    assert [len(batch) for batch in batches] == [BATCH_ROWS_MAX, *[1] * 7]
    assert {batch.schema for batch in batches} == {SCHEMA}
    message = "column 'n' of the table for 'table' has the type double, and a value that does not fit int64"
    with pytest.raises(UsageError, match=message):
        PushedSource("table", SCHEMA, bounded=True).push(pa.table({"n": [1.5], "s": ["x"]}))
    for nulls in (pa.table({"n": pa.array([None], pa.int64()), "s": ["x"]}), [{"s": "x"}]):
        with pytest.raises(UsageError, match="for 'table'.* (has nulls|column 'n': the value None)"):
            PushedSource("table", SCHEMA, bounded=True).push(nulls)


def test_what_is_taken_is_not_taken_again_and_belongs_to_who_takes_it() -> None:
    sink = TakenSink(sends=False)
    row = {"n": [1]}
    sink.named("other").process(Batch([row]), 0, lambda item: None)
    row["n"].append(2)
    assert (sink.take(), sink.take()) == ([[{"n": [1]}]], [])
