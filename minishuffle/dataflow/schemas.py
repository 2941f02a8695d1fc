"""What columns a step gives, as far as the columns that it takes are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["aggregated_schema"]


def aggregated_schema(
    schema: pa.Schema | None,
    keys: tuple[str, ...],
    aggregates: Mapping[str, tuple[str, str]],
    *,
    windows: bool = False,
    at_end: bool = True,
) -> pa.Schema | None:
    """Schema of aggregates (name: (column, function)) by key, also by window; None without ``schema``.

    ``at_end``: the keys come from the state, where dictionary-encoded columns are plain.

    Raises:
        UsageError: a column's type cannot be aggregated so.
    """
    if schema is None:
        return None
    import pyarrow as pa

    from minishuffle.dataflow.operators.categories import refuse_order
    from minishuffle.dataflow.operators.columns import result_type
    from minishuffle.dataflow.operators.windowarrow import MOMENT
    from minishuffle.exchange.schemas import without_dictionary

    fields = []
    for name in keys:
        kind = schema.field(name).type
        fields.append(pa.field(name, without_dictionary(kind) if at_end else kind))
    if windows:
        fields += [pa.field("window_start", MOMENT), pa.field("window_end", MOMENT)]
    for name, (column, function) in aggregates.items():
        if function in ("min", "max"):
            refuse_order(function, schema.field(column))
        fields.append(pa.field(name, result_type(function, column, schema.field(column).type)))
    return pa.schema(fields)
