"""The one type, and the one schema, for columns that come in several, the same whichever comes first; and how
values get there whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from minishuffle.errors import UsageError
from minishuffle.exchange.keys import BOOL8
from minishuffle.exchange.schemas import converted, decoded, without_dictionary
from minishuffle.operators.misplaced_nulls import misplaced_null

__all__ = [
    "DIGITS_MAX",
    "WIDE_DIGITS_MAX",
    "as_type",
    "common_schema",
    "in_schema",
    "require_own_names",
    "wider",
    "wider_schema",
]

DIGITS_MAX: Final = 38
"""Digits of a decimal128."""
WIDE_DIGITS_MAX: Final = 76
"""Digits of a decimal256."""
_INTEGER_DIGITS: Final = {8: 3, 16: 5, 32: 10, 64: 20}
"""Digits of integers, signed or not, by the width of the type in bits."""
ROUNDING: Final = {16: 1e-3, 32: 1e-6, 64: 1e-12}
"""How far a float of so many bits may be from the decimal that it becomes, as a share of it."""
_UNITS: Final = ("s", "ms", "us", "ns")


def wider(some: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type for values of both; None if there is none.

    Anything is wider than null. Integers beside floats become float64, those beside decimals decimals
    of enough digits; booleans beside numbers are 1 and 0. Floats and decimals have no type in common, for it
    would not be exact. Timestamps get the finer unit; those without a time zone are in UTC. Lists are as
    wide as their values need, and structs have the fields of both. Dictionaries that differ become what
    they hold.
    """
    if some == other:
        return some
    some, other = _without_extension(some), _without_extension(other)
    if some == other:
        return some
    if pa.types.is_boolean(some) or pa.types.is_boolean(other):
        some, other = _beside_boolean(some, other), _beside_boolean(other, some)
    kinds = (some, other)
    if any(map(pa.types.is_decimal, kinds)):
        return _wider_decimal(some, other)
    if any(map(pa.types.is_floating, kinds)) and any(map(pa.types.is_integer, kinds)):
        return pa.float64()
    if all(map(pa.types.is_timestamp, kinds)):
        zones = {kind.tz for kind in kinds} - {None}
        zone = zones.pop() if len(zones) == 1 else "UTC" if zones else None
        return pa.timestamp(max(some.unit, other.unit, key=_UNITS.index), zone)
    if _is_text(some) and _is_text(other):
        return pa.large_string()
    if _is_text(some) != _is_text(other) and not any(map(pa.types.is_null, kinds)):
        return None  # pyarrow would make bytes of texts
    if all(map(_is_list, kinds)):
        return _wider_list(some, other)
    if all(map(pa.types.is_struct, kinds)) and all(
        len({f.name for f in kind}) == len(kind) for kind in kinds
    ):
        return _wider_struct(some, other)
    return _unified(some, other)


def _without_extension(kind: pa.DataType) -> pa.DataType:
    """The type as :func:`wider` compares it: bool for arrow.bool8, the values' type for a dictionary, any
    other unchanged."""
    return pa.bool_() if kind == BOOL8 else without_dictionary(kind)


