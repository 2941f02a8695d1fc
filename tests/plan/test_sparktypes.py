"""Types that a stream may not declare, because no DataFrame comes in them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from minishuffle.api.stream import Table
from minishuffle.errors import UsageError
from minishuffle.plan.sparktypes import check_written


@pytest.mark.parametrize(
    "kind, instead",
    [
        (pa.uint8(), "int16"),
        (pa.uint64(), "decimal128(20, 0)"),
        (pa.large_string(), "string"),
        (pa.dictionary(pa.int8(), pa.large_string()), "string"),
        (pa.decimal256(50, 2), "decimal128(38, 2)"),
        (pa.timestamp("ns"), "timestamp[us]"),
        (pa.timestamp("us", "Europe/Berlin"), "timestamp[us, tz=UTC]"),
        (pa.timestamp("ms", "UTC"), "timestamp[us, tz=UTC]"),
        (pa.date64(), "date32[day]"),
        (pa.time32("s"), "time64[ns]"),
        (pa.duration("ns"), "duration[us]"),
        (pa.binary(4), "binary"),
        (pa.large_list(pa.field("item", pa.uint8(), nullable=False)), "list<item: int16 not null>"),
        (pa.struct([("x", pa.uint16())]), "struct<x: int32>"),
        (pa.map_(pa.large_string(), pa.float16()), "map<string, float>"),
    ],
    ids=str,
)
def test_what_spark_never_writes_is_refused_with_what_to_declare(kind: pa.DataType, instead: str) -> None:
    with pytest.raises(UsageError) as raised:
        Table.from_spark("types", pa.schema([("id", pa.int64()), ("c", kind)]))
    said = f"Table.from_spark: Spark never writes column 'c' as {kind}: declare it as {instead}"
    assert str(raised.value) == said


@pytest.mark.parametrize(
    "kind",
    [
        pa.month_day_nano_interval(),
        pa.list_(pa.month_day_nano_interval()),
        pa.struct([("x", pa.month_day_nano_interval())]),
        pa.map_(pa.string(), pa.month_day_nano_interval()),
    ],
    ids=str,
)
def test_what_spark_has_not_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(UsageError, match="Table.from_spark: Spark has nothing like column 'c' of type"):
        Table.from_spark("types", pa.schema([("c", kind)]))


def test_a_schema_without_columns_is_refused() -> None:
    with pytest.raises(UsageError, match="here takes a schema with at least one column"):
        check_written(pa.schema([]), "here")
