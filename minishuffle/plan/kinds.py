"""Which operator each kind of the physical plan is, and how it is built from its parameters.

Modules of operators are imported when one of them is built: a worker loads those that its jobs have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from minishuffle.operators.base import Operator

if TYPE_CHECKING:
    from minishuffle.operators.event_time_operator import Late
    from minishuffle.operators.join_columns import JoinColumns
    from minishuffle.operators.join_results import ColumnResults

__all__ = ["KINDS", "OperatorSpec", "built"]


@dataclass(frozen=True, slots=True, eq=False)
class OperatorSpec:
    """An operator that runs, as data: its kind and the parameters that this kind is built from.

    ``id`` is that of its state, empty if it has none. ``errors`` and ``sides`` are the tags of the side
    outputs of an operator that calls functions of the user: of records for which one raised, and of the
    user's own, by name.
    """

    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    errors: str = ""
    sides: Mapping[str, str] = field(default_factory=dict)
    id: str = ""


Builder: TypeAlias = Callable[..., Operator]

KINDS: Final[dict[str, Builder]] = {}
"""What builds the operators of each kind."""


def built(spec: OperatorSpec, name: str) -> Operator:
    """The operator of a spec, under the name of its node."""
    from minishuffle.operators.chained import ForgivingOperator, RecordOperator

    operator: Any = KINDS[spec.kind](**spec.parameters)
    if isinstance(operator, RecordOperator):
        operator.put_rows_aside(spec.sides)
    if isinstance(operator, ForgivingOperator):
        operator.put_errors_aside(spec.errors)
    named: Operator = operator.named(name, spec.id)
    return named


def _kind(name: str) -> Callable[[Builder], Builder]:
    def note(builder: Builder) -> Builder:
        KINDS[name] = builder
        return builder

    return note


@_kind("sink")
def _sink(sink: Operator) -> Operator:
    return sink


@_kind("unknown_columns")
def _unknown_columns(**parameters: Any) -> Operator:
    from minishuffle.operators.unknown_columns import UnknownColumns

    return UnknownColumns(**parameters)


# --- rows -----------------------------------------------------------------------------------------


@_kind("map")
def _map(**parameters: Any) -> Operator:
    from minishuffle.operators.row_functions import MapRows

    return MapRows(**parameters)


@_kind("filter")
def _filter(**parameters: Any) -> Operator:
    from minishuffle.operators.filter import Filter

    return Filter(**parameters)


@_kind("flat_map")
def _flat_map(fn: Any, on_error: Any) -> Operator:
    from minishuffle.operators.flat_map import FlatMap

    return FlatMap(fn, on_error)


@_kind("map_async")
def _map_async(**parameters: Any) -> Operator:
    from minishuffle.operators.map_async import MapRowsAsync

    return MapRowsAsync(**parameters)


@_kind("to_table")
def _to_table(schema: Any, inferred: bool, are_values: bool, on_error: Any) -> Operator:
    from minishuffle.operators.row_conversion import RowsSchema, ToArrow

    return ToArrow(RowsSchema(schema, inferred, are_values), on_error=on_error)


@_kind("key_by")
def _key_by(**parameters: Any) -> Operator:
    from minishuffle.operators.row_functions import KeyRows

    return KeyRows(**parameters)


@_kind("key_by_columns")
def _key_by_columns(**parameters: Any) -> Operator:
    from minishuffle.operators.row_functions import KeyRowsByColumns

    return KeyRowsByColumns(**parameters)


@_kind("forward")
def _forward() -> Operator:
    from minishuffle.operators.row_functions import Forwarded

    return Forwarded()


# --- event time -----------------------------------------------------------------------------------


@_kind("event_time")
def _event_time(**parameters: Any) -> Operator:
    from minishuffle.operators.assign_event_time import AssignEventTime

    return AssignEventTime(**parameters)


@_kind("hold_times")
def _hold_times(time: Any) -> Operator:
    from minishuffle.operators.assign_event_time import HoldTimes

    return HoldTimes(time)


# --- columns --------------------------------------------------------------------------------------


@_kind("projection")
def _projection(**parameters: Any) -> Operator:
    from minishuffle.operators.projection import Projection

    return Projection(**parameters)


@_kind("explode")
def _explode(column: str) -> Operator:
    from minishuffle.operators.flat_map import FlatMap, ListColumn

    return FlatMap(ListColumn(column))


@_kind("to_rows")
def _to_rows() -> Operator:
    from minishuffle.operators.row_conversion import ToRows

    return ToRows()


@_kind("conform")
def _conform(schema: Any) -> Operator:
    from minishuffle.operators.projection import Conform

    return Conform(schema)


@_kind("check_schema")
def _check_schema(schema: Any, declared: bool) -> Operator:
    from minishuffle.operators.row_conversion import CheckSchema

    return CheckSchema(schema, declared=declared)


@_kind("map_batches")
def _map_batches(**parameters: Any) -> Operator:
    from minishuffle.operators.map_batches import MapBatches

    return MapBatches(**parameters)


# --- keys -----------------------------------------------------------------------------------------


@_kind("count_rows")
def _count_rows(emission: Any) -> Operator:
    from minishuffle.operators.reductions import KeyCount, KeyedReduction

    return KeyedReduction(KeyCount(), emission)


@_kind("fold_rows")
def _fold_rows(fn: Any, create: Any, emission: Any, on_error: Any) -> Operator:
    from minishuffle.operators.reductions import KeyedReduction, RowFold

    return KeyedReduction(RowFold(fn, create), emission, on_error)


@_kind("process")
def _process(fn: Any, **parameters: Any) -> Operator:
    from minishuffle.operators.keyed_process import ProcessRows

    return ProcessRows(fn, **parameters)


@_kind("count_columns")
def _count_columns(keys: tuple[str, ...], emission: Any) -> Operator:
    from minishuffle.operators.reductions import KeyedReduction, count_by_key

    return KeyedReduction(count_by_key(keys), emission)


@_kind("aggregate")
def _aggregate(keys: tuple[str, ...], columns: Any, time: Any, emission: Any) -> Operator:
    from minishuffle.operators.aggregates import outputs_of
    from minishuffle.operators.reductions import Aggregation, KeyedReduction

    return KeyedReduction(Aggregation(keys, outputs_of(columns, time)), emission)


@_kind("combine")
def _combine(keys: tuple[str, ...], columns: Any, prefix: str) -> Operator:
    from minishuffle.operators.combining import CombineBatches

    return CombineBatches(keys, partial(_outputs, keys, columns, None), prefix)


@_kind("combined")
def _combined(keys: tuple[str, ...], columns: Any, prefix: str) -> Operator:
    from minishuffle.operators.combining import CombinedAggregation
    from minishuffle.operators.reductions import KeyedReduction

    return KeyedReduction(CombinedAggregation(keys, _outputs(keys, columns, None), prefix), "end")


@_kind("distinct")
def _distinct(keys: tuple[str, ...]) -> Operator:
    from minishuffle.operators.distinct import Distinct

    return Distinct(keys)


@_kind("top_n")
def _top_n(**parameters: Any) -> Operator:
    from minishuffle.operators.top_n import TopN

    return TopN(**parameters)


# --- windows --------------------------------------------------------------------------------------


def _lateness(policy: Any, tag: str) -> Late:
    from minishuffle.operators.event_time_operator import Late

    return Late(policy, tag)


@_kind("windows_of_rows")
def _windows_of_rows(
    *, assigner: Any, late: Any, panes: Any, time: Any, create: Any, fn: Any, on_error: Any
) -> Operator:
    from minishuffle.operators.windows import Panes, WindowFold, WindowOperator

    values = WindowFold(assigner, fn, create, Panes(*panes))
    return WindowOperator(values, time, _lateness(*late), on_error)


@_kind("windows_of_columns")
def _windows_of_columns(
    *, assigner: Any, late: Any, panes: Any, time: Any, keys: tuple[str, ...], columns: Any
) -> Operator:
    from minishuffle.operators.windows import Panes, WindowAggregation, WindowOperator

    values = WindowAggregation(assigner, keys, _outputs(keys, columns, time), Panes(*panes))
    return WindowOperator(values, time, _lateness(*late))


def _outputs(keys: tuple[str, ...], columns: Any, time: Any) -> Any:
    """The aggregates of these columns; None: the number of rows."""
    from minishuffle.operators.aggregate_states import RowCount
    from minishuffle.operators.aggregates import outputs_of

    return [("count", keys[0], RowCount())] if columns is None else outputs_of(columns, time)


@_kind("sessions_of_rows")
def _sessions_of_rows(*, closing: Any, late: Any, time: Any, create: Any, fn: Any, on_error: Any) -> Operator:
    from minishuffle.operators.sessions import SessionFold, SessionOperator

    return SessionOperator(SessionFold(closing, fn, create), time, _lateness(*late), on_error)


@_kind("sessions_of_columns")
def _sessions_of_columns(
    *, closing: Any, late: Any, time: Any, keys: tuple[str, ...], columns: Any
) -> Operator:
    from minishuffle.operators.sessions import SessionAggregation, SessionOperator

    sessions = SessionAggregation(closing, keys, _outputs(keys, columns, time))
    return SessionOperator(sessions, time, _lateness(*late))


# --- joins ----------------------------------------------------------------------------------------


@_kind("join_rows")
def _join_rows(*, how: Any, bounds: Any, times: Any, late: Any, gives_times: bool) -> Operator:
    from minishuffle.operators.interval_join import IntervalJoin
    from minishuffle.operators.join_inputs import Bounds
    from minishuffle.operators.join_results import RowResults

    lateness = (_lateness(*late[0]), _lateness(*late[1]))
    return IntervalJoin(RowResults(how), Bounds(*bounds), times, lateness, gives_times=gives_times)


@_kind("join_columns")
def _join_columns(
    *, keys: Any, how: Any, suffix: str, schemas: Any, takes: Any, bounds: Any, late: Any, **timing: Any
) -> Operator:
    from minishuffle.operators.interval_join import IntervalJoin
    from minishuffle.operators.join_columns import JoinColumns
    from minishuffle.operators.join_inputs import Bounds

    results = _results(JoinColumns(keys[0], keys[1], how, suffix), schemas, takes)
    lateness = (_lateness(*late[0]), _lateness(*late[1]))
    return IntervalJoin(results, Bounds(*bounds), lateness=lateness, **timing)


@_kind("asof_join")
def _asof_join(
    *, keys: Any, suffix: str, tolerance: int | None, schemas: Any, takes: Any, late: Any, **timing: Any
) -> Operator:
    from minishuffle.operators.asof_join import AsOfColumns, AsOfJoin

    results = _results(AsOfColumns(keys[0], keys[1], suffix), schemas, takes)
    return AsOfJoin(results, tolerance, lateness=(_lateness(*late[0]), _lateness(*late[1])), **timing)


def _results(columns: JoinColumns, schemas: Any, takes: Any) -> ColumnResults:
    """The results of a join to whose inputs the columns ``takes`` come; they are named after all."""
    from minishuffle.operators.join_results import ColumnResults

    columns.fix(schemas[0].names, schemas[1].names)
    return ColumnResults(columns, schemas).narrowed(_sets(takes))


def _sets(takes: Mapping[int, Any]) -> dict[int, frozenset[str] | None]:
    return {input: None if names is None else frozenset(names) for input, names in takes.items()}


@_kind("look_up_rows")
def _look_up_rows(keys: Any, is_left: bool, names: Any) -> Operator:
    from minishuffle.operators.broadcast_join import BroadcastColumns, BroadcastJoin, SmallRows

    return BroadcastJoin(SmallRows(BroadcastColumns(*keys, is_left=is_left), names))


@_kind("look_up_columns")
def _look_up_columns(*, keys: Any, is_left: bool, suffix: str, schemas: Any, takes: Any) -> Operator:
    from minishuffle.operators.broadcast_join import SMALL, BroadcastColumns, BroadcastJoin, SmallColumns

    columns = BroadcastColumns(*keys, is_left=is_left, suffix=suffix)
    columns.fix(schemas[0].names, schemas[1].names)
    return BroadcastJoin(SmallColumns(columns, schemas[1]).narrowed(_sets(takes)[SMALL]))
