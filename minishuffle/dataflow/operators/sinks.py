"""Sinks: the last operator of a chain. What ``close`` returns is the subtask's result."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from minishuffle.dataflow.operators.base import Batch, Emit, KeyedRows, TaskContext
from minishuffle.dataflow.operators.chained import ChainedOperator
from minishuffle.dataflow.operators.convert import RowsToArrow, rows_of
from minishuffle.dataflow.operators.widertype import wider_schema
from minishuffle.errors import UsageError
from minishuffle.limits import BATCH_ROWS_MAX

__all__ = ["CollectSink", "CountSink", "ParquetSink", "PrintSink", "Sink", "UserSink"]


@runtime_checkable
class Sink(Protocol):
    """The user's own sink. The instance is pickled to each subtask, which calls it from one thread."""

    def open(self, context: TaskContext) -> None:
        """Before the first batch."""

    def write(self, batch: Batch) -> None:
        """Take a list of rows or a ``pyarrow.RecordBatch``, as the stream before it has them."""

    def close(self) -> Any:
        """Once at the end, also after a failure. The return value (what msgpack takes, or None)
        is the subtask's result."""


class CollectSink(ChainedOperator):
    """Sends every row to the client; Arrow batches as dicts."""

    name = "collect"

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        self.context.collect(rows_of(batch))


class CountSink(ChainedOperator):
    """Counts rows; the result is their number."""

    name = "count_sink"

    def open(self, context: TaskContext) -> None:
        super().open(context)
        self._count = 0

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        self._count += len(batch)

    def close(self) -> int:
        return self._count


class PrintSink(ChainedOperator):
    """Writes each row into the job's log, as ``repr`` shows it."""

    name = "print"

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        log = self.context.log
        for row in rows_of(batch):
            log(repr(row))


class UserSink(ChainedOperator):
    """Runs a :class:`Sink` of the user; its name is the class's.

    Raises:
        UsageError: the object lacks one of the methods.
    """

    def __init__(self, sink: Sink) -> None:
        if not isinstance(sink, Sink):
            raise UsageError(
                f"{type(sink).__name__} is not a sink: it needs the methods open(context), write(batch) "
                "and close()"
            )
        self.sink = sink
        self.name = type(sink).__name__
        self._opened = False

    def open(self, context: TaskContext) -> None:
        super().open(context)
        self._opened = True
        self.sink.open(context)

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        self.sink.write(batch.rows if isinstance(batch, KeyedRows) else batch)

    def close(self) -> Any:
        return self.sink.close() if self._opened else None


class ParquetSink(ChainedOperator):
    """Writes ``path/part-<subtask>-<attempt>.parquet``; the result is {"file", "rows"}.

    The file is hidden (its name begins with a dot) until the input has ended; a subtask that fails
    leaves none, and one without rows writes none. Dict rows become columns by name, pairs the
    columns ``key`` and ``value``, longer tuples ``c0``, ``c1``, …, anything else the column
    ``value``. The types are those that hold all rows of the subtask, in whatever order they came: what
    is written already is written anew if later rows need wider ones.

    Raises:
        UsageError: ``path`` already holds parts or is no directory, rows have other columns than the
            first ones, or values of types that have none in common.
    """

    name = "parquet_sink"
    _hidden: Path | None = None

    def __init__(self, path: str | Path) -> None:
        self.path = str(Path(path).expanduser().resolve())
        self.claim()

    def claim(self) -> str:
        """
        Raises:
            UsageError: there are parts already, or there is a file.
        """
        directory = Path(self.path)
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"{directory} is a file: give the path of a directory for the Parquet parts")
        if next(directory.glob("part-*.parquet"), None) is not None:
            raise UsageError(f"{directory} already holds Parquet parts: remove them or give another path")
        return self.path

    def open(self, context: TaskContext) -> None:
        super().open(context)
        directory = Path(self.path)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write into {directory}: {error.strerror}") from error
        part = f"part-{context.index}-{context.attempt}.parquet"
        self._visible = directory / part
        self._hidden = directory / f".{part}.{uuid4().hex}.unfinished"  # of this job alone
        self._writer: pq.ParquetWriter | None = None
        self._converter = RowsToArrow(None)
        self._kept: list[pa.RecordBatch] = []
        self._kept_rows = 0
        self._written_rows = 0
        self._finished = False

    def process(self, batch: Batch, input: int, emit: Emit) -> None:
        if not isinstance(batch, pa.RecordBatch):
            rows = rows_of(batch)
            if not rows:
                return
            batch = self._converter.convert(_named(rows))
        self._kept.append(batch)
        self._kept_rows += batch.num_rows
        if self._kept_rows >= BATCH_ROWS_MAX:
            self._write_row_group()

    def _write_row_group(self) -> None:
        """Small batches are put together, so that a row group is worth reading."""
        if not self._kept_rows:
            return
        schema = self._kept[0].schema if self._writer is None else self._writer.schema
        for schema_given in dict.fromkeys(batch.schema for batch in self._kept):
            schema = _common(schema, schema_given)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._hidden, schema)
        elif not schema.equals(self._writer.schema):
            self._widen(schema)
        self._writer.write_table(pa.concat_tables(_cast(batch, schema) for batch in self._kept))
        self._written_rows += self._kept_rows
        self._kept, self._kept_rows = [], 0

    def _widen(self, schema: pa.Schema) -> None:
        """Write what is written already once more, with wider types."""
        assert self._writer is not None
        assert self._hidden is not None
        self._writer.close()
        narrow = self._hidden.with_suffix(".narrow")
        self._hidden.replace(narrow)
        try:
            self._writer = pq.ParquetWriter(self._hidden, schema)
            with pq.ParquetFile(narrow) as file:
                for number in range(file.num_row_groups):
                    self._writer.write_table(_cast(file.read_row_group(number), schema))
        finally:
            narrow.unlink()

    def finish(self, emit: Emit) -> None:
        self._write_row_group()
        if self._writer is not None and self._hidden is not None:
            self._writer.close()
            self._publish(self._hidden)
        self._finished = True

    def _publish(self, hidden: Path) -> None:
        """Give the file its name, unless another job has come in between: a link replaces nothing."""
        try:
            self._visible.hardlink_to(hidden)
        except FileExistsError:
            raise UsageError(
                f"{self._visible} is there already: another job has written into that directory; give each "
                "its own"
            ) from None
        hidden.unlink()

    def close(self) -> dict[str, Any] | None:
        if self._hidden is None:
            return None
        if not self._finished:
            try:
                if self._writer is not None:
                    self._writer.close()
            finally:
                self._hidden.unlink(missing_ok=True)
            return None
        return {"file": str(self._visible) if self._written_rows else None, "rows": self._written_rows}


def _named(rows: list[Any]) -> list[Any]:
    """Rows as dicts, for a stream that declared no names."""
    first = rows[0]
    if isinstance(first, dict):
        return rows
    if not isinstance(first, tuple | list):
        return [{"value": row} for row in rows]
    names = ("key", "value") if len(first) == 2 else tuple(f"c{i}" for i in range(len(first)))
    odd = next((row for row in rows if not isinstance(row, tuple | list) or len(row) != len(names)), None)
    if odd is not None:
        raise UsageError(f"the Parquet sink cannot write {first!r:.80} and {odd!r:.80} into the same columns")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _common(some: pa.Schema, other: pa.Schema) -> pa.Schema:
    if some.equals(other):
        return some
    schema = wider_schema(some, other)
    if schema is None:
        raise UsageError(
            f"the columns of the Parquet sink changed from ({_described(some)}) to ({_described(other)}): "
            "make them alike with map_batches, or declare Stream.schema(...)"
        )
    return schema


def _cast(batch: pa.RecordBatch | pa.Table, schema: pa.Schema) -> pa.Table:
    table = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
    try:
        return table if table.schema.equals(schema) else table.cast(schema)
    except pa.ArrowException as error:
        raise UsageError(
            f"the columns of the Parquet sink came as ({_described(table.schema)}) and have to be "
            f"({_described(schema)}) for others, but a value does not fit ({error}): make them alike with "
            "map_batches, or declare Stream.schema(...)"
        ) from error


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
