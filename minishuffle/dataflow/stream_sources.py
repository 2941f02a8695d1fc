"""Where a stream's records come from: the class methods of :class:`~minishuffle.dataflow.stream.Stream`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from minishuffle.dataflow.arguments import (
    arrow_schema,
    check_callable,
    checked_name,
    checked_paths,
    schema_message,
)
from minishuffle.dataflow.nodes import Boundary, Feed, Node
from minishuffle.dataflow.numbers import number_batch, number_rows
from minishuffle.dataflow.operators.base import Source
from minishuffle.dataflow.stream_base import StreamBase
from minishuffle.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from minishuffle.dataflow.stream import Stream

__all__ = ["StreamSources"]

U = TypeVar("U")
"""A row."""


class StreamSources(StreamBase):
    """Makes streams."""

    __slots__ = ()

    @classmethod
    def text(cls, *paths: str | Path, parallelism: int | None = None) -> Stream[str]:
        """Lines of UTF-8 files, without their line ends. A path may be a directory or a glob pattern.

        Raises:
            UnknownName: there is no such file.
        """
        from minishuffle.dataflow.operators.sources import TextSource

        stream: Stream[str] = cls._made("text", TextSource(checked_paths(paths, "Stream.text")))
        return stream if parallelism is None else stream.parallel(parallelism)

    @classmethod
    def parquet(cls, *paths: str | Path, columns: Sequence[str] | None = None) -> Stream[Any]:
        """Arrow batches of Parquet files, of all columns or of those named.

        Files may differ: a column that one lacks is null there (one that is named must be in all), and
        types that differ become one that holds the values of all: float32 and float64 become float64.

        Raises:
            UnknownName: there is no such file or column.
            UsageError: the files have a column in types with none in common.
        """
        from minishuffle.dataflow.operators.sources import ParquetSource

        if isinstance(columns, str):
            raise UsageError(f"columns takes a list of names: write columns=[{columns!r}]")
        source = ParquetSource(checked_paths(paths, "Stream.parquet"), columns)
        return cls._made("parquet", source, source.schema)

    @classmethod
    def csv(
        cls,
        *paths: str | Path,
        schema: pa.Schema | Mapping[str, Any],
        nulls: Sequence[str] = ("",),
        header: bool = True,
        delimiter: str = ",",
    ) -> Stream[Any]:
        """Arrow batches of UTF-8 CSV files: the columns of ``schema``, see :meth:`Stream.schema`.

        Args:
            nulls: spellings that stand for null where they are not quoted.
            header: each file's first line names its columns; else they are those of ``schema``.

        Raises:
            UnknownName: there is no such file, or it lacks a column.
        """
        from minishuffle.dataflow.operators.csv import CsvSource

        if isinstance(nulls, str):
            raise UsageError(f"nulls takes a list of spellings: write nulls=[{nulls!r}]")
        columns = arrow_schema(schema)
        source = CsvSource(checked_paths(paths, "Stream.csv"), columns, nulls, header, delimiter)
        return cls._made("csv", source, columns)

    @classmethod
    def items(cls, items: Iterable[U]) -> Stream[U]:
        """A collection in memory, which travels with the job: rows, or a table (of pyarrow, or what gives
        itself as one: a DataFrame of pandas, say)."""
        import pyarrow as pa

        from minishuffle.dataflow.operators.sources import ArrowItemsSource, ItemsSource

        if isinstance(items, pa.Table | pa.RecordBatch):
            return cls._made("items", ArrowItemsSource(items), items.schema)
        if hasattr(items, "__arrow_c_stream__"):
            try:
                table = pa.table(items).replace_schema_metadata(None)
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise UsageError(
                    f"Stream.items cannot take a {type(items).__name__} as a table: {error}"
                ) from error
            return cls._made("items", ArrowItemsSource(table), table.schema)
        if not isinstance(items, Iterable) or isinstance(items, str | bytes | Mapping):
            raise UsageError(
                f"Stream.items takes a list of rows or a pyarrow.Table, not a {type(items).__name__}: "
                "put a single row into a list"
            )
        return cls._made("items", ItemsSource(list(items)))

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
        return cls._made("generate", GeneratorSource(fn, rate=rate, records=records, format=format))

    @classmethod
    def source(cls, source: Source) -> Stream[Any]:
        """The user's own :class:`~minishuffle.dataflow.operators.base.Source`, named after its class."""
        name = type(source).__name__
        if isinstance(source, type) or not isinstance(source, Source):
            raise UsageError(f"{name} is not a source: it needs the methods splits() and read(split, offset)")
        format = getattr(source, "format", "rows")
        if format not in ("rows", "arrow"):
            raise UsageError(f"{name}.format is {format!r}: set it to 'rows' or 'arrow'")
        return cls._made(name, source)

    @classmethod
    def from_spark(
        cls, name: str, schema: pa.Schema | Mapping[str, Any], *, bounded: bool = True
    ) -> Stream[Any]:
        """Arrow batches that Spark writes while the job runs.

        There: ``df.write.format("minishuffle").option("stream", name)``. ``schema`` is that of the
        DataFrame, see :meth:`Stream.schema`; one that differs is refused.
        A bounded stream ends with the first write, one that is not bounded with the job.

        Raises:
            UsageError: there is no column, or one of a type that no DataFrame comes in.
        """
        from minishuffle.dataflow.sparktypes import check_written

        columns = arrow_schema(schema)
        check_written(columns, "Stream.from_spark")
        boundary = Boundary(checked_name(name, "Stream.from_spark"), schema_message(columns), bounded)
        feeds = (Feed(Node(f"from_spark {name}", boundary=boundary)),)
        return cast("Stream[Any]", cls._new(feeds, "arrow", columns))

    @classmethod
    def _made(cls, label: str, source: Source, schema: pa.Schema | None = None) -> Stream[Any]:
        return cast("Stream[Any]", cls._from_source(label, source, schema))
