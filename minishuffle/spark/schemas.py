"""Between Spark's schemas and Arrow's."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from minishuffle.errors import UsageError

__all__ = ["arrow_schema_of", "check_same_columns", "read_schema", "spark_schema_of"]


def read_schema(message: bytes) -> pa.Schema:
    """The Arrow schema of an IPC message."""
    return pa.ipc.read_schema(pa.py_buffer(message))


def spark_schema_of(schema: pa.Schema) -> StructType:
    """Spark's schema for an Arrow schema.

    Raises:
        UsageError: Spark has no type for a column's.
    """
    for field in schema:
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


def check_same_columns(given: pa.Schema, wanted: pa.Schema, stream: str) -> None:
    """Raises UsageError: the names, their order, or the types differ; the text says where."""

    def columns(schema: pa.Schema) -> list[tuple[str, Any]]:
        return [(field.name, field.type) for field in schema]

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
        if field.type != other.type
    )
    raise UsageError(
        f"stream {stream!r} takes column {name!r} as {theirs}, the DataFrame has {mine}: cast it, or declare "
        "it so in Stream.from_spark"
    )
