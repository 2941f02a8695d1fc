"""Results of jobs as DataFrames: all of a finished job's, or what comes as micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from minishuffle.external.access import Access
from minishuffle.external.reader import ResultReader
from minishuffle.external.results import commit_result, describe_result, wait_result

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ResultBatchReader", "ResultStreamReader", "Rows"]

PARTITION_ROWS: Final = 1_000_000
"""About how many rows one task of a batch read takes."""


@dataclass
class Rows(InputPartition):
    """Rows ``begin`` … ``end − 1`` of a subtask's."""

    job: str
    sink: str
    subtask: int
    begin: int
    end: int


def _read(access: Access, rows: Rows) -> Iterator[pa.RecordBatch]:
    """(In an executor.)"""
    with ResultReader(access, rows.job, rows.sink, rows.subtask, rows.begin, rows.end) as reader:
        yield from reader.batches()


class ResultBatchReader(DataSourceReader):
    """Of ``spark.read``: waits until the job is over, for at most ``timeout`` seconds."""

    def __init__(self, access: Access, job: str, sink: str, timeout: float) -> None:
        self._access = access
        self._job = job
        self._sink = sink
        self._timeout = timeout

    def partitions(self) -> Sequence[InputPartition]:
        info = wait_result(self._access, self._job, self._sink, self._timeout)
        found: list[InputPartition] = []
        for subtask, begin, end in info.subtasks:
            count = -(-(end - begin) // PARTITION_ROWS)
            for number in range(count):
                first = begin + (end - begin) * number // count
                last = begin + (end - begin) * (number + 1) // count
                found.append(Rows(info.job, info.sink, subtask, first, last))
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Rows)
        return _read(self._access, partition)


class ResultStreamReader(DataSourceStreamReader):
    """Of ``spark.readStream``: an offset is the number of the next row of each subtask.

    The last two batches that Spark committed can be read again; see ``external.results.commit_result``.
    """

    def __init__(self, access: Access, job: str, sink: str, rows_max: int) -> None:
        self._access = access
        self._job = job
        self._sink = sink
        self._rows_max = rows_max

    def initialOffset(self) -> dict[str, int]:
        info = describe_result(self._access, self._job, self._sink)
        return {str(subtask): begin for subtask, begin, _ in info.subtasks}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows_max) if self._rows_max else ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        info = describe_result(self._access, self._job, self._sink)
        room = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        offset: dict[str, int] = {}
        for subtask, _, end in info.subtasks:
            begin = start[str(subtask)]
            if room is not None:
                end = min(end, begin + room)
                room -= end - begin
            offset[str(subtask)] = max(begin, end)
        return offset

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [
            Rows(self._job, self._sink, int(subtask), start[subtask], last)
            for subtask, last in end.items()
            if start[subtask] < last
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Rows)
        return _read(self._access, partition)

    def commit(self, end: dict[str, int]) -> None:
        commit_result(self._access, self._job, self._sink, {int(name): row for name, row in end.items()})
