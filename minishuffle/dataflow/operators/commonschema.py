"""One schema for files that were written with several, so that a stream has the same columns throughout."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from minishuffle.dataflow.operators.widertype import as_type, wider
from minishuffle.errors import UsageError

__all__ = ["common_schema", "with_texts_for_nulls"]


def common_schema(schemas: Mapping[str, pa.Schema]) -> pa.Schema:
    """The schema that holds all values of files, by their paths (at least one).

    It has the columns of all, in the order in which they first come, each of a type that holds the
    values of all and nullable if it is in one file or a file lacks it.

    Raises:
        UsageError: a column's types have none in common, or a file has two columns of one name.
    """
    first, *others = schemas.values()
    if all(first.equals(other) for other in others):
        return first
    fields: dict[str, dict[str, pa.Field]] = {}
    for path, schema in schemas.items():
        for field in schema:
            if path in fields.setdefault(field.name, {}):
                raise UsageError(f"{path} has two columns {field.name!r}: give each its own name")
            fields[field.name][path] = field
    return pa.schema(
        [
            pa.field(
                name,
                _common_type(name, {path: field.type for path, field in of_files.items()}),
                len(of_files) < len(schemas) or any(field.nullable for field in of_files.values()),
            )
            for name, of_files in fields.items()
        ]
    )


def with_texts_for_nulls(schema: pa.Schema) -> pa.Schema:
    """The schema with texts in the columns of which no value is known."""
    return pa.schema(
        [field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema]
    )


def _common_type(name: str, kinds: Mapping[str, pa.DataType]) -> pa.DataType:
    common: pa.DataType = next(iter(kinds.values()))
    for path, kind in kinds.items():
        wide = _wider(common, kind)
        if wide is None:
            first = next(
                (file for file, its in kinds.items() if _wider(its, kind) is None), next(iter(kinds))
            )
            raise UsageError(
                f"column {name!r} is {kinds[first]} in {first} and {kind} in {path}, and no type holds both: "
                "write one of the files anew, or read each as a stream of its own and map one to the other"
            )
        common = wide
    return common


def _wider(some: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if some == other:
        return some
    wide = wider(_decoded(some), _decoded(other))
    return wide if wide is not None and _casts(some, wide) and _casts(other, wide) else None


def _decoded(kind: pa.DataType) -> pa.DataType:
    """The type of the values that pandas' categories number: wider numbers would help no other file."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _casts(kind: pa.DataType, wide: pa.DataType) -> bool:
    try:
        return as_type(pa.nulls(0, kind), wide) is not None
    except pa.ArrowException:
        return False
