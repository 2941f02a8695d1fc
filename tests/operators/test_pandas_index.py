"""What becomes of the index of a pandas frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from minishuffle.api.stream import Table
from minishuffle.errors import InvalidGraph
from minishuffle.operators.pandas_index import unnamed_index, with_named_range, without_unnamed_index
from support.cutjobs import run

FRAME = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"]})
LEFT = FRAME[FRAME["a"] > 1]
LEVELS = pd.MultiIndex.from_tuples([(7, 8), (8, 9)], names=["u", None])
NAMED_SO = pd.DataFrame({"__index_level_0__": [5, 6], "a": [2, 3]})
FRAMES = {
    "a filter": (LEFT, [{"a": 2, "b": "y"}, {"a": 3, "b": "z"}]),
    "a sort": (FRAME.sort_values("a", ascending=False)[:1], [{"a": 3, "b": "z"}]),
    "a concatenation": (pd.concat([FRAME[:1], FRAME[:1]]), [{"a": 1, "b": "x"}] * 2),
    "no change": (FRAME[:1], [{"a": 1, "b": "x"}]),
    "a name": (LEFT.rename_axis("n"), [{"a": 2, "b": "y", "n": 1}, {"a": 3, "b": "z", "n": 2}]),
    "a range with a name": (FRAME[:1].rename_axis("n"), [{"a": 1, "b": "x", "n": 0}]),
    "the name of a column": (
        LEFT.rename_axis("a"),
        [{"a": 2, "b": "y", "__index_level_0__": 1}, {"a": 3, "b": "z", "__index_level_0__": 2}],
    ),
    "levels": (LEFT[["a"]].set_axis(LEVELS), [{"a": 2, "u": 7}, {"a": 3, "u": 8}]),
    "a column of that name": (NAMED_SO, [{"__index_level_0__": 5, "a": 2}, {"__index_level_0__": 6, "a": 3}]),
    "a column of that name, and a filter": (NAMED_SO[NAMED_SO["a"] > 2], [{"__index_level_0__": 6, "a": 3}]),
    "nothing but an index": (LEFT[[]], [{"__index_level_0__": 1}, {"__index_level_0__": 2}]),
}


@pytest.mark.parametrize("made", [lambda frame: frame, pa.Table.from_pandas, pa.RecordBatch.from_pandas])
@pytest.mark.parametrize("case", FRAMES)
def test_an_index_without_a_name_is_left_out_and_others_are_columns(case: str, made: Any) -> None:
    frame, expected = FRAMES[case]
    assert run(Table.from_arrow(made(frame)).collect()).rows == expected


def as_pandas(batch: pa.RecordBatch) -> pa.RecordBatch:
    frame = batch.to_pandas()
    return pa.RecordBatch.from_pandas(frame[frame["a"] > 1])


def test_a_function_may_give_what_pandas_has_filtered() -> None:
    """Of no rows pandas does not know that a column holds texts."""
    with pytest.raises(InvalidGraph, match="gave the column 'b' in the type null: write schema="):
        Table.from_arrow(FRAME).map_batches(as_pandas)
    numbers = Table.from_arrow(FRAME).map_batches(as_pandas, columns=["a"])
    assert run(numbers.collect()).rows == [{"a": row["a"]} for row in FRAMES["a filter"][1]]
    for fn in (as_pandas, lambda batch: pa.Table.from_batches([as_pandas(batch)])):
        table = Table.from_arrow(FRAME).map_batches(fn, schema="same")
        assert run(table.collect()).rows == FRAMES["a filter"][1]


def test_batches_of_a_source_and_files_have_no_such_index_either(tmp_path: Path) -> None:
    made = Table.generate(lambda start, count: pa.RecordBatch.from_pandas(LEFT[:count]), records=2)
    assert run(made.collect()).rows == FRAMES["a filter"][1][:1] * 2
    LEFT.to_parquet(tmp_path / "left.parquet")
    FRAME[:1].to_parquet(tmp_path / "whole.parquet")
    rows = run(Table.from_files(tmp_path).collect()).rows
    assert sorted(rows, key=lambda row: row["a"]) == FRAMES["no change"][1] + FRAMES["a filter"][1]
    asked = Table.from_files(tmp_path / "left.parquet", schema={"__index_level_0__": "int64"})
    assert run(asked.collect()).rows == [{"__index_level_0__": 1}, {"__index_level_0__": 2}]


def test_metadata_that_no_longer_hold_are_taken_away() -> None:
    table = pa.Table.from_pandas(LEFT).replace_schema_metadata(
        {**pa.Table.from_pandas(LEFT).schema.metadata, b"mine": b"1"}
    )
    assert unnamed_index(table.schema) == [2]
    assert without_unnamed_index(table).schema.metadata == {b"mine": b"1"}
    named = with_named_range(pa.Table.from_pandas(FRAME.rename_axis("n")))
    assert named.column("n").to_pylist() == [0, 1, 2]
    assert named.schema.metadata is None


@pytest.mark.parametrize("told", [b"", b"[]", b"{}", b'{"index_columns": [], "columns": [{}]}'])
def test_metadata_of_others_say_nothing(told: bytes) -> None:
    table = pa.table({"__index_level_0__": [1]}).replace_schema_metadata({b"pandas": told})
    assert with_named_range(without_unnamed_index(table)) is table
