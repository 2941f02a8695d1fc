"""Categories that have an order of their own: what goes by order refuses them.

Where dictionaries are decoded that order is lost, and a mark in the column's metadata tells of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.dataflow.operators.expressionparts import Path, columns_in_order
from minishuffle.errors import WrongColumns
from minishuffle.exchange.schemas import ORDERED, is_ordered

__all__ = ["refuse_order", "refuse_order_in", "still_marked", "unmarked"]


def refuse_order(method: str, field: pa.Field) -> None:
    """Raises WrongColumns if ``method`` would order categories by their texts."""
    if is_ordered(field):
        name = field.name
        raise WrongColumns(
            f"{method}: the categories of column {name!r} have an order of their own, which texts have not: "
            f"compare their codes, as with_columns({name}=pc.index_in(pc.field({name!r}), "
            "value_set=pa.array(['S', 'M', 'L']))), or, to compare them as texts, cast the column: "
            f"with_columns({name}=pc.field({name!r}).cast('string'))"
        )


def refuse_order_in(where: str, schema: pa.Schema, expressions: Iterable[pc.Expression]) -> None:
    """Raises WrongColumns if one compares such categories by order, or UsageError if it reads a column by its
    number."""
    if not any(map(_has_ordered, schema)):
        return
    for path in chain.from_iterable(map(columns_in_order, expressions)):
        field = _field_at(schema, path)
        if field is not None:
            refuse_order(where, field.with_name(".".join(map(str, path))))


def _has_ordered(field: pa.Field) -> bool:
    kind = field.type
    return is_ordered(field) or any(_has_ordered(kind.field(place)) for place in range(kind.num_fields))


def _field_at(schema: pa.Schema, path: Path) -> pa.Field | None:
    """The field at the end of a path; None if there is none."""
    name, *steps = path
    if schema.get_field_index(name) < 0:
        return None
    field = schema.field(name)
    for step in steps:
        kind = field.type
        has = step < kind.num_fields if isinstance(step, int) else pa.types.is_struct(kind)
        if not has or (isinstance(step, str) and kind.get_field_index(step) < 0):
            return None
        field = kind.field(step)
    return field


def still_marked(made: pa.RecordBatch, given: pa.RecordBatch, sources: Mapping[str, Any]) -> pa.RecordBatch:
    """A batch that was made of another, with the marks of the columns that are as they were: ``sources`` has
    their names there."""
    marked = {field.name for field in given.schema if field.metadata and is_ordered(field)}
    if not marked:
        return made
    fields = [
        field.with_metadata(ORDERED) if sources.get(field.name) in marked else field for field in made.schema
    ]
    return pa.RecordBatch.from_arrays(made.columns, schema=pa.schema(fields))


def unmarked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch as whoever reads the results gets it."""
    if not any(field.metadata and is_ordered(field) for field in batch.schema):
        return batch
    fields = [field.remove_metadata() if is_ordered(field) else field for field in batch.schema]
    return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields, batch.schema.metadata))
