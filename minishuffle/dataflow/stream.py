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
from typing import TYPE_CHECKING, Any, Generic, Literal

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
from minishuffle.dataflow.nodes import Exchange, Feed, Node
from minishuffle.dataflow.operators.times import HIDDEN_TIME, EventTime
from minishuffle.dataflow.stream_base import StreamBase, side_outputs
from minishuffle.dataflow.stream_sinks import StreamSinks
from minishuffle.dataflow.stream_sources import StreamSources
from minishuffle.errors import InvalidGraph, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.dataflow.joined import On
    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.dataflow.operators.chained import OnError, RecordOperator
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
    _time_hint = (
        "event_time(...) before key_by, and again after a map that makes other records, or after to_rows() "
        "of a table that does not show its event time"
    )

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
        return self._on_rows(MapRows(fn, on_error), sides)

    def filter(self, fn: Callable[[T], Any], *, on_error: OnError = "fail") -> Stream[T]:
        """The rows for which ``fn(row)`` is true."""
        from minishuffle.dataflow.operators.functions import FilterRows

        check_callable(fn, "filter")
        kept: Stream[T] = self._on_rows(FilterRows(fn, on_error))
        return Stream(kept._feeds, None, self._columns, self._time, kept._sides)

    def flat_map(
        self, fn: Callable[[T], Iterable[U]], *, sides: Sequence[str] = (), on_error: OnError = "fail"
    ) -> Stream[U]:
        """Every item of the iterable that ``fn(row)`` returns; ``Aside(name, row)`` goes to :meth:`side`."""
        from minishuffle.dataflow.operators.functions import FlatMapRows

        check_callable(fn, "flat_map")
        return self._on_rows(FlatMapRows(fn, on_error), sides)

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

        check_callable(fn, "map_async")
        calls = checked_concurrency(concurrency)
        seconds = None
        if timeout is not None:
            seconds = checked_duration(timeout, "map_async(timeout=...)", positive=True) / 1_000_000
        return self._on_rows(MapRowsAsync(fn, calls, seconds, on_error), sides)

    def union(self, *others: Stream[T]) -> Stream[T]:
        """The records of this stream and the others, in no particular order."""
        if not others:
            raise InvalidGraph("union takes at least one other stream")
        for other in others:
            if not isinstance(other, Stream):
                refuse_mixture("union", "Stream", other)
        streams = (self, *others)
        feeds = tuple(feed for stream in streams for feed in stream._open_feeds("union"))
        columns = self._columns if all(other._columns == self._columns for other in others) else None
        time = self._time if all(other._time == self._time for other in others) else None
        return Stream(feeds, None, columns, time)

    def key_by(
        self, *key: str | Sequence[str] | Callable[[T], Any], on_error: OnError = "fail"
    ) -> KeyedStream[T]:
        """Bring the records of each key together: one or more column names, or a function of a row.

        Keys are compared in their canonical form: 1, 1.0 and True are one key, None is a key.

        Raises:
            UnknownName: the stream's columns are known, and one of the names is not among them.
        """
        from minishuffle.dataflow.keyed import KeyedStream

        feeds = self._open_feeds("key_by")
        if len(key) == 1 and callable(key[0]):
            return KeyedStream(self, feeds, None, key[0], on_error)
        columns = key_columns(key)
        if on_error != "fail":
            raise UsageError("on_error is about a key function: leave it out when the key is in columns")
        check_columns(columns, self._columns, "key_by")
        return KeyedStream(self, feeds, columns, None, on_error)

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
                date, or int microseconds since 1970.
                What :meth:`map` makes of a row has no time of its own, unless it keeps the column.
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

    def to_table(self, schema: pa.Schema | Mapping[str, Any] | None = None) -> Table:
        """The same records as Arrow columns: dicts by name, tuples and lists by position. Event time stays.

        Args:
            schema: a ``pyarrow.Schema``, or a dict of name to type: an Arrow type, its name ("int64"), or
                int, float, str, bool or bytes. A dict that lacks a column has null there; one with another
                column, and a value that does not fit, fails the task. Without it the rows (dicts) of each
                subtask set the columns: later rows add some and make their types wider, and the columns are
                not known before the job runs, which some steps need.

        Raises:
            UsageError: it is not a schema.
        """
        from minishuffle.dataflow.operators.convert import ToArrow
        from minishuffle.dataflow.table import Table

        declared = None if schema is None else arrow_schema(schema)
        time, by_function = self._time, None
        if time is not None and time.column is None:
            time, by_function = EventTime(column=HIDDEN_TIME, each=time.each), time
        feeds = self._beside("to_table", ToArrow(declared, time=by_function))._feeds
        return Table(feeds, declared, None, time)

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

    def _on_rows(self, operator: RecordOperator, sides: Sequence[str] = ()) -> Stream[Any]:
        feeds, time = self._open_feeds(operator.name), self._time_by_column()
        node = Node(operator.name, feeds, operators=(operator,))
        return Stream((Feed(node),), time=time, sides=side_outputs(operator, sides, time))

    # --- several at once ---------------------------------------------------------------------------

    @classmethod
    def together(cls, *streams: StreamBase) -> Stream[Any]:
        """One job of several streams or tables that each end in a sink; what they share runs once."""
        for stream in streams:
            if not isinstance(stream, StreamBase) or not all(feed.node.is_sink for feed in stream._feeds):
                raise InvalidGraph("together takes streams that end in a sink: add collect() or another one")
        if not streams:
            raise InvalidGraph("together takes at least one stream")
        return Stream(tuple(feed for stream in streams for feed in stream._feeds))
