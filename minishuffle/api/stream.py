"""Streams of rows and tables of columns, put together without running anything.

A :class:`Stream` or :class:`Table` never changes: every method gives a new one, and what several share runs
once (but ``name`` and ``parallel`` make another operator of the one before them). Each method adds one node
to the plan (:mod:`minishuffle.plan`), and checks its arguments there.

A stream's batches are lists of rows; :meth:`Stream.to_table` makes columns of them. A table's are Arrow, and
run without Python per row; it is not a collection: its batches flow through the job, with an end or without.
Expressions are made by ``minishuffle.col``, or are of ``pyarrow.compute``: ``col("amount") * 2``.

``on_error`` says what becomes of a record whose function raises: ``"fail"`` fails the task,
which restarts without the batch that it had in hand, until it has failed too often (``restart_failures_max``)
and the job ends with that error; ``"skip"`` drops and counts that record alone, ``"dead_letter"`` also writes
it with the error into the job's log, ``"side"`` sends it to :attr:`Stream.errors`.

The classes stand in one module, since each gives others: a stream a table, a table rows by key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVarTuple, cast, overload

from typing_extensions import TypeVar

from minishuffle.api.bridges import JOINED_ON, LATE_BY, LOOKED_UP_ON, Bridged, answering, refuse_mixture
from minishuffle.api.drafts import Draft, draft_in
from minishuffle.api.stream_base import SideOutputs, StreamBase
from minishuffle.api.stream_sinks import StreamSinks
from minishuffle.api.table_sources import TableSources
from minishuffle.errors import InvalidGraph, UsageError
from minishuffle.operators.base import AnySource, Aside, Source, SplitSource
from minishuffle.operators.event_time import EVENT_TIME
from minishuffle.plan.arguments import (
    check_callable,
    checked_duration,
    checked_name,
    checked_paths,
    discovery_seconds,
    key_columns,
)
from minishuffle.plan.column_steps import (
    CheckStep,
    DropStep,
    ExplodeStep,
    FilterStep,
    MapBatchesStep,
    RenameStep,
    SelectStep,
    ToRowsStep,
    UnknownStep,
    WithColumnsStep,
    conformed,
    mapped_columns,
)
from minishuffle.plan.end_steps import ScanStep
from minishuffle.plan.exchange_steps import hashed, together, united
from minishuffle.plan.join_steps import (
    Apart,
    AsOfStep,
    Interval,
    JoinColumnsStep,
    JoinRowsStep,
    LookUpColumnsStep,
    LookUpRowsStep,
    On,
    column_pairs,
    look_up,
)
from minishuffle.plan.keyed_steps import (
    Aggregates,
    AggregateStep,
    CountColumnsStep,
    CountRowsStep,
    DistinctStep,
    FoldStep,
    ProcessStep,
    TopNStep,
    column_keys,
    emission_of,
)
from minishuffle.plan.knownrows import ItemRows, KnownRows, TypedRows
from minishuffle.plan.nodes import Boundary, Exchange, Known, ObjectSchema, Relation, Step
from minishuffle.plan.row_steps import (
    FilterRowsStep,
    FlatMapStep,
    Key,
    MapAsyncStep,
    MapStep,
    ToTableStep,
    rows_by_key,
    rows_schema,
)
from minishuffle.plan.schemas import arrow_schema, schema_message
from minishuffle.plan.sides import checked_sides
from minishuffle.plan.time_steps import held
from minishuffle.plan.window_steps import (
    CalendarUnit,
    SessionWindows,
    TimeWindows,
    WindowAggregateStep,
    WindowFoldStep,
    Windowing,
)

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    import pyarrow as pa
    import pyarrow.compute as pc

    from minishuffle.api.columns import ColumnExpression
    from minishuffle.operators.chained import Emission, OnError
    from minishuffle.operators.event_time_operator import LatePolicy
    from minishuffle.operators.join_inputs import How
    from minishuffle.operators.keyed_process import ProcessContext

__all__ = ["KeyedStream", "KeyedTable", "Stream", "Table", "WindowedStream", "WindowedTable"]

T = TypeVar("T", default=Any, covariant=True)
"""A row."""
K = TypeVar("K", default=Any, covariant=True)
"""A key."""
U = TypeVar("U")
"""A row of the stream that a function makes, or a key that it gives."""
V = TypeVar("V")
"""Another such row, or the row of another stream."""
S = TypeVar("S")
"""The value that the rows of a key, or of a key and window, are folded into."""
Timed = TypeVar("Timed")
"""The windows of time of a stream or of a table."""
Counted = TypeVar("Counted")
"""Its sessions, and its windows of so many records."""
WindowKey = TypeVar("WindowKey", covariant=True)
"""A key, where windows follow (without a default, which a TypeVarTuple must not follow)."""
WindowRow = TypeVar("WindowRow", covariant=True)
"""A row there."""
Bounds = TypeVarTuple("Bounds")
"""What says which window a value is of: its start, or its start and its end."""


class Windowable(Generic[Timed, Counted]):
    """Records by key, which may be cut into windows."""

    __slots__ = ()

    @answering(timezone="write tz='Europe/Zurich'")
    def window(
        self,
        size: timedelta | CalendarUnit,
        *,
        slide: timedelta | None = None,
        offset: timedelta = timedelta(0),
        tz: str | ZoneInfo | None = None,
        late: LatePolicy = "drop",
        allowed_lateness: timedelta = timedelta(0),
        early: timedelta | None = None,
    ) -> Timed:
        """Cut the records of each key into windows of event time, aligned to 1970 UTC: tumbling ones, or with
        ``slide`` overlapping ones.

        A window's values go out when the watermark has reached its end. A record all of whose windows have
        gone out is late: it is counted (``records_late``) and dropped, or with ``"side"`` put into the stream
        or table ``late`` of what follows, or with ``"fail"`` ends the job. A few rows in memory are never
        late in a cluster, as each is a split; in ``minishuffle.testing`` they are, in their order.

        Args:
            size: of each window; with "month", "quarter" and "year" windows are those of the calendar.
            slide: so long after a window the next one begins; each record is in all that have its time.
            offset: windows begin so much after 1970, and any number of slides before and after that. Those of
                ``tz``, or of months, begin when the clocks there show midnight and so much more: at the first
                moment after that if it is left out when they change, at the first of two. Below 28 days where
                the size is "month", "quarter" or "year".
            tz: windows are whole days of this time zone, by name or as ``ZoneInfo`` (or months and so on,
                which are otherwise those of UTC), whatever hours they have. Their start and end are shown by
                its clocks: in columns of type ``timestamp[us, tz=...]``, as datetimes with their offset.
            allowed_lateness: so much longer a window takes records, and keeps its values, which go out then.
                What they are at its end, and after each later record, is in ``panes`` of what follows.
            early: so often, in event time, what has changed in a window goes to ``panes`` before its end.

        Raises:
            InvalidGraph: the records have no event time: see ``event_time`` of streams and tables.
            UsageError: an argument is wrong, or does not go with another.
        """
        windowing = TimeWindows.of(
            self._known(),
            size,
            slide=slide,
            offset=offset,
            tz=tz,
            late=late,
            allowed_lateness=allowed_lateness,
            early=early,
        )
        timed: Timed = self._windowed(windowing)
        return timed

    def session_window(self, gap: timedelta, *, late: LatePolicy = "drop") -> Counted:
        """Cut the records of each key into sessions: a record less than ``gap`` after another one is in the
        session of that one.

        A session's values go out when the watermark has reached its end, ``gap`` after its last record. A
        record is late if its time is not after the watermark, and treated as those of :meth:`window`.

        Raises:
            InvalidGraph: the records have no event time: see ``event_time`` of streams and tables.
            UsageError: an argument is wrong.
        """
        sessions: Counted = self._windowed(SessionWindows.with_gap(self._known(), gap, late))
        return sessions

    def count_window(self, size: int, *, late: LatePolicy = "drop") -> Counted:
        """Cut the records of each key into windows of ``size`` records, in order of event time; those of one
        time as they came.

        A window's values go out when the watermark has reached its last record. Records of a key that are
        fewer when the data end make no window, and nothing of them goes out. A record is late if its time is
        not after the watermark, and treated as those of :meth:`window`.

        Raises:
            InvalidGraph: the records have no event time: see ``event_time`` of streams and tables.
            UsageError: an argument is wrong.
        """
        counted: Counted = self._windowed(SessionWindows.with_size(self._known(), size, late))
        return counted

    def _known(self) -> Known:
        """The records before :meth:`key_by`."""
        raise NotImplementedError

    def _windowed(self, windowing: Windowing) -> Any:
        """The records of each key cut so."""
        raise NotImplementedError


class Stream(StreamSinks, SideOutputs["Stream[Any]"], Bridged, Generic[T]):
    """Records on their way through a job; see the module's docstring.

    Made by the class methods, never by the constructor.
    """

    __slots__ = ()

    # --- sources ---------------------------------------------------------------------------------

    @classmethod
    def text(cls, *paths: str | Path, parallelism: int | None = None) -> Stream[str]:
        """Lines of UTF-8 files, without their line ends. A path may be a directory, a glob pattern or a URI
        such as ``s3://bucket/folder``; the files may be compressed (``.gz``, ``.bz2``, ``.zst``, ``.lz4``).
        They are listed now; one that has changed since, or is gone, ends the job.

        Raises:
            UnknownName: there is no such file.
        """
        from minishuffle.connectors.text import TextSource

        source = TextSource(checked_paths(paths, "Stream.text"))
        rows = TypedRows(arrow_schema({"value": str}), are_values=True)
        stream: Stream[str] = cls._scanned("text", source, rows)
        return stream if parallelism is None else stream.parallel(parallelism)

    @classmethod
    def items(cls, items: Iterable[U]) -> Stream[U]:
        """A collection in memory, which travels with the job.

        Raises:
            ResourceExhausted: it does not fit into a job; no more of it is taken than shows that.
        """
        from minishuffle.connectors.items import ItemsSource
        from minishuffle.plan.pickling import items_that_fit

        if hasattr(items, "__arrow_c_stream__"):
            raise UsageError(
                f"Stream.items takes rows, not a {type(items).__name__}: write Table.from_arrow(...)"
            )
        if not isinstance(items, Iterable) or isinstance(items, str | bytes | Mapping):
            raise UsageError(
                f"Stream.items takes a list of rows, not a {type(items).__name__}: "
                "put a single row into a list"
            )
        source = ItemsSource(items_that_fit(items))
        return cls._scanned("items", source, ItemRows(source.items))

    @overload
    @classmethod
    def generate(
        cls, fn: None = None, *, rate: float | None = None, records: int | None = None
    ) -> Stream[int]: ...

    @overload
    @classmethod
    def generate(
        cls, fn: Callable[[int, int], list[U]], *, rate: float | None = None, records: int | None = None
    ) -> Stream[U]: ...

    @classmethod
    def generate(
        cls,
        fn: Callable[[int, int], Any] | None = None,
        *,
        rate: float | None = None,
        records: int | None = None,
    ) -> Stream[Any]:
        """Records by number: ``fn(start, count)`` gives ``count`` of them, from number ``start`` on.

        ``fn`` returns a list, and the same for the same numbers. Without it a record is its number. ``rate``
        is in records/s over all subtasks (None: as fast as they are taken); ``records`` None: without end.
        """
        from minishuffle.connectors.generator import GeneratorSource, number_rows

        check_callable(number_rows if fn is None else fn, "Stream.generate")
        return cls._scanned("generate", GeneratorSource(fn or number_rows, rate=rate, records=records))

    @overload
    @classmethod
    def source(cls, source: SplitSource[list[U]]) -> Stream[U]: ...

    @overload
    @classmethod
    def source(cls, source: Source[list[U]]) -> Stream[U]: ...

    @overload
    @classmethod
    def source(cls, source: AnySource) -> Stream[Any]: ...

    @classmethod
    def source(cls, source: AnySource) -> Stream[Any]:
        """The user's own :class:`~minishuffle.operators.base.Source` or
        :class:`~minishuffle.operators.base.SplitSource`, named after its class."""
        name = type(source).__name__
        if isinstance(source, type) or not isinstance(source, Source):
            raise UsageError(f"{name} is not a source: it needs the methods splits() and read(split, offset)")
        format = getattr(source, "format", "rows")
        if format != "rows":
            raise UsageError(
                f"{name}.format is {format!r}: write Table.source(...) for 'arrow', or set it to 'rows'"
            )
        discovery_seconds(source)
        return cls(Relation.of(ScanStep(name, source, ObjectSchema(), brings_times=True)))

    @classmethod
    def _scanned(cls, label: str, source: AnySource, rows: KnownRows | None = None) -> Stream[Any]:
        schema = ObjectSchema(origins=() if rows is None else (rows,))
        return cls(Relation.of(ScanStep(label, source, schema)))

    # --- transformations -------------------------------------------------------------------------

    def map(
        self, fn: Callable[[T], U | Aside], *, sides: Sequence[str] = (), on_error: OnError = "fail"
    ) -> Stream[U]:
        """One row for each row: ``fn(row)``. An ``Aside(name, row)`` in its place goes to :meth:`side`."""
        plan = self._held()
        return Stream(plan.then(MapStep(plan.gives, fn, checked_sides(sides), on_error)))

    def filter(self, fn: Callable[[T], Any], *, on_error: OnError = "fail") -> Stream[T]:
        """The rows for which ``fn(row)`` is true."""
        plan = self._held(stays=on_error != "side")
        return Stream(plan.then(FilterRowsStep(plan.gives, fn, on_error=on_error)))

    def flat_map(
        self, fn: Callable[[T], Iterable[U | Aside]], *, sides: Sequence[str] = (), on_error: OnError = "fail"
    ) -> Stream[U]:
        """Every item of the iterable that ``fn(row)`` returns; ``Aside(name, row)`` goes to :meth:`side`."""
        plan = self._held()
        return Stream(plan.then(FlatMapStep(plan.gives, fn, checked_sides(sides), on_error)))

    def map_async(
        self,
        fn: Callable[[T], Awaitable[U | Aside]],
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
        plan, aside = self._held(), checked_sides(sides)
        return Stream(plan.then(MapAsyncStep(plan.gives, fn, concurrency, timeout, aside, on_error)))

    def union(self, *others: Stream[U]) -> Stream[T | U]:
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
        plans = [stream.plan for stream in (self, *others)]
        times = [plan.gives.time for plan in plans]
        if all(time is not None for time in times) and any(time != times[0] for time in times):
            plans = list(map(held, plans))
        return Stream(united(plans))

    @overload
    def key_by(self, fn: Callable[[T], U], /, *, on_error: OnError = "fail") -> KeyedStream[U, T]: ...

    @overload
    def key_by(self, *columns: str | Sequence[str]) -> KeyedStream[Any, T]: ...

    def key_by(
        self, *key: str | Sequence[str] | Callable[[T], Any], on_error: OnError = "fail"
    ) -> KeyedStream[Any, T]:
        """Bring the records of each key together: one or more column names, or a function of a row.

        Keys are compared in their canonical form: 1, 1.0 and True are one key, None is a key.

        Raises:
            UnknownName: the stream's columns are known, and one of the names is not among them.
        """
        return KeyedStream(self.plan, Key.of(self._given("key_by"), key, on_error))

    @answering(**LATE_BY)
    def event_time(
        self,
        time: str | Callable[[T], datetime | int] | None = None,
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
                did, whatever they keep of it. None: the times that a source of your own brings, with a
                :class:`~minishuffle.operators.base.TimedBatch`, each of whose batches has to be one. (With
                a column or function these are left out.)
            out_of_order: how far behind the latest record of its split another may come; the
                watermark stays so far behind. One that comes later yet is *late*.
            idle_after: without a record for so long, this stream holds no other's time back.
            watermarks: ``"batch"``: after a batch, several times a second. ``"each"``: after each
                record, so that what is late depends on the records' order alone.
            on_error: what becomes of a record that has no time.

        Raises:
            UnknownName: the stream's columns are known, and this is not among them.
            UsageError: it is None, and this is not right behind a source of your own.
        """
        return self._timed(time, out_of_order, idle_after, watermarks, on_error)

    @answering(**LOOKED_UP_ON)
    def broadcast_join(
        self, small: Stream[Any], on: On, how: Literal["inner", "left"] = "inner"
    ) -> Stream[dict[str, Any]]:
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
        draft: Stream[Any] | None = draft_in([small])
        if draft is not None:
            return draft
        if not isinstance(small, Stream):
            refuse_mixture("broadcast_join", "Stream", small)
        big, little = self.plan.gives, small.plan.gives
        step = LookUpRowsStep(big, little, column_pairs(on, how, big, little), how == "left")
        return Stream(look_up(self.plan, small.plan, step))

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
        from minishuffle.operators.unknown_columns import UnknownColumns

        given = self._given("to_table")
        found = rows_schema(self.plan, schema)
        if isinstance(found, UnknownColumns):
            return cast("Table", Draft(self.plan.then(UnknownStep(found))))
        plan = self._held(stays=on_error != "side" and given.time_column is not None)
        return Table(plan.then(ToTableStep(plan.gives, found, on_error)))

    # --- side outputs ------------------------------------------------------------------------------

    def side(self, name: str) -> Stream[Any]:
        """What the function of the step before this has put aside: rows that it gave as ``Aside(name, row)``.

        Raises:
            InvalidGraph: that step has no such side output: see ``sides=`` of :meth:`map`, :meth:`flat_map`
                and :meth:`KeyedStream.process`.
        """
        return Stream(self._side(name))

    @property
    def errors(self) -> Stream[dict[str, Any]]:
        """The records for which the function of the step before this has raised, with ``on_error="side"``:
        dicts with ``operator``, ``error`` and ``record``, which is a text if no exchange takes the record.

        Raises:
            InvalidGraph: that step puts no such records aside.
        """
        return Stream(self._side("errors"))

    # --- who gets which record -------------------------------------------------------------------

    def partition(self, fn: Callable[[T, int], int]) -> Stream[T]:
        """``fn(row, count)`` says which of ``count`` subtasks gets the row: 0 to ``count`` - 1.

        What ``fn`` raises fails the task.
        """
        return self._exchanged(Exchange("custom", choose=fn))

    # --- several at once ---------------------------------------------------------------------------

    @overload
    @classmethod
    def together(cls, *streams: Table) -> Table: ...  # type: ignore[overload-overlap]  # The first is meant.

    @overload
    @classmethod
    def together(cls, *streams: StreamBase) -> Stream[Any]: ...

    @classmethod
    def together(cls, *streams: StreamBase) -> Stream[Any] | Table:
        """One job of several streams or tables that each end in a sink; what they share runs once. It is a
        table if all of them are."""
        draft: Stream[Any] | None = draft_in(streams)
        if draft is not None:
            return draft
        for stream in streams:
            if not isinstance(stream, StreamBase) or not stream.plan.node.is_sink:
                raise InvalidGraph("together takes streams that end in a sink: add collect() or another one")
        kind = Table if all(isinstance(stream, Table) for stream in streams) else Stream
        return kind(together([stream.plan for stream in streams]))


