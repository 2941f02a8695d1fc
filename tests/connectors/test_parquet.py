"""Parquet files: what cannot be read, and which columns are."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.connectors.parquet import ParquetSource
from minishuffle.errors import UnknownName, UsageError
from support.sourcereading import read_all


def test_parquet_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("not at all")
    with pytest.raises(UsageError, match=r"a\.parquet is not a Parquet file"):
        ParquetSource(tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    with pytest.raises(UnknownName, match=r"no column 'c' in .*: there are a, b"):
        ParquetSource(tmp_path / "a.parquet", pa.schema({"a": pa.int64(), "c": pa.int64()}))
    assert read_all(ParquetSource(tmp_path / "a.parquet", pa.schema({"b": pa.int64()}))) == [{"b": 2}]


def test_a_type_that_no_value_of_a_column_can_have_is_refused_when_the_plan_is_built(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1.5], "b": [2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"b": [3]}), tmp_path / "b.parquet")
    with pytest.raises(
        UsageError, match=r"'a' is declared as list<.*>, and no double of .*a\.parquet becomes that"
    ):
        ParquetSource(tmp_path, pa.schema({"a": pa.list_(pa.int64())}))
    for kind in (pa.decimal128(5, 2), pa.uuid()):  # pyarrow makes these of a column without rows.
        with pytest.raises(UsageError, match=r"'b' is declared as .*, and no int64 of .* becomes that \("):
            ParquetSource(tmp_path, pa.schema({"b": kind}))
    found = ParquetSource(tmp_path, pa.schema([pa.field("b", pa.decimal128(21, 2), nullable=False)]))
    assert [int(row["b"]) for row in read_all(found)] == [2, 3]
    found = ParquetSource(tmp_path, pa.schema({"a": pa.string(), "b": pa.int32()}))
    assert read_all(found) == [{"a": "1.5", "b": 2}, {"a": None, "b": 3}]
