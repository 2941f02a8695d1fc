"""Two tables become one: the joins behind :meth:`KeyedTable.join` and :meth:`Table.broadcast_join`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

from minishuffle.dataflow.arguments import checked_duration
from minishuffle.dataflow.bridges import refuse_mixture
from minishuffle.dataflow.drafts import draft_in
from minishuffle.dataflow.joined import Apart, On, interval_of, look_up_feeds, look_up_node
from minishuffle.dataflow.keyed_table import by_key
from minishuffle.dataflow.nodes import Feed, Node, Reads
from minishuffle.dataflow.operators.times import BESIDE, EventTime
from minishuffle.dataflow.table import Table
from minishuffle.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.operators.event_time_operator import LatePolicy
    from minishuffle.operators.join_columns import JoinColumns
    from minishuffle.operators.join_inputs import How

__all__ = ["join_as_of", "join_tables", "look_up"]

Tables: TypeAlias = tuple[Table, Table]
"""The left and the right one."""
Keys: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]


def join_tables(
    tables: Tables,
    keys: Keys,
    how: How,
    apart: tuple[Apart, Apart, Apart],
    late: LatePolicy,
    suffix: str,
) -> Table:
    """See :meth:`KeyedTable.join`; ``apart`` are ``within``, ``before`` and ``after``."""
    from minishuffle.operators.interval_join import IntervalJoin
    from minishuffle.operators.join_columns import JoinColumns
    from minishuffle.operators.join_results import ColumnResults

    left, right = tables
    bounds, times, put, sides = interval_of(tables, keys, how, apart, late)
    columns = JoinColumns(*keys, how, _checked_suffix(suffix))
    operator = IntervalJoin(ColumnResults(columns, (left._schema, right._schema)), bounds, times, put)
    schema, reads = _described(columns, tables, times)
    feeds = (*by_key(left, keys[0]), *by_key(right, keys[1], 1))
    node = Node(operator.name, feeds, operators=(operator,), reads=reads)
    # Times that are keys of each other are equal: a function of batches is shown the one that stands there.
    own = left._time_column, right._time_column
    both = [one for one, other in zip(*keys, strict=True) if (one, other) == own]
    time = None if times[0].is_none else EventTime(column=both[0]) if both else BESIDE
    return Table((Feed(node),), schema, None, time, sides)


def join_as_of(
    tables: Tables, keys: Keys, tolerance: timedelta | None, late: LatePolicy, suffix: str
) -> Table:
    """See :meth:`KeyedTable.asof_join`."""
    from minishuffle.operators.asof_join import AsOfColumns, AsOfJoin

    left, right = tables
    micros = None if tolerance is None else checked_duration(tolerance, "asof_join(tolerance=...)")
    _, times, put, sides = interval_of(tables, keys, "left", (timedelta(0), None, None), late, "asof_join")
    columns = AsOfColumns(*keys, _checked_suffix(suffix))
    operator = AsOfJoin(columns, micros, times, (left._schema, right._schema), put)
    schema, reads = _described(columns, tables, times)
    feeds = (*by_key(left, keys[0]), *by_key(right, keys[1], 1))
    node = Node(operator.name, feeds, operators=(operator,), reads=_all_of_the_right(reads))
    return Table((Feed(node),), schema, None, BESIDE, sides)


def _all_of_the_right(reads: Reads) -> Reads:
    """Which of several right rows is taken goes by all of their columns."""
    return lambda wanted, input: None if input else reads(wanted, input)


def _described(
    columns: JoinColumns, tables: Tables, times: Sequence[EventTime] = ()
) -> tuple[pa.Schema, Reads]:
    """The schema of the result, and what is read for it."""
    left, right = (table._schema for table in tables)
    columns.check_keys(left, right)
    return columns.result(left, right), columns.fix(left.names, right.names, times)


def _checked_suffix(suffix: str) -> str:
    if not isinstance(suffix, str) or not suffix:
        raise UsageError(f"suffix is {suffix!r:.80}: give a text such as '_right'")
    return suffix


def look_up(big: Table, small: Table, on: On, how: Literal["inner", "left"], suffix: str) -> Table:
    """Each row of ``big`` with the rows of ``small`` whose columns ``on`` are equal; see
    :meth:`Table.broadcast_join`."""
    from minishuffle.operators.broadcast_join import BroadcastColumns, BroadcastJoin, SmallColumns

    draft: Table | None = draft_in([small])
    if draft is not None:
        return draft
    if not isinstance(small, Table):
        refuse_mixture("broadcast_join", "Table", small)
    small = small._untimed_beside()
    pairs, feeds = look_up_feeds(big, small, on, how)
    columns = BroadcastColumns(
        tuple(pairs), tuple(pairs.values()), is_left=how == "left", suffix=_checked_suffix(suffix)
    )
    operator = BroadcastJoin(SmallColumns(columns, small._schema))
    schema, reads = _described(columns, (big, small))
    node = look_up_node(operator, feeds, reads)
    return Table((Feed(node),), schema, None, big._time)