class WindowedStream(Bridged, Generic[WindowKey, WindowRow, *Bounds]):
    """What :meth:`KeyedStream.window` and :meth:`~KeyedStream.session_window` give; every method leads
    back to a :class:`Stream`.

    A window's values go out once, when the watermark has reached its end, or is ``allowed_lateness`` past it:
    (key, start of the window, value) tuples. Their event time is the window's last microsecond, so that they
    may be cut into windows again. In :attr:`Stream.panes` the tuples end in the pane and whether it is final.
    Sessions and windows of so many records give (key, start, end, value).
    """

    __slots__ = ("_keyed", "_windowing")

    def __init__(self, keyed: KeyedStream[WindowKey, WindowRow], windowing: Windowing) -> None:
        self._keyed = keyed
        self._windowing = windowing

    def __repr__(self) -> str:
        return f"<WindowedStream of {self._windowing} over {self._keyed!r}>"

    def count(self) -> Stream[tuple[WindowKey, *Bounds, int]]:
        """The number of records of each key and window."""
        from minishuffle.operators.windows import one_more

        return self._stream("window_count", int, one_more)

    def reduce(
        self, fn: Callable[[WindowRow, WindowRow], WindowRow], *, on_error: OnError = "fail"
    ) -> Stream[tuple[WindowKey, *Bounds, WindowRow]]:
        """Combine the rows of each key and window: ``fn(value, row)``; the first row is the first value."""
        return self._stream("window_reduce", None, fn, on_error)

    def fold(
        self, create: Callable[[], S], add: Callable[[S, WindowRow], S], *, on_error: OnError = "fail"
    ) -> Stream[tuple[WindowKey, *Bounds, S]]:
        """Any Python value: ``create()`` makes it, ``add(value, row)`` returns the next one."""
        return self._stream("window_fold", create, add, on_error)

    # --- making nodes ----------------------------------------------------------------------------

    def _stream(
        self,
        label: str,
        create: Callable[[], Any] | None,
        add: Callable[[Any, Any], Any],
        on_error: OnError = "fail",
    ) -> Stream[Any]:
        plan, key = self._keyed.unkeyed, self._keyed.key
        step = WindowFoldStep(plan.gives, self._windowing, label, create, add, on_error)
        return Stream(Relation.of(step, rows_by_key(plan, key)))


