"""What a ``pyarrow.compute.Expression`` gives and reads, found with pyarrow on no rows before a job runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from minishuffle.errors import UsageError, WrongColumns
from minishuffle.exchange.schemas import long_types, with_types
from minishuffle.plan.arguments import check_columns

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

__all__ = ["check_expression", "columns_read", "expression_type"]

_TRIED: Final = ((1,), (2, 3, 5, 7))
"""Values of columns, over and over, on which expressions are tried. Most expressions take ones. No prime
divides another: quotients of whole numbers and of floats differ."""


def check_expression(given: Any, where: str, such_as: str) -> pc.Expression:
    """The expression itself. Raises UsageError, with one that it might be, if it is none."""
    import pyarrow.compute as pc

    if not isinstance(given, pc.Expression):
        hint = " (a function of rows is for a Stream: call to_rows() first)" if callable(given) else ""
        raise UsageError(
            f"{where} takes an expression such as {such_as}, with 'from minishuffle import col', not "
            f"{given!r:.80}{hint}"
        )
    return given


def expression_type(schema: pa.Schema, expression: pc.Expression, where: str) -> pa.DataType:
    """The type of what it gives on batches of ``schema``.

    Raises:
        UnknownName: it reads a column that is not there.
        UsageError: a function in it does not take the types of the columns, or takes more than one row.
    """
    import pyarrow as pa

    from minishuffle.operators.evaluation import missing_column
    from minishuffle.operators.expression_errors import refusal_text
    from minishuffle.operators.ordered_categories import refuse_order_in

    refuse_order_in(where, schema, [expression])
    schema = _read_part(schema, expression)
    try:
        if any(map(pa.types.is_null, schema.types)):
            return _untyped_type(schema, expression)
        kind = _bound_type(schema, expression)
        _check_one_row(schema, expression, where)
        return kind
    except WrongColumns as error:
        raise WrongColumns(f"{where}: {expression!s:.200}: {error}") from error
    except pa.ArrowException as error:
        if (missing := missing_column(error)) is not None:
            check_columns([missing], schema.names, where)
        if "MetaFunction" in str(error):
            raise _of_many_rows(expression, where) from error
        raise UsageError(f"{where}: {refusal_text([expression], error)}") from error


def _untyped_type(schema: pa.Schema, expression: pc.Expression) -> pa.DataType:
    """The type that the expression gives where columns that it reads have type null.

    Raises:
        ArrowException: it fails with every type that these columns could have.
        WrongColumns: its values depend on the type of these columns, and nothing says which it is.
    """
    import pyarrow as pa

    from minishuffle.operators.evaluation import of_untyped

    kinds = long_types(schema)
    found = of_untyped(pa.table([pa.nulls(1, kind) for kind in kinds], names=schema.names), expression).type
    # That it depends on the type may show with values of other columns alone.
    for numbers in _TRIED:
        values = [_one_value(kind, number) for kind, number in zip(kinds, cycle(numbers), strict=False)]
        with suppress(pa.ArrowException):
            kind = of_untyped(pa.table(values, names=schema.names), expression).type
            found = kind if pa.types.is_null(found) else found
    return found


def _one_value(kind: pa.DataType, number: int) -> pa.Array:
    """A value of the type; null if it has none that the number can become."""
    import pyarrow as pa

    try:
        return pa.array([number]).cast(kind)
    except pa.ArrowException:
        return pa.nulls(1, kind)


def _read_part(schema: pa.Schema, expression: pc.Expression) -> pa.Schema:
    """The columns that it reads, of hundreds perhaps, and one in any case; all if one is not there."""
    import pyarrow as pa

    read = columns_read([expression])
    if not read.issubset(schema.names):
        return schema
    return pa.schema([field for field in schema if field.name in read] or list(schema)[:1])


def _check_one_row(schema: pa.Schema, expression: pc.Expression, where: str) -> None:
    """Raises UsageError for sums and the like, and ArrowException for what is wrong with any row, a regular
    expression for one: pyarrow refuses them when it computes a row, not before."""
    import pyarrow as pa

    from minishuffle.operators.evaluation import computed, fits_no_value

    try:
        row = pa.table([pa.nulls(1, kind) for kind in long_types(schema)], names=schema.names)
        computed(row, [expression])
    except pa.ArrowException as error:
        if "non-scalar expression" in str(error):
            raise _of_many_rows(expression, where) from error
        if fits_no_value(error):
            raise


def _of_many_rows(expression: pc.Expression, where: str) -> UsageError:
    return UsageError(
        f"{where}: {expression!s:.200} is no function of one row: use aggregate() on a key, or map_batches()"
    )


def columns_read(expressions: Iterable[pc.Expression]) -> frozenset[str]:
    """The columns that they read, of which nothing need be known.

    Raises:
        UsageError: one reads a column by its number.
    """
    from minishuffle.operators.expression_parts import names_in

    return frozenset().union(*map(names_in, expressions))


def _bound_type(schema: pa.Schema, expression: pc.Expression) -> pa.DataType:
    from minishuffle.operators.evaluation import computed

    empty = with_types(schema, long_types(schema)).empty_table()
    kind: pa.DataType = computed(empty, [expression]).schema.field(0).type
    return kind
