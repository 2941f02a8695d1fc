"""What columns a step gives: as declared, by those that it takes, or by one call of the user's function
without rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from minishuffle.errors import InvalidGraph, UnknownName, UsageError, described, did_you_mean
from minishuffle.exchange.schemas import require_plain
from minishuffle.plan.rowtypes import column_type, fields_of, named_type, no_type

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.operators.unknown_columns import UnknownColumns

__all__ = [
    "StepColumns",
    "aggregated_schema",
    "check_result",
    "arrow_schema",
    "called_schema",
    "checked_types",
    "schema_message",
    "with_schema",
]

Made = TypeVar("Made")
_NO_FIELD: Final = re.compile('Field "(.*)" does not exist in schema')


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The columns that a function or a source of the user gives, for which each of its batches is checked.

    Args:
        schema: what stands for it in a draft, if it is not known.
        declared: the user did; else a call of the function showed it.
        keeps_time: event times may come beside these columns.
    """

    schema: pa.Schema | UnknownColumns
    declared: bool = True
    keeps_time: bool = False


def with_schema(given: Any, declared: Callable[[pa.Schema], Made], left_out: Callable[[], Made]) -> Made:
    """What a method makes of its argument ``schema=``: of the schema that it declares, or without one.

    Args:
        given: the argument; None: it is left out.
        declared: called with its schema, if there is one.
        left_out: called if there is none.

    Raises:
        UsageError: see :func:`arrow_schema`.
    """
    return left_out() if given is None else declared(arrow_schema(given))


def arrow_schema(given: Any) -> pa.Schema:
    """A ``pyarrow.Schema`` from itself, from a map of column name to type, or from a class with fields: a
    TypedDict, NamedTuple, dataclass or pydantic model.

    Raises:
        UsageError: it is none of them, or a type is unknown or one of several.
    """
    import pyarrow as pa

    if isinstance(given, pa.Schema):
        twice = next((name for name in given.names if given.names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"schema: there are two columns {twice!r}: give each its own name")
        return checked_types(given)
    types = given if isinstance(given, Mapping) else fields_of(given)
    if not types:
        raise UsageError(
            "schema takes a pyarrow.Schema, a dict of name to type, or a TypedDict, NamedTuple, dataclass or "
            f"pydantic model, not {given!r:.80} ({type(given).__name__})"
        )
    return checked_types(pa.schema([_field(name, kind) for name, kind in types.items()]))


def _field(name: Any, kind: Any) -> pa.Field:
    import pyarrow as pa

    try:
        if isinstance(kind, str):
            kind = named_type(kind)
        return pa.field(name, kind if isinstance(kind, pa.DataType) else column_type(str(name), kind))
    except (TypeError, ValueError, pa.ArrowException):
        raise no_type(name, kind) from None  # What Arrow says of it has another text.


def checked_types(schema: pa.Schema) -> pa.Schema:
    """The schema itself.

    Raises:
        UsageError: a column holds runs or a union.
    """
    for field in schema:
        require_plain(field)
    return schema


def schema_message(schema: pa.Schema) -> bytes:
    """The schema as an Arrow IPC message, without its metadata."""
    message: bytes = schema.remove_metadata().serialize().to_pybytes()
    return message


def called_schema(
    step: str, call: Callable[[], Any], shown: str, columns: Sequence[str] = ()
) -> pa.Schema | UnknownColumns:
    """The schema of the batch that a user's function gives in the one ``call`` of it while a plan is built.

    Args:
        step: the method that was given the function, for errors.
        shown: the call in words, for errors.
        columns: those of the batch that it is called with.

    Returns:
        What stands for it in a draft, if it is not known.

    Raises:
        InvalidGraph: the function raises, gives no batch, or one with a column of nulls alone, the type of
            whose values is then not known.
        UnknownName: the function reads a column that is none of ``columns``.
        UsageError: two columns have one name, or one holds runs or a union.
    """
    import pyarrow as pa

    from minishuffle.operators.pandas_index import without_unnamed_index
    from minishuffle.plan.unknownschemas import place_of_call, unknown_columns

    write, form = "write schema= with the columns that it gives", "schema={}"
    try:
        given = call()
    except Exception as error:
        _refuse_typo(error, f"{step} at {place_of_call()}: {shown} raised {described(error)}", columns)
        return unknown_columns(step, f"{shown} raised {described(error)}", write, form)
    if not isinstance(given, pa.RecordBatch | pa.Table):
        if given is not None:  # No schema would help.
            what = f"{shown} gave a {type(given).__name__}: return a pyarrow RecordBatch or Table"
            raise InvalidGraph(f"{step} at {place_of_call()}: {what}")
        return unknown_columns(step, f"{shown} gave None and no batch", write, form)
    schema = arrow_schema(without_unnamed_index(given).schema.remove_metadata())
    untyped = next((field for field in schema if _has_null_type(field.type)), None)
    if untyped is not None:
        why = f"{shown} gave the column {untyped.name!r} in the type {untyped.type}"
        return unknown_columns(step, why, write, form)
    return schema


def _refuse_typo(error: Exception, told: str, columns: Sequence[str]) -> None:
    """Raises UnknownName if a function failed for a column that its batch does not have."""
    if not isinstance(error, KeyError) or not columns:
        return
    said = str(error.args[0]) if error.args else ""
    read = _NO_FIELD.fullmatch(said)
    name = read[1] if read else said  # pandas says the name alone, and so does a dict of the function's own.
    hint = did_you_mean(name, columns)
    if name not in columns and (read or hint):
        raise UnknownName(f"{told}: {hint}the batch has {', '.join(columns)}") from error


def _has_null_type(kind: pa.DataType) -> bool:
    """Whether it, or one in it, is that of nulls alone."""
    import pyarrow as pa

    from minishuffle.exchange.schemas import with_innermost

    found: list[pa.DataType] = []

    def seen(inner: pa.DataType) -> pa.DataType:
        found.append(inner)
        return inner

    with_innermost(kind, seen)
    return any(map(pa.types.is_null, found))


def check_result(names: Sequence[str]) -> None:
    """Raises UsageError if two columns of the result have one name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            f"the result would have two columns {twice!r}, its columns being {', '.join(names)}: choose "
            "another name for one; a key column gets it by rename() before key_by()"
        )


def aggregated_schema(
    schema: pa.Schema,
    keys: tuple[str, ...],
    aggregates: Mapping[str, tuple[str, str]],
    *,
    windows_in: str = "",
    at_end: bool = True,
) -> pa.Schema:
    """Schema of aggregates (name: (column, function)) by key; also by windows that are shown ``windows_in`` a
    time zone ("": there are none).

    ``at_end``: the keys come from the state, where dictionary-encoded columns are plain.

    Raises:
        UsageError: a column's type cannot be aggregated so.
    """
    import pyarrow as pa

    from minishuffle.exchange.schemas import without_dictionary
    from minishuffle.operators.aggregate_states import result_type
    from minishuffle.operators.ordered_categories import refuse_order

    fields = []
    for name in keys:
        kind = schema.field(name).type
        fields.append(pa.field(name, without_dictionary(kind) if at_end else kind))
    if windows_in:
        moment = pa.timestamp("us", windows_in)
        fields += [pa.field("window_start", moment), pa.field("window_end", moment)]
    for name, (column, function) in aggregates.items():
        if function in ("min", "max"):
            refuse_order(function, schema.field(column))
        fields.append(pa.field(name, result_type(function, column, schema.field(column).type)))
    return pa.schema(fields)
