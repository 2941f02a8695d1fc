"""Nulls where a schema says that there are none: Arrow builds such columns without a word, and whoever reads
them takes what lies under a null, a 0 as a rule, for a value."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

__all__ = ["is_strict", "misplaced", "misplaced_null"]


def misplaced_null(batch: pa.RecordBatch, schema: pa.Schema) -> str | None:
    """The first column, or part of one (``a.b``), that has nulls and that ``schema`` declares without.

    The columns are in the order of the schema; only whether they may be null is taken from it.
    """
    for column, field in zip(batch.columns, schema, strict=True):
        found = misplaced(column, field)
        if found is not None:
            return found
    return None


def misplaced(column: Any, field: pa.Field) -> str | None:
    """The same of one column."""
    if not field.nullable and column.null_count:
        return str(field.name)
    parts = [part for part in _parts(field.type) if is_strict(part)]
    if not parts:
        return None
    if column.null_count:  # What lies under a null counts for nothing.
        column = column.drop_null()
    for part in parts:
        found = misplaced(_part(column, part), part)
        if found is not None:
            return f"{field.name}.{found}"
    return None


def _parts(kind: pa.DataType) -> list[pa.Field]:
    """Fields of a nested type; without a map's keys, which are never null."""
    if pa.types.is_struct(kind):
        return [kind.field(index) for index in range(kind.num_fields)]
    if pa.types.is_map(kind):
        return [kind.item_field]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [kind.value_field]
    return []


def is_strict(field: pa.Field) -> bool:
    """Whether it, or a part of it, is declared without nulls."""
    return not field.nullable or any(map(is_strict, _parts(field.type)))


def _part(column: Any, part: pa.Field) -> Any:
    """The values of a part, of exactly the rows of ``column``, which has no nulls."""
    if pa.types.is_struct(column.type):
        return column.field(part.name)
    if pa.types.is_map(column.type):
        begin, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return column.items.slice(begin, end - begin)
    return column.flatten()
