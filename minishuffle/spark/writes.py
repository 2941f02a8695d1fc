"""DataFrames on their way into streams of running jobs: each task of Spark is an upstream."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from minishuffle.errors import PeerLost, UsageError
from minishuffle.external.access import Access
from minishuffle.external.writer import StreamWriter, abort_write, commit_write, describe_stream
from minishuffle.spark.memory import settle_memory
from minishuffle.spark.schemas import arrow_schema_of, check_same_columns, fitted, read_schema
from minishuffle.wire.clients import StreamInfo

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BatchWriter", "StreamingWriter", "Written", "checked_stream"]


@dataclass
class Written(WriterCommitMessage):
    """One partition that the job has taken."""

    partition: int
    rows: int


def checked_stream(access: Access, stream: str, schema: StructType) -> StreamInfo:
    """What is known of the stream, if a DataFrame of that schema can be written to it.

    Raises:
        UnknownName: no running job reads the stream.
        UsageError: it takes other columns, or the DataFrame has none.
    """
    if not schema.fields:  # A batch of Arrow without columns does not say how many rows it has.
        raise UsageError("the DataFrame has no columns, and rows without any cannot be written: select some")
    info = describe_stream(access, stream)
    check_same_columns(arrow_schema_of(schema), read_schema(info.schema_message), stream)
    return info


def _write_partition(
    access: Access, info: StreamInfo, write: str, partitions: int, batches: Iterator[pa.RecordBatch]
) -> Written:
    """(In an executor.) Everything of this task's partition."""
    settle_memory()
    context = TaskContext.get()
    if context is None:
        raise UsageError("partitions are written by tasks of Spark only")
    partition = context.partitionId()
    if 0 < partitions <= partition:
        raise UsageError(
            f"option 'partitions' says that the DataFrame has {partitions}, and this is number "
            f"{partition + 1}: say how many there are, or leave it out"
        )
    schema = read_schema(info.schema_message)
    # The number of the attempt over all tasks: unlike attemptNumber it grows when a stage is run again.
    attempt = context.taskAttemptId() & 0xFFFF_FFFF
    with StreamWriter(access, info.stream, write, partition, partitions, attempt, schema) as writer:
        for batch in batches:
            writer.write(fitted(batch, schema))
        _check_whole_input()
        return Written(partition, writer.finish())


def _check_whole_input() -> None:
    """(In an executor.) Spark says so when a task's rows are all there; that follows their Arrow stream.

    A task whose upstream died closes the connection instead, and Arrow takes that for an orderly end: the
    rows so far would count as the whole partition. PySpark itself looks only after the write.

    Raises:
        PeerLost: the rows ended in the middle; Spark tries the task again.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "main" and "infile" in frame.f_locals):
        frame = frame.f_back
    if frame is None:
        raise UsageError("this PySpark hands rows over in an unknown way: install pyspark 4.3")
    if not frame.f_locals["infile"].peek(1):
        raise PeerLost("the rows of this task ended in the middle: what Spark made them of has died")


class BatchWriter(DataSourceArrowWriter):
    """Of ``df.write``. The save ends a bounded stream."""

    def __init__(self, access: Access, info: StreamInfo, partitions: int) -> None:
        self._access = access
        self._info = info
        self._partitions = partitions
        self._write = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _write_partition(self._access, self._info, self._write, self._partitions, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        commit_write(self._access, self._info.stream, self._write, _partitions_of(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        abort_write(self._access, self._info.stream, self._write, "Spark gave it up")


class StreamingWriter(DataSourceStreamArrowWriter):
    """Of ``df.writeStream``. A micro-batch that is run again goes on where it was."""

    def __init__(self, access: Access, info: StreamInfo, partitions: int) -> None:
        self._access = access
        self._info = info
        self._partitions = partitions

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        number = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
        if not query or not number:
            raise UsageError("this is not a task of a streaming query: Spark tells no query and batch")
        return _write_partition(self._access, self._info, f"{query}/{number}", self._partitions, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Every task has waited until the job had taken its rows: nothing is left to do."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """The query runs the batch again, and goes on where it was."""


def _partitions_of(messages: Sequence[WriterCommitMessage | None]) -> list[int]:
    return [message.partition for message in messages if isinstance(message, Written)]
