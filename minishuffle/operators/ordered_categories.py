"""Categories that have an order of their own, which is lost where dictionaries are decoded: while a plan is
built, what goes by order refuses them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import WrongColumns
from minishuffle.exchange.schemas import has_ordered_categories
from minishuffle.operators.expression_parts import Path, columns_in_order

__all__ = ["refuse_order", "refuse_order_in"]


def refuse_order(method: str, field: pa.Field, path: Path = ()) -> None:
    """Raises WrongColumns if ``method`` would order categories by their texts; ``path`` leads to a field
    inside of a column."""
    if _is_ordered(field.type):
        name, steps = field.name, path or (field.name,)
        column, shown = f"col({', '.join(map(repr, steps))})", ".".join(map(str, steps))
        raise WrongColumns(
            f"{method}: the categories of column {shown!r} have an order of their own, which texts have not: "
            f"compare their codes, as with_columns({name}=pc.index_in({column}.expression, "
            "value_set=pa.array(['S', 'M', 'L']))), or, to compare them as texts, cast the column: "
            f"with_columns({name}={column}.cast('string'))"
        )


def refuse_order_in(where: str, schema: pa.Schema, expressions: Iterable[pc.Expression]) -> None:
    """Raises WrongColumns if one compares such categories by order, or UsageError if it reads a column by its
    number."""
    if not any(map(has_ordered_categories, schema.types)):
        return
    for path in chain.from_iterable(map(columns_in_order, expressions)):
        field = _field_at(schema, path)
        if field is not None:
            refuse_order(where, field, path)


def _is_ordered(kind: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(kind) and kind.ordered)


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
