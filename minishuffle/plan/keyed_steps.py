"""Steps on the records of a key: values that records bring forward, first and best rows, and functions with
state of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.plan.arguments import (
    check_callable,
    check_columns,
    check_key_types,
    check_on_error,
    checked_duration,
    key_columns,
)
from minishuffle.plan.column_steps import picked
from minishuffle.plan.kinds import OperatorSpec
from minishuffle.plan.knownrows import ReturnedRows
from minishuffle.plan.nodes import Known, Needed, Node, ObjectSchema, Step
from minishuffle.plan.row_steps import FunctionStep
from minishuffle.plan.schemas import aggregated_schema, check_result
from minishuffle.plan.sides import checked_sides

if TYPE_CHECKING:
    from minishuffle.operators.chained import Emission, OnError

__all__ = [
    "AggregateStep",
    "Aggregates",
    "CountColumnsStep",
    "CountRowsStep",
    "DistinctStep",
    "FoldStep",
    "ProcessStep",
    "TopNStep",
    "check_aggregates",
    "column_keys",
    "emission_of",
]

Aggregates = Mapping[str, tuple[str, str]]
"""Input column and function of each aggregate, by its name."""


def emission_of(emit: Emission | None, *, bounded: bool) -> Emission:
    """When values by key go out; by default ``"end"`` if the data have one, else ``"batch"``.

    Raises:
        UsageError: there is no such emission.
        InvalidGraph: the end would never come.
    """
    if emit is None:
        return "end" if bounded else "batch"
    if emit not in ("each", "batch", "end"):
        raise UsageError(f"emit is {emit!r}: write 'each', 'batch' or 'end'")
    if emit == "end" and not bounded:
        raise InvalidGraph(
            "emit='end' on a source without end would never emit: write 'batch' or 'each', or bound it"
        )
    return emit


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CountRowsStep(Step):
    """The number of rows of each key."""

    given: Known
    emission: Emission
    label: ClassVar[str] = "count"
    has_state: ClassVar[bool] = True

    @property
    def by_order(self) -> bool:
        return self.emission != "batch"

    @property
    def gives(self) -> Known:
        return Known(ObjectSchema())

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return OperatorSpec("count_rows", {"emission": self.emission})


@dataclass(frozen=True, eq=False)
class FoldStep(Step):
    """One Python value for each key: ``create`` makes it (None: the first row is it), and ``add`` brings it
    forward."""

    given: Known
    create: Callable[[], Any] | None
    add: Callable[[Any, Any], Any]
    emission: Emission
    on_error: OnError = "fail"
    has_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.create is not None:
            check_callable(self.create, self.label)
        check_callable(self.add, self.label)
        check_on_error(self.on_error)

    @property
    def label(self) -> str:
        return "reduce" if self.create is None else "fold"

    @property
    def by_order(self) -> bool:
        return self.emission != "batch"

    @property
    def gives(self) -> Known:
        return Known(ObjectSchema())

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {
            "fn": self.add,
            "create": self.create,
            "emission": self.emission,
            "on_error": self.on_error,
        }
        return OperatorSpec("fold_rows", parameters)


@dataclass(frozen=True, eq=False)
class ProcessStep(FunctionStep):
    """What functions with state and timers for each key make; ``fn`` is called for each record."""

    given: Known
    fn: Callable[[Any, Any], Iterable[Any] | None]
    on_timer: Callable[[Any, Any], Iterable[Any] | None] | None = None
    ttl: timedelta | None = None
    own_sides: tuple[str, ...] = ()
    on_error: OnError = "fail"
    label: ClassVar[str] = "process"
    has_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_callable(self.fn, "process")
        if self.on_timer is not None:
            check_callable(self.on_timer, "process")
        self._seconds()
        check_on_error(self.on_error)
        checked_sides(self.own_sides)

    def _seconds(self) -> float | None:
        if self.ttl is None:
            return None
        return checked_duration(self.ttl, "process(ttl=...)", positive=True) / 1_000_000

    @property
    def by_order(self) -> bool:
        return self.on_timer is None and self.ttl is None and self.given.time is None

    @cached_property
    def gives(self) -> Known:
        functions = [self.fn] if self.on_timer is None else [self.fn, self.on_timer]
        schema = ObjectSchema(origins=tuple(ReturnedRows(fn, "rows") for fn in functions))
        return Known(schema, self.given.held().time)

    def needs(self, wanted: Needed, input: int) -> Needed:
        time = self.given.time
        return Needed(None, times=time is not None and time.is_beside)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return self.spec(
            "process",
            tags,
            on_timer=self.on_timer,
            time=self.given.time,
            ttl=self._seconds(),
            gives_times=node.needed.times,
        )


def column_keys(given: Known, columns: tuple[Any, ...]) -> tuple[str, ...]:
    """The key columns of a table, as ``key_by`` was given them, checked.

    Raises:
        UsageError: they are none, or of a type that no key has.
        UnknownName: one is no column.
    """
    if len(columns) == 1 and callable(columns[0]):
        raise UsageError(
            "key_by of a Table takes columns: make one with with_columns(), or call to_rows() first"
        )
    keys = key_columns(columns)
    check_columns(keys, given.columns, "key_by")
    check_key_types(given.schema, keys)
    return keys


# --- columns --------------------------------------------------------------------------------------


def check_aggregates(columns: Aggregates, given: Known) -> None:
    """Raises UsageError unless these are aggregates, and UnknownName unless their columns are there."""
    if not columns:
        raise UsageError("aggregate takes at least one column, such as total=('amount', 'sum')")
    for name, wanted in columns.items():
        is_pair = isinstance(wanted, tuple | list) and len(wanted) == 2
        if not is_pair or not all(isinstance(part, str) for part in wanted):
            raise UsageError(f"aggregate: {name}={wanted!r:.80}: write {name}=('column', 'sum')")
    from minishuffle.operators.aggregates import Function

    for name, (column, function) in columns.items():
        is_turned = column in get_args(Function) and function in (given.columns or ())
        way = f": the column comes first: write {name}=({function!r}, {column!r})" if is_turned else ""
        check_columns([column], given.columns, "aggregate", way)


@dataclass(frozen=True, eq=False)
class AggregateStep(Step):
    """Columns of each key's rows."""

    given: Known
    keys: tuple[str, ...]
    columns: Aggregates
    emission: Emission
    label: ClassVar[str] = "aggregate"
    has_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        from minishuffle.operators.aggregates import outputs_of

        check_aggregates(self.columns, self.given)
        outputs_of(self.columns, self.given.time)  # type: ignore[arg-type]
        self.gives  # noqa: B018
        check_result([*self.keys, *self.columns])

    @cached_property
    def gives(self) -> Known:
        at_end = self.emission == "end"
        return Known(aggregated_schema(self.given.arrow, self.keys, self.columns, at_end=at_end))

    @property
    def _goes_by_time(self) -> bool:
        from minishuffle.operators.aggregates import BY_TIME

        return any(function in BY_TIME for _, function in self.columns.values())

    def needs(self, wanted: Needed, input: int) -> Needed:
        needed = wanted.only(*self.keys, *(column for column, _ in self.columns.values()))
        if not self._goes_by_time:
            return needed.timed(False)
        time = self.given.time
        assert time is not None
        return needed.also(time.column).timed(time.is_beside)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {
            "keys": self.keys,
            "columns": dict(self.columns),
            "time": self.given.time if self._goes_by_time else None,
            "emission": self.emission,
        }
        return OperatorSpec("aggregate", parameters)


