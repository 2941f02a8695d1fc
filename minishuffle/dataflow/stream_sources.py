"""Where a stream's records come from: the class methods of :class:`~minishuffle.dataflow.stream.Stream`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from minishuffle.dataflow.arguments import arrow_schema, check_callable, checked_paths
from minishuffle.dataflow.knownrows import ItemRows, KnownRows, TypedRows
from minishuffle.dataflow.operators.base import Source
from minishuffle.dataflow.stream_base import StreamBase
from minishuffle.errors import UsageError

if TYPE_CHECKING:
    from minishuffle.dataflow.stream import Stream

__all__ = ["StreamSources"]

U = TypeVar("U")
"""A row."""


class StreamSources(StreamBase):
    """Makes streams."""

    __slots__ = ()

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
        stream: Stream[str] = cls._made("text", source, rows)
        return stream if parallelism is None else stream.parallel(parallelism)

    @classmethod
    def items(cls, items: Iterable[U]) -> Stream[U]:
        """A collection in memory, which travels with the job.

        Raises:
            ResourceExhausted: it does not fit into a job; no more of it is taken than shows that.
        """
        from minishuffle.connectors.items import ItemsSource
        from minishuffle.dataflow.pickling import items_that_fit

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
        return cls._made("items", source, ItemRows(source.items))

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
        return cls._made("generate", GeneratorSource(fn or number_rows, rate=rate, records=records))

    @classmethod
    def source(cls, source: Source) -> Stream[Any]:
        """The user's own :class:`~minishuffle.dataflow.operators.base.Source`, named after its class."""
        name = type(source).__name__
        if isinstance(source, type) or not isinstance(source, Source):
            raise UsageError(f"{name} is not a source: it needs the methods splits() and read(split, offset)")
        format = getattr(source, "format", "rows")
        if format != "rows":
            raise UsageError(
                f"{name}.format is {format!r}: write Table.source(...) for 'arrow', or set it to 'rows'"
            )
        return cls._made(name, source)

    @classmethod
    def _made(cls, label: str, source: Source, rows: KnownRows | None = None) -> Stream[Any]:
        return cast("Stream[Any]", cls._from_source(label, source, rows=rows))
