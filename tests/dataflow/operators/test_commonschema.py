"""Parquet files that differ: one schema for all, no value changed, and what is told where there is none."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.dataflow.operators.commonschema import common_schema
from minishuffle.dataflow.operators.sources import ParquetSource
from minishuffle.dataflow.operators.widertype import in_schema
from minishuffle.dataflow.table import Table
from minishuffle.errors import UnknownName, UsageError
from tests.dataflow.test_jobs import execute


def written(directory: Path, *tables: pa.Table) -> Path:
    for number, table in enumerate(tables, 1):
        pq.write_table(table, directory / f"{number}.parquet")
    return directory


def column(values: list[Any], kind: pa.DataType) -> pa.Table:
    return pa.table({"a": pa.array(values, kind)})


def read(source: ParquetSource, offset: int = 0) -> list[dict[str, Any]]:
    batches = [batch for split in source.splits() for batch in source.read(split, offset)]
    assert all(batch.schema.equals(source.schema) for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("some", "other", "kind"),
    [
        (column([1.5], pa.float32()), column([0.1], pa.float64()), pa.float64()),
        (column([1], pa.int64()), column([1.5], pa.float64()), pa.float64()),
        (column([None], pa.null()), column(["x"], pa.string()), pa.string()),
        (column(["x"], pa.string()), column(["y"], pa.large_string()), pa.large_string()),
        (column(["x"], pa.dictionary(pa.int32(), pa.string())), column(["y"], pa.string()), pa.string()),
        (column([[1]], pa.list_(pa.int32())), column([[300]], pa.list_(pa.int64())), pa.list_(pa.int64())),
        (column([{"x": 1}], pa.struct({"x": pa.int8()})), column([{"x": 300}], pa.struct({"x": pa.int64()})),
         pa.struct({"x": pa.int64()})),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)  # fmt: skip
def test_types_that_differ_become_one_that_holds_the_values_of_all(
    some: pa.Table, other: pa.Table, kind: pa.DataType, tmp_path: Path
) -> None:
    for tables in ((some, other), (other, some)):
        source = ParquetSource(written(tmp_path, *tables))
        assert source.schema.equals(pa.schema([("a", kind)]))
        assert read(source) == [row for table in tables for row in table.to_pylist()]


def test_a_column_is_null_where_a_file_lacks_it_and_nullable_if_it_is_anywhere(tmp_path: Path) -> None:
    required = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in "abc"])
    path = written(
        tmp_path,
        pa.table([[1], [2], [3]], schema=required),
        pa.table({"d": [4], "b": pa.array([None], pa.int64()), "a": [5]}).cast(
            pa.schema([("d", pa.int64()), ("b", pa.int64()), pa.field("a", pa.int64(), nullable=False)])
        ),
    )
    source = ParquetSource(path)
    assert source.schema.names == ["a", "b", "c", "d"]
    assert [field.nullable for field in source.schema] == [False, True, True, True]
    assert read(source) == [{"a": 1, "b": 2, "c": 3, "d": None}, {"a": 5, "b": None, "c": None, "d": 4}]
    assert read(ParquetSource(path, ["b", "a"])) == [{"b": 2, "a": 1}, {"b": None, "a": 5}]
    with pytest.raises(UnknownName, match=r"no column 'c' in .*2\.parquet: it has d, b, a"):
        ParquetSource(path, ["c"])
    Table.from_files(path).key_by("d")


def test_files_that_differ_in_metadata_alone_are_the_same(tmp_path: Path) -> None:
    table = pa.table({"a": [1]})
    source = ParquetSource(written(tmp_path, table.replace_schema_metadata({"pandas": "x"}), table))
    assert source.schema.equals(table.schema, check_metadata=True)
    assert read(source) == [{"a": 1}, {"a": 1}]


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            [column([date(2024, 1, 1)], pa.date32()), column([datetime(2024, 1, 1, 9)], pa.timestamp("us"))],
            r"column 'a' is date32\[day\] in .*1\.parquet and timestamp\[us\] in .*2\.parquet",
        ),
        (
            [column([1], pa.int64()), column([1.5], pa.float32()), column([None], pa.decimal128(3, 1))],
            r"column 'a' is float in .*2\.parquet and decimal128\(3, 1\) in .*3\.parquet",
        ),
        (
            [pa.table([[1], [2]], names=["a", "a"]), column([1], pa.int64())],
            r"1\.parquet has two columns 'a'",
        ),
    ],
    ids=["date and time", "three", "twice"],
)
def test_columns_without_a_common_type_are_told_with_both_files(
    tables: list[pa.Table], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=told):
        Table.from_files(written(tmp_path, *tables))


def test_a_value_that_the_common_type_would_change_is_told(tmp_path: Path) -> None:
    source = ParquetSource(written(tmp_path, column([2**53 + 1], pa.int64()), column([0.5], pa.float64())))
    with pytest.raises(UsageError, match=r"'a' of .*1\.parquet has the type int64, .* not fit double"):
        read(source)


def test_of_a_time_with_and_one_without_a_zone_the_latter_is_in_utc() -> None:
    naive = column([datetime(2024, 1, 1, 9)], pa.timestamp("ms"))
    zoned = column([None], pa.timestamp("us", "UTC"))
    schema = common_schema({"x": naive.schema, "y": zoned.schema})
    batch = in_schema(naive.to_batches()[0], schema, "x")
    assert batch.to_pylist() == [{"a": datetime(2024, 1, 1, 9, tzinfo=UTC)}]


def test_no_value_changes_on_its_way_through_rows(tmp_path: Path) -> None:
    (files := tmp_path / "in").mkdir()
    written(files, column([1.5], pa.float32()), column([0.1], pa.float64()))
    execute(Table.from_files(files).to_rows().filter(lambda row: True).to_files(tmp_path / "out"))
    assert sorted(pq.read_table(tmp_path / "out").column("a").to_pylist()) == [0.1, 1.5]
