"""Steps on columns that need no key: chosen, computed and unnested columns, filters, functions of batches,
and the checks of what these give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from minishuffle.errors import UsageError
from minishuffle.exchange.schemas import batch_without_rows, with_innermost, with_types, without_dictionary
from minishuffle.operators.event_time import EVENT_TIME
from minishuffle.plan.arguments import check_callable, check_columns, check_distinct, check_on_error
from minishuffle.plan.expressions import check_expression, columns_read, expression_type
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.knownrows import TypedRows
from minishuffle.plan.nodes import Known, Needed, Node, ObjectSchema, Relation, Step
from minishuffle.plan.schemas import StepColumns, called_schema, with_schema

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

    from minishuffle.operators.chained import OnError
    from minishuffle.operators.unknown_columns import UnknownColumns

__all__ = [
    "CheckStep",
    "ConformStep",
    "DropStep",
    "ExplodeStep",
    "FilterStep",
    "MapBatchesStep",
    "RenameStep",
    "SelectStep",
    "ToRowsStep",
    "UnknownStep",
    "WithColumnsStep",
    "conformed",
    "mapped_columns",
    "picked",
]


def picked(schema: pa.Schema, columns: Mapping[str, str]) -> pa.Schema:
    """The schema of these columns, each by its new name."""
    import pyarrow as pa

    return pa.schema([schema.field(old).with_name(new) for new, old in columns.items()])


def _require_own_names(given: Known, method: str) -> None:
    """Raises UsageError if two columns have one name."""
    from minishuffle.operators.wider_type import require_own_names

    require_own_names(given.arrow, f"the table of {method}()")


@dataclass(frozen=True, eq=False)
class ProjectionStep(Step):
    """Other columns of each row."""

    given: Known
    by_order: ClassVar[bool] = True
    follows: ClassVar[bool] = True

    def projection(self, node: Node, **parameters: Any) -> OperatorSpec:
        """The operator; see ``relational.Projection``."""
        return OperatorSpec("projection", {"label": self.label, **parameters})


@dataclass(frozen=True, eq=False)
class SelectStep(ProjectionStep):
    """These columns only, in this order."""

    names: tuple[str, ...]
    label: ClassVar[str] = "select"

    def __post_init__(self) -> None:
        check_columns(self.names, self.given.columns, "select")

    @cached_property
    def gives(self) -> Known:
        return replace(self.given, schema=picked(self.given.arrow, {name: name for name in self.names}))

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.only(*self.names)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return self.projection(node, outputs={name: name for name in self.names})


@dataclass(frozen=True, eq=False)
class DropStep(ProjectionStep):
    """All columns but these."""

    names: tuple[str, ...]
    label: ClassVar[str] = "drop"

    def __post_init__(self) -> None:
        check_columns(self.names, self.given.columns, "drop")
        _require_own_names(self.given, "drop")
        if not self.gives.columns:
            raise UsageError("drop would leave no column: keep one")

    @cached_property
    def gives(self) -> Known:
        left = {name: name for name in self.given.arrow.names if name not in self.names}
        return replace(self.given, schema=picked(self.given.arrow, left))

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.also(*self.names)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return self.projection(node, outputs=None, dropped=self.names)


@dataclass(frozen=True, eq=False)
class RenameStep(ProjectionStep):
    """Columns under other names, by their old ones."""

    names: Mapping[str, str]
    label: ClassVar[str] = "rename"

    def __post_init__(self) -> None:
        names = self.names
        if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
            raise UsageError(f"rename takes a dict of old name to new name, not {names!r:.80}")
        _require_own_names(self.given, "rename")
        given = self.given.arrow.names
        check_columns(list(names), given, "rename")
        renamed = [names.get(name, name) for name in given]
        if len(set(renamed)) < len(given):
            raise UsageError(f"rename would give two columns one name: {', '.join(renamed)}")

    @cached_property
    def _old(self) -> dict[str, str]:
        return {self.names.get(name, name): name for name in self.given.arrow.names}

    @cached_property
    def gives(self) -> Known:
        time = self.given.time
        if time is not None and time.column is not None and time.column in self.names:
            time = replace(time, column=self.names[time.column])
        return Known(picked(self.given.arrow, self._old), time)

    def needs(self, wanted: Needed, input: int) -> Needed:
        if wanted.columns is None:
            return wanted
        old = {new: name for name, new in self.names.items()}
        return Needed(
            frozenset(old.get(name, name) for name in wanted.columns) | self.names.keys(), wanted.times
        )

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return self.projection(node, outputs=None, renamed=self.names)


@dataclass(frozen=True, eq=False)
class WithColumnsStep(ProjectionStep):
    """Columns that expressions give, in place of others of their name or after all."""

    columns: Mapping[str, Any]
    label: ClassVar[str] = "with_columns"

    def __post_init__(self) -> None:
        if not self.columns:
            raise UsageError("with_columns takes at least one column, such as total=col('amount') * 2")
        for name, expression in self.columns.items():
            check_expression(
                expression,
                f"with_columns({name}=...)",
                "col('amount') * 2 or pc.scalar(1) of pyarrow.compute",
            )
        _require_own_names(self.given, "with_columns")
        self._read  # noqa: B018 - an expression may read a column by its number
        self.gives  # noqa: B018

    @cached_property
    def _read(self) -> frozenset[str]:
        return columns_read(self.columns.values())

    @cached_property
    def gives(self) -> Known:
        import pyarrow as pa

        fields = {each.name: each for each in self.given.arrow}
        for name, expression in self.columns.items():
            kind = expression_type(self.given.arrow, expression, f"with_columns({name}=...)")
            fields[name] = pa.field(name, kind)
        return replace(self.given, schema=pa.schema(fields.values()))

    def needs(self, wanted: Needed, input: int) -> Needed:
        if wanted.columns is None:
            return wanted
        return Needed(wanted.columns - self.columns.keys() | self._read, wanted.times)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        schema = self.gives.arrow
        untyped = {
            name: schema.field(name).type for name, each in self.columns.items() if self._reads_null(each)
        }
        return self.projection(node, outputs=None, added=dict(self.columns), untyped=untyped)

    def _reads_null(self, expression: pc.Expression) -> bool:
        """Whether it reads a column of type null."""
        kinds = (self.given.arrow.field(name).type for name in columns_read([expression]))
        return any(str(kind) == "null" for kind in kinds)


@dataclass(frozen=True, eq=False)
class FilterStep(Step):
    """The rows for which an expression is true."""

    given: Known
    condition: Any
    label: ClassVar[str] = "filter"
    by_order: ClassVar[bool] = True
    follows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_expression(self.condition, "filter", "col('amount') > 5")
        kind = expression_type(self.given.arrow, self.condition, "filter")
        if str(kind) != "bool":
            raise UsageError(
                f"filter: {self.condition!s:.200} gives {kind}: write a condition, such as col('amount') > 5"
            )
        self._read  # noqa: B018

    @cached_property
    def _read(self) -> frozenset[str]:
        return columns_read([self.condition])

    @property
    def gives(self) -> Known:
        return self.given

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.also(*self._read)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return OperatorSpec("filter", {"condition": self.condition})


@dataclass(frozen=True, eq=False)
class ExplodeStep(Step):
    """Each row once for each value of the list in a column."""

    given: Known
    column: str
    label: ClassVar[str] = "explode"
    by_order: ClassVar[bool] = True
    follows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        from minishuffle.operators.flat_map import is_list

        if not isinstance(self.column, str):
            raise UsageError(f"explode takes the name of a column, not {self.column!r:.80}")
        check_columns([self.column], self.given.columns, "explode")
        kind = self.given.arrow.field(self.column).type
        if not is_list(kind):
            raise UsageError(f"explode: column {self.column!r} has the type {kind}, which is no list")

    @cached_property
    def gives(self) -> Known:
        schema = self.given.arrow
        lists = schema.field(self.column)
        values = lists.with_type(lists.type.value_type).with_nullable(True)
        return replace(self.given, schema=schema.set(schema.get_field_index(self.column), values))

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.also(self.column)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return OperatorSpec("explode", {"column": self.column})


@dataclass(frozen=True, eq=False)
class ToRowsStep(Step):
    """Columns as dicts."""

    given: Known
    label: ClassVar[str] = "to_rows"
    by_order: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    is_auxiliary: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_distinct(self.given.columns, "to_rows")

    @cached_property
    def gives(self) -> Known:
        schema = ObjectSchema(self.given.columns, (TypedRows(self.given.arrow),))
        return replace(self.given, schema=schema)

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.all_columns()

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return OperatorSpec("to_rows")


@dataclass(frozen=True, eq=False)
class ConformStep(Step):
    """The rows of one part of a union in the types of all."""

    given: Known
    schema: Any
    label: ClassVar[str] = "union"
    by_order: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    is_auxiliary: ClassVar[bool] = True

    @property
    def gives(self) -> Known:
        return replace(self.given, schema=self.schema)

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.all_columns()

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return OperatorSpec("conform", {"schema": self.schema})


@dataclass(frozen=True, eq=False)
class CheckStep(Step):
    """Batches that are checked against the schema of what gave them; ``declared``: the user has said it, else
    it was found by a call of a function."""

    given: Known
    declared: bool = True
    label: ClassVar[str] = "schema"
    by_order: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    is_auxiliary: ClassVar[bool] = True

    @property
    def gives(self) -> Known:
        return self.given

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.all_columns()

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return OperatorSpec("check_schema", {"schema": self.given.arrow, "declared": self.declared})


@dataclass(frozen=True, eq=False)
class UnknownStep(Step):
    """Stands in a draft where a schema is not known."""

    unknown: UnknownColumns
    label: ClassVar[str] = "unknown columns"
    follows: ClassVar[bool] = True
    is_auxiliary: ClassVar[bool] = True

    @property
    def gives(self) -> Known:
        return Known(ObjectSchema())

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        unknown = self.unknown
        parameters = {"step": unknown.step, "place": unknown.place, "form": unknown.form}
        return OperatorSpec("unknown_columns", parameters)


@dataclass(frozen=True, eq=False)
class MapBatchesStep(Step):
    """What a function makes of batches of the columns ``columns`` (None: all), of at most ``batch_rows``
    rows: ``found``."""

    given: Known
    fn: Callable[[Any], Any]
    columns: tuple[str, ...] | None = None
    batch_rows: int | None = None
    on_error: OnError = "fail"
    found: Known = field(default=Known(ObjectSchema()), kw_only=True)
    label: ClassVar[str] = "map_batches"

    def __post_init__(self) -> None:
        check_callable(self.fn, "map_batches")
        if self.columns is not None:
            shown = [name for name in self.columns if name != EVENT_TIME]
            check_columns(shown, self.given.columns, "map_batches")
            if self.shows_times:
                self.given.needed_time("map_batches has no event time to give")
        rows = self.batch_rows
        if rows is not None and (type(rows) is not int or rows < 1):
            raise UsageError(f"batch_rows is {rows!r}: give a whole number from 1 on")
        check_on_error(self.on_error)

    @property
    def shows_times(self) -> bool:
        """Whether the function sees event times in a column."""
        return self.columns is not None and EVENT_TIME in self.columns

    @property
    def gives(self) -> Known:
        return self.found

    def needs(self, wanted: Needed, input: int) -> Needed:
        needed = Needed(None) if self.columns is None else Needed(frozenset(self.columns) - {EVENT_TIME})
        return needed.timed(self.shows_times)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {
            "fn": self.fn,
            "on_error": self.on_error,
            "columns": self.columns,
            "rows": self.batch_rows,
            "gives_times": self.shows_times and node.needed.times,
        }
        return OperatorSpec("map_batches", parameters)


def conformed(plans: Sequence[Relation]) -> list[Relation]:
    """Tables of a union in the types of all, by casts of those that differ.

    Raises:
        UsageError: a column has types with none in common.
    """
    from minishuffle.operators.wider_type import wider_schema

    first = plans[0].gives.arrow
    if all(plan.gives.arrow.equals(first) for plan in plans):
        return list(plans)
    common: pa.Schema = None
    for plan in plans:
        common = wider_schema(common, plan.gives.arrow, "the union")
    common = with_types(common, [with_innermost(kind, without_dictionary) for kind in common.types])
    return [
        plan if plan.gives.arrow.equals(common) else plan.then(ConformStep(plan.gives, common))
        for plan in plans
    ]


def mapped_columns(
    given: pa.Schema,
    fn: Callable[[pa.RecordBatch], Any],
    schema: pa.Schema | Mapping[str, Any] | str | None,
    taken: Sequence[str] | None,
) -> StepColumns:
    """What ``fn`` gives of the columns ``taken`` (None: all), without the column of event times."""
    import pyarrow as pa

    if taken is not None:
        beside = pa.field(EVENT_TIME, pa.int64())
        given = pa.schema([beside if name == EVENT_TIME else given.field(name) for name in taken])
    if schema == "same":
        return StepColumns(_without_event_time(given), keeps_time=True)
    return with_schema(schema, _declared_columns, lambda: _shown_columns(given, fn))


def _declared_columns(schema: pa.Schema) -> StepColumns:
    if EVENT_TIME in schema.names:
        raise UsageError(
            "map_batches(schema=...) names EVENT_TIME, which comes beside the columns of the schema: "
            "leave it out"
        )
    return StepColumns(schema, keeps_time=True)


def _shown_columns(given: pa.Schema, fn: Callable[[pa.RecordBatch], Any]) -> StepColumns:
    """Those of what ``fn`` gives for no rows."""
    from minishuffle.operators.unknown_columns import UnknownColumns
    from minishuffle.plan.unknownschemas import unknown_columns

    if hasattr(fn, "open"):
        why = "its function has open(), and is not called while the job is made"
        write = "write schema= with the columns that it gives, or schema='same'"
        return StepColumns(unknown_columns("map_batches", why, write, "schema={}"), declared=False)
    shown = "its function, called with a batch without rows,"
    found = called_schema("map_batches", lambda: fn(batch_without_rows(given)), shown, given.names)
    if isinstance(found, UnknownColumns):
        return StepColumns(found, declared=False)
    return StepColumns(_without_event_time(found), declared=False, keeps_time=EVENT_TIME in found.names)


def _without_event_time(schema: pa.Schema) -> pa.Schema:
    place = schema.get_field_index(EVENT_TIME)
    return schema if place < 0 else schema.remove(place)
