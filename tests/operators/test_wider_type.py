"""Types that hold the values of two others, whichever comes first."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minishuffle.api.stream import Table
from minishuffle.connectors.parquet import ParquetSource
from minishuffle.errors import UsageError
from minishuffle.operators.wider_type import common_schema, in_schema, wider, wider_schema
from tests.api.test_jobs import execute


@pytest.mark.parametrize(
    ("some", "other", "expected"),
    [
        (pa.int64(), pa.int64(), pa.int64()),
        (pa.null(), pa.decimal128(3, 1), pa.decimal128(3, 1)),
        (pa.null(), pa.string_view(), pa.string_view()),
        (pa.int64(), pa.float32(), pa.float64()),
        (pa.float16(), pa.float32(), pa.float32()),
        (pa.int8(), pa.uint64(), pa.int64()),
        (pa.int8(), pa.decimal128(2, 1), pa.decimal128(4, 1)),
        (pa.decimal128(4, 3), pa.decimal64(5, 1), pa.decimal128(7, 3)),
        (pa.decimal128(38, 0), pa.decimal128(38, 9), pa.decimal128(38, 9)),
        (pa.decimal256(40, 2), pa.decimal128(5, 4), pa.decimal256(42, 4)),
        (pa.decimal128(4, 3), pa.float64(), None),
        (pa.bool_(), pa.int8(), pa.int8()),
        (pa.bool_(), pa.float32(), pa.float64()),
        (pa.bool_(), pa.string(), None),
        (pa.struct({"a": pa.bool_()}), pa.struct({"a": pa.int64()}), pa.struct({"a": pa.int64()})),
        (pa.int64(), pa.string(), None),
        (pa.string(), pa.string_view(), pa.large_string()),
        (pa.string(), pa.binary(), None),
        (pa.timestamp("s"), pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC")),
        (pa.timestamp("s", "Asia/Tokyo"), pa.timestamp("s", "Europe/Rome"), pa.timestamp("s", "UTC")),
        (pa.date32(), pa.timestamp("s"), None),
        (pa.list_(pa.null()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.list_(pa.string()), pa.list_(pa.binary()), None),
        (pa.list_(pa.decimal128(4, 3)), pa.list_(pa.float64()), None),
        (pa.list_(pa.int8()), pa.large_list(pa.float64()), pa.large_list(pa.float64())),
        (pa.struct({"a": pa.string()}), pa.struct({"a": pa.binary()}), None),
        (
            pa.struct({"a": pa.int64(), "b": pa.null()}),
            pa.struct({"a": pa.float64(), "b": pa.list_(pa.null())}),
            pa.struct({"a": pa.float64(), "b": pa.list_(pa.null())}),
        ),
    ],
    ids=str,
)
def test_the_wider_type(some: pa.DataType, other: pa.DataType, expected: pa.DataType | None) -> None:
    assert wider(some, other) == expected
    assert wider(other, some) == expected


def test_structs_get_the_fields_of_both() -> None:
    some = pa.struct([pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.int64(), nullable=False)])
    other = pa.struct([("c", pa.string()), pa.field("b", pa.int64(), nullable=False)])
    wide = [("a", pa.int64()), pa.field("b", pa.int64(), nullable=False), ("c", pa.string())]
    assert wider(some, other) == pa.struct(wide)
    assert wider(other, some) == pa.struct([wide[2], wide[1], wide[0]])


def test_the_wider_schema() -> None:
    some = pa.schema([pa.field("a", pa.null()), pa.field("b", pa.int64(), nullable=False)])
    other = pa.schema([("a", pa.string()), ("b", pa.float64())])
    assert wider_schema(None, some, "it") == some
    assert wider_schema(some, other, "it") == wider_schema(other, some, "it") == other
    with pytest.raises(
        UsageError, match="column 'b' of it has values of the types date32\\[day\\] and double"
    ):
        wider_schema(other, pa.schema([("a", pa.string()), ("b", pa.date32())]), "it")
    with pytest.raises(UsageError, match="it has two columns of one name: rename some of a, a"):
        wider_schema(some, pa.schema([("a", pa.null()), ("a", pa.null())]), "it")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.int64(), pa.int64()),
        (pa.float64(), pa.float64()),
        (pa.decimal128(2, 1), pa.decimal128(4, 1)),
        (pa.bool_(), pa.bool_()),
        (pa.null(), pa.bool_()),
    ],
    ids=str,
)
def test_a_column_of_booleans_beside_one_of_numbers_has_ones_and_zeros(
    kind: pa.DataType, expected: pa.DataType
) -> None:
    booleans, numbers = pa.schema([("a", pa.bool_())]), pa.schema([("a", kind)])
    wide = pa.schema([("a", expected)])
    assert wider_schema(booleans, numbers, "it") == wider_schema(numbers, booleans, "it") == wide
    batch = pa.RecordBatch.from_pydict({"a": [True, False, None]})
    assert in_schema(batch, wide, "it")["a"].to_pylist() == [1, 0, None]


def test_a_column_of_one_schema_alone_may_be_null() -> None:
    some = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    other = pa.schema([pa.field("b", pa.int64(), nullable=False)])
    assert wider_schema(some, other, "it") == pa.schema([("a", pa.int64()), ("b", pa.int64())])


@pytest.mark.parametrize("kind", [pa.RecordBatch, pa.Table])
def test_what_a_batch_lacks_is_null_and_what_does_not_fit_refused(kind: Any) -> None:
    schema = pa.schema({"a": pa.float64(), "b": pa.string(), "c": pa.string()})
    names = pa.array(["x"]).dictionary_encode()
    found = in_schema(kind.from_pydict({"c": names, "a": pa.array([1])}), schema, "it")
    assert type(found) is kind
    assert found.schema == schema
    assert found.to_pylist() == [{"a": 1.0, "b": None, "c": "x"}]
    with pytest.raises(UsageError, match="column 'a' of it has the type int64, and a value that"):
        in_schema(kind.from_pydict({"a": pa.array([2**53 + 1])}), schema, "it")


# --- files that differ ------------------------------------------------------------------------------


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
    narrowed = ParquetSource(path, pa.schema({"b": pa.int64(), "a": pa.int64()}))
    assert read(narrowed) == [{"b": 2, "a": 1}, {"b": None, "a": 5}]
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
            r"'a' of .*1\.parquet and .*2\.parquet has values of the types date32\[day\] and timestamp\[us\]",
        ),
        (
            [column([1], pa.int64()), column([1.5], pa.float32()), column([None], pa.decimal128(3, 1))],
            r"'a' of .*2\.parquet and .*3\.parquet has values of the types decimal128\(3, 1\) and float",
        ),
        (
            [pa.table([[1], [2]], names=["a", "a"]), column([1], pa.int64())],
            r"1\.parquet and .*2\.parquet has two columns of one name: rename some of a, a",
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


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pa.array([1.0, 1e300]), pa.float32()),
        (pa.array([1e6]), pa.float16()),
        (pa.array([2]), pa.bool_()),
        (pa.array([2]).dictionary_encode(), pa.bool_()),
        (pa.array([0.5]), pa.bool_()),
        (pa.array([datetime(2020, 1, 1, 12)]), pa.date32()),
        (pa.array([datetime(2020, 1, 1, 12)]), pa.time64("us")),
        (pa.array([0.12345]), pa.decimal128(5, 2)),
    ],
    ids=str,
)
def test_what_pyarrow_would_change_without_a_word_is_refused(given: pa.Array, kind: pa.DataType) -> None:
    with pytest.raises(UsageError, match=r"column 'a' of it has .*would be another value"):
        in_schema(pa.table({"a": given}), pa.schema([("a", kind)]), "it")


@pytest.mark.parametrize(
    ("given", "kind", "values"),
    [
        (pa.array([0.1, float("inf"), None]), pa.float32(), [pytest.approx(0.1), float("inf"), None]),
        (pa.array([1, 0, None]), pa.bool_(), [True, False, None]),
        (pa.array([datetime(2020, 1, 1), None]), pa.date32(), [date(2020, 1, 1), None]),
        (pa.array([0.1, 123.456, 0.0]), pa.decimal128(6, 3), [Decimal("0.1"), Decimal("123.456"), 0]),
        (pa.array([0.1], pa.float32()), pa.decimal128(6, 3), [Decimal("0.1")]),
        (pa.array([Decimal("0.1")]), pa.float64(), [0.1]),
    ],
    ids=str,
)
def test_values_that_fit_are_taken(given: pa.Array, kind: pa.DataType, values: list[object]) -> None:
    assert in_schema(pa.table({"a": given}), pa.schema([("a", kind)]), "it")["a"].to_pylist() == values


def test_a_null_in_a_column_without_is_refused() -> None:
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.int64())])
    with pytest.raises(UsageError, match="column 'a' of it has nulls, and is declared without"):
        in_schema(pa.table({"a": pa.array([1, None], pa.int32()), "b": [1, 2]}), schema, "it")
    with pytest.raises(UsageError, match="column 'a' of it has nulls"):
        in_schema(pa.table({"b": [1, 2]}), schema, "it")