@dataclass(frozen=True, eq=False)
class CountColumnsStep(Step):
    """The number of rows of each key, in the column ``count``."""

    given: Known
    keys: tuple[str, ...]
    emission: Emission
    label: ClassVar[str] = "count"
    has_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.gives  # noqa: B018
        check_result([*self.keys, "count"])

    @cached_property
    def gives(self) -> Known:
        columns = {"count": (self.keys[0], "count")}
        at_end = self.emission == "end"
        return Known(aggregated_schema(self.given.arrow, self.keys, columns, at_end=at_end))

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.only(*self.keys).timed(False)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return OperatorSpec("count_columns", {"keys": self.keys, "emission": self.emission})


@dataclass(frozen=True, eq=False)
class DistinctStep(Step):
    """Each key once."""

    given: Known
    keys: tuple[str, ...]
    label: ClassVar[str] = "distinct"
    has_state: ClassVar[bool] = True

    @cached_property
    def gives(self) -> Known:
        return Known(aggregated_schema(self.given.arrow, self.keys, {}))

    def needs(self, wanted: Needed, input: int) -> Needed:
        return wanted.only(*self.keys).timed(False)

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        return OperatorSpec("distinct", {"keys": self.keys})


@dataclass(frozen=True, eq=False)
class TopNStep(Step):
    """The ``n`` rows of each key with the greatest values in a column, or the smallest."""

    given: Known
    keys: tuple[str, ...]
    n: int
    by: str
    descending: bool
    bounded: bool
    label: ClassVar[str] = "top_n"
    has_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        from minishuffle.operators.ordered_categories import refuse_order
        from minishuffle.operators.row_order import check_order

        if type(self.n) is not int or self.n < 1:
            raise UsageError(f"top_n takes a whole number from 1 on, not {self.n!r}")
        check_columns([self.by], self.given.columns, "top_n")
        if not self.bounded:
            raise InvalidGraph("top_n on a source without end would never emit: bound the source")
        ordered = self.given.arrow.field(self.by)
        check_order("top_n", self.by, ordered.type)
        refuse_order("top_n", ordered)

    @cached_property
    def gives(self) -> Known:
        others = [name for name in self.given.arrow.names if name not in self.keys]
        return Known(picked(self.given.arrow, {name: name for name in (*self.keys, *others)}))

    def operator(self, node: Node, tags: Mapping[str, str]) -> OperatorSpec:
        parameters = {"keys": self.keys, "n": self.n, "by": self.by, "descending": self.descending}
        return OperatorSpec("top_n", parameters)
