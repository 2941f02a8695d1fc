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