def _beside_boolean(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    """What a boolean is beside a number; any other type is itself."""
    if not pa.types.is_boolean(kind):
        return kind
    if pa.types.is_integer(other):
        return other
    return pa.uint8() if pa.types.is_floating(other) or pa.types.is_decimal(other) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _wider_list(some: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    field = _wider_field(some.value_field, other.value_field)
    if field is None:
        return None
    large = pa.types.is_large_list(some) or pa.types.is_large_list(other)
    return pa.large_list(field) if large else pa.list_(field)


def _wider_struct(some: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    fields = {field.name: field.with_nullable(True) for kind in (some, other) for field in kind}
    for name in {field.name for field in some} & {field.name for field in other}:
        field = _wider_field(some.field(name), other.field(name))
        if field is None:
            return None
        fields[name] = field
    return pa.struct(fields.values())


def _wider_field(some: pa.Field, other: pa.Field) -> pa.Field | None:
    kind = wider(some.type, other.type)
    return None if kind is None else some.with_type(kind).with_nullable(some.nullable or other.nullable)


def _is_text(kind: pa.DataType) -> bool:
    return any(is_a(kind) for is_a in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _wider_decimal(some: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if pa.types.is_null(some) or pa.types.is_null(other):
        return other if pa.types.is_null(some) else some
    shapes = []
    for kind in (some, other):
        if pa.types.is_integer(kind):
            shapes.append((_INTEGER_DIGITS[kind.bit_width], 0))
        elif pa.types.is_decimal(kind):
            shapes.append((kind.precision - kind.scale, kind.scale))
        else:
            return None
    scale = max(scale for _, scale in shapes)
    digits = max(before for before, _ in shapes) + scale
    if some.bit_width > 128 or other.bit_width > 128:
        return pa.decimal256(min(digits, WIDE_DIGITS_MAX), scale)
    return pa.decimal128(min(digits, DIGITS_MAX), scale)


def _unified(some: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    schemas = [pa.schema([("value", kind)]) for kind in (some, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def require_own_names(schema: pa.Schema, where: str) -> None:
    """Raises UsageError if two columns have one name."""
    if len(set(schema.names)) < len(schema):
        raise UsageError(f"{where} has two columns of one name: rename some of {', '.join(schema.names)}")


def wider_schema(some: pa.Schema | None, other: pa.Schema, where: str) -> pa.Schema:
    """The schema for batches of both: the columns of ``some`` and then those that only ``other`` has, each
    nullable where it is in one or one lacks it. None: there were no batches before.

    Raises:
        UsageError: a column has types with none in common, or two columns have one name.
    """
    if some is None or some.equals(other):
        return other
    for schema in (some, other):
        require_own_names(schema, where)
    fields = []
    for name in dict.fromkeys([*some.names, *other.names]):
        kinds = [schema.field(name) for schema in (some, other) if name in schema.names]
        field = kinds[0].with_nullable(True) if len(kinds) == 1 else _wider_field(*kinds)
        if field is None:
            types = " and ".join(sorted(str(each.type) for each in kinds))
            raise UsageError(
                f"column {name!r} of {where} has values of the types {types}, which have none in common that "
                "is exact: cast the column to one type first, or declare it: to_table(schema), "
                "from_files(schema=...)"
            )
        fields.append(field)
    return pa.schema(fields, some.metadata)


def common_schema(schemas: Mapping[str, pa.Schema]) -> pa.Schema:
    """The same for files, by their paths (at least one)."""
    common: pa.Schema | None = None
    for path, schema in schemas.items():
        try:
            common = wider_schema(common, schema, path)
        except UsageError:
            for before, other in schemas.items():
                wider_schema(other, schema, f"{before} and {path}")
            raise
    assert common is not None
    return common


def in_schema(data: Any, schema: pa.Schema, where: str) -> Any:
    """A batch or a table with the columns of ``schema``, those that it lacks null.

    Raises:
        UsageError: a value does not fit its type whole (an int64 of 17 digits a float64, say), or there is a
            null where none may be.
    """
    if data.schema.equals(schema):
        return data
    arrays, is_in_order = [], data.schema.names == schema.names
    for place, field in enumerate(schema):
        number = place if is_in_order else data.schema.get_field_index(field.name)
        column = pa.nulls(data.num_rows, field.type) if number < 0 else data.column(number)
        try:
            arrays.append(_exactly(column, field.type))
        except pa.ArrowException as error:
            raise UsageError(
                f"column {field.name!r} of {where} has the type {column.type}, and a value that does not fit "
                f"{field.type} ({error}): cast the column first, or declare what fits with to_table(schema)"
            ) from error
    found = type(data).from_arrays(arrays, schema=schema)
    for batch in [found] if isinstance(found, pa.RecordBatch) else found.to_batches():
        null = misplaced_null(batch, schema)
        if null is not None:
            raise UsageError(f"column {null!r} of {where} has nulls, and is declared without")
    return found


def _exactly(column: Any, kind: pa.DataType) -> Any:
    """As :func:`as_type`, but for the rounding of fractions to floats of fewer digits. Raises ArrowException
    for what pyarrow's safe casts do not look at either, at any depth."""
    if column.type == kind:
        return column
    if pa.types.is_dictionary(column.type):
        column = decoded(column)
    cast, given = as_type(column, kind), column.type
    for part, within in _parts(column, kind):
        _exactly(part, within)
    from_float = pa.types.is_floating(given)
    if pa.types.is_floating(kind) and (from_float or pa.types.is_decimal(given)):
        infinite = pc.is_inf(cast.cast(pa.float64()))
        if from_float:
            infinite = pc.and_not(infinite, pc.is_inf(column.cast(pa.float64())))
        lost = infinite
    elif (pa.types.is_boolean(kind) or kind == BOOL8) and (from_float or pa.types.is_integer(given)):
        lost = pc.not_equal(
            cast.cast(pa.bool_()).cast(pa.uint8()).cast(pa.float64()), column.cast(pa.float64(), safe=False)
        )
    elif pa.types.is_decimal(kind) and from_float:
        before, after = column.cast(pa.float64()), cast.cast(pa.float64())
        error = pc.multiply(pc.abs(before), ROUNDING[given.bit_width])
        lost = pc.greater(pc.abs(pc.subtract(before, after)), error)
    elif pa.types.is_date(kind) and pa.types.is_timestamp(given):
        lost = pc.not_equal(pc.floor_temporal(column, unit="day"), column)
    elif pa.types.is_time(kind) and pa.types.is_timestamp(given):
        lost = pc.is_valid(column)
    else:
        return cast
    if pc.any(lost).as_py():
        raise pa.ArrowInvalid(f"{pc.filter(column, lost)[0]} would be another value")
    return cast


def _parts(column: Any, kind: pa.DataType) -> list[tuple[Any, pa.DataType]]:
    """What a nested column holds, with the types that it is to become."""
    if not kind.num_fields:
        return []
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if column.null_count:  # What lies under a null counts for nothing.
        column = column.drop_null()
    if pa.types.is_struct(kind) and pa.types.is_struct(column.type):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        there = [field for field in fields if column.type.get_field_index(field.name) >= 0]
        return [(column.field(field.name), field.type) for field in there]
    if pa.types.is_map(kind) and pa.types.is_map(column.type):
        begin, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        keys, items = (child.slice(begin, end - begin) for child in (column.keys, column.items))
        return [(keys, kind.key_type), (items, kind.item_type)]
    return [(column.flatten(), kind.field(0).type)] if column.type.num_fields == 1 else []


def as_type(column: Any, kind: pa.DataType, *, safe: bool = True) -> Any:
    """The column in a type, dictionaries decoded. Raises ArrowException rather than lose part of a value, if
    ``safe``; see :func:`_exactly` for what pyarrow does not look at."""
    if column.type == kind:
        return column
    if pa.types.is_dictionary(column.type):
        column = decoded(column)
    if column.type == BOOL8:
        column = column.cast(pa.bool_())  # pyarrow casts what stands for true, of which there are 255 numbers
    elif kind == BOOL8:
        column = column.cast(pa.bool_(), safe=safe)
    if pa.types.is_decimal(kind) and pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())  # pyarrow casts booleans to no decimals
    elif pa.types.is_decimal(kind) and pa.types.is_float16(column.type):
        column = column.cast(pa.float32())  # nor these
    return converted(column, kind, safe=safe)
