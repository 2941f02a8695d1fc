"""What a user writes: sources, transformations and sinks, put together without running anything.

A :class:`Stream` never changes: every method gives a new one, and what several streams share runs
once (but ``name`` and ``parallel`` make another operator of the one before them). Batches are lists
of Python objects (*rows*) or Arrow record batches, as the source has them; a function of a row on an
Arrow stream gets dicts, a function of batches on rows gets Arrow.

``on_error`` says what becomes of a record whose function raises: ``"fail"`` ends the job with that
error, ``"skip"`` drops and counts that record alone, ``"dead_letter"`` also writes it with the error
into the job's log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias

from typing_extensions import TypeVar

from minishuffle.dataflow.arguments import (
    arrow_schema,
    check_callable,
    check_columns,
    checked_parallelism,
    checked_paths,
    key_columns,
    parquet_schema,
    same_schema,
)
from minishuffle.dataflow.nodes import Exchange, Feed, Format, Node, check_not_sinks, with_last_step
from minishuffle.dataflow.numbers import number_batch, number_rows
from minishuffle.dataflow.operators.base import Operator, Source
from minishuffle.errors import InvalidGraph, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.dataflow.keyed import KeyedStream
    from minishuffle.dataflow.operators.chained import OnError
    from minishuffle.dataflow.operators.sinks import Sink

__all__ = ["Stream"]

T = TypeVar("T", default=Any)
"""A row."""
U = TypeVar("U")
"""A row of the stream that a function makes."""

Columns: TypeAlias = tuple[str, ...] | None
Feeds: TypeAlias = tuple[Feed, ...]


class Stream(Generic[T]):
    """Records on their way through a job; see the module's docstring.

    Made by the class methods, never by the constructor.
    """

    __slots__ = ("_columns", "_feeds", "_format", "_schema")

    def __init__(
        self, feeds: Feeds, format: Format, schema: pa.Schema | None = None, columns: Columns = None
    ) -> None:
        self._feeds = feeds
        self._format: Format = format
        self._schema = schema
        self._columns = columns if schema is None else tuple(schema.names)

    def __repr__(self) -> str:
        return f"<Stream {', '.join(feed.node.label for feed in self._feeds)} ({self._format})>"

    # --- sources ---------------------------------------------------------------------------------

    @classmethod
    def text(cls, *paths: str | Path, parallelism: int | None = None) -> Stream[str]:
        """Lines of UTF-8 files, without their line ends. A path may be a directory or a glob pattern.

        Raises:
            UnknownName: there is no such file.
        """
        from minishuffle.dataflow.operators.sources import TextSource

        stream: Stream[str] = _source_stream("text", TextSource(checked_paths(paths, "Stream.text")))
        return stream if parallelism is None else stream.parallel(parallelism)

    @classmethod
    def parquet(cls, *paths: str | Path, columns: Sequence[str] | None = None) -> Stream[Any]:
        """Arrow batches of Parquet files, of all columns or of those named.

        Raises:
            UnknownName: there is no such file or column.
        """
        from minishuffle.dataflow.operators.sources import ParquetSource

        if isinstance(columns, str):
            raise UsageError(f"columns takes a list of names: write columns=[{columns!r}]")
        source = ParquetSource(checked_paths(paths, "Stream.parquet"), columns)
        splits = source.splits()
        return _source_stream("parquet", source, parquet_schema(splits[0][0], columns) if splits else None)

    @classmethod
    def items(cls, items: Iterable[U]) -> Stream[U]:
        """A collection in memory, which travels with the job: rows, or a ``pyarrow`` table or batch."""
        import pyarrow as pa

        from minishuffle.dataflow.operators.sources import ArrowItemsSource, ItemsSource

        if isinstance(items, pa.Table | pa.RecordBatch):
            return _source_stream("items", ArrowItemsSource(items), items.schema)
        if not isinstance(items, Iterable) or isinstance(items, str | bytes | Mapping):
            raise UsageError(
                f"Stream.items takes a list of rows or a pyarrow.Table, not a {type(items).__name__}: "
                "put a single row into a list"
            )
        return _source_stream("items", ItemsSource(list(items)))

    @classmethod
    def generate(
        cls,
        fn: Callable[[int, int], Any] | None = None,
        *,
        rate: float | None = None,
        records: int | None = None,
        format: Literal["rows", "arrow"] = "rows",
    ) -> Stream[Any]:
        """Records by number: ``fn(start, count)`` gives ``count`` of them, from number ``start`` on.

        ``fn`` returns a list or, with ``format="arrow"``, a record batch, and the same for the same
        numbers. Without it a record is its number (column ``number`` in Arrow). ``rate`` is in
        records/s over all subtasks (None: as fast as they are taken); ``records`` None: without end.
        """
        from minishuffle.dataflow.operators.sources import GeneratorSource

        if format not in ("rows", "arrow"):
            raise UsageError(f"format is {format!r}: write 'rows' or 'arrow'")
        if fn is None:
            fn = number_rows if format == "rows" else number_batch
        check_callable(fn, "Stream.generate")
        return _source_stream("generate", GeneratorSource(fn, rate=rate, records=records, format=format))

    @classmethod
    def source(cls, source: Source) -> Stream[Any]:
        """The user's own :class:`~minishuffle.dataflow.operators.base.Source`, named after its class."""
        name = type(source).__name__
        if isinstance(source, type) or not isinstance(source, Source):
            raise UsageError(f"{name} is not a source: it needs the methods splits() and read(split, offset)")
        format = getattr(source, "format", "rows")
        if format not in ("rows", "arrow"):
            raise UsageError(f"{name}.format is {format!r}: set it to 'rows' or 'arrow'")
        return _source_stream(name, source)

    # --- transformations -------------------------------------------------------------------------

    def map(self, fn: Callable[[T], U], *, on_error: OnError = "fail") -> Stream[U]:
        """One row for each row: ``fn(row)``."""
        from minishuffle.dataflow.operators.functions import MapRows

        check_callable(fn, "map")
        return self._on_rows(MapRows(fn, on_error))

    def filter(self, fn: Callable[[T], Any], *, on_error: OnError = "fail") -> Stream[T]:
        """The rows for which ``fn(row)`` is true."""
        from minishuffle.dataflow.operators.functions import FilterRows

        check_callable(fn, "filter")
        rows: Stream[T] = self._on_rows(FilterRows(fn, on_error))
        return Stream(rows._feeds, "rows", self._schema, self._columns)

    def flat_map(self, fn: Callable[[T], Iterable[U]], *, on_error: OnError = "fail") -> Stream[U]:
        """Every item of the iterable that ``fn(row)`` returns."""
        from minishuffle.dataflow.operators.functions import FlatMapRows

        check_callable(fn, "flat_map")
        return self._on_rows(FlatMapRows(fn, on_error))

    def map_batches(self, fn: Callable[[Any], Any], *, on_error: OnError = "fail") -> Stream[Any]:
        """What ``fn(batch)`` makes of each ``pyarrow.RecordBatch``: another, a table, or None for no rows.

        On a stream of rows, batches are made with the schema declared by :meth:`schema`, or with
        what the first rows of each subtask show.
        """
        from minishuffle.dataflow.operators.functions import MapBatches

        check_callable(fn, "map_batches")
        feeds = self._open_feeds("map_batches")
        operators = (*self._to_arrow(), MapBatches(fn, on_error))
        return _stream_of(Node("map_batches", feeds, operators=operators), "arrow")

    def union(self, *others: Stream[T]) -> Stream[T]:
        """The records of this stream and the others, in no particular order."""
        if not others:
            raise InvalidGraph("union takes at least one other stream")
        for other in others:
            if not isinstance(other, Stream):
                raise UsageError(f"union takes streams, not a {type(other).__name__}")
        streams = (self, *others)
        feeds = tuple(feed for stream in streams for feed in stream._open_feeds("union"))
        format = self._format if len({stream._format for stream in streams}) == 1 else "mixed"
        schema = self._schema if all(same_schema(other._schema, self._schema) for other in others) else None
        columns = self._columns if all(other._columns == self._columns for other in others) else None
        return Stream(feeds, format, schema, columns)

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

    # --- who gets which record -------------------------------------------------------------------

    def rebalance(self) -> Stream[T]:
        """Deal records to all subtasks of the next operator in turn."""
        return self._exchanged("rebalance", Exchange("rebalance"))

    def rescale(self) -> Stream[T]:
        """Like :meth:`rebalance`, but each subtask deals to a few neighbours only."""
        return self._exchanged("rescale", Exchange("rescale"))

    def forward(self) -> Stream[T]:
        """Leave records on the subtask of the same number; both operators must be equally parallel."""
        return self._exchanged("forward", Exchange("forward"))

    def broadcast(self) -> Stream[T]:
        """Give every record to every subtask of the next operator."""
        return self._exchanged("broadcast", Exchange("broadcast"))

    def partition(self, fn: Callable[[T, int], int]) -> Stream[T]:
        """``fn(row, count)`` says which of ``count`` subtasks gets the row: 0 to ``count`` - 1.

        The stream's records become rows. What ``fn`` raises fails the job.
        """
        check_callable(fn, "partition")
        stream: Stream[T] = self
        if self._format != "rows":
            from minishuffle.dataflow.operators.convert import ToRows

            stream = self._beside("partition", ToRows(), "rows")
        return stream._exchanged("partition", Exchange("custom", choose=fn))

    # --- what is known of the operator before ----------------------------------------------------

    def schema(self, schema: pa.Schema | Mapping[str, Any]) -> Stream[T]:
        """Declare columns and types: a ``pyarrow.Schema``, or a map from name to type.

        A type is an Arrow type, its name ("int64"), or int, float, str, bool or bytes. Arrow batches
        are checked against it as they pass; rows are not, but become Arrow by it wherever they do,
        dicts by name, tuples and lists by position.

        Raises:
            UsageError: it is not a schema.
            UnknownName: the stream's columns are known, and one of these is not among them.
        """
        declared = arrow_schema(schema)
        feeds = self._open_feeds("schema")
        if self._format == "rows":
            return Stream(feeds, "rows", declared)
        from minishuffle.dataflow.operators.convert import CheckSchema

        check_columns(declared.names, self._columns, "schema")
        checked: Stream[T] = self._beside("schema", CheckSchema(declared), self._format)
        return Stream(checked._feeds, self._format, declared)

    def parallel(self, count: int) -> Stream[T]:
        """Run the operator before this as ``count`` subtasks, whatever the job's parallelism is."""
        count = checked_parallelism(count, "parallel")
        return self._with_last_step("parallel", lambda node: replace(node, parallelism=count))

    def name(self, label: str) -> Stream[T]:
        """Name the operator before this, for tables, metrics and errors."""
        if not isinstance(label, str) or not label.strip():
            raise UsageError(f"name takes a text, not {label!r:.80}")
        return self._with_last_step("name", lambda node: node.named(label))

    # --- sinks -----------------------------------------------------------------------------------

    def to_parquet(self, path: str | Path) -> Stream[Any]:
        """Write Parquet files into the directory ``path``, which must not hold any.

        Raises:
            UsageError: it holds some, or is a file.
        """
        from minishuffle.dataflow.operators.sinks import ParquetSink

        convert = () if self._schema is None else self._to_arrow()
        return self._sink("to_parquet", ParquetSink(path), *convert)

    def collect(self) -> Stream[Any]:
        """Send every row to the program that submitted the job; Arrow as dicts."""
        from minishuffle.dataflow.operators.sinks import CollectSink

        return self._sink("collect", CollectSink())

    def to_count(self) -> Stream[Any]:
        """Count the records; each subtask's result is its number."""
        from minishuffle.dataflow.operators.sinks import CountSink

        return self._sink("to_count", CountSink())

    def print(self) -> Stream[Any]:
        """Write each row into the job's log."""
        from minishuffle.dataflow.operators.sinks import PrintSink

        return self._sink("print", PrintSink())

    def to(self, sink: Sink) -> Stream[Any]:
        """Give the batches to the user's own :class:`~minishuffle.dataflow.operators.sinks.Sink`."""
        from minishuffle.dataflow.operators.sinks import UserSink

        if isinstance(sink, type):
            raise UsageError(f"to takes a sink, not the class {sink.__name__}: write {sink.__name__}(...)")
        return self._sink(type(sink).__name__, UserSink(sink))

    @classmethod
    def together(cls, *streams: Stream[Any]) -> Stream[Any]:
        """One job of several streams that each end in a sink; what they share runs once."""
        for stream in streams:
            if not isinstance(stream, Stream) or not all(feed.node.is_sink for feed in stream._feeds):
                raise InvalidGraph("together takes streams that end in a sink: add collect() or another one")
        if not streams:
            raise InvalidGraph("together takes at least one stream")
        return Stream(tuple(feed for stream in streams for feed in stream._feeds), "rows")

    @property
    def ends(self) -> tuple[Node, ...]:
        """The nodes that this stream ends with: one, or several after union or together."""
        return tuple(dict.fromkeys(feed.node for feed in self._feeds))

    # --- making nodes ----------------------------------------------------------------------------

    def _open_feeds(self, method: str) -> Feeds:
        check_not_sinks(self._feeds, method)
        return self._feeds

    def _to_arrow(self) -> tuple[Operator, ...]:
        """What makes Arrow of this stream's batches, if they are not."""
        from minishuffle.dataflow.operators.convert import ToArrow

        return () if self._format == "arrow" else (ToArrow(self._schema),)

    def _to_rows(self) -> tuple[Operator, ...]:
        """What makes rows of this stream's batches, if they are not."""
        from minishuffle.dataflow.operators.convert import ToRows

        return () if self._format == "rows" else (ToRows(),)

    def _on_rows(self, operator: Operator) -> Stream[Any]:
        feeds = self._open_feeds(operator.name)
        return _stream_of(Node(operator.name, feeds, operators=(*self._to_rows(), operator)), "rows")

    def _beside(self, method: str, operator: Operator, format: Format) -> Stream[Any]:
        """A step that runs where its input does and changes no column."""
        feeds = self._open_feeds(method)
        node = Node(operator.name, feeds, operators=(operator,), follows=True, is_auxiliary=True)
        return Stream((Feed(node),), format, self._schema, self._columns)

    def _sink(self, label: str, sink: Operator, *convert: Operator) -> Stream[Any]:
        feeds = self._open_feeds(label)
        node = Node(label, feeds, operators=(*convert, sink), follows=True, is_sink=True)
        return _stream_of(node.named(label), "rows")

    def _exchanged(self, method: str, exchange: Exchange) -> Stream[T]:
        feeds = self._open_feeds(method)
        if any(feed.exchange is not None for feed in feeds):
            raise InvalidGraph(f"{method}() follows another choice of subtasks: leave one of them out")
        chosen = tuple(Feed(feed.node, exchange) for feed in feeds)
        return Stream(chosen, self._format, self._schema, self._columns)

    def _with_last_step(self, method: str, change: Callable[[Node], Node]) -> Stream[T]:
        if len(self._feeds) > 1 or self._feeds[0].exchange is not None:
            raise InvalidGraph(f"{method}() must directly follow the operator that it is about")
        node = with_last_step(self._feeds[0].node, change)
        return Stream((Feed(node),), self._format, self._schema, self._columns)


def _stream_of(node: Node, format: Format, columns: Columns = None) -> Stream[Any]:
    return Stream((Feed(node),), format, columns=columns)


def _source_stream(label: str, source: Source, schema: pa.Schema | None = None) -> Stream[Any]:
    return Stream((Feed(Node(label, source=source)),), getattr(source, "format", "rows"), schema)