class KeyedStream(
    Windowable["WindowedStream[K, T, datetime]", "WindowedStream[K, T, datetime, datetime]"],
    Bridged,
    Generic[K, T],
):
    """What :meth:`Stream.key_by` gives; every method leads back to a :class:`Stream`.

    ``emit`` says when a key's value goes out: ``"each"`` after every record, ``"batch"`` once for each
    key of a batch, ``"end"`` once for each key when the data end. By default ``"end"`` if they do
    end, else ``"batch"``.

    What comes are (key, value) tuples.
    """

    __slots__ = ("key", "unkeyed")

    def __init__(self, unkeyed: Relation, key: Key) -> None:
        self.unkeyed = unkeyed
        self.key = key

    def __repr__(self) -> str:
        return f"<KeyedStream by {self.key} of {Stream(self.unkeyed)!r}>"

    def count(self, emit: Emission | None = None) -> Stream[tuple[K, int]]:
        """The number of records of each key."""
        emission = emission_of(emit, bounded=self.unkeyed.bounded)
        return self._stream(CountRowsStep(self.unkeyed.gives, emission), alone=True)

    def reduce(
        self, fn: Callable[[T, T], T], emit: Emission | None = None, *, on_error: OnError = "fail"
    ) -> Stream[tuple[K, T]]:
        """Combine the rows of each key: ``fn(value, row)``, the first row being the first value."""
        emission = emission_of(emit, bounded=self.unkeyed.bounded)
        return self._stream(FoldStep(self.unkeyed.gives, None, fn, emission, on_error))

    def fold(
        self,
        create: Callable[[], S],
        add: Callable[[S, T], S],
        emit: Emission | None = None,
        *,
        on_error: OnError = "fail",
    ) -> Stream[tuple[K, S]]:
        """Any Python value for each key: ``create()`` makes it, ``add(value, row)`` returns the next one, or
        the same changed."""
        emission = emission_of(emit, bounded=self.unkeyed.bounded)
        return self._stream(FoldStep(self.unkeyed.gives, create, add, emission, on_error))

    def _known(self) -> Known:
        return self.unkeyed.gives

    def _windowed(self, windowing: Windowing) -> WindowedStream[K, T, *tuple[Any, ...]]:
        return WindowedStream(self, windowing)

    @overload
    def join(
        self,
        other: KeyedStream[K, V],
        how: Literal["inner"] = "inner",
        within: timedelta | None = None,
        late: LatePolicy = "drop",
        *,
        before: timedelta | None = None,
        after: timedelta | None = None,
    ) -> Stream[tuple[K, T, V]]: ...

    @overload
    def join(
        self,
        other: KeyedStream[K, V],
        how: Literal["left"],
        within: timedelta | None = None,
        late: LatePolicy = "drop",
        *,
        before: timedelta | None = None,
        after: timedelta | None = None,
    ) -> Stream[tuple[K, T, V | None]]: ...

    @overload
    def join(
        self,
        other: KeyedStream[K, V],
        how: Literal["right"],
        within: timedelta | None = None,
        late: LatePolicy = "drop",
        *,
        before: timedelta | None = None,
        after: timedelta | None = None,
    ) -> Stream[tuple[K, T | None, V]]: ...

    @overload
    def join(
        self,
        other: KeyedStream[K, V],
        how: Literal["full"],
        within: timedelta | None = None,
        late: LatePolicy = "drop",
        *,
        before: timedelta | None = None,
        after: timedelta | None = None,
    ) -> Stream[tuple[K, T | None, V | None]]: ...

    @overload
    def join(
        self,
        other: KeyedStream[K, V],
        how: Literal["semi", "anti"],
        within: timedelta | None = None,
        late: LatePolicy = "drop",
        *,
        before: timedelta | None = None,
        after: timedelta | None = None,
    ) -> Stream[T]: ...

    @answering(**JOINED_ON)
    def join(
        self,
        other: KeyedStream[Any, Any],
        how: How = "inner",
        within: timedelta | None = None,
        late: LatePolicy = "drop",
        *,
        before: timedelta | None = None,
        after: timedelta | None = None,
    ) -> Stream[Any]:
        """Pairs of records of one key whose event times are at most ``within`` apart, by default equal. The
        keys may stand in columns of other names: ``a.key_by("id").join(b.key_by("its_id"))``.

        What comes are (key, left row, right row) tuples. ``"left"``, ``"right"`` and ``"full"`` also give
        records of that side, or of both, without a partner, with None; ``"semi"`` and ``"anti"`` give the
        left rows that have a partner, or have none. A key that is None has none. The event time is the
        greater one of both records. If neither stream has event time, and both have an end, all records of a
        key match.

        A record is late if it is not after its own side's watermark: it is counted (``records_late``)
        and dropped, with ``"side"`` put into :attr:`Stream.late` or :attr:`Stream.late_right`, or with
        ``"fail"`` ends the job with an error.

        Args:
            before: how far the right record may be before the left one, instead of ``within``.
            after: how far it may be after it.

        Raises:
            InvalidGraph: a stream has no event time, and one has no end.
            UsageError: another argument is wrong, or the keys have different numbers of columns.
        """
        draft: Stream[Any] | None = draft_in([other])
        if draft is not None:
            return draft
        if not isinstance(other, KeyedStream):
            refuse_mixture("join", "KeyedStream", other)
        interval = Interval.of(self.unkeyed, other.unkeyed, Apart(within, before, after), late)
        keys = self.key.columns, other.key.columns
        step = JoinRowsStep(self.unkeyed.gives, other.unkeyed.gives, keys, how, interval)
        left, right = rows_by_key(self.unkeyed, self.key), rows_by_key(other.unkeyed, other.key)
        return Stream(Relation.of(step, left, right.at(1)))

    def process(
        self,
        on_record: Callable[[T, ProcessContext[K]], Iterable[U | Aside] | None],
        on_timer: Callable[[datetime, ProcessContext[K]], Iterable[V | Aside] | None] | None = None,
        *,
        ttl: timedelta | None = None,
        sides: Sequence[str] = (),
        on_error: OnError = "fail",
    ) -> Stream[U | V]:
        """Functions of your own with state and timers for each key.

        ``on_record(row, context)`` and ``on_timer(at, context)`` return an iterable of rows or None. The
        context has ``key``, ``time``, ``watermark``, ``state`` (a dict), ``set_timer(at)`` and
        ``delete_timer(at)``. Timers of event time fire when the watermark has passed them, in order;
        with ``clock="wall"`` when the clock has. State that was not touched for ``ttl`` is gone. Rows given
        as ``Aside(name, row)`` go to :meth:`Stream.side`.

        Raises:
            UsageError: an argument is wrong.
        """
        step = ProcessStep(self.unkeyed.gives, on_record, on_timer, ttl, checked_sides(sides), on_error)
        return self._stream(step)

    def _stream(self, step: Step, *, alone: bool = False) -> Stream[Any]:
        """What a step gives of the rows of each key; ``alone``: of nothing but the keys."""
        return Stream(Relation.of(step, rows_by_key(self.unkeyed, self.key, alone=alone)))


