"""Records as Python objects, and functions of them, put together without running anything.

A :class:`Stream` never changes: every method gives a new one, and what several streams share runs
once (but ``name`` and ``parallel`` make another operator of the one before them). Batches are lists
of rows; :meth:`Stream.to_table` makes columns of them.

``on_error`` says what becomes of a record whose function raises: ``"fail"`` fails the task,
which restarts without the batch that it had in hand, until it has failed too often (``restart_failures_max``)
and the job ends with that error; ``"skip"`` drops and counts that record alone, ``"dead_letter"`` also writes
it with the error into the job's log, ``"side"`` sends it to :attr:`Stream.errors`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

from typing_extensions import TypeVar

from minishuffle.dataflow.arguments import (
    arrow_schema,
    check_callable,
    check_columns,
    checked_concurrency,
    checked_duration,
    key_columns,
)
from minishuffle.dataflow.bridges import refuse_column_method, refuse_mixture
from minishuffle.dataflow.drafts import Draft, draft_in
from minishuffle.dataflow.knownrows import (
    ReturnedRows,
    declared_schema,
    found_schema,
    unread_annotations,
)
from minishuffle.dataflow.nodes import Exchange, Feed, Node, check_not_sinks, known_rows, named_step
from minishuffle.dataflow.operators.times import EventTime
from minishuffle.dataflow.rowtypes import Returns
from minishuffle.dataflow.stream_base import StreamBase, errors_aside, errors_of, side_outputs
from minishuffle.dataflow.stream_sinks import StreamSinks
from minishuffle.dataflow.stream_sources import StreamSources
from minishuffle.dataflow.unknownschemas import place_of_call, unknown_columns
from minishuffle.errors import InvalidGraph, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.dataflow.joined import On
    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.dataflow.operators.chained import OnError, RecordOperator
    from minishuffle.dataflow.operators.convert import RowsSchema
    from minishuffle.dataflow.table import Table

__all__ = ["Stream"]

T = TypeVar("T", default=Any)
"""A row."""
U = TypeVar("U")
"""A row of the stream that a function makes."""


class Stream(StreamSources, StreamSinks, Generic[T]):
    """Records on their way through a job; see the module's docstring.

    Made by the class methods, never by the constructor.
    """

    __slots__ = ()
    _time_hint = "event_time(...) before key_by"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            refuse_column_method(self, name)

    # --- transformations -------------------------------------------------------------------------

    def map(
        self, fn: Callable[[T], U], *, sides: Sequence[str] = (), on_error: OnError = "fail"
    ) -> Stream[U]:
        """One row for each row: ``fn(row)``. An ``Aside(name, row)`` in its place goes to :meth:`side`."""
        from minishuffle.dataflow.operators.functions import MapRows

        check_callable(fn, "map")
        return self._on_rows(MapRows(fn, on_error), sides, "row")

    def filter(self, fn: Callable[[T], Any], *, on_error: OnError = "fail") -> Stream[T]:
        """The rows for which ``fn(row)`` is true."""
        from minishuffle.operators.filter import Filter

        check_callable(fn, "filter")
        operator = Filter(fn, on_error)
        timed = self._timed_beside() if on_error == "side" else self
        feeds, sides = timed._open_feeds("filter"), side_outputs(operator, (), timed._time)
        node = Node(
            operator.name,
            feeds,
            operators=(operator,),
            rows=known_rows(feeds),
            errors=errors_of(operator, feeds),
        )
        return Stream((Feed(node),), None, self._columns, timed._time, sides)

    def flat_map(
        self, fn: Callable[[T], Iterable[U]], *, sides: Sequence[str] = (), on_error: OnError = "fail"
    ) -> Stream[U]:
        """Every item of the iterable that ``fn(row)`` returns; ``Aside(name, row)`` goes to :meth:`side`."""
        from minishuffle.operators.flat_map import FlatMap

        check_callable(fn, "flat_map")
        return self._on_rows(FlatMap(fn, on_error), sides, "rows")

    def map_async(
        self,
        fn: Callable[[T], Awaitable[U]],
        *,
        concurrency: int,
        timeout: timedelta | None = None,
        sides: Sequence[str] = (),
        on_error: OnError = "fail",
    ) -> Stream[U]:
        """One row for each row: ``await fn(row)``, in the order of the rows.

        The calls run on an event loop of the subtask, in a thread of its own.

        Args:
            concurrency: so many rows in each subtask may wait for their result, or for that of a row before
                them; while there are so many no other is taken.
            timeout: for one call; one that takes longer is cancelled and counts as raising TimeoutError.

        Raises:
            UsageError: an argument is wrong.
        """
        from minishuffle.dataflow.operators.mapasync import MapRowsAsync

        check_callable(fn, "map_async", awaited=True)
        calls = checked_concurrency(concurrency)
        seconds = None
        if timeout is not None:
            seconds = checked_duration(timeout, "map_async(timeout=...)", positive=True) / 1_000_000
        return self._on_rows(MapRowsAsync(fn, calls, seconds, on_error), sides, "awaited")

    def union(self, *others: Stream[T]) -> Stream[T]:
        """The records of this stream and the others, in no particular order. There is event time if
        all have some."""
        if not others:
            raise InvalidGraph("union takes at least one other stream")
        draft: Stream[Any] | None = draft_in(others)
        if draft is not None:
            return draft
        for other in others:
            if not isinstance(other, Stream):
                refuse_mixture("union", "Stream", other)
        streams = [self, *others]
        has_time = all(stream._time is not None for stream in streams)
        if has_time and any(stream._time != self._time for stream in streams):
            streams = [stream._timed_beside() for stream in streams]
        feeds = tuple(feed for stream in streams for feed in stream._open_feeds("union"))
        columns = self._columns if all(other._columns == self._columns for other in others) else None
        return Stream(feeds, None, columns, streams[0]._time if has_time else None)

    def key_by(
        self, *key: str | Sequence[str] | Callable[[T], Any], on_error: OnError = "fail"
    ) -> KeyedStream[T]:
        """Bring the records of each key together: one or more column names, or a function of a row.

        Keys are compared in their canonical form: 1, 1.0 and True are one key, None is a key.

        Raises:
            UnknownName: the stream's columns are known, and one of the names is not among them.
        """
        from minishuffle.dataflow.keyed import KeyedStream

        check_not_sinks(self._feeds, "key_by")
        if len(key) == 1 and callable(key[0]):
            return KeyedStream(self, None, key[0], on_error)
        columns = key_columns(key)
        if on_error != "fail":
            raise UsageError("on_error is about a key function: leave it out when the key is in columns")
        check_columns(columns, self._columns, "key_by")
        return KeyedStream(self, columns, None, on_error)

    def event_time(
        self,
        time: str | Callable[[T], datetime | int],
        *,
        out_of_order: timedelta = timedelta(0),
        idle_after: timedelta | None = None,
        watermarks: Literal["batch", "each"] = "batch",
        on_error: OnError = "fail",
    ) -> Stream[T]:
        """Say when each record happened, for windows, joins and timers; call it right after the source.

        Args:
            time: a column of dicts, or a function of the row: a datetime (without time zone: in UTC), a
                date, or int microseconds since 1970. What functions make of a row later on happened when it
                did, whatever they keep of it.
            out_of_order: how far behind the latest record of its split another may come; the
                watermark stays so far behind. One that comes later yet is *late*.
            idle_after: without a record for so long, this stream holds no other's time back.
            watermarks: ``"batch"``: after a batch, several times a second. ``"each"``: after each
                record, so that what is late depends on the records' order alone.
            on_error: what becomes of a record that has no time.

        Raises:
            UnknownName: the stream's columns are known, and this is not among them.
        """
        if isinstance(time, str):
            check_columns([time], self._columns, "event_time")
            place = EventTime(column=time, each=watermarks == "each")
        else:
            check_callable(time, "event_time")
            place = EventTime(fn=time, each=watermarks == "each")
        return self._timed(place, out_of_order, idle_after, watermarks, on_error)

    def broadcast_join(
        self, small: Stream[Any], on: On, how: Literal["inner", "left"] = "inner"
    ) -> Stream[Any]:
        """Each record with the records of ``small`` whose columns ``on`` are equal: a look-up.

        Records are dicts. ``small`` is read to its end first and kept whole in every subtask. What comes has
        this stream's columns and the other ones of ``small``, with ``_right`` after a name that is taken.
        ``"left"`` also gives records without a partner, with None. None has none.

        Args:
            on: a column, several, or a dict of this stream's columns to those of ``small``.

        Raises:
            InvalidGraph: ``small`` has no end, or both read one source, which would wait for itself.
            UsageError: an argument is wrong.
            UnknownName: a stream's columns are known, and one of ``on`` is not among them.
        """
        from minishuffle.dataflow.joined import broadcast_join

        return broadcast_join(self, small, on, how)

    def to_table(
        self, schema: pa.Schema | Mapping[str, Any] | type | None = None, *, on_error: OnError = "fail"
    ) -> Table:
        """The same records as Arrow columns: dicts, dataclasses and pydantic models by name, tuples and lists
        by position. Event time stays.

        Args:
            schema: a ``pyarrow.Schema``; a dict of name to type: an Arrow type, its name ("int64"), or int,
                float, str, bool or bytes; or a TypedDict, NamedTuple, dataclass or pydantic model. A dict
                that lacks a column has null there. Without it the columns have to be known: right after
                :meth:`items` they are inferred from all items, after :meth:`Table.to_rows` they are the
                table's, and :meth:`text` gives the column ``value``; so they are behind ``filter``,
                ``event_time``, ``union`` and exchanges too. After ``map``, ``map_async``, ``flat_map`` and
                ``process`` they are those of the class with fields that the function is annotated to return
                (or an iterable of).
            on_error: what becomes of a row with another column, or a value that does not fit.

        Raises:
            UsageError: it is not a schema, or has a type that is made of no values of Python.
        """
        from minishuffle.dataflow.operators.convert import ToArrow
        from minishuffle.dataflow.operators.pyvalues import check_made
        from minishuffle.dataflow.table import Table

        known = known_rows(self._open_feeds("to_table"))
        if schema is not None:
            found: RowsSchema | None = declared_schema(arrow_schema(schema), known)
        else:
            try:
                found = found_schema(known)
            except UsageError as error:
                raise type(error)(f"to_table at {place_of_call()}: {error}") from error
        if found is None:
            return cast("Table", Draft(self._undeclared()._feeds))
        for field in found.schema:
            check_made(field)
        in_column = self._time is None or (self._time.column is not None and on_error != "side")
        timed = self if in_column else self._timed_beside()
        feeds, time = timed._open_feeds("to_table"), timed._time
        operator = ToArrow(found, on_error=on_error)
        errors = errors_aside(operator, time)
        node = Node(
            operator.name,
            feeds,
            operators=(operator,),
            follows=True,
            is_auxiliary=True,
            errors=errors_of(operator, feeds),
        )
        return Table((Feed(node),), found.schema, None, time, errors)

    def _undeclared(self) -> Stream[T]:
        """
        Raises:
            InvalidGraph: unless a draft is made.
        """
        unread = unread_annotations(known_rows(self._feeds))
        if unread is None:
            before = ", ".join(dict.fromkeys(named_step(feed.node) for feed in self._feeds))
            why = f"nothing says which columns the rows of {before} have"
            write = (
                "annotate what the last function returns as a TypedDict, NamedTuple, dataclass or pydantic "
                "model"
            )
        else:
            why, write = unread, "define or import that class at the top of the function's module"
        placeholder = unknown_columns("to_table", why, f"write to_table(schema), or {write}", "to_table({})")
        return self._beside("to_table", placeholder)

    # --- side outputs ------------------------------------------------------------------------------

    def side(self, name: str) -> Stream[Any]:
        """What the function of the step before this has put aside: rows that it gave as ``Aside(name, row)``.

        Raises:
            InvalidGraph: that step has no such side output: see ``sides=`` of :meth:`map`, :meth:`flat_map`
                and :meth:`KeyedStream.process`.
        """
        return self._side(name)

    @property
    def errors(self) -> Stream[Any]:
        """The records for which the function of the step before this has raised, with ``on_error="side"``:
        dicts with ``operator``, ``error`` and ``record``, which is a text if no exchange takes the record.

        Raises:
            InvalidGraph: that step puts no such records aside.
        """
        return self._side("errors")

    # --- who gets which record -------------------------------------------------------------------

    def partition(self, fn: Callable[[T, int], int]) -> Stream[T]:
        """``fn(row, count)`` says which of ``count`` subtasks gets the row: 0 to ``count`` - 1.

        What ``fn`` raises fails the task.
        """
        check_callable(fn, "partition")
        return self._exchanged("partition", Exchange("custom", choose=fn))

    # --- making nodes ----------------------------------------------------------------------------

    def _on_rows(
        self,
        operator: RecordOperator,
        sides: Sequence[str],
        returns: Returns,
    ) -> Stream[Any]:
        """What a function makes of rows, with their event times beside it."""
        check_not_sinks(self._feeds, operator.name)
        timed, returned = self._timed_beside(), ReturnedRows(operator.fn, returns)
        aside = side_outputs(operator, sides, timed._time)
        node = Node(
            operator.name,
            timed._feeds,
            operators=(operator,),
            rows=(returned,),
            errors=errors_of(operator, timed._feeds),
        )
        return Stream((Feed(node),), time=timed._time, sides=aside)

    def _timed_beside(self) -> Stream[T]:
        """The same rows with their event times beside them; as they are if they have none."""
        from minishuffle.dataflow.operators.eventtime import HoldTimes

        if self._time is None or self._time.is_beside:
            return self
        feeds = self._represented(HoldTimes(self._time))
        return Stream(feeds, self._schema, self._columns, self._time.beside())

    # --- several at once ---------------------------------------------------------------------------

    @classmethod
    def together(cls, *streams: StreamBase) -> Stream[Any]:
        """One job of several streams or tables that each end in a sink; what they share runs once."""
        draft: Stream[Any] | None = draft_in(streams)
        if draft is not None:
            return draft
        for stream in streams:
            if not isinstance(stream, StreamBase) or not all(feed.node.is_sink for feed in stream._feeds):
                raise InvalidGraph("together takes streams that end in a sink: add collect() or another one")
        if not streams:
            raise InvalidGraph("together takes at least one stream")
        return Stream(tuple(feed for stream in streams for feed in stream._feeds))
