"""The one type for columns that come in several, the same whichever comes first."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from minishuffle.dataflow.operators.decimals import DIGITS_MAX

__all__ = ["wider", "wider_schema"]

_WIDE_DIGITS_MAX: Final = 76
"""Digits of a decimal256."""
_INTEGER_DIGITS: Final = {8: 3, 16: 5, 32: 10, 64: 20}
"""Digits of integers, signed or not, by the width of the type in bits."""
_UNITS: Final = ("s", "ms", "us", "ns")


def wider(some: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type for values of both; None if there is none.

    Anything is wider than null. Integers beside floats become float64, those beside decimals decimals
    of enough digits. Floats and decimals have no type in common, for it would not be exact; neither have
    numbers and booleans. Timestamps get the finer unit; those without a time zone are in UTC. Lists are as
    wide as their values need, and structs have the fields of both.
    """
    if some == other:
        return some
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
        return pa.decimal256(min(digits, _WIDE_DIGITS_MAX), scale)
    return pa.decimal128(min(digits, DIGITS_MAX), scale)


def _unified(some: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    schemas = [pa.schema([("value", kind)]) for kind in (some, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def wider_schema(some: pa.Schema, other: pa.Schema) -> pa.Schema | None:
    """The schema for batches of both; None if there is none, or they have other columns or another order."""
    if some.names != other.names:
        return None
    fields = []
    for mine, its in zip(some, other, strict=True):
        field = _wider_field(mine, its)
        if field is None:
            return None
        fields.append(field)
    return pa.schema(fields, some.metadata)
