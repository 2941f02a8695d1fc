"""Steps on rows: functions of the user, keys, and the way to columns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from minishuffle.errors import UsageError
from minishuffle.plan.arguments import (
    check_callable,
    check_columns,
    check_on_error,
    checked_concurrency,
    checked_duration,
    key_columns,
)
from minishuffle.plan.exchange_steps import exchanged, fed
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.knownrows import ReturnedRows, declared_schema, known_schema, unread_annotations
from minishuffle.plan.nodes import (
    Exchange,
    Known,
    Needed,
    Node,
    ObjectSchema,
    Relation,
    Step,
    named_step,
)
from minishuffle.plan.rowtypes import Returns
from minishuffle.plan.schemas import with_schema
from minishuffle.plan.sides import checked_sides, error_records
from minishuffle.plan.unknownschemas import unknown_columns

if TYPE_CHECKING:
    from minishuffle.operators.chained import OnError
    from minishuffle.operators.row_conversion import RowsSchema
    from minishuffle.operators.unknown_columns import UnknownColumns

__all__ = [
    "FilterRowsStep",
    "FlatMapStep",
    "ForwardStep",
    "FunctionStep",
    "Key",
    "KeyRowsStep",
    "MapAsyncStep",
    "MapStep",
    "ToTableStep",
    "rows_by_key",
    "rows_schema",
]


class FunctionStep(Step):
    """Calls functions of the user for records, which may put rows aside, and go aside themselves if it
    raises. Subclasses are dataclasses with these fields."""

    given: Known
    fn: Callable[..., Any]
    own_sides: tuple[str, ...] = ()
    on_error: OnError = "fail"

    @property
    def sides(self) -> Mapping[str, Known]:
        own = {name: Known(ObjectSchema(), self.gives.time) for name in self.own_sides}
        return own if self.on_error != "side" else own | {"errors": self._errors}

    @cached_property
    def _errors(self) -> Known:
        return error_records(self.given, self.gives.time)

    @property
    def must_be_read(self) -> frozenset[str]:
        return frozenset(self.own_sides)

    def spec(self, kind: str, tags: Mapping[str, str], **parameters: Any) -> OperatorSpec:
        """An operator that calls the function."""
        own = {name: tag for name, tag in tags.items() if name in self.own_sides}
        fields = {"fn": self.fn, "on_error": self.on_error, **parameters}
        return OperatorSpec(kind, fields, tags.get("errors", ""), own)


@dataclass(frozen=True, eq=False)
class MapStep(FunctionStep):
    """One row for each row; ``given`` have their event times beside them."""

    given: Known
    fn: Callable[[Any], Any]
    own_sides: tuple[str, ...] = ()
    on_error: OnError = "fail"
    label: ClassVar[str] = "map"
    by_order: ClassVar[bool] = True
    returns: ClassVar[Returns] = "row"

    def __post_init__(self) -> None:
        check_callable(self.fn, self.label)
        check_on_error(self.on_error)
        checked_sides(self.own_sides)

    @cached_property
    def gives(self) -> Known:
        return Known(ObjectSchema(origins=(ReturnedRows(self.fn, self.returns),)), self.given.time)

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.all_columns()

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return self.spec(self.label, tags)


@dataclass(frozen=True, eq=False)
class FlatMapStep(MapStep):
    """Every item of an iterable for each row."""

    fn: Callable[[Any], Iterable[Any]]
    label: ClassVar[str] = "flat_map"
    returns: ClassVar[Returns] = "rows"


@dataclass(frozen=True, eq=False)
class MapAsyncStep(FunctionStep):
    """One awaited row for each row; ``given`` have their event times beside them.

    ``concurrency`` calls of a subtask may be under way, each for ``timeout`` at most.
    """

    given: Known
    fn: Callable[[Any], Awaitable[Any]]
    concurrency: int
    timeout: timedelta | None = None
    own_sides: tuple[str, ...] = ()
    on_error: OnError = "fail"
    label: ClassVar[str] = "map_async"

    def __post_init__(self) -> None:
        check_callable(self.fn, self.label, awaited=True)
        checked_concurrency(self.concurrency)
        self._seconds()
        check_on_error(self.on_error)
        checked_sides(self.own_sides)

    def _seconds(self) -> float | None:
        if self.timeout is None:
            return None
        return checked_duration(self.timeout, "map_async(timeout=...)", positive=True) / 1_000_000

    @cached_property
    def gives(self) -> Known:
        return Known(ObjectSchema(origins=(ReturnedRows(self.fn, "awaited"),)), self.given.time)

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.all_columns()

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return self.spec(self.label, tags, concurrency=self.concurrency, timeout=self._seconds())


@dataclass(frozen=True, eq=False)
class FilterRowsStep(FunctionStep):
    """The rows for which a function is true."""

    given: Known
    fn: Callable[[Any], Any]
    on_error: OnError = "fail"
    label: ClassVar[str] = "filter"
    by_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_callable(self.fn, self.label)
        check_on_error(self.on_error)

    @cached_property
    def gives(self) -> Known:
        return Known(ObjectSchema(self.given.columns, self.given.origins), self.given.time)

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.all_columns()

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        own = {"condition": self.fn, "on_error": self.on_error}
        return OperatorSpec("filter", own, tags.get("errors", ""))


@dataclass(frozen=True, eq=False)
class ToTableStep(Step):
    """Rows as columns of a schema; those that do not fit go by ``on_error``."""

    given: Known
    rows: RowsSchema
    on_error: OnError = "fail"
    label: ClassVar[str] = "to_table"
    by_order: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    is_auxiliary: ClassVar[bool] = True

    def __post_init__(self) -> None:
        from minishuffle.operators.python_values import check_made

        for field in self.rows.schema:
            check_made(field)
        check_on_error(self.on_error)

    @cached_property
    def gives(self) -> Known:
        return Known(self.rows.schema, self.given.time)

    @cached_property
    def sides(self) -> Mapping[str, Known]:
        return {"errors": error_records(self.given, self.given.time)} if self.on_error == "side" else {}

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.all_columns()

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {
            "schema": self.rows.schema,
            "inferred": self.rows.inferred,
            "are_values": self.rows.are_values,
            "on_error": self.on_error,
        }
        return OperatorSpec("to_table", parameters, errors=tags.get("errors", ""))


def rows_schema(plan: Relation, schema: Any) -> RowsSchema | UnknownColumns:
    """That of the columns which ``to_table(schema)`` makes of rows; what stands for it in a draft, if it is
    not known.

    Raises:
        InvalidGraph: it is left out, and nobody knows the columns of the rows.
        UsageError: it is none, or does not fit the rows.
    """
    origins = plan.gives.origins
    return with_schema(
        schema,
        lambda declared: declared_schema(declared, origins),
        lambda: known_schema(origins, "to_table") or _unknown_columns(plan),
    )


def _unknown_columns(plan: Relation) -> UnknownColumns:
    why = unread_annotations(plan.gives.origins)
    write = "define or import that class at the top of the function's module"
    if why is None:
        before = ", ".join(dict.fromkeys(named_step(feed.node) for feed in plan.feeds))
        why = f"nothing says which columns the rows of {before} have"
        write = (
            "annotate what the last function returns as a TypedDict, NamedTuple, dataclass or pydantic model"
        )
    return unknown_columns("to_table", why, f"write to_table(schema), or {write}", "to_table({})")


@dataclass(frozen=True, slots=True)
class Key:
    """What rows are keyed by: columns of dicts, or a function, and what becomes of rows for which it
    raises."""

    columns: tuple[str, ...] | None
    fn: Callable[[Any], Any] | None
    on_error: OnError = "fail"

    @classmethod
    def of(cls, given: Known, key: tuple[Any, ...], on_error: OnError) -> Key:
        """As ``key_by`` was given it, checked.

        Raises:
            UsageError: it is neither columns nor a function.
            UnknownName: the columns of the rows are known, and one of the key is not among them.
        """
        check_on_error(on_error)
        if len(key) == 1 and callable(key[0]):
            return cls(None, key[0], on_error)
        columns = key_columns(key)
        if on_error != "fail":
            raise UsageError("on_error is about a key function: leave it out when the key is in columns")
        check_columns(columns, given.columns, "key_by")
        return cls(columns, None)

    def __str__(self) -> str:
        return "a function" if self.columns is None else ", ".join(self.columns)


@dataclass(frozen=True, eq=False)
class KeyRowsStep(Step):
    """Rows with their keys, which the exchange behind goes by; ``alone``: nothing but the keys is read."""

    given: Known
    key: Key
    alone: bool = False
    label: ClassVar[str] = "key_by"
    by_order: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    is_auxiliary: ClassVar[bool] = True

    @property
    def on_error(self) -> OnError:
        return self.key.on_error

    @property
    def gives(self) -> Known:
        return self.given

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.all_columns().timed(wanted.times and not self.alone)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        if self.key.columns is not None:
            return OperatorSpec("key_by_columns", {"names": self.key.columns, "alone": self.alone})
        parameters = {"fn": self.key.fn, "on_error": self.key.on_error, "alone": self.alone}
        return OperatorSpec("key_by", parameters)


def rows_by_key(relation: Relation, key: Key, *, alone: bool = False) -> Relation:
    """Keys are computed before the exchange and travel with the rows, so that each is computed once; or
    ``alone``.

    In a step of its own for each part of a union: where one took in all of them the order of their arrival
    would say which records are late.
    """
    by_key = Exchange("hash")
    parts: list[tuple[Relation, Exchange | None]] = []
    for feed in relation.feeds:
        part, exchange = Relation(feed.node, feed.side), by_key
        if feed.exchange is not None:
            # A choice is one of its own before the keys, a kind without one is about the exchange by key.
            if feed.is_chosen:
                part = exchanged(part, feed.exchange)
            else:
                exchange = by_key.and_then(feed.exchange)
        parts.append((part.then(KeyRowsStep(feed.gives, key, alone)), exchange))
    return fed(parts)


@dataclass(frozen=True, eq=False)
class ForwardStep(Step):
    """Rows as an exchange gives them out: stands where ``forward()`` leaves them in their thread."""

    given: Known
    label: ClassVar[str] = "forward"
    by_order: ClassVar[bool] = True
    is_auxiliary: ClassVar[bool] = True

    @property
    def gives(self) -> Known:
        return self.given

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return OperatorSpec("forward")
