"""Where a table's records come from: the class methods of :class:`~minishuffle.api.stream.Table`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from minishuffle.api.bridges import DELIMITED_BY, answering
from minishuffle.api.drafts import Draft
from minishuffle.api.stream_base import StreamBase
from minishuffle.errors import UsageError
from minishuffle.limits import DRAFT_ROWS
from minishuffle.operators.base import AnySource, Source
from minishuffle.plan.arguments import check_callable, checked_name, checked_paths, discovery_seconds
from minishuffle.plan.column_steps import CheckStep, UnknownStep
from minishuffle.plan.end_steps import ExternalStep, ScanStep
from minishuffle.plan.nodes import Boundary, Known, ObjectSchema, Relation
from minishuffle.plan.schemas import (
    StepColumns,
    arrow_schema,
    called_schema,
    checked_types,
    schema_message,
    with_schema,
)

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TableSources"]


class TableSources(StreamBase):
    """Makes tables. Where ``schema`` is asked for, it is a ``pyarrow.Schema`` or a dict of name to type: an
    Arrow type, its name ("int64"), or int, float, str, bool or bytes."""

    __slots__ = ()

    @classmethod
    @answering(**DELIMITED_BY)
    def from_files(
        cls,
        *paths: str | Path,
        format: Literal["parquet", "csv", "json"] = "parquet",
        schema: pa.Schema | Mapping[str, Any] | None = None,
        nulls: Sequence[str] = ("",),
        header: bool = True,
        delimiter: str = ",",
        partitioning: Literal["hive"] | None = None,
        on_error: Literal["fail", "skip", "dead_letter"] = "fail",
    ) -> Self:
        """The rows of files; a path may be a directory, a glob pattern or a URI such as ``s3://bucket/folder``,
        and CSV and JSON files may be compressed (``.gz``, ``.bz2``, ``.zst``, ``.lz4``).

        All files are looked at now. Workers read these and list none: one that has changed since, or is gone,
        ends the job. Where they differ, a column gets a type that holds the values of all, and is null where
        a file lacks it. Of CSV and JSON without ``schema`` that means to read all of them once. Integers,
        literals of digits only, are int64, uint64 or decimal128(38, 0), whichever is the first to hold all of
        a column; one that no float64 holds, in a column with fractions, is refused. Texts in JSON are times
        if all of a column are, in one form.

        Args:
            format: CSV files are UTF-8; JSON files have one object a line.
            schema: the columns to read, and their types; those in names of directories come in any case.
            nulls: (CSV) spellings that stand for null where they are not quoted.
            header: (CSV) each file's first line names its columns; else they are those of ``schema``.
            delimiter: (CSV) between two values.
            partitioning: ``"hive"``: the paths are directories, and the names of those below, such as
                ``day=2026-01-01``, give columns: texts, unless ``schema`` says another type.
            on_error: (CSV, JSON) what is done about a record that cannot be read, or does not fit: "fail"
                ends the job, "skip" leaves it out and counts it, "dead_letter" also writes it into the job's
                log with file, number and byte.

        Raises:
            UnknownName: there is no such file or column.
            InvalidGraph: there is no ``schema``, and a file of CSV or JSON has more than 256 MiB.
            UsageError: a file cannot be read; two have a column in types with none in common.
            WrongInput: a record cannot be read in any types.
        """
        from minishuffle.connectors.recordfiles import TooLarge
        from minishuffle.plan.unknownschemas import unknown_columns

        files = checked_paths(paths, "Table.from_files")
        declared: pa.Schema | None = with_schema(schema, lambda columns: columns, lambda: None)
        if isinstance(nulls, str):
            raise UsageError(f"nulls takes a list of spellings: write nulls=[{nulls!r}]")
        if partitioning not in (None, "hive"):
            raise UsageError(f"partitioning is {partitioning!r}: write 'hive'")
        read = partial(_source_of_files, format=format, csv=(nulls, header, delimiter), on_error=on_error)
        made = partial(read if partitioning is None else partial(_hive_source, read), files, declared)
        try:
            source = made()
        except TooLarge as error:
            unknown = unknown_columns("Table.from_files", error.why, error.advice, "schema={}")
            return cls._checked(format, made(head=DRAFT_ROWS), StepColumns(unknown))
        return cls._scanned(format, source, source.schema)

    @classmethod
    def from_arrow(cls, data: Any) -> Self:
        """A table or a batch of pyarrow in memory, or what gives itself as one (a DataFrame of pandas or
        Polars), which travels with the job.

        The index of a pandas frame is a column if it has a name, each level of a MultiIndex by itself.
        """
        import pyarrow as pa

        from minishuffle.connectors.items import ArrowItemsSource
        from minishuffle.operators.pandas_index import given_table, with_named_range

        if not hasattr(data, "__arrow_c_stream__"):
            raise UsageError(
                f"Table.from_arrow takes a pyarrow.Table or a DataFrame, not a {type(data).__name__}: "
                "rows are Stream.items(rows).to_table(schema)"
            )
        table = with_named_range(given_table(data, "Table.from_arrow"))
        if not isinstance(data, pa.Table | pa.RecordBatch):
            table = table.replace_schema_metadata(None)
        if table.num_rows and not table.num_columns:
            raise UsageError(
                f"Table.from_arrow takes a table with columns: these {table.num_rows:,} rows have none"
            )
        return cls._scanned("from_arrow", ArrowItemsSource(table), checked_types(table.schema))

    @classmethod
    def generate(
        cls,
        fn: Callable[[int, int], pa.RecordBatch] | None = None,
        *,
        rate: float | None = None,
        records: int | None = None,
        schema: pa.Schema | Mapping[str, Any] | None = None,
    ) -> Self:
        """Rows by number: ``fn(start, count)`` gives a record batch of ``count`` rows, from number ``start``
        on.

        ``fn`` gives the same for the same numbers. Without it a row is its number, in the column ``number``.
        ``rate`` is in rows/s over all subtasks (None: as fast as they are taken); ``records`` None: without
        end. Without ``schema`` the columns are those of ``fn(0, 1)``, which is called now.

        Raises:
            InvalidGraph: there is no ``schema``, and that call raises, gives no batch, or gives one with a
                column of nulls alone.
        """
        from minishuffle.connectors.generator import GeneratorSource, number_batch

        made = number_batch if fn is None else fn
        check_callable(made, "Table.generate")
        source = GeneratorSource(made, rate=rate, records=records, format="arrow")

        def shown() -> StepColumns:
            call = "its function, called with (0, 1),"
            return StepColumns(called_schema("Table.generate", lambda: made(0, 1), call), declared=False)

        return cls._checked("generate", source, with_schema(schema, StepColumns, shown))

    @classmethod
    def source(cls, source: AnySource, schema: pa.Schema | Mapping[str, Any] | None = None) -> Self:
        """The user's own :class:`~minishuffle.operators.base.Source` or
        :class:`~minishuffle.operators.base.SplitSource`, named after its class, whose ``format`` is "arrow".
        Its columns are those of ``schema``, else of ``source.schema``; it is not read for them.

        Raises:
            InvalidGraph: it has neither.
        """
        name = type(source).__name__
        if isinstance(source, type) or not isinstance(source, Source):
            raise UsageError(f"{name} is not a source: it needs the methods splits() and read(split, offset)")
        if getattr(source, "format", "rows") != "arrow":
            raise UsageError(
                f"{name} gives rows: write Stream.source(...), or set {name}.format to 'arrow' if read() "
                "yields record batches"
            )
        discovery_seconds(source)

        def unknown() -> StepColumns:
            from minishuffle.plan.unknownschemas import unknown_columns

            why, write = f"{name} has no attribute schema", "give it one, or write schema= with its columns"
            return StepColumns(unknown_columns("Table.source", why, write, "schema={}"))

        def own() -> StepColumns:
            return with_schema(getattr(source, "schema", None), StepColumns, unknown)

        return cls._checked(name, source, with_schema(schema, StepColumns, own), brings_times=True)

    @classmethod
    def from_spark(cls, name: str, schema: pa.Schema | Mapping[str, Any], *, bounded: bool = True) -> Self:
        """What Spark writes while the job runs.

        There: ``df.write.format("minishuffle").option("stream", name)``. ``schema`` is that of the DataFrame;
        one that differs is refused. A bounded stream ends with the first write, one that is not bounded with
        the job.

        Raises:
            UsageError: there is no column, or one of a type that no DataFrame comes in.
        """
        from minishuffle.plan.sparktypes import check_written

        columns = arrow_schema(schema)
        check_written(columns, "Table.from_spark")
        boundary = Boundary(checked_name(name, "Table.from_spark"), schema_message(columns), bounded)
        step = ExternalStep(f"from_spark {name}", boundary, columns)
        return cls(Relation.of(step))

    @classmethod
    def _scanned(cls, label: str, source: AnySource, schema: pa.Schema) -> Self:
        """What a source gives whose batches have the schema as they are."""
        return cls(Relation.of(ScanStep(label, source, schema)))

    @classmethod
    def _checked(
        cls, label: str, source: AnySource, found: StepColumns, *, brings_times: bool = False
    ) -> Self:
        """What a source gives, each batch of which is checked; in a draft a placeholder if its columns are
        not known."""
        from minishuffle.operators.unknown_columns import UnknownColumns

        if isinstance(found.schema, UnknownColumns):
            scan = Relation.of(ScanStep(label, source, ObjectSchema()))
            return cast("Self", Draft(scan.then(UnknownStep(found.schema))))
        scan = Relation.of(ScanStep(label, source, found.schema, brings_times))
        return cls(scan.then(CheckStep(Known(found.schema), found.declared)))


def _hive_source(
    read: Callable[..., Any],
    directories: Sequence[str | Path],
    declared: pa.Schema | None,
    *,
    head: int | None = None,
) -> Any:
    """The source for the files below directories, whose names give columns; ``read`` makes that for files."""
    from minishuffle.connectors.hive import HiveSource, file_schema, hive_files

    found = hive_files(directories)
    return HiveSource(read(list(found), file_schema(declared, found), head=head), found, declared)


def _source_of_files(
    files: Sequence[str | Path],
    declared: pa.Schema | None,
    *,
    head: int | None = None,
    format: str,
    csv: tuple[Sequence[str], bool, str],
    on_error: Literal["fail", "skip", "dead_letter"],
) -> Any:
    """The source for files of that format; ``csv`` are the spellings of null, header and delimiter, ``head``
    the records of each file that show its types, if no others are looked at."""
    if format == "parquet":
        from minishuffle.connectors.parquet import ParquetSource

        if on_error != "fail":
            raise UsageError(
                f"on_error={on_error!r} is for CSV and JSON: of Parquet files no record can be left out "
                "because it cannot be read; drop rows with filter()"
            )
        return ParquetSource(files, schema=declared)
    if format == "csv":
        from minishuffle.connectors.csv import CsvSource

        return CsvSource(files, declared, *csv, on_error=on_error, head=head)
    if format == "json":
        from minishuffle.connectors.json import JsonSource

        return JsonSource(files, declared, on_error=on_error, head=head)
    raise UsageError(f"format is {format!r}: write 'parquet', 'csv' or 'json'")
