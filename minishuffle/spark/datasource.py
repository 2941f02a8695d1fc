"""``format("minishuffle")``: DataFrames into running jobs, and results of jobs as DataFrames.

Options, in any case: ``stream`` (to write) or ``job`` with ``sink`` (to read); ``coordinator``, ``cluster``,
``state-dir`` and ``secret-file`` as on the command line. Everything but ``write`` and ``read`` runs in a
Python process of Spark's beside the driver.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from minishuffle.errors import UsageError
from minishuffle.external.access import Access, find_access
from minishuffle.external.results import describe_result
from minishuffle.spark.memory import settle_memory
from minishuffle.spark.options import check_names, number
from minishuffle.spark.reads import ResultBatchReader, ResultStreamReader
from minishuffle.spark.schemas import arrow_schema_of, spark_schema_of
from minishuffle.spark.writes import BatchWriter, StreamingWriter, checked_stream

__all__ = ["MinishuffleDataSource"]


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
        return ResultBatchReader(self._access(), arrow_schema_of(schema), job, sink, timeout)

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
                f"Stream.from_spark({stream!r}, ..., bounded=False)"
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
        """Of a micro-batch; 0: not said."""
        return number(self.options, "max-rows-per-batch", 0, 1)

    def _access(self) -> Access:
        check_names(self.options)
        settle_memory()
        return find_access(
            self.options.get("coordinator"),
            self.options.get("cluster", "default"),
            self.options.get("state-dir"),
            self.options.get("secret-file"),
        )
