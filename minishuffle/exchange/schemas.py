"""Types of Arrow with the types in them replaced, at any depth, and columns cast to those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from minishuffle.errors import WrongColumns

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "as_declared",
    "batch_without_rows",
    "converted",
    "decoded",
    "encoded",
    "has_ordered_categories",
    "long_types",
    "require_plain",
    "with_columns_of",
    "with_innermost",
    "with_long_dictionary",
    "with_types",
    "without_dictionary",
    "without_view",
]


def require_plain(field: pa.Field) -> None:
    """Raises WrongColumns: the column holds runs or a union, at any depth. Hardly a function of Arrow takes
    them, and those that do count none of their nulls."""
    if not _is_plain(field.type):
        raise WrongColumns(
            f"column {field.name!r} is of type {field.type}, which nothing can be made of: decode runs with "
            "pyarrow.compute.run_end_decode, and give each part of a union a column of its own"
        )


def _is_plain(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_run_end_encoded(kind) or pa.types.is_union(kind):
        return False
    if pa.types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    return not kind.num_fields or all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))


def with_innermost(
    kind: pa.DataType, replace: Callable[[pa.DataType], pa.DataType], *, castable: bool = True
) -> pa.DataType:
    """The type with ``replace`` applied to every type in it that holds no others, as a dictionary does not.

    With ``castable`` views of lists and runs stay too, which pyarrow casts to no other type.
    """
    import pyarrow as pa

    if not kind.num_fields:
        return replace(kind)
    inner = [kind.field(number) for number in range(kind.num_fields)]
    fields = [field.with_type(with_innermost(field.type, replace, castable=castable)) for field in inner]
    if pa.types.is_struct(kind):
        return pa.struct(fields)
    if pa.types.is_map(kind):
        return pa.map_(*fields[0].type, keys_sorted=kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(fields[0])
    if castable or pa.types.is_list(kind):
        return pa.list_(fields[0]) if pa.types.is_list(kind) else kind
    if pa.types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, fields[1].type)
    return (pa.list_view if pa.types.is_list_view(kind) else pa.large_list_view)(fields[0])


def batch_without_rows(schema: pa.Schema) -> pa.RecordBatch:
    """Columns of no rows."""
    import pyarrow as pa

    columns = [pa.nulls(0, kind) for kind in schema.types]  # empty_table() has none of some nested types
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def without_dictionary(kind: pa.DataType) -> pa.DataType:
    """What a dictionary holds, at any depth, long types for views; any other type is itself."""
    import pyarrow as pa

    if not pa.types.is_dictionary(kind):
        return kind
    return with_innermost(with_innermost(kind.value_type, without_dictionary), without_view)


def with_long_dictionary(kind: pa.DataType) -> pa.DataType:
    """For a dictionary of views that of the long types of what they show, and null for one of nulls; any
    other type is itself.

    pyarrow casts one to the other and back, does nothing else with dictionaries of views, and may crash with
    those of nulls.
    """
    import pyarrow as pa

    if not pa.types.is_dictionary(kind):
        return kind
    if pa.types.is_null(kind.value_type):
        return pa.null()
    held = with_innermost(kind.value_type, without_view)
    return kind if held == kind.value_type else pa.dictionary(kind.index_type, held, kind.ordered)


def without_view(kind: pa.DataType) -> pa.DataType:
    """For a view of texts or bytes the long type of what it shows; any other type is itself."""
    import pyarrow as pa

    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def with_types(schema: pa.Schema, kinds: Iterable[pa.DataType]) -> pa.Schema:
    """The schema with those types, in order."""
    import pyarrow as pa

    fields = [field.with_type(kind) for field, kind in zip(schema, kinds, strict=True)]
    return pa.schema(fields, schema.metadata)


def converted(column: Any, kind: pa.DataType, *, safe: bool = True) -> Any:
    """The column cast to a type, also from and to dictionaries of views, at any depth. Raises ArrowException
    as pyarrow's cast does."""
    for step in (
        with_innermost(column.type, with_long_dictionary),
        with_innermost(kind, with_long_dictionary),
        kind,
    ):
        if column.type != step:
            column = column.cast(step, safe=safe)
    return column


def long_types(schema: pa.Schema) -> list[pa.DataType]:
    """The types of the columns, with no dictionary of views."""
    return [with_innermost(kind, with_long_dictionary) for kind in schema.types]


def with_columns_of(data: Any, kinds: Sequence[pa.DataType]) -> Any:
    """A batch or table whose columns are cast to those types, in order."""
    if kinds == data.schema.types:
        return data
    columns = [
        decoded(column)
        if with_innermost(column.type, without_dictionary) == kind
        else converted(column, kind)
        for column, kind in zip(data.columns, kinds, strict=True)
    ]
    return type(data).from_arrays(columns, schema=with_types(data.schema, kinds))


def decoded(column: Any) -> Any:
    """The column without dictionaries, at any depth."""
    import pyarrow as pa

    plain = with_innermost(column.type, without_dictionary)
    if column.type == plain:
        return column
    if not pa.types.is_dictionary(column.type) or not _is_nested(column.type.value_type):
        return converted(column, plain)
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array(map(decoded, column.chunks), plain)
    # pyarrow casts dictionaries of lists and the like to nothing.
    return converted(decoded(column.dictionary), plain).take(column.indices)


def encoded(column: Any, kind: pa.DataType) -> Any:
    """A column with the dictionaries of ``kind``, which an exchange has decoded; itself where they cannot be
    made again, as categories in an order of their own."""
    import pyarrow as pa

    if column.type == kind or has_ordered_categories(kind):
        return column
    with suppress(pa.ArrowException):  # Of nested values, or too many for the type of the indices.
        return converted(column.dictionary_encode() if pa.types.is_dictionary(kind) else column, kind)
    return column


def as_declared(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch in the schema of its table, but for dictionaries that an exchange has decoded for good."""
    import pyarrow as pa

    if batch.schema.equals(schema, check_metadata=True):
        return batch
    columns = [encoded(batch.column(field.name), field.type) for field in schema]
    kinds = [column.type for column in columns]
    return pa.RecordBatch.from_arrays(columns, schema=with_types(schema, kinds))


def has_ordered_categories(kind: pa.DataType) -> bool:
    """Whether it is, or one in it, a dictionary whose values have an order of their own."""
    import pyarrow as pa

    is_ordered = bool(pa.types.is_dictionary(kind) and kind.ordered)
    return is_ordered or any(has_ordered_categories(kind.field(at).type) for at in range(kind.num_fields))


def _is_nested(kind: pa.DataType) -> bool:
    """Whether it holds other types, as a dictionary and the storage of an extension do too."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _is_nested(kind.storage_type)
    return bool(pa.types.is_nested(kind) or pa.types.is_dictionary(kind))
