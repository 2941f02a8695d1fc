"""The types of Arrow in which Spark hands over the columns of a DataFrame; needs no Spark."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from minishuffle.errors import UsageError
from minishuffle.exchange.schemas import long_types, with_types

__all__ = ["check_written", "spark_schema"]

WRITTEN: Final = frozenset(
    {
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
        *(pa.bool_(), pa.string(), pa.binary(), pa.null()),
        *(pa.date32(), pa.time64("ns"), pa.duration("us"), pa.timestamp("us"), pa.timestamp("us", "UTC")),
    }
)
"""Beside decimals and nested types."""
NEAREST: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}
DECIMAL_DIGITS_MAX: Final = 38


def spark_schema(schema: pa.Schema) -> pa.Schema:
    """The schema with every timestamp in microseconds as Spark's are: a moment in UTC, or naive; and no
    dictionary of views, which Spark does not read."""
    fields = []
    for field in schema:
        if pa.types.is_timestamp(field.type):
            field = field.with_type(pa.timestamp("us", "UTC" if field.type.tz else None))
        fields.append(field)
    schema = pa.schema(fields)
    return with_types(schema, long_types(schema))


def check_written(schema: pa.Schema, where: str) -> None:
    """
    Raises:
        UsageError: there is no column, or one of a type that no DataFrame comes in.
    """
    if not schema.names:
        raise UsageError(f"{where} takes a schema with at least one column: rows without columns are lost")
    for field in schema:
        nearest = _nearest(field.type)
        if nearest is None:
            raise UsageError(f"{where}: Spark has nothing like column {field.name!r} of type {field.type}")
        if nearest != field.type:
            raise UsageError(
                f"{where}: Spark never writes column {field.name!r} as {field.type}: declare it as {nearest}"
            )


def _nearest(kind: pa.DataType) -> Any:
    """The type in which Spark writes such values: mostly ``kind`` itself; None: there is none."""
    if kind in WRITTEN:
        return kind
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(kind.precision, DECIMAL_DIGITS_MAX), kind.scale)
    if pa.types.is_dictionary(kind):
        return _nearest(kind.value_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_time(kind):
        return pa.time64("ns")
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_nested(kind):
        return _nearest_nested(kind)
    return NEAREST.get(kind)


def _nearest_nested(kind: pa.DataType) -> Any:
    fields = [kind.field(number) for number in range(kind.num_fields)]
    if pa.types.is_map(kind):
        fields = [kind.key_field, kind.item_field]
    nearest = [_nearest(field.type) for field in fields]
    if not nearest or None in nearest:
        return None
    fields = [field.with_type(each) for field, each in zip(fields, nearest, strict=True)]
    if pa.types.is_struct(kind):
        return pa.struct(fields)
    return pa.map_(*fields) if pa.types.is_map(kind) else pa.list_(fields[0])
