"""``format("minishuffle")``: DataFrames into running jobs, and results of jobs as DataFrames.

Options, in any case: ``stream`` (to write) or ``job`` with ``sink`` (to read); ``coordinator``, ``cluster``,
``state-dir`` and ``secret-file`` as on the command line. Everything but ``write`` and ``read`` runs in a
Python process of Spark's beside the driver.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from minishuffle.errors import PeerLost, TaskCancelled, TaskFailed, UnknownName, UsageError
from minishuffle.remote.access import AWAY_SECONDS_MAX, Access, find_access
from minishuffle.remote.reader import ResultInfo, ResultReader, commit_result, describe_result, wait_result
from minishuffle.remote.writer import StreamWriter, abort_write, commit_write, describe_stream
from minishuffle.spark.schemas import (
    arrow_schema_of,
    check_same_columns,
    fitted,
    read_schema,
    spark_schema_of,
)
from minishuffle.wire.clients import StreamInfo
from minishuffle.worker.interpreter import keep_freed_memory, pass_over_modules

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "BatchWriter",
    "MinishuffleDataSource",
    "OWN",
    "ResultBatchReader",
    "ResultStreamReader",
    "Rows",
    "StreamingWriter",
    "Written",
    "check_names",
    "checked_stream",
    "number",
    "settle_memory",
    "shares",
    "switch",
]


# --- memory ---------------------------------------------------------------------------------------
#
# What garbage collector and allocator do in a Python of Spark's.


def settle_memory() -> None:
    """(In a Python of Spark's.) Have collections pass over the modules that are loaded by now.

    Spark collects everything after each use of a Python: that took as long as all else which a task that
    reads a million rows does in Python, and 33 ms after each commit. Each element that is read has memory of
    its own: faulting it in again and again was a quarter of what such a task does in Python.
    """
    keep_freed_memory()
    pass_over_modules()


# --- options --------------------------------------------------------------------------------------
#
# What users say in ``option(...)``, checked: Spark takes any key and any text.


OWN: Final = (
    "stream",
    "job",
    "sink",
    "coordinator",
    "cluster",
    "state-dir",
    "secret-file",
    "tls-certificate",
    "tls-key",
    "tls-ca",
    "partitions",
    "timeout",
    "allow-loss",
    "max-rows-per-batch",
)
SPARKS: Final = frozenset({"path", "paths", "checkpointlocation", "queryname", "outputmode"})
"""Keys that Spark adds, or takes for itself from the same options."""

NUMBER_END: Final = 1 << 31
"""Above all that makes sense, and what the wire and Spark carry."""

Number = TypeVar("Number", int, float)


def check_names(options: Mapping[str, str]) -> None:
    """Raises UnknownName: an option has a name that nobody knows, and would count for nothing."""
    for name in options:
        if name.lower() in SPARKS or name.lower() in OWN:
            continue
        near = difflib.get_close_matches(name.lower(), OWN, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UnknownName(f"there is no option {name!r}; {hint}there are {', '.join(OWN)}")


def number(options: Mapping[str, str], name: str, default: Number, least: int) -> Number:
    """The number that an option says, of the type of its default.

    Raises:
        UsageError: it says none, or one that is out of range.
    """
    text = options.get(name)
    if text is None:
        return default
    with contextlib.suppress(ValueError):
        found = type(default)(text)
        if least <= found < NUMBER_END:  # False for what is not a number, "nan".
            return found
    what = "whole number" if isinstance(default, int) else "number"
    raise UsageError(f"option {name!r} takes a {what} from {least}, not {text!r:.80}")


def switch(options: Mapping[str, str], name: str) -> bool:
    """Whether an option is on; it is off unless it is said.

    Raises:
        UsageError: it says neither.
    """
    text = options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise UsageError(f"option {name!r} takes true or false, not {text!r:.80}")
    return text == "true"


# --- reads ----------------------------------------------------------------------------------------
#
# Results of jobs as DataFrames: all of a finished job's, or what comes as micro-batches.


PARTITION_ROWS: Final = 2_500_000
"""About how many rows one task of a batch read takes."""
JOB: Final = "job"
"""The key of an offset that names the job; the others are subtasks."""
Offset = dict[str, int | str]


@dataclass
class Rows(InputPartition):
    """Rows ``begin`` … ``end − 1`` of a subtask's."""

    job: str
    sink: str
    subtask: int
    begin: int
    end: int


def _read(access: Access, rows: Rows, schema: pa.Schema, allow_loss: bool) -> Iterator[pa.RecordBatch]:
    """(In an executor.) Spark takes exactly its own Arrow types."""
    settle_memory()
    wanted = range(rows.begin, rows.end)
    with ResultReader(access, rows.job, rows.sink, rows.subtask, wanted, allow_loss=allow_loss) as reader:
        for batch in reader.batches():
            yield fitted(batch, schema)


class ResultBatchReader(DataSourceReader):
    """Reader of ``spark.read``: waits until the job has ended, for at most ``timeout`` seconds."""

    def __init__(
        self, access: Access, schema: pa.Schema, job: str, sink: str, *, timeout: float, allow_loss: bool
    ) -> None:
        self._access = access
        self._schema = schema
        self._job = job
        self._sink = sink
        self._timeout = timeout
        self._allow_loss = allow_loss

    def partitions(self) -> Sequence[InputPartition]:
        info = wait_result(self._access, self._job, self._sink, self._timeout, allow_loss=self._allow_loss)
        found: list[tuple[int, Rows]] = []
        for subtask, begin, end in info.subtasks:
            count = -(-(end - begin) // PARTITION_ROWS)
            for number in range(count):
                first = begin + (end - begin) * number // count
                last = begin + (end - begin) * (number + 1) // count
                found.append((number, Rows(info.job, info.sink, subtask, first, last)))
        # In turn, so that the tasks that run at once read from different workers.
        return [rows for _, rows in sorted(found, key=itemgetter(0))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Rows):  # Spark's own, where there are no rows and so no partitions.
            return iter(())
        return _read(self._access, partition, self._schema, self._allow_loss)


class ResultStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Of ``spark.readStream``: an offset is the job, and the number of the next row of each subtask.

    A query stays with the job that it began with, also if a newer one has its name: rows are numbered
    within a job. The last two batches that Spark committed can be read again; see
    ``remote.reader.commit_result``. Rows that are lost with their worker are passed over: the job counts
    them, and the log of the executor names them.
    """

    def __init__(self, access: Access, schema: pa.Schema, job: str, sink: str, rows_max: int) -> None:
        self._access = access
        self._schema = schema
        self._job = job
        self._sink = sink
        self._rows_max = rows_max
        self._now_only = False
        self._last: Offset | None = None
        self._committed: Offset | None = None

    def initialOffset(self) -> Offset:
        info = describe_result(self._access, self._job, self._sink)
        return _offset(info, [rows.begin for rows in info.subtasks])

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows_max) if self._rows_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """What there is when the first batch is planned is all that is read."""
        self._now_only = True

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Spark asks once it has the batch behind it that ends at ``start``, and commits that only when it
        has rows for the next one. A job that loses nothing may give none before: those who write to it wait
        until what comes of their rows is safe. So it is committed here.

        Raises:
            TaskFailed: all rows of a job that failed have been read.
            TaskCancelled: all rows of a job that was cancelled have.
            UsageError: see :meth:`_described`.
        """
        info = self._described(start)
        ends = _offset(info, [rows.end for rows in info.subtasks])
        if self._now_only:
            self._last = ends = self._last or ends
        begins = [_row(start, rows.subtask) for rows in info.subtasks]
        if begins != [rows.begin for rows in info.subtasks]:
            self.commit(start)
        waiting = [_row(ends, rows.subtask) - row for rows, row in zip(info.subtasks, begins, strict=True)]
        if info.state == "failed" and not any(waiting):
            raise TaskFailed(f"job {info.job} ({info.name}) failed: {info.cause}")
        if info.state == "canceled" and not any(waiting):
            raise TaskCancelled(f"job {info.job} ({info.name}) was cancelled")
        if isinstance(limit, ReadMaxRows):
            waiting = shares(waiting, limit.max_rows)
        return _offset(info, [row + more for row, more in zip(begins, waiting, strict=True)])

    def _described(self, start: Offset) -> ResultInfo:
        """The job that the query began with.

        Raises:
            UsageError: the checkpoint is of another one than is asked for, or of another cluster's.
        """
        name, _, submitted = str(start[JOB]).partition("@")
        info = describe_result(self._access, name, self._sink, away_seconds=AWAY_SECONDS_MAX)
        if self._job not in (info.job, info.name) or submitted != repr(info.submitted_at):
            raise UsageError(
                f"the checkpoint is of another job than {self._job!r}, job {name}: name another "
                "checkpointLocation to read this one from its beginning"
            )
        return info

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        job = str(end[JOB]).partition("@")[0]
        return [
            Rows(job, self._sink, int(subtask), _row(start, subtask), _row(end, subtask))
            for subtask in end
            if subtask != JOB and _row(start, subtask) < _row(end, subtask)
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Rows)
        return _read(self._access, partition, self._schema, True)

    def commit(self, end: Offset) -> None:
        if end == self._committed:
            return
        rows = {int(subtask): _row(end, subtask) for subtask in end if subtask != JOB}
        commit_result(self._access, str(end[JOB]).partition("@")[0], self._sink, rows)
        self._committed = end


def _offset(info: ResultInfo, rows: list[int]) -> Offset:
    """Spark compares offsets as text: the keys always come in this order."""
    subtasks = [str(kept.subtask) for kept in info.subtasks]
    return {JOB: f"{info.job}@{info.submitted_at!r}", **dict(zip(subtasks, rows, strict=True))}


def _row(offset: Offset, subtask: int | str) -> int:
    return int(offset[str(subtask)])


def shares(waiting: list[int], room: int) -> list[int]:
    """How many of each subtask's waiting rows go into a batch of at most ``room``: none is passed over for
    another that has more, and a batch is full if there are enough rows."""
    taken = [0] * len(waiting)
    for place, index in enumerate(sorted(range(len(waiting)), key=waiting.__getitem__)):
        taken[index] = min(waiting[index], room // (len(waiting) - place))
        room -= taken[index]
    return taken


# --- writes ---------------------------------------------------------------------------------------
#
# DataFrames on their way into streams of running jobs: each task of Spark is an upstream.


@dataclass
class Written(WriterCommitMessage):
    """One partition that the job has taken."""

    write: str
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
    with StreamWriter(
        access,
        info.stream,
        schema,
        write=write,
        partition=partition,
        partitions=partitions,
        attempt=attempt,
    ) as writer:
        for batch in batches:
            writer.write(fitted(batch, schema))
        _check_whole_input()
        return Written(write, partition, writer.finish())


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
        settle_memory()
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
        """The job has taken all rows: event time need not wait for this batch any more."""
        settle_memory()
        if writes := {message.write for message in messages if isinstance(message, Written)}:
            (write,) = writes
            commit_write(self._access, self._info.stream, write, _partitions_of(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """The query runs the batch again, and goes on where it was."""


def _partitions_of(messages: Sequence[WriterCommitMessage | None]) -> list[int]:
    return [message.partition for message in messages if isinstance(message, Written)]


# --- datasource -----------------------------------------------------------------------------------


class MinishuffleDataSource(DataSource):
    """Registered by :func:`~minishuffle.spark.session.spark_session`, or by
    ``spark.dataSource.register(MinishuffleDataSource)``."""

    @classmethod
    def name(cls) -> str:
        return "minishuffle"

    def schema(self) -> StructType:
        self._rows_max()  # Here already: of what streamReader raises, Spark says nothing.
        info = describe_result(self._access(), self._option("job"), self.options.get("sink", ""))
        return spark_schema_of(info.schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        timeout = number(self.options, "timeout", 600.0, 0)
        job, sink = self._option("job"), self.options.get("sink", "")
        return ResultBatchReader(
            self._access(),
            arrow_schema_of(schema),
            job,
            sink,
            timeout=timeout,
            allow_loss=switch(self.options, "allow-loss"),
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        job, sink = self._option("job"), self.options.get("sink", "")
        return ResultStreamReader(self._access(), arrow_schema_of(schema), job, sink, self._rows_max())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        self._check_append(overwrite)
        access, stream = self._access(), self._option("stream")
        info = checked_stream(access, stream, schema)
        return BatchWriter(access, info, self._partitions())

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        self._check_append(overwrite)
        access, stream = self._access(), self._option("stream")
        info = checked_stream(access, stream, schema)
        if info.bounded:  # No batch of a query is the last one: the job would wait for ever.
            raise UsageError(
                f"stream {stream!r} is bounded, and a streaming query does not end it: it writes into "
                f"Table.from_spark({stream!r}, ..., bounded=False)"
            )
        return StreamingWriter(access, info, self._partitions())

    @staticmethod
    def _check_append(overwrite: bool) -> None:
        if overwrite:
            raise UsageError("a stream cannot be overwritten: write with mode('append')")

    def _option(self, name: str) -> str:
        value: str | None = self.options.get(name)
        if not value:
            what = {"stream": "written to", "job": "read"}[name]
            raise UsageError(f"which {name} is to be {what}? Say so with option({name!r}, ...)")
        return value

    def _partitions(self) -> int:
        """How many partitions the DataFrame has; 0: not said."""
        return number(self.options, "partitions", 0, 1)

    def _rows_max(self) -> int:
        """Most rows in a micro-batch; 0: not given."""
        return number(self.options, "max-rows-per-batch", 0, 1)

    def _access(self) -> Access:
        check_names(self.options)
        settle_memory()
        return find_access(self.options)
