"""What is known of the rows of a stream when the plan is built: where they come from, and which columns they
make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from minishuffle.errors import UsageError
from minishuffle.plan.rowtypes import Returns, returned_row, unread_annotation

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.operators.row_conversion import RowsSchema

__all__ = [
    "ErrorRows",
    "ItemRows",
    "KnownRows",
    "ReturnedRows",
    "TypedRows",
    "all_known",
    "declared_schema",
    "found_schema",
    "known_schema",
    "unread_annotations",
]


@dataclass(frozen=True, slots=True, eq=False)
class ItemRows:
    """Rows of a collection in memory, some of them or all."""

    items: Sequence[Any]


@dataclass(frozen=True, slots=True, eq=False)
class TypedRows:
    """Rows of a schema. ``are_values``: not dicts, but the values of its only column."""

    schema: pa.Schema
    are_values: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ReturnedRows:
    """What a function of the user returns."""

    fn: Any
    returns: Returns


@dataclass(frozen=True, slots=True, eq=False)
class ErrorRows:
    """Records for which a function raised, each with the operator's name and the error; ``of``: all that the
    records may come from."""

    of: tuple[KnownRows, ...]


KnownRows: TypeAlias = ItemRows | TypedRows | ReturnedRows | ErrorRows


def declared_schema(schema: pa.Schema, rows: Sequence[KnownRows]) -> RowsSchema:
    """The schema for rows of which ``rows`` is known, as it was declared for them.

    Raises:
        UsageError: they are values of one column, and it has several.
    """
    from minishuffle.operators.row_conversion import RowsSchema

    are_values = bool(rows) and all(isinstance(each, TypedRows) and each.are_values for each in rows)
    if are_values and len(schema) != 1:
        raise UsageError(
            f"the rows are texts, and the schema has {len(schema)} columns ({', '.join(schema.names)}): "
            "declare one, or map the rows to dicts"
        )
    return RowsSchema(schema, are_values=are_values)


def unread_annotations(rows: Sequence[KnownRows]) -> str | None:
    """Why one of the functions that give the rows does not say their columns, though it is annotated; None:
    none is, or all can be read."""
    unread = (unread_annotation(each.fn) for each in rows if isinstance(each, ReturnedRows))
    return next(filter(None, unread), None)


def known_schema(rows: Sequence[KnownRows], step: str) -> RowsSchema | None:
    """See :func:`found_schema`; errors name the step and its place in the program."""
    from minishuffle.plan.unknownschemas import place_of_call

    try:
        return found_schema(rows)
    except UsageError as error:
        raise type(error)(f"{step} at {place_of_call()}: {error}") from error


def found_schema(rows: Sequence[KnownRows]) -> RowsSchema | None:
    """The schema for the rows of all; None: it is not known of some, or there are none.

    Raises:
        UsageError: items have no columns, a column has types with none in common, or the annotation of a
            function has a type that is none, or one of several.
    """
    from minishuffle.operators.row_conversion import RowsSchema, schema_of_rows
    from minishuffle.operators.wider_type import wider_schema

    items = [item for each in rows if isinstance(each, ItemRows) for item in each.items]
    others = [_found(each) for each in rows if not isinstance(each, ItemRows)]
    if items and not any(each is None for each in others):
        others.append(RowsSchema(schema_of_rows(items), inferred=True))
    known = [each for each in others if each is not None]
    if not known or len(known) < len(others) or len({each.are_values for each in known}) > 1:
        return None
    schema = known[0].schema
    for each in known[1:]:
        schema = wider_schema(schema, each.schema, "the union")
    return RowsSchema(schema, any(each.inferred for each in known), known[0].are_values)


def _found(rows: TypedRows | ReturnedRows | ErrorRows) -> RowsSchema | None:
    from minishuffle.operators.row_conversion import RowsSchema
    from minishuffle.plan.schemas import arrow_schema

    match rows:
        case TypedRows(schema, are_values):
            return RowsSchema(schema, are_values=are_values)
        case ReturnedRows(fn, returns):
            row = returned_row(fn, returns)
            return None if row is None else RowsSchema(arrow_schema(row))
        case ErrorRows(of):
            return _found_errors(of)


def _found_errors(of: Sequence[KnownRows]) -> RowsSchema | None:
    """None also for records of no columns, such as numbers, which need none to stand in one."""
    import pyarrow as pa

    from minishuffle.operators.row_conversion import RowsSchema

    try:
        records = found_schema(of)
    except UsageError:
        return None
    if records is None:
        return None
    schema = records.schema
    record = schema.field(0).type if records.are_values else pa.struct(list(schema))
    text = pa.string()
    return RowsSchema(pa.schema({"operator": text, "error": text, "record": record}))


def all_known(each: Iterable[tuple[KnownRows, ...]]) -> tuple[KnownRows, ...]:
    """What is known of rows that come from several places; nothing if it is not known of one of them."""
    parts = list(each)
    return tuple(dict.fromkeys(rows for part in parts for rows in part)) if all(parts) else ()
