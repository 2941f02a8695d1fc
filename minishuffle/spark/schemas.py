"""Between Spark's schemas and Arrow's."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from minishuffle.errors import UsageError
from minishuffle.operators.misplaced_nulls import misplaced_null

__all__ = ["arrow_schema_of", "check_same_columns", "fitted", "read_schema", "spark_schema_of"]

DECIMAL_DIGITS_MAX: Final = 38
WIDER: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
}
"""What holds every value of a type that Spark does not have."""


def read_schema(message: bytes) -> pa.Schema:
    """The Arrow schema of an IPC message."""
    return pa.ipc.read_schema(pa.py_buffer(message))


def spark_schema_of(schema: pa.Schema) -> StructType:
    """Spark's schema for an Arrow schema; see :data:`WIDER`.

    Raises:
        UsageError: Spark has no type for a column's.
    """
    schema = pa.schema([field.with_type(WIDER.get(field.type, field.type)) for field in schema])
    for field in schema:
        if pa.types.is_decimal(field.type) and field.type.precision > DECIMAL_DIGITS_MAX:
            raise UsageError(
                f"Spark's decimals have at most {DECIMAL_DIGITS_MAX} digits, column {field.name!r} is "
                f"{field.type}: cast it in the job"
            )
        try:
            from_arrow_schema(pa.schema([field]))
        except PySparkException as error:
            raise UsageError(
                f"Spark has no type for column {field.name!r} of type {field.type}: cast it in the job"
            ) from error
    found: StructType = from_arrow_schema(schema)
    return found


def arrow_schema_of(schema: StructType) -> pa.Schema:
    """The Arrow schema in which Spark hands over the rows of a DataFrame, times in UTC.

    Raises:
        UsageError: Arrow has no type for a column's.
    """
    for field in schema.fields:
        try:
            to_arrow_schema(StructType([field]), timezone="UTC")
        except PySparkException as error:
            raise UsageError(
                f"column {field.name!r} of type {field.dataType.simpleString()} does not fit Arrow: cast it"
            ) from error
    found: pa.Schema = to_arrow_schema(schema, timezone="UTC")
    return found


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the types of the schema, whose columns it has.

    Raises:
        UsageError: it has others, a value does not fit its type, or a null is where none may be.
    """
    if batch.schema.equals(schema):
        # Nothing holds a batch to its own schema either.
        _check_nulls(batch, schema)
        return batch
    if batch.schema.names != schema.names:
        raise UsageError(
            f"there are the columns {', '.join(batch.schema.names)}, and not those that were asked for: "
            f"{', '.join(schema.names)}"
        )
    try:
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(batch.columns, schema, strict=True)
        ]
        found = pa.RecordBatch.from_arrays(columns, schema=schema)
    except pa.ArrowException as error:
        raise UsageError(f"the columns {batch.schema} do not fit {schema}: {error}") from error
    _check_nulls(found, schema)
    return found


def _check_nulls(batch: pa.RecordBatch, schema: pa.Schema) -> None:
    place = misplaced_null(batch, schema)
    if place is not None:
        raise UsageError(
            f"column {place!r} has nulls and the stream declares it without: replace them, or declare it "
            "nullable"
        )


def check_same_columns(given: pa.Schema, wanted: pa.Schema, stream: str) -> None:
    """Raises UsageError: the names, their order, or the types differ; the text says where.

    Whether there may be nulls, in a column or inside of it, makes no difference: :func:`fitted` looks at
    those that come.
    """

    def columns(schema: pa.Schema) -> list[tuple[str, Any]]:
        return [(field.name, _nullable(field.type)) for field in schema]

    if columns(given) == columns(wanted):
        return
    if given.names != wanted.names:
        raise UsageError(
            f"stream {stream!r} takes the columns {', '.join(wanted.names)}, the DataFrame has "
            f"{', '.join(given.names)}: select them in that order"
        )
    name, mine, theirs = next(
        (field.name, field.type, other.type)
        for field, other in zip(given, wanted, strict=True)
        if _nullable(field.type) != _nullable(other.type)
    )
    raise UsageError(
        f"stream {stream!r} takes column {name!r} as {theirs}, the DataFrame has {mine}: cast it, or declare "
        "it so in Table.from_spark"
    )


def _nullable(kind: pa.DataType) -> pa.DataType:
    """The type with nulls allowed in every part of it; only types that Spark writes have parts here."""

    def part(field: pa.Field) -> pa.Field:
        return field.with_type(_nullable(field.type)).with_nullable(True)

    if pa.types.is_struct(kind):
        return pa.struct([part(kind.field(index)) for index in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(part(kind.key_field).with_nullable(False), part(kind.item_field))
    if pa.types.is_list(kind):
        return pa.list_(part(kind.value_field))
    return kind