class Table(TableSources, StreamSinks, SideOutputs["Table"], Bridged):
    """Columns on their way through a job; see the module's docstring.

    Made by the class methods and by :meth:`Stream.to_table`, never by the constructor.
    """

    __slots__ = ()

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types.

        Raises:
            InvalidGraph: it ends in a sink, which gives no records.
        """
        return self._given("schema").arrow.remove_metadata()

    @property
    def columns(self) -> list[str]:
        """The names of the columns. Raises as :attr:`schema`."""
        return list(self.schema.names)

    def _column_names(self) -> Sequence[str]:
        return self.plan.gives.columns or ()

    def to_rows(self) -> Stream[dict[str, Any]]:
        """The same records as dicts, for Python functions. Event time stays."""
        return Stream(self.plan.then(ToRowsStep(self._given("to_rows"))))

    @property
    def errors(self) -> Stream[dict[str, Any]]:
        """The rows that did not fit the columns of the ``to_table`` before this, with ``on_error="side"``:
        dicts with ``operator``, ``error`` and ``record``, as :attr:`Stream.errors` has them.

        Raises:
            InvalidGraph: there is no such step directly before this.
        """
        return Stream(self._side("errors"))

    # --- columns ---------------------------------------------------------------------------------

    def select(self, *names: str | Sequence[str]) -> Table:
        """These columns only, in this order. Event time stays, also without its column.

        Raises:
            UnknownName: one is not among the columns.
        """
        wanted = key_columns(names, "select")
        given = self._given("select")
        plan = self._held(stays=given.time_column in wanted)
        return Table(plan.then(SelectStep(plan.gives, wanted)))

    def drop(self, *names: str | Sequence[str]) -> Table:
        """All columns but these. Event time stays, also without its column."""
        dropped = key_columns(names, "drop")
        given = self._given("drop")
        plan = self._held(stays=given.time_column not in dropped)
        return Table(plan.then(DropStep(plan.gives, dropped)))

    def rename(self, names: Mapping[str, str]) -> Table:
        """Columns under other names: ``rename({"old": "new"})``. Their order stays, and so does event
        time."""
        return self._then(RenameStep(self._given("rename"), names))

    def with_columns(self, **columns: pc.Expression | ColumnExpression) -> Table:
        """Columns that expressions give, in place of those of the same name or after the others.

        All read the columns as they were before: ``with_columns(total=col("price") * col("n"))``, with
        :func:`minishuffle.col`.
        Event time stays as it was, also if its column is replaced: call :meth:`event_time` for another one.
        Whole numbers divided by ``/`` give whole numbers (cast one to float64 for others); ``//`` and ``%``
        of ``col`` are those of Python. A result of ``+ - * /`` that does not fit into its type is an error;
        functions such as ``pc.add`` wrap around, unlike ``pc.add_checked``.

        Raises:
            UnknownName: an expression reads another column.
            UsageError: an argument is no expression, or its functions do not take these types.
        """
        from minishuffle.api.columns import plain_expression

        given = self._given("with_columns")
        plan = self._held(stays=given.time_column not in columns)
        plain = {name: plain_expression(each) for name, each in columns.items()}
        return Table(plan.then(WithColumnsStep(plan.gives, plain)))

    def filter(self, condition: pc.Expression | ColumnExpression) -> Table:
        """The rows for which the expression is true: ``filter(col("amount") > 10)``. Null is not true.

        Raises:
            UnknownName: the expression reads another column.
            UsageError: it is no expression, or gives no truth value.
        """
        from minishuffle.api.columns import plain_expression

        return self._then(FilterStep(self._given("filter"), plain_expression(condition)))

    def explode(self, column: str) -> Table:
        """Each row once for each value of the list in ``column``, which then holds that value; a row whose
        list is empty or null is left out.

        Raises:
            UnknownName: there is no such column.
            UsageError: the column's type is no list.
        """
        return self._then(ExplodeStep(self._given("explode"), column))

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
        from minishuffle.operators.unknown_columns import UnknownColumns

        taken = None if columns is None else key_columns((columns,), "map_batches(columns=...)")
        plan, given = self.plan, self._given("map_batches").untimed()
        if taken is not None and EVENT_TIME in taken:
            plan = self._held()
            given = plan.gives
        step = MapBatchesStep(given, fn, taken, batch_rows, on_error)
        found = mapped_columns(given.arrow, fn, schema, taken)
        if isinstance(found.schema, UnknownColumns):
            return cast("Table", Draft(plan.then(step).then(UnknownStep(found.schema))))
        time = given.time
        if time is not None:
            stays = found.keeps_time if time.is_beside else time.column in found.schema.names
            time = time if stays else None
        known = Known(found.schema, time)
        mapped = plan.then(replace(step, found=known))
        return Table(mapped.then(CheckStep(known, found.declared)))

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
        plans = [table.plan for table in (self, *others)]
        for plan in plans:
            plan.check_open("union")
        times = [plan.gives.time for plan in plans]
        if all(time is not None for time in times) and any(time != times[0] for time in times):
            plans = list(map(held, plans))
        return Table(united(conformed(plans)))

    # --- time and keys -----------------------------------------------------------------------------

    @answering(**LATE_BY)
    def event_time(
        self,
        column: str | None = None,
        *,
        out_of_order: timedelta = timedelta(0),
        idle_after: timedelta | None = None,
        watermarks: Literal["batch", "each"] = "batch",
        on_error: OnError = "fail",
    ) -> Table:
        """Say in which column is when each row happened, for windows and joins; call it right after the
        source.

        The column holds timestamps (without a time zone: in UTC), dates or int microseconds since 1970. None:
        the times are those that a source of your own brings, as in :meth:`Stream.event_time`. Steps after
        this keep the event time, whether they keep that column or not; ``map_batches`` only with it.

        Args:
            out_of_order: how far behind the latest row of its split another may come; the watermark stays so
                far behind. One that comes later yet is *late*.
            idle_after: without a row for so long, this table holds no other's time back.
            watermarks: ``"batch"``: after a batch, several times a second. ``"each"``: after each row, so
                that what is late depends on the rows' order alone.
            on_error: what becomes of a row that has no time.

        Raises:
            UnknownName: there is no such column.
            UsageError: it has a type that holds no times; or it is None, and this is not right behind a
                source of your own.
        """
        return self._timed(column, out_of_order, idle_after, watermarks, on_error)

    def key_by(self, *columns: str | Sequence[str]) -> KeyedTable:
        """Bring the rows of each key together: one or more columns.

        Keys are compared in their canonical form: 1, 1.0 and True are one key, null is a key.

        Raises:
            UnknownName: one of these is no column.
            UsageError: one of these has a type that no key has, such as a list.
        """
        return KeyedTable(self.plan, column_keys(self._given("key_by"), columns))

    @answering(**LOOKED_UP_ON)
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
        draft: Table | None = draft_in([small])
        if draft is not None:
            return draft
        if not isinstance(small, Table):
            refuse_mixture("broadcast_join", "Table", small)
        big, little = self.plan.gives, small.plan.gives
        pairs = column_pairs(on, how, big, little)
        step = LookUpColumnsStep(big, little, pairs, how == "left", suffix)
        return Table(look_up(self.plan, small.plan, step))

    # --- Spark -------------------------------------------------------------------------------------

    def to_spark(self, name: str = "result") -> Table:
        """Keep the rows for Spark to read: ``format("minishuffle").option("sink", name)``.

        They get the table's schema, timestamps in microseconds: in UTC, or naive if they are.
        """
        checked_name(name, "to_spark")
        from minishuffle.connectors.spool import SpoolSink
        from minishuffle.plan.sparktypes import spark_schema

        schema = spark_schema(self._given("to_spark").schema)
        boundary = Boundary(name, schema_message(schema))
        return self._sink(f"to_spark {name}", SpoolSink(name, schema), boundary)


class WindowedTable(Bridged):
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

    def count(self) -> Table:
        """The number of rows of each key and window, in the column ``count``."""
        return self._table(None)

    def aggregate(self, **columns: tuple[str, str]) -> Table:
        """Columns of each key's and window's rows, as :meth:`KeyedTable.aggregate` makes them.

        Raises:
            UsageError: no columns, an unknown function, or two columns of one name.
            UnknownName: there is no such column.
        """
        return self._table(columns)

    def _table(self, columns: Aggregates | None) -> Table:
        plan, keys = self._keyed.unkeyed, self._keyed.keys
        step = WindowAggregateStep(plan.gives, keys, self._windowing, columns)
        return Table(Relation.of(step, hashed(plan, keys)))


class KeyedTable(Windowable["WindowedTable", "WindowedTable"], Bridged):
    """What :meth:`Table.key_by` gives; every method leads back to a :class:`Table`.

    ``emit`` says when a key's row goes out: ``"each"`` after every row, ``"batch"`` once for each key of a
    batch, ``"end"`` once for each key when the data end. By default ``"end"`` if they do end, else
    ``"batch"``.
    """

    __slots__ = ("keys", "unkeyed")

    def __init__(self, unkeyed: Relation, keys: tuple[str, ...]) -> None:
        self.unkeyed = unkeyed
        self.keys = keys

    def __repr__(self) -> str:
        return f"<KeyedTable by {', '.join(self.keys)} of {Table(self.unkeyed)!r}>"

    def _column_names(self) -> Sequence[str]:
        return self.unkeyed.gives.columns or ()

    def count(self, emit: Emission | None = None) -> Table:
        """The number of rows of each key, in the column ``count``."""
        emission = emission_of(emit, bounded=self.unkeyed.bounded)
        return self._table(CountColumnsStep(self.unkeyed.gives, self.keys, emission))

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
        emission = emission_of(emit, bounded=self.unkeyed.bounded)
        return self._table(AggregateStep(self.unkeyed.gives, self.keys, columns, emission))

    def distinct(self) -> Table:
        """Each key once, as soon as its first row comes: the key columns."""
        return self._table(DistinctStep(self.unkeyed.gives, self.keys))

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
        step = TopNStep(
            self.unkeyed.gives, self.keys, n, by, descending=descending, bounded=self.unkeyed.bounded
        )
        return self._table(step)

    def _known(self) -> Known:
        return self.unkeyed.gives

    def _windowed(self, windowing: Windowing) -> WindowedTable:
        return WindowedTable(self, windowing)

    @answering(**JOINED_ON)
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

        The keys may have other names there: ``a.key_by("id").join(b.key_by("its_id"))``. The columns are the
        keys (by this one's names), this table's others and the other's, with ``suffix``
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
        draft: Table | None = draft_in([other])
        if draft is not None:
            return draft
        if not isinstance(other, KeyedTable):
            refuse_mixture("join", "KeyedTable", other)
        interval = Interval.of(self.unkeyed, other.unkeyed, Apart(within, before, after), late)
        sides, keys = (self.unkeyed.gives, other.unkeyed.gives), (self.keys, other.keys)
        return self._joined(other, JoinColumnsStep(*sides, keys, how, interval, suffix))

    @answering(**JOINED_ON)
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
        draft: Table | None = draft_in([other])
        if draft is not None:
            return draft
        if not isinstance(other, KeyedTable):
            refuse_mixture("asof_join", "KeyedTable", other)
        micros = None if tolerance is None else checked_duration(tolerance, "asof_join(tolerance=...)")
        interval = Interval.of(self.unkeyed, other.unkeyed, Apart(timedelta(0)), late, "asof_join")
        sides, keys = (self.unkeyed.gives, other.unkeyed.gives), (self.keys, other.keys)
        return self._joined(other, AsOfStep(*sides, keys, micros, interval, suffix))

    def _table(self, step: Step) -> Table:
        """What a step gives of the rows of each key, which meet in one subtask."""
        return Table(Relation.of(step, hashed(self.unkeyed, self.keys)))

    def _joined(self, other: KeyedTable, step: Step) -> Table:
        """What a step gives of the rows of each key of both tables."""
        left, right = hashed(self.unkeyed, self.keys), hashed(other.unkeyed, other.keys)
        return Table(Relation.of(step, left, right.at(1)))
