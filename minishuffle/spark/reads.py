"""Results of jobs as DataFrames: all of a finished job's, or what comes as micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from minishuffle.errors import TaskCancelled, TaskFailed, UsageError
from minishuffle.external.access import Access
from minishuffle.external.reader import ResultReader
from minishuffle.external.results import ResultInfo, commit_result, describe_result, wait_result
from minishuffle.spark.memory import settle_memory
from minishuffle.spark.schemas import fitted

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ResultBatchReader", "ResultStreamReader", "Rows", "shares"]

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


def _read(access: Access, rows: Rows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """(In an executor.) Spark takes exactly its own Arrow types."""
    settle_memory()
    with ResultReader(access, rows.job, rows.sink, rows.subtask, rows.begin, rows.end) as reader:
        for batch in reader.batches():
            yield fitted(batch, schema)


class ResultBatchReader(DataSourceReader):
    """Of ``spark.read``: waits until the job is over, for at most ``timeout`` seconds."""

    def __init__(self, access: Access, schema: pa.Schema, job: str, sink: str, timeout: float) -> None:
        self._access = access
        self._schema = schema
        self._job = job
        self._sink = sink
        self._timeout = timeout

    def partitions(self) -> Sequence[InputPartition]:
        info = wait_result(self._access, self._job, self._sink, self._timeout)
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
        return _read(self._access, partition, self._schema)


class ResultStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Of ``spark.readStream``: an offset is the job, and the number of the next row of each subtask.

    A query stays with the job that it began with, also if a newer one has its name: rows are numbered
    within a job. The last two batches that Spark committed can be read again; see
    ``external.results.commit_result``.
    """

    def __init__(self, access: Access, schema: pa.Schema, job: str, sink: str, rows_max: int) -> None:
        self._access = access
        self._schema = schema
        self._job = job
        self._sink = sink
        self._rows_max = rows_max
        self._now_only = False
        self._last: Offset | None = None

    def initialOffset(self) -> Offset:
        info = describe_result(self._access, self._job, self._sink)
        return _offset(info, [rows.begin for rows in info.subtasks])

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows_max) if self._rows_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """What there is when the first batch is planned is all that is read."""
        self._now_only = True

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """
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
        info = describe_result(self._access, name, self._sink)
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
        return _read(self._access, partition, self._schema)

    def commit(self, end: Offset) -> None:
        rows = {int(subtask): _row(end, subtask) for subtask in end if subtask != JOB}
        commit_result(self._access, str(end[JOB]).partition("@")[0], self._sink, rows)


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
