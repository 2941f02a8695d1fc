"""The order of rows by the values of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import WrongColumns
from minishuffle.exchange.schemas import converted, without_dictionary, without_view

__all__ = ["check_order", "has_order", "row_order"]

Vector: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def has_order(kind: pa.DataType) -> bool:
    """Whether values of the type have an order; nulls alone, lists and the like have none."""
    kind = without_dictionary(kind)
    odd = pa.types.is_null(kind) or pa.types.is_interval(kind) or isinstance(kind, pa.BaseExtensionType)
    return not (odd or pa.types.is_nested(kind))


def check_order(method: str, name: str, kind: pa.DataType) -> None:
    """Raises WrongColumns if the column ``name`` has values that have no order."""
    if not has_order(kind) and not pa.types.is_null(without_dictionary(kind)):
        raise WrongColumns(
            f"{method} by column {name!r} of type {kind}, which has no order: first take out of it what to "
            "order by, as with explode() or with_columns()"
        )


def row_order(columns: Sequence[Any], directions: Sequence[str], nan_last: int | None = None) -> Vector:
    """The numbers of the rows by the columns, each ``"ascending"`` or ``"descending"``; those that have no
    order are left out. A null is smaller than all values, and NaN greater; in the column of the number
    ``nan_last`` it comes after all numbers in either direction. Rows that are equal stay in order."""
    keys: list[Any] = []
    for place, (column, direction) in enumerate(zip(columns, directions, strict=True)):
        if has_order(column.type):
            values = _sortable(column)
            # pyarrow sorts nulls and NaNs to the end in both directions.
            marks = [values.is_valid()] if values.null_count else []
            if pa.types.is_floating(values.type) and place != nan_last:
                marks.append(pc.is_nan(values))
            keys += [(each, direction) for each in (*marks, values)]
    names = list(map(str, range(len(keys))))
    table = pa.table([column for column, _ in keys], names=names)
    sort_keys = [(name, direction) for name, (_, direction) in zip(names, keys, strict=True)]
    order: Vector = pc.sort_indices(table, sort_keys=sort_keys).to_numpy()
    return order.astype(np.int64)


def _sortable(column: Any) -> Any:
    """In a type that pyarrow sorts."""
    kind = without_view(without_dictionary(column.type))
    if pa.types.is_decimal(kind) and kind.bit_width < 128:
        kind = pa.decimal128(kind.precision, kind.scale)
    elif pa.types.is_float16(kind):
        kind = pa.float32()
    return converted(column, kind)
