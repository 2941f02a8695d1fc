"""Parquet files: what cannot be read, and which columns are."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.connectors import parquet
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


def test_a_type_of_many_columns_and_files_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [1], "b": pa.array(["x"])}), tmp_path / "b.parquet")
    looked_at: list[tuple[str, pa.DataType]] = []

    def in_schema(batch: pa.RecordBatch, schema: pa.Schema, path: str) -> pa.RecordBatch:
        looked_at.append((Path(path).name, batch.schema.types[0]))
        return whole(batch, schema, path)

    whole = parquet.in_schema
    monkeypatch.setattr(parquet, "in_schema", in_schema)
    with pytest.raises(
        UsageError, match=r"'b' is declared as duration.*, and no string of .*b\.parquet becomes"
    ):
        ParquetSource(tmp_path, pa.schema({"a": pa.int32(), "b": pa.duration("s")}))
    looked_at.clear()
    ParquetSource(tmp_path, pa.schema({"a": pa.string(), "b": pa.string()}))
    assert looked_at == [("a.parquet", pa.int64()), ("b.parquet", pa.string())]
