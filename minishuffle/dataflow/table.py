"""Records as Arrow columns: sources and transformations that run without Python per row.

A :class:`Table` never changes: every method gives a new one, and what several tables share runs once. It is
not a collection: its batches flow through the job, with an end or without. Expressions are
``pyarrow.compute.Expression``: ``pc.field("amount") * 2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from minishuffle.dataflow.arguments import (
    arrow_schema,
    check_callable,
    check_columns,
    check_distinct,
    check_key_types,
    check_time_type,
    checked_name,
    key_columns,
    schema_message,
    spark_schema,
)
from minishuffle.dataflow.bridges import refuse_mixture, refuse_row_method
from minishuffle.dataflow.drafts import draft_in
from minishuffle.dataflow.expressions import check_expression, columns_read, expression_type
from minishuffle.dataflow.knownrows import TypedRows
from minishuffle.dataflow.nodes import Boundary, Feed, Node, Reads
from minishuffle.dataflow.operators.times import EVENT_TIME, EventTime
from minishuffle.dataflow.pruning import reads_also, reads_only
from minishuffle.dataflow.schemas import batch_without_rows, called_schema
from minishuffle.dataflow.stream import Stream
from minishuffle.dataflow.stream_sinks import StreamSinks
from minishuffle.dataflow.table_sources import TableSources
from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.exchange.schemas import with_innermost, with_types, without_dictionary

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

    from minishuffle.dataflow.keyed_table import KeyedTable
    from minishuffle.dataflow.operators.base import Operator
    from minishuffle.dataflow.operators.chained import OnError
    from minishuffle.dataflow.operators.unknowncolumns import UnknownColumns

__all__ = ["Table"]


class Table(TableSources, StreamSinks):
    """Columns on their way through a job; see the module's docstring.

    Made by the class methods and by :meth:`Stream.to_table`, never by the constructor.
    """

    __slots__ = ()
    _schema: pa.Schema
    _time_hint = "event_time('column') before key_by, and again after map_batches() that leaves it out"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            refuse_row_method(self, name)

    def to_rows(self) -> Stream[dict[str, Any]]:
        """The same records as dicts, for Python functions. Event time stays."""
        from minishuffle.dataflow.operators.convert import ToRows

        check_distinct(self._columns, "to_rows")
        known = TypedRows(self._schema)
        feeds = self._beside("to_rows", ToRows(), rows=(known,))._feeds
        return Stream(feeds, None, self._columns, self._time)

    @property
    def errors(self) -> Stream[Any]:
        """The rows that did not fit the columns of the ``to_table`` before this, with ``on_error="side"``:
        dicts with ``operator``, ``error`` and ``record``, as :attr:`Stream.errors` has them.

        Raises:
            InvalidGraph: there is no such step directly before this.
        """
        aside = self._side("errors")
        return Stream(aside._feeds, None, None, aside._time)

    # --- columns ---------------------------------------------------------------------------------

    def select(self, *names: str | Sequence[str]) -> Table:
        """These columns only, in this order. Event time stays, also without its column.

        Raises:
            UnknownName: one is not among the columns.
        """
        from minishuffle.dataflow.operators.relational import Projection

        wanted = key_columns(names, "select")
        check_columns(wanted, self._schema.names, "select")
        timed = self if self._time is None or self._time.column in wanted else self._timed_beside()
        outputs = {name: name for name in wanted}
        operator = Projection("select", outputs)
        schema = self._picked({name: name for name in wanted})
        return timed._step(operator, schema, timed._time, True, reads_only(*wanted))

    def drop(self, *names: str | Sequence[str]) -> Table:
        """All columns but these. Event time stays, also without its column."""
        from minishuffle.dataflow.operators.relational import Projection

        dropped = key_columns(names, "drop")
        check_columns(dropped, self._schema.names, "drop")
        self._require_own_names("drop")
        left = [name for name in self._schema.names if name not in dropped]
        if not left:
            raise UsageError("drop would leave no column: keep one")
        timed = self._timed_beside() if self._time_column in dropped else self
        operator = Projection("drop", None, dropped=dropped)
        schema = self._picked({name: name for name in left})
        return timed._step(operator, schema, timed._time, True, reads_also(*dropped))

    def rename(self, names: Mapping[str, str]) -> Table:
        """Columns under other names: ``rename({"old": "new"})``. Their order stays, and so does event
        time."""
        from minishuffle.dataflow.operators.relational import Projection

        if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
            raise UsageError(f"rename takes a dict of old name to new name, not {names!r:.80}")
        self._require_own_names("rename")
        check_columns(list(names), self._schema.names, "rename")
        old = {names.get(name, name): name for name in self._schema.names}
        if len(old) < len(self._schema.names):
            renamed = [names.get(name, name) for name in self._schema.names]
            raise UsageError(f"rename would give two columns one name: {', '.join(renamed)}")
        time = self._time
        if time is not None and time.column is not None and time.column in names:
            time = replace(time, column=names[time.column])
        operator = Projection("rename", None, renamed=names)
        return self._step(operator, self._picked(old), time, True, _reads_renamed(names))

    def with_columns(self, **columns: pc.Expression) -> Table:
        """Columns that expressions give, in place of those of the same name or after the others.

        All read the columns as they were before: ``with_columns(total=pc.field("price") * pc.field("n"))``.
        Event time stays as it was, also if its column is replaced: call :meth:`event_time` for another one.
        Whole numbers divided by ``/`` give whole numbers (cast one to float64 for others), and there is no
        ``%``: write ``a - a / b * b``. A result of ``+ - * /`` that does not fit into its
        type is an error; functions such as ``pc.add`` wrap around, unlike ``pc.add_checked``.

        Raises:
            UnknownName: an expression reads another column.
            UsageError: an argument is no expression, or its functions do not take these types.
        """
        from minishuffle.dataflow.operators.relational import Projection

        if not columns:
            raise UsageError("with_columns takes at least one column, such as total=pc.field('amount') * 2")
        added: dict[str, Any] = {
            name: check_expression(expression, f"with_columns({name}=...)")
            for name, expression in columns.items()
        }
        self._require_own_names("with_columns")
        timed = self._timed_beside() if self._time_column in added else self
        reads = _reads_added(added, columns_read(added.values()))
        schema = self._with(added)
        untyped = {name: schema.field(name).type for name in added if self._reads_null(added[name])}
        operator = Projection("with_columns", None, added, untyped=untyped)
        return timed._step(operator, schema, timed._time, True, reads)

    def _reads_null(self, expression: pc.Expression) -> bool:
        """Whether it reads a column of type null."""
        kinds = (self._schema.field(name).type for name in columns_read([expression]))
        return any(str(kind) == "null" for kind in kinds)

    def _with(self, added: Mapping[str, pc.Expression]) -> pa.Schema:
        """The schema with the columns of these expressions."""
        import pyarrow as pa

        fields = {field.name: field for field in self._schema}
        for name, expression in added.items():
            kind = expression_type(self._schema, expression, f"with_columns({name}=...)")
            fields[name] = pa.field(name, kind)
        return pa.schema(fields.values())

    def filter(self, condition: pc.Expression) -> Table:
        """The rows for which the expression is true: ``filter(pc.field("amount") > 10)``. Null is not true.

        Raises:
            UnknownName: the expression reads another column.
            UsageError: it is no expression, or gives no truth value.
        """
        from minishuffle.operators.filter import Filter

        check_expression(condition, "filter")
        kind = expression_type(self._schema, condition, "filter")
        if str(kind) != "bool":
            raise UsageError(f"filter: {condition!s:.200} gives {kind}: write a condition")
        reads = reads_also(*columns_read([condition]))
        return self._step(Filter(condition), self._schema, self._time, True, reads)

    def explode(self, column: str) -> Table:
        """Each row once for each value of the list in ``column``, which then holds that value; a row whose
        list is empty or null is left out.

        Raises:
            UnknownName: there is no such column.
            UsageError: the column's type is no list.
        """
        from minishuffle.operators.flat_map import FlatMap, ListColumn, is_list

        if not isinstance(column, str):
            raise UsageError(f"explode takes the name of a column, not {column!r:.80}")
        check_columns([column], self._schema.names, "explode")
        lists = self._schema.field(column)
        if not is_list(lists.type):
            raise UsageError(f"explode: column {column!r} has the type {lists.type}, which is no list")
        values = lists.with_type(lists.type.value_type).with_nullable(True)
        schema = self._schema.set(self._schema.get_field_index(column), values)
        return self._step(FlatMap(ListColumn(column)), schema, self._time, True, reads_also(column))

    def map_batches(
        self,
        fn: Callable[[pa.RecordBatch], Any],
        *,
        schema: pa.Schema | Mapping[str, Any] | Literal["same"] | None = None,
        columns: Sequence[str] | None = None,
        batch_rows: int | None = None,
        on_error: OnError = "fail",
    ) -> Table:
        """What ``fn(batch)`` makes of each ``pyarrow.RecordBatch``: another, a table, or None for no rows.

        Event time stays if ``fn`` gets its column and gives it back; else call :meth:`event_time` again. If
        no column that is shown holds it, ``columns`` may have ``EVENT_TIME``: int64, microseconds since 1970.
        What ``fn`` gives in that column are the times of its rows, the same or others; nobody else sees it.

        Args:
            schema: the columns that it gives, or ``"same"``: those that it gets. They are checked. Without it
                they are those of what ``fn`` gives for a batch without rows, with which it is called now; an
                ``fn`` that has ``open`` is not.
            columns: those that it gets. None: all, and all are shipped to it.
            batch_rows: at most so many rows at a time.

        Raises:
            InvalidGraph: ``columns`` have ``EVENT_TIME``, and there is no event time; there is no ``schema``,
                and ``fn`` raises for no rows, gives no batch, or one with a column of nulls alone.
            UnknownName: one of ``columns`` is none.
        """
        from minishuffle.dataflow.operators.unknowncolumns import UnknownColumns
        from minishuffle.operators.map_batches import MapBatches

        check_callable(fn, "map_batches")
        taken = None if columns is None else key_columns((columns,), "map_batches(columns=...)")
        timed = self._untimed_beside()
        if taken is not None:
            check_columns([name for name in taken if name != EVENT_TIME], self._schema.names, "map_batches")
            if EVENT_TIME in taken:
                self._needed_time("map_batches has no event time to give")
                timed = self._timed_beside()
        if batch_rows is not None and (type(batch_rows) is not int or batch_rows < 1):
            raise UsageError(f"batch_rows is {batch_rows!r}: give a whole number from 1 on")
        reads = None if taken is None else reads_only(*taken)
        operator = MapBatches(fn, on_error, taken, batch_rows)
        node = Node(operator.name, timed._open_feeds(operator.name), operators=(operator,), reads=reads)
        found, keeps_time = timed._mapped_schema(fn, schema, taken)
        time = timed._time
        if time is not None and not isinstance(found, UnknownColumns):
            is_kept = keeps_time if time.is_beside else time.column in found.names
            time = time if is_kept else None
        return Table._checked(node, found, time, declared=schema is not None)

    def _mapped_schema(
        self,
        fn: Callable[[pa.RecordBatch], Any],
        schema: pa.Schema | Mapping[str, Any] | str | None,
        taken: Sequence[str] | None,
    ) -> tuple[pa.Schema | UnknownColumns, bool]:
        """Without the column of event times what ``fn`` gives of the columns ``taken`` (None: all), and
        whether it may give that column too."""
        import pyarrow as pa

        from minishuffle.dataflow.operators.unknowncolumns import UnknownColumns
        from minishuffle.dataflow.unknownschemas import unknown_columns

        if schema is not None and schema != "same":
            declared = arrow_schema(schema)
            if EVENT_TIME in declared.names:
                raise UsageError(
                    "map_batches(schema=...) names EVENT_TIME, which comes beside the columns of the schema: "
                    "leave it out"
                )
            return declared, True
        beside = pa.field(EVENT_TIME, pa.int64())
        given = self._schema
        if taken is not None:
            given = pa.schema([beside if name == EVENT_TIME else given.field(name) for name in taken])
        if schema is not None:
            return _without_event_time(given), True
        if hasattr(fn, "open"):
            why = "its function has open(), and is not called while the job is made"
            write = "write schema= with the columns that it gives, or schema='same'"
            return unknown_columns("map_batches", why, write, "schema={}"), False
        shown = "its function, called with a batch without rows,"
        found = called_schema("map_batches", lambda: fn(batch_without_rows(given)), shown)
        if isinstance(found, UnknownColumns):
            return found, False
        return _without_event_time(found), EVENT_TIME in found.names

    def union(self, *others: Table) -> Table:
        """The rows of this table and the others, in no particular order: the columns of all, of types that
        hold the values of all; null where a table has none. It has event time if all have, in whatever
        columns.

        Raises:
            UsageError: a column has types with none in common.
        """
        if not others:
            raise InvalidGraph("union takes at least one other table")
        draft: Table | None = draft_in(others)
        if draft is not None:
            return draft
        for other in others:
            if not isinstance(other, Table):
                refuse_mixture("union", "Table", other)
        tables = self._alike_in_time(others)
        time = tables[0]._time
        if all(table._schema.equals(self._schema) for table in tables):
            feeds = tuple(feed for table in tables for feed in table._open_feeds("union"))
            return Table(feeds, self._schema, time=time)
        return self._widened(tables, time)

    def _alike_in_time(self, others: Sequence[Table]) -> list[Table]:
        """This table and the others, with event time in one column of all, or without."""
        tables = [self, *others]
        if any(table._time is None for table in tables):
            shown = [table._untimed_beside() for table in tables]
            return [Table(table._feeds, table._schema) for table in shown]
        if all(table._time == self._time for table in tables):
            return tables
        return [table._timed_beside() for table in tables]

    @staticmethod
    def _widened(tables: Sequence[Table], time: EventTime | None) -> Table:
        """The union of tables that differ."""

        from minishuffle.dataflow.operators.relational import Conform
        from minishuffle.dataflow.operators.widertype import wider_schema

        common: pa.Schema = None
        for table in tables:
            common = wider_schema(common, table._schema, "the union")
        common = with_types(common, [with_innermost(kind, without_dictionary) for kind in common.types])
        feeds = [
            feed
            for table in tables
            for feed in (
                table._open_feeds("union")
                if table._schema.equals(common)
                else table._beside("union", Conform(common))._feeds
            )
        ]
        return Table(tuple(feeds), common, time=time)

    # --- time and keys -----------------------------------------------------------------------------

    def event_time(
        self,
        column: str,
        *,
        out_of_order: timedelta = timedelta(0),
        idle_after: timedelta | None = None,
        watermarks: Literal["batch", "each"] = "batch",
        on_error: OnError = "fail",
    ) -> Table:
        """Say in which column is when each row happened, for windows and joins; call it right after the
        source.

        The column holds timestamps, dates or int microseconds since 1970. Steps after this keep the event
        time, whether they keep that column or not; ``map_batches`` and ``to_rows`` only with it.

        Args:
            out_of_order: how far behind the latest row of its split another may come; the watermark stays so
                far behind. One that comes later yet is *late*.
            idle_after: without a row for so long, this table holds no other's time back.
            watermarks: ``"batch"``: after a batch, several times a second. ``"each"``: after each row, so
                that what is late depends on the rows' order alone.
            on_error: what becomes of a row that has no time.

        Raises:
            UnknownName: there is no such column.
            UsageError: it has a type that holds no times.
        """
        if not isinstance(column, str):
            raise UsageError(
                f"event_time takes the name of a column, not {column!r:.80}: make one with with_columns(), "
                "or call to_rows() first"
            )
        check_columns([column], self._schema.names, "event_time")
        check_time_type(self._schema, column)
        place = EventTime(column=column, each=watermarks == "each")
        return self._timed(place, out_of_order, idle_after, watermarks, on_error)

    def key_by(self, *columns: str | Sequence[str]) -> KeyedTable:
        """Bring the rows of each key together: one or more columns.

        Keys are compared in their canonical form: 1, 1.0 and True are one key, null is a key.

        Raises:
            UnknownName: one of these is no column.
            UsageError: one of these has a type that no key has, such as a list.
        """
        from minishuffle.dataflow.keyed_table import KeyedTable

        if len(columns) == 1 and callable(columns[0]):
            raise UsageError(
                "key_by of a Table takes columns: make one with with_columns(), or call to_rows() first"
            )
        keys = key_columns(columns)
        check_columns(keys, self._schema.names, "key_by")
        check_key_types(self._schema, keys)
        return KeyedTable(self, keys)

    def broadcast_join(
        self,
        small: Table,
        on: str | Sequence[str] | Mapping[str, str],
        how: Literal["inner", "left"] = "inner",
        *,
        suffix: str = "_right",
    ) -> Table:
        """Each row with the rows of ``small`` whose columns ``on`` are equal: a look-up.

        ``small`` is read to its end first and kept whole in every subtask; then this table streams through
        where it is. The columns are this table's and the other ones of ``small``, with ``suffix`` after a
        name that this one has. ``"left"`` also gives rows without a partner, with nulls. Nulls have none.

        Args:
            on: a column, several, or a dict of this table's columns to those of ``small``.

        Raises:
            InvalidGraph: ``small`` has no end, or both read one source, which would wait for itself.
            UsageError: an argument is wrong.
            UnknownName: one of ``on`` is no column of its table.
        """
        from minishuffle.dataflow.joined_tables import look_up

        return look_up(self, small, on, how, suffix)

    # --- Spark -------------------------------------------------------------------------------------

    def to_spark(self, name: str = "result") -> Table:
        """Keep the rows for Spark to read: ``format("minishuffle").option("sink", name)``.

        They get the table's schema, timestamps in microseconds: in UTC, or naive if they are.
        """
        checked_name(name, "to_spark")
        from minishuffle.connectors.spool import SpoolSink

        schema = spark_schema(self._schema)
        boundary = Boundary(name, schema_message(schema))
        return self._sink(f"to_spark {name}", SpoolSink(name, schema), boundary)

    # --- making nodes ----------------------------------------------------------------------------

    def _require_own_names(self, method: str) -> None:
        """Raises UsageError if two columns have one name."""
        from minishuffle.dataflow.operators.widertype import require_own_names

        require_own_names(self._schema, f"the table of {method}()")

    def _picked(self, columns: Mapping[str, str]) -> pa.Schema:
        """The schema of these columns, each by its new name."""
        import pyarrow as pa

        return pa.schema([self._schema.field(old).with_name(new) for new, old in columns.items()])

    @property
    def _time_column(self) -> str | None:
        return None if self._time is None else self._time.column

    def _timed_beside(self) -> Table:
        """The same rows with their event times beside them."""
        from minishuffle.dataflow.operators.eventtime import HoldTimes

        time = self._time
        assert time is not None
        if time.is_beside:
            return self
        feeds = self._represented(HoldTimes(time), _reads_held(str(time.column)))
        return Table(feeds, self._schema, time=time.beside())

    def _untimed_beside(self) -> Table:
        """The same rows without event time if it is beside them."""
        is_beside = self._time is not None and self._time.is_beside
        return Table(self._feeds, self._schema) if is_beside else self

    def _step(
        self,
        operator: Operator,
        schema: pa.Schema,
        time: EventTime | None,
        follows: bool = False,
        reads: Reads | None = None,
    ) -> Table:
        feeds = self._open_feeds(operator.name)
        node = Node(operator.name, feeds, operators=(operator,), follows=follows, reads=reads)
        return Table((Feed(node),), schema, time=time)


def _without_event_time(schema: pa.Schema) -> pa.Schema:
    place = schema.get_field_index(EVENT_TIME)
    return schema if place < 0 else schema.remove(place)


def _reads_held(time_column: str) -> Reads:
    """The column too if the event times beside the rows are wanted."""
    return lambda wanted, input: (
        wanted if wanted is None or EVENT_TIME not in wanted else wanted | {time_column}
    )


def _reads_renamed(names: Mapping[str, str]) -> Reads:
    old = {new: name for name, new in names.items()}
    return lambda wanted, input: (
        None if wanted is None else frozenset(old.get(name, name) for name in wanted) | names.keys()
    )


def _reads_added(added: Mapping[str, Any], read: frozenset[str]) -> Reads:
    return lambda wanted, input: None if wanted is None else wanted - added.keys() | read
