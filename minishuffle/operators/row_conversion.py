"""Between rows and Arrow, and the check of a declared schema.

Dict rows are taken by name, tuples and lists by position (which needs a declared schema).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa

from minishuffle.errors import MissingColumn, UsageError, WrongColumns
from minishuffle.exchange.batch import Batch
from minishuffle.exchange.schemas import with_innermost, without_dictionary
from minishuffle.exchange.sizes import pieces
from minishuffle.operators.base import Emit
from minishuffle.operators.chained import ChainedOperator, ForgivingOperator, OnError, preview
from minishuffle.operators.misplaced_nulls import is_strict, misplaced
from minishuffle.operators.python_values import MISFITS, array_of, type_of
from minishuffle.operators.row_objects import as_dicts, shallow
from minishuffle.operators.wider_type import wider

__all__ = [
    "CheckSchema",
    "RowsSchema",
    "RowsToArrow",
    "ToArrow",
    "ToRows",
    "rows_of",
    "schema_of_rows",
    "schema_with_rows",
]


def rows_of(batch: Batch) -> list[Any]:
    """The rows of any batch; an Arrow batch's as dicts.

    Raises:
        UsageError: two columns have one name, or a timestamp has nanoseconds that Python's lacks.
    """
    payload = batch.payload
    if isinstance(payload, list):
        return payload
    names = payload.schema.names
    if len(set(names)) < len(names):
        twice = ", ".join(names)
        raise WrongColumns(f"dict rows cannot hold two columns of one name: rename some of {twice}")
    if not names:
        return [{} for _ in range(payload.num_rows)]
    columns = [_python_values(name, payload.column(i)) for i, name in enumerate(names)]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _python_values(name: str, column: pa.Array) -> list[Any]:
    try:
        held = with_innermost(column.type, _in_microseconds, castable=False)
        values: list[Any] = (column if held == column.type else column.cast(held)).to_pylist()
    except (ValueError, OverflowError, NotImplementedError) as error:
        if (moment := _beyond_calendar(column)) is not None:
            what = "a window ends" if name == "window_end" else f"column {name!r} has a time"
            raise UsageError(
                f"{what} at {moment}, and the datetimes of Python are in the years 1 to 9999: leave such "
                f"rows out with filter(), or the column with drop({name!r})"
            ) from error
        raise UsageError(
            f"column {name!r} of type {column.type} does not fit Python values ({error}): "
            "cast it first, a timestamp to microseconds for example"
        ) from error
    return values


def _beyond_calendar(column: pa.Array) -> str | None:
    """The first time that no datetime or date of Python holds, if there is one."""
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        for scalar in column:
            try:
                scalar.as_py()
            except OverflowError:
                return str(scalar.cast(pa.string()))
            except ValueError:
                continue  # of its nanoseconds
    return None


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """Microseconds for nanoseconds, of which pyarrow makes pandas' values if it can, and which it cuts off if
    it cannot."""
    if pa.types.is_dictionary(kind):
        held = with_innermost(kind.value_type, _in_microseconds)
        return kind if held == kind.value_type else held
    if getattr(kind, "unit", "") != "ns":
        return kind
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")


class RowsToArrow:
    """Turns lists of rows into record batches of one schema.

    Args:
        inferred: the schema was not declared, but found in rows: truth values beside numbers are 1 and 0.
    """

    def __init__(self, schema: pa.Schema, *, inferred: bool = False) -> None:
        self.schema = schema
        self._inferred = inferred

    def convert(self, rows: list[Any]) -> pa.RecordBatch:
        """Rows (at least one, all dicts or all tuples or lists) as one batch.

        Raises:
            UsageError: the rows do not fit the schema.
        """
        columns = self._columns(rows)
        arrays = [
            _array(field, values, inferred=self._inferred)
            for field, values in zip(self.schema, columns.values(), strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _columns(self, rows: list[Any]) -> dict[str, Sequence[Any]]:
        kinds = set(map(type, rows))
        if all(issubclass(kind, dict) for kind in kinds):
            return self._columns_by_name(rows)
        if not any(issubclass(kind, tuple | list) for kind in kinds):
            named = [shallow(row) for row in rows]
            if all(row is not None for row in named):
                return self._columns_by_name(named)
        _require_positions(rows)
        return _columns_by_position(rows, self.schema.names)

    def _columns_by_name(self, rows: list[Any]) -> dict[str, Sequence[Any]]:
        names = self.schema.names
        if not set(names).issuperset(set().union(*rows)):
            raise self._extra_column(rows)
        return {name: [row.get(name) for row in rows] for name in names}

    def _extra_column(self, rows: list[Any]) -> UsageError:
        known = self.schema.names
        row, name = next((row, name) for row in rows for name in row if name not in known)
        return UsageError(
            f"column {name!r} of the row {preview(row)} is not in the schema ({', '.join(known)}): "
            "correct that of to_table(schema), or map the rows to it"
        )


def _require_positions(rows: list[Any]) -> None:
    """Raises UsageError unless all rows are tuples or lists. It shows a row without columns, else the first
    one by name where others are by position, or the other way round."""
    if all(issubclass(kind, tuple | list) for kind in set(map(type, rows))):
        return
    ways = list(map(_way, rows))
    odd = None if None in ways else next((way for way in ways if way != ways[0]), ways[0])
    raise UsageError(
        "Arrow takes rows that are all dicts, or all tuples or lists, and one is "
        f"{preview(rows[ways.index(odd)])}: map the rows first"
    )


def _way(row: Any) -> str | None:
    """How a row gives its columns; None: it has none."""
    if isinstance(row, tuple | list):
        return "position"
    return None if shallow(row) is None else "name"


def _columns_by_position(rows: list[Any], names: list[str]) -> dict[str, Sequence[Any]]:
    if set(map(len, rows)) != {len(names)}:
        row = next(row for row in rows if len(row) != len(names))
        raise UsageError(
            f"a row has {len(row)} values and the schema {len(names)} columns ({', '.join(names)}): "
            f"{preview(row)}"
        )
    return dict(zip(names, zip(*rows, strict=True), strict=True))


_NUMBERS = frozenset((int, float, Decimal))


def _as_numbers(values: Sequence[Any]) -> Sequence[Any]:
    """True and False as 1 and 0, which they equal, where they stand beside numbers."""
    kinds = set(map(type, values))
    if bool not in kinds or not kinds & _NUMBERS:
        return values
    return [int(value) if type(value) is bool else value for value in values]


def _infer(name: str, values: Sequence[Any]) -> pa.DataType:
    try:
        return type_of(_as_numbers(values))
    except MISFITS as error:
        raise UsageError(
            f"no Arrow type fits the values of column {name!r} ({error}): "
            "declare one with to_table(schema), or map the rows"
        ) from error


def schema_of_rows(rows: list[Any]) -> pa.Schema:
    """The schema that holds all rows (at least one) whole.

    Raises:
        UsageError: there is none, or they have no names.
    """
    schema = schema_with_rows(None, rows)
    RowsToArrow(schema, inferred=True).convert(rows)
    return schema


def schema_with_rows(schema: pa.Schema | None, rows: list[Any]) -> pa.Schema:
    """``schema`` with the columns that only the rows have, and with types that hold their values too, as far
    as one does.

    Raises:
        UsageError: a column's type and that of the rows have none in common; rows have no names.
    """
    known = pa.schema([]) if schema is None else schema
    rows = [row if isinstance(row, dict | tuple | list) else as_dicts(row) for row in rows]
    names = list(dict.fromkeys([*known.names, *_names_of(rows)]))
    fields = []
    for name in names:
        values = _as_numbers([row.get(name) for row in rows])
        if name in known.names:
            fields.append(_wider_field(known.field(name), values))
        else:
            fields.append(pa.field(name, _infer(name, values)))
    return pa.schema(fields)


def _names_of(rows: list[Any]) -> list[str]:
    if not all(isinstance(row, dict) for row in rows):
        _require_positions(rows)
        raise WrongColumns(
            f"rows like {preview(rows[0])} have no column names: declare them with to_table(schema), "
            "or map the rows to dicts"
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names or not all(isinstance(name, str) for name in names):
        raise WrongColumns(f"rows like {preview(rows[0])} do not name their columns with strings")
    return names


def _wider_field(field: pa.Field, values: Sequence[Any]) -> pa.Field:
    """The field with a type that holds these values too."""
    try:
        _array(field, values, inferred=True)
        return field
    except UsageError:
        _check_zones(field, values)
    found = _infer(field.name, values)
    kind = wider(field.type, found)
    if kind is None:
        types = " and ".join(sorted(map(str, (field.type, found))))
        raise UsageError(
            f"column {field.name!r} has values of the types {types}, which have none in common that is "
            "exact: declare one with to_table(schema), or map the rows"
        )
    return field.with_type(kind)


def _array(field: pa.Field, values: Sequence[Any], *, inferred: bool) -> pa.Array:
    if inferred:
        is_number = not pa.types.is_boolean(field.type) and pa.types.is_primitive(field.type)
        values = _as_numbers([*values, 0])[:-1] if is_number and bool in set(map(type, values)) else values
        _check_zones(field, values)
    if pa.types.is_time(field.type) and any(isinstance(each, time) and each.tzinfo for each in values):
        raise UsageError(
            f"column {field.name!r} has times of day with a time zone, which no type holds: map them to "
            "datetimes or texts"
        )
    try:
        array = _made(field.type, values)
    except MISFITS as error:
        where = "which other rows have; declare one with to_table(schema)" if inferred else "as declared"
        value = _misfit(field.type, values)
        if isinstance(value, str) and pa.types.is_temporal(field.type):
            where += "; a text is no time: datetime.fromisoformat(text) makes one"
        raise UsageError(
            f"column {field.name!r}: the value {preview(value)} does not fit the type {field.type} ({where})"
        ) from error
    _check_nulls(field, array)
    return array


def _made(kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    try:
        return array_of(kind, values)
    except MISFITS:
        if not pa.types.is_nested(kind):
            raise
        return array_of(kind, list(map(as_dicts, values)))


def _check_zones(field: pa.Field, values: Sequence[Any]) -> None:
    """Raises UsageError for datetimes with a time zone beside others without: pyarrow would make either of
    both, whichever came first."""
    if pa.types.is_timestamp(field.type) or pa.types.is_null(field.type):
        aware = {value.tzinfo is not None for value in values if isinstance(value, datetime)}
        if pa.types.is_timestamp(field.type):
            aware.add(field.type.tz is not None)
        if len(aware) > 1:
            raise UsageError(
                f"column {field.name!r} has datetimes with a time zone and without: map them to one kind, or "
                "declare a type with to_table(schema)"
            )


def _misfit(kind: pa.DataType, values: Sequence[Any]) -> Any:
    """The first value that does not convert by itself; all of them if it is their mixture."""
    for value in values:
        try:
            array_of(kind, [value])
        except MISFITS:
            return value
    return values


def _check_nulls(field: pa.Field, array: pa.Array) -> None:
    place = misplaced(array, field)
    if place is not None:
        raise UsageError(f"column {place!r}: the value None does not fit a column that is not nullable")


class ToRows(ChainedOperator):
    """Emits Arrow batches as lists of dicts, one per row; lists pass as they are."""

    name = "to_rows"

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if len(batch.payload):
            emit(Batch(rows_of(batch), None, batch.times))


@dataclass(frozen=True, slots=True)
class RowsSchema:
    """The schema for rows. ``inferred``: from these rows, in which truth values may stand beside numbers.
    ``are_values``: the rows are the values of its only column."""

    schema: pa.Schema
    inferred: bool = False
    are_values: bool = False


class ToArrow(ForgivingOperator):
    """Emits lists of rows as Arrow batches.

    Args:
        on_error: what becomes of a row that does not fit.

    Raises:
        UsageError: a row or value does not fit; names column and value.
        WrongColumns: no row so far had the columns of the schema.
    """

    name = "to_table"
    only_reads = True

    def __init__(
        self,
        rows: RowsSchema,
        *,
        on_error: OnError = "fail",
    ) -> None:
        super().__init__(on_error)
        self._rows = rows
        self._converter = RowsToArrow(rows.schema, inferred=rows.inferred)
        self._fitted = False
        """Some rows did."""

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        for piece in pieces(batch):
            if piece.payload:
                self._take(piece, emit)

    def _take(self, records: Batch, emit: Emit) -> None:
        """Unless a row that does not fit fails the task, it is found by halves, each converted by itself."""
        rows = records.payload
        try:
            table = self._converted(rows)
        except UsageError as error:
            if self.on_error == "fail":
                of_all = not self._fitted and all(map(self._has_other_columns, rows))
                found = WrongColumns(str(error)) if of_all else error
                if (misfit := self._misfit(rows)) is not None:
                    self.note_failure(found, misfit)
                raise found from error.__cause__
            if len(rows) == 1:
                self.drop(error, records.payload[0], records.times)
            else:
                middle = len(rows) // 2
                self._take(records.slice(0, middle), emit)
                self._take(records.slice(middle, len(rows)), emit)
            return
        self._fitted = True
        emit(Batch(table, None, records.times))

    def _has_other_columns(self, row: Any) -> bool:
        names = self._rows.schema.names
        if self._rows.are_values:
            return False
        if isinstance(row, dict):
            return not set(names).issuperset(row)
        return isinstance(row, tuple | list) and len(row) != len(names)

    def _converted(self, rows: list[Any]) -> pa.RecordBatch:
        return self._converter.convert([(row,) for row in rows] if self._rows.are_values else rows)

    def _misfit(self, rows: list[Any]) -> Any:
        """The first row that is not converted by itself; None: there is none."""
        while rows:
            middle = len(rows) // 2
            try:
                self._converted(rows[:middle] or rows)
            except UsageError:
                if not middle:
                    return rows[0]
                rows = rows[:middle]
            else:
                rows = rows[middle:] if middle else []
        return None


def _decoded(kind: pa.DataType) -> pa.DataType:
    return with_innermost(kind, without_dictionary)


class CheckSchema(ChainedOperator):
    """Passes on batches of columns that fit a schema, in its order; dictionaries may be decoded.

    Args:
        declared: the schema is; else a function gave it, which was called when the job was made.

    Raises:
        WrongColumns: a column is missing, is not in the schema, or has another type.
        UsageError: a column has nulls and is declared without.
    """

    name = "schema"

    def __init__(self, schema: pa.Schema, *, declared: bool = True) -> None:
        self.schema = schema
        self._kind, self._given, self._change = "declared schema", "declared", "correct"
        if not declared:
            self._kind = "schema of what the function gave when the job was made"
            self._given, self._change = "what the function gave when the job was made", "declare"
        self._is_strict = any(map(is_strict, schema))

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        payload = batch.payload
        if self._is_strict or not payload.schema.equals(self.schema, check_metadata=True):
            batch = Batch(self._checked(payload), None, batch.times)
        emit(batch)

    def _checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        extra = [name for name in batch.schema.names if name not in self.schema.names]
        if extra:
            raise WrongColumns(
                f"column {extra[0]!r} is not in the {self._kind} ({', '.join(self.schema.names)}): "
                f"{self._change} the schema, or drop the column first"
            )
        arrays, fields = [], []
        for field in self.schema:
            index = batch.schema.get_field_index(field.name)
            if index < 0:
                raise MissingColumn(
                    f"no column {field.name!r} (or several), and one is {self._given}: the batch has "
                    f"{', '.join(batch.schema.names)}: {self._change} the schema, or give the column"
                )
            array = batch.column(index)
            if pa.types.is_null(array.type):  # of values that were all None so far
                array = pa.nulls(len(array), field.type)
            if array.type != field.type and _decoded(array.type) == _decoded(field.type):
                field = field.with_type(array.type)  # Exchanges decode dictionaries.
            if array.type != field.type:
                raise WrongColumns(
                    f"column {field.name!r} has the type {array.type}, but {field.type} is {self._given}: "
                    f"cast it first, or {self._change} the schema"
                )
            _check_nulls(field, array)
            arrays.append(array)
            fields.append(field)
        schema = pa.schema(fields, self.schema.metadata)
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
