"""A table whose rows are grouped by key columns: what can be computed for each key, and for each window of
it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from minishuffle.dataflow.arguments import check_columns
from minishuffle.dataflow.bridges import refuse_mixture, refuse_row_method
from minishuffle.dataflow.drafts import draft_in
from minishuffle.dataflow.nodes import Exchange, Feed, Node
from minishuffle.dataflow.operators.base import Operator
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.dataflow.pruning import reads_only
from minishuffle.dataflow.schemas import aggregated_schema
from minishuffle.dataflow.stream_base import Columns, Feeds, SideOutput, checked_emission
from minishuffle.dataflow.table import Table
from minishuffle.dataflow.windowed import Windowable, Windowing
from minishuffle.errors import InvalidGraph, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.dataflow.operators.chained import Emission
    from minishuffle.dataflow.operators.columns import Outputs
    from minishuffle.operators.event_time_operator import LatePolicy
    from minishuffle.operators.join_inputs import How

__all__ = ["KeyedTable", "WindowedTable"]

Aggregates = Mapping[str, tuple[str, str]]
"""Input column and function of each aggregate, by its name."""


class KeyedTable(Windowable["WindowedTable"]):
    """What :meth:`Table.key_by` gives; every method leads back to a :class:`Table`.

    ``emit`` says when a key's row goes out: ``"each"`` after every row, ``"batch"`` once for each key of a
    batch, ``"end"`` once for each key when the data end. By default ``"end"`` if they do end, else
    ``"batch"``.
    """

    __slots__ = ("_keys", "_table")

    def __init__(self, table: Table, keys: tuple[str, ...]) -> None:
        self._table = table
        self._keys = keys

    def __repr__(self) -> str:
        return f"<KeyedTable by {', '.join(self._keys)} of {self._table!r}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            refuse_row_method(self, name)

    def count(self, emit: Emission | None = None) -> Table:
        """The number of rows of each key, in the column ``count``."""
        from minishuffle.operators.reductions import KeyedReduction, count_by_key

        when = checked_emission(emit, self._table._feeds)
        schema = self._aggregated({"count": (self._keys[0], "count")}, at_end=when == "end")
        return self._computed(KeyedReduction(count_by_key(self._keys), when), schema, self._keys)

    def aggregate(self, emit: Emission | None = None, **columns: tuple[str, str]) -> Table:
        """Columns of each key's rows: ``total=("amount", "sum"), n=("amount", "count")``.

        The functions are sum, count, min, max, mean, std (of a sample), count_distinct, first and last; nulls
        count for nothing, but in first and last, where a null is a value. These go by event time; of rows of
        one time that comes first which has the smallest values in the columns of which the first or last is
        wanted, in their order, nulls before all others. Texts are ordered by code points.

        Raises:
            InvalidGraph: first or last without event time.
            UsageError: no columns, an unknown function, or two columns of one name.
            UnknownName: there is no such column.
        """
        from minishuffle.dataflow.operators.aggregates import BY_TIME, outputs_of
        from minishuffle.operators.reductions import Aggregation, KeyedReduction

        self._check_aggregates(columns)
        when = checked_emission(emit, self._table._feeds)
        outputs = outputs_of(columns, self._table._time)  # type: ignore[arg-type]
        operator = KeyedReduction(Aggregation(self._keys, outputs), when)
        schema = self._aggregated(columns, at_end=when == "end")
        used = (*self._keys, *(column for column, _ in columns.values()))
        if any(function in BY_TIME for _, function in columns.values()):
            used = (*used, *_column_of(self._table._time))
        return self._computed(operator, schema, used)

    def distinct(self) -> Table:
        """Each key once, as soon as its first row comes: the key columns."""
        from minishuffle.dataflow.operators.distinct import Distinct

        schema = self._aggregated({}, at_end=True)
        return self._computed(Distinct(self._keys), schema, self._keys)

    def top_n(self, n: int, by: str, *, descending: bool = True) -> Table:
        """The ``n`` rows of each key with the greatest values in the column ``by``, or the smallest, when the
        data end: the key columns, then the others.

        A null is smaller than all values; NaN comes after all numbers in either direction. Rows of one value
        are taken by the smallest values of the other columns, from the first on.

        Raises:
            InvalidGraph: the data have no end.
            UnknownName: there is no column ``by``.
            UsageError: ``by`` has values without an order, such as lists.
        """
        from minishuffle.dataflow.operators.categories import refuse_order
        from minishuffle.dataflow.operators.order import check_order
        from minishuffle.dataflow.operators.topn import TopN

        if type(n) is not int or n < 1:
            raise UsageError(f"top_n takes a whole number from 1 on, not {n!r}")
        schema = self._table._schema
        check_columns([by], schema.names, "top_n")
        if not self._is_bounded:
            raise InvalidGraph("top_n on a source without end would never emit: bound the source")
        check_order("top_n", by, schema.field(by).type)
        refuse_order("top_n", schema.field(by))
        others = [name for name in schema.names if name not in self._keys]
        picked = self._table._picked({name: name for name in (*self._keys, *others)})
        shown = KeyedTable(self._table._untimed_beside(), self._keys)
        return shown._computed(TopN(self._keys, n, by, descending), picked)

    def _unkeyed(self) -> Table:
        return self._table

    def _windowed(self, windowing: Windowing) -> WindowedTable:
        return WindowedTable(self, windowing)

    def join(
        self,
        other: KeyedTable,
        how: How = "inner",
        *,
        within: timedelta | None = None,
        before: timedelta | None = None,
        after: timedelta | None = None,
        late: LatePolicy = "drop",
        suffix: str = "_right",
    ) -> Table:
        """Pairs of rows of one key whose event times are at most ``within`` apart, by default equal.

        The columns are the keys (by this one's names), this table's others and the other's, with ``suffix``
        after a name that this one has. ``"left"``, ``"right"`` and ``"full"`` also give rows of that side, or
        of both, without a partner, with nulls; ``"semi"`` and ``"anti"`` give the rows of this table that
        have a partner, or have none. A key that is null has none. The event time is the greater one of both
        rows. If neither table has event time, and both have an end, all rows of a key match.

        A row is late if it is not after its own side's watermark: it is counted (``records_late``) and
        dropped, or with ``"side"`` put into :attr:`Table.late` or :attr:`Table.late_right`.

        Args:
            before: how far the other's row may be before this one's, instead of ``within``.
            after: how far it may be after it.

        Raises:
            InvalidGraph: a table has no event time, and one has no end.
            UsageError: another argument is wrong, or the keys have different numbers of columns.
        """

        from minishuffle.dataflow.joined_tables import join_tables

        draft: Table | None = draft_in([other])
        if draft is not None:
            return draft
        if not isinstance(other, KeyedTable):
            refuse_mixture("join", "KeyedTable", other)
        tables, keys = (self._table, other._table), (self._keys, other._keys)
        return join_tables(tables, keys, how, (within, before, after), late, suffix)

    def asof_join(
        self,
        other: KeyedTable,
        *,
        tolerance: timedelta | None = None,
        late: LatePolicy = "drop",
        suffix: str = "_right",
    ) -> Table:
        """Each row with the latest one of the other table that has its key and is not after it by event time,
        at most ``tolerance`` before it; with nulls if there is none.

        The columns are those of :meth:`join`, and the event time is that of this table's rows. A row goes out
        once the other side's watermark has reached it. Of the other table the latest row of each key is held,
        for ever without a ``tolerance``. Of its rows of one key and time that is taken which has the smallest
        values in the other columns, nulls before all others. Rows are late as in :meth:`join`.

        Raises:
            InvalidGraph: a table has no event time.
            UsageError: another argument is wrong, or the keys have different numbers of columns.
        """
        from minishuffle.dataflow.joined_tables import join_as_of

        draft: Table | None = draft_in([other])
        if draft is not None:
            return draft
        if not isinstance(other, KeyedTable):
            refuse_mixture("asof_join", "KeyedTable", other)
        return join_as_of((self._table, other._table), (self._keys, other._keys), tolerance, late, suffix)

    def _check_aggregates(self, columns: Aggregates) -> None:
        if not columns:
            raise UsageError("aggregate takes at least one column, such as total=('amount', 'sum')")
        for name, wanted in columns.items():
            is_pair = isinstance(wanted, tuple | list) and len(wanted) == 2
            if not is_pair or not all(isinstance(part, str) for part in wanted):
                raise UsageError(f"aggregate: {name}={wanted!r:.80}: write {name}=('column', 'sum')")
        check_columns([column for column, _ in columns.values()], self._table._schema.names, "aggregate")

    @property
    def _is_bounded(self) -> bool:
        return all(feed.node.bounded for feed in self._table._feeds)

    def _aggregated(self, columns: Aggregates, *, windows: bool = False, at_end: bool = True) -> pa.Schema:
        return aggregated_schema(self._table._schema, self._keys, columns, windows=windows, at_end=at_end)

    def _computed(
        self,
        operator: Operator,
        schema: pa.Schema,
        used: Columns = None,
        *,
        label: str | None = None,
        time: EventTime | None = None,
        sides: Mapping[str, SideOutput] | None = None,
    ) -> Table:
        """What the operator gives of each key's rows, which meet in one subtask. ``used`` are the columns
        that it reads; None: all."""
        feeds, reads = by_key(self._table, self._keys), reads_only(*used) if used else None
        node = Node(operator.name, feeds, operators=(operator,), reads=reads)
        node = node.named(label) if label else node
        return Table((Feed(node),), schema, None, time, sides)


def by_key(table: Table, keys: tuple[str, ...], input: int = 0) -> Feeds:
    """The table's rows, those of a key in one subtask.

    Raises:
        InvalidGraph: their subtasks are chosen already.
    """
    feeds = table._open_feeds("key_by")
    if any(feed.is_chosen for feed in feeds):
        raise InvalidGraph("key_by itself chooses the subtasks: leave out the choice before it")
    return tuple(feed.exchanged(Exchange("hash", keys=keys), input) for feed in feeds)


class WindowedTable:
    """What :meth:`KeyedTable.window` and :meth:`~KeyedTable.session_window` give; every method leads back
    to a :class:`Table`.

    A window's row goes out once, when the watermark has reached its end, or is ``allowed_lateness`` past it:
    the key columns, ``window_start``, ``window_end`` (the first microsecond after it) and the values. Its
    event time is the window's last microsecond, so that windows may be cut into windows again. In
    :attr:`Table.panes` rows also have the columns ``pane`` and ``final``.
    """

    __slots__ = ("_keyed", "_windowing")

    def __init__(self, keyed: KeyedTable, windowing: Windowing) -> None:
        self._keyed = keyed
        self._windowing = windowing

    def __repr__(self) -> str:
        return f"<WindowedTable of {self._windowing} over {self._keyed!r}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            refuse_row_method(self, name)

    def count(self) -> Table:
        """The number of rows of each key and window, in the column ``count``."""
        from minishuffle.dataflow.operators.columns import RowCount

        column = self._keyed._keys[0]
        return self._computed("window_count", {"count": (column, "count")}, [("count", column, RowCount())])

    def aggregate(self, **columns: tuple[str, str]) -> Table:
        """Columns of each key's and window's rows, as :meth:`KeyedTable.aggregate` makes them.

        Raises:
            UsageError: no columns, an unknown function, or two columns of one name.
            UnknownName: there is no such column.
        """
        from minishuffle.dataflow.operators.aggregates import outputs_of

        self._keyed._check_aggregates(columns)
        outputs = outputs_of(columns, self._keyed._table._time)  # type: ignore[arg-type]
        return self._computed("window_aggregate", columns, outputs)

    def _computed(self, label: str, columns: Aggregates, outputs: Outputs) -> Table:
        from minishuffle.operators.windows import with_panes

        keyed = self._keyed
        schema = keyed._aggregated(columns, windows=True)
        panes = SideOutput.made("panes", with_panes(schema))
        operator, sides = self._windowing.on_columns(keyed._table, keyed._keys, outputs, panes)
        return keyed._computed(
            operator,
            schema,
            (*keyed._keys, *_column_of(self._windowing.time), *(column for column, _ in columns.values())),
            label=label,
            time=EventTime(column="window_end", shift=-1),
            sides=sides,
        )


def _column_of(time: EventTime | None) -> tuple[str, ...]:
    """The column with the event time, if one has it."""
    return () if time is None or time.column is None else (time.column,)
