"""Types of Arrow with the types in them replaced, at any depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minishuffle.errors import WrongColumns

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["require_plain", "with_innermost", "without_dictionary", "without_view"]


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


def without_dictionary(kind: pa.DataType) -> pa.DataType:
    """What a dictionary holds, at any depth; any other type is itself."""
    import pyarrow as pa

    return with_innermost(kind.value_type, without_dictionary) if pa.types.is_dictionary(kind) else kind


def without_view(kind: pa.DataType) -> pa.DataType:
    """For a view of texts or bytes the long type of what it shows; any other type is itself."""
    import pyarrow as pa

    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind
