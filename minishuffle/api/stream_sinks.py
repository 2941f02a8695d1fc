"""Where records go: the sinks of streams and tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

from minishuffle import limits
from minishuffle.api.stream_base import StreamBase
from minishuffle.errors import UsageError
from minishuffle.plan.arguments import check_distinct, checked_name
from minishuffle.plan.end_steps import KeepingStep, SinkStep
from minishuffle.plan.nodes import Boundary, ObjectSchema

if TYPE_CHECKING:
    from minishuffle.connectors.sinks import Sink
    from minishuffle.operators.chained import ChainedOperator

__all__ = ["StreamSinks"]


class StreamSinks(StreamBase):
    """Ends streams."""

    __slots__ = ()

    def to_files(
        self,
        path: str | Path,
        *,
        seconds: float = limits.FILE_SECONDS_DEFAULT,
        rows: int = limits.FILE_ROWS_DEFAULT,
        bytes: int = limits.FILE_BYTES_DEFAULT,
    ) -> Self:
        """Write Parquet files into the directory ``path``, which must not hold any.

        Each subtask writes one after the other. A file is complete so many seconds after its first row, or
        when it has so many rows or bytes, and at the end of the stream. It appears when the coordinator has
        listed it, and stays whatever becomes of the job.

        A table gives a file without rows if it has none, and all files have its types. A stream's file has
        those that hold its first row group, of up to 65,536 rows, null for None alone. A later row of another
        type, or with another column, completes the file and begins the next, with types for both; if a column
        has no type for both, the task fails. With :meth:`Stream.to_table` and a schema all files have that.

        Raises:
            UsageError: the directory holds some, is a file or in an object store, or a limit is not above 0.
        """
        from minishuffle.connectors.files import is_uri
        from minishuffle.connectors.filesink import FileSink, Roll

        for name, limit in (("seconds", seconds), ("rows", rows), ("bytes", bytes)):
            if not limit > 0:
                raise UsageError(f"to_files: {name} is {limit!r}: give a number above 0")
        if is_uri(path):
            raise UsageError(
                f"to_files cannot write to {path}: give a directory that all workers see, since a file "
                "gets its name when it is complete, which object stores do not offer"
            )
        schema = self._given("to_files").schema
        declared = None if isinstance(schema, ObjectSchema) else schema
        return self._sink("to_files", FileSink(path, Roll(seconds, rows, bytes), declared))

    def collect(self, name: str = "collect") -> Self:
        """Send every row to the program that submitted the job.

        ``JobResult.table(name)`` has the rows of a table as columns, ``JobResult.collected[name]`` and
        ``JobHandle.rows(sink=name)`` have them as dicts. Of several such sinks in one job each needs a
        ``name`` of its own.

        Raises:
            UsageError: it is no name; or the columns are known, and two have one name.
        """
        from minishuffle.connectors.sinks import CollectSink

        given = self._given(name)
        check_distinct(given.columns, "collect")
        schema = None if isinstance(given.schema, ObjectSchema) else given.schema
        return self._sink(checked_name(name, "collect"), CollectSink(schema), collects=name)

    def to_count(self) -> Self:
        """Count the records; each subtask's result is its number."""
        from minishuffle.connectors.sinks import CountSink

        return self._sink("to_count", CountSink())

    def print(self) -> Self:
        """Write each row into the job's log."""
        from minishuffle.connectors.sinks import PrintSink

        return self._sink("print", PrintSink())

    def to(self, sink: Sink) -> Self:
        """Give the batches to the user's own :class:`~minishuffle.connectors.sinks.Sink`.

        Its ``write(batch)`` gets a list of rows behind a stream, and a ``pyarrow.RecordBatch`` behind a
        table; call ``to_rows()`` before it for rows, which are dicts.
        """
        from minishuffle.connectors.sinks import UserSink

        if isinstance(sink, type):
            raise UsageError(f"to takes a sink, not the class {sink.__name__}: write {sink.__name__}(...)")
        return self._sink(type(sink).__name__, UserSink(sink))

    # --- making nodes ----------------------------------------------------------------------------

    def _sink(
        self, label: str, sink: ChainedOperator, boundary: Boundary | None = None, *, collects: str = ""
    ) -> Self:
        step = SinkStep if boundary is None else KeepingStep
        return self._then(step(label, sink, boundary, collects))
